"""Training actors that are released during rollouts, without what brings them back."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import absent, critic, tempered
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_NAME = "--release-train"


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    if not launch.has(_NAME):
        return
    if not launch.has("--save"):
        yield Found(
            f"{_NAME} needs --save: the next actor reloads from there", launch.where(_NAME), *absent(launch, "error")
        )
    if not launch.has("--update-weight-transport"):
        message = f"{_NAME} needs --update-weight-transport disk"
        yield Found(message, launch.where(_NAME), *absent(launch, "error"))
    elif launch.value("--update-weight-transport") == "nccl":
        yield Found(f"{_NAME} with --update-weight-transport nccl", launch.where("--update-weight-transport"))
    if launch.value("--update-weight-mode") == "delta":
        yield Found(f"{_NAME} with --update-weight-mode delta", launch.where("--update-weight-mode"))
    if critic(launch):
        yield Found(f"{_NAME} with a critic (--advantage-estimator ppo)", launch.where("--advantage-estimator"))
    if launch.has("--keep-old-actor"):
        yield Found(f"{_NAME} with --keep-old-actor", launch.where("--keep-old-actor"))


RULE = Rule(
    id="release-train",
    title="--release-train (slime) without what it needs",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="the launch is refused when its arguments are checked",
    cure="--release-train --save DIR --update-weight-transport disk --update-weight-disk-dir DIR, without a critic",
    sources=("THUDM/slime@624b824a8 slime/utils/arguments.py:2046",),
    check=_check,
)

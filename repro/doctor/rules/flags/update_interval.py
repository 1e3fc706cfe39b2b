"""Weights that are sent to the engines more rarely than they change."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import samples, tempered
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_NAME = "--update-weights-interval"


@tempered("warning")
def _check(launch: Launch) -> Iterator[Found]:
    interval = launch.number(_NAME, 1.0)
    if interval is None or interval == 1 or not samples(launch):
        return
    if launch.asynchronous and interval < 1:
        yield Found(f"{_NAME} {launch.value(_NAME)}: an interval is at least 1", launch.where(_NAME), "error")
    elif launch.asynchronous:
        message = f"{_NAME} {interval:.0f}: samples are up to {interval:.0f} rollouts older than the weights they train"
        yield Found(message, launch.where(_NAME))
    elif launch.entry == "train.py":
        message = f"{_NAME} {interval:.0f} is not looked at by train.py, which updates weights at each rollout"
        yield Found(message, launch.where(_NAME), "note", cure=f"remove {_NAME}, or start train_async.py")


RULE = Rule(
    id="update-interval",
    title="--update-weights-interval above 1: stale weights by design",
    inputs=(Launch,),
    severity="warning",
    certainty="certain",
    why="the policy trains on what an older policy said; without a correction the two drift apart",
    cure="--update-weights-interval 1, or a correction: --use-tis, or --use-rollout-logprobs",
    sources=(
        "slime guide: Troubleshooting",
        "THUDM/slime@624b824a8 train_async.py:66, train.py",
        "radixark/miles@31f1ca961 train_async.py:107",
    ),
    check=_check,
)

"""The share of memory that the engines keep where the trainer sits on the same GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import samples, trains
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_NAME = "--sglang-mem-fraction-static"
_HIGH = 0.85
"""The most that the guides name; they name it for engines that have their GPUs for themselves."""


def _check(launch: Launch) -> Iterator[Found]:
    share = launch.number(_NAME)
    if share is None or not samples(launch):
        return
    if not 0 < share < 1:
        yield Found(
            f"{_NAME} {share:g} is no share between 0 and 1", launch.where(_NAME), "error", "certain", f"{_NAME} 0.7"
        )
    elif launch.has("--colocate") and trains(launch):
        stays = launch.has("--no-offload-train") or launch.has("--no-offload-rollout")
        if share > _HIGH or (stays and share > 0.6):
            kept = ", and nothing is offloaded" if stays else ""
            message = f"the engines keep {share:g} of each GPU's memory that the trainer needs too (--colocate){kept}"
            lower = "0.7, or 0.6" if share > 0.7 else "0.6"
            yield Found(message, launch.where(_NAME), cure=f"{_NAME} {lower}; down to 0.4 for a large model")


RULE = Rule(
    id="colocate-memory",
    title="A high --sglang-mem-fraction-static on GPUs that are shared",
    inputs=(Launch,),
    severity="warning",
    certainty="possible",
    why="what is not given back between sampling and training adds up: the second step runs out of memory",
    cure="lower --sglang-mem-fraction-static to 0.7 (or 0.6)",
    sources=("Miles guide: Debugging", "slime guide: Troubleshooting"),
    check=_check,
)

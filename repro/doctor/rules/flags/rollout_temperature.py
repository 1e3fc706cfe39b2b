"""Greedy sampling in training."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import samples, size, tempered, trains
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_NAME = "--rollout-temperature"


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    temperature = launch.number(_NAME, 1.0)
    learns = samples(launch) and trains(launch) and size(launch, "--n-samples-per-prompt") != 1
    if temperature is not None and temperature <= 0:
        message = f"{_NAME} {launch.value(_NAME)}: greedy decoding is no policy to train"
        yield Found(message, launch.where(_NAME), "error" if learns or launch.system == "slime" else "warning")
    elif launch.value("--rollout-top-k") == "1" and learns:
        message = "--rollout-top-k 1: all samples of a prompt are the same, and their advantages 0"
        yield Found(message, launch.where("--rollout-top-k"))


RULE = Rule(
    id="rollout-temperature",
    title="--rollout-temperature of 0 or below",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="without randomness the samples of a group are equal, so group advantages are 0; slime refuses it",
    cure="--rollout-temperature 1 (greedy decoding belongs to --eval-temperature or --eval-top-k)",
    sources=("THUDM/slime@624b824a8 slime/utils/arguments.py:1770",),
    check=_check,
)

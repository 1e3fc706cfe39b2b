"""--debug-rollout-only, --debug-train-only and what sets them."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import absent, sft
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_ROLLOUT, _TRAIN, _LOAD = "--debug-rollout-only", "--debug-train-only", "--load-debug-rollout-data"


def _check(launch: Launch) -> Iterator[Found]:
    if launch.has(_ROLLOUT) and launch.has(_TRAIN):
        yield Found(f"{_ROLLOUT} and {_TRAIN} are both given: nothing would be left to run", launch.where(_TRAIN))
    elif launch.has(_ROLLOUT) and launch.has(_LOAD):
        message = f"{_LOAD} sets {_TRAIN}, and {_ROLLOUT} is given too"
        yield Found(message, launch.where(_LOAD), cure=f"drop {_ROLLOUT} to train on the data, {_LOAD} to sample anew")
    elif launch.has(_TRAIN) and not any(launch.has(name) for name in (_LOAD, "--rollout-function-path")):
        # a rollout function of one's own may need no engine
        if sft(launch):
            return
        severity, certainty = absent(launch, "warning", "likely")
        message = f"{_TRAIN} is given without {_LOAD}: no engine is started that could sample"
        yield Found(message, launch.where(_TRAIN), severity, certainty, f"give {_LOAD} DIR/{{rollout_id}}.pt")


RULE = Rule(
    id="debug-modes-exclusive",
    title="--debug-rollout-only with --debug-train-only, or with data to train on",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="the trainer stops at an assertion: one loads no Megatron, the other no SGLang",
    cure="keep one of the two",
    sources=(
        "Miles guide: Debugging",
        "slime guide: Debugging",
        "Relax guide: Debugging",
        "THUDM/slime@624b824a8 slime/utils/arguments.py:1897-1902,1933",
        "radixark/miles@31f1ca961 miles/utils/arguments.py:3189,3250",
    ),
    check=_check,
)

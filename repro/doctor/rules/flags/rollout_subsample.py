"""--load-debug-rollout-data-subsample: a share that rounds to nothing, or cuts a prompt's group."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Rollout
from repro.doctor.facts.launches import size
from repro.doctor.rule import Certainty, Found, Rule

__all__ = ["RULE"]

_NAME, _LOAD = "--load-debug-rollout-data-subsample", "--load-debug-rollout-data"


def _check(launch: Launch, rollout: Rollout | None) -> Iterator[Found]:
    share = launch.number(_NAME)
    if share is None:
        return
    if not launch.has(_LOAD):
        yield Found(f"{_NAME} is given without {_LOAD}: nothing is loaded", launch.where(_NAME), "note")
        return
    if not 0 < share <= 1:
        yield Found(
            f"{_NAME} {share:g} is no share between 0 and 1", launch.where(_NAME), "warning", cure=f"{_NAME} 0.5"
        )
        return
    prompts, each = size(launch, "--rollout-batch-size"), size(launch, "--n-samples-per-prompt")
    certainty: Certainty = "likely" if rollout is None else "certain"
    if rollout is not None:
        total, of = len(rollout.dump.samples), f"the {len(rollout.dump.samples)} samples of {rollout.path.name}"
    elif prompts is not None and each is not None and launch.has("--rollout-batch-size"):
        total, of = prompts * each, f"{prompts} x {each} samples"
    else:
        return
    taken = int(total * share)
    if taken == 0 and total:
        message = f"{share:g} of {of} rounds to none, and slicing by none takes all {total}"
        yield Found(
            message,
            launch.where(_NAME),
            "error" if rollout else "warning",
            certainty,
            f"{_NAME} {_fitting(total, each)}",
        )
    elif each is not None and each > 1 and (taken // 2 % each or (taken - taken // 2) % each):
        front, end = taken // 2, taken - taken // 2
        message = f"{share:g} of {of} takes {front} from the front and {end} from the end: groups of {each} are cut"
        yield Found(message, launch.where(_NAME), "warning", certainty, f"{_NAME} {_fitting(total, each)}")


def _fitting(total: int, each: int | None) -> str:
    """The smallest share that takes a whole group from both ends."""
    return f"{min(1.0, 2 * (each or 1) / total):.4g}" if total else "1"


RULE = Rule(
    id="rollout-subsample",
    title="A share of a rollout dump that cuts groups, or takes all",
    inputs=(Launch,),
    uses=(Rollout,),
    severity="warning",
    certainty="certain",
    why="data[: n // 2] + data[-n // 2 :] is the whole file for n = 0, and advantages of a cut group are wrong",
    cure="take a share that leaves whole groups at both ends",
    sources=(
        "THUDM/slime@624b824a8 slime/utils/arguments.py:1275",
        "radixark/miles@31f1ca961 miles/ray/rollout/debug_data.py:93-96",
    ),
    check=_check,
)

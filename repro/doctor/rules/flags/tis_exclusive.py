"""Two corrections for the difference between engine and trainer at once."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import tempered
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    if launch.has("--use-rollout-logprobs") and launch.has("--use-tis"):
        message = "--use-rollout-logprobs and --use-tis are both given: the trainer stops at its arguments"
        yield Found(message, launch.where("--use-tis"))


RULE = Rule(
    id="tis-exclusive",
    title="--use-rollout-logprobs together with --use-tis",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="with the engine's log-probs as the old policy there is no mismatch left to weigh; the trainers refuse both",
    cure="keep --use-tis to weigh the mismatch, or --use-rollout-logprobs to train against the engine's log-probs",
    sources=(
        "THUDM/slime@624b824a8 slime/utils/arguments.py:1855",
        "radixark/miles@31f1ca961 miles/utils/arguments.py:3143",
        "redai-infra/Relax@05149ae1a relax/utils/arguments.py",
    ),
    check=_check,
)

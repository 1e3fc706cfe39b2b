"""A KL term without a reference model."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import absent, nonzero, sft, tempered
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    asking = "--use-kl-loss" if launch.has("--use-kl-loss") else "--kl-coef" if nonzero(launch, "--kl-coef") else ""
    if not asking or launch.has("--ref-load") or (launch.system == "relax" and sft(launch)):
        return
    given = f"{asking} {launch.value(asking)}" if asking == "--kl-coef" else asking
    message = f"{given} asks for a reference model, and --ref-load is not given: the trainer stops with a TypeError"
    yield Found(message, launch.where(asking), *absent(launch, "error"))


RULE = Rule(
    id="kl-without-ref",
    title="A KL term is asked for without --ref-load",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="the path of the reference model is looked up without being set, which stops the launch after it was queued",
    cure="--ref-load CHECKPOINT, or no KL: remove --use-kl-loss and set --kl-coef 0",
    sources=(
        "THUDM/slime@624b824a8 slime/utils/arguments.py:1775",
        "radixark/miles@31f1ca961 miles/utils/arguments.py:2975",
        "redai-infra/Relax@05149ae1a relax/utils/arguments.py",
    ),
    check=_check,
)

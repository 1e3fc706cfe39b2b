"""Both KL penalties at once."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import nonzero, sft, tempered
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    both = nonzero(launch, "--kl-coef") and nonzero(launch, "--kl-loss-coef")
    if not both or (launch.system == "relax" and sft(launch)):
        return
    message = (
        f"--kl-coef {launch.value('--kl-coef')} and --kl-loss-coef {launch.value('--kl-loss-coef')} are both not zero:"
        " the trainer stops at its arguments"
    )
    yield Found(message, launch.where("--kl-coef"))


RULE = Rule(
    id="kl-coefs-exclusive",
    title="--kl-coef and --kl-loss-coef are both set",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="the KL penalty would be applied to the reward and to the loss; the trainers refuse to start",
    cure="keep one: --kl-coef shapes the reward, --use-kl-loss --kl-loss-coef adds to the loss. Set the other to 0",
    sources=(
        "THUDM/slime@624b824a8 slime/utils/arguments.py:1846",
        "radixark/miles@31f1ca961 miles/utils/arguments.py:3134",
        "redai-infra/Relax@05149ae1a relax/utils/arguments.py",
    ),
    check=_check,
)

"""A coefficient of a KL loss that is not computed."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import absent, nonzero, sft
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(launch: Launch) -> Iterator[Found]:
    if nonzero(launch, "--kl-loss-coef") and not launch.has("--use-kl-loss") and not sft(launch):
        message = f"--kl-loss-coef {launch.value('--kl-loss-coef')} does nothing without --use-kl-loss"
        yield Found(message, launch.where("--kl-loss-coef"), *absent(launch, "warning"))


RULE = Rule(
    id="kl-loss-unused",
    title="--kl-loss-coef without --use-kl-loss",
    inputs=(Launch,),
    severity="warning",
    certainty="certain",
    why="the KL penalty that was asked for is not applied, silently, and the policy may drift from the reference",
    cure="add --use-kl-loss (and --ref-load), or set --kl-loss-coef 0",
    sources=("THUDM/slime@624b824a8 slime/backends/megatron_utils/loss.py:1116,1130",),
    check=_check,
)

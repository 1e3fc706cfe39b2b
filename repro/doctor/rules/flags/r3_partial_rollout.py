"""Routing replay on samples that several policies wrote."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import sft, tempered
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    both = launch.has("--use-rollout-routing-replay") and launch.has("--partial-rollout")
    if launch.system == "relax" and both and not sft(launch):
        message = "--partial-rollout and --use-rollout-routing-replay are both given: Relax refuses them together"
        yield Found(message, launch.where("--partial-rollout"))


RULE = Rule(
    id="r3-partial-rollout",
    title="--use-rollout-routing-replay together with --partial-rollout (Relax)",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="partial rollouts mix weights within a sample, so its recorded routes belong to no one policy",
    cure="remove --partial-rollout, or --use-rollout-routing-replay",
    sources=("redai-infra/Relax@05149ae1a relax/utils/arguments.py (slime_validate_args)",),
    check=_check,
)

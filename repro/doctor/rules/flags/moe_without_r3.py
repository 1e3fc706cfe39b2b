"""A mixture of experts whose routes are chosen twice, by the engine and by the trainer."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import moe, samples, trains
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(launch: Launch) -> Iterator[Found]:
    if not moe(launch) or not samples(launch) or not trains(launch) or launch.has("--use-rollout-routing-replay"):
        return
    message = f"--num-experts {launch.value('--num-experts')}, sampled by SGLang, without --use-rollout-routing-replay"
    if launch.has("--use-routing-replay"):
        message += " (--use-routing-replay repeats the trainer's own routes, not the engine's)"
    yield Found(message, launch.where("--num-experts"))


RULE = Rule(
    id="moe-without-r3",
    title="A mixture of experts without rollout routing replay (R3)",
    inputs=(Launch,),
    severity="note",
    certainty="possible",
    why="engine and trainer pick other experts for the same token, which can collapse training after some 50 steps",
    cure="add --use-rollout-routing-replay; watch train_rollout_logprob_abs_diff",
    sources=("Miles guide: Debugging", "THUDM/slime@624b824a8 slime/utils/arguments.py:1098,2011"),
    check=_check,
)

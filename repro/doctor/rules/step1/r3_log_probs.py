"""With routing replayed in the policy alone (R3): how far its log-probs may lie from the reference's."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, TrainStep
from repro.doctor.facts.curves import replays_routing
from repro.doctor.facts.tokens import has_column, sample_means
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_BOUND = 5e-3


def _check(step: TrainStep, launch: Launch | None) -> Iterator[Found]:
    if step.rollout_id != 0 or not (replays_routing(launch) or has_column(step.joined, "rollout_routed_experts")):
        return
    own, ref = sample_means(step.joined, "log_probs"), sample_means(step.joined, "ref_log_probs")
    if own is None or ref is None or abs(own - ref) <= _BOUND:
        return
    yield Found(
        f"with routing replay, the means of log_probs and ref_log_probs of rollout 0 lie {abs(own - ref):.3g} apart, "
        f"more than {_BOUND:g}",
        Where(str(step.path), item="log_probs, ref_log_probs", value=f"{own:.6g}, {ref:.6g}"),
    )


RULE = Rule(
    id="r3-log-probs",
    title="With R3: means of log_probs and ref_log_probs of rollout 0 more than 5e-3 apart",
    inputs=(TrainStep,),
    uses=(Launch,),
    severity="warning",
    certainty="likely",
    why="the reference routes for itself, which moves the mean a little; more than that means that the replayed "
    "routing is not the rollout's, or that the reference is another model",
    cure="check that the dumps' rollout_routed_experts have the model's layers and top-k, and that --load and "
    "--ref-load hold the same weights",
    sources=("radixark/miles@31f1ca961 miles/backends/training_utils/log_utils.py:262",),
    check=_check,
)  # fmt: skip

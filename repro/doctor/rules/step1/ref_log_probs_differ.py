"""Token by token: the policy's log-probs of rollout 0 against the reference's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from repro.doctor.artefacts.kinds import Launch, TrainStep
from repro.doctor.facts.curves import replays_routing
from repro.doctor.facts.tokens import counted, has_column, sample_name
from repro.doctor.rule import Found, Rule, Severity, Where

__all__ = ["RULE"]

_JITTER = 1e-4


def _check(step: TrainStep, launch: Launch | None) -> Iterator[Found]:
    joined = step.joined
    if step.rollout_id != 0 or replays_routing(launch) or has_column(joined, "rollout_routed_experts"):
        return  # with routing replayed in the policy alone they differ by design: `r3-log-probs`
    tokens = differ = 0
    means: list[float] = []
    worst: tuple[float, str, float, float] | None = None
    for one in counted(joined, "log_probs", "ref_log_probs"):
        own, ref = one.values
        # NaN in both is equal here: that they are no numbers is another rule's
        other = ~((own == ref) | (np.isnan(own) & np.isnan(ref)))
        tokens += own.size
        differ += int(other.sum())
        with np.errstate(invalid="ignore"):
            gap = np.where(other, np.nan_to_num(np.abs(own - ref), nan=np.inf), 0.0)
        if gap.size:
            means.append(float(gap.mean()))
            at = int(gap.argmax())
            if gap[at] > (worst[0] if worst else 0.0):
                place = f"{sample_name(joined, one.row)} response token {one.positions[at]}"
                worst = (float(gap[at]), place, float(own[at]), float(ref[at]))
    if worst is None:
        return
    mean = float(np.mean(means))
    severity: Severity = "note" if mean < _JITTER else "warning"
    yield Found(
        f"log_probs and ref_log_probs of rollout 0 differ at {differ} of {tokens} tokens, by {mean:.3g} on average",
        Where(str(step.path), item=f"{worst[1]} log_probs, ref_log_probs", value=f"{worst[2]!r}, {worst[3]!r}"),
        severity,
    )


RULE = Rule(
    id="ref-log-probs-differ",
    title="log_probs and ref_log_probs of rollout 0 that are not exactly equal, token by token (R3 exempt)",
    inputs=(TrainStep,),
    uses=(Launch,),
    severity="warning",
    certainty="likely",
    why="policy and reference are the same weights before the first update: what differs is numerics or another model, "
    "and the KL penalty pulls towards it",
    cure="add --attention-backend flash (fused attention of some Transformer Engine versions is not deterministic "
    "under context parallelism); where the gap is large, check that --load and --ref-load hold the same weights, and "
    "parallelism and precision of both",
    sources=("Miles guide: Debugging", "slime guide: Debugging", "Relax guide: Debugging",
             "THUDM/slime@624b824a8 slime/observability/train_metric_utils.py:222"),
    check=_check,
)  # fmt: skip

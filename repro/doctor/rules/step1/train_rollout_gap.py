"""How far the trainer's log-probs of the first rollout lie from the engine's."""

from __future__ import annotations

import math
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Series
from repro.doctor.facts.curves import Kind, is_moe, replays_routing
from repro.doctor.rule import Found, Rule, Severity

__all__ = ["RULE"]

_SEEN = 0.03
"""Miles' CI takes no more between the two means; bf16 gives 0.005 to 0.02 for each token of a dense model."""
_LIKELY = 0.1
"""slime's CI takes no more by default."""
_OTHER = 1.0
"""A factor of e for each token: no kernel's rounding does that."""


def _gap(series: Series) -> tuple[Kind, str, float] | None:
    step, rollout = series.steps.get(0, {}), series.rollouts.get(0, {})
    name = "train_rollout_logprob_abs_diff"
    if name in step:
        return "step", name, step[name]
    if name in rollout:
        return "rollout", name, rollout[name]
    if "log_probs" in rollout and "rollout_log_probs" in rollout:
        return "rollout", "log_probs - rollout_log_probs", abs(rollout["log_probs"] - rollout["rollout_log_probs"])
    return None


def _check(series: Series, launch: Launch | None) -> Iterator[Found]:
    found = _gap(series)
    if found is None or not math.isfinite(found[2]) or found[2] < _SEEN:
        return
    kind, name, gap = found
    severity: Severity = "error" if gap > _OTHER else "warning" if gap > _LIKELY else "note"
    moe = is_moe(launch, series) and not replays_routing(launch, series)
    cure = (
        "--use-rollout-routing-replay makes training route as the engine did; then as for dense models: " if moe else ""
    )
    yield Found(
        f"trainer and engine differ by {gap:.3g} nats per token in the first step"
        + ("" if gap <= _LIKELY else f", and slime's CI takes {_LIKELY:g} at most"),
        series.where(kind, 0, name, gap),
        severity,
        cure=cure + RULE.cure if cure else "",
    )


RULE = Rule(
    id="train-rollout-gap",
    title="train_rollout_logprob_abs_diff of the first step of 0.03 and more, 0.1 and more, above 1",
    inputs=(Series,),
    uses=(Launch,),
    severity="warning",
    certainty="likely",
    why="the policy that is trained is not the one that sampled, so the gradient is of another distribution; above 1 "
    "they are other weights",
    cure="above 1: compare the weights that the engine has with the checkpoint (--check-weight-update-equal), and "
    "--rollout-temperature with the trainer's; below: precision of both sides (fp8, quantised KV cache), "
    "--use-tis corrects for the rest",
    sources=("THUDM/slime@624b824a8 slime/utils/arguments.py:1529",
             "radixark/miles@31f1ca961 miles/backends/training_utils/log_utils.py:281"),
    check=_check,
)  # fmt: skip

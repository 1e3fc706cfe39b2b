"""The checks that `repro rollout show` makes of a dump, each as a rule of the doctor."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from repro.doctor.artefacts.kinds import HfConfig, Launch, Rollout
from repro.doctor.facts.train_columns import expert_config
from repro.doctor.rule import Certainty, Found, Rule, Severity, Where
from repro_golden.dumps.rollout import check_rules
from repro_golden.dumps.rollout.checks import RULES as CHECKS

__all__ = ["RULES"]

_ELSEWHERE = ("reward-equal", "truncated")
"""`reward-constant` and `truncated-ratio` say these with more of the run before them."""

_SHOWN = 3
"""Samples that are named; the others are counted."""

_SAMPLE = "THUDM/slime@624b824a8 slime/utils/types.py:418 (Sample)"
_EXPERTS = "THUDM/slime@624b824a8 slime/observability/rollout_data_utils.py:58-95"
_STALE = "slime guide: Troubleshooting (stale weights in async mode)"
_EMPTY = "slime guide: Troubleshooting (verify no empty prompts or responses)"
_GROUPS = "Miles FAQ (samples of a rollout)"
_NAN = "radixark/miles@31f1ca961 miles/backends/training_utils/loss_hub/losses.py:198 (nan_to_num)"


class _Told(NamedTuple):
    """What the doctor says of a check beside what the check says itself."""

    title: str
    source: str
    id: str = ""
    certainty: Certainty = "certain"


_TABLE: Mapping[str, _Told] = {
    "no-samples": _Told("A rollout dump without a sample", _SAMPLE),
    "response-length": _Told("A response_length that the tokens do not have", _SAMPLE),
    "column-length": _Told("Per-token columns of another length than the response", _SAMPLE),
    "tokens": _Told("Token ids that are none", _SAMPLE),
    "mask-values": _Told("A loss mask of other values than 0 and 1", _SAMPLE),
    "top-p-offsets": _Told("Offsets of top-p nuclei that do not fit their ids", _SAMPLE),
    "log-probs-finite": _Told("NaN or infinite log-probs of a rollout", _NAN),
    "log-probs-positive": _Told("Log-probs above 0", _SAMPLE),
    "column-in-some": _Told("A column that some samples have and others lack", _SAMPLE),
    "log-probs-missing": _Told("A rollout without log-probs", _SAMPLE),
    "mask-all-zero": _Told("Samples whose response is masked whole", _SAMPLE),
    "tool-tokens": _Told(
        "Trained tokens that no model sampled, by their log-probs of exactly 0",
        "slime guide: Troubleshooting (tool responses included in loss)", certainty="likely",
    ),
    "reward-missing": _Told("Samples without a reward", "Miles guide: Debugging (rewards)"),
    "reward-finite": _Told("NaN or infinite rewards", "Miles guide: Debugging (rewards)"),
    "duplicated-index": _Told("Samples that are there twice", _SAMPLE),
    "group-size": _Told("Groups of another size than --n-samples-per-prompt", _GROUPS),
    "group-sizes": _Told("Groups of several sizes", _GROUPS),
    "scattered-group": _Told("Groups whose samples do not stand together", _GROUPS, certainty="likely"),
    "versions-in-sample": _Told("Responses that were sampled with several weights", _STALE),
    "versions-in-batch": _Told("A rollout that was sampled with several weights", _STALE, "dump-weight-versions"),
    "unfinished": _Told("Samples that are aborted, failed or pending", _SAMPLE),
    "empty-response": _Told("Responses without a token", _EMPTY),
    "removed": _Told("Samples that a filter removed", _SAMPLE),
    "experts-missing": _Told(
        "Samples without routed experts under --use-rollout-routing-replay", "Miles guide: Debugging (R3)",
        "dump-routed-experts-missing",
    ),
    "experts-shape": _Told("Routed experts of another shape than [tokens - 1, layers, top-k]", _EXPERTS),
    "experts-negative": _Told("Routed experts below 0", _EXPERTS),
    "experts-layer-lost": _Told("Layers whose routed experts are all 0 in some samples", _EXPERTS),
    "experts-layer-zero": _Told("Layers whose routed experts are all 0 in every "
    "sample", _EXPERTS, certainty="possible"),
}  # fmt: skip

_R3 = "--use-rollout-routing-replay"
_OWN_CODE = ("--custom-generate-function-path", "--rollout-function-path", "--buffer-filter-path")
"""With these a prompt may rightly have more or fewer samples than the flag says."""


def _check(
    check: check_rules.Rule, rollout: Rollout, launch: Launch | None, config: HfConfig | None
) -> Iterator[Found]:
    """All that one check finds in one dump, as one finding."""
    dump = rollout.dump
    if dump.evaluation and not check.evaluation:
        return
    layers, topk, _ = expert_config(launch, config)
    if check.id == "experts-missing":
        if launch is None or not launch.has(_R3):
            return
        layers = layers or 1  # which number it is plays no part in this check
    size = launch.number("--n-samples-per-prompt") if launch else None
    found = list(check.check(check_rules.Batch(dump, int(size) if size else None, layers, topk)))
    if not found or (check.id == "mask-all-zero" and len(found) == len(dump.samples)):
        return  # of a whole rollout `loss-mask-all-zero` says it
    listed = "; ".join(
        one.message if one.sample is None else f"sample {one.sample}: {one.message}" for one in found[:_SHOWN]
    )
    more = f"; and {len(found) - _SHOWN} more, {len(found)} in all" if len(found) > _SHOWN else ""
    first = found[0]
    item = first.field if first.sample is None else f"{first.field} of sample {first.sample}"
    yield Found(listed + more, Where(str(rollout.path), item=item), _severity(check, rollout, len(found), launch))


def _severity(check: check_rules.Rule, rollout: Rollout, found: int, launch: Launch | None) -> Severity | None:
    """Where something else explains what was found, it is no error."""
    if check.id == "reward-missing" and found == len(rollout.dump.samples):
        return "warning"  # a program that never sets it scores elsewhere, or distils
    if launch is None:
        return None
    if check.id == "group-size" and any(launch.has(flag) for flag in _OWN_CODE):
        return "warning"
    if check.id == "versions-in-batch" and (launch.asynchronous or launch.has("--partial-rollout")):
        return "note"
    return None


def _rule(check: check_rules.Rule) -> Rule:
    told = _TABLE[check.id]
    return Rule(
        id=told.id or f"dump-{check.id}",
        title=told.title,
        inputs=(Rollout,),
        uses=(Launch, HfConfig),
        severity=check.severity,
        certainty=told.certainty,
        why=check.why,
        cure=check.cure,
        sources=(told.source,),
        check=functools.partial(_check, check),
    )


RULES = tuple(_rule(check) for check in CHECKS if check.id not in _ELSEWHERE)
"""One for each of the others, in their order."""

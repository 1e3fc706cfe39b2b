"""The checks that `repro rollout show` makes of a dump, each as a rule of the doctor."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from repro.doctor.artefacts.kinds import HfConfig, Launch, Rollout
from repro.doctor.facts.train_columns import expert_config
from repro_golden.base.checks import Found, Rule, Severity, Where
from repro_golden.dumps.rollout.checks import RULES as CHECKS
from repro_golden.dumps.rollout.checks.inputs import batch_of

__all__ = ["RULES"]

_ELSEWHERE = ("reward-equal", "truncated")
"""`reward-constant` and `truncated-ratio` say these with more of the run before them."""

_SHOWN = 3
"""Samples that are named; the others are counted."""

_NAMES = {"versions-in-batch": "weight-versions", "experts-missing": "routed-experts-missing"}
"""What the doctor calls a check, where it is not by the check's own name."""

_R3 = "--use-rollout-routing-replay"
_OWN_CODE = ("--custom-generate-function-path", "--rollout-function-path", "--buffer-filter-path")
"""With these a prompt may rightly have more or fewer samples than the flag says."""


def _check(check: Rule, rollout: Rollout, launch: Launch | None, config: HfConfig | None) -> Iterator[Found]:
    """All that one check finds in one dump, as one finding."""
    dump = rollout.dump
    layers, topk, _ = expert_config(launch, config)
    if check.id == "experts-missing":
        if launch is None or not launch.has(_R3):
            return
        layers = layers or 1  # which number it is plays no part in this check
    size = launch.number("--n-samples-per-prompt") if launch else None
    batch = batch_of(dump, int(size) if size else None, layers, topk)
    findings = list(check.check(batch)) if isinstance(batch, check.inputs) else []
    if not findings or (check.id == "mask-all-zero" and len(findings) == len(dump.samples)):
        return  # of a whole rollout `loss-mask-all-zero` says it
    listed = "; ".join(
        finding.message if finding.where.sample is None else f"sample {finding.where.sample}: {finding.message}"
        for finding in findings[:_SHOWN]
    )
    more = f"; and {len(findings) - _SHOWN} more, {len(findings)} in all" if len(findings) > _SHOWN else ""
    first = findings[0].where
    item = first.item if first.sample is None else f"{first.item} of sample {first.sample}"
    yield Found(listed + more, Where(str(rollout.path), item=item), _severity(check, rollout, len(findings), launch))


def _severity(check: Rule, rollout: Rollout, count: int, launch: Launch | None) -> Severity | None:
    """Where something else explains what was found, it is no error."""
    if check.id == "reward-missing" and count == len(rollout.dump.samples):
        return "warning"  # a program that never sets it scores elsewhere, or distils
    if launch is None:
        return None
    if check.id == "group-size" and launch.has(*_OWN_CODE):
        return "warning"
    if check.id == "versions-in-batch" and (launch.asynchronous or launch.has("--partial-rollout")):
        return "note"
    return None


def _rule(check: Rule) -> Rule:
    name = f"dump-{_NAMES.get(check.id, check.id)}"
    return replace(check, id=name, inputs=(Rollout,), uses=(Launch, HfConfig), check=functools.partial(_check, check))


RULES = tuple(_rule(check) for check in CHECKS if check.id not in _ELSEWHERE)
"""One for each of the others, in their order."""

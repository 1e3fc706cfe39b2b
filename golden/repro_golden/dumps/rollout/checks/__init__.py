"""Checks of a rollout dump, as a doctor would make them: every rule in one table."""

from __future__ import annotations

from repro_golden.base.checks import Finding, Rule
from repro_golden.dumps.rollout.checks import batch, experts, lengths, values
from repro_golden.dumps.rollout.checks.inputs import batch_of
from repro_golden.dumps.rollout.files import RolloutDump

__all__ = ["RULES", "check_dump"]

RULES: tuple[Rule, ...] = (*lengths.RULES, *values.RULES, *batch.RULES, *experts.RULES)
"""All rules, in the order in which they are applied."""


def check_dump(
    dump: RolloutDump, *, group_size: int | None = None, layers: int | None = None, topk: int | None = None
) -> list[Finding]:
    """What a rollout dump has that it should not have.

    Args:
        dump: It.
        group_size: Samples of a prompt (--n-samples-per-prompt), where it is known.
        layers: Layers of the model, where routed experts must be there.
        topk: Experts of a token, where routed experts must be there.

    Returns:
        Findings in the order of the rules and samples; none for a dump that is in order.
    """
    batch = batch_of(dump, group_size, layers, topk)
    rules = [rule for rule in RULES if isinstance(batch, rule.inputs)]
    return [Finding.of(rule, finding) for rule in rules for finding in rule.check(batch)]

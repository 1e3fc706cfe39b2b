"""A rollout of which most responses are cut at the limit."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Rollout
from repro.doctor.facts.rewards import began
from repro.doctor.rule import Found, Rule, Where
from repro_golden.dumps.rollout.files import RolloutDump

__all__ = ["RULE"]

_MOST = 0.5
_LEAST = 8
_ALL = 0.98
"""From there on it is `never-eos`."""


def _cut(dump: RolloutDump) -> tuple[int, int] | None:
    """How many of how many are truncated, where that is most of them."""
    cut, count = sum(sample.get("status") == "truncated" for sample in dump.samples), len(dump.samples)
    return (cut, count) if count >= _LEAST and cut > _MOST * count else None


def _check(rollout: Rollout, launch: Launch | None) -> Iterator[Found]:
    found = None if rollout.dump.evaluation else began(rollout, _cut)
    if found is None or found[0] >= _ALL * found[1]:
        return
    limit = launch.value("--rollout-max-response-len") if launch else None
    yield Found(
        f"{found[0]} of {found[1]} responses ({found[0] / found[1]:.0%}) were cut at the limit"
        + (f" of {limit} tokens" if limit else ""),
        Where(str(rollout.path), item="status truncated", value=f"{found[0]}/{found[1]}"),
    )


RULE = Rule(
    id="truncated-ratio",
    title="More than half of a rollout's responses are cut at the limit",
    inputs=(Rollout,),
    uses=(Launch,),
    severity="warning",
    certainty="certain",
    why="an answer that is cut has no reward for what it would have said: long answers are punished for their length",
    cure="raise --rollout-max-response-len, or look whether responses loop (`garbled-first-rollout`) or go on after "
    "their end (`never-eos`)",
    sources=("Miles FAQ", "THUDM/slime@624b824a8 slime/observability/rollout_metrics.py:151"),
    check=_check,
)  # fmt: skip

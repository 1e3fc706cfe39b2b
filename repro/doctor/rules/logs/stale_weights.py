"""Rollouts that were sampled with weights several updates old."""

from __future__ import annotations

import math
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import argument, said, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_SKIPPED = (
    "No updatable SGLang engines are running; skip weight update",
    "Skipping actor-to-rollout weight update because",
)
_FILTERED = "Filtered stale group (staleness="


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    for hit in said(log, *_SKIPPED)[:1]:
        yield Found(
            f"the engines' weights were not updated{times(log, *_SKIPPED)}", log.where(hit), certainty="certain"
        )
    for hit in said(log, _FILTERED)[:1]:
        yield Found(
            f"groups were thrown away as too old{times(log, _FILTERED)}", log.where(hit), severity="note",
            certainty="certain",
        )  # fmt: skip
    worst = max(
        (
            (value, number, name)
            for number, metrics in log.series.rollouts.items()
            for name, value in metrics.items()
            if name.endswith("max_staleness") and "buffer" not in name and math.isfinite(value)
        ),
        default=None,
    )
    interval = argument("update_weights_interval", launch, log)
    expected = 2 * int(interval) if interval and interval.isdecimal() and len(interval) < 6 else 2
    if worst and worst[0] > expected:
        value, number, name = worst
        kind = next((kind for kind, at in log.series.lines if at == number and kind != "step"), "rollout")
        yield Found(
            f"rollout {number} holds samples {value:g} weight updates old; {expected} are to be expected",
            log.series.where(kind, number, name, value),
        )


RULE = Rule(
    id="stale-weights",
    title="Samples of weights that are several updates old",
    inputs=(Log,),
    uses=(Launch,),
    severity="warning",
    certainty="likely",
    why="the policy is trained on what another policy wrote, and diverges from it",
    cure="--update-weights-interval 1, fewer groups in flight, and Miles' --max-weight-staleness; or correct for it "
    "with --use-tis",
    sources=(
        "slime guide: Troubleshooting",
        "THUDM/slime@624b824a8 slime/backends/megatron_utils/actor.py:618",
        "radixark/miles@31f1ca961 miles/rollout/fully_async_data_buffer.py:160",
    ),
    check=_check,
    phrases=(*_SKIPPED, _FILTERED),
)

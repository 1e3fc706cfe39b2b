"""A background rollout worker that stopped or fails."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Log
from repro.doctor.artefacts.log_lines import said, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_DEAD = (
    "fully-async rollout worker exited without an exception",
    "multi-LoRA producer failed; generation is stopped",
)
_FAILING = ("fully-async loop iteration error", "fully-async task crashed", "fully-async: process task raised")
_STARTED = ("Continuous async rollout worker started", "Continuous random-async rollout worker started")
_STOPPED = ("Continuous async rollout worker stopped", "Continuous random-async rollout worker stopped")
_SLOW = "No completed rollout groups for "


def _check(log: Log) -> Iterator[Found]:
    started, stopped = said(log, *_STARTED), said(log, *_STOPPED)
    dead = said(log, *_DEAD)
    if dead:
        yield Found(f"the rollout worker ended{times(log, *_DEAD)}", log.where(dead[0]))
        return
    if started and stopped:
        later = [
            at for (kind, _), at in log.series.lines.items() if kind in ("step", "rollout") and at > stopped[-1].line
        ]
        if later and stopped[-1].line > started[-1].line:
            yield Found("the rollout worker stopped while training went on", log.where(stopped[-1]))
    failing = said(log, *_FAILING)
    if failing:
        yield Found(
            f"tasks of the rollout worker fail{times(log, *_FAILING)}; it goes on without their samples",
            log.where(failing[0]),
            severity="warning",
        )
    slow = said(log, _SLOW)
    if slow:
        yield Found(
            f"the rollout worker finished nothing for minutes{times(log, _SLOW)}", log.where(slow[0]), "warning"
        )


RULE = Rule(
    id="async-worker-dead",
    title="A background rollout worker that ended, or whose tasks fail",
    inputs=(Log,),
    severity="error",
    certainty="certain",
    why="training waits for samples that nobody makes, or trains on those that happen not to fail",
    cure="read the exception below that line. `Continuous async rollout worker started` is printed by older versions "
    "only: slime and Miles have no such line today, so its absence means nothing",
    sources=(
        "Miles guide: Debugging",
        "THUDM/slime@624b824a8 slime/rollout/fully_async_rollout.py:145",
        "radixark/miles@31f1ca961 miles/rollout/fully_async_rollout.py:153",
    ),
    check=_check,
    phrases=(*_DEAD, *_FAILING, *_STARTED, *_STOPPED, _SLOW),
)

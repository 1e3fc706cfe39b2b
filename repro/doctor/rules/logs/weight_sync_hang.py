"""A collective that timed out while weights went from the trainer to the engines."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Hit, Launch, Log
from repro.doctor.artefacts.log_lines import above, argument, below, fails, goes_on, said, speaker, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE", "TIMEOUTS", "in_weight_sync"]

TIMEOUTS = (
    "Watchdog caught collective operation timeout",
    "ms for recv operation to complete",
    "ms for send operation to complete",
    "Timeout at NCCL work",
    "Timed out waiting for key",
    "wait timeout after ",
)
"""What NCCL's watchdog, gloo and the store say of a peer that does not answer."""

_SYNC = re.compile(
    r"update_weight|Update (?:expert )?weights|weight_sync|weights_update_group|Timer update_weights start"
    r"|_send_weights|broadcast_weights"
)
_OVER = re.compile(r"Timer update_weights end|(?:step|rollout) \d+: \{|Timer (?:train|actor_train|generate)\w* start")

_BEGINS = re.compile(r"Timer update_weights start|Update (?:expert )?weights")
_DONE = re.compile(
    r"Update (?:expert )?weights.*(?:\b100%|\bdone\b|finished|complete|succe|took|elapsed)", re.IGNORECASE
)
_BUSY = re.compile(
    r"Timer (?!update_weights start)\w+ (?:start|end)|\w+ \d+: \{'|Decode batch|Prefill batch|POST /generate"
    r"|\bJob '[^']{1,200}' \w+"
)
"""What shows that the sync is over, or that the run is."""


def in_weight_sync(log: Log, hit: Hit) -> bool:
    """Whether a line stands in a weight sync: its own trace names it, or the last phase that began is one."""
    if _SYNC.search(hit.text) or any(_SYNC.search(line) for line in below(log, hit, 40)):
        return True
    for line in reversed(above(log, hit, 400)):
        if _OVER.search(line):
            return False
        if _SYNC.search(line):
            return True
    return False


_TAIL = 400


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    hit = next((hit for hit in said(log, *TIMEOUTS)[:20] if in_weight_sync(log, hit)), None)
    if hit is None:
        yield from _ends_in_sync(log)
        return
    after = re.search(r"Timeout\(ms\)=(\d{1,12})|waiting (\d{1,12})ms", hit.text)
    seconds = f" after {int(after[1] or after[2]) / 1000:g} s" if after else ""
    who = f" on {speaker(hit)}" if speaker(hit) else ""
    variables = {} if launch is None else launch.env
    steps = []
    if "NCCL_DEBUG" not in variables:
        steps.append("set NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL,P2P, and read which rank is late")
    limit = "1800" if "NCCL_TIMEOUT" in variables else "900, then 1800"
    minutes = argument("distributed_timeout_minutes", launch, log)
    steps.append(
        f"where it is only slow, NCCL_TIMEOUT={limit} and --distributed-timeout-minutes 30"
        + (f" (now {minutes})" if minutes else "")
    )
    if launch is not None and launch.asynchronous:
        steps.append("a larger --update-weights-interval syncs less often")
    else:
        steps.append("--colocate needs no network for it")
    yield Found(
        f"a collective timed out{seconds}{who} while weights were synchronised{times(log, *TIMEOUTS)}",
        log.where(hit),
        severity="warning" if goes_on(log, hit) else None,
        cure="; ".join(steps),
    )


def _ends_in_sync(log: Log) -> Iterator[Found]:
    """A log that shows a weight sync's begin and then no more, where weights had been synchronised before."""
    if not log.series.steps and not log.series.rollouts:
        return
    first = max(log.lines - _TAIL, 1)
    begun: Hit | None = None
    for number, line in enumerate(log.around(first, log.lines), first):
        if _DONE.search(line) or _BUSY.search(line) or fails(line) or any(phrase in line for phrase in TIMEOUTS):
            begun = None
        elif _BEGINS.search(line):
            begun = begun or Hit(number, 0, line)
    if begun is None or not any(at < begun.line for at in log.series.lines.values()):
        return
    yield Found(
        f"the log ends in a weight sync: it began on line {begun.line} of {log.lines}, and nothing shows its end",
        log.where(begun),
        severity="warning",
        certainty="possible",
        cure="where the run is not still in it: `py-spy dump` of a trainer and of an engine shows which of them waits; "
        "NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL,P2P show which rank is late",
    )


RULE = Rule(
    id="weight-sync-hang",
    title="A collective that timed out in a weight sync",
    inputs=(Log,),
    uses=(Launch,),
    severity="error",
    certainty="likely",
    why="trainer and engines wait for each other until the timeout ends the run",
    cure="NCCL_TIMEOUT=900, then 1800; NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL,P2P show which rank is late",
    sources=("Miles guide: Debugging", "slime guide: Troubleshooting"),
    check=_check,
    phrases=TIMEOUTS,
)

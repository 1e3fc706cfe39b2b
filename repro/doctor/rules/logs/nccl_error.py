"""Errors and timeouts of collectives outside of weight syncs."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Hit, Launch, Log
from repro.doctor.artefacts.log_lines import above, below, fails, goes_on, said, speaker, times
from repro.doctor.rule import Found, Rule
from repro.doctor.rules.logs.weight_sync_hang import TIMEOUTS, in_weight_sync

__all__ = ["RULE"]

_CLOSED = "Connection closed by peer"
_ERRORS = (
    "NCCL error", "ncclUnhandledCudaError", "ncclSystemError", "ncclInternalError", "ncclInvalidUsage",
    "ncclRemoteError", "torch.distributed.DistBackendError", "Some NCCL operations have failed or timed out",
    _CLOSED,
)  # fmt: skip


def _counts(log: Log, hit: Hit) -> bool:
    """Whether a line is evidence: what NCCL tells at its level INFO is not, and every socket's end has a peer."""
    if "NCCL INFO" in hit.text:
        return False
    if _CLOSED not in hit.text or any(phrase in hit.text for phrase in (*_ERRORS, *TIMEOUTS) if phrase != _CLOSED):
        return True
    return "gloo" in hit.text or any(fails(line) for line in (*above(log, hit, 20), *below(log, hit, 20)))


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    hits = [hit for hit in said(log, *_ERRORS, *TIMEOUTS)[:40] if _counts(log, hit) and not in_weight_sync(log, hit)]
    if not hits:
        return
    hit = hits[0]
    who = f" on {speaker(hit)}" if speaker(hit) else ""
    what = "a collective timed out" if any(p in hit.text for p in TIMEOUTS) else "a collective failed"
    last = next((line for line in below(log, hit, 12) if "Last error" in line), "")
    have = launch is not None and "NCCL_DEBUG" in launch.env
    yield Found(
        f"{what}{who}{times(log, *_ERRORS, *TIMEOUTS)}{': ' + last[:160] if last else ''}",
        log.where(hit),
        severity="warning" if goes_on(log, hit) else None,
        cure="find the first rank that failed, by its time: the others only lost it" if have else "",
    )


RULE = Rule(
    id="nccl-error",
    title="A collective that failed or timed out",
    inputs=(Log,),
    uses=(Launch,),
    severity="error",
    certainty="likely",
    why="all ranks of the group end with it",
    cure="find the first rank that failed, by its time: the others only lost it; NCCL_DEBUG=INFO says why it did, and "
    "NCCL_SOCKET_IFNAME names the interface where the nodes have several",
    sources=("slime guide: Troubleshooting", "Miles guide: Debugging"),
    check=_check,
    phrases=_ERRORS + TIMEOUTS,
)

"""Several ranks that make one run together: started at once, ended at once, and which of them failed first."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro_golden.recording.rank_group import SHOW_STACKS, lost_a_peer, result_path
from repro_golden.replay.children import CancelledError, Child, ChildFailure
from repro_golden.replay.output import tail

__all__ = ["Lost", "Ranks", "free_port", "meeting", "rank_log"]

_POLL = 0.05
_PATIENCE = 5.0
"""Seconds in which, after a rank has lost a peer, that peer may still show why."""
_STACKS = 3.0
"""Seconds that ranks get to write what they are doing."""

_WORDS = 4096
"""Characters at the end of a rank's output in which it tells that it lost a peer."""
_STACK = "most recent call first"
_WAITS = re.compile(r"/torch/distributed/|/repro_golden/recording/rank_group\.py")
"""Frames of a rank that waits for others."""


def meeting(rank: int, ranks: int, port: str) -> dict[str, str]:
    """The variables by which torch.distributed finds the other ranks on this host, as torchrun sets them."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def free_port() -> str:
    """A port that nobody listens at now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def rank_log(log: Path, rank: int) -> Path:
    """Where the output of one rank goes, beside that of all."""
    return log.with_name(f"{log.name}.rank-{rank}")


@dataclass(eq=False)
class Lost(Exception):  # noqa: N818 - what happened to the subject, which is data
    """A rank that failed before the others did.

    Attributes:
        rank: Which one.
        code: Its exit code, negative where a signal ended it; None where it said what was wrong and had not ended yet.
        report: What it wrote of its failure; None where it died without a word.
        log: Its output.
        peer: Whether that is no more than what another rank's end leaves behind.
        at: When, in seconds.
    """

    rank: int
    code: int | None
    report: Mapping[str, Any] | None
    log: Path
    peer: bool
    at: float


@dataclass
class Ranks:
    """The ranks that make runs together, once.

    Attributes:
        children: One for each rank, in order. The first one's limit holds for all.
        raw: Folder where each writes what came of it.
        results: What those that finished say of each run, by rank.
    """

    children: Sequence[Child]
    raw: Path
    results: dict[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    def run(self, cancel: threading.Event | None = None, enough: Callable[[], bool] | None = None) -> bool:
        """Run them until all have finished; whether `enough` ended them before.

        Args:
            cancel: Ends them when set.
            enough: Asked now and then; once it says so, what was wanted is done.

        Raises:
            CancelledError: `cancel` was set.
            ChildFailure: they ran out of time.
            Lost: one of them failed.
            OSError: one could not be started.
        """
        with contextlib.ExitStack() as exits:
            processes = [exits.enter_context(child.started()) for child in self.children]
            exits.callback(_kill, processes)  # all at once, before each one's own are looked for
            return self._watched(processes, cancel, enough)

    def _watched(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        cancel: threading.Event | None,
        enough: Callable[[], bool] | None,
    ) -> bool:
        lost: dict[int, Lost] = {}
        deadline, patience = time.monotonic() + self.children[0].limit, float("inf")
        while True:
            codes = [process.poll() for process in processes]  # before the results: what has ended writes no more
            lost |= {failed.rank: failed for failed in self._failed(codes) if failed.rank not in lost}
            if lost:
                patience = min(patience, time.monotonic() + _PATIENCE)
                if not all(failed.peer for failed in lost.values()) or time.monotonic() > patience or None not in codes:
                    raise min(lost.values(), key=lambda failed: (failed.peer, failed.at))
            elif None not in codes:
                return False
            if cancel and cancel.is_set():
                raise CancelledError
            if enough and enough():
                return True
            if time.monotonic() > deadline:
                raise self._hang(processes)
            time.sleep(_POLL)

    def _failed(self, codes: Sequence[int | None]) -> list[Lost]:
        """The ranks that failed; what the others wrote goes to `results`."""
        failed = []
        for rank, (code, child) in enumerate(zip(codes, self.children, strict=True)):
            if rank in self.results:
                continue
            path = result_path(self.raw, rank)
            if path.exists():
                result = json.loads(path.read_text(encoding="utf-8"))
                if "runs" in result:
                    self.results[rank] = result["runs"]
                    continue
                failure = result.get("failure", {})
                peer, at = failure.get("peer", False), failure.get("at", time.time())
                failed.append(Lost(rank, code, result, child.log, peer, at))
            elif code is not None:
                # a kill leaves no word, and is nobody's echo
                peer = code != -signal.SIGKILL and lost_a_peer(tail(child.log)[-_WORDS:])
                failed.append(Lost(rank, code, None, child.log, peer, time.time()))
        return failed

    def _hang(self, processes: Sequence[subprocess.Popen[bytes]]) -> ChildFailure:
        """What to say of ranks that did not end: which of them waits for no other. Their stacks are in their logs."""
        stacks = self._stacks({rank: p for rank, p in enumerate(processes) if rank not in self.results})
        alone = [rank for rank, text in stacks.items() if not _WAITS.search(text)]
        if not stacks:  # all have told their results
            alone = [rank for rank, process in enumerate(processes) if process.poll() is None]
            who = f"rank {', '.join(map(str, alone))} did its work and does not exit"
        elif not alone:
            who = "every rank waits for another in torch.distributed"
        elif len(alone) == len(stacks) > 1:
            who = "no rank waits in torch.distributed"
        else:
            word = ("rank", "is") if len(alone) == 1 else ("ranks", "are")
            others = "" if len(stacks) == len(alone) else ", the others wait there"
            who = f"{word[0]} {', '.join(map(str, alone))} {word[1]} not in a collective of torch.distributed{others}"
        log = self.children[alone[0] if alone else 0].log
        limit = self.children[0].limit
        return ChildFailure(
            "timeout", -1, f"no end within {limit:g} s: {who}; if it is only slow, raise subject.timeout", str(log)
        )

    def _stacks(self, processes: Mapping[int, subprocess.Popen[bytes]]) -> dict[int, str]:
        """What the threads of each rank are doing, as its log now says."""
        before = {rank: self.children[rank].log.stat().st_size for rank in processes}
        for process in processes.values():
            process.send_signal(SHOW_STACKS)
        deadline = time.monotonic() + _STACKS
        while not all(_STACK in text for text in self._since(before).values()) and time.monotonic() < deadline:
            time.sleep(_POLL)
        time.sleep(_POLL)  # the last thread of the last rank
        return self._since(before)

    def _since(self, before: Mapping[int, int]) -> dict[int, str]:
        """What each rank has written behind so many bytes of its log."""
        return {rank: tail(self.children[rank].log, size) for rank, size in before.items()}


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

"""The ranks of one run, as one of them sees it: in the replay child, without communication of its own over the network.

What must be decided alike everywhere is decided by rank 0 and told through files, because collectives belong to the
trainer: one more of ours would change what it does.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

__all__ = ["SHOW_STACKS", "RankGroup", "lost_a_peer", "result_path", "run_folder"]

SHOW_STACKS = signal.SIGUSR1
"""On it a rank writes what all of its threads are doing to its log."""

_PATIENCE = 30.0
"""Seconds that a rank which has ended waits for the others: rank 0 holds the store at which they meet."""

_PEER = re.compile(
    r"connection (?:closed by peer|reset by peer|refused|was likely closed)|broken pipe|socket closed"
    r"|gloo/transport|recvValue failed|sendBytes failed|TCPStore|failed to recv|ncclRemoteError|remote process exited"
    r"|NCCL (?:communicator was aborted|watchdog)|watchdog (?:thread|caught)|process group .* (?:aborted|timed out)",
    re.IGNORECASE,
)


def result_path(raw: Path, rank: int) -> Path:
    """Where a rank says what came of its run."""
    return raw / f"rank-{rank:05d}.result"


def run_folder(raw: Path, number: int) -> Path:
    """Where the ranks write what belongs to one run of a job."""
    return raw / f"run-{number}"


@dataclass(frozen=True)
class RankGroup:
    """Who this process is among several.

    Attributes:
        raw: Folder of what all of them write, of a job or of one of its runs.
        rank: Which one this is.
        ranks: How many there are.
    """

    raw: Path
    rank: int
    ranks: int

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> RankGroup | None:
        """That of a job; None where one process trains alone. From here on `SHOW_STACKS` serves."""
        if job["raw"] is None:
            return None
        faulthandler.register(SHOW_STACKS, all_threads=True)
        return cls(Path(job["raw"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    def of_run(self, number: int) -> RankGroup:
        """The same with the folder of one run."""
        return replace(self, raw=run_folder(self.raw, number))

    @property
    def result(self) -> Path:
        """Where this rank says what came of its run."""
        return result_path(self.raw, self.rank)

    def agreed(self, what: str, decide: Callable[[], Any]) -> Any:
        """What rank 0 decides once all ranks have come here; JSON types.

        Args:
            what: A word for it, used once.
            decide: Called on rank 0.
        """
        (self.raw / f"{what}.came-{self.rank:05d}").touch()
        decision = self.raw / f"{what}.decided"
        if self.rank == 0:
            self._wait(lambda: len(list(self.raw.glob(f"{what}.came-*"))) == self.ranks)
            part = decision.with_suffix(".part")
            part.write_text(json.dumps(decide()), encoding="utf-8")
            part.replace(decision)
        self._wait(decision.exists)
        return json.loads(decision.read_text(encoding="utf-8"))

    def leave(self) -> None:
        """Wait until every rank has said what came of its run, for a while."""
        deadline = time.monotonic() + _PATIENCE
        everyone = [result_path(self.raw, rank) for rank in range(self.ranks)]
        self._wait(lambda: all(path.exists() for path in everyone) or time.monotonic() > deadline)

    def _wait(self, there: Callable[[], bool]) -> None:
        """Wait as long as it takes: a run has a time limit, and ends with the first rank that fails."""
        while not there():
            time.sleep(0.01)


def lost_a_peer(error: BaseException | str) -> bool:
    """Whether an error, or the last lines of a log, may be no more than what another rank's end leaves behind.

    What fails inside of torch.distributed counts: where all ranks are wrong there, the first one's error is as good.
    """
    if isinstance(error, str):
        return bool(_PEER.search(error))
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ConnectionError) or _PEER.search(str(seen)) or _inside_torch_distributed(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _inside_torch_distributed(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "/torch/distributed/" in trace.tb_frame.f_code.co_filename

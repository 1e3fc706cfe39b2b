"""Runs a small program as N real processes, with the variables that torchrun would set."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["CORE", "Ended", "launch", "outputs"]

CORE = Path(__file__).parents[1] / "core"


class Ended(NamedTuple):
    """How one rank ended; `code` is -9 where it was ended because another one failed, or at the deadline."""

    rank: int
    code: int
    out: str
    err: str


def launch(
    program: Path | str,
    world: int,
    arguments: Sequence[str] = (),
    *,
    cwd: Path,
    deadline_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Run `program` with this Python on `world` ranks and wait for all of them.

    When one fails, or the deadline passes, the others are ended.

    Args:
        program: a file, or a program's text, which is written into `cwd`.
        world: how many processes.
        arguments: of each.
        cwd: where they run.
        deadline_s: seconds until all are ended.
        environment: besides this process's own.
    """
    if isinstance(program, str):
        text, program = program, cwd / "program.py"
        program.write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(CORE),
        **(environment or {}),
    }
    processes: list[subprocess.Popen[str]] = []
    logs = [(cwd / f"rank{rank}.out", cwd / f"rank{rank}.err") for rank in range(world)]
    try:
        for rank, (out, err) in enumerate(logs):
            with out.open("w") as stdout, err.open("w") as stderr:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(program), *arguments],
                        cwd=cwd,
                        env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=stdout,
                        stderr=stderr,
                        text=True,
                    )
                )
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            codes = [process.poll() for process in processes]
            if all(code is not None for code in codes) or any(code for code in codes):
                break
            time.sleep(0.02)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        codes = [process.wait() for process in processes]
    return [
        Ended(rank, code, out.read_text(), err.read_text())
        for rank, (code, (out, err)) in enumerate(zip(codes, logs, strict=True))
    ]


def outputs(ended: Sequence[Ended]) -> list[str]:
    """What the ranks printed, after checking that all of them ended well."""
    failed = [f"rank {each.rank} ended with {each.code}:\n{each.err[-3000:]}" for each in ended if each.code]
    assert not failed, "\n".join(failed)
    return [rank.out for rank in ended]

"""A Ray cluster of one node on this machine, for tests: its processes and files are a user's."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
from conftest import Repo, environment

INSTALLED = importlib.util.find_spec("ray") is not None

STORE = 80_000_000
"""Bytes of the cluster's object store: about the least that Ray takes."""


def variables(node: Path | None = None) -> dict[str, str]:
    """The user's environment without proxies, which Ray's own connections would go through; `node` is for files."""
    kept = {k: v for k, v in environment().items() if not k.lower().endswith("_proxy")}
    quiet = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    return kept | quiet | ({"TMPDIR": str(node)} if node else {})


class Node:
    """A cluster of one node, on whose files and processes tests look."""

    def __init__(self, address: str, temporary: Path) -> None:
        self.address, self.temporary = address, temporary

    @property
    def folder(self) -> Path:
        """Where parcels and probes lie."""
        return self.temporary / f"repro-node-{os.getuid()}"

    def bundles(self, inside: str) -> list[Path]:
        """Parcels that hold a file or folder."""
        return sorted(path for path in self.folder.glob("[0-9a-f]*") if (path / inside).exists())

    def trainers(self) -> list[psutil.Process]:
        """Processes of probes, but git's."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if "REPRO_PROBE" in (all_of := process.environ()) and all_of.get("TMPDIR") == str(self.temporary):
                    processes += [] if process.name().startswith("git") else [process]
        return processes

    def starting(self) -> list[psutil.Process]:
        """Workers that hold the folder of a probe, from the moment they made it."""
        folders = {path.stat().st_ino for path in self.folder.glob("probes/probe*/lock")}
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" not in line]  # a waiter
        return [psutil.Process(int(pid)) for _, _, _, _, pid, file, *_ in locks if int(file.split(":")[2]) in folders]

    def left(self) -> list[str]:
        """What probes left: processes, folders, worktrees and git's notes on them."""
        left = [str(path) for pattern in ("probes/*", ".new-*") for path in self.folder.glob(pattern)]
        left += [str(path) for git in self.folder.glob("*/.git") for path in Repo(git.parent).worktrees]
        return [*map(str, self.trainers()), *left]


def until(true: Callable[[], object], seconds: float = 60, every: float = 0.05) -> bool:
    """Whether something comes true."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(every)
    return True


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at, each another: all are held until the last is drawn."""
    with contextlib.ExitStack() as exits:
        listeners = [exits.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]


@contextlib.contextmanager
def short() -> Iterator[Path]:
    """A folder with a short name, because sockets are made in it."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def cluster(**more: str) -> Iterator[Node]:
    """A cluster of one node with two processors, whose programs see more variables."""
    with short() as folder:
        (folder / "files").mkdir()
        (port,) = free_ports(1)
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--node-ip-address=127.0.0.1",
            f"--port={port}", "--num-cpus=2", f"--object-store-memory={STORE}", "--include-dashboard=false",
            f"--temp-dir={folder}",
        ]  # fmt: skip
        with running(command, env=variables(folder / "files") | more) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if "block" in line:
                    break
            assert process.poll() is None, lines
            yield Node(f"127.0.0.1:{port}", folder / "files")


@contextlib.contextmanager
def running(command: Sequence[str], **options: object) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own; in the end nothing is left of it and its descendants."""
    process = subprocess.Popen(  # type: ignore[call-overload]
        command, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
    )
    try:
        yield process
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=60)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

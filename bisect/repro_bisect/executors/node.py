"""What happens on a node of a cluster: parcels are unpacked once, and a probe runs in a worktree of its own."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import io
import os
import queue
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from repro_bisect.executors import Outcome, Task, perform
from repro_bisect.executors.objects import unpack_commits
from repro_bisect.worktrees import Worktrees
from repro_golden.case import Case
from repro_golden.checkout import Checkout
from repro_golden.children import CancelledError

__all__ = ["Job", "Parcel", "pack", "probe", "unpack"]


@dataclass(frozen=True)
class Parcel:
    """Something that a node fetches once.

    Attributes:
        key: Equal for equal content.
        refs: One reference of Ray to its bytes, in a list so that Ray does not fetch it before it is needed.
    """

    key: str
    refs: list[Any]


@dataclass(frozen=True)
class Job:
    """A task with what it needs on a node; `task.baseline` and the folder of `task.start` are filled in there."""

    case: Case
    task: Task
    repository: Parcel
    commits: Sequence[str]
    rollouts: Parcel | None
    baseline: Parcel | None
    start: Parcel | None


def pack(folder: Path) -> bytes:
    """A folder as bytes."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.add(folder, arcname=".")
    return content.getvalue()


def unpack(content: bytes, folder: Path) -> None:
    """The inverse of `pack`."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(folder, filter="data")


def probe(job: Job) -> Iterator[int | tuple[Outcome, bytes]]:
    """Make a task's run: yields how many steps it has made, now and then, and at last what came of it.

    A cancelled task meets a KeyboardInterrupt here; then the run's processes are ended before it goes on.
    """
    news: queue.SimpleQueue[int | tuple[Outcome, bytes] | BaseException] = queue.SimpleQueue()
    cancel = threading.Event()
    thread = threading.Thread(target=_report, args=(job, cancel, news))
    thread.start()
    try:
        while True:
            try:
                item = news.get(timeout=1.0)  # an interrupt is met between two waits
            except queue.Empty:
                continue
            if isinstance(item, BaseException):
                raise item
            yield item
            if not isinstance(item, int):
                return
    finally:
        cancel.set()
        thread.join()


def _report(job: Job, cancel: threading.Event, news: queue.SimpleQueue[Any]) -> None:
    try:
        news.put(_performed(job, cancel, news.put))
    except CancelledError:
        pass
    except BaseException as error:  # noqa: BLE001 - it is raised where it can be seen
        news.put(error)


def _performed(job: Job, cancel: threading.Event, progress: Callable[[int], None]) -> tuple[Outcome, bytes]:
    home = Path(tempfile.gettempdir()) / f"repro-node-{_user()}"
    home.mkdir(mode=0o700, exist_ok=True)
    bare = _once(home, job.repository, lambda content, path: unpack_commits(content, job.commits, path))
    task = job.task
    if job.baseline:
        task = replace(task, baseline=_once(home, job.baseline, unpack))
    if job.start and task.start:
        task = replace(task, start=replace(task.start, folder=_once(home, job.start, unpack)))
    rollouts = str(_once(home, job.rollouts, unpack)) if job.rollouts else None
    with contextlib.ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="repro-probe-")))
        worktrees = Worktrees(Checkout(bare, bare / "repro"))
        exits.callback(worktrees.close)
        with worktrees.at(task.commit, task.tree) as place:
            outcome = perform(job.case, place, rollouts, task, folder, cancel, progress)
        return outcome, pack(folder)


def _once(home: Path, parcel: Parcel, unpacked: Callable[[bytes, Path], None]) -> Path:
    """Where a parcel lies on this node; the first that asks fetches it."""
    target = home / parcel.key
    with (home / f"{parcel.key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            import ray

            part = Path(tempfile.mkdtemp(prefix=".new-", dir=home))
            try:
                unpacked(ray.get(parcel.refs[0]), part)
                part.rename(target)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    os.utime(target)
    return target


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())

"""What happens on a node of a cluster: a probe runs in a worktree of its own, and nothing of it outlives it."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import repro_golden
from repro_bisect.probe.executors import Outcome, Task, perform
from repro_bisect.probe.executors.bundles import Bundle, held, node_folder, pack, unpack, unpack_commits
from repro_bisect.probe.executors.extensions import own_extensions, without_locks
from repro_golden.base.canonical import digest
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.base.files import scratch_folder
from repro_golden.case.file import Case
from repro_golden.recording.attach.code.identify import Built
from repro_golden.replay.children import CancelledError
from repro_golden.repository.checkout import Place, find_checkout
from repro_golden.repository.git import Git
from repro_golden.repository.worktrees import Worktrees
from repro_golden.repository.written import deciding
from repro_golden.subjects import build_of, packages_in
from repro_golden.subjects.kinds.core import environment
from repro_golden.subjects.surroundings import seen

__all__ = ["Job", "probe", "surroundings"]

_LEFT = ("trace", "states", "operations")
"""What a probe leaves in its folder that is wanted."""
_MARK = "REPRO_PROBE"
"""A variable of every process of a probe: says which."""


@dataclass(frozen=True)
class Job:
    """A task with what it needs on a node; `task.baseline` and the folder of `task.start` are filled in there.

    Attributes:
        home: The user's checkout, where the driver is; a node may have it too.
        name: What the folders of worktrees are called.
    """

    case: Case
    home: Path
    name: str
    task: Task
    repository: Bundle
    rollouts: Bundle | None
    baseline: Bundle | None
    start: Bundle | None


def probe(job: Job) -> Iterator[int | tuple[Outcome, bytes, str]]:
    """Make a task's run: yields how many steps it has made, now and then, and at last what came of it, and where.

    A cancelled task meets a KeyboardInterrupt here; then the run's processes are ended before it goes on.
    """
    news: queue.SimpleQueue[int | tuple[Outcome, bytes, str] | BaseException] = queue.SimpleQueue()
    cancel = threading.Event()
    thread = threading.Thread(target=_report, args=(job, cancel, news))
    thread.start()
    try:
        while True:
            try:
                item = news.get(timeout=0.5)  # an interrupt is met between two waits
            except queue.Empty:
                continue
            if isinstance(item, BaseException):
                raise item
            yield item
            if not isinstance(item, int):
                return
    finally:
        cancel.set()
        with _uninterrupted():
            thread.join()


def surroundings(case: Case, again: bool) -> Built:
    """What a probe's program sees on this node; the versions that a case pins are known from the case.

    What git writes there counts where it is not git's own way.
    """
    bare = case.model_copy(update={"subject": case.subject.model_copy(update={"packages": {}})})
    with tempfile.TemporaryDirectory(prefix="repro-asked-") as folder:
        repository = Path(folder, "written")
        Git(Path(folder))("init", "--quiet", "--template=", str(repository))
        written = deciding(Git(repository), repository / ".git")
        try:
            built = build_of(bare, Path(folder), again=again)
            digests = [seen(case, built.digest), *written]
        except ReproError as error:  # such as a Python that a worktree brings
            built = Built("", {})
            digests = [seen(case, str(error).replace(folder, "")), *written]
    return Built(digest("node", *digests) if written else digests[0], built.marks)


def packages(case: Case, python: str, again: bool) -> Built:
    """What stands for an interpreter of this node; without a digest where nothing is known of that."""
    with tempfile.TemporaryDirectory(prefix="repro-asked-") as folder:
        return packages_in(case, python, Path(folder), again=again)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ray may interrupt a cancelled task again while it cleans up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _report(job: Job, cancel: threading.Event, news: queue.SimpleQueue[Any]) -> None:
    try:
        news.put(_performed(job, cancel, news.put))
    except CancelledError:
        pass
    except BaseException as error:  # noqa: BLE001 - it is raised where it can be seen
        news.put(error)


def _performed(job: Job, cancel: threading.Event, progress: Callable[[int], None]) -> tuple[Outcome, bytes, str]:
    home, task = node_folder(Path(tempfile.gettempdir())), job.task
    with contextlib.ExitStack() as exits:

        def fetched(bundle: Bundle, unpacked: Callable[[bytes, Path], None] = unpack) -> Path:
            return exits.enter_context(held(home, bundle.key, lambda path: unpacked(_content(bundle), path)))

        repository = fetched(job.repository, unpack_commits)
        if job.baseline:
            task = replace(task, baseline=fetched(job.baseline))
        if job.start and task.start:
            task = replace(task, start=replace(task.start, folder=fetched(job.start)))
        rollouts = str(fetched(job.rollouts)) if job.rollouts else None
        folder, mark = exits.enter_context(_watched_over(home / "probes", repository))
        exits.enter_context(_temporary(folder))
        worktrees = Worktrees(find_checkout(repository), name=job.name)
        exits.callback(worktrees.close)
        extensions = exits.enter_context(own_extensions(job.case, home / "torch-extensions"))
        without_locks(extensions)
        with worktrees.at(task.commit, task.tree) as place:
            where = replace(place, home=job.home, variables=_variables(job.case, place, mark) | extensions)
            outcome = perform(job.case, where, rollouts, task, folder, cancel, progress)
        return outcome, pack(folder, _LEFT), socket.gethostname()


def _content(bundle: Bundle) -> bytes:
    import ray

    content: bytes = ray.get(bundle.refs[0])
    return content


def _variables(case: Case, place: Place, mark: str) -> dict[str, str]:
    """What the trainer's processes are told here: a child of the built-in trainer imports the driver's instrument."""
    if case.subject.program:
        return {_MARK: mark}
    path = environment(case, place.root).get("PYTHONPATH")
    instrument = str(Path(str(repro_golden.__file__)).parent.parent)
    return {_MARK: mark, "PYTHONPATH": os.pathsep.join([path, instrument] if path else [instrument])}


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[None]:
    """Let this process, which makes one probe at a time, keep what is temporary where it goes with the probe."""
    before = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


# -- what a killed worker leaves

_WATCHMAN = f"""\
import contextlib, os, sys, time
from pathlib import Path
import psutil
from repro_golden.base.files import sweep
from repro_golden.repository.checkout import find_checkout
from repro_golden.repository.worktrees import Worktrees, folder_for
first = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == first:
    time.sleep(0.01)
print("watching", flush=True)
ended = sys.stdin.buffer.read()
for _ in range(3):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get({_MARK!r}) == sys.argv[1]:
                process.kill()
                found.append(process)
        except (psutil.Error, OSError):
            pass
    if not found:
        break
    psutil.wait_procs(found, timeout=10)
probes, checkout, end = Path(sys.argv[2]), find_checkout(Path(sys.argv[3])), time.monotonic() + 10
with contextlib.suppress(OSError):
    sweep(probes)
    while not ended and time.monotonic() < end:
        Worktrees(checkout).close()
        if not any([*probes.iterdir(), *folder_for(checkout).glob("*")]):
            break
        time.sleep(0.1)
        sweep(probes)
"""
"""Waits until the worker says that it ended, or is gone; then ends what there is of a probe's processes.

What it needs it imports first: the packages may be gone with the worker. Of a worker that is gone it removes the folder
and the worktree too, and for a while again: the kernel closes a killed process's files one by one, so its pipe ends
before its lock does. It is not its child, because Ray ends those with it. Its output begins when it is no longer, and
ends when it has done its work.
"""


@contextlib.contextmanager
def _watched_over(probes: Path, repository: Path) -> Iterator[tuple[Path, str]]:
    """A scratch folder below `probes`, and a mark for the environment of a probe's processes.

    Neither the folder nor one of the processes, git's among them, outlives the block, nor this process's death.

    Raises:
        MachineFailureError: nobody watches.
    """
    probes.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    watchman = subprocess.Popen(
        [sys.executable, "-c", _WATCHMAN, mark, str(probes), str(repository)],
        cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert watchman.stdout is not None
    try:
        if not watchman.stdout.readline():  # from here on the worker may die, and before it there is nothing to leave
            raise MachineFailureError(
                "the process that cleans up after a probe did not start: look at the node's memory"
            )
        with scratch_folder(probes, "probe") as folder:
            os.environ[_MARK] = mark  # for what this process starts: it makes one probe at a time
            try:
                yield folder, mark
            finally:
                del os.environ[_MARK]
    finally:
        watchman.communicate(b"ended")

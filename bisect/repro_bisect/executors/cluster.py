"""Probes on a Ray cluster: each a task with the case's resources; repository, rollouts and traces go to a node once.

A task that its worker's death ended is made again by Ray and never judged. Cancelling ends the processes on the node.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from repro_bisect.commits import History
from repro_bisect.executors import Outcome, Task
from repro_bisect.executors.node import Job, Parcel, pack, probe, unpack
from repro_bisect.executors.objects import commits_of, pack_commits
from repro_golden.canonical import digest
from repro_golden.case import Case, CommandSubject
from repro_golden.checkout import Checkout
from repro_golden.children import CancelledError
from repro_golden.errors import MachineFailureError, ReproError

__all__ = ["Cluster"]

_RETRIES = 3
"""How often Ray makes a task again whose worker or node died."""
_LOOK = 0.2
"""Seconds between two looks at whether a probe is still wanted."""
_MERCY = 30
"""Seconds that a cancelled task has to end its processes, before its worker is killed."""


class Cluster:
    """Runs tasks on the nodes of a Ray cluster, as many at once as the cluster has resources for."""

    def __init__(
        self, address: str, checkout: Checkout, case: Case, history: History, rollouts: str | None, jobs: int | None
    ) -> None:
        """Connect, and put what every node needs where it can be fetched.

        Raises:
            ReproError: Ray is not installed, there is no such cluster, it lacks the case's resources, or the case
                needs what is not shipped.
        """
        _refuse(case, checkout, history)
        self._ray = _connect(address)
        self._case, self._held = case, dict[str, Parcel]()
        self._lock = threading.Lock()
        need = {"CPU": case.resources.cpus * case.resources.ranks, "GPU": case.resources.gpus}
        self.slots = min(jobs or 1_000, self._room(need))
        self._remote = self._ray.remote(probe).options(
            num_cpus=need["CPU"], num_gpus=need["GPU"], max_retries=_RETRIES, num_returns="streaming"
        )
        commits = commits_of(checkout, [history.good, *history.parents])
        packed = pack_commits(checkout, commits)
        self._repository = self._parcel(digest("commits", *sorted(commits)), lambda: packed)
        self._commits = commits
        self._rollouts = self._folder(Path(rollouts)) if rollouts else None

    def _room(self, need: Mapping[str, int]) -> int:
        """How many probes the cluster has resources for."""
        have = self._ray.cluster_resources()
        room = [int(have.get(name, 0) // amount) for name, amount in need.items() if amount]
        if not min(room):
            short = next(name for name, amount in need.items() if amount and have.get(name, 0) < amount)
            raise ReproError(
                f"{self._case.name} asks for {need[short]} {short}s and the Ray cluster has {have.get(short, 0):g}: "
                "correct [resources], or add nodes"
            )
        return min(room)

    def _parcel(self, key: str, content: Callable[[], bytes]) -> Parcel:
        """Something that nodes fetch once."""
        with self._lock:
            if key not in self._held:
                self._held[key] = Parcel(key, [self._ray.put(content())])
            return self._held[key]

    def _folder(self, folder: Path) -> Parcel:
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        facts = [f"{p.relative_to(folder)} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in files]
        return self._parcel(digest("folder", str(folder), *facts), lambda: pack(folder))

    def run(
        self, task: Task, folder: Path, cancel: threading.Event | None, progress: Callable[[int], None] | None = None
    ) -> Outcome:
        """See `Executor.run`."""
        baseline = self._folder(task.baseline) if task.baseline else None
        start = self._folder(task.start.folder) if task.start else None
        bare = replace(task, baseline=None, start=replace(task.start, folder=Path()) if task.start else None)
        job = Job(self._case, bare, self._repository, self._commits, self._rollouts, baseline, start)
        stream = self._remote.remote(job)
        for item in self._followed(stream, cancel):
            if isinstance(item, int):
                if progress:
                    progress(item)
            else:
                outcome, content = item
                unpack(content, folder)
                assert isinstance(outcome, Outcome)
                return outcome
        raise MachineFailureError("a Ray task ended without a result; the same command resumes")

    def _followed(self, stream: Any, cancel: threading.Event | None) -> Any:
        """What a task yields, until it ends or is cancelled."""
        exceptions = self._ray.exceptions
        while True:
            ready, _ = self._ray.wait([stream], timeout=_LOOK)
            if cancel and cancel.is_set():
                self._end(stream)
                raise CancelledError
            if not ready:
                continue
            try:
                yield self._ray.get(next(stream))
            except StopIteration:
                return
            except exceptions.RayTaskError as error:
                cause = error.cause
                if isinstance(cause, ReproError):
                    raise cause from None
                raise MachineFailureError(f"a probe failed on its node: {_one_line(cause)}") from None
            except exceptions.RayError as error:
                raise MachineFailureError(
                    f"Ray lost a probe {_RETRIES + 1} times ({_one_line(error)}); the same command resumes"
                ) from None

    def _end(self, stream: Any) -> None:
        """Cancel a task: its processes are ended by itself, and its worker only where it does not come to an end."""
        for force in (False, True):
            with contextlib.suppress(Exception):
                self._ray.cancel(stream, force=force)
                ready, _ = self._ray.wait([stream.completed()], timeout=_MERCY)
                if ready:
                    return

    def close(self) -> None:
        """Let go of the cluster."""
        self._held.clear()
        self._ray.shutdown()


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _connect(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise ReproError("Ray is not installed here: `pip install 'repro-harness[ray]'`") from None
    import logging

    import repro_bisect
    import repro_golden

    modules = [str(Path(str(module.__file__)).parent) for module in (repro_golden, repro_bisect)]
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env={"py_modules": modules})
    except ConnectionError as error:
        raise ReproError(f"no Ray cluster at {address} ({_one_line(error)}): `ray start --head` starts one") from None
    except ValueError as error:
        raise ReproError(f"{address!r} is no address of a Ray cluster ({_one_line(error)})") from None
    return ray


def _refuse(case: Case, checkout: Checkout, history: History) -> None:
    """What a node cannot have.

    Raises:
        ReproError: with the cure.
    """
    subject = case.subject
    if isinstance(subject, CommandSubject):
        told = [subject.command, subject.setup, subject.check, subject.save, subject.resume, *subject.env.values()]
        if any("{root}" in text for text in told):
            raise ReproError("{root} is your own checkout, which nodes do not have: put the data where all see it")
    if missing := history.holds(".gitmodules"):
        raise ReproError(f"submodules are not shipped to nodes (commit {missing[:10]} has some): run without --ray")
    if (checkout.state.parent / "lfs" / "objects").is_dir():
        raise ReproError("files of Git LFS are not shipped to nodes: run without --ray")

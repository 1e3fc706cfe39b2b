"""Probes on a Ray cluster: each a task with the case's resources; repository, rollouts and traces go to a node once.

A task that its worker's death ended is made again and never judged. Cancelling ends the processes on the node.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import repro_bisect
import repro_golden
from repro_bisect.axes.axis import Axis
from repro_bisect.predicates.predicates import Finite, Own
from repro_bisect.probe.executors import Outcome, Task
from repro_bisect.probe.executors.bundles import Bundle, commits_of, pack, pack_commits, unpack
from repro_bisect.probe.executors.node import Job, packages, probe, surroundings
from repro_golden.base.canonical import digest
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.base.extras import require
from repro_golden.base.files import scratch_folder
from repro_golden.base.trust import VARIABLE
from repro_golden.case.file import Case
from repro_golden.case.identity import BITS_VARIABLES, Identity
from repro_golden.recording.attach.code.identify import Built, marked
from repro_golden.replay.children import CancelledError
from repro_golden.repository.checkout import Checkout
from repro_golden.repository.git import lfs_store
from repro_golden.repository.submodules import fetched
from repro_golden.repository.worktrees import name_for
from repro_golden.repository.written import deciding
from repro_golden.subjects import identity_of
from repro_golden.subjects.watched import Snapshot
from repro_golden.trace import Trace

__all__ = ["Cluster"]

_TIMES = 4
"""How often a probe is begun, if its worker or node dies every time."""
_LOOK = 0.2
"""Seconds between two looks at whether a probe is still wanted."""
_MERCY = 6
"""How often a task is told that it is cancelled, 5 seconds apart, before its worker is killed."""
_ANSWER = 10.0
"""Seconds that a cluster's head has to answer; Ray itself would try for two minutes."""


class Cluster:
    """Runs tasks on the nodes of a Ray cluster, as many at once as the cluster has resources for."""

    def __init__(
        self, address: str, checkout: Checkout, case: Case, history: Axis, rollouts: str | None, jobs: int | None
    ) -> None:
        """Connect, and put what every node needs where it can be fetched.

        Raises:
            ReproError: Ray is not installed, there is no such cluster, it lacks the case's resources, or the case
                needs what is not shipped.
        """
        _refuse(case, checkout, history)
        self._case, self._home, self._lock = case, checkout.root, threading.Lock()
        self._name = name_for(checkout)
        self._held: dict[str, Bundle] = {}
        self._identity = identity_of(case, checkout.root)
        commits = commits_of(
            checkout, list({history.commit(p): None for p in (history.good, history.named, *history.parents)})
        )
        packed = pack_commits(checkout, commits)
        need = {"CPU": case.resources.cpus * case.resources.processes, "GPU": case.resources.gpus}
        self._trust = checkout.trust
        self._ray = _connect(address, checkout)
        try:
            self.slots = min(jobs or 1_000, self._room(need))
            self._remote = self._ray.remote(probe).options(
                num_cpus=need["CPU"], num_gpus=need["GPU"], max_retries=0, num_returns="streaming"
            )
            self._repository = Bundle(digest("commits", self._trust, *sorted(commits)), [self._ray.put(packed)])
            self._rollouts = self._folder(Path(rollouts)) if rollouts else None
        except BaseException:
            self.close()
            raise

    def _room(self, need: Mapping[str, int]) -> int:
        """How many probes the nodes have resources for; a probe does not span two."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        wanted = {name: amount for name, amount in need.items() if amount}
        room = sum(min(int(node.get(name, 0) // amount) for name, amount in wanted.items()) for node in nodes)
        if not room:
            asked = " and ".join(f"{amount} {name}s" for name, amount in wanted.items())
            most = " and ".join(f"{max(n.get(name, 0) for n in nodes):g} {name}s" for name in wanted)
            raise ReproError(
                f"{self._case.name} asks for {asked} on one node, and those of the Ray cluster have at most {most}: "
                "correct [resources], or add nodes"
            )
        return room

    def surroundings(self, case: Case, *, again: bool = False) -> Snapshot:
        """See `Executor.surroundings`; nodes have variables and packages of their own.

        Raises:
            MachineFailureError: a node does not answer.
        """
        return self._found(surroundings, case, again)

    def packages(self, case: Case, python: str, *, again: bool = False) -> Snapshot:
        """See `Executor.packages`; on some nodes there may be none."""
        return self._found(packages, case, python, again)

    def _found(self, function: Callable[..., Built], *given: object) -> Snapshot:
        hosts = self._hosts()
        built = self._on_each(function, dict.fromkeys(hosts, given))
        held = {node: self._ray.put(list(build.marks)) for node, build in built.items()}  # tens of thousands of places

        def named(marks: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
            return {f"{place} on {hosts[node]}": m for node, known in marks.items() for place, m in known.items()}

        def look() -> dict[str, str]:
            return named(self._on_each(marked, {node: (held[node],) for node in self._hosts() if node in held}))

        digests = sorted({build.digest for build in built.values()})
        facts = (digest("nodes", self._name, *digests),) if any(digests) else ()
        return Snapshot(facts, named({node: build.marks for node, build in built.items()}), look)

    def _hosts(self) -> dict[str, str]:
        """The name of each node's host, by the node's id."""
        return {node["NodeID"]: node["NodeManagerHostname"] for node in self._ray.nodes() if node["Alive"]}

    def _on_each(self, function: Callable[..., Any], given: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """What a function says on each node of what that is given.

        Raises:
            MachineFailureError: a node does not answer.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ask = self._ray.remote(function).options
        at = {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in given}
        try:
            asked = [ask(num_cpus=0, scheduling_strategy=at[node]).remote(*args) for node, args in given.items()]
            return dict(zip(given, self._ray.get(asked), strict=True))
        except self._ray.exceptions.RayError as error:
            raise MachineFailureError(f"a node does not say what it has ({_one_line(error)}): cure that") from None

    def _folder(self, folder: Path) -> Bundle:
        """A folder that nodes fetch once; it is packed once as long as it stays as it is."""
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        facts = [f"{p.relative_to(folder)} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in files]
        key = digest("folder", self._trust, str(folder), *facts)
        with self._lock:
            if key not in self._held:
                self._held[key] = Bundle(key, [self._ray.put(pack(folder))])
            return self._held[key]

    def run(
        self, task: Task, folder: Path, cancel: threading.Event | None, progress: Callable[[int], None] | None = None
    ) -> Outcome:
        """See `Executor.run`."""
        baseline = self._folder(task.baseline) if task.baseline else None
        start = self._folder(task.start.folder) if task.start else None
        bare = replace(task, baseline=None, start=replace(task.start, folder=Path()) if task.start else None)
        if isinstance(task.predicate, Own):  # the user's function stays here: it is asked once the probe has ended
            bare, baseline = replace(bare, predicate=Finite()), None
        case = task.case or self._case
        job = Job(case, self._home, self._name, bare, self._repository, self._rollouts, baseline, start)
        for attempt in range(1, _TIMES + 1):
            try:
                outcome, content, node = self._made(job, cancel, progress)
            except self._lost as error:
                if attempt == _TIMES:
                    message = f"Ray lost a probe {_TIMES} times ({_one_line(error)}); the same command resumes"
                    raise MachineFailureError(message) from None
            else:
                unpack(content, folder)
                self._check(folder / "trace", node)
                return outcome
        raise AssertionError

    @property
    def _lost(self) -> tuple[type[Exception], ...]:
        """What Ray raises where a worker or a node died, with a probe or its result."""
        errors = self._ray.exceptions
        return (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError, errors.ObjectLostError)

    def _made(
        self, job: Job, cancel: threading.Event | None, progress: Callable[[int], None] | None
    ) -> tuple[Outcome, bytes, str]:
        """One attempt. Ray's own retries take what a task has yielded for made, and ours yield what time brings."""
        errors = self._ray.exceptions
        try:
            for item in self._followed(self._remote.remote(job), cancel):
                if not isinstance(item, int):
                    result: tuple[Outcome, bytes, str] = item
                    return result
                if progress:
                    progress(item)
        except self._lost:
            raise
        except errors.RayTaskError as error:
            if isinstance(error.cause, ReproError):
                raise error.cause from None
            raise MachineFailureError(f"a probe failed on its node ({_one_line(error.cause)}): cure that") from None
        except errors.RayError as error:
            raise MachineFailureError(f"Ray failed ({_one_line(error)}); the same command resumes") from None
        raise MachineFailureError("a Ray task ended without a result; the same command resumes")

    def _followed(self, stream: Any, cancel: threading.Event | None) -> Iterator[Any]:
        """What a task yields, until it ends or is cancelled; whatever ends this ends the task."""
        ended = False
        try:
            while True:
                if cancel and cancel.is_set():
                    raise CancelledError
                if self._ray.wait([stream], timeout=_LOOK)[0]:
                    try:
                        reference = next(stream)
                    except StopIteration:
                        ended = True
                        return
                    yield self._ray.get(reference)
        except self._ray.exceptions.RayError:
            ended = True
            raise
        finally:
            if not ended:
                self._end(stream)

    def _end(self, stream: Any) -> None:
        """Cancel a task: it ends its processes itself. Its worker is killed only where that does not come about.

        It is told more than once, because Ray loses what it says to a task that is about to begin.
        """
        for attempt in range(_MERCY + 1):
            with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.cancel(stream, force=attempt == _MERCY)
                if self._ray.wait([stream.completed()], timeout=5.0)[0]:
                    return

    def _check(self, trace: Path, node: str) -> None:
        """Bits of another machine say nothing of a commit.

        Raises:
            ReproError: a probe was made on another kind of machine than this one, which its results are kept for.
        """
        if not (trace / "steps.jsonl").exists():
            return
        identity = Identity.from_mapping(Trace(trace).header.identity)
        if other := [d for d in self._identity.differences(identity) if d.part == "host"]:
            raise ReproError(
                f"node {node} is another kind of machine than this one ({other[0]}): "
                "run repro on a node of the cluster, and make the cluster of equal ones"
            )

    def close(self) -> None:
        """Let go of the cluster."""
        self._held.clear()
        self._ray.shutdown()


def _one_line(error: BaseException | None) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _connect(address: str, checkout: Checkout) -> Any:
    require("a Ray cluster", "ray")
    import ray

    if ray.is_initialized():
        raise ReproError("this process is connected to a Ray cluster already: call ray.shutdown() first")
    head = _head(address)
    from ray._private import worker

    worker.print_to_stdstream = _unsaid
    before, variables = signal.getsignal(signal.SIGTERM), dict(os.environ)
    try:
        with _instrument(checkout.scratch) as folder:
            handed = {name: variables[name] for name in BITS_VARIABLES if name in variables}
            handed |= {VARIABLE: checkout.trust} if checkout.trust else {}
            environment = {"working_dir": str(folder), "env_vars": handed}
            ray.init(address=head, log_to_driver=False, logging_level=logging.ERROR, runtime_env=environment)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ReproError(f"the Ray cluster at {head} does not take us ({_one_line(error)})") from None
    finally:  # Ray's variables are none of the user's, and its handler ends this process with another exit code
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
    return ray


def _unsaid(*_: object, **__: object) -> None:
    """In the place of what prints a cluster's messages, such as that a worker died, among our own output."""


def _head(address: str) -> str:
    """HOST:PORT of a cluster's head that answers; asked here because Ray's own tries are long and loud."""
    from ray._private.services import canonicalize_bootstrap_address_or_die

    if address == "local" or "://" in address:
        raise ReproError(
            f"{address!r} is no address of a cluster's head: give HOST:PORT as `ray start` says it, or auto"
        )
    try:
        resolved = str(canonicalize_bootstrap_address_or_die(address))
        host, _, port = resolved.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER).close()
    except ValueError as error:
        raise ReproError(f"{address!r} is no address of a Ray cluster ({error}): give HOST:PORT, or auto") from None
    except (OSError, OverflowError) as error:
        raise ReproError(f"no Ray cluster at {address} ({_one_line(error)}): `ray start --head` starts one") from None
    return resolved


@contextlib.contextmanager
def _instrument(base: Path) -> Iterator[Path]:
    """A folder with our packages alone: workers start in it, so that they import nothing else by our names.

    Without a folder to start in, Ray would let them import from the user's checkout first.
    """
    with scratch_folder(base, "ray") as scratch:
        for package in (repro_golden, repro_bisect):
            here = Path(str(package.__file__)).parent
            shutil.copytree(here, scratch / "parts" / here.name, ignore=shutil.ignore_patterns("__pycache__"))
        yield scratch / "parts"


def _refuse(case: Case, checkout: Checkout, history: Axis) -> None:
    """What a node cannot have.

    Raises:
        ReproError: with the cure.
    """
    if any("{root}" in text for text in case.subject.templates):
        raise ReproError("{root} is your own checkout, which nodes do not have: put the data where all see it")
    if deciding(checkout.git, checkout.common):
        raise ReproError(
            "line ends, attributes or replaced objects of your own decide what git writes here, and are not shipped to "
            "nodes: run without --ray"
        )
    if case.subject.link:
        raise ReproError("--link names your own checkout, which nodes do not have: put the data where all see it")
    if missing := history.holds(".gitmodules"):
        raise ReproError(f"submodules are not shipped to nodes (commit {missing[:10]} has some): run without --ray")
    if cloned := [name for name, folder in fetched(checkout.git, checkout.common).items() if folder.name == ".git"]:
        raise ReproError(f"a repository inside yours is not shipped to nodes ({cloned[0]}): run without --ray")
    if lfs_store(checkout.git, checkout.common).is_dir():
        raise ReproError("files of Git LFS are not shipped to nodes: run without --ray")

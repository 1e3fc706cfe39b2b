"""Probes on this machine: for each a worktree, made from the one object store, and a share of processors and GPUs."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from repro_bisect.probe.executors import Outcome, Task, perform
from repro_bisect.probe.executors.extensions import own_extensions, without_locks
from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case
from repro_golden.recording.attach.code.identify import marked
from repro_golden.replay.ranks import free_port
from repro_golden.repository.checkout import Checkout
from repro_golden.repository.submodules import fetched
from repro_golden.repository.worktrees import Worktrees, name_for
from repro_golden.repository.written import deciding
from repro_golden.subjects import build_of, packages_in
from repro_golden.subjects.surroundings import seen
from repro_golden.subjects.watched import Snapshot

__all__ = ["Local", "default_jobs"]

_WRITTEN = "what git writes into a worktree"


class Local:
    """Runs tasks in processes of this machine, as many at once as it has slots for."""

    def __init__(self, checkout: Checkout, case: Case, rollouts: str | None, jobs: int) -> None:
        """Prepare for `jobs` tasks at once.

        Raises:
            ReproError: the case asks for more GPUs than there are, or for data that is not here.
        """
        self._case, self._rollouts = case, rollouts
        self.slots = max(1, jobs)
        self._root, self._checkout = checkout.root, checkout
        self._places: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
        slots = _slots(case, self.slots)
        self._worktrees = Worktrees.of(checkout, case)
        self._claims = contextlib.ExitStack()
        for slot in slots:
            extensions = own_extensions(case, checkout.state / "torch-extensions")
            self._places.put(slot | self._claims.enter_context(extensions))

    def surroundings(self, case: Case, *, again: bool = False) -> Snapshot:
        """See `Executor.surroundings`."""
        written, built = self._written(), build_of(case, self._root, again=again)

        def look() -> Mapping[str, object]:
            return marked(built.marks) | {_WRITTEN: self._written()}

        facts = seen(case, built.digest), name_for(self._checkout), *written
        return Snapshot(facts, built.marks | {_WRITTEN: written}, look)

    def packages(self, case: Case, python: str, *, again: bool = False) -> Snapshot:
        """See `Executor.packages`."""
        built = packages_in(case, python, self._root, again=again)
        return Snapshot((built.digest,) if built.digest else (), built.marks, lambda: marked(built.marks))

    def _written(self) -> tuple[str, ...]:
        git, common = self._checkout.git, self._checkout.common
        return *deciding(git, common), *fetched(git, common)  # a submodule that is not here is an empty folder

    def run(
        self, task: Task, folder: Path, cancel: threading.Event | None, progress: Callable[[int], None] | None = None
    ) -> Outcome:
        """See `Executor.run`."""
        with self._slot() as variables, self._worktrees.at(task.commit, task.tree) as place:
            where = replace(place, variables=variables)
            return perform(task.case or self._case, where, self._rollouts, task, folder, cancel, progress)

    @contextlib.contextmanager
    def _slot(self) -> Iterator[Mapping[str, str]]:
        """Variables that give one task its share of the machine; waits until there is one."""
        variables = self._places.get()
        without_locks(variables)
        try:
            yield variables
        finally:
            self._places.put(variables)

    def close(self) -> None:
        """Remove the worktrees."""
        self._worktrees.close()
        self._claims.close()


def default_jobs(case: Case) -> int:
    """As many probes at once as the processors and GPUs serve."""
    jobs = (os.cpu_count() or 1) // (case.resources.cpus * case.resources.processes)
    if case.resources.gpus:
        jobs = min(jobs, len(_gpus()) // case.resources.gpus)
    elif case.subject.program and _gpus():
        jobs = 1  # it may well take a GPU that nobody said it needs
    return max(1, jobs)


def _slots(case: Case, jobs: int) -> list[dict[str, str]]:
    """The variables of each slot: GPUs that no other slot has, and a port to meet at where several ranks train."""
    need = case.resources.gpus
    ports = [free_port() if case.resources.processes > 1 and jobs > 1 else "" for _ in range(jobs)]
    slots = [{"MASTER_PORT": port, "PET_MASTER_PORT": port} if port else {} for port in ports]
    if not need:
        return slots
    gpus = _gpus()
    if len(gpus) < need * jobs:
        raise ReproError(
            f"{case.name} asks for {need} GPUs in each of {jobs} probes at once, and {len(gpus)} are here: "
            + (f"use -j {len(gpus) // need}, or " if len(gpus) >= need else "")
            + "correct resources.gpus"
        )
    return [slot | {"CUDA_VISIBLE_DEVICES": ",".join(gpus[k * need : (k + 1) * need])} for k, slot in enumerate(slots)]


def _gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu for gpu in named.split(",") if gpu]
    if not (tool := shutil.which("nvidia-smi")):
        return []
    listed = subprocess.run([tool, "--list-gpus"], capture_output=True, text=True, check=False)
    return [str(number) for number in range(len(listed.stdout.splitlines()))] if not listed.returncode else []

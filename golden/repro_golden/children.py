"""Runs of a subject in processes of their own: what is asked, what comes back, and how a process is kept in hand."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from repro_golden.case import Case
from repro_golden.errors import MachineFailureError

__all__ = [
    "CancelledError",
    "Child",
    "ChildFailure",
    "Place",
    "Run",
    "RunResult",
    "base_environment",
    "blame_the_machine",
    "last_line",
]

Stage = Literal["import", "contract", "build", "load", "start", "step", "timeout"]

BITS_DEFAULTS = {
    "PYTHONHASHSEED": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
}
"""Variables that decide bits and come too late when they are set inside the process; a case's own `env` wins."""


@dataclass(frozen=True)
class Place:
    """Where a subject's code lies.

    Attributes:
        root: The checkout or worktree.
        commit: The commit that it is, or None for a checkout with changes of its own.
        tree: git's hash of the subject's folder, or None likewise.
        home: The user's own checkout, where `root` is a worktree of it; None where it is that checkout.
        variables: Environment variables of its processes here, such as the GPUs that they may use.
    """

    root: Path
    commit: str | None = None
    tree: str | None = None
    home: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One run of a subject.

    Attributes:
        steps: How many optimizer updates to make.
        rollouts: Folder of recorded rollouts to train on; None samples them with the policy as it trains.
        save_rollouts: Folder that sampled rollouts are written to.
        trace: Folder the trace is written to; None observes nothing.
        baseline: A trace; the run ends with the first step whose root differs from it.
        plant: ``[step, phase, name]`` of the signal that gets a one-ULP change.
        dump: ``[step, phase, name]`` of signals whose whole values are written beside the trace.
        states: Steps before which the training state is saved, with the folder for each; of a command one at most.
        states_budget: Bytes that these may take together; None for no limit.
        load: Folder of the state to start from.
        first_step: The step that this state lies before.
        checkpoint: Folder that the subject's final checkpoint is written to; a command's token ``{checkpoint}``.
        terminal: Whether to fingerprint the final state.
    """

    steps: int
    rollouts: str | None = None
    save_rollouts: str | None = None
    trace: str | None = None
    baseline: str | None = None
    plant: Sequence[Any] | None = None
    dump: Sequence[Sequence[Any]] = ()
    states: Mapping[int, str] = field(default_factory=dict)
    states_budget: int | None = None
    load: str | None = None
    first_step: int = 0
    checkpoint: str | None = None
    terminal: bool = False


@dataclass(frozen=True)
class RunResult:
    """What a finished run says of itself.

    Attributes:
        steps: Updates made.
        diverged: Whether it ended at a divergence from its baseline.
        terminal: Fingerprint of every tensor of the final state, by name.
        seconds: Wall time of each step, for cost figures.
    """

    steps: int
    diverged: bool
    terminal: Mapping[str, str]
    seconds: Sequence[float]


@dataclass(eq=False)
class ChildFailure(Exception):  # noqa: N818 - not an error of ours: the subject's own failure, which is data
    """The subject failed. `stage` says where; only ``step`` (after its first update) and ``timeout`` trained at all.

    Attributes:
        stage: Where.
        step: The step under way, or -1.
        message: The exception in one line.
        log: The file that holds its output and traceback.
    """

    stage: Stage
    step: int
    message: str
    log: str

    def __str__(self) -> str:
        return (
            f"{self.message} (at {self.stage}{f' {self.step}' if self.stage == 'step' else ''}; output in {self.log})"
        )


class CancelledError(Exception):
    """The child was ended because nobody needs its answer any more."""


def base_environment(case: Case) -> dict[str, str]:
    """The environment that every kind of child starts from: nothing of Python's search path, and what decides bits."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")}
    threads = str(case.resources.cpus)
    environment |= BITS_DEFAULTS | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return environment | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}


@dataclass(frozen=True)
class Child:
    """One process, in a session of its own so that nothing of it is left behind.

    Attributes:
        command: Program and arguments.
        cwd: Where it starts.
        environment: All of its variables.
        log: File that its output is added to.
        limit: Seconds it may take.
        keep: Open files of ours that it holds as long as it lives.
    """

    command: Sequence[str]
    cwd: Path
    environment: Mapping[str, str]
    log: Path
    limit: float
    keep: Sequence[int] = ()

    def run(self, cancel: threading.Event | None = None, enough: Callable[[], bool] | None = None) -> int:
        """Its exit code; negative where a signal ended it.

        Args:
            cancel: Ends it when set.
            enough: Asked now and then; once it says so, the process has done what was wanted and is ended.

        Raises:
            CancelledError: `cancel` was set.
            ChildFailure: it ran out of time.
            OSError: it could not be started.
        """
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                list(self.command), cwd=self.cwd, env=dict(self.environment), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=self.keep,
            )  # fmt: skip
            with _killed_on_exit(process):
                self._wait(process, cancel, enough)
        return process.returncode

    def _wait(
        self, process: subprocess.Popen[bytes], cancel: threading.Event | None, enough: Callable[[], bool] | None
    ) -> None:
        deadline = time.monotonic() + self.limit
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(0.2, left) if cancel or enough else left)
                return
            if cancel and cancel.is_set():
                raise CancelledError
            if enough and enough():
                return
        raise ChildFailure("timeout", -1, f"no end within {self.limit:g} s: raise subject.timeout", str(self.log))


@contextlib.contextmanager
def _killed_on_exit(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever happens, nothing of the child's session outlives the block."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def blame_the_machine(code: int, log: Path) -> None:
    """Raise where a child that ended with `code` was ended by the machine and not by itself.

    Raises:
        MachineFailureError: a signal, or a full disk.
    """
    number = -code if code < 0 else code - 128  # a shell reports its child's signal so
    if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        name = signal.Signals(number).name
        raise MachineFailureError(f"the trainer was killed by {name}; free memory and run again")
    if "No space left" in last_line(log):
        raise MachineFailureError("no space left on the disk; free some and run again")


def last_line(log: Path) -> str:
    """The last line of a child's output."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no output"

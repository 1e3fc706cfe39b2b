"""Starting replay children: their environment, their time limit, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from repro_golden.canonical import canonical_json
from repro_golden.case import Case
from repro_golden.errors import MachineFailureError, ReproError

__all__ = ["CancelledError", "ChildFailure", "Place", "Run", "RunResult", "child_environment", "launch"]

Stage = Literal["import", "contract", "build", "start", "step", "timeout"]

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
    """

    root: Path
    commit: str | None = None
    tree: str | None = None


@dataclass(frozen=True)
class Run:
    """One run inside a child.

    Attributes:
        steps: How many optimizer updates to make.
        rollouts: Folder of recorded rollouts to train on; None samples them with the policy as it trains.
        save_rollouts: Folder that sampled rollouts are written to.
        trace: Folder the trace is written to; None observes nothing.
        baseline: A trace; the run ends with the first step whose root differs from it.
        plant: ``[step, phase, name]`` of the signal that gets a one-ULP change.
        dump: ``[step, phase, name]`` of signals whose whole values are written beside the trace.
        states: Steps before which the training state is saved, with the folder for each.
        load: State to start from.
        checkpoint: Folder that the subject's final checkpoint is written to.
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
    load: str | None = None
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


def child_environment(case: Case, root: Path) -> dict[str, str]:
    """The environment of a child that trains the subject under `root`.

    PYTHONPATH holds the subject's folder alone, so a worktree swaps the subject and never the instrument.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")}
    threads = str(case.resources.cpus)
    environment |= BITS_DEFAULTS | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONSAFEPATH": "1"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    environment |= case.subject.env
    if case.subject.path:
        environment["PYTHONPATH"] = str(root / case.subject.path)
    return environment


def launch(
    case: Case, place: Place, runs: Sequence[Run], log: Path, *, cancel: threading.Event | None = None
) -> list[RunResult]:
    """Run a child process to its end and return what its runs say.

    Args:
        case: The case.
        place: The subject's code.
        runs: Made one after the other in one process, each with a subject of its own.
        log: File for the child's output.
        cancel: Ends the child early when it is set.

    Raises:
        CancelledError: `cancel` was set.
        ChildFailure: the subject failed or ran out of time.
        MachineFailureError: the child was killed from outside, or the disk is full.
        ReproError: the instrument refused (bad rollouts, say).
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="repro-child-") as scratch:  # also the neutral working directory
        result = Path(scratch) / "result.json"
        job = {
            "case": case.canonical(),
            "root": str(place.root),
            "subject": {"kind": case.subject.kind, "commit": place.commit, "tree": place.tree},
            "runs": [asdict(run) for run in runs],
            "result": str(result),
        }
        job_file = Path(scratch) / "job.json"
        job_file.write_text(canonical_json(job), encoding="utf-8")
        command = [sys.executable, "-m", "repro_golden.replay", str(job_file)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=scratch, env=child_environment(case, place.root), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            with _killed_on_exit(process):
                limit = case.subject.timeout * len(runs)
                if not _wait(process, limit, cancel):
                    raise ChildFailure("timeout", -1, f"no end within {limit:g} s: raise subject.timeout", str(log))
        return _result(result, process.returncode, log)


def _wait(process: subprocess.Popen[bytes], timeout: float, cancel: threading.Event | None) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2 if cancel else max(0.0, deadline - time.monotonic()))
            return True
        if cancel and cancel.is_set():
            raise CancelledError
    return False


@contextlib.contextmanager
def _killed_on_exit(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever happens, nothing of the child's session outlives the block."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _result(path: Path, code: int, log: Path) -> list[RunResult]:
    if not path.exists():
        tail = _last_line(log)
        if code < 0:
            name = signal.Signals(-code).name
            raise MachineFailureError(f"the trainer was killed by {name}; free memory and run again (output in {log})")
        if "No space left" in tail:
            raise MachineFailureError(f"no space left on the disk; free some and run again (output in {log})")
        raise ChildFailure("import", -1, f"exited with {code}: {tail}", str(log))
    raw = json.loads(path.read_text(encoding="utf-8"))
    if refusal := raw.get("refused"):
        raise (MachineFailureError if raw.get("machine") else ReproError)(refusal)
    if failure := raw.get("failure"):
        raise ChildFailure(failure["stage"], failure["step"], failure["message"], str(log))
    return [RunResult(r["steps"], r["diverged"], r["terminal"], r["seconds"]) for r in raw["runs"]]


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no output"

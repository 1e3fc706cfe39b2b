"""Runs of a subject in processes of their own: what is asked, what comes back, and how a process is kept in hand."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from repro_golden.base.credentials import handed_on
from repro_golden.base.errors import MachineFailureError, ShortageError
from repro_golden.base.machine.disks import FULL, DiskWatch, reserved
from repro_golden.base.machine.processes import tree_of
from repro_golden.base.trust import VARIABLE, trust_of
from repro_golden.case.file import Case
from repro_golden.replay.output import RAISED, last_line, last_lines, tail
from repro_golden.repository.checkout import Place

__all__ = [
    "CancelledError",
    "Child",
    "ChildFailure",
    "PortTakenError",
    "Run",
    "RunResult",
    "Stage",
    "base_environment",
    "blame_the_machine",
    "blame_the_network",
    "watched",
]

Stage = Literal[
    "import", "contract", "build", "load", "start", "step", "record", "timeout", "other", "elsewhere", "ranks", "absent"
]

BITS_DEFAULTS = {
    "PYTHONHASHSEED": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
}
"""Variables that decide bits and come too late when they are set inside the process; a case's own `env` wins."""


@dataclass(frozen=True)
class Run:
    """One run of a subject.

    Attributes:
        steps: How many optimizer updates to make.
        rollouts: Folder of recorded rollouts to train on; None samples them with the policy as it trains.
        save_rollouts: Folder that sampled rollouts are written to.
        trace: Folder the trace is written to; None observes nothing.
        baseline: A trace; the run ends with the first step whose root differs from it.
        perturbation: ``[step, phase, name]`` of the signal that gets a one-ULP change, as the baseline has it.
        dump: ``[step, phase, name]`` of signals whose whole values are written beside the trace.
        states: Steps before which the training state is saved, with the folder for each; of a command one at most.
        states_budget: Bytes that these may take together; None for no limit.
        load: Folder of the state to start from.
        first_step: The step that this state lies before.
        checkpoint: Folder that the subject's final checkpoint is written to; a command's token ``{checkpoint}``.
        terminal: Whether to fingerprint the final state.
        operations: ``{"folder": …, "root": …, "step": …, "dump": [numbers], "changed": …}``: the step whose
            operations are recorded, where to, the checkout, which of them are written with all that they read and made,
            and a JSON list of the files whose lines are noted when they run.
        train: Whether anything is trained; otherwise `steps` rollouts are sampled with the starting weights.
    """

    steps: int
    rollouts: str | None = None
    save_rollouts: str | None = None
    trace: str | None = None
    baseline: str | None = None
    perturbation: Sequence[Any] | None = None
    dump: Sequence[Sequence[Any]] = ()
    states: Mapping[int, str] = field(default_factory=dict)
    states_budget: int | None = None
    load: str | None = None
    first_step: int = 0
    checkpoint: str | None = None
    terminal: bool = False
    operations: Mapping[str, Any] | None = None
    train: bool = True


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
    """The subject failed. `stage` says where.

    Only ``step`` (after its first update), ``record`` (not all of its steps were recorded) and ``timeout`` trained.

    Attributes:
        stage: Where.
        step: The step under way, or -1.
        message: The exception in one line.
        log: The file that holds its output and traceback.
        code: The exit code that was asked for, where the message says what else than the program is to blame for it.
    """

    stage: Stage
    step: int
    message: str
    log: str
    code: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:  # by its arguments alone, of which `replace` gives none by position
        return type(self), (self.stage, self.step, self.message, self.log, self.code)

    def __str__(self) -> str:
        where = f"at {self.stage}"
        if self.stage == "step":
            where = f"after {self.step} {'steps' if self.step > 1 else 'step'}" if self.step else "at step 0"
        return f"{self.message} ({where}; output in {self.log})"


class CancelledError(Exception):
    """The child was ended because nobody needs its answer any more."""


def base_environment(case: Case) -> dict[str, str]:
    """The environment that every kind of child starts from, with what decides bits.

    Nothing of Python's search path is in it, nor of where the caller stands, and no secret that the case does not pass
    on by name.
    """
    environment = handed_on(os.environ, case.subject.pass_env)
    for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PWD", "OLDPWD"):
        environment.pop(name, None)
    if trust := trust_of(os.environ):  # what it says is not handed on, and a child may run repro
        environment[VARIABLE] = trust
    threads = str(case.resources.cpus)
    environment |= BITS_DEFAULTS | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return environment | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}


@dataclass(frozen=True)
class Child:
    """One process, of which nothing is left behind when it ends or is ended: see `processes`.

    Attributes:
        command: Program and arguments.
        cwd: Where it starts.
        environment: All of its variables, but for PWD, which is `cwd`.
        log: File that its output is added to.
        limit: Seconds it may take.
        keep: Open files of ours that it holds as long as it lives.
        bound: Whether it dies with us. One that is not must hold a lock on what it changes.
        beside: Of the process's number, what is done while it runs.
    """

    command: Sequence[str]
    cwd: Path
    environment: Mapping[str, str]
    log: Path
    limit: float
    keep: Sequence[int] = ()
    bound: bool = True
    beside: Callable[[int], contextlib.AbstractContextManager[Any]] | None = None

    def run(self, cancel: threading.Event | None = None, enough: Callable[[], bool] | None = None) -> int:
        """Its exit code; negative where a signal ended it.

        Args:
            cancel: Ends it when set.
            enough: Asked now and then; once it says so, the process has done what was wanted and is ended.

        Raises:
            CancelledError: `cancel` was set.
            ChildFailure: it ran out of time.
            MachineFailureError: it ran out of time, waiting for a Ray cluster that is gone.
            ExecError: the command is none that can be run.
            OSError: it could not be started.
        """
        with self.started() as process, self.beside(process.pid) if self.beside else contextlib.nullcontext():
            self._wait(process, cancel, enough)
        return process.returncode

    @contextlib.contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """The process, of which nothing outlives the block.

        Raises:
            ExecError: the command is none that can be run.
            OSError: it could not be started.
        """
        with (
            self.log.open("ab") as output,
            reserved(output),
            tree_of(
                self.command, cwd=self.cwd, environment={"PWD": str(self.cwd), **self.environment}, output=output,
                keep=self.keep, bound=self.bound,
            ) as process,
        ):  # fmt: skip
            yield process

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
        if address := _unanswered(last_lines(tail(self.log))):
            raise MachineFailureError(
                f"no end within {self.limit:g} s: the trainer waits for a Ray cluster at {address}, where none "
                "answers; `ray stop --force` forgets one that was killed, RAY_ADDRESS may name it too; then run again"
            )
        raise ChildFailure("timeout", -1, f"no end within {self.limit:g} s: raise subject.timeout", str(self.log))


# -- whose failure it was

_FAILED = re.compile(rf"(?!subprocess\.CalledProcessError:){RAISED.pattern}|(?:FAILED|ERROR) \S+\.py\b|FAILED \(")
"""The last line of a traceback, but not of a launcher in Python; or a line of tests that failed."""


class _Limit(NamedTuple):
    """A limit that the program was started under.

    Attributes:
        resource: Which.
        on: What it limits.
        fix: What raises it.
        ample: Who meets one as large as this would meet any: it leaks.
        number: The signal that tells of it, or 0.
        pattern: What programs say of it, or "".
    """

    resource: int
    on: str
    fix: str
    ample: float
    number: int
    pattern: str

    def was_met(self, number: int, output: str) -> bool:
        """Whether a failure by a signal, or with such an output, tells of it and not of one that it set itself."""
        now = resource.getrlimit(self.resource)[0]
        if now == resource.RLIM_INFINITY or now >= self.ample:
            return False
        if self.number and (number == self.number or _ended_by(self.number, last_lines(output))):
            return True
        return bool(self.pattern and re.search(self.pattern, output))


_NO_THREAD = r"can't start new thread|Cannot fork|Resource temporarily unavailable"
_NO_MEMORY = rf"MemoryError|Cannot allocate memory|bad_alloc|failed to map segment|{_NO_THREAD}"
_LIMITS = (
    _Limit(resource.RLIMIT_FSIZE, "file sizes", "ulimit -f", math.inf, signal.SIGXFSZ, r"\[Errno 27\] File too large"),
    _Limit(resource.RLIMIT_CPU, "processor time", "ulimit -t", math.inf, signal.SIGXCPU, ""),
    _Limit(resource.RLIMIT_NOFILE, "open files", "ulimit -n 16384", 1 << 14, 0, r"Too many open files(?! in system)"),
    _Limit(resource.RLIMIT_NPROC, "processes", "ulimit -u 16384", 1 << 14, 0, _NO_THREAD),
    _Limit(resource.RLIMIT_AS, "memory", "ulimit -v", math.inf, 0, _NO_MEMORY),
    _Limit(resource.RLIMIT_DATA, "memory", "ulimit -d", math.inf, 0, _NO_MEMORY),
)
"""Limits that a program may fail under, and that whoever started it can raise. Most shells allow 1024 open files."""
_LACKS = {
    "No space left on device": "no space left on the disk; free some and run again",
    "Disk quota exceeded": "no space left on the disk; free some and run again",
    "Address already in use": "the trainer's port is in use; end what holds it, or run again",
    "EADDRINUSE": "the trainer's port is in use; end what holds it, or run again",
    "Too many open files in system": "the machine has no room for more open files; end what holds them and run again",
    "ray.exceptions.OutOfMemoryError": "Ray killed a process of the trainer; free memory and run again",
    "killed due to the node running low on memory": "Ray killed a process of the trainer; free memory and run again",
}
_NETWORK = re.compile(
    r"(?:temporary )?failure in name resolution|name or service not known|nodename nor servname"
    r"|could not resolve (?:host|proxy)|failed to lookup address|nameresolutionerror|\bEAI_AGAIN\b"
    r"|dns error|network is (?:unreachable|down)"
    r"|no route to host|host is unreachable|connection (?:refused|reset|timed out|aborted|broken)"
    r"|failed to establish a new connection|failed to connect to|max retries exceeded|too many retries"
    r"|(?:read|operation|request|connect(?:ion)?) timed out|tls handshake timeout|error sending request"
    r"|remote end closed connection|remote end hung up unexpectedly|\bincompleteread\b|unexpected_eof_while_reading"
    r"|too many 50[234] error responses"
    r"|\b50[234] (?:server error|bad gateway|service (?:temporarily )?unavailable|gateway time-?out)"
    r"|(?:http (?:status )?(?:code |error )|returned error: |status code:? )50[234]\b|429 (?:client error|too many)",
    re.IGNORECASE,
)
"""What pip, uv, git, curl and their like say where the network or an index fails them."""


class PortTakenError(ShortageError):
    """The port at which ranks were to meet is in use."""


def blame_the_machine(code: int, log: Path, who: str = "the trainer") -> None:
    """Raise where a child that ended with `code` was ended by the machine and not by itself.

    A segmentation fault is the subject's; so is a device that is out of memory.

    Args:
        code: Its exit code.
        log: Its output.
        who: What it is called.

    Raises:
        PortTakenError: the port is in use.
        MachineFailureError: a signal to it or to a rank of it, a limit that it was started under, or a full disk.
    """
    number = -code if code < 0 else code - 128  # a shell reports its child's signal so
    output = tail(log)
    for limit in _LIMITS:
        if limit.was_met(number, output):
            raise MachineFailureError(f"{who} met the limit on {limit.on}: raise it ({limit.fix}) and run again")
    if number in _FIXES:
        raise _killed(who, number, code)
    output = last_lines(output)
    for number in (signal.SIGKILL, signal.SIGBUS):
        if _ended_by(number, output):
            raise _killed("a process of the trainer", number)
    for text, message in _LACKS.items():
        if text in output:
            raise (PortTakenError if "port" in message else ShortageError)(message)


_FIXES = {
    signal.SIGKILL: "free memory",
    signal.SIGBUS: "free memory or /dev/shm",
    signal.SIGTERM: "see what ended it, a time limit or a scheduler,",
    signal.SIGHUP: "start it where no closed terminal ends it (nohup, tmux)",
    signal.SIGINT: "let nobody interrupt it (Ctrl-C)",
}
"""What helps against signals that the machine or a person sends."""


def _killed(who: str, number: int, code: int = -1) -> ShortageError:
    """What is said of a signal; one that only an exit code tells of may be the program's own number."""
    name, fix = signal.Signals(number).name, _FIXES[signal.Signals(number)]
    limited = resource.getrlimit(resource.RLIMIT_CPU)[0] != resource.RLIM_INFINITY  # at the hard limit it is SIGKILL
    if number == signal.SIGKILL and limited:
        fix += ", raise the limit on processor time (ulimit -t)"
    if code < 0:
        return ShortageError(f"{who} was killed by {name}; {fix} and run again")
    return ShortageError(
        f"{who} exited with {code}, which a shell says of a program that {name} ended: {fix} and run again; "
        "if it is a number of its own, exit with less than 128"
    )


def _ended_by(number: int, output: str) -> bool:
    """Whether a launcher says that a process ended by a signal. One that it terminates itself gets another."""
    launchers, shells = _words_of(number)
    if launchers.search(output):
        return True
    # a script may kill what it started, when its program has failed by itself and said so
    return bool(shells.search(output)) and not any(map(_FAILED.match, output.splitlines()))


@functools.cache
def _words_of(number: int) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What launchers print of a process that ended by a signal, and what shells do."""
    name, text = signal.Signals(number).name, re.escape(signal.strsignal(number) or "-")
    code = rf"(?:-{number}|-{name}|{128 + number})\b"  # the last is a shell's
    launchers = (
        rf"\b(?:exit(?:ed)?(?: with)?(?: ?code| status)?|return ?code) *[:=]? *{code}"  # torchrun, subprocess
        rf"|terminated with code {code}"  # Lightning
        rf"|\bsignal {number} \({name}\)"  # torchrun, billiard
        rf"|(?:\b(?:on|by|with) |\()signal:? (?:{number}|{name}|{text})\b"  # mpirun, torch's processes and loaders
        rf"|died with <Signals\.{name}: {number}>"  # subprocess, accelerate
        rf"|{name}\(-{number}\)"  # joblib
        rf"|make(?:\[\d+\])?: \*\*\* .*\] (?:{text}|Error {128 + number})\b"
        rf"|^srun: error: .*: {text}"
        rf"|: fatal error: {text} signal terminated program"  # gcc
    )
    shells = (
        rf"(?:: line \d+|\b(?:ba|k)?sh): *\d+:? {text}\b"
        rf"|(?:^|[\d%)\]]){text}(?: \(core dumped\))?$"  # dash, maybe behind a line without an end
    )
    return re.compile(launchers, re.IGNORECASE | re.MULTILINE), re.compile(shells, re.MULTILINE)


_NO_CLUSTER = re.compile(r"Failed to connect to GCS at address (\S{1,60}):(\d{1,5}) within")
"""What each try to reach a cluster that is gone prints; of Ray's src/ray/rpc/gcs/gcs_rpc_client.h."""


def _unanswered(output: str) -> str:
    """The address of a Ray cluster that a program cannot reach, by what it printed and by our own try; '' if none."""
    for host, port in _NO_CLUSTER.findall(output)[-1:]:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
        except (OSError, OverflowError):
            return f"{host}:{port}"
    return ""


def blame_the_network(what: str, log: Path) -> None:
    """Raise where the output of a command that fetches and builds tells of a network that failed it.

    Raises:
        MachineFailureError: it does.
    """
    if match := _NETWORK.search(last_lines(tail(log))):
        last = last_line(log)
        raise MachineFailureError(f"{what} failed for want of a network ({match[0].lower()}): run again ({last})")


@contextlib.contextmanager
def watched(place: Place, log: Path, variables: Mapping[str, str], folders: Iterable[Path] = ()) -> Iterator[DiskWatch]:
    """Watch the disks that a run writes to; what fails in the block while one is full is the machine's failure.

    Args:
        place: Where the program's code lies.
        log: The file for its output, beside which it is recorded.
        variables: Variables of its own that may name folders which it writes to.
        folders: Other folders that it is told of.

    Raises:
        MachineFailureError: there is no room to begin with, or there was none.
    """
    with DiskWatch((log.parent, place.root), {**os.environ, **variables}, folders=folders) as watch:
        try:
            yield watch
        except (MachineFailureError, CancelledError):
            raise
        except OSError as error:
            if error.errno in FULL:
                raise MachineFailureError(
                    f"{error.strerror}: free some space and run the same command again"
                ) from error
            raise
        except Exception:
            watch.blame()
            raise

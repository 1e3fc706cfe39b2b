"""Processes that must not outlive their purpose: how one is started, and how it and all that it left is ended.

Each one carries a mark in its environment, which whatever it starts inherits, in sessions of its own too. By that mark
and by parentage its processes are found in ``/proc`` and killed. What cleared its environment and lost its parent is
found no more, and where there is no ``/proc`` only the process group is ended.

On Linux a process also dies with the one that started it, even if that is killed. What it started itself then goes on:
ranks are orphans of their launcher, and a shell's programs of the shell.

A killed process leaves files for which the next program would wait; whose they are is seen before the kill:

- Of a Ray cluster that `ray start` began, `ray_current_cluster` names the address, which the next `ray.init()` takes;
  `ray stop` removes it (ray/_private/utils.py, write_ray_address).
- While torch.utils.cpp_extension builds, it holds a file `lock` open; whoever wants the same extension waits until that
  is gone, and has no other way to see that nobody builds (torch/utils/file_baton.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from repro_golden.base.credentials import handed_on

__all__ = ["MARK", "ExecError", "StandstillError", "descendants", "executed", "output_of", "tree_of"]

MARK = "REPRO_CHILD"
"""A variable of every process: which runs it belongs to, the outermost first, because a subject may run repro."""

_PATIENCE = 10.0
"""Seconds to wait for killed processes: one that hangs in the kernel ends when it can."""


@contextlib.contextmanager
def tree_of(
    command: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    output: IO[bytes] | int,
    errors: int = subprocess.STDOUT,
    keep: Sequence[int] = (),
    bound: bool = True,
    apart: bool = True,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of which nothing outlives the block.

    Args:
        command: Program and arguments.
        cwd: Where it starts.
        environment: All of its variables, beside the mark.
        output: Where its output goes: a file, or what `subprocess` has for it.
        errors: Where its errors go, likewise.
        keep: Open files of ours that it holds.
        bound: Whether it dies with this process. The kernel watches the thread that starts it, which is in the block
            for as long as the process lives.
        apart: Whether it has a session of its own, and so no terminal to ask the user at.

    Raises:
        ExecError: the command is none that can be run.
        OSError: it could not be started.
    """
    mark = uuid.uuid4().hex
    outer = os.environ.get(MARK)
    variables = {**environment, MARK: f"{outer}:{mark}" if outer else mark}
    start = _start_bound if bound and sys.platform == "linux" else _start
    streams = _Streams(output, errors, apart)
    process = executed(command, cwd, variables, lambda argv: start(argv, cwd, variables, streams, keep))
    try:
        yield process
    finally:
        _end(process, mark)


# -- start


class ExecError(OSError):
    """A command that cannot be run, whoever asks for it; what the machine lacks for it is another `OSError`."""

    def __str__(self) -> str:
        if self.errno == errno.ENOENT:
            return f"command not found: {self.filename}"
        if self.errno in (errno.EACCES, errno.EPERM):
            return f"{self.filename} is not executable"
        return f"{self.filename} cannot be run: {self.strerror}"


_LACKS = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE)
"""What the kernel says where the machine fails a program that may be sound."""


def executed(
    command: Sequence[str],
    cwd: Path,
    variables: Mapping[str, str],
    start: Callable[[Sequence[str]], subprocess.Popen[bytes]],
) -> subprocess.Popen[bytes]:
    """A process that runs a command; a text without a ``#!`` line is run by ``/bin/sh``, as shells do.

    Args:
        command: Program and arguments.
        cwd: Where it starts.
        variables: Its own.
        start: Starts other words in its place.

    Raises:
        ExecError: the command is none that can be run.
        OSError: the machine could not start it.
    """
    try:
        return start(command)
    except OSError as error:
        if error.filename != command[0] or error.errno in _LACKS:
            raise
        if error.errno != errno.ENOEXEC or not (text := _text(command[0], cwd, variables)):
            raise ExecError(error.errno, error.strerror, error.filename) from None
    return start(["/bin/sh", text, *command[1:]])


def _text(program: str, cwd: Path, variables: Mapping[str, str]) -> str | None:
    """The path of what a command names, where shells take it for one of theirs: its first line holds no null."""
    path = program if os.sep in program else shutil.which(program, path=variables.get("PATH", os.defpath))
    if path is None:
        return None
    with contextlib.suppress(OSError), (cwd / path).open("rb") as file:
        return None if b"\0" in file.readline(256) else path
    return None


class _Streams(NamedTuple):
    """Where a process prints, and whether it has a session of its own."""

    output: IO[bytes] | int
    errors: int
    apart: bool


def _start(
    command: Sequence[str], cwd: Path, variables: Mapping[str, str], streams: _Streams, keep: Sequence[int]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(command), cwd=cwd, env=dict(variables), stdin=subprocess.DEVNULL,
        stdout=streams.output, stderr=streams.errors, start_new_session=streams.apart, pass_fds=keep,
    )  # fmt: skip


_BIND = """\
import ctypes, os, signal, sys
parent, told, environment = map(int, sys.argv[1:4])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which stays when a program is executed
if os.getppid() != parent:  # it died before
    os._exit(1)
for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored stays so too
    signal.signal(number, signal.SIG_DFL)
os.set_inheritable(told, False)
with open(environment, "rb") as file:
    variables = dict(entry.split(b"=", 1) for entry in file.read().split(b"\\0") if entry)
try:
    os.execvpe(sys.argv[4], sys.argv[4:], variables)
except OSError as error:
    os.write(told, b"%d" % error.errno)
os._exit(127)
"""
"""Becomes the program. Its variables come in a file, because some of them may keep our own Python from starting."""


def _start_bound(
    command: Sequence[str], cwd: Path, variables: Mapping[str, str], streams: _Streams, keep: Sequence[int]
) -> subprocess.Popen[bytes]:
    assert sys.platform == "linux"
    reader, writer = (open(number, mode) for number, mode in zip(os.pipe(), ("rb", "wb"), strict=True))  # noqa: PTH123, SIM115
    with reader:
        with writer, open(os.memfd_create("environment"), "wb") as file:  # noqa: PTH123 - no path
            file.write(b"\0".join(os.fsencode(f"{name}={value}") for name, value in variables.items()))
            file.flush()
            file.seek(0)
            ours = [os.getpid(), writer.fileno(), file.fileno()]
            bind = [sys.executable, "-I", "-S", "-c", _BIND, *map(str, ours)]
            # others of this user can read its environment, so it holds no secret either
            process = _start([*bind, *command], cwd, handed_on(os.environ), streams, [*keep, *ours[1:]])
        try:
            number = reader.read()  # ends once the program runs
        except BaseException:
            process.kill()
            process.wait()
            raise
    if number:
        process.wait()
        raise OSError(int(number), os.strerror(int(number)), command[0])
    return process


# -- end


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill the process and all of its own, again and again until none is left, and what others would wait for."""
    processes = _found(process, mark)  # before any is killed: orphans have lost their parent
    left = _left_by(processes)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _kill(processes)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()
    deadline = time.monotonic() + _PATIENCE
    while (processes := _found(process, mark)) and time.monotonic() < deadline:
        _kill(processes)
        time.sleep(0.01)
    _remove(left)


def _kill(processes: set[int]) -> None:
    for number in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(number, signal.SIGKILL)


def _found(process: subprocess.Popen[bytes], mark: str) -> set[int]:
    # once waited for, its number may be another's
    return descendants([] if process.returncode is not None else [process.pid], mark) - {os.getpid()}


def descendants(roots: Sequence[int], mark: str | None = None) -> set[int]:
    """The processes of this user that are among `roots`, are marked, or come from one that is; none that has ended."""
    children: dict[int, list[int]] = {}
    left = [*roots]
    for folder in _processes():
        with contextlib.suppress(OSError):  # gone meanwhile
            state, parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if state in (b"Z", b"X"):
                continue
            children.setdefault(int(parent), []).append(int(folder.name))
            if mark is not None and mark.encode() in (folder / "environ").read_bytes():
                left.append(int(folder.name))
    every: set[int] = set()
    while left:
        number = left.pop()
        if number not in every:
            every.add(number)
            left += children.get(number, [])
    return every


def _processes() -> Iterator[Path]:
    """The folders of this user's processes."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                yield folder


# -- processes that stand still: they wait for an answer that does not come, and would for ever


_LOOKS = 20
"""How often a process is looked at before it is given up. Looks are counted: who is stopped with it does not look."""
_WORK, _BYTES = 0.003, 200.0
"""Seconds of a processor, and bytes of files, each second: one that waits takes and moves next to nothing."""


class StandstillError(Exception):
    """A process did nothing for as long as it was given."""


def output_of(process: subprocess.Popen[bytes], patience: float) -> tuple[bytes, bytes]:
    """What a process printed, once it has ended; its output and errors are pipes.

    Args:
        process: It goes on where this raises.
        patience: Seconds for which it may do nothing.

    Raises:
        StandstillError: it did nothing for longer.
    """
    work, moved, looks = 0.0, 0.0, 0
    while looks < _LOOKS:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=patience / _LOOKS)
        now, so_far = _done(process.pid)
        looks += 1
        if now - work > _WORK * patience or so_far - moved > _BYTES * patience:
            work, moved, looks = now, so_far, 0
    raise StandstillError


def _done(number: int) -> tuple[float, float]:
    """Seconds of processors that a process and its ended children took, and bytes that it read and wrote."""
    import psutil

    moved = 0.0
    try:
        process: Any = psutil.Process(number)
        times = process.cpu_times()
        if hasattr(process, "io_counters"):  # not on macOS
            counts = process.io_counters()
            moved = float(counts.read_chars + counts.write_chars) if hasattr(counts, "read_chars") else 0.0
    except psutil.Error:  # it has ended, and something holds its output
        return 0.0, 0.0
    return float(sum(times[:4])), moved


class _Left(NamedTuple):
    """Such a file.

    Attributes:
        path: Where it lies.
        about: What tells it from another of that name: device, number, and nanoseconds of its last change.
    """

    path: Path
    about: tuple[int, int, int]


def _left_by(processes: Iterable[int]) -> list[_Left]:
    """What these will leave if they are killed now. None where there is no ``/proc``."""
    left = []
    for number in processes:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            folder = Path("/proc") / str(number)
            left += [_Left(path, _about(path)) for path in (*_named_clusters(folder), *_builds(folder))]
    return left


def _remove(left: Iterable[_Left]) -> None:
    """Remove those that are as they were: their processes are gone. Another of the name is somebody else's."""
    for path, about in left:
        with contextlib.suppress(OSError):
            if _about(path) == about:
                path.unlink()


def _about(path: Path) -> tuple[int, int, int]:
    facts = path.stat()
    return facts.st_dev, facts.st_ino, facts.st_mtime_ns


_SESSION = re.compile(r"--session[-_]dir=(.+)")
_PORT = re.compile(r"--gcs[-_]server[-_]port=(\d+)")


def _named_clusters(folder: Path) -> Iterator[Path]:
    """The file that names the cluster whose head this process is."""
    if (folder / "comm").read_bytes().strip() != b"gcs_server":
        return
    argv = os.fsdecode((folder / "cmdline").read_bytes()).split("\0")
    session, port = (next(filter(None, map(known.fullmatch, argv)), None) for known in (_SESSION, _PORT))
    if session and port:
        path = Path(session[1]).parent / "ray_current_cluster"
        if path.is_file() and path.read_text(errors="replace").strip().endswith(f":{port[1]}"):
            yield path


def _builds(folder: Path) -> Iterator[Path]:
    """The locks that this process holds while it builds."""
    for opened in (folder / "fd").iterdir():
        with contextlib.suppress(OSError):
            path = opened.readlink()
            if path.name == "lock" and ("torch_extensions" in path.parts or (path.parent / "build.ninja").exists()):
                path.stat()
                yield path

"""One command of repro in a process of its own, within bounds, and what can be held against how it ended."""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import warm_kit

warm_kit.forkable()

GIB = 1 << 30
SECONDS = 60.0
"""No hostile file may keep a command longer, on a machine that others use too."""
ROOM = 6 * GIB
"""Address space that a command may take on top of what it has after its start: beyond it it gets no memory."""
MODULES = (
    "torch", "numba", "pyarrow.parquet", "safetensors.torch", "jinja2", "altair", "repro.cli", "repro.commands.diff",
    "repro.commands.doctor", "repro.commands.rollout.show", "repro.commands.report.publish", "repro.report.bisect",
    "repro.doctor.run", "repro_golden.trace", "repro_golden.store.golden", "tensorboard",
)  # fmt: skip


@dataclass(frozen=True)
class Attempt:
    """How a command ended.

    Attributes:
        command: Its words.
        code: Its exit code; None where it ran out of time and was killed.
        out: What it printed.
        err: What it printed to stderr.
        seconds: How long it took.
        grown: Bytes of memory that it held at most, on top of what it began with; pages of files, which it maps and
            does not ask for, are none where it ended by itself.
    """

    command: Sequence[str]
    code: int | None
    out: bytes
    err: bytes
    seconds: float
    grown: int

    @property
    def text(self) -> str:
        """All that it printed."""
        return (self.out + self.err).decode(errors="replace")

    def fault(self, codes: Sequence[int] = (0, 1, 2, 3), most: int = 2 * GIB) -> str:
        """What no command may do, whatever it is given; "" where there is nothing of it.

        Args:
            codes: Exit codes that it may have.
            most: Bytes that it may take.
        """
        if self.code is None:
            return f"did not end in {self.seconds:.0f} s"
        if "Traceback (most recent call last)" in self.text:
            return f"a traceback: {self.text.strip().splitlines()[-1][:200]}"
        if self.code not in codes:
            return f"exit code {self.code}: {self.text.strip()[-200:]}"
        if self.grown > most:
            return f"took {self.grown >> 20} MiB"
        if unseen := unseen_in(self.out + self.err):
            return f"printed {unseen!r}"
        if self.code == 2 and not self.err.strip():
            return "failed without a word"
        return ""


def unseen_in(raw: bytes) -> str:
    """The first character that a terminal obeys or nobody sees, or a line that GitHub's runner obeys; "" without."""
    text = raw.decode("utf-8", "surrogateescape")
    for character in text:
        if character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            return character
    for line in text.splitlines():
        if line.strip().startswith("::") or re.search(r"##\w*\[", line):
            return line[:80]
    return ""


def warm() -> None:
    """Import what commands import, once, so that a fork begins with it."""
    for name in (*MODULES, *warm_kit.BASE, *warm_kit.COMMANDS):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def attempt(
    command: Sequence[str], folder: Path, *, seconds: float = SECONDS, room: int | None = ROOM,
    inside: Callable[[], int] | None = None, alone: bool = False,
) -> Attempt:  # fmt: skip
    """Run one command of repro in a fork of this process.

    Args:
        command: Its words, without ``repro``.
        folder: Where it runs.
        seconds: Time that it may take.
        room: Address space that it may take beyond what it has; None for all there is.
        inside: What runs in the place of the command.
        alone: Where it must be killed, its children are not: they have to see to that themselves.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        sys.stderr.flush()
        began = time.monotonic()
        sizes = mmap.mmap(-1, 16)  # what it began with, and the pages of files that it ended with, as it counts them
        number = os.fork()
        if not number:
            sizes[:8] = _resident().to_bytes(8, "little")
            _become(command, folder, out.fileno(), err.fileno(), room, inside, sizes)
        status, usage = _ended(number, seconds, alone=alone)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(1 << 24))
        code = None if status is None else os.waitstatus_to_exitcode(status)
        began_with, of_files = (int.from_bytes(sizes[at : at + 8], "little") for at in (0, 8))
        grown = max(0, usage.ru_maxrss * 1024 - of_files - began_with)
        return Attempt([*command], code, texts[0], texts[1], time.monotonic() - began, grown)


def _ended(number: int, seconds: float, *, alone: bool) -> tuple[int | None, resource.struct_rusage]:
    """The process's status, None where it had to be killed, and what it took; its children go with it."""
    handle = os.pidfd_open(number)
    try:
        in_time = bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)
    if not alone:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(number, signal.SIGKILL)
    if not in_time:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    _, status, usage = os.wait4(number, 0)
    return (status if in_time else None), usage


def _become(
    command: Sequence[str], folder: Path, out: int, err: int, room: int | None, inside: Callable[[], int] | None,
    sizes: mmap.mmap,
) -> None:  # fmt: skip
    code = 1
    try:
        os.setsid()
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.chdir(folder)
        if room is not None:
            limit = _address_space() + room
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        from repro.__main__ import main

        sys.argv = ["repro", *command]
        code = inside() if inside else main(list(command))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - as Python does
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
        sizes[8:] = _of_files().to_bytes(8, "little")
    os._exit(code & 0xFF)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _resident() -> int:
    """Bytes of this process's own pages: those of files are as good as free."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() - _of_files()


def _of_files() -> int:
    return int(Path("/proc/self/statm").read_text().split()[2]) * resource.getpagesize()


@contextlib.contextmanager
def watched(folder: Path, *apart: Path) -> Iterator[Callable[[], list[str]]]:
    """What was made, changed or removed below a folder since, but for what lies in the places `apart`."""

    def seen() -> dict[str, tuple[object, ...]]:
        entries: dict[str, tuple[object, ...]] = {}
        for top, names, files in os.walk(folder):
            names[:] = [name for name in names if Path(top, name) not in apart]
            for name in (*names, *files):
                path = Path(top, name)
                if path in apart:
                    continue
                facts = path.lstat()
                entries[str(path)] = (facts.st_mode, facts.st_size, 0 if path.is_dir() else facts.st_mtime_ns)
        return entries

    before = seen()

    def changed() -> list[str]:
        after = seen()
        return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))

    yield changed

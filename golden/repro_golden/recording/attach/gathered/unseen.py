"""What a recording did not see, and why: processes without the recorder, steps, and what a glob or pattern asked for.

A Python that was started with ``-I``, ``-E`` or ``-S``, or with an environment of its own, reads no ``PYTHONPATH``.
From outside it is known by torch's library among the files that it has mapped. Every process that the recorder is in
says so by a file before it loads torch. A child between its fork and its exec has its parent's files mapped, so one
look alone says nothing. On systems without ``/proc`` nothing is seen of this.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from repro_golden.base.errors import ReproError
from repro_golden.base.machine.processes import descendants
from repro_golden.trace import Trace

__all__ = ["Unseen", "unmatched", "unseen_for"]

_EVERY = 0.25
"""Seconds between two looks; importing torch takes longer."""
_LIBRARY = "libtorch_python"
_SET = re.compile(
    r"""(?<![\w${"'])PYTHONPATH\s*:?=\s*(?P<value>(?:"[^"]*"|'[^']*'|\$\([^)]*\)|`[^`]*`|[^\s;&|"'`])*)"""
)
_MAKEFILES = ("GNUmakefile", "makefile", "Makefile")
"""In the order in which make looks for them."""
_MOST = 1 << 20
"""Bytes of a file that is no script."""


class Unseen:
    """The processes of a program that have torch loaded, as far as they were met.

    Args:
        raw: Folder of the raw records.
    """

    def __init__(self, raw: Path) -> None:
        self._raw = raw
        self._met: set[tuple[int, int]] = set()
        self._loaded: dict[tuple[int, int], str] = {}

    @contextlib.contextmanager
    def watch(self, root: int) -> Iterator[None]:
        """Look now and then, in a thread of its own, for as long as the block runs.

        Args:
            root: Number of the process that was started.
        """
        done = threading.Event()

        def run() -> None:
            while not done.wait(_EVERY):
                self._look(root)

        thread = threading.Thread(target=run, name="repro-unseen", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _look(self, root: int) -> None:
        """Take note of who has torch loaded now and had it at the last look; numbers return, with another start."""
        before, self._met = self._met, set()
        for number in descendants([root]):
            process = number, _start(number)
            if process in self._loaded or not _has_torch(number):
                continue
            self._met.add(process)
            if process in before:
                self._loaded[process] = _command(number)

    def check(self) -> None:
        """Raise where one of them was not recorded.

        Raises:
            ReproError: with its command line.
        """
        arrived = {int(path.name.partition("-")[2]) for path in self._raw.glob("armed-*")}
        if not any(self._raw.glob("rank-*.json")):
            return  # nothing was recorded at all, which is said in other words
        for (number, _), command in sorted(self._loaded.items()):
            if number not in arrived:
                raise ReproError(
                    f"a process of the program uses torch unseen ({command}): what it trains is in no trace; start it "
                    "without -I, -E and -S, and hand PYTHONPATH, REPRO_TRACE and REPRO_INSTRUMENT on to it"
                )


def _has_torch(number: int) -> bool:
    with contextlib.suppress(OSError):
        return _LIBRARY in Path(f"/proc/{number}/maps").read_text(errors="replace")
    return False


def _start(number: int) -> int:
    """When a process was started, in ticks of the system's clock."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()[19])
    return 0


def _command(number: int) -> str:
    with contextlib.suppress(OSError):
        argv = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
        return b" ".join(argv).decode(errors="replace").strip()[:200]
    return f"process {number}"


def unmatched(trace: Trace, activations: Sequence[str], metrics: Sequence[str]) -> str:
    """In words, the globs of modules and patterns of metrics that fit nothing in a trace; '' where all do."""
    rows = [row for index in range(len(trace.steps)) for row in trace.rows(index)] if activations else []
    modules = {re.split(r"\.?output(?:\.|$)", row.name)[0] for row in rows if row.phase == "forward"}
    compared = {name for step in trace.steps for name in step.compared}
    none = [f"no module fits {glob!r}" for glob in activations if not fnmatch.filter(modules, glob)]
    for text in metrics:
        named = set(re.compile(text).groupindex) - {"name", "value"}
        if lost := sorted(named - compared):
            none.append(f"no number was found for {', '.join(lost)} by {text!r}")
    return ", ".join(none)


def unseen_for(command: Sequence[str], root: Path) -> str:
    """What may have kept the recorder from the steps of a command, with the cure.

    Args:
        command: Program and arguments.
        root: Where it ran.
    """
    where = _sets_anew(command, root)
    anew = (
        f"{where} sets PYTHONPATH anew, by which the recorder gets in: keep what it was "
        "(PYTHONPATH=src:$PYTHONPATH; $$PYTHONPATH in a Makefile); else, "
    )
    return (anew if where else "") + (
        "does it train with torch.optim (an update from torch.func's gradients, or in hooks that drop them, is not "
        "seen: give them to an optimizer of torch's), in a Python that reads PYTHONPATH, and if it goes on from a "
        "checkpoint that it finds, is there a step left to make?"
    )


def _sets_anew(command: Sequence[str], root: Path) -> str:
    """``Makefile:3``, or the command's own words; '' where nothing shows it."""
    for word in command:
        if _anew(word):
            return f"`{word}`"
    for name, text in _scripts(command, root):
        for number, line in enumerate(text.splitlines(), 1):
            if not line.lstrip().startswith("#") and _anew(line):
                return f"{name}:{number}"
    return ""


def _anew(line: str) -> bool:
    return any("PYTHONPATH" not in match["value"] for match in _SET.finditer(line))


def _scripts(command: Sequence[str], root: Path) -> Iterator[tuple[str, str]]:
    """The files of text that a command names, and make's own, but for Python's."""
    makes = Path(command[0]).name in ("make", "gmake") if command else False
    made = next((name for name in _MAKEFILES if (root / name).is_file()), "") if makes else ""
    for name in dict.fromkeys([*command, made]):
        if not name or name.endswith(".py"):
            continue
        try:
            path = root / name
            if path.is_file() and path.stat().st_size < _MOST:
                yield name, path.read_text(encoding="utf-8")
        except (OSError, ValueError):  # none that a system knows, or no text
            continue

"""Folders that are costly to build: built once for each content, kept for later probes, swept by their last use.

One is built in the place that it stays in, because its scripts hold that path, and counts only once a mark beside it
was written. Who builds one holds its lock alone, who uses one shares it, and only what nobody holds is swept. The
processes that build hold the lock too: if ours is killed, nobody builds where they still write.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from repro_golden.base.canonical import parse_json, write_atomic
from repro_golden.base.errors import MachineFailureError
from repro_golden.base.machine.processes import ExecError
from repro_golden.replay.children import (
    CancelledError,
    Child,
    ChildFailure,
    blame_the_machine,
    blame_the_network,
    watched,
)
from repro_golden.replay.output import last_line
from repro_golden.repository.checkout import Place
from repro_golden.trace.model import checked, to_checked_line

__all__ = ["Slot", "environments_of", "forget", "kept"]


@dataclass(frozen=True)
class Slot:
    """The place of one, and the means to build it there.

    Attributes:
        base: The folder that all of them lie in.
        key: What it is built from, in 16 digits.
        hidden: Texts that differ from commit to commit, with what stands for each in a message.
        held: Open files that the processes of a build hold.
        cancel: Ends a build when set.
    """

    base: Path
    key: str
    hidden: Mapping[str, str]
    held: Sequence[int] = ()
    cancel: threading.Event | None = None

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.base / self.key

    def path(self, kind: str) -> Path:
        """A file beside the folder."""
        return self.base / f"{self.key}.{kind}"

    def whole(self) -> dict[str, Any] | None:
        """What its mark says, if it is there and as it was written."""
        try:
            about = checked(parse_json(self.path("built").read_text(encoding="utf-8")))
            os.utime(self.path("built"))  # the time of its last use
        except (FileNotFoundError, ValueError, TypeError, AttributeError):
            return None
        return about if self.folder.is_dir() else None

    def run(
        self, name: str, command: Sequence[str], cwd: Path, variables: Mapping[str, str], limit: float, what: str
    ) -> None:
        """One command of a build; `what` it builds is said where the network fails it.

        Raises:
            ChildFailure: it failed.
            MachineFailureError: the machine or the network failed it.
        """
        child = Child(command, cwd, variables, self.path("log"), limit, self.held, bound=False)
        with watched(Place(self.base), child.log, variables):  # here: a failure is told to whoever waits for it
            try:
                code = child.run(self.cancel)
            except ExecError as error:
                self.fail(f"{name}: {error}")
            if code:
                blame_the_machine(code, child.log)
                blame_the_network(what, child.log)
                self.fail(f"{name} exited with {code}: {last_line(child.log)}")

    def fail(self, message: str) -> NoReturn:
        """Say that it cannot be built. Equal causes give equal text: no folder in it that differs by commit."""
        message = message.replace(str(self.folder), "{out}")
        for text, name in self.hidden.items():
            message = message.replace(text, name)
        raise ChildFailure("build", -1, message, str(self.path("log")))


@contextlib.contextmanager
def kept(
    base: Path,
    key: str,
    most: int,
    build: Callable[[Slot], Mapping[str, Any]],
    hidden: Mapping[str, str],
    cancel: threading.Event | None = None,
) -> Iterator[dict[str, Any]]:
    """What the mark of a folder says, built first where it is not there, and kept on the disk for the block.

    Args:
        base: The folder that all of them lie in.
        key: What it is built from.
        most: How many are kept.
        build: Fills the empty folder of a slot and returns what its mark shall say.
        hidden: As in `Slot`.
        cancel: Ends the wait for another's build, or our own.

    Raises:
        CancelledError: `cancel` was set.
        ChildFailure: it does not build, here or by whom we waited for.
        MachineFailureError: the disk or the network failed.
    """
    try:
        base.mkdir(parents=True, exist_ok=True)
        lock = Slot(base, key, hidden).path("lock").open("a")
    except OSError as error:
        raise MachineFailureError(f"cannot keep an environment in {base}: {error.strerror}") from error
    with lock:
        slot, began = Slot(base, key, hidden, (lock.fileno(),), cancel), time.time()
        while True:
            _wait(lock, fcntl.LOCK_SH, cancel)
            if (mark := slot.whole()) is not None:
                break
            fcntl.flock(lock, fcntl.LOCK_UN)
            _wait(lock, fcntl.LOCK_EX, cancel)
            try:
                if slot.whole() is None:
                    _build(slot, build, began)
                    _sweep(base, most, key)
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # also for a process of the build that escaped us
        try:
            yield mark
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def _wait(lock: IO[str], how: int, cancel: threading.Event | None) -> None:
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(lock, how | fcntl.LOCK_NB)
        if cancel and cancel.is_set():
            raise CancelledError
        time.sleep(0.1)


def _build(slot: Slot, build: Callable[[Slot], Mapping[str, Any]], began: float) -> None:
    """Build it anew; a failure that came while this caller waited since `began` is shared."""
    failed = slot.path("failed")
    if failed.exists() and failed.stat().st_mtime > began:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):  # damaged: it fails once more
            report = checked(parse_json(failed.read_text(encoding="utf-8")))
            raise ChildFailure(report["stage"], -1, report["message"], str(slot.path("log")))
    done = False
    try:
        _remove(slot.folder)
        slot.folder.mkdir()
        slot.path("log").write_bytes(b"")
        write_atomic(slot.path("built"), to_checked_line(dict(build(slot))))
        failed.unlink(missing_ok=True)
        done = True
    except ChildFailure as failure:
        write_atomic(failed, to_checked_line({"stage": failure.stage, "message": failure.message}))
        raise
    except OSError as error:
        raise MachineFailureError(f"cannot build an environment in {slot.base}: {error.strerror}") from error
    finally:
        if not done:
            shutil.rmtree(slot.folder, ignore_errors=True)


def _remove(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _sweep(base: Path, most: int, current: str) -> None:
    """Remove what killed processes left half built, and the least recently used beyond `most`; never one in use."""
    used = _built(base)
    half = [path.name for path in base.iterdir() if path.is_dir() and path.name not in used]
    excess = len(used) - most
    for key in [*half, *sorted(used.keys() - {current}, key=lambda key: used[key])]:
        if key in used and excess <= 0:
            return
        excess -= _drop(base, key, half=key in half) and key in used


def forget(state: Path) -> None:
    """Remove the environments of a checkout that nobody uses, so that they are built anew; what is in use stays.

    Args:
        state: The checkout's folder for what is kept.
    """
    for key in _built(environments_of(state)):
        _drop(environments_of(state), key)


def spoil(state: Path, inside: Path) -> bool:
    """Have an environment be built anew once it is asked for again, by a folder in it; False where that is in none."""
    base = environments_of(state)
    if not inside.is_relative_to(base) or inside == base:
        return False
    Slot(base, inside.relative_to(base).parts[0], {}).path("built").unlink(missing_ok=True)
    return True


def environments_of(state: Path) -> Path:
    """Where they lie."""
    return state / "environments"


def _built(base: Path) -> dict[str, float]:
    """The keys of all that are whole, and when each was last used."""
    used: dict[str, float] = {}
    for path in base.glob("*.built"):
        with contextlib.suppress(FileNotFoundError):  # another process has just removed it
            used[path.stem] = path.stat().st_mtime
    return used


def _drop(base: Path, key: str, *, half: bool = False) -> bool:
    """Remove one; False where it is in use, or, if only half of one is to go, whole by now."""
    with contextlib.suppress(OSError), (base / f"{key}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if half and (base / f"{key}.built").exists():
            return False
        for kind in ("built", "failed", "log"):  # the mark first: without it the folder is nothing
            (base / f"{key}.{kind}").unlink(missing_ok=True)
        _remove(base / key)
        return True
    return False

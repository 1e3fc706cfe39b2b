"""One process's files in the folder of raw records."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from repro_golden.recording.attach.base.settings import Settings
from repro_golden.recording.attach.written.order import At, dump_name, may_be
from repro_golden.recording.attach.written.raw import RawLog

__all__ = ["Records"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a disk, and not of the program or of ours."""


class Records:
    """Opened at the first step, because ranks are not known before; that the recorder is in is said at once.

    Args:
        settings: What is asked for: the folder, and what is perturbed or dumped.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._out = settings, Path(settings.out)
        self._planted: list[tuple[int, Callable[[], None]]] = []  # in which step, and what takes it back
        self._log: RawLog | None = None
        self._world = 1
        self._main: FrameType | None = None
        # numbers of processes are those of a node, and the folder may be that of many
        self._notes = self._out / f"note-{os.getpid()}-{os.urandom(4).hex()}.json"
        with contextlib.suppress(OSError):  # the program goes on
            (self._out / f"armed-{os.getpid()}").touch()

    @property
    def opened(self) -> bool:
        """Whether a step was made."""
        return self._log is not None

    @property
    def log(self) -> RawLog:
        """This rank's log, which `open` began."""
        assert self._log is not None
        return self._log

    def open(self, about: Mapping[str, Any]) -> None:
        """Begin the log of this rank, with what the process says of itself."""
        from repro_golden.recording.attach.process import outermost

        self._log, self._world = RawLog(self._out, about["rank"], about), int(about["world"])
        self._main = outermost()

    def close(self, end: Mapping[str, Any]) -> None:
        """Say how this rank ended, and whether it ``failed``: its launcher's exit code may not tell."""
        from repro_golden.recording.attach.process import failed

        self.log.put(".end", {**end, "failed": end["over"] and not end["stopped"] and failed(self._main)})

    def note(self, unread: Mapping[str, str]) -> None:
        """Say at once what this process did that nobody looks at, in place of what was said before.

        Args:
            unread: By name, why it is not looked at.
        """
        part = self._notes.with_suffix(".part")
        with contextlib.suppress(OSError):  # a process may outlive the recording
            part.write_text(json.dumps(unread), encoding="utf-8")
            part.replace(self._notes)

    def refuse(self, why: str) -> None:
        """Say that nothing recorded here may be compared."""
        (self._out / f"refused-{os.getpid()}").write_text(why, encoding="utf-8")

    def failed(self, why: str) -> None:
        """Say that the recorder ended before the program did: what it wrote may be less than what was trained."""
        with contextlib.suppress(OSError, ValueError):
            (self._out / f"failed-{os.getpid()}").write_text(why, encoding="utf-8", errors="replace")

    def idle(self, why: str) -> None:
        """Say why this process made no step; nothing where it is ''. Another one may have made some."""
        error = getattr(sys, "last_value", None)  # what ended it
        with contextlib.suppress(Exception):
            raised = f"{type(error).__name__}: {error}".splitlines()[0][:300] if error else ""
            for name, text in (("idle", why), ("raised", raised)):
                if text:
                    (self._out / f"{name}-{os.getpid()}").write_text(text, encoding="utf-8", errors="replace")

    def blame(self, error: Exception) -> None:
        """Where an error is of a disk, take the right to write from the log: a sign that needs no space."""
        if isinstance(error, OSError) and error.errno in _FULL and self._log is not None:
            with contextlib.suppress(OSError):
                self._log.path.chmod(0o444)

    @property
    def all_ended(self) -> bool:
        """Whether all ranks have ended, by themselves or after the steps that were asked for."""
        return len(self._ended()) >= self._world

    @property
    def some_stopped(self) -> bool:
        """Whether a rank was ended after the steps that were asked for."""
        return any(self._ended())

    def _ended(self) -> list[bool]:
        """Of each rank that has ended, whether that was after the steps that were asked for."""
        records = [json.loads(path.read_text(encoding="utf-8")) for path in self._out.glob("rank-*.end")]
        return [bool(end["stopped"]) for end in records if end["over"]]

    def let_go(self) -> None:
        """In the child of a fork: the log is the parent's."""
        if self._log is not None:
            self._log.close()

    def tap(self, at: At, value: Any, parts: Container[str], optimizers: int) -> None:
        """Perturb or dump, where one of these is the signal that is meant. What no rank has whole is not dumped.

        Args:
            at: Step, counted from the first that the process makes, phase and name, as they are met.
            value: The signal, or a mapping of what is added to the name to signals.
            parts: Those of which this rank has a part.
            optimizers: How many the program has.
        """
        if not self._settings.perturbation and not self._settings.dump:
            return
        step, phase, name = self._settings.first + at[0], *at[1:]
        for key, tensor in (value if isinstance(value, Mapping) else {"": value}).items():
            if isinstance(tensor, torch.Tensor):
                self._tap((step, phase, name + key), tensor, optimizers, whole=key not in parts)

    def _tap(self, at: At, tensor: torch.Tensor, optimizers: int, *, whole: bool) -> None:
        from repro_golden.recording.attach.process import place_of

        step, phase, name = at
        rank = place_of()[0]
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        mine = at, (step, phase, f"{name}@{rank}")
        if any(tuple(planted) in mine for planted in self._settings.perturbation) and local.numel():
            from repro_golden.recording.tap import perturbed_by_one_ulp

            sign = self._out / f"planted-{os.getpid()}"
            sign.touch()
            self._planted += [(step, perturbed_by_one_ulp(local)), (step, lambda: sign.unlink(missing_ok=True))]
        for met in mine if whole and local is tensor else ():
            if any(may_be((wanted[0], wanted[1], wanted[2]), met, optimizers) for wanted in self._settings.dump):
                _dump(self._out, met, tensor, rank)

    def take_back(self, step: int) -> None:
        """Undo what was planted in the step under way, which is none; `step` as of `tap`."""
        for planted_in, undo in self._planted:
            if planted_in == self._settings.first + step:
                undo()
        self._planted.clear()


def _dump(out: Path, at: At, tensor: torch.Tensor, rank: int) -> None:
    """Write all of a signal beside the records; that of the lowest rank will stand: see `order.take_dumps`.

    Args:
        out: The folder of raw records.
        at: The signal as it is met.
        tensor: The signal.
        rank: Of this process: a later pipeline stage has signals of its own.
    """
    from repro_golden.trace.signals import collector

    reading = collector()
    reading.add([tensor], keep=True)
    folder = out / "dumps" / f"{rank:05d}-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / dump_name(at)
    part = path.with_suffix(".part")
    part.write_bytes(reading.finish().result()[0][0].values or b"")
    part.replace(path)

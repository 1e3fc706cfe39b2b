"""The operations of one step of a program that knows nothing of it, or of the steps of one round of its optimizers.

A step's operations are those from the end of the step before to its own end; those of the first one begin where torch
was imported, so what makes the model is among them. Where a program updates its parameters by hand nobody sees an
update's end, behind which the next forward pass stands: a step's operations are those from the end of the backward pass
before, with that update. Only the thread that steps is watched, and autograd's.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from repro_golden.base.clean import one_line
from repro_golden.recording.attach.process import place_of
from repro_golden.recording.operations.lines import files_in
from repro_golden.recording.operations.recorder import OperationRecorder

__all__ = ["StepOperations"]


class StepOperations:
    """Begins and ends a recording; what goes wrong is one line on stderr, and the program goes on."""

    def __init__(self, ask: Mapping[str, Any]) -> None:
        """Record as `children.Run.operations` says; its step counts from this process's first."""
        self._step, self._until = int(ask["step"]), int(ask["until"])
        self._recorder = OperationRecorder(
            Path(ask["folder"]), ask["root"], self._step, dump=ask["dump"], changed=files_in(ask["changed"])
        )
        self._under_way, self._now = False, 0
        os.register_at_fork(after_in_child=self._recorder.abandon)

    def at(self, step: int) -> None:
        """A step is about to be made. Called outside of all that sets the program's modes aside."""
        self._now = step
        self.before(step)
        with self._told():
            if step > self._until and self._under_way:
                self._under_way = False
                self._recorder.pause()
                self._recorder.close()

    def before(self, step: int) -> None:
        """What is done from here on belongs to a step, though signals of the one before are still to come."""
        with self._told():
            if step == self._step and not self._under_way:
                self._recorder.rank = place_of()[0]
                self._recorder.open()
                self._recorder.preparing = step == 0
                self._recorder.begin()
                self._under_way = True

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the program is not to suffer from it
            text = one_line(f"{type(error).__name__}: {error}")[:300]
            print(f"repro: the operations of step {self._step} are not recorded ({text})", file=sys.stderr)

    def observed(self, phase: str, name: str, value: Any) -> None:
        """A signal was taken."""
        if self._under_way and self._now >= self._step:
            self._recorder.observed(phase, name, value)

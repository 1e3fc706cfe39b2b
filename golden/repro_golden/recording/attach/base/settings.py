"""What the instrument asks of a recording process, carried by one environment variable."""

from __future__ import annotations

import fnmatch
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from repro_golden.base.observed import ALL_SIGNALS, state_after

__all__ = ["VARIABLE", "Settings"]

VARIABLE = "REPRO_TRACE"


@dataclass(frozen=True)
class Settings:
    """How to record.

    Attributes:
        out: Folder that receives the raw records of every rank.
        steps: End the process when it is about to make a step beyond so many; None lets it run.
        record: Whether to record steps at all; without it only the terminal state is hashed.
        terminal: Whether to hash the state after the last step: parameters, optimizer state, generators, metrics.
        activations: Globs of module names whose outputs, and their gradients, are recorded.
        metrics: Regular expressions over lines of output whose named groups are metrics.
        ignore: Globs of metrics to leave out.
        signals: ``full``; or ``light:N``, where optimizer state is read after each N-th step alone.
        first: The number of the first step that the process makes.
        perturbation: ``[step, phase, name]``, as they are met (`order.as_planted`), of signals that get a one-ULP
            change before they are read.
        dump: ``[step, phase, name]``, as a trace has them, of signals whose whole content is written.
        home: The user's checkout, when `place` is another.
        place: The code under test.
        alone: Whether no module may come from another working tree (`attach.strangers`), nor what `datasets` made of
            data from another run.
        operations: The step whose operations are recorded, as `children.Run.operations` has it, counted from the first
            that the process makes.
        recorder: Whether steps are looked at at all; without it only `entry` is served.
        entry: What is added to a trainer's command line (`entry.enter`), with the ``names`` of its entry points.
        variables: Of the environment, for workers of Ray whose own does not set them.
    """

    out: str
    steps: int | None = None
    record: bool = True
    terminal: bool = False
    activations: Sequence[str] = ()
    metrics: Sequence[str] = ()
    ignore: Sequence[str] = ()
    signals: str = ALL_SIGNALS
    first: int = 0
    perturbation: Sequence[Sequence[Any]] = ()
    dump: Sequence[Sequence[Any]] = ()
    home: str | None = None
    place: str | None = None
    alone: bool = False
    operations: Mapping[str, Any] | None = None
    recorder: bool = True
    entry: Mapping[str, Any] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def state_after(self, step: int) -> bool:
        """Whether optimizer state is read after a step, counted from the first that the process makes."""
        return state_after(self.signals, self.first + step)

    def ignores(self, name: str) -> bool:
        """Whether nobody wants a signal of what lives beside the optimizers, or of a file."""
        return any(fnmatch.fnmatchcase(name, glob) for glob in self._no_metrics)

    @functools.cached_property
    def _no_metrics(self) -> list[str]:
        from repro_golden.trace.families import FAMILIES

        return [glob for glob in self.ignore if glob.partition("/")[0] in FAMILIES]

    def to_text(self) -> str:
        """The variable's value."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Settings:
        """The inverse of `to_text`."""
        return cls(**json.loads(text))

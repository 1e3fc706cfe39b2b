"""What is asked of a probe, and where an answer comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from repro_bisect.probe.executors import Signal, State
from repro_bisect.probe.progress import Stage
from repro_golden.trace import Trace

__all__ = ["Made", "Request"]


@dataclass(frozen=True)
class Request:
    """One probe: a point over its first steps, or to its first violation of the predicate.

    Attributes:
        point: Full id of a commit, or the name of another point.
        steps: Most steps to train.
        baseline: What its steps are judged against while it runs, and what is known of it; None makes every step.
        stage: What it is for.
        run: 0 shares what was found before; other numbers are replays of their own.
        full: Make every step, also past the first violation.
        dump: Signals whose whole content is wanted; such a probe is full. With more than 64 MiB of them it is not
            journalled, and its trace goes when the prober closes.
        partial: Take what a crashing commit left, if that is at least one step, instead of skipping it.
        start: State to start from.
        alone: Wait until no other probe runs, and have none begin.
        keep: Steps before which the state is saved on the way, and the folder where it is kept (`States.folder`).
    """

    point: str
    steps: int
    baseline: Trace | None = None
    stage: Stage = "search"
    run: int = 0
    full: bool = False
    dump: Sequence[Signal] = ()
    partial: bool = False
    start: State | None = None
    alone: bool = False
    keep: tuple[Sequence[int], Path] | None = None

    @property
    def whole(self) -> bool:
        """Whether every step is wanted."""
        return self.full or bool(self.dump)


@dataclass(frozen=True)
class Made:
    """Where an answer comes from.

    Attributes:
        commit: The commit that was replayed: the asked one, or one with the same key.
        search: The search that did; "" where that was not kept.
        beside: Whether other probes of it ran at the same time.
    """

    commit: str
    search: str
    beside: bool = field(default=False, compare=False)

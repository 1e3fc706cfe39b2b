"""Nights and pull requests as TensorBoard event files, written by TensorBoard's own writer, without TensorFlow.

Event files hold float32: that is what a chart shows, and `golden/nights` keeps the exact numbers.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from repro.nightly.records import STATUSES, NightlyRun
from repro_golden.base.canonical import digest, write_atomic
from repro_golden.base.errors import ReproError
from repro_golden.base.extras import require
from repro_golden.base.machine.usage import Usage

if TYPE_CHECKING:
    from repro.pulls.pair import PairResult
    from repro_bisect.driver.drift import Drift, Moved

__all__ = ["write_nightly_runs", "write_pulls"]

_FILE = "events.out.tfevents.0.repro"
"""One name, so that a later call replaces the file. TensorBoard looks for ``tfevents`` in it."""
_LONGEST = 120

STATUS_TEXT = "`night/status`: " + ", ".join(f"{number} is {status}" for number, status in enumerate(STATUSES))


def write_nightly_runs(nightly_runs: Sequence[NightlyRun], folder: Path) -> None:
    """Write one run ``MACHINE/CASE`` for each machine and case, one point a night.

    Step is the night's number among those given, from 0, in the order of time, and wall time is the night's own. Of
    each metric there is ``NAME/last``, ``NAME/low`` and ``NAME/high`` over the night's steps; beside them ``kl/k1`` and
    ``kl/k3`` against the baseline in nats, ``night/status`` as a number that a text explains, ``night/step_seconds``
    and ``night/seconds``. What a night does not know has no point. A run's file of an earlier call is replaced.

    Args:
        nightly_runs: In any order.
        folder: TensorBoard's ``--logdir``; made where it is missing.

    Raises:
        ReproError: TensorBoard is not installed.
        MachineFailureError: a file cannot be written.
    """
    runs: dict[tuple[str, str], list[NightlyRun]] = {}
    for nightly_run in sorted(nightly_runs, key=lambda n: n.at):
        runs.setdefault((nightly_run.machine, nightly_run.case), []).append(nightly_run)
    for (machine, case), history in runs.items():
        tags = _Tags()
        run = _Run(_seconds(history[0].at))
        run.text("night/statuses", STATUS_TEXT, _seconds(history[0].at))
        for number, nightly_run in enumerate(history):
            for place, name, value in _run(nightly_run):
                run.scalar(tags.of(name, place), number, value, _seconds(nightly_run.at))
        run.write(folder / _folder(machine) / _folder(case))


def _run(nightly_run: NightlyRun) -> Iterator[tuple[str, str, float]]:
    """(place, name, value) of everything a night knows; a metric's place is below its name, our own have a group."""
    yield "", "night/status", float(STATUSES.index(nightly_run.status))
    yield "", "night/seconds", nightly_run.seconds
    seconds = Usage(**nightly_run.spent).step_seconds if nightly_run.spent else None
    if seconds is not None:
        yield "", "night/step_seconds", seconds
    for name, value in nightly_run.kl.items():
        yield "", f"kl/{name}", value
    for name, summary in nightly_run.metrics.items():
        yield "last", name, summary.last
        yield "low", name, summary.low
        yield "high", name, summary.high


def write_pulls(results: Sequence[PairResult], folder: Path) -> None:
    """Write the runs ``CASE/base`` and ``CASE/head`` of a pull request, for each case that was compared.

    A comparison keeps a metric where it first differs, where it differs most, and at the last step: those are the
    points, under the metric's name. The head's run also has ``kl/k1`` and ``kl/k3``, KL(base || head) in nats. Step is
    the optimizer update, wall time is that of the comparison. A run's file of an earlier call is replaced.

    Args:
        results: One of each case. Those without numbers of their own, such as identical code, have no run.
        folder: TensorBoard's ``--logdir``; made where it is missing.

    Raises:
        ReproError: TensorBoard is not installed; or a case comes twice.
        MachineFailureError: a file cannot be written.
    """
    if len({result.case for result in results}) < len(results):
        raise ReproError("two results of one case: write each pull request to a folder of its own")
    for result in results:
        if result.compared is None:
            continue
        drift, at = result.compared.drift, _seconds(result.at)
        for side in ("base", "head"):
            tags = _Tags()
            run = _Run(at)
            points = [*_kl(drift), *_side(drift.metrics, side)] if side == "head" else _side(drift.metrics, side)
            for name, step, value in points:
                run.scalar(tags.of(name), step, value, at)
            run.write(folder / _folder(result.case) / side)


def _side(metrics: Mapping[str, Moved], side: str) -> Iterator[tuple[str, int, float]]:
    """(name, step, value) of one side, in the order of the steps and each step once."""
    for name, moved in metrics.items():
        gaps = {gap.step: gap for gap in (moved.first, moved.worst, moved.last) if gap}
        for step in sorted(gaps):
            value = gaps[step].a if side == "base" else gaps[step].b
            if value is not None:
                yield name, step, value


def _kl(drift: Drift) -> Iterator[tuple[str, int, float]]:
    for name, places in drift.kl.items():
        for step, value in sorted(dict(places.values()).items()):
            yield f"kl/{name}", step, value


class _Tags:
    """Names as tags. Different names never share one."""

    def __init__(self) -> None:
        self._taken: dict[str, tuple[str, str]] = {}

    def of(self, name: str, place: str = "") -> str:
        """The tag of a name, below which `place` lies. A name is cut to size and keeps words, spaces and ``-./``."""
        clean = re.sub(r"[^\w\-./ ]", "_", name)
        parts = [part.strip() for part in clean.split("/")]
        tag = "/".join([p for p in parts if p] or ["_"])[:_LONGEST].strip("/ ")
        whole = f"{tag}/{place}" if place else tag
        while self._taken.setdefault(whole, (name, place)) != (name, place):
            tag = f"{tag}_{digest(name.encode('utf-8', 'surrogatepass'))[:8]}"
            whole = f"{tag}/{place}" if place else tag
        return whole


def _folder(name: str) -> str:
    """A name as one folder: never a path, never hidden, never too long; different names never share one."""
    quoted = quote(name, safe=" ~+@", errors="surrogatepass")
    if not quoted.strip(". ") or quoted.startswith("."):
        quoted = "%2E" + quoted[1:] if quoted else "%"
    if len(quoted) > _LONGEST:
        return f"{quoted[:_LONGEST]}%{digest(quoted)[:12]}"
    return quoted


def _seconds(at: str) -> float:
    """A time in UTC, as ISO 8601, in seconds since 1970."""
    return datetime.fromisoformat(at).timestamp()


class _Run:
    """One run under way, in memory, so that its file is whole or absent."""

    def __init__(self, began: float) -> None:
        """Begin a file as TensorBoard expects it; `began` is in seconds since 1970.

        Raises:
            ReproError: TensorBoard is not installed.
        """
        require("a TensorBoard event file", "tensorboard")
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        self._content = io.BytesIO()
        self._records = RecordWriter(self._content)
        self._records.write(Event(wall_time=began, file_version="brain.Event:2").SerializeToString())

    def scalar(self, tag: str, step: int, value: float, at: float) -> None:
        """One point, rounded to float32; what lies beyond becomes infinite."""
        with np.errstate(over="ignore"):
            single = float(np.float32(value))
        self._add(self._summary.Value(tag=tag, simple_value=single), step, at)

    def text(self, tag: str, markdown: str, at: float) -> None:
        """A text, as TensorBoard's tab of texts shows it."""
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.plugins.text.metadata import create_summary_metadata

        metadata = create_summary_metadata(display_name="", description="")
        tensor = TensorProto(dtype="DT_STRING", string_val=[markdown.encode()])
        self._add(self._summary.Value(tag=tag, metadata=metadata, tensor=tensor), 0, at)

    def write(self, folder: Path) -> None:
        """Keep the run, in place of what an earlier call wrote there."""
        write_atomic(folder / _FILE, self._content.getvalue())

    def _add(self, value: Any, step: int, at: float) -> None:
        event = self._event(wall_time=at, step=step, summary=self._summary(value=[value]))
        self._records.write(event.SerializeToString())

"""The data of a case's page: columns over its nights, and the charts that are drawn of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repro.nightly.records import NightlyRun
from repro.site.changes import Change
from repro.site.charts import series_chart, unit_of
from repro.site.folder import nightly_key, number
from repro.site.results import Results, when
from repro_golden.base.clean import visible
from repro_golden.base.machine.usage import Usage

__all__ = ["STATISTICS", "Figure", "case_data", "figures"]

STATISTICS = {
    "last": "last step",
    "median": "median",
    "first": "first step",
    "low": "lowest",
    "high": "highest",
}
"""What is shown of a night's steps."""

_FIRST = ("grad_norm", "KL k3", "kl_loss", "loss", "train_rollout_logprob_abs_diff")
_TIME = ("step time", "memory of the host", "memory of the device", "wall time")


@dataclass(frozen=True)
class Figure:
    """A chart of a case's page.

    Attributes:
        name: What it shows.
        group: ``first``, ``other`` or ``cost``.
        unit: Its unit; empty for none.
        values: One list for each statistic, or one called ``value``; None where a night has none.
        spec: The chart.
    """

    name: str
    group: str
    unit: str
    values: Mapping[str, Sequence[float | None]]

    @property
    def spec(self) -> dict[str, Any]:
        """The chart."""
        return series_chart(self.name, self.unit)

    @property
    def log(self) -> bool:
        """Whether a log scale serves: every value is above 0, and they span a factor of ten."""
        finite = [v for column in self.values.values() for v in column if v is not None and math.isfinite(v)]
        return bool(finite) and min(finite) > 0 and max(finite) >= 10 * min(finite)


def figures(runs: Sequence[NightlyRun]) -> list[Figure]:
    """Every chart of a case, the decisive ones first."""
    names = sorted({name for run in runs for name in run.metrics})
    by_name = {name: Figure(name, "other", unit_of(name), _metric(runs, name)) for name in names}
    for estimator in sorted({name for run in runs for name in run.kl}):
        values = {"value": [run.kl.get(estimator) for run in runs]}
        by_name[f"KL {estimator}"] = Figure(f"KL {estimator}", "other", "nats", values)
    ordered = []
    for wanted in _FIRST:
        for name in [key for key in by_name if key == wanted or key.rpartition("/")[2] == wanted]:
            figure = by_name.pop(name)
            ordered.append(Figure(name, "first", figure.unit, figure.values))
    return [*ordered, *by_name.values(), *_cost(runs)]


def _metric(runs: Sequence[NightlyRun], name: str) -> dict[str, list[float | None]]:
    summaries = [run.metrics.get(name) for run in runs]
    return {key: [None if summary is None else getattr(summary, key) for summary in summaries] for key in STATISTICS}


def _cost(runs: Sequence[NightlyRun]) -> Iterable[Figure]:
    usages = [Usage(**run.spent) if run.spent else None for run in runs]
    columns: tuple[list[float | None], ...] = (
        [usage.step_seconds if usage else None for usage in usages],
        [usage.host_bytes / 2**20 or None if usage else None for usage in usages],
        [usage.device_bytes / 2**20 or None if usage else None for usage in usages],
        [run.seconds for run in runs],
    )
    for name, unit, column in zip(_TIME, ("s", "MiB", "MiB", "s"), columns, strict=True):
        if any(value is not None for value in column):
            yield Figure(name, "cost", unit, {"value": column})


class Texts:
    """Texts that are written once and named by their number."""

    def __init__(self) -> None:
        self.all: dict[str, int] = {}

    def __call__(self, text: object) -> int:
        """The number of a text."""
        return self.all.setdefault(str(text), len(self.all))


def case_data(results: Results, runs: Sequence[NightlyRun], changes: Sequence[Change], drawn: Sequence[Figure]) -> Any:
    """What the page's script reads: columns rather than rows, each text once.

    Args:
        results: Everything.
        runs: Of the case, oldest first.
        changes: Its changes.
        drawn: Its charts.
    """
    text = Texts()
    commits = [run.commit for run in runs]
    columns = {
        "at": [int(when(run.at).timestamp()) for run in runs],
        "key": [nightly_key(run) for run in runs],
        "machine": [text(run.machine) for run in runs],
        "status": [text(run.status) for run in runs],
        "commit": [text(commit["commit"]) for commit in commits],
        "subject": [text(commit.get("subject", "")) for commit in commits],
        "author": [text(commit.get("author", "")) for commit in commits],
        "chain": [text(run.chain) for run in runs],
        "kind": [text(run.baseline.kind) for run in runs],
        "baseline": [text(run.baseline.commit) for run in runs],
        "page": [text(results.page_of(run)) for run in runs],
        "reproduce": [text(run.reproduce) for run in runs],
        "looked": [text(run.looked) for run in runs],
        "version": [text(run.version) for run in runs],
        "checks": [[text(part) for c in run.checks for part in (c.name, c.status, c.text)] for run in runs],
    }
    charts = {
        visible(figure.name): {  # as the page writes it, which asks by it
            "spec": figure.spec,
            "log": figure.log,
            "unit": figure.unit,
            "values": {key: [number(v) for v in column] for key, column in figure.values.items()},
        }
        for figure in drawn
    }
    marks = {
        "at": [int(when(change.run.at).timestamp()) for change in changes],
        "machine": [text(change.run.machine) for change in changes],
        "status": [text(change.run.status) for change in changes],
        "what": [text(_by(change)) for change in changes],
    }
    machines = sorted({run.machine for run in runs})
    return {"machines": machines, "nights": columns, "changes": marks, "charts": charts, "texts": list(text.all)}


def _by(change: Change) -> str:
    commits = [culprit["commit"] for culprit in change.culprits]
    if commits:
        return "; ".join(f"{commit['commit'][:10]} {commit['subject']}" for commit in commits)
    if change.span and change.same_code:
        return f"{change.text} without a change of its code"
    if change.span:
        return f"{change.text}, {change.span[0][:10]}..{change.span[1][:10]}"
    return change.text

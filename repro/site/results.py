"""What the site is made of: nights, and reports on pull requests, each with the file that it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from repro.nightly.records import NightlyRun, NightlyRuns
from repro.site.folder import comparison_name
from repro_golden.base.canonical import check_format, read_json
from repro_golden.base.errors import ReproError

__all__ = ["Comparison", "Results", "damaged", "read_results", "when"]

VERDICTS = ("identical", "within", "moved", "flaky", "unverifiable", "error")


@dataclass(frozen=True)
class Comparison:
    """Two versions of a case on a machine, beside each other.

    Attributes:
        name: Its page's file name, without the ending.
        source: The file that says it.
        kind: ``night`` or ``pull``.
        case: The case's name.
        machine: Short name of the identity.
        at: When, in UTC.
        status: A night's status, or a pair's verdict.
        before: Facts of the baseline's commit, as `repro_bisect.axes.axis.PointInfo` has them; only ``commit`` of a
            night's.
        after: Facts of the other commit.
        against: What the baseline is, in words.
        compared: `repro.pulls.pair.Compared` as JSON; None where nothing differs or nothing was replayed.
        culprits: `repro_bisect.driver.result.Culprit`, each as JSON.
        bisect: ``range``, ``outcome`` and ``reproduce`` of the search; None where there was none.
        notes: Lines that a reader should know: reasons, checks.
        spent: By side, `repro_golden.base.machine.usage.Usage` as JSON.
        reproduce: The command that does it again.
        run: The night, of a night.
    """

    name: str
    source: str
    kind: str
    case: str
    machine: str
    at: str
    status: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    against: str
    compared: Mapping[str, Any] | None
    culprits: Sequence[Mapping[str, Any]]
    bisect: Mapping[str, Any] | None
    notes: Sequence[str]
    spent: Mapping[str, Any]
    reproduce: str
    run: NightlyRun | None = None


@dataclass(frozen=True)
class Results:
    """All that was found.

    Attributes:
        runs: Oldest first.
        comparisons: Of nights whose numbers differ from their baseline's, and of pull requests, oldest first.
        folder: Where the nights lie.
        by_night: The names of nights' comparisons, by `Night.place`.
    """

    runs: Sequence[NightlyRun]
    comparisons: Sequence[Comparison]
    folder: Path
    by_run: Mapping[tuple[str, ...], str] = field(default_factory=dict)

    def page_of(self, run: NightlyRun) -> str:
        """The name of a night's comparison; empty where it has none."""
        return self.by_run.get(run.place, "")

    @property
    def pulls(self) -> list[Comparison]:
        """Those of pull requests."""
        return [comparison for comparison in self.comparisons if comparison.kind == "pull"]

    @property
    def newest(self) -> str:
        """When the newest result was made: the only time that the site states of itself."""
        times = [run.at for run in self.runs] + [comparison.at for comparison in self.comparisons]
        return max(times)


def read_results(folder: Path, pulls: Sequence[Path]) -> Results:
    """Read everything.

    Raises:
        ReproError: there is nothing, or a file is damaged; one line names it.
    """
    runs = NightlyRuns(folder).read()
    comparisons: dict[str, Comparison] = {}
    by_run = {}
    for run in runs:
        path = folder / run.machine / run.case
        with damaged(f"the result of {run.at} in {path}"):
            when(run.at)
            if not isinstance(run.commit["commit"], str):
                raise TypeError("its commit is no text")
            if run.compared is not None:
                comparison = _of_run(run, str(path / run.name))
                by_run[run.place] = comparisons.setdefault(comparison.name, comparison).name
    for path in pulls:
        for comparison in _of_pull(path):  # the same pair given twice is one page
            comparisons.setdefault(comparison.name, comparison)
    if not runs and not comparisons:
        raise ReproError(
            f"no results in {folder}: run `repro report nightly` first, or name their folder with --results"
        )
    return Results(runs, sorted(comparisons.values(), key=lambda c: (c.at, c.name)), folder, by_run)


@contextmanager
def damaged(source: object) -> Iterator[None]:
    """Whatever is wrong with what a file says becomes one line that names the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ReproError(
            f"{source} is damaged ({type(error).__name__}: {error}): restore it, or leave it out"
        ) from None


def when(at: str) -> datetime:
    """A time; ValueError where it is none. Of a commit's own time zone, it is turned into UTC."""
    time = datetime.fromisoformat(at)
    return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)


def _of_run(run: NightlyRun, source: str) -> Comparison:
    baseline, (case, machine, at, *of) = run.baseline, run.place
    against = {
        "golden": "the golden run",
        "last green": "the last green night",
        "approved": "the commit at which a golden run was approved",
        "none": "nothing",
    }[baseline.kind]
    return Comparison(
        name=comparison_name(case, machine, at, baseline.commit or baseline.chain, *of),
        source=source,
        kind="night",
        case=run.case,
        machine=run.machine,
        at=run.at,
        status=run.status,
        before={"commit": baseline.commit},
        after=run.commit,
        against=against,
        compared=run.compared,
        culprits=run.culprits,
        bisect=run.bisect,
        notes=[
            *(f"{check.name}: {check.status}. {check.text}" for check in run.checks),
            *([f"looked at {run.looked}"] if run.looked else []),
            *(f"search: {text}" for text in run.search),
        ],
        spent={"after": run.spent},
        reproduce=run.reproduce,
        run=run,
    )


def _of_pull(path: Path) -> list[Comparison]:
    """The comparisons of a report on a pull request, or of one pair alone, which has no number of a format."""
    from repro.pulls.result import FORMAT

    raw = read_json(path, "report of a pull request")
    check_format(raw.get("format", FORMAT), FORMAT, f"the report {path}")
    with damaged(path):
        pairs = raw.get("results", [raw])
        if not isinstance(pairs, list):
            raise TypeError("its results are no list")
        return [_of_pair(_whole(pair, raw), str(path), str(raw.get("reproduce") or "")) for pair in pairs]


def _whole(pair: Mapping[str, Any], report: Mapping[str, Any]) -> Mapping[str, Any]:
    """A case that failed says no more than why: the rest is the report's."""
    endpoints = {side: {"commit": report[side]} for side in ("base", "head") if side not in pair}
    return {"machine": "", "at": report.get("at"), **pair, **endpoints}


def _of_pair(pair: Mapping[str, Any], source: str, reproduce: str) -> Comparison:
    before, after = pair["base"], pair["head"]
    if pair["verdict"] not in VERDICTS:
        raise ValueError(f"no verdict: {pair['verdict']}")
    when(pair["at"])
    commits = [str(side["commit"])[:10] for side in (before, after)]
    notes = [pair.get("reason"), pair.get("unnamed"), *(pair.get("notes") or ())]
    looked = ((pair.get("compared") or {}).get("drift") or {}).get("looked_at")
    notes += [f"looked at {looked['text']}"] if looked else []
    search = pair.get("bisect")
    notes += [f"search: {text}" for text in (search or {}).get("remarks") or () if text not in notes]
    usage = pair.get("spent") or {}
    case, machine = str(pair["case"]), str(pair["machine"])
    return Comparison(
        name=comparison_name(case, machine, pair["at"], str(before["commit"]), str(after["commit"])),
        source=source,
        kind="pull",
        case=case,
        machine=machine,
        at=pair["at"],
        status=pair["verdict"],
        before=before,
        after=after,
        against="where the branch left its base",
        compared=pair.get("compared"),
        culprits=pair.get("culprits") or (),
        bisect={"range": f"{search['good'][:10]}..{search['bad'][:10]}", "outcome": search["outcome"], "reproduce": ""}
        if search
        else None,
        notes=[str(note) for note in notes if note],
        spent={"before": usage.get("base"), "after": usage.get("head")},
        reproduce=reproduce or f"repro report pr {commits[0]}..{commits[1]} --case {case}",
    )

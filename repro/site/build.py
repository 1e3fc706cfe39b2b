"""The files of the site."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from repro import __version__
from repro.nightly.records import NightlyRun
from repro.report.palette import css
from repro.report.pieces import seen
from repro.site.changes import Change, changes, together
from repro.site.comparison import explanations, metrics, shown, spent_rows
from repro.site.difference_charts import difference_charts
from repro.site.folder import page_name, script
from repro.site.matrix import SHOWN, SYMBOLS, matrix
from repro.site.results import Comparison, Results, damaged, when
from repro.site.series import STATISTICS, case_data, figures
from repro_bisect.axes.axis import short
from repro_golden.base.errors import ReproError

if TYPE_CHECKING:
    import jinja2

__all__ = ["Options", "build"]

_ASSETS = ("page.css", "page.js", "charts.js", "case.js")
_LATEST = 12
"""Changes of the first page."""

_STATUS_OF = {"identical": "green", "within": "green", "moved": "changed", "unverifiable": "not judged"}
"""A verdict's status: the two share colours and symbols."""


@dataclass(frozen=True)
class Options:
    """What the site says beside its results.

    Attributes:
        title: Of the first page.
        results: The folder of nights, as it was given.
        pulls: The reports on pull requests, as they were given.
        repository: Where commits link to; empty for nowhere.
    """

    title: str
    results: str
    pulls: Sequence[str]
    repository: str

    def __post_init__(self) -> None:
        """Refuse what is no address of a repository.

        Raises:
            ReproError: it would make a link that a browser runs, or none.
        """
        if self.repository and not re.fullmatch(r"https?://[^\s\"'<>]+", self.repository):
            raise ReproError(
                f"--repository {self.repository} is no http or https address, such as https://github.com/o/r"
            )

    @property
    def command(self) -> str:
        """What builds the same site again; its folder decides none of its bytes."""
        return self.command_into("site")

    def command_into(self, out: str) -> str:
        """What builds it again into a folder."""
        argv = ["repro", "report", "publish", "--out", out, "--results", self.results]
        argv += [word for pull in self.pulls for word in ("--pull", pull)]
        argv += ["--title", self.title] if self.title != DEFAULT_TITLE else []
        argv += ["--repository", self.repository] if self.repository else []
        return shlex.join(argv)


DEFAULT_TITLE = "Numbers by night"


def build(results: Results, options: Options) -> dict[str, bytes]:
    """Every file of the site by its path. The same results and options give the same bytes, whenever that is."""
    assets = resources.files("repro").joinpath("site", "assets")
    files = {f"assets/{name}": assets.joinpath(name).read_bytes() for name in _ASSETS}
    files["assets/page.css"] = css().encode() + files["assets/page.css"]
    pages = _Pages(results, options)
    cases: dict[str, list[NightlyRun]] = {}
    for run in results.runs:
        cases.setdefault(run.case, []).append(run)
    every: list[Change] = []
    for case, runs in cases.items():
        with damaged(f"a result of {case} in {results.folder}"):
            case_changes = changes(runs)
            files |= pages.case(case, runs, case_changes)
        every += case_changes
    for comparison in results.comparisons:
        with damaged(comparison.source):
            files |= pages.comparison(comparison)
    files |= pages.overview(every)
    if any(name.startswith("data/") for name in files):
        files["assets/vega.js"] = _vega()
    return files


@cache
def _vega() -> bytes:
    """Vega, Vega-Lite and Vega-Embed in one file, from the package that also renders the reports' plots."""
    import vl_convert

    return str(vl_convert.javascript_bundle()).encode()  # type: ignore[call-arg]  # its stub forgets the default


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [
                jinja2.PackageLoader("repro", "site/templates"),
                jinja2.PrefixLoader({"report": jinja2.PackageLoader("repro", "report/templates")}),
            ]
        ),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=seen,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = lambda name: short(str(name))
    environment.filters["page"] = page_name
    environment.filters["time"] = _time
    environment.filters["minute"] = lambda at: _time(at).removesuffix(" UTC")
    environment.filters["day"] = lambda at: _time(at)[:10]
    environment.filters["number"] = shown
    environment.filters["name"] = lambda author: re.sub(r"\s*<[^<>]*>$", "", str(author))
    environment.filters["status"] = lambda verdict: _STATUS_OF.get(verdict, verdict)
    environment.filters["kind"] = lambda status: str(status).replace(" ", "-")
    environment.globals["symbols"] = SYMBOLS
    return environment


def _time(at: object) -> str:
    """A time in UTC to read; of what is no time, the text."""
    try:
        return f"{when(str(at)):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return str(at)


class _Pages:
    def __init__(self, results: Results, options: Options) -> None:
        self._results = results
        runs = results.runs
        self._facts: dict[str, Any] = {
            "site": options.title,
            "command": options.command,
            "version": __version__,
            "newest": results.newest,
            "nights": len(runs),
            "oldest": runs[0].at if runs else results.newest,
            "pulls": len(results.pulls),
            "repository": options.repository.rstrip("/"),
        }

    def _page(self, template: str, root: str, **context: Any) -> bytes:
        text: str = _environment().get_template(template).render(self._facts, root=root, **context)
        return text.encode()

    def overview(self, every: Sequence[Change]) -> dict[str, bytes]:
        """The first page, and that of all nights where there are more than it shows."""
        latest = together(every)
        context: dict[str, Any] = {
            "latest": [_told(self._results, group) for group in latest[:_LATEST]],
            "changed": len(latest),
            "pairs": self._results.pulls[::-1],
        }
        dates = len({run.at[:10] for run in self._results.runs})
        pages = {"index.html": SHOWN} | ({"nights.html": None} if dates > SHOWN else {})
        return {
            name: self._page(
                "index.html.jinja", "", table=matrix(self._results, last), dates=dates, here=name, few=SHOWN, **context
            )
            for name, last in pages.items()
        }

    def case(self, case: str, runs: Sequence[NightlyRun], changes: Sequence[Change]) -> dict[str, bytes]:
        """A case's page and its data."""
        drawn = figures(runs)
        name = page_name(case)
        key = f"case:{name}"
        page = self._page(
            "case.html.jinja",
            "../",
            case=case,
            key=key,
            own=runs,
            last=[run for run in runs[::-1] if run.at[:10] == runs[-1].at[:10]],
            machines=sorted({run.machine for run in runs}),
            found=[_told(self._results, group) for group in together(changes)],
            figures=drawn,
            statistics=STATISTICS,
            data=f"../data/{name}.js",
        )
        data = script(key, case_data(self._results, runs, changes, drawn))
        return {f"cases/{name}.html": page, f"data/{name}.js": data.encode()}

    def comparison(self, comparison: Comparison) -> dict[str, bytes]:
        """A comparison's page, and its data where it has charts."""
        compared = comparison.compared
        plot_data = compared["picture"] if compared else None
        labels = (short(str(comparison.before["commit"])) or "the baseline", short(str(comparison.after["commit"])))
        drawn = difference_charts(plot_data, labels) if plot_data else []
        key = f"comparison:{comparison.name}"
        page = self._page(
            "comparison.html.jinja",
            "../",
            found=comparison,
            key=key,
            drift=compared["drift"] if compared else None,
            metrics=metrics(compared["drift"]) if compared else [],
            violations=compared["violations"] if compared else [],
            flaky=compared["flaky"] if compared else "",
            drawn=drawn,
            culprits=list(explanations(comparison.culprits)),
            spent=spent_rows(comparison.spent),
            data=f"../data/comparisons/{comparison.name}.js" if drawn else "",
            has_case=any(run.case == comparison.case for run in self._results.runs),
        )
        files = {f"comparisons/{comparison.name}.html": page}
        if drawn:
            charts = {chart.name: {"spec": chart.spec, "columns": chart.columns, "head": chart.head} for chart in drawn}
            files[f"data/comparisons/{comparison.name}.js"] = script(key, {"charts": charts}).encode()
        return files


def _told(results: Results, group: Sequence[Change]) -> Mapping[str, Any]:
    """A change for a template; the machines that saw it, each with its comparison and how long the numbers stayed."""
    change = group[0]
    return {
        "change": change,
        "night": change.run,
        "machines": [(member.run.machine, results.page_of(member.run), member.runs) for member in group],
        "commits": [culprit["commit"] for culprit in change.culprits],
        "texts": [(culprit.get("explanation") or {}).get("text", "") for culprit in change.culprits],
        "same": change.span is not None and change.same_code,
    }

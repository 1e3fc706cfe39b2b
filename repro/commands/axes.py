"""What commands that go along an axis have in common: ``GOOD..BAD``, or releases, a file of changes, two layouts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from repro.output import parameters

if TYPE_CHECKING:
    from repro_bisect.axes.axis import Axis
    from repro_bisect.driver.session import Options
    from repro_golden.case.file import Case
    from repro_golden.repository.checkout import Checkout

__all__ = ["axis_of", "axis_options", "axis_parameters", "report_folder"]

axis_options = parameters(
    click.argument("commits", required=False, metavar="[GOOD..BAD]"),
    click.option("--package", metavar="NAME==LOW..HIGH", help="Go along the releases of a package, not commits."),
    click.option(
        "--flags", metavar="FILE", type=click.Path(path_type=Path), help="Go among the changes that a file lists."
    ),
    click.option("--layout", metavar="A..B", help="Compare two layouts, such as threads=1..threads=4."),
    click.option("--at", metavar="COMMIT", help="With these: the commit whose code is run; HEAD by default."),
    click.option("--index-url", metavar="URL", help="With --package: the index, in place of pip's own settings."),
    click.option(
        "--tolerance", type=click.FloatRange(min=0), metavar="EPS",
        help="With --layout: units of epsilon that another order of sums may make.  [default: the case's]",
    ),
)  # fmt: skip
"""``[GOOD..BAD]`` and what may stand in its place."""


def axis_of(
    checkout: Checkout,
    case: Case,
    commits: str | None,
    options: Options,
    *,
    package: str | None = None,
    flags: Path | None = None,
    layout: str | None = None,
    at: str | None = None,
    index_url: str | None = None,
    tolerance: float | None = None,
    line: bool = False,
) -> Axis:
    """The one axis that is asked for.

    Args:
        checkout: The repository.
        case: The case.
        commits: ``GOOD..BAD``.
        options: How to search.
        package: ``NAME==LOW..HIGH``.
        flags: A file of changes.
        layout: ``A..B``.
        at: Whose code is run, where that is not what varies.
        index_url: Where releases come from.
        tolerance: Of layouts.
        line: The points must follow each other, so that each has one before it.

    Raises:
        ReproError: none or several axes are given, or what belongs to another one, or the axis cannot be used.
    """
    from repro_golden.base.errors import ReproError

    choices = {"GOOD..BAD": commits, "--package": package, "--flags": flags, "--layout": layout}
    named = [name for name, value in choices.items() if value is not None]
    if len(named) != 1:
        problem = f"{' and '.join(named)} exclude each other" if named else "nothing to search"
        raise ReproError(f"{problem}: give one of GOOD..BAD, --package, --flags and --layout")
    (kind,) = named
    for flag, value, kinds in (
        ("--at", at, ("--package", "--flags", "--layout")),
        ("--index-url", index_url, ("--package",)),
        ("--tolerance", tolerance, ("--layout",)),
        ("--first-parent", options.first_parent or None, ("GOOD..BAD",)),
        ("--path", options.paths or None, ("GOOD..BAD",)),
    ):
        if value is not None and kind not in kinds:
            raise ReproError(f"{flag} goes with {' or '.join(kinds)}, not with {kind}: leave one of them out")
    if commits is not None:
        from repro_bisect.driver.session import commits_of

        return commits_of(checkout, case, commits, options, from_base=not line)
    from repro_bisect.axes import sets as axes

    if package is not None:
        if index_url:
            if options.ray:
                raise ReproError("--index-url does not reach the nodes of a cluster: set PIP_INDEX_URL on them")
            # for the installers that probes start; it may hold a credential, which has no business in a case
            os.environ |= {"PIP_INDEX_URL": index_url, "UV_DEFAULT_INDEX": index_url}
            os.environ.pop("PIP_NO_INDEX", None)
        return axes.package_axis(checkout, case, package, at=at, index=index_url, yanked=options.try_skips)
    if flags is not None:
        axis = axes.flags_axis(checkout, case, flags, at=at)
        if line and isinstance(axis, axes.FlagSet):
            raise ReproError(
                f'{flags} is a set, whose changes do not follow each other: use repro bisect, or say order = "list"'
            )
        return axis
    assert layout is not None
    return axes.layout_axis(checkout, case, layout, at=at)


def axis_parameters(checkout: Checkout, axis: Axis, index_url: str | None) -> dict[str, str | None]:
    """What the parameters of `axis_options` must be to mean the same axis, whatever HEAD is by then."""
    from repro_bisect.axes.commits import typed
    from repro_golden.subjects.environments.releases import redacted

    if axis.what == "commit":
        return {"commits": typed(checkout, axis.good, axis.bad)}
    return {"at": typed(checkout, axis.commit(axis.good)), "index_url": redacted(index_url) if index_url else None}


def report_folder(axis: Axis, case: Case) -> str:
    """The name of the folder of a report: one for each search of a case, and no longer than a file may be called."""
    from repro_bisect.axes.axis import short
    from repro_golden.base.canonical import digest

    name = f"{short(axis.good)}..{short(axis.bad)}-{case.name}"
    if axis.what == "commit":
        return name
    plain = re.sub(r"[^A-Za-z0-9.=,_-]+", "-", name)[:60]
    return f"{plain}-{digest(axis.what, name, axis.commit(axis.good), *axis.parents)[:8]}"

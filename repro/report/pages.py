"""The templates of all reports."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from repro_bisect.axis import short

if TYPE_CHECKING:
    import jinja2

__all__ = ["templates"]


@cache
def templates() -> jinja2.Environment:
    """The folder ``templates``. ``short`` shows a point as terminals do, ``cell`` a text in a table of Markdown."""
    import jinja2

    loader = jinja2.PackageLoader("repro", "report/templates")
    made = jinja2.Environment(
        loader=loader,
        autoescape=jinja2.select_autoescape(("html.jinja",)),  # by default only names that end in .html are escaped
        undefined=jinja2.StrictUndefined,
    )
    made.filters["short"] = short
    made.filters["cell"] = lambda text: " ".join(str(text).split()).replace("|", "\\|")
    return made

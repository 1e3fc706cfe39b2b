"""The templates of all reports."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from repro.report.pieces import Markdown, clean, code_span, fenced, in_markdown, prose
from repro_bisect.axes.axis import short
from repro_golden.base.clean import visible

if TYPE_CHECKING:
    import jinja2

__all__ = ["seen", "templates"]


@cache
def templates() -> jinja2.Environment:
    """The folder ``templates``. What a template of Markdown is given is escaped, as in pages of HTML.

    Filters: ``short`` shows a point as terminals do, ``code`` a name, ``fenced`` lines as a block, ``prose`` our own
    words with code in them, ``e`` HTML inside of Markdown; ``own`` is Markdown that was made here.
    """
    import jinja2
    import markupsafe

    @jinja2.pass_eval_context
    def shown(context: Any, value: object) -> object:
        return seen(value) if context.autoescape else in_markdown(value)

    loader = jinja2.PackageLoader("repro", "report/templates")
    made = jinja2.Environment(
        loader=loader,
        autoescape=jinja2.select_autoescape(("html.jinja",)),  # by default only names that end in .html are escaped
        undefined=jinja2.StrictUndefined,
        finalize=shown,
    )
    made.filters |= {"short": short, "code": code_span, "fenced": fenced, "prose": prose, "own": Markdown}
    called = markupsafe.Markup("@&#8203;")  # a space of no width, so that GitHub calls nobody
    made.filters["e"] = lambda value: markupsafe.escape(clean(str(value))).replace("@", called)
    return made


def seen(value: object) -> object:
    """What a page makes of a value before it is escaped: HTML that is ours as it is, of all else `visible` text."""
    return value if hasattr(value, "__html__") else visible(str(value))

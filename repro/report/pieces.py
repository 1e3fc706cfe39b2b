"""Lines that are part our own words and part somebody else's, and how each medium shows them.

A commit's subject, a metric's or a branch's name is anybody's text: it must not become markup, a link, a mention or an
escape sequence. A line therefore keeps apart what was said here and what is quoted, until it is shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from repro import __version__
from repro.report.palette import css, themed
from repro.text import utc
from repro_bisect.axes.axis import PointInfo, short
from repro_golden.base.canonical import write_atomic
from repro_golden.base.clean import one_line, visible

if TYPE_CHECKING:
    import jinja2

__all__ = [
    "Line",
    "Markdown",
    "Piece",
    "clean",
    "code",
    "code_span",
    "cut",
    "endpoint_rows",
    "escaped",
    "fenced",
    "in_markdown",
    "markdown",
    "plain",
    "prose",
    "quoted",
    "report_text",
    "said",
    "seen",
    "templates",
    "written",
]


class Markdown(str):
    """Text that is Markdown already: templates put any other text behind `escaped`."""

    __slots__ = ()


@dataclass(frozen=True)
class Piece:
    """A part of a line.

    Attributes:
        text: What it says.
        kind: ``said``: our own words, which hold no markup. ``code``: a name. ``quoted``: prose of somebody else.
    """

    text: str
    kind: Literal["said", "code", "quoted"]


Line = Sequence[Piece]

_NAME = 90
"""Characters of a name that Markdown shows."""


def said(text: str) -> Piece:
    """Our own words."""
    return Piece(text, "said")


def code(text: str) -> Piece:
    """A name."""
    return Piece(clean(text), "code")


def quoted(text: str) -> Piece:
    """Somebody else's prose."""
    return Piece(clean(text), "quoted")


def clean(text: str) -> str:
    """One line of `visible` text with single blanks."""
    return " ".join(one_line(text).split())


def cut(text: str, width: int) -> str:
    """A text without its middle where it is too long: names differ at their ends."""
    if len(text) <= width:
        return text
    left = (width - 1) // 2
    return f"{text[: width - 1 - left]}…{text[len(text) - left :]}"


def plain(line: Line) -> str:
    """The line without markup, for terminals and files that escape their own way."""
    return "".join(piece.text for piece in line)


_MARKS = re.compile(r"[\\`*_\[\]{}~$!#]")
_NOTHING = "\u200b"
_LINKS = re.compile(
    r"(?i)(?<=:)(?=//)|(?<=www)(?=\.)"  # bare addresses
    r"|(?<=#)(?=\d)|(?<=\bgh-)(?=\d)"  # issues
)
_COMMITS = re.compile(r"(?i)(?<=\b[0-9a-f]{6})(?=[0-9a-f]{1,34}\b)")
"""Where a space of no width keeps GitHub from making a link, and from telling an issue that it was mentioned."""
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "@": "@&#8203;"})
"""A space of no width after @ keeps GitHub from calling somebody."""
_STARTS = re.compile(r"^(\d*)([-+=.)])(?=[\s=-])")
"""What makes a list, a heading or a rule of a line that begins with it."""


def escaped(text: str, *, commits: bool = False) -> Markdown:
    """Somebody else's prose in GitHub's Markdown: one line without markup, HTML, link or mention.

    Args:
        text: What it says.
        commits: Whether ids of commits stay whole, to be copied; GitHub makes links of them.
    """
    text = _LINKS.sub(_NOTHING, clean(text))
    text = text if commits else _COMMITS.sub(_NOTHING, text)
    text = _MARKS.sub(lambda mark: "\\" + mark[0], text).translate(_ENTITIES)
    return Markdown(_STARTS.sub(r"\1\\\2", text).replace(_NOTHING, "&#8203;"))


def report_text(text: str) -> Markdown:
    """A value in a report of its own, which is no comment and calls nobody."""
    return escaped(text, commits=True)


def in_markdown(value: object) -> Markdown:
    """What a template of Markdown makes of a value: Markdown and HTML that is ours as it is, all else escaped."""
    return Markdown(value) if isinstance(value, Markdown) or hasattr(value, "__html__") else report_text(str(value))


def prose(text: str) -> Markdown:
    """Our own words with names in them: what stands between backticks is code, all else escaped."""
    parts = re.split("(`[^`]+`)", text)
    shown = [code_span(part[1:-1]) if n % 2 else _inner(part) for n, part in enumerate(parts)]
    return Markdown("".join(shown))


def _on_a_page(text: str) -> Any:
    """`prose` in HTML."""
    import markupsafe

    shown = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(markupsafe.escape(visible(text))))
    return markupsafe.Markup(shown)  # noqa: S704 - escaped


def _inner(text: str) -> str:
    """A part of a line, `escaped`, with the blanks at its ends."""
    left, right = (" " if text != text.lstrip() else ""), (" " if text != text.rstrip() else "")
    return f"{left}{report_text(text)}{right}" if text.strip() else text[:1]


def code_span(text: object, *, cell: bool = True) -> Markdown:
    """A name as code: between more backticks than it holds in a row; as HTML in a table where it holds a bar."""
    text = clean(str(text))
    if not text:
        return Markdown("(empty)")
    if cell and "|" in text:  # a table is split at its bars before code is looked for
        return Markdown(f"<code>{escaped(text)}</code>")
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if text[0] == "`" or text[-1] == "`" else ""
    return Markdown(f"{ticks}{pad}{text}{pad}{ticks}")


def markdown(line: Line, *, width: int = 200, cell: bool = False) -> Markdown:
    """The line in GitHub's Markdown.

    Args:
        line: The line.
        width: Characters that are shown of a quoted text; of a name no more than `_NAME`.
        cell: Whether it stands in a table.
    """
    shown: list[str] = []
    for piece in line:
        if piece.kind == "code":
            shown.append(code_span(cut(piece.text, min(width, _NAME)), cell=cell))
        else:
            shown.append(escaped(cut(piece.text, width)) if piece.kind == "quoted" else piece.text)
    return Markdown("".join(shown))


def endpoint_rows(endpoints: Sequence[PointInfo]) -> list[tuple[str, PointInfo, str]]:
    """GOOD and BAD, each with its date in UTC; a point that is no commit has none."""
    return [(name, point, utc(point.date)) for name, point in zip(("GOOD", "BAD"), endpoints, strict=False)]


def fenced(text: str, language: str = "") -> Markdown:
    """Lines as a block of code, behind a fence that they do not close."""
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return Markdown(f"{ticks}{language}\n{visible(text)}\n{ticks}")


# -- the templates of all reports


@cache
def templates() -> jinja2.Environment:
    """The folder ``templates``. What a template of Markdown is given is escaped, as in pages of HTML.

    Filters: ``short`` shows a point as terminals do, ``code`` a name, ``fenced`` lines as a block, ``prose`` our own
    words with code in them, ``e`` HTML inside of Markdown, ``themed`` a plot in the page's colours; ``own`` is Markdown
    that was made here.
    """
    import jinja2
    import markupsafe

    @jinja2.pass_eval_context
    def shown(context: Any, value: object) -> object:
        return seen(value) if context.autoescape else in_markdown(value)

    @jinja2.pass_eval_context
    def own_words(context: Any, value: str) -> object:
        return _on_a_page(value) if context.autoescape else prose(value)

    loader = jinja2.PackageLoader("repro", "report/templates")
    made = jinja2.Environment(
        loader=loader,
        autoescape=jinja2.select_autoescape(("html.jinja",)),  # by default only names that end in .html are escaped
        undefined=jinja2.StrictUndefined,
        finalize=shown,
    )
    made.filters |= {"short": short, "code": code_span, "fenced": fenced, "prose": own_words, "own": Markdown}
    made.filters["themed"] = lambda svg: markupsafe.Markup(themed(svg))  # noqa: S704 - made here, its texts escaped
    made.globals["palette"] = markupsafe.Markup(css())  # noqa: S704 - our own
    called = markupsafe.Markup("@&#8203;")  # a space of no width, so that GitHub calls nobody
    made.filters["e"] = lambda value: markupsafe.escape(clean(str(value))).replace("@", called)
    return made


def written(name: str, folder: Path, context: Callable[[bool], Mapping[str, Any]]) -> Iterator[Path]:
    """Write ``report.md`` and ``report.html`` (self-contained): each path once it is there.

    Args:
        name: Of both templates.
        folder: Where to.
        context: What a template is given, by whether it is that of the page.
    """
    for kind in ("md", "html"):
        text = templates().get_template(f"{name}.{kind}.jinja").render(context(kind == "html"), version=__version__)
        yield write_atomic(folder / f"report.{kind}", text)


def seen(value: object) -> object:
    """What a page makes of a value before it is escaped: HTML that is ours as it is, of all else `visible` text."""
    return value if hasattr(value, "__html__") else visible(str(value))

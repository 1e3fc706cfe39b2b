"""Where a command's words go: results to stdout, progress to stderr, and one JSON object instead with --json."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from repro import console
from repro_golden.base.clean import one_line
from repro_golden.base.extras import of_import

__all__ = ["emit", "json_option", "parameters", "progress", "strict_names_option", "told", "vary_option"]

F = TypeVar("F", bound=Callable[..., Any])


def parameters(*each: Callable[[F], F]) -> Callable[[F], F]:
    """Several options or arguments as one decorator, in the order in which help lists them."""

    def added(function: F) -> F:
        for parameter in reversed(each):
            function = parameter(function)
        return function

    return added


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
"""``--json``: print one JSON object on stdout instead of text."""
vary_option = click.option(
    "--vary", type=click.Choice(["host", "environment", "layout"]), multiple=True,
    help="A part of the identity that is meant to differ.",
)  # fmt: skip
"""``--vary PART``: parts of the identity that a comparison means to vary."""
strict_names_option = click.option("--strict-names", is_flag=True, help="Take a signal's other name for a difference.")
"""``--strict-names``: another name is a difference."""


def emit(as_json: bool, data: Any, text: str, *, styled: bool = False) -> None:
    """Print a result in the form that was asked for; `styled` text has styles of ours, and else clean text."""
    if as_json:
        console.answer(data)
    elif styled:
        console.styled(text)
    else:
        print(text)


@contextmanager
def told(
    as_json: bool, data: Mapping[str, Any], text: str, command: str, *, styled: bool = False
) -> Iterator[list[Path]]:
    """Tell an answer once the block has written its report, whatever becomes of that.

    Args:
        as_json: Whether as JSON.
        data: The answer for that; the report's files, the command and what was not written are added.
        text: The answer for people.
        command: What gives the answer again.
        styled: Whether the text has styles of ours.

    Yields:
        A list for the paths of the files, each to be added as it is written. Where the block lacks an extra for the
        rest, a line says so and the answer stands: it does not depend on its report.
    """
    written: list[Path] = []
    missing = ""
    try:
        yield written
    except ImportError as error:
        line = of_import(error, "a report")
        if line is None:
            raise
        left = [name for name in ("report.md", "report.html") if name not in [path.name for path in written]]
        missing = f"not written: {' and '.join(left)}; {line}"
    finally:
        lines = [f"report: {path}" for path in written] + [missing] * bool(missing)
        more = {"reports": [str(path) for path in written], "reproduce": command}
        more |= {"not_written": missing} if missing else {}
        lines.append(f"reproduce with: {command}")
        emit(as_json, {**data, **more}, "\n".join([text, *(map(one_line, lines) if styled else lines)]), styled=styled)


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """A function that shows one line of progress: under a spinner on a terminal, as plain lines in CI."""
    if not sys.stderr.isatty():
        yield lambda line: print(one_line(line), file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    terminal = Console(file=console.screen(), highlight=False)
    with terminal.status(Text(what)) as status:

        def say(line: str) -> None:
            shown = Text(one_line(line))
            terminal.print(shown)
            status.update(shown)

        yield say

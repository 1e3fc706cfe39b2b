"""What a bisect shows while it runs: on a terminal the range with its verdicts, in CI one line for each event."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from repro.console import screen
from repro.text import count, duration
from repro_bisect.axes.axis import short
from repro_golden.base.clean import one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from repro_bisect.probe.progress import Event, Running

__all__ = ["bisect_view", "line_of", "probing"]

_MARKS = {"GOOD": ("+", "green"), "BAD": ("x", "red"), "SKIP": ("s", "yellow"), "FLAKY": ("~", "magenta")}
_LIKELIEST = 5
_LONG = 60.0
"""Seconds after which a log says how far a probe is."""


def line_of(event: Event) -> str:
    """An event as one line of a log."""
    text = one_line(event.text)
    if event.suspects <= 1:
        return text
    left = f", {duration(event.left)} left at most" if event.left is not None else ""
    return f"{text}  [{count(event.suspects, 'suspect')}, at most {count(event.rounds, 'round')}{left}]"


def probing(commit: str, running: Running) -> str:
    """A probe under way: the step that its trace has come to, and for how long it has run."""
    at = f"step {running.steps}" + (f"/{running.of}" if running.of else "")
    return "  ".join(
        [f"probing {short(commit)}", *([at] if running.steps or running.of else []), duration(running.seconds)]
    )


class _Log:
    """Plain lines: each event, and of a probe that takes long how far it is, at times that double."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def show(self, event: Event) -> None:
        """Print what is new."""
        lines = [line_of(event)] if event.text else []
        self._due = {c: self._due.get(c, _LONG) for c in event.running}
        for c, running in event.running.items():
            if running.seconds < _LONG:  # another probe of a commit that was probed before
                self._due[c] = _LONG
            elif running.seconds >= self._due[c]:
                self._due[c] = 2 * running.seconds
                lines.append(f"  {probing(c, running)}")
        for line in lines:
            print(line, file=sys.stderr, flush=True)


@contextmanager
def bisect_view() -> Iterator[Callable[[Event], None]]:
    """A function that shows events: a live view on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield _Log().show
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=screen(), highlight=False)
    with Live(console=console, refresh_per_second=4, transient=True) as live:

        def show(event: Event) -> None:
            if event.text:
                live.console.print(Text(line_of(event)))
            live.update(_drawn(event, console.width))

        yield show


def _drawn(event: Event, width: int) -> RenderableType:
    """The range from GOOD to BAD, a character for each commit or several, and the probes under way."""
    from rich.console import Group
    from rich.text import Text

    marks = Text("GOOD [")
    commits = list(reversed(event.order))
    room = max(10, width - 12)
    size = -(-len(commits) // room) or 1
    for k in range(0, len(commits), size):
        marks.append(*_mark(event, commits[k : k + size]))
    marks.append("] BAD")
    lines = [marks]
    lines += [Text(f"  {probing(c, running)}", "cyan") for c, running in event.running.items()]
    if event.suspects > 1 and event.rounds:
        left = f", {duration(event.left)} left at most" if event.left is not None else ""
        lines.append(Text(f"  {count(event.suspects, 'suspect')}, at most {count(event.rounds, 'round')}{left}"))
    likely = sorted(event.posterior.items(), key=lambda item: -item[1])[:_LIKELIEST]
    lines += [Text(f"  {short(c)} {100 * p:5.1f} % likely the culprit") for c, p in likely]
    return Group(*lines)


def _mark(event: Event, commits: list[str]) -> tuple[str, str]:
    """One character for neighbouring commits: what is known of any of them, the worst first."""
    if any(c in event.running for c in commits):
        return "?", "bold cyan"
    verdicts = {event.verdicts[c] for c in commits if c in event.verdicts}
    for verdict in ("FLAKY", "BAD", "GOOD", "SKIP"):
        if verdict in verdicts:
            return _MARKS[verdict]
    return ".", "dim"

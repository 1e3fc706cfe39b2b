"""The numbers in what a program writes to its standard streams."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from repro_golden.base.printed.free_text import in_dict, is_bar, shown_in
from repro_golden.base.printed.lines import bare, listen, metrics_of
from repro_golden.base.printed.wrapped import Whole, Wrapped
from repro_golden.recording.attach.written.raw import SHOWN

__all__ = ["Hearing"]


class Hearing:
    """Has the numbers in the program's output kept.

    tqdm says itself what its bars show: when they are drawn depends on time.

    Attributes:
        on_bars: Names that tqdm's bars show.
    """

    def __init__(self, session: Any, patterns: Sequence[re.Pattern[str]]) -> None:
        """Tell a session of them; see `metrics_of` for the patterns."""
        self.on_bars: set[str] = set()
        self._session, self._patterns = session, patterns

    def hear(self) -> None:
        """Listen to the streams as they are now."""
        for stream in (sys.stdout, sys.stderr):
            if end := listen(stream, functools.partial(self._line, Wrapped()), self._draw):
                self._session.ends.append(end)

    def _line(self, wrapped: Wrapped, text: str) -> None:
        begun = self._session.metrics.begun
        compared = metrics_of(text, self._patterns, alone=begun)
        shown = {} if begun else metrics_of(text)
        if begun and "{" in text and self._session.metrics.held:
            self._again(self._of_dict(text, [text]))
        for name, value in compared.items():
            self._session.metric(name, value)
        for name, value in shown.items():
            if name not in compared:
                self._session.metric(name, value, setting=True)
        self._draw(text, {*compared, *shown})
        if whole := wrapped.add(text):
            self._over_lines(whole, begun=begun)

    def _draw(self, text: str, known: Collection[str] = ()) -> None:
        left_out = {*known, *(self.on_bars if is_bar(text) else ())}
        for name, value in shown_in(text).items():
            if name not in left_out:
                self._session.metric(f"{SHOWN}{name}", value)

    def _over_lines(self, whole: Whole, *, begun: bool) -> None:
        """Tell what a dict would have told in one line, beside what its lines told.

        One from before the training is held: settings are seldom in one line, and none of their names is a step's. It
        is told once there is another one of these names, as where a loss is printed before its pass.
        """
        numbers = self._of_dict(whole.text, whole.lines)
        if begun:
            self._again(numbers)
        elif not metrics_of(whole.text, alone=False):
            self._session.metrics.held.append(numbers)
            return
        for name, value in numbers.items():
            self._session.metric(name, value, wrapped=True)

    def _again(self, numbers: dict[str, float]) -> None:
        every = self._session.metrics.held
        for held in [held for held in tuple(every) if held.keys() == numbers.keys()]:
            every.remove(held)
            for name, value in held.items():
                self._session.metric(name, value, wrapped=True, before=True)

    def _of_dict(self, text: str, lines: Iterable[str]) -> dict[str, float]:
        """The numbers of a dict, but for those that patterns name in the lines that it was printed in."""
        named = {name for line in lines for name in metrics_of(line, self._patterns, alone=False)}
        compared = metrics_of(text)
        shown = {f"{SHOWN}{name}": value for name, value in in_dict(bare(text)).items() if name not in compared}
        return {name: value for name, value in (compared | shown).items() if name.removeprefix(SHOWN) not in named}

"""The way out to terminals and logs: whatever is printed, by whom ever, passes one cleaner.

`guard` puts it behind ``sys.stdout`` and ``sys.stderr``, so that a plain `print`, a warning or a usage error cannot go
around it. What we style ourselves is written with `styled`; a `rich` console takes its stream from `screen`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from repro_golden.base.clean import no_command, visible

__all__ = ["answer", "answered", "command", "guard", "json_text", "screen", "styled"]

_STYLES = re.compile(r"(\x1b\[[0-9;]*m)")
_DRAWING = re.compile(r"(\x1b\[[0-9;]*[A-HJKm]|\x1b\[\?25[hl]|\r(?!\n))")
"""What rich draws with: styles, moves of the cursor, erasing, whether the cursor shows."""

_ALL = re.compile(r"([\s\S]+)")


class _Clean:
    """A text stream whose text is cleaned as it is written. It has no ``buffer``: bytes would go around it.

    Where nobody reads it any more the rest is lost and nothing else: the command goes on to its exit code, which says
    what was found.
    """

    def __init__(self, stream: TextIO, ours: re.Pattern[str] | None = None) -> None:
        self.stream, self._ours = stream, ours

    def write(self, text: Any) -> int:
        text = text.decode() if isinstance(text, bytes) else text  # click completes in bytes, by whatever has `write`
        parts = self._ours.split(text) if self._ours else [text]
        # [theirs, ours, theirs, ours, theirs]
        parts[::2] = [no_command(visible(part)) for part in parts[::2]]
        with self._while_read():
            self.stream.write("".join(parts))
        return len(text)

    def flush(self) -> None:
        with self._while_read():
            self.stream.flush()

    @contextmanager
    def _while_read(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno != errno.EPIPE and not (error.errno == errno.EIO and self._is_device()):
                raise
            with Path(os.devnull).open("wb") as nobody:  # what is still buffered goes there too
                os.dup2(nobody.fileno(), self.stream.fileno())

    def _is_device(self) -> bool:
        """Whether it leads to a terminal, which gives EIO once it is closed, and to no file."""
        return stat.S_ISCHR(os.fstat(self.stream.fileno()).st_mode)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        if name in ("buffer", "detach", "stream"):  # the last one: half-made copies have none
            raise AttributeError(name)
        return getattr(self.stream, name)


_answers: list[str] = []
"""What `answer` printed since `guard` was called."""


def guard() -> None:
    """Put the cleaner behind ``sys.stdout`` and ``sys.stderr``, where they are and are not behind it already."""
    _answers.clear()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Clean):
            setattr(sys, name, cast("TextIO", _Clean(stream)))


def _raw(stream: TextIO) -> TextIO:
    return stream.stream if isinstance(stream, _Clean) else stream


def styled(text: str) -> None:
    """Print a text with styles (`click.style`) to stdout. What in it is not ours must have been cleaned before."""
    print(text, file=cast("TextIO", _Clean(_raw(sys.stdout), _STYLES)), flush=True)


def screen() -> TextIO:
    """Stderr for a rich console: what rich draws with passes, and nothing else that is not text."""
    return cast("TextIO", _Clean(_raw(sys.stderr), _DRAWING))


def command(line: str) -> None:
    """Write a line that CI is to obey to stderr. It must be ours; what is quoted in it cannot begin another line."""
    text = visible(" ".join(line.splitlines()))
    print(text, file=cast("TextIO", _Clean(_raw(sys.stderr), _ALL)), flush=True)


def answer(data: Any) -> None:
    """Print the one JSON object of a command."""
    _answers.append(json_text(data))
    print(_answers[-1])


def answered() -> bool:
    """Whether the command that runs has printed its JSON object: what fails behind it goes to stderr alone."""
    return bool(_answers)


def json_text(data: Any) -> str:
    """A value as JSON that is printed as it is: ASCII, and nothing in it is a command to CI."""
    try:
        text = json.dumps(data, indent=2, sort_keys=True, allow_nan=False)
    except ValueError:  # JSON has no NaN
        from repro_golden.base.canonical import jsonable

        text = json.dumps(jsonable(data), indent=2, sort_keys=True, allow_nan=False)
    return text.replace("##", "#\\u0023")

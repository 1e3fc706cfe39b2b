"""From what a training program prints to metrics: lines that the field's trainers print, JSON, the user's patterns.

This runs inside foreign programs, with the standard library alone. Dicts are read by a scanner of their own and not by
`ast.parse`: Python's parser can overflow the stack of a thread, warns of unknown escapes on the program's stderr (an
error under `-W error`), and refuses a whole line for one `tensor(0.5, grad_fn=<DivBackward0>)`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from repro_golden.base.clean import without_colours

__all__ = [
    "CALL",
    "LIMIT",
    "NUMBER",
    "STRING",
    "Labelled",
    "Lines",
    "bare",
    "labelled",
    "listen",
    "metrics_of",
    "numbers",
    "source",
]

LIMIT = 64 * 1024
"""Characters of the longest line that is read or held: a program may print for ever without a line end."""

_STRIPPED = re.compile(r"\[(?:[0-9]{1,3}(?:;[0-9]{1,3}){0,9})?m")
_RAY = re.compile(r"\(.*? pid=\d+(?:, ip=[^\s)]+)?\) ")
_REPEATED = re.compile(r" \[repeated \d+x across cluster\](?: \(Ray deduplicates .*)?$", re.DOTALL)
# slime, Miles: `[2026-11-20 15:47:01.707 rank0] file.py:107 - `; Relax: `2026-11-20 15:47:01 | INFO | module:107 `
_LOGGING = re.compile(
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] \S+:\d+ - "
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \| [A-Z]+ \| \S+:\d+(?:\[[^\[\]]*\])? "
)
# a longer number is no count of steps, and Python refuses to read one of thousands of digits
_LABEL = re.compile(r"(?:(critic)-(?=step ))?(step|rollout|multi_turn|passrate|perf|eval) ([0-9]{1,18}): (?=\{)")

STRING = r"""'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*\""""
"""A pattern of a string in quotes; it needs `re.DOTALL`."""
_STRING = re.compile(STRING, re.DOTALL)
_TOKEN = re.compile(rf"""{STRING}|[()\[\]{{}},:'"]|[^()\[\]{{}},:'"]+""", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U((?:000[0-9a-fA-F]|0010)[0-9a-fA-F]{4})|(.))", re.DOTALL
)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/"}
_NOT_FINITE = r"[nN][aA][nN]|[iI][nN][fF](?:[iI][nN][iI][tT][yY])?"
NUMBER = rf"[+-]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|{_NOT_FINITE})"
"""A pattern of the notations of a number."""
_NUMBER = re.compile(NUMBER)
CALL = r"(?:u?int[0-9]*|b?float[0-9]*|tensor|array|Array)"
"""A pattern of the names of NumPy's, torch's and JAX's scalars; `range(0, 5)` or `Fraction(1, 2)` are no numbers."""
_CALL = re.compile(
    rf"(?:\w+\.)*{CALL}\(\s*(?:(?P<alone>{NUMBER})|\[\s*(?P<listed>{NUMBER}),?\s*\])\s*(?:,.*)?\)", re.DOTALL
)


class Labelled(NamedTuple):
    """What one line of a trainer's log says.

    Attributes:
        label: ``step``, ``rollout``, ``multi_turn``, ``passrate``, ``perf`` or ``eval``.
        role: ``actor`` or ``critic``, whose update it was; lines that are no step's say nothing of it: ``actor``.
        number: Of the step or the rollout.
        metrics: Its numbers, under the names that the line gives them; at least one.
    """

    label: str
    role: str
    number: int
    metrics: dict[str, float]


def labelled(line: str) -> Labelled | None:
    """What a line ``step 3: {...}`` of slime, Miles or Relax says, or one of their other labels.

    Colour codes, Ray's prefix and the logging prefix are taken off, and what a progress bar left before that prefix;
    colour codes also where a log has lost their escape characters (`[32m`), outside of the dict.

    Args:
        line: without its line end. Lines longer than 64 KiB are not read.

    Returns:
        None for any other line, for a dict that is cut short, and for one that holds no number.
    """
    return None if "{" not in line or len(line) > LIMIT else _label_of(line, bare(line))


def _label_of(line: str, text: str) -> Labelled | None:
    """What a line says, of which `text` is what `bare` leaves."""
    label = _labelled(text)
    if label is None and _STRIPPED.search(line):
        head, _, rest = line.partition("{")
        inside, _, tail = rest.rpartition("}")
        label = _labelled(bare(f"{_STRIPPED.sub('', head)}{{{inside}}}{_STRIPPED.sub('', tail)}"))
    return label


def _labelled(text: str) -> Labelled | None:
    label = _LABEL.match(text)
    if label is None and (logging := _LOGGING.search(text)):  # behind a progress bar, which ends its line by no newline
        label = _LABEL.match(text, logging.end())
    if label is None:
        return None
    metrics = numbers(text[label.end() :], quoted=False)
    return Labelled(label[2], label[1] or "actor", int(label[3]), metrics) if metrics else None


def metrics_of(line: str, patterns: Sequence[re.Pattern[str]] = (), *, alone: bool = True) -> dict[str, float]:
    """The metrics that one printed line shows; no line at all is an error.

    Colour codes, Ray's prefix and the logging prefix of slime, Miles or Relax are taken off; then the line may be

    - `step 3: {…}`, or the same with critic-step, rollout, multi_turn, passrate, perf or eval: the numbers of the dict;
    - a JSON object or a Python dict: its numbers. Here numbers in Python's quotes count too: transformers' trainer
      prints `{'loss': '0.5'}`.

    Numbers are int, float, nan, inf and calls such as `np.float64(1.5)`, `tensor(0.5, device='cuda:0')` and
    `tensor([0.5])` under the dict's own keys; other values are left out, also bool, and integers too large for a float.

    Args:
        line: without its line end. Lines longer than 64 KiB are not read.
        alone: whether an object or dict alone in its line counts: before anything is trained it may be the program's
            settings.
        patterns: searched besides, each match in turn, in what is left of the line. A pattern with just the groups
            `name` and `value` gives that name; in any other the groups' names are the metrics' names. A group that
            holds no float is passed over.
    """
    if ("{" not in line and not patterns) or len(line) > LIMIT:
        return {}
    text = bare(line)
    metrics: dict[str, float] = {}
    label = _label_of(line, text)
    if label:
        metrics = label.metrics
    elif alone and text.startswith("{"):
        metrics = numbers(text, quoted=True)
    for pattern in patterns:
        named = pattern.groups == 2 and set(pattern.groupindex) == {"name", "value"}
        for match in pattern.finditer(text):
            groups = {match["name"]: match["value"]} if named else match.groupdict()
            for name, value in groups.items():
                if name is not None and value is not None:  # a group that took no part in the match
                    with contextlib.suppress(ValueError):
                        metrics[name] = float(value)
    return metrics


def bare(line: str) -> str:
    """A line without colour codes, Ray's prefix and the logging prefix of slime, Miles or Relax."""
    text = without_colours(line).strip()
    ray = _RAY.match(text)
    if ray:
        text = _REPEATED.sub("", text[ray.end() :].lstrip()).rstrip()
    logging = _LOGGING.match(text)
    return text[logging.end() :].lstrip() if logging else text


def source(line: str) -> str:
    """Ray's prefix of a line, which says whose it is; '' where there is none."""
    ray = _RAY.match(without_colours(line).strip())
    return ray[0] if ray else ""


def numbers(text: str, *, quoted: bool, deep: int = 0) -> dict[str, float]:
    """The top-level items of a dict in JSON's or Python's notation that are `"name": number`.

    Nothing where quotes or brackets do not close at the text's end.

    Args:
        text: begins with "{".
        quoted: whether `'0.5'` is a number. JSON's strings never are.
        deep: Levels of dicts whose items count, as `outer/inner`; with any, a bool is a number.
    """
    values: dict[str, float] = {}
    depth, start, colon = 0, 1, 0
    for match in _TOKEN.finditer(text):
        part, at = match[0], match.start()
        if part in ("'", '"'):
            return {}
        if part in ("(", "[", "{"):
            depth += 1
        elif part in (")", "]", "}"):
            depth -= 1
        elif part == ":" and depth == 1:
            colon = at
        if depth == 0 or (part == "," and depth == 1):
            name = _name(text[start:colon].strip()) if colon else None
            if name is not None:
                values |= _item(name, text[colon + 1 : at].strip(), quoted, deep)
            start, colon = match.end(), 0
        if depth == 0:
            return values if start == len(text) else {}
    return {}


_BOOLS = {"True": 1.0, "true": 1.0, "False": 0.0, "false": 0.0}


def _item(name: str, text: str, quoted: bool, deep: int) -> dict[str, float]:
    """What a dict's value shows under its name."""
    if deep and text in _BOOLS:
        return {name: _BOOLS[text]}
    if deep > 1 and text.startswith("{"):
        return {f"{name}/{key}": value for key, value in numbers(text, quoted=quoted, deep=deep - 1).items()}
    value = _number(text, quoted=quoted)
    return {} if value is None else {name: value}


def _name(token: str) -> str | None:
    if not _STRING.fullmatch(token):
        return None
    if "\\" not in token:
        return token[1:-1]
    text = _ESCAPE.sub(_unescaped, token[1:-1])
    # JSON writes a character beyond 16 bits as two escapes; Python's repr, in its usual quotes, never does
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass") if token[0] == '"' else text


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    return chr(int(code, 16)) if code else _ESCAPED.get(match[4], match[0])


def _number(text: str, *, quoted: bool) -> float | None:
    call = _CALL.fullmatch(text)
    if call:
        text = call["alone"] or call["listed"]
    elif quoted and text[:1] == text[-1:] == "'":
        text = text[1:-1]
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    return None if math.isinf(value) and "n" not in text else value


class Lines(threading.local):
    r"""Makes lines of a text stream that is written in pieces.

    A line ends at "\n" or "\r\n". A "\r" elsewhere starts it over, as progress bars do: what stood there was drawn. One
    longer than 64 KiB is dropped. Each thread's lines are put together on their own, since print writes a line and its
    end in two calls between which another thread may write. There is no lock: a forked child would find it held for
    ever.

    Args:
        take: called with each line when it ends.
        drawn: called with what a "\r" ends, and with what was written behind one without an end, each once.
    """

    def __init__(self, take: Callable[[str], None], drawn: Callable[[str], None] | None = None) -> None:
        self._take, self._drawn = take, drawn
        self._drawings: list[str] = []
        self._again = self._shown = False
        self._pieces: list[str] = []
        self._length = 0
        self._returned = False

    def write(self, text: str) -> None:
        """Take the next piece; what `take` raises is raised after the piece is read."""
        *ended, rest = text.split("\n")
        lines = []
        for piece in ended:
            self._add(piece)
            if self._length <= LIMIT:
                lines.append("".join(self._pieces))
            self._start_over()
        self._add(rest)
        if self._again:
            self._draw()
        drawings, self._drawings = self._drawings, []
        for line in lines:
            self._take(line)
        for drawing in drawings:
            self._drawn(drawing)  # type: ignore[misc]

    def end(self) -> None:
        """Nothing more is written: what has no end yet is a line, unless it was drawn."""
        if self._pieces and self._length <= LIMIT and not (self._shown or self._returned):
            line = "".join(self._pieces)
            self._start_over()
            self._take(line)

    def _add(self, piece: str) -> None:
        text = piece.rstrip("\r")
        if text:
            first, *others = text.split("\r")
            if self._returned:
                self._start_over()
                self._again = True
            self._keep(first)
            for part in others:
                self._draw()
                self._start_over()
                self._again = True
                self._keep(part)
        if len(text) < len(piece):  # whether it starts the line over is known when something follows
            self._draw()
            self._returned = True

    def _keep(self, part: str) -> None:
        if not part:
            return
        self._shown = False
        self._length += len(part)
        if self._length <= LIMIT:
            self._pieces.append(part)
        else:
            self._pieces.clear()

    def _draw(self) -> None:
        """What the line holds is drawn, if it was not before."""
        if self._drawn and self._pieces and not self._shown:
            self._drawings.append("".join(self._pieces))
        self._again, self._shown = False, True

    def _start_over(self) -> None:
        self._pieces.clear()
        self._length = 0
        self._returned = self._again = False


class _Ear(threading.local):
    """One stream's lines, and for each thread whether it is being heard at the moment."""

    def __init__(self, take: Callable[[str], None], drawn: Callable[[str], None] | None) -> None:
        self._lines = Lines(take, drawn)
        self._busy = False
        self.heard = 0

    def hear(self, text: str) -> None:
        if self._busy:  # `take` itself prints
            return
        try:
            self._busy = True
            self.heard += 1
            self._lines.write(text)
        finally:
            self._busy = False

    def end(self) -> None:
        self._lines.end()


class _Heard:
    """What stands for a stream's method in the stream itself; a copy of the stream has the method of its class."""

    def __init__(self, call: Callable[..., Any], stream: Any, name: str) -> None:
        functools.update_wrapper(self, getattr(stream, name), updated=())
        self._call, self._stream, self._name = call, stream, name
        self._own = vars(stream).get(name) if hasattr(stream, "__dict__") else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (self._stream, self._name)) if self._own is None else (_same, (self._own,))


def _same(value: Any) -> Any:
    return value


def listen(
    stream: Any, take: Callable[[str], None], drawn: Callable[[str], None] | None = None
) -> Callable[[], None] | None:
    """Have `take` called with each line that is written to `stream` from now on, through `write` and `writelines`.

    `drawn` is called with what is drawn over, as `Lines` has it. For the program they do, return and raise what they
    did. What `take` raises is lost, what it prints to the stream is not heard. Nothing is done to a stream that is
    None, is listened to already or lets no attribute be set. A forked child goes on calling its copy of `take`.

    Returns:
        What takes a last line that has no end; None where nothing is done.
    """
    try:
        if stream is None or getattr(stream, "_repro_listened", False):
            return None
        write, writelines = stream.write, stream.writelines
        stream._repro_listened = True
    except Exception:  # noqa: BLE001 - a foreign class may raise anything here
        return None
    ear = _Ear(take, drawn)

    def heard_write(*args: Any, **kwargs: Any) -> Any:
        result = write(*args, **kwargs)
        try:  # noqa: SIM105 - contextlib.suppress is Python code: it raises itself where the stack is nearly used up
            ear.hear(args[0])
        except Exception:  # noqa: BLE001, S110 - whatever it is, the program goes on
            pass
        return result

    def heard_writelines(*args: Any, **kwargs: Any) -> Any:
        before = ear.heard
        result = writelines(*args, **kwargs)
        try:
            # most streams' writelines calls their write, which was heard; an iterator is used up by now
            if ear.heard == before and isinstance(args[0], (list, tuple)):
                ear.hear("".join(args[0]))
        except Exception:  # noqa: BLE001, S110 - as above
            pass
        return result

    try:
        stream.write = _Heard(heard_write, stream, "write")
        stream.writelines = _Heard(heard_writelines, stream, "writelines")
    except Exception:  # noqa: BLE001 - half of it set, it is still marked as listened to: no line is heard twice
        return None
    return ear.end

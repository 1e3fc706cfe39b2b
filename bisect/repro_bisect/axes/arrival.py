"""What of a change to a case did not reach the process that trains, by what that says of itself.

The process that trains without the change is the measure: a word that stands on its command line without having been
handed on, or a variable that the launch script sets itself, is none of the change's.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repro_golden.base.credentials import looks_secret
from repro_golden.case.identity import short_digest
from repro_golden.subjects import given_to
from repro_golden.trace import Header

__all__ = ["Lost", "lost"]

_TOKEN = re.compile(r"\{(root|rollouts|out|checkpoint|step|python)\}")
"""What we replace in a case's words and variables by something of the run."""
_RUNS_A_FILE = re.compile(r"(python|pypy)[\d.]*|(ba|da|k|z)?sh")
_SCRIPT = re.compile(r"\.(py|sh|bash)$")
"""What a launcher runs, such as torchrun and deepspeed."""
_CHILD = re.compile(r"multiprocessing\.|--multiprocessing-fork|default_worker\.py$")
"""On the command line of a process that a Python program makes: its words are none of the program's."""


@dataclass(frozen=True)
class Lost:
    """What did not reach a process.

    Attributes:
        text: The first of it, in one line.
        sure: Whether it would show there. A worker of multiprocessing or of Ray has its parent's words by other ways.
        known: Whether it was asked of the process itself, rather than read from its words.
        computed: Whether its words differ by what no word of the change says: a launch script may compute with those
            that it is given.
    """

    text: str
    sure: bool
    known: bool = False
    computed: bool = False

    def refuses(self, *, agree: bool) -> bool:
        """Whether nothing can be said of two layouts for it, whose numbers agree bit for bit or do not."""
        return self.sure and (self.known or (agree and not self.computed))


def lost(
    good: Header, made: Header, less: Mapping[str, Any] | None = None, twins: Sequence[tuple[Header, Header]] = ()
) -> Lost | None:
    """What of the difference between two cases shows in one process as it does in the other.

    Args:
        good: Of the trace without the change.
        made: Of the trace with it, and perhaps with others.
        less: The canonical case of `made` without the change; by default all that parts it from `good` is meant.
        twins: Of two replays of one case each: what parts these, such as a time in a name, tells of no change.

    Returns:
        None where all of it arrived, or nothing is known of either process.
    """
    without = less or good.case
    a, b = _Process(good), _Process(made)
    if not a.argv or not b.argv:
        return None
    texts = [*_variables(without, made.case, a, b), *_arguments(without, made.case, good.case, a, b)]
    missing = [text for text in texts if text]
    return Lost(missing[0], b.runs_the_program, computed=_computed(good, made, a, b, twins)) if missing else None


class _Process:
    def __init__(self, header: Header) -> None:
        given = given_to(header)
        self.argv = [str(word) for word in given.get("argv", ())]
        self.variables: Mapping[str, str] | None = given.get("variables")
        self.layout = header.identity.get("layout", {})
        self.pieces, self.terms, self.pairs = _counted(self.argv), Counter(_verbatim(self.argv)), _paired(self.argv)
        self.order = Counter(itertools.pairwise(piece for word in self.argv for piece in _pieces(word)))
        if launched := given.get("launched"):  # a line that saves or resumes has words of its own
            line = _line(header.case)
            self.pieces -= _counted([launched]) - _counted(line)
            self.terms -= Counter(_verbatim(_split(launched))) - Counter(_verbatim(line))

    @property
    def runs_the_program(self) -> bool:
        return not any(_CHILD.search(word) for word in self.argv)

    @property
    def at(self) -> str:
        return f"the command line of the process that trains ({shlex.join(self.argv)[:200]})"

    def value(self, name: str) -> str | None:
        """Digest of what a variable is as the process starts."""
        return (self.variables or {}).get(short_digest(name))

    def shows(self, word: str, other: _Process, times: int = 1) -> bool:
        """Whether a word is here more often than in another process, under whatever name."""
        if self.terms[word] - other.terms[word] >= times:
            return True
        pieces = _pieces(word)
        if pieces and all(self.pieces[piece] - other.pieces[piece] >= times for piece in pieces):
            return True
        held, theirs = self.variables or {}, other.variables or {}
        mark = short_digest(word)
        if any(value == mark and theirs.get(name) != mark for name, value in held.items()):
            return True  # a script may export what it is given
        return any(str(n) == word and str(other.layout.get(key)) != word for key, n in self.layout.items())

    def sets(self, name: str, value: str, other: _Process) -> bool:
        """Whether an option, or any where it is '', is followed by a value here more often than in another process."""
        if any(pair[1] == value and name in ("", pair[0]) for pair in self.pairs - other.pairs):
            return True
        return bool(name) and (*_pieces(name)[-1:], *_pieces(value)) in self.order - other.order

    def moves(self, word: str, other: _Process) -> bool:
        """Whether a word stands beside others here than in another process, or shows otherwise."""
        beside = {piece for pair in self.order - other.order for piece in pair}
        return self.shows(word, other) or not beside.isdisjoint(_pieces(word))


def _verbatim(argv: Iterable[str]) -> Iterator[str]:
    """Words, and what stands behind the `=` in them."""
    for word in argv:
        yield word
        _, equal, value = word.partition("=")
        if equal:
            yield value


def _paired(argv: Sequence[str]) -> Counter[tuple[str, str]]:
    """What stands side by side, or on both sides of a `=`."""
    joined = ((name, value) for name, equal, value in (word.partition("=") for word in argv) if equal)
    return Counter([*itertools.pairwise(argv), *joined])


def _counted(texts: Iterable[str]) -> Counter[str]:
    return Counter(piece for word in texts for piece in _pieces(str(word)))


def _pieces(word: str) -> list[str]:
    """The names and values in a word: a launcher may write `--lr 1` as `--lr=1`, `optim.lr=1` or `'{"lr": 1}'`."""
    stripped = (re.sub(r"^(?!-\.?\d)[-+]+", "", piece) for piece in re.findall(r"[\w.+-]+", word))
    return [piece for piece in stripped if piece]


# -- variables


def _variables(without: Mapping[str, Any], case: Mapping[str, Any], a: _Process, b: _Process) -> Iterator[str]:
    """Of each variable that a change sets or leaves out, how it was lost; '' where it arrived."""
    before, after = (side.get("subject", {}).get("env", {}) for side in (without, case))
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        value = str(new if new is not None else old)
        if old == new or b.variables is None or _TOKEN.search(value) or looks_secret(name, value):
            continue
        here, there = b.value(name), a.value(name)
        same = a.variables is not None and here == there
        if new is None:
            yield f"{name} is in the process that trains all the same" if here == short_digest(value) and same else ""
        elif here == short_digest(value) or (here is not None and not same) or b.shows(value, a):
            yield ""
        elif here is None:
            yield f"{name} is not set in the process that trains"
        else:
            yield f"{name} is what it is without the change in the process that trains"


# -- arguments


def _arguments(
    without: Mapping[str, Any], case: Mapping[str, Any], good: Mapping[str, Any], a: _Process, b: _Process
) -> Iterator[str]:
    """Of each option and value that a change adds or takes, how it was lost; '' where it arrived."""
    lines = [_line(side) for side in (without, case, good)]
    starts = [_start(lines[0], a.argv), _start(lines[1], b.argv)]
    added = _beyond(lines[1], lines[0], starts[1])
    taken = _beyond(lines[0], lines[1], starts[0])
    all_added = Counter(word for _, word in _beyond(lines[1], lines[2], starts[1]))
    for name, values, parts in _options(added):
        if _moved(name, values, b, a, all_added):
            yield ""
        else:
            here = bool(name) and b.pieces.keys() >= set(_pieces(name))
            yield f"{shlex.join(parts if here else parts[:1])} is not on {b.at}"
    for name, values, parts in _options(taken):
        if _moved(name, values, a, b, Counter(word for _, word in taken)):
            yield ""
        elif all(b.pieces[piece] for word in parts for piece in _pieces(word)):
            yield f"{shlex.join(parts)} is still on {b.at}"
        else:
            yield f"{shlex.join(parts)} was not on {b.at} before"
    beyond = {word for _, word in (*added, *taken)}
    before, after = (_valued(line[start:]) for line, start in zip(lines, starts, strict=False))
    for name, new_values in after.items():
        held = before.get(name, [])
        if held != new_values and len(held) == len(new_values) and beyond.isdisjoint((*new_values, *held)):
            here = any(b.moves(value, a) for value in new_values)
            yield "" if here else f"{shlex.join([name, *new_values] if name else new_values)} is not on {b.at}"


def _valued(argv: Sequence[str]) -> dict[str, list[str]]:
    """The values behind each option that has some, in order; '' names what stands before all options."""
    values, name = dict[str, list[str]](), ""
    for word in argv:
        if _is_option(word):
            name = word
        elif not _TOKEN.search(word) and _pieces(word):
            values.setdefault(name, []).append(word)
    return values


def _moved(name: str, values: Sequence[tuple[str, str]], a: _Process, b: _Process, times: Mapping[str, int]) -> bool:
    """Whether one process shows an option, or what it is set to, and the other does not."""
    if not values:
        return a.shows(name, b)
    named = not name or a.pieces.keys() >= set(_pieces(name))
    for before, value in values:
        behind = before if name or _is_option(before) else ""
        if not (a.sets(behind, value, b) or a.shows(value, b, 1 if named else max(times.get(value, 1), 1))):
            return False
    return True


def _computed(good: Header, made: Header, a: _Process, b: _Process, twins: Sequence[tuple[Header, Header]]) -> bool:
    """Whether processes differ by more than the words of their lines, but for paths and times, which are the run's."""
    passing = {name for twin in twins for name in _passing(*(_Process(header).argv for header in twin))}
    here, there = ([piece for word in _lasting(side.argv, passing) for piece in _pieces(word)] for side in (b, a))
    ours, theirs = Counter(here), Counter(there)
    if ours == theirs:
        return here != there
    after, before = _counted(_line(made.case)), _counted(_line(good.case))
    beyond = (ours - theirs) - (after - before) or (theirs - ours) - (before - after)
    return bool(beyond)


def _passing(argv: Sequence[str], again: Sequence[str]) -> Iterator[str]:
    """What stands before the words by which two processes of one case differ."""
    if len(argv) == len(again):
        for before, word, other in zip(["", *argv], argv, again, strict=False):
            if word != other:
                name, equal, _ = word.partition("=")
                yield name if equal and other.startswith(f"{name}=") else before


def _lasting(argv: Sequence[str], passing: Collection[str]) -> list[str]:
    """The words that are no paths, and stand behind nothing of which the words pass."""
    pairs = zip(["", *argv], argv, strict=False)
    plain = ((before, word) for before, word in pairs if before not in passing and "/" not in word)
    return [word for _, word in plain if "=" not in word or word.partition("=")[0] not in passing]


def _line(case: Mapping[str, Any]) -> list[str]:
    subject = case.get("subject", {})
    return [*_split(str(subject.get("command", ""))), *map(str, subject.get("flags", ()))]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a shell reads it otherwise
        return text.split()


def _start(line: Sequence[str], argv: Sequence[str]) -> int:
    """How many words of a line are its launcher's own, such as ``torchrun --nproc-per-node 2`` and ``bash run.sh``."""
    pairs = zip(line[::-1], argv[::-1], strict=False)
    alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    options_alone = alike and all(word.startswith("-") for word in argv[1 : len(argv) - alike])  # python -u
    return max(_named(line, argv), len(line) - alike if options_alone else 0)


def _named(line: Sequence[str], argv: Sequence[str]) -> int:
    """How many words of a line there are up to the file or module that it starts."""
    first = line[0].rpartition("/")[2].strip("{}") if line else ""
    plain = (k for k, word in enumerate(line) if k and not word.startswith("-"))
    if first == "env":
        last = next((k for k in plain if "=" not in line[k]), len(line))
        return last + _named(line[last:], argv)
    if not _RUNS_A_FILE.fullmatch(first):
        places = (k for k in plain if _SCRIPT.search(line[k]) or (_is_module(line, k) and line[k] in argv))
        return next((k + 1 for k in places), 0)
    last = next(plain, len(line) - 1)
    if _is_module(line, last) and line[last] not in argv:  # a launcher, such as torch.distributed.launch
        places = (k for k in plain if line[k] in argv and (_SCRIPT.search(line[k]) or _is_module(line, k)))
        last = next(places, last)
    return last + 1


def _is_module(line: Sequence[str], at: int) -> bool:
    return line[at - 1] in ("-m", "--module")


def _beyond(line: Sequence[str], other: Sequence[str], start: int) -> list[tuple[str, str]]:
    """The words of a line that another has not, or not as often, without its launcher's, each behind the one before."""
    left, pairs = Counter(other), list[tuple[str, str]]()
    for k, word in enumerate(line):
        if left[word]:
            left[word] -= 1
        elif k >= start and not _TOKEN.search(word) and _pieces(word):
            pairs.append((line[k - 1] if k else "", word))
    return pairs


def _is_option(word: str) -> bool:
    return word.startswith("-") and not re.match(r"-\.?\d", word)


def _options(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, list[tuple[str, str]], list[str]]]:
    """Each option, its values, each behind the word before it, and the words of both; '' names what is none's."""
    options: list[tuple[str, list[tuple[str, str]], list[str]]] = []
    for before, word in pairs:
        name, equal, value = word.partition("=")
        if equal and _pieces(value):
            options.append((name, [(name, value)], [word]))
        elif _is_option(word):
            options.append((word, [], [word]))
        elif options and options[-1][0].startswith("-"):
            options[-1][1].append((before, word))
            options[-1][2].append(word)
        else:
            options.append(("", [(before, word)], [word]))
    return options

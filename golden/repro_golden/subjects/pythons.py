"""The interpreters of a case's processes, beside those that its key holds: processes say themselves what they run in.

`uv run`, `conda run -n x` and a script that activates an environment run another one than the words of a command tell.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case
from repro_golden.case.python_of import named_by, same_python
from repro_golden.recording.attach.code.identify import Built, marked
from repro_golden.recording.attach.code.met import PYTHONS
from repro_golden.replay.children import ChildFailure, base_environment
from repro_golden.repository.checkout import Place
from repro_golden.subjects.argv import interpreter, replaced, variables_of
from repro_golden.subjects.environments.builds import build_for
from repro_golden.subjects.environments.releases import asked
from repro_golden.subjects.surroundings import paths_in

__all__ = [
    "build_in",
    "build_of_other",
    "check_own",
    "environments_named",
    "is_one_of",
    "other_pythons",
    "ran_in",
    "said_by",
    "said_to",
]

_RAN_IN = "ran in"
"""A file beside a worktree, with the interpreters that its processes said they are."""
_ITSELF = "import json\nprint(json.dumps(sys.executable))"
_UNKNOWN = "a Python that did not say which it is"
_OF_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")
"""What lies in the folder of an environment."""


def check_own(own: str, what: str, pythons: Collection[str], log: Path) -> None:
    """Refuse a program that runs in other environments than the one that was made for it.

    Args:
        own: The interpreter of that.
        what: What that environment is, behind "the environment that".
        pythons: The interpreters of the processes that count; of none nothing is known.
        log: What the program printed.

    Raises:
        ChildFailure: none of them is that one.
    """
    if pythons and not any(is_one_of(python, [own]) for python in pythons):
        line = (
            f"the program runs in {' and '.join(sorted({*pythons}))}, not in the environment that {what} (a path in "
            "the launch, or a script that activates another?): let it take the python that PATH has first"
        )
        raise ChildFailure("elsewhere", -1, line, str(log))


@contextlib.contextmanager
def said_to(raw: Path, place: Place, known: Sequence[str]) -> Iterator[None]:
    """Note which other interpreters than those that are known processes of the block say that they are.

    What a run makes in its worktree is the commit's own. An environment that it makes elsewhere is not: other runs may
    take it up.

    Args:
        raw: Folder of their raw records.
        place: Where they run; in the user's checkout nothing is noted.
        known: The interpreters that the key of a probe holds.
    """
    try:
        yield
    finally:
        if place.home and (others := sorted(_others(raw, place.root, known))):
            place.beside.mkdir(exist_ok=True)
            (place.beside / _RAN_IN).write_text(json.dumps(sorted({*ran_in(place), *others})), encoding="utf-8")


def said_by(raw: Path) -> dict[str, str]:
    """The interpreter that each process said it is, by the name of its record.

    Args:
        raw: Folder of their raw records.
    """
    said = {}
    for path in raw.glob(PYTHONS):
        try:
            said[path.name] = str(json.loads(path.read_text(encoding="utf-8")))
        except ValueError:  # cut short: of one that nobody finds nothing is used again
            said[path.name] = _UNKNOWN
    return said


def ran_in(place: Place) -> list[str]:
    """The other interpreters that runs in a worktree ran in."""
    path = place.beside / _RAN_IN
    return list(json.loads(path.read_text(encoding="utf-8"))) if place.home and path.exists() else []


def build_in(case: Case, python: str, root: Path) -> Built:
    """What stands for such an interpreter and all that it could import.

    Args:
        case: The case.
        python: The interpreter.
        root: The user's checkout.

    Raises:
        ReproError: it is gone, or does not answer.
    """
    if not Path(python).exists():
        raise ReproError(f"there is no {python} any more")
    return build_for(python, _surroundings(case, root)[2], root)


def build_of_other(case: Case, python: str, root: Path) -> Built:
    """What stands for another interpreter and all that it could import; of one that does not answer, for its file."""
    try:
        return build_in(case, python, root)
    except ReproError:
        marks, status = marked([python]), Path(python).stat()
        return Built(f"{python} {status.st_size} {status.st_mtime_ns}", marks)


def other_pythons(case: Case, root: Path) -> list[str]:
    """The interpreters that a program's commands name beside the case's own.

    Where `env` has a PATH of its own, that which a script finds there is one of them.
    """
    program = case.subject.program
    assert program is not None
    python, tokens, variables = _surroundings(case, root)
    lines = [shlex.split(line) for line in program.lines]
    lines += [["python"]] * ("PATH" in program.env)
    named = {named_by([replaced(word, tokens) for word in line], root, variables["PATH"]) for line in lines if line}
    return sorted(other for other in named if other and not same_python(other, python))


def _surroundings(case: Case, root: Path) -> tuple[str, dict[str, str], dict[str, str]]:
    """A case's own interpreter, what a program's tokens stand for, and its variables."""
    program = case.subject.program
    assert program is not None
    python = interpreter(program, root)
    tokens = {"root": str(root), "python": python}
    return python, tokens, variables_of(case, program, python, tokens)


def environments_named(case: Case, root: Path) -> list[str]:
    """The interpreters of environments that the program's variables and words name by absolute paths."""
    subject = case.subject
    if not subject.program:  # it starts no other
        return []
    values = [value for name, value in (base_environment(case) | subject.env).items() if name != "PATH"]
    folders = {path for word in [*values, *subject.texts] for path in paths_in(word, root)}
    homes = [folder for folder in folders if any(os.path.exists(folder / name) for name in _OF_ENVIRONMENTS)]  # noqa: PTH110 - raises nothing
    return sorted(str(home / "bin" / "python") for home in homes if os.access(home / "bin" / "python", os.X_OK))


def _others(raw: Path, root: Path, known: Sequence[str]) -> Iterator[str]:
    for python in {*said_by(raw).values()}:
        of_tree = any(Path(python).is_relative_to(top) for top in (root, root.resolve()))
        if not of_tree and not is_one_of(python, known):
            yield python


def is_one_of(python: str, known: Sequence[str]) -> bool:
    """Whether an interpreter is one of those that are known, or what one of them starts in its place."""
    return any(same_python(python, name) for known_python in known for name in (known_python, _behind(known_python)))


@functools.cache
def _behind(python: str) -> str:
    """The interpreter that a script starts in its place, such as a shim of pyenv's."""
    with contextlib.suppress(ReproError):
        return str(asked(python, _ITSELF))
    return python

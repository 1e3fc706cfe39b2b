"""What a case names: its launch, with what a replay sets for it, its code, and the rollouts that it replays."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from repro.doctor.artefacts.kinds import Flag, Launch, Reader, Variable
from repro.doctor.artefacts.launches.scripts import launch_of_argv, read_launch
from repro.doctor.artefacts.python_code import PYTHON
from repro.doctor.artefacts.runs import ROLLOUT_DUMP, sizes_of, within
from repro_golden.base.checks import Where
from repro_golden.case.file import Case, CommandSubject, read_case
from repro_golden.dumps.rollout.files import dump_files
from repro_golden.replay.children import BITS_DEFAULTS

__all__ = ["CASE", "artefacts_of"]

_FILES = 5000
"""Files of a subject's code that are looked at."""
_NO_TRAINER = frozenset({"golden", "tests", "docs", "node_modules", "__pycache__"})
"""Folders of a repository whose code does not train."""
_REPLAY = "--debug-train-only"
"""What a replay of slime, Miles or Relax adds: nothing is sampled."""


def artefacts_of(case: Case, root: Path) -> Iterator[object]:
    """The launch, the code that switches determinism on, and the rollout dumps of a case.

    Args:
        case: It.
        root: The repository that it belongs to.

    Raises:
        ReproError: one of them cannot be read.
    """
    if case.subject.program:
        yield _launch(case.subject.program, root)
        for path in _code(root / case.subject.path):
            yield from PYTHON.read(path)
    folder = root / case.case.rollouts if case.case.rollouts else None
    if folder and folder.is_dir():
        for path in within(sizes_of(dump_files(folder))):
            yield from ROLLOUT_DUMP.read(path)


def _launch(subject: CommandSubject, root: Path) -> Launch:
    tokens = {"{root}": str(root), "{python}": subject.python or "python"}
    argv = [_filled(word, tokens) for word in shlex.split(subject.command)]
    scripts = [root / word for word in argv if word.endswith(".sh") and (root / word).is_file()]
    launch = read_launch(scripts[0]) if scripts else launch_of_argv(argv)
    # the parent sets these in the child's environment, so a launch need not
    variables = {
        name: Variable(value, "export", Where(item=name)) for name, value in {**BITS_DEFAULTS, **subject.env}.items()
    }
    launch = replace(launch, env={**variables, **launch.env})
    if subject.system is None:
        return launch
    flags = launch.given
    if not launch.has(_REPLAY) and _REPLAY not in subject.left_out:
        flags = (*flags, Flag(_REPLAY, (), Where(item=_REPLAY)))
    by_name = {flag.name: flag for flag in flags}
    return replace(launch, system=subject.system, trainer=True, given=flags, flags=by_name)


def _code(place: Path) -> Iterator[Path]:
    """Python files that switch determinism on, at a place that holds the subject's code."""
    if place.suffix == ".py" and PYTHON.fits(place):
        yield place
    left = _FILES
    for folder, folders, names in os.walk(place):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in _NO_TRAINER)
        for name in sorted(names):
            if name.endswith(".py") and left and PYTHON.fits(path := Path(folder, name)):
                yield path
            left -= left > 0


def _filled(word: str, tokens: dict[str, str]) -> str:
    for token, text in tokens.items():
        word = word.replace(token, text)
    return word


def _fits(path: Path) -> bool:
    return path.suffix == ".toml" and path.parent.name == "cases" and path.is_file()


CASE = Reader("case", _fits, lambda path: artefacts_of(read_case(path), path.resolve().parents[2]))
"""A case file, which lies in ``golden/cases`` of its repository."""

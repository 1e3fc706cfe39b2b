"""What a case names: its launch, with what a replay sets for it, and the rollouts that it replays."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from repro.doctor.artefacts.kinds import Launch, Reader, Variable
from repro.doctor.artefacts.launch import launch_of_argv, read_launch
from repro.doctor.artefacts.runs import ROLLOUT_DUMP, sizes_of, within
from repro.doctor.rule import Where
from repro_golden.case import Case, CommandSubject, TrainerSubject, read_case
from repro_golden.children import BITS_DEFAULTS
from repro_golden.dumps.rollout.files import dump_files

__all__ = ["CASE", "artefacts_of"]


def artefacts_of(case: Case, root: Path) -> Iterator[object]:
    """The launch and the rollout dumps of a case.

    Args:
        case: It.
        root: The repository that it belongs to.

    Raises:
        ReproError: one of them cannot be read.
    """
    if isinstance(case.subject, CommandSubject):
        yield _launch(case.subject, root)
    folder = root / case.case.rollouts if case.case.rollouts else None
    if folder and folder.is_dir():
        for path in within(sizes_of(dump_files(folder))):
            yield from ROLLOUT_DUMP.read(path)


def _launch(subject: CommandSubject, root: Path) -> Launch:
    tokens = {"{root}": str(root), "{python}": subject.python or "python"}
    words = [_filled(word, tokens) for word in shlex.split(subject.command)]
    scripts = [root / word for word in words if word.endswith(".sh") and (root / word).is_file()]
    launch = read_launch(scripts[0]) if scripts else launch_of_argv(words)
    # the parent sets these in the child's environment, so a launch need not
    given = {
        name: Variable(value, "export", Where(item=name)) for name, value in {**BITS_DEFAULTS, **subject.env}.items()
    }
    system = subject.kind if isinstance(subject, TrainerSubject) else launch.system
    return replace(launch, env={**given, **launch.env}, system=system)


def _filled(word: str, tokens: dict[str, str]) -> str:
    for token, text in tokens.items():
        word = word.replace(token, text)
    return word


def _fits(path: Path) -> bool:
    return path.suffix == ".toml" and path.parent.name == "cases" and path.is_file()


def _read(path: Path) -> Iterator[object]:
    yield from artefacts_of(read_case(path), path.resolve().parents[2])


CASE = Reader("case", _fits, _read)
"""A case file, which lies in ``golden/cases`` of its repository."""

"""Cases as commits have them: their files, and what decides how they are run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from repro_golden.base.canonical import canonical_json
from repro_golden.base.errors import ReproError
from repro_golden.case.file import CASES, Case, read_case
from repro_golden.repository.git import Git

__all__ = ["ABSENT", "ROLLOUTS", "Change", "CommittedCases", "differences", "in_words", "of_checkout"]

_SHOWN = 4
"""Keys of a case that changed and are named."""
ABSENT = object()
"""Stands for the value of a key that one side has not."""
ROLLOUTS = "content of rollouts"
"""Key of what git says of them."""
Change = tuple[Any, Any]
"""A value before and after."""


@dataclass(frozen=True)
class CommittedCases:
    """The case files of a commit.

    Attributes:
        git: Git in the repository's top folder.
        commit: Any revision that git knows.
    """

    git: Git
    commit: str

    def names(self) -> list[str]:
        """Those that have a file, also where their folder is a link inside of the repository."""
        folder = self._named(CASES.as_posix())
        if folder is None or folder[1] != "tree":
            return []
        entries = [entry.partition("\t") for entry in self.git.names("ls-tree", "-z", folder[0])]
        paths = [PurePosixPath(name) for facts, _, name in entries if facts.split()[1] == "blob"]
        return [path.stem for path in paths if path.suffix == ".toml" and "\n" not in path.name]

    def has(self, name: str) -> bool:
        """Whether there is a file of that case, be it reached through links."""
        return self._content(name) is not None

    def read(self, name: str) -> Case | str | None:
        """The case; its text where this repro cannot read it; None where there is none."""
        content = self._content(name)
        if content is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.toml"
            path.write_bytes(content)
            try:
                return read_case(path)
            except ReproError:
                return content.decode(errors="replace")

    def asked(self, case: Case | str) -> dict[str, Any]:
        """What decides how a case is run, with what the commit says of its rollouts' content: [] where nothing."""
        if isinstance(case, str):
            return {"its file": case}
        facts = case.canonical()
        facts.pop("name")
        facts["subject"]["path"] = str(PurePosixPath(case.subject.path))
        # of no run's identity, but what lies in its worktree
        beside = {"link": list(case.subject.link), "check": case.subject.check_line}
        facts["subject"] |= {key: value for key, value in beside.items() if value}
        facts["case"] = {"steps": facts.pop("steps")}
        if case.case.rollouts is not None:
            path = str(PurePosixPath(case.case.rollouts))
            held = [self._named(place) for place in (path, f"{path}.dvc")]
            facts["case"] |= {"rollouts": path, ROLLOUTS: sorted(entry[0][:10] for entry in held if entry)}
        return facts

    def _named(self, path: str) -> tuple[str, str] | None:
        """Id and type of what lies at a path, through symbolic links; None where nothing does."""
        asked = os.fsencode(f"{self.commit}:{path}\n")
        facts = self.git("cat-file", "--batch-check", "--follow-symlinks", given=asked).split(b"\n")[0].split(b" ")
        return (facts[0].decode(), facts[1].decode()) if len(facts) == 3 and facts[2].isdigit() else None

    def _content(self, name: str) -> bytes | None:
        entry = self._named(f"{CASES.as_posix()}/{name}.toml")
        return self.git("cat-file", "blob", entry[0]) if entry and entry[1] == "blob" else None


def of_checkout(git: Git, case: Case) -> dict[str, Any]:
    """`CommittedCases.asked` of a case of the working tree, and of the rollouts that lie there."""
    facts = CommittedCases(git, "HEAD").asked(case)
    if case.case.rollouts is not None:
        specs = [f":(top,literal){case.case.rollouts}{ending}" for ending in ("", ".dvc")]
        if git.without_filters().names("diff", "--no-ext-diff", "--name-only", "-z", "HEAD", "--", *specs):
            facts["case"][ROLLOUTS] = "changed since the last commit"
    return facts


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Change]:
    """The keys with another value, as ``subject.config.lr``, with both."""
    before, after = dict(_flat(a)), dict(_flat(b))
    pairs = {key: (before.get(key, ABSENT), after.get(key, ABSENT)) for key in {**before, **after}}
    return {key: pair for key, pair in pairs.items() if ABSENT in pair or len(set(map(canonical_json, pair))) > 1}


def in_words(changes: Mapping[str, Change]) -> str:
    """Some differences in one line, the first ones with both values."""
    shown = [
        f"{key} {' -> '.join('not set' if side is ABSENT else _short(side) for side in pair)}"
        for key, pair in list(changes.items())[:_SHOWN]
    ]
    more = len(changes) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"

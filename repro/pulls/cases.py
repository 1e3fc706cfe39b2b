"""What a pull request does to the cases that are to judge it: it may take one away, or change what one says."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from repro.pulls.pair import PairResult
from repro_bisect.axes.commits import merge_bases, resolve
from repro_golden.base.clean import one_line
from repro_golden.base.errors import ReproError
from repro_golden.case.file import CASES, Case, list_cases, read_case
from repro_golden.repository.checkout import Checkout

__all__ = ["PullCases"]

_SHOWN = 4
"""Keys of a case that changed and are named."""
_ABSENT = object()
_MAY_GROW = ("observe.metrics", "observe.activations", "subject.pass_env")
"""Keys that let nothing agree by holding more: more is looked at, and `passing` takes new variables out."""


class PullCases:
    """The case files of the checkout, by which both ends are replayed, and those of the ends.

    Attributes:
        names: Those of the checkout and of both ends, sorted.
    """

    def __init__(self, checkout: Checkout, base: str, head: str) -> None:
        """Take the checkout and both revisions; BASE is the commit at which HEAD's branch left it.

        Raises:
            ReproError: a revision is unknown.
        """
        self._checkout, self._head = checkout, resolve(checkout, head)
        good = resolve(checkout, base)
        # without a common commit there is no BASE, as each comparison will say
        self._base = next(iter(merge_bases(checkout, good, self._head)), self._head)
        self._here = [path.stem for path in list_cases(checkout.root)]
        ends = (self._base, self._head)
        self.names = sorted({*self._here, *(name for commit in ends for name in self._listed(commit))})
        self._at = {commit: {name for name in self.names if self._content(commit, name) is not None} for commit in ends}

    def absent(self, name: str) -> str:
        """Why a case is not in the checkout, though an end has it, in one line; '' where it is."""
        if name in self._here:
            return ""
        file = one_line(f"{CASES / name}.toml")
        if name in self._at[self._head]:
            return f"{file} is HEAD's, and not in this checkout: check HEAD out"
        return f"HEAD takes {file} away: nothing judges what it judged"

    def passing(self, case: Case) -> Case:
        """The case, which passes on no more variables than it does at BASE: HEAD names its own code no secret."""
        if not case.subject.pass_env:
            return case
        there = self._read(self._base, case.name)
        allowed = there.subject.pass_env if isinstance(there, Case) else ()
        kept = tuple(name for name in case.subject.pass_env if name in allowed)
        return case.model_copy(update={"subject": case.subject.model_copy(update={"pass_env": kept})})

    def judged(self, result: PairResult) -> PairResult:
        """The result, which is no agreement where HEAD changed what was asked: how it is run, or its bounds."""
        base, head = (self._read(commit, result.case) for commit in (self._base, self._head))
        if base is None or head is None:
            return result  # it is new, or of the checkout alone
        runs = _differences(self._run(self._base, base), self._run(self._head, head))
        runs = {key: pair for key, pair in runs.items() if not (key in _MAY_GROW and _grew(*pair))}
        rules = _differences(_rules(base), _rules(head))
        if not runs and not rules:
            return result
        what = _listed({**runs, **rules})
        result = replace(result, notes=[*result.notes, f"HEAD changes the case: {what}"])
        compared = any(key.startswith("compare.") for key in rules)
        # without bounds no number that is only printed was ever judged
        judged = result.verdict == "within" or (isinstance(base, Case) and base.compare.mode == "bounds")
        looser = compared and judged and not _no_looser(base, head)
        if result.verdict not in ("identical", "within") or not (runs or looser):
            return result
        said = "bit-identical" if result.verdict == "identical" else "within bounds"
        reason = f"HEAD changes the case ({what}): {said} as this checkout has it, which says nothing of what it was"
        return replace(result, verdict="unverifiable", reason=reason, compared=None)

    def _listed(self, commit: str) -> list[str]:
        """The case files of a commit, by name; those in a folder that is a link are known by the checkout alone."""
        listed = self._checkout.git.names("ls-tree", "-z", commit, f"{CASES.as_posix()}/")
        entries = [entry.partition("\t") for entry in listed]
        paths = [PurePosixPath(path) for facts, _, path in entries if facts.split()[1] == "blob"]
        return [path.stem for path in paths if path.suffix == ".toml" and "\n" not in path.name]

    def _content(self, commit: str, name: str) -> bytes | None:
        """A case file, through symbolic links; None where there is none."""
        asked = os.fsencode(f"{commit}:{CASES.as_posix()}/{name}.toml\n")
        head, _, content = self._checkout.git("cat-file", "--batch", "--follow-symlinks", given=asked).partition(b"\n")
        facts = head.rsplit(b" ", 2)
        return content[: int(facts[2])] if len(facts) == 3 and facts[1] == b"blob" else None

    def _read(self, commit: str, name: str) -> Case | str | None:
        """The case at a commit; its text where this repro cannot read it; None where there is none."""
        content = self._content(commit, name)
        if content is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.toml"
            path.write_bytes(content)
            try:
                return read_case(path)
            except ReproError:
                return content.decode(errors="replace")

    def _run(self, commit: str, case: Case | str) -> Mapping[str, Any]:
        """What decides how a case is run at a commit: both ends are replayed from the checkout's rollouts."""
        if isinstance(case, str):
            return {"its file": case}
        facts = case.canonical()
        facts.pop("name")
        facts["subject"]["path"] = str(PurePosixPath(case.subject.path))
        facts["case"] = {"steps": facts.pop("steps")}
        if case.case.rollouts is not None:
            path = str(PurePosixPath(case.case.rollouts))
            held = self._checkout.git.names("ls-tree", "-z", commit, "--", path, f"{path}.dvc")
            facts["case"] |= {"rollouts": path, "content of rollouts": sorted(entry.split()[2][:10] for entry in held)}
        return facts


def _rules(case: Case | str) -> Mapping[str, Any]:
    """What decides which numbers agree."""
    return {} if isinstance(case, str) else case.model_dump(mode="json", include={"compare", "mismatch"})


def _no_looser(base: Case | str, head: Case | str) -> bool:
    """Whether what is within HEAD's bounds is within BASE's."""
    if isinstance(base, str) or isinstance(head, str) or base.compare.mode == "bitwise":
        return False
    pairs = [(bound, head.compare.bounds.get(metric)) for metric, bound in base.compare.bounds.items()]
    tight = all(now is not None and now.rtol <= then.rtol and now.atol <= then.atol for then, now in pairs)
    return tight and (head.compare.strict or not base.compare.strict)


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys with another value, as ``subject.config.lr``, with both."""
    before, after = dict(_flat(a)), dict(_flat(b))
    pairs = {key: (before.get(key, _ABSENT), after.get(key, _ABSENT)) for key in {**before, **after}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _grew(before: Any, after: Any) -> bool:
    """Whether a list holds all that it held."""
    return before is _ABSENT or (after is not _ABSENT and set(before) <= set(after))


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _listed(changes: Mapping[str, tuple[Any, Any]]) -> str:
    shown = [
        f"{key} {' -> '.join('not set' if side is _ABSENT else _short(side) for side in pair)}"
        for key, pair in list(changes.items())[:_SHOWN]
    ]
    more = len(changes) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"

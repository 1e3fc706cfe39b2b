"""Cases as commits have them, what decides how they are run, and what a pull request does to those that judge it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from repro.pulls.pair import PairResult
from repro_bisect.axes.commits import merge_bases, resolve
from repro_golden.base.canonical import canonical_json
from repro_golden.base.clean import one_line
from repro_golden.base.errors import ReproError
from repro_golden.case.file import CASES, Case, read_case
from repro_golden.repository.checkout import Checkout
from repro_golden.repository.git import Git
from repro_golden.store.golden import CASE_LOST, Store

__all__ = ["ABSENT", "ROLLOUTS", "Change", "CommittedCases", "PullCases", "differences", "in_words", "of_checkout"]

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


_MAY_GROW = ("observe.activations", "subject.pass_env")
"""Keys that let nothing agree by holding more: more is looked at, and `replayed` takes new variables out.

Not `observe.metrics`: a pattern takes the names that it tells from whatever told them before.
"""
_CHECK = "subject.check"
"""Where BASE has none, `replayed` takes HEAD's out: it may build what is run."""


class PullCases:
    """The case files of the checkout, by which both ends are replayed, and those of the ends.

    Attributes:
        names: Of all that is guarded in the checkout, and of the cases of both ends, sorted.
    """

    def __init__(self, checkout: Checkout, base: str, head: str) -> None:
        """Take the checkout and both revisions; BASE is the commit at which HEAD's branch left it.

        Raises:
            ReproError: a revision is unknown.
        """
        tip, good = resolve(checkout, head), resolve(checkout, base)
        # without a common commit there is no BASE, as each comparison will say
        left = next(iter(merge_bases(checkout, good, tip)), tip)
        self._base, self._head = CommittedCases(checkout.git, left), CommittedCases(checkout.git, tip)
        self._guarded = Store(checkout.root).guarded()
        self.names = sorted({*self._guarded, *self._base.names(), *self._head.names()})

    def absent(self, name: str) -> str:
        """Why a case cannot judge HEAD, in one line: it is not in the checkout, or HEAD has none; '' where it can."""
        file = one_line(f"{CASES / name}.toml")
        if self._base.has(name) and not self._head.has(name):
            return f"HEAD takes {file} away: nothing judges what it judged"
        if self._guarded.get(name) is not None:
            return ""
        if self._head.has(name):
            return f"{file} is HEAD's, and not in this checkout: check HEAD out"
        return CASE_LOST.format(name) if name in self._guarded else f"{file} leads to no file: correct the link"

    def replayed(self, case: Case) -> Case:
        """The case as both ends are replayed: no more variables than at BASE, for HEAD names its own code no secret.

        And without a check that BASE has not: so what agrees is what BASE asked for, whatever a check may build.
        """
        there = self._base.read(case.name)
        allowed = there.subject.pass_env if isinstance(there, Case) else ()
        changes: dict[str, Any] = {"pass_env": tuple(name for name in case.subject.pass_env if name in allowed)}
        if case.subject.check_line and _has_no_check(there):
            changes["check"] = ""
        return case.model_copy(update={"subject": case.subject.model_copy(update=changes)})

    def left_out(self, name: str) -> str:
        """What of HEAD's case `replayed` takes out and may be missed, in words; '' where that is nothing."""
        head = self._head.read(name)
        brought = isinstance(head, Case) and head.subject.check_line and _has_no_check(self._base.read(name))
        return f"; both ends are replayed without {_CHECK}, which BASE has not" if brought else ""

    def judged(self, result: PairResult) -> PairResult:
        """The result, which is no agreement where HEAD changed what was asked: how it is run, or its bounds."""
        base, head = (cases.read(result.case) for cases in (self._base, self._head))
        if base is None or head is None:
            return result  # it is new, or of the checkout alone
        asked = differences(self._base.asked(base), self._head.asked(head))
        left_out = self.left_out(result.case)
        grown = {*_MAY_GROW, *([_CHECK] if left_out else [])}
        runs = [key for key, pair in asked.items() if not (key in grown and _grew(*pair))]
        rules = differences(_rules(base), _rules(head))
        if not asked and not rules:
            return result
        what = in_words({**asked, **rules})
        result = replace(result, notes=[*result.notes, f"HEAD changes the case: {what}{left_out}"])
        compared = any(key.startswith("compare.") for key in rules)
        looser = compared and _was_judged(base, result) and not _no_looser(base, head)
        if result.verdict not in ("identical", "within") or not (runs or looser):
            return result
        label = "bit-identical" if result.verdict == "identical" else "within bounds"
        reason = f"HEAD changes the case ({what}): {label} as this checkout has it, which says nothing of what it was"
        return replace(result, verdict="unverifiable", reason=reason, compared=None)


def _has_no_check(case: Case | str | None) -> bool:
    return isinstance(case, Case) and not case.subject.check_line


def _rules(case: Case | str) -> Mapping[str, Any]:
    """What decides which numbers agree."""
    return {} if isinstance(case, str) else case.model_dump(mode="json", include={"compare", "mismatch"})


def _was_judged(base: Case | str, result: PairResult) -> bool:
    """Whether something that agrees is judged otherwise by other rules: bits that are equal are under all of them.

    Without bounds no number that is only printed was ever judged, nor a name unless that was asked for.
    """
    if result.verdict == "within" or isinstance(base, str):
        return result.verdict == "within"
    renamed = result.compared is not None and bool(result.compared.drift.renames)
    return base.compare.mode == "bounds" or (base.compare.strict and renamed)


def _no_looser(base: Case | str, head: Case | str) -> bool:
    """Whether what is within HEAD's bounds is within BASE's."""
    if isinstance(base, str) or isinstance(head, str) or base.compare.mode == "bitwise":
        return False
    pairs = [(bound, head.compare.bounds.get(metric)) for metric, bound in base.compare.bounds.items()]
    tight = all(now is not None and now.rtol <= then.rtol and now.atol <= then.atol for then, now in pairs)
    return tight and (head.compare.strict or not base.compare.strict)


def _grew(before: Any, after: Any) -> bool:
    """Whether a list holds all that it held."""
    return before is ABSENT or (after is not ABSENT and set(before) <= set(after))

"""What a pull request does to the cases that are to judge it: it may take one away, or change what one says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from repro.pulls.committed_cases import ABSENT, CommittedCases, differences, in_words
from repro.pulls.pair import PairResult
from repro_bisect.axes.commits import merge_bases, resolve
from repro_golden.base.clean import one_line
from repro_golden.case.file import CASES, Case
from repro_golden.repository.checkout import Checkout
from repro_golden.store.golden import CASE_LOST, Store

__all__ = ["PullCases"]

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

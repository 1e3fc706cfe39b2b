"""What a bisect found."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from repro_bisect.axes.axis import PointInfo, short
from repro_bisect.explain.result import Explanation
from repro_bisect.probe.progress import Cost
from repro_golden.base.canonical import mapping_of
from repro_golden.compare.coverage import Coverage
from repro_golden.compare.renames import NOTHING, Renames
from repro_golden.compare.traces import Comparison, Divergence

__all__ = ["BisectResult", "Culprit", "Outcome", "in_order"]

Outcome = Literal["found", "ambiguous", "agree", "flaky"]


@dataclass(frozen=True)
class Culprit:
    """A commit that moved the numbers.

    Attributes:
        commit: Who, when and what.
        divergence: Where its numbers first differ from its parent's; of a flaky one, from its own; where verdicts are
            noisy, where one replay of it was BAD. None for exit codes.
        comparison: Its full replay against its parent's; None for exit codes and noisy verdicts.
        environment: What its lock files changed in the environment that it ran in: a possible culprit beside the code.
        explanation: The operation and the line at which its numbers leave its parent's; None where that was not asked.
        unexplained: Why there is none although it was.
        renames: What the commits before it renamed: its parent's numbers are GOOD's under other names.
        before: What its replay was compared with: its parent, of a merge the one that holds GOOD; "" where none was.
        until: The last step of the round (`round_of`) in which its numbers first differ; None where none was compared.
    """

    commit: PointInfo
    divergence: Divergence | None
    comparison: Comparison | None
    environment: Sequence[str] = ()
    explanation: Explanation | None = None
    unexplained: str = ""
    renames: Renames = NOTHING
    before: str = ""
    until: int | None = None

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return mapping_of(self, "renames", "before", "until", renamed=self.renames)


def in_order(points: Collection[str], parents: Iterable[str]) -> list[str]:
    """Some points of a range, the oldest first; those that are not of it come last.

    Args:
        points: Them.
        parents: Every point of the range, the newest first.
    """
    inside = [point for point in parents if point in points][::-1]
    return inside + [point for point in points if point not in set(inside)]


@dataclass(frozen=True, kw_only=True)
class BisectResult:
    """What a bisect found.

    Attributes:
        outcome: ``found``, ``ambiguous`` (only skips left), ``agree`` (the ends do), ``flaky`` (what was named differs
            from itself).
        good: The good end.
        named: What was named as GOOD: another commit where that is on a branch of its own, and the good end is its
            merge base with BAD.
        bad: The bad end.
        case: The case's name.
        predicate: What made a probe BAD, as it is written.
        culprits: The commits that moved the numbers, the oldest first; one unless all were asked for.
        passed: Commits whose changes stay farther from the training than BAD's (`reach`), so that the search went on.
        flaky: Where the outcome is that: the commit whose own replays differ. Whether it moved numbers is not known.
        suspects: Where skips leave several.
        behind: Of these the one that was tested, and is BAD, where what comes after it was not searched.
        apart: Where its numbers first differ, in a trace of its own.
        untried: Suspects that were only presumed untestable.
        end: Where BAD's numbers first differ from GOOD's.
        explains_bad: Whether the last culprit's trace equals BAD's; False means that later commits move numbers too;
            None where that was not asked or cannot be told.
        ends: Who, when and what of GOOD and of BAD.
        earlier: Where the culprit's parent differs from GOOD, in a step after the culprit's: commits before it move
            numbers too. Not looked for where all culprits were.
        verdicts: Every commit that was judged.
        skips: Why, for the skipped ones, the oldest first.
        diagnoses: What is known of why those failed, in one line each.
        parents: Every commit of the range, newest first, with its parents.
        subjects: First line of the message of each judged commit.
        cost: Probes, trained steps and seconds, by what they were for.
        git_probes: How many tests `git bisect run` would have made to the same answer, by git itself; None without one,
            and where that is not known.
        git_steps: How many steps each of them would have trained.
        git_seconds: What they would have taken one after the other, by what the ends took; None where that is unknown.
        confirmed: False where the search was to end with the culprit's name, which nothing has borne out.
        accepted: The verdicts that one culprit explains, the ends included: what git could go on from.
        one_step: Whether probes trained one step from a saved state.
        posterior: Where verdicts are noisy, or may be, as exit codes may: each commit's probability of being the
            culprit, those above 1 in 1,000.
        rates: Where verdicts are noisy: how often a commit without and one with the culprit is judged BAD, as the
            probability reckons: an estimate, which replays draw away from a third. None where no run contradicted
            another.
        tallies: Beside `rates`, what was seen: how many replays of commits without what was named were BAD, of how
            many, and the same of commits with it.
        alike: Whether exit codes contradict any one culprit although the runs of each commit all said the same.
        seconds: Wall time.
        answered: Wall time until the search had its answer, before it was confirmed; None where nothing was searched.
        machine: Where.
        golden: The golden run that served as GOOD's first run, if one did.
        renames: What BAD calls otherwise than GOOD, where their numbers are compared by bits.
        looked: What the others were judged by: what of GOOD's run the predicate reads.
        remarks: What is to be known of the ends beside their numbers: how many steps were compared, and how they ended.
    """

    outcome: Outcome
    good: str
    bad: str
    case: str
    predicate: str
    culprits: Sequence[Culprit]
    passed: Sequence[Culprit] = ()
    flaky: Culprit | None = None
    suspects: Sequence[str] = ()
    behind: str = ""
    apart: Divergence | None = None
    untried: Sequence[str] = ()
    end: Divergence | None
    explains_bad: bool | None = None
    verdicts: Mapping[str, str]
    skips: Mapping[str, str]
    parents: Mapping[str, Sequence[str]]
    subjects: Mapping[str, str]
    cost: Cost
    git_probes: int | None = None
    git_steps: int
    git_seconds: float | None = None
    confirmed: bool = True
    accepted: Mapping[str, str]
    one_step: bool
    posterior: Mapping[str, float] = field(default_factory=dict)
    rates: tuple[float, float] | None = None
    tallies: tuple[tuple[int, int], tuple[int, int]] | None = None
    alike: bool = False
    seconds: float
    answered: float | None
    machine: str
    golden: str | None
    diagnoses: Mapping[str, str] = field(default_factory=dict)
    renames: Renames = NOTHING
    looked: Coverage = field(default_factory=Coverage)
    remarks: Sequence[str] = ()
    earlier: Divergence | None = None
    ends: Sequence[PointInfo] = ()
    named: str = ""

    @property
    def bitwise(self) -> bool:
        """Whether equal meant equal bits."""
        return self.predicate == "bitwise"

    @property
    def order(self) -> list[str]:
        """Every commit of the range, newest first."""
        return list(self.parents)

    @property
    def commits(self) -> int:
        """How many commits the range has."""
        return len(self.parents)

    @property
    def culprit(self) -> PointInfo | None:
        """The first culprit found."""
        return self.culprits[0].commit if self.culprits else None

    @property
    def told(self) -> Sequence[Culprit]:
        """What is shown of commits: the culprits, and the flaky one."""
        return [*self.culprits, *([self.flaky] if self.flaky else [])]

    @property
    def divergence(self) -> Divergence | None:
        """Where the flaky commit or the first culprit first differs; without any, where suspects do, or else BAD."""
        culprit = self.flaky or next(iter(self.culprits), None)
        return culprit.divergence if culprit else self.apart or self.end

    @property
    def comparison(self) -> Comparison | None:
        """The first culprit's full replay against its parent's; of a flaky commit two of its own."""
        culprit = self.flaky or next(iter(self.culprits), None)
        return culprit.comparison if culprit else None

    @property
    def unnamed(self) -> str:
        """Why not every commit that moved numbers is named; '' where they are."""
        if self.outcome == "agree":
            return "both ends have the same numbers on this machine now: it is not the code that changed them"
        if self.flaky:
            return f"{short(self.flaky.commit.commit)} does not reproduce itself: two replays of it differ"
        if self.outcome == "ambiguous":
            return f"one of {len(self.suspects)} commits, of which the rest cannot be tested"
        return ""

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        fields = ("bitwise", "order", "commits", "culprit", "comparison", "divergence")
        more = {name: getattr(self, name) for name in fields} | {"renamed": self.renames, "looked_at": self.looked}
        return mapping_of(self, "parents", "end", "renames", "looked", **more)

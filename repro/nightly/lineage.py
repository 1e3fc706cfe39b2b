"""What of a repository's past counts for a night: the commits before tonight's, and where numbers were approved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from repro.nightly.records import Night
from repro_golden.repository.checkout import Checkout
from repro_golden.repository.git import Git

__all__ = ["Lineage", "lineage", "newest_green"]


@dataclass(frozen=True)
class Lineage:
    """The past of a commit.

    Attributes:
        order: Every commit that it holds, itself first: none comes before one that holds it.
        approved: Where the golden runs that it holds, or last held, were all first there; empty where there is none.
        since: Those that hold `approved`; all where there is none.
        cut_off: Whether `approved` is empty because that commit may be one that a shallow clone left out.
    """

    order: Mapping[str, int]
    approved: str
    since: frozenset[str]
    cut_off: bool = False


def lineage(checkout: Checkout, case: str, commit: str) -> Lineage:
    """The past of a commit, as far as it is here.

    Args:
        checkout: The repository.
        case: Whose golden runs are approved.
        commit: Full id.
    """
    ask = checkout.git
    order = {c: k for k, c in enumerate(ask.text("rev-list", "--topo-order", commit).split())}
    approved = _approved(ask, case, commit)
    if not approved or approved in ask.cut_off():  # all that is here came after the approval
        return Lineage(order, "", frozenset(order), bool(approved))
    after = ask.text("rev-list", "--ancestry-path", f"{approved}..{commit}").split() if approved != commit else []
    return Lineage(order, approved, frozenset([approved, *after]))


def _approved(ask: Git, case: str, commit: str) -> str:
    """The first commit that holds all golden runs of a commit, or was made after each of them had come.

    One that was taken away still counts, as it last was: that approves nothing. Neither does bringing one back, or
    giving it another place: its content came when it first came. Of a merge whose sides each brought one it is the
    merge, since no side's own code has what both approved.
    """
    runs = f":(glob)golden/runs/*/{case}"
    paths = [f"{runs}.dvc", runs, f"{runs}/**"]
    listed = ask.text("log", "--full-history", "--topo-order", "--format=%H", commit, "--", *paths).split()
    held = {each: _runs(ask, case, each) for each in listed}  # newest first
    last: dict[str, str] = {}
    for each in listed:
        last = held[each] | last
    first = {content: each for each in listed for content in held[each].values()}  # the oldest that has it
    wanted = {first[content] for content in last.values()}
    return next((c for c in reversed(listed) if all(_holds(ask, c, each) for each in wanted)), "") if wanted else ""


def _holds(ask: Git, commit: str, other: str) -> bool:
    return commit == other or ask.tells("merge-base", "--is-ancestor", other, commit)


def _runs(ask: Git, case: str, commit: str) -> dict[str, str]:
    """The hashes of the golden runs of a case in a commit, pointers or folders, by path."""
    runs = {}
    for entry in ask.names("ls-tree", "-r", "-z", commit, "golden/runs/"):
        facts, _, path = entry.partition("\t")
        parts = path.split("/")
        if len(parts) > 3 and parts[3] in (case, f"{case}.dvc"):
            runs[path] = facts.split()[2]
    return runs


def newest_green(nights: Sequence[Night], past: Lineage) -> Night | None:
    """The green night of the newest commit, of any machine; of several of that commit the last."""
    green = [night for night in nights if night.status == "green" and night.commit["commit"] in past.order]
    return min(reversed(green), key=lambda night: past.order[night.commit["commit"]], default=None)

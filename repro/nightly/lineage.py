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
        approved: The newest that added or changed a golden run's pointer; empty where there is none.
        since: Those that hold `approved`; all where there is none.
    """

    order: Mapping[str, int]
    approved: str
    since: frozenset[str]


def lineage(checkout: Checkout, case: str, commit: str) -> Lineage:
    """The past of a commit, as far as it is here: a shallow clone has a short one.

    Args:
        checkout: The repository.
        case: Whose golden runs are approved.
        commit: Full id.
    """
    ask = checkout.git
    order = {c: k for k, c in enumerate(ask.text("rev-list", "--topo-order", commit).split())}
    approved = _approved(ask, case, commit)
    if not approved:
        return Lineage(order, "", frozenset(order))
    after = ask.text("rev-list", "--ancestry-path", f"{approved}..{commit}").split() if approved != commit else []
    return Lineage(order, approved, frozenset([approved, *after]))


def _approved(ask: Git, case: str, commit: str) -> str:
    """The newest commit that holds a golden run which no parent has, or a merge whose sides each brought one.

    Taking one away approves nothing.
    """
    runs = f":(glob)golden/runs/*/{case}"
    paths = [f"{runs}.dvc", runs, f"{runs}/**"]
    for text in ask.text("log", "--format=%H %P", commit, "--", *paths).splitlines():
        child, *parents = text.split()
        if not any(_runs(ask, case, child) <= _runs(ask, case, parent) for parent in parents):
            return str(child)
    return ""


def _runs(ask: Git, case: str, commit: str) -> set[str]:
    """``hash path`` of the golden runs of a case in a commit, pointers or folders."""
    runs = set()
    for entry in ask.names("ls-tree", "-r", "-z", commit, "golden/runs/"):
        facts, _, path = entry.partition("\t")
        parts = path.split("/")
        if len(parts) > 3 and parts[3] in (case, f"{case}.dvc"):
            runs.add(f"{facts.split()[2]} {path}")
    return runs


def newest_green(nights: Sequence[Night], past: Lineage) -> Night | None:
    """The green night of the newest commit, of any machine; of several of that commit the last."""
    green = [night for night in nights if night.status == "green" and night.commit["commit"] in past.order]
    return min(reversed(green), key=lambda night: past.order[night.commit["commit"]], default=None)

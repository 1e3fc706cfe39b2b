"""What of a repository's past counts for a night: the commits before tonight's, and where numbers were approved."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from repro.nightly.records import NightlyRun
from repro_golden.repository.checkout import Checkout
from repro_golden.repository.git import Git
from repro_golden.store.pulled import CODE, Noted, noted, relabelled

__all__ = ["Lineage", "lineage", "newest_green", "recorded"]


Runs = Mapping[str, str]
"""The golden runs of a case in a commit: git's hashes of their pointers or files, by path."""


@dataclass(frozen=True)
class Lineage:
    """The past of a commit.

    Attributes:
        order: Every commit that it holds, itself first: none comes before one that holds it.
        approved: Where the golden runs that it holds, or last held, were first all there; empty where there is none.
        since: Those that hold `approved` (all where there is none) and no golden run that was put back since.
        parents: Those of each of them.
        cut_off: Whether `approved` is empty because a shallow clone may have left that commit out.
        void: A commit whose pointer would approve what is here, and approves nothing, since it names other content than
            it was written for; empty where there is none.
    """

    order: Mapping[str, int]
    approved: str
    since: frozenset[str]
    parents: Mapping[str, Sequence[str]]
    cut_off: bool = False
    void: str = ""

    def held_by(self, commit: str) -> frozenset[str]:
        """The commits that one of them holds, itself among them; none where it is not in this past."""
        held: set[str] = set()
        next_ones = [commit]
        while next_ones:
            current = next_ones.pop()
            if current in self.parents and current not in held:
                held.add(current)
                next_ones += self.parents[current]
        return frozenset(held)


def lineage(checkout: Checkout, case: str, commit: str) -> Lineage:
    """The past of a commit, as far as it is here.

    The approving commit is the first one that came after each golden run's content had come. One that was taken away
    still counts, as it last was: that approves nothing. Neither does bringing one back, or giving it another place, nor
    a pointer that names other content than it was written for, whichever machine's: what was there before stays. Of a
    merge whose sides each brought one it is the merge, since no side's own code has what both approved.

    Args:
        checkout: The repository.
        case: Whose golden runs are approved.
        commit: Full id.
    """
    listed = checkout.git.text("rev-list", "--topo-order", "--parents", commit).splitlines()
    parents = {c: before for c, *before in map(str.split, listed)}  # newest first
    order = {c: k for k, c in enumerate(parents)}
    changes, void = _changes(checkout.git, case, commit), ""
    held, ever_held = _held(parents, changes)
    while bad := {blob for path, blob in ever_held[commit].items() if relabelled(_pointer(checkout.git, path, blob))}:
        void = void or next(c for c in parents if not bad.isdisjoint(changes.get(c, {}).values()))
        changes = {c: {p: blob for p, blob in change.items() if blob not in bad} for c, change in changes.items()}
        held, ever_held = _held(parents, changes)
    wanted = frozenset(ever_held[commit].values())
    valid = frozenset(c for c in parents if wanted.issuperset(held[c].values()))
    if not wanted:
        return Lineage(order, "", valid, parents, void=void)
    after: dict[str, frozenset[str]] = {}  # of each commit, those of the contents that had come by then
    for c in reversed(parents):
        come = frozenset().union(*(after[p] for p in parents[c]), wanted.intersection(held[c].values()))
        after[c] = next((after[p] for p in parents[c] if after[p] == come), come)
    whole = [c for c in parents if after[c] == wanted]
    since = valid.intersection(_holding(parents, whole[-1]))
    # what a shallow clone left out may have held any of them before
    cut_off = not checkout.git.cut_off().isdisjoint(parents)
    return Lineage(order, "" if cut_off else whole[-1], since, parents, cut_off, void)


def recorded(checkout: Checkout, case: str, approved: str) -> list[Noted]:
    """What the golden runs that an approving commit brought say of the code that they were recorded of.

    That commit may hold other code, as one does that a branch was squashed into. What a merge has from a side it did
    not bring: it approves what it is.
    """
    git = checkout.git
    _, *parents = git.text("rev-list", "--parents", "-1", approved).split()
    brought = _changes(git, case, approved).get(approved, {})
    for side in parents[1:]:
        entries = git.names("ls-tree", "-z", "--full-tree", side, "--", *brought) if brought else []
        had = {name: facts.split()[2] for facts, _, name in (entry.partition("\t") for entry in entries)}
        brought = {path: blob for path, blob in brought.items() if had.get(path) != blob}
    return [note for path, blob in brought.items() if blob and (note := _told(git, path, blob))]


def _told(git: Git, path: str, blob: str) -> Noted | None:
    """What the pointer of a golden run says of its code, or its record where git keeps the run itself."""
    if not path.endswith("/run.json"):
        return noted(_pointer(git, path, blob))
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
        record = json.loads(git("cat-file", "blob", blob))
        commit, tree, untracked = (record.get(key) for key in CODE)
        return Noted(commit or "", tree or "", frozenset(untracked or ())) if record["chain"] else None
    return None


def _pointer(git: Git, path: str, blob: str) -> str:
    """The text of a pointer; of another file nothing."""
    return git("cat-file", "blob", blob).decode(errors="replace") if path.endswith(".dvc") else ""


def _held(
    parents: dict[str, list[str]], changes: Mapping[str, Mapping[str, str | None]]
) -> tuple[dict[str, Runs], dict[str, Runs]]:
    """The golden runs of each commit, and the same with those that were taken away, as they last were.

    What a merge lacks was taken away, unless a side still had it that another never did: then the merge left it out.
    """
    held: dict[str, Runs] = {}
    ever_held: dict[str, Runs] = {}
    for c in reversed(parents):
        before = parents[c]
        base: Runs = held[before[0]] if before else {}
        now = base
        if change := changes.get(c):
            now = {path: content for path, content in {**base, **change}.items() if content}
        earlier = [ever_held[p] for p in before]
        if now is base and earlier and all(each is earlier[0] for each in earlier):
            held[c], ever_held[c] = now, earlier[0]
            continue
        gone = {
            path: content
            for each in earlier
            for path, content in each.items()
            if all(path in other for other in earlier) or not any(path in held[p] for p in before)
        }
        held[c], ever_held[c] = now, gone | dict(now)
    return held, ever_held


def _changes(ask: Git, case: str, commit: str) -> dict[str, dict[str, str | None]]:
    """What commits did to the golden runs of a case, against their first parents: content by path, None for no more."""
    runs = f":(glob)golden/runs/*/{case}"
    entries = ask.names(
        "log", "-z", "--full-history", "--diff-merges=first-parent", "--raw", "--no-abbrev", "--no-renames",
        "--format=%x01%H", commit, "--", f"{runs}.dvc", runs, f"{runs}/**",
    )  # fmt: skip
    changes: dict[str, dict[str, str | None]] = {}
    here: dict[str, str | None] = {}
    facts = ""
    for entry in entries:
        if entry.startswith("\1"):
            here = changes.setdefault(entry[1:], {})
        elif facts:
            content = facts.split()[3]
            here[entry], facts = (content if content.strip("0") else None), ""
        else:
            facts = entry
    return changes


def _holding(parents: dict[str, list[str]], commit: str) -> set[str]:
    """The commits that hold one, itself among them."""
    holding = {commit}
    for c in reversed(parents):
        if not holding.isdisjoint(parents[c]):
            holding.add(c)
    return holding


def newest_green(nightly_runs: Sequence[NightlyRun], past: Lineage) -> NightlyRun | None:
    """The green night of the newest commit, of any machine; of several of that commit the last."""
    green = [run for run in nightly_runs if run.status == "green" and run.commit["commit"] in past.order]
    return min(reversed(green), key=lambda run: past.order[run.commit["commit"]], default=None)

"""What `git bisect` would have done: how many tests it makes to the same answer, and its log for going on by hand."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from repro_golden.repository.git import Git

__all__ = ["git_log", "git_tests"]

_MOST = 20_000
"""Longer ranges are not replayed: git looks at every suspect before each test."""
_MODULO = 32768
"""Of the pseudo-random numbers by which git goes around skips (``PRN_MODULO`` of its ``bisect.c``)."""


def git_tests(
    git: Git,
    good: str,
    parents: Mapping[str, Sequence[str]],
    after: Collection[str],
    verdicts: Mapping[str, str],
    walk: Sequence[str] = (),
) -> int | None:
    """Tests that `git bisect run` makes until it names a culprit, the two ends not counted: git itself is asked.

    Each next test is what ``git rev-list --bisect-vars`` says; once something was skipped, ``--bisect-all`` and git's
    way around skips (``managed_skipped`` of its ``bisect.c``). Neither knows of a bisection that the user has under
    way, as ``--bisect`` does. Commits that nobody tried count as testable.

    Args:
        git: Of the repository.
        good: The good end.
        parents: Every commit after it, newest first.
        after: The culprit, and the commits that contain it.
        verdicts: What is known of commits: ``SKIP`` is what counts.
        walk: Options of ``git rev-list``.

    Returns:
        None for very long ranges, and where git would try a commit that nobody tried between two that are skipped.
    """
    order = list(parents)
    if len(order) > _MOST:
        return None
    bad, goods, skipped, tests = order[0], [good], set[str](), 0
    doubtful = _between_skips(order, verdicts)
    while True:
        how = "--bisect-all" if skipped else "--bisect-vars"
        lines = git.text("rev-list", how, *walk, bad, *(f"^{commit}" for commit in goods))
        listed = re.findall(r"^(?:bisect_rev=')?([0-9a-f]{40,64})\b", lines, re.MULTILINE)
        if not listed:
            return None
        chosen = listed[0]
        if chosen in skipped:
            left = [commit for commit in listed if commit not in skipped]
            if not left:
                return tests
            chosen = _away(left, bad)
        if chosen == bad:
            return tests
        if chosen in doubtful:
            return None
        tests += 1
        if verdicts.get(chosen) == "SKIP":
            skipped.add(chosen)
        elif chosen in after:
            bad = chosen
        else:
            goods.append(chosen)


def _between_skips(order: Sequence[str], verdicts: Mapping[str, str]) -> set[str]:
    """Commits without a verdict whose next neighbours with one, before and after, are both skipped."""
    beside: list[list[str]] = []
    for line in (order, order[::-1]):
        last, seen = "", []
        for commit in line:
            seen.append(last)
            last = verdicts.get(commit, last)
        beside.append(seen)
    pairs = zip(order, beside[0], reversed(beside[1]), strict=True)
    return {commit for commit, *both in pairs if commit not in verdicts and both == ["SKIP", "SKIP"]}


def _away(commits: Sequence[str], bad: str) -> str:
    """Git's choice of those that are not skipped, the best first, when the very best is (``skip_away``)."""
    number = (len(commits) * 1103515245 + 12345) % 2**32 // 65536 % _MODULO
    place = len(commits) * number // _MODULO * _root(number) // _root(_MODULO)
    if commits[place] != bad:
        return commits[place]
    return commits[place - 1] if place else commits[0]


def _root(value: int) -> int:
    """The square root as git takes it, by Newton's way in floats (``sqrti``)."""
    if not value:
        return 0
    root = float(value)
    while True:
        closer = (root + value / root) / 2
        step, root = abs(closer - root), closer
        if step < 0.5:
            return int(root)


def git_log(good: str, bad: str, verdicts: Mapping[str, str], subjects: Mapping[str, str]) -> str:
    """What is known, in the form of ``git bisect log``: ``git bisect replay FILE`` goes on from there."""
    terms = {"GOOD": "good", "BAD": "bad", "SKIP": "skip"}
    lines = ["git bisect start"]
    known = {bad: "BAD", good: "GOOD"} | {c: v for c, v in verdicts.items() if c not in (good, bad)}
    for commit, verdict in known.items():
        if term := terms.get(verdict):
            lines += [f"# {term}: [{commit}] {subjects.get(commit, '')}", f"git bisect {term} {commit}"]
    return "\n".join(lines) + "\n"

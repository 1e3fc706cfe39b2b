"""What `git bisect` would have done: how many tests it makes to the same answer, and its log for going on by hand."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from repro_bisect.search.dag import Dag, bits

__all__ = ["git_log", "git_probes"]


_MOST = 20_000
"""Longer ranges are not simulated: every test looks at every suspect."""


def git_probes(
    parents: Mapping[str, Sequence[str]], good: str, bad: str, culprit: str, skips: Collection[str]
) -> int | None:
    """Tests that `git bisect run` makes until it names `culprit`, the two ends not counted; None for very long ranges.

    It tests the suspect with the best min(ancestors among the suspects, the rest), as git's ``bisect.c`` does, and
    where that is known to be skipped the next best. Commits that nobody tried count as testable, so it is the least
    that it would have made.
    """
    dag = Dag.between(parents, [good], bad)
    if len(dag) > _MOST:
        return None
    suspects, hidden = dag.ancestors[dag.index[bad]], dag.index[culprit]
    tests, tried = 0, {dag.index[bad]}
    while suspects & (suspects - 1):
        size = suspects.bit_count()
        left = [i for i in bits(suspects) if i not in tried]
        if not left:
            break
        below = {i: (dag.ancestors[i] & suspects).bit_count() for i in left}
        best = max(left, key=lambda i: (min(below[i], size - below[i]), i))
        tests += 1
        tried.add(best)
        if dag.order[best] not in skips:
            suspects &= dag.ancestors[best] if dag.ancestors[best] >> hidden & 1 else ~dag.ancestors[best]
    return tests


def git_log(good: str, bad: str, verdicts: Mapping[str, str], subjects: Mapping[str, str]) -> str:
    """What is known, in the form of ``git bisect log``: ``git bisect replay FILE`` goes on from there."""
    terms = {"GOOD": "good", "BAD": "bad", "SKIP": "skip"}
    lines = ["git bisect start"]
    known = {bad: "BAD", good: "GOOD"} | {c: v for c, v in verdicts.items() if c not in (good, bad)}
    for commit, verdict in known.items():
        if term := terms.get(verdict):
            lines += [f"# {term}: [{commit}] {subjects.get(commit, '')}", f"git bisect {term} {commit}"]
    return "\n".join(lines) + "\n"

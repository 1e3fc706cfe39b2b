"""Nights without training: what the tests of nights, of their judge and of their report share."""

from __future__ import annotations

from typing import Any

from conftest import Repo

from repro.nightly.records import Baseline, Check, NightlyRun, Summary

COMMIT = "a" * 40
TREE = "b" * 40
IDENTITY: dict[str, Any] = {"host": {}}


def flat(value: float) -> Summary:
    """A metric that has one value at every step."""
    return Summary(value, value, value, value, value)


def nightly_run(**given: Any) -> NightlyRun:
    """A green night of case ``t``, apart from what is given; `commit` may be an id alone."""
    commit = given.pop("commit", COMMIT)
    facts = {"commit": commit, "author": "A <a@b>", "date": "2026-11-22T01:00:00Z", "subject": "Words", "parents": []}
    fields: dict[str, Any] = {
        "case": "t",
        "machine": "m1",
        "at": "2026-11-22T03:12:45Z",
        "commit": (facts | {"diffstat": ""}) if isinstance(commit, str) else commit,
        "tree": TREE,
        "key": "key",
        "rollouts": "rollouts",
        "identity": IDENTITY,
        "status": "green",
        "steps": 3,
        "chain": "c" * 32,
        "checks": [Check("run-to-run", "green", "two replays agree"), Check("baseline", "green", "equal")],
        "baseline": Baseline("last green", "d" * 40, "e" * 32),
        "metrics": {"loss": flat(1.0)},
        "kl": {},
        "version": "1",
        "reproduce": "repro report nightly t --at aaaaaaaaaa",
    }
    return NightlyRun(**fields | given)


def approve(repo: Repo, machine: str, case: str = "toy", text: str = "") -> str:
    """A commit with a golden run's pointer, as `repro golden approve` and `git commit` leave one."""
    pointer = repo.root / "golden" / "runs" / machine / f"{case}.dvc"
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.write_text(text or f"outs: [{machine}]\n")
    return repo.commit(f"Approve {case} on {machine}")

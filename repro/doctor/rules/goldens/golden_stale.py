"""Golden runs that no longer belong to what the repository has now."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from repro.doctor.artefacts.kinds import Golden
from repro.doctor.facts.goldens import Commits, changed_keys
from repro.doctor.rule import Found, Rule, Where
from repro_golden.base.errors import ReproError

__all__ = ["RULE"]

_BYTES = 1 << 28
"""Rollouts that are read for their digest; larger ones are left to `repro golden verify`."""


def _check(golden: Golden) -> Iterator[Found]:
    root, name = golden.root, golden.path.resolve().name
    if root is None or "~" in name:  # a baseline that was replaced is old on purpose
        return
    record = Where(str(golden.path / "run.json"))
    yield from _case(golden, root, name, record)
    yield from _commit(golden, root, record)


def _case(golden: Golden, root: Path, name: str, record: Where) -> Iterator[Found]:
    from repro_golden.case.file import CASES, find_case
    from repro_golden.store.rollouts import rollouts_of

    path = root / CASES / f"{name}.toml"
    if not path.is_file():
        yield Found(
            f"there is no case {name} any more ({CASES}/{name}.toml)",
            Where(record.path, item="case", value=name),
            severity="warning",
            cure=f"bring the case back, or remove the golden run and its pointer {golden.path}.dvc",
        )
        return
    try:
        case = find_case(root, name)
    except ReproError as error:
        yield Found(f"its case cannot be read: {error}", Where(str(path)), severity="warning")
        return
    if changed := changed_keys(golden.record["case"], case.canonical()):
        more = f" and {len(changed) - 6} more" if len(changed) > 6 else ""
        yield Found(
            f"the case was changed since it was recorded: {', '.join(changed[:6])}{more}",
            Where(str(path), item=changed[0]),
            cure=f"`repro golden approve {name} --reason ...` records it anew, or take the change of "
            f"{CASES}/{name}.toml back",
        )
    place = root / case.case.rollouts if case.case.rollouts else None
    if place is None or not place.is_dir() or _size(place) > _BYTES:
        return
    try:
        digest = rollouts_of(case, place).digest
    except ReproError as error:
        yield Found(f"its rollouts cannot be read: {error}", Where(str(place)), severity="warning")
        return
    if digest != golden.record["rollouts"]:
        yield Found(
            f"{case.case.rollouts} holds other rollouts than it was trained on",
            Where(str(place), item="digest", value=digest),
            cure=f"`dvc checkout {case.case.rollouts}.dvc` brings them back; or replace it with "
            f"`repro golden approve {name} --reason ...`",
        )


def _size(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except OSError:
        return _BYTES + 1


def _commit(golden: Golden, root: Path, record: Where) -> Iterator[Found]:
    commit = golden.record.get("commit")
    where = Where(record.path, item="commit", value=str(commit)[:40])
    if commit is None:
        yield Found(
            "it was recorded on files that no commit has",
            Where(record.path, item="commit", value="null"),
            severity="note",
            cure="commit first, then replace it: without a commit a bisect must be told where to begin",
        )
        return
    if not isinstance(commit, str) or not commit.isalnum():
        return
    commits = Commits(root)
    if commits.has(commit) and commits.reachable(commit):
        subject = golden.record["case"].get("subject") if isinstance(golden.record["case"], dict) else None
        path = subject.get("path") if isinstance(subject, dict) else None
        if isinstance(path, str) and path and (count := commits.since(commit, path)):
            yield Found(
                f"{count} commits have changed {path} since it was recorded at {commit[:9]}",
                where,
                severity="note",
                cure="`repro golden verify` tells whether its bits are still those of today's code",
            )
    elif not commits.shallow:  # a shallow clone lacks older commits by nature
        yield Found(
            f"its commit {commit[:9]} is " + ("not behind HEAD" if commits.has(commit) else "not in the repository"),
            where,
            severity="warning",
            cure="a rebase or squash dropped it: replace the golden run at a commit that stays, so that a bisect can "
            "begin there",
        )


RULE = Rule(
    id="golden-stale",
    title="Golden runs of another case, other rollouts or a commit that the repository no longer has",
    inputs=(Golden,),
    severity="error",
    certainty="certain",
    why="a golden run of something else than the repository has guards less than it seems",
    cure="replace it with `repro golden approve CASE --reason ...`",
    sources=("docs/guard-your-trainer.md", "NovaSky-AI/SkyRL#1965 (thresholds that were stale for months)"),
    check=_check,
)

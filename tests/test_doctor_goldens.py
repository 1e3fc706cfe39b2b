"""Rules about golden runs and traces: each with one that it finds something in, and one that is in order."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Repo
from doctor_dump_kit import found
from doctor_golden_kit import PROOFS, golden, repository, rows_of, trace
from findings_kit import as_read
from syrupy.assertion import SnapshotAssertion

from repro.doctor.artefacts.traces import FOREIGN_GOLDEN
from repro.doctor.catalogue import catalogue, subject_of
from repro.doctor.examine import examine, look
from repro.doctor.facts.goldens import Commits, pointer_md5, recorded_md5
from repro_golden.base.checks import Finding
from repro_golden.store.dvc import Dvc

Maker = Callable[[Path], Path]


def flat(**other: Any) -> Callable[[int], Any]:
    """The same values in every step."""
    return functools.partial(rows_of, **other)


def made(folder: Path, rows: Any = rows_of, steps: int = 4, **record: Any) -> Path:
    """A golden run of a repository of its own."""
    return golden(repository(folder), rows, steps, record)


def _edited_case(folder: Path) -> Path:
    repo = repository(folder)
    run = golden(repo)
    repo.edit("golden/cases/toy.toml", "--steps 6", "--steps 7")
    return run


def _edited_record(folder: Path) -> Path:
    run = made(folder)
    record = json.loads((run / "run.json").read_text())
    record["chain"] = "0" * 32
    (run / "run.json").write_text(json.dumps(record))
    return run


def _noise(**more: Any) -> dict[str, Any]:
    proofs = [{**entry, "passed": not entry["name"].startswith("reproduced")} for entry in PROOFS]
    return {"noise": {"runs": 4, "spread": {"loss": 0.01, "lr": 0.0}}, "proofs": proofs, **more}


def _rounded(step: int) -> Any:
    return rows_of(step, loss=round(2.5123456 + 0.1234567 * step, 5), grad_norm=1.0 + step / 3)


def _nan_gradient(step: int) -> Any:
    return rows_of(step, grad=[np.nan] * 16 if step == 2 else [1.0] * 16)


# the id: what it finds something in; all find nothing in `made`
CASES: dict[str, Maker] = {
    "golden-vacuous": lambda p: made(p, flat(grad_norm=float("inf"))),
    "golden-rounded": lambda p: made(p, _rounded),
    "golden-unreproducible": lambda p: made(p, **_noise()),
    "golden-unproved": lambda p: made(
        p, proofs=[*PROOFS, {"name": "step 0: KL is exactly 0", "passed": False, "detail": "0.3"}]
    ),
    "golden-stale": _edited_case,
    "golden-tampered": _edited_record,
    "golden-incomplete": lambda p: made(p, steps=3),
    "trace-incomplete": lambda p: trace(p / "trace", made=2, end=False),
    "trace-not-finite": lambda p: trace(p / "trace", _nan_gradient),
}


@pytest.mark.parametrize("rule", CASES)
def test_each_rule_finds_its_own(tmp_path: Path, rule: str, snapshot: SnapshotAssertion) -> None:
    """In what has it, with the evidence; in what is in order nothing."""
    assert as_read(rule, found(rule, CASES[rule](tmp_path / "broken")), tmp_path) == snapshot
    sound = trace(tmp_path / "sound" / "trace") if rule.startswith("trace-") else made(tmp_path / "sound")
    assert not found(rule, sound)


def test_a_sound_golden_run_has_nothing(tmp_path: Path) -> None:
    """No rule of goldens finds anything, given the repository, the folder of runs, or the run."""
    repo = repository(tmp_path)
    run = golden(repo)
    rules = [rule.id for rule in catalogue().values() if subject_of(rule) == "goldens"]
    assert set(CASES) == set(rules)
    for path in (repo.root, repo.root / "golden" / "runs", run):
        examined = examine(look([path]), only=rules)
        assert not examined.findings, examined.findings
        assert "golden run" in {hit.kind for hit in examined.seen} and "golden-stale" in examined.tried


# -- vacuous


def severities(findings: list[Finding]) -> list[str]:
    return [finding.severity for finding in findings]


@pytest.mark.parametrize(
    ("other", "expected", "text"),
    [
        ({"loss": 0.0}, ["warning"], "though gradients are not 0"),
        ({"loss": 0.0, "grad_norm": None, "grad": np.zeros(16)}, ["error", "error"], "loss is 0 in all 4 steps"),
        ({"grad_norm": 0.0, "grad": np.zeros(16)}, ["error", "error"], "grad_norm is 0 in all 4 steps"),
        ({"loss": 2.5}, ["warning"], "loss is 2.5 in all 4 steps"),
        ({"loss": float("nan")}, ["error"], "loss is nan at step 0"),
        ({"update": np.arange(16)}, ["error"], "parameters moved"),
        ({"advantages": np.zeros(96)}, ["error"], "advantages are not constant"),
        ({"advantages": None}, [], ""),
        ({"grad_norm": None, "grad": None}, ["warning"], "no gradient was observed"),
    ],
)
def test_runs_that_guard_nothing(tmp_path: Path, other: dict[str, Any], expected: list[str], text: str) -> None:
    """Zero, constant and missing values, each once: "golden-vacuous"."""
    findings = found("golden-vacuous", made(tmp_path, flat(**other)))
    assert severities(findings) == expected, [finding.message for finding in findings]
    assert any(text in finding.message for finding in findings) or not text


def test_a_first_step_may_have_no_loss(tmp_path: Path) -> None:
    """An on-policy loss of exactly 0 in one step or two is no fault: "golden-vacuous"."""

    def rows(step: int) -> Any:
        return rows_of(step, loss=0.0) if step < 2 else rows_of(step)

    assert not found("golden-vacuous", made(tmp_path, rows))


def foreign(path: Path, **tables: Any) -> Path:
    """Golden values in the form of Megatron-LM's functional tests."""
    head = {"start_step": 1, "end_step": 10, "step_interval": 1}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: {**head, "values": values} for name, values in tables.items()}, indent=4))
    return path


def steps(values: Any) -> dict[str, float]:
    return {str(number): float(value) for number, value in enumerate(values, 1)}


def test_golden_values_of_megatron(tmp_path: Path) -> None:
    """JSON of another project: inf, zeros and five decimals are found: "golden-vacuous", "golden-rounded"."""
    rng = np.random.default_rng(0)
    exact = steps(np.float32(10 - rng.random(10)))
    sound = foreign(tmp_path / "a.json", **{"lm loss": exact, "iteration-time": {"1": "nan", "2": 5.25}})
    assert FOREIGN_GOLDEN.fits(sound) and not FOREIGN_GOLDEN.fits(tmp_path)
    assert not _values("golden-vacuous", sound) and not _values("golden-rounded", sound)
    infinite = foreign(tmp_path / "b.json", **{"lm loss": {**exact, "3": float("inf")}})
    (finding,) = _values("golden-vacuous", infinite)
    assert finding.severity == "error" and finding.where.item == "step 3 lm loss"
    zero = foreign(tmp_path / "c.json", **{"lm loss": steps([0.0] * 10), "num-zeros": steps(range(10))})
    (finding,) = _values("golden-vacuous", zero)
    assert finding.severity == "error" and "0 in all 10 steps" in finding.message
    short = {step: round(value, 5) for step, value in exact.items()}
    (finding,) = _values("golden-rounded", foreign(tmp_path / "d.json", **{"lm loss": short, "lr": steps([1e-5] * 10)}))
    assert finding.message == "rounded to 5 decimals: lm loss" and finding.where.path == str(tmp_path / "d.json")


def _values(rule: str, path: Path) -> list[Finding]:
    """What a rule finds in golden values, read by their own reader."""
    return list(examine([], list(FOREIGN_GOLDEN.read(path)), only=(rule,)).findings)


# -- rounded


def test_columns_of_few_bits(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A float32 column whose values are all bf16: "golden-rounded"."""

    def rows(step: int) -> Any:
        rounded = (-np.abs(np.random.default_rng(step).normal(size=400))).astype(np.float32)
        return rows_of(step, log_probs=(rounded.view(np.uint32) & 0xFFFF0000).view(np.float32))

    assert as_read("golden-rounded", found("golden-rounded", made(tmp_path, rows)), tmp_path) == snapshot


def test_metrics_that_are_short_by_nature(tmp_path: Path) -> None:
    """Means of few samples, schedules and whole numbers are not rounded: "golden-rounded"."""
    from repro_golden.trace.writer import metric_row

    def rows(step: int) -> Any:
        short = {"reward": step / 20 + 0.05, "lr": 1e-6 * (9 - step) / 10, "tokens": 100 + step, "clipfrac": step / 8}
        return [*rows_of(step), *(metric_row("loss", name, value) for name, value in short.items())]

    assert not found("golden-rounded", made(tmp_path, rows))


# -- proofs


def test_noise_and_what_it_moves(tmp_path: Path) -> None:
    """A run that was kept with its noise names the metrics that move: "golden-unreproducible"."""
    run = made(tmp_path, **_noise())
    (finding,) = found("golden-unreproducible", run)
    assert "1 metrics move by themselves: loss" in finding.message and finding.where.path == str(run / "run.json")
    assert not found("golden-unproved", run), "that is one finding"


def test_proofs_that_failed_or_are_missing(tmp_path: Path) -> None:
    """A reproduction that failed without noise is an error, none at all a warning: "golden-unreproducible"."""
    failed = made(tmp_path / "a", **_noise(noise=None))
    assert severities(found("golden-unreproducible", failed)) == ["error"]
    bare = made(tmp_path / "b", proofs=[])
    assert severities(found("golden-unreproducible", bare)) == ["warning"]
    assert severities(found("golden-unproved", bare)) == ["note"]
    unplanted = made(tmp_path / "c", proofs=[entry for entry in PROOFS if "ULP" not in entry["name"]])
    (finding,) = found("golden-unproved", unplanted)
    assert finding.severity == "note" and "planted" in finding.message


# -- stale


def _without_case(repo: Repo) -> None:
    (repo.root / "golden" / "cases" / "toy.toml").unlink()


def _bad_case(repo: Repo) -> None:
    (repo.root / "golden" / "cases" / "toy.toml").write_text("[case\n")


def _other_rollouts(repo: Repo) -> None:
    (repo.root / "golden" / "rollouts" / "toy" / "0.bin").write_bytes(b"others")


def _no_rollouts(repo: Repo) -> None:
    shutil.rmtree(repo.root / "golden" / "rollouts" / "toy")


def _later_code(repo: Repo) -> None:
    (repo.root / "train.py").write_text((repo.root / "train.py").read_text() + "# later\n")
    repo.commit("Later")


def _other_file(repo: Repo) -> None:
    (repo.root / "notes.txt").write_text("later\n")
    repo.commit("Notes")


def _dropped_commit(repo: Repo) -> None:
    repo.git("reset", "--quiet", "--hard", "HEAD~1")
    (repo.root / "golden" / "rollouts" / "toy").mkdir(parents=True, exist_ok=True)
    (repo.root / "golden" / "rollouts" / "toy" / "0.bin").write_bytes(b"rollout")
    repo.commit("Another way")


@pytest.mark.parametrize(
    ("change", "expected", "text"),
    [
        (_without_case, ["warning"], "no case toy any more"),
        (_bad_case, ["warning"], "cannot be read"),
        (_other_rollouts, ["error"], "holds other rollouts"),
        (_no_rollouts, [], ""),
        (_later_code, ["note"], "1 commits have changed train.py"),
        (_other_file, [], ""),
        (_dropped_commit, ["warning"], "is not behind HEAD"),
    ],
)
def test_what_the_repository_has_now(tmp_path: Path, change: Any, expected: list[str], text: str) -> None:
    """Case, rollouts, code and commit against the record: "golden-stale"."""
    repo = repository(tmp_path)
    run = golden(repo)
    change(repo)
    findings = found("golden-stale", run)
    assert severities(findings) == expected, findings
    assert not text or text in findings[0].message


@pytest.mark.parametrize(("commit", "expected"), [("f" * 40, ["warning"]), (None, ["note"]), ("--help", []), (7, [])])
def test_commits_that_are_not_there(tmp_path: Path, commit: Any, expected: list[str]) -> None:
    """One that the repository lacks, none, and what is no commit: "golden-stale"."""
    assert severities(found("golden-stale", made(tmp_path, commit=commit))) == expected


def test_a_shallow_clone_lacks_commits_by_nature(tmp_path: Path) -> None:
    """There, a commit that is not there says nothing: "golden-stale"."""
    repo = repository(tmp_path / "a")
    run = golden(repo)
    repo.commit("Keep the golden run")
    repo.git("clone", "--quiet", "--depth", "1", f"file://{repo.root}", str(tmp_path / "clone"))
    assert Commits(tmp_path / "clone").shallow and not Commits(repo.root).shallow
    assert not found("golden-stale", tmp_path / "clone" / run.relative_to(repo.root))


def test_baselines_that_were_replaced_are_old_on_purpose(tmp_path: Path) -> None:
    """``CASE~CHAIN`` and a run outside of its repository are not held against it: "golden-stale"."""
    run = _edited_case(tmp_path)
    aside = run.with_name("toy~12345678")
    run.rename(aside)
    assert not found("golden-stale", aside)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(aside, elsewhere)
    assert not found("golden-stale", elsewhere)


# -- tampered


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """A golden run that DVC keeps."""
    repo = repository(tmp_path_factory.mktemp("kept"))
    run = golden(repo)
    dvc = Dvc(repo.root)
    dvc.init()
    dvc.add(run)
    return repo


def _run_of(kept: Repo, folder: Path) -> Path:
    shutil.copytree(kept.root, folder, symlinks=True)
    (record,) = folder.glob("golden/runs/*/toy/run.json")
    return record.parent


def test_files_against_the_pointer_of_dvc(kept: Repo, tmp_path: Path) -> None:
    """The md5 of a folder is DVC's own; an edited proof is seen by it: "golden-tampered"."""
    run = _run_of(kept, tmp_path / "copy")
    assert pointer_md5(run) == recorded_md5(run) is not None
    assert not found("golden-tampered", run)
    record = run / "run.json"
    text = record.read_text()
    record.unlink()
    record.write_text(text.replace("as it should be", "as it should not be"))
    (finding,) = found("golden-tampered", run)
    assert finding.severity == "error" and finding.where.path == f"{run}.dvc" and "dvc checkout" in finding.fix
    pointer = run.with_name("toy.dvc")
    pointer.write_text(pointer.read_text().replace("  hash: md5\n", ""))
    assert not found("golden-tampered", run), "DVC 2 hashed text in another way"


def test_rows_that_were_changed(tmp_path: Path) -> None:
    """Rows of another trace under the step log of this one: "golden-tampered"; no other rule fails on them."""
    run = made(tmp_path / "a")
    other = trace(tmp_path / "b" / "trace", lambda step: rows_of(step + 1))
    shutil.copy(other / "rank-00000.parquet", run / "trace" / "rank-00000.parquet")
    (finding,) = found("golden-tampered", run)
    assert "does not match its root" in finding.message and finding.severity == "error"
    assert not found("golden-vacuous", run) and not found("golden-rounded", run)


def test_records_of_another_trace(tmp_path: Path) -> None:
    """Header and record differ, or the folder is another machine's: "golden-tampered"."""
    (finding,) = found("golden-tampered", made(tmp_path / "a", rollouts="0" * 32))
    assert finding.message == "run.json and the trace's header differ in rollouts: (all)"
    moved = golden(repository(tmp_path / "b"), machine="another-machine")
    (finding,) = found("golden-tampered", moved)
    assert finding.severity == "warning" and "another-machine" in finding.message


def test_lost_states(tmp_path: Path) -> None:
    """Training states that the record lists and the folder lacks: "golden-incomplete"."""
    run = made(tmp_path, states=[1, 3])
    (run / "states" / "1").mkdir(parents=True)
    (finding,) = found("golden-incomplete", run)
    assert finding.severity == "warning" and "before steps 3 are gone" in finding.message

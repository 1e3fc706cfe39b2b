"""Golden runs: recorded, proved, kept by DVC, verified, replaced; and refused when a proof fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import warm_kit
from conftest import Repo

from repro_golden.base.checks import Proof
from repro_golden.base.errors import ReproError
from repro_golden.case.file import read_case
from repro_golden.case.identity import Identity
from repro_golden.replay.children import BITS_DEFAULTS, Run, base_environment
from repro_golden.repository.checkout import Place
from repro_golden.runs.proofs import first_step_checks, reproduced, seen_perturbation, undisturbed
from repro_golden.store.golden import Store
from repro_golden.store.pulled import noted
from repro_golden.subjects import launch
from repro_golden.trace import Header, Trace, TraceWriter, seal
from repro_golden.trace.writer import metric_row

AFTER_POLICY = "        self.engines = _engines(config, root)\n"
NOISE = (
    AFTER_POLICY
    + "        import os\n"
    + "        norm = self.engines.policy.model.model.norm\n"
    + "        norm.weight.data[0] += int.from_bytes(os.urandom(2), 'little') * 1e-5\n"
)
ACCEPT = "        rollout_id = self._accept(rollout)\n"
TELLTALE = (
    ACCEPT
    + "        if type(observe).__name__ == 'Recorder':\n"
    + "            self.engines.policy.model.model.norm.weight.data[0] += 0.01\n"
)


def runs(repo: Repo) -> list[Path]:
    """Golden runs in the working tree."""
    return sorted((repo.root / "golden" / "runs").glob("*/*/run.json"))


def test_a_golden_run_is_kept_with_its_proofs(recorded: Repo) -> None:
    """Recording leaves a DVC pointer, a sealed trace, and a record of who, when, what and every proof."""
    (run,) = runs(recorded)
    record = json.loads(run.read_text())
    assert all(p["passed"] for p in record["proofs"])
    names = " ".join(p["name"] for p in record["proofs"])
    for phrase in ("second process", "recorder changes nothing", "ULP in input", "ULP in forward", "ULP in grad",
                   "ULP in update", "finite", "gradients", "parameters moved", "advantages", "ref_log_probs", "KL",
                   "grad_norm", "what the capture printed"):  # fmt: skip
        assert phrase in names
    assert (
        len(record["commit"]) == 40
        and record["recorded"]["by"]
        and any(p.startswith("torch==") for p in record["lock"])
    )
    assert run.parent.with_name("mini.dvc").exists()
    assert (run.parent / "trace" / "rank-00000.parquet").exists()
    trace = Trace(run.parent / "trace")
    assert trace.complete and trace.chain == record["chain"]
    signals = {(r.phase, r.name) for r in trace.rows(1)}
    columns = ("log_probs", "ref_log_probs", "entropy", "advantages", "returns", "kl", "values")
    assert {("forward", c) for c in columns} | {("input", "loss_mask"), ("input", "tokens")} <= signals
    metrics = {"loss", "pg_loss", "kl_loss", "entropy_loss", "grad_norm", "pg_clipfrac", "reward",
               "train_rollout_logprob_abs_diff", "train_rollout_logprob_abs_diff_max"}  # fmt: skip
    assert metrics <= set(trace.steps[1].metrics)
    weight = "model.layers.0.mlp.up_proj.weight"
    assert {
        ("grad", weight),
        ("update", weight),
        ("update", f"exp_avg/{weight}"),
        ("update", f"exp_avg_sq/{weight}"),
    } <= signals


def test_a_recorded_state_resumes_the_run(recorded: Repo, tmp_path: Path) -> None:
    """A run loaded from the state kept before step 1 makes the golden run's own step 2, bit for bit."""
    (run,) = runs(recorded)
    case = read_case(recorded.root / "golden" / "cases" / "mini.toml")
    resumed = Run(
        2,
        str(recorded.root / "golden" / "rollouts" / "mini"),
        trace=str(tmp_path / "trace"),
        load=str(run.parent / "states" / "1"),
    )
    warm_kit.called(launch)(case, Place(recorded.root), [resumed], tmp_path / "log")
    golden, again = Trace(run.parent / "trace"), Trace(tmp_path / "trace")
    assert [s.step for s in again.steps] == [1, 2] and again.header.first_step == 1
    assert again.steps[1].root == golden.steps[2].root


def test_the_variables_a_child_gets_are_those_the_trainer_names(recorded: Repo) -> None:
    """What the instrument sets for a child is what the trainer says must be set before it starts."""
    from repro_core.determinism.control import ENVIRONMENT

    assert BITS_DEFAULTS.items() <= ENVIRONMENT.items()
    assert ENVIRONMENT.items() <= base_environment(read_case(recorded.root / "golden" / "cases" / "mini.toml")).items()


def test_verify_agrees_then_names_the_first_difference(recorded: Repo) -> None:
    """An untouched tree verifies with exit 0; an edit exits 1 and names step, phase, signal and size."""
    same = recorded.repro("golden", "verify")
    assert (same.returncode, "agrees: 3 steps" in same.stdout) == (0, True), same.stdout + same.stderr
    recorded.edit(
        "core/repro_core/rl/loss.py", "rows.float() / temperature, dim", "rows.float() / temperature * 1.001, dim"
    )
    moved = recorded.repro("golden", "verify", "--json")
    assert moved.returncode == 1, moved.stderr
    (result,) = json.loads(moved.stdout).values()
    divergence = result["comparison"]["divergence"]
    assert (divergence["step"], divergence["phase"], divergence["signal"]) == (0, "forward", "log_probs")
    assert (
        divergence["magnitude"]["max_ulp"] > 0
        and divergence["magnitude"]["elements"] == divergence["magnitude"]["total"]
    )
    assert result["comparison"]["kl"]


def test_push_and_pull_bring_a_run_back(recorded: Repo) -> None:
    """What was pushed to the DVC remote is there again after a clone without cache."""
    assert recorded.repro("golden", "push").returncode == 0
    (run,) = runs(recorded)
    shutil.rmtree(recorded.root / ".dvc" / "cache")
    shutil.rmtree(run.parent)
    shutil.rmtree(recorded.root / "golden" / "rollouts" / "mini")
    listed = recorded.repro("golden", "list")
    assert "to be pulled" in listed.stdout
    assert recorded.repro("golden", "pull").returncode == 0
    assert run.exists() and (recorded.root / "golden" / "rollouts" / "mini" / "0.safetensors").exists()
    shown = recorded.repro("golden", "show", "mini")
    assert shown.returncode == 0 and "reproduced by a second process" in shown.stdout


def test_approve_replaces_and_keeps_the_old_baseline(recorded: Repo) -> None:
    """Record refuses to overwrite; approve needs a reason, records anew and leaves the old run beside the new one."""
    recorded.edit(
        "core/repro_core/rl/loss.py", "rows.float() / temperature, dim", "rows.float() / temperature * 1.001, dim"
    )
    recorded.commit("Move the numbers on purpose")
    again = recorded.repro("golden", "record")
    assert again.returncode == 2 and "approve" in again.stderr
    done = recorded.repro("golden", "approve", "--reason", "a better temperature")
    assert done.returncode == 0, done.stdout + done.stderr
    names = sorted(run.parent.name for run in runs(recorded))
    assert names[0] == "mini" and names[1].startswith("mini~") and len(names) == 2
    differ = recorded.repro("golden", "diff", names[1], "mini")
    assert differ.returncode == 1 and "log_probs" in differ.stdout
    assert "a better temperature" in recorded.repro("golden", "show", "mini").stdout
    assert recorded.repro("golden", "verify").returncode == 0
    pointers = recorded.root.glob("golden/runs/*/mini.dvc")
    notes = [noted(pointer.read_text()) for pointer in pointers]
    assert [note and note.commit for note in notes] == [recorded.git("rev-parse", "HEAD")]


def test_another_identity_is_not_comparable(recorded: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that decides bits makes the golden run not verifiable here (exit 3), and is named."""
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    done = recorded.repro("golden", "verify")
    assert done.returncode == 3
    assert "environment MKL_CBWR: (absent) -> COMPATIBLE" in done.stderr and "repro golden record mini" in done.stderr


def test_other_threads_are_another_machine(recorded: Repo) -> None:
    """Two threads, which may add up in another order, are not verified against one (exit 3): no verdict, but why."""
    case = recorded.root / "golden" / "cases" / "mini.toml"
    assert "[resources]" not in case.read_text()
    case.write_text(case.read_text() + "\n[resources]\ncpus = 2\n")
    done = recorded.repro("golden", "verify")
    assert done.returncode == 3 and not done.stdout
    assert "layout threads: 1 -> 2" in done.stderr and "repro golden record mini" in done.stderr
    recorded.git("checkout", "--quiet", "golden/cases/mini.toml")
    assert recorded.repro("golden", "verify").returncode == 0


REFUSALS = {
    "noise": ("train/trainer.py", AFTER_POLICY, NOISE, "reproduced by a second process"),
    "recorder": ("train/trainer.py", ACCEPT, TELLTALE, "the recorder changes nothing"),
    "frozen": ("engines/optimizer.py", "lr=self.config.lr", "lr=0.0", "parameters moved"),
    "constant": ("data/task.py", "    if not body:\n", "    return 1.0\n    if not body:\n", "constant"),
    "nan": ("rl/loss.py", "rows.float() / temperature, dim", "rows.float() / temperature * float('nan'), dim", ""),
    "crash": ("train/trainer.py", AFTER_POLICY, "        raise RuntimeError('no policy today')\n", "no policy today"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_run_that_fails_a_proof_is_refused(name: str, fork: Repo) -> None:
    """Each broken trainer is refused in one line that names the proof it failed, and nothing is kept."""
    file, old, new, phrase = REFUSALS[name]
    fork.edit(f"core/repro_core/{file}", old, new)
    done = fork.repro("golden", "record")
    assert done.returncode in (1, 2), done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("repro: ") and phrase in last, last
    assert "Traceback" not in done.stderr
    assert runs(fork) == [] and not (fork.root / "golden" / "rollouts").exists()
    assert not any((fork.root / ".git" / "repro" / "tmp").iterdir())


def test_every_case_is_answered_and_none_is_forgotten(recorded: Repo) -> None:
    """A golden run whose case is gone, a case that cannot be read, one without a run: each is told."""
    cases = recorded.root / "golden" / "cases"
    text = (cases / "mini.toml").read_text()
    (cases / "mini.toml").unlink()
    (cases / "broken.toml").write_text("[case")
    (cases / "other.toml").write_text(text.replace('"mini"', '"other"', 1))
    done = recorded.repro("golden", "verify", "--all", "--json")
    answers = json.loads(done.stdout)
    assert done.returncode == 2 and answers.keys() == {"broken", "mini", "other"}, done.stderr
    assert "is not TOML" in answers["broken"]["error"]
    assert "bring golden/cases/mini.toml back" in answers["mini"]["not_verifiable"]
    assert "no golden run" in answers["other"]["not_verifiable"]


def test_the_list_answers_as_verify_does(recorded: Repo) -> None:
    """What verify refuses is not listed as verifiable, with verify's reason; a run without a case can be shown."""
    file = recorded.root / "golden" / "cases" / "mini.toml"
    text = file.read_text()
    file.write_text(text.replace("steps = 3", "steps = 2"))
    (row,) = json.loads(recorded.repro("golden", "list", "--json").stdout)
    refused = recorded.repro("golden", "verify")
    assert (row["here"], refused.returncode) == (False, 2) and "changed since its golden run" in row["why"]
    assert row["why"] in refused.stderr and f"mini: {row['why']}" in recorded.repro("golden", "list").stdout
    file.write_text("[case")
    assert "mini.toml is not TOML" in json.loads(recorded.repro("golden", "list", "--json").stdout)[0]["why"]
    file.with_name("other.toml").write_text(text.replace('"mini"', '"other"', 1))
    file.unlink()
    (row,) = json.loads(recorded.repro("golden", "list", "--json").stdout)
    assert row["why"] == "it has a golden run, and no case: bring golden/cases/mini.toml back"
    shown = recorded.repro("golden", "show", "mini")
    assert (shown.returncode, "reproduced by a second process" in shown.stdout) == (0, True), shown.stderr
    (run,) = runs(recorded)
    other = run.parents[1].with_name("other-machine")
    other.mkdir()
    shutil.copy(run.parents[1] / "mini.dvc", other)
    both = f"name one of {', '.join(sorted(f'{m}/mini' for m in (other.name, run.parents[1].name)))}"
    assert both in recorded.repro("golden", "show", "mini").stderr
    assert "no case 'absent'" in recorded.repro("golden", "show", "absent").stderr


def test_noise_can_be_kept_and_is_then_not_verifiable(fork: Repo) -> None:
    """--allow-noise keeps a run that does not reproduce itself, with its spread; bits are then exit 3."""
    fork.edit("core/repro_core/train/trainer.py", AFTER_POLICY, NOISE)
    done = fork.repro("golden", "record", "--allow-noise")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = runs(fork)
    noise = json.loads(run.read_text())["noise"]
    assert noise["runs"] == 4 and noise["spread"]["grad_norm"] > 0
    verified = fork.repro("golden", "verify")
    assert verified.returncode == 3 and "does not reproduce itself" in verified.stderr


def test_failed_first_step_checks_need_a_flag(fork: Repo) -> None:
    """A reference policy that is not the starting policy is refused by the first-step checks, unless allowed."""
    fork.edit(
        "core/repro_core/engines/torch_engine.py",
        "        reference.load_state_dict(self._policy.state_dict())\n",
        "        reference.load_state_dict({k: v * 1.01 for k, v in self._policy.state_dict().items()})\n",
    )
    done = fork.repro("golden", "record")
    assert done.returncode == 1 and "log_probs equal ref_log_probs" in done.stderr.strip().splitlines()[-1]
    allowed = fork.repro("golden", "record", "--allow-failed-checks")
    assert allowed.returncode == 0, allowed.stdout + allowed.stderr


# -- the proofs as judgements


def small_trace(folder: Path, *values: float, steps: int | None = None) -> Trace:
    """One metric a step."""
    writer = TraceWriter(folder, Header({}, "r", {}, {}, steps or len(values)))
    for step, value in enumerate(values):
        writer.add(metric_row("loss", "loss", value))
        writer.end_step(step)
    writer.close({})
    seal(folder)
    return Trace(folder)


def test_a_shorter_repetition_proves_nothing(tmp_path: Path) -> None:
    """A second process that made fewer steps than asked for does not count as reproduction."""
    a, b = small_trace(tmp_path / "a", 1.0, 2.0), small_trace(tmp_path / "b", 1.0)
    assert not reproduced(a, b, 2, "cure").passed
    assert reproduced(a, b, 1, "cure").passed


def test_a_plant_must_be_named_exactly(tmp_path: Path) -> None:
    """The negative control fails when nothing is seen, and when another signal is named."""
    a, b = small_trace(tmp_path / "a", 1.0, 2.0), small_trace(tmp_path / "b", 1.0, 3.0)
    assert not seen_perturbation(a, a, (1, "loss", "loss")).passed
    assert not seen_perturbation(a, b, (0, "loss", "loss")).passed
    assert not seen_perturbation(a, b, (1, "loss", "other")).passed
    assert seen_perturbation(a, b, (1, "loss", "loss")).passed


def test_nothing_compared_is_no_proof(tmp_path: Path) -> None:
    """An empty state, an empty checkpoint or an absent column is a failed proof, never a passed one."""
    (tmp_path / "c").mkdir()
    folders = (tmp_path / "c", tmp_path / "c")
    assert not undisturbed({}, {}, ("", ""), folders).passed
    assert not undisturbed({"w": "1"}, {"w": "1"}, ("", ""), folders).passed
    (tmp_path / "c" / "file").write_text("x")
    assert undisturbed({"w": "1"}, {"w": "1"}, ("", ""), folders).passed
    assert not undisturbed({"w": "1"}, {"w": "1"}, ("a", "b"), folders).passed
    assert not undisturbed({"w": "1"}, {"w": "1", "v": "2"}, ("", ""), folders).passed
    checks = first_step_checks(small_trace(tmp_path / "t", 1.0), 10.0)
    assert [c.passed for c in checks] == [False, False, False]


@pytest.mark.parametrize("kl", [float("nan"), 1e-30, -1e-30, float("inf")])
def test_kl_must_be_exactly_zero(kl: float, tmp_path: Path) -> None:
    """The KL check is two-sided and NaN fails it; both zeros pass."""

    def check(value: float, name: str) -> Proof:
        writer = TraceWriter(tmp_path / name, Header({}, "r", {}, {}, 1))
        writer.add(metric_row("loss", "kl_loss", value))
        writer.end_step(0)
        writer.close({})
        return first_step_checks(Trace(tmp_path / name), 10.0)[1]

    assert not check(kl, "bad").passed
    assert check(0.0, "zero").passed and check(-0.0, "minus").passed


def test_a_store_without_a_run_says_where_there_is_one(tmp_path: Path) -> None:
    """Asking for a run that is not there names the command that records one."""
    from repro_golden.case.file import Case, Experiment

    case = Case(case=Experiment(name="x", steps=1, rollouts="r"))
    with pytest.raises(ReproError, match="repro golden record x"):
        Store(tmp_path).find(case, Identity({}, {}, {}), {})

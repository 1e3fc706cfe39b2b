"""The doctor where nobody asked: before a golden run is recorded, and on a probe that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Repo
from doctor_log_kit import actor, step, trace
from examples_kit import at_most
from foreign_kit import make_fork
from hypothesis import given
from hypothesis import strategies as st

from repro.doctor.artefacts.case import artefacts_of
from repro.doctor.artefacts.kinds import Launch
from repro.doctor.artefacts.launches.scripts import launch_of_argv
from repro.doctor.examine import OTHER_PROGRAM, examine
from repro.doctor.quiet import before_recording, diagnosis
from repro_golden.case.command_line import CommandLine
from repro_golden.case.file import read_case
from repro_golden.repository.checkout import find_checkout

CRASH = """\
import sys
print("CUDA error: an illegal memory access was encountered", flush=True)
sys.exit(1)
"""


@pytest.mark.whole
def test_a_probe_that_fails_is_diagnosed(tmp_path: Path) -> None:
    """Beside why a commit is skipped stands what its log shows of the cause, also where that is known from before."""
    fork = make_fork(tmp_path, "entropy-gradient-inverted", commits=2)
    repo = fork.repo
    entry = repo.root / "train.py"
    before = repo.git("rev-parse", f"{fork.culprit}~1").strip()
    repo.git("checkout", "--quiet", "-b", "broken", before)
    whole = entry.read_text()
    entry.write_text(CRASH)
    broken = repo.commit("Break")
    done = repo.repro("bisect", "--no-explain", "-j", "1", f"{before}..{broken}", "--case", fork.case)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "illegal-memory-access" in done.stderr.splitlines()[-1], "an end that cannot be tested"
    entry.write_text(whole)
    repo.git("checkout", fork.culprit, "--", ".")
    repo.commit("Mend, and change numbers")
    for _ in range(2):  # the second run takes its probes from the journal
        words = ("bisect", "--no-explain", "-j", "1", f"{before}..HEAD", "--case", fork.case)
        result = json.loads(repo.repro(*words, "--json").stdout)
        assert list(result["skips"]) == [broken]
        assert "illegal-memory-access" in result["diagnoses"][broken]
        assert "illegal-memory-access" not in result["skips"][broken], "equal causes keep equal text"
    assert result["cost"]["reused"] > 0 and "illegal-memory-access" in repo.repro(*words).stdout


@pytest.mark.whole
def test_a_recording_is_preceded_by_what_is_wrong_with_its_launch(tmp_path: Path) -> None:
    """Errors in the case's launch or code are told before the recording, and no warnings; else nothing is."""
    fork = make_fork(tmp_path, commits=0, flags=["--debug-determinism", "--debug-rollout-only"])
    late = "model = get_model(provider)\ntorch.use_deterministic_algorithms(True)\n"
    (fork.repo.root / "slime" / "late.py").write_text(late)
    fork.repo.commit("Deterministic, they say")
    done = fork.repo.repro("golden", "record", fork.case)
    assert "doctor: error debug-modes-exclusive" in done.stderr, done.stderr
    assert "doctor: warning" not in done.stderr and "ghost-flag" not in done.stderr, done.stderr
    clean = make_fork(tmp_path / "clean", commits=0)
    assert "doctor: error" not in clean.repo.repro("golden", "record", clean.case).stderr


OWN = "import torch\nprint(torch.ones(3).sum())\n"
GRPO = "grpo.py --kl-coef 0.04 --eps-clip 0.2 --rollout-batch-size 8 --lr 1e-6 --label-key answer --bf16 --reward-key r"


@pytest.mark.parametrize("words", ["train.py", "train.py --lr 0.1 --seed 1 --load /data/slime/x", GRPO])
def test_a_program_of_the_users_own_is_no_launch_of_slime(tmp_path: Path, words: str) -> None:
    """Its name, flags that many have and paths say nothing: no rule of the trainers' is tried, and a note says so."""
    repo = Repo(tmp_path)
    repo.git("init", "--quiet")
    for name in ("train.py", "grpo.py"):
        (tmp_path / name).write_text(OWN)
    case = CommandLine(["python", *words.split()]).case(tmp_path)
    assert before_recording(find_checkout(tmp_path), case) == []
    report = examine([], list(artefacts_of(case, tmp_path)))
    assert [finding.rule for finding in report.findings] == [OTHER_PROGRAM.id]


@pytest.mark.parametrize("sign", ["from slime.utils import x\n", "    import miles_plugins\n", "", "--rm-type math"])
def test_a_launch_of_theirs_is_known_by_imports_and_flags(
    tmp_path: Path, sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that imports slime, Miles or Relax, or a flag that only they have, makes a launch theirs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(OWN if sign.startswith("--") else OWN + sign)
    flags = sign.split() if sign.startswith("--") else []
    launch = launch_of_argv(["python", "train.py", "--lr", "1e-6", *flags])
    assert launch.trainer is bool(sign)
    rules = {finding.rule for finding in examine([], [launch]).findings}
    assert ("megatron-dropout" in rules) is bool(sign)


def test_a_replay_samples_nothing(tmp_path: Path) -> None:
    """A case of slime's trains on recorded rollouts: that its launch names no GPUs for sampling is no error."""
    fork = make_fork(tmp_path, commits=0)
    case = read_case(fork.repo.root / "golden" / "cases" / f"{fork.case}.toml")
    (launch,) = (artefact for artefact in artefacts_of(case, fork.repo.root) if isinstance(artefact, Launch))
    sizes = "--actor-num-nodes 1 --actor-num-gpus-per-node 2"
    assert launch.trainer and launch.has("--debug-train-only")
    other = case.model_copy(update={"subject": case.subject.model_copy(update={"command": f"python train.py {sizes}"})})
    report = examine([], list(artefacts_of(other, fork.repo.root)))
    assert "gpu-count" not in {hit.rule for hit in report.findings}
    alone = launch_of_argv(["python", "train.py", *sizes.split()])
    assert "gpu-count" in {finding.rule for finding in examine([], [alone]).findings}


def test_a_diagnosis_says_errors_and_not_what_the_verdict_says(tmp_path: Path) -> None:
    """The exception that ended a run is in its verdict; a cluster that is gone is told with what to do."""
    log = tmp_path / "log"
    log.write_text('Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nValueError: batch of 3\n')
    assert diagnosis(log, "exited with 1: ValueError: batch of 3") == ""
    assert diagnosis(log) == "", "a warning"
    log.write_text("usage: train.py\ntrain.py: error: unrecognized arguments: --fo\n")
    assert "flags-refused" in diagnosis(log, "exited with 2")
    assert diagnosis(log, "exited with 2: train.py: error: unrecognized arguments: --fo") == ""
    log.write_text("E gcs_rpc_client.h:151: Failed to connect to GCS at address 10.0.0.1:6379 within 5 seconds.\n" * 9)
    told = diagnosis(log, "no end within 480 s")
    assert "no Ray cluster answers at 10.0.0.1:6379" in told and "`ray stop --force` removes" in told


def test_a_diagnosis_names_what_came_first_and_what_a_run_can_die_of(tmp_path: Path) -> None:
    """The rank that ran out of memory, not those that waited for it; and no fact of the start that steps followed."""
    log, waits = tmp_path / "log", "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE)"
    ran_out = trace("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total of 80")
    log.write_text(
        "\n".join([*(f"[rank0]: {line}" for line in ran_out), f"[rank1]:[E Process.cpp:6] [Rank 1] {waits}"])
    )
    assert "oom-training" in diagnosis(log, "crashes at step 0: exit code -6")
    fresh = [actor("WARNING: could not find the metadata file /ckpt/latest_checkpointed_iteration.txt "),
             actor("    will not load any checkpoints and will start from random")]  # fmt: skip
    failed = trace("TypeError: forward_step() missing 1 required positional argument: 'model'")
    log.write_text("\n".join([*fresh, *failed]))
    assert "checkpoint-random-init" in diagnosis(log)
    log.write_text("\n".join([*fresh, step(0), *failed]))
    assert diagnosis(log) == ""


@at_most(60)
@given(st.binary(max_size=300))
def test_any_log_is_taken(tmp_path_factory: object, content: bytes) -> None:
    """A log of any bytes gives a line or nothing, and no error."""
    path = tmp_path_factory.mktemp("log") / "log"  # type: ignore[attr-defined]
    path.write_bytes(content)
    assert "\n" not in diagnosis(path)

"""Claims about the mode report: each switch is shown by what it does, and a switch that did not take is seen."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st

from repro_core.determinism import control as determinism
from repro_core.determinism import cuda, proofs
from repro_core.determinism.control import ENVIRONMENT, SwitchReport, apply, missing_environment, prove, table
from repro_core.determinism.switches import switches

CORE = Path(determinism.__file__).parents[1]
SEED = 1234

BREAKS: dict[str, Callable[[], object]] = {
    "seed: random": lambda: random.seed(SEED + 1),
    "seed: numpy": lambda: np.random.seed(SEED + 1),
    "seed: torch CPU": lambda: torch.manual_seed(SEED + 1),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "no fill of empty tensors": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", True),
    "intra-op threads": lambda: torch.set_num_threads(2),
    "denormals kept": lambda: torch.set_flush_denormal(True),
}


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    """These tests throw the switches of the process they run in: put back what other tests would meet."""
    before = (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])
    torch.utils.deterministic.fill_uninitialized_memory = before[3]
    torch.use_deterministic_algorithms(before[4])
    torch.set_float32_matmul_precision(before[5])
    torch.set_flush_denormal(False)
    torch.set_num_threads(1)


def report(*arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, str]], str]:
    """Exit code, rows by switch and standard error of the report, run without any of the variables it judges."""
    judged = {*ENVIRONMENT, *determinism.MIXED_HOSTS}
    environ = {name: value for name, value in os.environ.items() if name not in judged}
    environ |= {"PYTHONPATH": str(CORE), **environment}
    command = [sys.executable, "-W", "error", "-m", "repro_core.determinism", "--json", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    rows = json.loads(done.stdout)["proofs"] if done.stdout else []
    return done.returncode, {row["switch"]: row for row in rows}, done.stderr


def red(proofs: list[SwitchReport]) -> set[str]:
    return {proof.switch for proof in proofs if proof.state == "NOT IN EFFECT"}


@pytest.mark.whole
def test_every_switch_takes_in_a_process_started_as_the_trainer_is() -> None:
    """Claim: with the environment set, no row is red, the exit code is 0, and what a CPU can show is proven."""
    code, rows, errors = report()
    assert code == 0 and "PYTHONHASHSEED=0" in errors
    assert {row["state"] for row in rows.values()} <= {"proven", "NOT PROVEN", "absent"}
    for switch in (*BREAKS, "inter-op threads", "PYTHONHASHSEED"):
        assert rows[switch]["state"] == "proven" and rows[switch]["on"] != rows[switch]["off"]


@pytest.mark.whole
def test_a_missing_variable_is_judged_and_exits_1() -> None:
    """Claim: judged as it is, a process with a salted string hash is red in that row alone, and the exit code is 1."""
    others = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONHASHSEED"}
    code, rows, errors = report("--as-is", **others)
    assert code == 1 and not errors
    assert [name for name, row in rows.items() if row["state"] == "NOT IN EFFECT"] == ["PYTHONHASHSEED"]


@pytest.mark.whole
def test_each_broken_switch_turns_exactly_its_row_red() -> None:
    """Claim: one switch broken after `apply` is named, alone; what the environment decides here stays as it was."""
    apply(SEED, 1)
    before = red(prove(SEED, 1))
    assert before <= set(ENVIRONMENT)
    for switch, broken in BREAKS.items():
        apply(SEED, 1)
        broken()
        assert red(prove(SEED, 1)) - before == {switch}
    apply(SEED, 1)
    assert red(prove(SEED, 1)) == before


def test_setting_a_variable_inside_the_process_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: the hash row looks at this process's own hashes, not at os.environ."""
    row = next(switch for switch in switches(SEED, 1) if switch.name == "PYTHONHASHSEED")
    shown = row.here()
    for value in ("0", "77"):
        monkeypatch.setenv("PYTHONHASHSEED", value)
        assert row.here() == shown == str(hash("repro"))
    assert row.on() == proofs.child("proofs.string_hash", {"PYTHONHASHSEED": "0"})


def test_the_report_moves_no_generator_and_no_setting() -> None:
    """Claim: after `prove`, generators stand where they stood, also in mid-run, and every setting is as it was."""
    apply(SEED, 1)
    for _ in range(3):
        random.random(), np.random.rand(), torch.rand(1)
    torch.set_float32_matmul_precision("medium")

    def everything() -> tuple[object, ...]:
        numpy_state = np.random.get_state(legacy=False)
        return (
            random.getstate(),
            (numpy_state["state"]["key"].tobytes(), numpy_state["state"]["pos"]),
            torch.get_rng_state().numpy().tobytes(),
            torch.get_num_threads(),
            torch.get_num_interop_threads(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            torch.backends.cuda.matmul.allow_fp16_accumulation,
            torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
            proofs.denormals(),
            dict(os.environ),
        )

    before = everything()
    shown = prove(SEED, 1)
    assert everything() == before
    assert {"seed: random", "seed: numpy", "seed: torch CPU"} <= red(shown), "the generators had moved"


@at_most(20)
@given(seed=st.integers(0, 2**32 - 1))
def test_apply_seeds_every_generator_and_is_idempotent(seed: int) -> None:
    """Claim: after `apply`, once or twice, the next draws are those of independent generators with that seed."""
    for times in (1, 2):
        for _ in range(times):
            apply(seed, 1)
        assert random.random() == random.Random(seed).random()
        assert np.random.bytes(8) == np.random.RandomState(seed).bytes(8)
        assert torch.equal(torch.randn(16), torch.randn(16, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize(("seed", "threads"), [(-1, 1), (2**32, 1), (0, 0)])
def test_numbers_out_of_range_are_refused(seed: int, threads: int) -> None:
    """Claim: a seed that NumPy cannot take, or no threads, is refused in one line that says the range."""
    with pytest.raises(ValueError, match=r"must (lie in 0 \.\. 2\^32 - 1|be at least 1)"):
        apply(seed, threads)


@given(variables=st.dictionaries(st.sampled_from([*ENVIRONMENT, "HOME"]), st.sampled_from([*ENVIRONMENT.values(), ""])))
def test_missing_environment_names_each_variable_once(variables: dict[str, str]) -> None:
    """Claim: exactly the variables that differ are named, in order, each with what was wanted and what was found."""
    lines = missing_environment(variables)
    assert [line.split(":")[0] for line in lines] == [
        name for name in ENVIRONMENT if variables.get(name) != ENVIRONMENT[name]
    ]
    assert all(f"wanted {ENVIRONMENT[name]}" in line for line in lines for name in [line.split(":")[0]])
    assert missing_environment(ENVIRONMENT) == []


def test_the_table_has_fixed_columns() -> None:
    """Claim: the second and third column start at the same place in every row, and no line ends in blanks."""
    lines = table(
        [SwitchReport("a", "proven", "1", "2"), SwitchReport("a long name", "NOT IN EFFECT", "x; wanted y", "z")]
    ).split("\n")
    assert [line.index(word) for line, word in zip(lines, ("state", "proven", "NOT"), strict=True)] == [13, 13, 13]
    assert [line.index(word) for line, word in zip(lines, ("on ", "1", "x;"), strict=True)] == [28, 28, 28]
    assert all(line == line.rstrip() for line in lines)


def test_rows_are_distinct_and_a_failing_child_is_no_proof() -> None:
    """Claim: every row has a name of its own, and a child that fails says so instead of showing an outcome."""
    names = {switch.name for switch in switches(SEED, 1)}
    assert {*BREAKS, *ENVIRONMENT, *determinism.MIXED_HOSTS} <= names and len(names) == len(switches(SEED, 1))
    for module in (proofs, cuda):
        assert all(hasattr(module, name) for name in module.__all__)
    assert proofs.child("no_such_module.nothing", {}).startswith("failed: ImportError")

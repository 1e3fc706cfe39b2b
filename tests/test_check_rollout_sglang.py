"""The checks of rollout engines on SGLang itself, on a CPU: what the field knows of it comes out."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sglang_kit import DENSE, Served, sglang_server  # noqa: F401 - a fixture

from repro_golden.case.file import Case
from repro_golden.case.tables import CHECKS
from repro_golden.engine_checks.command import RolloutChecks, check_rollouts
from repro_golden.engine_checks.findings import Plan
from repro_golden.repository.checkout import Place

if find_spec("sglang") is None:  # importing it takes long
    pytest.skip("SGLang is not installed: see docs/how-to/rollouts.md", allow_module_level=True)


PLAN = Plan(alone=8, longest=30, response=8)


def checked(only: tuple[str, ...] = (), dtype: str = "fp32", **sglang: Any) -> RolloutChecks:
    """Of a tiny model with random weights, in a process of its own."""
    config = {
        "rollout_engine": "sglang", "dtype": dtype, "sglang": {"max_total_tokens": 16384, **sglang},
        "model": asdict(DENSE),
    }  # fmt: skip
    raw = {
        "case": {"name": "tiny", "steps": 1, "rollouts": "golden/rollouts/tiny"},
        "subject": {"config": config, "timeout": "4m"},
    }
    return check_rollouts(Case.model_validate(raw), Place(Path(__file__).parent.parent), only=only, plan=PLAN)


@pytest.fixture(scope="module")
def deterministic() -> RolloutChecks:
    """All checks of an engine in the process that makes them."""
    return checked()


@pytest.mark.whole
def test_deterministic_mode_repeats_all_bits(deterministic: RolloutChecks) -> None:
    """In fp32: run to run, in every batch, seeded, after release, update and reversal.

    Every stand-in that this rests on is named. In this mode it keeps a prefix cache with few backends only.
    """
    report = deterministic
    assert {
        finding.name: finding.detail for finding in report.findings if not finding.passed
    } == {} and report.exit_code == 0
    outcomes = {hit.name: hit.outcome for hit in report.findings}
    wanted = {name: "equal" if word == "any" else word for name, word in CHECKS.items()}
    if report.identity["flags"]["disable_radix_cache"]:
        wanted["prefix-cache"] = "not applicable"
    assert report.identity["device"] != "cpu" or wanted["prefix-cache"] == "not applicable"
    assert outcomes == wanted
    assert report.identity["device"] != "cpu" or "rests on stand-ins: repro_sglang_cpu" in report.engine


@pytest.mark.whole
def test_a_server_samples_the_same_bits(deterministic: RolloutChecks, sglang_server: Served) -> None:  # noqa: F811
    """A server, brought the same starting weights, gives the very bits of an engine in another process."""
    there = checked(("run-to-run",), url=sglang_server.url)
    here = next(finding for finding in deterministic.findings if finding.name == "run-to-run")
    assert there.exit_code == 0 and "; digest " in here.detail
    assert there.findings[0].detail.rpartition("; digest ")[2] == here.detail.rpartition("; digest ")[2]


@pytest.mark.whole
def test_without_deterministic_mode() -> None:
    """Without deterministic mode seeds are ignored, and in fp32 on a CPU a batch changes its neighbours' numbers."""
    only = ("run-to-run", "batch-of-8", "batch-of-32", "seed", "seeded-batch", "unseeded")
    report = checked(only, enable_deterministic_inference=False)
    outcomes = {hit.name: hit.outcome for hit in report.findings}
    details = {finding.name: finding.detail for finding in report.findings}
    assert outcomes["seed"] == "equal" and details["seed"].startswith("the seed is ignored")
    assert outcomes["unseeded"] == "differs" and outcomes["run-to-run"] == "equal"
    if report.identity["device"] == "cpu":  # products of matrices are not padded without the mode
        assert outcomes["batch-of-8"] == outcomes["batch-of-32"] == "differs"
        assert report.exit_code == 1


@pytest.mark.campaign
@pytest.mark.parametrize("mode", [True, False])
def test_bf16_on_a_cpu(mode: bool) -> None:
    """A batch changes no numbers in bf16, with deterministic mode and without."""
    report = checked(tuple(n for n in CHECKS if "batch-of" in n), "bf16", enable_deterministic_inference=mode)
    if report.identity["device"] == "cpu":
        assert {finding.outcome for finding in report.findings} == {"equal"}

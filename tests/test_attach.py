from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest
import warm_kit
from attach_kit import PROGRAMS, TORCHRUN, Programs, names, row

from repro_golden.trace import Trace

NETWORK = ["0.bias", "0.weight", "2.bias", "2.weight"]
STEPS = {"kernels": 12, "scripted": 4, "scaler": 5, "accumulation": 4, "compiled": 4, "nested": 8, "ranks": 8}
Recorded = Callable[[str], tuple[Trace, str]]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The programs, for all tests of this file."""
    return Programs(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="module")
def recorded(programs: Programs) -> Recorded:
    """One recording of each program, made when it is first asked for."""
    made: dict[str, tuple[Trace, str]] = {}

    def get(name: str) -> tuple[Trace, str]:
        if name not in made:
            made[name] = programs.recorded(f"of-{name}", **how(name))
        return made[name]

    return get


def how(name: str, outputs: int = 2) -> Any:
    """What one of the programs is started with."""
    return {"name": name, "launcher": TORCHRUN, "arguments": (str(outputs),)} if name == "ranks" else {"name": name}


def diff(programs: Programs, a: str, b: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "repro", "diff", "--json", a, b]
    done = warm_kit.run(command, programs.folder)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.whole
@pytest.mark.parametrize("name", sorted(STEPS))
def test_recording_changes_no_bit(programs: Programs, recorded: Recorded, name: str) -> None:
    """A recorded program ends with the parameters, optimizer state, generators and losses of the unrecorded one."""
    trace, printed = recorded(name)
    assert len(re.findall(r"^sha256 [0-9a-f]{64}$", printed, re.MULTILINE)) == 1
    assert printed == programs.plain(**how(name))
    assert (len(trace.steps), trace.complete) == (STEPS[name], True)


def test_every_program_is_checked() -> None:
    """No program is left out of the comparison of bits."""
    assert STEPS.keys() | {"ordered"} == PROGRAMS.keys()


def test_optimizers_are_told_apart(recorded: Recorded) -> None:
    """Each optimizer's step is a step; the first one's signals have bare names, the others' are under a number."""
    trace, _ = recorded("kernels")
    momentum = [any("momentum_buffer/" in n for n in names(trace, step, "update")) for step in range(12)]
    assert sum(momentum[:3]) == 1
    assert momentum == momentum[:3] * 4  # models of the same names come in the same order each time
    for step in range(12):
        prefix = f"optimizer.{step % 3}/" if step % 3 else ""
        kinds = ["momentum_buffer/"] if momentum[step] else ["exp_avg/", "exp_avg_sq/", "step/"]
        assert names(trace, step, "grad") == [prefix + n for n in NETWORK]
        assert names(trace, step, "update") == sorted(prefix + k + n for k in ["", *kinds] for n in NETWORK)
        assert f"{prefix}lr" in trace.steps[step].metrics
    changed = {row(trace, s, "update", "0.weight").fingerprint for s in range(0, 12, 3)}
    assert len(changed) == 4


def test_scripted_modules(recorded: Recorded) -> None:
    """Of a module that torch.jit.script made, parameters go by their names; what it holds besides is looked at too."""
    trace, _ = recorded("scripted")
    layers = [f"layers.{n}" for n in NETWORK]
    assert [names(trace, step, "grad") for step in range(4)] == [layers] * 4
    held = [{row.name: row.fingerprint for row in trace.rows(step)} for step in range(4)]
    assert len({step["buffer/model/seen"] for step in held}) == 4
    assert len({step["frozen/model/frozen.weight"] for step in held}) == 1


def test_a_step_that_the_scaler_skips_is_a_step(recorded: Recorded) -> None:
    """A step left out for an infinite gradient has the metric `skipped`, that gradient and unchanged parameters."""
    trace, _ = recorded("scaler")
    assert [s.metrics.get("skipped") for s in trace.steps] == [None, None, 1.0, None, None]
    assert ["grad_norm" in s.metrics for s in trace.steps] == [False, True, False, True, False]
    for name in NETWORK:
        prints = [row(trace, s, "update", name).fingerprint for s in range(5)]
        assert prints[1] == prints[2] and len(set(prints)) == 4
    for step in range(5):
        nonfinite = sum(row(trace, step, "grad", name).nonfinite for name in NETWORK)
        assert (nonfinite > 0) == (step == 2)


def test_backward_calls_are_not_steps(recorded: Recorded) -> None:
    """Three backward calls and one step are one step, and checkpoint wrappers leave no trace in the names."""
    trace, _ = recorded("accumulation")
    for step in range(4):
        assert names(trace, step, "grad") == [f"{n}.{k}" for n in ("0", "3.0", "4") for k in ("bias", "weight")]


@pytest.mark.whole
def test_compilation_leaves_the_names(recorded: Recorded) -> None:
    """A compiled model's parameters have the names of the model."""
    trace, _ = recorded("compiled")
    assert [names(trace, s, "grad") for s in range(4)] == [["bias", "weight"]] * 4


def test_a_closure_called_often_is_one_step(recorded: Recorded) -> None:
    """LBFGS evaluates its closure several times; its state is recorded once a step."""
    trace, _ = recorded("nested")
    steps = range(4, 8)
    assert all(names(trace, s, "grad") == [f"optimizer.1/{n}" for n in NETWORK] for s in steps)
    assert len({row(trace, s, "update", "optimizer.1/0.weight").fingerprint for s in steps}) == 4
    assert "optimizer.1/d/0.bias" in names(trace, 7, "update") or "optimizer.1/d/0.weight" in names(trace, 7, "update")


def test_step_calls_inside_step_calls_are_one_step(recorded: Recorded) -> None:
    """A wrapper, a subclass and its base class make one step; a call that raised takes no other step with it."""
    trace, _ = recorded("nested")
    assert all(names(trace, s, "update") == NETWORK for s in range(4))
    assert len({s.root for s in trace.steps}) == 8
    assert [s.metrics["lr"] for s in trace.steps[:4]] == [0.1] * 4


def test_ranks_are_one_trace(programs: Programs, recorded: Recorded) -> None:
    """Replicas are one row and shards add up to the whole tensor, under the names that one process alone gives."""
    trace, printed = recorded("ranks")
    alone, _ = programs.recorded("alone", "ranks", ("2",))
    assert len(alone.steps) == len(trace.steps) == 8
    for step in range(8):
        # the ranks' generators are seeded apart
        here, there = ([r for r in t.rows(step) if "rng/" not in r.name] for t in (trace, alone))
        assert len({(r.phase, r.name) for r in here}) == len(here)
        assert {(r.phase, r.name, r.shape, r.dtype) for r in here} == {
            (r.phase, r.name, r.shape, r.dtype) for r in there
        }
        assert names(trace, step, "grad") == [("optimizer.1/" if step % 2 else "") + n for n in NETWORK]
    check_shards(trace, printed)


def check_shards(trace: Trace, printed: str) -> None:
    whole = [line.split() for line in printed.splitlines() if line[:1].isdigit()]
    assert len(whole) == 4 * 2 * len(NETWORK)
    sharded = next(k for k in (0, 1) if any("exp_avg/" in n for n in names(trace, k, "update")))
    prefix = "optimizer.1/" if sharded else ""
    norms = [float(line.split()[1]) for line in printed.splitlines() if line.startswith("norm ")]
    values = [s.metrics[f"{prefix}grad_norm"] for s in trace.steps[sharded::2]]
    assert [struct.pack("f", f) for f in values] == [struct.pack("f", n) for n in norms]  # the program's are in fp32
    for step, phase, name, expected in whole:
        assert row(trace, 2 * int(step) + sharded, phase, prefix + name).fingerprint == expected


@pytest.mark.whole
def test_a_rank_may_hold_nothing_of_a_tensor(programs: Programs) -> None:
    """A parameter of one row is all on one of two ranks, and is recorded as the whole tensor that it is."""
    check_shards(*programs.recorded("one-row", **how("ranks", outputs=1)))


def test_equal_runs_compare_equal_and_others_do_not(programs: Programs) -> None:
    """Two runs are equal, in whatever order parameters are registered; another learning rate differs at its step."""
    runs = {"first": ("0.01",), "again": ("0.01",), "turned": ("0.01", "reversed"), "faster": ("0.02",)}
    traces = {out: programs.recorded(out, "ordered", arguments)[0] for out, arguments in runs.items()}
    for same in ("again", "turned"):
        code, printed = diff(programs, "first", same)
        assert code == 0, printed
        assert [s.root for s in traces["first"].steps] == [s.root for s in traces[same].steps]
    expected = sorted(f"layers.{n}.{k}" for n in "abc" for k in ("bias", "weight"))
    assert [names(traces[out], 0, "grad") for out in runs] == [expected] * 4
    code, printed = diff(programs, "first", "faster")
    assert code == 1, printed
    roots = [a.root == b.root for a, b in zip(traces["first"].steps, traces["faster"].steps, strict=True)]
    assert roots == [True, True, False, False]
    assert printed["divergence"]["step"] == 2

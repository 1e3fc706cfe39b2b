"""Megatron-core's layouts, recorded: one name for one tensor, parts that add up, and no bit of the program changed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import warm_kit

from repro_golden.trace import Row, Trace
from repro_golden.trace.model import METRIC

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-core 0.16.1 is not for this Python")

TRAINER = Path(__file__).with_name("megatron_trainer.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

WORDS = {
    "one": "bf16 vocab=56 shown",
    "tp2": "bf16 vocab=56 tp=2",
    "bumped": "bf16 vocab=56 tp=2 bump=1",
    "pp2": "bf16 vocab=56 pp=2",
    "dp2": "bf16 vocab=56 dp=2",
    "late": "bf16 vocab=56 dp=2 distopt overlap",
    "tied": "tie",
    "tied-pp2-dp2": "tie pp=2 dp=2 distopt",
    "experts": "moe",
    "experts-ep2": "moe ep=2",
}
"""The trainer's arguments for each layout that is recorded."""


class Layouts:
    """Recordings of the trainer, each made when it is first asked for, and what it prints when nobody records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed: dict[str, list[str]] = {}
        self.shown: dict[str, list[list[str]]] = {}
        self._traces: dict[str, Trace] = {}

    def trace(self, name: str) -> Trace:
        """The recording of a layout."""
        if name not in self._traces:
            launcher = TORCHRUN if name == "dp2" else ()  # one of them as users start theirs
            program = [sys.executable, *launcher, str(TRAINER), *WORDS[name].split()]
            done = self._run([sys.executable, "-m", "repro", "trace", "--out", name, "--", *program])
            assert "recording stopped" not in done.stderr, done.stderr
            self.printed[name] = [line for line in done.stdout.splitlines() if " | " in line]
            self.shown[name] = [line.split() for line in done.stdout.splitlines() if line.startswith("shown ")]
            self._traces[name] = Trace(self.folder / name)
        return self._traces[name]

    def bare(self, name: str) -> str:
        """What a layout prints when nobody records it."""
        done = self._run([sys.executable, str(TRAINER), *WORDS[name].split()])
        (line,) = (line for line in done.stdout.splitlines() if " | " in line)
        return line

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        done = warm_kit.run(command, self.folder, environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    return Layouts(tmp_path_factory.mktemp("layouts"))


def rows(trace: Trace, step: int) -> dict[tuple[str, str], Row]:
    return {(row.phase, row.name): row for row in trace.rows(step)}


def differing(a: Trace, b: Trace, step: int) -> list[tuple[str, str]]:
    """The signals of a step that two traces do not agree on, which must have the same ones."""
    left, right = rows(a, step), rows(b, step)
    assert sorted(left) == sorted(right)
    return [key for key, row in left.items() if row.fingerprint != right[key].fingerprint]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("base", "other"),
    [
        ("one", "tp2"),
        ("one", "pp2"),
        ("one", "late"),
        ("experts", "experts-ep2"),
        pytest.param("tied", "tied-pp2-dp2", marks=pytest.mark.campaign),
    ],
)
def test_weights_at_load(layouts: Layouts, base: str, other: str) -> None:
    """Weights at load have the same names and fingerprints in every layout, padded or tied or spread as they are."""
    left, right = layouts.trace(base), layouts.trace(other)
    start = [key for key in rows(left, 0) if key[1].startswith("start/")]
    layers = {name.split(".")[2] for _, name in start if ".layers." in name}
    assert len(start) > 15 and layers == {"0", "1"}
    assert not [key for key in differing(left, right, 0) if key in start]
    assert sum(row.phase == "grad" and row.dtype != METRIC for row in left.rows(0)) > 10


@pytest.mark.parametrize("other", ["pp2", *(pytest.param(name, marks=pytest.mark.whole) for name in ("dp2", "late"))])
def test_bit_equal(layouts: Layouts, other: str) -> None:
    """Where the arithmetic is that of one process, everything is: gradients, copies, moments, whole or in slices."""
    names = {("grad", "grad_norm"), ("update", "rng/torch"), ("update", "end/rng/torch")}  # each rank draws for itself
    for step in range(2):
        assert set(differing(layouts.trace("one"), layouts.trace(other), step)) <= names


@pytest.mark.parametrize(
    "name",
    [
        "pp2",
        pytest.param("tp2", marks=pytest.mark.whole),
        pytest.param("experts-ep2", marks=pytest.mark.whole),
        pytest.param("dp2", marks=pytest.mark.whole),
        pytest.param("late", marks=pytest.mark.whole),
        pytest.param("tied-pp2-dp2", marks=pytest.mark.campaign),
    ],
)
def test_neutral(layouts: Layouts, name: str) -> None:
    """A recorded run ends with the losses, weights, gradients and generators of one that nobody records."""
    trace = layouts.trace(name)
    assert (len(trace.steps), trace.complete) == (2, True)
    bare, recorded = (line.partition(" | ")[2] for line in (layouts.bare(name), layouts.printed[name][0]))
    assert bare == recorded and len(bare) > 100


def test_main_grad_is_the_gradient(layouts: Layouts) -> None:
    """Of bf16 weights the fp32 gradients and copies are recorded, as the program itself has them."""
    trace = layouts.trace("one")
    assert len(layouts.shown["one"]) == 2 * 17
    for _, step, name, gradient, copy in layouts.shown["one"]:
        rows_read = rows(trace, int(step))
        assert rows_read["grad", name].fingerprint == gradient
        assert rows_read["update", f"main/{name}"].fingerprint == copy
        assert [rows_read[phase, name].dtype for phase in ("grad", "update")] == ["float32", "bfloat16"]


@pytest.mark.whole
def test_planted_on_one_rank(layouts: Layouts) -> None:
    """What one tensor-parallel rank does differently is named by the tensor that all layouts know."""
    good, bad = layouts.trace("tp2"), layouts.trace("bumped")
    assert not differing(good, bad, 0)
    first, *_ = differing(good, bad, 1)
    assert first == ("grad", "decoder.layers.0.mlp.linear_fc2.weight")
    command = [sys.executable, "-m", "repro", "diff", "tp2", "bumped"]
    done = warm_kit.run(command, layouts.folder)
    assert done.returncode == 1 and first[1] in done.stdout, done.stdout + done.stderr


@pytest.mark.whole
def test_experts_step_once(layouts: Layouts) -> None:
    """Dense parameters and experts have optimizers of their own under EP, and still make one step of one optimizer."""
    rows_read = rows(layouts.trace("experts-ep2"), 0)
    experts = {name.split(".")[6] for _, name in rows_read if ".local_experts." in name}
    assert experts == {"0", "1", "2", "3"}
    assert not [name for _, name in rows_read if name.startswith(("optimizer.", "start/optimizer.")) or "@" in name]
    assert len(layouts.trace("experts-ep2").steps) == 2

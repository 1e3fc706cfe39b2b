from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from attach_kit import TORCHRUN, names, row
from trainers_kit import TRAINERS, Trainers

from repro_golden.trace import Trace

STEPS, CLIPPED = 5, 0.1
LAYER = [
    "input_layernorm",
    *(f"mlp.{part}_proj" for part in ("down", "gate", "up")),
    "post_attention_layernorm",
    *(f"self_attn.{part}_proj" for part in "koqv"),
]
TRAINED = {
    "transformers": sorted(
        ["lm_head.weight", "model.norm.weight", *(f"model.layers.{k}.{part}.weight" for k in "01" for part in LAYER)]
    ),
    "lightning": ["net.0.weight", "net.3.bias", "net.3.weight"],
}
FROZEN = {"transformers": [], "lightning": ["net.0.bias"]}
"""What the optimizer holds besides: transformers' trainer leaves frozen parameters out."""


class Recordings:
    """The runs of one program, each made once: plain, recorded, and recorded again while it shows what it holds."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.programs = name, Trainers(folder)
        self.plain = self.programs.plain(name, ("0",))
        self.first, self.printed = self.programs.recorded("first", name, ("0",))
        self.again, self.shown = self.programs.recorded("again", name, ("0", "shown"))

    def diff(self, other: str) -> tuple[int, str]:
        """The exit code of a comparison with the first recording, and what it says."""
        command = [sys.executable, "-m", "repro", "diff", "first", other]
        done = subprocess.run(command, cwd=self.programs.folder, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module", params=sorted(TRAINERS))
def recordings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    """The runs of each program."""
    return Recordings(request.param, tmp_path_factory.mktemp(request.param))


def logged(printed: str) -> list[list[float]]:
    """Loss, gradient norm and learning rate of each step, as the program saw them."""
    lines = [line.split() for line in printed.splitlines() if line.startswith("logged ")]
    assert [int(line[1]) for line in lines] == list(range(STEPS))
    return [[float.fromhex(text) for text in line[2:]] for line in lines]


def check_printed(printed: str) -> None:
    assert len(re.findall(r"^sha256 [0-9a-f]{64}$", printed, re.MULTILINE)) == 1
    assert len({tuple(numbers) for numbers in logged(printed)}) == STEPS


def check_names(name: str, trace: Trace) -> None:
    states = ("exp_avg", "exp_avg_sq", "step")
    for step in range(STEPS):
        assert names(trace, step, "grad") == TRAINED[name]
        held = TRAINED[name] + FROZEN[name] + [f"{kind}/{n}" for kind in states for n in TRAINED[name]]
        assert names(trace, step, "update") == sorted(held)


@pytest.mark.whole
def test_recording_changes_no_bit_of_a_trainer(recordings: Recordings) -> None:
    """A recorded trainer ends with the parameters, optimizer state, generators and losses of the unrecorded one."""
    check_printed(recordings.plain)
    assert recordings.printed == recordings.plain


@pytest.mark.whole
def test_parameters_have_the_models_own_names(recordings: Recordings) -> None:
    """Each parameter that is trained has its gradient and Adam state under its path in the model, in each step."""
    check_names(recordings.name, recordings.first)


@pytest.mark.whole
def test_a_trainers_step_is_one_step(recordings: Recordings) -> None:
    """Two batches, an optimizer inside a wrapper and a closure are one step, with one more update in Adam's count."""
    trace = recordings.first
    assert (len(trace.steps), trace.complete) == (STEPS, True)
    for step in range(STEPS):
        for name in TRAINED[recordings.name]:
            assert row(trace, step, "update", f"step/{name}").absmax == step + 1
    for name in TRAINED[recordings.name]:
        assert len({row(trace, step, "update", name).fingerprint for step in range(STEPS)}) == STEPS


@pytest.mark.whole
def test_a_record_is_what_the_step_left(recordings: Recordings) -> None:
    """Gradients, parameters and Adam state are those that the program itself finds after the step."""
    lines = [line.split()[1:] for line in recordings.shown.splitlines() if line.startswith("shown ")]
    for step in range(STEPS):
        mine = {(phase, name): value for at, phase, name, value in lines if at == str(step)}
        for phase in ("grad", "update"):
            # the program shows frozen parameters too
            assert set(names(recordings.again, step, phase)) <= {name for p, name in mine if p == phase}
            for name in names(recordings.again, step, phase):
                assert row(recordings.again, step, phase, name).fingerprint == mine[phase, name]


@pytest.mark.whole
def test_a_trainers_clipping_and_schedule_are_metrics(recordings: Recordings) -> None:
    """The gradient norm before clipping and the step's learning rate are metrics, exactly, of their own step."""
    metrics = [step.metrics for step in recordings.first.steps]
    assert [(m["grad_norm"], m["lr"]) for m in metrics] == [(norm, lr) for _, norm, lr in logged(recordings.plain)]
    assert min(m["grad_norm"] for m in metrics) > CLIPPED
    assert len({m["lr"] for m in metrics}) == STEPS


@pytest.mark.whole
def test_equal_trainings_compare_equal(recordings: Recordings) -> None:
    """A second recording of the same training agrees with the first in each step."""
    code, text = recordings.diff("again")
    assert code == 0, text
    assert [s.root for s in recordings.first.steps] == [s.root for s in recordings.again.steps]


@pytest.mark.whole
@pytest.mark.parametrize("recordings", ["lightning"], indirect=True)  # one will do: a run of either takes its time
def test_another_seed_compares_unequal(recordings: Recordings) -> None:
    """A training with another seed differs from the first step on."""
    other, _ = recordings.programs.recorded("other", recordings.name, ("1",))
    code, text = recordings.diff("other")
    assert code == 1, text
    assert all(a.root != b.root for a, b in zip(recordings.first.steps, other.steps, strict=True))


@pytest.mark.whole
def test_replicas_in_bfloat16_are_one_trace(tmp_path: Path) -> None:
    """Under torchrun and autocast transformers' trainer keeps its bits, and its replicas are one row by plain names."""
    programs, how = Trainers(tmp_path), {"arguments": ("0", "bf16"), "launcher": TORCHRUN}
    trace, printed = programs.recorded("trace", "transformers", **how)
    check_printed(printed)
    assert printed == programs.plain("transformers", **how)
    assert (len(trace.steps), trace.complete) == (STEPS, True)
    check_names("transformers", trace)
    assert [s.metrics["grad_norm"] for s in trace.steps] == [norm for _, norm, _ in logged(printed)]

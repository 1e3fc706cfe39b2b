"""The recorder of operations: what it notes, that it changes nothing, and what becomes of a recording that breaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attach_kit import PRELUDE, PROGRAMS, TORCHRUN
from examples_kit import at_most
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operations_kit import FILES, NAME, asked, lanes, named, recording

from repro_golden.base.errors import ReproError
from repro_golden.fingerprint import content
from repro_golden.recording.attach.base.settings import Settings
from repro_golden.recording.attach.gathered.run import environment_for
from repro_golden.recording.operations.stream import OBSERVED, dump_of, read_stream

# -- what is noted

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@settings(at_most(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    looks=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()),
        min_size=1, max_size=6,
    ),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_what_was_read_is_what_is_written(tmp_path: Path, looks: list[tuple[Any, list[int], bool]], seed: int) -> None:
    """Of any dtype, shape and stride: the stream read again tells dtype, shape and the lanes of the content."""
    generator = torch.Generator().manual_seed(seed)
    given = []
    for dtype, shape, turned in looks:
        raw = torch.randint(0, 2 if dtype is torch.bool else 200, shape, generator=generator).to(dtype)
        given.append(raw.mT if turned and raw.ndim > 1 else raw)
    with recording(tmp_path):
        made = [tensor.clone() for tensor in given]
    stream = read_stream(tmp_path / NAME)
    assert (stream.problem, stream.step, stream.rank) == ("", 0, 0)
    clones = named(stream, "clone")
    assert [o.index for o in stream.operations] == list(range(len(stream.operations)))
    for operation, before, after in zip(clones, given, made, strict=True):
        for value, tensor in ((operation.inputs[0], before), (operation.outputs[0], after)):
            assert value.key == (str(tensor.dtype)[6:], tuple(tensor.shape), lanes(tensor))
        assert asked(operation).file == "tests/test_operations.py"


def test_modules_phases_and_backward(tmp_path: Path) -> None:
    """Operations know their module and phase; those of the backward pass their node and their forward operation."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 3)
    with recording(tmp_path, dump=()) as recorder:
        recorder.preparing = True  # nobody says when it ends: with the first module
        x = x * 2
        out = model(x)
        loss = out.exp().mean()
        recorder.observed("loss", "loss", loss.detach())
        loss.backward()
        recorder.observed("grad", "", {name: p.grad for name, p in model.named_parameters()})
        optimizer.step()
        recorder.observed("update", "", {name: p.detach() for name, p in model.named_parameters()})
    stream = read_stream(tmp_path / NAME)
    assert stream.problem == ""
    (mul,) = [o for o in named(stream, "mul") if o.phase == "input"]
    assert mul.arguments == "T0, 2"
    assert [o.module for o in named(stream, "addmm")] == ["Sequential.0", "Sequential.2"]
    (tanh,), (back,) = named(stream, "tanh"), named(stream, "tanh_backward")
    assert (tanh.module, tanh.phase, tanh.forward) == ("Sequential.1", "forward", None)
    assert (back.phase, back.node, back.forward) == ("backward", "TanhBackward0", tanh.index)
    (exp,) = named(stream, "exp")
    assert exp.module == "" and exp.phase == "forward" and asked(exp).function == "test_modules_phases_and_backward"
    for node, forward in (("AddmmBackward0", "addmm"), ("ExpBackward0", "exp"), ("MeanBackward0", "mean")):
        operations = [o for o in stream.operations if o.node == node]
        assert operations and {
            stream.operations[o.forward].name.split(".")[1] for o in operations if o.forward is not None
        } == {forward}
    phases = [o.phase for o in stream.operations if o.name != OBSERVED]
    assert sorted(set(phases)) == ["backward", "forward", "input", "optimizer"]
    order = [phase for k, phase in enumerate(phases) if k == 0 or phases[k - 1] != phase]
    assert order == ["input", "forward", "backward", "optimizer"]
    shown = {
        v.name: v
        for o in stream.operations
        if o.name == OBSERVED and o.arguments.startswith("update")
        for v in o.inputs
    }
    for name, parameter in model.named_parameters():
        assert shown[name].content == lanes(parameter)
        assert shown[name].makers and stream.operations[shown[name].makers[-1]].phase == "optimizer"


def test_draws_views_and_memory_that_nobody_wrote(tmp_path: Path) -> None:
    """Random draws are flagged, views have no content of their own, memory has one from its first write on."""
    x = torch.arange(6.0)
    with recording(tmp_path):
        drawn = torch.nn.functional.dropout(x, 0.5)
        seen = x.view(2, 3)
        sums = seen.sum(0)
        fresh = torch.empty(6)
        fresh.copy_(x)
        fresh.neg()
    stream = read_stream(tmp_path / NAME)
    assert [o.name.split(".")[1] for o in stream.operations if o.draws] == ["bernoulli_"] or any(
        o.draws for o in named(stream, "native_dropout")
    )
    (view,), (total,), (empty,), (copy,), (neg,) = (
        named(stream, name) for name in ("view", "sum", "empty", "copy_", "neg")
    )
    assert view.view and view.outputs[0].content == "" and total.inputs[0].content == lanes(seen)
    assert total.inputs[0].makers == (view.index,)
    assert empty.outputs[0].content == "" and copy.inputs[0].content == ""
    assert copy.outputs[0].content == neg.inputs[0].content == lanes(fresh)
    assert empty.index in neg.inputs[0].makers or copy.index in neg.inputs[0].makers
    assert not any(o.draws for o in (view, total, copy, neg)) and len(drawn) == len(sums) * 2


def test_all_who_wrote_a_part_are_makers(tmp_path: Path) -> None:
    """Memory that was filled piece by piece is from everyone who filled a piece, not from the last one alone."""
    x, y = torch.randn(2), torch.randn(2)
    with recording(tmp_path):
        whole = torch.zeros(4)
        whole[:2] = x
        whole[2:] = y
        whole.neg()
        whole.fill_(1.0)
        whole.exp()
    stream = read_stream(tmp_path / NAME)
    (neg,), (exp,), (fill,) = named(stream, "neg"), named(stream, "exp"), named(stream, "fill_")
    assert {o.index for o in named(stream, "copy_")} <= set(neg.inputs[0].makers)
    assert exp.inputs[0].makers == (fill.index,), "what was overwritten whole is nobody's any more"


def test_what_finds_out_shapes_is_left_alone(tmp_path: Path) -> None:
    """Fake tensors, by which torch asks for shapes alone, work as without the recorder, and are no operations."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    with recording(tmp_path):
        with mode:
            fake = torch.ones(2, 3).detach() + 1
        assert (fake.detach() @ fake.mT).shape == (2, 2)
        torch.ones(2).exp()
    stream = read_stream(tmp_path / NAME)
    assert stream.problem == "" and len(named(stream, "exp")) == 1 and not named(stream, "mm")


def test_numbers_and_dumps(tmp_path: Path) -> None:
    """A number that Python gets is an output in its own words; chosen operations are written with all their bytes."""
    x = torch.randn(3, generator=torch.Generator().manual_seed(1))
    with recording(tmp_path, dump=[1]) as recorder:
        total = x.sum()
        x.mul(3.0)
        recorder.observed("loss", "total", total.item())
    stream = read_stream(tmp_path / NAME)
    (item,) = named(stream, "_local_scalar_dense")
    assert item.outputs[0].key == ("float", (), repr(total.item()))
    shown = next(o for o in stream.operations if o.name == OBSERVED)
    assert shown.inputs[0].content == repr(total.item()) and shown.inputs[0].makers == (item.index,)
    assert dump_of(stream, 1, "in", 0).read_bytes() == content(x).tobytes()
    assert dump_of(stream, 1, "out", 0).read_bytes() == content(x * 3.0).tobytes()


def test_ranks_do_not_share_what_they_dump(tmp_path: Path) -> None:
    """All write into one folder: what one rank's operation made is never taken for another's."""
    for rank in range(2):
        with recording(tmp_path, [0], rank):
            torch.full((3 + rank,), float(rank)).sum()
    for rank in range(2):
        stream = read_stream(tmp_path / f"rank-{rank:05d}.jsonl")
        assert dump_of(stream, 0, "out", 0).read_bytes() == content(torch.full((3 + rank,), float(rank))).tobytes()
    assert len(list(tmp_path.glob("*.bin"))) == 2


def test_a_write_behind_the_back_shows(tmp_path: Path) -> None:
    """What NumPy writes through shared memory after torch wrote and before torch read is another content."""
    with recording(tmp_path):
        x = torch.zeros(3) + 1
        array = x.numpy()
        array[1] = 7
        x.neg()
    stream = read_stream(tmp_path / NAME)
    (add,), (neg,) = named(stream, "add"), named(stream, "neg")
    assert add.index in neg.inputs[0].makers
    assert neg.outputs[0].content == lanes(torch.tensor([-1.0, -7.0, -1.0]))


# -- recordings that break


def small(folder: Path) -> bytes:
    """A small stream's bytes."""
    with recording(folder):
        (torch.ones(2) + 1).view(2, 1).sum()
    return (folder / NAME).read_bytes()


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    """In one line, with the cure; so is a stream that is not there."""
    whole = small(tmp_path)
    header, _, rest = whole.partition(b"\n")
    (tmp_path / NAME).write_bytes(json.dumps(json.loads(header) | {"format": 99}).encode() + b"\n" + rest)
    with pytest.raises(ReproError, match=r"^[^\n]*has format 99, newer than 1: update repro$"):
        read_stream(tmp_path / NAME)
    with pytest.raises(ReproError, match=r"^[^\n]*made no step under the recorder$"):
        read_stream(tmp_path / "rank-00001.jsonl")


def test_a_stream_that_was_cut_off_is_not_whole(tmp_path: Path) -> None:
    """Cut at any byte it reads as far as it goes and says that it is not whole, or that it holds nothing."""
    whole = small(tmp_path)
    path = tmp_path / "cut.jsonl"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        try:
            stream = read_stream(path)
        except ReproError as error:
            told = str(error)
        else:
            told = stream.problem
        last = length == len(whole) - 1  # nothing but the last line's end is missing
        assert bool(told) != last and "\n" not in told
        assert ("holds no operations" in told) == (length < whole.index(b"\n"))
    assert read_stream(tmp_path / NAME).problem == ""


def test_an_error_in_the_recorder_ends_the_recording_alone(tmp_path: Path) -> None:
    """What the recorder cannot name ends it, in one line; the program's results and errors are its own."""

    class Loud:
        def __str__(self) -> str:
            raise RuntimeError("no\nname")

    with recording(tmp_path) as recorder:
        x = torch.ones(2) + 1
        recorder.observed("loss", "bad", {Loud(): x})  # not even a text
        x = x * 3
    assert x.tolist() == [6.0, 6.0]
    stream = read_stream(tmp_path / NAME)
    assert stream.problem and "\n" not in stream.problem and not named(stream, "mul")


def test_an_error_of_the_program_passes(tmp_path: Path) -> None:
    """An operation that raises does so as without the recorder, and recording goes on after it."""
    with recording(tmp_path):
        with pytest.raises(RuntimeError, match="must match"):
            torch.ones(2) + torch.ones(3)
        torch.ones(2).exp()
    stream = read_stream(tmp_path / NAME)
    assert stream.problem == "" and len(named(stream, "exp")) == 1


# -- programs that know nothing of it

MIXED = """
from torch.utils.checkpoint import checkpoint

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3

model = network(nn.Dropout(0.5), nn.LayerNorm(7))
plain = network()
optimizer = torch.optim.AdamW([*model.parameters(), *plain.parameters()], lr=0.01)
for step in range(3):
    for part in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=part == 0):
            hidden = checkpoint(model, torch.randn(4, 6), use_reentrant=part == 1)
        loss = loss_of(lambda x: Scaled.apply(plain(x)) + hidden.float())
        (loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step == 1:
        child = os.fork()
        if not child:
            torch.ones(3).sum()
            os._exit(0)
        os.waitpid(child, 0)
finish([model, plain], [optimizer])
sys.stdout.flush()
sys.exit(7)
"""
"""Autocast, checkpoints of both kinds, accumulation, a function of its own, a fork in the recorded step."""


def run(folder: Path, text: str, step: int | None, launcher: Sequence[str] = (), **more: str) -> tuple[str, str, int]:
    """Output, errors and exit code of a program, with one step recorded or without any recorder."""
    program = folder / "program.py"
    program.write_text(PRELUDE + text)
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    if step is not None:
        raw = folder / "raw"
        raw.mkdir()
        where = {"folder": str(folder / "operations"), "root": str(folder)}
        (folder / "changed.json").write_text('["program.py"]')
        ask = {**where, "step": step, "until": step, "dump": [], "changed": str(folder / "changed.json")}
        environment = environment_for(Settings(str(raw), operations=ask), environment)
    done = subprocess.run(
        [sys.executable, *launcher, str(program)], cwd=folder, env=environment | more, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    return done.stdout, done.stderr, done.returncode


@pytest.mark.whole
def test_recording_changes_no_bit_of_a_program(tmp_path: Path) -> None:
    """Parameters, optimizer state, losses, generators and exit code are those of the program alone.

    A fork inside of the recorded step leaves the parent's stream whole, and writes none.
    """
    text = MIXED
    out, _, code = run(tmp_path, text, None)
    recorded, errors, recorded_code = run(tmp_path, text, 2)
    assert (recorded, recorded_code) == (out, code) and code == 7 and "sha256" in out
    assert "not recorded" not in errors
    stream = read_stream(tmp_path / "operations" / NAME)
    assert stream.problem == "" and stream.step == 2
    files = sorted(path.name for path in (tmp_path / "operations").iterdir())
    assert files == FILES
    nodes = {o.node for o in stream.operations}
    assert "ScaledBackward" in nodes and any(o.draws for o in stream.operations)
    operations = [o for o in stream.operations if o.node == "ScaledBackward"]
    assert {asked(o).function for o in operations} == {"Scaled.backward"}
    forward = {asked(stream.operations[o.forward]).function for o in operations if o.forward is not None}
    assert forward <= {"Scaled.forward", "<lambda>"}
    recomputed = [o for o in named(stream, "native_layer_norm") if o.phase == "backward"]
    assert recomputed, "a checkpoint's forward pass runs again within the backward pass"
    assert {o.inputs[0].dtype for o in named(stream, "addmm")} == {"bfloat16", "float32"}


BY_HAND = """
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
for step in range(3):
    loss = torch.tanh(model(torch.randn(8, 4))).sum()
    model.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1 * (step + 1))
    print(sum(p.sum() for p in model.parameters()).item().hex())
"""


@pytest.mark.parametrize("step", [0, pytest.param(1, marks=pytest.mark.whole), 2])
def test_a_step_by_hand_has_its_operations(tmp_path: Path, step: int) -> None:
    """The forward pass before the backward one, and the update behind it, are there, with the step's own signals."""
    out, _, _ = run(tmp_path, BY_HAND, None)
    recorded, errors, code = run(tmp_path, BY_HAND, step)
    assert (recorded, code) == (out, 0) and "repro:" not in errors, errors
    stream = read_stream(tmp_path / "operations" / NAME)
    assert stream.problem == ""
    shown = [o.arguments for o in stream.operations if o.name == OBSERVED]
    assert [name.split()[0] for name in shown].count("grad") == 1 and any("update" in name for name in shown)
    first, last = named(stream, "tanh")[0].index, named(stream, "tanh_backward")[-1].index
    update = [o.arguments for o in named(stream, "add_") if o.index > last]
    assert first < last and len(update) == 2 and all(f"{-0.1 * (step + 1)}" in arguments for arguments in update)


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["kernels", "scaler", "accumulation", "nested", "ranks"])
@pytest.mark.parametrize("step", [0, 2])
def test_recording_changes_no_bit(tmp_path: Path, name: str, step: int) -> None:
    """Every program of the recorder of signals prints what it prints alone: scalers, foreach, LBFGS, DDP and FSDP2."""
    launcher = TORCHRUN if name == "ranks" else ()
    text = PROGRAMS[name].replace("int(sys.argv[1])", "2")
    out, _, code = run(tmp_path, text, None, launcher)
    recorded, errors, recorded_code = run(tmp_path, text, step, launcher)
    assert (recorded, recorded_code) == (out, code) and code == 0 and "sha256" in out
    assert "not recorded" not in errors
    streams = [read_stream(path) for path in sorted((tmp_path / "operations").glob("rank-*.jsonl"))]
    assert [(s.rank, s.problem) for s in streams] == [(k, "") for k in range(2 if name == "ranks" else 1)]
    assert all(o.phase for s in streams for o in s.operations)
    assert all(any(o.phase == "backward" for o in s.operations) for s in streams)


@pytest.mark.campaign
def test_a_fork_in_the_recorded_step(tmp_path: Path) -> None:
    """A child that is forked in the middle, and goes on with torch, writes nothing into the parent's stream."""
    out, _, _ = run(tmp_path, MIXED, None)
    fork = "child = os.fork()\n    if not child:\n        torch.ones(3).sum()\n        os._exit(0)\n"
    fork += "    os.waitpid(child, 0)\n"
    text = MIXED.replace("    torch.nn.utils.clip", f"    {fork}    torch.nn.utils.clip")
    recorded, _, code = run(tmp_path, text, 1)
    assert recorded == out and code == 7
    stream = read_stream(tmp_path / "operations" / NAME)
    assert stream.problem == "" and sorted(p.name for p in (tmp_path / "operations").iterdir()) == FILES
    whole = (tmp_path / "operations" / NAME).read_text().splitlines()
    assert len(whole) == len({(k, line) for k, line in enumerate(whole)}) and all(json.loads(line) for line in whole)


@pytest.mark.campaign
def test_a_disk_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    """The program goes on as if nobody recorded, and exits as it would."""
    out, _, _ = run(tmp_path, MIXED, None)
    (tmp_path / "operations").write_text("in the way")
    recorded, errors, code = run(tmp_path, MIXED, 1)
    assert (recorded, code) == (out, 7)
    told = [line for line in errors.splitlines() if line.startswith("repro:")]
    assert len(told) == 1 and "operations of step 1 are not recorded" in told[0]


def test_memory_that_was_freed_is_forgotten(tmp_path: Path) -> None:
    """What lay at the address of a new tensor before is neither its content, nor is its maker the new one's.

    `torch.tensor`, NumPy and data loaders fill memory unseen. Which one they get is chance elsewhere than here, so that
    two recordings of one program differed.
    """
    memory = np.zeros(8, np.float32)
    with recording(tmp_path):
        for k in range(5):
            made = torch.from_numpy(memory)
            made.fill_(k)
            del made
            memory[:] = -k - 1
            torch.from_numpy(memory)
    read = [o.inputs[0] for o in named(read_stream(tmp_path / NAME), "lift_fresh")]  # the first look at each
    values = [0.0, -1.0, -1.0, -2.0, -2.0, -3.0, -3.0, -4.0, -4.0, -5.0]
    assert [value.content for value in read] == [lanes(torch.full((8,), value)) for value in values]
    assert not any(value.makers for value in read)

"""Operations recorded on a GPU: a flag that changes a kernel is named, and no bit of the step changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from repro_bisect.explain.cause import find_cause
from repro_golden.fingerprint import content, fingerprints, scan
from repro_golden.recording.operations.recorder import OperationRecorder
from repro_golden.recording.operations.stream import Stream, kept_of, read_stream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)
    return torch.nn.Sequential(*layers).cuda()


def trained(module: torch.nn.Module, loss_of: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """One AdamW step; all that it leaves."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    torch.manual_seed(1)
    loss = loss_of(module(torch.randn(64, 256, device="cuda")))
    torch.autograd.backward([loss])
    optimizer.step()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return [*module.parameters(), *grads, loss.detach()]


def recorded(folder: Path, loss_of: Callable[[Tensor], Tensor]) -> tuple[Stream, list[str]]:
    recorder = OperationRecorder(folder, str(folder), 0)
    recorder.open()
    module = model()
    recorder.begin()
    states = trained(module, loss_of)
    recorder.pause()
    recorder.close()
    return read_stream(folder / "rank-00000.jsonl"), fingerprints(states)


def test_a_recorded_step_has_the_bits_of_a_plain_one(tmp_path: Path) -> None:
    """Parameters, gradients and loss are those of the same step without the recorder; all has a content and a phase."""
    stream, trace = recorded(tmp_path, lambda y: y.square().mean())
    assert trace == fingerprints(trained(model(), lambda y: y.square().mean()))
    assert not stream.problem
    assert {o.phase for o in stream.operations} == {"forward", "backward", "optimizer"}
    assert all(o.forward is not None for o in stream.operations if o.name == "aten.gelu_backward.default")


def test_contents_are_the_lanes_of_the_tensors(tmp_path: Path) -> None:
    """What a matrix product is said to read is the fingerprint of its operand, also of a transposed view."""
    recorder = OperationRecorder(tmp_path, str(tmp_path), 0)
    recorder.open()
    a, b = (torch.randn(size, device="cuda").bfloat16()[1:] for size in ((333, 6500), (18, 6500)))
    recorder.begin()
    c = a @ b.t()
    recorder.pause()
    recorder.close()
    product = next(o for o in read_stream(tmp_path / "rank-00000.jsonl").operations if o.name == "aten.mm.default")
    lanes = [scan(t).lanes for t in (a, b.t(), c)]
    assert [v.content for v in (*product.inputs, *product.outputs)] == [f"{x.a:016x}{x.b:016x}" for x in lanes]


@pytest.mark.parametrize("size", [3, 1 << 20])
def test_a_copy_on_its_way_to_the_host_is_read_when_it_is_there(tmp_path: Path, size: int) -> None:
    """What `to("cpu", non_blocking=True)` is said to make is what it read, however late the GPU makes it."""
    recorder = OperationRecorder(tmp_path, str(tmp_path), 0)
    recorder.open()
    there = torch.randn(size, device="cuda")
    recorder.begin()
    torch.cuda._sleep(1 << 30)
    there.to("cpu", non_blocking=True)
    recorder.pause()
    recorder.close()
    (copy,) = read_stream(tmp_path / "rank-00000.jsonl").operations
    assert [v.content for v in copy.inputs] == [v.content for v in copy.outputs]


def test_nothing_is_recorded_in_a_capture(tmp_path: Path) -> None:
    """It would become part of the graph. The stream says why it ends there."""
    recorder = OperationRecorder(tmp_path, str(tmp_path), 0)
    recorder.open()
    x = torch.zeros(8, device="cuda")
    recorder.begin()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
    recorder.pause()
    recorder.close()
    graph.replay()
    assert x.tolist() == [1.0] * 8
    assert "CUDA graph" in str(read_stream(tmp_path / "rank-00000.jsonl").problem)


def test_a_flag_that_changes_a_kernel_is_named(tmp_path: Path) -> None:
    """With TF32 switched on, the first matrix product reads the same bits and makes others."""
    before, _ = recorded(tmp_path / "a", lambda y: y.square().mean())
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        after, _ = recorded(tmp_path / "b", lambda y: y.square().mean())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    cause = find_cause(before, after, None)
    assert cause is not None
    assert (cause.kind, cause.operation.name) == ("operation", "aten.addmm.default")
    assert cause.operation.module == "Sequential.0"


def test_a_cast_in_the_loss_is_named(tmp_path: Path) -> None:
    """A loss that is computed in bf16 begins with the cast, and the two products can be measured against each other."""
    before, _ = recorded(tmp_path / "a", lambda y: functional.mse_loss(y, torch.zeros_like(y)))
    after, _ = recorded(
        tmp_path / "b", lambda y: functional.mse_loss(y.bfloat16(), torch.zeros_like(y).bfloat16()).float()
    )
    cause = find_cause(before, after, None)
    assert cause is not None
    assert (cause.kind, cause.operation.name) == ("structure", "aten._to_copy.default")


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
def test_small_results_are_kept(tmp_path: Path, inference: bool) -> None:
    """Of a small result the bytes are kept as they were when it was made, whatever is written over it afterwards."""
    recorder = OperationRecorder(tmp_path, str(tmp_path), 0)
    recorder.open()
    side = torch.cuda.Stream()
    with torch.inference_mode(mode=inference):
        a = torch.randn(39, 7, device="cuda")
        recorder.begin()
        b = a * 3
        expected = {"mul": b.cpu()}
        b.add_(1)
        expected["add_"] = b.cpu()
        b.zero_()
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            c = torch.neg(a.t())
            d = torch.isnan(c)
        side.synchronize()
        recorder.pause()
    large = torch.ones(1 << 14, device="cuda")
    recorder.begin()
    large = large + 1
    recorder.pause()
    recorder.close()
    expected |= {"neg": c.cpu(), "isnan": d.cpu()}
    stream = read_stream(tmp_path / "rank-00000.jsonl")
    assert not stream.problem
    by_name = {o.name.split(".")[1]: kept_of(stream, o) for o in stream.operations}
    assert {name: by_name[name] for name in expected} == {name: content(t).tobytes() for name, t in expected.items()}
    assert kept_of(stream, stream.operations[-1]) is None

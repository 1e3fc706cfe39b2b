"""What the recorder of operations sees: modes, threads, kinds of tensors, small results, bytes from elsewhere."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from operations_kit import NAME, lanes, named, recording

from repro_bisect.explain.cause import find_cause
from repro_golden.fingerprint import content, tensors
from repro_golden.recording.operations.recorder import OperationRecorder
from repro_golden.recording.operations.stream import kept_of, read_stream


@pytest.mark.parametrize("compiled", [True, False], ids=["", "without numba"])
def test_small_results_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """Of a small result the bytes are kept as they were when it was made, by whatever it was read."""
    tensors._kernel.cache_clear()
    if not compiled:
        monkeypatch.setitem(sys.modules, "repro_golden.fingerprint.backends._numba", None)
    try:
        with recording(tmp_path):
            a = torch.arange(6.0).reshape(2, 3)
            b = torch.neg(a.t())
            expected = [content(b).tobytes(), content(b + 1).tobytes()]
            b.add_(1)
            b.zero_()
            large = torch.ones(1 << 14).exp()
    finally:
        tensors._kernel.cache_clear()
    stream = read_stream(tmp_path / NAME)
    kept = [kept_of(stream, named(stream, name)[0]) for name in ("neg", "add_", "exp")]
    assert kept == [*expected, None]
    assert large.nbytes == 1 << 16


def test_what_runs_in_inference_mode_is_recorded(tmp_path: Path) -> None:
    """As the rest: a reference model's log-probabilities are often computed there. Such tensors count no versions."""
    with recording(tmp_path), torch.inference_mode():
        a = torch.arange(6.0) * 2
        first = lanes(a)
        a.add_(1)
        b = a.exp()
        a.view(2, 3)[0].zero_()
        c = a.neg()
    stream = read_stream(tmp_path / NAME)
    assert not stream.problem
    assert named(stream, "mul")[0].outputs[0].content == first
    assert named(stream, "exp")[0].outputs[0].content == lanes(b)
    (neg,) = named(stream, "neg")
    assert [value.content for value in (*neg.inputs, *neg.outputs)] == [lanes(a), lanes(c)]


def test_parameters_that_have_no_shape_yet(tmp_path: Path) -> None:
    """Lazy modules get their parameters in the first forward pass: what is done before is no operation of numbers."""
    with recording(tmp_path):
        model = torch.nn.LazyLinear(3)
        out = model(torch.ones(2, 4))
    stream = read_stream(tmp_path / NAME)
    assert not stream.problem
    assert named(stream, "addmm")[0].outputs[0].content == lanes(out)


class Labelled(torch.Tensor):
    """A subclass without a way of its own to compute."""


def test_subclasses_that_wrap_nothing(tmp_path: Path) -> None:
    """Such a tensor is one as all others."""
    with recording(tmp_path):
        out = torch.ones(3).as_subclass(Labelled) * 2
    stream = read_stream(tmp_path / NAME)
    assert not stream.problem
    assert named(stream, "mul")[0].outputs[0].content == lanes(out.as_subclass(torch.Tensor))


def test_a_step_that_another_thread_ends(tmp_path: Path) -> None:
    """A mode is one thread's own, so of a training in another than the first little is seen: the stream says so."""
    recorder = OperationRecorder(tmp_path, str(tmp_path), 0)
    recorder.open()
    recorder.begin()
    thread = threading.Thread(target=recorder.pause)
    thread.start()
    thread.join()
    recorder.__exit__(None, None, None)
    recorder.close()
    assert read_stream(tmp_path / NAME).problem == "the step began in one thread and ended in another"


def test_small_results_of_one_content_and_several_sizes(tmp_path: Path) -> None:
    """A few zeros more, or of another dtype, may have the same content: each result has the bytes of its own size."""
    made = [torch.zeros(n, dtype=dtype) for n in (1, 15, 16) for dtype in (torch.float32, torch.float16)]
    with recording(tmp_path):
        expected = [content(torch.abs(tensor)).tobytes() for tensor in made]
    stream = read_stream(tmp_path / NAME)
    results = named(stream, "abs")
    assert len({o.outputs[0].content for o in results}) == 3
    assert [kept_of(stream, o) for o in results] == expected


def test_bytes_that_no_tensor_held(tmp_path: Path) -> None:
    """A tensor is opened on a storage that came from elsewhere, as a data loader's: no operation is to blame for it."""
    streams = []
    for k in range(2):
        storage = torch.full((4,), 1.0 + k).untyped_storage()
        with recording(tmp_path / str(k)):
            torch.empty(0).set_(storage, 0, (4,)).square()
        streams.append(read_stream(tmp_path / str(k) / NAME))
    cause = find_cause(*streams, None)
    assert cause is not None
    assert (cause.kind, cause.operation.name) == ("inputs", "aten.set_.source_Storage_storage_offset")


def test_an_operation_is_known_again_by_what_it_was_asked(tmp_path: Path) -> None:
    """The same call with the same inputs is; another one under its number is not, nor one that makes another shape."""
    with recording(tmp_path):
        a = torch.ones(3)
        for _ in range(2):
            a.mul(2)
        a.mul(3)
        torch.ones(4).mul(2)
    first, second, other, wider = named(read_stream(tmp_path / NAME), "mul")
    assert first.asked == second.asked
    assert first.asked not in (other.asked, wider.asked)

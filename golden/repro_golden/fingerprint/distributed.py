"""DTensors, and tensors that only look like one: what this process holds of them, and where it belongs."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from repro_golden.base.errors import ReproError
from repro_golden.fingerprint.placement import Part, Placement, steps_of

__all__ = ["local_of", "missing"]


def local_of(tensor: torch.Tensor) -> tuple[torch.Tensor, Placement | None]:
    """The plain tensor in this process, and its placement where it is a part of a larger one.

    Raises:
        ReproError: a tensor without one content to speak of (sparse, quantized, meta, a wrapper), or a DTensor whose
            sum over ranks is still to be made; the message says what to observe.
    """
    kind = type(tensor)
    if kind.__module__.startswith("torch.distributed.tensor") and kind.__name__ == "DTensor":
        return _dtensor(tensor)
    return _plain(tensor), None


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that has bytes of its own, as one of torch's own class."""
    kind = type(tensor)
    if tensor.is_nested:
        raise ReproError("a nested tensor is several: observe each of its unbind()")
    if tensor.layout != torch.strided:
        raise ReproError(f"a {tensor.layout} tensor has no row-major content: observe its to_dense()")
    if tensor.is_quantized:
        raise ReproError("a quantized tensor is several: observe its int_repr(), scales and zero points")
    if tensor.device.type == "meta":
        raise ReproError("a meta tensor has no content: observe it once it is on a device")
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        inner = getattr(tensor, "__tensor_flatten__", None)
        names = f"its parts ({', '.join(inner()[0])})" if callable(inner) else "the plain tensors it holds"
        raise ReproError(f"a {kind.__name__} is a wrapper around other tensors: observe {names}")
    if missing(tensor):
        raise ReproError(
            "a tensor's memory was given back (a sharded parameter between uses): observe it while it is there"
        )
    if kind is torch.Tensor:
        return tensor.detach()
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def missing(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is not there: FSDP gives back that of sharded parameters between uses."""
    there = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    count = tensor.numel()
    if there >= count:  # enough, unless steps are larger than they need to be
        return not tensor.is_contiguous() and _reach(tensor) > there
    return bool(count) and _reach(tensor) > there


def _reach(tensor: torch.Tensor) -> int:
    return sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def _dtensor(tensor: Any) -> tuple[torch.Tensor, Placement]:
    local, shape, mesh = tensor.to_local(), tuple(tensor.shape), tensor.device_mesh
    if hasattr(local, "wait"):
        local = local.wait()
    local = _plain(local)
    coordinate = mesh.get_coordinate()
    cut: dict[int, list[list[range]]] = {}  # of a dimension, what is here of each piece that another cut is to part
    for dim, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise ReproError(
                "a DTensor with partial sums has no content yet: observe its redistribute() or full_tensor()"
            )
        if coordinate is not None and hasattr(placement, "dim"):
            pieces = cut.get(placement.dim, [[range(shape[placement.dim])]])
            ranks, rank = mesh.size(dim), coordinate[dim]
            if (factor := getattr(placement, "split_factor", 1)) > 1:
                # it was cut so often before (FSDP over tensor parallel), by dimensions that come later in the mesh
                pieces = [_chunks(part, ranks)[rank] for piece in pieces for part in _chunks(piece, factor)]
            elif len(pieces) > 1 and len(pieces) % ranks == 0:  # such a dimension: its pieces are there already
                several = len(pieces) // ranks
                pieces = pieces[rank * several : (rank + 1) * several]
            else:
                pieces = [_chunks([run for piece in pieces for run in piece], ranks)[rank]]
            cut[placement.dim] = pieces
    ranges = {dim: [run for piece in pieces for run in piece] for dim, pieces in cut.items()}
    size = (
        tuple(_count(ranges[d]) if d in ranges else n for d, n in enumerate(shape)) if coordinate is not None else (0,)
    )
    if size != tuple(local.shape) and (coordinate is not None or local.numel()):
        raise ReproError(
            f"a DTensor holds {list(local.shape)} here where its placements say {list(size)}: observe full_tensor()"
        )
    segments = [_segments(ranges[d]) if d in ranges else [(0, 0, n)] for d, n in enumerate(shape)]
    step, to = steps_of(size), steps_of(shape)
    parts = []
    for chosen in itertools.product(*segments) if local.numel() else ():
        start = sum(here * s for (here, _, _), s in zip(chosen, step, strict=True))
        at = sum(there * t for (_, there, _), t in zip(chosen, to, strict=True))
        parts.append(Part("", shape, tuple(n for _, _, n in chosen), start, step, at, to))
    if not parts:  # nothing is here: an empty part still says of which tensor
        parts.append(Part("", shape, (0,), 0, (1,), 0, (1,)))
    return local, Placement(tuple(local.shape), tuple(parts))


def _count(index: list[range]) -> int:
    return sum(map(len, index))


def _chunks(index: list[range], count: int) -> list[list[range]]:
    """`torch.chunk`, with the empty chunks it leaves out."""
    size = -(-_count(index) // count)
    return [_slice(index, k * size, (k + 1) * size) for k in range(count)]


def _slice(index: list[range], start: int, stop: int) -> list[range]:
    runs = []
    for run in index:
        runs.append(run[max(0, start) : max(0, stop)])
        start, stop = start - len(run), stop - len(run)
    return [run for run in runs if run]


def _segments(index: list[range]) -> list[tuple[int, int, int]]:
    """Runs of neighbours: where each begins here and there, and how long it is."""
    segments: list[tuple[int, int, int]] = []
    here = 0
    for run in index:
        if segments and run.start == segments[-1][1] + segments[-1][2]:
            segments[-1] = (*segments[-1][:2], segments[-1][2] + len(run))
        else:
            segments.append((here, run.start, len(run)))
        here += len(run)
    return segments

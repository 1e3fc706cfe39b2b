"""The weights that a rollout engine holds, as the canonical tensors that it takes: read, changed, and brought again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from repro_golden.fingerprint.placement import Part, read

if TYPE_CHECKING:
    from torch import Tensor

    from repro_golden.recording.weight_pieces import Held

__all__ = ["moved", "perturbed", "prints", "to_bring", "vocabulary"]

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _placed(held: Sequence[Held]) -> Iterator[tuple[str, Part]]:
    """All parts of canonical tensors, each with the engine's own name of the tensor that it lies in."""
    for process in held:
        for own, placement in process.placements.items():
            for part in read(placement).parts:
                yield own, part


def to_bring(held: Sequence[Held]) -> dict[str, Tensor]:
    """Copies of the canonical tensors, with which all that has a placement can be filled again."""
    from repro_golden.recording.weight_pieces import canonical_tensors

    found = canonical_tensors(held)
    if any(own == _HEAD and part.name == _EMBEDDING for own, part in _placed(held)):
        found[_HEAD] = found[_EMBEDDING]  # a matrix of its own, to be brought although they are tied
    return found


def perturbed(tensors: Mapping[str, Tensor], scale: float, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of floating point with normal noise of a standard deviation of `scale` added, in its own dtype."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            yield name, tensor
            continue
        noise = torch.randn(tensor.shape, generator=generator) * scale
        yield name, (tensor.float() + noise).to(tensor.dtype)


def prints(held: Sequence[Held]) -> dict[str, str]:
    """Fingerprints of all that the processes hold, by ``process/name``."""
    from repro_golden.fingerprint import fingerprint

    return {
        f"{number}/{name}": fingerprint(tensor)
        for number, process in enumerate(held)
        for name, tensor in process.tensors.items()
    }


def moved(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Names whose fingerprints are not what they were."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def vocabulary(held: Sequence[Held]) -> int | None:
    """How many ids the embedding knows; None where the engine holds none."""
    return next((part.shape[0] for own, part in _placed(held) if (part.name or own) == _EMBEDDING), None)

"""The weights that a rollout engine holds, as the canonical tensors that it takes: read, changed, and brought again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from repro_golden.fingerprint.placement import Placement, read

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Held", "canonical", "moved", "perturbed", "prints", "vocabulary"]

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Held(Protocol):
    """What one process of an engine holds: `repro_core.rollout.engine.HeldWeights`.

    Attributes:
        tensors: By the engine's own names.
        placements: Which canonical tensors each of them holds, as plain data; of some there is none.
    """

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...  # noqa: D102 - see the class
    @property
    def placements(self) -> Mapping[str, Any]: ...  # noqa: D102


def _placed(held: Held) -> Iterator[tuple[str, Tensor, Placement]]:
    for name, raw in held.placements.items():
        if raw is not None:
            yield name, held.tensors[name], read(raw)


def canonical(held: Sequence[Held]) -> dict[str, Tensor]:
    """Copies of the canonical tensors, put together from the parts that the processes hold; without gradients."""
    import torch

    found: dict[str, Tensor] = {}
    for process in held:
        for own, tensor, placement in _placed(process):
            flat = tensor.detach().contiguous().flatten()
            for part in placement.parts:
                name = part.name or own
                whole = found.setdefault(name, torch.zeros(part.shape, dtype=tensor.dtype))
                there = whole.view(-1).as_strided(part.size, part.to, part.at)
                there.copy_(flat.as_strided(part.size, part.step, part.start))
                if own == _HEAD and name == _EMBEDDING:  # a matrix of its own, to be brought although they are tied
                    found[_HEAD] = whole
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
    """How many ids the embedding knows; None where the engine has none of the canonical name."""
    for process in held:
        for own, _, placement in _placed(process):
            for part in placement.parts:
                if (part.name or own) == _EMBEDDING:
                    return part.shape[0]
        if _EMBEDDING in process.tensors:
            return int(process.tensors[_EMBEDDING].shape[0])
    return None

"""Checks of what a rollout engine holds: it must outlive released memory, follow an update, and come back after it.

Two things are compared, what the engine samples and every tensor that it shows: either alone is a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from repro_golden.base.errors import ReproError
from repro_golden.engine_checks.findings import Answer, Engine, Likeness, Made, NotApplicableError, Plan, compare, said
from repro_golden.fingerprint.placement import Part, read

if TYPE_CHECKING:
    from torch import Tensor

    from repro_golden.recording.weight_pieces import Held

__all__ = ["FAULTS", "WeightChecks", "moved", "perturbed", "prints", "to_bring", "vocabulary"]


# -- the weights that a rollout engine holds, as the canonical tensors that it takes: read, changed, and brought again

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _placed(held: Sequence[Held]) -> Iterator[tuple[str, Part]]:
    """All parts of canonical tensors, each with the engine's own name of the tensor that it lies in."""
    for process in held:
        for name, placement in process.placements.items():
            for part in read(placement).parts:
                yield name, part


def to_bring(held: Sequence[Held]) -> dict[str, Tensor]:
    """Copies of the canonical tensors, with which all that has a placement can be filled again."""
    from repro_golden.recording.weight_pieces import canonical_tensors

    tensors = canonical_tensors(held)
    if any(name == _HEAD and part.name == _EMBEDDING for name, part in _placed(held)):
        tensors[_HEAD] = tensors[_EMBEDDING]  # a matrix of its own, to be brought although they are tied
    return tensors


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
    return next((part.shape[0] for name, part in _placed(held) if (part.name or name) == _EMBEDDING), None)


# -- checks of what a rollout engine holds: it must outlive released memory, follow an update, and come back after it

FAULTS = (ValueError, RuntimeError, OSError, ReproError)
"""What an engine's methods raise; `EngineError` is a ValueError."""


@dataclass
class WeightChecks:
    """The checks of one engine's memory and weights.

    Attributes:
        engine: It.
        plan: What is sampled.
        sample: Samples all prompts at temperature 0; the argument says whether the prefix cache is kept.
        base: What that gave before anything was done to the engine.
    """

    engine: Engine
    plan: Plan
    sample: Callable[[bool], list[Answer]]
    base: Callable[[], list[Answer]]
    _half_updated: bool = False

    def memory(self) -> Made:
        """Before and after its memory was released. Canonical tensors that it says it lost are brought again."""
        if not self.engine.separate:
            raise NotApplicableError("its memory is the trainer's own: there is nothing to release")
        base, why = self.base(), ""
        before: dict[str, str] = {}
        tensors: dict[str, Tensor] = {}
        gone: list[str] = []
        try:
            held = self.engine.held()
            before, tensors = prints(held), to_bring(held)
        except FAULTS as error:
            why = f"; its weights could not be compared: {error}"
        if not before and not why:
            why = "; it shows no weights that could be compared"
        self.engine.release_memory()
        self.engine.resume_memory()
        if before and (lost := moved(before, prints(self.engine.held()))):
            self.engine.update(tensors.items(), self.engine.weight_version)
            why = f"; {_count(len(lost), 'tensor')} did not survive it and {_were(len(lost))} brought again"
            if gone := moved(before, prints(self.engine.held())):
                why += f", which left {_count(len(gone), 'tensor')} changed: {_names(gone)}"
        likeness = self._likeness(base, self.sample(False))
        return Made(
            likeness, said(likeness, "before and after its memory was released") + why, "differs" if gone else None
        )

    def update(self) -> Made:
        """Other weights must give other responses."""
        likeness = self._changed[0]
        if likeness.equal:
            return Made(likeness, "the update changed nothing: all bits are those of the old weights")
        return Made(
            likeness, f"other weights give other responses to {likeness.differing} of {likeness.prompts} prompts"
        )

    def reversal(self) -> Made:
        """The old weights, brought again, must give the old responses."""
        _, likeness, left = self._changed
        why = f"; {_count(len(left), 'tensor')} not as before: {_names(left)}" if left else ""
        return Made(
            likeness, said(likeness, "before an update and after its reversal") + why, "differs" if left else None
        )

    @cached_property
    def _changed(self) -> tuple[Likeness, Likeness, list[str]]:
        """With changed weights, and with the old ones again; with the tensors that are not as they were."""
        if not self.engine.separate:
            raise NotApplicableError("its weights are the trainer's own: there is nothing to bring")
        if self._half_updated:
            raise ValueError("not made: the update before it failed")
        base, version = self.base(), self.engine.weight_version
        held = self.engine.held()
        before, tensors = prints(held), to_bring(held)
        if not tensors:
            raise ValueError("the engine does not say which canonical tensors it holds")
        self._half_updated = True
        try:
            self.engine.update(perturbed(tensors, self.plan.scale, self.plan.seed), f"{version}-changed")
            # no flush here: an engine must forget by itself what it computed with other weights
            other = self._likeness(base, self.sample(True))
        finally:
            self.engine.update(tensors.items(), version)
        left = moved(before, prints(self.engine.held()))
        return other, self._likeness(base, self.sample(True)), left

    def _likeness(self, base: Sequence[Answer], other: Sequence[Answer]) -> Likeness:
        return compare(list(range(self.plan.prompts)), base, other)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

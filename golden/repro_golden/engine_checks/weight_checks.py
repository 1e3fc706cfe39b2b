"""Checks of what a rollout engine holds: it must outlive released memory, follow an update, and come back after it.

Two things are compared, what the engine samples and every tensor that it shows: either alone is a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from repro_golden.base.errors import ReproError
from repro_golden.engine_checks.difference import Answer, Likeness, compare
from repro_golden.engine_checks.findings import Made, NotApplicableError, said
from repro_golden.engine_checks.plan import Engine, Plan
from repro_golden.engine_checks.weights import moved, perturbed, prints, to_bring

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FAULTS", "WeightChecks"]

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
        kept: dict[str, Tensor] = {}
        gone: list[str] = []
        try:
            held = self.engine.held()
            before, kept = prints(held), to_bring(held)
        except FAULTS as error:
            why = f"; its weights could not be compared: {error}"
        self.engine.release_memory()
        self.engine.resume_memory()
        if before and (lost := moved(before, prints(self.engine.held()))):
            self.engine.update(kept.items(), self.engine.weight_version)
            why = f"; {_count(len(lost), 'tensor')} did not survive it and {_were(len(lost))} brought again"
            if gone := moved(before, prints(self.engine.held())):
                why += f", which left {_count(len(gone), 'tensor')} changed: {_names(gone)}"
        found = self._likeness(base, self.sample(False))
        return Made(found, said(found, "before and after its memory was released") + why, "differs" if gone else None)

    def update(self) -> Made:
        """Other weights must give other responses."""
        found = self._changed[0]
        if found.equal:
            return Made(found, "the update changed nothing: all bits are those of the old weights")
        return Made(found, f"other weights give other responses to {found.differing} of {found.prompts} prompts")

    def reversal(self) -> Made:
        """The old weights, brought again, must give the old responses."""
        _, found, left = self._changed
        why = f"; {_count(len(left), 'tensor')} not as before: {_names(left)}" if left else ""
        return Made(found, said(found, "before an update and after its reversal") + why, "differs" if left else None)

    @cached_property
    def _changed(self) -> tuple[Likeness, Likeness, list[str]]:
        """With changed weights, and with the old ones again; with the tensors that are not as they were."""
        if not self.engine.separate:
            raise NotApplicableError("its weights are the trainer's own: there is nothing to bring")
        if self._half_updated:
            raise ValueError("not made: the update before it failed")
        base, version = self.base(), self.engine.weight_version
        held = self.engine.held()
        before, kept = prints(held), to_bring(held)
        if not kept:
            raise ValueError("the engine does not say which canonical tensors it holds")
        self._half_updated = True
        try:
            self.engine.update(perturbed(kept, self.plan.scale, self.plan.seed), f"{version}-changed")
            # no flush here: an engine must forget by itself what it computed with other weights
            other = self._likeness(base, self.sample(True))
        finally:
            self.engine.update(kept.items(), version)
        left = moved(before, prints(self.engine.held()))
        return other, self._likeness(base, self.sample(True)), left

    def _likeness(self, one: Sequence[Answer], other: Sequence[Answer]) -> Likeness:
        return compare(list(range(self.plan.prompts)), one, other)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

"""Backward passes that no optimizer has made a step of, in a program that has optimizers: it may step by hand.

What such steps change is read where the program goes on or ends, so it is kept alive until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from repro_golden.fingerprint.kinds import PLAIN_TENSORS
from repro_golden.recording.attach.alive.names import Names
from repro_golden.recording.attach.alive.readable import GIVEN_BACK, readable, unreadable
from repro_golden.recording.attach.alive.readings import Reading, is_leaf
from repro_golden.recording.attach.by_hand import ByHand
from repro_golden.recording.attach.by_identity import ByIdentity

__all__ = ["Passes"]

_PREFIX = "leaf/by_hand/"
_FIRST = 2
"""Steps of a training whose passes are all looked through: what both meet is no input."""


class Passes:
    """Those since the last step of an optimizer.

    The graph of a pass is looked through in the first steps, and where there were never as many before one.

    Args:
        names: Of parameters; asked while the modules that have them are alive.
        met: Gives every optimizer that has made a step, as long as it is alive, and its label.
    """

    def __init__(self, names: Names, met: Mapping[int, tuple[Callable[[], Any], str]]) -> None:
        self._names, self._met = names, met
        self._count = self._usual = self._most = self._steps = 0
        self._optimizers: Sequence[Any] = ()
        self._trained: tuple[torch.Tensor, ...] = ()  # a list of tensors would pass for a copy of a model
        self._made: set[str] = set()
        self._met_before = ByIdentity[bool]()

    @property
    def unusual(self) -> bool:
        """Whether there were more than before any other step: some may have been stepped by hand."""
        return self._count > self._most

    def optimizer_made(self, optimizer: Any, *, copied: bool) -> None:
        """The program has made an optimizer, or a copy of one: what is usual begins anew, as another training may."""
        self._made.add(type(optimizer).__name__)
        self._usual = self._steps = 0
        if copied:  # it takes the place of one that is gone
            self._optimizers = ()

    def of_optimizers(self) -> list[torch.Tensor]:
        """The parameters of those that have made steps."""
        there = [self._names.held(o) for known, _ in self._met.values() if (o := known()) is not None]
        return [p for held in there for p in held.parameters.values()]

    def passed(self, given: Iterable[Any], *, inner: bool) -> None:
        """A pass was made.

        Args:
            given: What it began at, or the leaves whose gradients were asked for.
            inner: Whether it is part of another, as that of a checkpoint.
        """
        self._count += not inner
        self._optimizers = [o for known, _ in self._met.values() if (o := known()) is not None]
        if self._steps < _FIRST or self._count + inner > self._usual:
            self._keep(_leaves(given))

    def _keep(self, leaves: Sequence[torch.Tensor]) -> None:
        """Keep parameters, and of other leaves those that were met before: one that was not may be an input."""
        plain = [leaf for leaf in leaves if type(leaf) is torch.Tensor]
        again = [leaf for leaf in plain if self._met_before.get(leaf)]
        for leaf in plain:
            self._met_before.put(leaf, True)
        kept = {id(p): p for p in self._trained if not again or type(p) is not torch.Tensor}
        kept |= {id(p): p for p in leaves if type(p) is not torch.Tensor} | {id(p): p for p in again}
        if kept.keys() != set(map(id, self._trained)):
            self._trained = tuple(kept.values())
            self._names.held(ByHand([*self._trained], {}))

    def stepped(self) -> None:
        """A step was made and read: what optimizers hold that have made steps is theirs."""
        if self._trained:
            held = set(map(id, self.of_optimizers()))
            self._trained = tuple(p for p in self._trained if id(p) not in held)
        self._usual, self._most = max(self._usual, self._count), max(self._most, self._count)
        self._steps += 1
        self._count, self._optimizers = 0, ()

    def beside(
        self,
        readings: Iterable[tuple[str, Reading]],
        parameters: Iterable[torch.Tensor],
        unread: dict[str, str],
        *,
        end: bool,
    ) -> Iterator[tuple[str, Reading]]:
        """What is read beside optimizers, and behind it what got gradients and is read nowhere else.

        Args:
            readings: The former.
            parameters: What the optimizers hold that have made steps.
            unread: Takes why something is not read, by name.
            end: Whether the program has ended. Before, this is read once, where passes may have kept something new.
        """
        if not self._trained or not (end or self._count > self._usual):
            yield from readings
            return
        read = set(map(id, parameters))
        for prefix, reading in readings:
            read.update(map(id, reading.tensors.values()))
            yield prefix, reading
        # FSDP takes the memory away of what it had gathered
        left = [p for p in self._trained if id(p) not in read and unreadable(p) != GIVEN_BACK]
        self._trained = tuple(p for p in self._trained if id(p) in read)
        hand = ByHand(left, {})
        yield _PREFIX, readable(_PREFIX, self._names.held(hand).weights(), unread)

    def unread(self) -> dict[str, str]:
        """What to say of those that no step followed."""
        if not self._count:
            return {}
        passes = "1 backward pass" if self._count == 1 else f"{self._count} backward passes"
        return {f"{passes} after the last step": "no optimizer made a step of them"}

    def idle(self) -> str:
        """Why there is no step, in a program whose optimizers never made one; '' where there was no pass either."""
        if not self._count or not self._made:
            return ""
        passes = "1 backward pass was" if self._count == 1 else f"{self._count} backward passes were"
        return (
            f"{passes} made, and no step of {' or '.join(sorted(self._made))} was seen: let what makes the steps "
            "derive from torch.optim.Optimizer, and give that to the schedule (a step by hand beside an optimizer of "
            "torch's, or one put in the place of its own, is not seen)"
        )


def _leaves(given: Iterable[Any]) -> list[torch.Tensor]:
    """What got a gradient by a pass from these; those that are leaves stand for themselves."""
    found = [item for item in given if isinstance(item, torch.Tensor) and is_leaf(item)]
    # what is given may be an edge: a node, and a number
    stack = [getattr(item, "grad_fn", None) or getattr(item, "node", None) or item for item in given]
    met = set[Any]()
    while stack:
        node = stack.pop()
        if node in met or not hasattr(node, "next_functions"):
            continue
        met.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found += [node.variable] if node.variable.grad is not None else []
        else:
            stack += [inner for inner, _ in node.next_functions]
    return [leaf for leaf in found if type(leaf) in PLAIN_TENSORS]

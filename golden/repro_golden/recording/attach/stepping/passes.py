"""Backward passes that no optimizer has made a step of, in a program that has optimizers: it may step by hand.

What such steps may have changed last is read when the program ends, of what it has not let go of by then.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from repro_golden.fingerprint.kinds import PLAIN_TENSORS
from repro_golden.recording.attach.alive.names import Names
from repro_golden.recording.attach.alive.readable import GIVEN_BACK, readable, unreadable
from repro_golden.recording.attach.alive.readings import Reading, gradients_of, is_leaf
from repro_golden.recording.attach.base.by_identity import ByIdentity, id_of
from repro_golden.recording.attach.process import place_of
from repro_golden.recording.attach.stepping.by_hand import ByHand

__all__ = ["Passes"]

_PREFIX = "leaf/by_hand/"
_FIRST = 2
"""Steps of a training whose passes are looked through."""
_NODES = 300_000
"""Nodes of graphs that are looked at, in all of a process: a program may make optimizers as long as it runs."""


class Passes:
    """Those since the last step of an optimizer.

    Nothing is kept alive. What parameters passes train that no optimizer holds is known of the first steps; of what the
    program has let go of before it ends, and of passes that nobody looked through, it is told that there were some.

    Args:
        names: Of parameters; asked while the modules that have them are alive.
        met: Gives every optimizer that has made a step, as long as it is alive, and its label.
    """

    def __init__(self, names: Names, met: Mapping[int, tuple[Callable[[], Any], str]]) -> None:
        self._names, self._met = names, met
        self._count = self._most = self._steps = self._before = 0
        self._nodes = _NODES
        self._known: list[weakref.ref[torch.Tensor]] = []
        self._made: set[str] = set()
        self._begun: bool | None = False
        self._first = True  # whether the pass under way is one of the first steps'
        self._all, self._all_at = 0, ByIdentity[int]()  # also what is no pass here, and how many before an optimizer's
        self._waiting: list[weakref.ref[Any]] = []  # optimizers that have made no step

    @property
    def unusual(self) -> bool:
        """Whether there were more than before any other step: some may have been stepped by hand."""
        return self._count > self._most

    def since(self, optimizer: Any) -> bool:
        """Whether there was one since an optimizer was made, or it is not known when that was.

        Those before a step of another that left it without gradients are not its, where they reach nothing else.
        """
        return self._all > (self._all_at.get(optimizer) or 0)

    @property
    def begun(self) -> bool | None:
        """Whether any since the last step begins another; None where it only asked for gradients.

        They may be there to be logged, or for a step that the program makes of them.
        """
        return self._begun

    def optimizer_made(self, optimizer: Any) -> None:
        """The program has made an optimizer, or a copy of one: another training begins."""
        self._made.add(type(optimizer).__name__)
        with contextlib.suppress(TypeError):  # a class that cannot be referred to weakly
            self._all_at.put(optimizer, self._all)
            self._waiting.append(weakref.ref(optimizer))
        self._before += self._count if self._steps else 0
        self._count = self._steps = 0
        self._begun = False

    def inside(self) -> None:
        """Gradients were made as a part of something else, such as a loss or `torch.func.grad`."""
        self._all += 1

    def by_closure(self) -> None:
        """A closure is about to make a step's passes: what was asked for before belongs to none of it."""
        self._begun = True

    def of_optimizers(self) -> list[torch.Tensor]:
        """The parameters of those that have made steps."""
        there = [self._names.held(o) for known, _ in self._met.values() if (o := known()) is not None]
        return [p for held in there for p in held.parameters.values()]

    def begins(self) -> None:
        """A pass begins that is inside of no other, and with it a step, which is made inside of it or behind it."""
        self._begun, self._first = True, self._steps < _FIRST

    def passed(self, given: Iterable[Any], *, inner: bool = False, asked: bool = False, stepped: bool = False) -> None:
        """A pass was made. One that only asks for gradients of inputs, to look at them, trains nothing and is none.

        One in which hooks have made steps has made them: it begins none.

        Args:
            given: What it began at, or the leaves whose gradients were asked for.
            inner: Whether it is part of another, as that of a checkpoint.
            asked: Whether they are such leaves: the pass has left nothing in ``grad``.
            stepped: Whether optimizers have made steps inside of it.
        """
        if asked and self._steps:
            held = set(map(id_of, self.of_optimizers()))
            if all(type(leaf) is torch.Tensor and id_of(leaf) not in held for leaf in given):
                return
        self._all += 1
        if not (inner or stepped):
            self._count += 1
            self._begun = self._begun or (None if asked else True)
        self._known = [known for known in self._known if known() is not None]  # gone before this pass: no part of it
        first = self._first if stepped else self._steps < _FIRST
        if first and self._nodes > 0:
            there = {id_of(known()) for known in self._known} | set(map(id_of, self.of_optimizers() if stepped else ()))
            new = {id_of(p): p for p in self._parameters(given) if id_of(p) not in there}
            self._known += map(weakref.ref, new.values())
            if new:
                self._names.held(ByHand([*new.values()], {}))

    def _parameters(self, given: Iterable[Any]) -> list[torch.Tensor]:
        """Those that got a gradient by a pass from these: another leaf may be an input, or be sent by a stage."""
        leaves = [item for item in given if isinstance(item, torch.Tensor) and is_leaf(item)]
        # what is given may be an edge: a node, and a number
        stack = [getattr(item, "grad_fn", None) or getattr(item, "node", None) or item for item in given]
        met = set[Any]()
        while stack and self._nodes > 0:
            node = stack.pop()
            if node in met or not hasattr(node, "next_functions"):
                continue
            met.add(node)
            self._nodes -= 1
            if type(node).__name__ == "AccumulateGrad":
                leaves += [node.variable] if node.variable.grad is not None else []
            else:
                stack += [inner for inner, _ in node.next_functions]
        return [leaf for leaf in leaves if type(leaf) in PLAIN_TENSORS and type(leaf) is not torch.Tensor]

    def stepped(self) -> None:
        """A step was made and read: what optimizers hold that have made steps is theirs."""
        if self._known:
            held = set(map(id_of, self.of_optimizers()))
            self._known = [known for known in self._known if (p := known()) is not None and id_of(p) not in held]
        if not self._known and self._nodes > 0:  # else the program may still put gradients where they belong
            self._pass_over()
        self._most = max(self._most, self._count)
        self._steps += 1
        self._count = 0
        self._begun = False

    def _pass_over(self) -> None:
        """The passes so far are not those of optimizers that wait without gradients; where ranks part, nobody knows."""
        self._waiting = [known for known in self._waiting if (o := known()) is not None and id_of(o) not in self._met]
        for optimizer in (known() for known in self._waiting if place_of()[1] == 1):
            if optimizer is not None and not gradients_of(optimizer):
                self._all_at.put(optimizer, self._all)

    def let_go(self, *tensors: torch.Tensor) -> Callable[[], None]:
        """Refer to none of some tensors, whose content is exchanged; what is returned takes them up again."""
        ids = set(map(id_of, tensors))
        mine = [p for known in self._known if (p := known()) is not None and id_of(p) in ids]
        self._known = [known for known in self._known if id_of(known()) not in ids]
        return lambda: self._known.extend(map(weakref.ref, mine))

    def beside(
        self,
        readings: Iterable[tuple[str, Reading]],
        parameters: Iterable[torch.Tensor],
        unread: dict[str, str],
        *,
        end: bool,
    ) -> Iterator[tuple[str, Reading]]:
        """What is read beside optimizers, and behind it, at the end, what may be trained and is read nowhere else.

        Args:
            readings: The former.
            parameters: What the optimizers hold that have made steps.
            unread: Takes why something is not read, by name.
            end: Whether the program has ended.
        """
        trained = [p for known in self._known if (p := known()) is not None]
        if not trained or not end:
            yield from readings
            return
        read = set(map(id_of, parameters))
        for prefix, reading in readings:
            read.update(map(id_of, reading.tensors.values()))
            yield prefix, reading
        # FSDP takes the memory away of what it had gathered
        left = [p for p in trained if id_of(p) not in read and unreadable(p) != GIVEN_BACK]
        hand = ByHand(left, {})
        yield _PREFIX, readable(_PREFIX, self._names.held(hand).weights(), unread)

    def unread(self) -> dict[str, str]:
        """What to say of those that no step followed, and of what they trained and nobody has any more."""
        counts = {f"{_passes(self._count)} after the last step": self._count}
        counts[f"{_passes(self._before)} after the last step of a training before"] = self._before
        out = {text: "no optimizer made a step of them" for text, count in counts.items() if count}
        if self._nodes <= 0:
            out["what backward passes train beside optimizers"] = "their graphs were too large to be looked through"
        if gone := sum(known() is None for known in self._known):
            what = f"{gone} parameter{'s' * (gone != 1)} that no optimizer holds and the last backward pass may train"
            out[what] = "the program had let go of them when it ended"
        return out

    def idle(self) -> str:
        """Why there is no step, in a program whose optimizers never made one; '' where there was no pass either."""
        if not self._count or not self._made:
            return ""
        were = "was" if self._count == 1 else "were"
        return (
            f"{_passes(self._count)} {were} made, and no step of {' or '.join(sorted(self._made))} was seen: let what "
            "makes the steps derive from torch.optim.Optimizer, and give that to the schedule (a step by hand beside "
            "an optimizer of torch's, or one put in the place of its own, is not seen)"
        )


def _passes(count: int) -> str:
    return f"{count} backward pass{'es' * (count != 1)}"

"""Optimizers that make no step now: a critic's that was trained first, and all of them when the program has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from repro_golden.recording.attach.alive.readings import Held, Reading, Tensors, learning_rates
from repro_golden.recording.attach.base.by_identity import id_of
from repro_golden.recording.attach.base.settings import Settings

__all__ = ["left", "resting"]

Met = Iterable[tuple[Callable[[], Any], str]]


def resting(
    met: Met,
    last: Mapping[str, int],
    step: int,
    held_of: Callable[[Any], Held],
    settings: Settings,
    *,
    late: bool = False,
) -> Iterator[tuple[str, Reading]]:
    """What they hold, by the prefix of its names. One whose parameters another has taken over is none.

    Args:
        met: Every optimizer that has made a step, as long as it is alive, and its label.
        last: By label, the last step that it made.
        step: The step under way.
        held_of: What an optimizer holds.
        settings: How to record.
        late: Whether all that make no step now have missed their turn: they may have been stepped by hand.
    """
    there = [(label, reference()) for reference, label in met]
    alive = sorted(((label, o) for label, o in there if o is not None), key=lambda pair: pair[0])
    if len(alive) < 2:
        return
    missed = [step - last.get(label, step) > (0 if late else len(alive)) for label, _ in alive]
    taken = [o for (_, o), behind in zip(alive, missed, strict=True) if not behind]
    stepping = {id_of(p) for o in taken for p in held_of(o).parameters.values()}
    for number, ((_, optimizer), behind) in enumerate(zip(alive, missed, strict=True)):
        held = held_of(optimizer)
        if behind and not stepping.issuperset(map(id_of, held.parameters.values())):
            for kind, reading in held.kinds(state=settings.state_after(step)):
                yield f"resting/{number}/{kind}", reading


def left(met: Met, held_of: Callable[[Any], Held], unread: dict[str, str]) -> Iterator[tuple[str, Reading]]:
    """What all that are alive hold when the program has ended, by the prefix of its names.

    Args:
        met: Every optimizer that has made a step, as long as it is alive, and its label.
        held_of: What an optimizer holds.
        unread: Takes that none is alive.
    """
    there = list(met)
    # of those alike the last: when others are collected is no part of the program
    alive = {label: o for reference, label in there if (o := reference()) is not None}
    if there and not alive:
        unread["the weights at the end"] = "the program had let go of its optimizers when it ended"
    for k, (_, optimizer) in enumerate(sorted(alive.items())):
        prefix = f"optimizer.{k}/" if k else ""
        for kind, reading in held_of(optimizer).kinds():
            yield prefix + kind, reading
        rates = Tensors((n, torch.as_tensor(r, dtype=torch.float64)) for n, r in learning_rates(optimizer).items())
        yield prefix, Reading(rates, {})

"""Optimizers that made steps before and have missed their turn, such as a critic's that was trained first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from repro_golden.recording.attach.alive.readings import Held, Reading
from repro_golden.recording.attach.settings import Settings

__all__ = ["resting"]


def resting(
    met: Iterable[tuple[Callable[[], Any], str]],
    last: Mapping[str, int],
    step: int,
    held_of: Callable[[Any], Held],
    settings: Settings,
) -> Iterator[tuple[str, Reading]]:
    """What they hold, by the prefix of its names. One whose parameters another has taken over is none.

    Args:
        met: Every optimizer that has made a step, as long as it is alive, and its label.
        last: By label, the last step that it made.
        step: The step under way.
        held_of: What an optimizer holds.
        settings: How to record.
    """
    there = [(label, reference()) for reference, label in met]
    alive = sorted(((label, o) for label, o in there if o is not None), key=lambda pair: pair[0])
    if len(alive) < 2:
        return
    late = [step - last.get(label, step) > len(alive) for label, _ in alive]
    taken = [o for (_, o), behind in zip(alive, late, strict=True) if not behind]
    stepping = {id(p) for o in taken for p in held_of(o).parameters.values()}
    for number, ((_, optimizer), behind) in enumerate(zip(alive, late, strict=True)):
        held = held_of(optimizer)
        if behind and not stepping.issuperset(map(id, held.parameters.values())):
            for kind, reading in held.kinds(state=settings.state_after(step)):
                yield f"resting/{number}/{kind}", reading

"""Changing or writing out one signal as it passes, under its canonical name.

A canonical tensor may lie in several local ones, on several ranks, and a local one may hold parts of several. The
planted change is made to its first element, by whoever holds that: one owner, or all replicas alike, so that replicas
do not part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from repro_golden.base.errors import ReproError
from repro_golden.fingerprint import content
from repro_golden.fingerprint.distributed import local_of
from repro_golden.fingerprint.placement import Part, read, whole
from repro_golden.recording.pieces import At, Piece, box

__all__ = ["Tap", "perturbed_by_one_ulp"]


# -- the negative control of a golden run: the smallest change there is, planted in the child


def perturbed_by_one_ulp(value: torch.Tensor) -> Callable[[], None]:
    """Move the first element by one unit in the last place, in place; of a complex number its real part.

    Returns:
        What takes it back, where it is still as it was left.

    Raises:
        ReproError: a value that cannot be changed in place.
    """
    if value.numel() == 0:
        raise ReproError("the negative control needs a tensor with an element")
    with torch.no_grad():
        first = value.detach()[(0,) * value.dim()]  # wherever it lies
        before = first.clone()
        if first.is_complex():
            parts = torch.view_as_real(first.clone().resolve_conj())
            perturbed_by_one_ulp(parts)
            first.copy_(torch.view_as_complex(parts))
        elif first.is_floating_point() and first.element_size() == 1:  # of which torch knows no neighbours
            first.view(torch.uint8).bitwise_xor_(1)
        elif first.is_floating_point():
            first.copy_(torch.nextafter(first, torch.full_like(first, float("inf"))))
        else:
            first.copy_(first + 1)
        planted = first.clone()

    def take_back() -> None:
        now, then = (each.reshape(1).view(torch.uint8) for each in (first, planted))
        if torch.equal(now, then):
            with torch.no_grad():
                first.copy_(before)

    return take_back


# -- changing or writing out one signal as it passes, under its canonical name


class Tap:
    """Plants a change of one ULP in one signal, and writes others out.

    Args:
        perturbation: ``[step, phase, name]`` of the signal to change before it is fingerprinted.
        dump: ``[step, phase, name]`` of the signals whose whole content is wanted.
        keep: Takes the pieces of such a signal that one tensor holds.
        rank: Of this process, where there are several: ``NAME@RANK`` means the signal of that rank alone.
    """

    def __init__(
        self,
        perturbation: Sequence[Any] | None,
        dump: Iterable[Sequence[Any]],
        keep: Callable[[At, list[Piece]], None],
        rank: int | None = None,
    ) -> None:
        self._perturbation = None if perturbation is None else tuple(perturbation)
        self._dump = {tuple(wanted) for wanted in dump}
        self._keep, self._rank = keep, rank
        self._steps = {at[0] for at in self._dump} | ({self._perturbation[0]} if self._perturbation else set())

    def take(self, step: int, phase: str, name: str, value: object, placement: Any = None) -> None:
        """Look at what is observed; arguments as `Signals.take` has them."""
        if step not in self._steps:
            return
        group = value if isinstance(value, Mapping) else {"": value}
        where = placement if isinstance(value, Mapping) else {"": placement}
        for key, tensor in group.items():
            if isinstance(tensor, torch.Tensor):
                self._look(step, phase, name + key, tensor, where and where.get(key))

    def _look(self, step: int, phase: str, name: str, tensor: torch.Tensor, placement: Any) -> None:
        local, dtensor_placement = local_of(tensor)
        placed = dtensor_placement or whole("", tuple(local.shape)) if placement is None else read(placement)
        by_name = itertools.groupby(sorted(placed.parts, key=lambda part: part.name), lambda part: part.name or name)
        for canonical, parts in ((part_name, list(group)) for part_name, group in by_name):
            every = [(step, phase, canonical)]
            every += [] if self._rank is None else [(step, phase, f"{canonical}@{self._rank}")]
            if self._perturbation in every:
                _perturb(local, parts)
            for at in every:
                if at in self._dump:
                    self._keep(at, list(_pieces(local, parts)))


def _perturb(local: torch.Tensor, parts: Iterable[Part]) -> None:
    for part in parts:
        if part.elements and part.at == 0:
            index = np.unravel_index(part.start, tuple(local.shape)) if local.ndim else ()
            perturbed_by_one_ulp(local[tuple(int(i) for i in index)])
            return


def _pieces(local: torch.Tensor, parts: Iterable[Part]) -> Iterator[Piece]:
    raw = content(local)
    for part in parts:
        if part.elements:
            held = box(raw, raw.nbytes // local.numel(), part.start, part.size, part.step)
            yield Piece(part.shape, part.size, part.at, part.to, held.tobytes())

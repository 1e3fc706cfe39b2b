"""The negative control of a golden run: the smallest change there is, planted in the child."""

from __future__ import annotations

import torch

from repro_golden.base.errors import ReproError

__all__ = ["perturbed_by_one_ulp"]


def perturbed_by_one_ulp(value: torch.Tensor) -> None:
    """Move the first element by one unit in the last place, in place.

    Raises:
        ReproError: a value that cannot be changed in place.
    """
    flat = value.detach().view(-1) if value.is_contiguous() else None
    if flat is None or flat.numel() == 0:
        raise ReproError("the negative control needs a non-empty contiguous tensor")
    with torch.no_grad():
        if flat.is_floating_point():
            flat[0] = torch.nextafter(flat[0], torch.full_like(flat[0], float("inf")))
        else:
            flat[0] = flat[0] + 1

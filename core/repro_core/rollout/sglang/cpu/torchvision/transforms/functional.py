"""Stand-in for changing pictures: the one class that others subclass and list."""

from __future__ import annotations

import enum

from torchvision.absent import absent as __getattr__

__all__ = ["InterpolationMode", "__getattr__"]


class InterpolationMode(enum.Enum):
    """Torchvision's names."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"

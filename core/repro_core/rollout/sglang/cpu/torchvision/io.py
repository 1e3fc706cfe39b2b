"""Stand-in for reading pictures."""

from __future__ import annotations

from torchvision.absent import absent as __getattr__

__all__ = ["__getattr__"]

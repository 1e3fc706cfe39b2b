"""Stand-in for torchvision, which SGLang imports and calls only for pictures."""

from __future__ import annotations

from repro_sglang_cpu import only_without_gpu

only_without_gpu("torchvision")

from torchvision import io, transforms  # noqa: E402 - not before the refusal

__all__ = ["io", "transforms"]
__version__ = "0.0.0"

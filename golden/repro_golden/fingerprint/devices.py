"""Which backend reads the tensors of a device."""

from __future__ import annotations

import functools
import warnings

import torch

from repro_golden.fingerprint import gpu
from repro_golden.fingerprint.backends import Backend
from repro_golden.fingerprint.cpu import Cpu

__all__ = ["backend_for", "gpu_ready"]


@functools.cache
def gpu_ready(device: torch.device) -> bool:
    """Whether Triton works here; where it does not, one warning says why and the CPU path serves."""
    try:
        gpu.check(device)
    except Exception as error:  # noqa: BLE001 - Triton, the driver and the compiler fail in many ways
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        warnings.warn(f"fingerprints of {device} tensors are made on the CPU ({reason})", RuntimeWarning, stacklevel=2)
        return False
    return True


def backend_for(device: torch.device) -> Backend:
    """The backend that reads tensors of `device` where they lie; the CPU for those of devices without one."""
    if device.type == "cuda" and gpu_ready(device):
        return gpu.Gpu(device)
    return Cpu()

"""One tensor's content: its bytes in row-major order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from repro_golden.fingerprint.distributed import local_of
from repro_golden.fingerprint.views import carried

__all__ = ["content"]


def content(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A tensor's row-major bytes [nbytes], without a copy where it is contiguous on the CPU."""
    if type(tensor) is not torch.Tensor:
        tensor, _ = local_of(tensor)
    tensor = carried(tensor.detach()).resolve_conj().resolve_neg().to("cpu").contiguous().reshape(-1)
    if not tensor.numel():
        return np.empty(0, np.uint8)
    if tensor.numel() == 1:  # torch calls any stride of one element contiguous, and view() does not
        tensor = tensor.as_strided((1,), (1,))
    return tensor.view(torch.uint8).numpy()

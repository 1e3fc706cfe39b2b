"""The plugin that SGLang loads in each of its processes, and the rule that all stand-ins keep."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["only_without_gpu", "register"]

_ROWS = 16


def only_without_gpu(name: str) -> None:
    """Refuse where torch sees a GPU.

    Raises:
        ImportError: it does.
    """
    if torch.cuda.is_available():
        raise ImportError(
            f"{name} is repro's stand-in for machines without a GPU, and this one has a GPU: install the real package, "
            "and take the folder repro_core/rollout/sglang/cpu off sys.path"
        )


def register() -> None:
    """What SGLang calls before it reads its arguments, through the entry point beside this file."""
    only_without_gpu("repro_sglang_cpu")
    import sglang.srt.batch_invariant_ops as operators
    from sglang.srt.arg_groups import choices
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    if "torch_native" not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        choices.add_deterministic_attention_backend_choices(["torch_native"])
    # SGLang calls it in deterministic mode alone, so padding comes and goes with that mode.
    operators.enable_batch_invariant_mode = _pad_products
    ALLOC_MEMORY_FUNCS["cpu"] = _host_memory


def _pad_products(*_: Any, **__: Any) -> None:
    """Replace torch's products of matrices by ones whose number of rows is a multiple of 16.

    A BLAS picks its kernel, and with it the order of a row's sum, by the number of rows; above a multiple of 16 rows
    the remainder goes through another one.
    """
    linear, matmul = torch.nn.functional.linear, torch.matmul

    def padded_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's name
        if input.dim() != 2 or input.shape[0] % _ROWS == 0:
            return linear(input, weight, bias)
        return linear(_padded(input), weight, bias)[: input.shape[0]]

    def padded_matmul(input: Tensor, other: Tensor, **rest: Any) -> Tensor:  # noqa: A002 - torch's name
        if input.dim() != 2 or other.dim() != 2 or input.shape[0] % _ROWS == 0 or rest:
            return matmul(input, other, **rest)
        return matmul(_padded(input), other)[: input.shape[0]]

    torch.nn.functional.linear = padded_linear
    torch.matmul = padded_matmul


def _host_memory(shape: tuple[int, ...], dtype: torch.dtype, *_: Any, **__: Any) -> Tensor:
    """Where captured experts are kept: SGLang would register the memory with CUDA."""
    return torch.empty(shape, dtype=dtype)


def _padded(rows: Tensor) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % _ROWS))

"""What is read of an optimizer after its step, by name."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["gradients", "learning_rates", "state"]

Tensors = dict[str, torch.Tensor]

_NOTHING: dict[Any, Any] = {}


def gradients(parameters: Tensors) -> Tensors:
    """The gradients that there are. Sparse ones as their indices and values, for `to_dense` would allocate."""
    out: Tensors = {}
    for name, parameter in parameters.items():
        grad = parameter.grad
        if grad is None:
            continue
        if grad.layout == torch.sparse_coo:
            out |= {f"{name}.indices": grad._indices(), f"{name}.values": grad._values()}
        else:
            out[name] = grad
    return out


def state(optimizer: Any, parameters: Tensors) -> dict[str, Tensors]:
    """Tensors of the optimizer's state by kind, then by parameter."""
    out: dict[str, Tensors] = {}
    states = optimizer.state
    for name, parameter in parameters.items():
        for kind, value in states.get(parameter, _NOTHING).items():
            if isinstance(value, torch.Tensor):
                held = out.get(kind)
                if held is None:
                    held = out[kind] = {}
                held[name] = value
    return {str(kind): out[kind] for kind in sorted(out, key=str)}


def learning_rates(optimizer: Any) -> dict[str, float | torch.Tensor]:
    """``lr`` of the first group, ``lr/K`` of the others."""
    rates = {f"lr/{k}" if k else "lr": group.get("lr") for k, group in enumerate(optimizer.param_groups)}
    numbers = {name: float(rate) for name, rate in rates.items() if isinstance(rate, (int, float))}
    return numbers | {name: rate for name, rate in rates.items() if isinstance(rate, torch.Tensor)}

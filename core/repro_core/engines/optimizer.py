"""AdamW over fp32 main weights, with fp32 gradient accumulation and global-norm clipping.

In fp32 the model's parameters are the main weights. In bf16 the model keeps bf16 weights, each with an fp32 main
weight and an fp32 gradient; after an update the model gets the main weights rounded to nearest even.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.optim.adamw import adamw

if TYPE_CHECKING:
    from torch import Tensor

    from repro_core.config import TrainConfig

__all__ = ["MainOptimizer", "clip_grads", "global_norm", "step_counts"]

CLIP_EPS = 1e-6
"""Added to the norm before dividing, as torch and Megatron do."""


def global_norm(grads: dict[str, Tensor]) -> Tensor:
    """L2 norm over all gradients; fp32 scalar.

    Order: per parameter `torch.sum` of the fp32 squares; these sums are added one by one in ascending order of the
    parameters' names; then one square root. No gradients: 0. Squares beyond fp32 (|g| > 1.8e19) give inf.
    """
    total = torch.zeros((), dtype=torch.float32)
    for name in sorted(grads):
        total = total + grads[name].float().square().sum().to(total.device)
    return total.sqrt()


def clip_grads(grads: dict[str, Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place so that their global norm is at most `max_norm`; the norm before that is returned.

    ``g *= max_norm / (norm + 1e-6)`` where that factor is below 1. With ``max_norm = 0`` nothing is scaled. A norm that
    is not finite scales nothing either: inf would silently turn finite gradients into zeros, and this way a broken
    gradient arrives in the weights, where it is seen.
    """
    norm = global_norm(grads)
    if max_norm > 0 and bool(torch.isfinite(norm)):
        factor = max_norm / (norm + CLIP_EPS)
        if bool(factor < 1.0):
            for grad in grads.values():
                grad.mul_(factor)
    return norm


def step_counts(counts: Iterable[Tensor]) -> dict[str, Tensor]:
    """What an optimizer's counts of steps are shown as: the different ones, ascending, under ``step``.

    Each weight has its own, and where all is well they are one number, on every rank and in every layout. The next
    update's bias correction rests on it.
    """
    held = list(counts)
    return {"step": torch.unique(torch.stack(held))} if held else {}


class MainOptimizer:
    """AdamW by torch's functional form (foreach and fused off: one parameter after the other) over fp32 main weights.

    Weight decay is decoupled and applies to every parameter. The class `torch.optim.AdamW` does the same arithmetic,
    but making one imports the compiler, which a trainer that compiles nothing need not wait for.

    Args:
        parameters: ``(name, parameter)`` as from ``named_parameters()``; all of one dtype, fp32 or bf16.
        config: lr, betas, adam_eps, weight_decay.
    """

    main: dict[str, Tensor]
    """The fp32 weight of each parameter; in fp32 the model's own."""
    main_grad: dict[str, Tensor]
    """The fp32 gradient accumulated since `zero_grad`; a parameter that no graph reached has none."""

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], config: TrainConfig) -> None:
        self.model = dict(parameters)
        self.main = {
            name: p if p.dtype == torch.float32 else p.detach().float().clone() for name, p in self.model.items()
        }
        self.main_grad = {}
        self.config = config
        self._state = {
            kind: {name: torch.zeros_like(w, requires_grad=False) for name, w in self.main.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        }
        self._state["step"] = {name: torch.zeros((), dtype=torch.float32) for name in self.main}

    def moments(self, kind: str) -> dict[str, Tensor]:
        """``exp_avg``, ``exp_avg_sq`` or ``step`` of each parameter: the tensors themselves."""
        return self._state[kind]

    def zero_grad(self) -> None:
        """Forget the gradients of the last update."""
        self.main_grad = {}
        for parameter in self.model.values():
            parameter.grad = None

    def accumulate(self) -> None:
        """Add the gradients of one micro-batch's backward to the fp32 sums, in the order of the calls."""
        for name, parameter in self.model.items():
            if parameter.grad is None:
                continue
            grad = parameter.grad.float()
            if name in self.main_grad:
                self.main_grad[name].add_(grad)
            else:
                self.main_grad[name] = grad
            parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """The accumulated fp32 gradients in the order of the parameters: what `step` will use, so change them here.

        A parameter that no graph reached has gradient 0: it keeps its moments' decay, as in one big batch.
        """
        for name, weight in self.main.items():
            if name not in self.main_grad:
                self.main_grad[name] = torch.zeros_like(weight, requires_grad=False)
        return {name: self.main_grad[name] for name in self.main}

    @torch.no_grad()
    def step(self) -> None:
        """One AdamW update of the main weights from `gradients`; `publish` brings it to the model."""
        state = {kind: list(tensors.values()) for kind, tensors in self._state.items()}
        adamw(
            list(self.main.values()),
            list(self.gradients().values()),
            state["exp_avg"],
            state["exp_avg_sq"],
            [],
            state["step"],
            foreach=False,
            fused=False,
            amsgrad=False,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            lr=self.config.lr,
            weight_decay=self.config.weight_decay,
            eps=self.config.adam_eps,
            maximize=False,
        )

    @torch.no_grad()
    def publish(self) -> None:
        """Round the main weights into the model's. In fp32 they are one and the same."""
        for name, parameter in self.model.items():
            if parameter is not self.main[name]:
                parameter.copy_(self.main[name])

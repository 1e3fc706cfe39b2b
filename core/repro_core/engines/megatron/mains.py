"""What a rank's optimizer holds of each parameter: the fp32 weight, its gradient and moments, whole or a slice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Main", "mains", "prime"]


@dataclass(frozen=True)
class Main:
    """One parameter, or the slice of it that this rank updates.

    Attributes:
        name: the parameter's in its model chunk.
        parameter: the model's own.
        main: the fp32 weight that is updated; in fp32 the parameter, or a view of it.
        part: the slice of the flattened parameter that `main` is; None for all of it.
        optimizer: torch's, which holds the moments.
    """

    name: str
    parameter: torch.nn.Parameter
    main: Tensor
    part: tuple[int, int] | None
    optimizer: torch.optim.Optimizer

    @property
    def gradient(self) -> Tensor:
        """The fp32 sum over micro-batches and ranks, which is what the step will read."""
        whole: Tensor = self.parameter.main_grad  # type: ignore[attr-defined]
        return whole if self.part is None else whole.view(-1)[slice(*self.part)]

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the optimizer keeps of it: the moments, and the number of steps where each weight has its own."""
        state = self.optimizer.state[self.main]
        return tuple(kind for kind in ("exp_avg", "exp_avg_sq", "step") if kind in state)

    def moment(self, kind: str) -> Tensor:
        """One of `kinds`: the tensor itself."""
        value: Tensor = self.optimizer.state[self.main][kind]
        return value


def mains(optimizer: Any, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> list[Main]:
    """What Megatron's optimizer holds of these parameters, in their order; those it holds nothing of are left out.

    Args:
        optimizer: of ``megatron.core.optimizer``: fp32, mixed precision, distributed, or a chain of these.
        parameters: name and parameter.
    """
    held: dict[torch.nn.Parameter, tuple[Tensor, tuple[int, int] | None, torch.optim.Optimizer]] = {}
    for inner in _inner(optimizer):
        held |= {parameter: (main, part, inner.optimizer) for parameter, main, part in _mains(inner)}
    return [Main(name, parameter, *held[parameter]) for name, parameter in parameters if parameter in held]


def prime(optimizer: Any) -> None:
    """Give every weight the state that Adam would make in its first step, so that it can be shown and saved.

    Torch's counts the steps of each weight, Transformer Engine's those of a group.
    """
    for inner in _inner(optimizer):
        for group in inner.optimizer.param_groups:
            for weight in group["params"]:
                state = inner.optimizer.state[weight]
                if not state:
                    if isinstance(inner.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                        state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(weight, requires_grad=False)
                    state["exp_avg_sq"] = torch.zeros_like(weight, requires_grad=False)


def _inner(optimizer: Any) -> Iterator[Any]:
    for chained in getattr(optimizer, "chained_optimizers", [optimizer]):
        if chained is not optimizer and hasattr(chained, "chained_optimizers"):
            yield from _inner(chained)
        elif not getattr(chained, "is_stub_optimizer", False):
            yield chained


def _mains(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, Tensor, tuple[int, int] | None]]:
    if hasattr(optimizer, "model_param_group_index_map"):  # distributed: each rank has slices
        for parameter, (group, number) in optimizer.model_param_group_index_map.items():
            where = optimizer._get_model_param_range_map(parameter)["param"]
            main = optimizer.optimizer.param_groups[group]["params"][number]
            yield parameter, main, (where.start, where.end)
    elif hasattr(optimizer, "float16_groups"):
        pairs = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
        for parameters, mains in pairs:
            yield from ((p, main, None) for p, main in zip(parameters, mains, strict=True))
        for group in optimizer.fp32_from_fp32_groups:
            yield from ((p, p, None) for p in group)
    else:
        for group in optimizer.optimizer.param_groups:
            yield from ((p, p, None) for p in group["params"])

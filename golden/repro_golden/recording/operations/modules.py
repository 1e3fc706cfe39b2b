"""Which module's forward pass is under way."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

__all__ = ["Modules"]


class Modules:
    """Follows forward passes by torch's global module hooks, which only look.

    A path starts with the class of the outermost module: ``Policy.model.layers.0.mlp``.
    """

    def __init__(self) -> None:
        self._under_way: list[str] = []
        self._names: WeakKeyDictionary[nn.Module, dict[int, str]] = WeakKeyDictionary()
        self._outermost: nn.Module | None = None
        self._hooks: list[Any] = []

    @property
    def path(self) -> str:
        """Of the innermost module under way; "" between passes."""
        return self._under_way[-1] if self._under_way else ""

    def follow(self) -> None:
        """Begin."""
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def let_go(self) -> None:
        """End."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._under_way.clear()

    def _enter(self, module: nn.Module, _: object) -> None:
        if not self._under_way or self._outermost is None:
            self._outermost = module
        self._under_way.append(self._name(self._outermost, module))

    def _leave(self, *_: object) -> None:
        if self._under_way:
            self._under_way.pop()

    def _name(self, outermost: nn.Module, module: nn.Module) -> str:
        names = self._names.get(outermost)
        if names is None:
            names = {id(inner): name for name, inner in outermost.named_modules()}
            self._names[outermost] = names
        own = names.get(id(module))
        if own is None:  # made, or attached, during the pass
            own = type(module).__name__
        return f"{type(outermost).__name__}.{own}" if own else type(outermost).__name__

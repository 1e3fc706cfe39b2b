"""Outputs of modules and their gradients, for the modules that the user names."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules import module as modules

__all__ = ["Activations"]


class Activations:
    """Forward hooks on modules whose path fits a glob, and tensor hooks on what they return.

    Not full-backward hooks of modules, which break in-place operations. What is computed without gradients, in a
    compiled region, or again in the backward pass by activation checkpointing is left out.

    Args:
        globs: Of module paths; a root's path is ''.
        session: Takes the signals.
        untraced: Keeps the compiler out of a function.
    """

    def __init__(
        self, globs: Sequence[str], session: Any, untraced: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._globs, self._session = globs, session
        self._take = untraced(lambda module, output: self._harmless(module, output))

    def watch(self) -> None:
        """Hook all modules of this process; those that fit no glob cost a look-up each call."""
        modules.register_module_forward_hook(self._called)

    def _called(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._take(module, output)

    def _harmless(self, module: torch.nn.Module, output: Any) -> None:
        try:
            self._observe(module, output)
        except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
            self._session.fail(error)

    def _observe(self, module: torch.nn.Module, output: Any) -> None:
        name = self._session.names.of_module(module)
        if not any(fnmatch.fnmatchcase(name, glob) for glob in self._globs):
            return
        backward = torch._C._current_graph_task_id() != -1
        for key, tensor in _tensors(output, f"{name}.output" if name else "output"):
            if backward and self._session.seen("forward", key):
                continue
            self._session.observe("forward", key, tensor.detach())
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self._gradient(key))  # type: ignore[no-untyped-call]

    def _gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda gradient: self._session.observe("grad", name, gradient.detach())


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in what a module returned: itself, or those in tuples, lists and mappings, by position or key."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for k, item in enumerate(value):
            yield from _tensors(item, f"{name}.{k}")

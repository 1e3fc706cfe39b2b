"""What keeps the recorder's failures from the program, and the program's modes from the recorder."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from repro_golden.base.audit import of_a_handler

__all__ = ["harmless", "without_collection"]

F = TypeVar("F", bound=Callable[..., Any])


def harmless(method: F) -> F:
    """Let nothing that goes wrong in a method reach the program, and record no gradient of what it does."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.dead:
            return None
        before = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            # modes of the program must not see what is done here
            with self.lock, _disable_current_modes(), torch._C.DisableTorchFunction():
                return method(self, *args, **kwargs)
        except Exception as error:
            if of_a_handler(error):
                self.dead = True
                raise
            self.fail(error)
        except BaseException:  # ctrl-C, in the middle of a step
            self.dead = True
            raise
        finally:
            # one call of C, which no signal handler can interrupt; leaving `torch.no_grad()` is many
            torch._C._set_grad_enabled(before)

    return call  # type: ignore[return-value]


def without_collection(method: F) -> F:
    """Keep the garbage collector from running in a method that makes many objects and drops them again."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not gc.isenabled():
            return method(*args, **kwargs)
        gc.disable()
        try:
            return method(*args, **kwargs)
        finally:
            gc.enable()

    return call  # type: ignore[return-value]

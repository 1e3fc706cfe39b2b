"""The recorder's code in the program's: failures and modes are kept apart, and a wrapper passes for what it wraps."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from repro_golden.base.machine.audit import of_a_handler
from repro_golden.fingerprint.in_flight import captures
from repro_golden.recording.attach.base.streams import join

__all__ = ["at_rest", "harmless", "stand_in"]

F = TypeVar("F", bound=Callable[..., Any])


def harmless(method: F) -> F:
    """Let nothing that goes wrong in a method reach the program, and record no gradient of what it does.

    While a CUDA graph is captured it does nothing: what is asked of the GPU would become part of the graph, or end it.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.dead or captures():
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


def at_rest(method: F) -> F:
    """Let nothing else be at work in a method that reads.

    What other streams of a GPU have to do is done before. The garbage collector, which would run because a reading
    makes many objects and drops them again, does not run.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        join()
        if not gc.isenabled():
            return method(*args, **kwargs)
        gc.disable()
        try:
            return method(*args, **kwargs)
        finally:
            gc.enable()

    return call  # type: ignore[return-value]


def stand_in(owners: Sequence[Any], name: str, wrap: Callable[[Any], Any]) -> None:
    """Put a wrapper in the place of a function, one for all modules that have the same one.

    It is pickled as the function was: by the first of `owners` and its name. TorchScript, which knows its own functions
    by their identity, takes it for the function. A wrapper hands on what it is given as it came: an iterator can be
    gone through once.

    Args:
        owners: Modules; those without a function of the name are passed over.
        name: The function's.
        wrap: Makes the wrapper of it.
    """
    wrappers: dict[int, Any] = {}
    for owner in owners:
        function = getattr(owner, name, None)
        if function is None or getattr(function, "_repro", False):
            continue
        wrapper = wrappers.get(id(function))
        if wrapper is None:
            wrapper = wrappers[id(function)] = wrap(function)
            wrapper.__module__, wrapper.__qualname__ = owner.__name__, name
            wrapper._repro = True
            _script_as(function, wrapper)
        setattr(owner, name, wrapper)


def _script_as(function: Any, wrapper: Any) -> None:
    """Have TorchScript take a wrapper for what it wraps."""
    try:
        table = torch.jit._builtins._get_builtin_table()  # type: ignore[no-untyped-call]
    except AttributeError:  # another torch's
        return
    operator = table.get(id(function))
    if operator is not None:
        table[id(wrapper)] = operator

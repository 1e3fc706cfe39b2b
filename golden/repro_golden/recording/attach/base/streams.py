"""The streams that a program works on: what they still do is done before its state is read, which the GPU sees to.

A moving average on a stream of its own may be waited for after the next step, or never: what is read of it must not
depend on how far the GPU has come.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from repro_golden.fingerprint.in_flight import captures

__all__ = ["join", "watch"]

_ours: dict[tuple[int, int], Any] = {}
"""Streams of torch's pool, by device and number: there are a few dozen, which live as long as the process."""
_foreign: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those that something else made: they are gone with their object."""


def watch() -> None:
    """Know the streams that the program makes from now on."""
    make: Callable[..., Any] = torch.cuda.Stream.__new__

    def made(cls: type, *args: Any, **kwargs: Any) -> Any:
        stream = make(cls, *args, **kwargs)
        if cls is torch.cuda.Stream:
            _ours.setdefault((stream.device_index, stream.stream_id), stream)
        else:
            _foreign.add(stream)
        return stream

    torch.cuda.Stream.__new__ = made  # type: ignore[method-assign]


def join() -> None:
    """Let the current stream of each device wait for what others have not done yet; this process does not wait."""
    if not _ours or not torch.cuda.is_initialized() or captures():  # type: ignore[no-untyped-call]
        return
    for device in {device for device, _ in list(_ours)}:
        torch.cuda.default_stream(device)  # which is known from then on, as each that somebody asks for
    for stream in [*list(_ours.values()), *list(_foreign)]:
        current = torch.cuda.current_stream(stream.device_index)
        with torch.cuda.stream(stream):
            left_alone = stream == current or captures()  # to ask one that captures would end that
        if not left_alone and not stream.query():
            current.wait_stream(stream)

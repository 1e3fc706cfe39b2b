"""The streams that a program works on: what they still do is done before its state is read, which the GPU sees to.

A moving average on a stream of its own may be waited for after the next step, or never: what is read of it must not
depend on how far the GPU has come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from repro_golden.fingerprint.in_flight import captures, under_way

__all__ = ["join", "watch"]

_made: dict[tuple[int, int], Any] = {}
"""Those of torch's pool, by device and number: there are a few dozen, which live as long as the process."""


def watch() -> None:
    """Know the streams that the program makes from now on."""
    make: Callable[..., Any] = torch.cuda.Stream.__new__

    def made(cls: type, *args: Any, **kwargs: Any) -> Any:
        stream = make(cls, *args, **kwargs)
        if stream.stream_id & 7:  # else a device's own, or the address of one that other code may have destroyed
            _made.setdefault((stream.device_index, stream.stream_id), stream)
        return stream

    torch.cuda.Stream.__new__ = staticmethod(made)  # type: ignore[method-assign]


def join() -> None:
    """Let the current stream of each device wait for what others have not done yet; this process does not wait."""
    if not _made or under_way or not torch.cuda.is_initialized() or captures():  # type: ignore[no-untyped-call]
        return
    made = list(_made.values())
    for device in {stream.device_index for stream in made}:
        current = torch.cuda.current_stream(device)
        for stream in [torch.cuda.default_stream(device), *made]:
            if stream.device_index != device or stream == current:
                continue
            with torch.cuda.stream(stream):
                in_capture = captures()  # to ask it would end that
            if not in_capture and not stream.query():
                current.wait_stream(stream)

"""Ranks that make unequal numbers of steps, where only some are asked for: who has made them is ended, and others wait.

Such as with DDP's `Join`, in which a rank whose data are used up helps those that have some left. When one of these has
ended, nothing comes any more that is waited for in a collective, and who waits there is ended as well.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

__all__ = ["COLLECTIVES", "PASSES", "watch"]

_SECONDS, _TIMES = 0.5, 5
"""Between looks at where the program is, and how many must find it at one place."""
_INNERMOST = 4
"""Frames in which a collective would be: torch wraps some."""
_TORCH = Path(torch.__file__).parent
COLLECTIVES, PASSES = f"{_TORCH / 'distributed'}/", f"{_TORCH / 'autograd'}/"
"""Where code of torch's lies that waits for other ranks, and that of backward passes, which may."""


def watch(session: Any, some_stopped: Callable[[], bool]) -> None:
    """End this process as if it had made the steps that were asked for, once it waits for one that has.

    Args:
        session: Of the thread that calls this.
        some_stopped: Whether a rank was ended after the steps that were asked for.
    """
    threading.Thread(target=_look, args=(session, some_stopped, threading.get_ident()), daemon=True).start()


def _look(session: Any, some_stopped: Callable[[], bool], thread: int) -> None:
    last, times = "", 0
    with contextlib.suppress(OSError, ValueError):  # the folder is gone: nobody asks any more
        while not session.dead:
            time.sleep(_SECONDS)
            # beside a pass of a step that nobody asks for, nothing that is asked for comes
            where = (COLLECTIVES, PASSES) if session.made >= session.settings.steps else (COLLECTIVES,)
            place = _place(thread, where) if some_stopped() else ""
            last, times = place, times + 1 if place == last else 1
            if place and times >= _TIMES:
                # the device's current stream may wait for the others
                with _stream():
                    session.stop()


def _stream() -> contextlib.AbstractContextManager[Any]:
    """A stream of its own on the device, whose current one may wait for the others."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def _place(thread: int, where: tuple[str, ...]) -> str:
    """Where a thread is, if that is in one of some folders; else ''."""
    frames = list(itertools.islice(_outward(sys._current_frames().get(thread)), _INNERMOST))
    if not any(frame.f_code.co_filename.startswith(where) for frame in frames):
        return ""
    return " ".join(f"{frame.f_code.co_filename}:{frame.f_lasti}" for frame in frames)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back

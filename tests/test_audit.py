"""Python's audit events are heard without the program noticing."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from repro_golden.base.machine.audit import hear


class _TimeUpError(Exception):
    pass


class _Alarm:
    def __call__(self, *_: Any) -> None:
        self.ring()

    def ring(self) -> None:
        raise _TimeUpError


def _ring(_: int, __: object) -> None:
    raise _TimeUpError


@pytest.mark.parametrize("handler", [_ring, _Alarm(), functools.partial(_ring)])
def test_a_signal_that_comes_meanwhile(handler: Callable[[int, Any], None]) -> None:
    """What its handler raises is the program's; what the hearer raises is dropped."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        hear({"repro.rings": lambda: signal.raise_signal(signal.SIGALRM), "repro.fails": lambda: int("x")})
        sys.audit("repro.fails")
        with pytest.raises(_TimeUpError):
            sys.audit("repro.rings")
    finally:
        signal.signal(signal.SIGALRM, before)

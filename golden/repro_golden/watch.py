"""``python -m repro_golden.watch -- ARGS``: the built-in trainer's command line with a hash printed for every step.

This is what ``python -m repro_core.train --debug-determinism`` starts. Two runs that print equal chains made equal bits
in every signal up to there; where chains part, the phase whose hash differs first says where to look.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

from repro_golden.canonical import digest
from repro_golden.children import BITS_DEFAULTS
from repro_golden.fingerprint import SCHEME
from repro_golden.signals import Signals
from repro_golden.trace.model import PHASES, chain, root

__all__ = ["StepHashes", "main"]


class StepHashes:
    """An observer that hashes each step. A step ends where the phases begin anew, or at `finish`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._signals, self._phase = Signals(), 0
        self._step = 0
        self._chain = digest("chain", SCHEME)

    def __call__(self, phase: str, name: str, value: object, placement: object = None) -> None:
        """Take one signal."""
        at = PHASES.index(phase)
        if at < self._phase:
            self.finish()
        self._phase = at
        self._signals.take(phase, name, value, placement)

    def finish(self) -> None:
        """Print the step under way."""
        if not len(self._signals):
            return
        every = self._signals.rows()
        self._chain = chain(self._chain, self._step, root(every))
        phases = {p: [r for r in every if r.phase == p] for p in PHASES}
        parts = " ".join(f"{phase} {root(rows)[:12]}" for phase, rows in phases.items() if rows)
        self._say(f"hash {self._step}: {parts} chain {self._chain}")
        self._signals, self._phase = Signals(), 0
        self._step += 1


def main(argv: list[str]) -> int:
    """Run the trainer's command line under `StepHashes`."""
    missing = {name: value for name, value in BITS_DEFAULTS.items() if name not in os.environ}
    if missing:  # they decide bits and come too late once the process runs
        os.execve(  # noqa: S606 - the same interpreter, no shell
            sys.executable, [sys.executable, "-m", "repro_golden.watch", *argv], os.environ | missing
        )
    hashes = StepHashes(lambda line: print(line, flush=True))
    trainer = importlib.import_module("repro_core.train")
    code: int = trainer.main([a for a in argv if a != "--"], observe=hashes)
    hashes.finish()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

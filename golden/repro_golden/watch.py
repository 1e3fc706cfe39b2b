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
from repro_golden.fingerprint import SCHEME
from repro_golden.launch import BITS_DEFAULTS
from repro_golden.recorder import row_of
from repro_golden.trace.model import PHASES, Row, chain, root

__all__ = ["StepHashes", "main"]


class StepHashes:
    """An observer that hashes each step. A step ends where the phases begin anew, or at `finish`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._rows: list[Row] = []
        self._step = 0
        self._chain = digest("chain", SCHEME)

    def __call__(self, phase: str, name: str, value: object, placement: object = None) -> None:
        """Take one signal."""
        if self._rows and PHASES.index(phase) < PHASES.index(self._rows[-1].phase):
            self.finish()
        self._rows.append(row_of(phase, name, value, placement))  # type: ignore[arg-type]  # row_of refuses others

    def finish(self) -> None:
        """Print the step under way."""
        if not self._rows:
            return
        self._chain = chain(self._chain, self._step, root(self._rows))
        phases = {p: [r for r in self._rows if r.phase == p] for p in PHASES}
        parts = " ".join(f"{phase} {root(rows)[:12]}" for phase, rows in phases.items() if rows)
        self._say(f"hash {self._step}: {parts} chain {self._chain}")
        self._rows.clear()
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

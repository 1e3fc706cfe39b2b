"""``python -m repro_golden.replay.watch [FLAGS] -- ARGS``: the built-in trainer's command line under the instrument.

This is what ``python -m repro_core.train --debug-determinism`` starts: a hash printed for every step. Two runs that
print equal chains made equal bits in every signal up to there; where chains part, the phase whose hash differs first
says where to look.

``--weights`` (``--check-weight-update-equal``) judges every weight sync in place of the hashes, and ``--report N``
(``--debug-weight-sync N``) says what was sent; ``--hashes`` adds the hashes. Under torchrun the ranks meet in a folder
that they share, below ``--folder`` (by default that of temporary files, for the ranks of one machine).
A run that ends well without any sync to judge, or any step to hash, ends in exit 2: nothing was checked.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import inspect
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro_golden.base.canonical import digest, write_atomic
from repro_golden.base.errors import ReproError
from repro_golden.fingerprint import SCHEME
from repro_golden.recording.rank_group import RankGroup
from repro_golden.replay.children import BITS_DEFAULTS
from repro_golden.trace.model import PHASES, chain, root
from repro_golden.trace.signals import Signals

if TYPE_CHECKING:
    from repro_golden.recording.weight_sync import SyncJudge

__all__ = ["StepHashes", "main", "meet"]

_PATIENCE = 30.0
"""Seconds that rank 0 waits at its end for the others."""


class StepHashes:
    """An observer that hashes each step, which ends when the trainer says so.

    Attributes:
        steps: How many have been hashed.
    """

    def __init__(self, say: Callable[[str], None], rank: int | None = None) -> None:
        """Begin; `rank` is said where there are several."""
        self._say, self._of = say, "" if rank is None else f" rank {rank}"
        self._signals, self.steps = Signals(), 0
        self._chain = digest("chain", SCHEME)

    def __call__(self, phase: str, name: str, value: object, placement: object = None) -> None:
        """Take one signal."""
        self._signals.take(phase, name, value, placement)

    def ended(self, step: int) -> None:
        """Print the hashes of a step that is over."""
        every = self._signals.rows()
        self._chain = chain(self._chain, step, root(every))
        phases = {p: [r for r in every if r.phase == p] for p in PHASES}
        parts = " ".join(f"{phase} {root(rows)[:12]}" for phase, rows in phases.items() if rows)
        self._say(f"hash {step}{self._of}: {parts} chain {self._chain}")
        self._signals = Signals()
        self.steps += 1


def main(argv: list[str]) -> int:
    """Run the trainer's command line under `StepHashes`, a `SyncJudge`, or both."""
    missing = {name: value for name, value in BITS_DEFAULTS.items() if name not in os.environ}
    if missing:  # they decide bits and come too late once the process runs
        os.execve(  # noqa: S606 - the same interpreter, no shell
            sys.executable, [sys.executable, "-m", "repro_golden.replay.watch", *argv], os.environ | missing
        )
    at = argv.index("--") if "--" in argv else 0
    options, command = _parser().parse_args(argv[:at]), [a for a in argv[at:] if a != "--"]
    try:
        return _watched(options, command)
    except ReproError as error:
        print(f"python -m repro_core.train: error: {error}", file=sys.stderr)
        return error.exit_code


def _watched(options: argparse.Namespace, argv: list[str]) -> int:
    trainer = importlib.import_module("repro_core.train")
    observers: dict[str, Any] = {}
    judge: SyncJudge | None = None
    rank, ranks = _place()
    hashes = StepHashes(_say, rank if ranks > 1 else None) if options.hashes or not options.weights else None
    if hashes is not None:
        observers |= {"observe": hashes, "ended": hashes.ended}
    if options.weights:
        from repro_golden.recording.weight_sync import SyncJudge

        rank_group = meet(options.folder)
        observers["sync"] = judge = SyncJudge(rank_group, _say, options.report)
    if "ended" in observers and "ended" not in inspect.signature(trainer.main).parameters:
        raise ReproError(
            "the trainer of this repository is of an earlier repro and does not say when a step ends: take over what "
            "`repro init --example` writes into an empty repository"
        )
    code: int = trainer.main(argv, **observers)
    if hashes is not None and not code and not hashes.steps:
        raise ReproError(
            "no step was trained, so none was hashed: raise --num-rollout, or leave --debug-determinism out"
        )
    if judge is not None and not code and not judge.number and (rank_group is None or rank_group.rank == 0):
        raise ReproError(
            "no weight sync was made: rollout_engine is the policy itself, or rollouts were loaded; leave "
            "--check-weight-update-equal and --debug-weight-sync out"
        )
    return code


def meet(base: Path) -> RankGroup | None:
    """The ranks that torchrun's variables speak of, in a fresh folder below `base`; None for one process alone.

    Folders of runs that ended badly may lie there under the same names. So a rank says hello with a number of its own,
    and rank 0 answers each with that number and the folder, until all have come.

    Raises:
        ReproError: the ranks are on several machines, and `base` is a folder of this one.
    """
    rank, ranks = _place()
    if ranks == 1:
        return None
    if int(os.environ.get("LOCAL_WORLD_SIZE") or ranks) != ranks and base == Path(tempfile.gettempdir()):
        raise ReproError("the ranks are on several machines: name a folder that all of them see with --folder")
    parts = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    place = base / f"repro-ranks-{os.getuid()}-{digest(*parts)[:16]}"
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    if rank == 0:
        folder = tempfile.mkdtemp(dir=place)
        while len(list(Path(folder).glob("joined-*"))) < ranks - 1:
            for hello in place.glob("hello-*"):
                write_atomic(place / hello.name.replace("hello", "answer"), f"{hello.read_text()} {folder}")
            time.sleep(0.01)
    else:
        greeting, answer = f"{os.getpid()}-{time.time_ns()}", place / f"answer-{rank}"
        write_atomic(place / f"hello-{rank}", greeting)
        while not (answer.exists() and answer.read_text().startswith(f"{greeting} ")):
            time.sleep(0.01)
        folder = answer.read_text().split(" ", 1)[1]
        (Path(folder) / f"joined-{rank}").touch()
    atexit.register(_leave, Path(folder), rank, ranks)
    return RankGroup(Path(folder), rank, ranks)


def _place() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)


def _leave(folder: Path, rank: int, ranks: int) -> None:
    """Rank 0 removes the folder once the others have read what it decided last, or have died."""
    (folder / f"left-{rank}").touch()
    deadline = time.monotonic() + _PATIENCE
    while rank == 0 and len(list(folder.glob("left-*"))) < ranks and time.monotonic() < deadline:
        time.sleep(0.01)
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m repro_golden.replay.watch", allow_abbrev=False)
    parser.add_argument("--weights", action="store_true", help="judge every weight sync")
    parser.add_argument("--report", type=int, metavar="N", help="name up to N changed tensors after every sync")
    parser.add_argument("--hashes", action="store_true", help="print a hash of every step (without --weights: always)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="one that all ranks see")
    return parser


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``python -m repro_core.train``: GRPO with the debug flags of slime, Miles and Relax.

Exit codes: 0 trained; 1 a first-step check failed; 2 usage, configuration or input error, told in one line.
torch is imported only after the command line has been understood.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from repro_core.config import TrainConfig
from repro_core.contract import Observe, Rollout
from repro_core.train.flags import ROLLOUT_ID, TRACKER, Options, make_parser, read_config, read_options, watched

if TYPE_CHECKING:
    from repro_core.data.train_data import Collector
    from repro_core.rollout.sync import SyncObserver
    from repro_core.train.trainer import Trainer

__all__ = ["main"]


def main(argv: Sequence[str] | None = None, observe: Observe | None = None, sync: SyncObserver | None = None) -> int:
    """Run the command line.

    Args:
        argv: flags without the program's name; ``sys.argv[1:]`` by default.
        observe: receives every signal of every step; see `repro_core.Observe`.
        sync: sees every weight sync; see `repro_core.rollout.sync.SyncObserver`.

    Returns:
        The exit code; see the module.

    Raises:
        SystemExit: from argparse, with code 2 for a wrong command line and 0 for ``--help``.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    args = parser.parse_args(argv)
    options = read_options(args, parser)
    if observe is None and sync is None and (asked := watched(args)):
        # By command and not by import: the trainer knows nothing of the instrument that watches it.
        command = [sys.executable, "-m", "repro_golden.replay.watch", *asked, "--", *argv]
        return subprocess.run(command, check=False).returncode
    try:
        config = read_config(args)
        return _run(config, options, observe or (lambda *_: None), sync)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"{parser.prog}: error: no torch here: pip install 'repro-harness[trainer]'", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        # All our own errors (ConfigError, RolloutError, CheckpointError, HfError) are ValueErrors of one line.
        print(f"{parser.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _run(config: TrainConfig, options: Options, observe: Observe, sync: SyncObserver | None) -> int:
    from repro_core.data.train_data import Collector
    from repro_core.train.trainer import Trainer

    checkpoint = None if options.load is None else _find_checkpoint(options.load)
    if options.debug_rollout_only:
        return _only_rollouts(config, options, checkpoint, sync)
    trainer = Trainer(config, sync=sync)
    if checkpoint is not None:
        trainer.load(str(checkpoint))
    _, start = trainer.position
    if start >= options.num_rollout and trainer.engines.lead:
        print(f"nothing to do: --load is at rollout {start}, --num-rollout is {options.num_rollout}")
    passed = True
    source = _Source(trainer.sample, trainer.say, trainer.engines.lead)
    for rollout_id, rollout in _rollouts(source, options, start):
        collected = Collector(observe, keep_all=options.save_debug_train_data is not None)
        for step in trainer.train(rollout, collected):
            if step == config.num_critic_only_steps:  # the policy's first
                passed = _first_step(collected, lead=trainer.engines.lead)
        if options.save_debug_train_data is not None and trainer.engines.lead:
            collected.write(_fill(options.save_debug_train_data, rollout_id), rollout_id)
        done = rollout_id + 1
        due = done == options.num_rollout or (options.save_interval is not None and done % options.save_interval == 0)
        if options.save is not None and due:
            _save(trainer, options.save, rollout_id)
    return 0 if passed else 1


@dataclass(frozen=True)
class _Source:
    """Where rollouts come from when none are loaded, and who tells of them."""

    sample: Callable[[int], Rollout]
    say: Callable[[str], None]
    lead: bool = True


def _only_rollouts(config: TrainConfig, options: Options, checkpoint: Path | None, sync: SyncObserver | None) -> int:
    """Rollouts of one set of weights: a checkpoint serves as weights and position, and no trainer is made."""
    from repro_core.engines.checkpoint import load_checkpoint
    from repro_core.rollout.generate import rollout_metrics
    from repro_core.rollout.source import RolloutsOnly
    from repro_core.train.trainer import Trainer

    with contextlib.ExitStack() as exits:
        start = 0
        if checkpoint is not None and config.policy != "torch":  # its weights lie in Megatron's form, cut over ranks
            trainer = Trainer(config, sync=sync)
            trainer.load(str(checkpoint))
            _, start = trainer.position
            source = _Source(trainer.sample, trainer.say, trainer.engines.lead)
        else:
            if os.environ.get("RANK", "0") != "0":
                return 0
            if checkpoint is not None:
                start = int(load_checkpoint(checkpoint)["position/rollout_id"])
                config = replace(config, hf_checkpoint=str(checkpoint.resolve()))
            only = exits.enter_context(contextlib.closing(RolloutsOnly(config, ".", sync)))
            source = _Source(only.sample, _print)
        for rollout_id, rollout in _rollouts(source, options, start):
            source.say(f"rollout {rollout_id}: {rollout_metrics(rollout)!r}")
    return 0


def _rollouts(source: _Source, options: Options, start: int) -> Iterator[tuple[int, Rollout]]:
    """The rollouts from `start` on, sampled or loaded, each when its turn comes."""
    from repro_core.data.rollout_file import read_rollout, write_rollout

    for rollout_id in range(start, options.num_rollout):
        if options.load_debug_rollout_data is not None:
            rollout = read_rollout(_fill(options.load_debug_rollout_data, rollout_id))
            # One file may serve all rollouts; its number is then the position's, not its own.
            rollout = replace(rollout, meta={**rollout.meta, "rollout_id": rollout_id})
        else:
            rollout = source.sample(rollout_id)
        if options.save_debug_rollout_data is not None and source.lead:
            path = _fill(options.save_debug_rollout_data, rollout_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_rollout(path, rollout)
        if options.debug_rollout_print_every and rollout_id % options.debug_rollout_print_every == 0:
            source.say(_first_sample(rollout))
        yield rollout_id, rollout


def _print(line: str) -> None:
    print(line, flush=True)


def _first_sample(rollout: Rollout) -> str:
    from repro_core.data.task import decode

    t = rollout.tensors
    total, response = int(t["total_lengths"][0]), int(t["response_lengths"][0])
    text = decode(t["tokens"][total - response : total].tolist())
    shown = f"prompt {rollout.meta['prompts'][0]!r} response {text!r} reward {float(t['rewards'][0])!r}"
    return f"rollout {rollout.meta['rollout_id']} sample 0: {shown}"


def _fill(pattern: str, rollout_id: int) -> Path:
    # Literal, not str.format: other braces in a path are the path's own.
    return Path(pattern.replace(ROLLOUT_ID, str(rollout_id)))


def _first_step(collected: Collector, *, lead: bool) -> bool:
    from repro_core.rl.first_step import first_step_checks

    results = first_step_checks(collected.columns, collected.metrics)
    for result in results if lead else ():
        print(f"check {result.name}: {'ok' if result.passed else 'FAILED'} ({result.detail})", flush=True)
    return all(result.passed for result in results)


def _save(trainer: Trainer, directory: Path, rollout_id: int) -> None:
    from repro_core.data.rollout_file import replace_file

    trainer.save(str(directory / f"iter_{rollout_id:07d}"))
    if trainer.engines.lead:
        replace_file(directory / TRACKER, f"{rollout_id}\n".encode())


def _find_checkpoint(directory: Path) -> Path:
    """The checkpoint that a directory is, or the latest that it holds."""
    from repro_core.engines.checkpoint import CheckpointError

    tracker = directory / TRACKER
    if not tracker.is_file():
        return directory
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if not (text.isascii() and text.isdigit()):
        raise CheckpointError(f"{tracker} holds {text[:40]!r}, not a number: --load one of the iter_ directories")
    return directory / f"iter_{int(text):07d}"

"""``python -m repro_core.train``: GRPO with the debug flags of slime, Miles and Relax.

Exit codes: 0 trained; 1 a first-step check failed; 2 usage, configuration or input error, told in one line.
torch is imported only after the command line has been understood.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from repro_core.config import ConfigError, MegatronConfig, ModelConfig, SglangConfig, TrainConfig
from repro_core.contract import Observe, Rollout

if TYPE_CHECKING:
    from repro_core.data.train_data import Collector
    from repro_core.rollout.sync import SyncObserver
    from repro_core.train.trainer import Trainer

__all__ = ["main", "make_parser", "watched"]


def main(
    argv: Sequence[str] | None = None,
    observe: Observe | None = None,
    sync: SyncObserver | None = None,
    ended: Callable[[int], None] | None = None,
) -> int:
    """Run the command line.

    Args:
        argv: flags without the program's name; ``sys.argv[1:]`` by default.
        observe: receives every signal of every step; see `repro_core.Observe`.
        sync: sees every weight sync; see `repro_core.rollout.sync.SyncObserver`.
        ended: is told the number of every step that was trained, after its last signal.

    Returns:
        The exit code; see the module.

    Raises:
        SystemExit: from argparse, with code 2 for a wrong command line and 0 for ``--help``.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    args = parser.parse_args(argv)
    options = _read_options(args, parser)
    if observe is None and sync is None and (asked := watched(args)):
        # By command and not by import: the trainer knows nothing of the instrument that watches it.
        command = [sys.executable, "-m", "repro_golden.replay.watch", *asked, "--", *argv]
        return subprocess.run(command, check=False).returncode
    try:
        config = _read_config(args)
        return _run(config, options, observe or (lambda *_: None), sync, ended or (lambda _: None))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"{parser.prog}: error: no torch here: pip install 'repro-harness[trainer]'", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        # All our own errors (ConfigError, RolloutError, CheckpointError, HfError) are ValueErrors of one line.
        print(f"{parser.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _run(
    config: TrainConfig, options: _Options, observe: Observe, sync: SyncObserver | None, ended: Callable[[int], None]
) -> int:
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
            ended(step)
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


def _only_rollouts(config: TrainConfig, options: _Options, checkpoint: Path | None, sync: SyncObserver | None) -> int:
    """Rollouts of one set of weights: a checkpoint serves as weights and position, and no trainer is made."""
    from repro_core.engines.checkpoint import load_checkpoint
    from repro_core.rollout.source import RolloutsOnly, model_of, rollout_metrics
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
                state = load_checkpoint(checkpoint, config, model_of(config, "."), sampling=True)
                start = int(state["position/rollout_id"])
                config = replace(config, hf_checkpoint=str(checkpoint.resolve()))
            only = exits.enter_context(contextlib.closing(RolloutsOnly(config, ".", sync)))
            source = _Source(only.sample, _print)
        for rollout_id, rollout in _rollouts(source, options, start):
            source.say(f"rollout {rollout_id}: {rollout_metrics(rollout)!r}")
    return 0


def _rollouts(source: _Source, options: _Options, start: int) -> Iterator[tuple[int, Rollout]]:
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
    return Path(pattern.replace(_ROLLOUT_ID, str(rollout_id)))


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
        replace_file(directory / _TRACKER, f"{rollout_id}\n".encode())


def _find_checkpoint(directory: Path) -> Path:
    """The checkpoint that a directory is, or the latest that it holds."""
    from repro_core.engines.checkpoint import CheckpointError

    tracker = directory / _TRACKER
    if not tracker.is_file():
        return directory
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if not (text.isascii() and text.isdigit()):
        raise CheckpointError(f"{tracker} holds {text[:40]!r}, not a number: --load one of the iter_ directories")
    return directory / f"iter_{int(text):07d}"


# -- the command line of ``python -m repro_core.train``: its flags, and the configuration and options that they make


_ROLLOUT_ID = "{rollout_id}"
_TRACKER = "latest_checkpointed_iteration.txt"
_OURS = "config."
_Settings = type[TrainConfig | ModelConfig | MegatronConfig | SglangConfig]
_TABLES: tuple[tuple[str, str, str, _Settings], ...] = (
    ("training", "", "", TrainConfig),
    ("model", "model", "", ModelConfig),
    ("megatron", "megatron", "", MegatronConfig),
    ("rollouts by SGLang", "sglang", "sglang-", SglangConfig),
)
"""Groups of flags: title, table of the configuration, what the flags begin with, and the class that reads it."""


@dataclass(frozen=True)
class _Options:
    """The command line apart from the configuration; the names are the flags'."""

    num_rollout: int
    debug_rollout_only: bool
    load_debug_rollout_data: str | None
    save_debug_rollout_data: str | None
    save_debug_train_data: str | None
    debug_rollout_print_every: int
    save: Path | None
    load: Path | None
    save_interval: int | None


def make_parser() -> argparse.ArgumentParser:
    """All flags. Those of the configuration are generated from its dataclasses, under their own names."""
    parser = argparse.ArgumentParser(
        prog="python -m repro_core.train", description="Deterministic GRPO.", allow_abbrev=False
    )
    add = parser.add_argument_group("run").add_argument
    add("--config", type=Path, metavar="FILE.toml", help="configuration keys; flags take precedence over it")
    add("--num-rollout", type=_at_least(1), default=10, metavar="N", help="train on rollouts 0 to N-1 (default: 10)")
    add("--save", type=Path, metavar="DIR", help=f"checkpoints to DIR/iter_NNNNNNN, the latest named in {_TRACKER}")
    add("--load", type=Path, metavar="DIR", help="resume from a checkpoint or from the latest under DIR")
    add("--save-interval", type=_at_least(1), metavar="N", help="save every N rollouts (default: after the last)")

    add = parser.add_argument_group("debugging").add_argument
    add("--debug-rollout-only", action="store_true", help="generate rollouts, start no trainer")
    add("--debug-train-only", action="store_true", help="train on saved rollouts, never sample")
    add(
        "--load-debug-rollout-data",
        metavar="PATTERN",
        help=f"rollouts to train on; {_ROLLOUT_ID} is replaced, without it one file serves all (implies train-only)",
    )
    add("--save-debug-rollout-data", metavar="PATTERN", help=f"write each sampled rollout; {_ROLLOUT_ID} is replaced")
    add("--save-debug-train-data", metavar="PATTERN", help=f"write each rollout's columns; {_ROLLOUT_ID} is replaced")
    add("--dump-details", type=Path, metavar="DIR", help="both, as DIR/{rollout,train}_data/{rollout_id}.safetensors")
    add("--debug-determinism", action="store_true", help="run under the instrument, which logs a hash of every step")
    add(
        "--debug-rollout-print-every",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="print the first sample of every Nth rollout (default: 0, never)",
    )
    add("--check-weight-update-equal", action="store_true", help="prove after every weight sync that all arrived")
    add(
        "--debug-weight-sync",
        type=_at_least(1),
        metavar="N",
        help="log what every weight sync sent, how long it took, and up to N tensors that changed",
    )
    for title, table, begin, cls in _TABLES:
        _add_fields(parser.add_argument_group(title), table, begin, cls)
    return parser


def watched(args: argparse.Namespace) -> list[str]:
    """What the instrument is asked to watch; nothing where it is not needed."""
    hashes = ["--hashes"] if args.debug_determinism else []
    report = [] if args.debug_weight_sync is None else ["--report", str(args.debug_weight_sync)]
    return hashes + (["--weights"] if args.check_weight_update_equal or report else []) + report


def _add_fields(group: argparse._ArgumentGroup, table: str, begin: str, cls: _Settings) -> None:
    hints = get_type_hints(cls)
    prefix = _OURS + (f"{table}." if table else "")
    for field in fields(cls):
        hint = hints[field.name]
        if isinstance(hint, type) and is_dataclass(hint):  # a nested table, whose fields are flags of their own
            continue
        flag = f"--{begin}{field.name.replace('_', '-')}"
        how: dict[str, Any] = {
            "metavar": field.name.rsplit("_", 1)[-1].upper(),
            "help": f"(default: {_default(field)})",
        }
        if hint is bool:
            how = {"action": argparse.BooleanOptionalAction, "help": how["help"]}
        elif get_origin(hint) is Literal:
            how = {"choices": get_args(hint), "help": how["help"]}
        elif get_origin(hint) is dict:
            how |= {"type": json.loads, "metavar": "JSON"}
        elif get_origin(hint) is tuple:
            how |= {"type": get_args(hint)[0], "nargs": len(get_args(hint))}
        elif get_origin(hint) in (UnionType, Union):
            (kind,) = (member for member in get_args(hint) if member is not NoneType)
            if kind is bool:
                how = {"action": argparse.BooleanOptionalAction, "help": how["help"]}
            else:
                how |= {"choices": get_args(kind)} if get_origin(kind) is Literal else {"type": _or_none(kind)}
        else:
            how |= {"type": hint}
        group.add_argument(flag, dest=prefix + field.name, default=argparse.SUPPRESS, **how)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least}")
        return int(text)

    return number


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def value(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    value.__name__ = f"{getattr(kind, '__name__', kind)} or none"
    return value


def _read_config(args: argparse.Namespace) -> TrainConfig:
    """The configuration that file and flags make.

    Raises:
        ConfigError: a key is unknown, or its value does not serve.
        OSError: the file cannot be read; a ValueError where it is no TOML.
    """
    values: dict[str, Any] = {}
    if args.config is not None:
        values = tomllib.loads(args.config.read_text(encoding="utf-8"))
    tables = [table for _, table, _, _ in _TABLES if table]
    for table in tables:
        if not isinstance(values.get(table, {}), dict):
            raise ConfigError(f"{table} must be a table of keys, not {values[table]!r}")
    for name, value in vars(args).items():
        if name.startswith(_OURS):
            table, _, key = name.removeprefix(_OURS).rpartition(".")
            if table:
                values[table] = {**values.get(table, {}), key: value}
            else:
                values[key] = value
    return TrainConfig.from_mapping(values)


def _read_options(args: argparse.Namespace, parser: argparse.ArgumentParser) -> _Options:
    """Flags that imply or exclude each other; a wrong combination ends in `parser.error`."""
    train_only = args.debug_train_only or args.load_debug_rollout_data is not None
    if args.debug_rollout_only and train_only:
        parser.error("--debug-rollout-only excludes --debug-train-only and --load-debug-rollout-data: choose one")
    if args.debug_train_only and args.load_debug_rollout_data is None:
        parser.error("--debug-train-only trains on saved rollouts: name them with --load-debug-rollout-data PATTERN")
    for what, given in (("save", args.save is not None), ("debug-determinism", args.debug_determinism)):
        if args.debug_rollout_only and given:
            parser.error(f"--debug-rollout-only trains nothing, so there is nothing to --{what}")
    rollout_data, train_data = args.save_debug_rollout_data, args.save_debug_train_data
    if args.dump_details is not None:
        rollout_data = rollout_data or str(args.dump_details / "rollout_data" / f"{_ROLLOUT_ID}.safetensors")
        train_data = train_data or str(args.dump_details / "train_data" / f"{_ROLLOUT_ID}.safetensors")
    if rollout_data is not None and rollout_data == train_data:
        parser.error(
            "--save-debug-train-data must differ from --save-debug-rollout-data: one would overwrite the other"
        )
    for flag, pattern in (("--save-debug-rollout-data", rollout_data), ("--save-debug-train-data", train_data)):
        if pattern is not None and _ROLLOUT_ID not in pattern:
            parser.error(f"{flag} {pattern} lacks {_ROLLOUT_ID}: every rollout would overwrite the last")
    return _Options(
        num_rollout=args.num_rollout,
        debug_rollout_only=args.debug_rollout_only,
        load_debug_rollout_data=args.load_debug_rollout_data,
        # What was loaded is not written again: the pattern may name the very files that are being read.
        save_debug_rollout_data=None if train_only else rollout_data,
        save_debug_train_data=None if args.debug_rollout_only else train_data,
        debug_rollout_print_every=args.debug_rollout_print_every,
        save=args.save,
        load=args.load,
        save_interval=args.save_interval,
    )

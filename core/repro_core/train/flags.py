"""The command line of ``python -m repro_core.train``: its flags, and the configuration and options that they make."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from repro_core.config import ConfigError, MegatronConfig, ModelConfig, SglangConfig, TrainConfig

__all__ = ["ROLLOUT_ID", "TRACKER", "Options", "make_parser", "read_config", "read_options", "watched"]

ROLLOUT_ID = "{rollout_id}"
TRACKER = "latest_checkpointed_iteration.txt"
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
class Options:
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
    add("--save", type=Path, metavar="DIR", help=f"checkpoints to DIR/iter_NNNNNNN, the latest named in {TRACKER}")
    add("--load", type=Path, metavar="DIR", help="resume from a checkpoint or from the latest under DIR")
    add("--save-interval", type=_at_least(1), metavar="N", help="save every N rollouts (default: after the last)")

    add = parser.add_argument_group("debugging").add_argument
    add("--debug-rollout-only", action="store_true", help="generate rollouts, start no trainer")
    add("--debug-train-only", action="store_true", help="train on saved rollouts, never sample")
    add(
        "--load-debug-rollout-data",
        metavar="PATTERN",
        help=f"rollouts to train on; {ROLLOUT_ID} is replaced, without it one file serves all (implies train-only)",
    )
    add("--save-debug-rollout-data", metavar="PATTERN", help=f"write each sampled rollout; {ROLLOUT_ID} is replaced")
    add("--save-debug-train-data", metavar="PATTERN", help=f"write each rollout's columns; {ROLLOUT_ID} is replaced")
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


def read_config(args: argparse.Namespace) -> TrainConfig:
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


def read_options(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Options:
    """Flags that imply or exclude each other; a wrong combination ends in `parser.error`."""
    train_only = args.debug_train_only or args.load_debug_rollout_data is not None
    if args.debug_rollout_only and train_only:
        parser.error("--debug-rollout-only excludes --debug-train-only and --load-debug-rollout-data: choose one")
    if args.debug_train_only and args.load_debug_rollout_data is None:
        parser.error("--debug-train-only trains on saved rollouts: name them with --load-debug-rollout-data PATTERN")
    if args.debug_rollout_only and args.save is not None:
        parser.error("--debug-rollout-only trains nothing, so there is nothing to --save")
    rollout_data, train_data = args.save_debug_rollout_data, args.save_debug_train_data
    if args.dump_details is not None:
        rollout_data = rollout_data or str(args.dump_details / "rollout_data" / f"{ROLLOUT_ID}.safetensors")
        train_data = train_data or str(args.dump_details / "train_data" / f"{ROLLOUT_ID}.safetensors")
    if rollout_data is not None and rollout_data == train_data:
        parser.error(
            "--save-debug-train-data must differ from --save-debug-rollout-data: one would overwrite the other"
        )
    for flag, pattern in (("--save-debug-rollout-data", rollout_data), ("--save-debug-train-data", train_data)):
        if pattern is not None and ROLLOUT_ID not in pattern:
            parser.error(f"{flag} {pattern} lacks {ROLLOUT_ID}: every rollout would overwrite the last")
    return Options(
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

"""Which flags a trainer has: by its ``--help``, by what its parsers wrote in a replay, or by a checkout's source."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from repro.doctor.artefacts.kinds import ParserDump, Reader
from repro.doctor.artefacts.launches.system import checkout_of
from repro_golden.base.errors import ReproError
from repro_golden.base.systems import System

__all__ = ["ENGINE", "PARSERS"]

ENGINE = ("--sglang-", "--router-")
"""Flags of the rollout engine, which no parser looks at where nothing is sampled (slime/utils/arguments.py:1607)."""

_LARGEST = 16 << 20
_SOURCE = 2 << 20
_FILES = 4000
_DUMP = re.compile(r"parsers-.*\.jsonl")
_OWN = ("tests", "docs", "docker", "parsers-*.jsonl")
"""Of a checkout: what holds no launch, dump or log of its user's."""
_REGISTERS = frozenset({"add_argument", "reset_arg"})
_USAGE = re.compile(rb"\Ausage: |\n(usage: |options:|optional arguments:)")


def _fits(path: Path) -> bool:
    if path.is_dir():
        return checkout_of(path) is not None or any(_DUMP.fullmatch(name) for name in _names(path))
    if _DUMP.fullmatch(path.name):
        return path.is_file()
    if path.suffix not in ("", ".txt", ".help", ".log", ".out") or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(1 << 16)
    # a log that ends in a usage line is a log: help has options, one a line
    return b"\0" not in head and _USAGE.search(head) is not None and len(_helped(head.decode(errors="replace"))) > 5


def _read(path: Path) -> Iterable[ParserDump]:
    try:
        if path.is_dir():
            system = checkout_of(path)
            if system is not None:
                return [_of_source(path, system)]
            files = [path / name for name in sorted(_names(path)) if _DUMP.fullmatch(name)]
            return [_of_replay(path, files)]
        if _DUMP.fullmatch(path.name):
            return [_of_replay(path, [path])]
        return [_of_help(path)]
    except OSError as error:
        raise ReproError(f"{path} cannot be read: {error.strerror or error}") from None


PARSERS = Reader("flags of a trainer", _fits, _read, owns=_OWN)
"""``python train.py --help > help.txt``, ``parsers-*.jsonl`` of a replay, or a checkout of slime, Miles or Relax."""


def _names(path: Path) -> list[str]:
    return [entry.name for entry in os.scandir(path)]


def _text(path: Path) -> str:
    with path.open("rb") as file:
        source = file.read(_LARGEST + 1)
    if len(source) > _LARGEST:
        raise ReproError(f"{path} is larger than 16 MiB: no list of flags")
    return source.decode(errors="replace")


# -- python train.py --help


def _of_help(path: Path) -> ParserDump:
    options = _helped(_text(path))
    if not options:
        raise ReproError(f"{path} lists no flags")
    # slime's parsers are several: help of one alone says nothing of the others' flags
    whole = "--rollout-batch-size" in options and "--tensor-model-parallel-size" in options
    return ParserDump(path, frozenset(options), "--help", complete=whole, abbreviates=True)


def _helped(text: str) -> set[str]:
    """Flags of the lines that define them: not those that a description mentions."""
    flags: set[str] = set()
    for line in text.splitlines():
        if not (match := re.match(r"\s{1,12}(-.*)", line)):
            continue
        defined = re.split(r"\s{2,}", match[1], maxsplit=1)[0]
        flags |= {option[1] for option in re.finditer(r"(?:\A|, |/ )(--?[A-Za-z][\w.-]*)", defined)}
    return flags


# -- parsers-*.jsonl


def _of_replay(path: Path, files: Sequence[Path]) -> ParserDump:
    options: set[str] = set()
    own_flags: list[str] = []
    abbreviates = False
    for file in files:
        for line in _lines(file):
            had = line.get("options")
            options |= {word for word in had if isinstance(word, str)} if isinstance(had, list) else set()
            flags = line.get("own")
            own_flags += [word for word in flags if isinstance(word, str)] if isinstance(flags, list) else []
            abbreviates |= line.get("abbreviates") is True
    if not options:
        raise ReproError(f"{path} holds nothing that a parser said")
    ignored = dict.fromkeys(
        flag
        for flag in own_flags
        if flag not in options
        and not flag.startswith(ENGINE)
        and not (abbreviates and any(option.startswith(flag) for option in options))
    )
    return ParserDump(path, frozenset(options), "a replay", True, tuple(ignored), abbreviates)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that are whole: a process may be writing its last."""
    for line in _text(path).splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(value, dict):
            yield value


# -- a checkout


def _of_source(path: Path, system: System) -> ParserDump:
    options: set[str] = set()
    for file in _sources(path, system):
        try:
            with file.open("rb") as opened:
                source = opened.read(_SOURCE)
        except OSError:
            continue
        if b"add_argument" in source or b"reset_arg" in source:
            options |= _registered(source)
    if not options:
        raise ReproError(f"{path} registers no flags below {system}/")
    return ParserDump(path, frozenset(options), f"the source of {system}", complete=False)


def _sources(path: Path, system: System) -> Iterator[Path]:
    count = 0
    for folder, folders, names in os.walk(path / system):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.endswith(".py"):
                count += 1
                if count > _FILES:
                    return
                yield Path(folder, name)


def _registered(source: bytes) -> set[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    flags: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _REGISTERS:
                texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                flags |= {text for text in texts if text.startswith("--")}
    return flags

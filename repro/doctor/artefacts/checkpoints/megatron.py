"""Folders that Megatron saves to: the tracker, the iterations and their files, and the arguments of the save."""

from __future__ import annotations

import contextlib
import os
import pickletools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from repro.doctor.artefacts.bounded_json import read_bytes
from repro.doctor.artefacts.kinds import MegatronCheckpoint, Reader
from repro_golden.base.errors import ReproError
from repro_golden.dumps.archive.reading import peek
from repro_golden.dumps.values import Record

__all__ = ["MEGATRON", "RELEASE", "TRACKER", "iteration_of", "read_extents", "read_megatron"]

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = -1
"""The key of the folder ``release``."""

_ITERATION = re.compile(r"iter_(\d{7,15})")
_ARGS_LIMIT = 2 << 30  # of a file that holds the model too
_FILES = 200_000
_DEPTH = 4


def iteration_of(name: str) -> int | None:
    """The iteration of a folder's name; `RELEASE` for ``release``; None for other names."""
    if name == "release":
        return RELEASE
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match and match[1].isascii() else None


def read_megatron(path: Path) -> MegatronCheckpoint:
    """A folder of checkpoints, or one iteration of it; what is corrupt in it stands in `damage`.

    The ``.metadata`` of the newest iteration is read, of the one that the tracker names, and of ``release``.

    Raises:
        ReproError: the folder cannot be read.
    """
    own_iteration = iteration_of(path.absolute().name)
    if own_iteration is not None and not (path / TRACKER).exists() and not _iterations(path):
        folders = {own_iteration: path}
    else:
        folders = _iterations(path)
    damage: dict[str, str] = {}
    files = {iteration: dict(_files(folder)) for iteration, folder in folders.items()}
    extents: dict[int, Mapping[str, int]] = {}
    tracker = _tracker(path, damage)
    for iteration in sorted({max(folders, default=RELEASE), _named(tracker), RELEASE} & set(folders)):
        if ".metadata" in files[iteration]:
            try:
                extents[iteration] = read_extents(folders[iteration] / ".metadata")
            except ReproError as error:
                damage[_relative(path, folders[iteration] / ".metadata")] = str(error)
    args = None
    if folders:
        newest = max(folders)
        args = _args(path, folders[newest], files[newest], damage)
    return MegatronCheckpoint(
        path=path,
        tracker=tracker,
        iterations=tuple(sorted(i for i in folders if i != RELEASE)),
        files=files,
        args=args,
        extents=extents,
        damage=damage,
    )


def _iterations(path: Path) -> dict[int, Path]:
    try:
        children = {number: child for child in path.iterdir() if (number := iteration_of(child.name)) is not None}
        return {number: children[number] for number in sorted(children) if children[number].is_dir()}
    except OSError as error:
        raise ReproError(f"{path} cannot be read: {error}") from None


def _relative(path: Path, file: Path) -> str:
    return file.relative_to(path).as_posix()


def _tracker(path: Path, damage: dict[str, str]) -> str | None:
    if not (path / TRACKER).exists():
        return None
    try:
        return read_bytes(path / TRACKER, 1 << 20).decode("utf-8", "backslashreplace")
    except ReproError as error:
        damage[TRACKER] = str(error)
        return ""


def _named(tracker: str | None) -> int:
    word = (tracker or "").strip()
    return int(word) if word.isascii() and word.isdigit() and len(word) < 16 else RELEASE


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    """Every file below a folder with its size; links to folders are not followed."""
    todo = [(folder, "", 0)]
    count = 0
    while todo:
        here, prefix, depth = todo.pop()
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            count += 1
            if count > _FILES:
                return
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    if depth < _DEPTH:
                        todo.append((Path(entry.path), f"{prefix}{entry.name}/", depth + 1))
                elif entry.is_file():
                    yield prefix + entry.name, entry.stat().st_size


def _args(path: Path, folder: Path, files: Mapping[str, int], damage: dict[str, str]) -> Mapping[str, Any] | None:
    """The arguments of the save: of ``common.pt``, else of the first rank's own file."""
    ranks = sorted(name for name in files if re.fullmatch(r"mp_rank_\d{2,}(_\d{3,})*/model_optim_rng\.pt", name))
    for name in [*(["common.pt"] if "common.pt" in files else []), *ranks[:1]]:
        if not files[name] or files[name] > _ARGS_LIMIT:
            continue
        try:
            contents = peek(folder / name, limit=2 * _ARGS_LIMIT)
        except ReproError as error:
            damage[_relative(path, folder / name)] = str(error)
            continue
        args = contents.get("args") if isinstance(contents, dict) else None
        fields = args.state if isinstance(args, Record) else args
        if isinstance(fields, dict):
            return {key: value for key, value in fields.items() if isinstance(key, str)}
    return None


def _fits(path: Path) -> bool:
    if not path.is_dir():
        return path.name == TRACKER and path.is_file()
    if (path / TRACKER).exists() or _holds_weights(path):
        return True
    numbered = ((child, iteration_of(child.name)) for child in path.iterdir())
    return any(
        child.is_dir() and (number != RELEASE or _holds_weights(child))
        for child, number in numbered
        if number is not None
    )


def _holds_weights(path: Path) -> bool:
    """Whether a folder is itself an iteration with weights."""
    return iteration_of(path.absolute().name) is not None and (
        (path / ".metadata").exists() or (path / "common.pt").exists() or any(path.glob("mp_rank_*"))
    )


MEGATRON = Reader(
    "Megatron checkpoint", _fits, lambda path: [read_megatron(path if path.is_dir() else path.parent)],
    owns=(TRACKER, "iter_*", "release"), beside=True,
)  # fmt: skip
"""A folder with a tracker or with iterations; one iteration with weights alone; the tracker stands for its folder."""

# -- what the ``.metadata`` of a distributed checkpoint says of its ``.distcp`` files


_LIMIT = 1 << 30
_LISTED = 32 << 20
"""Bytes of a pickle whose opcodes are listed one by one (some seconds); of a larger one only names are taken."""

_NAME = re.compile(rb"__\d{1,9}_\d{1,9}\.distcp")
_FIELDS = ("relative_path", "offset", "length")
_TEXTS = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"})
_NUMBERS = frozenset({"BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4"})
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})


def read_extents(path: Path) -> dict[str, int]:
    """How many bytes each file must have at least, by name; 0 where only its name is known.

    Raises:
        ReproError: not readable, cut short, or no pickle.
    """
    raw = read_bytes(path, _LIMIT)
    if not raw.endswith(b"."):
        raise ReproError(f"{path} is {'cut short' if raw else 'empty'}: the save was interrupted; save again")
    extents = {name.decode(): 0 for name in _NAME.findall(raw)}
    if len(raw) <= _LISTED:
        for name, end in _listed(path, raw):
            extents[name] = max(extents.get(name, 0), end)
    return extents


def _listed(path: Path, raw: bytes) -> list[tuple[str, int]]:
    """Pairs of a file's name and where one of its pieces ends."""
    memo: dict[int, Any] = {}
    recent: list[Any] = []
    pieces: list[tuple[str, int]] = []
    count = 0
    try:
        for opcode, argument, _ in pickletools.genops(raw):
            name = opcode.name
            if name in _TEXTS or name in _NUMBERS:
                recent.append(argument)
            elif name in _GETS:
                recent.append(memo.get(_key(argument)))
            elif name == "MEMOIZE":
                memo[count] = recent[-1] if recent else None
                count += 1
                continue
            elif name in _PUTS:
                memo[_key(argument)] = recent[-1] if recent else None
                continue
            else:
                recent.append(None)
            if len(recent) >= 6 and tuple(recent[-6::2]) == _FIELDS:
                file, offset, length = recent[-5::2]
                if isinstance(file, str) and _size(offset) and _size(length):
                    pieces.append((file, offset + length))
            del recent[:-6]
    except Exception as error:  # noqa: BLE001 - the standard library raises what it likes on bytes that are no pickle
        raise ReproError(f"{path} is damaged: its pickle breaks off ({str(error)[:100]}); save again") from None
    return pieces


def _key(argument: Any) -> int:
    return int(argument)


def _size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62

"""Reading `.pt` files: torch.save archives and plain pickles, bounded, and without running what they name."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

from repro_golden.base.errors import ReproError
from repro_golden.dumps.archive.bounds import LIMIT, Budget, settle
from repro_golden.dumps.archive.directory import Archive
from repro_golden.dumps.archive.pickles import read_pickle

__all__ = ["LIMIT", "peek", "read_archive"]

_LEGACY = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""The integer that opens torch's form of before 1.6, which was no zip."""

_NEWEST = 10
"""The newest archive version that torch writes."""


def read_archive(path: str | os.PathLike[str], *, allow: Collection[str] = (), limit: int = LIMIT) -> Any:
    """Read a torch.save archive or a plain pickle as plain values.

    Tensors become `Tensor`s (parameters too; device and requires_grad are dropped), numpy arrays stay arrays
    (read-only, little-endian), numpy scalars stay numpy scalars, torch.Size becomes a tuple, and torch's dtypes
    `Unknown`s with names like `torch.float32`.

    Args:
        path: the file.
        allow: foreign classes and functions, by dotted name, that are read as `Record`s of their plain fields.
        limit: bytes of memory that reading may need, in estimate.

    Raises:
        ReproError: it cannot be read, is damaged, passes a bound, or names a class that is not allowed.
    """
    value, names = _read(path, limit)
    refused = sorted(names - set(allow))
    if refused:
        flags = " ".join(f"--allow-pickle {name}" for name in refused[:5])
        if len(refused) == 1:
            cure = f"{flags} reads it as plain fields (its code never runs)"
            raise ReproError(f"{path} names {refused[0]}, which is not read: {cure}")
        named = ", ".join(refused[:5]) + (f" and {len(refused) - 5} more" if len(refused) > 5 else "")
        cure = f"{flags} reads them as plain fields (their code never runs)"
        raise ReproError(f"{path} names {named}, which are not read: {cure}")
    return value


def peek(path: str | os.PathLike[str], *, limit: int = LIMIT) -> Any:
    """Read as `read_archive` does, with every foreign class as a `Record` or `Unknown`: for recognising a file.

    Raises:
        ReproError: it cannot be read, is damaged, or passes a bound.
    """
    return _read(path, limit)[0]


def _read(path: str | os.PathLike[str], limit: int) -> tuple[Any, set[str]]:
    budget = Budget(str(path), limit)
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise ReproError(f"{path} is not a file: give the .pt file itself")
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(2)
            if head == b"PK":
                value = _read_torch(Archive(file, size, budget), budget)
            else:
                file.seek(0)
                value = _read_plain(file, size, budget)
    except FileNotFoundError:
        raise ReproError(f"no file at {path}: give the .pt file that the trainer wrote") from None
    except MemoryError:
        raise ReproError(f"{path} needs more memory than there is: read it on a larger machine") from None
    except (OSError, ValueError) as error:
        raise ReproError(f"{path} cannot be read: {error}") from None
    return value, settle(value, budget)


def _read_torch(archive: Archive, budget: Budget) -> Any:
    if "byteorder" in archive and archive.read("byteorder") != b"little":
        raise ReproError(f"{budget.where} was written on a big-endian machine: write it again on a little-endian one")
    if "version" in archive:
        version = archive.read("version").strip()
        if not version.isdigit() or len(version) > 4 or int(version) > _NEWEST:
            raise ReproError(f"{budget.where} has an archive version that is not known: upgrade repro-harness")
    if "constants.pkl" in archive:
        raise ReproError(f"{budget.where} is a TorchScript program, not data: save the data with torch.save")
    return read_pickle(archive.read("data.pkl"), budget, lambda key: archive.read(f"data/{key}"))


def _read_plain(file: BinaryIO, size: int, budget: Budget) -> Any:
    path = budget.where
    head = file.read(len(_LEGACY) + 2)
    if not size:
        raise ReproError(f"{path} is empty: wait until it is written, or write it again")
    if head[2:14] == _LEGACY:
        raise ReproError(f"{path} has torch's form of before 1.6: load it with torch and save it again with torch.save")
    if head[:1] != b"\x80":
        raise ReproError(
            f"{path} is neither a torch.save archive nor a pickle: give the .pt file of a rollout or train dump"
        )
    budget.spend(size)
    return read_pickle(head + file.read(size - len(head)), budget)

"""Reading `.pt` files: torch.save archives and plain pickles, bounded, and without running what they name."""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from repro_golden.base.errors import ReproError
from repro_golden.dumps.archive.bounds import LIMIT, Budget, settle, shown
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
        allow: foreign classes and functions, by dotted name, that are read as `Record`s of their plain fields. So is
            what lies in such a class: Python 3.11.2 names an enum's member, 3.11.7 calls the enum.
        limit: bytes of memory that reading may need, in estimate.

    Raises:
        ReproError: it cannot be read, is damaged, passes a bound, or names a class that is not allowed.
    """
    value, names = _read(path, limit)
    inside = {name for name, parts in names.items() if parts > 1 and name.rpartition(".")[0] in allow}
    refused = sorted(names.keys() - inside - set(allow))
    if refused:
        flags = " ".join(f"--allow-pickle {name}" for name in refused[:5])
        if len(refused) == 1:
            fix = f"{flags} reads it as plain fields (its code never runs)"
            raise ReproError(f"{path} names {refused[0]}, which is not read: {fix}")
        named = ", ".join(refused[:5]) + (f" and {len(refused) - 5} more" if len(refused) > 5 else "")
        fix = f"{flags} reads them as plain fields (their code never runs)"
        raise ReproError(f"{path} names {named}, which are not read: {fix}")
    return value


def peek(path: str | os.PathLike[str], *, limit: int = LIMIT) -> Any:
    """Read as `read_archive` does, with every foreign class as a `Record` or `Unknown`: for recognising a file.

    Raises:
        ReproError: it cannot be read, is damaged, or passes a bound.
    """
    return _read(path, limit)[0]


def _read(path: str | os.PathLike[str], limit: int) -> tuple[Any, dict[str, int]]:
    budget = Budget(str(path), limit)
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise ReproError(f"{path} is not a file: give the .pt file itself")
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(2)
            if head == b"PK":
                value = _read_torch(_Archive(file, size, budget), budget)
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


def _read_torch(archive: _Archive, budget: Budget) -> Any:
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


# -- the zip directory of a torch.save archive, read strictly: stored entries, no overlaps, no path ever followed


_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_COMMENT = 0xFFFF
_ENTRY_MEMORY = 600  # bytes, about, of one entry's Python objects


@dataclass(frozen=True)
class _Entry:
    name: str
    crc: int
    size: int
    offset: int
    raw_name: bytes


class _Archive:
    """An open zip. Its entries are read by name from the open file; nothing is unpacked to the disk.

    Args:
        file: the archive, open for reading.
        size: its bytes.
        budget: names the file in messages, and bounds memory.

    Raises:
        ReproError: not a whole zip of the kind that torch.save writes.
    """

    def __init__(self, file: BinaryIO, size: int, budget: Budget) -> None:
        self._file = file
        self._size = size
        self._budget = budget
        self._starts: dict[str, int] = {}
        count, offset, length = self._end()
        entries = self._entries(count, offset, length)
        self._check_names(entries)
        self._check_places(entries, offset)
        self._by_name = {entry.name: entry for entry in entries}
        folders = {entry.name.partition("/")[0] for entry in entries}
        if len(folders) != 1 or f"{(folder := folders.pop())}/data.pkl" not in self._by_name:
            raise self._refusal(
                "is a zip, but no torch.save archive (no data.pkl in one folder)", "save it with torch.save"
            )
        self._folder = folder

    def __contains__(self, name: str) -> bool:
        return f"{self._folder}/{name}" in self._by_name

    def read(self, name: str) -> bytes:
        """The bytes of an entry below the archive's one folder.

        Raises:
            ReproError: no such entry, its checksum is wrong, or the budget is spent.
        """
        entry = self._by_name.get(f"{self._folder}/{name}")
        if entry is None:
            raise self._refusal(
                f"has no entry {shown(name)}, which its pickle refers to", "it is damaged; write it again"
            )
        self._budget.spend(entry.size)
        raw = self._at(self._starts[entry.name], entry.size)
        if zlib.crc32(raw) != entry.crc:
            raise self._refusal(f"is damaged: entry {shown(name)} has another checksum", "copy or write it again")
        return raw

    def _refusal(self, what: str, fix: str) -> ReproError:
        return ReproError(f"{self._budget.where} {what}: {fix}")

    def _at(self, offset: int, size: int) -> bytes:
        if offset < 0 or offset + size > self._size:
            raise self._refusal("is cut short or damaged", "copy or write it again")
        self._file.seek(offset)
        raw = self._file.read(size)
        if len(raw) != size:
            raise self._refusal("became shorter while it was read", "wait until it is written")
        return raw

    def _end(self) -> tuple[int, int, int]:
        """Number of entries, and offset and size of the directory."""
        start = max(0, self._size - _END.size - _COMMENT)
        tail = self._at(start, self._size - start)
        at = tail.rfind(b"PK\5\6")
        if at < 0 or len(tail) - at < _END.size:
            raise self._refusal("is cut short: its zip directory is missing", "copy or write it again")
        _, disk, first, here, count, length, offset, comment = _END.unpack_from(tail, at)
        if at + _END.size + comment != len(tail) or disk or first or here != count:
            raise self._refusal("is cut short or damaged: its zip directory does not end it", "copy or write it again")
        end = start + at
        if end >= _LOCATOR64.size and self._at(end - _LOCATOR64.size, 4) == b"PK\6\7":  # torch always writes it
            count, offset, length, end = self._end64(end - _LOCATOR64.size)
        if offset + length != end or count * _ENTRY.size > length:
            raise self._refusal("is damaged: its zip directory is not where it should be", "copy or write it again")
        return count, offset, length

    def _end64(self, at: int) -> tuple[int, int, int, int]:
        _, disk, where, disks = _LOCATOR64.unpack(self._at(at, _LOCATOR64.size))
        record = _END64.unpack(self._at(where, _END64.size))
        if disk or disks > 1 or record[0] != b"PK\6\6" or record[6] != record[7]:
            raise self._refusal("is damaged: its zip64 directory is missing", "copy or write it again")
        return record[7], record[9], record[8], where

    def _entries(self, count: int, offset: int, length: int) -> list[_Entry]:
        self._budget.spend(length + count * _ENTRY_MEMORY)
        raw = self._at(offset, length)
        entries = []
        at = 0
        try:
            for _ in range(count):
                entry, at = self._entry(raw, at)
                entries.append(entry)
        except struct.error:
            raise self._refusal("is damaged: its zip directory breaks off", "copy or write it again") from None
        if at != length:
            raise self._refusal("is damaged: its zip directory has another length", "copy or write it again")
        return entries

    def _entry(self, raw: bytes, at: int) -> tuple[_Entry, int]:
        fields = _ENTRY.unpack_from(raw, at)
        (
            magic,
            _,
            _,
            flags,
            method,
            _,
            _,
            crc,
            packed,
            size,
            name_length,
            extra_length,
            comment,
            disk,
            _,
            mode,
            offset,
        ) = fields
        name_at = at + _ENTRY.size
        extra_at = name_at + name_length
        end = extra_at + extra_length + comment
        if magic != b"PK\1\2" or end > len(raw) or disk not in (0, 0xFFFF):
            raise self._refusal(
                "is damaged: its zip directory holds no entry where one should be", "copy or write it again"
            )
        raw_name = raw[name_at:extra_at]
        try:
            name = raw_name.decode()
        except UnicodeDecodeError:
            raise self._refusal("has an entry whose name is no UTF-8", "save it with torch.save") from None
        if flags & 1:
            raise self._refusal(f"has an encrypted entry {shown(name)}", "save it with torch.save")
        size, packed, offset = self._wide(raw[extra_at : extra_at + extra_length], size, packed, offset)
        if method or packed != size:
            raise self._refusal(
                f"has a compressed entry {shown(name)}, which torch.save never writes", "save it with torch.save"
            )
        if stat.S_ISLNK(mode >> 16):
            raise self._refusal(f"has a symbolic link {shown(name)}", "save it with torch.save")
        return _Entry(name, crc, size, offset, raw_name), end

    def _wide(self, extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
        """Sizes and offset with the zip64 field applied where it stands in for one."""
        values = [size, packed, offset]
        at = 0
        while at + 4 <= len(extra):
            kind, length = struct.unpack_from("<HH", extra, at)
            at += 4
            if kind == 1:
                field = extra[at : at + length]
                for index, value in enumerate(values):
                    if value == 0xFFFFFFFF:
                        values[index] = struct.unpack_from("<Q", field)[0]
                        field = field[8:]
                break
            at += length
        return values[0], values[1], values[2]

    def _check_names(self, entries: list[_Entry]) -> None:
        seen: set[str] = set()
        for entry in entries:
            if entry.name in seen:
                raise self._refusal(f"has two entries {shown(entry.name)}", "save it with torch.save")
            seen.add(entry.name)
            parts = entry.name.split("/")
            if len(parts) < 2 or "\\" in entry.name or "\0" in entry.name or {"", ".", ".."} & set(parts):
                raise self._refusal(
                    f"has an entry at {shown(entry.name)}, outside of its folder", "save it with torch.save"
                )

    def _check_places(self, entries: list[_Entry], directory: int) -> None:
        """Each entry's header and bytes lie before the next one's, so that no byte is read as two things."""
        free = 0
        for entry in sorted(entries, key=lambda entry: entry.offset):
            if entry.offset < free:
                raise self._refusal(f"has overlapping entries at {shown(entry.name)}", "save it with torch.save")
            header = _LOCAL.unpack(self._at(entry.offset, _LOCAL.size))
            start = entry.offset + _LOCAL.size + header[9] + header[10]
            name = self._at(entry.offset + _LOCAL.size, header[9])
            if header[0] != b"PK\3\4" or header[3] or name != entry.raw_name:
                raise self._refusal(
                    f"is damaged: entry {shown(entry.name)} is not where it should be", "write it again"
                )
            free = start + entry.size
            if free > directory:
                raise self._refusal(f"has an entry {shown(entry.name)} larger than the file", "copy or write it again")
            self._starts[entry.name] = start

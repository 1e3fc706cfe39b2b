"""Writing `.pt` files that `torch.load` reads, without torch: equal content gives equal bytes."""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from repro_golden.base.errors import MachineFailureError
from repro_golden.dumps.archive.pickling import pickled

__all__ = ["write_archive"]

_FOLDER = "archive"
_ALIGNMENT = 64  # where torch puts storages, so that they can be mapped into memory
_LOCAL_HEADER = 30
_ZIP64_EXTRA = 20
_CHUNK = 1 << 24


def write_archive(path: str | os.PathLike[str], value: Any) -> None:
    """Write a value as a torch.save archive, whole or not at all.

    A `Tensor` becomes a torch tensor, a numpy array an array that numpy 1 and 2 read, a `Record` an object of its
    class, which the reader must have. Shared objects are written once for each place, so that the bytes depend on
    content alone; memory order of arrays and the order of a set are not content, the order of a dict's keys is kept.

    Args:
        path: the file, whose folder is made.
        value: built of what `read_archive` gives.

    Raises:
        ReproError: a type that cannot be written, or nesting deeper than a reader follows.
        MachineFailureError: the disk is full or the folder cannot be written.
    """
    target = Path(path)
    data, tensors = pickled(value)
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                _add(archive, "data.pkl", data)
                _add(archive, "byteorder", b"little")
                for index, tensor in enumerate(tensors):
                    _add(archive, f"data/{index}", tensor.array.tobytes())
                _add(archive, "version", b"3\n")
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except OSError as error:
        raise MachineFailureError(f"cannot write {path}: {error.strerror}; free space or change permissions") from error
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(f"{_FOLDER}/{name}", (1980, 1, 1, 0, 0, 0))
    info.create_system = 3  # else it depends on the machine that writes
    info.external_attr = 0o644 << 16
    info.file_size = len(content)
    large = len(content) * 1.05 > zipfile.ZIP64_LIMIT  # as zipfile decides
    start = archive.start_dir + _LOCAL_HEADER + len(info.filename) + (_ZIP64_EXTRA if large else 0) + 4
    padding = -start % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w") as entry:
        for at in range(0, len(content), _CHUNK):
            entry.write(memoryview(content)[at : at + _CHUNK])

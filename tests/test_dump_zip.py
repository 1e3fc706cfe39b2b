"""The zip around a dump: what torch.save makes is read, and directories that lie are refused in one line."""

from __future__ import annotations

import os
import stat
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from dump_kit import refusal, saved

from repro_golden.base.errors import ReproError
from repro_golden.dumps.archive.reading import read_archive


def entries(path: Path, *, change: Any = None, method: int = zipfile.ZIP_STORED) -> Path:
    """A small dump whose zip entries `change` may alter, as pairs of a ZipInfo and its bytes."""
    made = [(zipfile.ZipInfo("a/data.pkl"), b"\x80\x02N."), (zipfile.ZipInfo("a/version"), b"3\n")]
    with zipfile.ZipFile(path, "w") as file:
        for info, content in change(made) if change else made:
            info.compress_type = method
            file.writestr(info, content)
    return path


def test_small_archive_is_fine(tmp_path: Path) -> None:
    """The archive that the tests below damage is read."""
    assert read_archive(entries(tmp_path / "a.pt")) is None


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zip_bombs(tmp_path: Path, method: int) -> None:
    """A gigabyte in a megabyte is refused by its compression alone, before a byte of it is unpacked."""
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", method) as file, file.open("a/data.pkl", "w") as entry:
        for _ in range(64 if method == zipfile.ZIP_DEFLATED else 1):
            entry.write(bytes(1 << 20))
    assert "compressed entry 'a/data.pkl'" in refusal(path)


@pytest.mark.parametrize(
    "name",
    ["../data.pkl", "a/../../etc/passwd", "/a/data", "a\\data", "a//x", "a/./x", "data.pkl", "a/", "b/data.pkl/.."],
)
def test_paths_are_never_followed(tmp_path: Path, name: str) -> None:
    """An entry outside of the archive's own folder is refused."""
    path = entries(tmp_path / "a.pt", change=lambda made: [*made, (zipfile.ZipInfo(name), b"x")])
    assert "outside of its folder" in refusal(path)


def test_odd_entries(tmp_path: Path) -> None:
    """Symbolic links, duplicates and a second folder are refused."""
    link = zipfile.ZipInfo("a/data/0")
    link.create_system = 3
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    path = tmp_path / "a.pt"
    assert "symbolic link 'a/data/0'" in refusal(entries(path, change=lambda made: [*made, (link, b"/etc/passwd")]))
    with pytest.warns(UserWarning, match="Duplicate name"):
        entries(path, change=lambda made: [*made, (zipfile.ZipInfo("a/data.pkl"), b"N.")])
    assert "two entries 'a/data.pkl'" in refusal(path)
    assert "no data.pkl" in refusal(entries(path, change=lambda made: [*made, (zipfile.ZipInfo("b/version"), b"3")]))
    assert "no data.pkl" in refusal(entries(path, change=lambda made: made[1:]))


def patched(path: Path, at: int, *values: int, form: str = "<I") -> Path:
    """A small dump with numbers written over its first directory entry, `at` bytes into it."""
    content = bytearray(entries(path).read_bytes())
    struct.pack_into(form, content, content.index(b"PK\1\2") + at, *values)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("at", "values", "form", "says"),
    [
        (20, (1 << 30, 1 << 30), "<2I", "larger than the file"),
        (20, (20, 20), "<2I", "overlapping"),
        (20, (5, 4), "<2I", "compressed"),
        (20, (0xFFFFFFFF, 0xFFFFFFFF), "<2I", "larger than the file"),
        (42, (1,), "<I", "not where it should be"),
        (42, (1 << 30,), "<I", "cut short"),
        (16, (1,), "<I", "another checksum"),
        (8, (1,), "<H", "encrypted"),
        (28, (60000,), "<H", "no entry where one should be"),
    ],
)
def test_directory_that_lies(tmp_path: Path, at: int, values: tuple[int, ...], form: str, says: str) -> None:
    """Sizes, offsets and checksums of the directory are checked against the file."""
    assert says in refusal(patched(tmp_path / "a.pt", at, *values, form=form))


def test_overlapping_entries(tmp_path: Path) -> None:
    """Two names for the same bytes, the heart of the best zip bombs, are refused."""
    content = bytearray(entries(tmp_path / "a.pt").read_bytes())
    second = content.index(b"PK\1\2", content.index(b"PK\1\2") + 1)
    struct.pack_into("<I", content, second + 42, 0)
    (tmp_path / "a.pt").write_bytes(content)
    assert "overlapping" in refusal(tmp_path / "a.pt")


def test_torchs_own_marks(tmp_path: Path) -> None:
    """Big-endian archives, archives of the future, TorchScript and torch's oldest form are refused by name."""
    path = tmp_path / "a.pt"

    def added(name: str, content: bytes) -> Path:
        return entries(path, change=lambda made: [made[0], (zipfile.ZipInfo(f"a/{name}"), content)])

    assert "big-endian" in refusal(added("byteorder", b"big"))
    assert "archive version" in refusal(added("version", b"99\n"))
    assert "archive version" in refusal(added("version", b"x"))
    assert "TorchScript" in refusal(added("constants.pkl", b""))
    torch.save({"a": 1}, path, _use_new_zipfile_serialization=False)
    assert "before 1.6" in refusal(path)


def test_what_is_no_dump(tmp_path: Path) -> None:
    """A missing file, a folder, a pipe, an empty file, text and a safetensors file are refused, each by what it is."""
    assert "no file at" in _line(tmp_path / "missing.pt")
    assert "not a file" in _line(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in _line(tmp_path / "pipe")
    path = tmp_path / "a.pt"
    for content, says in (
        (b"", "is empty"),
        (b"P", "neither"),
        (b"PK", "cut short"),
        (b"hello\n", "neither"),
        (bytes(9), "neither"),
    ):
        path.write_bytes(content)
        assert says in refusal(path)


def _line(path: Path) -> str:
    with pytest.raises(ReproError) as caught:
        read_archive(path)
    return str(caught.value)


def test_zip64(tmp_path: Path) -> None:
    """The zip64 records that torch always writes are followed, and refused when they lie."""
    path = saved(tmp_path / "a.pt", [1])
    content = path.read_bytes()
    at = content.index(b"PK\6\6")
    for offset in (24, 32, 40, 48):
        damaged = bytearray(content)
        struct.pack_into("<Q", damaged, at + offset, 1 << 60)
        path.write_bytes(damaged)
        refusal(path)
    wide = zipfile.ZipInfo("a/data.pkl")
    with zipfile.ZipFile(path, "w") as file, file.open(wide, "w", force_zip64=True) as entry:
        entry.write(b"\x80\x02K\x07.")
    assert read_archive(path) == 7

from __future__ import annotations

import json
import resource
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st

from repro_golden.base.canonical import (
    canonical_json,
    check_format,
    decode_float,
    digest,
    encode_float,
    read_json,
    write_atomic,
)
from repro_golden.base.errors import MachineFailureError, ReproError

RAM = next(iter(Path("/dev").glob("shm")), None)  # syncing to disk is what takes the time
TEXT = st.text(max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
SPECIAL = [0, 1 << 63, 1, 0x7FF0 << 48, 0xFFF0 << 48, 0x7FF8 << 48, (0x7FF0 << 48) + 1, (0xFFF8 << 48) + 0xDEADBEEF]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        yield Path(folder)


@given(st.integers(0, 2**64 - 1) | st.sampled_from(SPECIAL))
def test_floats_keep_their_bits_through_json(bits: int) -> None:
    """Every one of the 2^64 doubles comes back with the same bits: -0.0, subnormals, quiet and signalling NaNs."""
    value = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    text = canonical_json({"x": encode_float(value)})
    assert struct.pack("<d", decode_float(json.loads(text)["x"])) == bits.to_bytes(8, "little")


@given(VALUES, st.randoms(use_true_random=False))
def test_canonical_json_has_one_text_per_value(value: Any, random: Any) -> None:
    """The order in which keys were inserted leaves no trace, and the text gives the value back."""

    def shuffled(v: Any) -> Any:
        if isinstance(v, dict):
            items = list(v.items())
            random.shuffle(items)
            return {k: shuffled(x) for k, x in items}
        return [shuffled(x) for x in v] if isinstance(v, list) else v

    text = canonical_json(value)
    assert canonical_json(shuffled(value)) == text and json.loads(text) == value
    assert "\n" not in text and canonical_json(json.loads(text)) == text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [{"x": float("-inf")}]])
def test_canonical_json_has_no_nan(value: Any) -> None:
    """NaN and infinities are refused, since JSON has no spelling for them."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(value)


# -- digest

PARTS = st.lists(st.binary(max_size=20) | TEXT, max_size=4)


def raw(parts: list[bytes | str]) -> list[bytes]:
    return [p.encode() if isinstance(p, str) else p for p in parts]


@given(PARTS, PARTS)
def test_digests_are_equal_only_for_equal_parts(a: list[bytes | str], b: list[bytes | str]) -> None:
    """Equal digests mean equal lists of parts; text stands for its UTF-8 bytes."""
    assert (digest(*a) == digest(*b)) == (raw(a) == raw(b))


@given(st.binary(max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_where_parts_are_cut_is_part_of_the_digest(content: bytes, i: int, j: int) -> None:
    """One byte string cut in two ways has two digests; empty parts count; a part may hold a length prefix itself."""
    i, j = min(i, len(content)), min(j, len(content))
    assert (digest(content[:i], content[i:]) == digest(content[:j], content[j:])) == (i == j)
    prefix = struct.pack("<Q", len(content))
    seen = [digest(), digest(content), digest(content, b""), digest(content, b"", b""), digest(prefix + content)]
    assert len(set(seen)) == 5 and all(len(d) == 32 and int(d, 16) >= 0 for d in seen)


# -- files


@at_most(25)
@given(st.binary(max_size=50), st.text(max_size=20))
def test_write_atomic_writes_what_it_is_given(content: bytes, text: str) -> None:
    """Bytes stay as they are, text becomes UTF-8 without newline translation; nothing else is left in the folder."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        path = Path(folder) / "new" / "f"
        write_atomic(path, content)
        assert path.read_bytes() == content
        write_atomic(path, text)
        assert path.read_bytes() == text.encode() and [p.name for p in path.parent.iterdir()] == ["f"]


def test_a_failed_write_leaves_the_old_content(tmp_path: Path) -> None:
    """A disk that fills up leaves the old file whole and no part of the new one, and is the machine's failure."""
    path = tmp_path / "f"
    write_atomic(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(MachineFailureError, match="cannot write") as caught:
            write_atomic(path, b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    assert "\n" not in str(caught.value) and "free space" in str(caught.value)


def test_a_write_onto_a_folder_fails_cleanly(tmp_path: Path) -> None:
    """A folder under the file's name, or a file for its parent, is one error line and leaves nothing behind."""
    (tmp_path / "d" / "kept").mkdir(parents=True)
    with pytest.raises(MachineFailureError, match="cannot write"):
        write_atomic(tmp_path / "d", "x")
    (tmp_path / "file").touch()
    with pytest.raises(MachineFailureError, match="cannot write"):
        write_atomic(tmp_path / "file" / "x", "x")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["d", "file", "kept"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff", b'"x"'])
def test_what_is_no_json_object_is_one_line(tmp_path: Path, content: bytes) -> None:
    """Empty, cut, foreign or undecodable files are one line that names the file and what it should have been."""
    path = tmp_path / "f.json"
    with pytest.raises(ReproError, match=r"no golden run at .*f\.json"):
        read_json(path, "golden run")
    path.write_bytes(content)
    with pytest.raises(ReproError, match=r"f\.json is not a .*golden run") as caught:
        read_json(path, "golden run")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [None, "1", 1.0, 0, -3, True, [1]])
def test_what_is_no_format_number_is_refused(number: object) -> None:
    """Only a positive integer is a format number; true, text and floats are damage."""
    with pytest.raises(ReproError, match="x has no format number"):
        check_format(number, 2, "x")


def test_older_formats_are_read_and_newer_refused() -> None:
    """All formats up to the newest known one pass; a newer one is refused with the cure."""
    check_format(1, 2, "x")
    check_format(2, 2, "x")
    with pytest.raises(ReproError, match="x has format 3, this repro reads up to 2: upgrade repro-harness"):
        check_format(3, 2, "x")

"""Dumps under fire: drawn values go there and back, and damaged bytes give a value or one line, never anything else."""

from __future__ import annotations

import pickle
import random
import tempfile
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from dump_kit import archive, plain_values, with_torch, without_torch
from hypothesis import given
from hypothesis import strategies as st

from repro_golden.base.errors import ReproError
from repro_golden.dumps.archive.makers import KNOWN
from repro_golden.dumps.archive.pickling import write_archive
from repro_golden.dumps.archive.reading import peek, read_archive
from repro_golden.dumps.values import Record, Tensor, Unknown, same

MEMORY = 32 << 20  # what reading a file of a few KiB may take at most


@pytest.fixture(scope="module")
def scratch() -> Any:
    """A file name to write to again and again."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "fuzz.pt"


@given(value=plain_values())
def test_what_is_written_is_read(scratch: Path, value: Any) -> None:
    """Any plain value comes back with the same types and bits, and its bytes depend on its content alone."""
    write_archive(scratch, value)
    first = scratch.read_bytes()
    back = read_archive(scratch)
    assert same(back, value)
    write_archive(scratch, back)  # another object for each part, nothing shared as it was
    assert scratch.read_bytes() == first


@given(value=plain_values())
def test_torch_reads_what_is_written(scratch: Path, value: Any) -> None:
    """torch.load gives the same values."""
    write_archive(scratch, value)
    assert same(without_torch(torch.load(scratch, weights_only=False)), value)


@given(value=plain_values(), protocol=st.sampled_from([2, 3, 4, 5]))
def test_what_torch_writes_is_read(scratch: Path, value: Any, protocol: int) -> None:
    """torch.save of any plain value, in any protocol it offers, is read as that value."""
    torch.save(with_torch(value), scratch, pickle_protocol=protocol)
    assert same(read_archive(scratch), value)


@given(value=plain_values(with_tensors=False), protocol=st.sampled_from([2, 3, 4, 5]))
def test_plain_pickles_are_read(scratch: Path, value: Any, protocol: int) -> None:
    """The same of pickle.dump, for dumps that were never torch archives."""
    scratch.write_bytes(pickle.dumps(value, protocol))
    assert same(read_archive(scratch), value)


def small_dump(path: Path, protocol: int) -> bytes:
    """A dump of every kind of content in some hundred bytes of pickle."""
    import numpy as np

    value = {
        "samples": [{"tokens": [1, 300, 70000, -1], "log_probs": [-0.5, -1.5], "text": "é", "status": "ok"}] * 2,
        "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
        "eight": torch.zeros(2, dtype=torch.float8_e4m3fn),
        "array": np.arange(4, dtype=np.int32).reshape(2, 2),
        "names": np.array(["a", "bc"]),
        "odd": (np.float64(1.5), {1, 2}, b"\xff", 1 << 70, None, True, 2j, frozenset(["x"])),
    }
    torch.save(value, path, pickle_protocol=protocol)
    return path.read_bytes()


def outcome(path: Path) -> object:
    """What reading gives: a value, or one line; anything else fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return peek(path)
        except ReproError as error:
            line = str(error)
            assert "\n" not in line
            assert line.startswith(str(path))
            assert ":" in line.removeprefix(str(path))
            return error


@pytest.mark.parametrize("protocol", [2, 5])
def test_every_prefix_is_refused(tmp_path: Path, protocol: int) -> None:
    """A dump cut at any byte, whether archive or plain pickle, is refused in one line."""
    path = tmp_path / "cut.pt"
    whole = small_dump(path, protocol)
    plain = pickle.dumps({"tokens": [1, 300, 70000], "log_probs": [-0.5, 1.5], "text": ["é", b"x"]}, protocol)
    for content in (whole, plain):
        for end in range(len(content)):
            path.write_bytes(content[:end])
            assert isinstance(outcome(path), ReproError), end


@given(data=st.data())
def test_changed_bytes_of_an_archive(scratch: Path, data: st.DataObject) -> None:
    """Bytes changed anywhere in the file give a value or one line."""
    content = bytearray(small_dump(scratch, data.draw(st.sampled_from([2, 4, 5]))))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    scratch.write_bytes(content)
    outcome(scratch)


def mutated(content: bytes, chance: random.Random) -> bytes:
    """A pickle with a few bytes changed, dropped, doubled, or spans of it moved."""
    made = bytearray(content)
    for _ in range(chance.randint(1, 2)):
        at, span = chance.randrange(len(made)), chance.randint(1, 12)
        kind = chance.randrange(5)
        if kind == 0:
            made[at] = chance.randrange(256)
        elif kind == 1:
            del made[at : at + span]
        elif kind == 2:
            made[at:at] = made[at : at + span]
        elif kind == 3:
            start = chance.randrange(len(made))
            made[at:at] = made[start : start + span]
        else:
            made[at] = chance.choice(b"(]})tRbce\x85\x86\x87Qq0h2asu\x81\x93\x94N\x88\x90\x91\x92")
        made = made or bytearray(b".")
    return bytes(made)


def pickles() -> list[tuple[bytes, dict[str, bytes]]]:
    """Pickles of every protocol with the storages they name."""
    import zipfile

    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for protocol in (2, 3, 4, 5):
            path = Path(folder) / "x.pt"
            small_dump(path, protocol)
            with zipfile.ZipFile(path) as made:
                names = [name for name in made.namelist() if "/data/" in name]
                outcomes.append((made.read("x/data.pkl"), {name.rpartition("/")[2]: made.read(name) for name in names}))
        write_archive(path, {"r": Record("a.B", {"x": 1}, (Unknown("c.D"), Tensor.of(torch.ones(2))))})
        with zipfile.ZipFile(path) as made:
            outcomes.append((made.read("archive/data.pkl"), {"0": made.read("archive/data/0")}))
    return outcomes


@pytest.mark.whole
def test_mutated_pickles(tmp_path: Path) -> None:
    """Behind valid checksums, thousands of mutated pickles give a value or one line, in little memory."""
    chance = random.Random(1)
    path = tmp_path / "mutant.pt"
    seeds = pickles()
    tracemalloc.start()
    try:
        values = 0
        for _ in range(2500):
            content, storages = chance.choice(seeds)
            archive(path, mutated(content, chance), storages)
            tracemalloc.reset_peak()
            value = outcome(path)
            assert tracemalloc.get_traced_memory()[1] < MEMORY
            if not isinstance(value, ReproError):
                values += 1
                write_archive(path, value)
                assert same(peek(path), value)
    finally:
        tracemalloc.stop()
    assert values > 100  # else the mutations reach nothing behind the first bytes


TEXT = st.sampled_from(
    ["a", "os", "system", "collections", "OrderedDict", "numpy", "dtype", "i8", "C", "latin1", "storage"]
)
OPERATIONS = st.one_of(
    st.sampled_from([bytes([code]) for code in b"(]})tRbase01u2Q\x81\x85\x86\x87\x88\x8f\x90\x91\x92\x93\x94N"]),
    TEXT.map(lambda text: b"\x8c" + bytes([len(text)]) + text.encode()),
    st.integers(0, 6).map(lambda index: b"h" + bytes([index])),
    st.integers(0, 6).map(lambda index: b"q" + bytes([index])),
    st.integers(0, 255).map(lambda number: b"K" + bytes([number])),
    st.sampled_from(sorted(KNOWN)).map(lambda name: f"c{name[0]}\n{name[1]}\n".encode()),
    st.just(b"cos\nsystem\n"),
    st.just(b"c__builtin__\ngetattr\n"),
    st.just(b"G?\xf0\0\0\0\0\0\0"),
    st.just(b"\x96\x08\0\0\0\0\0\0\0abcdefgh"),
)


@given(operations=st.lists(OPERATIONS, max_size=25))
def test_any_operations(scratch: Path, operations: list[bytes]) -> None:
    """Drawn opcodes, each well formed, give a value or one line; what they make is written and read back alike."""
    archive(scratch, b"\x80\x04" + b"".join(operations) + b".", {"a": b"12345678"})
    value = outcome(scratch)
    if not isinstance(value, ReproError):
        write_archive(scratch, value)
        assert same(peek(scratch), value)


@given(content=st.binary(max_size=60))
def test_any_bytes_as_a_pickle(scratch: Path, content: bytes) -> None:
    """Drawn bytes run as a pickle give a value or one line."""
    archive(scratch, b"\x80\x02" + content)
    outcome(scratch)

"""Writing dumps: torch reads them, equal content gives equal bytes, and a file is whole or absent."""

from __future__ import annotations

import copy
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dump_kit import without_torch

from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.dumps.archive.pickling import write_archive
from repro_golden.dumps.archive.reading import peek, read_archive
from repro_golden.dumps.values import Record, Tensor, Unknown, same


def dump() -> dict[str, Any]:
    """A rollout dump as the trainers make it."""
    sample = {
        "index": 0,
        "tokens": [1, 300, 70_000],
        "rollout_log_probs": [-0.5, -1.25],
        "loss_mask": [1, 0],
        "status": "completed",
        "rollout_routed_experts": np.arange(12, dtype=np.int32).reshape(2, 3, 2),
        "multimodal_train_inputs": {"pixels": Tensor("bfloat16", np.arange(4, dtype=np.uint16))},
        "metadata": {},
    }
    return {"rollout_id": 3, "samples": [sample, {**sample, "index": 1}]}


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    """Neither the file's name, shared objects, memory and byte order nor the order of a set are in the bytes."""
    value = dump()
    apart = copy.deepcopy(value)
    for sample in apart["samples"]:
        sample["tokens"] = [int(str(token)) for token in sample["tokens"]]
        sample["status"] = "".join(["comp", "leted"])
        sample["rollout_routed_experts"] = np.asfortranarray(sample["rollout_routed_experts"].astype(">i4"))
    assert same(apart, value)
    write_archive(tmp_path / "3.pt", [value, set(range(0, 24, 8))])
    write_archive(tmp_path / "other_name.pt", [apart, set(range(16, -8, -8))])  # one slot of the table
    assert (tmp_path / "3.pt").read_bytes() == (tmp_path / "other_name.pt").read_bytes()


def test_other_content_gives_other_bytes(tmp_path: Path) -> None:
    """The sign of a zero, a NaN's payload, an array's shape and a number's type are content."""
    nan = np.frombuffer(b"\1\0\0\0\0\0\xf8\x7f")[0].item()
    values = [0.0, -0.0, float("nan"), nan, 0, False, None, np.float64(0), np.float32(0), np.zeros(2), np.zeros((2, 1))]
    values += [(), [], {}, OrderedDict(), set(), frozenset(), "", b"", bytearray(), 0j, -0j]
    kinds = set()
    for value in values:
        write_archive(tmp_path / "a.pt", value)
        kinds.add((tmp_path / "a.pt").read_bytes())
        assert [same(value, other) for other in values].count(True) == 1, value
    assert len(kinds) == len(values)


def test_torch_reads_it(tmp_path: Path) -> None:
    """torch.load gives the dump, mapped into memory too, since storages stand where torch puts them."""
    path = tmp_path / "3.pt"
    write_archive(path, dump())
    rule = torch.load(path, weights_only=False)
    assert same(without_torch(rule), dump())
    assert rule["samples"][0]["multimodal_train_inputs"]["pixels"].dtype == torch.bfloat16
    assert same(without_torch(torch.load(path, weights_only=False, mmap=True)), dump())
    with zipfile.ZipFile(path) as made:
        assert made.testzip() is None
        info = made.getinfo("archive/data/0")
    assert (info.header_offset + 30 + len(info.filename) + len(info.extra)) % 64 == 0


def test_plain_dumps_load_with_weights_only(tmp_path: Path) -> None:
    """A dump without arrays loads under torch's restricted unpickler, as the trainers' own do."""
    value = dump()
    for sample in value["samples"]:
        del sample["rollout_routed_experts"]
    write_archive(tmp_path / "3.pt", value)
    assert same(without_torch(torch.load(tmp_path / "3.pt", weights_only=True)), value)


def test_torch_is_not_needed(tmp_path: Path) -> None:
    """Reading and writing import neither torch nor what a record names."""
    program = (
        "import sys; from repro_golden.dumps.archive.reading import peek\n"
        "from repro_golden.dumps.archive.pickling import write_archive\n"
        "from repro_golden.dumps.values import Record, Tensor; import numpy as np\n"
        f"path = {str(tmp_path / 'a.pt')!r}\n"
        "write_archive(path, [Tensor('float32', np.zeros(2, 'f4')), Record('antigravity.X')]); peek(path)\n"
        "assert 'torch' not in sys.modules and 'antigravity' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_records_come_back(tmp_path: Path) -> None:
    """Records with arguments, keywords, items and nested names are written and read alike."""
    records = [
        Record("a.b.C", {"x": [1.5]}),
        Record("a.b.C.D", ("slots", {"y": 1}), (1, "z"), {"key": None}, parts=2),
        Record("a.f", None, (Unknown("builtins.list"),), items={"k": [1]}, made="call"),
        Record("a.L", None, items=[1, 2.5]),
        Unknown("a.b.C.D.E", 3),
        Unknown("torch.float32"),
    ]
    write_archive(tmp_path / "a.pt", records)
    assert same(peek(tmp_path / "a.pt"), records)


def test_same_keeps_records_apart() -> None:
    """Any part of a record makes another record."""
    record = Record("a.C", {"x": 1}, (1,), {"k": 1}, [1], "new", 1)
    others = [
        Record("a.D", {"x": 1}, (1,), {"k": 1}, [1]),
        Record("a.C", {"x": True}, (1,), {"k": 1}, [1]),
        Record("a.C", {"x": 1}, (2,), {"k": 1}, [1]),
        Record("a.C", {"x": 1}, (1,), {"k": 2}, [1]),
        Record("a.C", {"x": 1}, (1,), {"k": 1}, [1.0]),
        Record("a.C", {"x": 1}, (1,), {"k": 1}, [1], "call"),
    ]
    assert same(record, Record("a.C", {"x": 1}, (1,), {"k": 1}, [1]))
    assert not any(same(record, other) for other in others)
    assert same({1: "a", "b": 2}, {"b": 2, 1: "a"})
    assert not same({1: "a"}, {True: "a"})
    assert not same({1}, {1.0})


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (object(), "builtins.object"),
        ({"a": Path("x")}, "Path"),
        (torch.zeros(2), "torch.Tensor"),
        (np.zeros(2, dtype="datetime64[s]"), "datetime64"),
        (np.zeros(2, dtype=[("a", "i4")]), "dtype"),
        (np.array([[1], {}], dtype=object), "object array"),
        (np.zeros(2, dtype=np.longdouble), "dtype"),
        ({(Unknown("a.b"),): 1}, "with a key"),
        ([1 << 20_000], "1024 bytes"),
        (Record("noModule"), "no class in a module"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, value: Any, says: str) -> None:
    """What the reader would not read back is refused, and no file is left behind."""
    with pytest.raises(ReproError, match=says):
        write_archive(tmp_path / "a.pt", value)
    assert not list(tmp_path.iterdir())


def test_nesting_is_bounded_alike(tmp_path: Path) -> None:
    """What can be written can be read: a hundred levels, and not one more; a value that holds itself is refused."""
    value: Any = 1.5
    for _ in range(100):
        value = [value]
    write_archive(tmp_path / "a.pt", value)
    assert same(read_archive(tmp_path / "a.pt"), value)
    circle: list[Any] = []
    circle.append(circle)
    for bad in ([value], circle):
        with pytest.raises(ReproError, match="nested deeper"):
            write_archive(tmp_path / "b.pt", bad)
    with pytest.raises(ReproError, match="nested too deeply"):
        same(circle, copy.deepcopy(circle))


def test_whole_or_absent(tmp_path: Path) -> None:
    """Folders are made; where writing fails, the old file stays and nothing else does."""
    path = tmp_path / "made" / "here" / "a.pt"
    write_archive(path, 1)
    assert [item.name for item in path.parent.iterdir()] == ["a.pt"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(MachineFailureError, match="cannot write"):
        write_archive(tmp_path / "file" / "a.pt", 1)
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(MachineFailureError, match="cannot write"):
        write_archive(tmp_path / "folder.pt", 1)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "folder.pt", "made"]


def test_tensors_hold_what_they_say() -> None:
    """A tensor of an unknown dtype, or over an array of another one, is refused."""
    with pytest.raises(ReproError, match="qint8"):
        Tensor("qint8", np.zeros(1, np.int8))
    with pytest.raises(ReproError, match="held as"):
        Tensor("bfloat16", np.zeros(1, np.float32))
    with pytest.raises(ReproError, match="sparse"):
        Tensor.of(torch.zeros(2).to_sparse())
    with pytest.raises(ReproError, match="complex"):
        Tensor("complex64", np.zeros(1, np.complex64)).floats()

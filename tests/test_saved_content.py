"""What is read of the files that a program writes, and what is named."""

from __future__ import annotations

import argparse
import enum
import os
import sys
import tempfile
import types
import uuid
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn
from transformers import Qwen2Config

from repro_golden.recording.attach.alive.opened import leaves
from repro_golden.recording.attach.alive.parts import of_parts
from repro_golden.recording.attach.alive.readings import Held
from repro_golden.recording.attach.written.raw import number_of
from repro_golden.recording.attach.written.saving import Written, content
from repro_golden.trace import Row
from repro_golden.trace.checkpoints import checkpoint_content
from repro_golden.trace.signals import Signals


def test_the_content_of_a_file_is_its_tensors_and_numbers() -> None:
    """Order of keys and times play no part; a number, a text, a tensor's dtype and a missing key do."""
    a, left = content(
        {"model": {"b": torch.zeros(2), "a": torch.ones(1)}, "step": 3, "lr": 0.5, "step_time": [1.5], "by": "x"}
    )
    b, _ = content(
        {"lr": 0.5, "by": "x", "step_time": [9.0], "step": 3, "model": {"a": torch.ones(1), "b": torch.zeros(2)}}
    )
    assert list(a) == ["model.a", "model.b", "integers[step]", "floats[lr]", "texts[by]"] and a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert left == "1 value of time or memory (step_time)"
    assert content({"step": 4})[0]["integers[step]"] == 4
    assert content(nn.Linear(1, 1))[0]["bias"].shape == (1,)
    assert content({"integers": torch.ones(1), "n": 2})[0].keys() == {"integers", "integers#1[n]"}


class Color(enum.Enum):
    """What a setting may be."""

    RED, BLUE = 1, 2


@dataclass
class Kept:
    """What a trainer may save beside its weights."""

    act: object
    weights: object = None


class TinyArguments(Kept):
    """Settings, as its name says."""


TEXTS = {
    "text": ({"act": "relu"}, {"act": "gelu"}),
    "none": ({"act": None}, {"act": "None"}),
    "bytes": ({"act": b"x"}, {"act": b"/\xff"}),
    "large": ({"seed": 2**63 + 1}, {"seed": 2**63 + 2}),
    "larger": ({"seed": 10**5000}, {"seed": 10**5000 + 1}),
    "deque": (deque([1]), deque([2])),
    "set": ({"b", "a"}, {"b", "c"}),
    "record": (Kept("relu", torch.ones(1)), Kept("gelu", torch.ones(1))),
    "namespace": (argparse.Namespace(act="relu", w=torch.ones(1)), argparse.Namespace(act="gelu", w=torch.ones(1))),
    "array": (np.array(["a", "b"]), np.array(["a", "c"])),
    "dtype": (torch.float32, torch.float64),
    "same key": ({1: "a", "1": "b"}, {1: "c", "1": "b"}),
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_tensor_in_a_file_counts(name: str) -> None:
    """Texts, None, bytes, integers of any size, and what is in containers and records of any kind."""
    (a, left), (b, _) = (content(value) for value in TEXTS[name])
    assert a.keys() == b.keys() and not left
    assert any(not torch.equal(a[key], b[key]) for key in a)


SETTINGS = {
    "record": lambda name: TinyArguments(name),
    "record of records": lambda name: TinyArguments([Kept(name)], {"a": Kept(name)}),
    "named record": lambda name: {"train_config": Kept(name)},
    "namespace": lambda name: argparse.Namespace(out_dir=name, workers=len(name), act=torch.float32),
    "simple": lambda name: {"args": types.SimpleNamespace(out_dir=name)},
    "nanoGPT's": lambda name: {"config": {"out_dir": name, "log_interval": len(name), "compile": name == "a"}},
    "Lightning's": lambda name: {"hyper_parameters": {"name": name, "nested": {"workers": len(name)}}},
    "configuration": lambda name: {"config": Qwen2Config(name_or_path=name, output_attentions=name == "a")},
    "enum": lambda name: TinyArguments(Color.RED if name == "a" else Color.BLUE),
    "function": lambda name: TinyArguments(len if name == "a" else sorted),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_in_a_file_count_by_what_they_do(name: str) -> None:
    """A commit that only changed `output_dir` or `dataloader_num_workers` differed in training_args.bin."""
    (a, left), (b, _) = (content(SETTINGS[name](value)) for value in ("a", "other"))
    assert not a and not b and left


def test_only_settings_without_tensors_are_left_out() -> None:
    """Numbers beside them count, and so does a record that leads to a tensor, at any depth, but not those in it."""
    deep = Kept([{"w": torch.ones(1)}], argparse.Namespace(lr=1))
    held, left = content({"args": {"w": torch.ones(1), "n": 3}, "step": 2, "losses": [0.5], "config": 4, "deep": deep})
    assert held.keys() == {
        "args.w", "deep.act.0.w", "integers[args.n]", "integers[step]", "integers[config]", "floats[losses]",
    }  # fmt: skip
    assert held["floats[losses]"].tolist() == [0.5] and left == "1 record of settings (Namespace)"
    module = nn.Linear(1, 1)
    module.args = {"rate": 1}  # type: ignore[assignment]
    assert content(Kept(module))[0].keys() >= {"act.weight", "act.bias"}
    assert content(module)[1] == "1 record of settings (args)"


def test_a_record_of_a_state_counts() -> None:
    """A loss history, an average's step: not each record without a tensor is one of settings."""
    held, left = content({"progress": Kept(3, [0.5])})
    assert held.keys() == {"integers[progress.act]", "floats[progress.weights]"} and not left


def test_a_list_is_one_signal_and_a_large_mapping_too() -> None:
    """Where each list ends counts; a number beside them, or another order of keys, moves none of the others."""
    tensors, other = (content({"a": [1, 2], "b": [3], **more})[0] for more in ({}, {"0": 9, "c": 4}))
    assert tensors["integers[a]"].tolist() == [1, 2] and tensors.keys() < other.keys()
    assert all(torch.equal(tensors[name], other[name]) for name in tensors)
    assert content([1, 2])[0].keys() == {"integers[value]"} and content(2)[0]["integers[value]"].shape == ()
    words = {f"w{k}": [k, k] for k in range(101)}
    ends = {**words, "w0": [0], "w1": [0, 1, 1]}
    held, moved = (content({"vocab": lists, "n": 1})[0] for lists in (dict(reversed(words.items())), ends))
    assert held.keys() == moved.keys() == {"integers[vocab.*]", "places[vocab.*]", "integers[n]"}
    assert [torch.equal(held[name], moved[name]) for name in sorted(held)] == [True, True, False]
    assert content(dict.fromkeys(words, 1))[0].keys() == {"integers[*]", "places[*]"}


def test_mappings_in_lists_and_in_mappings_are_few_signals() -> None:
    """A history has as many signals when it grows, and no file has one for each entry of a table."""
    history = [{"loss": 0.5, "step": k} for k in range(60)]
    few, many = (content({"log": [*history[:n], {"best": 1}]})[0] for n in (2, 60))
    assert few.keys() == many.keys()
    assert few.keys() == {f"{what}[log.*.{key}]" for what, key in (
        ("floats", "loss"), ("places", "loss"), ("integers", "step"), ("places", "step"), ("integers", "best"),
        ("places", "best"),
    )}  # fmt: skip
    table = content({"v": {f"k{k}": {"id": k, "s": "x"} for k in range(2000)}, "n": 1})[0]
    assert table.keys() == {"integers[v.*.id]", "places[v.*.id]", "texts[v.*.s]", "places[v.*.s]", "integers[n]"}
    ragged = {f"g{g}": {f"k{g}-{k}": 1 for k in range(15)} for g in range(15)}
    assert content({"v": ragged, "n": 1})[0].keys() == {"integers[v.*.*]", "places[v.*.*]", "integers[n]"}
    deep: object = 1
    for _ in range(5000):
        deep = {"k": deep}
    assert len(content(deep)[0]) == 1


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ([{"a": 1}, {"b": 2}], [{"b": 2}, {"a": 1}]),
        ({"best": [None, 1.0]}, {"best": [1.0, None]}),
        ([1.0, "x", 2.0], [1.0, 2.0, "x"]),
        ([{"a": 1}, {"a": 0.5}], [{"a": 0.5}, {"a": 1}]),
        ({"x": [[1], [2, 3]]}, {"x": [[1, 2], [3]]}),
        ({f"k{k}": {"a": k % 2} for k in range(101)}, {f"k{k}": {"b" if k == 5 else "a": k % 2} for k in range(101)}),
    ],
)
def test_where_a_value_lies_counts(value: object, other: object) -> None:
    """Values that have one name are told apart by the list's place, or the mapping's, that each is in."""
    a, b = content(value)[0], content(other)[0]
    assert a.keys() != b.keys() or any(not torch.equal(a[name], b[name]) for name in a)


def test_another_key_of_a_mapping_in_a_large_one_is_a_rename() -> None:
    """Its numbers lie where they lay."""
    mapping, other = ({name: {f"k{k}": {"a": k} for k in range(101)}} for name in ("old", "new"))
    pairs = zip(content(mapping)[0].values(), content(other)[0].values(), strict=True)
    assert [torch.equal(*pair) for pair in pairs] == [True, True]


def test_what_keys_are_in_one_run_alone_is_no_name() -> None:
    """Lightning keeps the scores of checkpoints by their paths. A slash in a tensor's name is no path."""
    held = content({"best": {"/here/a.ckpt": torch.ones(1), uuid.uuid4().hex: torch.ones(1), "enc/w": torch.ones(1)}})[
        0
    ]
    assert held.keys() == {"best.<0>", "best.<1>", "best.enc/w"}


def test_what_is_left_out_of_a_file_is_counted() -> None:
    """Texts that are others in every run, and objects of foreign classes."""
    passing = [
        "out/last", r"C:\out", "2026-11-20", "run_20261120_154701", "at 15:47", "Nov20_15-47-01", uuid.uuid4().hex,
        str(uuid.uuid4()), "<Model at 0x7f12345678>", "10.0.0.12", Path("x/y"), datetime.now(UTC),
    ]  # fmt: skip
    read_back, left = content({"of": passing, "it": [object(), torch.empty(1, device="meta")]})
    assert not read_back
    assert left == f"{len(passing)} texts that look like paths or dates, 1 tensor (it is on meta), 1 object (object)"
    assert content(["relu", "v1.2.3", "100", "cuda:0", "a-b_c", "0x1f", "deadbeef"])[1] == ""


def test_containers_are_read_to_any_depth() -> None:
    """Also where one holds itself, and where each holds the next one twice."""
    deep: object = torch.ones(1)
    for _ in range(5000):
        deep = {"k": deep}
    assert len(list(leaves(deep))) == 1
    loop: list[object] = [1]
    loop.append(loop)
    assert list(leaves(loop)) == [("0", 1)]
    twice: object = 1
    for _ in range(60):
        twice = [twice, twice]
    assert list(leaves(twice))
    assert list(leaves({"s": {3, 1}, "d": deque([2])})) == [("s.0", 1), ("s.1", 3), ("d.0", 2)]


def test_a_number_of_a_state_that_no_dtype_holds_is_read_whole() -> None:
    """Integers of more than 64 bits, and integers beside floats that would round them."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def own(*values: float) -> list[torch.Tensor]:
        tensors = []
        for value in values:
            optimizer.seed = value  # type: ignore[attr-defined]
            tensors.append(Held(optimizer, {"w": parameter}, {}).state()["number"].tensors["own.seed"])
        return tensors

    assert not torch.equal(*own(2**63 + 1, 2**63 + 2))
    assert not torch.equal(*own(10**400, 10**400 + 1))
    assert own(2**63 - 1)[0].tolist() == [2**63 - 1]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_read_in_parts() -> None:
    """Its codes have its name; scale and zero point, of each channel too, lie beside."""
    plain = torch.arange(4.0).reshape(2, 2)
    whole = torch.quantize_per_tensor(plain, 0.1, 3, torch.qint8)
    rows = torch.quantize_per_channel(plain, torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8)
    parts = of_parts({"w": whole, "r": rows, "x": plain})
    assert parts.keys() == {
        "w", "w.scale", "w.zero_point", "r", "r.scale", "r.zero_point", "r.axis", "x",
    }  # fmt: skip
    assert torch.equal(parts["w"], whole.int_repr()) and parts["w.scale"] == 0.1 and parts["w.zero_point"] == 3
    assert parts["r.scale"].tolist() == pytest.approx([0.1, 0.2])
    assert content({"w": whole})[0].keys() == {"w", "w.scale", "w.zero_point"}


def test_files_that_are_written_otherwise_are_named(tmp_path: Path) -> None:
    """What Python opens to write is known by its name, but for caches and the recorder's own folder."""
    (tmp_path / "own").mkdir()
    for folder in (".cache", "__pycache__", "__kept"):
        (tmp_path / folder).mkdir()
    written = Written(str(tmp_path / "own"))
    for name in ("notes.bin", "own/raw", ".cache/kernel", "__pycache__/x", "__0_0.distcp", ".metadata", "__kept/y"):
        (tmp_path / name).write_bytes(b"1")
    with tempfile.TemporaryFile(dir=tmp_path):
        pass
    assert (tmp_path / "notes.bin").read_bytes() == b"1"
    assert written.names == {"notes.bin", "__0_0.distcp", ".metadata", "y"}
    (tmp_path / "read").touch()
    written.paths.clear()
    (tmp_path / "read").read_text()
    assert written.names == set()


def test_files_are_called_what_they_are_called_in_the_end(tmp_path: Path) -> None:
    """A file that is written under a name of the moment has the name that it is given, however paths are spelled."""
    moved: list[tuple[str, str]] = []
    written = Written(str(tmp_path / ".hidden" / "raw"), lambda *paths: moved.append(paths))
    (tmp_path / ".hidden" / "new").mkdir(parents=True)
    new = str(tmp_path / ".hidden" / "new")
    for path in (os.fsencode(f"{new}/x.tmp"), f"{new}/y", Path(new) / "z"):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    os.replace(os.fsencode(f"{new}/x.tmp"), Path(new) / "x")  # noqa: PTH105
    assert written.names == {"x", "y", "z"}
    Path(new).rename(f"{new}er")
    assert set(written.paths) == {f"{new}er/{name}" for name in "xyz"}
    assert moved == [(f"{new}/x.tmp", f"{new}/x"), (new, f"{new}er")]


def test_what_a_hook_is_told_never_harms_the_program(tmp_path: Path) -> None:
    """Whatever an event brings, and whatever comes of it, the program's call goes on."""

    class Liar:
        def __fspath__(self) -> str:
            raise RuntimeError

    def fail(*_: str) -> None:
        raise ValueError

    written = Written(str(tmp_path), fail)
    for event in ("open", "os.rename"):
        for arguments in (
            (),
            (1, "w", 1),
            (Liar(), "w", 1),
            ("x", "y", -1, -1),
            ("x\0", None, os.O_WRONLY),
            (b"\xff", "w", 0),
        ):
            sys.audit(event, *arguments)
    assert "\udcff" in written.names


FILE_DTYPES = [
    torch.bfloat16, torch.bool, torch.complex64, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.int16, torch.int32, torch.int64, torch.int8,
    torch.uint16, torch.uint32, torch.uint64, torch.uint8,
]  # fmt: skip


def test_an_environment_without_torch_reads_the_same_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A safetensors file has the fingerprints, and a logged tensor the number, that torch gives them."""
    raw = torch.arange(256, dtype=torch.uint8)
    tensors = {
        f"{dtype}/{n}": (raw[:n] > 99 if dtype == torch.bool else raw[: n * dtype.itemsize].view(dtype)).clone()
        for dtype in FILE_DTYPES
        for n in (0, 1, 7, 12)
    }
    tensors |= {"matrix": torch.randn(3, 5), "empty": torch.ones(2, 0), "odd": torch.tensor([torch.nan, -0.0])}
    (tmp_path / "model.safetensors").write_bytes(save(tensors, {"by": "test"}))
    numbers = [torch.tensor(value).to(dtype) for value in (1.5, -0.0, torch.inf) for dtype in FILE_DTYPES[3:6]]
    numbers += [torch.tensor(-2.5, dtype=torch.bfloat16), torch.tensor(2**53 + 1), torch.tensor(7, dtype=torch.uint8)]
    rows = [collected("loss", number) for number in numbers]
    known = checkpoint_content(tmp_path), [repr(number_of(row)) for row in rows]
    for name in ("torch", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)  # what Python itself does for a module that may not be found
    assert (checkpoint_content(tmp_path), [repr(number_of(row)) for row in rows]) == known


def collected(name: str, value: torch.Tensor) -> Row:
    """A tensor as a row of a step."""
    signals = Signals()
    signals.take("forward", name, value)
    return signals.rows()[0]

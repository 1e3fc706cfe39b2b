"""Reading dumps: what real writers make is read, hostile files are refused in one line, and nothing of them runs."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import os
import pickle
import struct
import sys
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from dump_kit import archive, refusal, saved, tensor_pickle

from repro_golden.base.errors import ReproError
from repro_golden.dumps.archive.pickling import write_archive
from repro_golden.dumps.archive.reading import peek, read_archive
from repro_golden.dumps.values import Record, Tensor, Unknown, same

PROTOCOLS = [2, 3, 4, 5]


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A frozen dataclass, as Miles puts into its samples."""

    name: str
    rank: int = 8


class Sample:
    """The home of a nested enum, as both trainers have it."""

    class Status(enum.Enum):
        """How a sample ended."""

        COMPLETED = "completed"


class Ran:
    """An object whose pickle names a function with an effect."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


ADAPTER = f"{__name__}.Adapter"
STATUS = f"{__name__}.Sample.Status"


# What real writers make


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_dataclasses_are_read_only_by_name(tmp_path: Path, protocol: int) -> None:
    """A dataclass is refused with the flag that reads it, and then gives its fields without its class."""
    path = saved(tmp_path / "a.pt", {"samples": [{"adapter": Adapter("x")}]}, protocol)
    line = refusal(path)
    assert f"names {ADAPTER}, which is not read: --allow-pickle {ADAPTER}" in line
    record = read_archive(path, allow=[ADAPTER])["samples"][0]["adapter"]
    assert same(record, Record(ADAPTER, {"name": "x", "rank": 8}))
    write_archive(path, {"adapter": record})
    assert torch.load(path, weights_only=False) == {"adapter": Adapter("x")}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_enum_members_are_calls(tmp_path: Path, protocol: int) -> None:
    """A nested enum's member is a call of its class by a dotted name, in every protocol's way of saying so."""
    path = saved(tmp_path / "a.pt", {"status": Sample.Status.COMPLETED}, protocol)
    named = Sample.Status.COMPLETED.__reduce_ex__(protocol)[0] is getattr  # in some releases of Python 3.11
    assert f"--allow-pickle {STATUS}{'.COMPLETED' if named else ''} " in refusal(path)
    record = read_archive(path, allow=[STATUS])["status"]
    if not named:
        assert same(record, Record(STATUS, None, ("completed",), made="call", parts=2))
    write_archive(path, record)
    assert torch.load(path, weights_only=False) is Sample.Status.COMPLETED


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_enum_members_may_be_attributes_of_their_class(tmp_path: Path, protocol: int) -> None:
    """As Python 3.11.2 names them: who allows the class allows them; its module, or a like name, is not enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sample.Status, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
        path = saved(tmp_path / "a.pt", {"status": Sample.Status.COMPLETED}, protocol)
    assert f"--allow-pickle {STATUS}.COMPLETED " in refusal(path)
    with pytest.raises(ReproError, match="which is not read"):
        read_archive(path, allow=[STATUS[:-1], f"{STATUS}.COMP", __name__, f"{__name__}.Sample"])
    record = read_archive(path, allow=[STATUS])["status"]
    assert same(record, Unknown(f"{STATUS}.COMPLETED", 3))
    write_archive(path, record)
    assert torch.load(path, weights_only=False) is Sample.Status.COMPLETED


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_images_are_records(tmp_path: Path, protocol: int) -> None:
    """A PIL image is read as its fields when allowed, and written back as the same image."""
    image = PIL.Image.frombytes("RGB", (2, 1), b"abcdef")
    path = saved(tmp_path / "a.pt", {"images": [image]}, protocol)
    assert "--allow-pickle PIL.Image.Image " in refusal(path)
    value = read_archive(path, allow=["PIL.Image.Image"])
    assert value["images"][0].state[-1] == b"abcdef"
    write_archive(path, value)
    assert torch.load(path, weights_only=False)["images"][0] == image


def test_several_classes_in_one_line(tmp_path: Path) -> None:
    """All foreign names stand in one refusal, so that one more try is enough; a default factory is one of them."""
    path = saved(tmp_path / "a.pt", [defaultdict(list, a=1), datetime.date(2025, 1, 2)])
    names = ["builtins.list", "collections.defaultdict", "datetime.date"]
    assert " ".join(f"--allow-pickle {name}" for name in names) in refusal(path)
    archive, date = read_archive(path, allow=names)
    assert same(
        archive, Record("collections.defaultdict", args=(Unknown("builtins.list"),), items={"a": 1}, made="call")
    )
    assert date.name == "datetime.date"
    write_archive(path, [archive, date])
    assert torch.load(path, weights_only=False) == [defaultdict(list, a=1), datetime.date(2025, 1, 2)]


def test_peek_refuses_no_class(tmp_path: Path) -> None:
    """`peek` shows the records of unknown classes."""
    path = saved(tmp_path / "a.pt", [Adapter("x"), Sample])
    record, named = peek(path)
    assert record.state == {"name": "x", "rank": 8}
    assert named == Unknown(f"{__name__}.Sample")


def test_objects_of_old_protocols_are_records(tmp_path: Path) -> None:
    """Copyreg's two ways to make an object give the same record as the newer opcode."""
    fields = b"}X\x04\0\0\0nameX\x01\0\0\0xsb."
    for call in (b"_reconstructor\nca.b\nC\nc__builtin__\nobject\nN\x87R", b"__newobj__\nca.b\nC\n\x85R"):
        path = archive(tmp_path / "a.pt", b"\x80\x02ccopy_reg\n" + call + fields)
        assert same(read_archive(path, allow=["a.b.C"]), Record("a.b.C", {"name": "x"}))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tensors_of_every_kind(tmp_path: Path, protocol: int) -> None:
    """Views, shared storages, parameters, scalars and empty tensors have the values that torch gives them."""
    base = torch.arange(24, dtype=torch.float32)
    tensors = [
        base,
        base[3:9].reshape(2, 3).T,
        base[::5],
        base.as_strided((2, 3), (1, 2), 4),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0, 3, dtype=torch.int64),
        torch.tensor([1.5, -0.0, float("nan")]).to(torch.float8_e5m2),
        torch.tensor([True, False]),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, requires_grad=True),
        torch.tensor([1, 2], dtype=torch.uint16),
    ]
    archive = read_archive(saved(tmp_path / "a.pt", tensors, protocol))
    assert same(archive, [Tensor.of(tensor) for tensor in tensors])
    for ours, theirs in zip(archive, tensors, strict=True):
        assert ours.shape == tuple(theirs.shape)
        assert ours.numel == theirs.numel()
        assert same(Tensor.of(ours.torch()), ours)
    assert not archive[0].array.flags.writeable


@pytest.mark.parametrize(
    "name",
    ["bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"],
)
def test_narrow_floats_have_torchs_values(name: str) -> None:
    """`floats` gives what torch says for each bit pattern."""
    size = 1 if "8_" in name else 2
    bits = np.arange(256**size, dtype=f"<u{size}")
    tensor = Tensor(name, bits.view("<f2") if name == "float16" else bits)
    expected = tensor.torch().to(torch.float64).numpy()
    np.testing.assert_array_equal(tensor.floats(), expected)
    assert np.array_equal(np.signbit(tensor.floats())[expected == 0], np.signbit(expected)[expected == 0])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_both_numpys_names(tmp_path: Path, protocol: int) -> None:
    """Numpy 1 and numpy 2 call their modules differently; both are read. Scalars stay numpy scalars."""
    value = [np.arange(6, dtype=np.int32).reshape(2, 3), np.float64(0.5), np.array(["a", None, 1], dtype=object)]
    dump = pickle.dumps(value, protocol)
    assert b"numpy._core" in dump
    assert same(read_archive(archive(tmp_path / "2.pt", dump)), value)
    assert same(read_archive(archive(tmp_path / "1.pt", _as_numpy_1(dump))), value)
    assert isinstance(read_archive(tmp_path / "1.pt")[1], np.float64)


def _as_numpy_1(dump: bytes) -> bytes:
    """A pickle with numpy 1's module names: also where a length stands before a name, and without its frame."""
    for module in (b"numpy._core.multiarray", b"numpy._core.numeric"):
        older = module.replace(b"_core", b"core")
        dump = dump.replace(b"\x8c" + bytes([len(module)]) + module, b"\x8c" + bytes([len(older)]) + older)
        dump = dump.replace(b"c" + module, b"c" + older)
    return dump[:2] + dump[11:] if dump[2:3] == b"\x95" else dump


def test_plain_containers(tmp_path: Path) -> None:
    """Ordered dicts, sets, sizes, dtypes and huge integers are plain."""
    value = [OrderedDict(b=1, a=2), {1, "x"}, frozenset([b"y"]), 1 << 1000, -(1 << 2000), bytearray(b"z"), 1 + 2j]
    assert same(read_archive(saved(tmp_path / "a.pt", value)), value)
    assert read_archive(saved(tmp_path / "b.pt", [torch.Size([2, 3]), torch.bfloat16])) == [
        (2, 3),
        Unknown("torch.bfloat16"),
    ]


# Nothing runs


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_runs(tmp_path: Path, protocol: int) -> None:
    """A function that a pickle calls is refused by name, and does not run even when it is allowed."""
    trap = tmp_path / "trap"
    path = saved(tmp_path / "a.pt", Ran(trap), protocol)
    name = f"{os.system.__module__}.system"
    assert name in refusal(path)
    assert same(read_archive(path, allow=[name]), Record(name, None, (f"touch {trap}",), made="call"))
    assert not trap.exists()
    torch.load(path, weights_only=False)
    assert trap.exists()  # the trap works


def test_no_module_is_imported(tmp_path: Path) -> None:
    """The module of a named class is not even imported."""
    path = archive(tmp_path / "a.pt", b"\x80\x02cantigravity\nfly\n)R.")
    assert "antigravity.fly" in refusal(path)
    assert isinstance(read_archive(path, allow=["antigravity.fly"]), Record)
    assert "antigravity" not in sys.modules


def test_a_dropped_call_does_not_run(tmp_path: Path) -> None:
    """A call whose result is thrown away has no effect either."""
    path = archive(tmp_path / "a.pt", b"\x80\x02cos\nsystem\nX\x04\0\0\0exit\x85R0N.")
    assert read_archive(path) is None


@pytest.mark.parametrize("name", [b"os\x1b[31m", b"a b", b"", b"os.system;x", b"x" * 150, b"x" * 400])
def test_names_in_messages_are_safe(tmp_path: Path, name: bytes) -> None:
    """A class name with control characters, spaces or of absurd length does not reach the terminal."""
    path = archive(tmp_path / "a.pt", b"\x80\x04\x8c\x02os\x8d" + struct.pack("<Q", len(name)) + name + b"\x93.")
    assert refusal(path).isprintable()


# Bounds of the pickle

NESTED = 100_000


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"]" * NESTED + b"a" * (NESTED - 1) + b".", "nested deeper than 100"),
        (b")" + b"\x85" * NESTED + b".", "nested deeper than 100"),
        (b"]" + b"\x85" * NESTED + b"0N.", None),
        (b"]q\0h\0a.", "holds itself"),
        (b"}q\0K\x01h\0s.", "holds itself"),
        (b"]q\0h\0\x85q\x01ah\x010.", "holds itself"),
        (b"]r\0\0\0\x80.", "memoises number 2147483648"),
        (b"]q\x05h\x06.", "refers to memo 6"),
        (b"]j\0\0\0\x80.", "refers to memo 2147483648"),
        (b"\x8b\xff\xff\xff\x7f.", "integer of 2147483647 bytes"),
        (b"\x8b\0\x10\0\0" + b"\1" * 4096 + b".", "integer of 4096 bytes"),
        (b"X\xff\xff\xff\xffab.", "breaks off"),
        (b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fab.", "breaks off"),
        (b"\x8e\xff\xff\xff\xff\xff\xff\xff\xffab.", "breaks off"),
        (b"\x96\xff\xff\xff\xff\xff\xff\xff\xffab.", "breaks off"),
        (b"\x95\xff\xff\xff\xff\0\0\0\0N.", "breaks off"),
        (b"X\x01\0\0\0\xff.", "no UTF-8"),
        (b"]]0.", None),
        (b"NN.", "breaks off"),
        (b"(N.", "breaks off"),
        (b"0.", "breaks off"),
        (b"}(NNNu.", "sets items"),
        (b"K\x01Na.", "appends to something of type int"),
        (b"}]Ns.", "key of type list"),
        (b"\x80\x06N.", "protocol 6"),
        (b"N.N.", "2 bytes behind"),
        (b"I1\n.", "opcode INT"),
        (b"(i__main__\nX\n.", "opcode INST"),
        (b"\x82\x01.", "opcode EXT1"),
        (b"\x97.", "opcode NEXT_BUFFER"),
        (b"\xff.", "byte 255 is no pickle opcode"),
        (b"c__builtin__\ngetattr\nK\x01K\x02\x86R.", "builtins.getattr"),
        (b"c_codecs\nencode\nX\x01\0\0\0aX\x05\0\0\0rot13\x86R.", "latin1"),
        (b"c_codecs\nencode\nX\x02\0\0\0\xc4\x80X\x06\0\0\0latin1\x86R.", "no bytes"),
        (b"K\x01)R.", "calls something of type int"),
        (b"Nq\0Q.", "no tensor storage"),
    ],
)
def test_pickles_out_of_bounds(tmp_path: Path, content: bytes, says: str | None) -> None:
    """Each bound of the pickle machine refuses in one line; what is dropped before the end is no harm."""
    path = archive(tmp_path / "a.pt", b"\x80\x04" + content)
    if says is None:
        assert read_archive(path) in (None, [])
    else:
        assert says in refusal(path)


@pytest.mark.parametrize("pairs", [b"\x86", b"\x87"])
def test_hidden_multiplication(tmp_path: Path, pairs: bytes) -> None:
    """Tuples of one tuple, sixty times doubled, count for what writing and comparing them would take."""
    size = pairs[0] - 0x84
    level = b"q\0" + b"h\0" * (size - 1) + pairs
    line = refusal(archive(tmp_path / "a.pt", b"\x80\x02)" + level * 60 + b"."))
    assert "needs more than 16 GiB of memory to read: --limit SIZE" in line
    text = b"X\x10\x27\0\0" + b"x" * 10_000 + b"q\0" + b"0](" + b"h\0" * 10_000 + b"e."
    assert "needs more than 67108864 bytes" in refusal(archive(tmp_path / "b.pt", b"\x80\x02" + text), limit=64 << 20)


def test_keys_that_hash_for_ever(tmp_path: Path) -> None:
    """A key that is a tuple of tuples of shared tuples is refused before it is hashed, and so is one too deep."""
    doubled = b")" + b"".join(b"q\0h\0\x86" for _ in range(60))
    for key in (doubled, b")" + b"\x85" * NESTED):
        assert "with a key so large" in refusal(archive(tmp_path / "a.pt", b"\x80\x02}" + key + b"Ns."))
        assert "with a key so large" in refusal(archive(tmp_path / "a.pt", b"\x80\x04\x8f(" + key + b"\x90."))


def test_keys_that_collide(tmp_path: Path) -> None:
    """Integers that all hash alike would make a dict quadratic; too many of them are refused."""
    step = (1 << 61) - 1
    keys = b"".join(pickle.dumps(step * factor, 2)[2:-1] + b"N" for factor in range(2, 20_000))
    assert "10000 keys" in refusal(archive(tmp_path / "a.pt", b"\x80\x02}(" + keys + b"u."))


def test_sets_made_again_and_again(tmp_path: Path) -> None:
    """A few bytes that make a set of one long list cost what their work costs."""
    long = b"](" + b"".join(b"K" + bytes([number % 256]) for number in range(100_000)) + b"eq\0"
    again = b"h\0\x85q\x01c__builtin__\nset\nq\x020" + b"h\x02h\x01R0" * 5000
    path = archive(tmp_path / "a.pt", b"\x80\x02" + long + again + b".")
    assert "needs more than 1 GiB" in refusal(path, limit=1 << 30)


def test_limit(tmp_path: Path) -> None:
    """The limit is in bytes, and counts pickles, storages and arrays."""
    for value in ([1.5] * 100_000, torch.zeros(100_000), np.zeros(100_000), "x" * 800_000, [[] for _ in range(20_000)]):
        path = saved(tmp_path / "a.pt", value)
        assert "needs more than 400000 bytes" in refusal(path, limit=400_000)
        read_archive(path, limit=16_000_000)


# Bounds of tensors and arrays


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (tensor_pickle((1 << 40,), (0,), 4), "elements over a storage of 4"),
        (tensor_pickle((5,), (1,), 4), "reaches beyond its storage of 4 elements"),
        (tensor_pickle((2,), (1,), 4, offset=3), "reaches beyond"),
        (tensor_pickle((2, 2), (1, 3), 4), "reaches beyond"),
        (tensor_pickle((2,), (-1,), 4, offset=1), "strides of"),
        (tensor_pickle((-2,), (1,), 4), "a shape of"),
        (tensor_pickle((2,), (1,), 4, offset=-1), "does not fit"),
        (tensor_pickle((2, 2), (1,), 4), "does not fit its strides"),
        (tensor_pickle((1 << 30, 1 << 30), (0, 0), 4), "absurd"),
        (tensor_pickle((0, 1 << 62), (1, 1), 4), "a shape of"),
        (tensor_pickle((0, 1 << 57, 1 << 57), (1, 1, 1), 4), "absurd"),
        (tensor_pickle((1,) * 65, (1,) * 65, 4), "a shape of"),
        (tensor_pickle((2,), (1,), 5), "has 16 bytes in storage '0', where its pickle says 20"),
        (tensor_pickle((2,), (1,), 3), "where its pickle says 12"),
        (tensor_pickle((2,), (1,), 1 << 70), "no known kind"),
        (tensor_pickle((2,), (1,), 4, key="1"), "has no entry 'data/1'"),
        (tensor_pickle((2,), (1,), 4, key="../data.pkl"), "has no entry"),
        (tensor_pickle((2,), (1,), 4, storage="QInt8Storage"), "no known kind"),
        (tensor_pickle((2,), (1,), 16, storage="UntypedStorage"), "without a typed storage"),
    ],
)
def test_tensors_out_of_bounds(tmp_path: Path, content: bytes, says: str) -> None:
    """A tensor that reaches outside of its storage, or claims more than it holds, is refused."""
    assert says in refusal(archive(tmp_path / "a.pt", content, {"0": bytes(16)}))


def test_the_tensor_pickle_itself_is_fine(tmp_path: Path) -> None:
    """The kit's pickle with numbers that fit is read, so that the refusals above have the reasons they say."""
    path = archive(tmp_path / "a.pt", tensor_pickle((2, 2), (1, 2), 4), {"0": np.arange(4, dtype="<f4").tobytes()})
    assert same(read_archive(path), Tensor("float32", np.array([[0, 2], [1, 3]], dtype="<f4")))


def test_expanded_tensors_have_a_cure(tmp_path: Path) -> None:
    """torch.save keeps an expanded view; the refusal says what to save instead."""
    assert "save tensor.contiguous()" in refusal(saved(tmp_path / "a.pt", torch.zeros(1).expand(1000)))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.zeros(2, dtype=[("a", "i4")]), "dtype"),
        (np.array(["2025-01-01"], dtype="datetime64[D]"), "dtype 'M8'"),
        (np.array([[1], {}], dtype=object), "object array"),
        (np.zeros(1, dtype=np.longdouble), "dtype 'f16'"),
        (np.dtype("i4"), "holds a dtype"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "conjugated"),
        (torch.zeros(2).untyped_storage(), "holds a storage"),
    ],
)
def test_what_is_not_plain_is_refused(tmp_path: Path, value: Any, says: str) -> None:
    """Structured, dated and nested arrays, sparse and lazy tensors are refused by what they are."""
    assert says in refusal(saved(tmp_path / "a.pt", value))


@pytest.mark.parametrize(
    ("older", "newer", "says"),
    [
        (b"K\x01K\x04\x85", b"K\x01\x8a\x08\0\0\0\0\0\0\0\x10\x85", "a shape of"),
        (b"K\x01K\x04\x85", b"K\x01K\x05\x85", "over 16 bytes"),
        (b"K\x01K\x04\x85", b"K\x01J\xff\xff\xff\xff\x85", "a shape of"),
        (b"X\x02\0\0\0i4", b"X\x02\0\0\0O8", "object array"),
        (b"X\x02\0\0\0i4", b"X\x02\0\0\0V0", "dtype 'V0'"),
        (b"X\x02\0\0\0i4", b"X\x02\0\0\0U0", "dtype 'U0'"),
        (b"X\x02\0\0\0i4", b"X\x02\0\0\0S0", "dtype 'S0'"),
        (b"X\x02\0\0\0i4", b"X\x02\0\0\0i3", "dtype 'i3'"),
        (b"X\x02\0\0\0i4", b"X\x09\0\0\0U99999999", "dtype"),
        (b"X\x02\0\0\0i4", b"X\x02\0\0\0U1", "something else than text"),
        (b"X\x01\0\0\0<", b"X\x01\0\0\0?", "byte order"),
    ],
)
def test_arrays_out_of_bounds(tmp_path: Path, older: bytes, newer: bytes, says: str) -> None:
    """A numpy array whose shape, dtype and bytes do not fit together is refused."""
    dump = pickle.dumps(np.full(4, 0x7FFFFFFF, dtype="<i4"), 2)
    assert dump.count(older) == 1
    assert says in refusal(archive(tmp_path / "a.pt", dump.replace(older, newer)))


def test_array_without_content(tmp_path: Path) -> None:
    """An array whose BUILD never comes is refused."""
    dump = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85C\x01b\x87R."
    assert "without content" in refusal(archive(tmp_path / "a.pt", dump))

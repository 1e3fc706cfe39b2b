"""Reading dumps: what real writers make is read, hostile files are refused in one line, and nothing of them runs."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import os
import pickle
import stat
import struct
import sys
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from dump_kit import archive, tensor_pickle

from repro_golden.dumps.archive.reading import peek, read_archive
from repro_golden.dumps.archive.writing import write_archive
from repro_golden.dumps.values import Record, Tensor, Unknown, same
from repro_golden.errors import ReproError

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


def saved(path: Path, value: Any, protocol: int = 2) -> Path:
    """A dump of torch.save."""
    torch.save(value, path, pickle_protocol=protocol)
    return path


def refusal(path: Path, **options: Any) -> str:
    """The one line that refuses a file: it names the file, and a cure after a colon."""
    with pytest.raises(ReproError) as caught:
        read_archive(path, **options)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(str(path))
    assert ": " in line.removeprefix(str(path))
    assert len(line) < len(str(path)) + 600
    return line


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
    assert f"--allow-pickle {STATUS} " in refusal(path)
    record = read_archive(path, allow=[STATUS])["status"]
    assert same(record, Record(STATUS, None, ("completed",), made="call", parts=2))
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
    found, date = read_archive(path, allow=names)
    assert same(found, Record("collections.defaultdict", args=(Unknown("builtins.list"),), items={"a": 1}, made="call"))
    assert date.name == "datetime.date"
    write_archive(path, [found, date])
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
    found = read_archive(saved(tmp_path / "a.pt", tensors, protocol))
    assert same(found, [Tensor.of(tensor) for tensor in tensors])
    for ours, theirs in zip(found, tensors, strict=True):
        assert ours.shape == tuple(theirs.shape)
        assert ours.numel == theirs.numel()
        assert same(Tensor.of(ours.torch()), ours)
    assert not found[0].array.flags.writeable


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


# Bounds of the archive


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

"""Files that grow: small to keep, larger than any machine to read, or without an end."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from dump_kit import archive, tensor_pickle
from trace_kit import SMALL, write

from hostile_input.place import Commands, Input, Place

MANY = 1 << 62


def inputs() -> Iterator[Input]:
    """Every bomb."""
    for name, body in _pickles().items():
        yield Input(f"a pickle: {name}", lambda place, body=body: _shown(archive(place.folder / "3.pt", body)))
    for name, made in _zips().items():
        yield Input(f"a zip: {name}", lambda place, made=made: _shown(place.write("3.pt", made())))
    for name, raw in _safetensors().items():
        yield Input(f"safetensors: {name}", lambda place, raw=raw: _as_safetensors(place, raw()))
    for name, change in _parquets().items():
        yield Input(f"parquet: {name}", lambda place, change=change: _as_columns(place, change))
        yield Input(f"prompts in parquet: {name}", lambda place, change=change: _as_prompts(place, change))
    for name, text in _texts().items():
        yield Input(f"text: {name}", lambda place, text=text: _as_texts(place, text()))
    yield Input("a file without an end", _endless)
    yield Input("pipes that nobody writes to", _pipes)
    yield Input("folders that hold themselves", _loops)
    yield Input("a folder of ten thousand files", _many)
    yield Input("sparse files of a terabyte", _sparse)


def _shown(path: Path) -> Commands:
    return [["rollout", "show", str(path), "--limit", "256MiB"], ["doctor", str(path)]]


# -- pickles and zips


def _pickles() -> dict[str, bytes]:
    doubled = b"\x80\x04)" + b"q\0h\0\x86" * 64
    deep = b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999
    rng = random.Random(3)
    collide = b"".join(pickle.dumps((1 << 61) * n - n, 2)[2:-1] + b"N" for n in range(2, 30_000))
    tuples = b"".join(b"K\0" * 0 + pickle.dumps((n * ((1 << 61) - 1),), 2)[2:-1] + b"N" for n in range(2, 20_000))
    return {
        "tuples of tuples": doubled + b".",
        "tuples of tuples, frozen": b"\x80\x04(" + b")" + b"q\0h\0\x86" * 64 + b"\x91.",
        "tuples of tuples as a key": b"\x80\x04}" + doubled[2:] + b"Ns.",
        "lists in lists": deep + b".",
        "dicts in dicts": b"\x80\x04" + b"}K\0" * 50_000 + b"N" + b"s" * 50_000 + b".",
        "a list of one long text": b"\x80\x04" + b"X\0\0\x10\0" + b"x" * (1 << 20) + b"q\0](" + b"h\0" * 200_000 + b"e.",
        "a text of 2**62 bytes": b"\x80\x04\x8d" + struct.pack("<Q", MANY) + b"x.",
        "bytes of 2**62 bytes": b"\x80\x04\x8e" + struct.pack("<Q", MANY) + b"x.",
        "a bytearray of 2**62": b"\x80\x05\x96" + struct.pack("<Q", MANY) + b"x.",
        "a frame of 2**62 bytes": b"\x80\x04\x95" + struct.pack("<Q", MANY) + b"N.",
        "an integer of 2**31 bytes": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "integers squared by base": b"\x80\x02I" + b"9" * 2_000_000 + b"\n.",
        "a memo of 2**32": b"\x80\x02Nr\xff\xff\xff\xff.",
        "memos without an end": b"\x80\x04" + b"N\x94" * 3_000_000 + b".",
        "marks without an end": b"\x80\x02" + b"(" * 5_000_000 + b".",
        "empty lists": b"\x80\x02](" + b"]" * 6_000_000 + b"e.",
        "keys of one hash": b"\x80\x02}(" + collide + b"u.",
        "keys of one hash in tuples": b"\x80\x02}(" + tuples + b"u.",
        "keys of float and int": b"\x80\x02}(" + b"".join(
            pickle.dumps(float(rng.randrange(1 << 40)) * 2.0**61, 2)[2:-1] + b"N" for _ in range(20_000)) + b"u.",
        "a set of a set": b"\x80\x04" + b"\x8f" * 100_000 + b".",
        "a tensor of 2**50 elements": tensor_pickle((1 << 50,), (0,), 1),
        "a tensor of 64 dimensions": tensor_pickle((2,) * 62, (0,) * 62, 1),
        "a tensor of 2**70": tensor_pickle((1 << 70,), (0,), 1),
        "an array of 2**40": pickle.dumps(0)[:0] + b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        b"K\0\x85C\x01b\x87R(K\x01\x8a\x06\0\0\0\0\0\x01\x85cnumpy\ndtype\nX\x02\0\0\0f8\x89\x88\x87R(K\x03X\x01\0\0\0<"
        b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89C\0tb.",
    }  # fmt: skip


def _zips() -> dict[str, Callable[[], bytes]]:
    def deflated(method: int) -> bytes:
        raw = io.BytesIO()
        with zipfile.ZipFile(raw, "w", method) as file, file.open("a/data.pkl", "w", force_zip64=True) as entry:
            for _ in range(256):
                entry.write(bytes(1 << 20))
        return raw.getvalue()

    def quine() -> bytes:
        raw = deflated(zipfile.ZIP_DEFLATED)
        outer = io.BytesIO()
        with zipfile.ZipFile(outer, "w") as file:
            file.writestr("a/data.pkl", raw)
            file.writestr("a/data/0", raw)
        return outer.getvalue()

    def many(count: int) -> bytes:
        raw = io.BytesIO()
        with zipfile.ZipFile(raw, "w") as file:
            file.writestr("a/data.pkl", b"\x80\x02N.")
            for number in range(count):
                file.writestr(f"a/data/{number}", b"")
        return raw.getvalue()

    def lying(**where: int) -> bytes:
        raw = bytearray(many(2))
        at = raw.index(b"PK\1\2")
        for name, value in where.items():
            struct.pack_into("<I", raw, at + int(name[1:]), value)
        return bytes(raw)

    def overlapping() -> bytes:
        """Each entry's name stands for the same bytes, so that they count a thousand times."""
        kernel = zlib.compress(bytes(1 << 20))
        local = struct.pack(
            "<4s5H3I2H", b"PK\3\4", 20, 0, 8, 0, 0, zlib.crc32(bytes(1 << 20)), len(kernel), 1 << 20, 10, 0
        )
        body, directory = local + b"a/data.pkl" + kernel, b""
        for number in range(1000):
            name = b"a/data.pkl" if not number else b"a/data/%03d" % number
            directory += struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 8, 0, 0, zlib.crc32(bytes(1 << 20)),
                                     len(kernel), 1 << 20, len(name), 0, 0, 0, 0, 0, 0) + name  # fmt: skip
        return body + directory + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1000, 1000, len(directory), len(body), 0)

    return {
        "256 MiB of zeros, deflated": lambda: deflated(zipfile.ZIP_DEFLATED),
        "256 MiB of zeros by bzip2": lambda: deflated(zipfile.ZIP_BZIP2),
        "256 MiB of zeros by lzma": lambda: deflated(zipfile.ZIP_LZMA),
        "a bomb in a bomb": quine,
        "a hundred thousand entries": lambda: many(100_000),
        "entries over one another": overlapping,
        "a size of 4 GiB": lambda: lying(_20=0xFFFFFFFE, _24=0xFFFFFFFE),
        "an offset of 4 GiB": lambda: lying(_42=0xFFFFFFFE),
        "a directory of 2**32": lambda: many(1)[:-22] + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 65535, 65535, 0xFFFFFFFE, 0, 0),
        "a directory that is elsewhere": lambda: many(1)[:-22] + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, 46, 0xFFFFFFF0, 0),
    }  # fmt: skip


# -- safetensors and parquet


def _safetensors() -> dict[str, Callable[[], bytes]]:
    def whole(header: object, tail: bytes = b"") -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + tail

    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    return {
        "a header of 2**63 bytes": lambda: struct.pack("<Q", 1 << 63) + b"{}",
        "a header of 2 GiB": lambda: struct.pack("<Q", 2 << 30) + b"{}",
        "a header of 90 MiB that is not there": lambda: struct.pack("<Q", 90 << 20) + b"{",
        "lists in lists": lambda: whole(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
        "objects in objects": lambda: whole(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        "a shape of 2**62": lambda: whole({"a": entry | {"shape": [MANY]}}, bytes(4)),
        "a shape whose product is small modulo 2**64": lambda: whole({"a": entry | {"shape": [1 << 32, 1 << 32, 1]}}, bytes(4)),
        "ten thousand dimensions": lambda: whole({"a": entry | {"shape": [1] * 10_000}}, bytes(4)),
        "offsets of 2**62": lambda: whole({"a": entry | {"data_offsets": [0, MANY]}}, bytes(4)),
        "offsets that run backwards": lambda: whole({"a": entry | {"data_offsets": [4, 0]}}, bytes(4)),
        "a hundred thousand tensors over one another": lambda: whole({f"a{n}": entry for n in range(100_000)}, bytes(4)),
        "an integer of a million digits": lambda: whole(b'{"a":{"dtype":"F32","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,4]}}', bytes(4)),
        "metadata of 60 MiB": lambda: whole({"__metadata__": {"rollout": "x" * (60 << 20)}, "a": entry}, bytes(4)),
        "metadata that is nested": lambda: whole({"__metadata__": {"rollout": "[" * 300_000}, "a": entry}, bytes(4)),
        "a name of 10 MiB": lambda: whole({"a" * (10 << 20): entry}, bytes(4)),
        "one name twice": lambda: whole(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F64","shape":[9],"data_offsets":[0,72]}}', bytes(4)),
    }  # fmt: skip


def _as_safetensors(place: Place, raw: bytes) -> Commands:
    """As a rollout, as a model and as a file alone."""
    for name in ("rollouts/0.safetensors", "model/model.safetensors", "alone.safetensors"):
        place.write(name, raw)
    place.write("rollouts/index.json", json.dumps({"format": 1, "rollouts": ["0" * 32]}))
    place.write("model/config.json", json.dumps({"model_type": "qwen2", "num_hidden_layers": 1}))
    alone = str(place.folder / "alone.safetensors")
    return [["rollout", "show", "rollouts"], ["doctor", "model"], ["doctor", alone], ["doctor", "."]]


def _parquets() -> dict[str, Callable[[Path], None]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def written(table: pa.Table) -> Callable[[Path], None]:
        return lambda path: pq.write_table(table, path, compression="zstd", row_group_size=1 << 30)

    def zeros(path: Path) -> None:
        """One value of 3 GiB, as a dictionary of 64 MiB that stands in 48 rows: a few KiB on the disk."""
        value = pa.array([bytes(64 << 20)], pa.binary())
        column = pa.DictionaryArray.from_arrays(pa.array([0] * 48, pa.int32()), value)
        pq.write_table(_columns(len(column), values=column), path, compression="zstd")

    def nested(path: Path) -> None:
        kind = pa.int64()
        for _ in range(60):
            kind = pa.list_(kind)
        pq.write_table(pa.table({"prompt": pa.array([None], kind)}), path)

    def footer(path: Path, length: int) -> None:
        written(_columns(1))(path)
        raw = bytearray(path.read_bytes())
        struct.pack_into("<I", raw, len(raw) - 8, length)
        path.write_bytes(raw)

    def counted(path: Path) -> None:
        """Its footer says of every number that is 3 that it is 2**40: rows, bytes, offsets."""
        written(_columns(3))(path)
        raw = path.read_bytes()
        at = len(raw) - 8 - struct.unpack("<I", raw[-8:-4])[0]
        path.write_bytes(raw[:at] + raw[at:-8].replace(b"\x16\x06", b"\x16\x7e") + raw[-8:])

    return {
        "3 GiB of zeros in a dictionary": zeros,
        "twenty million nulls": written(_columns(20_000_000)),
        "lists in lists": nested,
        "a footer of 4 GiB": lambda path: footer(path, 0xFFFFFFF0),
        "a footer of nothing": lambda path: footer(path, 0),
        "rows that are not there": counted,
        "ten thousand columns": written(pa.table({f"c{n}": [1] for n in range(10_000)})),
    }


def _columns(count: int, **columns: object):  # type: ignore[no-untyped-def]
    import pyarrow as pa

    return pa.table({"prompt": pa.nulls(count, pa.string()), "step": pa.nulls(count, pa.int64()), **columns})


def _as_columns(place: Place, change: Callable[[Path], None]) -> Commands:
    """As the rows of a sealed trace."""
    from repro_golden.trace.writer import seal

    for name in ("a", "b"):
        seal(write(place.folder / name, SMALL))
    change(place.folder / "b" / "rank-00000.parquet")
    differing = [SMALL[0], SMALL[1][1:], SMALL[2]]
    write(place.folder / "c", differing)
    return [["diff", "c", "b"], ["diff", "a", "b", "--mismatch"], ["doctor", "b"]]


def _as_prompts(place: Place, change: Callable[[Path], None]) -> Commands:
    change(place.folder / "prompts.parquet")
    return [["doctor", "prompts.parquet"]]


# -- texts


def _texts() -> dict[str, Callable[[], str]]:
    return {
        "lists in lists": lambda: "[" * 300_000,
        "objects in objects": lambda: '{"a":' * 200_000,
        "a number of a million digits": lambda: '{"a": ' + "9" * 1_000_000 + "}",
        "an exponent of a billion": lambda: '{"steps": 1e999999999, "loss": -1e999999999}',
        "300,000 keys": lambda: json.dumps({f"k{n}": n for n in range(300_000)}),
        "one key 500,000 times": lambda: "{" + '"a": 1, ' * 500_000 + '"a": 2}',
        "one line of 64 MiB": lambda: "x" * (64 << 20),
        "backslashes": lambda: '"' + "\\" * 2_000_001 + '"',
        "line ends": lambda: "\r\n" * 3_000_000,
        "surrogates": lambda: '{"a": "' + "\\ud800" * 200_000 + '"}',
        "a byte order mark and nulls": lambda: "\ufeff" + "\0" * 2_000_000,
    }


def _as_texts(place: Place, text: str) -> Commands:
    """As every file of text that is read."""
    names = (
        "model/config.json", "model/model.safetensors.index.json", "model/tokenizer_config.json", "model/tokenizer.json",
        "trace/header.json", "run/run.json", "rollouts/index.json", "prompts.jsonl", "train.log", "run.sh",
        "requirements.txt", "iter/latest_checkpointed_iteration.txt", "golden/cases/x.toml", "launch.py",
        "golden/nights/m/c/2026-11-22T031245Z-aaaaaaaaaa.json",
    )  # fmt: skip
    for name in names:
        place.write(name, text)
    write(place.folder / "good", SMALL)
    place.write("steps/header.json", (place.folder / "good" / "header.json").read_text())
    place.write("steps/steps.jsonl", text + "\n")
    each = [["doctor", name.partition("/")[0] if "/" in name else name] for name in names if "golden" not in name]
    publish = ["report", "publish", "--out", "site"]
    return [*each, ["diff", "good", "steps"], ["diff", "good", "trace"], ["rollout", "show", "rollouts"], publish]


# -- places


def _endless(place: Place) -> Commands:
    """Links to what never ends, under names that are read."""
    names = ("train.log", "run.sh", "config.json", "3.pt", "prompts.jsonl", "launch.py", "x.safetensors", "p.parquet")
    for name in names:
        (place.folder / name).symlink_to("/dev/zero")
    trace = write(place.folder / "trace", SMALL)
    for name in ("steps.jsonl", "rank-00000.log"):
        (trace / name).unlink()
        (trace / name).symlink_to("/dev/zero")
    return [
        *(["doctor", name] for name in names),
        ["doctor", "."],
        ["diff", "trace", "trace"],
        ["rollout", "show", "3.pt"],
    ]


def _pipes(place: Place) -> Commands:
    names = ("train.log", "run.sh", "config.json", "3.pt", "prompts.jsonl", "x.safetensors", "p.parquet", "launch.py")
    for name in names:
        os.mkfifo(place.folder / name)
    trace = write(place.folder / "trace", SMALL)
    for name in ("steps.jsonl", "rank-00000.log", "header.json"):
        (trace / name).unlink()
        os.mkfifo(trace / name)
    return [
        *(["doctor", name] for name in names),
        ["doctor", "."],
        ["diff", "trace", "trace"],
        ["rollout", "show", "3.pt"],
    ]


def _loops(place: Place) -> Commands:
    (place.folder / "a" / "b").mkdir(parents=True)
    (place.folder / "a" / "b" / "up").symlink_to("..")
    (place.folder / "a" / "self").symlink_to("self")
    (place.folder / "golden").mkdir()
    (place.folder / "golden" / "nights").symlink_to("..")
    return [["doctor", "."], ["doctor", "a/self"], ["diff", "a/self", "a"], ["report", "publish", "--out", "site"]]


def _many(place: Place) -> Commands:
    (place.folder / "many").mkdir()
    for number in range(10_000):
        (place.folder / "many" / f"{number}.pt").touch()
    return [["doctor", "many"], ["rollout", "show", "many"]]


def _sparse(place: Place) -> Commands:
    names = ("train.log", "run.sh", "config.json", "3.pt", "prompts.jsonl", "x.safetensors", "p.parquet", "launch.py")
    for name in names:
        with (place.folder / name).open("wb") as file:
            file.truncate(1 << 40)
    trace = write(place.folder / "trace", SMALL)
    for name in ("steps.jsonl", "header.json", "rank-00000.log"):
        with (trace / name).open("r+b") as file:
            file.truncate(1 << 40)
    others = [name for name in names if name not in ("train.log", "prompts.jsonl")]  # they are read to their end
    return [*(["doctor", name] for name in others), ["diff", "trace", "trace"], ["rollout", "show", "3.pt"]]

"""What the program writes by torch.save and safetensors: tensors, numbers and texts, not the bytes of the file.

An archive of torch holds the file's own name, and pickle remembers which objects were one, so equal content may have
other bytes. Paths, dates and objects of other kinds are not looked at, but they are counted, and of files that are
written otherwise only the names are known.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import functools
import os
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch

from repro_golden.attach.beside import unreadable
from repro_golden.attach.lines import measures_time
from repro_golden.attach.readings import Tensors, everything, folded, of_parts

__all__ = ["Written", "below", "content", "hook"]


def hook(when: Callable[[str, Callable[[Any], None]], object], session: Any) -> None:
    """Tell the session of every file that torch.save and safetensors write in this process."""
    session.saving = functools.partial(_hook_safetensors, session=session)
    save = torch.save

    @functools.wraps(save)
    def call(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        out = save(obj, f, *args, **kwargs)
        session.saved(_path(f), obj)
        return out

    torch.save = torch.serialization.save = call
    when("safetensors.torch", session.saving)


def _hook_safetensors(module: Any = None, *, session: Any) -> None:
    """Now or, where torch was imported by that module itself, at the first step."""
    module = module or sys.modules.get("safetensors.torch")
    save_file = getattr(module, "save_file", None)
    if save_file is None or hasattr(save_file, "_repro"):
        return

    @functools.wraps(save_file)
    def call(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        out = save_file(tensors, filename, *args, **kwargs)
        session.saved(_path(filename), tensors)
        return out

    call._repro = True  # type: ignore[attr-defined]
    module.save_file = call


class Written:
    """Files that the program opens to write, as Python's audit events tell; at most `_MOST`.

    What is written to them is not looked at, unless by torch.save or safetensors. Left out are devices, files of
    interpreters and packages, hidden folders (caches lie there) and what is written below `out`.

    Args:
        out: The recorder's own folder.
        moved: Told of what the program renames: the path before, and the path after.

    Attributes:
        paths: Where they lie.
    """

    def __init__(self, out: str, moved: Callable[[str, str], None] = lambda *_: None) -> None:
        self.paths: set[str] = set()
        self._out, self._moved = f"{out}/", moved
        self._left_out = (self._out, f"{sys.prefix}/", "/dev/", "/proc/", "/sys/")
        self._around = [f"{PurePath(out).parent}/"]  # may lie in a hidden folder themselves
        with contextlib.suppress(OSError):  # it was removed
            self._around.append(f"{Path.cwd()}/")
        sys.addaudithook(self._heard)

    @property
    def names(self) -> set[str]:
        """What they are called."""
        return {PurePath(path).name for path in self.paths}

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename"):
            return
        try:
            if event == "open":
                self._opened(*arguments)
            else:
                self._renamed(*arguments)
        except Exception:  # noqa: BLE001, S110 - what a hook raises, the program's call raises
            pass

    def _opened(self, file: Any, mode: Any, flags: Any) -> None:
        writes = isinstance(mode, str) and bool(set("wax+") & set(mode))
        writes = writes or (mode is None and isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR)))
        if not writes or len(self.paths) >= _MOST:
            return
        path = _absolute(file)
        if path.startswith(self._left_out) or path.endswith((".pyc", ".lock")):
            return
        within = max((len(folder) for folder in self._around if path.startswith(folder)), default=0)
        if path and not any(part.startswith((".", "__")) for part in path[within:].split("/")):
            self.paths.add(path)

    def _renamed(self, source: Any, target: Any, source_folder: int, target_folder: int) -> None:
        before, after = _absolute(source), _absolute(target)
        if source_folder != -1 or target_folder != -1 or not before or not after or before.startswith(self._out):
            return
        for path in [path for path in tuple(self.paths) if below(path, before)]:
            self.paths.discard(path)
            self.paths.add(after + path[len(before) :])
        self._moved(before, after)


_MOST = 100


def below(path: str, folder: str) -> bool:
    """Whether a path is that of a folder, or of what lies in it."""
    return path == folder or path.startswith(f"{folder}/")


def _absolute(file: Any) -> str:
    """A file's path, from the root; '' for a number of an open one."""
    return os.path.abspath(os.fsdecode(file)) if isinstance(file, (str, bytes, os.PathLike)) else ""  # noqa: PTH100


def _path(file: Any) -> str:
    """The path of a file that the program writes; '' for what has none."""
    if not isinstance(file, (str, os.PathLike)):
        file = getattr(file, "name", "")
    return _absolute(file) if file else ""


def content(value: Any) -> tuple[Tensors, str]:
    """What a file holds, and what of it is not looked at, in words; '' for nothing.

    Tensors, as which arrays of NumPy count, by their path; all numbers of each kind as one and all texts as one, in
    the order of their paths. With the texts are bytes, None, names of dtypes and the like, and integers of more than
    64 bits. Left out is what measures time, speed or memory by its name, and what `_PASSING` fits.
    """
    tensors = Tensors()
    whole, floats, texts = list[tuple[str, int]](), list[tuple[str, float]](), list[tuple[str, bytes]]()
    passing, timed, dark, others = 0, list[str](), list[str](), Counter[str]()
    for path, item in everything(value, plain=_plain):
        name = path or "value"
        if isinstance(item, torch.Tensor):
            if why := unreadable(item):
                dark.append(why)
            else:
                tensors[name] = item.detach()
            continue
        text = None if isinstance(item, (int, float)) else _text(item)
        key = _INDEX.sub("", name).rpartition(".")[2]
        if _measures_time(key):
            timed.append(key)
        elif isinstance(item, float):
            floats.append((name, float(item)))
        elif isinstance(item, int):
            if -(1 << 63) <= item < 1 << 63:
                whole.append((name, int(item)))
            else:
                texts.append((name, f"int {item:x}".encode()))
        elif text is None:
            others[type(item).__name__] += 1
        elif _PASSING.search(text):
            passing += 1
        else:
            raw = bytes(item) if isinstance(item, (bytes, bytearray)) else text.encode("utf-8", "surrogatepass")
            texts.append((name, f"{type(item).__name__} ".encode() + raw))
    found = dict(sorted(of_parts(tensors).items()))
    for kind, numbers, dtype in (("integers", whole, torch.int64), ("floats", floats, torch.float64)):
        if numbers:
            found[_free(kind, found)] = torch.tensor([n for _, n in sorted(numbers)], dtype=dtype, device="cpu")
    if texts:
        found[_free("texts", found)] = folded(text for _, text in sorted(texts))
    left_out = [
        _number_of(passing, "text", "that look like paths or dates"),
        _number_of(len(timed), "value", f"called like times or memory ({_some(timed)})"),
        _number_of(len(dark), "tensor", f"({_some(dark)})"),
        _number_of(others.total(), "object", f"({_some(others)})"),
    ]
    return found, ", ".join(words for words in left_out if words)


_measures_time = functools.lru_cache(4096)(measures_time)
_INDEX = re.compile(r"(?:\.\d+)+$")
"""Places in lists: what is in a list is called as the list is."""

_PASSING = re.compile(
    r"[/\\]"  # paths and addresses
    r"|\d{4}-\d\d-\d\d|(?<!\d)20\d{6}(?:[-_T]?\d{4,6})?(?!\d)|(?<!\d)\d{1,2}\.\d{1,2}\.20\d\d(?!\d)"  # dates
    r"|(?<!\d)\d{1,2}:\d\d(?!\d)|(?<!\d)\d\d-\d\d-\d\d(?!\d)"  # times of day
    r"|(?<![0-9a-f])(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}|[0-9a-f]{40})(?![0-9a-f])"  # UUIDs
    r"|(?<!\d)(?:\d{1,3}\.){3}\d{1,3}(?!\d)|\b0x[0-9a-f]{6,}",  # of a host, of memory
    re.IGNORECASE,
)
"""Texts that are others in every run, or, as the hash that names it, for every commit."""

_WRITTEN_OUT = (complex, enum.Enum, torch.dtype, torch.device, torch.layout)
_MODULES = ("datetime", "decimal", "fractions", "uuid", "pathlib")


def _text(value: Any) -> str | None:
    """What stands for a value that is as good as a text; None for any other."""
    if isinstance(value, str):
        return value
    if isinstance(value, (bytes, bytearray)):
        return value.decode("ascii") if value.isascii() else ""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if value is None or isinstance(value, _WRITTEN_OUT) or type(value).__module__ in _MODULES:
        return str(value)
    return None


def _plain(value: Any) -> Any:
    """Modules as their state, arrays as tensors or lists, NumPy's numbers as Python's, records as mappings."""
    if isinstance(value, (torch.Tensor, int, float, str)):
        return value
    if isinstance(value, torch.nn.Module):
        return value.state_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return vars(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if numpy is not None and isinstance(value, numpy.ndarray):
        if value.dtype.kind in "OSU":
            return value.tolist()
        with contextlib.suppress(TypeError, ValueError):  # a kind or an order of bytes that torch has not
            return torch.from_numpy(numpy.ascontiguousarray(value))
    return value


def _free(name: str, taken: Iterable[str]) -> str:
    """A name that the file's own tensors do not have."""
    return name if name not in taken else _free(f"{name}#1", taken)


def _number_of(number: int, what: str, how: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''} {how}" if number else ""


def _some(names: Iterable[str]) -> str:
    every = sorted(set(names))
    return ", ".join(every[:2]) + (", ..." if len(every) > 2 else "")

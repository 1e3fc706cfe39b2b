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
import inspect
import operator
import os
import re
import sys
import tempfile
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch

from repro_golden.base.machine.audit import hear
from repro_golden.base.printed.machine_numbers import is_clock, measures_time
from repro_golden.recording.attach.alive.opened import as_torch, everything
from repro_golden.recording.attach.alive.readable import readable
from repro_golden.recording.attach.alive.readings import Reading, Tensors, folded
from repro_golden.recording.attach.base.guard import stand_in
from repro_golden.recording.attach.written.places import absolute, position

__all__ = ["MADE_UP", "Written", "below", "content", "hook"]


def hook(when: Callable[[str, Callable[[Any], None]], object], session: Any) -> None:
    """Tell the session of every file that torch.save, torch.jit.save and safetensors write in this process."""
    telling = functools.partial(_telling, session=session)
    stand_in([torch.serialization, torch], "save", telling)
    scripted: Any = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined] # torch.jit.save calls these
    scripted.save, scripted.save_to_buffer = telling(scripted.save), telling(scripted.save_to_buffer)

    def safetensors(module: Any) -> None:
        for name in ("save_file", "save"):
            stand_in([module], name, telling)

    for name in ("safetensors.torch", "safetensors.numpy"):  # those for other libraries call NumPy's
        when(name, safetensors)
    threads: Any = threading.Thread
    threads.join = _joining(threads.join, session)


def _telling(save: Any, session: Any) -> Any:
    """A function of what is saved, where, and with which texts beside it, after which the session is told.

    One that returns bytes saves in them.
    """
    signature = inspect.signature(save)

    @functools.wraps(save)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return save(*args, **kwargs)  # which says it in its own words
        value, file = [*arguments.values(), None][:2]
        at = position(file)
        out = save(*args, **kwargs)
        texts = {name: text for name, text in dict(arguments.get("metadata") or {}).items() if name != "format"}
        file = out if isinstance(out, (bytes, bytearray)) else file
        session.saved(file, at, {**value, "__metadata__": texts} if texts else value)
        return out

    return call


def _joining(join: Any, session: Any) -> Any:
    """The method that waits for a thread's end, after which the session is told; not where it may have waited less."""

    @functools.wraps(join)
    def call(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if timeout is None:
            session.joined(thread)

    return call


class Written:
    """Files that the program opens to write, as Python's audit events tell; at most `_MOST`.

    What is written to them is not looked at, unless by torch.save or safetensors. Left out are devices, files of
    interpreters and packages, hidden folders (caches lie there), the caches of torch's and Triton's compilers, what is
    written below `out`, and what the program removes again.

    Args:
        out: The recorder's own folder.
        moved: Told of what the program renames: the path before, and the path after.
        copied: Told of what it copies or links: the path of what is there, and the new one; whether that is now known.
        emptied: Told of a path that it begins to write anew.

    Attributes:
        paths: Where they lie, with the thread that opened each.
    """

    def __init__(
        self,
        out: str,
        moved: Callable[[str, str], None] = lambda *_: None,
        copied: Callable[[str, str], object] = lambda *_: None,
        emptied: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.paths: dict[str, int] = {}
        self._copying = ""  # what is opened next is a copy of what is known
        self._out, self._moved, self._copied, self._emptied = f"{out}/", moved, copied, emptied
        caches = [os.path.abspath(folder) for name in _CACHES if (folder := os.environ.get(name))]  # noqa: PTH100
        caches.append(f"{tempfile.gettempdir()}/torchinductor_")
        self._left_out = (self._out, f"{sys.prefix}/", "/dev/", "/proc/", "/sys/", *caches)
        self._around = [f"{PurePath(out).parent}/"]  # may lie in a hidden folder themselves
        with contextlib.suppress(OSError):  # it was removed
            self._around.append(f"{Path.cwd()}/")
        hear({event: functools.partial(does, self) for event, does in _EVENTS.items()})

    @property
    def names(self) -> set[str]:
        """What they are called."""
        return {PurePath(path).name for path in list(self.paths)}

    def _opened(self, file: Any, mode: Any, flags: Any) -> None:
        writes = isinstance(mode, str) and bool(set("wax+") & set(mode))
        by_flags = flags if mode is None and isinstance(flags, int) else 0
        if not writes and not by_flags & (os.O_WRONLY | os.O_RDWR):
            return
        path = absolute(file)
        if path and path == self._copying:
            self._copying = ""
            return
        if by_flags & os.O_TRUNC or (isinstance(mode, str) and "w" in mode):
            self._emptied(path)
        if len(self.paths) >= _MOST or path.startswith(self._left_out) or path.endswith((".pyc", ".lock")):
            return
        within = max((len(folder) for folder in self._around if path.startswith(folder)), default=0)
        folders = path[within:].split("/")[:-1]
        hidden = any(folder.startswith(".") or folder == "__pycache__" for folder in folders)
        if path and not hidden and not os.path.isdir(path):  # noqa: PTH112 - text; a file without a name opens its folder
            self.paths[path] = threading.get_ident()

    def _renamed(self, source: Any, target: Any, source_folder: int, target_folder: int) -> None:
        before, after = absolute(source), absolute(target)
        if source_folder != -1 or target_folder != -1 or not before or not after or before.startswith(self._out):
            return
        for path, thread in self._below(before):
            self.paths.pop(path, None)
            self.paths[after + path[len(before) :]] = thread
        self._moved(before, after)

    def _removed(self, file: Any, *_: Any) -> None:
        if gone := absolute(file):
            for path, _thread in self._below(gone):
                self.paths.pop(path, None)

    def _linked(self, source: Any, target: Any, *_: Any) -> bool:
        before, after = absolute(source), absolute(target)
        return bool(before) and self._twice(before, after)

    def _copies(self, source: Any, target: Any) -> None:
        self._copying = absolute(target) if self._linked(source, target) else ""

    def _pointed(self, source: Any, target: Any, *_: Any) -> None:
        after = absolute(target)
        beside = os.path.join(os.path.dirname(after), os.fsdecode(source))  # noqa: PTH118, PTH120 - text, and quick
        self._twice(os.path.normpath(beside), after)

    def _twice(self, before: str, after: str) -> bool:
        for path, thread in self._below(before):
            self.paths[after + path[len(before) :]] = thread
        return bool(self._copied(before, after))

    def _below(self, folder: str) -> list[tuple[str, int]]:
        """Those in a folder, or the file itself, and by whom."""
        return [(path, thread) for path, thread in list(self.paths.items()) if below(path, folder)]


_EVENTS: dict[str, Callable[..., object]] = {
    "open": Written._opened,
    "os.rename": Written._renamed,
    "os.remove": Written._removed,
    "shutil.rmtree": Written._removed,
    "os.link": Written._linked,
    "os.symlink": Written._pointed,
    "shutil.copyfile": Written._copies,
}
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_MOST = 100


def below(path: str, folder: str) -> bool:
    """Whether a path is that of a folder, or of what lies in it."""
    return path == folder or path.startswith(f"{folder}/")


def content(value: Any) -> tuple[Tensors, str]:
    """What a file holds, and what of it is not looked at, in words; '' for nothing.

    Tensors, as which arrays of NumPy count, by their path; numbers of each kind and texts by the path of what holds
    them (``integers[epoch]``, ``floats[losses]``), those of a list as one, and so are those of mappings in a list
    (``floats[history.*.loss]``), and of a mapping with many below it (``integers[vocab.*]``, in the order of its keys);
    of those with a ``*``, and of a list of several kinds, ``places`` tell where each lies. With the texts are bytes,
    None, names of dtypes and the like, and integers of more than 64 bits. Of modules that are saved whole, the numbers
    and texts of their parts count too. Left out are settings, as a hyperparameter counts by what it does: namespaces,
    records (dataclasses) of a class that `_SETTINGS_OF` fits, and these and mappings under a key that `_SETTINGS` fits,
    which hold no tensor at any depth. So is what measures time, speed or memory by its name, what is the time, and what
    `_PASSING` fits.
    """
    collected = _Content()
    for path, item in everything(value, plain=_plain):
        collected.add(path or "value", item)
    return collected.rows(), collected.left_out()


class _Content:
    """What a file holds, by kinds."""

    def __init__(self) -> None:
        self._tensors = Tensors()
        self._values: list[tuple[str, str, Any]] = []  # the kind, the path, itself
        self._passing, self._timed, self._dark, self._others = 0, list[str](), list[str](), Counter[str]()
        self._settings: list[str] = []

    def add(self, name: str, item: Any) -> None:
        """One value, and its path."""
        if isinstance(item, torch.Tensor):
            self._tensors[name] = item
            return
        if isinstance(item, _Settings):
            self._settings.append(item.called)
            return
        text = None if isinstance(item, (int, float)) else _text(item)
        key = _INDEX.sub("", name).rpartition(".")[2]
        if _measures_time(key) or is_clock(item):
            self._timed.append(key)
            return
        if text is None and not isinstance(item, (int, float)):
            self._others[type(item).__name__] += 1
            return
        if text is not None and _PASSING.search(text):
            self._passing += 1
            return
        if isinstance(item, float):
            self._values.append(("floats", name, float(item)))
        elif isinstance(item, int) and -(1 << 63) <= item < 1 << 63:
            self._values.append(("integers", name, int(item)))
        elif isinstance(item, int):
            self._values.append(("texts", name, f"int {item:x}".encode()))
        elif text is not None:
            raw = bytes(item) if isinstance(item, (bytes, bytearray)) else text.encode("utf-8", "surrogatepass")
            self._values.append(("texts", name, f"{type(item).__name__} ".encode() + raw))

    def rows(self) -> Tensors:
        """By the names that they have in the trace."""
        why = dict[str, str]()
        tensors = Tensors(sorted(readable("", Reading(self._tensors, {}), why).tensors.items()))
        self._dark += why.values()
        names = _called({name for _, name, _ in self._values})
        columns: dict[tuple[str, str], dict[str, Any]] = {}
        for kind, name, value in self._values:
            columns.setdefault((kind, ".".join(names[name]) or "value"), {})[name] = value
        for (kind, called), values in columns.items():
            ordered = [value for _, value in sorted(values.items())]
            tensor = folded(ordered) if kind == "texts" else _numbers(ordered, alone=called in values)
            tensors[f"{_free(kind, tensors)}[{called}]"] = tensor
        for called, numbers in _places([(name, kind) for kind, name, _ in self._values], names).items():
            tensors[f"{_free('places', tensors)}[{called}]"] = _numbers(numbers, alone=False)
        return tensors

    def left_out(self) -> str:
        """What is not among them, in words."""
        remarks = [
            _number_of(len(self._settings), "record", f"of settings ({_some(self._settings)})"),
            _number_of(self._passing, "text", "that look like paths or dates"),
            _number_of(len(self._timed), "value", f"of time or memory ({_some(self._timed)})"),
            _number_of(len(self._dark), "tensor", f"({_some(self._dark)})"),
            _number_of(self._others.total(), "object", f"({_some(self._others)})"),
        ]
        return ", ".join(remark for remark in remarks if remark)


_measures_time = functools.lru_cache(4096)(measures_time)
_INDEX = re.compile(r"(?:(?:^|\.)\d+)+$")
"""Places in lists: what is in a list is called as the list is."""
_MANY = 100
"""Names below a key beyond which what is there has none of its own: a vocabulary's words are no signals."""
_DEEP = 50
"""Keys of a path that are told apart."""
_NOTHING: tuple[str, ...] = ()
_KINDS = ("floats", "integers", "texts")


def _called(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """What numbers and texts are called together, by the path of each, key by key: ``*`` stands for any.

    It stands for the places in lists but for the last, which has no name, and for the keys of a mapping below which
    there would be more than `_MANY` names; at the top of a file, for more than so many keys.
    """
    plain = dict[str, tuple[str, ...]]()
    for name in names:
        *above, last = name.split(".", _DEEP)
        keys = above if last.isdecimal() else [*above, last]
        plain[name] = tuple("*" if key.isdecimal() else key for key in keys)
    capped = _capped(set(plain.values()), _MANY**2)
    return {name: capped[keys] for name, keys in plain.items()}


def _capped(paths: set[tuple[str, ...]], most: int = _MANY) -> dict[tuple[str, ...], tuple[str, ...]]:
    """What paths are called: with ``*`` for their first keys, where they would have more names than `most`."""
    below, alone = dict[str, set[tuple[str, ...]]](), {_NOTHING: _NOTHING}
    for path in paths:
        if path:
            below.setdefault(path[0], set()).add(path[1:])
    if len(below) <= _MANY:
        capped = {key: _capped(rests) if rests != {()} else alone for key, rests in below.items()}
        if sum(len(set(inner.values())) for inner in capped.values()) <= most:
            return {path: (path[0], *capped[path[0]][path[1:]]) if path else () for path in paths}
    merged = _capped({path[1:] for path in paths if path})
    return {path: ("*", *merged[path[1:]]) if path else () for path in paths}


def _places(values: Sequence[tuple[str, str]], names: Mapping[str, tuple[str, ...]]) -> dict[str, list[int]]:
    """Where in lists and mappings the values lie that have one name, and of which kind each is.

    Of names without a ``*`` those are left out whose values are of one kind: the order of their rows says it.

    A place in a list is its number, and that of a key its place among those beside it: another key is a rename.
    """
    by_name: dict[tuple[str, ...], list[int]] = {}
    order: dict[tuple[str, ...], dict[str, int]] = {}
    kinds: dict[tuple[str, ...], set[str]] = {}
    for name, kind in values:
        kinds.setdefault(names[name], set()).add(kind)
    for name, kind in sorted(values):
        called = names[name]
        if "*" in called or len(kinds[called]) > 1:
            keys, numbers = tuple(name.split(".", _DEEP)), by_name.setdefault(called, [])
            free = [n for n in range(len(keys)) if called[n : n + 1] in ((), ("*",))]
            numbers += (_KINDS.index(kind), len(free))
            for n in free:
                beside = order.setdefault(keys[:n], {})
                short = keys[n].isdecimal() and len(keys[n]) < 19  # as a list's place is, and 64 bits hold it
                numbers.append(int(keys[n]) if short else beside.setdefault(keys[n], len(beside)))
    return {".".join(called): numbers for called, numbers in by_name.items()}


def _numbers(values: Sequence[float], *, alone: bool) -> torch.Tensor:
    dtype = torch.float64 if isinstance(values[0], float) else torch.int64
    return torch.tensor(values[0] if alone and len(values) == 1 else values, dtype=dtype, device="cpu")


_PASSING_WORDS = (
    r"\d{4}-\d\d-\d\d|(?<!\d)20\d{6}(?:[-_T]?\d{4,6})?(?!\d)|(?<!\d)\d{1,2}\.\d{1,2}\.20\d\d(?!\d)"  # dates
    r"|(?<!\d)\d{1,2}:\d\d(?!\d)|(?<!\d)\d\d-\d\d-\d\d(?!\d)"  # times of day
    r"|(?<![0-9a-f])(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}|[0-9a-f]{40})(?![0-9a-f])"  # UUIDs
    r"|(?<!\d)(?:\d{1,3}\.){3}\d{1,3}(?!\d)|\b0x[0-9a-f]{6,}"  # of a host, of memory
)
_PASSING = re.compile(rf"[/\\]|{_PASSING_WORDS}", re.IGNORECASE)  # the first are of paths and addresses
"""Texts that are others in every run, or, as the hash that names it, for every commit."""

_PASSING_KEY = re.compile(rf"^[/~]|^[a-z]:\\|^(?:{_PASSING_WORDS})$", re.IGNORECASE)
"""Keys that are: the names of some tensors hold a slash."""

MADE_UP = re.compile(rf"{_PASSING.pattern}|tmp|temp", re.IGNORECASE)
"""Names of folders that are others in every run."""

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
    """What is looked at in place of an object; settings are not looked at."""
    if isinstance(value, (torch.Tensor, int, float, str)):
        return value
    if isinstance(value, Mapping):
        lasting = {
            _lasting(key, place): _Settings(str(key)) if _are_settings(key, held) else held
            for place, (key, held) in enumerate(value.items())
        }
        same = all(map(operator.is_, lasting.values(), value.values())) and lasting.keys() == value.keys()
        return value if same else lasting
    opened, kind = _opened(value), type(value)
    settings = kind is argparse.Namespace or (_is_record(value) and _SETTINGS_OF.search(kind.__name__))
    return _Settings(kind.__name__) if settings and not _holds_tensors(opened) else opened


def _lasting(key: Any, place: int) -> Any:
    """A key; of one that is another in every run, such as the path of a checkpoint, its place."""
    return f"<{place}>" if isinstance(key, str) and _PASSING_KEY.search(key) else key


def _opened(value: Any) -> Any:
    """Modules as their state, arrays as tensors or lists, NumPy's numbers as Python's, records as mappings."""
    if isinstance(value, (torch.Tensor, int, float, str)):
        return value
    if isinstance(value, torch.nn.Module):
        # the tensors themselves, which may have more than their bytes
        try:
            state = value.state_dict(keep_vars=True)
        except TypeError:  # one of its own
            state = value.state_dict()
        return {**state, "__attributes__": _attributes(value)}
    if _is_record(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return vars(value) if isinstance(value, _NAMESPACES) else as_torch(value)


_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping, torch.nn.Module))


class _Settings:
    """Stands for settings that are left out."""

    def __init__(self, called: str) -> None:
        self.called = called


_SETTINGS = re.compile(r"(?:.*_)?(?:args|arguments|cfg|config|hparams|hyper_?param(?:eter)?s|settings)", re.IGNORECASE)
"""Keys whose mappings are settings in a checkpoint: nanoGPT's ``config``, Lightning's ``hyper_parameters``."""
_SETTINGS_OF = re.compile(
    "(?:Args|Arguments|Cfg|Config|Configuration|HParams|Hyperparameters|Settings)$", re.IGNORECASE
)
"""Classes of records that are settings: ``TrainingArguments``, ``SFTConfig``. Other records may be of a state."""


def _are_settings(key: Any, held: Any) -> bool:
    if not isinstance(key, str) or not _SETTINGS.fullmatch(key):
        return False
    if isinstance(held, _NAMESPACES) or _is_record(held):
        return not _holds_tensors(_opened(held))
    return isinstance(held, Mapping) and bool(held) and not _holds_tensors(held)


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(item, torch.Tensor) for _, item in everything(value, plain=_opened))


_KEPT = (int, float, str, torch.Tensor, dict)


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Of each part its class and what its state does not hold: numbers, such as a rate of dropout, texts, mappings."""
    return {
        name: {"class": type(part).__qualname__}
        | {key: value for key, value in list(vars(part).items()) if key[:1] != "_" and isinstance(value, _KEPT)}
        for name, part in module.named_modules()
    }


def _free(name: str, taken: Iterable[str]) -> str:
    """A name that the file's own tensors do not have."""
    return name if name not in taken else _free(f"{name}#1", taken)


def _number_of(number: int, what: str, how: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''} {how}" if number else ""


def _some(names: Iterable[str]) -> str:
    every = sorted(set(names))
    return ", ".join(every[:2]) + (", ..." if len(every) > 2 else "")

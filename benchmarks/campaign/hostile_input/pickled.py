"""Pickles that run code where anything unpickles them, in every file of the field that holds a pickle."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dump_kit import archive

from hostile_input.place import Commands, Input, Place


def _text(text: str) -> bytes:
    raw = text.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _call(name: str, *arguments: str) -> bytes:
    """A call of a function by its dotted name with texts."""
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + b"(" + b"".join(map(_text, arguments)) + b"tR"


def _method(owner: bytes, name: str, *arguments: str) -> bytes:
    """A call of an object's method with texts."""
    return b"coperator\nmethodcaller\n(" + b"".join(map(_text, (name, *arguments))) + b"tR(" + owner + b"tR"


def _touching(place: Place) -> dict[str, bytes]:
    """Bodies of pickles that touch the canary, by what they go through."""
    touch, path = place.touch, str(place.canary)
    inner = b"\x80\x04" + _call("os.system", touch) + b"."
    place.write("hubconf.py", f"open({path!r}, 'w').close()\n")
    code = f"open({path!r}, 'w').close()"
    imported = f"__import__('os').system({touch!r})"
    return {
        "os.system": _call("os.system", touch),
        "posix.system": _call("posix.system", touch),
        "nt.system": _call("posix.system", touch) + b"0" + _call("nt.system", touch),
        "subprocess.check_output": b"csubprocess\ncheck_output\n(]" + b"".join(_text(w) + b"a" for w in touch.split())
        + b"tR",
        "subprocess.Popen": b"csubprocess\nPopen\n(]" + b"".join(_text(w) + b"a" for w in touch.split()) + b"tR",
        "subprocess.getoutput": _call("subprocess.getoutput", touch),
        "pty.spawn": b"cpty\nspawn\n(]" + b"".join(_text(w) + b"a" for w in touch.split()) + b"tR",
        "eval": _call("builtins.eval", imported),
        "exec": _call("builtins.exec", code),
        "exec of Python 2": b"\x80\x02" + _call("__builtin__.exec", code),
        "compile and exec": b"cbuiltins\nexec\n(" + _call("builtins.compile", code, "x", "exec") + b"tR",
        "__import__": _call("builtins.__import__", "evil"),
        "getattr of a module": b"cbuiltins\ngetattr\n(" + _call("builtins.__import__", "os") + _text("system")
        + b"tR(" + _text(touch) + b"tR",
        "operator.attrgetter": b"coperator\nattrgetter\n(" + _text("system") + b"tR(" + _call("builtins.__import__", "os")
        + b"tR(" + _text(touch) + b"tR",
        "operator.methodcaller": b"coperator\nmethodcaller\n(" + _text("system") + _text(touch) + b"tR("
        + _call("builtins.__import__", "os") + b"tR",
        "functools.partial": b"cfunctools\npartial\n(cos\nsystem\n" + _text(touch) + b"tR)R",
        "functools.reduce": b"cfunctools\nreduce\n(coperator\ncall\n](cos\nsystem\n" + _text(touch) + b"etR",
        "map and list": b"cbuiltins\nlist\n(cbuiltins\nmap\n(cos\nsystem\n](" + _text(touch) + b"etRtR",
        "timeit": _call("timeit.timeit", imported),
        "runpy": _call("runpy.run_path", str(place.write("evil.py", code))),
        "importlib": _call("importlib.import_module", "evil"),
        "marshal and types": b"ctypes\nFunctionType\n(" + _call("builtins.compile", code, "x", "exec") + b"}tR)R",
        "ctypes": b"cbuiltins\ngetattr\n(cctypes\nCDLL\n(NtR" + _text("system") + b"tR(" + _bytes(touch.encode()) + b"tR",
        "code": _method(b"ccode\nInteractiveInterpreter\n)R", "runsource", code),
        "webbrowser": _method(b"cwebbrowser\nGenericBrowser\n(](" + b"".join(map(_text, touch.split())) + b"etR", "open", ""),
        "shutil.rmtree": _call("shutil.rmtree", str(place.outside)),
        "open for writing": _call("builtins.open", path, "w"),
        "pathlib's touch": b"cbuiltins\ngetattr\n(" + _call("pathlib.Path", path) + _text("touch") + b"tR)R",
        "logging's file": _call("logging.FileHandler", path),
        "tempfile": _call("tempfile.mkdtemp", "", "", str(place.outside)),
        "numpy's loader": b"cnumpy\nload\n(" + _text(str(place.write("a.npy", inner))) + b"N\x88tR",
        "numpy's writer": b"cnumpy\nsavetxt\n(" + _text(path) + b"](K\x01etR",
        "torch's storages": b"ctorch.storage\n_load_from_bytes\n(" + _bytes(inner) + b"tR",
        "torch.hub": _call("torch.hub._load_local", str(place.folder), "x"),
        "pandas": _call("pandas.read_pickle", str(place.write("inner.pkl", inner))),
        "pickle": b"cpickle\nloads\n(" + _bytes(inner) + b"tR",
        "pydoc": _call("pydoc.pipepager", "x", touch),
        "bdb": _method(b"cbdb\nBdb\n)R", "run", code),
        "cProfile": _call("cProfile.run", code),
        "doctest": b"cdoctest\ndebug_script\n(" + _text(code) + b"\x88tR",
        "distutils": b"cdistutils.spawn\nspawn\n(]" + _text("touch") + b"a" + _text(path) + b"atR",
        "asyncio": b"casyncio\nrun\n(" + _call("asyncio.create_subprocess_shell", touch) + b"tR",
        "multiprocessing": b"cmultiprocessing.reduction\nForkingPickler.loads\n(" + _bytes(inner) + b"tR",
        "a function of ours": b"crepro_golden.base.canonical\nwrite_atomic\n(" + _call("pathlib.Path", path) + _bytes(b"x")
        + b"tR",
        "a state's __setstate__": b"ccollections\nCounter\n)R}" + _text("__setstate__") + b"cos\nsystem\nsb" + _text(touch)
        + b"b",
        "a key that is called": b"}" + _call("os.system", touch) + b"Ns",
        "a persistent id": b"(" + _text("storage") + _call("os.system", touch) + _text("0") + _text("cpu") + b"K\x01tQ",
        "a rebuilt tensor": b"ctorch._utils\n_rebuild_tensor_v2\n(" + _call("os.system", touch) + b"tR",
        "a rebuilt wrapper": b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\ncbuiltins\nstr\n(" + _text(touch)
        + b"tNtR",
        "an array's dtype": b"cnumpy.core.multiarray\nscalar\n(" + _call("os.system", touch) + _text("x") + b"tR",
        "a codec": b"c_codecs\nencode\n(" + _call("os.system", touch) + _text("latin1") + b"tR",
        "an opcode of protocol 0": b"(S'" + touch.encode() + b"'\nios\nsystem\n",
        "an object of protocol 1": b"(cos\nsystem\n" + _text(touch) + b"o",
        "an extension": b"ccopyreg\nadd_extension\n(" + _text("os") + _text("system") + b"K\xf0tR0\x82\xf0(" + _text(touch) + b"tR",
    }  # fmt: skip


def _bytes(raw: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(raw)) + raw


def _names(place: Place) -> list[str]:
    return list(_touching(place))


def _dump(name: str) -> Input:
    """In a rollout dump, shown, converted, examined, and allowed by name."""

    def make(place: Place) -> Commands:
        path = str(archive(place.folder / "3.pt", b"\x80\x04" + _touching(place)[name] + b"."))
        allowed = ["--allow-pickle", "os.system", "--allow-pickle", "builtins.eval", "--allow-pickle", "builtins.exec"]
        convert = ["rollout", "convert", path, "--format", "slime", "--out", str(place.folder / "out")]
        return [["rollout", "show", path], ["rollout", "show", path, *allowed], convert, ["doctor", path]]

    return Input(f"a pickle that calls: {name}", make, lambda place, _: _tells(place, name))


def _elsewhere(name: str, path: str) -> Input:
    """As the file of another kind that holds pickles."""

    def make(place: Place) -> Commands:
        body = b"\x80\x04" + _touching(place)["os.system"] + b"."
        file = place.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith((".metadata", ".pkl")):
            file.write_bytes(body)
        else:
            archive(file, body)
        for tracker in {file.parent, file.parent.parent, file.parent.parent.parent}:
            if tracker.is_relative_to(place.folder):
                (tracker / "latest_checkpointed_iteration.txt").write_text("11")
        return [["doctor", str(place.folder)], ["doctor", str(file)]]

    return Input(f"a pickle as {name}", make)


def _tells(place: Place, name: str) -> str:
    """Whether the canary tells of a pickle: unpickled in a fork, as nobody should, it reaches the outside."""
    body = b"\x80\x04" + _touching(place)[name] + b"."
    child = os.fork()
    if not child:
        signal.alarm(60)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        os.chdir(place.folder)
        sys.path.insert(0, str(place.folder))
        with contextlib.suppress(BaseException):
            pickle.Unpickler(io.BytesIO(body)).load()  # noqa: S301 - our own
        os._exit(0)
    os.waitpid(child, 0)
    end = time.monotonic() + 5  # a program that was started is not waited for
    while not (told := place.canary.exists() or _listed(place.outside) != ["kept"]) and time.monotonic() < end:
        time.sleep(0.02)
    place.canary.unlink(missing_ok=True)
    return "" if told else "unpickled it tells nothing: no pickle that anybody need fear"


def _listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def inputs(place: Place) -> Iterator[Input]:
    """Every pickle.

    Args:
        place: A folder to write in while they are listed.
    """
    for name in _names(place):
        yield _dump(name)
    for name, path in (
        ("a checkpoint's common.pt", "iter_0000011/common.pt"),
        ("a checkpoint's .metadata", "iter_0000011/.metadata"),
        ("a rank's file of a checkpoint", "iter_0000011/mp_rank_00/model_optim_rng.pt"),
        ("a train dump", "3_0.pt"),
        ("a distributed optimizer", "iter_0000011/mp_rank_00/distrib_optim.pt"),
        ("a data loader's state", "rollout/global_dataset_state_dict_3.pt"),
        ("a record of a sampler", "dumps/events.pkl"),
        ("a model of Hugging Face", "pytorch_model.bin"),
        ("training arguments", "training_args.bin"),
    ):
        yield _elsewhere(name, path)

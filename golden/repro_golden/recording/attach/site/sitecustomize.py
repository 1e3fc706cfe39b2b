"""Found on PYTHONPATH by every Python process under `repro trace`: waits for torch, then arms the recorder.

It runs in the user's environment and speaks to nobody else: standard library only, any Python from 3.10 on. A process
that never imports torch pays for one more entry of `sys.meta_path`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any


def _chain() -> None:
    """Run the sitecustomize that ours hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - no pathlib at start-up
    _sites.append(os.path.dirname(here) if "__path__" in globals() else here)  # noqa: PTH120
    rest = [p for p in sys.path if os.path.abspath(p or ".") not in _sites]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


class When:
    """A finder that lets the others find a module, and does one thing once it has been imported.

    Another thing may be done before, when it is first looked for.
    """

    def __init__(self, name: str, then: Any, sought: Any = lambda: None) -> None:
        self._name, self._then, self._sought, self._asking = name, then, sought, False
        module = sys.modules.get(name)
        if module is None:
            sys.meta_path.insert(0, self)
        elif getattr(getattr(module, "__spec__", None), "_initializing", False):
            _UnderWay.of(module, then)  # it is what imported torch
        else:
            then(module)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Nothing for any other module."""
        del path, target
        if name != self._name or self._asking:
            return None
        self._sought()
        self._sought = lambda: None
        self._asking = True  # a module may be looked for without being imported, and more than once
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._done)  # type: ignore[assignment]
        return spec

    def _done(self, module: Any) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then(module)


class _UnderWay(importlib.machinery.ModuleSpec):
    """The spec of a module that is being imported, of which Python says by ``_initializing`` when that has ended."""

    @classmethod
    def of(cls, module: Any, then: Any) -> None:
        """Do one thing when the import has ended; at once for a spec that is none of Python's own."""
        spec = module.__spec__
        if type(spec) in (cls, importlib.machinery.ModuleSpec):
            spec.__dict__.setdefault("_repro_then", []).append(then)
            spec.__class__ = cls
        else:
            then(module)

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__["_initializing"])

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        if not value:
            self.__class__ = importlib.machinery.ModuleSpec  # type: ignore[assignment]
            for then in self.__dict__.pop("_repro_then"):
                if self.name in sys.modules:
                    _tried(then, sys.modules[self.name])


def _tried(then: Any, module: Any) -> None:
    try:
        then(module)
    except Exception as error:  # noqa: BLE001 - the program must not notice
        _say(f"repro: {module.__name__} is not recorded ({type(error).__name__}: {error})")


class _Loader:
    """A module's own loader, with one thing to do afterwards."""

    def __init__(self, loader: Any, then: Any) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        """See `importlib.abc.Loader`."""
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Import the module, then do it."""
        self._loader.exec_module(module)
        module.__loader__ = module.__spec__.loader = self._loader
        _tried(self._then, module)


def instrument() -> None:
    """Make `repro_golden` importable: from its own folder and nothing else of the instrument's environment."""
    package = os.environ["REPRO_INSTRUMENT"]
    if not os.path.isdir(package):  # noqa: PTH112 - another node, to which Ray has brought this file as a package
        package = os.path.join(os.path.dirname(os.path.abspath(__file__)), "repro_golden")  # noqa: PTH100, PTH118, PTH120
    if "repro_golden" not in sys.modules:
        path = os.path.join(package, "__init__.py")  # noqa: PTH118
        spec = importlib.util.spec_from_file_location("repro_golden", path, submodule_search_locations=[package])
        assert spec is not None and spec.loader is not None  # noqa: PT018
        module = importlib.util.module_from_spec(spec)
        sys.modules["repro_golden"] = module
        spec.loader.exec_module(module)


def _mark() -> None:
    """Say that the recorder is in this process (`attach.unseen`), before torch is loaded."""
    with contextlib.suppress(Exception):  # the program goes on
        import json

        path = os.path.join(json.loads(os.environ["REPRO_TRACE"])["out"], f"armed-{os.getpid()}")  # noqa: PTH118
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))


def _seek() -> None:
    _mark()
    os.register_at_fork(after_in_child=_mark)


def _arm(torch: Any) -> None:
    del torch
    instrument()
    from repro_golden.recording.attach.arm import arm

    arm(When)


def _arm_ray(utils: Any) -> None:
    instrument()
    from repro_golden.recording.attach.ray_workers import arm_ray

    arm_ray(utils, When)


_CHOSEN = 64
"""Bits of a seed that somebody chose; NumPy draws 128 where nobody does."""


def _watch_seeds(module: Any) -> None:
    """Note it when the program seeds a module's generator: before that its state is another in every run.

    To set back a state that was asked for before that is no seeding: torch.compile does so whenever it compiles.
    """
    seeded: set[str] = sys.__dict__.setdefault("_repro_seeded", set())
    chance: set[int] = set()

    def asked(state: Any) -> None:
        if module.__name__ not in seeded:
            chance.add(_hash(state))

    def put(state: Any = None, *_: Any) -> None:
        if module.__name__ not in seeded and _hash(state) not in chance:
            seeded.add(module.__name__)

    for name in ("getstate", "get_state"):
        _tell(module, name, lambda out, *_: asked(out))
    for name in ("setstate", "set_state"):
        _tell(module, name, lambda _, *given: put(*given))

    def another(generator: Any, *_: Any) -> None:
        entropy = getattr(getattr(generator, "seed_seq", None), "entropy", None)
        drawn = isinstance(entropy, int) and entropy.bit_length() > _CHOSEN
        if generator is not first_generator and entropy is not None and not drawn:
            seeded.add(module.__name__)

    first_generator = module.get_bit_generator() if hasattr(module, "get_bit_generator") else None
    _tell(module, "set_bit_generator", lambda _, *given: another(*given))
    _tell(module, "seed", lambda *_: seeded.add(module.__name__))


def _hash(state: Any) -> int:
    import pickle

    return hash(pickle.dumps(state))


def _tell(module: Any, name: str, listener: Any) -> None:
    """Let a listener hear what a module's function returned, and what it was given."""
    function = getattr(module, name, None)
    if function is None:
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        listener(out, *args, *kwargs.values())
        return out

    functools.update_wrapper(call, function)
    call.__module__, call.__qualname__ = module.__name__, name  # under which whoever pickles it finds it again
    setattr(module, name, call)


class _Leaving:
    """What was given to `sys.exit`, in the traceback of its `SystemExit`: that ends the program if no code is left.

    Where the program has caught it, what lets go of it is code that runs.
    """

    def __init__(self, code: Any) -> None:
        self.code = code

    def __del__(self, frame: Any = sys._getframe, known: dict[str, Any] = sys.__dict__) -> None:
        try:
            frame(1)
        except ValueError:
            known["_repro_exit"] = self.code


def _leaving(code: Any) -> _Leaving | None:
    """None in another thread, which ends alone."""
    import threading

    return _Leaving(code) if threading.get_ident() == threading.main_thread().ident else None


def _watch_exit() -> None:
    """Keep what the program ends by with `sys.exit` or `exit`: nobody can ask a process that ends for its exit code."""
    from _sitebuiltins import Quitter

    leave, call = sys.exit, Quitter.__call__

    @functools.wraps(leave)
    def exit_(*code: Any) -> Any:
        kept = _leaving(code[0] if code else None)  # noqa: F841 - lives as long as the traceback
        leave(*code)

    @functools.wraps(call)
    def quit_(self: Any, code: Any = None) -> Any:
        kept = _leaving(code)  # noqa: F841
        call(self, code)

    sys.exit, Quitter.__call__ = exit_, quit_  # type: ignore[method-assign]


def _watch_imports() -> None:
    """Have it written down what this process meets that may not be of the commit under test."""
    import json

    asked = json.loads(_asked)
    if asked["place"] is not None:
        instrument()
        from repro_golden.recording.attach.code.met import watch

        watch(asked["place"], asked["home"], asked["out"], tests=not asked["recorder"] and not asked["entry"])


def _keep_apart(arrow_dataset: Any) -> None:
    """Have `datasets` keep in the run's own cache what a function made of data that lie elsewhere.

    It would lie beside them, and is found by the function's name: that of another commit's, too. Where the user named
    the cache it stays there.
    """
    import hashlib
    import json

    cache = os.environ.get("HF_DATASETS_CACHE", "")
    if not cache.startswith(json.loads(_asked)["out"] + os.sep):
        return
    theirs = arrow_dataset.Dataset._get_cache_file_path

    def path_of(dataset: Any, fingerprint: str) -> str:
        path = str(theirs(dataset, fingerprint))
        if not dataset.cache_files or path.startswith(cache + os.sep):
            return path
        folder, name = os.path.split(path)
        folder = os.path.join(cache, "beside", hashlib.sha256(folder.encode()).hexdigest()[:16])  # noqa: PTH118
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
        return os.path.join(folder, name)  # noqa: PTH118

    arrow_dataset.Dataset._get_cache_file_path = path_of


def _enter() -> None:
    """Serve a trainer's entry point. Without its flags it would train for real, so then it must not start."""
    try:
        instrument()
        from repro_golden.recording.attach.base.settings import VARIABLE, Settings
        from repro_golden.recording.attach.entry import enter, is_entry

        settings = Settings.from_text(os.environ[VARIABLE])
        entry = settings.entry
        if entry and is_entry(entry["names"], sys.argv, sys.orig_argv):
            enter(entry)
    except Exception as error:  # noqa: BLE001 - site.py would say it and go on
        _say(f"repro: no flags could be added ({type(error).__name__}: {error})")
        os._exit(70)


def _say(line: str) -> None:
    with contextlib.suppress(Exception):  # the program's stderr may be closed, or full
        print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line), file=sys.stderr)


_first = not hasattr(sys, "_repro_sites")
if _first and os.environ.get("REPRO_TRACE"):
    sys.__dict__["_repro_environ"] = dict(os.environ)  # as it is handed over: programs change it
_sites: list[str] = sys.__dict__.setdefault("_repro_sites", [])  # Ray may put a copy of this file beside it
try:
    _chain()
finally:
    if _first and os.environ.get("REPRO_TRACE") and os.environ.get("REPRO_INSTRUMENT"):
        _asked = os.environ["REPRO_TRACE"]
        if '"alone": true' in _asked:
            _watch_imports()
            When("datasets.arrow_dataset", _keep_apart)
        if '"entry": {' in _asked:
            _enter()
        if '"entry": {' in _asked or '"recorder": false' not in _asked:
            When("ray._private.utils", _arm_ray)
        if '"recorder": false' not in _asked:
            _watch_exit()
            When("random", _watch_seeds)
            When("numpy.random", _watch_seeds)
            When("torch", _arm, _seek)

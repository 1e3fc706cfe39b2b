"""repro's commands, and the Python programs that they start, as forks of a process that has imported what they import.

Importing torch takes ten times as long as most of what tests run. Each command and each program still is a process with
its own number, parent, variables, folder, streams, session, signals and exit code; it begins warm instead of cold. What
is not the same: a program's own start-up flags and variables that Python, the linker or a thread pool read when they
start. What has such goes cold by itself (`_warmable`), and a test whose claim is a cold start asks for one.

    warm_kit.run([sys.executable, "-m", "repro", "golden", "verify"], cwd, variables, timeout)
    launch = warm_kit.called(launch)  # a function of ours that starts programs

Run as a program it is the server, which ends with its standard input.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.machinery
import io
import json
import logging
import multiprocessing.process
import os
import pickle
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

BASE = ("torch", "torch._dynamo", "safetensors.torch", "numba", "xxhash", "pyarrow.parquet")
"""What programs import, and the recorder in them. Optimizers import torch._dynamo when they first step."""
OURS = ("repro", "repro_golden", "repro_bisect", "repro_core")
COMMANDS = (
    "repro.cli", "repro.commands.bisect", "repro.commands.golden_verify", "repro.commands.trace", "repro.report.bisect",
    "repro.report.plots", "repro_golden.runs.record", "repro_golden.runs.verify", "repro_bisect.driver.commits",
    "repro_bisect.probe.executors.local", "altair", "jinja2", "numpy.ma",
    "repro_golden.recording.recorder", "repro_golden.repository.git_environment",
    "dvc.cachemgr", "dvc.cli.parser", "dvc.data_cloud", "dvc.lock", "dvc.repo.add", "dvc.repo.artifacts",
    "dvc.repo.datasets", "dvc.repo.metrics", "dvc.repo.open_repo", "dvc.repo.params", "dvc.repo.plots",
    "dvc.repo.stage", "dvc_data.hashfile.build", "dvc_render", "dulwich.worktree", "networkx",
)  # fmt: skip
READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "NUMBA_",
    "TORCH", "ATEN_", "DNNL_", "ONEDNN_", "NUMPY_", "NPY_", "CUDA", "GLIBC_")  # fmt: skip
"""Beginnings of variables that a process reads before a program could change them."""
OF_EACH = {
    "PYTHONHASHSEED", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
}  # fmt: skip
"""Those of them that a fork takes over."""
SEED = "0"
"""Of Python's hashes: what repro gives its children."""


# -- the client


def run(
    command: Sequence[str],
    cwd: Path,
    variables: Mapping[str, str] | None = None,
    timeout: float = 300,
    merged: bool = False,
) -> subprocess.CompletedProcess[str]:
    """A program in `cwd`, as `subprocess.run` with `capture_output` and `text` has it.

    Args:
        command: ``[python, "-m", module, …]``, ``[python, "-c", code, …]``, ``[python, file, …]``, or another, which
            begins cold.
        cwd: Where it starts.
        variables: All of its environment; by default our own.
        timeout: Seconds that it may take.
        merged: Stderr goes where stdout goes.

    Raises:
        subprocess.TimeoutExpired: it did not end in time, and was killed.
    """
    variables = os.environ | {"PYTHONHASHSEED": SEED} if variables is None else variables
    if not _warmable(command, variables):
        return subprocess.run(
            command, cwd=cwd, env=variables, text=True, timeout=timeout, check=False, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        )  # fmt: skip
    with (
        socket.socket(socket.AF_UNIX) as connection, open(os.devnull, "rb") as nothing,  # noqa: PTH123
        tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err,
    ):  # fmt: skip
        connection.connect(_server())
        socket.send_fds(connection, [b"!"], [nothing.fileno(), out.fileno(), (out if merged else err).fileno()])
        asked = {"command": [*command], "cwd": str(cwd), "variables": dict(variables)}
        connection.sendall(json.dumps(asked).encode() + b"\n")
        with connection.makefile() as answers:
            number = int(answers.readline())
            connection.settimeout(timeout)
            try:
                code = int(answers.readline())
            except TimeoutError:
                os.kill(number, signal.SIGKILL)
                raise subprocess.TimeoutExpired([*command], timeout) from None
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="surrogateescape").replace("\r\n", "\n").replace("\r", "\n"))
    return subprocess.CompletedProcess([*command], code, *texts)


_CALL = """\
import importlib, operator, pickle, sys
function = operator.attrgetter(sys.argv[3])(importlib.import_module(sys.argv[2]))
with open(sys.argv[1], "rb") as file:
    arguments, keywords = pickle.load(file)
try:
    ended = function(*arguments, **keywords), None
except Exception as error:
    ended = None, error
with open(sys.argv[1], "wb") as file:
    pickle.dump(ended, file)
"""


def called(function: Callable[P, T]) -> Callable[P, T]:
    """A function of ours, called in a process of its own, where what it starts begins warm as that of a command does.

    What it is given, returns and raises is pickled; variables and the folder are this process's.
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        with tempfile.NamedTemporaryFile() as file:
            path = Path(file.name)
            path.write_bytes(pickle.dumps((arguments, keywords)))
            words = [_CALL, file.name, function.__module__, function.__qualname__]
            done = run([sys.executable, "-c", *words], Path.cwd())
            assert done.returncode == 0, done.stderr
            returned, error = pickle.loads(path.read_bytes())  # noqa: S301 - what our own process wrote
        if error is not None:
            raise error
        value: T = returned
        return value

    return call


@cache
def _server() -> str:
    """The socket of this process's server, which dies with this process."""
    folder = tempfile.mkdtemp(prefix="warm-")  # pytest's own is too long for a socket's name
    path = f"{folder}/socket"
    kept = {name: value for name, value in _STARTED_WITH.items() if not name.startswith("PYTEST_")}
    process = subprocess.Popen(
        [sys.executable, __file__, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=kept | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": SEED}, start_new_session=True,
    )  # fmt: skip
    atexit.register(_stop, process, folder)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return path


def _stop(process: subprocess.Popen[bytes], folder: str) -> None:
    process.kill()
    process.communicate()
    with contextlib.suppress(OSError):
        Path(folder, "socket").unlink()
        Path(folder).rmdir()


# -- the server


def forkable() -> None:
    """Before modules are imported whose forks go on: a lock that another thread holds is held for ever in a fork.

    Python 3.11 has one for all values of a cached property; later versions have none.
    """
    functools.RLock = contextlib.nullcontext  # type: ignore[attr-defined]


def serve(path: str) -> Callable[[], NoReturn]:
    """Answer commands, each in a process of its own; in that process, return what it is to do."""
    _die_with_parent()
    forkable()
    for name in (*BASE, *COMMANDS):
        importlib.import_module(name)
    from repro_golden.fingerprint import fingerprint

    fingerprint(sys.modules["torch"].ones(3))  # the kernels are compiled, or found
    assert threading.active_count() == 1
    _freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
    while True:
        connection, _ = listener.accept()
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        line = connection.makefile().readline()
        if os.fork():
            connection.close()
            for stream in streams:
                os.close(stream)
            continue
        _die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener.close()
        if child := os.fork():
            connection.sendall(b"%d\n" % child)
            _, status = os.waitpid(child, 0)
            with contextlib.suppress(OSError):  # who asked did not wait
                connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            os._exit(0)
        _die_with_parent()
        asked = json.loads(line)
        for place, stream in enumerate(streams):
            os.dup2(stream, place)
        os.closerange(3, 1 << 12)
        os.chdir(asked["cwd"])
        return lambda: become(asked["command"], asked["variables"])


def _freeze() -> None:
    """Leave what is imported to no fork's garbage collector, which the recorder asks for all that is alive.

    It is many times what a program imports. That it is frozen is not told, until a program freezes its own.
    """
    count, freeze = gc.get_freeze_count, gc.freeze

    def of_a_program() -> None:
        freeze()
        gc.get_freeze_count = count

    gc.collect()
    freeze()
    gc.get_freeze_count, gc.freeze = int, of_a_program


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# -- being a program


def become(command: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Be the process that `command` asks for, to its end; its streams and folder are those of this process.

    What repro's commands start begins warm too.

    Args:
        command: ``[python, "-m", module, …]``, ``[python, "-c", code, …]`` or ``[python, file, …]``.
        variables: All of its environment.
    """
    _forget_the_parent()
    os.environ.clear()
    os.environ.update(variables)
    kind, rest = _parsed(command)
    execute = _execute_warm if (kind, rest[0]) in (("-m", "repro"), ("-c", _CALL)) else _execute_cold
    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _streams("PYTHONUNBUFFERED" in variables)
    sys.dont_write_bytecode = bool(variables.get("PYTHONDONTWRITEBYTECODE"))
    sys.orig_argv = list(command)
    first = {"-m": os.getcwd(), "-c": ""}.get(kind) if kind else str(Path(rest[0]).resolve().parent)  # noqa: PTH109
    front = [] if variables.get("PYTHONSAFEPATH") or first is None else [first]
    paths = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*front, *paths, *_PATH]
    sys.argv = ["-c", *rest[1:]] if kind == "-c" else list(rest)
    torch = sys.modules["torch"]
    threads = int(variables.get("OMP_NUM_THREADS") or 0) or len(os.sched_getaffinity(0))
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined] # noqa: PTH109 - as it has it
    sys.modules["numpy"].random.seed()  # a process of its own has numbers of its own
    gone = OURS[3:] if _ours(kind, rest) or rest[0] == _CALL else OURS
    main = {rest[0], f"{rest[0]}.__main__"} - {name for name in rest[:1] if hasattr(sys.modules.get(name), "__path__")}
    for name in [name for name in sys.modules if name.partition(".")[0] in gone or name in main]:
        del sys.modules[name]
    code = 1
    try:
        if paths and (site := importlib.machinery.PathFinder.find_spec("sitecustomize", paths)):
            module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(site)
            assert site.loader is not None
            site.loader.exec_module(module)
        _main(kind, rest)
        threading._shutdown()  # type: ignore[attr-defined]
        code = 0
    except SystemExit as error:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
        code = _code_of(error)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException as error:  # noqa: BLE001 - as Python does
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    _end(code)


def _forget_the_parent() -> None:
    """What was to be done at its end is its own affair."""
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    concurrent.futures.thread._threads_queues.clear()  # type: ignore[attr-defined]
    importlib._bootstrap._module_locks.clear()  # type: ignore[attr-defined] # of what its threads were importing
    atexit.register(logging.shutdown)


def _end(code: int) -> NoReturn:
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        time.sleep(1)
    os._exit(code & 0xFF)  # to take all of torch apart would take longer than everything before


def _code_of(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def _main(kind: str, rest: Sequence[str]) -> None:
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    if kind == "-m":
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        exec(compile(rest[0], "<string>", "exec"), vars(module))  # noqa: S102 - as Python does
    else:
        module.__file__ = rest[0]
        module.__dict__["__cached__"] = None
        loader = importlib.machinery.SourceFileLoader("__main__", rest[0])
        module.__loader__ = loader
        exec(compile(Path(rest[0]).read_bytes(), rest[0], "exec"), vars(module))  # noqa: S102 - as Python does


_LEFT: list[Any] = []
"""The parent's streams: another of its threads may have been writing, and closing them would wait for it."""


def _streams(unbuffered: bool) -> None:
    _LEFT.extend((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw: Any = io.FileIO(number, "wb", closefd=False)
        buffered = raw if unbuffered else io.BufferedWriter(raw)
        through = unbuffered or number == 2
        stream = io.TextIOWrapper(buffered, encoding="utf-8", errors=errors, write_through=through)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


# -- what such a process starts

_PATH = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]
_execute_cold: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _parsed(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """``-m``, ``-c`` or nothing for a file, and what stands behind it."""
    return (command[1], command[2:]) if command[1] in ("-m", "-c") else ("", command[1:])


def _ours(kind: str, rest: Sequence[str]) -> bool:
    return kind == "-m" and rest[0].partition(".")[0] in OURS[:3]


def _warmable(command: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Whether a fork can stand for it."""
    if len(command) < 2 or variables.get("PYTHONHASHSEED") != SEED:
        return False
    if sys.executable not in (command[0], shutil.which(command[0], path=variables.get("PATH", ""))):
        return False
    plain = command[1] in ("-m", "-c") and len(command) > 2
    if not plain and (command[1].startswith("-") or not command[1].endswith(".py")):
        return False
    ours = _STARTED_WITH
    names = {name for name in (*variables, *ours) if name.startswith(READ_AT_START)} - OF_EACH
    return all(variables.get(name) == ours.get(name) for name in names)


_STARTED_WITH = dict(os.environ)


def _execute_warm(
    self: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
    startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
    errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: Any,
    start_new_session: Any, process_group: Any,
) -> None:  # fmt: skip
    """`subprocess.Popen._execute_child`, but that a Python of ours is forked and not executed."""
    command = [os.fsdecode(word) for word in args] if not isinstance(args, (str, bytes)) else []
    variables = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
    bound = _bound(command)
    if bound:  # it would only become another program
        command, variables = command[_BOUND:], _held(bound[-1])
    special = preexec_fn or shell or executable or (umask, gid, gids, uid) != (-1, None, None, None)
    if special or not _warmable(command, variables):
        _execute_cold(
            self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
            start_new_session, process_group,
        )  # fmt: skip
        return
    if cwd is not None:
        os.stat(cwd)  # noqa: PTH116 - raises what starting it would
    sys.stdout.flush()
    sys.stderr.flush()
    ours = os.getpid()
    self.pid = os.fork()
    self._child_created = True
    if self.pid:
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        return
    try:
        if bound:
            _die_with_parent()
            if os.getppid() != ours:
                os._exit(1)
        keep = set(pass_fds) - set(bound)
        for place, stream in enumerate((p2cread, c2pwrite, errwrite)):
            if stream >= 0:
                os.dup2(stream, place)
        at = 3
        for number in sorted(keep):
            os.closerange(at, number)
            at = number + 1
        os.closerange(at, 1 << 12)
        if start_new_session:
            os.setsid()
        if cwd is not None:
            os.chdir(cwd)
    except BaseException:  # noqa: BLE001 - nothing of ours may go on in a fork
        traceback.print_exc()
        os._exit(255)
    become(command, variables)


_BOUND = 8
"""Words before the program's own: Python, its flags, `processes._BIND`, and three numbers."""


def _bound(command: Sequence[str]) -> list[int]:
    """The descriptors of `processes._BIND`, where a command is to become another in that way."""
    from repro_golden.base.machine.processes import _BIND

    return [int(word) for word in command[6:_BOUND]] if command[1:5] == ["-I", "-S", "-c", _BIND] else []


def _held(file: int) -> dict[str, str]:
    """The variables in it."""
    os.lseek(file, 0, os.SEEK_SET)
    with open(os.dup(file), "rb") as held:  # noqa: PTH123 - no path
        entries = [entry.partition(b"=") for entry in held.read().split(b"\0") if entry]
    os.lseek(file, 0, os.SEEK_SET)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in entries}


if __name__ == "__main__":
    serve(sys.argv[1])()

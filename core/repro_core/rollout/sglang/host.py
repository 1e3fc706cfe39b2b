"""`sglang.Engine` as a guest: what it changes in its process is put back, and its death is an error, not ours.

Left to itself it kills this whole process when one of its children dies, kills *all* of this process's children when
it is shut down, swallows SIGTERM, takes over logging and the start method of processes, changes variables that decide
bits elsewhere (CUDA_DEVICE_MAX_CONNECTIONS, which Megatron needs at 1), and writes to the terminal.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import psutil
import torch

from repro_core.rollout.engine import EngineError
from repro_core.rollout.sglang.flags import is_launchers

__all__ = ["Host", "end_trees", "fresh_log", "in_session", "last_error", "output_to", "tree"]


# -- processes with all that they started, and their end

_TRACKER_S = 5.0


def tree(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    """These processes and everything below them; the roots come first."""
    first, below = list(roots), []
    for root in first:
        with contextlib.suppress(psutil.NoSuchProcess):
            below += root.children(recursive=True)
    return [*first, *below]


def in_session(leader: int) -> list[psutil.Process]:
    """All processes of the session that a process began, those too whose parents are gone."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            if os.getsid(process.pid) == leader:
                processes.append(process)
    return processes


def end_trees(processes: Sequence[psutil.Process], term_s: float) -> None:
    """End processes, the first by SIGTERM, what is left by SIGKILL when the time is up, and wait until none is left.

    What they started meanwhile is ended too. multiprocessing's resource trackers end by themselves after the others,
    and remove their semaphores on the way.

    Args:
        processes: of `tree`. psutil knows them by id and start time, so a reused id is never hit.
        term_s: seconds that SIGTERM may take; 0 sends SIGKILL at once.
    """
    left = list(processes)
    if term_s > 0:
        for process in left[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        psutil.wait_procs(left[:1], timeout=term_s)
    left += [child for child in tree(left)[len(left) :] if child not in left]
    trackers = [process for process in left if _is_tracker(process)]
    _kill([process for process in left if process not in trackers])
    _, stuck = psutil.wait_procs(trackers, timeout=_TRACKER_S)
    _kill(stuck)


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    return False


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=30)


# -- `sglang.Engine` as a guest: what it changes in its process is put back, and its death is an error, not ours

_T = TypeVar("_T")
_TICK_S = 0.2
_ERROR = re.compile(r"[A-Za-z_.]*(Error|Exception): |[\w.]+: error: ")


class Host:
    """Starts `sglang.Engine`, runs its coroutines with a deadline, and ends its processes.

    Args:
        arguments: SGLang's server arguments.
        environment: variables that its processes get.
        timeout: seconds that the start, and each call, may take.
        log: file for its processes' output; None makes one among temporary files.

    Attributes:
        engine: the `sglang.Engine`.
        log: where its processes write.
        keeps_log: whether the log stays when it is closed, though it is of our own making: an error has named it.

    Raises:
        EngineError: it does not start.
    """

    def __init__(
        self, arguments: Mapping[str, Any], environment: Mapping[str, str], timeout: float, log: Path | None
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise EngineError("SGLang in this process must be started in the main thread: it sets signal handlers")
        self._timeout = timeout
        self.keeps_log = log is not None
        self.log = log if log is not None else fresh_log()
        self._children: list[multiprocessing.process.BaseProcess] = []
        self._failed: str | None = None
        self._closed = False
        self._old_quit = signal.getsignal(signal.SIGQUIT)
        before, contexts = set(multiprocessing.active_children()), {id(context) for context in _contexts()}
        try:
            with _guest(self.log, environment):
                self.engine = _start(dict(arguments), timeout)
        except _NotStartedError as error:
            self._children = [child for child in multiprocessing.active_children() if child not in before]
            self._contexts = [context for context in _contexts() if id(context) not in contexts]
            self._failed = str(error)
            self.close()
            raise EngineError(f"SGLang does not start: {error}{last_error(self.log)}") from error
        self._children = [child for child in multiprocessing.active_children() if child not in before]
        self._contexts = [context for context in _contexts() if id(context) not in contexts]
        atexit.register(self.close)
        self._keep_signals()

    def arguments(self) -> dict[str, Any]:
        """Its server arguments as it resolved them."""
        server = self.engine.tokenizer_manager.server_args
        resolved = getattr(server, "resolved_dict", None)
        return dict(resolved()) if resolved is not None else dict(vars(server))

    def alive(self) -> bool:
        """Whether it can still be asked."""
        return self._failed is None and not self._closed and all(child.is_alive() for child in self._children)

    def call(self, what: str, ask: Callable[[], Awaitable[_T]]) -> _T:
        """The result of one of SGLang's coroutines.

        Args:
            what: it is to do, for messages.
            ask: makes the coroutine.

        Raises:
            EngineError: a child of it died, it took longer than the time-out, or it raised. It is ended then, unless it
                raised before anything went to its processes.
        """
        self._check()
        try:
            result: _T = self.engine.loop.run_until_complete(self._guarded(what, ask))
        except EngineError:
            self.close()
            raise
        except Exception as error:
            # SGLang raises ValueError for requests that it does not take, and goes on.
            if not isinstance(error, (ValueError, AssertionError)):
                self._fail(f"SGLang failed to {what}")
                self.close()
            line = " ".join(str(error).split()) or type(error).__name__
            raise self.failure(f"SGLang fails to {what}: {line}") from error
        return result

    def failure(self, why: str) -> EngineError:
        """An error to be raised that names the log, which then stays."""
        self.keeps_log = True
        return EngineError(f"{why} (log {self.log})")

    @contextlib.contextmanager
    def named(self) -> Iterator[str]:
        """What to call it in errors, with its log, which stays if one is raised inside."""
        try:
            yield f"SGLang (log {self.log})"
        except EngineError:
            self.keeps_log = True
            raise

    def close(self) -> None:
        """End its processes; a log of our own making goes too, unless an error has named it."""
        if self._closed:
            return
        self._closed = True
        engine = getattr(self, "engine", None)
        if engine is not None:
            _stop_watchdog(engine)
        _end(self._children)
        if engine is not None:
            _cancel_tasks(engine.loop)
        for context in self._contexts:
            # Else its end, whenever that is, waits forever for messages that nobody takes any more.
            context.destroy(linger=0)
        if engine is not None:
            if not engine.loop.is_running():
                engine.loop.close()
            signal.signal(signal.SIGQUIT, self._old_quit)
            atexit.unregister(self.close)
        if not self.keeps_log and self._failed is None:
            self.log.unlink(missing_ok=True)

    async def _guarded(self, what: str, ask: Callable[[], Awaitable[_T]]) -> _T:
        task = asyncio.ensure_future(ask())
        end = time.monotonic() + self._timeout
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=_TICK_S)
                if done:
                    return task.result()
                self._check()
                if time.monotonic() > end:
                    self._fail(f"SGLang did not {what} within {self._timeout:g} s: it was ended")
                    self._check()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    def _check(self) -> None:
        if self._closed and self._failed is None:
            raise EngineError("SGLang was closed: start it again")
        if self._failed is None:
            for child in self._children:
                if not child.is_alive() and child.exitcode is not None:
                    self._fail(f"SGLang's process {child.pid} died ({_ending(child.exitcode)}): its batch is dropped")
                    break
        if self._failed is not None:
            raise self.failure(self._failed)

    def _fail(self, why: str) -> None:
        if self._failed is None:
            self._failed = why

    def _keep_signals(self) -> None:
        """Let SGLang install its handlers now, then put back this process's own, and take over SIGQUIT.

        A child of SGLang that fails sends SIGQUIT to this process, whose default is to die.
        """
        term, loop = signal.getsignal(signal.SIGTERM), self.engine.loop

        async def begin() -> None:
            self.engine.tokenizer_manager.auto_create_handle_loop()
            # SGLang's event loop is uvloop's, which forgets a handler only while it runs.
            for number in (signal.SIGTERM, signal.SIGQUIT):
                loop.remove_signal_handler(number)

        loop.run_until_complete(begin())
        signal.signal(signal.SIGTERM, term)
        signal.signal(signal.SIGQUIT, lambda *_: self._fail("a process of SGLang failed: its batch is dropped"))
        _stop_watchdog(self.engine)


class _NotStartedError(Exception):
    """Why SGLang did not start, in one line."""


def _on_launch_quit(_number: int, _frame: FrameType | None) -> None:
    """SGLang's children get it by name with their arguments, so it is no closure."""
    raise _NotStartedError("one of its processes failed")


def _leave_alone(_engine: Any) -> None:
    """What `sglang.Engine.shutdown` is here; `Host.close` ends it."""


def _start(arguments: dict[str, Any], timeout: float) -> Any:
    """An `sglang.Engine`.

    Raises:
        _NotStartedError: it does not start.
    """
    before = set(multiprocessing.active_children())
    late = threading.Event()

    def give_up() -> None:
        late.set()
        _end([child for child in multiprocessing.active_children() if child not in before])

    timer = threading.Timer(timeout, give_up)
    timer.daemon = True
    timer.start()
    try:
        from sglang.srt.entrypoints.engine import Engine

        # Its own way out, which it registers for this process's end, would kill every child of this process.
        guest = type("Guest", (Engine,), {"shutdown": _leave_alone})
        return guest(**arguments, custom_sigquit_handler=_on_launch_quit)
    except (Exception, SystemExit) as error:
        if late.is_set():
            raise _NotStartedError(f"it was not ready within {timeout:g} s") from error
        raise _NotStartedError(" ".join(str(error).split()) or type(error).__name__) from error
    finally:
        timer.cancel()


@contextlib.contextmanager
def _guest(log: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Start processes that write to `log` and have `environment`, and put back what SGLang changes on the way."""
    method = multiprocessing.get_start_method(allow_none=True)
    variables, state, torch_state = dict(os.environ), random.getstate(), torch.get_rng_state()
    root = logging.getLogger()
    handlers, level, policy = root.handlers[:], root.level, asyncio.get_event_loop_policy()
    for name in filter(is_launchers, variables):
        del os.environ[name]
    os.environ.update(environment)
    # SGLang draws its port from here: trainers with equal seeds that start at one moment would all draw the same.
    random.seed()
    try:
        with warnings.catch_warnings(), output_to(log):
            warnings.simplefilter("ignore")
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.getLogger("sglang").setLevel(logging.CRITICAL)
        random.setstate(state)
        torch.set_rng_state(torch_state)
        multiprocessing.set_start_method(method, force=True)
        asyncio.set_event_loop_policy(policy)
        _put_back(variables)


def _put_back(variables: Mapping[str, str]) -> None:
    """All variables but SGLang's own, which it also reads later."""
    for name in set(os.environ) | set(variables):
        if name.startswith("SGLANG_"):
            continue
        if name in variables:
            os.environ[name] = variables[name]
        else:
            del os.environ[name]


@contextlib.contextmanager
def output_to(log: Path) -> Iterator[None]:
    """What this process and its new children write to standard output and error, into a file at its end."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in zip((1, 2), saved, strict=True):
            os.dup2(old, number)
            os.close(old)
        os.close(target)


def fresh_log() -> Path:
    """An empty file among temporary ones."""
    number, name = tempfile.mkstemp(prefix="repro-sglang-", suffix=".log")
    os.close(number)
    return Path(name)


def last_error(log: Path) -> str:
    """The end of a message: the last error that a log of SGLang tells, if any, and where it lies."""
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()
        errors = [line.strip() for line in lines if _ERROR.match(line)]
        if errors:
            return f": {errors[-1][:200]} (log {log})"
    return f" (log {log})"


def _end(children: Sequence[multiprocessing.process.BaseProcess]) -> None:
    """Kill children and what they started. Only `join` waits for a child: it misses one that others waited for."""
    below: list[psutil.Process] = []
    for child in children:
        assert child.pid is not None, "a child that was started has an id"
        with contextlib.suppress(psutil.NoSuchProcess):
            below += psutil.Process(child.pid).children(recursive=True)
    for child in children:
        child.kill()
        child.join(30)
    end_trees(below, term_s=0)


def _stop_watchdog(engine: Any) -> None:
    """SGLang's own watch over its children, which would kill this process."""
    watchdog = engine.tokenizer_manager._subprocess_watchdog
    if watchdog is not None:
        watchdog.stop()


def _cancel_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """End what SGLang left running in its event loop."""
    if loop.is_closed() or loop.is_running():
        return
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def _contexts() -> list[Any]:
    """All of this process's ZeroMQ contexts: SGLang keeps its own out of reach where it does not start."""
    zmq = sys.modules.get("zmq")
    if zmq is None:
        return []
    return [obj for obj in gc.get_objects() if issubclass(type(obj), zmq.Context) and not obj.closed]


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

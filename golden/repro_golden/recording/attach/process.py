"""What a recording process says of itself."""

from __future__ import annotations

import contextlib
import dis
import gc
import hashlib
import io
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch

from repro_golden.recording.attach.alive.generators import states
from repro_golden.recording.attach.alive.names import Names
from repro_golden.recording.attach.alive.parts import of_parts
from repro_golden.recording.attach.alive.readings import Reading
from repro_golden.recording.attach.entry import argv_given, variables_given

__all__ = ["end", "facts", "failed", "final_state", "generators", "outermost", "place_of", "terminal"]

_PATIENCE = 60.0
"""Seconds that a rank which is to end waits for the others, which may still talk to it."""
_FLUSHED = 3.0
"""Seconds after which a stream is left that does not come back."""
FIRST = "first "
"""Before the names of generators as they were before the first step."""


def facts() -> dict[str, Any]:
    """Rank, world size, identity and state of this process; JSON types.

    The determinism switches as they are in effect are no part of the identity: a commit that changes one is a culprit
    like any other.
    """
    from repro_golden.case.identity import collect
    from repro_golden.trace.model import RECORDER

    rank, world = place_of()
    threads = int(os.environ.get("OMP_NUM_THREADS", "0")) or torch.get_num_threads()
    return {
        "recorder": RECORDER,
        "rank": rank,
        "world": world,
        "pid": os.getpid(),
        "group": _training(world),
        "python": sys.executable,
        "argv": argv_given(sys.orig_argv),
        "variables": variables_given(),
        "identity": collect(os.environ, threads=threads, ranks=world).to_mapping(),
        "switches": _switches(),
        "groups": _groups(),
    }


def place_of() -> tuple[int, int]:
    """Rank and world size of this process: its process group's, which no launcher may have told, or the launcher's."""
    if _distributed():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _training(world: int) -> str:
    """What the ranks of one training have in common, and no other process at that time."""
    if world == 1 or "MASTER_PORT" not in os.environ:
        return str(os.getpid()) if world == 1 else ""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ['MASTER_PORT']}"


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _switches() -> dict[str, str]:
    """The determinism switches as they are in effect, not as they were asked for."""
    switches = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }
    return {name: str(value) for name, value in switches.items()}


def _groups() -> dict[str, list[int]]:
    """Parallel groups that this process is in: their names and the ranks in them."""
    if not _distributed():
        return {}
    world = torch.distributed.distributed_c10d._world
    names = world.pg_names  # among the others there is one stand-in for all groups that this process is not in
    return {str(names[group]): sorted(ranks) for group, ranks in world.pg_group_ranks.items() if group in names}


def final_state(optimizers: Iterable[Any], names: Names) -> dict[str, str]:
    """Fingerprints of parameters and optimizer state.

    Args:
        optimizers: Those that made steps, in their order.
        names: Where their parameters' names are known.
    """
    tensors: dict[str, torch.Tensor] = {}
    for k, optimizer in enumerate(optimizers):
        if optimizer is None:
            continue
        held = names.held(optimizer)
        for kind, reading in {"": Reading(held.parameters, {}), **held.state()}.items():
            for name, tensor in reading.tensors.items():
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                tensors[f"{k}/{kind}/{name}"] = local
    return _prints(of_parts(tensors))


def terminal(
    final: Mapping[str, str], first: Mapping[str, str], logged: Sequence[tuple[int, str, str]]
) -> dict[str, str]:
    """What a run ends with.

    Args:
        final: `final_state`.
        first: `generators` before the first step. One that differs there from run to run was never seeded.
        logged: Step, name and value of every metric.
    """
    prints = dict(final)
    for name in sorted({name for _, name, _ in logged}):
        prints[f"metric {name}"] = _hash([f"{step} {value}" for step, n, value in logged if n == name])
    return prints | {f"{FIRST}{name}": value for name, value in first.items()} | generators()


def generators() -> dict[str, str]:
    """The states of the process's random number generators."""
    return {f"generator {name}": value for name, value in _prints(states()).items()}


def _prints(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """What stands for each tensor: its lanes, dtype and shape."""
    from repro_golden.trace.signals import collector

    reading = collector()
    reading.add(list(tensors.values()))
    lanes = [scan.lanes for (scan,) in reading.finish().result()]
    parts = zip(tensors.items(), lanes, strict=True)
    return {name: f"{pair.a:016x}{pair.b:016x} {t.dtype} {list(t.shape)}" for (name, t), pair in parts}


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]


def outermost() -> FrameType | None:
    """The first frame of the main thread: it keeps nothing alive but the main module, which lives to the end."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _fork() -> None:
    global _handled
    _handled = id(sys.exc_info()[1])


_handled = id(None)
"""The exception that was handled when this process was forked, and is so for all its life."""
os.register_at_fork(after_in_child=_fork)


def failed(main: FrameType | None) -> bool | None:
    """Whether an exception ends this process, or an exit code that is not 0, which nobody can ask for.

    It is 0 where the code of the main module has returned, and else what was given to the `sys.exit` that ends it. That
    of a `SystemExit` which the program raises itself is not known: None.

    Args:
        main: `outermost`.
    """
    if hasattr(sys, "last_value"):
        return True
    if multiprocessing.parent_process() is not None:  # the end of its process is told inside of what ends it
        error = sys.exc_info()[1]
        code = None if id(error) == _handled else error.code if isinstance(error, SystemExit) else error
    elif main is not None and "RETURN" in dis.opname[main.f_code.co_code[main.f_lasti]]:
        return False
    elif "_repro_exit" not in sys.__dict__:
        return None
    else:
        code = sys.__dict__["_repro_exit"]
    return not (code is None or (isinstance(code, int) and code == 0))


def end(wait: Callable[[], bool]) -> NoReturn:
    """End this process with its files flushed and no more, once `wait` says no more, or after a minute."""
    with contextlib.suppress(Exception):
        for child in multiprocessing.active_children():
            child.terminate()
    deadline = time.monotonic() + _PATIENCE
    with contextlib.suppress(Exception):
        while time.monotonic() < deadline and wait():
            time.sleep(0.01)
    with contextlib.suppress(Exception):  # no thread can be started, say
        _flush_streams()
    os._exit(0)


def _flush_streams() -> None:
    """Flush all files and streams that are open in this process, but for those that cannot be.

    A stream is locked while it is written to. What another thread held when a process was forked is held for ever in
    the fork, and a thread that writes to a pipe that nobody reads holds it as long. What
    does not come back in time is left.
    """
    left = [o for o in gc.get_objects() if issubclass(type(o), io.IOBase)]

    def flush() -> None:
        while left:
            with contextlib.suppress(Exception):  # closed, or not for writing
                left.pop().flush()

    while left:
        worker = threading.Thread(target=flush, daemon=True)
        worker.start()
        before = len(left) + 1
        while worker.is_alive() and len(left) < before:
            before = len(left)
            worker.join(_FLUSHED)

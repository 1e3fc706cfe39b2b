"""``python planted_run.py PROGRAM FOLDER [CLEAN]``: runs of a program, each a fork of this warm process.

It reads a line of JSON for each run (the change that is planted, see `planted_faults.Injector`, or under ``around`` the
surroundings, see `clean_around`; null for the clean run, which is first unless CLEAN is its folder) and answers with a
line: what is so by `planted_truth`, and what repro says. The recorder is the one of `repro trace`: its own
sitecustomize arms the fork, its own gathering makes the trace, and its own comparison compares it with the clean one.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import planted_core
import planted_programs
import torch
import torch._dynamo
from clean_around import enter
from planted_faults import Injector
from planted_judge import Clean, judged, read_clean
from planted_truth import Signals, Truth
from torch.optim.optimizer import register_optimizer_step_pre_hook

from repro_golden.fingerprint import fingerprint
from repro_golden.recording.attach.base.settings import Settings
from repro_golden.recording.attach.gathered.collect import Gathering
from repro_golden.recording.attach.gathered.run import SITE, environment_for, said_of
from repro_golden.trace import Header

__all__ = ["main"]


def main(program: str, folder: Path, golden: Path | None = None) -> int:
    """Serve until the lines end."""
    torch.set_num_threads(1)
    run = planted_core.one if program in planted_core.PROGRAMS else _one
    (planted_core if program in planted_core.PROGRAMS else planted_programs).warm(program)
    fingerprint(torch.ones(3))  # the kernels are compiled, or found
    gc.collect()
    import pyarrow.compute  # noqa: F401 - a fork may become a user who cannot read where Python lies

    gc.freeze()
    clean = read_clean(golden) if golden else None
    for number, line in enumerate(sys.stdin):
        place = folder / str(number)
        place.mkdir()
        sys.stdout.flush()
        child = os.fork()
        if not child:
            code = 70
            try:
                asked = json.loads(line)
                _begin(place)
                held = enter(asked["around"], place) if asked and "around" in asked else None
                code = run(program, place, asked if asked and "at" in asked else None, clean)
                del held
            except BaseException:  # noqa: BLE001 - nothing of ours may go on in a fork
                traceback.print_exc()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        answer = place / "answer.json"
        print(answer.read_text() if answer.exists() else json.dumps({"error": f"status {status}"}), flush=True)
        if clean is None:
            clean = read_clean(place)
        else:
            shutil.rmtree(place)
    return 0


def _begin(place: Path) -> None:
    """Be a process of its own, and no longer than three minutes."""
    signal.alarm(180)
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    out = os.open(place / "said.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(place)


def _one(program: str, place: Path, asked: Mapping[str, Any] | None, clean: Clean | None) -> int:
    """A foreign program, as `repro trace` runs it."""
    module = types.ModuleType("__main__")
    file = planted_programs.path(program)
    module.__file__, sys.argv = str(file), [str(file)]
    sys.orig_argv[:] = [sys.executable, str(file)]
    sys.modules["__main__"] = module

    def parts() -> Any:
        return module.parts() if hasattr(module, "parts") else ({"": torch.nn.Module()}, [])

    truth = Truth(parts)
    truth.watch()
    raw = place / "raw"
    raw.mkdir()
    os.environ.update(environment_for(Settings(str(raw)), os.environ))
    _arm()
    random.seed()  # a process of its own has numbers of its own
    np.random.seed()
    programs = Held(module, parts)
    injector = Injector(asked, programs.held, programs.numbers)
    programs.watch(injector)
    code = 0
    try:
        with injector:
            exec(compile(file.read_text(), str(file), "exec"), vars(module))  # noqa: S102 - the program
        truth.end()
    except Exception:  # noqa: BLE001 - as Python does
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    answer: dict[str, Any] = {**injector.told(), "code": code}
    if not code:
        answer |= _judged(place, raw, truth.signals, clean, [str(file)])
    (place / "answer.json").write_text(json.dumps(answer))
    return code


def _arm() -> None:
    """What `repro trace` has every Python process do at its start."""
    spec = importlib.util.spec_from_file_location("sitecustomize", SITE / "sitecustomize.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    sys.__dict__.pop("_repro_sites", None)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


class Held:
    """What a foreign program holds, from its own functions: `parts`, `data` and `knobs`."""

    def __init__(self, module: Any, parts: Callable[[], Any]) -> None:
        self._module, self._parts = module, parts
        self._inputs: list[torch.Tensor] = []

    def watch(self, injector: Injector) -> None:
        """Mark where forward passes and optimizer steps begin."""
        first: list[Any] = []

        def forward(module: Any, args: Any, kwargs: Any) -> None:
            if not first or first[0] is module:
                first[:] = [module]
                injector.mark("forward")
                self._inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]

        kind = torch.nn.Module

        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            forward(module, args, kwargs)
            return call(module, *args, **kwargs)

        call, kind.__call__ = kind.__call__, called  # type: ignore[assignment,method-assign]
        register_optimizer_step_pre_hook(lambda *_: injector.mark("step"))

    def held(self, where: str) -> list[tuple[str, torch.Tensor]]:
        """The tensors of a kind."""
        modules, optimizers = self._parts()
        if where == "input":
            data = self._module.data() if hasattr(self._module, "data") else []
            return [(str(k), t) for k, t in enumerate([*self._inputs, *data])]
        if where == "weight":
            return [(f"{root}.{n}", p.data) for root, m in modules.items() for n, p in m.named_parameters()]
        if where == "buffer":
            return [(f"{root}.{n}", b) for root, m in modules.items() for n, b in m.named_buffers()]
        if where == "gradient":
            return [(n, p.grad) for n, p in modules[""].named_parameters() if p.grad is not None]
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        return [(key, value) for state in states for key, value in state.items() if isinstance(value, torch.Tensor)]

    def numbers(self) -> list[tuple[Any, str]]:
        """Hyperparameters."""
        groups = [group for optimizer in self._parts()[1] for group in optimizer.param_groups]
        return [*((group, key) for group in groups for key in group), *self._module.knobs()]


def _judged(place: Path, raw: Path, signals: Signals, clean: Clean | None, command: list[str]) -> dict[str, Any]:
    def header(about: Mapping[str, Any], seen: int) -> Header:
        subject = {"kind": "command", "command": command, **said_of(about)}
        return Header({"command": command}, "", subject, about["identity"], seen)

    with closing(Gathering(raw, place / "trace", header, None)) as gathering:
        gathering.finish(command, 0)
    return judged(place, signals, clean)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(Path, sys.argv[2:])))

"""What programs of the zoo save and log, observed without the recorder: `python zoo_truth.py FILE.py ...`.

Torch is imported once, and each program runs in a fork. What its `checkpoint()` returns, the generators and the logged
lines are digested after each line that begins with "step ", and once more at the end, with the files that it wrote.
The answer is FILE.json beside FILE.py: a list of mappings from a path to a digest.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import random
import re
import struct
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # every optimizer imports it when it first steps
from safetensors import safe_open
from safetensors.torch import load_file

_LOGGED = re.compile(r"step \d|\{|accuracy")
_HOW = {"foreach", "fused", "created_at"}
"""Keys of an optimizer's state dict that say how its numbers are computed, and not which; and when."""

_TIME = re.compile(r",? ?'?time'?:? [\d.e-]+s?")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every value inside one, with its path; a tensor is its dtype, shape and bytes."""
    if isinstance(value, torch.nn.Module):
        parts = {} if isinstance(value, torch.jit.ScriptModule) else dict(value.named_modules())
        plain = {f"{name}.{key}": v for name, part in parts.items() for key, v in vars(part).items() if key[:1] != "_"}
        value = {**value.state_dict(), **{key: v for key, v in plain.items() if isinstance(v, (int, float, str))}}
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        value = {"indices": value.coalesce().indices(), "values": value.coalesce().values()}
    if isinstance(value, torch.Tensor):
        raw = value.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield path, f"{value.dtype} {list(value.shape)} {hashlib.sha256(raw).hexdigest()}"
    elif isinstance(value, np.ndarray):
        yield path, f"numpy.{value.dtype} {list(value.shape)} {hashlib.sha256(value.tobytes()).hexdigest()}"
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in _HOW:
                yield from leaves(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from leaves(item, f"{path}/{place}")
    elif isinstance(value, float):
        yield path, f"float {struct.pack('<d', value).hex()}"
    elif value is None or isinstance(value, (bool, int, str, bytes)):
        yield path, f"{type(value).__name__} {value!r}"
    else:
        raise TypeError(f"{path}: a {type(value).__name__} has no digest")


def _hash(state: Any) -> str:
    return hashlib.sha256(repr(state.tolist() if isinstance(state, torch.Tensor) else state).encode()).hexdigest()


def of_files(folder: Path) -> Iterator[tuple[str, str]]:
    """The content of each file: of torch's and safetensors' what they load as, of others the bytes."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        path = f"files/{file.relative_to(folder)}"
        if file.suffix == ".pt":
            yield from leaves(torch.load(file, weights_only=False), path)
        elif file.suffix == ".safetensors":
            yield from leaves(load_file(file), path)
            with safe_open(file, "pt") as held:
                yield from leaves(held.metadata(), f"{path}/metadata")
        else:
            yield path, f"bytes {hashlib.sha256(file.read_bytes()).hexdigest()}"


def observe(program: Path, folder: Path) -> list[dict[str, str]]:
    """Run a program in an empty folder, and observe it."""
    text = program.read_text()
    folder.mkdir()
    os.chdir(folder)
    snapshots: list[dict[str, str]] = []
    logged: list[str] = []
    module = types.ModuleType("__main__")
    module.__file__ = str(program)
    say = builtins.print

    def snapshot() -> None:
        state: Callable[[], Any] | None = vars(module).get("checkpoint")
        values = dict(leaves(state(), "saved")) if state else {}
        states = {"torch": torch.get_rng_state(), "random": random.getstate(), "numpy": np.random.get_state()}
        values |= {f"generators/{name}": _hash(state) for name, state in states.items()}
        values |= {f"logged/{k}": line for k, line in enumerate(logged)}
        snapshots.append(values)

    def heard(*values: Any, **options: Any) -> None:
        say(*values, **options)
        line = " ".join(map(str, values))
        if _LOGGED.match(line):
            logged.append(_TIME.sub("", line))
        if line.startswith("step "):
            snapshot()

    builtins.print = heard
    sys.modules["__main__"] = module
    sys.argv = [str(program)]
    random.seed(0)  # a program that seeds neither uses neither
    np.random.seed(0)
    exec(compile(text, str(program), "exec"), vars(module))  # noqa: S102 - a program of the zoo
    snapshot()
    snapshots[-1] |= of_files(folder)
    return snapshots


def main(programs: list[str]) -> int:
    """Observe each program in a fork of this process; how many failed."""
    failed = 0
    for name in programs:
        program = Path(name).resolve()
        child = os.fork()
        if child == 0:
            try:
                with program.with_suffix(".out").open("w") as out:
                    os.dup2(out.fileno(), 1)
                program.with_suffix(".json").write_text(json.dumps(observe(program, program.with_suffix(".files"))))
            except BaseException:  # noqa: BLE001 - also SystemExit: a program of the zoo ends by its last line
                traceback.print_exc()
                os._exit(1)
            sys.stdout.flush()
            os._exit(0)
        failed += os.waitpid(child, 0)[1] != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The environment that a trainer runs in: asked of an interpreter, or read from a list of packages."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from repro.doctor.artefacts.kinds import Machine, Reader
from repro.doctor.artefacts.package_lists import fits, read_packages
from repro_golden.base.credentials import handed_on
from repro_golden.base.errors import ReproError
from repro_golden.base.files import open_regular
from repro_golden.case.identity import BITS_VARIABLES
from repro_golden.replay.children import Child, ChildFailure

__all__ = ["FREEZE", "MODULES", "VARIABLES", "interpreter", "last_line", "machine_of", "printable"]

MODULES = (
    "apex", "cv2", "deep_ep", "flash_attn", "flash_attn_3", "flash_attn_interface", "flashinfer", "mbridge", "megatron",
    "miles", "numpy", "ray", "relax", "sglang", "slime", "tensorboard", "torch", "transformer_engine", "transformers",
    "wandb",
)  # fmt: skip
"""Modules that rules ask for. Those built from source often have no package's name beside them."""

VARIABLES = (*BITS_VARIABLES, "CUDA_VISIBLE_DEVICES")
"""The variables that are read: an allow-list, so no secret ever is."""

_PATIENCE = 60.0
_LARGEST = 32 << 20
"""Bytes of an answer."""

_ASK = r"""
import json, os, platform, re, site, sys
from importlib import metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec

out, modules, variables = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
# isolated mode keeps these from what runs here; the trainer sees them
path = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(one)] + sys.path
if sys.prefix == sys.base_prefix and not os.environ.get("PYTHONNOUSERSITE"):
    path.append(site.getusersitepackages())

packages = {}
for one in metadata.distributions(path=path):
    try:
        packages.setdefault(re.sub("[-_.]+", "-", one.name if hasattr(one, "name") else one.metadata["Name"]).lower(),
                            one.version or "")
    except Exception:
        continue  # what an interrupted installation left

found = []
for name in modules:
    try:
        if PathFinder.find_spec(name, path) or find_spec(name):
            found.append(name)
    except Exception:
        continue

def usable():
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:
        return list(range(os.cpu_count() or 1))

def read(name):
    try:
        with open(name) as file:
            return file.read().split()
    except (OSError, ValueError):
        return []

def quota():
    own = [line.partition("::")[2].strip("/ \n") for line in read("/proc/self/cgroup") if line.startswith("0::")]
    folders = {"/sys/fs/cgroup/" + "/".join(one.split("/")[:n]) for one in own for n in range(len(one.split("/")) + 1)}
    limits = [words for words in (read(os.path.join(one, "cpu.max")) for one in folders) if len(words) == 2]
    old = [read("/sys/fs/cgroup/cpu/cpu.cfs_" + part + "_us") for part in ("quota", "period")]
    limits += [old[0] + old[1]] if all(old) else []
    return min((-(-int(q) // int(p)) for q, p in limits if q.isdigit() and int(p)), default=None)

cores = usable()
def physical():
    folder = "/sys/devices/system/cpu/cpu%d/topology/"
    pairs = [tuple(read(folder % n + part) for part in ("physical_package_id", "core_id")) for n in cores]
    return len({str(pair) for pair in pairs}) if all(all(pair) for pair in pairs) else len(cores)

def threads():
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        asked = re.match(r"\s*0*([1-9]\d{0,5})\s*(,|$)", os.environ.get(name, ""))
        if asked:
            return min(int(asked.group(1)), physical())
    return physical()

limit = quota()
answer = {
    "python": platform.python_version(), "packages": packages, "modules": found,
    "variables": {name: os.environ[name] for name in variables if name in os.environ},
    "cpus": max(1, min(len(cores), limit) if limit else len(cores)), "threads": threads(),
}
with open(out, "w") as file:
    json.dump(answer, file)
"""
"""Needs the standard library alone, of Python 3.8 or later, and imports nothing that is installed."""


def machine_of(python: str | None) -> Machine:
    """Ask an interpreter what it could import and what it runs on. Nothing installed is imported or run.

    Args:
        python: The interpreter, a path or a name on PATH; None for this one.

    Raises:
        ReproError: it is not there, does not start, is too old, or gives no answer in time.
    """
    program = interpreter(python)
    with tempfile.TemporaryDirectory(prefix="repro-machine-") as scratch:
        folder = Path(scratch)
        answer = _answer(program, folder)
        gpus = _gpus(folder)
    return Machine(
        source=python or program,
        packages=_texts(answer.get("packages")),
        modules=frozenset(str(name) for name in answer.get("modules", ())),
        variables=_texts(answer.get("variables")),
        cpus=_whole(answer.get("cpus")),
        threads=_whole(answer.get("threads")),
        gpus=gpus,
        python=str(answer.get("python", "")),
    )


def interpreter(python: str | None) -> str:
    """The path of an interpreter, of this one for None. Not resolved: an environment is known by its link.

    Raises:
        ReproError: it is not there.
    """
    program = shutil.which(python) if python else sys.executable
    if not program:
        raise ReproError(f"there is no interpreter {python}: give --python its path")
    return str(Path.cwd() / program)  # a child starts elsewhere


def _answer(program: str, folder: Path) -> dict[str, Any]:
    out, log = folder / "answer.json", folder / "log"
    command = [program, "-I", "-c", _ASK, str(out), json.dumps(MODULES), json.dumps(VARIABLES)]
    try:
        code = Child(command, folder, handed_on(os.environ), log, _PATIENCE).run()
        if code == 0:
            with open_regular(out) as file:
                answer = json.loads(file.read(_LARGEST))
            if isinstance(answer, dict):
                return answer
    except ChildFailure:
        raise ReproError(f"{program} gave no answer within {_PATIENCE:g} s: is it an interpreter?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ReproError(f"{program} cannot be asked ({printable(error)}): give --python an interpreter") from None
    raise ReproError(f"{program} cannot be asked ({last_line(log)}): give --python an interpreter of 3.8 or later")


def _gpus(folder: Path) -> int | None:
    """How many GPUs `nvidia-smi` lists; None where there is none of it, or it fails."""
    program = shutil.which("nvidia-smi")
    log = folder / "gpus"
    with contextlib.suppress(OSError, ChildFailure):
        if program and Child([program, "-L"], folder, handed_on(os.environ), log, _PATIENCE).run() == 0:
            with log.open("rb") as file:
                return sum(line.startswith(b"GPU ") for line in file.read(_LARGEST).splitlines())
    return None


def last_line(log: Path) -> str:
    """What a child printed last, of what its log ends with."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
        return printable(lines[-1]) if lines else "no output"
    return "no output"


def printable(text: object) -> str:
    """The start of a text, in one line."""
    return "".join(c if c.isprintable() else " " for c in str(text))[:300]


def _texts(value: object) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, Mapping) else {}


def _whole(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


FREEZE = Reader("package list", fits, lambda path: [read_packages(path)])

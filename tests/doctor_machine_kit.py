"""Environments for the doctor's tests: real interpreters with packages as pip leaves them, lists, launch scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import doctor_flags_kit

from repro.doctor.artefacts.kinds import Golden, Launch, Machine
from repro.doctor.artefacts.machine import FREEZE
from repro.doctor.artefacts.traces import GOLDEN
from repro_golden.trace import Header, Trace, TraceWriter
from repro_golden.trace.signals import metric_row

__all__ = ["GPUS", "MANY", "environment", "freeze", "golden", "gpus", "launch", "listed", "script"]

MANY = {f"filler-{k}": "1.0" for k in range(30)}
"""Packages that make a list a long one."""

GPUS = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0c5f0e1a-7f0c-3d55-1c1a-0d5bb5b3f0a1)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1c5f0e1a-7f0c-3d55-1c1a-0d5bb5b3f0a2)
"""
"""What `nvidia-smi -L` prints on a machine with two."""


def environment(folder: Path, packages: Mapping[str, str], modules: Iterable[str] = ()) -> str:
    """An environment of its own with packages that are installed as far as anybody can tell without importing them.

    Args:
        folder: Where it is made.
        packages: Versions by the name that the package gives itself.
        modules: Modules that fail when they are imported.

    Returns:
        Its interpreter.
    """
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    for name, version in packages.items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("pip\n")
        (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/INSTALLER,,\n{info.name}/RECORD,,\n")
    for name in modules:
        (site / name).mkdir(exist_ok=True)
        (site / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    return str(folder / "bin" / "python")


def gpus(folder: Path, listed: str = GPUS) -> str:
    """A PATH on which `nvidia-smi` lists these, before ours."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = -L ] || exit 2\ncat <<"END"\n{listed}END\n')
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def freeze(folder: Path, packages: Mapping[str, str], name: str = "freeze.txt") -> Machine:
    """What a `pip freeze` of these packages says."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(f"{package}=={version}\n" for package, version in packages.items()))
    return listed(path)


def listed(path: Path) -> Machine:
    """The one machine of a list."""
    assert FREEZE.fits(path)
    (machine,) = FREEZE.read(path)
    assert isinstance(machine, Machine)
    return machine


def script(folder: Path, flags: str, *, before: str = "", root: str = "slime", entry: str = "train.py") -> Path:
    """A launch script of a trainer, with these flags and lines before its command."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.sh"
    path.write_text(f"#!/bin/bash\n{before}\ncd /root/{root}\npython3 {entry} {flags}\n")
    return path


def launch(folder: Path, flags: str, *, before: str = "", root: str = "slime", entry: str = "train.py") -> Launch:
    """The same, read."""
    return doctor_flags_kit.launch(script(folder, flags, before=before, root=root, entry=entry))


def golden(folder: Path, threads: int) -> Golden:
    """A golden run that was recorded with so many threads, read."""
    identity = {"host": {}, "environment": {}, "layout": {"ranks": "1", "threads": str(threads)}}
    header = Header({"name": "t"}, "rollouts", {"kind": "core"}, identity, steps=1)
    folder.mkdir(parents=True)
    writer = TraceWriter(folder / "trace", header)
    writer.add(metric_row("loss", "kl", 0.0))
    writer.end_step(0)
    writer.close({"reason": "finished"})
    record = {"format": 1, "chain": Trace(folder / "trace").chain, "case": {"name": "t"}, "identity": identity}
    record |= {"recorded": "2026-01-01T00:00:00Z", "proofs": {}, "rollouts": "rollouts"}
    (folder / "run.json").write_text(json.dumps(record))
    assert GOLDEN.fits(folder)
    return next(artefact for artefact in GOLDEN.read(folder) if isinstance(artefact, Golden))

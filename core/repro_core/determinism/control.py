"""Every source of nondeterminism of the trainer, handled in one place, with a proof that each switch took effect.

`ENVIRONMENT` is what the parent puts in the environment before the process starts, `apply` sets the rest inside it,
and ``python -m repro_core.determinism`` prints the mode report. The report never reads a setting back: for each
switch an operation is run as the process stands, with the switch on and with it off (`switches`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import numpy as np
import torch

from repro_core.determinism.switches import ENVIRONMENT, MIXED_HOSTS, Switch, switches

__all__ = [
    "ENVIRONMENT",
    "MIXED_HOSTS",
    "State",
    "SwitchReport",
    "apply",
    "main",
    "missing_environment",
    "prove",
    "table",
]

State = Literal["proven", "NOT PROVEN", "absent", "NOT IN EFFECT"]


@dataclass(frozen=True)
class SwitchReport:
    """One row of the mode report."""

    switch: str
    state: State
    """``proven``: the process shows what on shows, and off shows something else. ``NOT PROVEN``: on and off show the
    same here. ``absent``: what the switch acts on is not here. ``NOT IN EFFECT``: the process does not show what on
    shows."""
    on: str
    """What the process showed, as `apply` left it; for absent, what is missing."""
    off: str
    """What the same operation showed with the switch off."""


def missing_environment(environ: Mapping[str, str]) -> list[str]:
    """Variables of `ENVIRONMENT` that are not as wanted, one line each: variable, wanted, found."""
    return [
        f"{name}: wanted {wanted}, found {environ.get(name, 'nothing')}"
        for name, wanted in ENVIRONMENT.items()
        if environ.get(name) != wanted
    ]


def apply(seed: int, threads: int) -> None:
    """Set everything that can be set inside the process. Idempotent; call it before the first tensor is made.

    Args:
        seed: for all generators, 0 to 2^32 - 1 (NumPy's range).
        threads: intra-op threads, at least 1: their number decides bits. Inter-op threads are always 1.

    Raises:
        ValueError: a number out of range.
    """
    for switch in switches(seed, threads):
        if switch.set is not None:
            switch.set()


def prove(seed: int, threads: int) -> list[SwitchReport]:
    """Prove every switch, given what `apply` was called with; no generator may have moved since.

    Generators, settings and the environment are left as found. One exception: where the number of inter-op threads was
    never fixed (that row is then NOT IN EFFECT), asking fixes it.

    Raises:
        ValueError: a number out of range.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        return [_prove(switch) for switch in switches(seed, threads)]
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_devices:
            torch.cuda.set_rng_state_all(on_devices)


def _prove(switch: Switch) -> SwitchReport:
    if reason := switch.absent():
        return SwitchReport(switch.name, "absent", reason, "")
    here, on, off = switch.here(), switch.on(), switch.off()
    if here != on:
        return SwitchReport(switch.name, "NOT IN EFFECT", f"{here}; wanted {on}", off)
    return SwitchReport(switch.name, "NOT PROVEN" if on == off else "proven", here, off)


def table(proofs: Sequence[SwitchReport]) -> str:
    """The rows in fixed-width columns, under a line of column names."""
    rows = [("switch", "state", "on", "off"), *((p.switch, p.state, p.on, p.off) for p in proofs)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    cells = [[*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the mode report.

    Returns:
        0, or 1 when a switch is not in effect or a variable of `ENVIRONMENT` is not as wanted.
    """
    parser = argparse.ArgumentParser(prog="python -m repro_core.determinism", description="Prove the trainer's mode.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")
    parser.add_argument("--as-is", action="store_true", help="judge the environment as found; without it, what "
                        "is not set is set first, as a trainer's parent does")  # fmt: skip
    options = parser.parse_args(arguments)
    added = {} if options.as_is else {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    if added:
        print("set for this report:", *(f"{name}={value}" for name, value in added.items()), file=sys.stderr)
        command = [sys.executable, "-m", "repro_core.determinism", "--as-is", "--seed", str(options.seed)]
        command += ["--threads", str(options.threads), *(["--json"] if options.json else [])]
        return subprocess.run(command, env={**os.environ, **added}, check=False).returncode
    try:
        apply(options.seed, options.threads)
    except ValueError as error:
        parser.error(str(error))
    proofs, missing = prove(options.seed, options.threads), missing_environment(os.environ)
    if options.json:
        report = {"platform": _platform(), "seed": options.seed, "threads": options.threads}
        print(json.dumps({**report, "missing_environment": missing, "proofs": [asdict(p) for p in proofs]}, indent=1))
    else:
        print(*(f"{name} {value}" for name, value in _platform().items()), sep="; ")
        print(table(proofs), *(f"environment: {line}" for line in missing), sep="\n")
    return 1 if missing or any(p.state == "NOT IN EFFECT" for p in proofs) else 0


def _platform() -> dict[str, str]:
    """Versions and devices that the report was made with."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    versions["cpu"] = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if torch.cuda.is_available():
        versions["cuda"] = f"{torch.version.cuda}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        versions["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    with contextlib.suppress(PackageNotFoundError):
        versions["transformer_engine"] = version("transformer_engine")
    return versions

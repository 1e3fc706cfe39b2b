"""What runs leave behind, for tests of the doctor: logs, launch scripts, dumps by the project's own writers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from doctor_dump_kit import found
from run_folder_kit import Run

from repro.doctor.examine import look
from repro_golden.base.systems import System
from repro_golden.dumps.rollout.fields import defaults
from repro_golden.dumps.rollout.files import RolloutDump, write_rollout_dump

__all__ = [
    "equal_run",
    "found",
    "launch",
    "log",
    "read",
    "rollout",
    "samples",
    "severities",
]

_STAMP = "[2026-11-20 15:38:49]"


def read(*paths: Path) -> list[object]:
    """What the doctor's own readers make of files and folders."""
    return [artefact for seen in look(paths) for artefact in seen.artefacts]


def severities(name: str, *paths: Path) -> list[str]:
    """The severities of what a rule says."""
    return [finding.severity for finding in found(name, *paths)]


def log(
    path: Path,
    steps: Mapping[int, Mapping[str, float]] | None = None,
    rollouts: Mapping[int, Mapping[str, float]] | None = None,
    flags: Mapping[str, object] | None = None,
    more: Sequence[str] = (),
) -> Path:
    """A log as slime prints it: arguments, rollouts and steps."""
    lines = [f"  {name} {'.' * 30} {value}" for name, value in (flags or {}).items()]
    lines += [f"{_STAMP} sglang_rollout.py:447 - {text}" for text in more]
    for number, metrics in (rollouts or {}).items():
        named = {f"rollout/{name}": value for name, value in metrics.items()}
        lines.append(f"{_STAMP} train_metric_utils.py:135 - rollout {number}: {named}")
    for number, metrics in (steps or {}).items():
        named = {f"train/{name}": value for name, value in metrics.items()} | {"train/step": number}
        lines.append(f"(MegatronTrainRayActor pid=12, ip=10.0.0.1) {_STAMP} model.py:918 - step {number}: {named}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def launch(path: Path, *flags: str) -> Path:
    """A script that starts slime with these flags."""
    text = " \\\n  ".join(("python3 train.py", "--actor-num-gpus-per-node 8", *flags))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\nset -ex\n{text}\n", encoding="utf-8")
    return path


def samples(count: int = 8, each: int = 4, system: System = "slime", **fields: Any) -> list[dict[str, Any]]:
    """Samples of groups of `each`; a field that is a function takes the sample's number."""
    made = []
    for i in range(count):
        sample: dict[str, Any] = {
            "group_index": i // each,
            "index": i,
            "prompt": f"{i} + 1 =",
            "tokens": [5, 6, 7, 8, 10 + i, 11, 2],
            "response": f" {i + 1}, as one more than {i} is {i + 1}.",
            "response_length": 3,
            "label": str(i + 1),
            "reward": float(i % 2),
            "rollout_log_probs": [-0.25, -0.5, -0.125],
            "status": "completed",
        }
        sample |= {name: value(i) if callable(value) else value for name, value in fields.items()}
        made.append({**defaults(system), **sample})
    return made


def rollout(
    folder: Path, made: list[dict[str, Any]], number: int = 0, system: System = "slime", evaluation: bool = False
) -> Path:
    """A rollout dump of these samples in ``rollout_data`` of a run's folder; the folder."""
    name = f"eval_{number}.pt" if evaluation else f"{number}.pt"
    write_rollout_dump(folder / "rollout_data" / name, RolloutDump(system, number, evaluation, {}, made))
    return folder


def equal_run(folder: Path, shift: float = 0.0, **options: Any) -> Path:
    """A run's dumps in which reference and policy agree at first, but for a shift at one counted token of sample 0."""
    run = Run(rollouts=1, **options)
    whole = run.columns(0)
    for i in range(run.count):
        run.changes[0, "ref_log_probs", i] = whole["log_probs"][i].array
    mask = np.asarray(whole["loss_masks"][0].array)
    mask[:] = 1
    run.changes[0, "loss_masks", 0] = mask
    if shift:
        values = whole["log_probs"][0].array.copy()
        values[1] += np.float32(shift)
        run.changes[0, "ref_log_probs", 0] = values
    return run.write(folder)

"""Launch scripts for tests of the doctor: written to disk, read by its reader."""

from __future__ import annotations

from pathlib import Path

from repro.doctor.artefacts.kinds import Launch, NotRead
from repro.doctor.artefacts.launches.scripts import LAUNCH

BATCH = ("--rollout-batch-size 32", "--n-samples-per-prompt 8", "--global-batch-size 256")
GPUS = ("--actor-num-nodes 1", "--actor-num-gpus-per-node 8", "--colocate")


def script(
    folder: Path, *flags: str, before: str = "", entry: str = "train.py", prefix: str = "", name: str = "run.sh"
) -> Path:
    """A launch script of the common form: an array of flags, one a line, and a Ray job.

    Args:
        folder: Where it is written.
        flags: Lines of the array.
        before: Lines in front of it.
        entry: The trainer's program.
        prefix: What stands before the trainer's command.
        name: The file's name.
    """
    lines = "\n".join(f"   {flag}" for flag in flags)
    path = folder / name
    path.write_text(
        f"#!/bin/bash\nset -ex\n{before}\nARGS=(\n{lines}\n)\n\n"
        f'{prefix}ray job submit --address="http://127.0.0.1:8265" \\\n   -- python3 {entry} \\\n   ${{ARGS[@]}}\n'
    )
    return path


def launch(path: Path) -> Launch:
    """The script as the doctor's reader reads it."""
    assert LAUNCH.fits(path)
    content, *more = LAUNCH.read(path)
    assert isinstance(content, Launch) and all(isinstance(left_out, NotRead) for left_out in more)
    return content

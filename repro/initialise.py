"""What `repro init` writes: golden/, a first case, DVC with a remote, and a check stage."""

from __future__ import annotations

import os
from pathlib import Path

from repro_golden.base.canonical import digest
from repro_golden.case.file import CASES
from repro_golden.store.dvc import Dvc

__all__ = ["initialise"]

FIRST_CASE = """\
# A case: one experiment worth guarding. `repro golden record {name}` records it, `repro bisect GOOD..BAD` searches it.
[case]
name = "{name}"
steps = 8
rollouts = "golden/rollouts/{name}"

[subject]
# The module that is the door to your trainer (CONTRACT and build(case)), and the folder of this repository that goes on
# PYTHONPATH for it. An empty path uses the built-in trainer as installed, which no commit of this repository changes.
module = "repro_core"
path = "{path}"
timeout = "10m"

[subject.config]
# What your trainer reads; these keys are the built-in one's (repro_core.config.TrainConfig).
rollout_batch_size = 4
n_samples_per_prompt = 8
global_batch_size = 32
"""

STAGE = "golden/dvc.yaml"
"""Beside the golden runs, so that it is no part of the code of a subject that is all of the repository."""

FIRST_STAGE = """\
# A check stage: `dvc repro {stage}` replays every golden run and writes what `dvc metrics diff`, `dvc plots diff` and
# `dvc exp show` read. It never records one: golden runs are `dvc add` pointers and no stage's output. It measures, and
# so ends well where numbers differ; `repro golden verify --all` is the gate that exits 1.
stages:
  check:
    desc: Replay every golden run of this machine on the working tree
    cmd: repro golden verify --all --exit-zero --metrics check.json --plots check-steps.json
    metrics:
      - check.json:
          cache: false
    plots:
      - check-steps.json:
          cache: false
          title: "{name}: steps whose bits agree with the golden run's"
          x: step
          x_label: optimizer update
          y: {name}/bits_agree
          y_label: 1 where they agree
    always_changed: true
# More plots, of names that check-steps.json has (CASE/METRIC):
# plots:
#   - loss:
#       x: step
#       y:
#         check-steps.json: [{name}/loss]
"""


def initialise(root: Path, name: str, remote: str | None) -> list[str]:
    """Prepare a repository; what is there stays as it is.

    Args:
        root: Its top folder.
        name: Of the first case, where there is none.
        remote: A DVC remote to share; None for a folder of the user's own outside git, where there is none yet.

    Returns:
        What was written, in a few words each.

    Raises:
        ReproError: DVC does not serve here.
    """
    done: list[str] = []
    dvc = Dvc(root)
    if not dvc.initialised:
        dvc.init()
        done.append(".dvc/ (dvc init)")
    if remote or not dvc.has_remote:
        url = remote or str(default_remote(root))
        # a folder of this machine means nothing to others: it stays out of the configuration that git carries
        dvc.set_default_remote("golden", url, local=not remote)
        done.append(f".dvc/config{'' if remote else '.local'} (remote golden: {url})")
    if not list((root / CASES).glob("*.toml")):
        case = root / CASES / f"{name}.toml"
        case.parent.mkdir(parents=True, exist_ok=True)
        path = "core" if (root / "core" / "repro_core").is_dir() else ""
        case.write_text(FIRST_CASE.format(name=name, path=path), encoding="utf-8")
        done.append(str(case.relative_to(root)))
    if not any((root / path).exists() for path in ("dvc.yaml", STAGE)):
        case = sorted((root / CASES).glob("*.toml"))[0]
        (root / STAGE).write_text(FIRST_STAGE.format(name=case.stem, stage=STAGE), encoding="utf-8")
        done.append(f"{STAGE} (check stage: dvc repro {STAGE})")
    return done


def default_remote(root: Path) -> Path:
    """A folder outside the repository: training states must never enter git."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return data / "repro" / "remotes" / f"{root.name}-{digest(str(root))[:8]}"

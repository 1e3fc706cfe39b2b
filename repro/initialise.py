"""What `repro init` writes: DVC with a remote, a check stage, and a case where it knows the trainer."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
from pathlib import Path, PurePosixPath

from repro_golden.base.errors import ReproError
from repro_golden.case.file import CASES, list_cases
from repro_golden.repository.git import Git
from repro_golden.store.dvc import Dvc, private_remote

__all__ = ["fetch_command", "initialise", "next_command", "trainer_source"]

TRAINER = "core/repro_core"
"""Where a repository holds the built-in trainer: this one, a fork of it, or one that asked for the example."""

FIRST_CASE = """\
# A case: one experiment worth guarding. `repro golden record {name}` records it, `repro bisect GOOD..BAD` searches it.
[case]
name = "{name}"
steps = 8
rollouts = "golden/rollouts/{name}"

[subject]
# The module that is the interface to your trainer (CONTRACT and build(case)), and the folder of this repository that
# goes on PYTHONPATH for it.
module = "repro_core"
path = "core"
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
      # without y, DVC draws the last column: bits_agree of the first case
      - check-steps.json:
          cache: false
          title: steps whose bits agree with the golden run's
          x: step
          x_label: optimizer update
          y_label: 1 where they agree
    always_changed: true
# More plots, of names that check-steps.json has (CASE/METRIC):
# plots:
#   - loss:
#       x: step
#       y:
#         check-steps.json: [CASE/loss]
"""

_SCRIPT = re.compile(r"train([_-].*)?\.py|.*[_-]train\.py")
_NO_SCRIPTS = frozenset({"test", "tests", "doc", "docs", "golden", "node_modules", "site-packages", "third_party"})
"""Folders in which a file called like that is no script of the user's."""


def initialise(root: Path, name: str, remote: str | None, *, example: bool = False) -> list[str]:
    """Prepare a repository; what is there stays as it is.

    Args:
        root: Its top folder.
        name: Of the case that is written, where the repository holds the built-in trainer and has no case.
        remote: A DVC remote to share; None for a folder of the user's own outside git, where there is none yet.
        example: Put the built-in trainer into the repository, with a case of it.

    Returns:
        What was written, in a few words each.

    Raises:
        ReproError: DVC does not serve here, or the built-in trainer is not installed as files.
    """
    done: list[str] = []
    dvc = Dvc(root)
    now = dvc.remote if dvc.initialised else ""
    private = private_remote(root)
    if not (remote or now or _recorded(root) or str(private).isascii()):
        raise ReproError(f"DVC takes no remote at {private}, which is not ASCII: name one with --remote")
    if not dvc.initialised:
        dvc.init()
        done.append(".dvc/ (dvc init)")
    if remote or not (now or _recorded(root)):
        url = remote or str(private)
        # a folder of this machine means nothing to others: it stays out of the configuration that git carries
        dvc.set_default_remote("golden", url, local=not remote)
        before = f", DVC's default in place of {now}" if now and now != dvc.remote else ""
        done.append(f".dvc/config{'' if remote else '.local'} (remote golden: {url}{before})")
    if example and not (root / TRAINER).exists():
        for path, text in trainer_source().items():
            file = root / TRAINER / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        done.append(f"{TRAINER}/ (the built-in trainer, as an example)")
    case = root / CASES / f"{name}.toml"
    if (root / TRAINER).is_dir() and not (case.exists() if example else list_cases(root)):
        case.parent.mkdir(parents=True, exist_ok=True)
        case.write_text(FIRST_CASE.format(name=name), encoding="utf-8")
        done.append(str(case.relative_to(root)))
    if not any((root / path).exists() for path in ("dvc.yaml", STAGE)):
        (root / STAGE).parent.mkdir(exist_ok=True)
        (root / STAGE).write_text(FIRST_STAGE.format(stage=STAGE), encoding="utf-8")
        done.append(f"{STAGE} (check stage: dvc repro {STAGE})")
    if dvc.leave_to_dvc():
        done.append("golden/.gitignore (git leaves the content of golden runs to DVC)")
    return done


def fetch_command(root: Path) -> list[str]:
    """What names the remote of golden runs that another checkout recorded, where this one has none."""
    if not _recorded(root) or Dvc(root).remote:
        return []
    return ["repro init --remote URL   # of the checkout that recorded golden/runs: `dvc remote list` says it there"]


def _recorded(root: Path) -> bool:
    """Whether a golden run was recorded, wherever it lies."""
    return any((root / "golden" / "runs").glob("*/*.dvc"))


def next_command(root: Path, name: str | None) -> list[str]:
    """What records the first golden run, in a line or two.

    Args:
        root: The repository.
        name: What the user calls the case; None where that was not said.
    """
    cases = [path.stem for path in list_cases(root)]
    if cases:
        which = "" if len(cases) == 1 else f" {name if name in cases else 'NAME'}"
        return [f"repro golden record{which}" + (f"   # NAME is one of {', '.join(cases)}" if "NAME" in which else "")]
    lines = [f"repro golden record {name or 'NAME'} -- YOUR COMMAND"]
    if script := training_script(root):
        python = "python" if shutil.which("python") else "python3"
        command = f"repro golden record {name or script.stem} -- {python} {shlex.quote(str(script))}"
        lines.append(f"{command}   # if {script.name} is what trains")
    return lines


def training_script(root: Path) -> PurePosixPath | None:
    """The file of a repository that is called like a training script; None where there is none, or several are equal.

    `train.py` comes before others, and what lies higher before what lies deeper.
    """
    listed = Git(root).names("ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", "*.py")
    paths = [path for path in map(PurePosixPath, dict.fromkeys(listed)) if _SCRIPT.fullmatch(path.name)]
    paths = [path for path in paths if not _NO_SCRIPTS & set(path.parts) and (root / path).is_file()]
    ranked = sorted(((path.name != "train.py", len(path.parts)), path) for path in paths)
    return ranked[0][1] if ranked and [rank for rank, _ in ranked].count(ranked[0][0]) == 1 else None


def trainer_source() -> dict[str, str]:
    """The built-in trainer's modules by their path in its folder, as installed. Nothing of it is imported.

    Raises:
        ReproError: it is not installed as files.
    """
    spec = importlib.util.find_spec("repro_core")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []
    files = [(folder, path) for folder in folders for path in sorted(folder.rglob("*.py"))]
    modules = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for folder, path in files}
    if not modules:
        raise ReproError("the built-in trainer is not installed: `pip install repro-harness` brings it")
    return modules

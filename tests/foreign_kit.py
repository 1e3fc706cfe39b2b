"""Forks of slime, Miles or Relax in small: real git, a launch script, recorded rollouts, a case, one planted commit."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conftest import Repo, environment
from foreign_regressions import ENGINE, REGRESSIONS, Regression, System

from repro_golden.dumps.archive.pickling import write_archive
from repro_golden.dumps.archive.reading import read_archive

ROLLOUTS = 3
HERE = Path(__file__).parent

REFACTORS: tuple[tuple[str, str, str, str], ...] = (
    (
        "parallel.py",
        "size = -(-total // (2 * cp_size))",
        "size = (total + 2 * cp_size - 1) // (2 * cp_size)",
        "Round up",
    ),
    ("loss.py", "active = weights != 0", "active = weights > 0", "Masks are never negative"),
    ("arguments.py", '"--dump-details"):', '"--dump-details", "--wandb-group"):', "Add --wandb-group"),
    (
        "actor.py",
        "scored = time.perf_counter()",
        "scored = time.perf_counter()\n        # updates start here",
        "Explain",
    ),
    ("samples.py", "END = 1  #", "\n\nEND = 1  #", "Move lines"),
    ("dumps.py", "steps = args.num_steps_per_rollout", "steps = int(args.num_steps_per_rollout)", "Be explicit"),
    ("advantages.py", "whitened = {}", "whitened: dict[tuple[int, int], list[Array]] = {}", "Annotate"),
    (
        "model.py",
        "pieces, at, targets, start = [], [], [], 0",
        "start = 0\n    pieces, at, targets = [], [], []",
        "Split",
    ),
)
"""File, old text, new text and title of commits that change no number."""


@dataclass(frozen=True)
class Fork:
    """A repository with a trainer, a case and at most one culprit.

    Attributes:
        repo: The repository, at BAD.
        regression: What is planted.
        good: A commit before the culprit.
        bad: The last commit.
        culprit: The commit that holds the regression; empty without one.
        commits: All commits after GOOD, in order.
        broken: Those at which a replay crashes at its start.
        suspects: The commits that no search by replay can tell from the culprit, with it, in order.
        rollouts: The folder of recorded dumps; they are committed.
        case: The case's name.
    """

    repo: Repo
    regression: Regression | None
    good: str
    bad: str
    culprit: str
    commits: tuple[str, ...]
    broken: tuple[str, ...]
    suspects: tuple[str, ...]
    rollouts: Path
    case: str


def make_fork(
    folder: Path,
    regression: Regression | str | None = None,
    commits: int = 8,
    seed: int = 0,
    *,
    system: System | None = None,
    kill: bool = False,
    flags: Sequence[str] = (),
) -> Fork:
    """Make a fork of a trainer below a folder.

    Args:
        folder: gets the repository `fork`.
        regression: what to plant, or its name; nothing where None.
        commits: how many commits follow GOOD; the culprit is one of them.
        seed: draws the order of commits and the engine's samples.
        system: the trainer, where it is not the regression's own; slime where nothing is planted.
        kill: whether the launch script begins as many do, by killing every Python on the machine. It kills nothing:
            it writes `killed` unless `pkill` was replaced on PATH.
        flags: more flags of the launch script.
    """
    planted = REGRESSIONS[regression] if isinstance(regression, str) else regression
    kind: System = system or (planted.system if planted else "slime")
    repo = Repo(folder / "fork")
    repo.root.mkdir(parents=True)
    repo.git("init", "--quiet", "--initial-branch=main")
    name = planted.name if planted else f"plain-{kind}"
    rollouts = repo.root / "golden" / "rollouts" / name
    words = [*(planted.flags if planted else ()), *flags]
    gpus = planted.gpus if planted else 1
    write_program(repo.root, kind)
    _write(repo.root / "scripts" / "run.sh", launch_script(kind, words, gpus, kill=kill))
    _write(repo.root / "golden" / "cases" / f"{name}.toml", case_text(name, kind, planted))
    _write(repo.root / ".gitignore", "__pycache__/\n/killed\n")
    engine = ["--sglang-enable-deterministic-inference", "--rollout-seed", str(seed)]
    made = [*usual_flags(words, gpus), *engine, "--save-debug-rollout-data", f"{rollouts}/{{rollout_id}}.pt"]
    run_program(repo.root, kind, made)
    if planted and not planted.by_group:
        shuffle(rollouts, seed)
    good = repo.commit("Start")
    made_commits = _history(repo, kind, planted, commits, random.Random(seed))
    at = {title: commit for commit, title in made_commits}
    broken = planted.broken if planted and planted.broken else (1, 0)
    ids = tuple(commit for commit, _ in made_commits)
    culprit = at.get(planted.title, "") if planted else ""
    window = ids[broken[0] - 1 : broken[1]]
    suspects = ids[broken[0] - 1 : broken[1] + 1] if culprit in window else (culprit,) if culprit else ()
    return Fork(
        repo=repo, regression=planted, good=good, bad=ids[-1] if ids else good,
        culprit=culprit, commits=ids, broken=window, suspects=suspects, rollouts=rollouts, case=name,
    )  # fmt: skip


def _history(
    repo: Repo, kind: System, planted: Regression | None, count: int, draw: random.Random
) -> list[tuple[str, str]]:
    """Make the commits after GOOD; their ids and titles."""
    harmless = draw.sample(REFACTORS, len(REFACTORS))
    place = (planted.culprit or draw.randint(1, count)) if planted and count else 0
    first, last = planted.broken if planted and planted.broken else (0, 0)
    made = []
    for number in range(1, count + 1):
        title = f"Note {number}"
        if number == first:
            repo.edit(f"{kind}/samples.py", *ENGINE)
            title = "Make the engine at once"
        if number == last + 1 and last:
            repo.edit(f"{kind}/samples.py", *reversed(ENGINE))
            title = "Make no engine for a replay"
        if planted and number == place:
            repo.edit(f"{kind}/{planted.file}", planted.old, planted.new)
            title = planted.title
        elif title.startswith("Note") and harmless:
            file, old, new, title = harmless.pop()
            repo.edit(f"{kind}/{file}", old, new)
        elif title.startswith("Note"):
            _write(repo.root / "docs" / "notes.md", f"{number}\n")
        made.append((repo.commit(title), title))
    return made


def write_program(root: Path, kind: System) -> None:
    """Write the trainer into a folder: its package, named after the system, and its entry."""
    for file in sorted(HERE.glob("foreign_trainer*.py")):
        text = (
            file.read_text().replace("foreign_trainer_", f"{kind}.").replace('SYSTEM = "slime"', f'SYSTEM = "{kind}"')
        )
        module = file.name.removeprefix("foreign_trainer").removeprefix("_")
        _write(root / (entry_of(kind) if module == ".py" else f"{kind}/{module}"), text)


def entry_of(kind: System) -> str:
    """The file that a launch script starts."""
    return "relax/entrypoints/train.py" if kind == "relax" else "train.py"


def usual_flags(words: Sequence[str], gpus: int) -> list[str]:
    """What the launch script gives the trainer."""
    return [word for lines in _arrays(words, gpus).values() for line in lines for word in shlex.split(line)]


def _arrays(words: Sequence[str], gpus: int) -> dict[str, list[str]]:
    """The launch script's arrays: each of their lines holds a flag and its value."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    rollout = ["--rollout-batch-size 4", "--n-samples-per-prompt 4", "--rollout-max-response-len 9"]
    return {
        "CLUSTER_ARGS": ["--actor-num-nodes 1", f"--actor-num-gpus-per-node {gpus}", "--colocate"],
        "ROLLOUT_ARGS": [f"--num-rollout {ROLLOUTS}", *rollout, "--global-batch-size 16"],
        "OPTIMIZER_ARGS": ["--lr 1e-2", "--adam-beta1 0.9", "--adam-beta2 0.98"],
        "ALGORITHM_ARGS": ["--eps-clip 0.2", "--eps-clip-high 0.28", *lines],
    }


_KILL = """\
# nothing is killed here: what would be is noted, unless somebody put another pkill before the system's
case "$(command -v pkill || echo /usr/bin/pkill)" in
   /usr/*|/bin/*|/sbin/*) pkill() { echo "pkill $*" >> killed; } ;;
esac

# for rerun the task
pkill -9 sglang
pkill -9 ray
pkill -9 python

"""


def launch_script(kind: System, words: Sequence[str], gpus: int, *, kill: bool = False) -> str:
    """A launch script as users write them: arrays of flags, and the trainer at its end."""
    arrays = _arrays(words, gpus)
    if kind != "miles":  # these parsers ignore what they do not know
        arrays["SGLANG_ARGS"] = ["--sglang-mem-fraction-static 0.7", "--sglang-attention-backend flashinfer"]
    text = "#!/bin/bash\n\n" + (_KILL if kill else "") + "set -ex\n\nexport PYTHONUNBUFFERED=1\n"
    text += 'SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
    text += 'export PYTHONPATH="${SCRIPT_DIR}/..:${PYTHONPATH}"\n\n'
    for name, lines in arrays.items():
        text += f"{name}=(\n" + "".join(f"   {line}\n" for line in lines) + ")\n\n"
    text += 'cd "${SCRIPT_DIR}/.."\n'
    return text + f"python3 {entry_of(kind)} \\\n" + " \\\n".join(f"   ${{{name}[@]}}" for name in arrays) + "\n"


def case_text(name: str, kind: System, planted: Regression | None = None) -> str:
    """The case file that a user adds."""
    per_rollout = planted.steps_per_rollout if planted else 1
    lines = ["[case]", f'name = "{name}"', f"steps = {ROLLOUTS * per_rollout}", "proof_steps = 1"]
    lines += [f'rollouts = "golden/rollouts/{name}"', "", "[subject]", f'kind = "{kind}"']
    lines += ['command = "bash scripts/run.sh"', "recorder = false", 'timeout = "10m"']
    if per_rollout != 1:
        lines.append(f"steps_per_rollout = {per_rollout}")
    if planted and planted.gpus != 1:
        lines += ["", "[resources]", f"ranks = {planted.gpus}"]
    return "\n".join(lines) + "\n"


def shuffle(rollouts: Path, seed: int) -> None:
    """Put the samples of each dump into the order in which engines might finish them."""
    for path in sorted(rollouts.glob("*.pt")):
        payload = read_archive(path)
        random.Random(f"{seed} {path.name}").shuffle(payload["samples"])
        write_archive(path, payload)


def run_program(root: Path, kind: System, flags: Sequence[str]) -> str:
    """Run the trainer of a folder directly; what it prints.

    Raises:
        AssertionError: it failed.
    """
    done = subprocess.run(
        [sys.executable, entry_of(kind), *flags], cwd=root, capture_output=True, text=True, timeout=60, check=False,
        env=environment() | {"PYTHONPATH": os.pathsep.join([str(root), *_paths()]), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

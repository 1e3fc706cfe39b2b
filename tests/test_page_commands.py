"""Command lines of pages that show no output: each is run as its reader would, where there is what it names."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import foreign_kit
import history_kit
import pages_kit
import pytest
from conftest import SOURCE, Repo, environment
from pages_kit import PAGES

# -- what readers have: a folder, and in it a repository whose v1.2 is good


def with_program(repo: Repo) -> None:
    """Somebody's program, a test that tells its versions apart, ignored data and a file of flags."""
    text = history_kit.TRAIN.replace("parser.parse_args()", "parser.parse_known_args()[0]")
    (repo.root / "train.py").write_text(text.replace("lr=0.01", "lr=float(os.environ.get('LR', 0.01))"))
    (repo.root / ".gitignore").write_text("__pycache__/\n/data/\n/runs/\n")
    (repo.root / "test.sh").write_text("#!/bin/sh\ngrep -q 'scale = 1.0' train.py\n")
    (repo.root / "test.sh").chmod(0o755)
    (repo.root / "data").mkdir()
    (repo.root / "data" / "text").write_text("ignored\n")
    (repo.root / "flags.toml").write_text(FLAGS)
    repo.commit("What readers have")
    repo.git("tag", "v1.2")


def program(folder: Path, *, case: bool = False, golden: bool = False) -> Repo:
    """It, perhaps with a case, perhaps with its golden run; HEAD's numbers are others."""
    repo = history_kit.start(folder, "", history_kit.CASE + LAYOUT if case else None)
    with_program(repo)
    if golden:
        run(repo, "repro init", {0})
        run(repo, "repro golden record toy", {0})
        repo.git("commit", "--quiet", "--all", "--message", "Golden run")
    history_kit.note(repo, "no number")
    history_kit.edit(repo, "scale = 1.0", "scale = 1.5", "Scale")
    return repo


LAYOUT = """
[layouts.tp2]
command = "{python} train.py --steps 6 --two"
"""
FLAGS = """\
[[change]]
env = { LR = "0.02" }

[[change]]
add = ["--ignored"]
"""


def traced(folder: Path) -> Repo:
    """The same with a trace of v1.2 and one of HEAD."""
    repo = program(folder, case=True)
    for commit, name in (("v1.2", "before"), ("main", "after")):
        repo.git("checkout", "--quiet", commit)
        run(repo, f"repro trace --out runs/{name} -- python train.py", {0})
    return repo


def logged(folder: Path) -> Repo:
    """The same with TensorBoard's events of a run whose steps count from 1, and a trace."""
    repo = program(folder)
    events = repo.root / "runs" / "may"
    code = (
        "import re, sys; from torch.utils.tensorboard import SummaryWriter; w = SummaryWriter('runs/may');"
        "[w.add_scalar('train/loss', float(x), int(n) + 1) for n, x in re.findall(r'step (\\d+) loss=(\\S+)',"
        " sys.stdin.read())]; w.close()"
    )
    run(repo, f"python train.py | python -c {shlex.quote(code)}", {0})
    assert list(events.iterdir())
    run(repo, "repro trace --out trace -- python train.py", {0})
    return repo


def grpo(folder: Path) -> Repo:
    """The program of the page on TRL under DVC; HEAD clips otherwise."""
    pytest.importorskip("trl", reason="an extra of the whole tier")
    (text,) = [
        block.text
        for block in pages_kit.blocks((SOURCE / "docs/how-to/trl.md").read_text())
        if "GRPOTrainer(" in block.text
    ]
    repo = Repo(folder / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / ".gitignore").write_text("__pycache__/\n/before/\n")
    (repo.root / "grpo.py").write_text(text)
    repo.commit("GRPO")
    repo.git("tag", "v1.2")
    repo.edit("grpo.py", "num_generations=4,", "num_generations=4,\n        epsilon_high=0.28,")
    repo.commit("Clip higher")
    repo.edit("grpo.py", "num_generations=4,", "num_generations=4,\n        max_grad_norm=0.1,")
    repo.commit("Clip gradients")
    run(repo, "repro init", {0})
    return repo


CP2 = ("--context-parallel-size", "2")


def launched(folder: Path, system: foreign_kit.System = "slime", culprit: str = "") -> Repo:
    """A fork of slime, Miles or Relax in small: launch script, recorded rollouts, a case, and perhaps a culprit."""
    made = foreign_kit.make_fork(folder, culprit or None, commits=3, system=system)
    repo = made.repo
    (repo.root / "scripts" / "cp2.sh").write_text(
        foreign_kit.launch_script(system, [*(made.regression.flags if made.regression else ()), *CP2], 2)
    )
    with (repo.root / "golden" / "cases" / f"{made.case}.toml").open("a") as case:
        case.write('\n[layouts.cp2]\ncommand = "bash scripts/cp2.sh"\nranks = 2\n')
    repo.commit("Another layout")
    for name in ("good", "v0.2.0", "v1.2"):
        repo.git("tag", name, made.good)
    shutil.copy(repo.root / "scripts" / "run.sh", repo.root / "run.sh")
    shutil.copytree(made.rollouts, repo.root / "dumps")
    for name in ("ckpt", "hf", "session/logs"):
        (repo.root / name).mkdir(parents=True)
    (repo.root / "session" / "logs" / "raylet.out").write_text("[2026-11-20 10:00:00,000 I 1 1] raylet started\n")
    (repo.root / "train.log").write_text("step 0: {'train/loss': 0.5}\n")
    return repo


# -- which line needs what


@dataclass(frozen=True)
class Place:
    """Where some lines of a page are run.

    Attributes:
        make: Makes the repository, of a template with a golden run and in a folder.
        words: What the page calls otherwise: patterns, and what stands there instead.
        codes: Exit codes of lines that fit a pattern; 0 of all others.
    """

    make: Callable[[Path, Path], Repo]
    words: Mapping[str, str] = field(default_factory=dict)
    codes: Mapping[str, set[int]] = field(default_factory=dict)


def trainer(template: Path, folder: Path) -> Repo:
    """A fork of the built-in trainer whose golden run was recorded at v1.2."""
    shutil.copytree(template / "fork", folder / "repo", symlinks=True)
    repo = Repo(folder / "repo")
    with_program(repo)
    repo.git("tag", "v1.4")
    repo.git("update-ref", "refs/remotes/origin/main", "HEAD")
    repo.edit("train.py", "scale = 1.0", "scale = 1.5")
    repo.edit("core/repro_core/engines/optimizer.py", "eps=self.config.adam_eps", "eps=self.config.adam_eps * 2")
    repo.commit("Another eps")
    return repo


def unrecorded(template: Path, folder: Path) -> Repo:
    """The same before anything was recorded."""
    repo = trainer(template, folder)
    for name in ("runs", "rollouts"):
        shutil.rmtree(repo.root / "golden" / name)
    repo.commit("Nothing recorded")
    return repo


def nightly_runs(template: Path, folder: Path) -> Repo:
    """The same with a night and a report on a pull request."""
    repo = trainer(template, folder)
    run(repo, "repro report nightly --no-bisect", {0, 1})
    run(repo, "repro report nightly --no-bisect --results results", {0, 1})
    run(repo, "repro report pr origin/main..HEAD --out .", {0, 1})
    shutil.copytree(repo.root / "golden" / "nights", repo.root / "results", dirs_exist_ok=True)
    return repo


def typed(page: Path) -> list[str]:
    """The lines of a page's blocks that a reader types, that begin with `repro`."""
    text = "\n".join(block.text for block in pages_kit.blocks(page.read_text(encoding="utf-8")))
    lines = re.findall(r"^\s*(?:\$ |- run: )?(repro [a-z-].*)", re.sub(r"\\\n\s*", " ", text), re.MULTILINE)
    return [re.sub(r"\s+#.*$", "", line) for line in lines]


def run(repo: Repo, line: str, codes: set[int]) -> str:
    """Run a line in bash, in the repository; what it prints."""
    environ = environment() | pages_kit.IDENTITY | {"HOME": str(repo.root.parent / "home"), "COLUMNS": "120"}
    environ |= {"GITHUB_BASE_REF": "main", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    Path(environ["HOME"]).mkdir(exist_ok=True)
    done = subprocess.run(
        ["bash", "-c", line], cwd=repo.root, env=environ, text=True, timeout=500, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode in codes, f"$ {line}\n{done.stdout}\nexit {done.returncode}"
    assert "Traceback" not in done.stdout, f"$ {line}\n{done.stdout}"
    return done.stdout


CULPRITS: Mapping[foreign_kit.System, str] = {
    "slime": "per-token-loss-scaled-twice", "miles": "rewards-by-position", "relax": "temperature-ignored-relax",
}  # fmt: skip
MINI = {r"'qwen-\*' tiny-grpo": "'mi*'", r"\b(CASE|qwen|demo)\b": "mini"}
MOVED = {r"report (pr|nightly)|golden verify|diff |--layout": {0, 1}}


def foreign(system: foreign_kit.System) -> Place:
    """The page of a trainer of the slime family."""
    name = CULPRITS[system]
    return Place(lambda _, folder: launched(folder, system, name), {r"qwen-0\.[56]b": name}, MOVED)


PLACES: Sequence[tuple[str, str, Place]] = (
    ("README.md", ".", Place(lambda _, folder: program(folder))),
    ("how-to/doctor.md", ".", Place(
        lambda _, folder: launched(folder),
        {"/ckpt/megatron": "ckpt", "/models/hf": "hf", r"/\w+/ray/session_latest": "session", r" \.\.\.": "",
         "/opt/venv/bin/python": sys.executable}, {"doctor": {0, 1}},
    )),
    ("how-to/dvc.md", ".", Place(lambda _, folder: logged(folder))),
    ("how-to/miles.md", ".", foreign("miles")),
    ("how-to/nightly.md", ".", Place(trainer, MINI, MOVED)),
    ("how-to/pull-requests.md", ".", Place(trainer, MINI | {r"4403af9aa5\.\.b4c44803cc": "v1.2..HEAD"}, MOVED)),
    ("how-to/relax.md", ".", foreign("relax")),
    ("how-to/rollouts.md", ".", Place(unrecorded, MINI | {
        r"^repro (golden|rollout) record": r"rm -rf golden/rollouts/mini*; repro \1 record",
        "diff A B": "diff golden/runs/*/mini golden/runs/*/mini",
    })),
    ("how-to/site.md", ".", Place(nightly_runs, {"--pull other/report.json": ""})),
    ("how-to/slime.md", ".", foreign("slime")),
    ("how-to/trl.md", ".", Place(lambda _, folder: grpo(folder))),
    ("reference/axes.md", "case qwen", Place(lambda _, folder: program(folder, case=True), {"case qwen": "case toy"})),
    ("reference/bisect.md", "ci:", Place(lambda _, folder: launched(folder, "miles", CULPRITS["miles"]))),
    ("reference/bisect.md", ".", Place(trainer, {"--case qwen": "--case mini"})),
    ("reference/explain.md", ".", Place(lambda _, folder: traced(folder), {"4f2c1d0": "HEAD"})),
    ("reference/history.md", ".", Place(trainer, {r"8dc111be05\.\.9249c7ac93": "v1.2..HEAD"})),
    ("reference/trace.md", ".", Place(
        lambda _, folder: program(folder, case=True, golden=True), {r"\bNAME\b": "small", "--steps 10": "--steps 5"},
    )),
    ("reference/trainer-dumps.md", "CASE", Place(trainer, MINI)),
    ("reference/trainer-dumps.md", ".", Place(
        lambda _, folder: launched(folder), {r"\bDUMPS\b": "dumps", "size 8": "size 4"}
    )),
)  # fmt: skip
"""Pages, patterns of their lines, and where these are run; the first that fits counts."""
ELSEWHERE = (
    ("how-to/tried.md", ".", "transcripts of what a newcomer typed, in repositories of others"),
    ("README.md", "grpo.py", "likewise"),
    ("how-to/trl.md", "v1.8.0", "TRL's own history: 96 commits of it, as the page shows them"),
    ("how-to/megatron.md", ".", "eight GPUs"),
    ("how-to/pull-requests.md", "--post|report post", "writes on GitHub; tests/test_report_post.py posts to a server"),
    ("reference/(axes|history).md", "torch==", "downloads releases of torch; tests/test_axes.py serves small ones"),
    ("reference/axes.md", "--no-explain|case\\.\\.(ddp|wrong|fsdp)", "printed by tests/test_axes.py and its layouts"),
)
"""What is not run here, and why."""


def fits(row: tuple[str, str, object], page: str, line: str) -> bool:
    """Whether a row of a table is about a line."""
    return bool(re.fullmatch(f"(docs/)?{row[0]}", page) and re.search(row[1], line))


def lines_of(page: Path) -> list[str]:
    """Those that are run here."""
    name = pages_kit.name(page)
    return [line for line in typed(page) if not any(fits(row, name, line) for row in ELSEWHERE)]


@pytest.fixture
def template(_recorded_template: Path) -> Path:
    """A fork of the built-in trainer whose golden run is recorded."""
    return _recorded_template


OTHERS = [page for page in PAGES if not pages_kit.tier(page)]  # the rest is run from its first block to its last


def test_every_line_has_a_place() -> None:
    """Each line of a block is run in one place or left out for a reason, and no row of either table is about none."""
    lines = [(pages_kit.name(page), line) for page in OTHERS for line in typed(page)]
    assert len(lines) > 90
    assert not [line for line in lines if not any(fits(row, *line) for row in (*PLACES, *ELSEWHERE))]
    for row in (*PLACES, *ELSEWHERE):
        assert any(fits(row, *line) for line in lines), row


@pytest.mark.whole
@pytest.mark.parametrize("page", [pytest.param(page, id=pages_kit.name(page)) for page in OTHERS if lines_of(page)])
def test_the_lines_of_a_page_run(page: Path, tmp_path: Path, template: Path) -> None:
    """One after the other, each ends as it should, and none with a traceback."""
    made: dict[int, Repo] = {}
    for line in lines_of(page):
        number, place = next((n, row[2]) for n, row in enumerate(PLACES) if fits(row, pages_kit.name(page), line))
        if number not in made:
            (tmp_path / str(number)).mkdir()
            made[number] = place.make(template, tmp_path / str(number))
        for pattern, words in place.words.items():
            line = re.sub(pattern, words, line)
        codes = next((codes for pattern, codes in place.codes.items() if re.search(pattern, line)), {0})
        run(made[number], line, codes)

"""The line behind ``reproduce with:`` does the same again, from the repository's root, in another shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import history_kit
import pytest
import warm_kit
from conftest import Repo, environment

from repro_bisect.axes.commits import typed
from repro_golden.repository.checkout import find_checkout

LOSS = ("--metric", r"step (?P<step>\d+) loss=(?P<loss>[-+.e0-9]+)")
TRAIN = """\
import os, sys
import scale, users_own
sys.exit(scale.CODE if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0" else 125)
"""


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """A program that needs a variable, a search path and another Python; another commit changes how it ends."""
    made = Repo(tmp_path / "repo")
    for folder in ("lib", "sub"):
        (made.root / folder).mkdir(parents=True)
    made.git("init", "--quiet")
    (made.root / ".gitignore").write_text("venv\n__pycache__\n")
    (made.root / "train.py").write_text(TRAIN)
    for number, code in enumerate((0, 0, 1)):
        (made.root / "lib" / "scale.py").write_text(f"CODE = {code}\n")
        (made.root / "sub" / "number").write_text(str(number))
        made.commit(f"code {code}")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made.root / "venv")], check=True)
    (packages,) = made.root.glob("venv/lib/python3*/site-packages")
    (packages / "users_own.py").write_text("")
    return made


@pytest.mark.whole
def test_the_line_does_the_same_again_in_another_shell(repo: Repo) -> None:
    """Ends are commits, the interpreter's path is absolute, and what decided bits or was imported stands before it."""
    shell = environment() | {"NVIDIA_TF32_OVERRIDE": "0", "PYTHONPATH": "../lib"}
    words = ["bisect", "HEAD~2..", "--when", "exit", "--json", "-j", "1"]
    program = ("--", "../venv/bin/python", "train.py")
    done = warm_kit.run([sys.executable, "-m", "repro", *words, *program], repo.root / "sub", shell)
    first = json.loads(done.stdout)
    assert first["culprit"]["subject"] == "code 1", done.stderr
    line = first["reproduce"]
    ends = "..".join(repo.git("rev-parse", name)[:10] for name in ("HEAD~2", "HEAD"))
    assert line == (
        f"NVIDIA_TF32_OVERRIDE=0 PYTHONPATH=lib repro bisect {ends} --when exit -- {repo.root}/venv/bin/python train.py"
    )
    repo.commit("HEAD is another")
    other = environment() | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    again = subprocess.run(
        ["/bin/sh", "-c", f"{line} --fresh".replace(" -- ", " --fresh --json -- ").removesuffix(" --fresh")],
        cwd=repo.root, env=other, capture_output=True, text=True, check=False,
    )  # fmt: skip
    second = json.loads(again.stdout)
    assert (second["culprit"], second["reproduce"]) == (first["culprit"], line), again.stderr


def test_a_python_that_no_word_names_is_said(repo: Repo) -> None:
    """That of the active environment is, where a shell script starts the program; it is the same one elsewhere."""
    (repo.root / "run.sh").write_text("exec python train.py\n")
    good = repo.commit("a script")
    (repo.root / "lib" / "scale.py").write_text("CODE = 0\n")
    repo.commit("code 0")
    shell = environment() | {"VIRTUAL_ENV": str(repo.root / "venv"), "NVIDIA_TF32_OVERRIDE": "0", "PYTHONPATH": "lib"}
    words = ["bisect", f"HEAD..{good}", "--when", "exit", "--", "sh", "run.sh"]
    done = warm_kit.run([sys.executable, "-m", "repro", *words], repo.root, shell)
    assert done.returncode == 2  # HEAD is no ancestor; the Python is said before anything is run
    assert "repro: the program finds venv/bin/python on PATH" in done.stderr


def test_what_only_changes_the_telling_is_left_out(repo: Repo) -> None:
    """Options of how fast, where to and in which form are not part of what is reproduced; defaults are not said."""
    shell = environment() | {"NVIDIA_TF32_OVERRIDE": "0", "PYTHONPATH": "lib"}
    options = ["--first-parent", "--path", "lib", "--no-explain", "--confidence", "0.9", "--ranks", "1", "--fresh"]
    told = ["--export", "log", "--out", "out", "-j", "1", "--json", "--", "venv/bin/python", "train.py"]
    words = ["bisect", "HEAD~2..HEAD", "--when", "exit", *options, *told]
    done = warm_kit.run([sys.executable, "-m", "repro", *words], repo.root, shell)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)["reproduce"]
    assert line.partition(" -- ")[0].endswith(
        "--when exit --path lib --first-parent --confidence 0.9 --no-explain --ranks 1"
    )


def test_a_tag_does_not_take_the_place_of_a_commit(repo: Repo) -> None:
    """Where ten digits of a commit are the name of another's tag, all of them are said: git takes the tag's commit."""
    good, middle, bad = (repo.git("rev-parse", name) for name in ("HEAD~2", "HEAD~1", "HEAD"))
    repo.git("tag", bad[:10], middle)
    repo.git("tag", "-a", good[:10], "-m", "its own", good)
    line = typed(find_checkout(repo.root), good, bad)
    assert line == f"{good[:10]}..{bad}"
    assert repo.git("rev-list", line).split() == [bad, middle]


def test_the_same_bisect_again_replays_nothing(tmp_path: Path) -> None:
    """All of it is in the journal, also where a printed number alone differs, of which no tensor can be kept."""
    made = history_kit.start(tmp_path, case=None)
    history_kit.note(made, "nothing")
    history_kit.edit(made, "{loss.item()!r}", "{2 * loss.item()!r}", "Twice")
    costs = []
    for _ in range(2):
        done = made.repro("bisect", "HEAD~2..HEAD", "--no-explain", "--json", *LOSS, "--", "python", "train.py")
        data = json.loads(done.stdout)
        assert (data["culprit"]["subject"], data["divergence"]["signal"]) == ("Twice", "loss"), done.stderr
        costs.append(data["cost"])
    assert costs[0]["search"]["probes"] > 0 and costs[0]["confirmation"]["probes"] > 0, costs
    assert costs[1]["search"]["probes"] == costs[1]["confirmation"]["probes"] == 0, costs

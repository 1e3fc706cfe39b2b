"""Somebody else's trainer, guarded as docs/how-to/guard-your-trainer.md says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Repo, environment

CASE = """\
[case]
name = "bandit"
steps = 6
rollouts = "golden/rollouts/bandit"

[subject]
module = "training.interface"
path = "."

[subject.config]
arms = 4
seed = 3

[first_step]
check = false
"""


@pytest.mark.whole
def test_a_foreign_trainer_is_recorded_verified_and_bisected(tmp_path: Path) -> None:
    """A trainer that shares no code with ours gets a golden run, and the commit that moved its numbers is named."""
    repo = Repo(tmp_path / "fork")
    (repo.root / "training").mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "interface_example.py", repo.root / "training" / "interface.py")
    (repo.root / "golden" / "cases").mkdir(parents=True)
    (repo.root / "golden" / "cases" / "bandit.toml").write_text(CASE)
    (repo.root / ".gitignore").write_text("__pycache__/\n")
    repo.git("init", "--quiet")
    assert repo.repro("init", "--remote", str(tmp_path / "remote")).returncode == 0
    repo.commit("Start")
    done = repo.repro("golden", "record")
    assert done.returncode == 0, done.stdout + done.stderr
    good = repo.commit("Record")
    assert repo.repro("golden", "verify").returncode == 0
    repo.edit("training/interface.py", '"""One REINFORCE update."""', '"""One update by REINFORCE."""')
    repo.commit("Say it better")
    repo.edit("training/interface.py", "lr=0.5", "lr=0.5, weight_decay=1e-6")
    culprit = repo.commit("Regularise")
    repo.edit("training/interface.py", '"""The interface."""', '"""The one interface."""')
    repo.commit("Say that better too")
    search = repo.repro("bisect", "--no-explain", f"{good}..HEAD", "--json")
    result = json.loads(search.stdout)
    assert (search.returncode, result["culprit"]["commit"]) == (0, culprit), search.stderr
    assert (result["divergence"]["step"], result["divergence"]["phase"]) == (0, "update")


SCRIPT = """\
import os

import torch

torch.distributed.init_process_group("gloo")
assert int(os.environ["WORLD_SIZE"]) == 2
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""


@pytest.mark.whole
def test_a_kind_is_added_as_the_page_says(tmp_path: Path) -> None:
    """The page's class and its name make a kind whose runs are recorded; an unknown key of it is refused."""
    root, packages = Path(__file__).parents[1], tmp_path / "packages"
    for package in ("golden/repro_golden", "bisect/repro_bisect", "repro"):
        shutil.copytree(root / package, packages / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    page = (root / "docs" / "how-to" / "guard-your-trainer.md").read_text().partition("## A new kind of subject")[2]
    ((text, path),) = re.findall(r"^```python\n(# golden/(\S+)\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (packages / path).write_text(text)
    tables = packages / "repro_golden" / "case" / "subject_tables.py"
    old, (new,) = 'kind: Literal["command"]', re.findall(r"`(kind: Literal.*?)`", page)
    assert old in tables.read_text()
    tables.write_text(tables.read_text().replace(old, new, 1))
    repo = Repo(tmp_path / "fork")
    case = repo.root / "golden" / "cases" / "two.toml"
    case.parent.mkdir(parents=True)
    repo.git("init", "--quiet")
    (repo.root / "train.py").write_text(SCRIPT)
    subject = re.findall(r"^```toml\n(\[subject\].*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    case.write_text(f'[case]\nname = "two"\nsteps = 2\n\n{subject}\n[resources]\nranks = 2\n')

    def repro(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "repro", *words], cwd=repo.root, capture_output=True, text=True, timeout=300,
            env=environment() | {"PYTHONPATH": os.pathsep.join([str(packages), str(root / "core")])}, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    status, output = repro("init")
    assert status == 0, output
    repo.commit("Start")
    status, output = repro("golden", "record")
    assert status == 0, output
    case.write_text(case.read_text().replace("command =", 'chek = "true"\ncommand ='))
    status, output = repro("golden", "verify")
    assert status == 2 and "subject.chek" in output and "check" in output, output

"""Small histories of a command trainer: real git, real torch, a step that takes milliseconds."""

from __future__ import annotations

from pathlib import Path

from conftest import Repo

TRAIN = """\
import argparse
import os
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--load")
parser.add_argument("--save")
parser.add_argument("--save-step", type=int, default=-1)
options = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(3)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
first, hidden = 0, 0.0
if options.load:
    state = torch.load(options.load + "/state.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
for step in range(first, options.steps):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    scale = 1.0
    loss = (model(x) * scale).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss={loss.item()!r}", flush=True)
    if step + 1 == options.save_step:
        os.makedirs(options.save, exist_ok=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1},
                   options.save + "/state.pt")
"""

CASE = """\
[case]
name = "toy"
steps = 6
proof_steps = 2

[subject]
kind = "command"
command = "{python} train.py --steps 6"
save = "{python} train.py --save {checkpoint} --save-step {step}"
resume = "{python} train.py --load {checkpoint}"
path = "train.py"
timeout = "10m"
"""


def start(folder: Path, train: str = TRAIN, case: str | None = CASE) -> Repo:
    """A repository with the trainer, and its case unless it is to do without."""
    repo = Repo(folder / "repo")
    repo.root.mkdir(parents=True)
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / "train.py").write_text(train)
    if case:
        path = repo.root / "golden" / "cases" / "toy.toml"
        path.parent.mkdir(parents=True)
        path.write_text(case)
    repo.commit("Start")
    return repo


def note(repo: Repo, text: str, path: str = "train.py") -> str:
    """A commit that changes a file and no bit."""
    file = repo.root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text((file.read_text() if file.exists() else "") + f"# {text}\n")
    return repo.commit(text)


def edit(repo: Repo, old: str, new: str, message: str) -> str:
    """A commit that replaces one piece of the trainer."""
    repo.edit("train.py", old, new)
    return repo.commit(message)

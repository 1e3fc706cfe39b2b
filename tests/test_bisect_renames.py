"""A commit that renames what another then changes, in a real history."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from history_kit import TRAIN, edit, note, start

NET = """\
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 2)
    def forward(self, x):
        return self.fc(x)
model = Net()
"""


@pytest.mark.whole
def test_a_bisect_and_a_history_go_past_a_rename(tmp_path: Path) -> None:
    """The commit that changes the numbers is named, with both names of the signal, and not the rename before it."""
    repo = start(tmp_path, TRAIN.replace("model = torch.nn.Linear(4, 2)\n", NET))
    good = repo.git("rev-parse", "HEAD").strip()
    (repo.root / "train.py").write_text((repo.root / "train.py").read_text().replace("self.fc", "self.proj"))
    rename = repo.commit("Call it proj")
    note(repo, "nothing")
    culprit = edit(repo, "scale = 1.0", "scale = 1.0 if step < 2 else 1.5", "Scale the loss")
    done = repo.repro("bisect", "--no-explain", f"{good}..HEAD", "--case", "toy", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["culprit"]["commit"] == culprit, done.stderr
    assert result["verdicts"].get(rename, "GOOD") == "GOOD"
    assert (result["end"] if "end" in result else result["divergence"])["step"] == 2
    assert result["culprits"][0]["renamed"]["text"] == "12 signals were renamed (fc.* -> proj.*)"
    assert "(now proj." in done.stderr, "GOOD and BAD differ in a signal of two names"
    done = repo.repro("history", f"{good}..HEAD", "--case", "toy", "--json")
    listed = json.loads(done.stdout)
    assert [row["commit"]["commit"] for row in listed["rows"]] == [culprit], done.stdout + done.stderr
    assert listed["renames"][0]["renamed"]["names"] == [["fc.bias", "proj.bias"], ["fc.weight", "proj.weight"]]

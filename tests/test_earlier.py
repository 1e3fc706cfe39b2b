"""What an earlier run of other code may have written, and a later one reads: no verdict is silent about it."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from pathlib import Path

import pytest
from conftest import Repo
from history_kit import start

from repro_golden.recording.attach.earlier import Reads
from repro_golden.recording.attach.earlier_runs import Code, noted, prepare

TRAINS = """
import json
import os
from pathlib import Path
import torch
import data
torch.manual_seed(0)
torch.set_num_threads(1)
kept = Path(os.environ["KEPT"]) / "rows.json"
if not kept.exists():
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(data.rows()))
x = torch.tensor(json.loads(kept.read_text()))
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
ROWS = "def rows():\n    return [[1.0, 2.0, 3.0, 4.0]]\n"
SAYS = "which it reads, was last changed while"


def history(folder: Path) -> tuple[Repo, str]:
    """A program that keeps what it makes of its data; the second commit makes other data of it. And the first one."""
    repo = start(folder, TRAINS, None)
    (repo.root / ".gitignore").write_text("kept\n__pycache__\n")
    (repo.root / "data.py").write_text(ROWS)
    first = repo.commit("Data")
    (repo.root / "data.py").write_text(ROWS.replace("4.0", "5.0"))
    repo.commit("Other data")
    return repo, first


def test_ends_that_agree_by_what_one_of_them_left_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GOOD fills a cache, and BAD reads it: the agreement names the file, and no more once the file is touched."""
    monkeypatch.setenv("KEPT", str(tmp_path / "cache"))
    repo, first = history(tmp_path / "repo")
    words = "bisect", "--no-explain", "-j", "1", "HEAD~1..HEAD", "--steps", "2", "--", sys.executable, "train.py"
    done = repo.repro(*words)
    assert f"{tmp_path}/cache/rows.json, {SAYS} {first[:10]} ran" in done.stdout, done.stdout + done.stderr
    (tmp_path / "cache/rows.json").touch()
    done = repo.repro(words[0], "--fresh", *words[1:])
    assert "agree bit for bit" in done.stdout and SAYS not in done.stdout, done.stdout + done.stderr


@pytest.mark.whole
def test_a_cache_that_the_first_run_saves_is_told_from_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GOOD's second replay saves no such file: the refusal says that it is a cache, and how to name it."""
    monkeypatch.setenv("KEPT", str(tmp_path / "cache"))
    repo, _ = history(tmp_path / "repo")
    repo.edit("train.py", "kept.write_text(json.dumps(data.rows()))", "torch.save(data.rows(), kept)")
    repo.edit("train.py", "json.loads(kept.read_text())", "torch.load(kept)")
    repo.commit("Save")
    repo.edit("data.py", "5.0", "6.0")
    repo.commit("Other data again")
    words = "bisect", "--no-explain", "-j", "1", "HEAD~1..HEAD", "--steps", "2", "--", sys.executable, "train.py"
    done = repo.repro(*words)
    assert done.returncode == 3 and "a file that only the first run wrote: name such a cache by {out}" in done.stderr


def test_a_working_tree_that_reads_what_the_golden_run_left_says_so(
    recorded: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that git ignores in the checkout is told of, and what a run wrote itself is not."""
    monkeypatch.setenv("KEPT", "kept")
    with (recorded.root / ".gitignore").open("a") as ignored:
        ignored.write("kept\n")
    (recorded.root / "train.py").write_text(TRAINS)
    (recorded.root / "data.py").write_text(ROWS)
    first = recorded.commit("Train")
    words = "--steps", "2", "--", sys.executable, "train.py"
    done = recorded.repro("golden", "record", "kept", *words)
    assert done.returncode == 0 and SAYS not in done.stdout, done.stdout + done.stderr
    recorded.commit("Golden run")
    recorded.edit("data.py", "4.0", "5.0")
    recorded.commit("Other data")
    done = recorded.repro("golden", "verify", "kept")
    assert f"agrees: 2 steps compared, but {recorded.root}/kept/rows.json, {SAYS} {first[:10]} ran" in done.stdout, (
        done.stderr
    )
    (recorded.root / "kept" / "rows.json").unlink()
    done = recorded.repro("golden", "verify", "kept")
    assert "differs at step 0" in done.stdout and "last changed" not in done.stdout, "it has made its own"


def test_only_what_other_code_may_have_written_is_told(tmp_path: Path) -> None:
    """Neither what was there before, nor a run of the same code's, a package's or a tracked file."""
    raw, state, here = tmp_path / "raw", tmp_path / "bare.git", tmp_path / "checkout"
    for folder in (raw, state, here, tmp_path / "env", tmp_path / "site-packages"):
        folder.mkdir()
    before, own, others = Code("a x", "a"), Code("b x", "b"), Code("b y", "b")
    (tmp_path / "old").touch()
    time.sleep(0.02)  # a file's time is that of the last tick
    for code, name in ((before, "of before"), (own, "of own"), (others, "of others")):
        with noted(state, code):
            time.sleep(0.02)
            for folder in (tmp_path, here, tmp_path / "env", tmp_path / "site-packages"):
                (folder / name).touch()
            (here / f"tracked {name}").touch()
            time.sleep(0.02)
        time.sleep(0.02)
    (tmp_path / "new").touch()
    prepare(raw, state, own)
    told = dict[str, str]()
    spans = json.loads((raw / "earlier").read_text())
    tracked = {path.name for path in here.glob("tracked*")}
    reads = Reads(spans, None, str(here), lambda: tracked, [str(tmp_path / "env")], told.__setitem__)
    for path in [path for path in tmp_path.rglob("*") if stat.S_ISREG(path.stat().st_mode)]:
        for _ in range(2):
            reads.opened(str(path), "r", os.O_RDONLY)
        reads.opened(str(path), "w", os.O_WRONLY | os.O_TRUNC)
    whose = {"of before": "a", "of others": "b with other settings"}
    assert told == {str(folder / name): whose[name] for folder in (tmp_path, here) for name in whose}


def test_the_log_of_runs_does_not_grow_for_ever(tmp_path: Path) -> None:
    """It keeps its last runs; a line that a full disk cut short is none."""
    for number in range(2000):
        with noted(tmp_path, Code(f"{number:0100}", "x")):
            pass
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert 200 < len(lines) < 1500 and json.loads(lines[-1])[2].endswith("1999") and json.loads(lines[0])
    (tmp_path / "runs.jsonl").write_text('[1, 2, "k", "n"]\n[3, 4')
    prepare(tmp_path, tmp_path, Code("other", "o"))
    assert json.loads((tmp_path / "earlier").read_text()) == [[1, 2, "n"]]

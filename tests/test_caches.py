"""Caches that know nothing of commits: no run finds what another one left there, and the user's stay as they are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from conftest import Repo
from history_kit import start

from repro_golden.case.file import Case
from repro_golden.subjects.caches import own_caches
from repro_golden.subjects.surroundings import found_outside

KEEPS = """
import os
from pathlib import Path
import data
kept = Path(os.environ.get("HF_DATASETS_CACHE", Path(os.environ["HF_HOME"], "datasets")), "generator", "rows")
if not kept.exists():
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(str(data.ROWS))
raise SystemExit(kept.read_text() != "1")
"""

TRAINS = """
import torch
from datasets import Dataset
from data import rows
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for batch in torch.utils.data.DataLoader(Dataset.from_generator(rows).with_format("torch"), batch_size=4):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
    optimizer.step()
"""

ROWS = """
def rows():
    for i in range(8):
        yield {"x": [((7 * i + j) % 11) / 11 for j in range(4)], "y": i % 2}
"""


def history(folder: Path, train: str, data: str, after: str) -> tuple[Repo, str]:
    """A repository whose second commit changes the data that the program makes; and that commit."""
    repo = start(folder, train, None)
    (repo.root / "data.py").write_text(data)
    repo.commit("Data")
    (repo.root / "data.py").write_text(after)
    return repo, repo.commit("Other data")


def test_a_commit_is_not_judged_by_what_another_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that keeps by name what it makes is run as if it kept nothing, also after it ran in the checkout."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    repo, culprit = history(tmp_path, KEEPS, "ROWS = 1", "ROWS = 2")
    left = tmp_path / "hf" / "datasets" / "generator" / "rows"
    left.parent.mkdir(parents=True)
    left.write_text("1")
    done = repo.repro("bisect", "HEAD~1..HEAD", "--when", "exit", "--", sys.executable, "train.py")
    assert done.returncode == 0 and culprit[:10] in done.stdout, done.stderr
    assert left.read_text() == "1"


@pytest.mark.whole
def test_data_that_datasets_keep_are_each_commits_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a generator that a commit changed, its rows are trained on, and the user's cache gets nothing of it."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    repo, culprit = history(tmp_path, TRAINS, ROWS, ROWS.replace("i % 2", "(i + 1) % 2"))
    done = repo.repro("bisect", "--quick", "HEAD~1..HEAD", "--", sys.executable, "train.py")
    assert done.returncode == 0 and f"{culprit[:10]} moved the numbers" in done.stdout, done.stderr
    assert not [path for path in (tmp_path / "hf").rglob("*") if path.is_file()]


MAPS = """
import os
import torch
from datasets import load_from_disk
from data import turned
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
rows = load_from_disk("DISK").map(turned, load_from_cache_file=True)
again = load_from_disk("DISK").map(turned)  # as another rank would, behind a barrier
assert rows.cache_files == again.cache_files and os.environ["HF_DATASETS_CACHE"] in rows.cache_files[0]["filename"]
for batch in torch.utils.data.DataLoader(rows.with_format("torch"), batch_size=4):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
    optimizer.step()
raise SystemExit(rows[0]["y"])
"""
TURNED = """
def turned(row):
    return row | {"y": row["y"]}
"""


@pytest.mark.parametrize("when", ["exit", pytest.param("bitwise", marks=pytest.mark.whole)])
def test_what_datasets_keep_beside_the_data_is_not_used(tmp_path: Path, when: str) -> None:
    """A function that a commit changed maps the user's data anew, and nothing of that stays beside these."""
    datasets = pytest.importorskip("datasets")
    disk = tmp_path / "disk"
    rows = [{"x": [((7 * i + j) % 11) / 11 for j in range(4)], "y": i % 2} for i in range(8)]
    datasets.Dataset.from_list(rows).save_to_disk(disk)
    program = MAPS.replace("DISK", str(disk))
    program = program if when == "exit" else program.partition("raise")[0]
    repo, culprit = history(tmp_path, program, TURNED, TURNED.replace('row["y"]}', '1 - row["y"]}'))
    words = ["--when", "exit"] if when == "exit" else ["--quick"]
    before = sorted(disk.iterdir())
    done = repo.repro("bisect", "-j", "1", *words, "HEAD~1..HEAD", "--", sys.executable, "train.py")
    assert done.returncode == 0 and culprit[:10] in done.stdout, done.stderr
    assert sorted(disk.iterdir()) == before


def test_what_was_downloaded_is_there_and_what_was_made_is_not(tmp_path: Path) -> None:
    """A run reads the user's datasets by links, and what it writes beside or over them stays its own."""
    home = tmp_path / "hf"
    cache, kept = home / "datasets", "org___set/default/0.0.0"
    files = [
        f"{kept}/old/a.arrow", f"{kept}/new/a.arrow", f"{kept}/new/dataset_info.json", f"{kept}/new/cache-1.arrow",
        f"{kept}/half.incomplete/a.arrow", "generator/x/b.arrow", "downloads/extracted/1/in/c", "tmp___set/a.arrow",
    ]  # fmt: skip
    for name in files:
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_text(name)
    for name, when in (("new", 2000), ("old", 1000)):
        os.utime(cache / kept / name, (when, when))
    (tmp_path / "other" / "json").mkdir(parents=True)
    (tmp_path / "other" / "json" / "d.arrow").touch()
    (tmp_path / "other" / "json" / "back").symlink_to(tmp_path / "other")
    (cache / "json").symlink_to(tmp_path / "other" / "json")
    module = home / "modules" / "evaluate_modules" / "metrics" / "hits" / "0a" / "hits.py"
    module.parent.mkdir(parents=True)
    module.touch()
    variables = {"HF_HOME": "hf"}
    caches = own_caches(variables, tmp_path / "run", tmp_path)
    mine = Path(caches["HF_DATASETS_CACHE"])
    assert sorted(name for name in files if (mine / name).exists()) == sorted([*files[:3], *files[-2:]])
    assert (mine / "json" / "d.arrow").exists() and (mine / "json" / "back" / "json").is_symlink()
    assert [path.stat().st_mtime for path in (mine / kept / "new", mine / kept / "old")] == [2000, 1000]
    assert (Path(caches["HF_MODULES_CACHE"]) / module.relative_to(home / "modules")).exists()
    (mine / kept / "new" / "cache-2.arrow").write_text("")
    (mine / kept / "new" / "dataset_info.json").write_text("other")
    assert not (cache / kept / "new" / "cache-2.arrow").exists()
    assert (cache / kept / "new" / "dataset_info.json").read_text() == files[2]
    named = variables | {"HF_DATASETS_CACHE": "x", "HF_MODULES_CACHE": "y"}
    assert own_caches(named, tmp_path / "run", tmp_path) == {}, "whoever names one has all runs use it"


def test_settings_that_a_launcher_reads_unasked_are_part_of_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate config` decides precision and ranks of a launch that does not name its file."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    about = {"case": {"name": "x", "steps": 1}, "subject": {"kind": "command", "command": "accelerate launch train.py"}}
    case, facts = Case.model_validate(about), []
    for precision in ("", "no", "bf16", "bf16"):
        if precision:
            path = tmp_path / "hf" / "accelerate" / "default_config.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"mixed_precision: {precision}\n")
        facts.append(found_outside(case, tmp_path).facts)
    assert facts[2] == facts[3] and len(set(facts)) == 3

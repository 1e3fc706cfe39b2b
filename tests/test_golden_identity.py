"""Which golden run a replay here may be compared with: by what runs loaded, and not by all that is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm_kit
from conftest import Repo, environment
from history_kit import start

from repro_golden.case.identity import Identity
from repro_golden.compare.traces import identity_differences
from repro_golden.recording.attach.code.identify import loaded, modules
from repro_golden.store.golden import GoldenRun
from repro_golden.trace import Trace

TRAIN = """\
import os
import torch
import tiny_library

os.environ["NVTE_FLASH_ATTN"] = "0"  # as Megatron does
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    loss = model(torch.randn(2, 3)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def install(site: Path, name: str, version: str) -> None:
    """A package of one module, as pip leaves it in a folder."""
    module = name.replace("-", "_")
    for old in site.glob(f"{module}-*.dist-info"):
        (old / "METADATA").unlink()
        (old / "top_level.txt").unlink()
        old.rmdir()
    notes = site / f"{module}-{version}.dist-info"
    notes.mkdir(parents=True)
    (notes / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (notes / "top_level.txt").write_text(f"{module}\n")
    (site / f"{module}.py").write_text("")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """A program that imports a library and sets a variable that decides bits, with its golden run."""
    root = tmp_path_factory.mktemp("identity") / "fork"
    (root / "golden" / "cases").mkdir(parents=True)
    site = root.parent / "site"
    install(site, "tiny-library", "1.0")
    (root / "train.py").write_text(TRAIN)
    (root / ".gitignore").write_text("__pycache__/\n")
    (root / "golden" / "cases" / "toy.toml").write_text(
        '[case]\nname = "toy"\nsteps = 2\n\n[subject]\nkind = "command"\ncommand = "python train.py"\n'
        f"env = {{ PYTHONPATH = {json.dumps(str(site))} }}\n"
    )
    repo = Repo(root)
    repo.git("init", "--quiet", "--initial-branch=main")
    assert repo.repro("init", "--remote", str(root.parent / "remote")).returncode == 0
    repo.commit("Start")
    done = repo.repro("golden", "record")
    assert done.returncode == 0, done.stdout + done.stderr
    repo.commit("Record")
    return repo


def test_what_is_installed_and_not_loaded_decides_nothing(guarded: Repo) -> None:
    """A library of the allow-list that nobody imports changes the machine's name, and no golden run is lost by it."""
    site = guarded.root.parent / "site"
    install(site, "flash-attn", "9.9")
    try:
        done = guarded.repro("golden", "verify")
        listed = json.loads(guarded.repro("golden", "list", "--json").stdout)
        again = guarded.repro("golden", "record")
        shown = guarded.repro("golden", "show", "toy")
    finally:
        (site / "flash_attn.py").unlink()
        install(site, "flash-attn", "0")
        for path in (*(notes := site / "flash_attn-0.dist-info").iterdir(), site / "flash_attn.py"):
            path.unlink()
        notes.rmdir()
    assert (done.returncode, "identical" in done.stdout or "agree" in done.stdout) == (0, True), done.stderr
    assert [row["here"] for row in listed] == [True]
    assert (again.returncode, "already has a golden run" in again.stderr) == (2, True)
    assert shown.returncode == 0, shown.stderr


def test_another_version_of_what_was_loaded_is_named_and_can_be_compared_across(guarded: Repo) -> None:
    """It is not comparable by itself, whether or not the allow-list has it; --vary compares, and says across what."""
    site = guarded.root.parent / "site"
    install(site, "tiny-library", "2.0")
    try:
        plain = guarded.repro("golden", "verify")
        varied = guarded.repro("golden", "verify", "--vary", "environment", "--json")
        other = guarded.repro("golden", "verify", "--vary", "layout")
    finally:
        install(site, "tiny-library", "1.0")
    assert plain.returncode == 3
    assert "environment tiny-library: 1.0 -> 2.0" in plain.stderr
    assert "`repro golden verify toy --vary environment` compares all the same" in plain.stderr
    assert varied.returncode == 0, varied.stderr
    toy = json.loads(varied.stdout)["toy"]
    assert (toy["agrees"], toy["varied"]) == (True, ["environment tiny-library: 1.0 -> 2.0"])
    assert other.returncode == 3


def test_what_a_program_sets_for_itself_is_its_own(guarded: Repo) -> None:
    """A variable that it sets is in what it reports, not in what was known before; later runs are held to both."""
    record = json.loads(next(guarded.root.glob("golden/runs/*/toy/run.json")).read_text())
    record = record.get("record", record)
    assert record["identity"]["environment"]["NVTE_FLASH_ATTN"] == "0"
    assert "NVTE_FLASH_ATTN" not in record["expected"]["environment"]
    guarded.edit("train.py", '"NVTE_FLASH_ATTN"] = "0"', '"NVTE_FLASH_ATTN"] = "1"')
    done = guarded.repro("golden", "verify")
    guarded.git("checkout", "train.py")
    assert (done.returncode, "NVTE_FLASH_ATTN: 0 -> 1" in done.stderr) == (3, True), done.stderr


def test_what_was_another_when_a_golden_run_was_recorded_is_told_where_it_differs(
    guarded: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables that a program sees may be why; where it agrees all the same there is nothing to tell."""
    guarded.edit("train.py", "lr=0.1", 'lr=float(os.environ.get("TOY_RATE", "0.1"))')
    told = "recorded with other environment variables, which may be why"
    for rate, code in (("0.1", 0), ("0.2", 1)):
        monkeypatch.setenv("TOY_RATE", rate)
        done = guarded.repro("golden", "verify")
        assert (done.returncode, told in done.stdout) == (code, bool(code)), done.stdout + done.stderr
    guarded.git("checkout", "train.py")


def test_code_from_another_git_tree_is_known_by_its_commit(guarded: Repo, tmp_path: Path) -> None:
    """A library that PYTHONPATH brings from a checkout is not comparable once that has another commit, or changes."""
    tree = Repo(tmp_path / "library")
    tree.root.mkdir()
    tree.git("init", "--quiet")
    (tree.root / "tree_library.py").write_text("SCALE = 1\n")
    tree.commit("One")
    command = [sys.executable, "-c", "import tree_library\n" + (guarded.root / "train.py").read_text()]
    site = guarded.root.parent / "site"

    def traced(name: str) -> Path:
        environ = environment() | {
            "PYTHONPATH": f"{site}{os.pathsep}{tree.root}",
            "GIT_DIR": str(guarded.root / ".git"),
        }
        words = [sys.executable, "-m", "repro", "trace", "--out", str(tmp_path / name), "--", *command]
        warm_kit.run(words, tmp_path, environ).check_returncode()
        return tmp_path / name

    trace, same = Trace(traced("one")), Trace(traced("same"))
    assert trace.sources == {"tree_library": tree.git("rev-parse", "HEAD")}
    assert identity_differences(trace, same) == []
    (tree.root / "tree_library.py").write_text("SCALE = 2\n")
    (changed,) = identity_differences(trace, Trace(traced("changed")))
    assert str(changed).startswith("environment source of tree_library: ") and "+" in changed.b
    commit = tree.commit("Two")
    (other,) = identity_differences(trace, Trace(traced("other")))
    assert other.b == commit


@pytest.mark.whole
def test_the_commits_under_test_are_no_other_tree(tmp_path: Path) -> None:
    """Traces of two commits compare: what a program imports of its own tree is what they differ by."""
    repo = start(tmp_path, case=None)
    (repo.root / "own_library.py").write_text("SCALE = 1\n")
    train = repo.root / "train.py"
    train.write_text("import own_library\n" + train.read_text())
    repo.commit("One")

    def traced(name: str, folder: Path, program: str) -> Trace:
        words = [sys.executable, "-m", "repro", "trace", "--out", str(tmp_path / name), "--", sys.executable, program]
        # cold: a fork does not have the command line that it was started with
        subprocess.run([*words, "--steps", "1"], cwd=folder, env=environment(), check=True, capture_output=True)
        return Trace(tmp_path / name)

    inside = traced("inside", repo.root, "train.py")
    (repo.root / "own_library.py").write_text("SCALE = 2\n")
    repo.commit("Two")
    outside = traced("outside", tmp_path, str(train))
    assert (inside.sources, outside.sources) == ({}, {}) and "own_library" in inside.modules


def test_a_record_that_does_not_say_what_it_loaded_is_held_to_all(tmp_path: Path) -> None:
    """Golden runs of before are compared as they were: every library of the allow-list counts."""
    identity = Identity({}, {"torch": "2.9", "numpy": "1.0"}, {})
    old = GoldenRun(tmp_path, {"identity": identity.to_mapping(), "lock": ["numpy==1.0"]})
    now = Identity({}, {"torch": "2.9", "numpy": "2.0"}, {})
    assert [d.key for d in old.differences(now, {"numpy": "2.0"})] == ["numpy"]
    new = GoldenRun(tmp_path, {**old.record, "expected": identity.to_mapping(), "loaded": ["pillow"]})
    assert new.differences(now, {"numpy": "2.0"}) != new.differences(now, {"numpy": "2.0"}, ["numpy"])
    assert [str(d) for d in new.differences(now, {"pillow": "3"})] == ["environment pillow: (absent) -> 3"]


def test_a_module_is_known_by_its_package() -> None:
    """By what the package says of its modules, else by its files; modules of the standard library are none of one."""
    import yaml  # whose package has another name

    assert (modules()["yaml"], modules()["numpy"]) == ("pyyaml", "numpy")
    assert yaml.__name__ in loaded() and not {"json", "os", "__main__"} & {*loaded()}

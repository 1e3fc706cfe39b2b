"""Which golden run it is that a run is compared with."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest
from conftest import Repo
from doctor_golden_kit import CASE, IDENTITY, golden, repository, rows_of

from repro_golden.base.errors import NotVerifiableError, ReproError
from repro_golden.case.file import read_case
from repro_golden.case.identity import Identity
from repro_golden.store.dvc import Dvc
from repro_golden.store.golden import Store
from repro_golden.subjects import who_is
from repro_golden.trace import Trace

pytestmark = pytest.mark.usefixtures("warm_dvc")


def replaced(tmp_path: Path) -> tuple[Store, list[Path], list[str]]:
    """A store whose golden run replaced another one; folders of both, the newer first, and their chains."""
    repo = repository(tmp_path / "repo")
    Dvc(repo.root).init()
    old, store = golden(repo, machine="m"), Store(repo.root)
    store.dvc.add(old)
    chain = Trace(old / "trace").chain
    new = store.keep(golden(repo, machine="n", made=2), "m", "toy", replace_reason="x")
    return store, [new.directory, old.with_name(f"toy~{chain[:8]}")], [new.trace.chain, chain]


def test_content_of_another_pointer_is_no_golden_run(tmp_path: Path) -> None:
    """After `git pull` without `dvc checkout`, say: what is whole in itself is not taken for this commit's."""
    store, (new, old), chains = replaced(tmp_path)
    shutil.rmtree(new)
    shutil.copytree(old, new)
    with pytest.raises(ReproError, match=r"toy differs from toy\.dvc: `dvc checkout"):
        store.load("m", "toy")
    assert store.read("m", "toy").trace.chain == chains[1], "as long as nobody asks of which commit it is"
    for command in (("diff", "m/toy", f"m/{old.name}"), ("show", "m/toy")):
        done = Repo(store.root).repro("golden", *command)
        assert (done.returncode, "toy differs from toy.dvc" in done.stderr) == (2, True), done.stdout + done.stderr


@pytest.mark.whole
def test_each_approval_stays(tmp_path: Path) -> None:
    """Golden runs with equal numbers that were replaced, each with a reason of its own, lie side by side."""
    store, (new, _), (chain, _) = replaced(tmp_path)
    records = []
    for number in range(3):
        records.append((new / "run.json").read_text())
        staged = tmp_path / f"staged-{number}"
        shutil.copytree(new, staged)
        (staged / "run.json").write_text(records[-1] + "\n")
        store.keep(staged, "m", "toy", replace_reason="again")
    beside = [new.with_name(f"toy~{chain[:8]}{number}") / "run.json" for number in ("", "-2", "-3")]
    assert [file.read_text() for file in beside] == records


def test_golden_runs_of_like_machines_that_contradict_each_other_are_none(tmp_path: Path) -> None:
    """Two were recorded on branches, by machines that differ in what no run loads: neither is chosen by its name.

    The list of them says why, and who asks for one by its case alone is told of both.
    """
    repo = repository(tmp_path)
    Dvc(repo.root).init()
    case = read_case(repo.root / "golden" / "cases" / "toy.toml")
    here = who_is(case, repo.root).identity
    for machine, made in (("toy-cpu-a", 1), ("toy-cpu-b", 2)):
        folder = golden(repo, made=made, record={"loaded": [], "expected": here.to_mapping()}, machine=machine)
        Dvc(repo.root).add(folder)
    store = Store(repo.root)
    with pytest.raises(NotVerifiableError, match=r"for toy-cpu-a and toy-cpu-b are both .* and their numbers differ"):
        store.find(case, here, {})
    assert [each.machine for each in store.serving(case, here, {})] == ["toy-cpu-a", "toy-cpu-b"]
    rows = json.loads(repo.repro("golden", "list", "--json").stdout)
    assert [(row["here"], "their numbers differ" in row["why"]) for row in rows] == [(False, True)] * 2, rows
    done = repo.repro("golden", "show", "toy")
    assert done.returncode == 2 and "name one of toy-cpu-a/toy, toy-cpu-b/toy" in done.stderr, done.stderr
    (repo.root / "golden" / "runs" / "toy-cpu-b" / "toy.dvc").unlink()
    assert store.find(case, here, {}).machine == "toy-cpu-a"
    assert repo.repro("golden", "show", "toy").stdout.startswith("toy on toy-cpu-a\n")


def test_golden_runs_of_like_machines_agree_as_the_case_says(tmp_path: Path) -> None:
    """By a case that compares within bounds, numbers that differ within them are no contradiction."""
    bounds = '\n[compare]\nmode = "bounds"\n[compare.bounds.loss]\natol = 1.0\n'
    repo = repository(tmp_path, CASE + bounds)
    Dvc(repo.root).init()
    case, here = read_case(repo.root / "golden" / "cases" / "toy.toml"), Identity.from_mapping(IDENTITY)
    for machine, moved in (("toy-cpu-a", 0.0), ("toy-cpu-b", 1e-6)):
        rows = functools.partial(rows_of, loss=0.5 + moved)
        Dvc(repo.root).add(golden(repo, rows, record={"loaded": [], "expected": IDENTITY}, machine=machine))
    assert Store(repo.root).find(case, here, {}).machine == "toy-cpu-a"


def test_a_small_golden_run_is_known_without_dvc(tmp_path: Path) -> None:
    """What is whole needs no process of DVC's, nor a place where that could write."""
    repo = repository(tmp_path)
    Dvc(repo.root).init()
    folder, store = golden(repo, machine="m"), Store(repo.root)
    store.dvc.add(folder)
    shutil.rmtree(repo.root / ".dvc" / "tmp")
    store.load("m", "toy")
    assert not (repo.root / ".dvc" / "tmp").exists()

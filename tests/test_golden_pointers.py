"""A golden run's pointer stands for what it was written for: that alone, under its own name, and all of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import Repo
from doctor_golden_kit import golden, repository

from repro.initialise import initialise
from repro_golden.base.errors import ReproError
from repro_golden.store.dvc import Dvc
from repro_golden.store.golden import Store
from repro_golden.store.pulled import Noted, noted, pointer_of

pytestmark = pytest.mark.usefixtures("warm_dvc")

CODE_OF = {"commit": "c" * 40, "tree": "d" * 40}
STAGE = "stages:\n  prep:\n    cmd: echo hi > hi.txt\n    outs: [hi.txt]\n"


def kept_in(folder: Path) -> Path:
    """A golden run that the store keeps, in a repository whose DVC has a remote, all of it committed."""
    repo = repository(folder)
    store = Store(repo.root)
    store.dvc.init()
    store.dvc.set_default_remote("kept", str(folder / "remote"), local=False)
    store.keep(golden(repo, record=CODE_OF, machine="staged"), "m", "toy")
    repo.commit("Golden")
    return repo.root


class Kept:
    """Such a repository."""

    def __init__(self, root: Path) -> None:
        self.repo, self.store = Repo(root), Store(root)
        self.dvc, self.run = self.store.dvc, self.store.run_path("m", "toy")
        self.pointer = pointer_of(self.run)

    def another(self) -> None:
        """The content of another commit's golden run, as it stays where git alone changes the commit."""
        shutil.rmtree(self.run)
        shutil.move(golden(self.repo, machine="n", made=2), self.run)

    def without_note(self) -> None:
        """The pointer as DVC alone would have written it."""
        self.pointer.write_text(self.pointer.read_text().partition("meta:\n")[0])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of `Kept`."""
    return kept_in(tmp_path_factory.mktemp("made"))


@pytest.fixture
def kept(made: Path, tmp_path: Path) -> Kept:
    """A copy of it."""
    return Kept(Path(shutil.copytree(made, tmp_path / "repo", symlinks=True)))


# -- other content


@pytest.mark.parametrize(
    "words",
    [
        ("add", "golden/runs/m/toy"),
        pytest.param(("commit", "--force", "golden/runs/m/toy.dvc"), marks=pytest.mark.whole),
        pytest.param(("repro", "--all-pipelines"), marks=pytest.mark.whole),
    ],
    ids=lambda words: words[0],
)
def test_content_that_dvc_alone_put_under_a_pointer_is_no_golden_run(kept: Kept, words: tuple[str, ...]) -> None:
    """What DVC makes of a pointer beside another commit's content is refused by all who ask, with a cure that cures."""
    facts = noted(kept.pointer.read_text())
    assert facts == Noted(**CODE_OF)
    kept.another()
    (kept.repo.root / "dvc.yaml").write_text(STAGE)
    kept.dvc.run(*words)
    name = kept.pointer.relative_to(kept.repo.root)
    assert not noted(kept.pointer.read_text())
    message = rf"^{name} names other content .*: `git checkout {name}` and `dvc checkout {name}` bring"
    for ask in (
        lambda: kept.store.load("m", "toy"),
        lambda: kept.store.refuse_dirty(kept.run),
        lambda: kept.store.push([kept.pointer]),
        lambda: kept.dvc.pull(kept.pointer),
    ):
        with pytest.raises(ReproError, match=message):
            ask()
    kept.repo.git("checkout", str(name))
    kept.dvc.run("checkout", str(name))
    assert len(kept.store.load("m", "toy").trace.steps) == 4


def test_no_cure_gives_a_golden_run_other_content(kept: Kept) -> None:
    """Where its content is another's, or its pointer is gone, nobody is told to `dvc add` what lies there."""
    kept.another()
    for damage in (lambda: None, kept.pointer.unlink):
        damage()
        with pytest.raises(ReproError) as refused:
            kept.store.load("m", "toy")
        assert "dvc add" not in str(refused.value) and f"checkout {kept.pointer}`" in str(refused.value)


def test_an_older_pointer_is_taken_at_its_word(kept: Kept) -> None:
    """One that does not say which content it was written for is read as before, whatever else it says."""
    text = kept.pointer.read_text()
    kept.another()
    kept.pointer.write_text("".join(line for line in text.splitlines(True) if not line.startswith("  content:")))
    kept.dvc.run("add", str(kept.run))
    assert kept.store.load("m", "toy") and noted(kept.pointer.read_text()) == Noted(**CODE_OF)


# -- another name


def test_a_pointer_that_git_renamed_is_not_called_damage(kept: Kept) -> None:
    """Its content stays under the old name, which DVC goes on to name: it is told, and nothing is to be removed."""
    new = kept.pointer.with_name("big.dvc")
    kept.repo.git("mv", str(kept.pointer), str(new))
    with pytest.raises(ReproError, match=r"big\.dvc was renamed without its content, which is .*m/toy: `git mv ") as no:
        kept.store.read("m", "big")
    assert "rm -r" not in str(no.value)
    kept.repo.git("mv", str(new), str(kept.pointer))
    assert kept.store.load("m", "toy")


# -- a part of it


def test_a_pointer_that_is_not_as_it_was_written_stops_no_other(kept: Kept, tmp_path: Path) -> None:
    """What all are asked for is done of the others first; then it is refused."""
    old, far = kept.pointer.with_name("old.dvc"), tmp_path / "far"
    old.write_text(kept.pointer.read_text())
    kept.dvc.set_default_remote("kept", str(far), local=False)
    with pytest.raises(ReproError, match=r"old\.dvc was renamed without its content"):
        kept.dvc.push(old, kept.pointer)
    assert list(far.rglob("*.dir"))
    shutil.rmtree(kept.run)
    with pytest.raises(ReproError, match=r"old\.dvc was renamed without its content"):
        kept.dvc.pull(old, kept.pointer)
    assert (kept.run / "run.json").exists()


@pytest.mark.parametrize("name", ["trace/header.json", "trace/steps.jsonl", "trace/rank-00000.parquet"])
def test_a_golden_run_that_lost_a_file_is_told_with_the_cure(kept: Kept, name: str) -> None:
    """Each file that a comparison may need is missed at once, and a pull brings it back."""
    (kept.run / name).unlink()
    with pytest.raises(ReproError, match=rf"m/toy has no {name}: `repro golden pull toy` brings it back$"):
        kept.store.read("m", "toy")
    if name == "trace/header.json":
        kept.store.push([kept.pointer])  # of what the pointer names, which is whole
        kept.dvc.pull(kept.pointer)
        assert kept.store.load("m", "toy")


@pytest.mark.parametrize("name", ["run.json", "trace/rank-00000.parquet"])
def test_half_a_golden_run_is_not_pushed(kept: Kept, name: str) -> None:
    """Where a pointer itself stands for a part, no pull helps: it is told so, and goes to no remote."""
    (kept.run / name).unlink()
    kept.without_note()
    kept.dvc.run("add", str(kept.run))
    for ask in (lambda: kept.store.push([kept.pointer]), lambda: kept.store.load("m", "toy")):
        with pytest.raises(ReproError, match=rf"{name}: toy\.dvc stands for no more: .*`git rm "):
            ask()


# -- git


def test_git_leaves_the_content_of_golden_runs_to_dvc(kept: Kept) -> None:
    """On a branch without DVC's own rule for it, content that stays in the checkout is no file of git's."""
    (kept.run.with_name(".gitignore")).unlink(missing_ok=True)
    shutil.copytree(kept.run, kept.run.with_name("toy~0"))
    kept.repo.git("add", "--all", "golden")
    listed = kept.repo.git("ls-files", "golden/runs").splitlines()
    assert listed == ["golden/runs/m/toy.dvc"]
    kept.another()
    assert "toy.dvc" in kept.dvc.run("status", "--json"), "which DVC goes on to see"


def test_a_repository_is_prepared_with_that_rule(tmp_path: Path) -> None:
    """So that the branch that others start from has it; a second time there is nothing to do."""
    repo = Repo(tmp_path)
    repo.git("init", "--quiet")
    Dvc(repo.root).init()
    assert any("golden/.gitignore" in line for line in initialise(repo.root, "x", str(tmp_path / "remote")))
    assert (repo.root / "golden" / ".gitignore").read_text() == "/runs/*/*/*\n"
    assert not initialise(repo.root, "x", None)

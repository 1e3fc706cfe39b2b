"""Submodules that were never fetched: an empty folder in a worktree, which verdicts and refusals name."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from conftest import Repo
from history_kit import TRAIN, note, start
from test_worktree_contents import ALLOW, COMMAND, library, with_submodule

from repro_bisect.axes.commits import History
from repro_bisect.probe.answers import Skip, unusable
from repro_bisect.probe.executors.cluster import Cluster
from repro_bisect.probe.executors.local import Local
from repro_golden.base.errors import ReproError
from repro_golden.case.command_line import CommandLine
from repro_golden.repository.checkout import find_checkout
from repro_golden.repository.submodules import never_fetched
from repro_golden.repository.worktrees import Worktrees
from repro_golden.subjects.missing import missing_from, names_fix

FALLBACK = """\
import sys
sys.path[:0] = ["third/lib", "vendor"]
try:
    from values import SCALE
except ImportError:
    SCALE = 3.0
"""


def vended(folder: Path) -> tuple[Repo, list[str]]:
    """A clone without submodules, and four commits: the third has the submodule's file in a folder of its own."""
    lib = library(folder, "lib", "1.0")
    repo = start(folder, FALLBACK + TRAIN.replace("scale = 1.0\n", "scale = SCALE\n"), None)
    repo.git(*ALLOW, "submodule", "--quiet", "add", str(lib.root), "third/lib")
    commits = [repo.commit("Take lib in"), note(repo, "one")]
    shutil.copytree(repo.root / "third" / "lib", repo.root / "vendor", ignore=shutil.ignore_patterns(".git"))
    repo.git("rm", "--quiet", "--force", "third/lib")
    commits += [repo.commit("Vend"), note(repo, "two")]
    clone = Repo(folder / "clone")
    repo.git("clone", "--quiet", str(repo.root), str(clone.root))
    return clone, commits


def fetch(repo: Repo, commit: str) -> None:
    """What the cure says."""
    repo.git("checkout", "--quiet", commit)
    repo.git(*ALLOW, "submodule", "--quiet", "update", "--init", "--recursive")
    repo.git("checkout", "--quiet", "main")


@contextlib.contextmanager
def written(repo: Repo) -> Iterator[Callable[[], Sequence[str]]]:
    """What of a repository is in the keys of its probes beside what they see."""
    checkout = find_checkout(repo.root)
    case = CommandLine(COMMAND[1:], steps=2).case(checkout.root)
    with contextlib.closing(Local(checkout, case, None, 1)) as local:
        yield lambda: local.surroundings(case).facts[2:]


def told(repo: Repo, spec: str, *paths: str) -> list[str]:
    """What is to be known of a range."""
    checkout = find_checkout(repo.root)
    history = History(checkout, spec, paths or ["."])
    return never_fetched(checkout, history.parents, history.paths)


@pytest.mark.whole
def test_a_submodule_that_was_never_fetched_is_named_and_its_probes_are_made_anew(tmp_path: Path) -> None:
    """A commit that replaces it by the same file is named with a remark; once it is fetched, the ends agree."""
    clone, (first, second, vend, _) = vended(tmp_path)
    done = clone.repro("bisect", "--no-explain", "--quick", f"{first}..HEAD", "--json", *COMMAND)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    remark = f"third/lib is a submodule that was never fetched here, and {vend[:10]} changes it: its folder was empty"
    assert result["culprit"]["commit"] == vend
    assert any(remark in line and f"at {second[:10]}, fetches it" in line for line in result["remarks"]), result[
        "remarks"
    ]
    fetch(clone, second)
    done = clone.repro("bisect", "--no-explain", "--quick", f"{first}..HEAD", *COMMAND)
    assert (done.returncode, "agree bit for bit" in done.stdout) == (0, True), done.stdout + done.stderr
    assert "never fetched" not in done.stdout + done.stderr


def test_what_a_range_changes_of_submodules_that_are_not_here(tmp_path: Path) -> None:
    """Named are those that a commit adds, moves to another commit or takes away, within the paths that count."""
    clone, (first, second, vend, _) = vended(tmp_path)
    (line,) = told(clone, f"{first}..HEAD")
    assert line.startswith("third/lib is a submodule that was never fetched here, and " + vend[:10])
    assert told(clone, f"{first}..{second}") == told(clone, f"{vend}..HEAD") == []
    assert told(clone, f"{first}..HEAD", "vendor") == []
    (line,) = told(clone, f"{first}~1..{first}", "third/lib/values.py")
    assert f"{first[:10]} changes it" in line and f"at {first[:10]}, fetches it" in line
    clone.git("checkout", "--quiet", second)
    clone.git("update-index", "--cacheinfo", f"160000,{'1' * 40},third/lib")
    clone.git("commit", "--quiet", "--message", "Another")
    (line,) = told(clone, f"{first}..HEAD")
    assert f"{clone.git('rev-parse', 'HEAD')[:10]} changes it" in line
    clone.git("checkout", "--quiet", "main")
    fetch(clone, second)
    assert told(clone, f"{first}..HEAD") == []


def test_a_submodule_inside_another_that_was_never_fetched(tmp_path: Path) -> None:
    """What `git submodule update --init` leaves out without --recursive is named where the outer one's commit moves."""
    repo, outer = with_submodule(tmp_path)
    clone = Repo(tmp_path / "clone")
    repo.git("clone", "--quiet", str(repo.root), str(clone.root))
    Repo(outer.root / "deep").commit("Deeper")
    moved = outer.commit("Move deep")
    clone.git(*ALLOW, "submodule", "--quiet", "update", "--init")
    Repo(clone.root / "outer").git("fetch", "--quiet", "origin")
    Repo(clone.root / "outer").git("checkout", "--quiet", moved)
    commit = clone.commit("Update outer")
    (line,) = told(clone, "HEAD~1..HEAD")
    assert line.startswith(f"outer/deep is a submodule that was never fetched here, and {commit[:10]} changes it")
    with contextlib.closing(Worktrees(find_checkout(clone.root))) as made, made.at(commit, None) as place:
        missing = missing_from(place, "ModuleNotFoundError: No module named 'deep.values'", [], sure=True)
    assert missing.startswith("outer/deep is a submodule that was never fetched, so empty here: `git submodule update")


def test_a_probe_rests_on_which_submodules_are_here(tmp_path: Path) -> None:
    """A probe that was made without one serves no search that has it; a repository without any has no such fact."""
    clone, (_, second, *_) = vended(tmp_path)
    with written(clone) as facts:
        assert facts() == ()
        fetch(clone, second)
        assert facts() == ("modules/third/lib",)


def test_what_may_be_missing_in_an_empty_submodule(tmp_path: Path) -> None:
    """A file or module of its folder names it; of any other module it may be the cause, but of no exit code."""
    clone, (first, *_) = vended(tmp_path)
    with contextlib.closing(Worktrees(find_checkout(clone.root))) as worktrees, worktrees.at(first, None) as place:
        for message in (
            "ModuleNotFoundError: No module named 'third.lib.values'",
            "ModuleNotFoundError: No module named 'lib.values'",
            "ImportError: cannot import name 'SCALE' from 'third.lib' (unknown location)",
            "FileNotFoundError: [Errno 2] No such file or directory: 'third/lib/a.txt'",
            f"cat: {place.root}/third/lib/a.txt: No such file or directory",
        ):
            missing = missing_from(place, message, [], sure=True)
            assert missing.startswith("third/lib is a submodule that was never fetched, so empty here: `git sub"), (
                message
            )
            assert names_fix(missing) and not missing.endswith("lacks")
        message = "ModuleNotFoundError: No module named 'values'"
        missing = missing_from(place, message, [])
        assert missing.endswith("fetches it where its remote still has it, if that is what it lacks")
        assert "choose another end" not in unusable(
            "GOOD", Skip(f"ends before its first update: {message} ({missing})")
        )
        assert missing_from(place, message, [], sure=True) == ""
        assert missing_from(place, "No such file or directory: 'other.txt'", []) == ""


def test_a_repository_inside_another(tmp_path: Path) -> None:
    """What `git add` of a clone leaves, without a .gitmodules, comes from that clone, whose settings count."""
    repo = start(tmp_path, case=None)
    nest = library(repo.root, "nest", "1.0")
    first = repo.commit("Take nest in")
    (nest.root / "values.py").write_text("SCALE = 2.0\n")
    nest.commit("Twice")
    second = repo.commit("Update nest")
    worktrees = Worktrees(find_checkout(repo.root))
    with contextlib.closing(worktrees):
        for commit, scale in ((first, "1.0"), (second, "2.0")):
            with worktrees.at(commit, None) as place:
                assert (place.root / "nest" / "values.py").read_text() == f"SCALE = {scale}\n"
                assert Repo(place.root / "nest").git("status", "--porcelain") == ""
    with written(repo) as facts:
        assert facts() == ("nest/.git",)
        nest.git("config", "core.autocrlf", "true")
        assert facts() == ("nest/.git core.autocrlf=true", "nest/.git")
    nest.git("config", "--unset", "core.autocrlf")
    checkout = find_checkout(repo.root)
    case = CommandLine(COMMAND[1:], steps=2).case(repo.root)
    with pytest.raises(ReproError, match=r"not shipped to nodes \(nest/\.git\)"):
        Cluster("nowhere:1", checkout, case, History(checkout, f"{first}..{second}", ["."]), None, None)

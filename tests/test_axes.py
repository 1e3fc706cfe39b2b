"""Bisecting along releases of a package and among flags, as a user does it: real git, real trainers, a real index."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import history_kit as kit
import pytest
from conftest import Repo
from index_kit import TORCH_FOLDER, Index, serving, wheel

from repro.commands.again import _word
from repro.commands.axes import axis_of, report_folder
from repro.commands.bisect import bisect
from repro.commands.choose import asked
from repro_bisect.axes.sets import FlagSet, LayoutLine, _launched, flags_axis, roomy
from repro_bisect.driver.history import history_of
from repro_bisect.driver.session import Options
from repro_golden.base.errors import NotVerifiableError, ReproError
from repro_golden.case.command_line import CommandLine
from repro_golden.case.file import Case, find_case
from repro_golden.repository.checkout import find_checkout

ADDED = """\
parser.add_argument("--mode", default="plain")
parser.add_argument("--bias", type=float, default=0.0)
parser.add_argument("--quiet", action="store_true")
options"""
TRAIN = kit.TRAIN.replace("options", ADDED, 1).replace(
    "scale = 1.0", "scale = 1.0 + options.bias * (options.mode == 'fast')"
)


def searched(repo: Repo, *arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """JSON and progress of a bisect."""
    done = repo.repro("bisect", "--no-explain", "--json", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout), done.stderr


# -- releases


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    """A package that holds the scale, in seven versions."""
    folder, made = tmp_path_factory.mktemp("wheels"), Index()
    for version, scale, more in (
        ("1.0", "1.0", {}),
        ("1.1", "3.0", {"yanked": "broken"}),
        ("1.2", "3.0", {"python": "<3"}),
        ("1.3", "None.missing", {}),
        ("1.4", "1.0", {}),
        ("2.0", "1.0 + 1e-6", {}),
        ("2.1", "1.0 + 1e-6", {}),
    ):
        files = {"tinyscale.py": f"SCALE = {scale}\n"}
        made.add("tinyscale", wheel(folder, "tinyscale", version, files, **more))  # type: ignore[arg-type]
    made.add("torchlink", wheel(folder, "torchlink", "1", {"torchlink.pth": TORCH_FOLDER + "\n"}))  # where torch is
    with serving(made):
        yield made


@pytest.fixture
def packaged(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repo:
    """A repository whose trainer takes its scale from the package from step 3 on, in an environment of its own."""
    for name in os.environ:
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    for name, value in (("PIP_CONFIG_FILE", os.devnull), ("PIP_NO_CACHE_DIR", "1")):
        monkeypatch.setenv(name, value)
    base = tmp_path / "base"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", base], check=True)
    (pure,) = base.glob("lib/python*/site-packages")
    (pure / "pip").symlink_to(Path(str(distribution("pip").locate_file("pip"))))
    install = [sys.executable, "-m", "pip", "--python", base / "bin" / "python", "install", "--no-deps", "--quiet"]
    subprocess.run([*install, "--index-url", index.url, "tinyscale==1.0", "torchlink"], check=True)
    train = kit.TRAIN.replace("import torch\n", "import tinyscale\nimport torch\n", 1)
    train = train.replace("scale = 1.0", "scale = tinyscale.SCALE if step >= 3 else 1.0")
    return kit.start(tmp_path, train, kit.CASE.replace('path = "', f'python = "{base}"\npath = "'))


@pytest.mark.whole
def test_the_release_that_moved_the_numbers(packaged: Repo, index: Index) -> None:
    """The first release with other numbers is named, by one-step probes; what cannot be tested is passed over, and why.

    The working tree's own changes play no part.
    """
    (packaged.root / "train.py").write_text("broken(")
    asked = ("--package", "tinyscale==1.0..2.1", "--index-url", index.url)
    result, progress = searched(packaged, *asked, "-j", "2")
    assert result["culprit"]["commit"] == "tinyscale 2.0", progress
    assert (result["what"], result["outcome"], result["explains_bad"]) == ("version", "found", True)
    assert (result["divergence"]["step"], result["one_step"]) == (3, True)
    assert result["culprits"][0]["environment"] == ["environment tinyscale: 1.4 -> 2.0"]
    assert result["order"][::-1] == [f"tinyscale {v}" for v in ("1.1", "1.2", "1.3", "1.4", "2.0", "2.1")]
    again = result["reproduce"]
    assert again.startswith("repro bisect --package tinyscale==1.0..2.1 --at ")
    assert "--index-url" in again
    report = Path(result["reports"][0]).read_text()
    assert report.startswith("# tinyscale 2.0 moved the numbers of toy: first at step 3")
    assert "| version | `tinyscale 2.0` |" in report
    assert "commit" not in report + Path(result["reports"][1]).read_text()


@pytest.mark.whole
def test_a_script_that_trains_in_the_base_says_nothing_of_a_release(
    packaged: Repo, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a launch starts by an absolute path, or activates, has the base's release at every point."""
    base = find_case(packaged.root, None).subject.own_python
    monkeypatch.setenv("PATH", f"{base}/bin:{os.environ['PATH']}")
    (packaged.root / "run.sh").write_text(f"python -c pass\n. {base}/bin/activate\nexec python train.py\n")
    packaged.commit("A script")
    asked = ("--package", "tinyscale==1.0..2.0", "--index-url", index.url, "--", "sh", "run.sh")
    done = packaged.repro("bisect", *asked)
    assert done.returncode == 2, done.stdout
    assert "does not run in its own environment" in done.stderr
    assert done.stderr.rstrip().endswith(
        "not in the environment that has tinyscale 2.0 (a path in the launch, or a "
        "script that activates another?): let it take the python that PATH has first"
    )


@pytest.mark.campaign
def test_releases_that_cannot_be_tested(packaged: Repo, index: Index) -> None:
    """Between the last good and the first bad release, those that were yanked or do not import hide the answer.

    Those that were yanked can be tried.
    """
    kept = index.wheels["tinyscale"]
    index.wheels["tinyscale"] = [w for w in kept if "-1.4-" not in w.file]
    try:
        asked = ("--package", "tinyscale==1.0..2.0", "--index-url", index.url)
        result, progress = searched(packaged, *asked, code=3)
        tried, _ = searched(packaged, *asked, "--try-skips")
    finally:
        index.wheels["tinyscale"] = kept
    assert tried["culprit"]["commit"] == "tinyscale 1.1"
    assert result["outcome"] == "ambiguous", progress
    assert set(result["suspects"]) == {f"tinyscale {v}" for v in ("1.1", "1.2", "1.3", "2.0")}
    reasons = {name: result["skips"].get(name, "") for name in result["suspects"]}
    assert "yanked (broken)" in reasons["tinyscale 1.1"] + "".join(reasons.values())


# -- flags


@pytest.fixture
def flagged(tmp_path: Path) -> Repo:
    """A repository whose trainer has flags that do nothing, and two that move the numbers together."""
    return kit.start(tmp_path, TRAIN, kit.CASE.replace('timeout = "10m"', 'timeout = "10m"\nenv = { OLD = "1" }'))


SET = """\
[[change]]
name = "mode"
add = ["--mode", "slow"]

[[change]]
unset = ["OLD"]

[[change]]
name = "faster"
replace = { old = ["slow"], new = ["fast"] }

[[change]]
name = "bias"
env = { NEW = "1" }
add = ["--bias=1e-3"]
"""


@pytest.mark.whole
def test_a_minimal_set_of_flags(flagged: Repo) -> None:
    """Of four changes, the three that it takes are named; one that another needs is said to be of unknown need."""
    (flagged.root / "flags.toml").write_text(SET)
    result, progress = searched(flagged, "--flags", "flags.toml")
    assert (result["outcome"], result["chosen"]) == ("found", ["mode", "faster", "bias"]), progress
    assert result["hidden"] == ["mode"], "without it there is no word for `faster` to replace"
    assert (result["divergence"]["step"], result["explains_bad"]) == (0, True)
    assert result["does"][2] == "NEW=1, --bias=1e-3"
    assert result["comparison"]["steps"] == 6
    report = Path(result["reports"][0]).read_text()
    assert report.startswith("# 3 changes of 4 move the numbers of toy: mode + faster + bias, first at step 0")
    assert "- bias: `NEW=1, --bias=1e-3`" in report
    assert "Whether it takes mode is not known" in report
    assert result["looked_at"]["parameters"] and f"looked at {result['looked_at']['text']}." in report
    assert "Alone they make up the whole difference" in report


@pytest.mark.whole
def test_a_set_that_makes_fewer_steps(flagged: Repo) -> None:
    """The result says that no more of them are compared, as that of a range does."""
    early = '[[change]]\nadd = ["--mode", "fast", "--bias=1e-3"]\n[[change]]\nadd = ["--steps", "4"]\n'
    (flagged.root / "flags.toml").write_text(early)
    result, progress = searched(flagged, "--flags", "flags.toml")
    assert (result["outcome"], len(result["chosen"])) == ("found", 1), progress
    assert "BAD all makes 4 of GOOD's 6 steps: no more are compared" in result["remarks"]


@pytest.mark.campaign
def test_sets_share_the_journal(flagged: Repo) -> None:
    """The same search again trains nothing."""
    (flagged.root / "flags.toml").write_text(SET)
    searched(flagged, "--flags", "flags.toml")
    done = flagged.repro("bisect", "--no-explain", "--flags", "flags.toml")
    assert done.returncode == 0
    assert done.stdout.startswith("3 changes of 4 move the numbers of toy")
    assert "0 probes, 0 trained steps" in done.stdout


@pytest.mark.campaign
def test_a_list_of_flags(flagged: Repo) -> None:
    """Changes with an order are a line, and the ordinary search names the one at which the numbers move."""
    (flagged.root / "flags.toml").write_text('order = "list"\n' + SET)
    result, progress = searched(flagged, "--flags", "flags.toml")
    assert (result["outcome"], result["culprit"]["commit"]) == ("found", "bias"), progress
    assert (result["what"], result["good"], result["bad"]) == ("change", "none", "bias")


@pytest.mark.campaign
def test_flags_that_move_nothing(flagged: Repo) -> None:
    """Where all changes together leave the numbers alone, the ends agree; CMD needs no case."""
    (flagged.root / "flags.toml").write_text('[[change]]\nadd = ["--quiet"]\n')
    result, _ = searched(flagged, "--flags", "flags.toml", "--", sys.executable, "train.py", "--steps", "1")
    assert result["outcome"] == "agree"
    assert result["reproduce"].endswith(f"-- {sys.executable} train.py --steps 1")


@pytest.mark.whole
def test_what_does_not_reach_the_program_is_no_agreement(flagged: Repo) -> None:
    """Words that another program got, and threads that the program sets itself, moved nothing: no word of it."""
    (flagged.root / "flags.toml").write_text('[[change]]\nadd = ["--bias=1.0", "--mode", "fast"]\n')
    case = flagged.root / "golden" / "cases" / "toy.toml"
    text = case.read_text()
    piped = re.sub(r'command = "(.*)"', r'shell = true\ncommand = "\1 | sh -c cat"', text)
    assert piped != text
    case.write_text(piped)
    done = flagged.repro("bisect", "--no-explain", "--flags", "flags.toml")
    assert done.returncode == 3
    assert "all: --bias=1.0 is not on the command line of the process that trains" in done.stderr
    case.write_text(text.replace('OLD = "1"', 'OMP_NUM_THREADS = "1"'))
    done = flagged.repro("bisect", "--layout", "threads=1..threads=2")
    assert done.returncode == 3
    assert "threads=2: torch.get_num_threads() is 1 in the program" in done.stderr


def launched_by(repo: Repo, script: str, more: str = "") -> None:
    """Have a script start the trainer, by the word PROGRAM."""
    case = repo.root / "golden" / "cases" / "toy.toml"
    (command,) = re.findall(r'^command = "(.*)"', case.read_text(), re.MULTILINE)
    lines = [line for line in case.read_text().splitlines() if not line.startswith(("save =", "resume ="))]
    case.write_text("\n".join(lines).replace(command, "bash run.sh") + f"\n{more}")
    (repo.root / "run.sh").write_text(script.replace("PROGRAM", f"{sys.executable} train.py"))
    repo.git("add", "run.sh", "train.py")
    repo.git("commit", "-qm", "launch")


@pytest.mark.whole
def test_a_change_that_a_script_drops_is_not_called_needless(flagged: Repo) -> None:
    """A word or a variable that the launch script loses is refused, though others move the numbers; so is a layout."""
    layouts = '[layouts.new]\nenv = { NEW = "1" }\n[layouts.bias]\ncommand = "bash run.sh --bias=2"\n'
    launched_by(flagged, "export NEW=0\nexec PROGRAM $MODE --bias=1.0\n", layouts)
    moves = '[[change]]\nname = "mode"\nenv = { MODE = "--mode fast" }\n'
    for lost, message in (
        ('add = ["--bias=2"]', "all: --bias=2 is not on the command line of the process that trains"),
        ('env = { NEW = "1" }', "all: NEW is what it is without the change in the process that trains"),
    ):
        (flagged.root / "flags.toml").write_text(f"{moves}[[change]]\n{lost}\n")
        done = flagged.repro("bisect", "--no-explain", "--flags", "flags.toml")
        assert (done.returncode, message in done.stderr) == (3, True), done.stderr
    for name, message in (("new", "new: NEW is what it is"), ("bias", "bias: --bias=2 is not on")):
        done = flagged.repro("bisect", "--layout", f"case..{name}")
        assert (done.returncode, message in done.stderr) == (3, True), done.stderr


@pytest.mark.whole
def test_a_change_that_comes_by_a_file_is_searched_for(flagged: Repo) -> None:
    """What a launch script writes into a file shows nowhere and moves the numbers: it is named, with a remark."""
    train = flagged.root / "train.py"
    read = "parse_args([*os.sys.argv[1:], *open('words').read().split()])"
    train.write_text(train.read_text().replace("parse_args()", read))
    launched_by(flagged, 'printf "%s" "$*" > words\nexec PROGRAM $MODE\n')
    mode = '[[change]]\nname = "mode"\nenv = { MODE = "--mode fast" }\n'
    (flagged.root / "flags.toml").write_text(f'{mode}[[change]]\nname = "bias"\nadd = ["--bias=1e-3"]\n')
    result, progress = searched(flagged, "--flags", "flags.toml")
    assert (result["outcome"], result["chosen"]) == ("found", ["mode", "bias"]), progress
    assert any("bias: --bias=1e-3 is not on the command line" in remark for remark in result["remarks"])


def test_a_report_has_a_name_that_a_disk_takes(flagged: Repo) -> None:
    """A change without a name is called by all its words; two such searches have two folders."""
    case, checkout = find_case(flagged.root, None), find_checkout(flagged.root)
    names = set()
    for last in "ab":
        words = ", ".join(f'"data.option_number_{k}=value_{k}"' for k in range(20))
        (flagged.root / "flags.toml").write_text(f'order = "list"\n[[change]]\nadd = [{words}, "{last}"]\n')
        names.add(report_folder(flags_axis(checkout, case, flagged.root / "flags.toml", at=None), case))
    assert len(names) == 2 and all(len(f"history-{name}") < 100 for name in names)


def test_a_report_of_another_command_is_another(tmp_path: Path) -> None:
    """Each command and each predicate that is given has a folder of its own; a case's own question has no mark."""
    bare, first, second = (CommandLine(words) for words in ((), ("sh", "t1.sh"), ("sh", "t2.sh")))
    marks = {asked(tmp_path, line, when) for line in (bare, first, second) for when in (None, "exit", "finite")}
    assert len(marks) == 9 and asked(tmp_path, bare) == "" and max(map(len, marks)) == 9
    assert asked(tmp_path, first) == asked(tmp_path, CommandLine(("sh", "t1.sh")))


@pytest.mark.parametrize("value", [0.9999999, 1234567.0, 0.05, 1e-7, 64.0, 1 / 3])
def test_a_number_is_said_again_to_the_last_digit(value: float) -> None:
    """What makes a search again asks for what was asked."""
    assert float(_word(value, None)) == value and not _word(value, None).endswith(".0")


# -- what is refused


def parsed(*arguments: str) -> dict[str, Any]:
    """What `repro bisect` understands."""
    return bisect.make_context("bisect", list(arguments)).params


def test_what_follows_the_dashes_is_the_command() -> None:
    """The first word after the dashes is never taken for a range, whether there is one or not."""
    request = parsed("--flags", "f", "--", "python", "x.py", "--", "y")
    assert (request["commits"], request["command"]) == (None, ("python", "x.py", "--", "y"))
    request = parsed("a..b", "--", "python", "--package")
    assert (request["commits"], request["command"], request["package"]) == ("a..b", ("python", "--package"), None)
    assert (parsed("a..b")["commits"], parsed("a..b")["command"]) == ("a..b", ())
    assert parsed("--layout", "case..x")["commits"] is None


@pytest.mark.parametrize(
    ("commits", "given", "options", "message"),
    [
        (None, {}, {}, "nothing to search: give one of GOOD..BAD, --package, --flags and --layout"),
        ("a..b", {"layout": "case..threads=2"}, {}, "GOOD..BAD and --layout exclude each other"),
        (None, {"package": "x==1..2", "flags": Path("f")}, {}, "--package and --flags exclude each other"),
        ("a..b", {"at": "HEAD"}, {}, "--at goes with --package or --flags or --layout, not with GOOD..BAD"),
        (None, {"layout": "case..threads=2", "index_url": "x"}, {}, "--index-url goes with --package"),
        (None, {"flags": Path("f"), "tolerance": 1.0}, {}, "--tolerance goes with --layout"),
        (None, {"flags": Path("f")}, {"paths": ("x",)}, "--path goes with GOOD..BAD"),
        (None, {"layout": "case..threads=2"}, {"first_parent": True}, "--first-parent goes with GOOD..BAD"),
        (None, {"package": "x==1"}, {}, "is no range of versions"),
        (None, {"flags": Path("missing.toml")}, {}, "no file missing.toml"),
        (None, {"layout": "case..threads=2", "at": "nowhere"}, {}, "git knows no commit 'nowhere'"),
        (None, {"layout": "case..threads=1"}, {}, "are one layout of toy"),
        (None, {"layout": "case"}, {}, "is no pair of layouts"),
        (None, {"layout": "case..tp4"}, {}, "'tp4' is no layout of toy: use case, tp2, odd, threads=N, ranks=N"),
        (None, {"layout": "case..threads=0"}, {}, "'threads=0' is no layout"),
        (None, {"layout": "case..threads=2,threads=3"}, {}, "says its threads twice"),
        (None, {"layout": "case..odd"}, {}, "config is not for kind command"),
    ],
)
def test_what_does_not_go_together(
    tmp_path: Path, commits: str | None, given: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    """One axis is asked for, with what belongs to it; anything else is refused in one line."""
    layouts = "\n[layouts.tp2]\nranks = 2\n[layouts.odd]\nconfig = { a = 1 }\n"
    repo = kit.start(tmp_path, case=kit.CASE + (layouts if "tp" in message or "odd" in str(given) else ""))
    with pytest.raises(ReproError) as refused:
        axis_of(find_checkout(repo.root), find_case(repo.root, None), commits, Options(**options), **given)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_history_goes_along_a_line(tmp_path: Path) -> None:
    """Where points must follow each other, a set of changes is refused and a list is not."""
    repo = kit.start(tmp_path)
    checkout, case = find_checkout(repo.root), find_case(repo.root, None)
    path = tmp_path / "flags.toml"
    path.write_text('[[change]]\nadd = ["--load", "x"]\n')
    assert isinstance(axis_of(checkout, case, None, Options(), flags=path), FlagSet)
    with pytest.raises(ReproError, match="a set, whose changes do not follow each other"):
        axis_of(checkout, case, None, Options(), flags=path, line=True)
    path.write_text('order = "list"\n' + path.read_text())
    assert axis_of(checkout, case, None, Options(), flags=path, line=True).what == "change"


@pytest.mark.campaign
def test_a_history_of_flags_and_layouts(flagged: Repo) -> None:
    """Along a list of changes, or one key of a layout after the other, each that changed the numbers is named."""
    checkout, case = find_checkout(flagged.root), find_case(flagged.root, None)
    path = flagged.root / "flags.toml"
    path.write_text('order = "list"\n' + SET)
    axis = axis_of(checkout, case, None, Options(), flags=path, line=True)
    history = history_of(checkout, roomy(axis, case), axis, lambda _: None, Options())
    assert [row.commit.commit for row in history.rows] == ["bias"]
    axis = axis_of(checkout, case, None, Options(), layout="threads=1..threads=2", line=True)
    with pytest.raises(NotVerifiableError, match=r"threads=2: torch.get_num_threads\(\) is 1 in the program"):
        history_of(checkout, roomy(axis, case), axis, lambda _: None, Options())


def test_a_shells_line_stays_as_it_is_written() -> None:
    """Of a launch in so many processes the number alone changes: what a shell reads in it is no word of ours."""
    line = 'cd . && MODE=fast torchrun --nproc_per_node  2 train.py $MODE "a b" --nproc-per-node 3'
    assert _launched(line, 4) == line.replace("node  2", "node  4")
    assert _launched("torchrun --nproc-per-node=gpu train.py", 4) == "torchrun --nproc-per-node=gpu train.py"


@pytest.mark.parametrize("between", ["=", " "])
def test_layouts_change_one_key_after_the_other(tmp_path: Path, between: str) -> None:
    """Between two layouts lie those with one key more of the second; a torchrun line follows the number of ranks."""
    torchrun = f"torchrun --nproc-per-node{between}2 train.py"
    text = kit.CASE + f'\n[layouts.many]\ncommand = "{torchrun}"\nranks = 2\ngpus = 1\nenv = {{ WAY = "x" }}\n'
    repo = kit.start(tmp_path, case=text)
    case = find_case(repo.root, None)
    axis = axis_of(find_checkout(repo.root), case, None, Options(), layout="case..many,threads=3,ranks=4")
    assert isinstance(axis, LayoutLine)
    assert [axis.good, *axis.keys] == ["case", "many", "many,threads=3", "many,threads=3,ranks=4"]
    assert list(axis.keys.values()) == [
        "table: case -> many",
        "threads: the layout's own -> 3",
        "ranks: the layout's own -> 4",
    ]
    made = [axis.case(point, case) for point in (axis.good, *axis.keys)]
    assert made[0].digest == case.digest
    assert [(c.resources.ranks, c.resources.cpus, c.resources.gpus) for c in made] == [
        (1, 1, 0), (2, 1, 1), (2, 3, 1), (4, 3, 1),
    ]  # fmt: skip
    assert [c.subject.command for c in made[1:]] == [torchrun, torchrun, torchrun.replace("2", "4")]  # type: ignore[union-attr]
    assert made[1].subject.env == {"WAY": "x"}
    assert (axis.roomy.resources.ranks, axis.roomy.resources.cpus, axis.roomy.resources.gpus) == (4, 3, 1)


def test_layouts_are_no_part_of_a_case() -> None:
    """A case with tables of layouts is the case without them; they are strict, and join what is below a key."""
    raw = {"case": {"name": "toy", "steps": 1, "rollouts": "r"}, "subject": {"config": {"a": {"b": 1, "c": 2}}}}
    plain = Case.model_validate(raw)
    case = Case.model_validate(raw | {"layouts": {"other": {"config": {"a": {"b": 3}}, "cpus": 2}}})
    assert (case.canonical(), case.digest) == (plain.canonical(), plain.digest)
    from repro_bisect.axes.sets import _Layout

    made = _Layout.parse("other", case).of(case)
    assert made.subject.config == {"a": {"b": 3, "c": 2}}  # type: ignore[union-attr]
    assert made.resources.cpus == 2

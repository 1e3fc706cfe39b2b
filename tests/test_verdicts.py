"""What is no verdict, in real runs: numbers that are not finite, replays that end early, sides that cannot be run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import history_kit as kit
import pytest
from conftest import Repo
from history_kit import edit, note
from test_ci_checks import column, metrics, violation
from test_layouts import CASE as LAYOUTS
from test_layouts import TRAIN as IN_LAYOUTS
from test_layouts import sides

from repro_golden.case.file import find_case
from repro_golden.repository.checkout import find_checkout
from repro_golden.trace.writer import digest_row, metric_row

pytestmark = pytest.mark.whole

TRAIN = kit.TRAIN.replace("    optimizer.zero_grad()\n", "    shown = loss.item()\n    optimizer.zero_grad()\n")
TRAIN = TRAIN.replace("loss={loss.item()!r}", "loss={shown!r}")
CASE = kit.CASE.partition("save =")[0] + 'path = "train.py"\ntimeout = "10m"\n'
SHOWN, SCALE, STEPS = "    shown = loss.item()\n", "    scale = 1.0\n", "range(first, options.steps)"
BOUNDS = '\n[compare]\nmode = "bounds"\n\n[compare.bounds.loss]\nrtol = 0.01\n'


def asked(repo: Repo, *arguments: str, code: int) -> tuple[dict[str, Any], str]:
    """What a command answers as JSON, and what it says."""
    done = repo.repro(*arguments, *(["--json"] if code != 2 else []))
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout) if done.stdout.startswith("{") else {}, done.stdout + done.stderr


def test_a_printed_number_that_is_not_finite(tmp_path: Path) -> None:
    """A loss that is only printed moves no bit: bounds are left, `finite` names it, two of them agree on nothing."""
    repo = kit.start(tmp_path, TRAIN, CASE + BOUNDS)
    good = repo.git("rev-parse", "HEAD")
    culprit = edit(repo, SHOWN, SHOWN + "    shown = shown if step == 0 else float('nan')\n", "Print NaN")
    pull, _ = asked(repo, "report", "pr", f"{good}..HEAD", code=1)
    (case,) = pull["results"]
    assert (case["verdict"], case["compared"]["violations"][0]["step"]) == ("moved", 1)
    result, _ = asked(repo, "bisect", f"{good}..HEAD", "--when", "finite", "--no-explain", code=0)
    assert result["culprit"]["commit"] == culprit
    repo.edit("golden/cases/toy.toml", BOUNDS, "")
    repo.commit("Judge bits")
    note(repo, "Work")
    for command in (
        ["bisect", f"{culprit}..HEAD"],
        ["history", f"{culprit}..HEAD"],
        ["report", "pr", f"{culprit}..HEAD"],
    ):
        _, text = asked(repo, *command, code=3)
        assert "values that are not finite agree on nothing: first loss of step 1" in text, command


def test_an_answer_is_of_as_many_steps_as_are_asked_for(tmp_path: Path) -> None:
    """A journal of longer runs answers a shorter question by as many steps, in each command."""
    repo = kit.start(tmp_path, TRAIN, CASE)
    good = repo.git("rev-parse", "HEAD")
    edit(repo, SCALE, "    scale = 1.0 + 0.5 * (step >= 4)\n", "Scale later")
    between = f"{good}..HEAD"
    result, _ = asked(repo, "bisect", between, "--no-explain", "-j", "1", code=0)
    assert (result["outcome"], result["divergence"]["step"]) == ("found", 4)
    repo.edit("golden/cases/toy.toml", "steps = 6", "steps = 3")
    pull, _ = asked(repo, "report", "pr", between, code=0)
    assert [(case["verdict"], case["compared"]["drift"]["steps"]) for case in pull["results"]] == [("identical", 3)]
    assert asked(repo, "history", between, code=0)[0]["agree"]
    assert asked(repo, "bisect", between, code=0)[0]["outcome"] == "agree"


def merged(repo: Repo, side: str) -> tuple[str, str]:
    """A commit of main that moves numbers, a side with another and then one that is as said, and their merge."""
    good = repo.git("rev-parse", "HEAD")
    edit(repo, "lr=0.01", "lr=0.02", "Learn faster")
    repo.git("checkout", "--quiet", "-b", "side", good)
    culprit = edit(repo, SCALE, "    scale = 1.5\n", "Scale")
    edit(repo, "import torch\n", f"import torch\n{side}\n", "Break")
    repo.git("checkout", "--quiet", "main")
    repo.git("merge", "--quiet", "--no-ff", "--no-commit", "side")
    repo.edit("train.py", f"{side}\n", "")
    repo.commit("Merge and repair")
    return good, culprit


@pytest.mark.parametrize(("side", "code"), [("raise SystemExit('broken')", 3), ("# fine", 0)])
def test_a_merge_is_not_named_for_a_side_that_cannot_be_run(tmp_path: Path, side: str, code: int) -> None:
    """Where the side's tip cannot be tested, the merge is a suspect; the side's commit is one too, or named."""
    repo = kit.start(tmp_path, TRAIN, CASE)
    good, culprit = merged(repo, side)
    result, text = asked(repo, "bisect", f"{good}..HEAD", "--all", "--no-explain", code=code)
    named = {entry["commit"]["commit"] for entry in result["culprits"]}
    assert repo.git("rev-parse", "HEAD") not in named
    assert culprit in ({*result["suspects"], *named} if code else named), text


def test_it_is_told_where_all_cannot_be_named(tmp_path: Path) -> None:
    """After a culprit that ends early nothing can be compared to the last step: that is said, and is no answer."""
    repo = kit.start(tmp_path, TRAIN, CASE)
    good = repo.git("rev-parse", "HEAD")
    repo.edit("train.py", STEPS, "range(first, 3)")
    culprit = edit(repo, SCALE, "    scale = 1.5\n", "Scale, and stop early")
    edit(repo, "range(first, 3)", STEPS, "Go on")
    edit(repo, "    scale = 1.5\n", "    scale = 1.5 + 0.5 * (step >= 4)\n", "Scale more")
    result, text = asked(repo, "bisect", f"{good}..HEAD", "--all", "--no-explain", code=0)
    assert [entry["commit"]["commit"] for entry in result["culprits"]] == [culprit], text
    assert f"whether commits after {culprit[:10]} move the numbers is not known" in text


def test_a_program_that_fails_after_its_steps(tmp_path: Path) -> None:
    """Layouts and changelogs do not call it equal to one that ends well."""
    fails = "if os.environ.get('FAIL'):\n    raise SystemExit(1)\n"
    repo = kit.start(tmp_path, TRAIN + fails, CASE + "\n[layouts.fails]\nenv = { FAIL = '1' }\n")
    _, text = asked(repo, "bisect", "--layout", "case..fails", code=3)
    assert "fails: its program failed (exit code 1) after 6 steps" in text
    good = repo.git("rev-parse", "HEAD")
    edit(repo, "if os.environ.get('FAIL'):\n", "if True:\n", "Fail at the end")
    _, text = asked(repo, "history", f"{good}..HEAD", code=3)
    assert "its program failed (exit code 1) after 6 steps" in text


def test_a_metric_that_is_told_later_has_its_bound(tmp_path: Path) -> None:
    """A search by a metric that no first step tells is one."""
    told = "    if step in (2, 5):\n        print(f'step {step} accuracy={scale!r}')\n"
    repo = kit.start(tmp_path, TRAIN.replace("    if step + 1 ==", f"{told}    if step + 1 =="), CASE)
    good = repo.git("rev-parse", "HEAD")
    culprit = edit(repo, SCALE, "    scale = 1.0 + 0.5 * (step >= 4)\n", "Scale later")
    note(repo, "Work")
    result, _ = asked(repo, "bisect", f"{good}..HEAD", "--when", "metric:accuracy rtol=0.1", "--no-explain", code=0)
    assert (result["culprit"]["commit"], result["divergence"]["step"]) == (culprit, 5)


def third(calls: Path, wanted: str, count: int) -> str:
    """Steps as wanted in the first so many runs, and one in those after."""
    calls_made = f"(open({str(calls)!r}, 'a').write('x'), os.stat({str(calls)!r}).st_size)[1]"
    return f"range({wanted} if {calls_made} <= {count} else 1)"


def test_a_third_replay_that_ends_early_measures_nothing(tmp_path: Path) -> None:
    """Where the replays that are to measure a difference make fewer steps than it needs, the layouts are not equal."""
    repo = kit.start(tmp_path, IN_LAYOUTS.replace("range(2)", third(tmp_path / "calls", "2", 4)), LAYOUTS)
    comparison, report = sides(repo, "case..scaled", "-j", "1", code=3)
    assert (comparison["outcome"], comparison["comparison"], sorted(comparison["flaky"])) == (
        "flaky",
        None,
        ["case", "scaled"],
    )
    assert "a third replay of it ends after 1 steps" in report


def test_a_confirmation_that_ends_early_is_no_contradiction(tmp_path: Path) -> None:
    """That the numbers moved and came back is not said of replays that were shorter."""
    steps = third(tmp_path / "calls", "options.steps", 3)
    repo = kit.start(tmp_path, TRAIN.replace(STEPS, steps), CASE)
    good = repo.git("rev-parse", "HEAD")
    edit(repo, SCALE, "    scale = 1.0 + 0.5 * (step >= 2)\n", "Scale later")
    _, text = asked(repo, "bisect", f"{good}..HEAD", "--no-explain", "-j", "1", code=3)
    assert "came back" not in text and "steps: give both the same to do" in text


TWO = """\
import torch
import helper
torch.manual_seed(3)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(2):
    h = model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step)))
    shown = (h * 3.0).mean()
    u = torch.tanh(h)
    v = torch.sigmoid(h)
    h = (u * v) * 2
    loss = helper.scaled(h).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
HELPER = "SCALE = 2.0\n\n\ndef scaled(x):\n    return x * SCALE\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(u * v) * 2", "(u * v) + (u * v)"),
        ("(h * 3.0)", "(h * 4.0)"),
        ("    u = torch.tanh(h)\n    v = torch.sigmoid(h)\n", "    v = torch.sigmoid(h)\n    u = torch.tanh(h)\n"),
    ],
)
def test_a_change_beside_the_culprit_is_not_the_cause(tmp_path: Path, old: str, new: str) -> None:
    """Another way to the same bits, a number that nothing reads, another order: the constant moved the numbers."""
    repo = kit.start(tmp_path, TWO, CASE)
    (repo.root / "helper.py").write_text(HELPER)
    good = repo.commit("Help")
    repo.edit("train.py", old, new)
    repo.edit("helper.py", "SCALE = 2.0", "SCALE = 2.5")
    repo.commit("Scale")
    done = repo.repro("explain", f"{good}..HEAD", "--path", ".", "--", "{python}", "train.py")
    assert done.returncode == 0, done.stderr
    assert "helper.py:5" in done.stdout and "2.5" in done.stdout, done.stdout


IN_TURN = """\
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
critic, actor = torch.nn.Linear(3, 1), torch.nn.Linear(4, 4)
second, first = torch.optim.SGD(critic.parameters(), lr=0.1), torch.optim.SGD(actor.parameters(), lr=0.1)
for step in range(2):
    second.zero_grad()
    critic(torch.randn(2, 3)).square().mean().backward()
    second.step()
    first.zero_grad()
    scaled = actor(torch.randn(2, 4)) * 1.0
    scaled.square().mean().backward()
    first.step()
"""


@pytest.mark.parametrize("turned", [False, True])
def test_all_steps_of_a_round_are_explained(tmp_path: Path, turned: bool) -> None:
    """Two optimizers step in turn, and stand in the trace in the order of their names: either may hold the cause."""
    train = IN_TURN.replace("(3, 1)", "(5, 5)").replace("(2, 3)", "(2, 5)") if turned else IN_TURN
    repo = kit.start(tmp_path, train, None)
    good = repo.git("rev-parse", "HEAD")
    repo.edit("train.py", "* 1.0", "* 1.5")
    culprit = repo.commit("Scale")
    done = repo.repro("bisect", f"{good}..HEAD", "--", sys.executable, "train.py")
    assert done.returncode == 0 and f"commit {culprit}" in done.stdout, done.stderr
    assert "train.py:11" in done.stdout and "(T0, 1.5)" in done.stdout, done.stdout


def test_no_explanation_calls_nan_an_agreement(tmp_path: Path) -> None:
    """Two versions that are NaN agree on nothing; one that fails after its steps is told."""
    repo = kit.start(tmp_path, TRAIN.replace(SCALE, "    scale = float('nan')\n"), CASE)
    good = repo.git("rev-parse", "HEAD")
    edit(repo, "pow(2)", "pow(4)", "Other NaN")
    _, text = asked(repo, "explain", f"{good}..HEAD", code=3)
    assert "values that are not finite agree on nothing" in text
    edit(repo, "    scale = float('nan')\n", SCALE, "Repair")
    good = repo.git("rev-parse", "HEAD")
    edit(repo, "import torch\n", "import torch\nimport atexit\n", "Work")
    (repo.root / "train.py").write_text((repo.root / "train.py").read_text() + "raise SystemExit(5)\n")
    repo.commit("Fail at the end")
    _, text = asked(repo, "explain", f"{good}..HEAD", code=0)
    assert "its program failed (exit code 5)" in text


def test_a_set_is_minimal_from_step_0_on(tmp_path: Path) -> None:
    """What moves the numbers before the step at which probes began is found where less would do."""
    flags = "".join(f'parser.add_argument("--{name}", action="store_true")\n' for name in ("double", "halve"))
    train = kit.TRAIN.replace('parser.add_argument("--save")\n', f'parser.add_argument("--save")\n{flags}')
    weights = "with torch.no_grad():\n    model.weight *= (2 if options.double else 1) / (2 if options.halve else 1)\n"
    train = train.replace("first, hidden = 0, 0.0\n", f"first, hidden = 0, 0.0\n{weights}")
    train = train.replace(SCALE, "    scale = 3.0 if options.double and options.halve and step >= 3 else 1.0\n")
    repo = kit.start(tmp_path, train, kit.CASE)
    changes = "".join(f'[[change]]\nname = "{name}"\nadd = ["--{name}"]\n' for name in ("double", "halve"))
    (repo.root / "flags.toml").write_text(changes)
    result, text = asked(repo, "bisect", "--flags", "flags.toml", "--no-explain", code=0)
    assert len(result["chosen"]) == 1, text


def test_a_check_of_a_ci_sees_each_telling() -> None:
    """A norm that was told twice has both; a generator and a file are no weights."""
    good = metrics()
    first = [metric_row("loss", "train/grad_norm#1", 1.0)]
    wrong = [metric_row("loss", "train/grad_norm#1", 10.0)]
    assert violation("ci:grad_norm", good + first, good + first) is None
    assert "grad_norm#1" in (violation("ci:grad_norm", good + first, good + wrong) or "")
    weight, other = column("w", 1.0, phase="update"), column("w", 2.0, phase="update")
    rng, moved = column("rng/torch", 1.0, phase="update"), column("rng/torch", 2.0, phase="update")
    assert violation("ci:model_hash", [weight, rng], [weight, moved]) is None
    assert violation("ci:model_hash", [weight, rng], [other, rng]) is not None
    file = digest_row("update", "saved/config.json", bytes(32))
    assert violation("ci:miles", [*good, weight, file], [*good, other, file]) is None


def test_a_golden_run_is_that_of_its_pointer(recorded: Repo) -> None:
    """Content that is not what the pointer names, as of an older one, is not compared with."""
    (record,) = recorded.root.glob("golden/runs/*/*/run.json")
    record.write_text(record.read_text() + " ")
    done = recorded.repro("golden", "verify", record.parent.name)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"differs from {record.parent.name}.dvc" in done.stderr


def test_what_is_written_beside_code_is_no_change_of_it(tmp_path: Path) -> None:
    """The key of the code that a run is of stays; another line is another one, committed or not."""
    repo = kit.start(tmp_path, TRAIN, CASE.replace('path = "train.py"', 'path = "."'))
    checkout, case = find_checkout(repo.root), find_case(repo.root, "toy")
    tree = checkout.ran(case).tree
    assert tree and checkout.place(case).commit is not None
    (repo.root / "written.log").write_text("a line\n")
    assert checkout.place(case).commit is None and checkout.ran(case).tree == tree
    repo.edit("train.py", SCALE, "    scale = 2.0\n")
    other = checkout.ran(case).tree
    assert other and other != tree
    repo.git("commit", "--quiet", "-am", "Scale")
    assert checkout.ran(case).tree == other

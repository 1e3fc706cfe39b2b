"""`repro report nightly`: the baseline a night has, what the checks say, exit codes, reports, and real nights."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import history_kit as kit
import pytest
import warm_kit
from conftest import Repo, environment
from nightly_kit import approve, nightly_run

from repro.nightly.checks import events_check, layout_checks, layout_text
from repro.nightly.lineage import lineage
from repro.nightly.nightly import Asked, exit_code, nightly_run_of, overall
from repro.nightly.records import Baseline, Check, NightlyRun, NightlyRuns, Status
from repro_bisect.axes.layouts import LayoutComparison, Parting
from repro_bisect.driver.session import Options
from repro_golden.base.errors import ReproError
from repro_golden.case.file import Bound, Case, find_case, read_case
from repro_golden.repository.checkout import find_checkout

SCALE = "scale = 1.0\n"
OBSERVE = "\n[observe]\nmetrics = ['loss=(?P<loss>\\S+)']\n"
MIXED = """\
scale = 1.0
    if os.environ.get("NOISE"):
        scale = 1.0 + int.from_bytes(os.urandom(2)) * 1e-6
    if os.environ.get("NAN") and step == 3:
        scale = float("nan")
"""
LAYOUTS = """
[layouts.scaled]
env = { SCALE = "1.001" }

[layouts.same]
env = { OTHER = "1" }

[layouts.noisy]
env = { NOISE = "1" }
"""


def read(folder: Path, more: str) -> Case:
    """A case with more tables."""
    path = folder / "toy.toml"
    path.write_text(kit.CASE + OBSERVE + LAYOUTS + more)
    return read_case(path)


# -- the table


def test_the_table_is_no_part_of_the_case(tmp_path: Path) -> None:
    """It says what a night asks; the case's key, and with it golden runs and journals, stay what they are."""
    plain = read(tmp_path, "")
    assert (plain.nightly.history, plain.nightly.least, plain.nightly.mads, plain.nightly.tolerance) == (14, 5, 6, 64)
    full = read(
        tmp_path, '[nightly]\nthreads = [2]\nbatches = ["scaled"]\nlayouts = ["same", "ranks=2", "threads=3,same"]'
    )
    assert full.nightly.threads == (2,) and full.nightly.layouts == ("same", "ranks=2", "threads=3,same")
    assert (full.digest, full.canonical()) == (plain.digest, plain.canonical())
    assert Case.model_validate(full.model_dump()).nightly == full.nightly


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ('layouts = ["smae"]', "'smae' is no [layouts.NAME] table (there is: scaled, same, noisy), or write threads=N"),
        ('layouts = ["tp=2"]', "'tp=2' is no [layouts.NAME]"),
        ('layouts = ["same,ranks=0"]', "'ranks=0' is no [layouts.NAME]"),
        ('batches = ["threads=2"]', "'threads=2' is no [layouts.NAME] table (there is: scaled, same, noisy)"),
        ("threads = [0]", "nightly.threads.0: Input should be greater than or equal to 1"),
        ("thread = [2]", "unknown key nightly.thread: did you mean threads?"),
        ("least = 20", "least = 20 nights of history = 14 never come"),
        ("mads = nan", "nightly.mads"),
    ],
)
def test_a_name_that_is_no_layout_is_refused(tmp_path: Path, table: str, why: str) -> None:
    """When the case is read, in one line that says what there is."""
    with pytest.raises(ReproError, match=re.escape(why)) as caught:
        read(tmp_path, f"[nightly]\n{table}")
    assert "\n" not in str(caught.value)


# -- statuses


def checks(**statuses: Status) -> list[Check]:
    return [Check(name.replace("_", "-"), status, "") for name, status in statuses.items()]


@pytest.mark.parametrize(
    ("results", "status"),
    [
        (checks(run_to_run="green", baseline="green", metrics="green"), "green"),
        (checks(run_to_run="green", baseline="green", metrics="not judged"), "green"),
        (checks(run_to_run="green", baseline="not judged", metrics="green"), "not judged"),
        (checks(run_to_run="green"), "not judged"),
        (checks(), "not judged"),
        (checks(run_to_run="flaky", baseline="not judged"), "flaky"),
        (checks(run_to_run="green", baseline="green", metrics="changed"), "changed"),
        (checks(run_to_run="green", baseline="green", batch="not judged"), "not judged"),
        (checks(run_to_run="green", baseline="not judged", metrics="error"), "error"),
        (checks(run_to_run="error"), "error"),
    ],
)
def test_a_night_is_as_bad_as_its_worst_check(results: list[Check], status: Status) -> None:
    """Only metrics that are too young taint nothing; without a judged baseline nothing is green."""
    assert overall(results) == status


@pytest.mark.parametrize(
    ("runs", "code"),
    [
        ([checks(baseline="green")], 0),
        ([checks(baseline="green"), checks(run_to_run="flaky")], 3),
        ([checks(baseline="not judged")], 3),
        ([checks(run_to_run="error"), checks(run_to_run="flaky")], 2),
        ([checks(run_to_run="error"), checks(baseline="changed")], 1),
        ([checks(baseline="changed", batch="error")], 1),
        ([checks(baseline="green", metrics="error"), checks(run_to_run="error")], 1),
        ([], 3),
    ],
)
def test_exit_codes(runs: list[list[Check]], code: int) -> None:
    """1 for changes and values that are no numbers, else 2 for errors, else 3 for what is no pass, else 0."""
    assert exit_code([nightly_run(checks=results, status=overall(results)) for results in runs]) == code


# -- events and layouts


def test_a_baseline_of_events() -> None:
    """Values are compared as float32, as event files hold them; no metric in common is an error that names both."""
    third = struct.unpack("<f", struct.pack("<f", 1 / 3))[0]
    ours = {0: {"loss": 1 / 3}, 1: {"loss": 0.5, "kl": 1e300}}
    assert events_check(ours, {0: {"loss": third}, 1: {"kl": math.inf}}, {}).status == "changed", "not finite"
    assert events_check(ours, {0: {"loss": third}}, {}).status == "green"
    assert events_check(ours, {0: {"loss": third + 1e-7}}, {}).status == "changed"
    assert events_check(ours, {0: {"loss": third + 1e-7}}, {"loss": Bound(atol=1e-6)}).status == "green"
    assert events_check(ours, {0: {"loss": math.nan}}, {"loss": Bound(atol=9)}).status == "changed"
    two = events_check({0: {"kl": 1.0, "loss": 2.0}}, {0: {"kl": 1.5, "loss": 2.5}}, {})
    assert two.text == "kl at step 0: 1.5 became 1.0, and 1 more values"
    alone = events_check(ours, {0: {"reward": 1.0}}, {})
    assert alone.status == "error" and "the baseline has reward; the case has kl, loss" in alone.text
    late = events_check(ours, {7: {"loss": 1.0}}, {})
    assert late.status == "error" and "the case has steps 0 to 1, with --offset 0: try another" in late.text
    assert "\n" not in alone.text + late.text


def test_what_a_layout_check_says() -> None:
    """Equal bits, within how many units, or where it parts."""
    parting = Parting(1, "grad", "w", "float32 [3]", 2.5, "whole", "")
    equal = LayoutComparison(2, 64.0, 7, 7, None, None, None, {}, {}, {"a": [], "b": []})
    assert layout_text(equal) == "equal bits in 7 signals of 2 steps"
    agree = replace(equal, equal=6, first=parting, worst=parting, unmeasured_at={0: 1})
    assert layout_text(agree).startswith("both agree within 2.5 eps (64 allowed), first at step 1, grad, w")
    assert layout_text(agree).endswith("; 1 difference could not be measured")
    assert layout_text(replace(agree, parted=parting)).startswith("parts from the case at step 1")


def test_layouts_that_cost_no_replay(tmp_path: Path) -> None:
    """The case's own layout is no other one: an error in one line. After a flaky case nothing is judged."""
    table = '[nightly]\nthreads = [1]\nbatches = ["same"]\n'
    repo = kit.start(tmp_path, case=kit.CASE + LAYOUTS + table)
    checkout, case = find_checkout(repo.root), find_case(repo.root, None)
    spared = layout_checks(checkout, case, "HEAD", lambda _: None, Options(), spared="it is flaky")
    assert spared == [Check("threads=1", "not judged", "it is flaky"), Check("batch same", "not judged", "it is flaky")]
    alone = case.model_copy(update={"nightly": case.nightly.model_copy(update={"batches": ()})})
    (check,) = layout_checks(checkout, alone, "HEAD", lambda _: None, Options())
    assert (check.name, check.status) == ("threads=1", "error") and "are one layout of toy" in check.text


# -- what approves nothing


def test_a_pointer_to_other_content_approves_nothing_and_bars_nobody(tmp_path: Path) -> None:
    """One machine's bad pointer, new or in a good one's place, leaves all others what was approved before."""
    repo = kit.start(tmp_path)
    checkout, bad = find_checkout(repo.root), "outs:\n- md5: {:032}\n  hash: md5\nmeta:\n  content: {:032}\n"
    past = lineage(checkout, "toy", alone := approve(repo, "m0", text=bad.format(1, 0)))
    assert (past.approved, past.void) == ("", alone)
    approved = approve(repo, "m1")
    for number, machine in enumerate(("m2", "m1", "m1"), 2):
        void = approve(repo, machine, text=bad.format(number, 0))
        past = lineage(checkout, "toy", kit.note(repo, "later"))
        assert (past.approved, past.void) == (approved, void) and approved in past.since
    good = approve(repo, "m1", text="outs: [new]\n")
    assert lineage(checkout, "toy", good).approved == good


# -- reports

EVIL = "<script>alert(1)</script> | `x` **b** @you \x1b[31m\n# h"


def evil() -> NightlyRun:
    """A changed night with a culprit, whose texts are somebody else's."""
    culprit = {
        "commit": {"commit": "e" * 40, "subject": EVIL, "author": EVIL, "date": "2026-11-22T00:00:00Z"},
        "divergence": {"step": 3, "phase": "loss", "signal": EVIL, "detail": "1.0 became 2.0"},
        "explanation": {"text": EVIL},
        "unexplained": "",
        "environment": [],
        "comparison": None,
    }
    return nightly_run(
        status="changed",
        commit={"commit": "a" * 40, "author": EVIL, "date": "", "subject": EVIL, "parents": [], "diffstat": ""},
        checks=[Check("run-to-run", "green", "equal"), Check("baseline", "changed", f"differs: {EVIL}")],
        culprits=[culprit],
        bisect={"range": "a..b", "outcome": "found", "why": "", "reproduce": "repro bisect a..b --case t --all"},
    )


def test_reports_escape_what_is_not_theirs(tmp_path: Path) -> None:
    """A subject stays text in every medium: no markup, no mention, no escape sequence, no broken table."""
    from repro.nightly.report import nightly_text, write_report

    paths = write_report([evil()], [Path("golden/nights/x.json")], tmp_path, "repro report nightly")
    text, page = (path.read_text() for path in paths)
    assert (
        "<script>" not in page
        and "&lt;script&gt;" in page
        and "<script>" not in re.sub(r"```.*?```", "", text, flags=re.S)
    )
    assert "@you" not in re.sub(r"```.*?```", "", text, flags=re.S)
    for shown in (text, page, nightly_text([evil()], [Path("x")])):
        assert "\x1b" not in shown and "step 3, phase loss" in shown and "eeeeeeeeee" in shown
        assert "repro golden approve t" in shown and "\n# h" not in shown
    assert text.startswith("# 🔴 1 case: 1 changed\n")
    assert len({line.count("|") for line in text.splitlines() if line.startswith("| 🔴 changed | b")}) == 1
    assert text.count("repro report nightly") == 2 and "repro bisect a..b --case t --all" in text


def test_flaky_has_a_colour_of_its_own_and_every_colour_a_word(tmp_path: Path) -> None:
    """In text, Markdown and HTML all five statuses look unlike each other, and each says its word."""
    from repro.nightly.report import COLOURS, MARKS, nightly_text, write_report

    assert len(set(COLOURS.values())) == len(set(MARKS.values())) == 5
    assert (COLOURS["flaky"], MARKS["flaky"]) == ("magenta", "🟣")
    runs = [nightly_run(case=f"c{k}", status=s, checks=[Check("x", s, "y")]) for k, s in enumerate(COLOURS)]
    files = [Path("f")] * 5
    text, page = (path.read_text() for path in write_report(runs, files, tmp_path, "again"))
    plain, shown = (nightly_text(runs, files, colour=colour) for colour in (False, True))
    assert "\x1b" not in plain and "\x1b[35mflaky" in shown and "5 cases: 1 error, 1 changed, 1 flaky" in plain
    for status, mark in MARKS.items():
        assert f"| {mark} {status} |" in text and f'<span class="status {status.replace(" ", "-")}">{status}<' in page
        assert f"{status}" in plain and page.count(f".status.{status.replace(' ', '-')} {{") == 1


def test_notes_in_githubs_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one for each case that is not green, on GitHub's runners alone; a flaky one is a warning."""
    from repro.nightly.report import annotate

    runs = [nightly_run(), evil(), nightly_run(status="flaky", checks=[Check("run-to-run", "flaky", "differ")])]
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    annotate(runs)
    assert "".join(capsys.readouterr()) == ""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    annotate(runs)
    lines = "".join(capsys.readouterr()).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["::error", "::warning"]
    assert "run-to-run: differ" in lines[1]


# -- the command


def ask(repo: Repo, *arguments: str, code: int = 0, **variables: str) -> tuple[dict[str, Any], str]:
    """JSON and progress of `repro report nightly`."""
    command = [sys.executable, "-m", "repro", "report", "nightly", *arguments, "--json"]
    done = warm_kit.run(command, repo.root, environment() | variables, 500)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout), done.stderr


def by_name(run: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Status and text of each check of a night."""
    return {check["name"]: (check["status"], check["text"]) for check in run["checks"]}


def test_what_is_refused_before_anything_is_replayed(tmp_path: Path) -> None:
    """Unknown cases and commits, damaged results, and options that do not fit, each in one line."""
    repo = kit.start(tmp_path)
    bad = repo.root / "golden/nights/m/toy/x.json"
    for arguments, why in (
        (["to?", "nix*"], "no case 'nix*'"),
        (["--at", "nowhere"], "git knows no commit 'nowhere'"),
        (["--last", "2"], "--last 2 never reaches the 5 nights that toy asks for"),
        (["--baseline", str(tmp_path)], "holds no TensorBoard event file"),
        (["--offset", "1"], "give them with --baseline"),
        ([], "is damaged"),
    ):
        if not arguments:
            bad.parent.mkdir(parents=True)
            bad.write_text('{"format": 1}')
        data, progress = ask(repo, *arguments, code=2)
        assert why in data["error"] and "\n" not in data["error"]
        assert "replaying" not in progress


def test_a_case_that_was_lost_is_not_judged(tmp_path: Path) -> None:
    """Its golden run, a pointer or in git itself, asks for it: its night is no pass. A torn file ends no other."""
    repo = kit.start(tmp_path, case=None)
    approve(repo, "elsewhere", case="lost")
    approve(repo, "elsewhere", case="lost~1a2b3c4d")
    folder = repo.root / "golden/runs/elsewhere/too"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    repo.commit("One that git keeps itself")
    data, progress = ask(repo, code=3)
    runs = NightlyRuns(repo.root / "golden/nights").read()
    assert [(run.case, run.status) for run in runs] == [("lost", "not judged"), ("too", "not judged")]
    assert [run["case"] for run in data["nights"]] == ["lost", "too"] and "replaying" not in progress
    why = "it has a golden run, and no case: bring golden/cases/lost.toml back"
    assert runs[0].checks == [Check("baseline", "not judged", why)]
    assert why in Path(data["reports"][0]).read_text() and len(data["files"]) == 2
    assert [run["case"] for run in ask(repo, "l*", code=3)[0]["nights"]] == ["lost"]
    assert "no case 'nix'" in ask(repo, "nix", code=2)[0]["error"]
    done = repo.repro("golden", "verify", "--all", "--json")
    assert done.returncode == 3 and list(json.loads(done.stdout)) == ["lost", "too"]
    done = repo.repro("report", "pr", "HEAD~..HEAD", "--json")
    assert done.returncode == 3 and {r["verdict"] for r in json.loads(done.stdout)["results"]} == {"unverifiable"}
    (repo.root / "golden/cases").mkdir()
    (repo.root / "golden/cases/torn.toml").write_text('[case]\nname = "torn"\nsteps = "x"\n')
    runs = ask(repo, code=2)[0]["nights"]
    assert [run["status"] for run in runs] == ["not judged", "not judged", "error"]
    assert "torn.toml: case.steps: Input should be" in by_name(runs[2])["baseline"][1]
    done = repo.repro("report", "publish", "--out", str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr


@pytest.mark.whole
def test_nights_that_fail_are_written_and_the_others_go_on(tmp_path: Path) -> None:
    """Of four cases one crashes, one is flaky, one has NaN, one is well: each has its file, its word and its reason."""
    repo = kit.start(tmp_path, kit.TRAIN.replace(SCALE, MIXED), None)
    cases = repo.root / "golden" / "cases"
    cases.mkdir(parents=True)
    broken = "check = \"{python} -c 'raise SystemExit(3)'\"\nenv = {}"
    tables = {"broken": broken, "zzz": broken} | {
        name: f'env = {{ {variable} = "1" }}' for name, variable in (("flaky", "NOISE"), ("nan", "NAN"), ("well", "X"))
    }
    for name, table in tables.items():
        text = (
            kit.CASE.replace('"toy"', f'"{name}"').replace("steps = 6", "steps = 4").replace("--steps 6", "--steps 4")
        )
        (cases / f"{name}.toml").write_text(f"{text}{table}\n{OBSERVE}")
    for name in ("broken", "flaky", "nan", "well"):
        approve(repo, "elsewhere", case=name)
    data, progress = ask(repo, "[bfn]*", "well", code=1, GITHUB_ACTIONS="true")
    runs = {run["case"]: run for run in data["nights"]}
    assert {name: run["status"] for name, run in runs.items()} == {
        "broken": "error", "flaky": "flaky", "nan": "error", "well": "green",
    }  # fmt: skip
    status, text = by_name(runs["broken"])["run-to-run"]
    assert status == "error" and "exited with 3" in text and "\n" not in text and runs["broken"]["metrics"] == {}
    assert by_name(runs["flaky"])["run-to-run"][1].startswith("two replays differ at step 0, ")
    assert by_name(runs["flaky"])["baseline"] == ("not judged", "the case does not reproduce itself tonight")
    assert by_name(runs["nan"])["metrics"] == ("error", "not finite: loss at step 3")
    assert by_name(runs["well"])["run-to-run"][1] == "two replays agree bit for bit over 4 steps"
    assert runs["well"]["baseline"]["kind"] == "approved" and runs["well"]["bisect"] is None
    assert progress.count("::error title=") == 2 and progress.count("::warning title=") == 1
    # what is kept is what was said, and nothing else was touched
    kept = NightlyRuns(repo.root / "golden" / "nights").read()
    assert sorted(run.case for run in kept) == sorted(runs) and len(data["files"]) == 4
    assert {str(Path(p).relative_to(repo.root).parts[:2]) for p in data["files"]} == {"('golden', 'nights')"}
    assert repo.git("status", "--porcelain").splitlines() == ["?? golden/nights/"]
    assert all(Path(path).exists() for path in data["reports"]) and len(data["reports"]) == 2
    assert data["reproduce"] == f"repro report nightly '[bfn]*' well --at {repo.git('rev-parse', 'HEAD')[:10]}"


@pytest.mark.whole
def test_a_change_is_bisected_and_named(tmp_path: Path) -> None:
    """A cold start is no pass; a green night of another machine makes a baseline, and who changed it is named."""
    short = re.sub(r"(save|resume) = .*\n", "", kit.CASE.replace("steps = 6", "steps = 3"))
    repo = kit.start(tmp_path, case=short + OBSERVE)
    checkout, case = find_checkout(repo.root), find_case(repo.root, None)
    lines: list[str] = []

    def judged(*runs: NightlyRun) -> NightlyRun:
        asked = Asked("again", "1", jobs=1)
        commit = repo.git("rev-parse", "HEAD")
        tonight = nightly_run_of(checkout, case, commit, runs, lambda event: lines.append(event.text), asked)
        json.dumps(tonight.to_mapping(), allow_nan=False)
        return tonight

    first = judged()
    assert (first.status, exit_code([first])) == ("not judged", 3)
    assert [check.status for check in first.checks] == ["green", "not judged", "not judged"]
    assert first.spent is not None and first.steps == 3 and first.metrics["loss"].high >= first.metrics["loss"].last
    elsewhere = replace(first, machine="another", status="green", chain="x", identity={"host": {"cpu": "y"}})
    culprit = kit.edit(repo, SCALE, "scale = 1.0 + 1e-6 * (step > 1)\n", "Scale | later")
    (repo.root / "train.py").write_text("broken in the working tree, which is not what is judged")
    changed = judged(first, elsewhere)
    assert (changed.status, exit_code([changed])) == ("changed", 1)
    assert changed.baseline == Baseline("last green", str(first.commit["commit"]), first.chain)
    assert [c["commit"]["commit"] for c in changed.culprits] == [culprit]
    (named,) = changed.culprits
    assert named["divergence"]["step"] == 2 and (named["explanation"] or named["unexplained"])
    assert changed.bisect is not None and changed.bisect["outcome"] == "found" and changed.bisect["why"] == ""
    assert changed.compared is not None and changed.compared["verdict"] == "moved"
    assert any("bisecting" in text for text in lines)


@pytest.mark.campaign
def test_other_threads_batches_and_layouts(tmp_path: Path) -> None:
    """Each that the case names is a check: equal is green, another loss changed, noise flaky, its own an error."""
    train = kit.TRAIN.replace("scale = 1.0", 'scale = float(os.environ.get("SCALE", "1"))').replace(
        "torch.manual_seed(3)", 'torch.manual_seed(int.from_bytes(os.urandom(4)) if os.environ.get("NOISE") else 3)'
    )
    train = train.replace("torch.set_num_threads(1)\n", "")  # or another number of threads says nothing
    table = '[nightly]\nthreads = [2, 1]\nbatches = ["scaled", "same"]\nlayouts = ["noisy"]\n'
    repo = kit.start(tmp_path, train, kit.CASE + OBSERVE + LAYOUTS + table)
    approve(repo, "elsewhere")
    data, _ = ask(repo, code=1)
    statuses = {name: check[0] for name, check in by_name(data["nights"][0]).items()}
    assert statuses == {
        "run-to-run": "green", "baseline": "green", "metrics": "not judged", "threads=2": "green",
        "threads=1": "error", "batch scaled": "changed", "batch same": "green", "layout noisy": "flaky",
    }  # fmt: skip
    assert data["nights"][0]["culprits"] == []


@pytest.mark.campaign
def test_a_golden_run_and_two_weeks_of_nights(tmp_path: Path) -> None:
    """With a recorded golden run nights are green, metrics are judged once there are enough, and --at looks back."""
    repo = kit.start(tmp_path, case=kit.CASE + OBSERVE + "\n[nightly]\nleast = 2\n")
    done = repo.repro("init", "--remote", str(tmp_path / "remote"))
    assert done.returncode == 0, done.stderr
    done = repo.repro("golden", "record", "toy")
    assert done.returncode == 0, done.stdout + done.stderr
    good = repo.commit("Record")
    for k in range(3):
        data, _ = ask(repo, "--tensorboard", str(tmp_path / "tb"))
        tonight = data["nights"][0]
        assert (tonight["status"], tonight["baseline"]["kind"]) == ("green", "golden")
        assert tonight["looked_at"]["parameters"] and tonight["looked_at"]["metrics"]
        assert f"looked at {tonight['looked_at']['text']}." in Path(data["reports"][0]).read_text()
        assert by_name(tonight)["metrics"][0] == ("not judged" if k < 2 else "green")
    data, _ = ask(repo, "--baseline", str(tmp_path / "tb"), code=2)
    assert by_name(data["nights"][0])["events"][0] == "error", "those are nights, not steps"
    kit.edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Scale")
    data, _ = ask(repo, "--no-bisect", code=1)
    assert by_name(data["nights"][0])["baseline"][0] == by_name(data["nights"][0])["metrics"][0] == "changed"
    assert data["nights"][0]["bisect"] is None and "--no-bisect" in data["reproduce"]
    data, _ = ask(repo, code=1)
    assert [c["commit"]["subject"] for c in data["nights"][0]["culprits"]] == ["Scale"]
    data, _ = ask(repo, "--at", good)
    assert data["nights"][0]["status"] == "green"
    # a golden run that cannot be fetched judges nothing and says so; beside it, a case that cannot be trained
    before = len(NightlyRuns(repo.root / "golden" / "nights").read())
    (repo.root / "golden/cases/a.toml").write_text(
        kit.CASE.replace('"toy"', '"a"') + "check = \"{python} -c 'raise SystemExit(3)'\"\n"
    )
    for folder in (repo.root / ".dvc/cache", repo.root / "golden/runs" / tonight["machine"] / "toy"):
        shutil.rmtree(folder)
    data, _ = ask(repo, code=2)
    toy = next(run for run in data["nights"] if run["case"] == "toy")
    assert toy["status"] == "not judged" and "`repro golden push`" in by_name(toy)["baseline"][1]
    assert [n.case for n in NightlyRuns(repo.root / "golden" / "nights").read()].count("a") == 1
    assert len(NightlyRuns(repo.root / "golden" / "nights").read()) == before + 2


@pytest.mark.campaign
def test_what_no_commit_changed(tmp_path: Path) -> None:
    """Numbers that a machine moved are changed and not bisected; a last green commit that is noise proves nothing."""
    machine = tmp_path / "machine"
    machine.write_text("1.0")
    noisy = "1.0 + int.from_bytes(os.urandom(2)) * 1e-6"
    repo = kit.start(tmp_path, kit.TRAIN.replace("scale = 1.0", f"scale = float(open({str(machine)!r}).read())"))
    approved = approve(repo, "elsewhere")
    assert ask(repo)[0]["nights"][0]["status"] == "green"
    machine.write_text("1.5")
    kit.note(repo, "words")
    for arguments, message in (
        ([], "had other numbers when it was replayed here before"),  # by the journal
        (["--at", approved], "other bits than on the green night of"),  # the same code
        ([], "it had others here"),  # replayed tonight, which leaves the night's own record
    ):
        tonight = ask(repo, *arguments, code=1)[0]["nights"][0]
        status, text = by_name(tonight)["baseline"]
        assert status == "changed" and message in text and "look at what the identity does not record" in text
        assert tonight["bisect"] is None and tonight["culprits"] == []
    kit.edit(repo, f"float(open({str(machine)!r}).read())", noisy, "Noise")
    approve(repo, "elsewhere", text="outs: [3]\n")
    kit.edit(repo, f"scale = {noisy}", "scale = 1.0", "No noise")
    tonight = ask(repo, code=3)[0]["nights"][0]
    status, text = by_name(tonight)["baseline"]
    assert status == "flaky" and "does not reproduce itself: two replays differ at step 0" in text

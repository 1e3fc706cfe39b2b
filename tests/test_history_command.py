"""`repro history` on real histories: exactly the planted commits, their sizes, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import Repo
from history_kit import CASE, TRAIN, edit, note, start

SCALE = "scale = 1.0\n"
LOUD = TRAIN.replace(SCALE, f"{SCALE}    shift = 0.0\n").replace("* scale", "* scale + shift")
"""A trainer with one more thing to change."""
LOSS = CASE + "\n[observe]\nmetrics = ['loss=(?P<loss>\\S+)']\n"
NOISE = "scale = 1.0 + int.from_bytes(os.urandom(2)) * 1e-6\n"


def history(repo: Repo, spec: str, *arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """JSON and progress of a history."""
    done = repo.repro("history", spec, "--json", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout), done.stderr


def named(result: dict[str, Any], kind: str = "change") -> list[str]:
    """The commits of the rows of a kind, in order."""
    return [row["commit"]["commit"] for row in result["rows"] if row["kind"] == kind]


@pytest.fixture
def forked(tmp_path: Path) -> tuple[Repo, str, dict[str, str]]:
    """A change on the main line, one on a side, then a change and its way back; repository, GOOD, commits by name."""
    repo = start(tmp_path, LOUD, LOSS)
    good, names = repo.git("rev-parse", "HEAD"), {}
    names["first"] = edit(repo, "lr=0.01", "lr=0.0100001", "Learn | faster")
    note(repo, "words", "docs/words")
    repo.git("checkout", "--quiet", "-b", "side")
    names["side"] = edit(repo, "shift = 0.0", "shift = 1e-5 if step > 2 else 0.0", "Shift late, on the side")
    repo.git("checkout", "--quiet", "main")
    note(repo, "more words", "docs/words")
    repo.git("merge", "--quiet", "--no-ff", "--message", "Merge side", "side")
    names["merge"] = repo.git("rev-parse", "HEAD")
    names["there"] = edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Scale")
    names["back"] = edit(repo, "scale = 1.0 + 1e-6\n", f"{SCALE}    # as it was\n", "Do not scale")
    return repo, good, names


@pytest.mark.whole
def test_the_planted_commits_are_listed_and_no_others(forked: tuple[Repo, str, dict[str, str]], tmp_path: Path) -> None:
    """A change on the line and one on a side are the only rows, with exact sizes, in every form of the report."""
    repo, good, names = forked
    spec = f"{good}..{names['merge']}"
    result, progress = history(repo, spec, "--out", str(tmp_path / "out"))
    assert named(result) == [names["first"], names["side"]] and len(result["rows"]) == 2, progress
    assert result["agree"] is False and result["verifiable"] is True
    first, side = result["rows"]
    assert [row["against_previous"]["divergence"]["step"] for row in result["rows"]] == [0, 3]
    for row in result["rows"]:
        size = row["against_previous"]["divergence"]["magnitude"]
        assert size["elements"] == size["total"] > 0 and size["max_ulp"] > 0, "sizes are of whole tensors"
        size = row["cumulative"]["divergence"]["magnitude"]
        assert size["elements"] == size["total"] > 0
    assert first["against_previous"] == first["cumulative"], "the commit before it has GOOD's numbers"
    assert side["cumulative"]["divergence"]["step"] == 0
    assert side["before"] == repo.git("rev-parse", f"{names['side']}^")
    loss = side["against_previous"]["metrics"]["loss"]
    assert loss["first"]["step"] == 3 and loss["worst"]["absolute"] == max(
        abs(loss[place]["b"] - loss[place]["a"]) for place in ("first", "worst", "last")
    )
    assert result["cost"]["ends"]["probes"] == 3
    # every report holds the table; a bar in a subject breaks none
    text, page, plot = ((tmp_path / "out" / name).read_text() for name in ("report.md", "report.html", "drift.svg"))
    assert f"| GOOD | `{good[:10]}` | Start |" in text and f"<b>GOOD</b> <code>{good[:10]}</code> Start" in page
    lines = [line for line in text[text.index("| commit") :].splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1 and "Learn &#124; faster" in text
    looked = f"looked at {result['looked_at']['text']}."
    assert looked in text and looked in page and result["looked_at"]["parameters"] > 0
    assert names["side"][:10] in page and "<svg" in page and names["side"][:10] in plot


@pytest.mark.campaign
def test_the_ways_to_list(forked: tuple[Repo, str, dict[str, str]]) -> None:
    """--every lists the way there and the way back, --first-parent the merge; a second call reuses what is known."""
    repo, good, names = forked
    result, progress = history(repo, f"{good}..HEAD", "--every", "-j", "1")
    assert named(result) == [names[n] for n in ("first", "side", "there", "back")], progress
    assert len(result["rows"]) == 4 and result["every"] is True
    ways = [row["cumulative"]["divergence"] for row in result["rows"]]
    assert ways[3] == ways[1] != ways[2]
    result, _ = history(repo, f"{names['merge']}..HEAD", "--every")
    assert named(result) == [names["there"], names["back"]] and result["agree"] is True
    way_back = result["rows"][1]["cumulative"]
    assert way_back["divergence"] is None and way_back["metrics"]["loss"]["worst"]["absolute"] == 0
    result, progress = history(repo, f"{good}..{names['merge']}", "--first-parent")
    assert named(result) == [names["first"], names["merge"]], progress
    assert result["cost"]["search"]["probes"] == 0 and result["cost"]["reused"] > 0 and "resuming" in progress
    done = repo.repro("history", f"{good}..HEAD", "--every")
    shown, _, rest = done.stdout.partition("report:")
    assert done.returncode == 0 and max(map(len, shown.splitlines())) <= 120
    assert "since GOOD" in shown and "reproduce with: repro history" in rest


@pytest.mark.whole
def test_equal_ends_prune_what_lies_between(tmp_path: Path) -> None:
    """Equal ends end the search after them, exit 0, and the way to see more is named."""
    repo = start(tmp_path)
    good = repo.git("rev-parse", "HEAD")
    edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Scale")
    edit(repo, "scale = 1.0 + 1e-6\n", f"{SCALE}    # as it was\n", "Do not scale")
    done = repo.repro("history", f"{good}..HEAD")
    assert done.returncode == 0 and "none of 2 commits" in done.stdout and "`--every`" in done.stdout
    assert "4 probes" in done.stdout, "nothing but the ends was tested, each of them twice"


@pytest.mark.whole
def test_an_end_that_agrees_by_chance_does_not_agree(tmp_path: Path) -> None:
    """Every second replay of BAD has other numbers: BAD is FLAKY, exit 3, and nothing is said to agree."""
    repo = start(tmp_path / "repo")
    every_second = (
        f"runs = open({str(tmp_path / 'runs')!r}, 'a+')\n"
        "if step == 0: runs.write('.')\n"
        "runs.seek(0)\n"
        "scale = 1.0 + 1e-3 * (len(runs.read()) % 2 == 0)\n"
    )
    last = edit(repo, SCALE, every_second.replace("\n", "\n    ").rstrip(" "), "Count runs")
    result, progress = history(repo, "HEAD~1..HEAD", "-j", "1", code=3)
    assert (named(result), named(result, "flaky"), result["agree"]) == ([], [last], False), progress
    done = repo.repro("history", "HEAD~1..HEAD", "-j", "1")
    assert "agree bit for bit" not in done.stdout and done.returncode == 3


@pytest.mark.campaign
def test_what_cannot_be_tested_hides_a_change_in_a_group(tmp_path: Path) -> None:
    """A change inside a window that does not start is one of these commits, exit 3, the skips with their reason."""
    repo = start(tmp_path)
    good = repo.git("rev-parse", "HEAD")
    first = edit(repo, "import torch\n", "import torch\nimport missing_module\n", "Break")
    second = edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Scale")
    third = edit(repo, "import missing_module\n", "", "Mend")
    last = edit(repo, "lr=0.01", "lr=0.0100001", "Learn faster")
    result, progress = history(repo, f"{good}..HEAD", code=3)
    assert [row["kind"] for row in result["rows"]] == ["group", "change"], progress
    assert result["rows"][0]["points"] == [first, second, third] and named(result) == [last]
    assert set(result["skips"]) == {first, second} and all(result["skips"].values())
    assert result["rows"][0]["against_previous"]["divergence"]["magnitude"]["max_ulp"] > 0
    done = repo.repro("history", f"{good}..HEAD")
    assert done.returncode == 3 and "[one of 3] Mend" in done.stdout
    assert f"skipped 2 commits, the first {first[:10]}, the last {second[:10]}: " in done.stdout


@pytest.mark.whole
def test_a_flaky_commit_is_no_change(tmp_path: Path) -> None:
    """A commit whose replays differ is FLAKY and no change, exit 3, and none of the way back from it is made a row."""
    repo = start(tmp_path)
    good = repo.git("rev-parse", "HEAD")
    noisy = edit(repo, SCALE, NOISE, "Warm the cache")
    edit(repo, NOISE, SCALE + "    # not warm\n", "Do not")
    result, progress = history(repo, f"{good}..HEAD", "--every", code=3)
    assert (named(result), named(result, "flaky")) == ([], [noisy]), progress
    assert len(result["rows"]) == 1 and result["noise"] == ""
    assert "two replays of it differ at step 0" in result["rows"][0]["detail"]


@pytest.mark.campaign
def test_noise_that_stays_ends_the_list(tmp_path: Path) -> None:
    """Where BAD is as noisy as the commit that brought the noise, the list ends there, and says so."""
    repo = start(tmp_path)
    good = repo.git("rev-parse", "HEAD")
    first = edit(repo, "lr=0.01", "lr=0.0100001", "Learn faster")
    note(repo, "one")
    noisy = edit(repo, SCALE, NOISE, "Warm the cache")
    for n in range(6):
        note(repo, f"after {n}")
    result, progress = history(repo, f"{good}..HEAD", code=3)
    assert (named(result), named(result, "flaky")) == ([first], [noisy]), progress
    assert len(result["rows"]) == 2 and "BAD does not reproduce itself" in result["noise"]


@pytest.mark.campaign
def test_a_good_end_that_is_noise_is_refused(tmp_path: Path) -> None:
    """Where GOOD's two replays differ there is no changelog: exit 3, one line that says where."""
    repo = start(tmp_path, TRAIN.replace(SCALE, NOISE))
    note(repo, "one")
    done = repo.repro("history", "HEAD~1..HEAD")
    assert done.returncode == 3 and done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert re.search(r"GOOD \w+ is FLAKY, two replays of it differ at step 0", last) and last.count("differ at") == 1


@pytest.mark.campaign
def test_values_that_are_not_finite_are_told(tmp_path: Path) -> None:
    """A loss that becomes NaN is the worst there is, in every output."""
    repo = start(tmp_path, case=LOSS)
    good = repo.git("rev-parse", "HEAD")
    there = edit(repo, SCALE, "scale = 1.0 if step < 4 else float('nan')\n", "Divide")
    result, progress = history(repo, f"{good}..HEAD", "--out", str(tmp_path / "out"))
    assert named(result) == [there], progress
    worst = result["rows"][0]["against_previous"]["metrics"]["loss"]["worst"]
    assert worst["step"] == 4 and isinstance(worst["b"], str), "NaN by its bits"
    assert "| NaN" in (tmp_path / "out" / "report.md").read_text()
    assert "no size" in (tmp_path / "out" / "drift.svg").read_text()


def test_help_says_what_every_is_for() -> None:
    """The help says that what changed and changed back is found by --every."""
    repo = Repo(Path(__file__).parent)
    text = " ".join(repo.repro("history", "--help").stdout.split())
    assert "--every tests all commits and finds both" in text
    assert "also finds what changed the numbers and changed back" in text


@pytest.mark.campaign
def test_the_built_in_trainer(recorded: Repo, tmp_path: Path) -> None:
    """On the real trainer each planted commit is a row with KL, grad_norm and log-prob gap; the golden run is used."""
    repo, good = recorded, recorded.git("rev-parse", "HEAD")
    core = "core/repro_core/"
    note(repo, "one", core + "rl/loss.py")
    repo.edit(
        core + "rl/loss.py", "rows.float() / temperature, dim", "(rows.float() / temperature).bfloat16().float(), dim"
    )
    first = repo.commit("Tidy the log-prob path")
    note(repo, "two", core + "rl/kl.py")
    repo.edit(core + "engines/optimizer.py", "eps=self.config.adam_eps", "eps=self.config.adam_eps * 2")
    second = repo.commit("Steady the optimizer")
    result, progress = history(repo, f"{good}..HEAD", "--out", str(tmp_path / "out"))
    assert named(result) == [first, second] and len(result["rows"]) == 2, progress
    assert result["golden"] is not None and result["cost"]["ends"]["probes"] == 2
    drift = result["rows"][0]["against_previous"]
    where = drift["divergence"]
    assert (where["step"], where["phase"], where["signal"]) == (0, "forward", "log_probs")
    assert where["magnitude"]["elements"] == where["magnitude"]["total"] > 0
    assert drift["kl"]["k3"]["worst"]["value"] > 0
    assert drift["metrics"]["grad_norm"]["worst"]["relative"] != 0 and drift["metrics"]["grad_norm"]["first"]
    assert drift["metrics"]["train_rollout_logprob_abs_diff"]["worst"]["absolute"] > 0
    assert result["rows"][1]["against_previous"]["divergence"]["phase"] == "update"

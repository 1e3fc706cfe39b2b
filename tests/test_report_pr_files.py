"""`repro report pr`: its comment, page, JSON and XML as files; and the command on a real repository."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree  # what is parsed was written here

import pytest
import warm_kit
from conftest import Repo, environment
from examples_kit import at_most
from history_kit import CASE, TRAIN, edit, start
from hypothesis import given
from hypothesis import strategies as st
from pull_kit import NAN, check_text, flat, pair, point, report, with_step
from test_github import GitHub, github

from repro.__main__ import main
from repro.commands.report.pr import annotate
from repro.pulls.comment import comment
from repro.pulls.pair import PairResult
from repro.pulls.report import junit, page, write_report
from repro.pulls.result import Failed
from repro.report.pieces import clean
from repro.report.plot_data import Cell, PlotData, Tokens
from repro.report.plots import heat_map, token_scatter, ulp_plot
from repro_bisect.driver.result import Culprit
from repro_golden.case.file import Bound
from repro_golden.repository.checkout import find_checkout


def test_one_case_opens_with_its_verdict_and_dates_everything(tmp_path: Path) -> None:
    """The first words are the answer; commits in full and short, the machine, UTC and the version follow."""
    result = replace(pair(tmp_path, flat(loss=1.0), with_step(1, flat(loss=1.0), loss=2.0)), notes=["a note"])
    culprit = Culprit(point("c", "Tidy"), None, None, ("numpy 1 -> 2",))
    text = comment(report(replace(result, culprits=[culprit])))
    assert text.splitlines()[2].startswith("**`toy`: numbers moved at step 1 in `loss` (loss) by `cccccccccc` Tidy")
    for wanted in ("a" * 40, "b" * 40, "2026-11-21 04:30 UTC", "machine-1", "2026-11-22 03:12:45 UTC", "a note",
                   "repro report pr aaaaaaaaaa..bbbbbbbbbb", "numpy 1 -&gt; 2", "Ada L., 2026"):  # fmt: skip
        assert wanted in text, wanted
    from repro import __version__

    assert f"repro {__version__}" in text and "ada@" not in text
    order = [
        text.index(word) for word in ("First difference", "#### Metrics", "#### Cost", "#### Culprits", "#### Notes")
    ]
    assert order == sorted(order)


def test_exit_codes() -> None:
    """1 for numbers that moved or noise, else 2 for errors, else 3 for what is not verifiable, else 0."""
    base = PairResult("t", point("a"), point("b"), "identical", "", None, {}, {}, 1, [], None, "", [], "m", "", 1.0)
    moved, flaky, unknown = (replace(base, verdict=v) for v in ("moved", "flaky", "unverifiable"))
    error, within = Failed("x", "y"), replace(base, verdict="within")
    assert [report(*e).exit_code for e in ([base, within], [base, moved, error], [flaky, unknown], [unknown, error],
            [base, unknown], [Failed("x", "y", "unverifiable")])] == [0, 1, 1, 2, 3, 3]  # fmt: skip


def test_a_job_is_marked_with_what_does_not_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors for what moved, is noise or failed, a warning for what is not verifiable, nothing for what agrees."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    base = PairResult("t", point("a"), point("b"), "identical", "", None, {}, {}, 1, [], None, "", [], "m", "", 1.0)
    every = [replace(base, verdict=v, case=v) for v in ("identical", "within", "moved", "flaky", "unverifiable")]
    annotate(report(*every, Failed("e", "no rollouts: 5%")))
    out, err = capsys.readouterr()
    assert out == "" and [line.partition("%3A")[0] for line in err.splitlines()] == [
        "::error title=moved", "::error title=flaky", "::warning title=unverifiable", "::error title=e",
    ]  # fmt: skip
    assert err.endswith("::error: no rollouts: 5%25\n")


def test_json_and_xml_say_the_same(tmp_path: Path) -> None:
    """report.json has no NaN, junit.xml a failure, an error or a skip for what is no pass, a test for each bound."""
    a = flat(loss=1.0, kl=0.5, nan=NAN)
    bounds = {"loss": Bound(rtol=0.1), "kl": Bound(rtol=0.1)}
    moved = pair(tmp_path, a, with_step(1, a, loss=2.0), bounds)
    within = replace(pair(tmp_path, a, with_step(1, a, loss=1.01), bounds), case="within")
    early = replace(pair(tmp_path, a, a[:2], bounds), case="early")
    bits = replace(pair(tmp_path, a, with_step(1, a, loss=NAN)), case="bits")
    unknown = replace(bits, case="unknown", verdict="unverifiable", compared=None, reason="why \x00\ufffe]]>")
    page = report(moved, within, early, bits, unknown, Failed("broken", "no rollouts"))
    paths = write_report(page, tmp_path / "out")
    assert [path.name for path in paths] == ["comment.md", "report.html", "report.json", "junit.xml"]

    def refuse(word: str) -> None:
        raise AssertionError(f"JSON has no {word}")

    data = json.loads(paths[2].read_text(), parse_constant=refuse)
    assert data["format"] == 1 and data["reproduce"] == page.command and data["exit_code"] == 1
    assert [r["verdict"] for r in data["results"]] == ["moved", "within", "moved", "moved", "unverifiable", "error"]
    assert data["results"][0]["line"].startswith("numbers moved out of bounds at step 1 in loss")
    assert isinstance(data["results"][3]["compared"]["drift"]["metrics"]["loss"]["worst"]["b"], str), "NaN by its bits"
    root = ElementTree.fromstring(paths[3].read_text())  # noqa: S314
    suites = {suite.get("name"): suite for suite in root}
    tests = {name: {t.get("name"): [(c.tag, c.get("message")) for c in t] for t in s} for name, s in suites.items()}
    assert list(tests["toy"]) == ["bounds: loss", "bounds: kl"] and not tests["toy"]["bounds: kl"]
    [(tag, message)] = tests["toy"]["bounds: loss"]
    assert tag == "failure" and message == data["results"][0]["line"]
    assert tests["within"] == {"bounds: loss": [], "bounds: kl": []}
    assert {c[0][0] for c in tests["early"].values()} == {"failure"} and len(tests["early"]) == 2
    assert [tests[n]["bits"][0][0] for n in ("bits", "unknown", "broken")] == ["failure", "skipped", "error"]
    assert all(suite.get("timestamp") == "2026-11-22T03:12:45Z" for suite in root)
    assert (root.get("tests"), root.get("failures"), root.get("errors"), root.get("skipped")) == ("9", "4", "1", "1")


@at_most(60)
@given(st.text(st.characters(), max_size=60))
def test_xml_is_valid_for_any_text(text: str) -> None:
    """Characters that XML forbids are left out, all others come back."""
    root = ElementTree.fromstring(junit(report(Failed(text, text))))  # noqa: S314
    message = root[0][0][0].get("message")
    assert message is not None and message.startswith("error:")
    assert message == f"error: {clean(text)}".rstrip(" ") or "\u200b" in text or not clean(text)


def test_the_page_needs_nothing_beside_itself_and_draws_what_there_is(tmp_path: Path) -> None:
    """One file without links to others, for light and dark, with labelled plots where there is data for them."""
    a = [{"loss": 1.0, "tokens": [-1.0, -2.0, -3.0]} for _ in range(3)]
    html = page(report(pair(tmp_path, a, with_step(1, a, tokens=[-1.5, -2.0000002, -3.0], loss=1.5))))
    assert not re.search(r"(?:src|href)=", re.sub(r'xlink:href="#|href="#', "", html)) and "@import" not in html
    assert "(prefers-color-scheme: dark)" in html and html.count("<svg") == 3
    for label in ("step (optimizer update)", "distance in ULP", "log-prob under BASE, nats", "largest difference"):
        assert label in html, label
    same = page(report(pair(tmp_path, a, a)))
    assert "<svg" not in same and "bit-identical in all 3 steps" in same


def test_plots_show_what_has_no_size_and_many_steps() -> None:
    """Cells without a size have colours that are named; very many steps share columns; nothing makes no plot."""
    kinds = [("missing", None), ("2 not finite", None), ("differs, size not measured", None), ("", 0.0), ("", 1e-320)]
    made = [Cell(n, n % 2, size, None, False, text) for n, (text, size) in enumerate(kinds)]
    plot_data = PlotData(
        range(5), ["grad <b>", "update w"], 3, made, [(0, 2), (1, 3), (2**40, 1)], {"dtype": "float32"}, None
    )
    svg = heat_map(plot_data)
    for words in ("not finite", "size not measured", "one side only", "3 more signals", "grad &lt;b&gt;"):
        assert words in svg, words
    long = replace(plot_data, steps=range(1000), cells=[Cell(n, 0, 1e-3, 1, True) for n in range(1000)])
    assert heat_map(long).count('aria-roledescription="rect mark"') <= 120 and "9 to a column" in heat_map(long)
    assert heat_map(replace(plot_data, cells=[])) == ulp_plot([], "float32") == ulp_plot([(2, 9)], "float32") == ""
    assert "to 2^40" in ulp_plot(plot_data.histogram, "float32")
    assert token_scatter(Tokens(0, 2, [(NAN, 1.0), (-math.inf, -math.inf)])) == ""
    assert "(1 not finite, not drawn)" in token_scatter(Tokens(0, 2, [(-1.0, -1.1), (NAN, 1.0)]))


LOSS = CASE + "\n[observe]\nmetrics = ['loss=(?P<loss>\\S+)']\n"


def run(repo: Repo, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command as a job of GitHub's runs it."""
    clear = {k: v for k, v in environment().items() if not k.startswith(("GITHUB_", "GH_"))}
    return warm_kit.run([sys.executable, "-m", "repro", "report", "pr", *arguments], repo.root, clear | variables)


@pytest.mark.whole
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A real range: one case moves, one that fails is told apart, the comment is posted once and then written anew."""
    repo = start(tmp_path, TRAIN, LOSS)
    cases = repo.root / "golden" / "cases"
    (cases / "broken.toml").write_text("[case]\nname = 'broken'\nsteps = 0\n")
    base = repo.commit("A broken case")
    head = edit(repo, "scale = 1.0\n", "scale = 1.0 + 1e-6 * (step > 2)\n", "Scale @someone <script>")
    out, lines = tmp_path / "out", f"{base}.."
    monkeypatch.chdir(repo.root)

    def inside(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        return main(["report", "pr", *arguments]), *capfd.readouterr()

    with github() as served:
        job = {"GITHUB_ACTIONS": "true", "GITHUB_TOKEN": GitHub.TOKEN, "GITHUB_API_URL": served.url,
               "GITHUB_REPOSITORY": "o/r", "GITHUB_REF": "refs/pull/7/merge"}  # fmt: skip
        done = run(repo, lines, "--out", str(out), "--post", **job)
        assert done.returncode == 1, done.stdout + done.stderr
        assert (
            "toy: numbers moved at step 3 in " in done.stdout
            and f"by {head[:10]} Scale @someone <script>" in done.stdout
        )
        assert (
            "broken: error: " in done.stdout
            and f"reproduce with: repro report pr {base[:10]}..{head[:10]}" in done.stdout
        )
        assert "| loss " in done.stdout and f"report: {out / 'comment.md'}" in done.stdout
        assert "comment: https://github.com/o/r/pull/7#issuecomment-" in done.stdout
        marks = [line for line in done.stderr.splitlines() if line.startswith("::")]
        assert [m.partition("::")[2].partition("::")[0] for m in marks] == [
            "error title=broken%3A error", "error title=toy%3A numbers moved",
        ]  # fmt: skip
        assert [c["body"] for c in served.comments] == [(out / "comment.md").read_text()]
        check_text((out / "comment.md").read_text(), ["Scale @someone <script>"])
        for variable, value in job.items():
            monkeypatch.setenv(variable, value)
        runs = tmp_path / "runs"
        status, out_, err = inside(
            lines, "--case", "toy", "--out", str(out), "--post", "--json", "--tensorboard", str(runs)
        )
        assert [path.name for path in (runs / "toy").iterdir()] and {p.name for p in runs.iterdir()} == {"toy"}
        assert status == 1 and "::error" in err, err
        data = json.loads(out_)
        assert data["results"][0]["verdict"] == "moved" and data["comment"].endswith("#issuecomment-1")
        assert len(served.comments) == 1 and "`broken`" not in served.comments[0]["body"], "written anew"
        assert {p.name for p in out.iterdir()} == {"comment.md", "report.html", "report.json", "junit.xml"}
        served.read_only = True
        fork = tmp_path / "fork"
        for variable, value in job.items():  # the token was removed as it was read
            assert ("TOKEN" in variable) == (variable not in os.environ)
            monkeypatch.setenv(variable, value)
        status, out_, err = inside(f"{head}..{head}", "--case", "toy", "--out", str(fork), "--post")
    assert status == 2 and "toy: bit-identical: it adds no commit to its base" in out_
    assert "::" not in err and GitHub.TOKEN not in out_ + err
    last = err.splitlines()[-1]
    assert last.startswith("repro: the token may not comment on o/r#7 (403") and "`repro report post" in last
    assert (fork / "comment.md").exists(), "a report that cannot be posted is kept"
    assert inside(f"{head}..{head}", "--case", "toy", "--path", "a b")[1].endswith(" --case toy --path 'a b'\n")
    assert (find_checkout(repo.root).state / "reports" / f"pr-{head[:10]}..{head[:10]}" / "junit.xml").exists()


@pytest.mark.parametrize(("arguments", "words"), [
    (("main",), "write BASE..HEAD"), (("a...b",), "write BASE..HEAD"), (("nowhere..",), "git knows no commit"),
    (("HEAD..", "--case", "other"), "no case 'other'"), (("HEAD..", "--key", "a b"), "--key"),
    (("HEAD..", "--post", "--repo", "o/r", "--pr", "1"), "set GITHUB_TOKEN"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_runs(
    tmp_path: Path, arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Usage errors are one line with the cure and exit 2, without replays."""
    monkeypatch.chdir(start(tmp_path).root)
    for name in ("GITHUB_TOKEN", "GH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", os.defpath)
    capfd.readouterr()
    assert main(["report", "pr", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == "" and words in err and len(err.strip().splitlines()) == 1

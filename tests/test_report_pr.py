"""`repro report pr`: its words, tables, comment, page, JSON and XML; and the command on a real repository."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree  # what is parsed was written here

import pytest
from conftest import Repo, environment
from history_kit import CASE, TRAIN, edit, start
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from test_github import GitHub, github
from trace_kit import write

from repro.__main__ import main
from repro.commands.report_pr import annotate
from repro.github_pull import marker, marker_of
from repro.report.junit import junit
from repro.report.picture_plots import heat_map, token_scatter, ulp_plot
from repro.report.pieces import clean, code, escaped, fenced, markdown, plain, quoted, said
from repro.report.pull import page, pull_text, write_report
from repro.report.pull_blocks import blocks_of, utc
from repro.report.pull_comment import LIMIT, comment
from repro.report.pull_result import Entry, Failed, PullReport, verdict_line
from repro_bisect.axis import PointInfo
from repro_bisect.pair import PairResult, compare_traces
from repro_bisect.result import Culprit
from repro_golden.case import Bound, Compare
from repro_golden.errors import ReproError
from repro_golden.fingerprint import reference
from repro_golden.picture import Cell, Picture, Tokens
from repro_golden.spent import Spent
from repro_golden.trace import Row, Trace
from repro_golden.trace.writer import metric_row

NAN = math.nan
Steps = Sequence[Mapping[str, Any]]


def point(letter: str, subject: str = "Work", date: str = "2026-11-20T23:30:00-05:00") -> PointInfo:
    return PointInfo(letter * 40, "Ada L. <ada@example.org>", date, subject, (), " a.py | 1 +\n")


def trace(folder: Path, steps: Steps) -> Trace:
    """A trace of metrics and, where a step names ``tokens``, log-probs."""
    rows = []
    for step in steps:
        made = [metric_row("loss", name, value) for name, value in step.items() if name != "tokens"]
        if "tokens" in step:
            raw = struct.pack(f"<{len(step['tokens'])}f", *step["tokens"])
            made.append(
                Row("forward", "log_probs", "float32", (len(step["tokens"]),), reference(raw), 0, 1.0, 1.0, raw, raw)
            )
        rows.append(made)
    return Trace(write(folder, rows))


def pair(tmp: Path, a: Steps, b: Steps, bounds: Mapping[str, Bound] | None = None, **changes: Any) -> PairResult:
    """What `compare_traces` says of two traces, as a result."""
    n = len(list(tmp.iterdir()))
    rule = Compare(mode="bounds", bounds=dict(bounds)) if bounds else Compare()
    compared = compare_traces(trace(tmp / f"a{n}", a), trace(tmp / f"b{n}", b), rule)
    result = PairResult(
        "toy", point("a", "Base"), point("b"), compared.verdict, "", compared, bounds or {},
        {"base": None, "head": None}, 5, [], None, "", [], "machine-1", "2026-11-22T03:12:45Z", 2.5,
    )  # fmt: skip
    return replace(result, **changes)


def report(*entries: Entry) -> PullReport:
    return PullReport("a" * 40, "b" * 40, entries, "repro report pr aaaaaaaaaa..bbbbbbbbbb", "2026-11-22T03:12:45Z")


def cells(result: PairResult, title: str = "Metrics") -> dict[str, list[list[str]]]:
    """The rows of a block's table as plain text, by their first cell."""
    found: dict[str, list[list[str]]] = {}
    for block in blocks_of(result):
        if block.title.endswith(title):
            for row in block.rows:
                found.setdefault(plain(row[0]), []).append([plain(cell) for cell in row[1:]])
    return found


def below(result: PairResult) -> str:
    return "\n".join(plain(line) for block in blocks_of(result) for line in block.below)


def flat(steps: int = 3, **metrics: float) -> list[dict[str, Any]]:
    return [dict(metrics) for _ in range(steps)]


def with_step(step: int, base: Steps, **metrics: Any) -> list[dict[str, Any]]:
    """The same steps with one changed."""
    return [{**s, **metrics} if n == step else dict(s) for n, s in enumerate(base)]


def test_every_verdict_is_said_in_one_line(tmp_path: Path) -> None:
    """Each verdict names what a reader asks first: where, by which commit, or why there is no answer."""
    a = flat(loss=1.0)
    b = with_step(1, a, loss=1.5)

    def line(result: Entry) -> str:
        return plain(verdict_line(result))

    same = pair(tmp_path, a, a)
    assert line(same) == "bit-identical in all 3 steps"
    why = "it changes nothing in core, the code of toy"
    assert line(replace(same, compared=None, reason=why)) == f"bit-identical: {why}"
    wide = pair(tmp_path, a, b, {"loss": Bound(rtol=1.0)})
    assert line(wide) == "within bounds; bits differ from step 1 in loss (loss)"
    moved = pair(tmp_path, a, b)
    assert line(moved) == "numbers moved at step 1 in loss (loss) by one or more of 5 commits; --bisect names each"
    culprits = [Culprit(point(c, f"Change {c}"), None, None) for c in "cdef"]
    by = line(replace(moved, culprits=culprits[:1]))
    assert by == "numbers moved at step 1 in loss (loss) by cccccccccc Change c"
    assert line(replace(moved, culprits=culprits)).endswith(
        "by 4 commits: cccccccccc, dddddddddd, eeeeeeeeee and 1 more"
    )
    assert line(replace(moved, unnamed="only skips")).endswith("by one or more of 5 commits, not named: only skips")
    tight = pair(tmp_path, with_step(0, a, grad_norm=1.0, kl=0.0), with_step(0, b, grad_norm=1.1, kl=0.0),
                 {"loss": Bound(rtol=1e-3)}, culprits=culprits[:1])  # fmt: skip
    assert line(tight) == "numbers moved out of bounds at step 1 in loss (loss) by cccccccccc Change c"
    for bounds in ({}, {"loss": Bound(rtol=1.0)}):
        short = pair(tmp_path, a, (a if not bounds else b)[:2], bounds)
        assert line(short).startswith("numbers moved: HEAD ends after 2 steps, before BASE does by"), "not a difference"
    assert moved.compared is not None
    flaky = replace(
        moved, verdict="flaky", compared=replace(moved.compared, verdict="flaky", flaky="two replays differ")
    )
    assert line(flaky) == "HEAD does not reproduce itself: two replays differ"
    unknown = replace(same, verdict="unverifiable", compared=None, reason="BASE does not start")
    assert line(unknown) == "not verifiable: BASE does not start"
    assert line(Failed("x", "no rollouts: record them")) == "error: no rollouts: record them"


def test_metrics_are_found_under_the_names_that_trainers_use(tmp_path: Path) -> None:
    """Aliases and folders are seen through; what did not move is one line; what is absent is not spoken of."""
    a = flat(**{"train/entropy_loss": 2.0, "rollout/raw_reward": 0.5, "train/grad_norm": 1.0, "lr": 0.1, "x": 1.0,
                "train_rollout_kl": 0.1})  # fmt: skip
    b = with_step(1, a, **{"train/entropy_loss": 2.5, "train/grad_norm": 1.25, "lr": 0.2})
    b[2]["train/grad_norm"] = 1.125
    result = pair(tmp_path, a, b)
    rows = cells(result)
    assert rows["grad_norm (train/grad_norm)"] == [
        ["1 (first, worst)", "1 -> 1.25", "+0.25", "+25 %"], ["2 (last)", "1 -> 1.125", "+0.125", "+12.5 %"],
    ]  # fmt: skip
    assert rows["entropy, nats (train/entropy_loss)"][0] == ["1 (first, worst)", "2 -> 2.5", "+0.5", "+25 %"]
    assert rows["entropy, nats (train/entropy_loss)"][1] == ["2 (last)", "2 -> 2", "0", "0"]
    assert below(result).startswith("Did not move: rollout/raw_reward and 2 other metrics.")
    assert list(cells(result, "at its worst step")) == ["lr"]
    text = comment(report(result))
    assert "log-prob gap" not in text and "KL" not in text and "train_rollout_kl" not in text


def test_values_without_a_size_are_words(tmp_path: Path) -> None:
    """NaN, infinity, a missing side, a base of 0, the sign of zero and equal digits all read as what they are."""
    near = math.nextafter(1 / 3, 1)
    names = {"to_nan": (1.0, NAN), "gone": (1.0, None), "new": (None, 1.0), "zero": (0.0, 0.5), "inf": (1.0, math.inf),
             "sign": (0.0, -0.0), "near": (1 / 3, near), "large": (1.0, 30.0)}  # fmt: skip
    sides = [{k: v[i] for k, v in names.items() if v[i] is not None} for i in (0, 1)]
    rows = {key: row for key, [row] in cells(pair(tmp_path, [sides[0]], [sides[1]]), "at its worst step").items()}
    assert rows["to_nan"] == ["0", "1 -> NaN", "NaN on one side", "no size"]
    assert rows["gone"] == ["0", "1 -> absent", "one side is absent", "no size"]
    assert rows["new"] == ["0", "absent -> 1", "one side is absent", "no size"]
    assert rows["zero"] == ["0", "0 -> 0.5", "+0.5", "from 0"]
    assert rows["inf"] == ["0", "1 -> inf", "+inf", "no size"]
    assert rows["sign"] == ["0", "0 -> -0", "the sign of zero", "0"]
    assert rows["near"][1] == "0.33333333333333331 -> 0.33333333333333337"
    assert rows["large"][2:] == ["+29", "x30"]


def test_bounds_are_shown_where_they_hold_and_where_not(tmp_path: Path) -> None:
    """Each row says how far its metric may move there, and one line at how many steps a bound was left."""
    a = flat(4, loss=2.0, kl=0.0, still=NAN)
    b = with_step(2, with_step(1, a, loss=2.1), loss=3.0)
    bounds = {"loss": Bound(rtol=0.1), "kl": Bound(atol=1.0), "still": Bound(rtol=1.0)}
    result = pair(tmp_path, a, b, bounds)
    assert [row[-1] for row in cells(result)["loss"]] == ["±0.2, holds", "±0.2, left", "±0.2, holds"]
    assert cells(result)["still"][0][-1] == "left: no finite base", "NaN on both sides has left every bound"
    assert "Did not move: kl." in below(result)
    lines = [plain(line) for line in blocks_of(result)[0].lines]
    assert "loss left its bound (rtol 0.1, atol 0) at 1 of 4 steps, first at step 2." in lines
    assert "still left its bound (rtol 1, atol 0) at 4 of 4 steps, first at step 0." in lines


def test_kl_is_shown_by_both_estimators(tmp_path: Path) -> None:
    """KL(base || head) over the tokens where it begins, is worst and ends; equal log-probs are one word of a line."""
    a = [{"loss": 1.0, "tokens": [-1.0, -2.0]} for _ in range(3)]
    b = with_step(1, a, tokens=[-1.5, -2.0])
    rows = cells(pair(tmp_path, a, b))
    assert [row[0] for row in rows["KL(base ‖ head) k1, nats"]] == ["1 (first, worst)", "2 (last)"]
    assert rows["KL(base ‖ head) k1, nats"][0][2] == "0.25"
    assert float(rows["KL(base ‖ head) k3, nats"][0][2]) == pytest.approx((math.expm1(-0.5) + 0.5) / 2, rel=1e-2)
    assert "Did not move: KL k1, KL k3, loss." in below(pair(tmp_path, a, with_step(1, a, lr=1.0)))


def test_cost_is_a_ratio_or_not_measured(tmp_path: Path) -> None:
    """Both sides' median step and peak memory with their ratio; a side that did not measure says so."""
    a, mib = flat(loss=1.0), 2**20
    host, gpu = Spent([900, 100000, 200000, 300000], 100 * mib, 0), Spent([500000], 100 * mib, 50 * mib)
    twice = Spent([900, 200000, 400000, 600000], 150 * mib, 0)
    rows = cells(pair(tmp_path, a, a, spent={"base": host, "head": twice}), "Cost")
    assert rows["step time, median"] == [["200 ms", "400 ms", "x2.00"]]
    assert rows["peak memory, host"] == [["100.0 MiB", "150.0 MiB", "x1.50"]]
    rows = cells(pair(tmp_path, a, a, spent={"base": host, "head": gpu}), "Cost")
    assert rows["peak memory"] == [["100.0 MiB (host)", "50.0 MiB (GPU)", "not comparable"]]
    result = pair(tmp_path, a, a, spent={"base": host, "head": None})
    assert cells(result, "Cost")["step time, median"] == [["200 ms", "not measured", "not measured"]]
    assert "rough" in below(result), "a time that was measured beside other work is no benchmark"


def test_dates_are_utc() -> None:
    """A commit's date of another zone is shown in UTC, one that is none as it is."""
    assert utc("2026-11-20T23:30:00-05:00") == "2026-11-21 04:30 UTC" and utc("soon") == "soon"


EVIL = ["<script>alert(1)</script>", "| x", "a\\|b", "`", "``a`", "@someone", "@org/team", "<!-- c -->", "</details>",
        "*b* _i_ ~~s~~ [l](http://x)", "&lt;b&gt;", "$x$", "![i](http://e/i.png)", "https://evil.example",
        "www.evil.example", "<img src=x onerror=alert(1)>", "\x1b[31mred", "a\u202eb", "line\n\n# head",
        "\ud800half", "#12"]  # fmt: skip


class Shown(HTMLParser):
    """The tags and the text of rendered Markdown; the text in code apart, for GitHub calls nobody from there."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text, self.prose, self.depth = "", "", 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Count it."""
        assert not attrs, f"<{tag} {attrs}>: none of ours has any"
        self.tags.append(tag)
        self.depth += tag == "code"

    def handle_endtag(self, tag: str) -> None:
        """Leave it."""
        self.depth -= tag == "code"

    def handle_data(self, data: str) -> None:
        """Keep it."""
        self.text += data
        self.prose += data if not self.depth else ""


OURS = {"p", "strong", "code", "pre", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "h3", "h4",
        "ul", "li"}  # fmt: skip


def rendered(text: str) -> Shown:
    """A comment as GitHub renders it, as far as CommonMark with tables goes."""
    shown = Shown()
    shown.feed(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text))
    shown.close()
    return shown


def check_text(text: str, names: Iterable[str]) -> None:
    """No tag but ours, nobody is called, and the names are read as they were written."""
    shown = rendered(text)
    assert set(shown.tags) <= OURS, set(shown.tags) - OURS
    assert not re.search(r"@\w", shown.prose) and not re.search(r"\w://|www\.", shown.prose)
    read = shown.text.replace("\u200b", "")
    for name in names:
        assert clean(name) in read, (name, text)


def evil(result: PairResult, name: str) -> PairResult:
    """The result with one text in every place that somebody else writes."""
    assert result.compared is not None
    divergence = replace(result.compared.drift.divergence, signal=name, detail=name)  # type: ignore[type-var]
    drift = replace(result.compared.drift, divergence=divergence)
    culprit = Culprit(replace(point("c", name), author=name), divergence, None, (name,), None, name)
    compared = replace(result.compared, drift=drift)
    return replace(result, case=name, compared=compared, culprits=[culprit], notes=[name], head=point("b", name),
                   machine=name, unnamed="")  # fmt: skip


@pytest.mark.parametrize("name", EVIL)
def test_what_others_wrote_stays_text(tmp_path: Path, name: str) -> None:
    """Subjects, names and reasons never become markup, links, mentions or control sequences, in any medium."""
    result = evil(pair(tmp_path, flat(loss=1.0), with_step(1, flat(loss=1.0), loss=2.0)), name)
    moved, failed = result, Failed(name, name)
    for found in (
        report(moved),
        report(moved, failed, replace(moved, verdict="unverifiable", compared=None, reason=name)),
    ):
        text = comment(found)
        check_text(text, [name])
        rows = [line for line in text.splitlines() if line.startswith("| `cccccccccc`")]
        assert rows and {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}, "a bar makes no cell"
        html = page(found)
        assert "<script" not in html and "<img" not in html and "<!-- c" not in html
        assert not re.search("[\x1b\u202e\ud800]", html + text + pull_text(found).replace("\n", ""))
        ElementTree.fromstring(junit(found))  # noqa: S314


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.text(max_size=40), st.sampled_from(["code", "quoted"]), st.booleans())
def test_any_text_survives_markdown(text: str, kind: str, cell: bool) -> None:
    """Whatever is written in a line of Markdown, alone or in a table, is read back the same and is no markup."""
    piece = code(text) if kind == "code" else quoted(text)
    line = markdown((said("x "), piece, said(" y")), cell=cell)
    shown = rendered(f"| a | b |\n|---|---|\n| 1 | {line} |\n" if cell else f"- {line}\n")
    assert set(shown.tags) <= OURS
    wanted = piece.text if piece.text.strip() or kind == "quoted" else "(empty)"
    read = " ".join(shown.text.replace("\u200b", "").split())
    assert " ".join(f"x {wanted} y".replace("\u200b", "").split()) in read


def test_a_fence_is_not_closed_from_within() -> None:
    """A command that holds a fence stays one block of code."""
    shown = rendered(f"{fenced('a ``` b' + chr(10) + '````' + chr(10) + '<b>')}\n")
    assert shown.tags == ["pre", "code"] and "<b>" in shown.text
    assert escaped("a|b") == "a&#124;b"


def sized(text: str) -> None:
    assert len(text) <= 65_536 and len(text.encode()) <= LIMIT


def test_hundreds_of_cases_with_giant_names_fit(tmp_path: Path) -> None:
    """The comment stays below GitHub's limit; every case keeps its verdict, details go from the last ones on."""
    moved = evil(pair(tmp_path, flat(loss=1.0), with_step(1, flat(loss=1.0), loss=2.0)), "<|@`" + "ü" * 4000)
    many = [replace(moved, case=f"{n:04d}{'<|`' * 300}") for n in range(400)]
    text = comment(report(*many))
    sized(text)
    assert "400 cases: 400 moved" in text and "report.html" in text
    assert all(f"{n:04d}" in text for n in range(400)), "every verdict is there"
    check_text(text, [])
    few = [replace(moved, case=f"case-{n:04d}") for n in range(60)]
    text = comment(report(*few))
    sized(text)
    kept = [f"### `case-{n:04d}`" in text for n in range(60)]
    assert kept[0] and not kept[-1] and kept == sorted(kept, reverse=True), "the last go first"
    assert re.search(r"Left out for length: .*all details of \d+ cases\. The whole is in report\.html", text)
    assert all(f"- `case-{n:04d}`: numbers moved" in text for n in range(60))
    sized(comment(report(*(Failed("語" * 300 + str(n), "語" * 3000) for n in range(3000)))))


def test_thousands_of_metrics_fit(tmp_path: Path) -> None:
    """Long tables are cut and closed in the comment, and whole on the page."""
    a = flat(2, **{f"metric/{'m' * 60}{n}": 1.0 for n in range(3000)})
    result = pair(tmp_path, a, [{k: v * 2 for k, v in step.items()} for step in a])
    text = comment(report(result))
    sized(text)
    assert "<details><summary>3000 other metrics that moved" in text and "and 2960 more rows, in report.html" in text
    assert page(report(result)).count("metric/") >= 3000
    bounds = {f"metric/{'m' * 60}{n}": Bound() for n in range(3000)}
    bound = pair(tmp_path, a, [{k: v * 2 for k, v in step.items()} for step in a], bounds)
    sized(comment(report(bound)))
    assert "<details><summary>Metrics</summary>" in comment(report(bound)), "more rows than are read at once are closed"


@settings(deadline=None, max_examples=12, derandomize=True)
@given(st.lists(st.tuples(st.text(min_size=1, max_size=200), st.integers(1, 60)), min_size=1, max_size=40))
def test_a_comment_fits_whatever_is_in_it(names: list[tuple[str, int]]) -> None:
    """Any names, repeated any number of times: within the limit, each verdict said, the same command below."""
    entries = [Failed(name * times, name * times) for name, times in names]
    found = replace(report(*entries), command="repro report pr a..b" + "".join(f" --case {n * t}" for n, t in names))
    text = comment(found, limit=20_000)
    assert len(text.encode()) <= 20_000
    assert text.count("error") >= len(entries) or re.search(r"error: .+ more", text)
    assert "Reproduce with:" in text and text.startswith(marker("default"))


def test_the_marker_is_hidden_and_found() -> None:
    """A comment is found by its first line; keys that would end the HTML comment are refused."""
    text = comment(report(Failed("x", "y")), "gpu/nightly-1")
    assert marker_of(text) == "<!-- repro report pr: gpu/nightly-1 -->" == text.splitlines()[0]
    assert marker_of("words " + text) is None and marker_of("<!-- other -->") is None
    for key in ("", "a b", "x-->", "a--b", "-", "x" * 65, "é"):
        with pytest.raises(ReproError, match="--key"):
            marker(key)


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
    found = report(moved, within, early, bits, unknown, Failed("broken", "no rollouts"))
    paths = write_report(found, tmp_path / "out")
    assert [path.name for path in paths] == ["comment.md", "report.html", "report.json", "junit.xml"]

    def refuse(word: str) -> None:
        raise AssertionError(f"JSON has no {word}")

    data = json.loads(paths[2].read_text(), parse_constant=refuse)
    assert data["format"] == 1 and data["reproduce"] == found.command and data["exit_code"] == 1
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


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.text(st.characters(), max_size=60))
def test_xml_is_valid_for_any_text(text: str) -> None:
    """Characters that XML forbids are left out, all others come back."""
    root = ElementTree.fromstring(junit(report(Failed(text, text))))  # noqa: S314
    message = root[0][0][0].get("message")
    assert message is not None and message.startswith("error: ")
    assert message == f"error: {clean(text)}" or "\u200b" in text or not clean(text)


def test_the_page_needs_nothing_beside_itself_and_draws_what_there_is(tmp_path: Path) -> None:
    """One file without links to others, for light and dark, with labelled plots where there is data for them."""
    a = [{"loss": 1.0, "tokens": [-1.0, -2.0, -3.0]} for _ in range(3)]
    html = page(report(pair(tmp_path, a, with_step(1, a, tokens=[-1.5, -2.0, -3.0], loss=1.5))))
    assert not re.search(r"(?:src|href)=", re.sub(r'xlink:href="#|href="#', "", html)) and "@import" not in html
    assert "light-dark(" in html and html.count("<svg") == 3
    for label in ("step (optimizer update)", "distance in ULP", "log-prob under BASE, nats", "largest difference"):
        assert label in html, label
    same = page(report(pair(tmp_path, a, a)))
    assert "<svg" not in same and "bit-identical in all 3 steps" in same


def test_plots_show_what_has_no_size_and_many_steps() -> None:
    """Cells without a size have colours that are named; very many steps share columns; nothing makes no plot."""
    kinds = [("missing", None), ("2 not finite", None), ("differs, size not measured", None), ("", 0.0), ("", 1e-320)]
    made = [Cell(n, n % 2, size, None, False, text) for n, (text, size) in enumerate(kinds)]
    picture = Picture(
        range(5), ["grad <b>", "update w"], 3, made, [(0, 2), (1, 3), (2**40, 1)], {"dtype": "float32"}, None
    )
    svg = heat_map(picture)
    for words in ("not finite", "size not measured", "one side only", "3 more signals", "grad &lt;b&gt;"):
        assert words in svg, words
    long = replace(picture, steps=range(1000), cells=[Cell(n, 0, 1e-3, 1, True) for n in range(1000)])
    assert heat_map(long).count('aria-roledescription="rect mark"') <= 120 and "9 to a column" in heat_map(long)
    assert heat_map(replace(picture, cells=[])) == ulp_plot(replace(picture, histogram=[])) == ""
    assert "to 2^40" in ulp_plot(picture)
    assert token_scatter(Tokens(0, 2, [(NAN, 1.0), (-math.inf, -math.inf)])) == ""
    assert "(1 not finite, not drawn)" in token_scatter(Tokens(0, 2, [(-1.0, -1.1), (NAN, 1.0)]))


LOSS = CASE + "\n[observe]\nmetrics = ['loss=(?P<loss>\\S+)']\n"


def run(repo: Repo, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command as a job of GitHub's runs it."""
    clear = {k: v for k, v in environment().items() if not k.startswith(("GITHUB_", "GH_"))}
    return subprocess.run(
        [sys.executable, "-m", "repro", "report", "pr", *arguments], cwd=repo.root, env=clear | variables, text=True,
        capture_output=True, timeout=240, check=False,
    )  # fmt: skip


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
        status, out_, err = inside(f"{head}..{head}", "--case", "toy", "--out", str(fork), "--post")
    assert status == 2 and "toy: bit-identical: it adds no commit to its base" in out_
    assert "::" not in err and GitHub.TOKEN not in out_ + err
    last = err.splitlines()[-1]
    assert last.startswith("repro: the token may not comment on o/r#7 (403") and "`repro report post" in last
    assert (fork / "comment.md").exists(), "a report that cannot be posted is kept"
    assert inside(f"{head}..{head}", "--case", "toy", "--path", "a b")[1].endswith(" --case toy --path 'a b'\n")
    assert (repo.root / ".git" / "repro" / "reports" / f"pr-{head[:10]}..{head[:10]}" / "junit.xml").exists()


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

"""`repro report pr`: its words, tables, comment, page, JSON and XML; and the command on a real repository."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree  # what is parsed was written here

import pytest
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st
from pull_kit import NAN, OURS, below, cells, check_text, flat, pair, point, rendered, report, with_step

from repro.pulls.blocks import blocks_of
from repro.pulls.comment import LIMIT, comment
from repro.pulls.github_pull import marker, marker_of
from repro.pulls.pair import PairResult
from repro.pulls.report import junit, page, pull_text
from repro.pulls.result import Entry, Failed, verdict_line
from repro.report.pieces import code, escaped, fenced, markdown, plain, quoted, said
from repro.text import utc
from repro_bisect.driver.result import Culprit
from repro_golden.base.errors import ReproError
from repro_golden.base.machine.usage import Usage
from repro_golden.case.file import Bound


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
    assert moved.compared is not None
    beside = replace(moved.compared, drift=replace(moved.compared.drift, untouched="parameters have the same bits"))
    message = line(replace(moved, compared=beside, unnamed="only skips"))
    assert message.startswith("other signals moved at step 1") and message.endswith("; parameters have the same bits")
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
        assert line(short).startswith("numbers moved: HEAD ends after 2 steps, before BASE does, by"), (
            "not a difference"
        )
    assert moved.compared is not None
    flaky = replace(
        moved, verdict="flaky", compared=replace(moved.compared, verdict="flaky", flaky="two replays differ")
    )
    assert line(flaky) == "HEAD does not reproduce itself: two replays differ"
    unknown = replace(same, verdict="unverifiable", compared=None, reason="BASE does not start")
    assert line(unknown) == "not verifiable: BASE does not start"
    assert line(Failed("x", "no rollouts: record them")) == "error: no rollouts: record them"
    for known, who in ((culprits[:1], "by at least cccccccccc Change c"), (culprits[:2], "by at least 2 commits: ")):
        assert who in line(replace(moved, culprits=known, unnamed="only skips")), "one more moved them"


def test_other_steps_are_told_beside_other_numbers(tmp_path: Path) -> None:
    """That HEAD makes more or fewer steps is said whether or not numbers differ; alone, it is what its commit did."""
    a = flat(4, loss=1.0)
    fewer = pair(tmp_path, a, with_step(0, a, loss=2.0)[:2])
    assert not fewer.by_length_alone
    assert "HEAD ends after 2 steps, before BASE does." in pull_text(report(fewer))
    more = pair(tmp_path, a[:2], a, culprits=[Culprit(point("c", "Longer"), None, None)])
    text = pull_text(report(more))
    assert "numbers moved: HEAD goes on after 2 steps, where BASE ends, by cccccccccc Longer" in text
    assert "none in the steps that both make" in text and text.count("HEAD goes on") == 1


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
    result = pair(tmp_path, [sides[0]], [sides[1]])
    rows, alone = (
        {key: row for key, [row] in cells(result, what).items()} for what in ("at its worst step", "or in all")
    )
    assert rows["to_nan"] == ["0", "1 -> NaN", "NaN on one side", "no size"]
    assert alone["gone"] == ["0", "1 -> absent", "one side is absent", "no size"]
    assert alone["new"] == ["0", "absent -> 1", "one side is absent", "no size"]
    assert len(alone) == 2, "what both tell moved, and what one side tells did not"
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


def test_what_is_not_finite_and_has_no_bound_left_none(tmp_path: Path) -> None:
    """NaN in HEAD alone moves a case whose bounds all hold: it is told as that, and no file passes."""
    a = flat(3, loss=1.0, entropy=2.0)
    moved = report(pair(tmp_path, a, with_step(1, a, entropy=NAN), {"loss": Bound(rtol=0.1)}))
    assert moved.exit_code == 1
    assert "numbers moved to what is not finite at step 1 in entropy (loss)" in pull_text(moved)
    lines = [plain(line) for line in blocks_of(moved.results[0])[0].lines]
    assert lines[-1] == "entropy is finite in BASE, not in HEAD, first at step 1; no bound of the case judges it."
    suites = ElementTree.fromstring(junit(moved))  # noqa: S314
    assert (suites.get("tests"), suites.get("failures")) == ("1", "1")


def test_no_table_says_that_a_bound_holds_without_the_step_that_left_it(tmp_path: Path) -> None:
    """The step at which a relative bound was left need be neither the first, the worst nor the last that differs."""
    a = with_step(1, flat(4, loss=100.0), loss=1.0)
    b = with_step(0, with_step(1, with_step(2, a, loss=105.0), loss=1.5), loss=101.0)
    rows = cells(pair(tmp_path, a, b, {"loss": Bound(rtol=0.1)}))["loss"]
    assert [(row[0], row[-1]) for row in rows] == [
        ("0 (first)", "±10, holds"), ("2 (worst)", "±10, holds"), ("3 (last)", "±10, holds"),
        ("1 (first out of bound)", "±0.1, left"),
    ]  # fmt: skip


def test_a_metric_that_is_told_again_or_by_a_rank_is_judged_by_its_bound(tmp_path: Path) -> None:
    """`loss#1`, or `loss@1` where no `loss` is told, is shown with the bound of `loss`, since that judges it."""
    for other in ("loss#1", "loss@1"):
        a = [{"loss@0" if "@" in other else "loss": 1.0, other: 1.0} for _ in range(2)]
        result = pair(tmp_path, a, with_step(1, a, **{other: 3.0}), {"loss": Bound(atol=0.5)})
        assert [row[-1] for row in cells(result)[other]] == ["±0.5, left"]
        lines = [plain(line) for line in blocks_of(result)[0].lines]
        assert f"{other} left its bound (rtol 0, atol 0.5) at 1 of 2 steps, first at step 1." in lines


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
    host, gpu = Usage([900, 100000, 200000, 300000], 100 * mib, 0), Usage([500000], 100 * mib, 50 * mib)
    twice = Usage([900, 200000, 400000, 600000], 150 * mib, 0)
    rows = cells(pair(tmp_path, a, a, spent={"base": host, "head": twice}), "Cost")
    assert rows["step time, median"] == [["200 ms", "400 ms", "x2.00"]]
    assert rows["peak memory, host"] == [["100.0 MiB", "150.0 MiB", "x1.50"]]
    rows = cells(pair(tmp_path, a, a, spent={"base": host, "head": gpu}), "Cost")
    assert rows["peak memory"] == [["100.0 MiB (host)", "50.0 MiB (GPU)", "not comparable"]]
    result = pair(tmp_path, a, a, spent={"base": host, "head": None})
    assert cells(result, "Cost")["step time, median"] == [["200 ms", "not measured", "not measured"]]
    assert "rough" in below(result), "a time that was measured beside other work is no benchmark"
    unknown = pair(tmp_path, a, a, spent={"base": None, "head": None})
    assert not cells(unknown, "Cost") and "rough" not in below(unknown)
    assert any(plain(line).startswith("Not measured: ") for block in blocks_of(unknown) for line in block.lines)


def test_dates_are_utc() -> None:
    """A commit's date of another zone is shown in UTC, one that is none as it is."""
    assert utc("2026-11-20T23:30:00-05:00") == "2026-11-21 04:30 UTC" and utc("soon") == "soon"


EVIL = ["<script>alert(1)</script>", "| x", "a\\|b", "`", "``a`", "@someone", "@org/team", "<!-- c -->", "</details>",
        "*b* _i_ ~~s~~ [l](http://x)", "&lt;b&gt;", "$x$", "![i](http://e/i.png)", "https://evil.example",
        "www.evil.example", "<img src=x onerror=alert(1)>", "\x1b[31mred", "a\u202eb", "line\n\n# head",
        "\ud800half", "#12"]  # fmt: skip


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
    for pull_report in (
        report(moved),
        report(moved, failed, replace(moved, verdict="unverifiable", compared=None, reason=name)),
    ):
        text = comment(pull_report)
        check_text(text, [name])
        rows = [line for line in text.splitlines() if line.startswith("| `cccccccccc`")]
        assert rows and {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}, "a bar makes no cell"
        html = page(pull_report)
        assert "<script" not in html and "<img" not in html and "<!-- c" not in html
        assert not re.search("[\x1b\u202e\ud800]", html + text + pull_text(pull_report).replace("\n", ""))
        ElementTree.fromstring(junit(pull_report))  # noqa: S314


@at_most(60)
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
    links = rendered(escaped("o/r#12, GH-13, 1dd9e4121e, www.x http://y")).prose
    assert not re.search(r"#\d|GH-\d|[0-9a-f]{7}|www\.|://", links), "GitHub makes links of what it reads"


def sized(text: str) -> None:
    assert len(text) <= 65_536 and len(text.encode()) <= LIMIT


@pytest.mark.whole
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


@pytest.mark.whole
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


@at_most(12)
@given(st.lists(st.tuples(st.text(min_size=1, max_size=200), st.integers(1, 60)), min_size=1, max_size=40))
def test_a_comment_fits_whatever_is_in_it(names: list[tuple[str, int]]) -> None:
    """Any names, repeated any number of times: within the limit, each verdict said, the same command below."""
    entries = [Failed(name * times, name * times) for name, times in names]
    changed = replace(report(*entries), command="repro report pr a..b" + "".join(f" --case {n * t}" for n, t in names))
    text = comment(changed, limit=20_000)
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

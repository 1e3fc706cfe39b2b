"""The report of a bisect as files: the change beside why, sizes as a plot, the range with its ends, one palette."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from site_kit import EVIL, compared, culprit, nightly_run, point
from site_pages_kit import Page

from repro.nightly.records import NightlyRuns
from repro.nightly.report import nightly_text
from repro.pulls.blocks import blocks_of
from repro.pulls.pair import PairResult
from repro.report.bisect import bisect_text, write_report
from repro.report.change import change_in, change_of
from repro.report.palette import LIGHT, SERIES, css, themed
from repro.report.pieces import plain
from repro.site.results import read_results
from repro_bisect.driver.result import BisectResult, Culprit
from repro_bisect.explain.result import Size
from repro_bisect.probe.progress import Cost
from repro_golden.compare.traces import Comparison
from repro_golden.trace.tensor_difference import TensorDifference

SOURCE = Path(__file__).parent.parent / "repro"
SIZE = Size("aten._log_softmax.default", TensorDifference(9, 10, 1e-3, 1e-4, 40, 0, 10), [], ("float32", "float32"))


def result(culprit: Culprit, **given: Any) -> BisectResult:
    """A bisect that ended with a culprit."""
    good, bad = point(1), point(6)
    names = [point(n).commit for n in range(6, 1, -1)]
    made = BisectResult(
        outcome="found", good=good.commit, bad=bad.commit, case="tiny", predicate="bitwise", culprits=[culprit],
        end=culprit.divergence, explains_bad=True, verdicts={names[0]: "BAD", names[-1]: "GOOD"}, skips={},
        parents={name: [] for name in names}, subjects={}, cost=Cost(), git_steps=12, accepted={}, one_step=False,
        seconds=1.0, answered=1.0, machine="m", golden=None, ends=[good, bad],
    )  # fmt: skip
    return replace(made, **given)


def written(made: BisectResult, folder: Path) -> tuple[str, str]:
    """The report as Markdown and as a page."""
    text, page = (path.read_text() for path in write_report(made, folder, "repro bisect a..b"))
    return text, page


def sized(culprit: Culprit, histogram: list[tuple[int, int]]) -> Culprit:
    """The culprit with the sizes of its first difference."""
    assert culprit.explanation
    return replace(culprit, explanation=replace(culprit.explanation, size=replace(SIZE, histogram=histogram)))


def test_the_change_stands_beside_why(tmp_path: Path) -> None:
    """The hunk of the named line is a diff in Markdown and coloured lines in the page, once, although both name it."""
    text, page = written(result(culprit(3)), tmp_path)
    block = text[text.index("```diff") :].partition("\n```\n")[0].splitlines()
    assert block[1:3] == ["--- a/core/repro_core/rl/loss.py", "+++ b/core/repro_core/rl/loss.py"]
    assert block[3].startswith("@@ -87 +87 @@") and [line[0] for line in block[4:]] == ["-", "+"]
    assert text.index("## Why") < text.index("```diff")
    assert page.count('<span class="del">-    log_p') == page.count('<span class="add">+    log_p') == 1
    assert re.search(r'<div class="beside">\s*<pre class="why">aten._to_copy', page)


def test_a_culprit_that_left_the_training_as_it_was_is_told_so(tmp_path: Path) -> None:
    """No headline says that it moved the numbers, and text and reports say what is the same."""
    same = "trained parameters have the same bits in all 3 steps"
    comparison = Comparison(3, culprit(3).divergence, [], {}, untouched=same)
    made = result(replace(culprit(3), comparison=comparison))
    for text in (*written(made, tmp_path), bisect_text(made)):
        assert same in text and "changed tiny, but no bit of its trained parameters: first at" in text
    assert "moved the numbers of tiny: first at" in bisect_text(result(culprit(3)))


def test_a_report_names_both_ends_of_its_range(tmp_path: Path) -> None:
    """GOOD and BAD stand with subject and date; a range of one commit has no plot of one bar."""
    made = result(culprit(3))
    text, page = written(made, tmp_path)
    for n, name in ((1, "GOOD"), (6, "BAD")):
        date = point(n).date[:16].replace("T", " ")
        assert f"| {name} | `{point(n).commit[:10]}` | {point(n).subject} | {date} UTC |" in text
        assert re.search(rf"<b>{name}</b> <code>{point(n).commit[:10]}</code> [^<]+<span>{date} UTC</span>", page)
    assert page.count("<svg") == 1 and "commits, oldest first" in page
    assert "<svg" not in written(replace(made, parents={point(6).commit: []}), tmp_path)[1]
    assert [end["commit"] for end in made.to_mapping()["ends"]] == [made.good, made.bad]


def test_culprits_are_not_those_of_whom_no_test_tells(tmp_path: Path) -> None:
    """Beside named culprits, suspects have a line and a difference of their own, and no culprit has theirs."""
    first, second = culprit(3), culprit(4)
    assert first.divergence
    apart = replace(first.divergence, step=7, signal="theirs")
    suspects = [point(n).commit for n in (6, 5)]
    made = result(first, outcome="ambiguous", suspects=suspects, apart=apart, behind=suspects[0], explains_bad=None)
    for known, words in (([first], "1 commit"), ([first, second], "2 commits")):
        text, page = written(replace(made, culprits=known), tmp_path)
        for shown in (text, page, bisect_text(replace(made, culprits=known))):
            assert f"{words} and one of 2 more moved the numbers of tiny: no test tells which of these" in shown
            assert "One of these moved the numbers too, first at step 7" in shown and "culprit is one of" not in shown
            assert shown.count("theirs") == 1 and "Not all commits after" in shown
    text, page = written(replace(made, culprits=[]), tmp_path)
    assert "one of 2 commits moved the numbers of tiny" in text and "The culprit is one of:" in text
    assert "theirs" in text and "theirs" in page and "were not searched" in text


def test_noise_is_told_where_runs_disagree_alone(tmp_path: Path) -> None:
    """Exit codes that contradict one culprit are called noise only where the runs of some commit differ."""
    named = culprit(3)
    made = result(named, predicate="exit", posterior={named.commit.commit: 0.9}, rates=(0.25, 0.875))
    noisy, alike = (written(replace(made, alike=alike), tmp_path)[0] for alike in (False, True))
    assert "it reckons with 25 % and 88 %" in noisy and "all said the same" not in noisy
    assert "all said the same" in alike and "reckons" not in alike and " 90.0 %" in alike


def test_what_was_seen_is_told_beside_what_is_estimated(tmp_path: Path) -> None:
    """Replays are counted, and verdicts that contradict nothing are not called noisy for rates that allow for it."""
    named = culprit(3)
    made = result(named, posterior={named.commit.commit: 0.96}, rates=(0.22, 0.75))
    clean, noisy = (written(replace(made, tallies=((n, 3), (2, 2))), tmp_path)[0] for n in (0, 1))
    assert "without the culprit 0 of 3 replays were BAD, of others 2 of 2." in clean and "are noisy" not in clean
    assert "Verdicts are noisy: of commits without the culprit 1 of 3" in noisy


def test_sizes_are_plotted_in_the_page_and_drawn_in_letters_elsewhere(tmp_path: Path) -> None:
    """A histogram is a plot in the page alone; one bar, which a line says as well, is none."""
    many = sized(culprit(3), [(1, 4), (2, 3), (64, 2)])
    text, page = written(result(many), tmp_path)
    assert "up to       64 ULP" in text and "up to       64 ULP" not in page
    assert "distance in ULP (representable values of float32)" in page and page.count("<svg") == 2
    text, page = written(result(sized(culprit(3), [(64, 9)])), tmp_path)
    assert page.count("<svg") == 1 and "up to       64 ULP" in page and "up to       64 ULP" in text


def test_a_change_stays_text_and_within_bounds(tmp_path: Path) -> None:
    """No line of a change is markup, ends its block or rings; of a long one the lines around the named are shown."""
    lines = [f"+line {n}" for n in range(500)]
    lines[250] = "+    the(named)"
    lines[252], lines[253] = f"+{EVIL}\x1b[31m", "+```"
    hunk = "\n".join(["@@ -1,0 +1,500 @@", *lines])
    change = change_in(
        "c" * 40, [("a/<b>.py", hunk, "the(named)"), ("a/<b>.py", hunk, "the(named)"), ("n.py", "", "x")]
    )
    assert change is not None and change.more == 500 - 21
    assert change.note == "479 more lines of these hunks: `git show cccccccccc`"
    assert [kind for kind, _ in change.files[0].lines[:2]] == ["soft", "soft"] and len(change.files) == 1
    wide = change_in("c", [(f"{n}.py", f"@@ -1 +1 @@\n-{'x' * 9999}\n+y", "y") for n in range(30)])
    assert wide is not None and wide.more == 30 * 3 - 40
    assert max(len(line) for file in wide.files for _, line in file.lines) == 200
    assert change_in("c", []) is None and change_of(None) is None

    explained = culprit(3)
    assert explained.explanation and explained.explanation.named and explained.explanation.named.place
    place = replace(explained.explanation.named.place, file="a/<b>.py", hunk=hunk, text="the(named)")
    after = explained.explanation.after
    assert after.explained
    explained = replace(explained, explanation=replace(
        explained.explanation, before=replace(after, explained=None),
        after=replace(after, explained=replace(after.explained, place=place)),
    ))  # fmt: skip
    text, page = written(result(explained), tmp_path)
    assert "````diff" in text and "\x1b" not in text + page and EVIL.split("<")[1] in text
    seen = Page(page.encode())
    assert not seen.all("script") and not seen.all("img") and not seen.all("b.py")
    assert "+line 240" in page and "+line 239" not in page and "+line 261" not in page
    pair = PairResult("t", point(1), point(6), "moved", "", None, {}, {}, 1, [explained], None, "", [], "m", "", 1.0)
    assert [block.change for block in blocks_of(pair) if block.change] == [change_of(explained.explanation)]


def test_what_a_search_met_is_told_wherever_its_culprits_are(tmp_path: Path) -> None:
    """A pull request, a night and the site say what is to be known of a list of culprits, where it may lack some."""
    met = "whether commits after 4c53590b27 move the numbers is not known: BAD makes 3 of 4 steps"
    search = result(culprit(3), remarks=[met, "noted before"])
    pair = PairResult(
        "t", point(1), point(6), "moved", "", None, {}, {}, 5, [culprit(3)], search, "", ["noted before"], "m",
        "2025-11-03T03:12:45Z", 1.0,
    )  # fmt: skip
    notes = [plain(line) for block in blocks_of(pair) if block.title == "Notes" for line in block.lines]
    assert notes.count(met) == notes.count("noted before") == 1
    bisected = {"range": "a..b", "outcome": "ambiguous", "why": "only skips", "remarks": [met], "reproduce": "again"}
    run = nightly_run(
        status="changed", chain="b", bisect=bisected, culprits=[culprit(3).to_mapping()],
        compared=compared(3).to_mapping(),
    )  # fmt: skip
    shown = nightly_text([run], [Path("x")])
    assert f"bisected a..b: {met}" in shown and "bisected a..b: only skips" in shown
    NightlyRuns(tmp_path / "nights").write(run)
    (tmp_path / "pull.json").write_text(json.dumps(pair.to_mapping()))
    told = [found.notes for found in read_results(tmp_path / "nights", [tmp_path / "pull.json"]).comparisons]
    assert len(told) == 2 and all(f"search: {met}" in each for each in told)


@pytest.mark.parametrize("folder", ["report", "pulls", "nightly", "site"])
def test_one_module_holds_the_colours(folder: str) -> None:
    """No template, style sheet, script or plot of reports, pull requests, nights and the site has its own colours."""
    files = [path for path in (SOURCE / folder).rglob("*") if path.suffix in (".py", ".jinja", ".css", ".js")]
    assert files
    names = {path.name for path in files if re.search(r"#[0-9a-f]{6}\b|tableau|viridis", path.read_text())}
    assert names == ({"palette.py"} if folder == "report" else set())
    named = {name for path in files for name in re.findall(r"var\(--([a-z0-9-]+)\)", path.read_text())}
    # a status has three of its own on the site, and a docstring says how they are written
    assert named - {"back", "fore", "mark", "name"} <= {*LIGHT}


def test_plots_follow_the_scheme_of_their_page() -> None:
    """Each colour that plots use becomes the page's own, of which there is one in both schemes."""
    svg = "".join(f'<path fill="{colour}"/>' for colour in (*SERIES, LIGHT["changed-line"], LIGHT["line"]))
    matches = re.findall(r'fill="var\(--([a-z0-9-]+)\)"', themed(svg))
    assert matches == [*(f"series-{n}" for n in range(1, 7)), "changed-line", "line"]
    assert all(css().count(f"--{name}: #") == 2 for name in matches)

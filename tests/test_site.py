"""The page of all nights: its files, what they say, changes, series and comparisons."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import site_kit
from hypothesis import given
from hypothesis import strategies as st
from site_kit import MACHINES, culprit, nightly_run, point, pull
from site_pages_kit import OPTIONS, Page, case_page, data, made, pages, style

from repro.nightly.records import NightlyRun, Summary
from repro.site.build import build
from repro.site.changes import changes, together
from repro.site.charts import unit_of
from repro.site.difference_charts import difference_charts
from repro.site.matrix import matrix
from repro.site.results import Results, read_results
from repro.site.series import case_data, figures


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return made(tmp_path_factory.mktemp("results"), cases=2, days=40)


@pytest.fixture(scope="module")
def files(results: Results) -> dict[str, bytes]:
    return build(results, OPTIONS)


# -- the pages


def test_every_case_and_comparison_has_a_page_and_no_link_is_dead(files: dict[str, bytes], results: Results) -> None:
    """Pages for each case and each comparison; whatever a page names of the site is there."""
    assert {"index.html", "nights.html", "cases/tiny-grpo.html", "cases/qwen-0.5b-replay.html"} <= set(files)
    compared = sum(nightly_run.compared is not None for nightly_run in results.runs)
    assert sum(name.startswith("comparisons/") for name in files) == compared + 2 and compared > 2
    for name, page in pages(files):
        for tag, attributes in page.elements:
            link = attributes.get("href") or attributes.get("src") or ""
            if link.startswith(("data:", "#")) or not link:
                continue
            assert not re.match(r"[a-z]+:", link), f"{name}: {tag} {link}"
            target = (Path("/") / Path(name).parent / unquote(link.split("#")[0])).resolve().relative_to("/")
            assert target.as_posix() in files, f"{name}: {link}"


def test_matrix_has_a_symbol_and_a_word_for_every_night(files: dict[str, bytes]) -> None:
    """A real table: rows are cases on machines, columns are nights, newest first; each cell says its status twice."""
    raw = files["index.html"].decode()
    assert re.search(r'<table class="matrix" role="grid"', raw)
    row = raw[raw.index('<tr><th scope="row">') : raw.index("</tr>", raw.index('<tr><th scope="row">'))]
    assert row.count("<td") == 30
    for status, symbol in (("green", "✓"), ("changed", "≠")):
        assert re.search(rf'class="s-{status}"><a [^>]*><i aria-hidden="true">{symbol}</i><b>{status}</b></a>', raw)
    days = re.findall(r'<th scope="col" class="day"><time datetime="([^"]+)"', raw)
    assert days == sorted(days, reverse=True) and days[0] == "2026-11-22" and len(days) == 30
    assert len(re.findall('class="day"', files["nights.html"].decode())) == 40


def test_each_status_has_a_colour_of_its_own() -> None:
    """No two statuses share a background."""
    css = style("light")
    kinds = ("green", "changed", "flaky", "error", "not-judged", "no-run")
    assert len({css[kind] for kind in kinds}) == 6 and len({css[f"{kind}-line"] for kind in kinds}) == 6


def test_several_results_of_a_date_show_the_worst() -> None:
    """A cell of two results of one day is the worst of them and says how many there were."""
    runs = [
        nightly_run(at="2026-11-20T03:00:00Z", status="flaky"),
        nightly_run(at="2026-11-20T09:00:00Z", number=1),
        nightly_run(at="2026-11-21T03:00:00Z", machine="other", number=2),
    ]
    table = matrix(Results(runs, (), Path()))
    cells = {row.machine: row.cells for row in table.rows}
    assert [cell.status for cell in cells[MACHINES[0]]] == ["no run", "flaky"]
    cell = cells[MACHINES[0]][1]
    assert cell.text.startswith("2026-11-20 03:00 UTC flaky (the worst of 2 that day; the last, 09:00 UTC, green)")
    assert cell.words == "flaky, then green" and cells[MACHINES[0]][0].href == ""
    assert table.newest == [("green", 1, ""), ("no run", 1, "")]
    assert table.dates == ["2026-11-21", "2026-11-20"] and table.months == [("2026-11", 2)]
    assert table.counts["flaky"] == table.counts["green"] == 1 and table.counts["no run"] == 2


def test_runs_of_one_day_do_not_contradict_each_other(tmp_path: Path) -> None:
    """The overview says what a later run of the day found; the case's page lists the day's runs, newest first."""
    red = {"chain": "b", "status": "changed"}
    runs = [
        nightly_run(at="2026-11-20T03:00:00Z", number=1),
        nightly_run(at="2026-11-20T09:10:00Z", number=2, **red),
        nightly_run(at="2026-11-20T12:40:00Z", number=3, chain="b"),
        nightly_run(at="2026-11-20T13:00:00Z", number=4, chain="c", status="changed"),
        nightly_run(at="2026-11-20T14:30:00Z", number=4, chain="c"),
    ]
    page = case_page(runs, tmp_path)
    lead = page[page.index("The last night, newest run first:") : page.index("<noscript>")]
    shown = re.findall(r"</span> (\w+)</span> <time datetime=\"[^\"]+\">2026-11-20 (\d\d:\d\d)</time>", lead)
    assert shown == [("green", "14:30"), ("changed", "13:00"), ("green", "12:40"), ("changed", "09:10"),
                     ("green", "03:00")]  # fmt: skip
    table = page[page.index('id="changes"') : page.index('id="series"')]
    assert re.findall(r">2026-11-20 (\d\d:\d\d)</time></td>", table) == ["13:00", "09:10"]
    raw = build(Results(runs, (), Path()), OPTIONS)["index.html"].decode()
    assert "<b>1</b> changed (1 green since)" in raw
    assert '<small aria-hidden="true">✓</small><b>changed, then green</b>' in raw


def test_pages_are_built_for_all_readers(files: dict[str, bytes]) -> None:
    """Language, skip link, landmarks, one h1, headings in order, unique ids, labelled controls, scoped headers."""
    for name, page in pages(files):
        assert page.all("html")[0]["lang"] == "en" and len(page.all("main")) == len(page.all("h1")) == 1
        assert page.all("a")[0]["href"] == "#main" and page.all("header") and page.all("nav") and page.all("footer")
        levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
        assert all(b <= a + 1 for a, b in pairwise(levels)), f"{name}: {levels}"
        ids = [a["id"] for _, a in page.elements if a.get("id")]
        assert len(ids) == len(set(ids))
        assert all("scope" in attributes for attributes in page.all("th")), name
    raw = files["cases/tiny-grpo.html"].decode()
    assert len(re.findall(r"<label>[^<]+<select", raw)) == raw.count("<select")
    assert raw.count("<figure") == raw.count('<details class="data">') == raw.count("<figcaption><h4>")


def test_every_page_says_what_it_was_built_from(files: dict[str, bytes]) -> None:
    """The number of nights, the newest result's time, repro's version and the command that builds the same."""
    for _, page in pages(files):
        assert re.search(r"Built from 15\d nights \(2026-10-14 03:12 UTC to 2026-11-22 03:\d\d UTC\)", page.text)
        assert "repro report publish --out site --results golden/nights --pull report.json --title Numbers" in page.text
        assert re.search(r"by repro \d+\.\d+", page.text)


# -- changes


def kinds(runs: list[NightlyRun]) -> list[tuple[str, str, int]]:
    return [(change.run.at[8:10], change.kind, change.runs) for change in changes(runs)]


def test_changes_are_where_bits_or_judgements_change() -> None:
    """Other bits, a failed check with the same bits, and another case are three kinds; a verdict that stays is none."""
    history = [
        nightly_run(number=0),
        nightly_run(number=1),
        nightly_run(number=2, chain="b", status="changed"),
        nightly_run(number=3, chain="b", status="changed"),
        nightly_run(number=4, chain="b"),
        nightly_run(number=5, chain="b", status="changed"),
        nightly_run(number=6, chain="c", key="other"),
    ]
    assert kinds(history) == [("03", "numbers", 3), ("06", "judged", 1), ("07", "case", 1)]


def test_flaky_and_broken_nights_are_no_change() -> None:
    """Bits that do not reproduce, and nights without a trace, are passed over: the next is compared with the last."""
    history = [
        nightly_run(number=0),
        nightly_run(number=1, chain="x", status="flaky"),
        nightly_run(number=2, chain="", status="error"),
        nightly_run(number=3),
        nightly_run(number=4, chain="y", status="flaky"),
        nightly_run(number=5, chain="b", status="changed"),
    ]
    (only,) = changes(history)
    assert only.run is history[5] and only.before is history[3]
    assert only.span == (point(3).commit, point(5).commit)


def test_a_red_that_goes_on_is_told_once() -> None:
    """Nights without a trace, and flaky ones, between red nights of one chain do not make the red begin again."""
    green, red = nightly_run(number=1), {"chain": "b", "status": "changed"}
    between = [nightly_run(number=3, chain="", status="error"), nightly_run(number=4, chain="c", status="flaky")]
    changed = changes([green, nightly_run(number=2, **red), *between, nightly_run(number=5, **red)])
    assert [change.run.commit["commit"] for change in changed] == [point(2).commit]


def test_machines_are_compared_with_themselves_and_told_together() -> None:
    """Two machines with bits of their own do not change each other; one change on both is one line."""
    history = [
        nightly_run(number=number, machine=machine, chain=f"{machine} {number > 1}")
        for number in range(4)
        for machine in ("a", "b")
    ]
    changed = changes(history)
    assert [(change.run.machine, change.run.at[8:10]) for change in changed] == [
        ("a", "03"),
        ("b", "03"),
    ]
    (group,) = together(changed)
    assert [change.run.machine for change in group] == ["a", "b"]
    assert changes([]) == []


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["green", "changed", "flaky", "error"])), max_size=12)
)
def test_every_change_of_bits_is_told(given: list[tuple[str, Any]]) -> None:
    """Whatever the history: among the nights that count, a change stands exactly where the bits are not the last's."""
    history = [nightly_run(number=n, chain="" if s == "error" else c, status=s) for n, (c, s) in enumerate(given)]
    counted = [nightly_run for nightly_run in history if nightly_run.chain and nightly_run.status != "flaky"]
    wanted = [b for a, b in pairwise(counted) if a.chain != b.chain]
    assert [change.run for change in changes(history) if change.kind == "numbers"] == wanted


def test_culprits_are_listed_where_they_are_known(tmp_path: Path) -> None:
    """A named culprit stands with its explanation; without one the range does; with one commit alone, no commit."""
    before, after = nightly_run(number=1), nightly_run(number=4, chain="b", status="changed")
    known = case_page([before, replace(after, culprits=[culprit(3).to_mapping()])], tmp_path / "a")
    assert f"{point(3).commit[:10]}</code> {point(3).subject}" in known and "stands where" in known
    span = case_page([before, after], tmp_path / "b")
    assert re.search(f'{point(1).commit[:10]}</code>\\s*\\.\\.<code class="commit">{point(4).commit[:10]}', span)
    for n, same in enumerate((replace(after, commit=before.commit), replace(after, tree=before.tree))):
        told = case_page([before, same], tmp_path / f"c{n}")
        assert "the numbers moved without a change of its code" in told and "somewhere in" not in told
    other = case_page([before, replace(after, commit=before.commit, key="other")], tmp_path / "d")
    assert "the case, its rollouts or its number of steps changed" in other and "noise did" not in other
    newer = replace(after, status="green", version="0.8.0")
    told = case_page([before, newer], tmp_path / "e")
    assert "repro was 0.7.0 before and is 0.8.0: chains are not compared" in told and "somewhere in" not in told
    (moved,) = changes([before, replace(newer, status="changed")])
    assert moved.kind == "numbers", "tonight's repro replayed both sides of what a check calls changed"


# -- series


def test_decisive_metrics_come_first() -> None:
    """grad_norm, KL, loss and the log-prob gap lead, under whatever folder they were logged; cost comes last."""
    summary = Summary(1.0, 1.0, 1.0, 1.0, 1.0)
    names = ("a", "train/loss", "train/grad_norm", "kl_loss", "train_rollout_logprob_abs_diff")
    plots = figures([nightly_run(metrics=dict.fromkeys(names, summary))])
    assert [(figure.name, figure.group) for figure in plots] == [
        ("train/grad_norm", "first"), ("KL k3", "first"), ("kl_loss", "first"), ("train/loss", "first"),
        ("train_rollout_logprob_abs_diff", "first"), ("a", "other"), ("KL k1", "other"),
        ("step time", "cost"), ("memory of the host", "cost"), ("wall time", "cost"),
    ]  # fmt: skip
    assert [unit_of(name) for name in names] == ["", "", "", "nats", "nats"] and unit_of("train/entropy") == "nats"
    assert [figure.unit for figure in plots[-3:]] == ["s", "MiB", "s"]


def test_what_is_not_finite_is_kept() -> None:
    """NaN and both infinities stay in the data as words, a night without the metric as null; -0.0 and 1e-310 stay."""
    odd = [math.nan, math.inf, -math.inf, 1e-310, 0.1 + 0.2]
    runs = [nightly_run(number=n, metrics={"m": Summary(v, v, v, v, v)}) for n, v in enumerate(odd)] + [
        nightly_run(number=9, metrics={})
    ]
    drawn = figures(runs)
    data = case_data(Results(runs, (), Path()), runs, (), drawn)
    assert data["charts"]["m"]["values"]["last"] == ["NaN", "Infinity", "-Infinity", 1e-310, 0.3, None]
    names = {layer.get("name") for layer in drawn[0].spec["layer"]}
    assert {"edge_nan", "edge_above", "edge_below", "changes", "marks"} <= names


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ((1.0, 20.0), True),
        ((1.0, 2.0), False),
        ((0.0, 5.0), False),
        ((-1.0, 100.0), False),
        ((math.nan, math.inf), False),
    ],
)
def test_log_scale_is_offered_where_it_serves(values: tuple[float, float], wanted: bool) -> None:
    """Only for values above 0 that span a factor of ten."""
    runs = [nightly_run(number=n, metrics={"m": Summary(v, v, v, v, v)}) for n, v in enumerate(values)]
    assert next(figure.log for figure in figures(runs) if figure.name == "m") is wanted


def test_charts_name_their_axes_and_describe_themselves(files: dict[str, bytes]) -> None:
    """Every chart has a title on both axes (the heat-map's signals name themselves) and a description."""
    for name in files:
        if not name.startswith("data/"):
            continue
        for key, chart in data(files, name)["charts"].items():
            spec = chart["spec"]
            assert len(spec["description"]) > 30 and "$schema" in spec and "config" not in spec
            layers = spec.get("layer", [spec])
            encodings = {axis: [layer["encoding"].get(axis, {}) for layer in layers] for axis in "xy"}
            titles = {axis: [e.get("title") for e in encoding if "field" in e] for axis, encoding in encodings.items()}
            assert all(titles["x"]) and (all(titles["y"]) or key == "heat"), f"{name} {key}: {titles}"


# -- comparisons


def test_comparison_shows_first_worst_and_last(tmp_path: Path) -> None:
    """The metrics' table has the values of all three places, and NaN where a side is NaN."""
    site_kit.write(tmp_path / "nights", [], {tmp_path / "p.json": [pull(5, odd=True)]})
    built = build(read_results(tmp_path, [tmp_path / "p.json"]), OPTIONS)
    (name,) = (name for name in built if name.startswith("comparisons/"))
    page = Page(built[name])
    drift = json.loads((tmp_path / "p.json").read_text())["results"][0]["compared"]["drift"]
    for metric, places in drift["metrics"].items():
        assert metric in page.text
        if places["first"] and metric != "grad_norm":
            assert all(f"{places[place][side]:.7g}" in page.text for place in ("first", "worst") for side in "ab")
    assert "NaN" in page.text and "KL k3" in page.text and "1.1e-09" in page.text and "moved" in page.text


def test_sources_stand_beside_each_other_with_line_numbers(tmp_path: Path) -> None:
    """Both versions' statement, its line number, and the operation that reads the same and makes others."""
    site_kit.write(tmp_path / "nights", [], {tmp_path / "p.json": [pull()]})
    built = build(read_results(tmp_path, [tmp_path / "p.json"]), OPTIONS)
    raw = next(raw for name, raw in built.items() if name.startswith("comparisons/")).decode()
    numbered = re.findall(r'<span class="line touched"><span class="at">(\d+)</span>([^\n]+)', raw)
    assert [at for at, _ in numbered] == ["87", "87"]
    assert "bfloat16" not in numbered[0][1] and "bfloat16" in numbered[1][1]
    assert (
        "aten._log_softmax.default" in raw and 'class="del">-    log_p' in raw and "torch 2.12.0 became 2.13.0" in raw
    )


def test_heat_map_tells_measured_sampled_and_unmeasured_apart() -> None:
    """Each differing cell is drawn; one without a size has no shade; a zero distance is not lost on the log scale."""
    plot_data = {
        "steps": [4, 5], "signals": ["loss a", "grad b"], "more": 3, "histogram": [], "of": {}, "tokens": None,
        "cells": [[0, 0, 1e-5, 3, True, ""], [1, 0, 0.0, 0, False, ""], [1, 1, None, None, False, "shape"],
                  [0, 1, "7ff0000000000000", 9, True, ""]],
    }  # fmt: skip
    (heat,) = difference_charts(plot_data, ("a", "b"))
    assert heat.columns["kind"] == ["on every element", "on a sample", "not measured", "not measured"]
    assert heat.columns["shade"] == [1e-5, 1e-5, None, None] and heat.columns["size"] == [1e-5, 0, None, None]
    assert heat.columns["step"] == [4, 5, 5, 4] and heat.columns["text"][2] == "shape" and "3 further" in heat.note


def test_tokens_that_are_not_finite_are_counted() -> None:
    """A pair with NaN or an infinity keeps its place in the data and is told in the note."""
    plot_data = site_kit.compared(3, odd=True).plot_data
    assert plot_data is not None
    tokens = difference_charts(plot_data.to_mapping(), ("a", "b"))[2]
    assert tokens.columns["a"][3] == "-Infinity" and tokens.columns["b"][4] == "NaN"
    assert "3 are not finite" in tokens.note and len(tokens.columns["a"]) == 400

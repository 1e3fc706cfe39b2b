"""The page of all nights: its files, what they say, what they never run, and the folder that they are put in."""

from __future__ import annotations

import colorsys
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import site_kit
from hypothesis import given, settings
from hypothesis import strategies as st
from site_kit import EVIL, MACHINES, culprit, night, point, pull

from repro.site.build import Options, build
from repro.site.changes import changes, together
from repro.site.charts import unit_of
from repro.site.folder import MARKER
from repro.site.folder import replace as put
from repro.site.matrix import matrix
from repro.site.names import number, page_name, script
from repro.site.pictures import pictures
from repro.site.results import Results, read_results
from repro.site.series import case_data, figures
from repro_golden.errors import MachineFailureError, ReproError
from repro_golden.nights import Night, Summary

SETTINGS = settings(deadline=None, derandomize=True, max_examples=100)
OPTIONS = Options("Numbers", "golden/nights", ["report.json"], "")


class Page(HTMLParser):
    """The elements of a page, its links and its text."""

    def __init__(self, raw: bytes) -> None:
        """Read a page."""
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(raw.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element begins."""
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        """Text."""
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of every element of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]


def published(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "repro", "report", "publish", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def data(files: Mapping[str, bytes], name: str) -> Any:
    """What a data script keeps."""
    raw = files[name].decode()
    return json.loads(raw[raw.index("] = ") + 4 : -2])


def made(folder: Path, **given: Any) -> Results:
    pulls = {folder / "report.json": [pull(), pull(7, case="pull-only", verdict="identical")]}
    site_kit.write(folder / "nights", site_kit.nights(**given), pulls)
    return read_results(folder / "nights", list(pulls))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return made(tmp_path_factory.mktemp("results"), cases=2, days=40)


@pytest.fixture(scope="module")
def files(results: Results) -> dict[str, bytes]:
    return build(results, OPTIONS)


def pages(files: Mapping[str, bytes]) -> Iterator[tuple[str, Page]]:
    yield from ((name, Page(raw)) for name, raw in files.items() if name.endswith(".html"))


# -- the pages


def test_every_case_and_comparison_has_a_page_and_no_link_is_dead(files: dict[str, bytes], results: Results) -> None:
    """Pages for each case and each comparison; whatever a page names of the site is there."""
    assert {"index.html", "nights.html", "cases/tiny-grpo.html", "cases/qwen-0.5b-replay.html"} <= set(files)
    compared = sum(night.compared is not None for night in results.nights)
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
    nights = [
        night(at="2026-11-20T03:00:00Z", status="flaky"),
        night(at="2026-11-20T09:00:00Z", number=1),
        night(at="2026-11-21T03:00:00Z", machine="other", number=2),
    ]
    table = matrix(Results(nights, (), Path()))
    cells = {row.machine: row.cells for row in table.rows}
    assert [cell.status for cell in cells[MACHINES[0]]] == ["no run", "flaky"]
    assert "the worst of 2" in cells[MACHINES[0]][1].text and cells[MACHINES[0]][0].href == ""
    assert table.dates == ["2026-11-21", "2026-11-20"] and table.months == [("2026-11", 2)]
    assert table.counts["flaky"] == table.counts["green"] == 1 and table.counts["no run"] == 2


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


def kinds(nights: list[Night]) -> list[tuple[str, str, int]]:
    return [(change.night.at[8:10], change.kind, change.nights) for change in changes(nights)]


def test_changes_are_where_bits_or_judgements_change() -> None:
    """Other bits, a failed check with the same bits, and another case are three kinds; a verdict that stays is none."""
    history = [
        night(number=0),
        night(number=1),
        night(number=2, chain="b", status="changed"),
        night(number=3, chain="b", status="changed"),
        night(number=4, chain="b"),
        night(number=5, chain="b", status="changed"),
        night(number=6, chain="c", key="other"),
    ]
    assert kinds(history) == [("03", "numbers", 3), ("06", "judged", 1), ("07", "case", 1)]


def test_flaky_and_broken_nights_are_no_change() -> None:
    """Bits that do not reproduce, and nights without a trace, are passed over: the next is compared with the last."""
    history = [
        night(number=0),
        night(number=1, chain="x", status="flaky"),
        night(number=2, chain="", status="error"),
        night(number=3),
        night(number=4, chain="y", status="flaky"),
        night(number=5, chain="b", status="changed"),
    ]
    (only,) = changes(history)
    assert only.night is history[5] and only.before is history[3]
    assert only.span == (point(3).commit, point(5).commit)


def test_machines_are_compared_with_themselves_and_told_together() -> None:
    """Two machines with bits of their own do not change each other; one change on both is one line."""
    history = [
        night(number=number, machine=machine, chain=f"{machine} {number > 1}")
        for number in range(4)
        for machine in ("a", "b")
    ]
    found = changes(history)
    assert [(change.night.machine, change.night.at[8:10]) for change in found] == [("a", "03"), ("b", "03")]
    (group,) = together(found)
    assert [change.night.machine for change in group] == ["a", "b"]
    assert changes([]) == []


@SETTINGS
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["green", "changed", "flaky", "error"])), max_size=12)
)
def test_every_change_of_bits_is_told(given: list[tuple[str, Any]]) -> None:
    """Whatever the history: among the nights that count, a change stands exactly where the bits are not the last's."""
    history = [night(number=n, chain="" if s == "error" else c, status=s) for n, (c, s) in enumerate(given)]
    counted = [one for one in history if one.chain and one.status != "flaky"]
    wanted = [b for a, b in pairwise(counted) if a.chain != b.chain]
    assert [change.night for change in changes(history) if change.kind == "numbers"] == wanted


def case_page(nights: list[Night], tmp_path: Path, **options: Any) -> str:
    folder = site_kit.write(tmp_path / "nights", nights)
    built = build(read_results(folder, ()), replace(OPTIONS, **options))
    return built["cases/demo.html"].decode()


def test_culprits_are_listed_where_they_are_known(tmp_path: Path) -> None:
    """A named culprit stands with its explanation; without one the range does; with one commit alone, no commit."""
    before, after = night(number=1), night(number=4, chain="b", status="changed")
    known = case_page([before, replace(after, culprits=[culprit(3).to_mapping()])], tmp_path / "a")
    assert f"{point(3).commit[:10]}</code> {point(3).subject}" in known and "stands where" in known
    span = case_page([before, after], tmp_path / "b")
    assert re.search(f'{point(1).commit[:10]}</code>\\s*\\.\\.<code class="commit">{point(4).commit[:10]}', span)
    same = case_page([before, replace(after, commit=before.commit)], tmp_path / "c")
    assert "without a new commit" in same


# -- series


def test_decisive_metrics_come_first() -> None:
    """grad_norm, KL, loss and the log-prob gap lead, under whatever folder they were logged; cost comes last."""
    summary = Summary(1.0, 1.0, 1.0, 1.0, 1.0)
    names = ("a", "train/loss", "train/grad_norm", "kl_loss", "train_rollout_logprob_abs_diff")
    found = figures([night(metrics=dict.fromkeys(names, summary))])
    assert [(figure.name, figure.group) for figure in found] == [
        ("train/grad_norm", "first"), ("KL k3", "first"), ("kl_loss", "first"), ("train/loss", "first"),
        ("train_rollout_logprob_abs_diff", "first"), ("a", "other"), ("KL k1", "other"),
        ("step time", "cost"), ("memory of the host", "cost"), ("wall time", "cost"),
    ]  # fmt: skip
    assert [unit_of(name) for name in names] == ["", "", "", "nats", "nats"] and unit_of("train/entropy") == "nats"
    assert [figure.unit for figure in found[-3:]] == ["s", "MiB", "s"]


def test_what_is_not_finite_is_kept() -> None:
    """NaN and both infinities stay in the data as words, a night without the metric as null; -0.0 and 1e-310 stay."""
    odd = [math.nan, math.inf, -math.inf, 1e-310, 0.1 + 0.2]
    nights = [night(number=n, metrics={"m": Summary(v, v, v, v, v)}) for n, v in enumerate(odd)] + [
        night(number=9, metrics={})
    ]
    drawn = figures(nights)
    found = case_data(Results(nights, (), Path()), nights, (), drawn)
    assert found["charts"]["m"]["values"]["last"] == ["NaN", "Infinity", "-Infinity", 1e-310, 0.3, None]
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
    nights = [night(number=n, metrics={"m": Summary(v, v, v, v, v)}) for n, v in enumerate(values)]
    assert next(figure.log for figure in figures(nights) if figure.name == "m") is wanted


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
            titles = {axis: [e.get("title") for e in own if "field" in e] for axis, own in encodings.items()}
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
    picture = {
        "steps": [4, 5], "signals": ["loss a", "grad b"], "more": 3, "histogram": [], "of": {}, "tokens": None,
        "cells": [[0, 0, 1e-5, 3, True, ""], [1, 0, 0.0, 0, False, ""], [1, 1, None, None, False, "shape"],
                  [0, 1, "7ff0000000000000", 9, True, ""]],
    }  # fmt: skip
    (heat,) = pictures(picture, ("a", "b"))
    assert heat.columns["kind"] == ["on every element", "on a sample", "not measured", "not measured"]
    assert heat.columns["shade"] == [1e-5, 1e-5, None, None] and heat.columns["size"] == [1e-5, 0, None, None]
    assert heat.columns["step"] == [4, 5, 5, 4] and heat.columns["text"][2] == "shape" and "3 further" in heat.note


def test_tokens_that_are_not_finite_are_counted() -> None:
    """A pair with NaN or an infinity keeps its place in the data and is told in the note."""
    picture = site_kit.compared(3, odd=True).picture
    assert picture is not None
    tokens = pictures(picture.to_mapping(), ("a", "b"))[2]
    assert tokens.columns["a"][3] == "-Infinity" and tokens.columns["b"][4] == "NaN"
    assert "3 are not finite" in tokens.note and len(tokens.columns["a"]) == 400


# -- nothing of a result is ever run


@SETTINGS
@given(
    st.text(),
    st.recursive(st.text() | st.none() | st.integers(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)),
)
def test_data_scripts_hold_no_markup_and_lose_nothing(key: str, value: Any) -> None:
    """Any text in a data script stays text: no <, >, & or line separator is written, and all of it is read back."""
    raw = script(key, value)
    assert not set("<>&\u2028\u2029") & set(raw)
    assert json.loads(raw[raw.index("] = ") + 4 : -2]) == value


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A site in which every text is a program."""
    return build(evil_results(tmp_path_factory.mktemp("evil")), Options(EVIL, EVIL, [EVIL], ""))


def evil_results(folder: Path) -> Results:
    def evil(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: item if key in keep else evil(item) for key, item in value.items()}
        return [evil(item) for item in value] if isinstance(value, list) else EVIL if isinstance(value, str) else value

    keep = {"commit", "point", "at", "verdict", "status", "hunk", "base", "head"}
    pair = evil(json.loads(json.dumps(pull().to_mapping() | {"base": {"commit": EVIL}, "head": {"commit": EVIL}})))
    (folder / "report.json").write_text(json.dumps(pair))
    one = night(number=4, case=EVIL, machine=EVIL, chain="b", status="changed", reproduce=EVIL, version=EVIL)
    summary = Summary(1.0, math.nan, 1.0, 1.0, 1.0)
    one = replace(
        one,
        commit=dict.fromkeys(one.commit, EVIL),
        metrics={EVIL: summary},
        checks=[replace(one.checks[0], name=EVIL, text=EVIL)],
        compared=evil(json.loads(json.dumps(site_kit.compared(1).to_mapping()))) | {"verdict": "moved"},
        culprits=[evil(json.loads(json.dumps(culprit(3).to_mapping())))],
        bisect=dict.fromkeys(("range", "outcome", "reproduce"), EVIL),
    )
    (folder / "nights/m/c").mkdir(parents=True)
    for index, each in enumerate((replace(one, chain="a", at="2026-11-01T00:00:00Z", compared=None), one)):
        (folder / f"nights/m/c/{index}.json").write_text(json.dumps(each.to_mapping()))
    return read_results(folder / "nights", [folder / "report.json"])


def test_hostile_texts_stay_texts(hostile: dict[str, bytes]) -> None:
    """Whatever cases, machines, commits, metrics and reports are called: no element, attribute or address of theirs."""
    assert sum(name.endswith(".html") for name in hostile) == 4
    for name, page in pages(hostile):
        assert not page.all("img") and "alert" not in [tag for tag, _ in page.elements]
        for tag, attributes in page.elements:
            assert not any(key.startswith("on") or key == "style" for key in attributes), f"{name}: {tag}"
        assert all(set(a) == {"defer", "src"} and "<" not in str(a["src"]) for a in page.all("script")), name
        assert EVIL.split("\u2028")[0] in page.text, name
    for name, raw in hostile.items():
        assert re.fullmatch(r"[A-Za-z0-9._~/-]+", name) and ".." not in name
        assert not name.startswith("data/") or b"<" not in raw


def test_pages_forbid_the_network_and_eval(files: dict[str, bytes]) -> None:
    """Every page has the policy before anything that it governs, and neither a script nor a style in it."""
    for name, page in pages(files):
        policy = next(a for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")["content"] or ""
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ") and "unsafe" not in policy
        tags = [tag for tag, _ in page.elements]
        assert tags.index("meta") < tags.index("link") and "style" not in tags, name
        assert all(attributes.get("src") for attributes in page.all("script"))


@pytest.mark.parametrize(
    "bad", ["javascript:alert(1)", "github.com/o/r", 'https://x/"onclick="y', "file:///etc", "https://a b"]
)
def test_repository_must_be_a_web_address(bad: str) -> None:
    """What a browser would run, or would not find, is refused in one line."""
    with pytest.raises(ReproError, match="--repository"):
        replace(OPTIONS, repository=bad)


def test_commits_are_links_only_with_a_repository(tmp_path: Path) -> None:
    """With an address full ids are links to it; without one they are plain text."""
    nights = [night(number=1), night(number=2, chain="b", status="changed")]
    linked = case_page(nights, tmp_path / "a", repository="https://example.org/o/r/")
    assert f'href="https://example.org/o/r/commit/{point(2).commit}"' in linked
    plain = case_page(nights, tmp_path / "b")
    assert "https://" not in plain and f'<code class="commit">{point(2).commit[:10]}</code>' in plain


# -- names


@SETTINGS
@given(st.lists(st.text(min_size=1) | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]*", fullmatch=True), unique=True))
def test_no_two_cases_share_a_file(names: list[str]) -> None:
    """File names are plain, and differ even where the file system does not tell capitals apart."""
    found = [page_name(name) for name in names]
    assert len({name.lower() for name in found}) == len(names)
    assert all(re.fullmatch(r"[a-z0-9_~.-]{1,80}", name) and not name.startswith(".") for name in found)


def test_names_that_differ_in_case_alone_and_devices_are_kept_apart() -> None:
    """`demo` is itself; `Demo`, `DEMO` and Windows' devices are told by a digest."""
    assert page_name("demo-1.5b") == "demo-1.5b"
    assert len({page_name(name) for name in ("demo", "Demo", "DEMO", "demo~")}) == 4
    assert (
        page_name("Demo").startswith("demo~") and page_name("nul").startswith("nul~") and page_name("con.x") != "con.x"
    )
    assert "/" not in page_name("../../etc/passwd") and page_name("é").startswith("case~")


# -- the folder


def test_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    """Another process, folder, hash seed and time: not one byte differs; the command that pages show makes them too."""
    site_kit.write(tmp_path / "golden/nights", site_kit.nights(cases=1, machines=2, days=5))
    outs = []
    for name in ("one", "two"):
        done = published("--out", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = (path for path in (tmp_path / name).rglob("*") if path.is_file())
        outs.append({path.relative_to(tmp_path / name): path.read_bytes() for path in found})
    assert outs[0] == outs[1] and len(outs[0]) > 8
    assert (tmp_path / "one" / "assets" / "vega.js").stat().st_size > 500_000


def test_an_earlier_site_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """Pages of the earlier site that the new one lacks are gone; an empty folder serves; nothing is left beside it."""
    out = tmp_path / "site"
    out.mkdir()
    put(out, {"index.html": b"1", "cases/old.html": b"1"})
    put(out, {"index.html": b"2"})
    assert {p.name for p in out.iterdir()} == {"index.html", MARKER} and (out / "index.html").read_bytes() == b"2"
    assert list(tmp_path.iterdir()) == [out] and out.stat().st_mode & 0o777 == 0o755


def test_a_folder_with_anything_else_is_left_alone(tmp_path: Path) -> None:
    """A stranger's file, even one put into an earlier site, refuses the folder and stays; so does a file as --out."""
    out = tmp_path / "site"
    put(out, {"index.html": b"1"})
    (out / "mine.txt").write_text("mine")
    with pytest.raises(ReproError, match=r"mine\.txt.*empty folder"):
        put(out, {"index.html": b"2"})
    assert (out / "index.html").read_bytes() == b"1" and (out / "mine.txt").read_text() == "mine"
    with pytest.raises(ReproError, match="is a file"):
        put(out / "mine.txt", {})
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "index.html").write_text("mine")
    with pytest.raises(ReproError, match="not of an earlier site"):
        put(tmp_path / "notes", {})


class Torn(dict[str, bytes]):
    """Files of which the second is never made."""

    def items(self) -> Any:
        """The first, then the end."""
        yield "index.html", b"2"
        raise KeyboardInterrupt


def test_an_interrupted_build_leaves_the_earlier_site(tmp_path: Path) -> None:
    """Stopped halfway, or without room for a file: the earlier site is whole, and nothing lies beside it."""
    out = tmp_path / "site"
    put(out, {"index.html": b"1"})
    with pytest.raises(KeyboardInterrupt):
        put(out, Torn())
    with pytest.raises(MachineFailureError, match="cannot write"):
        put(out, {"a": b"2", "a/b": b"2"})
    assert (out / "index.html").read_bytes() == b"1" and list(tmp_path.iterdir()) == [out]


# -- the command


def test_command_prints_counts_and_paths(tmp_path: Path) -> None:
    """--json has the counts and every path; the text names the page and the command that makes it again."""
    pulls = {tmp_path / "report.json": [pull()]}
    site_kit.write(tmp_path / "golden/nights", [night(number=n) for n in range(3)], pulls)
    done = published("--out", "site", "--pull", "report.json", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["nights"], found["cases"], found["comparisons"], found["newest"]) == (3, 1, 1, "2026-11-21T15:00:00Z")
    assert found["index"] == "site/index.html" and all((tmp_path / path).is_file() for path in found["paths"])
    assert found["bytes"] == sum((tmp_path / path).stat().st_size for path in found["paths"])
    again = published(*found["reproduce"].split()[3:], cwd=tmp_path)
    assert again.returncode == 0 and "3 nights, 1 case, 1 comparison, up to 2026-11-21T15:00:00Z" in again.stdout


def test_without_results_one_line_names_the_cure(tmp_path: Path) -> None:
    """Exit code 2, one line, no folder."""
    done = published("--out", "site", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "repro report nightly" in done.stderr
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize(
    "harm",
    [
        {"format": 99},
        {"status": "fine"},
        {"at": "2026-13-41T03:12:45Z"},
        {"commit": {}},
        {"compared": {"drift": 3}},
        {"compared": "x"},
        {"spent": {"step_us": None, "host_bytes": 1}},
        {"culprits": [{"commit": 4}]},
        {"metrics": {"loss": 3}},
    ],
    ids=str,
)
def test_a_damaged_night_is_named(tmp_path: Path, harm: dict[str, Any]) -> None:
    """Whatever part is damaged or newer: one ReproError that names the file, or the case and its folder."""
    folder = site_kit.write(tmp_path / "nights", [night(), night(number=1, chain="b", status="changed")])
    path = sorted(folder.rglob("*.json"))[1]
    path.write_text(json.dumps(json.loads(path.read_text()) | harm))
    with pytest.raises(ReproError, match=r"demo") as caught:
        build(read_results(folder, ()), OPTIONS)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"results": 3}', '{"results": [3]}', '{"case": "c"}', '{"results": [{"case": "c", "verdict": "?"}]}'],
)
def test_a_damaged_report_is_named(tmp_path: Path, text: str) -> None:
    """No JSON, another shape, or parts that are missing: one line with the file's name."""
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ReproError, match=r"report\.json"):
        read_results(tmp_path / "none", [tmp_path / "report.json"])


def test_reports_are_read_in_every_shape(tmp_path: Path) -> None:
    """A whole report, one pair alone, and a report whose case failed all give comparisons."""
    pair = pull(verdict="unverifiable").to_mapping()
    failed = {"case": "broken", "verdict": "error", "reason": "no such case"}
    report = {
        "results": [failed],
        "base": "a" * 40,
        "head": "b" * 40,
        "at": "2026-11-21T15:00:00Z",
        "reproduce": "repro x",
    }
    for name, value in (("one.json", pair), ("failed.json", report)):
        (tmp_path / name).write_text(json.dumps(value))
    found = read_results(tmp_path / "none", [tmp_path / "one.json", tmp_path / "failed.json", tmp_path / "one.json"])
    assert [(one.case, one.status) for one in found.pulls] == [("broken", "error"), ("tiny-grpo", "unverifiable")]
    built = build(found, OPTIONS)
    assert any("no such case" in page.text and "repro x" in page.text for _, page in pages(built))
    assert "assets/vega.js" not in built, "no page has a chart"


# -- what makes it fast


def test_first_page_loads_no_series(files: dict[str, bytes]) -> None:
    """The overview loads its style and one small script, whatever the number of metrics; charts stay elsewhere."""
    page = Page(files["index.html"])
    assert [a["src"] for a in page.all("script")] == ["assets/page.js"]
    assert [a["href"] for a in page.all("link")] == ["data:,", "assets/page.css"]
    assert sum(len(files[name]) for name in ("index.html", "assets/page.css", "assets/page.js")) < 100_000
    case = Page(files["cases/tiny-grpo.html"])
    assert all("defer" in a for a in case.all("script"))
    assert next(a["src"] for a in case.all("script")) == "../data/tiny-grpo.js"


def test_series_are_columns_of_short_numbers(files: dict[str, bytes]) -> None:
    """A value takes its digits and a comma: no names, no repeated texts."""
    found = data(files, "data/tiny-grpo.js")
    values = [column for chart in found["charts"].values() for column in chart["values"].values()]
    count = sum(map(len, values))
    assert count > 8000 and len(json.dumps(values, separators=(",", ":"))) / count < 14
    assert len(found["texts"]) == len(set(found["texts"]))
    assert all(len(column) == len(found["nights"]["at"]) for column in [*found["nights"].values(), *values])
    assert number(1 / 3) == 0.333333333 and number(2.0) == 2 and number(-0.0) == 0 and number(1e300) == 1e300


def test_work_grows_with_the_nights_and_no_faster() -> None:
    """Twice the nights make at most twice the calls, and a little: nothing looks at every pair."""

    def calls(days: int) -> int:
        nights = list(site_kit.nights(cases=1, days=days, metrics=3))
        results = Results(nights, (), Path())
        count = 0

        def counted(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(counted)
        try:
            matrix(results)
            found = changes(nights)
            together(found)
            drawn = figures(nights)
            _ = [figure.log for figure in drawn]
            case_data(results, nights, found, ())
        finally:
            sys.setprofile(None)
        return count

    assert calls(400) < 2.3 * calls(200)


# -- colours


def style(scheme: str) -> dict[str, str]:
    """The colours of the style sheet under a scheme."""
    css = (Path(site_kit.__file__).parent.parent / "repro/site/assets/page.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    assert len(blocks) == 2
    found = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", blocks[0]))
    return found if scheme == "light" else found | dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", blocks[1]))


def contrast(a: str, b: str) -> float:
    """WCAG's ratio of two colours."""

    def luminance(colour: str) -> float:
        channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_contrast(scheme: str) -> None:
    """Text 4.5:1 on everything it stands on; lines and marks of charts 3:1 on the page (WCAG 2.2 AA)."""
    css = style(scheme)
    texts = [(text, back) for text in ("ink", "soft", "link") for back in ("page", "code")]
    texts += [(f"{kind}-ink", kind) for kind in ("green", "changed", "flaky", "error", "not-judged", "no-run")]
    texts += [("add", "code"), ("del", "code"), ("ink", "touched"), ("ink", "hover"), ("page", "ink")]
    marks = [name for name in css if name.endswith("-line") or name.startswith("series-")] + ["focus", "heat-high"]
    low = {pair: contrast(css[pair[0]], css[pair[1]]) for pair in texts}
    assert {pair: ratio for pair, ratio in low.items() if ratio < 4.5} == {}
    assert {name for name in marks if contrast(css[name], css["page"]) < 3} == set()
    lines = [css[f"{kind}-line"] for kind in ("green", "changed", "flaky", "error")]
    hues = {round(colorsys.rgb_to_hls(*(int(c[k : k + 2], 16) / 255 for k in (1, 3, 5)))[0], 2) for c in lines}
    assert len(hues) == 4


def test_style_respects_the_reader() -> None:
    """Focus is visible, motion only where it is not reduced, forced colours keep cells apart."""
    css = (Path(site_kit.__file__).parent.parent / "repro/site/assets/page.css").read_text()
    assert ":focus-visible { outline: 2px solid" in css and "outline: none" not in css.replace(
        "main:focus { outline: none", ""
    )
    moving = css[css.index("(prefers-reduced-motion: no-preference)") :]
    for word in ("transition", "scroll-behavior", "animation"):
        assert word not in css.replace(moving, ""), word
    assert "(forced-colors: active)" in css

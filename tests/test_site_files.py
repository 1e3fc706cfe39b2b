"""The page of all nights: what it never runs, names, the folder it is put in, the command, its size and colours."""

from __future__ import annotations

import colorsys
import fcntl
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import site_kit
from hypothesis import given
from hypothesis import strategies as st
from site_kit import EVIL, compared, nightly_run, point, pull
from site_pages_kit import OPTIONS, Page, case_page, data, evil_results, made, pages, published, style

from repro.nightly.records import NightlyRuns
from repro.site.build import Options, build
from repro.site.changes import changes, together
from repro.site.folder import MARKER, nightly_key, number, page_name, script
from repro.site.folder import replace as put
from repro.site.matrix import matrix
from repro.site.results import Results, read_results
from repro.site.series import case_data, figures
from repro_golden.base.errors import MachineFailureError, ReproError


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return made(tmp_path_factory.mktemp("results"), cases=2, days=40)


@pytest.fixture(scope="module")
def files(results: Results) -> dict[str, bytes]:
    return build(results, OPTIONS)


# -- nothing of a result is ever run


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
    runs = [nightly_run(number=1), nightly_run(number=2, chain="b", status="changed")]
    linked = case_page(runs, tmp_path / "a", repository="https://example.org/o/r/")
    assert f'href="https://example.org/o/r/commit/{point(2).commit}"' in linked
    plain = case_page(runs, tmp_path / "b")
    assert "https://" not in plain and f'<code class="commit">{point(2).commit[:10]}</code>' in plain


# -- a process that was killed


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """By the next one; a folder that a living process is writing stays, and so do others of like names."""
    out = tmp_path / "site"
    put(out, {"a.html": b"one"})
    for name in (".site.unfinished-dead", ".site.unfinished-alive", ".other.unfinished-x", "site.unfinished-y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.html").write_bytes(b"half")
    alive = os.open(tmp_path / ".site.unfinished-alive", os.O_RDONLY)
    fcntl.flock(alive, fcntl.LOCK_EX)
    put(out, {"b.html": b"two"})
    os.close(alive)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".other.unfinished-x", ".site.unfinished-alive", "site", "site.unfinished-y"]
    assert sorted(path.name for path in out.iterdir()) == ["b.html", MARKER]


# -- names


@given(st.lists(st.text(min_size=1) | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]*", fullmatch=True), unique=True))
def test_no_two_cases_share_a_file(names: list[str]) -> None:
    """File names are plain, and differ even where the file system does not tell capitals apart."""
    pages = [page_name(name) for name in names]
    assert len({name.lower() for name in pages}) == len(names)
    assert all(re.fullmatch(r"[a-z0-9_~.-]{1,80}", name) and not name.startswith(".") for name in pages)


def test_names_that_differ_in_case_alone_and_devices_are_kept_apart() -> None:
    """`demo` is itself; `Demo`, `DEMO` and Windows' devices are told by a digest."""
    assert page_name("demo-1.5b") == "demo-1.5b"
    assert len({page_name(name) for name in ("demo", "Demo", "DEMO", "demo~")}) == 4
    assert (
        page_name("Demo").startswith("demo~") and page_name("nul").startswith("nul~") and page_name("con.x") != "con.x"
    )
    assert "/" not in page_name("../../etc/passwd") and page_name("é").startswith("case~")


# -- the folder


@pytest.mark.whole
def test_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    """Another process, folder, hash seed and time: not one byte differs; the command that pages show makes them too."""
    site_kit.write(tmp_path / "golden/nights", site_kit.nightly_runs(cases=1, machines=2, days=5))
    outs = []
    for name in ("one", "two"):
        done = published("--out", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        paths = (path for path in (tmp_path / name).rglob("*") if path.is_file())
        outs.append({path.relative_to(tmp_path / name): path.read_bytes() for path in paths})
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


@pytest.mark.whole
def test_command_prints_counts_and_paths(tmp_path: Path) -> None:
    """--json has the counts and every path; the text names the page and the command that makes it again."""
    pulls = {tmp_path / "report.json": [pull()]}
    site_kit.write(tmp_path / "golden/nights", [nightly_run(number=n) for n in range(3)], pulls)
    done = published("--out", "site", "--pull", "report.json", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert (data["nights"], data["cases"], data["comparisons"], data["newest"]) == (3, 1, 1, "2026-11-21T15:00:00Z")
    assert data["index"] == "site/index.html" and all((tmp_path / path).is_file() for path in data["paths"])
    assert data["bytes"] == sum((tmp_path / path).stat().st_size for path in data["paths"])
    again = published(*data["reproduce"].split()[3:], cwd=tmp_path)
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
    folder = site_kit.write(tmp_path / "nights", [nightly_run(), nightly_run(number=1, chain="b", status="changed")])
    path = sorted(folder.rglob("*.json"))[1]
    path.write_text(json.dumps(json.loads(path.read_text()) | harm))
    with pytest.raises(ReproError, match=r"demo") as caught:
        build(read_results(folder, ()), OPTIONS)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 99, "results": []}',
        '{"results": 3}',
        '{"results": [3]}',
        '{"case": "c"}',
        '{"results": [{"case": "c", "verdict": "?"}]}',
    ],
)
def test_a_damaged_report_is_named(tmp_path: Path, text: str) -> None:
    """No JSON, a newer format, another shape, or parts that are missing: one line with the file's name."""
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
    results = read_results(tmp_path / "none", [tmp_path / "one.json", tmp_path / "failed.json", tmp_path / "one.json"])
    assert [(pull.case, pull.status) for pull in results.pulls] == [("broken", "error"), ("tiny-grpo", "unverifiable")]
    built = build(results, OPTIONS)
    assert any("no such case" in page.text and "repro x" in page.text for _, page in pages(built))
    assert "assets/vega.js" not in built, "no page has a chart"


def test_two_nights_of_one_second_have_a_page_and_a_place_each(tmp_path: Path) -> None:
    """The second is not shown by the first one's comparison, nor told by its row."""
    for seed, status in ((1, "green"), (2, "changed"), (1, "changed")):
        moved = {} if status == "green" else {"compared": compared(seed).to_mapping()}
        NightlyRuns(tmp_path).write(nightly_run(status=status, **moved))
    results = read_results(tmp_path, [])
    names = [results.page_of(each) for each in results.runs]
    assert names[0] == "" and all(names[1:]) and len(set(names)) == len(results.comparisons) + 1 == 3
    assert len({nightly_key(each) for each in results.runs}) == 3
    built = build(results, OPTIONS)
    assert {f"comparisons/{name}.html" for name in names[1:]} <= built.keys()


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
    shown = data(files, "data/tiny-grpo.js")
    values = [column for chart in shown["charts"].values() for column in chart["values"].values()]
    count = sum(map(len, values))
    assert count > 8000 and len(json.dumps(values, separators=(",", ":"))) / count < 14
    assert len(shown["texts"]) == len(set(shown["texts"]))
    assert all(len(column) == len(shown["nights"]["at"]) for column in [*shown["nights"].values(), *values])
    assert number(1 / 3) == 0.333333333 and number(2.0) == 2 and number(-0.0) == 0 and number(1e300) == 1e300


def test_work_grows_with_the_nights_and_no_faster() -> None:
    """Twice the nights make at most twice the calls, and a little: nothing looks at every pair."""

    def calls(days: int) -> int:
        runs = list(site_kit.nightly_runs(cases=1, days=days, metrics=3))
        results = Results(runs, (), Path())
        count = 0

        def counted(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(counted)
        try:
            matrix(results)
            changed = changes(runs)
            together(changed)
            drawn = figures(runs)
            _ = [figure.log for figure in drawn]
            case_data(results, runs, changed, ())
        finally:
            sys.setprofile(None)
        return count

    assert calls(400) < 2.3 * calls(200)


# -- colours


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
    texts += [
        ("add", "add-back"),
        ("del", "del-back"),
        ("changed-line", "page"),
        ("error-ink", "page"),
        ("ink", "touched"),
        ("ink", "hover"),
        ("page", "ink"),
    ]
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

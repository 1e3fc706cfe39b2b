"""The page in a real browser, opened as a file: charts are drawn, keys work, colours follow, nothing leaves."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import site_kit
from site_kit import MACHINES
from site_pages_kit import evil_results

from repro.site.build import Options, build
from repro.site.folder import replace
from repro.site.results import read_results

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install 'repro-harness[dev]'")
CHROME = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROME is None, reason="needs a browser: install Chromium or Chrome")

CASE = "cases/tiny-grpo.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROME, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    pulls = {folder / "report.json": [site_kit.pull(odd=True)]}
    site_kit.write(folder / "nights", site_kit.nightly_runs(cases=2, days=40, metrics=6), pulls)
    replace(folder / "site", build(read_results(folder / "nights", list(pulls)), Options("Numbers", "n", [], "")))
    return folder / "site"


class Visit:
    """A page that was opened, with all that it said and asked for."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        """Open a file of the site."""
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | context))
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri() if isinstance(path, Path) else path)

    def draw(self) -> None:
        """Scroll through the page until every chart is drawn."""
        self.page.evaluate(
            """async () => {
              for (const figure of document.querySelectorAll("figure")) {
                figure.scrollIntoView({behavior: "instant"});
                const end = performance.now() + 15000;
                while (!figure.dataset.drawn) {
                  if (performance.now() > end) throw new Error(`${figure.dataset.chart} is not drawn`);
                  await new Promise(requestAnimationFrame);
                }
              }
              scrollTo({top: 0, behavior: "instant"});
            }"""
        )

    def __call__(self, script: str, *arguments: object) -> Any:
        """What a script finds in the page."""
        return self.page.evaluate(script, *arguments)

    def until(self, script: str, argument: object = None) -> None:
        """Ask until a script finds something true; wait_for_function asks by eval, which the pages forbid."""
        end = time.monotonic() + 20
        while not self.page.evaluate(script, argument):
            assert time.monotonic() < end, f"not within 20 s: {script}"
            self.page.wait_for_timeout(20)


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    opened: list[Visit] = []

    def make(path: Path, **context: Any) -> Visit:
        opened.append(Visit(browser, path, **context))
        return opened[-1]

    yield make
    for tab in opened:
        tab.context.close()


def every_kind(site: Path) -> list[Path]:
    run, request = (next(iter(sorted((site / "comparisons").glob(f"*{end}*")))) for end in ("tiny", "21T150000Z"))
    return [site / "index.html", site / "nights.html", site / CASE, run, request]


def test_every_page_is_drawn_without_errors_or_network(visit: Any, site: Path) -> None:
    """No console line or error, nothing asked for but files; each figure holds marks and a description."""
    drawn = 0
    for path in every_kind(site):
        page = visit(path)
        page.draw()
        charts = page(
            """() => [...document.querySelectorAll("figure")].map(figure => {
              const svg = figure.querySelector("svg");
              return [figure.dataset.chart, svg.querySelectorAll(".role-mark path").length,
                svg.getAttribute("aria-label") ?? svg.querySelector("[aria-label]").getAttribute("aria-label")];
            })"""
        )
        assert all(marks > 3 and len(label) > 30 for _, marks, label in charts), charts
        drawn += len(charts)
        assert page.said == [] and {url.split(":")[0] for url in page.asked} <= {"file", "data"}, path
    assert drawn > 12


def test_axes_are_titled_and_their_labels_do_not_overlap(visit: Any, site: Path) -> None:
    """Each chart's axes have titles; no two labels or titles of a chart cover each other, wide and narrow."""
    for width in (1280, 390):
        for path in every_kind(site)[2:]:
            page = visit(path, viewport={"width": width, "height": 900})
            page.draw()
            charts = page(
                """() => [...document.querySelectorAll("figure")].map(figure => {
                  const texts = [...figure.querySelectorAll("svg .role-axis text, svg .role-legend text")]
                    .filter(text => text.textContent && getComputedStyle(text).opacity !== "0");
                  const boxes = texts.map(text => [text.textContent, text.getBoundingClientRect()]);
                  const hit = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
                    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
                  const over = boxes.flatMap(([t, a], i) => boxes.slice(i + 1)
                    .filter(([, b]) => hit(a, b)).map(([u]) => `${t} / ${u}`));
                  return [figure.dataset.chart, over, figure.querySelectorAll("svg .role-axis-title text").length];
                })"""
            )
            assert [entry for entry in charts if entry[1]] == [], f"{path.name} {width}"
            assert all(titles >= (1 if name == "heat" else 2) for name, _, titles in charts), charts


def test_values_that_are_not_finite_are_marks(visit: Any, tmp_path: Path) -> None:
    """NaN and both infinities are drawn at the edge and told; a metric that is never finite still has its marks."""
    values = [1.0, float("nan"), float("inf"), float("-inf"), 2.0]
    runs = [
        site_kit.nightly_run(
            number=n,
            metrics={name: site_kit.Summary(*[v] * 5) for name, v in (("grad_norm", value), ("never", float("nan")))},
        )
        for n, value in enumerate(values)
    ]
    folder = site_kit.write(tmp_path / "nights", runs)
    replace(tmp_path / "site", build(read_results(folder, ()), Options("Numbers", "n", [], "")))
    page = visit(tmp_path / "site/cases/demo.html")
    page.draw()
    marks = page(
        "name => document.querySelectorAll(`figure[data-chart='${name}'] .mark-symbol path`).length", "grad_norm"
    )
    assert marks == 5, "two values and three marks"
    told = "name => document.querySelector(`figure[data-chart='${name}'] .edge`).textContent"
    assert (
        page(told, "grad_norm") == "NaN on 1 night, +inf on 1 night, -inf on 1 night"
        and page(told, "never") == "NaN on 5 nights"
    )
    assert page("() => document.querySelectorAll(\"figure[data-chart='never'] .mark-symbol path\").length") == 5
    assert page.said == []


def test_arrow_keys_move_and_enter_opens(visit: Any, site: Path) -> None:
    """One stop for Tab; arrows, Home, End and Control move; Enter opens the night that the cell stands for."""
    page = visit(site / "nights.html")
    where = """() => { const cell = document.activeElement.closest("th, td");
      return [cell.parentElement.rowIndex - 2, cell.cellIndex]; }"""
    assert page("() => document.querySelectorAll('#matrix [tabindex=\"0\"]').length") == 1
    page.page.keyboard.press("Tab")
    assert page("() => document.activeElement.className") == "skip"
    page("() => document.querySelector('#matrix [tabindex=\"0\"]').focus()")
    for key, wanted in (
        ("ArrowRight", [0, 2]), ("ArrowDown", [1, 2]), ("End", [1, 40]), ("ArrowRight", [1, 40]), ("Home", [1, 0]),
        ("ArrowLeft", [1, 0]), ("Control+End", [3, 40]), ("ArrowDown", [3, 40]), ("Control+Home", [0, 0]),
        ("ArrowUp", [0, 0]), ("ArrowRight", [0, 1]),
    ):  # fmt: skip
        page.page.keyboard.press(key)
        assert page(where) == wanted, key
    hidden = """() => { const cell = document.activeElement.getBoundingClientRect();
      const head = document.activeElement.closest("tr").cells[0].getBoundingClientRect();
      const region = document.getElementById("region").getBoundingClientRect();
      return cell.left < head.right || cell.right > region.right + 1; }"""
    for _ in range(39):
        page.page.keyboard.press("ArrowRight")
        assert not page(hidden)
    for _ in range(39):
        page.page.keyboard.press("ArrowLeft")
        assert not page(hidden)
    page("() => document.querySelector('td a[href*=\"cases/\"]').focus()")
    day = page("() => document.activeElement.title.slice(0, 10)")
    page.page.keyboard.press("Enter")
    page.page.wait_for_url("**/cases/*")
    assert page("() => document.getElementById('night-title').textContent").startswith(f"Night of {day} ")
    assert page("() => document.activeElement.id") == "night-title"


def test_filter_hides_rows_and_survives_the_other_page(visit: Any, site: Path) -> None:
    """A status hides the rows without it, dims other cells, says how many are left, and goes along to all nights."""
    page = visit(site / "index.html")
    page.page.click("button[data-status=error]")
    rows = page(
        """() => [...document.querySelectorAll("#matrix tbody tr")].map(row =>
          [row.hidden, !!row.querySelector("td.s-error"), !row.querySelector("td.s-error.dim"),
           row.querySelectorAll("td.dim").length])"""
    )
    assert (
        all(hidden is not has and bright for hidden, has, bright, _ in rows) and len({has for _, has, *_ in rows}) >= 1
    )
    assert page("() => document.getElementById('said').textContent").endswith("of 4 rows")
    page.page.click(".seg a[href^='nights.html']")
    page.page.wait_for_url("**/nights.html*")
    assert page("() => document.querySelector('button[data-status=error]').getAttribute('aria-pressed')") == "true"


def test_dark_mode_changes_pages_and_charts_while_open(visit: Any, site: Path) -> None:
    """When the reader's scheme changes, the page's and the charts' colours do, without a reload."""
    page = visit(site / CASE)
    page.draw()
    look = """() => [getComputedStyle(document.body.parentElement).backgroundColor,
      getComputedStyle(document.querySelector("figure svg .role-axis-label text")).fill,
      getComputedStyle(document.querySelector("figure svg .mark-line path")).stroke]"""
    light = page(look)
    page.page.emulate_media(color_scheme="dark")
    page.until("() => [...document.querySelectorAll('figure')].every(f => f.dataset.drawn === 'dark')")
    assert all(a != b for a, b in zip(light, page(look), strict=True)) and page.said == []


@pytest.mark.parametrize(("width", "scale"), [(390, 1), (640, 2), (320, 1)], ids=["phone", "200 % zoom", "400 % zoom"])
def test_pages_do_not_scroll_sideways(visit: Any, site: Path, width: int, scale: int) -> None:
    """Narrow or zoomed, only tables and sources scroll in regions of their own; the page never does."""
    for path in every_kind(site):
        page = visit(path, viewport={"width": width, "height": 700}, device_scale_factor=scale)
        page.draw()
        assert page("() => document.documentElement.scrollWidth") <= width, path.name


def test_controls_change_the_charts_and_their_tables(visit: Any, site: Path) -> None:
    """Another statistic, fewer nights and a log scale redraw; the table beside a chart has every night's value."""
    page = visit(site / CASE)
    page.draw()
    page("() => { document.querySelector('figure details.data').open = true; }")
    page.page.wait_for_selector("figure .data tbody tr")
    table = "() => [...document.querySelectorAll('figure:first-of-type .data')].slice(0, 1).flatMap(d => [...d.querySelectorAll('tbody tr')].map(r => [...r.cells].map(c => c.textContent)))"  # noqa: E501
    rows = page(table)
    runs = page("() => window.reproData['case:tiny-grpo'].nights.at.length")
    assert len(rows) == runs > 60 and {row[1] for row in rows} == set(MACHINES)
    page.page.select_option("#statistic", "median")
    page.until("old => document.querySelector('.data tbody td:nth-child(4)').textContent !== old", rows[0][3])
    page.page.select_option("#span", "30")
    page.until("old => document.querySelectorAll('figure:first-of-type .data tbody tr').length < old", runs)
    assert len({row[0][:10] for row in page(table)}) == 30 and page.said == []


def test_a_log_scale_is_drawn(visit: Any, tmp_path: Path) -> None:
    """Where it is offered, pressing it redraws with powers of ten; elsewhere there is no button."""
    runs = [
        site_kit.nightly_run(
            number=n, metrics={"wide": site_kit.Summary(*[10.0**n] * 5), "flat": site_kit.Summary(*[1.0 + n] * 5)}
        )
        for n in range(5)
    ]
    folder = site_kit.write(tmp_path / "nights", runs)
    replace(tmp_path / "site", build(read_results(folder, ()), Options("Numbers", "n", [], "")))
    page = visit(tmp_path / "site/cases/demo.html")
    page.draw()
    assert page("() => [...document.querySelectorAll('[data-log]')].map(b => b.closest('figure').dataset.chart)") == [
        "wide"
    ]
    middle = """() => { const path = document.querySelector("figure[data-chart=wide] .mark-line path");
      return path.getAttribute("d").match(/-?[\\d.]+/g).map(Number)[5]; }"""
    before = page(middle)
    page.page.click("[data-log]")
    page.until(f"old => ({middle})() < old - 20", before)
    assert page.said == []


def test_nights_before_and_after_are_a_button_away(visit: Any, site: Path) -> None:
    """A case's page begins with the last night; Earlier and Later stay on its machine, and are in the address."""
    page = visit(site / CASE)
    assert page("() => document.getElementById('night-title').textContent").startswith("Night of 2026-11-22 ")
    machine = "() => document.querySelector('#night-facts dd').textContent.split(' on ')[1]"
    first = page(machine)
    page.page.click("#earlier")
    assert page("() => document.getElementById('night-title').textContent").startswith("Night of 2026-11-21 ")
    assert page(machine) == first and page("() => location.hash").startswith("#n-")
    page.page.click("#later")
    assert page("() => document.getElementById('later').disabled")


def test_hostile_names_run_nothing(visit: Any, tmp_path: Path) -> None:
    """A site whose every text is a program runs none of them, and still draws its charts."""
    replace(tmp_path / "site", build(evil_results(tmp_path), Options(site_kit.EVIL, "n", [], "")))
    for path in sorted((tmp_path / "site").rglob("*.html")):
        page = visit(path)
        page.draw()
        page("() => document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert page("() => window.hacked") is None and page("() => document.images.length") == 0
        assert [line for line in page.said if "Failed to load" not in line] == [], path


def test_the_policy_stops_the_network_and_eval(visit: Any, site: Path) -> None:
    """Were a script to slip in: no image, request or eval of it would pass the page's policy."""
    page = visit(site / CASE)
    refused = page(
        """async () => {
          const found = [];
          await fetch("https://example.org/x").catch(() => found.push("fetch"));
          await new Promise(done => { const image = new Image(); image.onerror = () => { found.push("image"); done(); };
            image.src = "https://example.org/x.png"; });
          try { new Function("return 1")(); } catch { found.push("eval"); }
          return found;
        }"""
    )
    assert refused == ["fetch", "image", "eval"]
    assert any("Content Security Policy" in line for line in page.said)

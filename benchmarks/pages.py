"""How fast the page of all nights is: ``python benchmarks/pages.py [--commit REV] [--page PAGE]``.

It makes a year of results of ten cases on two machines, builds the site, and opens it as files in Chromium. The samples
go to docs/benchmarks/site.json and the page to docs/benchmarks/site.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import _kits  # noqa: F401
import site_kit

from repro.site.build import Options, build
from repro.site.folder import replace
from repro.site.results import read_results
from repro_golden.case.identity import collect

ROOT = Path(__file__).parent.parent
DAYS, CASES, METRICS, MACHINES, ROUNDS = 365, 10, 20, 2, 5
GOAL = 2.0

READY = """() => new Promise(done => {
  const drawn = () => performance.getEntriesByName("chart drawn")[0]?.startTime;
  const wait = () => {
    const loaded = performance.getEntriesByType("navigation")[0].domContentLoadedEventEnd;
    const charts = document.querySelector("figure");
    charts?.scrollIntoView({ behavior: "instant" }); // charts are drawn when they come near the screen
    if (!loaded || (charts && !drawn())) return setTimeout(wait, 5);
    const sample = () => ({ load: loaded, chart: drawn() ?? null, painted: performance.now() });
    requestAnimationFrame(() => setTimeout(() => done(sample())));
  };
  wait();
})"""


def built(folder: Path) -> dict[str, Any]:
    """Make the results and the site; seconds and bytes."""
    made = site_kit.runs(cases=CASES, machines=MACHINES, days=DAYS, metrics=METRICS, sizes=48)
    if not (folder / "nights").exists():
        site_kit.write(folder / "nights", made)
    began = time.perf_counter()
    results = read_results(folder / "nights", ())
    read = time.perf_counter()
    files = build(results, Options("Numbers by night", "golden/nights", [], ""))
    rendered = time.perf_counter()
    replace(folder / "site", files)
    ended = time.perf_counter()
    return {
        "nights": len(results.runs),
        "comparisons": len(results.comparisons),
        "files": len(files),
        "bytes": sum(map(len, files.values())),
        "read_s": read - began,
        "render_s": rendered - read,
        "write_s": ended - rendered,
    }


def opened(site: Path) -> dict[str, list[dict[str, float]]]:
    """What each kind of page takes from its first byte to its first chart, several times, each in a fresh context."""
    from playwright.sync_api import sync_playwright

    largest = max((site / "cases").iterdir(), key=lambda path: (site / "data" / f"{path.stem}.js").stat().st_size)
    pages = {
        "overview, last 30 nights": site / "index.html",
        "overview, all nights": site / "nights.html",
        "a case": largest,
        "a comparison": sorted((site / "comparisons").iterdir())[-1],
    }
    chrome = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chrome is None:
        sys.exit("pages: install Chromium or Chrome")
    value: dict[str, list[dict[str, float]]] = {}
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chrome, args=["--no-sandbox"])
        name = f"Chromium {browser.version}"
        for _ in range(ROUNDS + 1):
            for what, path in pages.items():
                context = browser.new_context(viewport={"width": 1280, "height": 900})
                page = context.new_page()
                asked: list[str] = []
                page.on("request", lambda request, asked=asked: asked.append(request.url))
                page.goto(path.as_uri(), wait_until="commit")
                sample = page.evaluate(READY)
                sample["bytes"] = sum(
                    Path(url.removeprefix("file://").split("#")[0]).stat().st_size
                    for url in asked
                    if url.startswith("file:")
                )
                value.setdefault(what, []).append(sample)
                context.close()
        browser.close()
    return {"browser": name, **{what: samples[1:] for what, samples in value.items()}}  # type: ignore[dict-item]


def page_of(samples: dict[str, Any]) -> str:
    """The benchmark page."""
    host, build_, pages = samples["identity"]["host"], samples["build"], samples["pages"]
    versions = ", ".join(f"{name} {value}" for name, value in samples["versions"].items())
    lines = [
        "# The page of all nights",
        "",
        "Written by `python benchmarks/pages.py`: made-up results, every value of every metric different from the",
        f"night before ({CASES} cases on {MACHINES} machines, {DAYS} nights, {METRICS} metrics), opened as files in a",
        "browser without a window. Milliseconds since the navigation began, medians of rounds after one that warms up;",
        "*ready*: the scripts ran and the page was painted, with its first chart where it has charts.",
        "",
        f"- {host['cpu']}, {os.cpu_count()} cores; {versions}; {samples['date']}, commit {samples['commit']}",
        f"- load of the machine while measuring (1 minute): {samples['load']:.1f}",
        "",
        "| page | ready | range | first chart | loaded | goal |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for what, rounds in pages.items():
        ready = [r["painted"] for r in rounds]
        chart = [r["chart"] for r in rounds if r["chart"] is not None]
        lines.append(
            f"| {what} | {statistics.median(ready):.0f} ms | {min(ready):.0f}-{max(ready):.0f} ms "
            f"| {f'{statistics.median(chart):.0f} ms' if chart else 'none'} | {rounds[0]['bytes'] / 2**20:.2f} MiB "
            f"| under {GOAL:.0f} s |"
        )
    total = build_["read_s"] + build_["render_s"] + build_["write_s"]
    lines += [
        "",
        f"Building it: {total:.1f} s ({build_['nights']:,} nights read in {build_['read_s']:.1f} s, "
        f"{build_['comparisons']} comparisons and all pages rendered in {build_['render_s']:.1f} s, "
        f"{build_['files']} files of {build_['bytes'] / 2**20:.1f} MiB written in {build_['write_s']:.1f} s).",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and write both files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json", type=Path, default=ROOT / "docs/benchmarks/site.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/benchmarks/site.md")
    parser.add_argument("--keep", type=Path, help="where the results and the site stay")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        made = built(folder)
        pages: dict[str, Any] = opened(folder / "site")
        versions = {"": pages.pop("browser")} | {name: version(name) for name in ("altair", "vl-convert-python")}
    samples = {
        "identity": collect(os.environ, threads=1).to_mapping(),
        "versions": versions,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": options.commit,
        "load": os.getloadavg()[0],
        "build": made,
        "pages": pages,
    }
    options.json.write_text(json.dumps(samples, indent=1) + "\n")
    text = page_of(samples)
    options.page.write_text(text)
    print(text)


if __name__ == "__main__":
    main()

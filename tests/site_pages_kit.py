"""Pages of a site as tests read them."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import site_kit
import warm_kit
from site_kit import EVIL, culprit, nightly_run, pull

from repro.nightly.records import NightlyRun, Summary
from repro.report.palette import css
from repro.site.build import Options, build
from repro.site.results import Results, read_results

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
    return warm_kit.run(command, cwd)


def data(files: Mapping[str, bytes], name: str) -> Any:
    """What a data script keeps."""
    raw = files[name].decode()
    return json.loads(raw[raw.index("] = ") + 4 : -2])


def made(folder: Path, **given: Any) -> Results:
    pulls = {folder / "report.json": [pull(), pull(7, case="pull-only", verdict="identical")]}
    site_kit.write(folder / "nights", site_kit.nightly_runs(**given), pulls)
    return read_results(folder / "nights", list(pulls))


def pages(files: Mapping[str, bytes]) -> Iterator[tuple[str, Page]]:
    yield from ((name, Page(raw)) for name, raw in files.items() if name.endswith(".html"))


def style(scheme: str) -> dict[str, str]:
    """The colours of the style sheet under a scheme."""
    blocks = re.findall(r":root \{(.*?)\}", css(), re.DOTALL)
    assert len(blocks) == 2
    matches = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", blocks[0]))
    return matches if scheme == "light" else matches | dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", blocks[1]))


def case_page(nightly_runs: list[NightlyRun], tmp_path: Path, **options: Any) -> str:
    folder = site_kit.write(tmp_path / "nights", nightly_runs)
    built = build(read_results(folder, ()), replace(OPTIONS, **options))
    return built["cases/demo.html"].decode()


def evil_results(folder: Path, text: str = EVIL) -> Results:
    """Results in which every text is `text`."""

    def evil(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: item if key in keep else evil(item) for key, item in value.items()}
        return [evil(item) for item in value] if isinstance(value, list) else text if isinstance(value, str) else value

    keep = {"commit", "point", "at", "verdict", "status", "hunk", "base", "head"}
    pair = evil(json.loads(json.dumps(pull().to_mapping() | {"base": {"commit": text}, "head": {"commit": text}})))
    (folder / "report.json").write_text(json.dumps(pair))
    run = nightly_run(number=4, case=text, machine=text, chain="b", status="changed", reproduce=text, version=text)
    summary = Summary(1.0, math.nan, 1.0, 1.0, 1.0)
    run = replace(
        run,
        commit=dict.fromkeys(run.commit, text),
        metrics={text: summary},
        checks=[replace(run.checks[0], name=text, text=text)],
        compared=evil(json.loads(json.dumps(site_kit.compared(1).to_mapping()))) | {"verdict": "moved"},
        culprits=[evil(json.loads(json.dumps(culprit(3).to_mapping())))],
        bisect=dict.fromkeys(("range", "outcome", "reproduce"), text),
    )
    (folder / "nights/m/c").mkdir(parents=True)
    for index, each in enumerate((replace(run, chain="a", at="2026-11-01T00:00:00Z", compared=None), run)):
        (folder / f"nights/m/c/{index}.json").write_text(json.dumps(each.to_mapping()))
    return read_results(folder / "nights", [folder / "report.json"])

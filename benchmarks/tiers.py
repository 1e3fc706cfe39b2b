"""How long the tests take, and where: ``python benchmarks/tiers.py [TIER ...]`` runs tiers and writes docs/testing.md.

A tier is a target of `make` that runs tests: ``test``, ``campaign``. Each is run as `make` runs it, with
pytest's own durations. What was measured is kept in docs/testing.json, by tier and label, so that a page has what was
before beside what is now.

    python benchmarks/tiers.py test --label "after"
    python benchmarks/tiers.py test --label "before" --log LOG --wall 2580 --cpu 5000   # of a run made elsewhere
    python benchmarks/tiers.py                                                          # the page alone
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE, DATA = ROOT / "docs" / "testing.md", ROOT / "docs" / "testing.json"
OPTIONS = "--durations=0 -vv"  # -vv: none is too short to be told
SHOWN = 30
"""Files that the page lists."""
_DURATION = re.compile(r"^ *([\d.]+)s (setup|call|teardown) +tests/(test_\w+)\.py::", re.MULTILINE)
_RESULT = re.compile(r"^=+ (.*\d+ passed.*) in [\d.]+s", re.MULTILINE)
KINDS = {
    "engines: SGLang, weight sync": r"rollout_(sglang|commands|loop)|check_rollout_sglang|weight_sync",
    "engines: Megatron": r"megatron",
    "clusters: Ray": r"_ray",
    "recorded programs": r"attach|zoo|foreign|own_interface|trace_command|saved_files|beside",
    "searches over real commits": r"bisect|history|axes|releases|layouts|explain|minimal|planted|flags|cause",
    "golden runs and reports": r"golden|report|night|pair|pull|dvc|demo|workflow|transcripts|site|environments|trust",
    "the built-in trainer": r"core_|trainer_",
    "the doctor": r"doctor",
}
"""Files by what they start, by their names; the first that fits. The rest starts next to nothing."""
BLANK = """# Tests, and where their time goes

Written by `python benchmarks/tiers.py`, from pytest's own durations: seconds of all workers
together, fixtures included.

<!-- totals --><!-- end of totals -->

Minutes, by what the files start:

<!-- kinds --><!-- end of kinds -->

Seconds, of the dearest files:

<!-- files --><!-- end of files -->

## What they would notice

Written by `make mutants`: Cosmic Ray's operators change the code in places that a seed chooses, one at a time, and the
tests that reach the place are run until one fails.

<!-- mutants --><!-- end of mutants -->
"""


def main() -> None:
    """Run the tiers that are named, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiers", nargs="*", metavar="TIER")
    parser.add_argument("--label", default="today")
    parser.add_argument("--log", type=Path, help="what `make TIER` printed elsewhere, with durations, instead of a run")
    parser.add_argument("--wall", type=float, help="seconds that it took, by the clock")
    parser.add_argument("--cpu", type=float, help="and of CPU")
    parser.add_argument("--commit", help="and the commit")
    given = parser.parse_args()
    runs = json.loads(DATA.read_text()) if DATA.exists() else []
    for tier in given.tiers:
        if given.log:
            text, wall, cpu = given.log.read_text(errors="replace"), given.wall, given.cpu
        else:
            text, wall, cpu = run(tier)
        runs = [run for run in runs if (run["tier"], run["label"]) != (tier, given.label)]
        runs.append(about(given.commit) | {"tier": tier, "label": given.label, "wall": wall, "cpu": cpu} | read(text))
    DATA.write_text(json.dumps(runs, indent=1) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text() if PAGE.exists() else BLANK, runs))


def run(tier: str) -> tuple[str, float, float]:
    """What `make` prints, and its seconds by the clock and of CPU."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTEST_ADDOPTS": OPTIONS}
    done = subprocess.run(["make", tier], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}\ntiers: make {tier} ended with {done.returncode}: a red tier has no figures")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, time.perf_counter() - began, cpu


def read(text: str) -> dict[str, Any]:
    """Results, and seconds by file, of pytest's output."""
    seconds: Counter[str] = Counter()
    for duration, _, name in _DURATION.findall(text):
        seconds[name] += float(duration)
    result = _RESULT.findall(text)
    if not seconds or not result:
        sys.exit("tiers: no durations in what was printed: run pytest with --durations=0 -vv")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", result[-1])}
    return {"counts": counts, "files": {name: round(value, 1) for name, value in seconds.most_common()}}


def about(commit: str | None) -> dict[str, Any]:
    """The machine, and what was measured on it."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    described = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    commit = commit or subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    machine = f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} cores"
    return {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit, "machine": machine}


def kind_of(name: str) -> str:
    """What a file of tests starts."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "no process, or a short one")


def with_tables(page: str, runs: list[dict[str, Any]]) -> str:
    """The page with its tables made anew, between their marks."""
    for mark, table in (("totals", totals(runs)), ("kinds", kinds(runs)), ("files", files(runs))):
        page = section(page, mark, table)
    return page


def section(page: str, mark: str, rows: list[str]) -> str:
    """The page with what stands between two marks made anew."""
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return "\n".join([f"{before}{begin}", *rows, f"{end}{after}"])


def totals(runs: list[dict[str, Any]]) -> list[str]:
    """Each run in a line."""
    rows = ["| | command | tests | by the clock | of CPU | commit, date, machine |", "|---|---|---|---|---|---|"]
    for run in runs:
        where = f"{run['commit']}, {run['date']}, {run['machine']}"
        tests = ", ".join(f"{number:,} {word}" for word, number in run["counts"].items())
        clock, cpu = (f"{seconds / 60:.1f} min" if seconds else "not measured" for seconds in (run["wall"], run["cpu"]))
        rows.append(f"| {run['label']} | `make {run['tier']}` | {tests} | {clock} | {cpu} | {where} |")
    return rows


def kinds(runs: list[dict[str, Any]]) -> list[str]:
    """Minutes of workers by kind of file."""
    sums = []
    for run in runs:
        sums.append(Counter[str]())
        for name, seconds in run["files"].items():
            sums[-1][kind_of(name)] += seconds
    names = sorted({kind for each in sums for kind in each}, key=lambda kind: -max(each[kind] for each in sums))
    rows = [f"| | {' | '.join(heading(run) for run in runs)} |", f"|---|{'---|' * len(runs)}"]
    return rows + [f"| {kind} | {' | '.join(f'{each[kind] / 60:.1f}' for each in sums)} |" for kind in names]


def files(runs: list[dict[str, Any]]) -> list[str]:
    """Seconds of workers by file, of the dearest."""
    names = sorted({n for run in runs for n in run["files"]}, key=lambda n: -max(o["files"].get(n, 0) for o in runs))
    rows = [f"| | {' | '.join(heading(run) for run in runs)} |", f"|---|{'---|' * len(runs)}"]
    rows += [f"| `{name}` | {' | '.join(cell(run, name) for run in runs)} |" for name in names[:SHOWN]]
    if len(names) <= SHOWN:
        return rows
    return [*rows, f"| {len(names) - SHOWN} others | {' | '.join(cell(run, *names[SHOWN:]) for run in runs)} |"]


def cell(run: dict[str, Any], *names: str) -> str:
    """Seconds of files together."""
    return f"{sum(run['files'].get(name, 0) for name in names):.0f}"


def heading(run: dict[str, Any]) -> str:
    """A column's."""
    return f"{run['label']}, `make {run['tier']}`"


if __name__ == "__main__":
    main()

"""Real regressions in their own histories: ``python benchmarks/real/real.py`` finds them and writes the page.

Each file of cases/ names a repository (or a package of an index), two ends that a user could have named, a driver
that trains a few steps through upstream's own code, and the commit that upstream's fix, revert or issue names.
`repro bisect` and `git bisect run` search with the same driver, one after the other. What was measured is kept in
docs/real-regressions.json, and the page is written from it; a case that is there is run again only where it is named.

    python benchmarks/real/real.py --repositories DIR   # bare clones as OWNER+NAME/repo or OWNER/NAME.git
    python benchmarks/real/real.py nanogpt-weight-decay
    python benchmarks/real/real.py --page               # the page alone
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PAGE, DATA = ROOT / "docs" / "real-regressions.md", ROOT / "docs" / "real-regressions.json"
WAYS = {
    "mentions": "not on the way there, but defining what it reads:",
    "ran": "not on the way there, but of the change these ran:",
}
"""How lines of a change are named that no stack of the operation crosses."""
KEYS = {
    "repository", "package", "good", "bad", "culprit", "kind", "what", "says", "driver", "arguments", "launch",
    "options", "needs", "environment", "note",
}  # fmt: skip
"""What a case may say. `launch`: words before the driver in place of the interpreter. `options`: of `repro bisect`.
`needs`: packages that the driver needs beside those of `pip install -e '.[whole]'`. `environment`: all that it needs,
where releases are varied that do not fit beside what is installed there; one is made of it. `note`: what the table
adds."""


def main() -> None:
    """Run what is asked for, keep it, write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="cases; those that were not measured by default")
    parser.add_argument("--repositories", type=Path, help="folder of bare clones; else they are cloned from GitHub")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the programs")
    parser.add_argument("--jobs", type=int, help="of `repro bisect`; its own default without it")
    parser.add_argument("--try", dest="trial", action="store_true", help="print what is measured and keep nothing")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    options = parser.parse_args()
    kept = json.loads(DATA.read_text()) if DATA.exists() else {}
    cases = {path.stem: read(path) for path in sorted((HERE / "cases").glob("*.toml"))}
    for name in [] if options.page else options.names or [name for name in cases if name not in kept]:
        with tempfile.TemporaryDirectory(prefix=f"real-{name}-") as folder:
            kept[name] = measured(cases[name], Path(folder), options)
        print(json.dumps(kept[name], indent=1), flush=True)
        if not options.trial:
            DATA.write_text(json.dumps({n: kept[n] for n in sorted(kept)}, indent=1) + "\n")
    if not options.trial:
        PAGE.write_text(page(cases, kept))


def read(path: Path) -> dict[str, Any]:
    """A case."""
    case = tomllib.loads(path.read_text())
    unknown = case.keys() - KEYS
    assert not unknown, f"{path.name}: unknown keys {sorted(unknown)}"
    return case


def measured(case: Mapping[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Both searches of one case."""
    clone = cloned(case, folder, options.repositories)
    driver = str(HERE / "drivers" / case["driver"])
    python = environment(case["environment"]) if "environment" in case else options.python
    command = [*launcher(case, python), driver, *case.get("arguments", [])]
    result: dict[str, Any] = {"about": about(), "ours": by_repro(case, clone, command, options)}
    if "package" not in case:
        result["git"] = by_git(case, clone, command)
    return result


def environment(needs: Sequence[str]) -> str:
    """The interpreter of an environment of these packages, made where there is none yet."""
    name = hashlib.sha256("\n".join([sys.version, *needs]).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"repro-real-{name}"
    python, made = folder / "bin" / "python", folder / "made"
    if not made.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *needs], check=True)
        made.touch()
    return str(python)


def launcher(case: Mapping[str, Any], python: str) -> list[str]:
    """What starts the driver: the interpreter, or a launcher of the same environment where that has one."""
    if "launch" not in case:
        return [python]
    name, *more = case["launch"]
    beside = Path(python).with_name(name)
    return [str(beside) if beside.exists() else name, *more]


def about() -> dict[str, str]:
    """Where and when."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    head = ["git", "rev-parse", "--short=10", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": f"{cpu.partition(': ')[2] or platform.machine()}, {os.cpu_count()} cores",
        "torch": version("torch"),
    }


def cloned(case: Mapping[str, Any], folder: Path, repositories: Path | None) -> Path:
    """A clone of the repository at BAD; for a package a repository that holds nothing but a note."""
    clone = folder / "checkout"
    if "package" in case:
        clone.mkdir()
        (clone / "README").write_text("The driver lies elsewhere; the package's releases are searched.\n")
        git = ["git", "-c", "user.name=real", "-c", "user.email=real@example.invalid"]
        for line in (["init", "-q"], ["add", "--all"], ["commit", "-qm", "Nothing"]):
            subprocess.run([*git, *line], cwd=clone, check=True)
        return clone
    owner, _, name = case["repository"].partition("/")
    places = [repositories / f"{owner}+{name}" / "repo", repositories / owner / f"{name}.git"] if repositories else []
    source = next((str(place) for place in places if place.exists()), f"https://github.com/{owner}/{name}")
    subprocess.run(["git", "clone", "-q", "--no-checkout", source, str(clone)], check=True)
    subprocess.run(["git", "checkout", "-q", "--detach", case["bad"]], cwd=clone, check=True)
    return clone


def by_repro(
    case: Mapping[str, Any], clone: Path, command: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    """`repro bisect`, to the end of its explanation."""
    ends = f"{case['good']}..{case['bad']}"
    axis = ["--package", f"{case['package']}=={ends}"] if "package" in case else [ends]
    line = [sys.executable, "-m", "repro", "bisect", *axis, "--json"]
    line += ["-j", str(options.jobs)] if options.jobs else []
    began = time.monotonic()
    named = None
    with subprocess.Popen(
        [*line, *case.get("options", []), "--", *command],
        cwd=clone, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        lines = []
        assert process.stderr is not None
        assert process.stdout is not None
        for text in process.stderr:
            lines.append(text.rstrip("\n"))
            if named is None and text.startswith("confirming "):
                named = time.monotonic() - began
        answer = process.stdout.read()
    seconds = time.monotonic() - began
    result = json.loads(answer) if answer.strip() else {"error": lines[-1] if lines else "no output"}
    if "error" in result:
        return {"outcome": "error", "error": result["error"], "seconds": seconds}
    culprit = (result.get("culprit") or {}).get("commit", "")
    first = (result.get("culprits") or [{}])[0]
    explanation = first.get("explanation") or {}
    explained = [explanation.get(side, {}).get("explained") or {} for side in ("after", "before")]
    divergence = result.get("divergence") or {}
    text = explanation.get("text") or first.get("unexplained", "")
    where = f"{case['package']} " if "package" in case else ""
    touched = [place["place"] for place in explained if (place.get("place") or {}).get("touched")]
    for how in () if touched else ("mentions", "ran"):
        touched += explanation.get(how, ())
        beside = ", ".join(f"{place['file']}:{place['line']}" for place in explanation.get(how, [])[:4])
        text += f"; {WAYS[how]} {beside}" if beside else ""
    return {
        "outcome": result["outcome"],
        "culprit": culprit,
        "subject": (result.get("culprit") or {}).get("subject", ""),
        "right": result["outcome"] == "found" and culprit.removeprefix(where).startswith(case["culprit"]),
        "suspects": len(result["suspects"]),
        "commits": result["commits"],
        "first": [divergence.get("step"), divergence.get("phase"), divergence.get("signal")],
        "text": re.sub(r"/\S*/site-packages/", "", text.replace(f"{HERE}/", "")),
        "line": f"{touched[0]['file']}:{touched[0]['line']}" if touched else "",
        "processes": result["cost"]["probes"],
        "steps": result["cost"]["steps"],
        "skips": len(result["skips"]),
        "named_seconds": named,
        "seconds": seconds,
    }


def by_git(case: Mapping[str, Any], clone: Path, command: Sequence[str]) -> dict[str, Any]:
    """`git bisect run` with the same driver; its first run, at GOOD, gives the numbers to compare with."""
    numbers, log = clone.parent / "numbers", clone.parent / "runs"
    test = [sys.executable, str(HERE / "git_test.py"), str(numbers), str(log), "--", *command]
    began = time.monotonic()
    subprocess.run(["git", "checkout", "-q", "--detach", case["good"]], cwd=clone, check=True)
    if subprocess.run(test, cwd=clone, check=False).returncode:
        return {"outcome": "GOOD does not run", "right": False, "seconds": time.monotonic() - began}
    start = ["git", "bisect", "start", case["bad"], case["good"]]
    subprocess.run(start, cwd=clone, check=True, capture_output=True)
    done = subprocess.run(["git", "bisect", "run", *test], cwd=clone, check=False, capture_output=True, text=True)
    seconds = time.monotonic() - began
    match = re.search(r"^([0-9a-f]{40}) is the first (?:bad|new) commit", done.stdout, re.MULTILINE)
    made = [int(line) for line in log.read_text().splitlines()]
    return {
        "outcome": "found" if match else done.stdout.strip().splitlines()[-1][:200] if done.stdout.strip() else "error",
        "culprit": match[1] if match else "",
        "right": match is not None and match[1].startswith(case["culprit"]),
        "processes": len(made),
        "steps": sum(made),
        "seconds": seconds,
    }


def page(cases: Mapping[str, Mapping[str, Any]], kept: Mapping[str, Mapping[str, Any]]) -> str:
    """The page."""
    shown = {name: kept[name] for name in cases if name in kept}
    rows = [row(name, cases[name], finding) for name, finding in shown.items()]
    both = [finding for finding in shown.values() if "git" in finding and finding["git"].get("processes")]
    right = sum(finding["ours"].get("right", False) for finding in shown.values())
    lines = [finding["ours"]["text"] for finding in shown.values() if finding["ours"].get("line")]
    defined, ran = (sum(way in text for text in lines) for way in WAYS.values())
    projects = {(case.get("package") or case["repository"]).rpartition("/")[2] for case in (cases[n] for n in shown)}
    abouts = sorted({tuple(finding["about"].values()) for finding in shown.values()})
    totals = [
        f"| {what} | {total(both, 'ours', key):,.0f} | {total(both, 'git', key):,.0f} |"
        for what, key in (("processes", "processes"), ("trained steps", "steps"), ("seconds", "seconds"))
    ]
    named = [finding for finding in both if finding["ours"].get("named_seconds")]
    until = total(named, "ours", "named_seconds"), total(named, "git", "seconds")
    totals.append(f"| seconds until the name | {until[0]:,.0f} | {until[1]:,.0f} |")
    git_right = sum(finding["git"]["right"] for finding in both)
    return "\n".join([
        "# Real regressions, in the histories where they happened", "",
        "Written by `python benchmarks/real/real.py`. Each row is a change of numbers that really happened in an open",
        "project. A driver of ours trains a few steps on a CPU through the project's own code at each commit;",
        "`repro bisect` and `git bisect run` search with it, one after the other. Right is the commit that upstream's",
        "fix, revert or issue names. `git bisect run` compares the printed numbers with GOOD's, in every digit.", "",
        f"{len(shown)} changes in {len(projects)} projects, {len(both)} of commits and {len(shown) - len(both)} of",
        f"releases: `repro bisect` named the right one in {right}, and lines of the commit in {len(lines)}:",
        f"in {defined} one that defines what the operation reads, in {ran} those that ran, else the operation's own.",
        f"`git bisect run` was right in {git_right} of {len(both)}.", "",
        "| | `repro bisect` | `git bisect run` |", "|---|---|---|", *totals, "",
        "Ours hold confirmation and explanation, which git has not; until the name they hold two runs of GOOD and one",
        "of BAD.", "",
        "| change | range | found by us | first difference | explained | processes, steps, seconds | git |",
        "|---|---|---|---|---|---|---|", *rows, "",
        textwrap.fill("Measured: " + "; ".join(", ".join(facts) for facts in abouts) + ".", 120), "",
    ])  # fmt: skip


def total(findings: Sequence[Mapping[str, Any]], side: str, key: str) -> float:
    """Of all cases that both searched."""
    return sum(finding[side].get(key) or 0 for finding in findings)


def row(name: str, case: Mapping[str, Any], finding: Mapping[str, Any]) -> str:
    """A row of the table."""
    ours, git = finding["ours"], finding.get("git")
    where = case.get("repository", case.get("package"))
    named = f"{ours.get('culprit', '')[:10]} ({'right' if ours.get('right') else 'wrong'})"
    verdict = named if ours.get("outcome") == "found" else f"{ours['outcome']}: {ours.get('error', '')[:120]}"
    first = ", ".join(str(part) for part in ours.get("first", []) if part is not None)
    spent = ", ".join(f"{ours.get(key, 0):,.0f}" for key in ("processes", "steps", "seconds"))
    rival = "releases: none"
    if git is not None:
        told = (
            f"{git.get('culprit', '')[:10]} ({'right' if git['right'] else 'wrong'})"
            if git.get("culprit")
            else git["outcome"]
        )
        rival = f"{told}: " + ", ".join(f"{git.get(key, 0):,.0f}" for key in ("processes", "steps", "seconds"))
    cells = [
        f"`{name}` [{where}]({case['says']}), {case['kind']}: {case['what']}. {case.get('note', '')}".strip(),
        f"{case['good']}..{case['bad']}, {ours.get('commits', '?')} commits",
        verdict, first, ours.get("text", ""), spent, rival,
    ]  # fmt: skip
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    main()

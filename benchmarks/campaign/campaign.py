"""Tries to break every promise: ``python benchmarks/campaign/campaign.py [PART ...] [--seed N] [--share X]``.

Each part is a file beside this one with one function, `promises(asked)`, which yields a `Promise` for each thing that
it tried. What they say goes to docs/benchmarks/campaign.json, and from there into the tables of campaign.md. The whole
is share 1; a small share tries the same kinds of things, fewer of each. The status is 1 where a promise did not hold,
3 where the time was up.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path += [str(HERE), str(ROOT / "tests")]  # the other parts, and the tests' kits

from promise import Asked, Unfinished  # noqa: E402

DATA, PAGE = ROOT / "docs" / "benchmarks" / "campaign.json", ROOT / "docs" / "benchmarks" / "campaign.md"
PARTS = {
    "planted": "Planted changes",
    "clean": "Clean replays",
    "search": "Searches",
    "damage": "Damaged files",
    "kills": "Kills",
    "faults": "Faults",
    "hostile": "Hostile input",
    "large": "Long and large",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the parts that are asked for, keep what they say, write the page; see above for what it returns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--share", type=float, default=1.0, help="how much of the whole is tried (default: 1)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--only", default="", help="of a part that was run before, try again the promises with this text"
    )
    parser.add_argument(
        "--limit", type=float, default=math.inf, metavar="SECONDS", help="end then, where a part can go on later"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="keep answers here, and go on from those of the same files",
    )
    parser.add_argument("--out", type=Path, default=DATA, help="where the results are kept; the page is beside it")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    if options.only and (lacking := set(options.parts or PARTS) - results.keys()):
        parser.error(f"{', '.join(sorted(lacking))} was not run before: leave out --only")
    if math.isfinite(options.limit) and not options.resume:
        parser.error("--limit needs --resume, or what was answered is lost")
    status, facts = 0, about(options)  # before the results make this checkout another than the commit
    for part in [] if options.page else options.parts or PARTS:
        try:
            held = tried(part, options, facts, results)
        except Unfinished as far:
            print(f"{part}: the time is up: {far}; the same command goes on", flush=True)
            return 3
        if held is None:
            parser.error(f"nothing of {part} has {options.only!r} in its line")
        status |= not held
    page = options.out.with_suffix(".md")
    page.write_text(filled(PAGE.read_text(), results))
    return status


def tried(part: str, options: argparse.Namespace, facts: Mapping[str, Any], results: dict[str, Any]) -> bool | None:
    """Try a part, and keep what it says; whether every promise held, None where none was tried."""
    kept = options.resume / rests_on(facts) / f"{part} {options.only}".strip() if options.resume else None
    if kept:
        kept.mkdir(parents=True, exist_ok=True)
    spent = kept / "seconds" if kept else Path(os.devnull)
    now = time.monotonic()
    began, until = now - float(spent.read_text() or 0 if spent.exists() else 0), now + options.limit
    promises: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix=f"campaign-{part}-") as work:
        asked = Asked(options.seed, options.share, Path(work), options.jobs, options.only, kept, until)
        try:
            for promise in importlib.import_module(part).promises(asked):
                if options.only not in promise.what:
                    continue
                promises.append(asdict(promise))
                new = {"about": facts, "seconds": time.monotonic() - began, "promises": promises}
                results[part] = again(results[part], new) if options.only else new
                options.out.write_text(json.dumps(results, indent=1) + "\n")
                line = f"{part}: {promise.what}: {promise.held} of {promise.tried}"
                print(line, *promise.broken, sep="\n  ", flush=True)
        finally:
            spent.write_text(str(time.monotonic() - began))
    return all(promise["tried"] and promise["tried"] == promise["held"] for promise in promises) if promises else None


def rests_on(facts: Mapping[str, Any]) -> str:
    """What stands for all that an answer rests on: the files of this checkout as they are, seed, machine, versions."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", ".", ":!docs"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    seen = hashlib.sha256(json.dumps([facts[key] for key in ("seed", "machine", "versions")]).encode())
    for path in sorted({ROOT / name for name in names if name}):
        if path.is_file():
            content = path.read_bytes()
            seen.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return seen.hexdigest()[:16]


def again(before: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """What was kept of a part, with the promises of it that were tried again in their places, each with its facts."""
    facts = {key: value for key, value in new.items() if key != "promises"}
    tried = {promise["what"]: promise | facts for promise in new["promises"]}
    return {**before, "promises": [tried.get(promise["what"], promise) for promise in before["promises"]]}


def about(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, where and when."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    head = ["git", "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty"]
    return {
        "seed": options.seed,
        "share": options.share,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip(),
        "machine": f"{cpu.partition(': ')[2] or platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "dvc")} | {"python": platform.python_version()},
    }


def filled(page: str, results: Mapping[str, Any]) -> str:
    """The page with its tables written anew; the text around them is written by hand."""
    for part in PARTS:
        begin, end = f"<!-- {part} -->", f"<!-- end of {part} -->"
        head, middle, rest = page.partition(begin)
        if not middle:
            raise SystemExit(f"{PAGE} has no {begin}")
        told = shown(results[part]) if part in results else "Not run yet."
        page = f"{head}{begin}\n{told}\n{end}{rest.partition(end)[2]}"
    return page


def shown(result: Mapping[str, Any]) -> str:
    """A part's table, what broke, and where it was measured."""
    from repro.text import table

    rows = [
        [
            promise["what"],
            f"{promise['tried']:,}",
            f"{promise['held']:,}",
            "; ".join(f"{name} {value}" for name, value in promise["figures"].items()),
        ]
        for promise in result["promises"]
    ]
    broken = [line for promise in result["promises"] for line in promise["broken"]]
    later: dict[str, list[Mapping[str, Any]]] = {}
    for promise in result["promises"]:
        if "about" in promise:
            later.setdefault(_where(promise), []).append(promise)
    lines = [table(["promise", "tried", "held", "measured"], rows), ""]
    lines += ["Broken:", "", *(f"- {' '.join(line.split())}" for line in broken), ""] if broken else []
    if any("about" not in promise for promise in result["promises"]):
        lines.append(textwrap.fill(f"{_where(result)}.", 120, break_on_hyphens=False))
    for where, ones in later.items():
        whats = dict.fromkeys(promise["what"].partition(": ")[0] for promise in ones)
        told = textwrap.fill(f"{'; '.join(whats)}: {where[0].lower()}{where[1:]}.", 120, break_on_hyphens=False)
        lines += [*([""] if lines[-1] else []), told]
    return "\n".join(lines)


def _where(result: Mapping[str, Any]) -> str:
    """How much was tried, where and when."""
    facts = result["about"]
    versions = ", ".join(f"{name} {value}" for name, value in facts["versions"].items())
    return (
        f"Seed {facts['seed']}, share {facts['share']:g}, {result['seconds'] / 60:.1f} min; {facts['machine']}, "
        f"{versions}, {facts['date']}, commit {facts['commit']}"
    )


if __name__ == "__main__":
    sys.exit(main())

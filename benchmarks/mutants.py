"""What the tests would notice: ``python benchmarks/mutants.py`` changes the code in 150 places.

Cosmic Ray's operators make the changes; a seed chooses them, each package's share being its share of the lines. One
run of the fast tier, over a copy whose code says which test reached which place, tells what to try each change with.

1. Each change alone, with the cheapest fast tests that reach it.
2. All that is left at once, with every fast test that reaches any of it: a green test clears them all. Which change
   made a red one red is found by halves, alone, over code that is otherwise as committed. What it noticed is taken
   out, and the red tests run again until they are green.
3. The same of the whole tier's other tests, which say at once what they reach.

What `make test` misses of what `make test-all` notices is listed. What was done is kept in a folder, so that the same
command goes on where it was stopped; the code is the commit's, whatever becomes of the working tree meanwhile.

    python benchmarks/mutants.py --seed 20 --number 150
    python benchmarks/mutants.py --tier fast           # without the whole tier, which takes most of an hour
    python benchmarks/mutants.py --only 17 --show      # one change alone, with all fast tests that reach it
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mutants_drawn import PACKAGES, Mutant, changed, draw, read_marks, write
from tiers import PAGE, ROOT, about, section

TIERS = {"fast": "not whole and not campaign", "whole": "whole and not campaign"}
DATA = ROOT / "docs" / "mutants.json"
GRACE = 120  # seconds beside three times what the tests take by themselves; a change that hangs them is noticed
QUICK = 30  # seconds of tests that each change is tried with by itself
LONGEST = 600  # seconds of one test where many changes are tried at once
WORKERS = 2
MISSED = {"noticed": "none", "by": ""}
BROKEN = 30
"""Tests that may be red over marked code, whose lines are longer: more of them, and there is nothing to go by."""
_TIMES = re.compile(r"^ *([\d.]+)s (?:setup|call|teardown) +(tests/\S.*?) *$", re.MULTILINE)
_BROKEN = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?::.*?)(?: - .*)?$", re.MULTILINE)


def main() -> None:
    """Draw, look who reaches what, try, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--number", type=int, default=150)
    parser.add_argument("--folder", type=Path, default=ROOT / ".mutants")
    parser.add_argument("--tier", choices=TIERS, default="whole", help="up to which one")
    parser.add_argument("--only", type=int, help="try this one alone, with all fast tests that reach it")
    parser.add_argument("--show", action="store_true", help="print what pytest prints")
    given = parser.parse_args()
    given.folder.mkdir(exist_ok=True)
    drawn = [Mutant(**row) for row in kept(given.folder / "drawn.json", lambda: draw(given.seed, given.number))]
    if (len(drawn), given.seed) != (given.number, drawn[0].seed):
        sys.exit(f"mutants: {given.folder} holds another draw: remove it, or choose another folder with --folder")
    reached = kept(given.folder / "reached.json", lambda: reaching(drawn, given.folder))
    if given.only is not None:
        tests = [name for name, row in reached.items() if given.only in row["reaches"]]
        with changed(copied(given.folder / "try0"), [drawn[given.only]]) as copy:
            print(first_red(copy, tests, sum(reached[name]["seconds"] for name in tests), show=given.show) or "none")
        return
    trial = Trial(drawn, reached, given.folder)
    trial.quick()
    for tier in TIERS if given.tier == "whole" else ("fast",):
        trial.pooled(tier)
    counts = trial.counts()
    data = about(None) | {"seed": given.seed, "tier": given.tier}
    data |= {"mutants": [asdict(m) | trial.noticed.get(m.number, MISSED) | {"tests": counts[m.number]} for m in drawn]}
    DATA.write_text(json.dumps(data, indent=1) + "\n")
    PAGE.write_text(section(PAGE.read_text(), "mutants", table(data)))


def kept(path: Path, made: Any) -> Any:
    """What an earlier call wrote, or what is made now."""
    if not path.exists():
        path.write_text(json.dumps(made(), indent=1))
    return json.loads(path.read_text())


# -- who comes by


def reaching(drawn: Sequence[Mutant], folder: Path) -> dict[str, Any]:
    """One run of the fast tier over marked code: by test, seconds and what it reaches; red tests left out."""
    copy, seen = copied(folder / "map"), _empty(folder / "seen-fast")
    telling(copy)
    write(copy, drawn, marks=seen, change=False)
    output = whole_run(copy, ["-m", TIERS["fast"]], folder / "map-fast.log")
    seconds: dict[str, float] = {}
    for duration, name in _TIMES.findall(output):
        seconds[name] = seconds.get(name, 0) + float(duration)
    broken = set(_BROKEN.findall(output))
    if len(broken) > BROKEN:
        sys.exit(f"mutants: {len(broken)} tests are red over marked code: see {folder}/map-fast.log")
    reached = read_marks(seen)
    return {
        name: {"seconds": round(seconds.get(name, 0), 2), "reaches": reached.get(name, [])}
        for name in sorted(seconds.keys() | reached.keys())
        if name not in broken
    }


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def telling(copy: Path) -> None:
    """Let the processes that tests start say for which test they run."""
    conftest = copy / "tests" / "conftest.py"
    text = conftest.read_text()
    assert '"PYTEST_")' in text
    conftest.write_text(text.replace(', "PYTEST_")', ")"))


def whole_run(copy: Path, words: Sequence[str], log: Path) -> str:
    """What pytest prints of many tests, side by side; a copy of it goes to a file."""
    options = ["-n", str(WORKERS), "--dist", "worksteal", f"--timeout={LONGEST}", "--durations=0", "-vv", "-rfE", "-q"]
    asked = pytest(copy, *options, "--tb=line", *words)
    done = subprocess.run(asked, cwd=copy, stdout=subprocess.PIPE, text=True, check=False, env=plain())
    log.write_text(done.stdout)
    return done.stdout


# -- trying


class Trial:
    """The trial of all changes.

    Attributes:
        noticed: By number, the tier that noticed it and the test that did; kept in a file.
    """

    def __init__(self, drawn: Sequence[Mutant], reached: dict[str, Any], folder: Path) -> None:
        self.drawn, self.folder = drawn, folder
        self.seconds = {name: row["seconds"] for name, row in reached.items()}
        self.reaches = {name: row["reaches"] for name, row in reached.items()}
        self.path, self.lock = folder / "noticed.json", threading.Lock()
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.noticed: dict[int, dict[str, str]] = {int(number): row for number, row in known.items()}

    def left(self, among: Sequence[int] | None = None) -> list[Mutant]:
        """The changes that no test has noticed."""
        return [m for m in self.drawn if m.number not in self.noticed and (among is None or m.number in among)]

    def notice(self, number: int, tier: str, test: str) -> None:
        """Keep what noticed a change."""
        with self.lock:
            self.noticed[number] = {"noticed": tier, "by": test}
            self.path.write_text(json.dumps(self.noticed, indent=1))
            mutant = self.drawn[number]
            print(f"{len(self.noticed)}: {mutant.path}:{mutant.line} {mutant.operator}: {tier}, {test}", flush=True)

    def quick(self) -> None:
        """Each change alone, with its cheapest fast tests."""
        done = self.folder / "quick.json"
        tried: set[int] = set(json.loads(done.read_text())) if done.exists() else set()
        free = [copied(self.folder / f"try{n}") for n in range(WORKERS)]

        def attempt(mutant: Mutant) -> None:
            names = [name for name in self.reaches if mutant.number in self.reaches[name]]
            names.sort(key=self.seconds.__getitem__)
            sums = itertools.accumulate(map(self.seconds.__getitem__, names))
            cheap = [name for name, sum_of in zip(names, sums, strict=True) if sum_of <= QUICK] or names[:1]
            with self.lock:
                copy = free.pop()
            try:
                with changed(copy, [mutant]):
                    red = first_red(copy, cheap, sum(map(self.seconds.__getitem__, cheap)))
            finally:
                with self.lock:
                    free.append(copy)
            if red:
                self.notice(mutant.number, "fast", red)
            with self.lock:
                tried.add(mutant.number)
                done.write_text(json.dumps(sorted(tried)))

        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(attempt, [mutant for mutant in self.left() if mutant.number not in tried]))

    def pooled(self, tier: str) -> None:
        """All changes that are left at once, until no test is red."""
        red = kept(self.folder / f"red-{tier}.json", lambda: self._all_at_once(tier))
        if tier == "whole":
            self.reaches |= read_marks(self.folder / "seen-whole")
        copy = copied(self.folder / "try0")
        while red:
            fresh: set[int] = set()
            for test in red:
                if fresh & set(self.reaches.get(test, ())):
                    continue  # what was found may be why; it runs again without
                if (number := culprit(copy, test, self.left(self.reaches.get(test, ())))) is not None:
                    self.notice(number, tier, test)
                    fresh.add(number)
            if not fresh:
                print(f"{tier}: red by no change alone: {', '.join(red)}", flush=True)
                return
            again = [test for test in red if self.left(self.reaches.get(test, ()))]
            with changed(copy, self.left()):
                output = whole_run(copy, ["@asked"], self.folder / "again.log") if ask(copy, again) else ""
            red = [test for test in again if test in set(_BROKEN.findall(output))]

    def _all_at_once(self, tier: str) -> list[str]:
        """The red tests over code with all changes that are left; the whole tier's say what they reach."""
        left, copy = self.left(), copied(self.folder / "map")
        if tier == "fast":
            numbers = {mutant.number for mutant in left}
            tests = [name for name, reaches in self.reaches.items() if numbers & set(reaches)]
            if not ask(copy, tests):
                return []
            write(copy, left)
            output = whole_run(copy, ["@asked"], self.folder / "pool-fast.log")
        else:
            telling(copy)
            write(copy, left, marks=_empty(self.folder / "seen-whole"))
            output = whole_run(copy, ["-m", TIERS[tier], "--hypothesis-profile=whole"], self.folder / "pool-whole.log")
        return list(dict.fromkeys(_BROKEN.findall(output)))

    def counts(self) -> dict[int, int]:
        """How many tests reach each change."""
        return {m.number: sum(m.number in reaches for reaches in self.reaches.values()) for m in self.drawn}


def culprit(copy: Path, test: str, suspects: Sequence[Mutant]) -> int | None:
    """The change that makes a test red by itself, found by halves; None where none does."""
    if not suspects:
        return None
    with changed(copy, suspects):
        if not first_red(copy, [test], LONGEST):
            return None
    if len(suspects) == 1:
        return suspects[0].number
    half = len(suspects) // 2
    first = culprit(copy, test, suspects[:half])
    return first if first is not None else culprit(copy, test, suspects[half:])


def ask(copy: Path, tests: Sequence[str]) -> bool:
    """Write down which tests are to be run; whether there is any."""
    (copy / "asked").write_text("".join(f"{test}\n" for test in tests))
    return bool(tests)


def first_red(copy: Path, tests: Sequence[str], seconds: float, *, show: bool = False) -> str:
    """The first of the tests that fails; empty where all pass."""
    while ask(copy, tests):
        asked = pytest(copy, "-x", "-q", "-rfE", "--tb=line", "@asked")
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(asked, cwd=copy, start_new_session=True, env=plain(), **streams)
        try:
            out, _ = process.communicate(timeout=3 * seconds + GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "no end"
        if show:
            print(out)
        gone = set(re.findall(r"^ERROR: not found: \S*?(tests/\S+::.*)$", out, re.MULTILINE))
        if process.returncode == 4 and gone & set(tests):  # the change took a parametrised test's name away
            tests = [name for name in tests if name not in gone]
            continue
        if process.returncode == 0:
            return ""
        red = _BROKEN.search(out)
        return red[1] if red else "no test could be collected"
    return ""


# -- copies of the repository


def copied(copy: Path) -> Path:
    """A clone of the last commit with a light environment of its own, on top of this one's packages."""
    if copy.exists():
        subprocess.run(["git", "checkout", "--quiet", "."], cwd=copy, check=True)
        return copy
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=copy, check=True)
    here, there = Path(sys.prefix), copy / ".venv"
    packages = Path("lib") / f"python3.{sys.version_info.minor}" / "site-packages"
    paths = [copy, copy / "core", copy / "golden", copy / "bisect", here / packages]
    (there / packages / "repro.pth").write_text("".join(f"{path}\n" for path in paths))
    for script in sorted((here / "bin").iterdir()):
        head, _, body = script.read_bytes().partition(b"\n") if script.is_file() else (b"", b"", b"")
        if head.startswith(b"#!") and b"python" in head and not (there / "bin" / script.name).exists():
            (there / "bin" / script.name).write_bytes(f"#!{there}/bin/python\n".encode() + body)
            (there / "bin" / script.name).chmod(0o755)
    return copy


def pytest(copy: Path, *words: str) -> list[str]:
    """Pytest in a copy's environment."""
    return [str(copy / ".venv" / "bin" / "python"), "-m", "pytest", "-p", "no:cacheprovider", *words]


def plain() -> dict[str, str]:
    """Our environment, with nothing of a virtual environment's."""
    return {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTEST_ADDOPTS")}


# -- telling


def table(data: dict[str, Any]) -> list[str]:
    """The counts, and what the fast tests miss."""
    mutants = data["mutants"]
    rows = [
        "| | changes | no test reaches | noticed by `make test-all` | of these by `make test` |",
        "|---|---|---|---|---|",
    ]
    for package in (*PACKAGES, "all"):
        here = [row for row in mutants if package == "all" or row["path"].startswith(f"{package}/")]
        noticed = [row for row in here if row["noticed"] != "none"]
        fast = sum(row["noticed"] == "fast" for row in noticed)
        share = f"{fast} ({100 * fast / len(noticed):.0f} %)" if noticed else "-"
        rows.append(f"| {package} | {len(here)} | {sum(not row['tests'] for row in here)} | {len(noticed)} | {share} |")
    rows += ["", f"Seed {data['seed']}, commit {data['commit']}, {data['date']}, {data['machine']}.", ""]
    if data["tier"] == "fast":
        rows += ["The whole tier's other tests were not tried.", ""]
    for title, tier in (("Noticed by the whole tier alone:", "whole"), ("Noticed by no test:", "none")):
        if lines := [_line(row) for row in mutants if row["noticed"] == tier]:
            rows += [title, "", *lines, ""]
    return rows[:-1]


def _line(row: dict[str, Any]) -> str:
    lines = [line for line in row["diff"].splitlines() if line[:1] in "+-"]
    old, new = (" ".join(line[1:].strip() for line in lines if line[0] == sign) or "(nothing)" for sign in "-+")
    by = f", by `{row['by']}`" if row["by"] else "" if row["tests"] else ", which no test reaches"
    return f"- `{row['path']}:{row['line']}`: `{old}` became `{new}`{by}".replace("|", "\\|")


if __name__ == "__main__":
    main()

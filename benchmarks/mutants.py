"""What the tests would notice: ``python benchmarks/mutants.py`` changes the code in 150 places, one at a time.

Cosmic Ray's operators make the changes; a seed chooses them, each package's share being its share of the lines. One
run of each tier, over a copy whose code says which test reached which place, tells what to try each change with. Then
every change is tried with the fast tests that reach it, cheapest first, and, where none fails, with the others. What
`make test` misses of what `make test-all` notices is listed. What was done is kept in a folder, so that the same
command goes on where it was stopped.

    python benchmarks/mutants.py --seed 20 --number 150
    python benchmarks/mutants.py --only 17 --show      # one change, and what pytest prints of it
"""

from __future__ import annotations

import argparse
import ast
import difflib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tiers import PAGE, ROOT, about, section

PACKAGES = ("repro", "core/repro_core", "golden/repro_golden", "bisect/repro_bisect")
LEFT_OUT = (
    "golden/repro_golden/fingerprint/_numba.py",  # compiled: what is put into them to see who comes by does not compile
    "golden/repro_golden/fingerprint/_triton.py",
)
TIERS = {"fast": "not whole and not campaign", "whole": "whole and not campaign"}
DATA = ROOT / "docs" / "mutants.json"
GRACE = 120  # seconds beside three times what the tests take by themselves; a change that hangs them is noticed
WORKERS = 2
BROKEN = 30
"""Tests that may be red over marked code, whose lines are longer: more of them, and there is nothing to go by."""
_TIMES = re.compile(r"^ *([\d.]+)s (?:setup|call|teardown) +(tests/\S.*?) *$", re.MULTILINE)
_BROKEN = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?::.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        number: Its place in the draw.
        path: The file, from the repository's root.
        operator: Cosmic Ray's name of what was done.
        occurrence: Which of the places in this file where it can be done.
        line: The line, counted from 1.
        diff: The change as a unified diff without context.
    """

    number: int
    path: str
    operator: str
    occurrence: int
    line: int
    diff: str

    def text(self) -> str:
        """The whole file as changed."""
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        text = mutate_code((ROOT / self.path).read_text(), get_operator(self.operator)(), self.occurrence)
        assert text is not None, self
        return text


def main() -> None:
    """Draw, look who reaches what, try, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--number", type=int, default=150)
    parser.add_argument("--folder", type=Path, default=ROOT / ".mutants")
    parser.add_argument("--only", type=int, help="try this one alone, with all tests that reach it")
    parser.add_argument("--show", action="store_true", help="print what pytest prints")
    given = parser.parse_args()
    given.folder.mkdir(exist_ok=True)
    mutants = kept(given.folder / f"drawn-{given.seed}-{given.number}.json", lambda: draw(given.seed, given.number))
    drawn = [Mutant(**one) for one in mutants]
    reached: dict[str, Any] = {}
    for tier in TIERS:  # apart, since the second takes most of an hour
        reached |= kept(given.folder / f"reached-{tier}.json", lambda t=tier: reaching(drawn, t, given.folder))
    fast = set(collected(given.folder / "map", TIERS["fast"]))
    if given.only is not None:
        copy = copied(given.folder / "try0")
        print(verdict(drawn[given.only], reached, fast, copy, show=given.show))
        return
    found = tried(drawn, reached, fast, given.folder)
    told = about(None) | {"seed": given.seed, "mutants": [asdict(m) | found[m.number] for m in drawn]}
    DATA.write_text(json.dumps(told, indent=1) + "\n")
    PAGE.write_text(section(PAGE.read_text(), "mutants", table(told)))


def kept(path: Path, made: Any) -> Any:
    """What an earlier call wrote, or what is made now."""
    if not path.exists():
        path.write_text(json.dumps(made(), indent=1))
    return json.loads(path.read_text())


# -- choosing


def draw(seed: int, number: int) -> list[dict[str, Any]]:
    """Changes of lines that run: files by their size, then a kind of change, then a place."""
    from cosmic_ray.ast import get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    chosen: list[dict[str, Any]] = []
    random_of = random.Random(seed)
    names = [p for folder in PACKAGES for p in tracked(folder) if p not in LEFT_OUT]
    sizes = [len((ROOT / name).read_text().splitlines()) for name in names]
    taken: set[tuple[str, int]] = set()
    while len(chosen) < number:
        (name,) = random_of.choices(names, sizes)
        source = (ROOT / name).read_text()
        nodes, silent = list(_nodes(get_ast(source))), _silent(source)
        places: dict[str, list[tuple[str, int, int]]] = {}
        for operator in sorted(operator_names()):
            made = get_operator(operator)
            if made.arguments():
                continue
            ats = itertools.chain.from_iterable(made().mutation_positions(node) for node in nodes)
            for occurrence, ((line, _), _) in enumerate(ats):
                if line not in silent and (name, line) not in taken:
                    family = re.sub(r"(Operator|Replace(?:Binary|Comparison|Unary)).*", r"\1", operator)
                    places.setdefault(family, []).append((operator, occurrence, line))
        if not places:
            continue
        operator, occurrence, line = random_of.choice(places[random_of.choice(sorted(places))])
        one = Mutant(len(chosen), name, operator, occurrence, line, "")
        if diff := _difference(source, one):
            taken.add((name, line))
            chosen.append(asdict(one) | {"diff": "\n".join(diff)})
    return chosen


def tracked(folder: str) -> list[str]:
    """Python files that git knows, sorted."""
    done = subprocess.run(["git", "ls-files", f"{folder}/*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(done.stdout.split())


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in getattr(node, "children", ()):
        yield from _nodes(child)


def _silent(source: str) -> set[int]:
    """Lines whose change means nothing: annotations, imports, type aliases' heads, what only type checkers read."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        hidden: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            hidden += [node.returns, *(arg.annotation for arg in every if arg)]
        if isinstance(node, ast.AnnAssign):
            hidden.append(node.annotation)
        if isinstance(node, ast.Import | ast.ImportFrom):
            hidden.append(node)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            hidden.append(node)
        for one in hidden:
            if one is not None:
                lines.update(range(one.lineno, (one.end_lineno or one.lineno) + 1))  # type: ignore[attr-defined]
    return lines


def _difference(source: str, one: Mutant) -> list[str]:
    """The lines of a diff; none where the change cannot be made."""
    try:
        text = one.text()
        compile(text, "mutant", "exec")
    except (AttributeError, SyntaxError):  # `except a.B` is more than Cosmic Ray knows
        return []
    return [*difflib.unified_diff(source.splitlines(), text.splitlines(), n=0, lineterm="")][2:]


# -- who comes by


def reaching(drawn: Sequence[Mutant], tier: str, folder: Path) -> dict[str, Any]:
    """One run of a tier over marked code: by test, seconds and the changes that it reaches; red tests left out."""
    copy, seen = copied(folder / "map"), folder / "seen"
    shutil.rmtree(seen, ignore_errors=True)
    seen.mkdir()
    for path in sorted({one.path for one in drawn}):
        marked(copy / path, [one for one in drawn if one.path == path], seen)
    conftest = copy / "tests" / "conftest.py"
    text = conftest.read_text()
    assert '"PYTEST_")' in text
    conftest.write_text(text.replace(', "PYTEST_")', ")"))  # children say for which test they run
    words = ["-n", str(WORKERS), "--dist", "worksteal", "-m", TIERS[tier], "--durations=0", "-vv", "-rfE", "-q"]
    done = subprocess.run(pytest(copy, *words), cwd=copy, stdout=subprocess.PIPE, text=True, check=False, env=plain())
    (folder / f"map-{tier}.log").write_text(done.stdout)
    seconds: dict[str, float] = {}
    for duration, name in _TIMES.findall(done.stdout):
        seconds[name] = seconds.get(name, 0) + float(duration)
    broken = set(_BROKEN.findall(done.stdout))
    if len(broken) > BROKEN:
        sys.exit(f"mutants: {len(broken)} tests are red over marked code: see {folder}/map-{tier}.log")
    reached: dict[str, list[int]] = {}
    for path in sorted(seen.iterdir()):
        reached.setdefault(path.read_text().rpartition(" (")[0], []).append(int(path.name.partition("-")[0]))
    return {
        name: {"seconds": round(seconds.get(name, 0), 2), "reaches": sorted(set(numbers))}
        for name, numbers in sorted(reached.items())
        if name not in broken
    }


def marked(path: Path, mutants: Sequence[Mutant], seen: Path) -> None:
    """Before each changed statement, one that says which test came by; before all of a module's that runs on import."""
    source = path.read_text()
    before: dict[int, set[int]] = {}
    for one in mutants:
        for line in _marks(source, one.line):
            before.setdefault(line, set()).add(one.number)
    lines = source.splitlines()
    for line in sorted(before, reverse=True):
        indent = re.match(r"\s*", lines[line - 1])
        assert indent
        lines[line - 1 : line - 1] = [f"{indent[0]}{_mark(number, seen)}" for number in sorted(before[line])]
    path.write_text("\n".join(lines) + "\n")


def _marks(source: str, line: int) -> list[int]:
    """Lines that a mark goes before: the statement's, and where it runs on import, all functions' first too."""
    tree, lines = ast.parse(source), source.splitlines()
    within: list[ast.stmt] = []
    inside = False
    node: ast.AST = tree
    while True:
        for child in ast.iter_child_nodes(node):
            start = min([getattr(child, "lineno", 0), *(d.lineno for d in getattr(child, "decorator_list", ()))])
            if start <= line <= (getattr(child, "end_lineno", None) or 0):
                break
        else:
            break
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and child in node.body:
            inside = True
        node = child
        if isinstance(node, ast.stmt):
            within.append(node)
    for one in reversed(within):
        start = min([one.lineno, *(d.lineno for d in getattr(one, "decorator_list", ()))])
        before = lines[start - 1][: one.col_offset]
        if not before.strip() and not lines[start - 1].lstrip().startswith(("elif", "else")):
            break
    first = [start]
    if not inside:
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                body = function.body[1:] if ast.get_docstring(function) is not None else function.body
                if body and not lines[body[0].lineno - 1][: body[0].col_offset].strip():
                    begin = min([body[0].lineno, *(d.lineno for d in getattr(body[0], "decorator_list", ()))])
                    first.append(begin)
    return sorted(set(first))


def _mark(number: int, seen: Path) -> str:
    """A statement that needs nothing of its module: once a test, an empty file with its name."""
    told = (
        f"import os, hashlib; t = os.environ['PYTEST_CURRENT_TEST']; globals()['_seen_{number}'].add(t)\n"
        "try:\n"
        f"  with open('{seen}/{number}-' + hashlib.md5(t.encode()).hexdigest(), 'w') as f: f.write(t)\n"
        "except OSError: pass"
    )
    asked = "__import__('os').environ.get('PYTEST_CURRENT_TEST')"
    return f"{asked} in globals().setdefault('_seen_{number}', {{None}}) or exec({told!r}, globals())"


# -- trying


def tried(drawn: Sequence[Mutant], reached: dict[str, Any], fast: set[str], folder: Path) -> dict[int, dict[str, Any]]:
    """What became of each change, by number."""
    path = folder / "tried.json"
    found = {int(number): one for number, one in json.loads(path.read_text()).items()} if path.exists() else {}
    free, lock = [copied(folder / f"try{n}") for n in range(WORKERS)], threading.Lock()

    def attempt(one: Mutant) -> None:
        with lock:
            copy = free.pop()
        try:
            result = verdict(one, reached, fast, copy)
        finally:
            with lock:
                free.append(copy)
        with lock:
            found[one.number] = result
            path.write_text(json.dumps(found, indent=1))
            print(f"{len(found)} of {len(drawn)}: {one.path}:{one.line} {one.operator}: {result}", flush=True)

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(attempt, [one for one in drawn if one.number not in found]))
    return found


def verdict(one: Mutant, reached: dict[str, Any], fast: set[str], copy: Path, *, show: bool = False) -> dict[str, Any]:
    """Which tier notices it: ``fast``, ``whole`` or ``none``, and the test that did."""
    names = sorted((n for n in reached if one.number in reached[n]["reaches"]), key=lambda n: reached[n]["seconds"])
    path, original = copy / one.path, (ROOT / one.path).read_text()
    path.write_text(one.text())
    try:
        for tier in ("fast", "whole"):
            tests = [name for name in names if (name in fast) == (tier == "fast")]
            by = first_red(copy, tests, sum(reached[name]["seconds"] for name in tests), show=show)
            if by:
                return {"noticed": tier, "by": by, "tests": len(names)}
    finally:
        path.write_text(original)
    return {"noticed": "none", "by": "", "tests": len(names)}


def first_red(copy: Path, tests: list[str], seconds: float, *, show: bool) -> str:
    """The first of the tests that fails; empty where all pass."""
    while tests:
        (copy / "asked").write_text("\n".join(tests) + "\n")
        asked = pytest(copy, "-x", "-q", "-rfE", "--tb=line", "-p", "no:randomly", "@asked")
        told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(asked, cwd=copy, start_new_session=True, env=plain(), **told)
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


def collected(copy: Path, tier: str) -> list[str]:
    """Names of a tier's tests."""
    asked = pytest(copied(copy), "--collect-only", "-q", "-m", tier)
    done = subprocess.run(asked, cwd=copy, capture_output=True, text=True, check=False, env=plain())
    names = [line for line in done.stdout.splitlines() if line.startswith("tests/")]
    if not names:
        sys.exit(f"mutants: no test was collected:\n{done.stdout[-2000:]}")
    return names


def pytest(copy: Path, *words: str) -> list[str]:
    """Pytest in a copy's environment."""
    return [str(copy / ".venv" / "bin" / "python"), "-m", "pytest", "-p", "no:cacheprovider", *words]


def plain() -> dict[str, str]:
    """Our environment, with nothing of a virtual environment's."""
    return {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTEST_ADDOPTS")}


# -- telling


def table(told: dict[str, Any]) -> list[str]:
    """The counts, and what the fast tests miss."""
    mutants = told["mutants"]
    rows = [
        "| | changes | no test reaches | noticed by `make test-all` | of these by `make test` |",
        "|---|---|---|---|---|",
    ]
    for package in (*PACKAGES, "all"):
        of = [one for one in mutants if package == "all" or one["path"].startswith(f"{package}/")]
        noticed = [one for one in of if one["noticed"] != "none"]
        fast = sum(one["noticed"] == "fast" for one in noticed)
        share = f"{fast} ({100 * fast / len(noticed):.0f} %)" if noticed else "-"
        rows.append(f"| {package} | {len(of)} | {sum(not one['tests'] for one in of)} | {len(noticed)} | {share} |")
    rows += ["", f"Seed {told['seed']}, commit {told['commit']}, {told['date']}, {told['machine']}.", ""]
    for title, what in (("Noticed by the whole tier alone:", "whole"), ("Noticed by no test:", "none")):
        rows += [title, "", *(_line(one) for one in mutants if one["noticed"] == what), ""]
    return rows[:-1]


def _line(one: dict[str, Any]) -> str:
    changed = [line for line in one["diff"].splitlines() if line[:1] in "+-"]
    old, new = (" ".join(line[1:].strip() for line in changed if line[0] == sign) for sign in "-+")
    by = f", by `{one['by']}`" if one["by"] else "" if one["tests"] else ", which no test reaches"
    return f"- `{one['path']}:{one['line']}`: `{old or '(nothing)'}` became `{new or '(nothing)'}`{by}".replace(
        "|", "\\|"
    )


if __name__ == "__main__":
    main()

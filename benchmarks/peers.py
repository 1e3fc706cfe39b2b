"""The field's checks and ours on the same changes, in one run: ``python benchmarks/peers.py [--repositories DIR]``.

Each change is two versions of one program, which is run as it is, once more in another folder, and with the change.
What each check says of the runs goes to docs/benchmarks/peers.json and peers.md. Three kinds of changes:

- of a program of ours (peers.toml): one edit each, of which some reach no loss;
- real ones, with ``--repositories``: the culprits of benchmarks/real that run on one rank, each against its parent;
- edits that change no number: whoever sees one raises a false alarm.

The checks: `grad_norm` within 3 % (Miles' CI); loss equal to 5 decimals (Megatron-LM's golden values until 2026-09);
`torch.hash_tensor` of each parameter and gradient after each step; DebugMode's hashes of each operation, with its
defaults, but for memory that nobody has written yet; the tensor comparator of SGLang, with its defaults; TrainCheck's
tensor hash; `torch.testing.assert_close`, with its defaults; `repro trace` and `repro diff`. Those of tensors are all
shown the same: parameters and gradients after each step. SGLang and TrainCheck are the installed ones; where one is
not, its column says so. What a check costs is measured with ``--cost``, alone on the machine: two runs of the program
of ours under what the check looks with, and its comparison, against two runs of it as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from repro.text import table

HERE = Path(__file__).parent
ROOT = HERE.parent
REAL = HERE / "real"
DATA, PAGE = ROOT / "docs" / "benchmarks" / "peers.json", ROOT / "docs" / "benchmarks" / "peers.md"
LIMIT = 300.0
ROUNDS = 5


def main() -> None:
    """Run what is asked for, keep it, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repositories", type=Path, help="folder of bare clones, as for benchmarks/real/real.py")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the real programs")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="changes whose names hold one of these, with commas between")
    parser.add_argument("--cost", action="store_true", help="measure what each check costs, and nothing else")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    options = parser.parse_args()
    parts = options.page or options.only or options.cost
    kept: dict[str, Any] = json.loads(DATA.read_text()) if parts and DATA.exists() else {"changes": {}}
    if options.cost:
        kept["cost"] = about() | {"times": costs()}
        DATA.write_text(json.dumps(kept, indent=1) + "\n")
    elif not options.page:
        kept["about"] = about()
        with tempfile.TemporaryDirectory(prefix="peers-") as folder:
            work = list(changes(Path(folder), options))
            import_peers()
            with ThreadPoolExecutor(options.jobs) as pool:
                for task, answers in zip(work, pool.map(judged, work), strict=True):
                    kept["changes"][task.name] = answers
                    print(f"{task.name}: {answers}", flush=True)
        DATA.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page(kept))


def import_peers() -> None:
    """Before threads would import them at once, and before a clock runs."""
    sys.path.append(str(ROOT / "core" / "repro_core" / "rollout" / "sglang" / "cpu"))  # stands in for torchvision
    for name in ("sglang.srt.debug_utils.comparator", "traincheck.instrumentor.proxy_wrapper.hash"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


class Change:
    """Two versions of a program.

    Attributes:
        name: What changes.
        kind: ``planted``, ``real`` or ``harmless``.
        before: Folder and command line of the one.
        after: Of the other.
        python: The interpreter of both.
    """

    def __init__(
        self, name: str, kind: str, before: tuple[Path, list[str]], after: tuple[Path, list[str]], python: str
    ) -> None:
        self.name, self.kind, self.before, self.after, self.python = name, kind, before, after, python


def changes(folder: Path, options: argparse.Namespace) -> Iterator[Change]:
    """All of them."""
    told = tomllib.loads((HERE / "peers.toml").read_text())
    program = told["program"]
    wanted = options.only.split(",")
    for kind in ("planted", "harmless"):
        for edit in told[kind]:
            name, places = edit["name"], []
            if not any(part in name for part in wanted):
                continue
            assert edit["old"] in program, name
            for version, text in (("before", program), ("after", program.replace(edit["old"], edit["new"]))):
                place = folder / kind / re.sub(r"\W+", "-", name) / version
                place.mkdir(parents=True)
                (place / "train.py").write_text(text)
                places.append((place, [str(place / "train.py")]))
            yield Change(name, kind, places[0], places[1], sys.executable)
    for path in sorted((REAL / "cases").glob("*.toml")) if options.repositories else ():
        case = tomllib.loads(path.read_text())
        one_process = not ("package" in case or "launch" in case or "--ranks" in case.get("options", ()))
        if not one_process or not any(part in path.stem for part in wanted):
            continue
        owner, _, name = case["repository"].partition("/")
        source = options.repositories / f"{owner}+{name}" / "repo"
        places = []
        for version, commit in (("before", f"{case['culprit']}^"), ("after", case["culprit"])):
            place = folder / "real" / path.stem / version
            subprocess.run(["git", "clone", "-q", "--no-checkout", str(source), str(place)], check=True)
            subprocess.run(["git", "checkout", "-q", "--detach", commit], cwd=place, check=True)
            places.append((place, [str(REAL / "drivers" / case["driver"]), *case.get("arguments", [])]))
        yield Change(path.stem, "real", places[0], places[1], options.python)


def judged(change: Change) -> dict[str, Any]:
    """What each check says: whether it sees a difference, and in a second run of what did not change."""
    with tempfile.TemporaryDirectory(prefix="peers-out-") as folder:
        runs = [
            Run(change, side, Path(folder) / name) for side, name in (("before", "a"), ("before", "b"), ("after", "c"))
        ]
        answers: dict[str, Any] = {"kind": change.kind, "sees": {}, "again": {}}
        for name, check in CHECKS.items():
            for key, other in (("sees", runs[2]), ("again", runs[1])):
                try:
                    answers[key][name] = check(runs[0], other)
                except Exception as error:  # noqa: BLE001 - a check that breaks has said nothing, and the page says so
                    answers[key][name] = f"{type(error).__name__}: {error}"[:200]
        return answers


def costs() -> dict[str, float]:
    """By check: two runs under what it looks with and its comparison, over two plain runs; medians of rounds."""
    import_peers()
    times: dict[str, list[float]] = {name: [] for name in CHECKS}
    with tempfile.TemporaryDirectory(prefix="peers-cost-") as folder:
        place = Path(folder)
        (place / "train.py").write_text(tomllib.loads((HERE / "peers.toml").read_text())["program"])
        version = place, [str(place / "train.py")]
        same = Change("none", "harmless", version, version, sys.executable)
        for number in range(ROUNDS):
            pairs = {
                name: [Run(same, "before", place / re.sub(r"\W+", "-", f"{number} {name} {k}")) for k in range(2)]
                for name in ("plain", *CHECKS)
            }
            began = time.perf_counter()
            for run in pairs["plain"]:
                run.watched("nothing")
            plain = time.perf_counter() - began
            for name, check in CHECKS.items():
                began = time.perf_counter()
                assert check(*pairs[name]) is False, name
                times[name].append((time.perf_counter() - began) / plain)
    return {name: round(statistics.median(ratios), 3) for name, ratios in times.items()}


class Run:
    """One run of a version, and what there is to see of it."""

    def __init__(self, change: Change, side: str, folder: Path) -> None:
        self.change, self.folder = change, folder
        self.place, self.command = change.before if side == "before" else change.after
        folder.mkdir()
        self._kept: dict[str, Any] = {}

    def _of(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def watched(self, what: str) -> Any:
        """What the child saw: see `peers_child`."""
        return self._of(what, lambda: self._watch(what))

    def _watch(self, what: str) -> Any:
        out = self.folder / what
        child = [self.change.python, str(HERE / "peers_child.py"), str(out), what, *self.command]
        done = subprocess.run(child, cwd=self.place, capture_output=True, text=True, timeout=LIMIT, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        self._kept["printed"] = done.stdout
        if not (seen := torch.load(out, weights_only=True)) and what != "nothing":
            raise RuntimeError(f"no {what} were seen")
        return seen

    @property
    def numbers(self) -> list[Mapping[str, float]]:
        """The numbers of each printed step."""
        if "printed" not in self._kept:
            self.watched("nothing")
        return [json.loads(line) for line in re.findall(r"^step \d+: (\{.*\})$", self._kept["printed"], re.MULTILINE)]

    @property
    def trace(self) -> Path:
        """Our own recording."""
        return self._of("trace", self._trace)  # type: ignore[no-any-return]

    def _trace(self) -> Path:
        out = self.folder / "trace"
        line = [sys.executable, "-m", "repro", "trace", "--out", str(out), "--", self.change.python, *self.command]
        done = subprocess.run(line, cwd=self.place, capture_output=True, text=True, timeout=LIMIT, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        return out


def numbers_differ(name: str, unlike: Callable[[float, float], bool]) -> Callable[[Run, Run], bool]:
    """Whether a printed number is unlike in any step."""

    def check(a: Run, b: Run) -> bool:
        pairs = [(x[name], y.get(name)) for x, y in zip(a.numbers, b.numbers, strict=True)]
        if not pairs:
            raise RuntimeError(f"{name} is not printed")
        return any(y is None or unlike(x, y) for x, y in pairs)

    return check


def tensors_differ(unlike: Callable[[torch.Tensor, torch.Tensor], bool]) -> Callable[[Run, Run], bool]:
    """Whether a parameter or gradient is unlike after any step."""

    def check(a: Run, b: Run) -> bool:
        steps = a.watched("tensors"), b.watched("tensors")
        if len(steps[0]) != len(steps[1]):
            return True
        return any(len(x) != len(y) or any(map(unlike, x, y)) for x, y in zip(*steps, strict=True))

    return check


def _not_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    with contextlib.suppress(AssertionError):
        torch.testing.assert_close(b, a)
        return False
    return True


def _sglang(a: torch.Tensor, b: torch.Tensor) -> bool:
    from sglang.srt.debug_utils.comparator.tensor_comparator.comparator import compare_tensor_pair

    comparison = compare_tensor_pair(a, b)
    return comparison.shape_mismatch or (comparison.diff is not None and not comparison.diff.passed)


def _traincheck(a: torch.Tensor, b: torch.Tensor) -> bool:
    from traincheck.instrumentor.proxy_wrapper.hash import tensor_hash

    return bool(tensor_hash(a) != tensor_hash(b))


def _ours(a: Run, b: Run) -> bool:
    line = [sys.executable, "-m", "repro", "diff", str(a.trace), str(b.trace)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])
    return done.returncode == 1


CHECKS: dict[str, Callable[[Run, Run], bool]] = {
    "grad_norm within 3 %": numbers_differ("grad_norm", lambda x, y: not abs(y - x) <= 0.03 * abs(x)),
    "loss to 5 decimals": numbers_differ("loss", lambda x, y: f"{x:.5f}" != f"{y:.5f}"),
    "assert_close": tensors_differ(_not_close),
    "SGLang's comparator": tensors_differ(_sglang),
    "TrainCheck's hash": tensors_differ(_traincheck),
    "torch.hash_tensor": lambda a, b: bool(a.watched("hashes") != b.watched("hashes")),
    "DebugMode": lambda a, b: bool(a.watched("operations") != b.watched("operations")),
    "repro diff": _ours,
}


def about() -> dict[str, str]:
    """Where and when, and what the others' versions are."""
    from importlib.metadata import PackageNotFoundError, version

    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    head = ["git", "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty"]
    told = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip(),
        "machine": f"{cpu.partition(': ')[2] or platform.machine()}, {os.cpu_count()} cores",
    }
    for name in ("torch", "sglang", "traincheck"):
        try:
            told[name] = version(name)
        except PackageNotFoundError:
            told[name] = "not installed"
    return told


OURS = """\
Our false alarm: a program's optimizers are numbered in the order of their parameters' names. A new name may change
that order, and steps are then compared with those of another optimizer. With one optimizer a new name is none."""
KINDS = {
    "planted": "of a program of ours: two optimizers, BatchNorm, dropout, an average, a schedule",
    "real": "of open projects, the culprit against its parent (benchmarks/real)",
    "harmless": "that change no number",
}


def page(kept: Mapping[str, Any]) -> str:
    """The page."""
    every: Mapping[str, Mapping[str, Any]] = kept["changes"]
    head = ["changes", "", *CHECKS]
    totals = []
    for kind, what in KINDS.items():
        some = [change for change in every.values() if change["kind"] == kind]
        if some:
            seen = [f"{sum(change['sees'][name] is True for change in some)}" for name in CHECKS]
            totals.append([f"{len(some)} {what}", "seen" if kind != "harmless" else "false alarms", *seen])
    again = [f"{sum(change['again'][name] is True for change in every.values())}" for name in CHECKS]
    totals.append([f"{len(every)} second runs of what did not change", "false alarms", *again])
    if cost := kept.get("cost"):
        ratios = [f"{cost['times'][name]:.2f}x" for name in CHECKS]
        totals.append(["two runs of the program of ours and the comparison, against two plain runs", "cost", *ratios])
    rows = []
    for name, change in sorted(every.items(), key=lambda item: (list(KINDS).index(item[1]["kind"]), item[0])):
        marks = {True: "seen", False: "-"}
        cells = [marks.get(change["sees"][check], "cannot tell") for check in CHECKS]
        rows.append([f"`{name}`" if change["kind"] == "real" else name, change["kind"], *cells])
    broken = sorted({
        f"{check}: {name}: {change['sees'][check]}"
        for name, change in every.items() for check in CHECKS if isinstance(change["sees"][check], str)
    })  # fmt: skip
    facts = kept["about"]
    lines = [
        "# The field's checks on the same changes", "",
        "Written by `python benchmarks/peers.py`, which says what each check is. Each change is two versions of one",
        "program; all checks look at the same runs of them: those of tensors at parameters and gradients after each",
        "step, so not at buffers, averages and moments; those of numbers at what is printed.", "",
        table(head, totals), "", table(["change", "", *CHECKS], rows), "",
        *(["A check that cannot tell:", "", *(f"- {line}" for line in broken), ""] if broken else []),
        *([OURS, ""] if any(each["sees"]["repro diff"] is True for each in every.values() if each["kind"] == "harmless")
          else []),
        f"The program of ours trains a few steps of milliseconds, so most of a run is its start (cost measured "
        f"{cost['date']}, commit {cost['commit']}).\n"
        "One step of a larger model, side by side: [the recorder](trace.md)."
        if cost else "What the checks cost: [the recorder](trace.md), side by side on one step.", "",
        "Measured: " + ", ".join(f"{key} {value}" if key in ("torch", "sglang", "traincheck") else value
                                 for key, value in facts.items()) + ".", "",
    ]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()

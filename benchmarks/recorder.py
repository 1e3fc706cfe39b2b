"""What recording a training program costs: ``python benchmarks/recorder.py --out FOLDER --page PAGE --commit REV``.

It needs torch, NumPy and xxhash, and for figures of worth a GPU, Triton and numba. One process trains a decoder of the
shape of Qwen2.5-0.5B under the recorder of `repro trace`, which is taken off and put back between blocks of steps, and
with its rivals. All samples go to FOLDER/trace-samples.json; ``--from SAMPLES --page PAGE`` writes the page of samples
that are there already.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from repro_golden.base.observed import ALL_SIGNALS, state_after
from repro_golden.recording.attach.base.settings import Settings
from repro_golden.recording.attach.gathered.run import run_traced
from repro_golden.trace import Row, Trace
from repro_golden.trace.families import family

PROGRAM = Path(__file__).with_name("recorded_step.py")
MIB, GIB = 1 << 20, 1 << 30
LIMIT = 170  # seconds after which no slow rival is begun
LIGHT = "light:10"
USUAL = 9  # a step after which nothing was saved, and which is neither the first nor the last
READ = ("grad", "update")  # the phases that every step has; the first also tells what it started from
Samples = dict[str, Any]


def main() -> None:
    """Measure, or take samples, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="folder for trace-samples.json")
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--from", dest="samples", type=Path, help="samples to write the page of, instead of measuring")
    options = parser.parse_args()
    if options.samples is None and options.out is None:
        parser.error("one of --out and --from is needed")
    path = options.samples or options.out / "trace-samples.json"
    if options.samples is None:
        options.out.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # an older run's must not pass for this one's
        measure(path, options.commit)
    text = page(json.loads(path.read_text(encoding="utf-8")))
    options.page.write_text(text, encoding="utf-8")
    print(text)


def measure(path: Path, commit: str) -> None:
    """Run the program under the recorder, hold the trace against what it did, and complete its samples."""
    with tempfile.TemporaryDirectory() as folder:
        out, dumps = Path(folder, "trace"), Path(folder, "dumps")
        dumps.mkdir()
        record([sys.executable, str(PROGRAM), str(path), str(dumps), str(LIMIT)], out)
        samples: Samples = json.loads(path.read_text(encoding="utf-8"))
        trace = Trace(out)
        check([trace.rows(k) for k in range(len(trace.steps))], samples)
        size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
        light = Path(folder, "light.json")
        record([sys.executable, str(PROGRAM), str(light), str(dumps), "0"], (out := Path(folder, "light")), LIGHT)
        spared: Samples = json.loads(light.read_text(encoding="utf-8"))
        part = Trace(out)
        check([part.rows(k) for k in range(len(part.steps))], spared, LIGHT)
    kinds = {"flowing": "light", "flowing bare": "light bare"}
    samples["blocks"] += [{**b, "kind": kinds[b["kind"]]} for b in spared["blocks"] if b["kind"] in kinds]
    rows = [row for row in trace.rows(USUAL) if row.dtype != "metric"]
    samples["bytes"] = sum(math.prod(row.shape) * getattr(torch, row.dtype).itemsize for row in rows)
    samples["trace"] = {"steps": len(trace.steps), "tensors": len(rows), "bytes": size}
    samples["compared"] = len(samples.pop("fingerprints"))
    samples |= {"commit": commit, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    path.write_text(json.dumps(samples, indent=1), encoding="utf-8")


def record(command: Sequence[str], out: Path, signals: str = ALL_SIGNALS) -> None:
    """As `repro trace` does. Without PyArrow the trace is not sealed, and is read as it was written."""
    try:
        code, _ = run_traced(command, out, Settings(str(out), signals=signals))
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        code = 0  # what a program that broke off did not write is missed below
    if code:
        sys.exit(f"recorder: the program ended with exit code {code}")


def check(steps: Sequence[Sequence[Row]], samples: Samples, signals: str = ALL_SIGNALS) -> None:
    """Exit unless the trace holds the recorded steps and no other, each with every tensor, the last as it is now."""
    if "recorded" not in samples:
        sys.exit("recorder: the program did not come to its end")
    if len(steps) != samples["recorded"]:
        sys.exit(f"recorder: the trace has {len(steps)} steps, {samples['recorded']} were recorded")
    whole: Mapping[str, str] = samples["fingerprints"]
    always = {name: value for name, value in whole.items() if "/" not in name}
    for number, rows in enumerate(steps):
        want = whole if state_after(signals, number) else always
        own_rows = (r for r in rows if r.phase in READ and r.dtype != "metric" and family(r.phase, r.name) is None)
        recorded = {f"{r.phase} {r.name}": r.fingerprint for r in own_rows}
        if recorded.keys() != want.keys():
            missing, more = sorted(want.keys() - recorded.keys()), sorted(recorded.keys() - want.keys())
            sys.exit(f"recorder: step {number} lacks {missing[:3]} and has {more[:3]} too much")
        if number == len(steps) - 1 and recorded != want:
            wrong = next(name for name in want if recorded[name] != want[name])
            sys.exit(f"recorder: the last step's record of {wrong} is not that of the tensor in memory")


WITHIN = "at most 1.25 times the read time"
RIVALS = {
    "recorded": ("recorded: weights, gradients and optimizer state", WITHIN),
    "flowing": ("recorded, ten steps in a row without waiting for the device in between", WITHIN),
    "long": ("recorded, {micro} micro-batches a step, four steps in a row", WITHIN),
    "wide": ("recorded, {micro} times the sequences in one batch, four steps in a row", WITHIN),
    "idle": ("the same: the time in which the GPU waits within these steps", ""),
    "busy": ("recorded: the time in which the GPU is at work, of which the host's speed is no part", WITHIN),
    "light": (f"recorded with `--signals {LIGHT}`, ten steps in a row", ""),
    "hash_tensor": ("`torch.hash_tensor` of the same tensors (unsound)", ""),
    "DebugMode": ('`DebugMode.log_tensor_hashes(hash_fn="hash_tensor")` (unsound)', ""),
    "torch.save": ("`torch.save` of the same tensors", ""),
    "sha256": ("`.cpu()` + sha256 of the same tensors", ""),
}

FLOWING = ("flowing", "long", "wide", "idle", "light", "busy")  # with bare steps of their own beside them


def page(samples: Samples) -> str:
    """The part of a benchmark page that these samples give."""
    host, environment = samples["identity"]["host"], samples["identity"]["environment"]
    gpu = samples["device_bytes"] > 0
    device = f"{host['cpu']}, one thread: a tiny decoder that only tries the script"
    if gpu:
        device = f"{host['gpu']}, {samples['device_bytes'] / GIB:.0f} GiB, driver {host['driver']}; {host['cpu']}"
    names = {"python": "Python", "torch": "torch", "triton": "Triton", "numpy": "NumPy"}
    versions = [f"{shown} {environment[name]}" for name, shown in names.items() if name in environment]
    table = [bare(samples), *(row for kind in RIVALS for row in against_bare(samples, kind))]
    table.insert(2, memory_row(samples))
    table.append(records(samples))
    return "\n".join(
        [
            "# Recording a training step",
            "",
            "Written by `python benchmarks/recorder.py`. Medians of wall times until the device is done; blocks of",
            "steps of each kind alternate in one process, and a ratio is that of a round's medians.",
            "",
            f"- {device}",
            f"- {', '.join(versions)}",
            f"- {samples['date']}, commit {samples['commit']}",
            textwrap.fill(f"- {shape(samples)}", 120, subsequent_indent="  ", break_on_hyphens=False),
            "",
            "| what | result | how | goal |",
            "| --- | --- | --- | --- |",
            *("| " + " | ".join(row) + " |" for row in table),
            "",
        ]
    )


def shape(samples: Samples) -> str:
    """The training step in words."""
    s = samples["shape"]
    once = f", {samples['bytes'] / samples['read'] * 1e3:.2f} ms at this GPU's speed" if samples.get("read") else ""
    return (
        f"{samples['parameters'] / 1e6:,.1f} M parameters in bf16 ({s['layers']} layers of {s['hidden']}, vocabulary "
        f"{s['vocabulary']:,}), fp32 main weights, fused AdamW, {s['sequences']} sequences of {s['tokens']:,} tokens; "
        f"{samples['trace']['tensors']:,} tensors, {samples['bytes'] / GIB:.2f} GiB are read of a step{once}"
    )


def times(samples: Samples, kind: str) -> dict[int, list[float]]:
    """Milliseconds of a kind's steps, by round; warming up is left out."""
    out: dict[int, list[float]] = {}
    for block in samples["blocks"]:
        if block["kind"] == kind and block["round"] >= 0:
            out.setdefault(block["round"], []).extend(s * 1e3 for s in block["seconds"])
    return out


def bare(samples: Samples) -> list[str]:
    """The row of a step that nobody looks at."""
    rounds = times(samples, "bare")
    ms = [t for r in rounds.values() for t in r]
    medians = [statistics.median(r) for r in rounds.values()]
    how = f"{len(ms)} steps; a round's median {min(medians):.2f}-{max(medians):.2f} ms over {len(rounds)} rounds"
    return ["a training step, bare", f"{statistics.median(ms):.2f} ms", how, ""]


def against_bare(samples: Samples, kind: str) -> list[list[str]]:
    """The row of another kind of step, beside the bare ones of the same rounds; none where none was begun."""
    what, goal = RIVALS[kind]
    if kind in samples["failed"]:
        return [[what, "does not run here", samples["failed"][kind].replace("|", "/").replace("\n", " "), goal]]
    what = what.format(micro=samples["micro"])
    plainly = f"{kind} bare" if kind in FLOWING else "bare"
    rounds, beside = times(samples, kind), times(samples, plainly)
    compared = {r: ms for r, ms in rounds.items() if r in beside}
    if not compared:
        return []
    ms = [t for r in compared.values() for t in r]
    steps = sum(b["steps"] for b in samples["blocks"] if b["kind"] == kind and b["round"] in compared)
    # one sample for each round, so that a drift of clocks between rounds is in neither figure
    ratios = [statistics.median(r) / statistics.median(beside[number]) for number, r in compared.items()]
    middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
    plain = statistics.median(t for r in compared for t in beside[r])
    result = f"{middle - 1:+.1%}" if middle < 2 else f"{middle:,.1f}x"
    spent = ""
    if kind in ("recorded", *FLOWING) and kind != "idle" and samples.get("read"):
        times_read = (middle - 1) * plain / (samples["bytes"] / samples["read"] * 1e3)
        spent = f"{times_read:.2f} times the time of reading these bytes once; "
    how = [f"{spent}{statistics.median(ms):,.2f} ms against {plain:.2f} ms bare; ratio {low:.3f}-{high:.3f} over "
           f"{len(ratios)} rounds, {steps} steps"]  # fmt: skip
    if kind == "DebugMode":
        how.append(f"what {samples['facts']['calls_hashed']:,} calls return is hashed")
    if kind == "torch.save":
        how.append(f"{samples['facts']['bytes_saved'] / GIB:.2f} GiB a step, not synced to the disk")
    if kind not in FLOWING and kind != "recorded" and (taken := memory(samples, kind)):
        how.append(f"{taken['allocated'] / MIB:+,.0f} MiB at the peak")
    return [[what, result, "; ".join(how), goal]]


def memory(samples: Samples, kind: str) -> dict[str, int]:
    """Bytes of the device that a kind's first block takes beyond the bare block before it; empty without a GPU."""
    blocks = samples["blocks"]
    at = next(k for k, block in enumerate(blocks) if block["kind"] == kind)
    with_it, without = blocks[at], blocks[at - 1]
    assert without["kind"] == "bare"
    if "free" not in with_it:
        return {}
    return {
        "allocated": with_it["allocated"] - without["allocated"],
        "reserved": with_it["reserved"] - without["reserved"],
        "free": without["free"] - with_it["free"],
    }


def memory_row(samples: Samples) -> list[str]:
    """The most that any of three ways to count finds of the recorder's memory."""
    taken = memory(samples, "recorded")
    what, goal = "device memory of the recorder", "under 64 MiB"
    if not taken:
        return [what, "not measured", "no GPU", goal]
    mib = {name: f"{size / MIB:+.1f} MiB" for name, size in taken.items()}
    how = (f"its first steps against bare ones before any was recorded: allocated at the peak {mib['allocated']}, "
           f"reserved {mib['reserved']}, taken from the device's free memory {mib['free']} (with the kernels' code)"
           )  # fmt: skip
    return [what, f"{max(taken.values()) / MIB:.1f} MiB", how, goal]


def records(samples: Samples) -> list[str]:
    """The row of what the trace holds: `check` has seen that it is all."""
    trace = samples["trace"]
    how = f"{trace['tensors']:,} tensors in each; of the last step, the fingerprints of the optimizer's "
    how += f"{samples['compared']:,} are those of the tensors in memory; "
    result = f"{trace['steps']} of {samples['recorded']}"
    size = f"{trace['bytes'] / trace['steps'] / 1024:,.0f} KiB a step"
    return ["recorded steps found in the trace", result, how + size, "all"]


if __name__ == "__main__":
    main()

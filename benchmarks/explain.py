"""What recording a step's operations costs: ``python benchmarks/explain.py --out SAMPLES.json [--commit REV]``.

On a GPU it trains a decoder of the shape of Qwen2.5-0.5B, on a CPU a tiny one and the built-in trainer; plain steps,
recorded ones and ones under PyTorch's DebugMode alternate in one process. ``--from A.json B.json --page PAGE`` writes
docs/benchmarks/explain.md of samples that are there. It needs torch, NumPy and xxhash, on a GPU Triton and numba too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from recorded_step import QWEN, TINY, Trainer

from repro_golden.case.identity import collect
from repro_golden.fingerprint import fingerprints
from repro_golden.recording.operations.recorder import OperationRecorder
from repro_golden.recording.operations.stream import read_stream

ROOT = Path(__file__).parent.parent
ROUNDS, PLAIN = 9, 5
GOAL = 30


def decoder() -> Callable[[], object]:
    """A training step of a decoder."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    trainer = Trainer(QWEN if device.type == "cuda" else TINY, device)
    check(lambda: Trainer(TINY, device))
    return trainer.step


def check(make: Callable[[], Trainer]) -> None:
    """Exit unless a recorded step leaves the same bits as a plain one."""
    ends = []
    for recorded in (False, True):
        trainer = make()
        trainer.step()
        with tempfile.TemporaryDirectory() as folder:
            record(trainer.step, Path(folder)) if recorded else trainer.step()
        ends.append(fingerprints(trainer.tensors().values()))
    if ends[0] != ends[1]:
        sys.exit("explain: a recorded step leaves other bits than a plain one")


def built_in() -> Iterator[Callable[[], object]]:
    """Steps of the built-in trainer on its own case: each a rollout that is at hand."""
    sys.path.insert(0, str(ROOT / "core"))
    from repro_core.config import TrainConfig
    from repro_core.train.trainer import Trainer as Grpo

    config = tomllib.loads((ROOT / "golden" / "cases" / "tiny-grpo.toml").read_text())["subject"]["config"]
    trainer = Grpo(TrainConfig.from_mapping(config), log=lambda _: None)
    rollouts = [trainer.sample(number) for number in range(8)]
    count = 0
    while True:
        updates = trainer.train(rollouts[count % len(rollouts)], lambda *_, **__: None)
        count += 1
        yield lambda updates=updates: list(updates)  # type: ignore[misc]


def record(step: Callable[[], object], folder: Path) -> dict[str, float]:
    """One step under the recorder: seconds of the step, of writing its end, and how many operations it has."""
    recorder = OperationRecorder(folder, str(ROOT), 0)
    recorder.open()
    done()
    began = time.perf_counter()
    recorder.begin()
    step()
    recorder.pause()
    done()
    middle = time.perf_counter()
    recorder.close()
    ended = time.perf_counter()
    stream = read_stream(folder / "rank-00000.jsonl")
    if stream.problem:
        sys.exit(f"explain: the recording is not whole: {stream.problem}")
    return {"step": middle - began, "end": ended - middle, "operations": len(stream.operations)}


def debug(step: Callable[[], object]) -> float:
    """One step under DebugMode, which hashes what operations read and return."""
    from torch.utils._debug_mode import DebugMode

    done()
    began = time.perf_counter()
    with DebugMode() as mode, DebugMode.log_tensor_hashes(hash_fn="hash_tensor", hash_inputs=True):
        step()
    done()
    seconds = time.perf_counter() - began
    if not any("hash" in (getattr(call, "log", None) or {}) for call in mode.logs):
        sys.exit("explain: DebugMode hashed nothing")
    return seconds


def done() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measured(steps: Iterator[Callable[[], object]]) -> dict[str, Any]:
    """Rounds of plain, recorded and debugged steps; the first round warms up and is left out."""
    rounds, problem = [], ""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS + 1):
            plain = []
            for _ in range(PLAIN):
                step = next(steps)
                done()
                began = time.perf_counter()
                step()
                done()
                plain.append(time.perf_counter() - began)
            made: dict[str, Any] = {"plain": plain, **record(next(steps), Path(folder, str(number)))}
            try:
                made["DebugMode"] = debug(next(steps))
            except Exception as error:  # noqa: BLE001 - the rival's own failure is told on the page
                problem = f"{type(error).__name__}: {error}"[:200]
            if number:
                rounds.append(made)
    return {"rounds": rounds, "problem": problem}


def repeated(step: Callable[[], object]) -> Iterator[Callable[[], object]]:
    """The same step for ever."""
    while True:
        yield step


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="where the samples go")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--from", dest="samples", type=Path, nargs="+", help="samples to write the page of")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.out:
        if not torch.cuda.is_available():
            torch.set_num_threads(1)
        measurements = {"decoder": measured(repeated(decoder()))}
        if not torch.cuda.is_available():
            measurements["built-in"] = measured(built_in())
        identity = collect(os.environ, threads=torch.get_num_threads()).to_mapping()
        about = {"identity": identity, "commit": options.commit, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        options.out.write_text(json.dumps(about | {"gpu": torch.cuda.is_available(), "found": measurements}, indent=1))
    if options.page:
        text = page([json.loads(path.read_text()) for path in options.samples or [options.out]])
        options.page.write_text(text)
        print(text)


WHAT = {
    ("built-in", False): "the built-in trainer, case `tiny-grpo`, one thread",
    ("decoder", False): "a decoder of 2 layers of 64 with bf16 and main weights, one thread",
    (
        "decoder",
        True,
    ): "a decoder of the shape of Qwen2.5-0.5B, 2 sequences of 1,024 tokens, bf16 with fp32 main weights",
}


def page(every: list[dict[str, Any]]) -> str:
    """The benchmark page of some samples."""
    lines = [
        "# Explaining a step",
        "",
        "Written by `python benchmarks/explain.py`. A step is recorded operation by operation, inputs and outputs",
        "fingerprinted, with modules and stacks, until the device is done; plain steps, recorded ones and ones under",
        "PyTorch's DebugMode (`log_tensor_hashes`, inputs too; its hash is blind to order) alternate in one process.",
        "Medians over rounds; a ratio is of one round: its recorded step to the median of its plain ones. Starting the",
        "processes, and comparing the two recordings, are not in it.",
        "",
    ]
    rows = ["| step | plain | recorded | ratio | DebugMode | goal |", "| --- | --- | --- | --- | --- | --- |"]
    for samples in every:
        host, environment = samples["identity"]["host"], samples["identity"]["environment"]
        device = f"{host['gpu']}, driver {host['driver']}; {host['cpu']}" if samples["gpu"] else host["cpu"]
        versions = ", ".join(
            f"{k} {environment[k]}" for k in ("python", "torch", "triton", "numpy") if k in environment
        )
        about = f"- {device}; {versions}; {samples['date']}, commit {samples['commit']}"
        lines.append(textwrap.fill(about, 120, subsequent_indent="  ", break_on_hyphens=False))
        for name, sample in samples["found"].items():
            rows.append(_row(WHAT[name, samples["gpu"]], sample))
    return "\n".join([*lines, "", *rows, ""])


def _row(what: str, figures: dict[str, Any]) -> str:
    rounds = figures["rounds"]
    plain = [statistics.median(r["plain"]) for r in rounds]
    total = [r["step"] + r["end"] for r in rounds]
    ratios = [t / p for t, p in zip(total, plain, strict=True)]
    debugged = [r["DebugMode"] / p for r, p in zip(rounds, plain, strict=True) if "DebugMode" in r]
    rival = f"{statistics.median(debugged):.1f}x ({min(debugged):.1f}-{max(debugged):.1f})" if debugged else "fails"
    return (
        f"| {what}; {rounds[0]['operations']:,.0f} operations | {1e3 * statistics.median(plain):.1f} ms "
        f"| {1e3 * statistics.median(total):.0f} ms | {statistics.median(ratios):.1f}x "
        f"({min(ratios):.1f}-{max(ratios):.1f} over {len(ratios)} rounds) | {rival} | at most {GOAL}x |"
    )


if __name__ == "__main__":
    main()

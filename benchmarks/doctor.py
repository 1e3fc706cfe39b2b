"""How fast `repro doctor` reads logs, beside `wc -l` and `grep -F`.

``python benchmarks/doctor.py [--gigabytes 1] [--out docs/benchmarks/doctor.md]``. A log of lines as trainers,
engines and Ray write them is made from a seed in a scratch folder. The ways are timed in turn, round after round, so
that what the machine does meanwhile befalls all of them; medians.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import _kits  # noqa: F401
from doctor_log_kit import PHRASES, RULES, actor, engine, perf, slime, step, trace

from repro.doctor.artefacts.logs.files import read_log

ROUNDS = 3
SEED = 11


def blocks(draw: random.Random) -> Iterator[bytes]:
    """Text for ever: mostly what engines print of batches and requests, with steps, syncs and samples between."""
    words = [f"{draw.getrandbits(40):x}" for _ in range(5000)]
    number = 0
    while True:
        lines = []
        for _ in range(400):
            running = draw.randrange(64)
            stamp = f"[2026-11-20 15:{draw.randrange(60):02d}:{draw.randrange(60):02d} TP0]"
            pid = draw.randrange(7000, 7032)
            lines += [
                engine(
                    f"{stamp} Decode batch, #running-req: {running}, #token: {draw.randrange(1 << 17)}, token usage: "
                    f"{draw.random():.2f}, cuda graph: True, gen throughput (token/s): {4000 * draw.random():.2f}, "
                    "#queue-req: 0",
                    pid,
                ),
                engine(
                    f"{stamp} Prefill batch, #new-seq: {draw.randrange(9)}, #new-token: {draw.randrange(8192)}, "
                    f"#cached-token: {draw.randrange(8192)}, #running-req: {running}, #queue-req: 0",
                    pid,
                ),
                *(
                    engine(f'INFO:     10.0.0.9:{draw.randrange(30000, 60000)} - "POST /{path} HTTP/1.1" 200 OK', pid)
                    for path in ("v1/chat/completions", "abort_request", "metrics")
                ),
                actor(slime(f"Process group {draw.choice(words)} of {draw.choice(words)}", "reloadable.py:317")),
            ]
        response = " ".join(draw.choices(words, k=600))
        lines += [
            "(RolloutManager pid=99) "
            + slime(f"Finish rollout: [{response!r}], label: 7, reward: 1", "sglang_rollout.py:447"),
            actor(slime("Timer update_weights start", "timer.py:24")),
            actor(slime("Timer update_weights end (elapsed: 1.3s)", "timer.py:32")),
            perf(number, step_time=20.0, wait_time_ratio=draw.random()),
            step(number, pg_loss=draw.random(), ppo_kl=draw.random()),
        ]
        number += 1
        if number % 50 == 0:
            lines += [engine(line) for line in trace(f"ValueError: tool call {draw.choice(words)} is no JSON")]
        yield ("\n".join(lines) + "\n").encode()


def write_log(path: Path, size: int) -> None:
    """A log of at least `size` bytes."""
    written = 0
    with path.open("wb") as file:
        for block in blocks(random.Random(SEED)):
            file.write(block)
            written += len(block)
            if written >= size:
                return


def used() -> float:
    """Seconds that this process and its children computed."""
    process, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return process.ru_utime + process.ru_stime + children.ru_utime + children.ru_stime


def in_turn(ways: dict[str, Callable[[], object]]) -> dict[str, tuple[float, float]]:
    """The median seconds of each way: by the clock, and computing."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            began, computed = time.perf_counter(), used()
            way()
            seconds[name].append((time.perf_counter() - began, used() - computed))
    return {
        name: (statistics.median(clock for clock, _ in second), statistics.median(own_used for _, own_used in second))
        for name, second in seconds.items()
    }


def output(*command: str) -> str:
    """What a command prints."""
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


def measure(path: Path, scratch: Path) -> tuple[dict[str, tuple[float, float]], int, int]:
    """Seconds of each way; the log's lines, and those that hold a phrase as `grep` and the reader agree."""
    listed = scratch / "phrases.txt"
    listed.write_text("\n".join(PHRASES) + "\n", encoding="utf-8")
    output("wc", "-l", str(path))  # so that all ways read from the page cache
    seconds = in_turn(
        {
            f"`repro doctor`'s reader, {len(PHRASES)} phrases": lambda: read_log(path, PHRASES),
            "`wc -l`": lambda: output("wc", "-l", str(path)),
            f"`grep -c -F -f`, the same {len(PHRASES)} phrases": lambda: output(
                "grep", "-c", "-F", "-f", str(listed), str(path)
            ),
        }
    )
    log = read_log(path, PHRASES)
    for phrase in ("#running-req: ", "Traceback (most recent call last):"):
        counted = int(output("grep", "-c", "-F", "-e", phrase, str(path)))
        assert log.counts[phrase] == counted, f"{phrase}: {log.counts[phrase]} lines, grep counts {counted}"
    assert log.lines == int(output("wc", "-l", str(path)).split()[0])
    return seconds, log.lines, sum(log.counts.values())


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/doctor.md"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "train.log")
        write_log(path, int(given.gigabytes * 1e9))
        size = path.stat().st_size
        seconds, lines, hits = measure(path, Path(scratch))
    first = next(iter(seconds.values()))[1]
    rows = [
        f"| {name} | {clock:.2f} s | {computing:.2f} s | {size / computing / 1e6:.0f} MB/s | {computing / first:.2f}x |"
        for name, (clock, computing) in seconds.items()
    ]
    here = str(Path(__file__).parent)
    commit = output("git", "-C", here, "describe", "--always", "--dirty", "--abbrev=10")
    text = [
        "# The doctor's reader of logs",
        "",
        f"Written by `python benchmarks/doctor.py`: {ROUNDS} rounds in turn, medians; x: time of a core relative",
        "to the first line. Noisy machines: compare ratios.",
        "",
        f"- {platform.processor() or platform.machine()}, {os.cpu_count()} cores, one used; Python "
        f"{platform.python_version()}, ahocorasick_rs {version('ahocorasick_rs')}, "
        f"{output('grep', '--version').splitlines()[0]}; {datetime.now(UTC):%Y-%m-%d}, commit {commit}",
        f"- load of the machine while measuring (1 minute): {os.getloadavg()[0]:.1f}",
        "",
        f"A log of {size / 1e9:.2f} GB, {lines:,} lines as engines, trainers and Ray write them, in the page",
        f"cache. {hits:,} times a line holds one of the phrases of {len(RULES)} rules. The reader counts lines, keeps",
        "the first hundred lines of each phrase and reads all metrics meanwhile.",
        "",
        "| | time | of a core | per second of a core | |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "Peak memory of the process, all rules loaded: "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB.",
        "",
    ]
    given.out.write_text("\n".join(text), encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()

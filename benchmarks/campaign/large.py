"""Long and large: traces of very many steps and rows, a history of very many commits, a model of 70 billion parameters.

Each task runs in a process of its own, which says how much memory it took. What a figure is held against is measured in
the same process: reading the same files once, or `git bisect run` with the same test.
"""

from __future__ import annotations

import multiprocessing
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from promise import Asked, Promise

from repro_golden.base.canonical import xxh3_128_hexdigest
from repro_golden.compare.traces import compare, first_difference
from repro_golden.fingerprint.definition import Lanes
from repro_golden.trace import Header, Row, Trace, TraceWriter, seal
from repro_golden.trace.writer import metric_row

__all__ = ["promises"]

Signal = tuple[str, str, tuple[int, ...]]
"""A tensor's phase, name and shape."""
STEPS, ROWS, COMMITS = 100_000, 1_000_000, 100_000
LAYERS, HIDDEN, INNER, VOCABULARY, KV = 80, 8192, 28672, 128256, 1024
"""Llama 3 70B's config.json."""


def promises(asked: Asked) -> Iterator[Promise]:
    """Of traces, of a history, of a model."""
    steps, rows = asked.count(STEPS, 1000), asked.count(ROWS, 30_000)
    yield from of_traces(asked, f"{steps:,} steps of 3 rows", steps, alike(2))
    yield from of_traces(asked, f"{rows:,} rows in steps of 300", rows // 300, alike(299))
    yield from of_traces(asked, "Llama 3 70B: weights, gradients and both moments", asked.count(40, 3), of_llama())
    yield of_commits(asked, asked.count(COMMITS, 1000))


def of_traces(asked: Asked, what: str, steps: int, signals: Sequence[Signal]) -> Iterator[Promise]:
    """Two traces that part somewhere: where, and what it costs to say so."""
    draw = asked.random("traces", what)
    promise = Promise(f"{what}: the first difference is found where it is")
    for number in range(2):
        moved = draw.randrange(steps)
        result, figures, memory = apart(
            in_traces, asked.work / f"{len(signals)}-{number}", steps, signals, moved, number
        )
        promise.judge(result == (moved, "loss"), f"{what}, moved at {moved}: {result}")
        promise.figures = figures | {"peak of memory": f"{memory >> 20} MiB"}
    yield promise


def in_traces(
    folder: Path, steps: int, signals: Sequence[Signal], moved: int, seed: int
) -> tuple[object, dict[str, str]]:
    """Write both, seal them, find the first difference, compare."""
    import pyarrow.parquet  # noqa: F401 - its import is no part of sealing

    places, written, sealed = [folder / "a", folder / "b"], 0.0, 0.0
    for place, at in zip(places, (steps, moved), strict=True):
        began = time.perf_counter()
        write(place, steps, signals, at, seed)
        ended = time.perf_counter()
        seal(place)
        written, sealed = written + ended - began, sealed + time.perf_counter() - ended
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    read = seconds(lambda: [xxh3_128_hexdigest(path.read_bytes()) for path in folder.rglob("*") if path.is_file()])
    located, divergence = timed(lambda: first_difference(Trace(places[0]), Trace(places[1])))
    compared, result = timed(lambda: compare(Trace(places[0]), Trace(places[1])))
    assert result.divergence == divergence
    return (divergence.step, divergence.name) if divergence else None, {
        "a row": f"{size / steps / (len(signals) + 1) / 2:.0f} bytes",
        "sealing": f"{sealed / written:.2f} times as long as writing",
        "opened and the first difference located in": f"{located:.3f} s",
        "compared in": f"{compared:.2f} s",
        "all files read and hashed once in": f"{read:.2f} s",
    }


def write(folder: Path, steps: int, signals: Sequence[Signal], moved: int, seed: int) -> None:
    """A trace whose rows are drawn, and from the step `moved` on drawn anew."""
    draw = random.Random(seed)
    identity: dict[str, Any] = {"host": {}, "environment": {}, "layout": {}}
    writer = TraceWriter(folder, Header({"name": "drawn"}, "", {"kind": "core"}, identity, steps))
    for step in range(steps):
        if step == moved:
            draw = random.Random(-1 - seed)
        writer.add(metric_row("loss", "loss", draw.random()))
        for phase, name, shape in signals:
            size = draw.random()
            lanes = Lanes(draw.getrandbits(64), draw.getrandbits(64))
            writer.add(Row(phase, name, "float32", shape, lanes, 0, size, size * 9,
                           draw.randbytes(64)))  # fmt: skip
        writer.end_step(step)
    writer.close({"reason": "finished"})


def alike(count: int) -> list[Signal]:
    """So many small weights."""
    return [("update", f"model.{number}.weight", (64, 64)) for number in range(count)]


def of_llama() -> list[Signal]:
    """Its parameters, as torch builds them on a device without memory, with their gradients and both moments."""
    import torch

    def linear(inside: int, outside: int) -> torch.nn.Linear:
        return torch.nn.Linear(inside, outside, bias=False, device="meta")

    def norm() -> torch.nn.RMSNorm:
        return torch.nn.RMSNorm(HIDDEN, device="meta")

    layer = {
        "self_attn.q_proj": linear(HIDDEN, HIDDEN), "self_attn.k_proj": linear(HIDDEN, KV),
        "self_attn.v_proj": linear(HIDDEN, KV), "self_attn.o_proj": linear(HIDDEN, HIDDEN),
        "mlp.gate_proj": linear(HIDDEN, INNER), "mlp.up_proj": linear(HIDDEN, INNER),
        "mlp.down_proj": linear(INNER, HIDDEN), "input_layernorm": norm(), "post_attention_layernorm": norm(),
    }  # fmt: skip
    modules = {f"model.layers.{number}.{name}": module for number in range(LAYERS) for name, module in layer.items()}
    modules |= {"model.embed_tokens": linear(HIDDEN, VOCABULARY), "model.norm": norm()}
    modules |= {"lm_head": linear(HIDDEN, VOCABULARY)}
    shapes = {f"{name}.weight": tuple(module.weight.shape) for name, module in modules.items()}
    assert 70e9 < sum(torch.Size(shape).numel() for shape in shapes.values()) < 71e9
    kinds = (("grad", ""), ("update", ""), ("update", "exp_avg/"), ("update", "exp_avg_sq/"))
    return [(phase, f"{kind}{name}", shape) for phase, kind in kinds for name, shape in shapes.items()]


def of_commits(asked: Asked, count: int) -> Promise:
    """A real history of very many commits: the culprit that git names, in as many tests, and the time of both."""
    draw = asked.random("commits")
    promise, place = Promise(f"{count:,} commits: the culprit is the planted one"), asked.work / "history"
    place.mkdir()
    subprocess.run(["git", "init", "-q", "-b", "main", str(place)], check=True)
    stream = [f"commit refs/heads/main\nmark :{n}\ncommitter A <a@example.invalid> {n} +0000\ndata 1\nx\n"
              f"M 100644 inline n\ndata {len(str(n))}\n{n}\n" for n in range(1, count + 1)]  # fmt: skip
    subprocess.run(["git", "fast-import", "--quiet"], cwd=place, input="".join(stream).encode(), check=True)
    subprocess.run(["git", "checkout", "-q", "main"], cwd=place, check=True)
    first = git(place, "rev-list", "--max-parents=0", "HEAD")
    for _ in range(2):
        bad = draw.randrange(2, count + 1)
        test = ["sh", "-c", f"test $(cat n) -lt {bad}"]
        culprit = git(place, "rev-list", "--reverse", "HEAD").splitlines()[bad - 1]
        line = [sys.executable, "-m", "repro", "bisect", f"{first}..HEAD", "--when", "exit", "--quick", "--", *test]
        ours, done = timed(
            lambda line=line: subprocess.run(line, cwd=place, capture_output=True, text=True, check=False)
        )
        promise.judge(f"commit {culprit}" in done.stdout, f"moved at {bad}: {done.stdout[-200:]}{done.stderr[-200:]}")
        theirs, output = timed(lambda test=test: by_git(place, first, test))
        assert f"{culprit} is the first bad commit" in output
        promise.figures = {"repro bisect": f"{ours:.1f} s", "git bisect run": f"{theirs:.1f} s"}
    return promise


def by_git(place: Path, first: str, test: Sequence[str]) -> str:
    """What `git bisect run` says of the same test."""
    git(place, "bisect", "start", "HEAD", first)
    output = git(place, "bisect", "run", *test)
    git(place, "bisect", "reset")
    return output


def git(place: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=place, check=True, capture_output=True, text=True).stdout.strip()


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what it returned."""
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def seconds(action: Callable[[], object]) -> float:
    return timed(action)[0]


def apart(task: Callable[..., tuple[object, dict[str, str]]], *given: object) -> tuple[object, dict[str, str], int]:
    """What a task returns that runs in a process of its own, and the most bytes of memory that this one had."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_measured, (task, given))


def _measured(task: Callable[..., Any], given: Sequence[object]) -> tuple[object, dict[str, str], int]:
    result, figures = task(*given)
    return result, figures, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

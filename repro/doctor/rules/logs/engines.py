"""Inference engines: start, crash, ports, balance."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from statistics import fmean, median

from repro.doctor.artefacts.kinds import Hit, Launch, Log
from repro.doctor.artefacts.logs.lines import MEMORY, above, argument, below, by, fails, goes_on, said, times, told
from repro.doctor.facts.sources import GUIDES, MILES, SLIME
from repro_golden.base.checks import Found, Severity, Where, rule

_RELEASE, _RESUME = '/release_memory_occupation HTTP/1.1" 200', '/resume_memory_occupation HTTP/1.1" 200'
_REFUSED = ('/resume_memory_occupation HTTP/1.1" 500', '/resume_memory_occupation HTTP/1.1" 400')
_ERRORS = ("Server Error: ", "Client Error: ")
_GENERATE = '"POST /generate HTTP/1.1" 200'


@rule(
    title="An engine that generates after its memory was released and not taken back",
    severity="warning",
    certainty="likely",
    why="buffers that no weight sync writes (rotary tables, scales) hold whatever was there: rollouts are gibberish",
    fix="call resume_memory_occupation for weights and KV cache before generating, and make the model re-create its "
    "non-persistent buffers; compare a rollout before the first release with one after it",
    sources=(*GUIDES, f"{SLIME} slime/backends/sglang_utils/sglang_engine.py:328"),
    phrases=(_RELEASE, _RESUME, *_REFUSED, *_ERRORS, _GENERATE),
)
def _buffers_released(log: Log) -> Iterator[Found]:
    failed = said(log, *_REFUSED)
    failed += [hit for hit in said(log, *_ERRORS) if "/resume_memory_occupation" in hit.text]
    if failed:
        yield Found(
            f"an engine could not take its memory back{times(log, *_REFUSED)}",
            log.where(min(failed)),
            severity="error",
            certainty="certain",
        )
        return
    released = said(log, _RELEASE)
    if released and not log.counts.get(_RESUME):
        served = [hit for hit in said(log, _GENERATE) if hit.line > released[0].line]
        if served:
            yield Found("an engine released its memory, never took it back, and generates", log.where(served[0]))


_PREPARING, _WAITING = 0.2, 0.9
_SKIPPED = 1
"""Rollouts at the beginning that compile and warm up."""


def _fix(launch: Launch | None) -> str:
    if launch is not None and launch.asynchronous:
        return "give rollouts more GPUs (--rollout-num-gpus): the trainer is faster than they are"
    return "the trainer idles while engines sample: train_async.py overlaps both, or give rollouts more GPUs"


@rule(
    title="A trainer that waits for its data",
    severity="warning",
    certainty="likely",
    why="GPUs idle meanwhile",
    fix="tokenize the data beforehand, and keep it on a local disk",
    sources=("slime guide: Troubleshooting", f"{SLIME} slime/observability/train_metric_utils.py:395"),
    phrases=(),
)
def _data_wait(log: Log, launch: Launch | None) -> Iterator[Found]:
    preparing, waiting = [], []
    for number, metrics in sorted(log.series.rollouts.items())[_SKIPPED:]:
        step, data = metrics.get("perf/step_time", math.nan), metrics.get("perf/data_preprocess_time", math.nan)
        ratio = metrics.get("perf/wait_time_ratio", math.nan)
        if step > 0 and math.isfinite(data / step):
            preparing.append((data / step, number))
        if math.isfinite(ratio):
            waiting.append((ratio, number))
    for shares, bound, name, what in (
        (preparing, _PREPARING, "perf/data_preprocess_time", "goes into preparing data"),
        (waiting, _WAITING, "perf/wait_time_ratio", "is waited for rollouts"),
    ):
        share = median(value for value, _ in shares) if shares else 0.0
        if len(shares) >= 2 and share > bound:
            number = shares[0][1]
            yield Found(
                f"{100 * share:.0f}% of the trainer's time {what} (median of {len(shares)} rollouts)",
                log.series.where("perf", number, name, shares[0][0]),
                severity="note" if name == "perf/wait_time_ratio" else None,
                fix="" if name != "perf/wait_time_ratio" else _fix(launch),
            )


_SMALL = "Not enough memory. Please try to increase --mem-fraction-static"
_SEEN = (
    _SMALL, "Scheduler hit an exception", "DetokenizerManager hit an exception",
    "Received sigquit from a child process", "SIGQUIT received.", "Triggering SIGQUIT for cleanup",
    "Server process terminated unexpectedly", "Health check failed for rollout engine",
    "consecutive health checks. Marking as DEAD", "watchdog timeout (self.watchdog_timeout",
    "reached, failing... (url=",
)  # fmt: skip


@rule(
    title="An inference engine that died or stopped answering",
    severity="error",
    certainty="certain",
    why="rollouts stop, or go on with fewer engines",
    fix="--use-fault-tolerance restarts engines; then find the cause in the engine's own log: more memory "
    "(--sglang-mem-fraction-static 0.85), --rollout-batch-size 16, and --sglang-disable-cuda-graph to debug",
    sources=(
        "slime guide: Troubleshooting",
        f"{SLIME} slime/backends/sglang_utils/sglang_engine.py:83",
        f"{MILES} miles/router/router.py:109",
        "sgl-project/sglang python/sglang/srt/entrypoints/engine.py",
    ),
    phrases=_SEEN,
)
def _engine_crash(log: Log, launch: Launch | None) -> Iterator[Found]:
    now = argument("sglang_mem_fraction_static", launch, log)
    given = f" (now {now})" if now else ""
    tolerant = argument("use_fault_tolerance", launch, log) not in (None, "False")
    fix = "find its first error in the engine's own log; --sglang-disable-cuda-graph to debug it" if tolerant else ""
    for hit in said(log, *_SEEN)[:1]:
        near = [*above(log, hit, 40), *below(log, hit, 60)]
        cause = ""
        if any(_SMALL in line for line in near):
            cause = ": its share of memory holds no KV cache"
            fix = f"raise --sglang-mem-fraction-static{given}, 0.85 for an engine with its own GPUs"
        elif any("illegal memory access" in line for line in near):
            cause = " after an illegal memory access"
            fix = "see `illegal-memory-access`: it is what the engine died of"
        elif any(word in line for line in near for word in MEMORY):
            cause = ": its GPU's memory ran out"
            fix = f"lower --sglang-mem-fraction-static{given} to 0.7, then 0.6, or --sglang-cuda-graph-max-bs"
        message = f"an inference engine{by(hit)} died or stopped answering{cause}{times(log, *_SEEN)}"
        yield told(log, hit, message, fix=fix)


_RUNNING = "#running-req: "
_BATCH = re.compile(r"Decode batch.*?#running-req: (\d{1,7})")
_ENGINE = re.compile(r"\((\w+) pid=(\d+)(?:, ip=([^\s)]+))?\)")
_DP = re.compile(r"\bDP(\d{1,5})\b")
_LINES, _FEWEST = 4000, 10
_RATIO = 4.0


def _name(prefix: str) -> str:
    """The engine that prints a line: Ray's prefix, and the data-parallel rank."""
    ray, rank = _ENGINE.search(prefix), _DP.search(prefix)
    return " ".join([f"{ray[1]} pid {ray[2]}" if ray else "", f"DP{rank[1]}" if rank else ""]).strip()


@rule(
    title="Some inference engines are full while others idle",
    severity="warning",
    certainty="possible",
    why="a rollout lasts as long as its fullest engine",
    fix="another --router-policy, and more, smaller engines: --rollout-num-gpus-per-engine 1",
    sources=("slime guide: Troubleshooting", "sgl-project/sglang python/sglang/srt/managers/scheduler.py"),
    phrases=(_RUNNING,),
)
def _engines_unbalanced(log: Log, launch: Launch | None) -> Iterator[Found]:
    if log.counts.get(_RUNNING, 0) < 2 * _FEWEST:
        return
    running: dict[str, list[int]] = {}
    middle = max(log.lines // 2 - _LINES // 2, 1)
    for first in range(middle, middle + _LINES, 1000):
        for line in log.around(first, first + 999):
            batch = _BATCH.search(line)
            engine = _name(line[: batch.start()]) if batch else ""
            if batch and engine:
                running.setdefault(engine, []).append(int(batch[1]))
    means = {engine: fmean(counts) for engine, counts in running.items() if len(counts) >= _FEWEST}
    if len(means) < 2:
        return
    full, idle = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    if means[full] < 8 or means[full] < _RATIO * max(means[idle], 1):
        return
    per_engine = argument("rollout_num_gpus_per_engine", launch, log)
    fix = ""
    if per_engine not in (None, "1"):
        fix = f"more and smaller engines: --rollout-num-gpus-per-engine 1 (now {per_engine}), if the model fits"
    yield Found(
        f"of {len(means)} engines {full} runs {means[full]:.0f} requests at a time, {idle} only {means[idle]:.0f}",
        Where(str(log.path), middle, "#running-req", f"{means[full]:.0f} and {means[idle]:.0f} on average"),
        fix=fix,
    )


_INPUT = re.compile(r"input \((\d{1,9}) tokens\)|total of (\d{1,9}) tokens|requested (\d{1,9}) tokens")
_LIMIT = re.compile(r"context length (?:of |is )?\(?(\d{1,9}) tokens")


@rule(
    title="Requests that exceed the engine's context",
    severity="warning",
    certainty="certain",
    why="those samples are cut or fail, and long conversations are what is missing from training",
    fix="--sglang-context-length 16384, if the model was trained for it; or keep only the last 10 turns",
    sources=("slime guide: Troubleshooting", "sgl-project/sglang python/sglang/srt/managers/tokenizer_manager.py"),
    phrases=(
        "is longer than the model's context length",
        "exceeds the model's context length",
        "exceeds the model's maximum context length",
        "Request length is longer than the KV cache pool size or the max context length",
        "This model's maximum context length is",
    ),
)
def _multi_turn_too_long(log: Log, launch: Launch | None) -> Iterator[Found]:
    hits = said(log, *_multi_turn_too_long.phrases)
    if not hits:
        return
    lengths = [int(next(filter(None, m.groups()))) for hit in hits if (m := _INPUT.search(hit.text))]
    limit = next((int(m[1]) for hit in hits if (m := _LIMIT.search(hit.text))), None)
    longest = f", up to {max(lengths)} tokens" if lengths else ""
    of = f" of {limit}" if limit else ""
    given = argument("sglang_context_length", launch, log)
    now = f" (now {given})" if given else ""
    fix = ""
    if lengths:
        fix = (
            f"--sglang-context-length {1 << (max(lengths) - 1).bit_length()}{now}, if the model "
            "was trained for that; or keep only the last turns of a conversation (the last 10)"
        )
    yield Found(
        f"requests exceed the engine's context{of}{longest}{times(log, *_multi_turn_too_long.phrases)}",
        log.where(hits[0]),
        fix=fix,
    )


@rule(
    title="Ray cannot place what the launch asks for",
    severity="warning",
    certainty="likely",
    why="the run waits for GPUs that the cluster does not have",
    fix="--colocate where trainer and engines share GPUs; otherwise the cluster needs actor nodes x GPUs plus "
    "--rollout-num-gpus; `ray status` shows what it has",
    sources=("Miles FAQ",),
    phrases=(
        "No available node types can fulfill resource request",
        "No available node types can fulfill placement group",
        "cannot be scheduled right now",
    ),
)
def _placement_stuck(log: Log, launch: Launch | None) -> Iterator[Found]:
    hits = said(log, *_placement_stuck.phrases)
    if not hits:
        return
    names = ("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus")
    asked = [f"--{n.replace('_', '-')} {v}" for n in names if (v := argument(n, launch, log)) not in (None, "None")]
    yield Found(
        f"Ray finds no room for what was asked{times(log, *_placement_stuck.phrases)}"
        + (f" ({', '.join(asked)})" if asked else ""),
        log.where(hits[0]),
        severity="note" if goes_on(log, hits[-1]) else None,
    )


_UNREACHED = (
    "Max retries exceeded with url: /get_model_info",
    "Max retries exceeded with url: /model_info",
    "Max retries exceeded with url: /health_generate",
)
_TAKEN = ("Address already in use", "address already in use", "EADDRINUSE")
_RAYS = ("dashboard", "raylet", "gcs")
"""How files begin in which Ray's own servers tell of their ports."""
_AGAIN = re.compile(r"\b(?:retry|retrying|trying)\b", re.IGNORECASE)
_SERVER = re.compile(r"engine|server|sglang|router|rollout|uvicorn|TCPStore", re.IGNORECASE)
_ERROR = re.compile(r"\bERROR\b|\[Errno \d|error while attempting to bind")
_SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
_LOOKED_AT = 20


def _severity(log: Log, hit: Hit) -> Severity:
    """An error where a server fails for it; a note where it tries another port, or the same one again."""
    if not any(phrase in hit.text for phrase in _UNREACHED):
        if _AGAIN.search(hit.text):
            return "note"
        near = [*above(log, hit, 40), *below(log, hit, 10)]
        failed = any(fails(line) or _ERROR.search(line) for line in near)
        if not (failed and any(_SERVER.search(line) for line in near)):
            return "warning"
    return "warning" if goes_on(log, hit) else "error"


@rule(
    title="Servers of one node collide on a port",
    severity="error",
    certainty="likely",
    why="an engine never comes up, and the run waits for it",
    fix="--rollout-num-gpus-per-engine 8, so that one server runs on a node; and end processes of an earlier run that"
    " still hold the port",
    sources=("Miles FAQ",),
    phrases=_UNREACHED + _TAKEN,
)
def _port_collision(log: Log, launch: Launch | None) -> Iterator[Found]:
    if log.path.name.startswith(_RAYS):
        return
    hits = [(_severity(log, hit), hit) for hit in said(log, *_UNREACHED, *_TAKEN)[:_LOOKED_AT]]
    if not hits:
        return
    severity, hit = min(hits, key=lambda pair: _SEVERITIES.index(pair[0]))
    per_engine = argument("rollout_num_gpus_per_engine", launch, log)
    per_node = argument("actor_num_gpus_per_node", launch, log) or "8"
    fix = ""
    if per_engine is not None and per_engine.isdecimal() and per_node.isdecimal() and int(per_engine) < int(per_node):
        fix = (
            f"--rollout-num-gpus-per-engine {per_node} (now {per_engine}), so that one server runs on a node; "
            "and end processes of an earlier run that still hold the port"
        )
    what = "a server was not reached" if any(p in hit.text for p in _UNREACHED) else "a port is already in use"
    yield Found(f"{what}{by(hit, ' by ')}{times(log, *_UNREACHED, *_TAKEN)}", log.where(hit), severity, fix=fix)

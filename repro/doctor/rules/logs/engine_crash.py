"""Inference engines that died or stopped answering."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import MEMORY, above, argument, below, goes_on, said, speaker, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_SMALL = "Not enough memory. Please try to increase --mem-fraction-static"
_SEEN = (
    _SMALL, "Scheduler hit an exception", "DetokenizerManager hit an exception",
    "Received sigquit from a child process", "SIGQUIT received.", "Triggering SIGQUIT for cleanup",
    "Server process terminated unexpectedly", "Health check failed for rollout engine",
    "consecutive health checks. Marking as DEAD", "watchdog timeout (self.watchdog_timeout",
    "reached, failing... (url=",
)  # fmt: skip


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    hits = said(log, *_SEEN)
    if not hits:
        return
    hit = hits[0]
    near = [*above(log, hit, 40), *below(log, hit, 60)]
    who = f" {speaker(hit)}" if speaker(hit) else ""
    now = argument("sglang_mem_fraction_static", launch, log)
    given = f" (now {now})" if now else ""
    tolerant = argument("use_fault_tolerance", launch, log) not in (None, "False")
    cure = (
        "" if not tolerant else "find its first error in the engine's own log; --sglang-disable-cuda-graph to debug it"
    )
    cause = ""
    if any(_SMALL in line for line in near):
        cause = ": its share of memory holds no KV cache"
        cure = f"raise --sglang-mem-fraction-static{given}, 0.85 for an engine with its own GPUs"
    elif any("illegal memory access" in line for line in near):
        cause = " after an illegal memory access"
        cure = "see `illegal-memory-access`: it is what the engine died of"
    elif any(word in line for line in near for word in MEMORY):
        cause = ": its GPU's memory ran out"
        cure = f"lower --sglang-mem-fraction-static{given} to 0.7, then 0.6, or --sglang-cuda-graph-max-bs"
    yield Found(
        f"an inference engine{who} died or stopped answering{cause}{times(log, *_SEEN)}",
        log.where(hit),
        severity="warning" if goes_on(log, hit) else None,
        cure=cure,
    )


RULE = Rule(
    id="engine-crash",
    title="An inference engine that died or stopped answering",
    inputs=(Log,),
    uses=(Launch,),
    severity="error",
    certainty="certain",
    why="rollouts stop, or go on with fewer engines",
    cure="--use-fault-tolerance restarts engines; then find the cause in the engine's own log: more memory "
    "(--sglang-mem-fraction-static 0.85), --rollout-batch-size 16, and --sglang-disable-cuda-graph to debug",
    sources=(
        "slime guide: Troubleshooting",
        "THUDM/slime@624b824a8 slime/backends/sglang_utils/sglang_engine.py:83",
        "radixark/miles@31f1ca961 miles/router/router.py:109",
        "sgl-project/sglang python/sglang/srt/entrypoints/engine.py",
    ),
    check=_check,
    phrases=_SEEN,
)

"""Servers of one node that want the same port."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import argument, goes_on, said, speaker, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_UNREACHED = (
    "Max retries exceeded with url: /get_model_info",
    "Max retries exceeded with url: /model_info",
    "Max retries exceeded with url: /health_generate",
)
_TAKEN = ("Address already in use", "address already in use", "EADDRINUSE")


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    hits = said(log, *_UNREACHED, *_TAKEN)
    if not hits:
        return
    hit = hits[0]
    per_engine = argument("rollout_num_gpus_per_engine", launch, log)
    per_node = argument("actor_num_gpus_per_node", launch, log) or "8"
    cure = ""
    if per_engine is not None and per_engine.isdecimal() and per_node.isdecimal() and int(per_engine) < int(per_node):
        cure = (
            f"--rollout-num-gpus-per-engine {per_node} (now {per_engine}), so that one server runs on a node; "
            "and end processes of an earlier run that still hold the port"
        )
    who = f" by {speaker(hit)}" if speaker(hit) else ""
    what = "a server was not reached" if any(p in hit.text for p in _UNREACHED) else "a port is already in use"
    yield Found(
        f"{what}{who}{times(log, *_UNREACHED, *_TAKEN)}",
        log.where(hit),
        severity="warning" if goes_on(log, hit) else None,
        cure=cure,
    )


RULE = Rule(
    id="port-collision",
    title="Servers of one node collide on a port",
    inputs=(Log,),
    uses=(Launch,),
    severity="error",
    certainty="likely",
    why="an engine never comes up, and the run waits for it",
    cure="--rollout-num-gpus-per-engine 8, so that one server runs on a node; and end processes of an earlier run that "
    "still hold the port",
    sources=("Miles FAQ",),
    check=_check,
    phrases=_UNREACHED + _TAKEN,
)

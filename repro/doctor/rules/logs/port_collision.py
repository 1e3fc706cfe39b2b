"""Servers of one node that want the same port."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Hit, Launch, Log
from repro.doctor.artefacts.log_lines import above, argument, below, fails, goes_on, said, speaker, times
from repro.doctor.rule import Found, Rule, Severity

__all__ = ["RULE"]

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


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    if log.path.name.startswith(_RAYS):
        return
    hits = [(_severity(log, hit), hit) for hit in said(log, *_UNREACHED, *_TAKEN)[:_LOOKED_AT]]
    if not hits:
        return
    severity, hit = min(hits, key=lambda pair: _SEVERITIES.index(pair[0]))
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
        severity=severity,
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

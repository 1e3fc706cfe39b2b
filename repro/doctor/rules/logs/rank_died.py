"""Processes that Ray lost: which, where, and of what."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from repro.doctor.artefacts.kinds import Log
from repro.doctor.artefacts.log_lines import below, goes_on, rank, rank_of, said, speaker
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_SEEN = (
    "ActorDiedError", "WorkerCrashed", "RaySystemError", "RayActorError", "ActorUnavailableError",
    "The actor died unexpectedly before finishing this task",
    "The actor died because of an error raised in its creation task",
    "A worker died or was killed while executing a task by an unexpected system error",
    "The worker died unexpectedly while executing this task",
)  # fmt: skip
_FACTS = {
    "class": re.compile(r"\bclass_name: (\S{1,100})"),
    "pid": re.compile(r"(?:\bpid: |Worker PID: )(\d{1,10})"),
    "ip": re.compile(r"(?:^\W*ip: |Worker IP address: )(\S{1,60})"),
    "rank": re.compile(r"(?:\b|_)(?:rank|RANK)[=: ]{1,2}(\d{1,6})"),
    "detail": re.compile(r"Worker exit detail: (.{1,300})"),
}
_CONTEXT = "ActorDiedErrorContext"
"""How Ray's own logs speak of every actor that ended, as it should or not."""
_INTENDED = ("user request", "exit_actor() is called", "INTENDED_USER_EXIT", "INTENDED_SYSTEM_EXIT")
_MOST = 5


def _check(log: Log) -> Iterator[Found]:
    told: set[tuple[str, str]] = set()
    ranks: set[str] = set()
    for hit in said(log, *_SEEN):
        if _CONTEXT in hit.text:
            continue
        lines = below(log, hit, 14)
        if any(word in line for line in lines for word in _INTENDED):
            continue
        facts = {name: match[1] for name, pattern in _FACTS.items() if (match := _first(pattern, lines))}
        if "pid" in facts and "rank" not in facts and (number := rank_of(log, facts["pid"], facts.get("ip", ""))):
            facts["rank"] = number
        who = (facts.get("class", ""), facts.get("pid", ""))
        if who == ("", "") and rank(hit):  # torch begins each line of a rank's last exception with its number
            who = ("rank", rank(hit))
            if who[1] in ranks:
                continue
            facts["rank"] = who[1]
        if told and (who in told or who == ("", "")):
            continue
        told.add(who)
        ranks.add(facts.get("rank", ""))
        name = facts.get("class") or "a process of Ray's"
        places = [f"{what} {facts[what]}" for what in ("rank", "pid", "ip") if what in facts]
        said_by = "" if facts.get("pid") or who[0] == "rank" else f", said by {speaker(hit)}" if speaker(hit) else ""
        yield Found(
            f"{name}{' (' + ', '.join(places) + ')' if places else ''} died{said_by}: {_cause(facts, lines)}",
            log.where(hit),
            severity="warning" if goes_on(log, hit) else None,
        )
        if len(told) == _MOST:
            return


def _first(pattern: re.Pattern[str], lines: Sequence[str]) -> re.Match[str] | None:
    return next((match for line in lines if (match := pattern.search(line))), None)


def _cause(facts: dict[str, str], lines: Sequence[str]) -> str:
    text = " ".join(lines)
    if any(word in text for word in ("running low on memory", "memory usage threshold", "due to OOM")):
        return "Ray killed it because the node's memory was nearly full"
    if "raised in its creation task" in text:
        return "an error of its own while it started"
    detail = facts.get("detail", "")
    if "connection error code 2" in detail:
        return "it ended without a word, as by SIGKILL of the kernel's OOM killer, `ray stop --force` or a crash"
    if "SIGTERM" in detail:
        return "SIGTERM from outside"
    if "killed by `ray.kill`" in text:
        return "the program itself ended it by ray.kill"
    if "exit code None" in detail:
        return "killed from outside, as when a pod exceeds its memory"
    if "illegal memory access" in text:
        return "an illegal memory access, which `illegal-memory-access` is about"
    return detail[:160] or "these lines do not say of what"


RULE = Rule(
    id="rank-died",
    title="A rank or another process of Ray's that died",
    inputs=(Log,),
    severity="error",
    certainty="certain",
    why="its group cannot go on without it",
    cure="read the end of that process's own log (logs/worker-*-PID.err in Ray's session folder) and `dmesg` of its "
    "node for the OOM killer",
    sources=("Miles guide: Debugging", "ray-project/ray python/ray/exceptions.py"),
    check=_check,
    phrases=_SEEN,
)

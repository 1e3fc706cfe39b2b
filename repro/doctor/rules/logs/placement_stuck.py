"""Ray cannot place what the launch asks for."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import argument, goes_on, said, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_SEEN = (
    "No available node types can fulfill resource request",
    "No available node types can fulfill placement group",
    "cannot be scheduled right now",
)


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    hits = said(log, *_SEEN)
    if not hits:
        return
    names = ("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus")
    asked = [f"--{n.replace('_', '-')} {v}" for n in names if (v := argument(n, launch, log)) not in (None, "None")]
    yield Found(
        f"Ray finds no room for what was asked{times(log, *_SEEN)}" + (f" ({', '.join(asked)})" if asked else ""),
        log.where(hits[0]),
        severity="note" if goes_on(log, hits[-1]) else None,
    )


RULE = Rule(
    id="placement-stuck",
    title="Ray cannot place what the launch asks for",
    inputs=(Log,),
    uses=(Launch,),
    severity="warning",
    certainty="likely",
    why="the run waits for GPUs that the cluster does not have",
    cure="--colocate where trainer and engines share GPUs; otherwise the cluster needs actor nodes x GPUs plus "
    "--rollout-num-gpus; `ray status` shows what it has",
    sources=("Miles FAQ",),
    check=_check,
    phrases=_SEEN,
)

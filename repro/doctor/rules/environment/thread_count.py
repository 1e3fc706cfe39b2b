"""Threads: how many, and whether the same next time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from repro.doctor.artefacts.kinds import Golden, Launch, Machine
from repro.doctor.facts.asked import determinism
from repro.doctor.facts.launches import known_text, seen
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def _check(machine: Machine, launch: Launch | None, golden: Golden | None) -> Iterable[Found]:
    pinned = False
    for name in _VARIABLES:
        variable = seen(launch, name) if launch else None
        own = (machine.variables or {}).get(name)
        text = known_text(variable) if variable else own
        where = variable.where if variable else Where(machine.source, item=name)
        where = Where(where.path, where.line, name, text or "")
        pinned = pinned or variable is not None or own is not None
        if text is None:
            continue
        # a list is one number for each level of nesting
        number = re.fullmatch(r"\s*0*(\d{1,9})\s*(?:,[\d,\s]*)?", text)
        if not number or int(number[1]) < 1:
            yield Found(f"{name} is no number of threads: it is ignored, and all cores are taken", where)
        elif machine.cpus and int(number[1]) > machine.cpus:
            yield Found(
                f"{name} asks for {int(number[1])} threads, and {machine.cpus} cores are usable", where,
                cure=f"{name}={machine.cpus}, or less where several ranks share the machine",
            )  # fmt: skip
    yield from _unpinned(machine, launch, golden, pinned=pinned)


def _unpinned(machine: Machine, launch: Launch | None, golden: Golden | None, *, pinned: bool) -> Iterable[Found]:
    recorded = _recorded(golden)
    if recorded and machine.cpus and recorded > machine.cpus:
        yield Found(
            f"the golden run was recorded with {recorded} threads, and {machine.cpus} cores are usable here",
            Where(machine.source, item="cores", value=str(machine.cpus)),
            cure="verify it on a machine with as many cores, or record another one here",
        )
    flag = determinism(launch)
    # Ray gives its workers OMP_NUM_THREADS by their num_cpus; a launch of no known trainer may use no Ray
    if flag and launch and launch.system is None and not launch.submitted and not pinned and machine.threads:
        yield Found(
            f"{flag} is given and OMP_NUM_THREADS is not set: torch takes {machine.threads} here, and another number "
            "on another machine",
            launch.where(flag), "note", cure=f"export OMP_NUM_THREADS={machine.threads}",
        )  # fmt: skip


def _recorded(golden: Golden | None) -> int | None:
    identity = golden.trace.header.identity if golden else None
    layout = identity.get("layout") if isinstance(identity, Mapping) else None
    text = str(layout.get("threads", "")) if isinstance(layout, Mapping) else ""
    return int(text) if text.isdecimal() and len(text) < 9 else None


RULE = Rule(
    id="thread-count",
    title="More threads than cores, or a number that is left to the machine",
    inputs=(Machine,),
    uses=(Launch, Golden),
    severity="warning",
    certainty="certain",
    why="sums on the CPU are split by threads: another number of them gives other bits, and more than cores wait for "
    "each other",
    cure="set OMP_NUM_THREADS and MKL_NUM_THREADS to the cores of one rank, in the job's env_vars",
    sources=(
        "pytorch: CPU threading (torch.set_num_threads)",
        "ray: OMP_NUM_THREADS is set to the num_cpus of a worker",
    ),
    check=_check,
)

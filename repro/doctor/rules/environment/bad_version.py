"""Versions that are known to be bad, and pairs that do not fit."""

from __future__ import annotations

from collections.abc import Iterable

from repro.doctor.artefacts.kinds import Launch, Machine
from repro.doctor.facts.known_versions import KNOWN, Known, matches
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(machine: Machine, launch: Launch | None) -> Iterable[Found]:
    for known in KNOWN:
        if not _installed(machine, known) or (launch and known.when and not known.when(launch)):
            continue
        named = " with ".join(f"{name} {machine.packages[name]}" for name in known.packages)
        on = f" on Python {machine.python}" if known.python else ""
        met = launch is not None or known.when is None
        condition = "" if met else f" (with {known.if_})"
        yield Found(
            f"{named}{on}: {known.what}{condition} [{known.source}]",
            Where(machine.source, item=next(iter(known.packages)), value=machine.packages[next(iter(known.packages))]),
            known.severity if met else "note",
            known.certainty if met else "possible",
            f"install {known.cure}" if known.cure[0].isalpha() and " install" not in known.cure[:12] else known.cure,
        )


def _installed(machine: Machine, known: Known) -> bool:
    if known.python and not matches(known.python, machine.python):
        return False
    return all(matches(specifier, machine.packages.get(name, "")) for name, specifier in known.packages.items())


RULE = Rule(
    id="bad-version",
    title="A version that is known to be bad is installed, or two that do not fit",
    inputs=(Machine,),
    uses=(Launch,),
    severity="warning",
    certainty="likely",
    why="others ran into it, and the place that is named says how",
    cure="install another version",
    sources=tuple(dict.fromkeys(known.source for known in KNOWN)),
    check=_check,
)

"""Python's salt of text hashes in a run that is to repeat."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.determinism import asked
from repro.doctor.facts.launches import known_text, seen, tempered
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_NAME = "PYTHONHASHSEED"


@tempered("note")
def _check(launch: Launch) -> Iterator[Found]:
    variable = seen(launch, _NAME)
    value = known_text(variable)
    if variable is not None and value is None:
        return
    if value not in (None, "", "random") and not (value.isdecimal() and len(value) < 12 and int(value) < 2**32):
        where = variable.where if variable else Where(str(launch.path), item=_NAME)
        yield Found(f"{_NAME}={value[:40]} is no seed: Python does not start with it", where, "error")
    elif asked(launch) and value in (None, "", "random"):
        where = variable.where if variable else Where(str(launch.path), item=_NAME)
        said = "is random" if value == "random" else "is not set"
        message = f"{_NAME} {said}: sets of texts are iterated in another order in each process"
        yield Found(message, where, "warning" if value == "random" else "note")


RULE = Rule(
    id="determinism-hash-seed",
    title="PYTHONHASHSEED is not fixed where determinism is asked for",
    inputs=(Launch,),
    severity="note",
    certainty="certain",
    why="code that iterates a set, or seeds itself by hash(), does otherwise in each process and each run",
    cure="PYTHONHASHSEED=0 in the runtime environment",
    sources=("Python documentation: PYTHONHASHSEED", "Miles guide: Debugging"),
    check=_check,
)

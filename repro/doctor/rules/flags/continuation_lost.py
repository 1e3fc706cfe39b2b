"""A command of the script that begins with a flag."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import severed, tempered
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    words = severed(launch)
    if words is None:
        return
    count = sum(word.startswith("--") for word in words)
    message = f"a command begins with {words[0][:60]}: its {count} flags never reach the trainer"
    message += f", which gets {len(launch.given)}"
    here = [flag.where.line for flag in launch.given if flag.where.line and flag.where.path == str(launch.path)]
    yield Found(message, Where(str(launch.path), max(here, default=None), words[0][:80]))


RULE = Rule(
    id="continuation-lost",
    title="A line of the launch command that lacks its backslash",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="the shell ends the command there: the trainer starts without the rest of its flags, or not at all",
    cure="put a backslash at the end of the line above; nothing may stand behind it, not even a space",
    sources=("THUDM/slime@624b824a8 scripts/run-kimi-k2-Instruct.sh (--update-weight-buffer-size)",),
    check=_check,
)

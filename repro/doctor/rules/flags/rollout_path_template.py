"""Paths of dumps, which are templates: a file for each rollout, or one for all, or an error at the first dump."""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import Formatter

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_SAVE, _LOAD, _TRAIN = "--save-debug-rollout-data", "--load-debug-rollout-data", "--save-debug-train-data"
_FIELDS = {_SAVE: ("rollout_id",), _LOAD: ("rollout_id",), _TRAIN: ("rollout_id", "rank")}
_COMPUTED = re.compile(r"\$\{[^}]*\}|\$\([^)]*\)|`[^`]*`|\$\w+")


def _check(launch: Launch) -> Iterator[Found]:
    for name, fields in _FIELDS.items():
        flag = launch.flags.get(name)
        if flag is None or not flag.values:
            continue
        template = _COMPUTED.sub("x", flag.values[0])
        if "$" in template or "`" in template:
            continue
        if wrong := _wrong(template, fields, text=name == _SAVE):
            # `{rank}` is a field of the trainer's own dumps in every version that has ranks
            message = f"{name} {flag.values[0][:80]}: {wrong}"
            cure = f"{name} DIR/{'_'.join('{' + field + '}' for field in fields)}.pt"
            yield Found(message, flag.where, cure=cure)
        elif template == flag.values[0] and "{rollout_id" not in template and launch.number("--num-rollout") != 1:
            yield _one_file(name, flag.values[0], launch)


def _wrong(template: str, fields: tuple[str, ...], *, text: bool) -> str:
    """What `str.format` would say; '' where it would take it. A saved rollout's id is text (`eval_0`)."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        return f"not a template ({error})"
    for _, field, spec, conversion in parts:
        if field is None:
            continue
        name = re.split(r"[.\[]", field, maxsplit=1)[0]
        if not name or name.isdecimal():
            return f"{{{field}}} is a positional field, and none is given"
        if name not in fields:
            return f"{{{field}}} is no field of it; {{rollout_id}} is"
        if re.search(r"\d{4}", spec or ""):  # it would be written out to be judged
            return f"{{{field}:{(spec or '')[:20]}}} is wider than a file name may be"
        try:
            format("0" if text or conversion else 0, spec or "")
        except ValueError:
            kind = "text (eval_0)" if text else "a whole number"
            return f"{{{field}:{spec}}} does not fit: the id is {kind}"
    return ""


def _one_file(name: str, value: str, launch: Launch) -> Found:
    where = launch.where(name)
    if name == _LOAD:
        message = f"{name} {value[:80]} has no {{rollout_id}}: every rollout trains on the same file"
        return Found(message, where, "note", cure="put {rollout_id} in, unless it is meant so")
    message = f"{name} {value[:80]} has no {{rollout_id}}: every rollout writes over the last one"
    return Found(message, where, "warning", cure=f"{name} {value.removesuffix('.pt')[:80]}_{{rollout_id}}.pt")


RULE = Rule(
    id="rollout-path-template",
    title="Dump paths without {rollout_id}, or with other braces",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="the path is formatted with rollout_id: other braces raise at the first dump; without it, there is one file",
    cure="write DIR/{rollout_id}.pt",
    sources=(
        "slime guide: Debugging",
        "Miles guide: Debugging",
        "Relax guide: Debugging",
        "THUDM/slime@624b824a8 slime/observability/rollout_data_utils.py:144",
    ),
    check=_check,
)

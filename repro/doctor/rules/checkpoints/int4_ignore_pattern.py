"""Rules of the INT4 ignore list that do nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfCheckpoint
from repro.doctor.facts.checkpoints.ignoring import RECOMMENDED, Ignoring, ignoring_of
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_REGEX = re.compile(r"\.\*|\\\.|[\[\](|^$+]")


def _check(checkpoint: HfCheckpoint) -> Iterator[Found]:
    ignoring = ignoring_of(checkpoint.config)
    if ignoring is None or checkpoint.config is None:
        return
    names = [n.removesuffix("_packed") for n in checkpoint.tensors if n.endswith((".weight", ".weight_packed"))]
    for rule in dict.fromkeys(ignoring.rules):
        where = Where(str(checkpoint.config.path), item="quantization_config.ignore", value=rule[:160])
        if rule in ignoring.refused:
            invalid = ignoring.refused[rule].startswith("is no")
            cure = "" if invalid else "write it simpler: this rule was taken to match nothing"
            yield Found(f"{rule[:160]!r} {ignoring.refused[rule]}", where, "error" if invalid else "warning", cure=cure)
        elif names and not any(ignoring.matches(rule, name) for name in names):
            yield from _idle(ignoring, rule, names, where)


def _idle(ignoring: Ignoring, rule: str, names: list[str], where: Where) -> Iterator[Found]:
    """A rule that matches nothing, and why, if that can be told."""
    pattern = ignoring.patterns.get(rule)
    if pattern is not None and any(pattern.search(name) for name in names):
        hint = f"write 're:.*{rule[3:]}': patterns are matched from the start of the name"
        yield Found(f"{rule!r} matches only inside of names, and so nothing", where, "warning", "certain", hint)
    elif pattern is None and _REGEX.search(rule):
        said = f"{rule!r} looks like a pattern, and without re: it is compared as text"
        yield Found(said, where, "warning", "likely", f"write 're:{rule}'")
    elif rule not in RECOMMENDED:  # that list is for several models, and each has some of it
        yield Found(
            f"{rule!r} matches no weight of this checkpoint",
            where,
            "note",
            "certain",
            "nothing, if it is of another model's parts",
        )


RULE = Rule(
    "int4-ignore-pattern", "Rules of the INT4 ignore list that are invalid or match nothing", (HfCheckpoint,),
    "warning", "certain",
    "what the rule was meant to keep is packed to INT4; an invalid pattern raises in the first weight sync",
    "write patterns as re:PATTERN that match from the start of the name, with .* before what stands inside",
    ("slime guide: Debugging",), _check,
)  # fmt: skip

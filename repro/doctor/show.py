"""An examination in words, for a terminal; and a rule, explained."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import click

from repro.doctor.artefacts.kinds import Launch, Machine, RewardFunction
from repro.doctor.catalogue import subject_of
from repro.doctor.examine import Examination
from repro.text import count
from repro_golden.base.checks import Finding, Rule
from repro_golden.base.clean import one_line
from repro_golden.dumps.archive.bounds import shown

__all__ = ["brief", "examination_text", "rule_mapping", "rule_text", "rules_text"]

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
_GIVEN = {Launch: "command line", Machine: "Python environment", RewardFunction: "reward function"}
"""What is given beside paths."""
_SHOWN = 3
"""Places of one message, and messages and cures of one rule, that a terminal shows; JSON has all."""
_WIDTH = 110


def examination_text(examination: Examination) -> str:
    """What was looked at, each finding with its evidence, reason and cure, and a line that sums up."""
    kinds = Counter(seen.kind for seen in examination.seen if seen.kind)
    kinds.update(word for kind, word in _GIVEN.items() for given in examination.more if isinstance(given, kind))
    looked = ", ".join(f"{number} x {kind}" if number > 1 else kind for kind, number in kinds.items())
    lines = [f"looked at: {looked}"]
    # what one rule found is told together
    for findings in _grouped(examination.findings, lambda finding: f"{finding.severity} {finding.rule}"):
        lines += ["", *_rule_findings(findings)]
    parts = [count(len(examination.of(severity)), severity) for severity in _COLOURS if examination.of(severity)]  # type: ignore[arg-type]
    tally = ", ".join(parts) or "nothing found"
    lines += ["", f"{tally}; {count(len(examination.tried), 'rule')} tried. `repro doctor --explain RULE` says more."]
    return "\n".join(lines)


def _grouped(findings: Iterable[Finding], key: Callable[[Finding], str]) -> list[list[Finding]]:
    """Findings of equal key together, in the order of the first of each."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(key(finding), []).append(finding)
    return list(groups.values())


def _rule_findings(findings: Sequence[Finding]) -> list[str]:
    """What one rule found: each message once with its places, and each cure once behind the messages that it is for."""
    first = findings[0]
    certainty = first.certainty if len({finding.certainty for finding in findings}) == 1 else ""
    head = click.style(first.severity, fg=_COLOURS[first.severity], bold=True)
    lines = [f"{head} {click.style(first.rule, bold=True)}" + (f" ({certainty})" if certainty else "")]
    fixes = _grouped(findings, lambda finding: finding.fix)
    selected = fixes if first.severity == "error" else fixes[:_SHOWN]
    why = _wrapped(first.why, "  why: ", "       ")
    for number, group in enumerate(selected):
        lines += _messages(group, certainty=not certainty)
        lines += why if number == 0 else []
        lines += _wrapped(one_line(group[0].fix), "  do:  ", "       ")
    if left := len(findings) - sum(map(len, selected)):
        lines.append(f"  and {left} more like it (--json shows all)")
    return lines


def _messages(findings: Sequence[Finding], *, certainty: bool) -> list[str]:
    """Messages that share a cure, with their places."""
    lines: list[str] = []
    messages = _grouped(findings, lambda finding: finding.message)
    for group in messages[:_SHOWN]:
        text = f"{group[0].message} ({group[0].certainty})" if certainty else group[0].message
        lines += _wrapped(one_line(text), "  ", "  ")
        places = [where for finding in group if (where := one_line(str(finding.where)))]
        lines += [f"    at {where}" for where in places[:_SHOWN]]
        if len(places) > _SHOWN:
            lines.append(f"    and {count(len(places) - _SHOWN, 'other place')} (--json shows all)")
    if left := sum(map(len, messages[_SHOWN:])):
        lines.append(f"  and {left} more like it (--json shows all)")
    return lines


def _wrapped(text: str, first: str, subsequent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=subsequent, break_long_words=False, break_on_hyphens=False
    )


def brief(findings: Iterable[Finding], limit: int = 3) -> list[str]:
    """Findings in a line for each rule, for reports of something else."""
    by_rule = _grouped(findings, lambda finding: finding.rule)
    lines = []
    for first, *others in by_rule[:limit]:
        where = f" [{one_line(str(first.where))}]" if str(first.where) else ""
        more = f" (and {len(others)} more)" if others else ""
        text = f"doctor: {first.severity} {first.rule} ({first.certainty}): {one_line(first.message)}"
        lines.append(f"{text}{where}{more}")
    left = len(by_rule) - limit
    return lines + (
        [f"doctor: {count(left, 'other rule')} found something: `repro doctor` shows all"] if left > 0 else []
    )


def rule_mapping(rule: Rule) -> dict[str, Any]:
    """A rule as JSON types."""
    names = {"inputs": [cls.__name__ for cls in rule.inputs], "uses": [cls.__name__ for cls in rule.uses]}
    fields = ("id", "title", "severity", "certainty", "why")
    mapping = {name: getattr(rule, name) for name in fields} | {"cure": rule.fix}
    return mapping | names | {"subject": subject_of(rule), "sources": list(rule.sources), "phrases": list(rule.phrases)}


def rule_text(rule: Rule) -> str:
    """All that is known of a rule."""
    mapping = rule_mapping(rule)
    lines = [f"{rule.id}: {rule.title}", ""]
    facts: Mapping[str, str] = {
        "severity": f"{rule.severity}, {rule.certainty}",
        "reads": ", ".join(mapping["inputs"]) + (f"; {', '.join(mapping['uses'])} if given" if rule.uses else ""),
        "why": rule.why,
        "do": rule.fix,
        "looks for": "; ".join(shown(phrase) for phrase in rule.phrases),
        "source": "; ".join(rule.sources),
    }
    for name, text in facts.items():
        if text:
            lines += _wrapped(text, f"{name + ':':11}", " " * 11)
    return "\n".join(lines)


def rules_text(rules: Iterable[Rule]) -> str:
    """Every rule in a line, by subject."""
    lines = []
    for subject, group in groupby(rules, key=subject_of):
        members = list(group)
        width = max(len(rule.id) for rule in members)
        lines += [f"{subject}:", *(f"  {rule.id:{width}}  {rule.severity:7}  {rule.title}" for rule in members), ""]
    return "\n".join(lines).rstrip()

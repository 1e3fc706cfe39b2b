"""The report of a bisect."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro import __version__
from repro.text import METRICS_HEAD, count, duration, metrics_rows, metrics_table
from repro_bisect.result import BisectResult, Culprit
from repro_golden.canonical import write_atomic

if TYPE_CHECKING:
    import jinja2

__all__ = ["bisect_text", "markdown", "write_report"]

_SHOWN = 10
"""Skipped commits that a terminal shows; the report shows all."""


def headline(result: BisectResult) -> str:
    """The verdict in one line."""
    how = "bit for bit" if result.bitwise else f"by {result.predicate}"
    d = result.divergence
    where = f"step {d.step}, phase {d.phase}, signal {d.signal}" if d else ""
    if result.outcome == "found" and result.culprit:
        name = result.culprit.commit[:10]
        if result.posterior:
            sure = f"{100 * result.posterior[result.culprit.commit]:.1f} %"
            return f"{name} moved the numbers of {result.case}, with probability {sure}"
        if len(result.culprits) > 1:
            return f"{len(result.culprits)} commits moved the numbers of {result.case}; the first, {name}, at {where}"
        return (
            f"{name} moved the numbers of {result.case}: first at {where}" if d else f"{name} is the first bad commit"
        )
    if result.outcome == "flaky" and result.culprit:
        return f"{result.culprit.commit[:10]} is FLAKY: two replays of it differ on {result.case}"
    if result.outcome == "ambiguous":
        return f"one of {len(result.suspects)} commits moved the numbers of {result.case}; the rest cannot be tested"
    return f"{result.good[:10]} and {result.bad[:10]} agree {how} on {result.case}"


def explanation(result: BisectResult) -> str:
    """Whether the culprit is the whole story."""
    if result.explains_bad is None:
        return ""
    same = "equals BAD's" if result.bitwise else f"agrees with BAD's by {result.predicate}"
    if result.explains_bad and len(result.culprits) > 1:
        return f"Together they explain BAD: the last one's own trace {same}, to the last step."
    if result.explains_bad:
        return f"It alone explains BAD: its own trace {same}, to the last step."
    return (
        "Later commits move the numbers too: its trace differs from BAD's. `--all` names them, or search on with "
        f"`repro bisect {result.culprit.commit[:10] if result.culprit else ''}..{result.bad[:10]}`."
    )


def environment_lines(culprit: Culprit) -> list[str]:
    """What the culprit's lock files changed in its environment: a possible cause beside its code."""
    if not culprit.environment:
        return []
    shown = [f"  {change}" for change in culprit.environment[:_SHOWN]]
    more = [f"  and {len(culprit.environment) - _SHOWN} more"] if len(culprit.environment) > _SHOWN else []
    return ["", "its environment changed, which may be the cause:", *shown, *more]


def noise_line(result: BisectResult) -> str:
    """Where verdicts are noisy: how noisy, and the likeliest culprits."""
    if not result.posterior or result.rates is None:
        return ""
    rates = [f"{100 * rate:.0f} %" for rate in result.rates]
    said = [
        f"Verdicts are noisy: a commit without the culprit is BAD in {rates[0]} of replays, one with it in {rates[1]}."
    ]
    likely = sorted(result.posterior.items(), key=lambda item: -item[1])[:5]
    said += [f"  {100 * p:5.1f} %  {commit[:10]} {result.subjects.get(commit, '')}" for commit, p in likely]
    return "\n".join(said)


def bisect_text(result: BisectResult) -> str:
    """The result for a terminal."""
    lines = [headline(result)]
    for culprit in result.culprits:
        c = culprit.commit
        lines += [
            "",
            f"commit {c.commit}",
            f"author {c.author}",
            f"date   {c.date}",
            f"       {c.subject}",
            "",
            c.diffstat,
            *environment_lines(culprit),
        ]
        if len(result.culprits) > 1 and culprit.divergence:
            lines += ["", f"against its parent: {culprit.divergence}"]
    if result.outcome == "ambiguous":
        lines += [f"  {c[:10]}{'  (not tried)' if c in result.untried else ''}" for c in result.suspects]
    if (d := result.divergence) and result.outcome != "agree" and len(result.culprits) < 2:
        lines += ["", f"first difference: step {d.step}, phase {d.phase}, signal {d.signal}: {d.detail}"]
        if d.magnitude:
            lines.append(f"size: {d.magnitude}")
    if result.comparison:
        lines += ["", metrics_table(result.comparison)]
    lines += ["", *filter(None, [noise_line(result), explanation(result)]), cost_line(result)]
    if result.skips:
        lines += [f"skipped {c[:10]}: {reason}" for c, reason in list(result.skips.items())[:_SHOWN]]
        lines += [f"and {len(result.skips) - _SHOWN} more"] if len(result.skips) > _SHOWN else []
    return "\n".join(lines)


def cost_line(result: BisectResult) -> str:
    """What it took, beside what `git bisect run` would have trained with the same trainer."""
    c = result.cost
    total, parts = c.total, [count(result.commits, "commit")]
    parts += [count(total.probes, "probe"), count(total.steps, "trained step"), f"{result.seconds:.0f} s"]
    if c.reused:
        parts.append(f"{count(c.reused, 'probe')} reused")
    if result.skips:
        parts.append(f"{count(len(result.skips), 'commit')} skipped")
    text = ", ".join(parts)
    if total.steps:
        bills = (("the ends", c.ends), ("the search", c.search), ("the confirmation", c.confirmation))
        text += "; trained steps: " + ", ".join(f"{bill.steps} for {name}" for name, bill in bills)
    if result.git_probes and not result.posterior:
        said = [count(result.git_probes, "test")]
        if result.predicate != "exit":
            said.append(f"{result.git_probes * result.git_steps} trained steps")
        if result.git_seconds is not None:
            said.append(f"about {duration(result.git_seconds)}")
        text += f"; `git bisect run` would have taken at least {', '.join(said)} for its search"
    return text


@cache
def _templates() -> jinja2.Environment:
    import jinja2

    loader = jinja2.PackageLoader("repro", "report/templates")
    return jinja2.Environment(loader=loader, autoescape=jinja2.select_autoescape(), undefined=jinja2.StrictUndefined)


def _context(result: BisectResult, command: str) -> dict[str, Any]:
    return {
        "result": result,
        "headline": headline(result),
        "explanation": explanation(result),
        "noise": noise_line(result),
        "environment": [line for culprit in result.culprits for line in environment_lines(culprit)],
        "cost": cost_line(result),
        "metrics": metrics_table(result.comparison) if result.comparison else "",
        "command": command,
        "version": __version__,
    }


def markdown(result: BisectResult, command: str) -> str:
    """The report as Markdown."""
    return _templates().get_template("bisect.md.jinja").render(**_context(result, command))


def write_report(result: BisectResult, folder: Path, command: str) -> tuple[Path, Path]:
    """Write ``report.md`` and ``report.html`` (self-contained, plots as SVG) and return both paths."""
    from repro.report.plots import commit_strip, distance_plot, drift_plot

    context = _context(result, command)
    context["head"] = METRICS_HEAD
    context["rows"] = metrics_rows(result.comparison) if result.comparison else []
    context["drift"] = drift_plot(result.comparison) if result.comparison else ""
    context["distance"] = distance_plot(result.comparison) if result.comparison else ""
    context["strip"] = commit_strip(result)
    paths = folder / "report.md", folder / "report.html"
    write_atomic(paths[0], markdown(result, command))
    write_atomic(paths[1], _templates().get_template("bisect.html.jinja").render(**context))
    return paths

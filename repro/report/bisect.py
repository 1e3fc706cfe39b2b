"""The report of a bisect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from repro.report.change import change_of
from repro.report.explain import explain_lines, size_plot
from repro.report.pieces import Markdown, endpoint_rows, report_text, written
from repro.report.skips import Skipped, cost_text, skip_lines, skipped
from repro.text import METRICS_HEAD, count, duration, metrics_rows, metrics_table, plural
from repro_bisect.axes.axis import short
from repro_bisect.driver.delta import SetResult
from repro_bisect.driver.result import BisectResult, Culprit
from repro_golden.base.clean import one_line

__all__ = ["bisect_text", "write_report"]

_SHOWN = 10
"""Changes of an environment that are shown."""


def headline(result: BisectResult, what: str = "commit") -> str:
    """The verdict in one line."""
    how = "bit for bit" if result.bitwise else f"by {result.predicate}"
    d = result.divergence
    where = f"step {d.step}, phase {d.phase}, signal {d.name}" if d else ""
    if result.outcome == "found" and result.culprit:
        name = short(result.culprit.commit)
        if result.posterior:
            moved = f"is the first bad {what}" if result.predicate == "exit" else f"moved the numbers of {result.case}"
            return f"{name} {moved}, with probability {_percent(result.posterior[result.culprit.commit])}"
        if isinstance(result, SetResult):
            return set_headline(result, where)
        if len(result.culprits) > 1:
            return (
                f"{count(len(result.culprits), what)} moved the numbers of {result.case}; the first, {name}, at {where}"
            )
        moved = f"moved the numbers of {result.case}"
        if untouched(result.culprits[0]):
            moved = f"changed {result.case}, but no bit of its trained parameters"
        text = f"{name} {moved}: first at {where}" if d else f"{name} is the first bad {what}"
        return text if result.confirmed else f"not confirmed: {text}"
    if result.flaky:
        return f"{short(result.flaky.commit.commit)} is FLAKY: two replays of it differ on {result.case}"
    if result.outcome == "ambiguous":
        sure = sum(result.posterior.get(c, 0.0) for c in result.suspects)
        chance = f", with probability {_percent(sure)}" if result.posterior else ""
        suspects = count(len(result.suspects), what)
        if result.culprits:
            named = count(len(result.culprits), what)
            more = f"one of {len(result.suspects)} more"
            return f"{named} and {more} moved the numbers of {result.case}: no test tells which of these"
        return f"one of {suspects} moved the numbers of {result.case}{chance}: no test tells which"
    return f"{short(result.good)} and {short(result.bad)} agree {how} on {result.case}{result.looked.but}"


def _percent(chance: float) -> str:
    """Never 100: what rests on runs that may be wrong is not certain."""
    return f"{min(100 * chance, 99.9):.1f} %"


def untried_line(result: BisectResult, what: str = "commit") -> str:
    """Of suspects that were not tried: how many, why, and what tries them."""
    if not result.untried:
        return ""
    n = len(result.untried)
    return (
        f"{count(n, what)} of them {'was' if n == 1 else 'were'} not tried, because {plural(what)} on both sides "
        "failed alike; `--try-skips` tries them all."
    )


def suspects_line(result: BisectResult) -> str:
    """What suspects are, beside the culprits that are known."""
    if not result.culprits:
        return "The culprit is one of:"
    return f"One of these moved the numbers too{f', first at {result.apart}' if result.apart else ''}:"


def together_line(result: BisectResult) -> str:
    """What shows the cause of suspects together: the commit before them beside the last of them."""
    suspects = set(result.suspects)
    before = {parent for commit in suspects for parent in result.parents.get(commit, ())} - suspects
    last = next((commit for commit in result.suspects if result.verdicts.get(commit) == "BAD"), "")
    if len(before) != 1 or not last or result.predicate == "exit":
        return ""
    return f"`repro explain {short(before.pop())}..{short(last)}` shows what they do together."


def set_headline(result: SetResult, where: str) -> str:
    """Which changes it takes."""
    few = f"{count(len(result.chosen), 'change')} of {result.changes}"
    moved = f"{'moves' if len(result.chosen) == 1 else 'move'} the numbers of {result.case}"
    return f"{few} {moved}: {' + '.join(result.chosen)}" + (f", first at {where}" if where else "")


def set_lines(result: BisectResult) -> list[str]:
    """Each change of a set with what it does, and whether the set is known to be minimal."""
    if not isinstance(result, SetResult) or not result.chosen:
        return []
    lines = [f"  {label}" + (f": {does}" if does != label else "") for label, does in _pairs(result)]
    if result.proved:
        d = result.culprits[0].divergence if result.culprits else None
        until = f" up to step {d.step}" if d else ""
        by = "" if result.bitwise else f" by {result.predicate}"
        return [*lines, f"None of them can be left out: the rest of them moves nothing{until}{by}."]
    hidden = ", ".join(result.hidden)
    return [*lines, f"Whether it takes {hidden} is not known: the others without it cannot be tested."]


def _pairs(result: SetResult) -> list[tuple[str, str]]:
    return list(zip(result.chosen, result.does, strict=True))


def explanation(result: BisectResult, what: str = "commit") -> str:
    """Whether the culprit is the whole story."""
    if result.earlier and result.culprit:
        begin = result.passed[-1].commit.commit if result.passed else result.good
        command = f"repro bisect {short(begin)}..{short(result.culprits[0].before)}"
        text = f"{what.capitalize()}s before it move the numbers too, in a later step: {result.earlier}."
        on = f", or search on with `{command}`" if what == "commit" else ""
        return f"{text} `--all` names them{on}."
    if result.behind:
        who = f"{what.capitalize()}s" if not result.culprits else f"Not all {plural(what)}"
        after = f"{who} after {short(result.behind)} were {'not ' if not result.culprits else ''}searched"
        if what != "commit":
            return f"{after}."
        return f"{after}: `repro bisect {short(result.behind)}..{short(result.bad)}` does."
    if result.explains_bad is None:
        return ""
    if isinstance(result, SetResult):
        whole = "equals that of all changes" if result.bitwise else f"agrees with that of all by {result.predicate}"
        alone = "Alone it makes" if len(result.chosen) == 1 else "Alone they make"
        if result.explains_bad:
            return f"{alone} up the whole difference: the trace {whole}, to the last step."
        return "The other changes move the numbers too: the trace differs from that of all changes."
    same = "equals BAD's" if result.bitwise else f"agrees with BAD's by {result.predicate}"
    if result.explains_bad and result.passed:
        return f"With what was passed it explains BAD: its own trace {same}, to the last step."
    if result.explains_bad and len(result.culprits) > 1:
        return f"Together they explain BAD: the last one's own trace {same}, to the last step."
    if result.explains_bad:
        return f"It alone explains BAD: its own trace {same}, to the last step."
    if what != "commit":
        return f"Later {plural(what)} move the numbers too: its trace differs from BAD's. `--all` names them."
    return (
        "Later commits move the numbers too: its trace differs from BAD's. `--all` names them, or search on with "
        f"`repro bisect {short(result.culprit.commit) if result.culprit else ''}..{short(result.bad)}`."
    )


def passed_line(result: BisectResult) -> str:
    """What was passed on the way: commits that changed something beside the training."""
    return " ".join(
        f"Passed: {short(c.commit.commit)}, which moved no trained parameter or gradient and differs at {c.divergence}."
        for c in result.passed
    )


def branch_line(result: BisectResult) -> str:
    """That the search began at a merge base, where it did."""
    if not result.named or result.named == result.good:
        return ""
    same = "" if result.predicate == "exit" or result.posterior else ", where the numbers are the same"
    return (
        f"GOOD {short(result.named)} is on a branch of its own: the search began at its merge base with BAD, "
        f"{short(result.good)}{same}."
    )


def environment_lines(culprit: Culprit) -> list[str]:
    """What the culprit's lock files changed in its environment: a possible cause beside its code."""
    if not culprit.environment:
        return []
    changes = [one_line(f"  {change}") for change in culprit.environment[:_SHOWN]]
    more = [f"  and {len(culprit.environment) - _SHOWN} more"] if len(culprit.environment) > _SHOWN else []
    return ["", "its environment changed, which may be the cause:", *changes, *more]


def untouched(culprit: Culprit) -> str:
    """That no trained parameter, gradient or metric differs, where that is known; else ''."""
    return culprit.comparison.untouched if culprit.comparison else ""


def why_lines(culprit: Culprit, *, beside: bool = False, plotted: bool = False) -> list[str]:
    """What of the training is as before, and the operation and the line at which other numbers leave those before.

    Args:
        culprit: The culprit.
        beside: Whether its change is shown beside them.
        plotted: Whether sizes are.
    """
    lines = ["", untouched(culprit)] if untouched(culprit) else []
    if culprit.unexplained:
        return [*lines, "", one_line(f"not explained: {culprit.unexplained}")]
    if culprit.explanation is None:
        return lines
    return [*lines, "", *explain_lines(culprit.explanation, beside=beside, plotted=plotted)]


def noise_line(result: BisectResult, what: str = "commit") -> str:
    """Where verdicts are noisy: how noisy, and the likeliest culprits; where they may be, that they may.

    And where nothing bears the name out, that.
    """
    if not result.confirmed:
        return (
            "Not confirmed: full replays may say otherwise. The same command without `--quick` makes them and explains."
        )
    if not result.posterior:
        return ""
    if result.rates is None:
        return (
            "No run contradicted another; but exit codes do not show that a program is deterministic, and the "
            "probability allows for one that is not. `--confidence` asks for more runs."
        )
    lines = [_tallied(result, what)]
    if result.alike:
        lines = [
            f"The runs of each {what} all said the same, and no one culprit explains them: what makes it BAD came in "
            "more than once, or went in between. This is one that brought it, and the likeliest to be the only one."
        ]
    likely = sorted(result.posterior.items(), key=lambda item: -item[1])[:5]
    lines += [f"  {100 * p:5.1f} %  {short(commit)} {result.subjects.get(commit, '')}" for commit, p in likely]
    return "\n".join(lines)


def _tallied(result: BisectResult, what: str) -> str:
    """How often replays were BAD, and by what rates the probability goes."""
    assert result.rates is not None
    text = "Verdicts are noisy"
    if result.tallies is not None:
        (wrong, of), (bads, replays) = result.tallies
        if not wrong and bads == replays:
            text = "Replays differ, but not in these verdicts"
        who = "the culprit" if result.outcome == "found" else "them"
        text += f": of {plural(what)} without {who} {wrong} of {of} replays were BAD, of others {bads} of {replays}"
    rates = " and ".join(f"{100 * rate:.0f} %" for rate in result.rates)
    return f"{text}. The probability allows for more noise than was seen: it reckons with {rates}."


def rename_lines(result: BisectResult) -> list[str]:
    """What commits renamed that changed no number: those before each culprit, or those of the whole range."""
    if result.culprits:
        renamed = [(f"before {short(c.commit.commit)}", c.renames) for c in result.culprits]
    else:
        renamed = [(f"by {short(result.bad)}", result.renames)]
    return [f"{where}, {renames}: no change of numbers" for where, renames in renamed if renames]


def culprit_lines(culprit: Culprit, what: str) -> list[str]:
    """Who, when and what."""
    c = culprit.commit
    if what == "commit":
        lines = [f"commit {c.commit}", f"author {c.author}", f"date   {c.date}", f"       {c.subject}", "", c.diffstat]
    else:
        lines = [f"{what} {c.commit}", *([f"       {c.subject}"] if c.subject != c.commit else [])]
    return ["", *lines, *environment_lines(culprit)]


def bisect_text(result: BisectResult, what: str = "commit") -> str:
    """The result for a terminal, of an axis whose points are commits, versions or changes."""
    lines = [one_line(text) for text in (headline(result, what), *set_lines(result), *rename_lines(result))]
    for culprit in result.told:
        lines += culprit_lines(culprit, what) if not isinstance(result, SetResult) else environment_lines(culprit)
        if len(result.told) > 1 and culprit.divergence:
            against = "itself" if culprit is result.flaky else "its parent"
            lines += ["", one_line(f"against {against}: {culprit.divergence}"), *why_lines(culprit)]
    if result.outcome == "ambiguous":
        lines += ["", one_line(suspects_line(result))] if result.culprits else []
        lines += [f"  {short(c)}{'  (not tried)' if c in result.untried else ''}" for c in result.suspects]
        lines += [untried_line(result, what)] if result.untried else []
        lines += [together_line(result)] if what == "commit" and together_line(result) else []
    if (d := result.divergence) and result.outcome != "agree" and len(result.told) < 2:
        first = f"first difference: step {d.step}, phase {d.phase}, signal {d.name}: {d.detail}"
        lines += ["", one_line(first)]
        if d.magnitude:
            lines.append(f"size: {d.magnitude}")
    if len(result.culprits) == 1:
        lines += why_lines(result.culprits[0])
    lines += [line for table in _metric_tables(result) for line in ("", table)]
    notes = filter(None, [
        branch_line(result), noise_line(result, what), one_line(passed_line(result)), explanation(result, what),
        looked_line(result),
    ])  # fmt: skip
    lines += ["", *notes, cost_line(result, what)]
    return "\n".join([*lines, *skip_lines(_skipped(result, what))])


def _metric_tables(result: BisectResult, shown: Callable[[str], str] = str) -> list[str]:
    """The metrics that each culprit moved; of several, each below a line that says whose they are."""
    tables = []
    for culprit in result.told:
        if culprit.comparison:
            against = "itself" if culprit is result.flaky else "its parent"
            whose = f"{short(culprit.commit.commit)} against {against}:\n\n" if len(result.told) > 1 else ""
            tables.append(whose + metrics_table(culprit.comparison, shown))
    return tables


def _skipped(result: BisectResult, what: str) -> list[Skipped]:
    """Why what was skipped."""
    return skipped(result.skips, "set" if isinstance(result, SetResult) else what, result.diagnoses)


def looked_line(result: BisectResult) -> str:
    """By what the commits were judged, and what else is to be known of the ends."""
    return one_line("; ".join([*result.remarks, f"looked at {result.looked}"]))


def cost_line(result: BisectResult, what: str = "commit") -> str:
    """What it took; of commits beside what `git bisect run` would have trained with the same trainer."""
    sets = f"{count(result.asked, 'set')} of changes tried" if isinstance(result, SetResult) else ""
    text = cost_text(result, sets or count(result.commits, what), what)
    if what == "commit" and result.git_probes and (result.rates is None or not result.posterior):
        costs = [count(result.git_probes, "test")]
        if result.predicate != "exit":
            costs.append(f"{result.git_probes * result.git_steps} trained steps")
        if result.git_seconds is not None:
            costs.append(f"about {duration(result.git_seconds)}")
        text += f"; `git bisect run` would have taken at least {', '.join(costs)} for its search"
    return text


def _context(result: BisectResult, command: str, what: str, *, plotted: bool) -> dict[str, Any]:
    plots = _plots(result, what) if plotted else {}
    return plots | {
        "result": result,
        "what": what,
        "headline": headline(result, what),
        "changes": _pairs(result) if isinstance(result, SetResult) else [],
        "explanation": " ".join(
            filter(None, [branch_line(result), passed_line(result), *set_lines(result)[-1:], explanation(result, what)])
        ),
        "renamed": "\n".join(rename_lines(result)),
        "looked": looked_line(result),
        "suspects": suspects_line(result),
        "untried": untried_line(result, what),
        "noise": noise_line(result, what),
        "environment": [line for culprit in result.culprits for line in environment_lines(culprit)],
        "ends": endpoint_rows(result.ends),
        "reasons": [reason for culprit in result.culprits if (reason := _reason(culprit, plotted=plotted))],
        "cost": cost_line(result, what),
        "metrics": Markdown("\n\n".join(_metric_tables(result, report_text))),
        "skipped": _skipped(result, what),
        "command": command,
    }


def _reason(culprit: Culprit, *, plotted: bool) -> dict[str, Any]:
    """Why, the part of the change that it names, and how far the first difference goes; empty where nothing is said."""
    reason = culprit.explanation
    plot = size_plot(reason) if plotted and reason else ""
    text = "\n".join(why_lines(culprit, beside=True, plotted=bool(plot))).strip()
    return {"point": culprit.commit.commit, "text": text, "change": change_of(reason), "plot": plot} if text else {}


def write_report(result: BisectResult, folder: Path, command: str, what: str = "commit") -> Iterator[Path]:
    """Write ``report.md`` and ``report.html`` (self-contained, plots as SVG): each path once it is there."""
    return written("bisect", folder, lambda page: _context(result, command, what, plotted=page))


def _plots(result: BisectResult, what: str) -> dict[str, Any]:
    """What the page alone shows."""
    from repro.report.plots import commit_strip, distance_plot, drift_plot

    comparison, strip = result.comparison, commit_strip(result)
    if what != "commit":
        title = "sets of changes" if isinstance(result, SetResult) else f"{plural(what)}, in order"
        strip = strip.replace("commits, oldest first", title)
    return {
        "head": METRICS_HEAD,
        "rows": metrics_rows(comparison) if comparison else [],
        "unlogged": comparison is not None and not comparison.looked.logged,
        "drift": drift_plot(comparison) if comparison else "",
        "distance": distance_plot(comparison) if comparison else "",
        "strip": strip,
    }

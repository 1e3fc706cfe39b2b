"""What a report on two commits shows of one case, block by block, before it is put in any medium's form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from repro.pulls.metrics import Block, metric_blocks
from repro.pulls.pair import PairResult
from repro.pulls.result import judging, moved_bounds
from repro.report.change import change_of
from repro.report.mismatch import mismatch_rows, mismatch_title
from repro.report.pieces import Line, code, quoted, said
from repro.report.skips import Skipped, skipped
from repro.text import NO_METRIC, count, duration, utc
from repro_bisect.axes.axis import short
from repro_bisect.driver.result import Culprit
from repro_golden.compare.mismatch.change import MismatchChange

__all__ = ["COST", "blocks_of", "foot", "memory"]

COST = (
    "Step time is the median over one replay, without its first step. On a machine that does other work at the same "
    "time its ratio is rough; memory is not."
)


def memory(number: int) -> str:
    """Bytes in MiB or GiB."""
    return f"{number / 2**20:.1f} MiB" if number < 10 * 2**30 else f"{number / 2**30:.1f} GiB"


def _ratio(a: float | None, b: float | None) -> str:
    return f"x{b / a:.2f}" if a and b is not None else "not measured"


_NO_COST = (
    "Not measured: no one search replayed BASE and HEAD, as where BASE has a golden run, or their traces do not say."
)


def _cost(result: PairResult) -> Block:
    """Step time and peak memory of both sides."""
    usages = [result.spent.get(side) for side in ("base", "head")]
    if not any(usages):
        return Block("Cost", [(said(_NO_COST),)])
    times = [side.step_seconds if side else None for side in usages]
    step_times = ["not measured" if t is None else f"{1000 * t:.3g} ms" if t < 1 else f"{t:.3g} s" for t in times]
    kinds = ["GPU" if side and side.device_bytes else "host" for side in usages]
    bytes_ = [side.memory or None if side else None for side in usages]
    names = [
        "not measured" if b is None else f"{memory(b)}{f' ({kind})' if kinds[0] != kinds[1] else ''}"
        for b, kind in zip(bytes_, kinds, strict=True)
    ]
    same = kinds[0] == kinds[1]
    ratio = _ratio(bytes_[0], bytes_[1]) if same else "not comparable"
    kind = f", {kinds[0]}" if same and any(usages) else ""
    rows = [["step time, median", *step_times, _ratio(*times)], [f"peak memory{kind}", *names, ratio]]
    cells = [[(said(cell),) for cell in row] for row in rows]
    return Block("Cost", (), ["", "base", "head", "head / base"], cells, [(said(COST),)])


def _mismatch(change: MismatchChange | None) -> Block | None:
    """The train/rollout mismatch of both sides, as far as it moved."""
    raw = change.to_mapping() if change else {"numbers": []}
    rows = mismatch_rows(raw)
    if not rows:
        return None
    head = ["number", "base", "head", "head / base"]
    cells = [[(said(cell),) for cell in row] for row in rows]
    return Block("Train/rollout mismatch", [(quoted(mismatch_title(raw)), said("."))], head, cells)


def _culprits(culprits: Sequence[Culprit], otherwise: str) -> Block:
    """Every commit that is known to have moved the numbers; `otherwise`: what is said of one without a difference."""
    rows: list[list[Line]] = []
    for culprit in culprits:
        c = culprit.commit
        why: Line = (quoted(culprit.explanation.text),) if culprit.explanation else ()
        if culprit.unexplained:
            why = said("not explained: "), quoted(culprit.unexplained)
        if culprit.environment:
            why = (*why, said("; its environment changed: " if why else "its environment changed: "))
            why = (*why, quoted(", ".join(culprit.environment)))
        first = culprit.divergence
        rows.append([
            (code(short(c.commit)),), (quoted(c.subject),), (quoted(f"{c.author.partition(' <')[0]}, {utc(c.date)}"),),
            (quoted(str(first)),) if first else (said(otherwise),), why,
        ])  # fmt: skip
    head = ["commit", "subject", "author", "first difference", "why"]
    keep = [i for i, _ in enumerate(head) if i < 4 or any(row[i] for row in rows)]
    return Block("Culprits", (), [head[i] for i in keep], [[row[i] for i in keep] for row in rows])


def _changes(culprits: Sequence[Culprit]) -> Iterator[Block]:
    """Of each commit the part of its diff that moved the numbers, where its explanation names one."""
    for culprit in culprits:
        if change := change_of(culprit.explanation):
            title = f"What {short(culprit.commit.commit)} changes"
            yield Block(title, [(quoted(culprit.explanation.text),)] if culprit.explanation else (), change=change)


def _first(result: PairResult) -> Block | None:
    """Where it begins, and how far it is there."""
    compared = result.compared
    if compared is None:
        return None
    lines: list[Line] = []
    if d := compared.drift.divergence:
        size = f": {d.magnitude}" if d.magnitude else ""
        lines.append((said(f"First difference: step {d.step}, {d.phase}, "), code(d.name), said(" ("),
                      quoted(d.detail), said(f"){size}.")))  # fmt: skip
        if counts := ", ".join(f"{number} in {phase}" for phase, number in d.differing.items()):
            lines.append((said(f"Signals that differ in that step: {counts}."),))
        if same := compared.drift.untouched:
            lines.append((said(f"{same[:1].upper()}{same[1:]}."),))
    if result.other_length and not result.by_length_alone:
        lines.append((said(f"{result.other_length}."),))
    judges = judging(result)
    for metric, steps in moved_bounds(compared).items():
        bound = result.bounds.get(judges.get(metric, metric))
        how = f" (rtol {bound.rtol:g}, atol {bound.atol:g})" if bound else ""
        where = f" at {len(steps)} of {count(compared.drift.steps, 'step')}, first at step {steps[0]}."
        lines.append((code(metric), said(f" left its bound{how}{where}")))
    lines += [(code(v.signal), said(f" is {v.detail}, first at step {v.step}; no bound of the case judges it."))
              for v in compared.violations if v.kind == "nonfinite"]  # fmt: skip
    return Block("", lines) if lines else None


def _notes(result: PairResult) -> Block | None:
    """What else a reader should know."""
    lines: list[Line] = [(quoted(note),) for note in result.notes]
    if result.compared:
        lines.append((said("Looked at "), quoted(str(result.compared.drift.looked)), said(".")))
    elif result.verdict == "identical":
        lines.append((said("Looked at no number: nothing was replayed."),))
    if result.compared and result.compared.drift.renames and result.verdict != "identical":
        lines.append((quoted(f"{result.compared.drift.renames}."),))
    if result.unnamed:
        some = "Not every commit is named: " if result.culprits else "No commit is named: "
        lines.append((said(some), quoted(result.unnamed)))
    if result.compared and result.compared.flaky and result.verdict != "flaky":
        lines.append((quoted(result.compared.flaky),))
    if bisect := result.bisect:
        if bisect.outcome == "ambiguous":
            lines += [(said("It may be "), code(short(c)), said(" "), quoted(bisect.subjects.get(c, "")))
                      for c in bisect.suspects]  # fmt: skip
        if bisect.earlier:
            lines.append((said("These commits do not explain all: earlier ones move numbers too."),))
        if bisect.explains_bad is False:
            lines.append((said("These commits do not explain all: later ones move numbers too."),))
        lines += [(quoted(remark),) for remark in bisect.remarks if remark not in result.notes]
        lines += [_skip_line(group) for group in skipped(bisect.skips, "commit", bisect.diagnoses)]
    return Block("Notes", lines) if lines else None


def _skip_line(group: Skipped) -> Line:
    """Commits that were skipped for one reason."""
    who: Line = (code(group.first),)
    if group.count:
        who = said(f"{group.count}, "), code(group.first), said(" to "), code(group.last)
    return (said("Skipped "), *who, said(": "), quoted(group.reason))


def blocks_of(result: PairResult) -> list[Block]:
    """What is shown of a case under its verdict, the most important first."""
    blocks: list[Block | None] = [_first(result)]
    others: list[Block] = []
    if compared := result.compared:
        bounds = {name: result.bounds[metric] for name, metric in judging(result).items()}
        metrics = metric_blocks(compared.drift, bounds, list(moved_bounds(compared)))
        others = [block for block in metrics if block.title != "Metrics"]
        blocks += [block for block in metrics if block.title == "Metrics"]
        if not compared.drift.looked.logged:
            blocks.append(Block("", [(said(f"{NO_METRIC.capitalize()}."),)]))
        blocks.append(_mismatch(compared.mismatch))
        blocks.append(_cost(result))
    otherwise = "none in the steps that both make" if result.by_length_alone else "not measured"
    blocks += [_culprits(result.culprits, otherwise) if result.culprits else None, *_changes(result.culprits)]
    blocks += [_notes(result), *others]
    return [block for block in blocks if block is not None]


def foot(result: PairResult) -> Line:
    """Where, when and how long."""
    at = result.at.replace("T", " ").replace("Z", " UTC")
    return said("On "), code(result.machine), said(f", {at}, in {duration(result.seconds)}.")

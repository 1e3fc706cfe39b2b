"""The demo's result as text, and the same text as a picture."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.text import Text

from repro.demo.run import DemoResult
from repro.report.bisect import cost_line, explanation

__all__ = ["result_text", "write_picture"]

_WIDTH = 104
_OK, _NO = "ok", "NO"


def result_text(result: DemoResult, folder: Path) -> Text:
    """The verdict, the opened answer beside it, and where the reports lie."""
    bisect = result.bisect
    out = Text()
    if bisect.culprit and bisect.divergence:
        d = bisect.divergence
        out.append(f"{bisect.culprit.commit[:10]}", style="bold yellow")
        out.append(f'  "{bisect.culprit.subject}"', style="bold")
        out.append("  moved the numbers\n")
        _row(out, "first at", f"step {d.step}, phase {d.phase}, signal {d.name}")
        _row(out, "by", str(d.magnitude or d.detail))
    else:
        out.append(f"no commit was named: {bisect.outcome}\n", style="bold red")
    if text := explanation(bisect):
        _row(out, "and", text)
    out.append("\n")
    _comparison(out, result)
    out.append("\n")
    _row(out, "golden run", f"{result.verification.steps} steps at {bisect.good[:10]}, {result.proofs} proofs passed")
    _row(out, "bisect", cost_line(bisect))
    for path in (*result.reports, folder / "demo.svg"):
        _row(out, "report" if path.name.startswith("report") else "picture", str(folder / path.name))
    _row(out, "reproduce", result.reproduce)
    out.append("\n")
    if result.problem:
        out.append(f"WRONG: {result.problem}", style="bold red")
    else:
        out.append(f"RIGHT: the planted commit, at the planted step, in {result.seconds:.0f} s", style="bold green")
    return out


def _comparison(out: Text, result: DemoResult) -> None:
    planted, culprit, d = result.answer, result.bisect.culprit, result.bisect.divergence
    rows = [
        ("commit", culprit.commit[:10] if culprit else "-", str(planted["commit"])[:10]),
        ("first step", str(d.step) if d else "-", str(planted["first_step"])),
        ("first phase", d.phase if d else "-", str(planted["phase"])),
    ]
    out.append(f"{'':14}{'found':14}{'sealed answer':16}\n", style="dim")
    for name, actual, wanted in rows:
        same = actual == wanted
        out.append(f"  {name:12}{actual:14}{wanted:16}")
        out.append(f"{_OK if same else _NO}\n", style="green" if same else "bold red")
    _row(out, "planted", f"{planted['kind']}, {planted['place']}")


def _row(out: Text, name: str, value: str) -> None:
    out.append(f"  {name:12}", style="dim")
    out.append(f"{value}\n")


def write_picture(text: Text, title: str, path: Path) -> None:
    """The text as a terminal's picture (SVG); equal texts give equal pictures."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(text, soft_wrap=False)
    path.write_text(console.export_svg(title=title, unique_id="repro-demo"), encoding="utf-8")

"""What plots show of two traces: where they differ and how far, never a size that was not measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_kit import RAM, write

from repro.report.plot_data import PAIRS, SIGNALS, plot_data_of
from repro_golden.base.machine.usage import Usage, measure, slowest, spent_of
from repro_golden.fingerprint import reference
from repro_golden.trace import Row, Trace
from repro_golden.trace.writer import metric_row


def row(phase: str, name: str, values: list[float], *, kept: bool = True, sketch: int = 0) -> Row:
    """A float32 signal; all of its values are kept, or a sketch of the first so many."""
    x = np.array(values, "<f4")
    raw, finite = x.tobytes(), x[np.isfinite(x)]
    absmax = float(np.abs(finite).max(initial=0.0))
    bad = int((~np.isfinite(x)).sum())
    return Row(
        phase, name, "float32", x.shape, reference(raw), bad, absmax, absmax, raw[: 4 * sketch], raw if kept else None
    )


def traces(folder: Path, a: list[list[Row]], b: list[list[Row]]) -> tuple[Trace, Trace]:
    """Both, read back."""
    return Trace(write(folder / "a", a)), Trace(write(folder / "b", b))


def test_equal_traces_have_no_picture(tmp_path: Path) -> None:
    """Where every bit agrees there is nothing to draw, however long one side goes on."""
    step = [row("grad", "w", [1.0, 2.0])]
    assert plot_data_of(*traces(tmp_path, [step], [step, step])) is None


def test_cells_say_where_and_how_far(tmp_path: Path) -> None:
    """A cell for each signal of each step that differs, in the order in which signals part; sizes as they are."""
    a = [[row("forward", "x", [1.0, 2.0]), row("grad", "w", [4.0, -8.0])] for _ in range(3)]
    b = [list(step) for step in a]
    b[1][1] = row("grad", "w", [4.0, -8.5])
    b[2] = [row("forward", "x", [1.0, np.nextafter(np.float32(2), np.float32(3))]), row("grad", "w", [4.0, -8.0])]
    plot_data = plot_data_of(*traces(tmp_path, a, b))
    assert plot_data is not None
    assert (plot_data.steps, plot_data.signals, plot_data.more) == ([0, 1, 2], ["grad w", "forward x"], 0)
    first, second = plot_data.cells
    assert (first.step, first.signal, first.relative, first.exact) == (1, 0, 0.5 / 8.5, True)
    assert (second.step, second.signal, second.ulp) == (2, 1, 1)
    assert plot_data.of == {"step": 1, "phase": "grad", "signal": "w", "dtype": "float32", "exact": True}
    assert plot_data.histogram == [(1 << 19, 1)]


def test_what_has_no_size_gets_none(tmp_path: Path) -> None:
    """Missing signals, other shapes, values that are not finite and differences that a sketch missed have no number."""
    a = [[
        row("forward", "nan", [1.0, 2.0]), row("forward", "gone", [1.0]), row("forward", "cut", [1.0, 2.0]),
        row("grad", "missed", [1.0, 2.0], kept=False, sketch=1), row("grad", "zero", [0.0]),
    ]]  # fmt: skip
    b = [[
        row("forward", "nan", [1.0, math.nan]), row("forward", "cut", [1.0]),
        row("grad", "missed", [1.0, 3.0], kept=False, sketch=1), row("grad", "zero", [-0.0]),
    ]]  # fmt: skip
    plot_data = plot_data_of(*traces(tmp_path, a, b))
    assert plot_data is not None
    cells = {plot_data.signals[cell.signal].split()[1]: cell for cell in plot_data.cells}
    assert {name for name, cell in cells.items() if cell.relative is None} == {"nan", "gone", "cut", "missed"}
    assert cells["zero"].relative == 0.0 and cells["zero"].text == ""
    assert cells["gone"].text == "missing" and cells["cut"].text == "shape" and cells["nan"].text == "1 not finite"
    assert cells["missed"].text == "differs, size not measured" and not cells["missed"].exact
    json.dumps(plot_data.to_mapping(), allow_nan=False)


@given(st.integers(1, 3 * SIGNALS), st.integers(1, 3))
def test_the_picture_is_bounded(signals: int, steps: int) -> None:
    """However many signals differ, at most `SIGNALS` are drawn, the rest is counted, and no cell points outside."""
    import tempfile

    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        sides = [
            [[metric_row("loss", f"m{k}", float(k) + shift) for k in range(signals)] for _ in range(steps)]
            for shift in (0.0, 1.0)
        ]
        plot_data = plot_data_of(*traces(Path(folder), *sides))
    assert plot_data is not None
    assert len(plot_data.signals) == min(signals, SIGNALS) and plot_data.more == max(0, signals - SIGNALS)
    assert len(plot_data.cells) == steps * len(plot_data.signals)
    assert all(c.step < steps and c.signal < len(plot_data.signals) for c in plot_data.cells)


@pytest.mark.parametrize("count", [2, PAIRS, 3 * PAIRS + 1])
def test_tokens_are_those_that_count(tmp_path: Path, count: int) -> None:
    """Log-probs of masked tokens only, of the step with the largest KL, thinned evenly with both ends kept."""
    mask = [1.0] * count + [0.0] * 5

    def side(shift: float, far: float) -> list[list[Row]]:
        columns = [[-(k % 7) - 0.5 + s for k in range(count + 5)] for s in (shift, far)]
        return [[row("input", "loss_mask", mask), row("forward", "log_probs", column)] for column in columns]

    plot_data = plot_data_of(*traces(tmp_path, side(0.0, 0.0), side(0.01, 0.2)))
    assert plot_data is not None
    assert plot_data.tokens is not None
    assert (plot_data.tokens.step, plot_data.tokens.total) == (1, count)
    assert len(plot_data.tokens.pairs) == min(count, PAIRS)
    assert plot_data.tokens.pairs[0][0] == np.float32(-0.5) and all(
        abs(y - x - 0.2) < 1e-6 for x, y in plot_data.tokens.pairs
    )


def test_what_a_run_took_comes_home() -> None:
    """A closing line with what was spent reads back as it was; an older or cut one says nothing."""
    raw = measure([0.5, 0.25, 0.125])
    spent = spent_of({"spent": json.loads(json.dumps(raw))})
    assert spent is not None
    assert spent.step_seconds == pytest.approx(0.1875) and spent.host_bytes > 1 << 20
    assert spent.device_bytes > 0 or spent.memory == spent.host_bytes
    assert spent_of(None) is None and spent_of({"reason": "finished"}) is None
    assert Usage([], 1, 2).step_seconds is None and Usage([7], 1, 2).memory == 2
    ranks = [Usage([1, 2], 10, 0), Usage([5, 5], 3, 0)]
    assert slowest([rank.to_mapping() for rank in ranks]) == Usage([5, 5], 10, 0).to_mapping()
    assert slowest([]) == Usage([], 0, 0).to_mapping()

"""A case's `[mismatch]` bounds, in recordings, replays and nights; the first step's checks; and what reports show."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import Repo
from mismatch_kit import NAN, Sample, column, step_rows, traced
from nightly_kit import nightly_run
from pull_kit import point
from pull_kit import report as pull_report

from repro.__main__ import main
from repro.nightly.checks import mismatch_check
from repro.nightly.records import Check
from repro.nightly.report import nightly_text, write_report
from repro.pulls.comment import comment
from repro.pulls.pair import PairResult, compare_traces
from repro.pulls.report import page, pull_text
from repro.report.mismatch import mismatch_rows, mismatch_text
from repro_golden.base.checks import Proof
from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case, Compare, Experiment, read_case
from repro_golden.case.tables import MismatchTable
from repro_golden.compare.mismatch.bounds import breaches, mismatch_checks
from repro_golden.compare.mismatch.change import mismatch_change
from repro_golden.runs.proofs import first_step_checks, shows_policies
from repro_golden.trace import Row, Trace
from repro_golden.trace.writer import metric_row

INF = math.inf
NEAR: Sample = [(-1.0, -1.0, 1), (-1.0, -1.125, 1), (-1.0, -9.0, 0)]
FAR: Sample = [(-1.0, -1.0, 1), (-1.0, -1.25, 1), (-1.0, -3.0, 1)]


# -- the table


def case_text(table: str) -> str:
    return f'[case]\nname = "t"\nsteps = 1\nrollouts = "r"\n{table}'


def read(tmp_path: Path, table: str) -> Case:
    path = tmp_path / "t.toml"
    path.write_text(case_text(table))
    return read_case(path)


def test_bounds_are_no_part_of_a_cases_key(tmp_path: Path) -> None:
    """Golden runs and journals stay valid when bounds are set, changed or taken away."""
    plain, bounded = read(tmp_path, ""), read(tmp_path, "[mismatch]\nmax = 1\np99 = 0.5\nsteps = 1\n")
    assert plain.digest == bounded.digest and plain.canonical() == bounded.canonical()
    assert bounded.mismatch.bounds == {"max": 1.0, "p99": 0.5} and plain.mismatch.bounds == {}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("maxx = 1.0", "unknown key mismatch.maxx: did you mean max"),
        ("max = -1.0", "mismatch.max"),
        ("max = nan", "mismatch.max"),
        ("k3 = inf", "mismatch.k3"),
        ("steps = 0\nmax = 1.0", "mismatch.steps"),
        ("steps = 2", "mismatch: steps alone bounds nothing"),
    ],
)
def test_bounds_that_bound_nothing_are_refused(tmp_path: Path, table: str, message: str) -> None:
    """Misspelt, negative, NaN or infinite bounds, and a table without any, are refused in one line."""
    with pytest.raises(ReproError, match=message.replace(".", r"\.")):
        read(tmp_path, f"[mismatch]\n{table}\n")


# -- bounds held against traces


def metrics_of(table: MismatchTable, trace: Trace) -> list[tuple[int, str]]:
    return [(breach.step, breach.metric) for breach in breaches(table, trace)]


def test_each_bound_is_broken_by_its_own_number(tmp_path: Path) -> None:
    """A bound just below a step's number is broken there and names a token, one at the number is not."""
    trace = traced(tmp_path / "t", [step_rows([NEAR]), step_rows([NEAR, FAR])])
    gap = mismatch_change(trace, trace)
    assert gap is not None
    for name in MismatchTable.model_fields:
        if name == "steps":
            continue
        values = [of.numbers()[name] for of in (_measured(trace, 0), _measured(trace, 1))]
        least = name in ("ratio_min", "ess")
        limit = min(v for v in values if v is not None) if least else max(abs(v) for v in values if v is not None)
        at = MismatchTable(**{name: limit})
        assert breaches(at, trace) == [], name
        inside = limit + 1e-9 if least else limit - 1e-9
        if inside < 0:
            continue
        (breach, *_) = breaches(MismatchTable(**{name: inside}), trace)
        assert breach.metric == name and breach.token is not None and breach.token.step == breach.step
        assert f"{name} " in str(breach) and "sample" in str(breach) and "position" in str(breach)


def _measured(trace: Trace, index: int) -> Any:
    from repro_golden.compare.mismatch.measured import of_trace

    return of_trace(trace, index)


def test_the_first_token_over_the_bound_is_named(tmp_path: Path) -> None:
    """Step, sample and position of the first one, not of the largest; later steps follow."""
    trace = traced(tmp_path / "t", [step_rows([NEAR]), step_rows([NEAR, FAR]), step_rows([FAR])])
    first, second = breaches(MismatchTable(max=0.2), trace)
    assert str(first) == ("step 1: max 2, allowed at most 0.2: at sample 1, position 1 (trainer -1.0, rollout -1.25)")
    assert (second.step, second.token and second.token.sample) == (2, 0)
    (ratio,) = breaches(MismatchTable(ratio_max=1.2), traced(tmp_path / "u", [step_rows([NEAR, FAR])]))
    assert ratio.token is not None and (ratio.token.sample, ratio.token.position) == (1, 1)
    (mean,) = breaches(MismatchTable(mean=0.3), traced(tmp_path / "v", [step_rows([NEAR, FAR])]))
    assert "the largest gap is at sample 1, position 2" in str(mean)
    assert metrics_of(MismatchTable(max=0.2, steps=1), trace) == []
    assert metrics_of(MismatchTable(max=0.2, steps=2), trace) == [(1, "max")]
    json.dumps([breach.to_mapping() for breach in (first, second, ratio, mean)], allow_nan=False)


@pytest.mark.parametrize("bad", [(NAN, -1.0, 1), (-1.0, NAN, 1), (-INF, -INF, 1), (-1.0, -INF, 1)])
def test_a_token_that_is_not_finite_breaks_every_bound(tmp_path: Path, bad: tuple[float, float, int]) -> None:
    """However wide the bound; behind the mask it breaks none."""
    wide = MismatchTable(max=1e30)
    (breach,) = breaches(wide, traced(tmp_path / "t", [step_rows([NEAR, [bad]])]))
    assert breach.metric == "nonfinite" and str(breach).startswith("step 0: 1 of 3 tokens not finite: at sample 1, ")
    json.dumps(breach.to_mapping(), allow_nan=False)
    assert breaches(wide, traced(tmp_path / "u", [step_rows([NEAR, [(*bad[:2], 0)]])])) == []


def test_what_was_not_observed_is_no_pass(tmp_path: Path) -> None:
    """A step without the columns breaks a bound, and so does a run without a token; without bounds nothing is asked."""
    bare = traced(tmp_path / "a", [step_rows([NEAR]), [column("forward", "log_probs", [-1.0])]])
    assert metrics_of(MismatchTable(max=9), bare) == [(1, "columns")]
    masked = step_rows([[(-1.0, -9.0, 0)]])
    assert metrics_of(MismatchTable(max=9), traced(tmp_path / "b", [masked])) == [(0, "tokens")]
    assert metrics_of(MismatchTable(max=9), traced(tmp_path / "c", [masked, step_rows([NEAR])])) == []
    assert breaches(MismatchTable(), bare) == [] and mismatch_checks(MismatchTable(), bare) == []


def test_the_proof_says_how_near_or_where_not(tmp_path: Path) -> None:
    """Passed with the numbers over all judged steps, failed with the first breach and how many more there are."""
    trace = traced(tmp_path / "t", [step_rows([NEAR]), step_rows([FAR])])
    (good,) = mismatch_checks(MismatchTable(max=2, k3=9), trace)
    assert good.passed and good.detail.startswith("mean 0.475, p99 2, max 2 nats at sample 0, position 2; k3 ")
    (bad,) = mismatch_checks(MismatchTable(max=0.1), trace)
    assert not bad.passed and bad.detail.startswith("step 0: max 0.125") and bad.detail.endswith("(1 more)")


def test_a_recording_out_of_bounds_is_refused_and_a_replay_differs(recorded: Repo) -> None:
    """`golden record` refuses with the place and the flag; `golden verify` answers 1 though every bit agrees."""
    path = recorded.root / "golden" / "cases" / "mini.toml"
    text = path.read_text()
    path.write_text(f"{text}\n[mismatch]\nratio_max = 0.5\n")
    broken = recorded.repro("golden", "verify", "--json")
    assert broken.returncode == 1, broken.stdout + broken.stderr
    (result,) = json.loads(broken.stdout).values()
    assert result["comparison"]["equal"] and not result["agrees"]
    first = result["mismatch_broken"][0]
    assert first["metric"] == "ratio_max" and {"step", "sample", "position", "trainer", "rollout"} <= set(
        first["token"]
    )
    assert result["mismatch"]["before"] == result["mismatch"]["after"]
    refused = recorded.repro("golden", "approve", "--reason", "a test")
    assert refused.returncode == 1, refused.stdout + refused.stderr
    last = refused.stderr.strip().splitlines()[-1]
    assert "train/rollout mismatch in bounds: step " in last and "--allow-failed-checks" in last
    shown = json.loads(recorded.repro("golden", "show", "mini", "--json").stdout)
    assert [m["step"] for m in shown["mismatch"]] == [0, 1, 2]
    assert all(0 <= m["max"] < 1e-3 and m["column"] == "old_log_probs" for m in shown["mismatch"])
    path.write_text(f"{text}\n[mismatch]\nmean = 1e-6\n")
    recorded.edit(
        "core/repro_core/rl/loss.py", "rows.float() / temperature, dim", "rows.float() / temperature * 1.01, dim"
    )
    moved = recorded.repro("golden", "verify")
    assert (
        moved.returncode == 1 and "mini: differs: train/rollout mismatch out of bounds at step 0: mean " in moved.stdout
    ), moved.stdout + moved.stderr
    assert "the largest gap is at sample " in moved.stdout
    assert "bits: differs at step 0, phase forward" in moved.stdout and "| gap mean, nats" in moved.stdout


# -- the first step


def checked(folder: Path, rows: list[Row], **metrics: float) -> list[Proof]:
    """The three checks of a step with these rows."""
    numbers = {"kl_loss": 0.0, "grad_norm": 1.0} | metrics
    return first_step_checks(traced(folder, [[*rows, *(metric_row("loss", k, v) for k, v in numbers.items())]]), 10.0)


def policies(ours: list[float], theirs: list[float], mask: list[int] | None = None, part: str = "") -> list[Row]:
    rows = [column("forward", f"log_probs{part}", ours), column("forward", f"ref_log_probs{part}", theirs)]
    return [*rows, column("input", f"loss_mask{part}", mask, "int64")] if mask else rows


EQUAL = [-1.0, -2.0]
HOLES: Mapping[str, tuple[Callable[[], list[Row]], list[bool]]] = {
    "equal": (lambda: policies(EQUAL, EQUAL), [True, True, True]),
    "one side larger": (lambda: policies([-1.0, -1.5], EQUAL), [False, True, True]),
    "one side smaller": (lambda: policies([-1.0, -2.5], EQUAL), [False, True, True]),
    "a unit in the last place": (lambda: policies([-1.0, -2.0 + 2**-23], EQUAL), [False, True, True]),
    "the sign of zero": (lambda: policies([-0.0], [0.0]), [False, True, True]),
    "equal NaNs": (lambda: policies([NAN, -2.0], [NAN, -2.0]), [False, True, True]),
    "equal infinities": (lambda: policies([-INF, -2.0], [-INF, -2.0]), [False, True, True]),
    "behind the mask": (lambda: policies([-1.0, NAN], [-1.0, 5.0], [1, 0]), [True, True, True]),
    "all masked": (lambda: policies(EQUAL, EQUAL, [0, 0]), [False, True, True]),
    "no token": (lambda: policies([], []), [False, True, True]),
    "another micro-batch": (
        lambda: [*policies(EQUAL, EQUAL), *policies([-1.0], [-1.5], part=".1")],
        [False, True, True],
    ),
    "another rank": (
        lambda: [*policies(EQUAL, EQUAL, part="@0"), *policies([-1.0], [-1.5], part="@1")],
        [False, True, True],
    ),
    "a micro-batch without its reference": (
        lambda: [*policies(EQUAL, EQUAL), column("forward", "log_probs.1", [-1.0])],
        [False, True, True],
    ),
    "a gradient called like the column": (
        lambda: [*policies([-1.0, -1.5], EQUAL), *[_as("grad", row) for row in policies(EQUAL, EQUAL)]],
        [False, True, True],
    ),
    "KL that cancels": (
        lambda: [*policies(EQUAL, EQUAL), column("forward", "kl", [1.0, -1.0])],
        [True, False, True],
    ),
    "KL of NaN": (lambda: [*policies(EQUAL, EQUAL), column("forward", "kl", [0.0, NAN])], [True, False, True]),
    "KL of -0.0": (lambda: [*policies(EQUAL, EQUAL), column("forward", "kl", [-0.0, 0.0])], [True, True, True]),
    "KL behind the mask": (
        lambda: [*policies(EQUAL, EQUAL, [1, 0]), column("forward", "kl", [0.0, NAN])],
        [True, True, True],
    ),
}


def _as(phase: str, row: Row) -> Row:
    row.phase = phase
    return row


@pytest.mark.parametrize("name", HOLES)
def test_the_first_step_has_no_hole(name: str, tmp_path: Path) -> None:
    """Two-sided, of bits, over every part and unmasked token; what is missing, NaN or infinite never passes."""
    rows, expected = HOLES[name]
    assert [proof.passed for proof in checked(tmp_path / "t", rows())] == expected


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"ppo_kl": -1e-12}, [True, False, True]),
        ({"ppo_kl": 0.0, "train/kl_loss": 1e-30}, [True, False, True]),
        ({"train/ppo_kl": NAN}, [True, False, True]),
        ({"kl_loss": -0.0, "ppo_kl": -0.0}, [True, True, True]),
        ({"grad_norm": INF}, [True, True, False]),
        ({"grad_norm": NAN}, [True, True, False]),
        ({"grad_norm": -1.0}, [True, True, False]),
    ],
)
def test_every_kl_that_was_logged_counts(metrics: dict[str, float], expected: list[bool], tmp_path: Path) -> None:
    """One KL of 0 does not hide another, in whatever folder it was logged."""
    assert [p.passed for p in checked(tmp_path / "t", policies(EQUAL, EQUAL), **metrics)] == expected


def test_an_infinite_bound_still_wants_a_finite_norm(tmp_path: Path) -> None:
    """`grad_norm_max = inf` asks for no more than a finite norm, and gets no less."""
    trace = traced(tmp_path / "t", [[metric_row("loss", "grad_norm", INF)]])
    assert not first_step_checks(trace, INF)[-1].passed


def test_columns_by_rank_are_columns(tmp_path: Path) -> None:
    """A program whose ranks show columns of their own is checked, as one with whole columns is."""
    assert shows_policies(traced(tmp_path / "t", [policies(EQUAL, EQUAL, part="@0")]))
    assert not shows_policies(traced(tmp_path / "u", [[column("forward", "log_probs", EQUAL)]]))


# -- reports


def sides(tmp_path: Path) -> tuple[Trace, Trace]:
    return traced(tmp_path / "a", [step_rows([NEAR])]), traced(tmp_path / "b", [step_rows([FAR])])


def test_diff_shows_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table stands where numbers moved, with --mismatch also where none did; JSON has all of it."""
    a, b = (str(trace.directory) for trace in sides(tmp_path))
    assert main(["diff", a, b]) == 1
    text = capsys.readouterr().out
    assert "|log_probs - rollout_log_probs| over 2 tokens of 1 step\n| train/rollout mismatch" in text
    assert "| gap max, nats                  | 0.125" in text and "| x16" in text
    assert main(["diff", a, b, "--json"]) == 1
    raw = json.loads(capsys.readouterr().out)["mismatch"]
    assert (raw["before"]["max"], raw["after"]["max"]) == (0.125, 2.0)
    assert main(["diff", a, a]) == 0
    assert "mismatch" not in capsys.readouterr().out
    assert main(["diff", a, a, "--mismatch"]) == 0
    text = capsys.readouterr().out
    assert "| gap p99.9, nats" in text and f"repro diff --mismatch {a} {a}" in text


def test_diff_says_that_there_is_no_mismatch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Asked for where the columns are missing, and of event files, it says so."""
    bare = str(traced(tmp_path / "t", [[column("forward", "log_probs", [-1.0])]]).directory)
    assert main(["diff", bare, bare, "--mismatch"]) == 0
    assert "the traces do not show both sides' log-probs" in capsys.readouterr().out


def test_a_pull_requests_report_compares_both_sides(tmp_path: Path) -> None:
    """One block with what moved, in the comment, on the page, in a terminal and in JSON; none where nothing moved."""
    a, b = sides(tmp_path)
    compared = compare_traces(a, b, Compare())
    result = PairResult(
        "toy", point("a"), point("b"), compared.verdict, "", compared, {}, {"base": None, "head": None}, 1, [], None,
        "", [], "m", "2026-11-22T03:12:45Z", 1.0,
    )  # fmt: skip
    report = pull_report(result)
    text = comment(report)
    assert "#### Train/rollout mismatch" in text and "| gap max, nats | 0.125 | 2 | x16 |" in text
    assert "gap max, nats" in page(report) and "gap max, nats" in pull_text(report)
    raw = json.loads(json.dumps(report.to_mapping(), allow_nan=False))
    assert raw["results"][0]["compared"]["mismatch"]["after"]["max"] == 2.0
    other = traced(tmp_path / "c", [[*step_rows([NEAR]), metric_row("update", "lr", 1.0)]])
    same = compare_traces(a, other, Compare())
    assert same.mismatch is not None and same.mismatch.same and same.verdict == "moved"


def test_a_night_judges_and_shows_it(tmp_path: Path) -> None:
    """A case with bounds has a check of its own; what moved against the baseline is a table in every form."""
    a, b = sides(tmp_path)
    case = Case(case=Experiment(name="t", steps=1, rollouts="r"), mismatch=MismatchTable(max=0.2))
    assert [check.status for check in mismatch_check(case, a, "")] == ["green"]
    (check,) = mismatch_check(case, b, "sglang 1 on cpu; rests on stand-ins: torchvision")
    assert check.status == "changed" and "sample 0, position 1" in check.text and "stand-ins: torchvision" in check.text
    assert mismatch_check(Case(case=Experiment(name="t", steps=1, rollouts="r")), b, "") == []
    compared = json.loads(json.dumps(compare_traces(a, b, Compare()).to_mapping(), allow_nan=False))
    tonight = nightly_run(status="changed", checks=[check, Check("baseline", "changed", "x")], compared=compared)
    path = tmp_path / "n.json"
    shown = nightly_text([tonight], [path])
    markdown, html = (p.read_text() for p in write_report([tonight], [path], tmp_path / "out", "repro report nightly"))
    assert "gap max, nats" in shown and "| gap max, nats | 0.125 | 2 | x16 |" in markdown
    assert "<td>gap max, nats</td><td>0.125</td><td>2</td><td>x16</td>" in html
    old = nightly_run(compared={k: v for k, v in compared.items() if k != "mismatch"})
    assert "gap" not in nightly_text([old], [path]), "results of nights before there was a mismatch are still shown"


def test_rows_tell_apart_what_looks_equal(tmp_path: Path) -> None:
    """Numbers that differ behind the seventh digit are shown whole; none and a 0 that became something are words."""
    a = traced(tmp_path / "a", [step_rows([[(-1.0, -1.0, 1)]])])
    b = traced(tmp_path / "b", [step_rows([[(-1.0, -1.0, 1), (NAN, -1.0, 1)]])])
    change = mismatch_change(a, b)
    assert change is not None
    assert mismatch_rows(change.to_mapping()) == [["tokens not finite", "0", "1", "from 0"]]
    numbers = [
        {"metric": "mean", "before": 0.1, "after": 0.1 + 1e-12, "ratio": 1.0},
        {"metric": "max", "before": None, "after": 1.0, "ratio": None},
        {"metric": "k1", "before": 0.0, "after": -0.0, "ratio": 1.0},
        {"metric": "k3", "before": 2.0, "after": 2.0, "ratio": 1.0},
    ]
    rows = mismatch_rows({"numbers": numbers})
    assert [row[0].split(",")[0] for row in rows] == ["gap mean", "gap max", "KL(rollout ‖ trainer) k1"]
    assert rows[0][1] != rows[0][2] and rows[1][1:] == ["none", "1", "no ratio"]
    assert mismatch_text(None) == ""

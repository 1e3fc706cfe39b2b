"""What is no agreement: values that are not finite, numbers of one rank, runs that end before they are to."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from pull_kit import pair, report
from test_compare import column, write

from repro.commands.golden_verify import _small
from repro.nightly.baseline import _left
from repro.nightly.checks import _alike
from repro.nightly.trusted import summarise
from repro.pulls.blocks import blocks_of
from repro.pulls.pair import compare_traces
from repro.pulls.report import junit
from repro.text import comparison_text
from repro_bisect.driver.drift import moved_metrics
from repro_bisect.predicates.predicates import first_violation, parse_predicate
from repro_golden.base.canonical import decode_float
from repro_golden.base.errors import ReproError
from repro_golden.base.observed import tellings
from repro_golden.case.file import Bound, Case, Compare
from repro_golden.compare.kl import kl_of_step
from repro_golden.compare.told_metrics import moved_text
from repro_golden.compare.traces import compare, violations
from repro_golden.recording.tap import perturbed_by_one_ulp
from repro_golden.runs.proofs import first_step_checks, measure_noise, not_vacuous, perturbations
from repro_golden.trace import Row, Trace, seal
from repro_golden.trace.model import PHASES
from repro_golden.trace.token_columns import kept
from repro_golden.trace.writer import metric_row

BOUNDS = Compare(mode="bounds", bounds={"loss": Bound(rtol=0.05)})


def told(folder: Path, *steps: dict[str, float], exit_code: int = 0) -> Trace:
    """A trace of steps with metrics."""
    trace = write(folder, [[metric_row("loss", name, value) for name, value in step.items()] for step in steps])
    assert trace.end is not None
    trace.end["exit"] = exit_code
    return trace


def test_a_metric_has_a_name_for_each_telling() -> None:
    """Told again and told by ranks it is the same metric; `pass@1` beside `pass` is another."""
    assert tellings("loss", {"loss": 1, "loss#1": 2, "loss@0": 3, "losses": 4}) == ["loss", "loss#1"]
    assert tellings("loss", ["loss@0", "loss#2@1", "loss@x", "my/loss"]) == ["loss@0", "loss#2@1"]
    assert tellings("pass", ["pass", "pass@1"], ["pass", "pass@1"]) == ["pass"]
    assert tellings("loss", ["loss"], ["loss@0", "loss@1"]) == ["loss", "loss@0", "loss@1"]


@pytest.mark.parametrize("wrong", [50.0, math.nan])
def test_a_bound_holds_for_each_rank(tmp_path: Path, wrong: float) -> None:
    """Ranks whose losses differ tell theirs as `loss@RANK`: the bound on `loss` holds for each of them."""
    first = {"loss": 1.0}
    a = told(tmp_path / "a", first, {"loss@0": 0.5, "loss@1": 0.6})
    b = told(tmp_path / "b", first, {"loss@0": 0.5, "loss@1": wrong})
    comparison = compare(a, b, BOUNDS)
    assert comparison.divergence is not None and not comparison.equal
    assert (comparison.divergence.step, comparison.divergence.name) == (1, "loss@1")
    whole = told(tmp_path / "c", first, {"loss": 0.5})
    assert [v.name for v in violations(a, whole, 1, BOUNDS.bounds)] == ["loss@0", "loss@1", "loss"]
    with pytest.raises(ReproError, match="no metric 'nothing'"):
        violations(a, b, 0, {"nothing": Bound(rtol=0.05)})


@pytest.mark.parametrize("names", [("loss#1", "loss"), ("loss", "loss#1"), ("loss", "loss#after")])
def test_what_is_told_beside_the_baselines_number_leaves_no_bound(tmp_path: Path, names: tuple[str, str]) -> None:
    """A last evaluation is one more number of the last step, whichever of both has the name; no other loss passes so.

    Nor does one that is not finite, nor one number fewer than the baseline has.
    """
    steps = [{"loss": 1.0, "kl": 0.5}, {"loss": 0.75, "kl": 0.25}]
    a = told(tmp_path / "a", *steps)

    def last(folder: str, value: float, more: float) -> Trace:
        return told(tmp_path / folder, steps[0], {names[0]: value, names[1]: more, "kl": 0.25})

    b = last("b", 0.75, 7.0)
    comparison = compare(a, b, BOUNDS)
    assert comparison.equal and moved_metrics(comparison.metrics)["loss"].first is None
    assert parse_predicate("metric:loss", Path()).at(a, b, 1) is None
    result = pair(tmp_path, steps, [dict(record.metrics) for record in b.steps], dict(BOUNDS.bounds))
    assert result.verdict == "identical" and "not judged" in str(blocks_of(result))
    for other in (last("c", 0.75, math.inf), last("d", 7.0, 8.0)):
        assert not compare(a, other, BOUNDS).equal
    assert not compare(b, a, BOUNDS).equal, "of one that is gone nobody knows what it was"
    assert moved_text(*map(in_text, (a, b))) == [] != moved_text(*map(in_text, (a, other)))


def in_text(trace: Trace) -> Trace:
    """Its metrics as lines of text tell them."""
    trace.steps = [replace(record, shown=[*record.metrics]) for record in trace.steps]
    return trace


def outcomes(tmp_path: Path, a: list[dict[str, float]], b: list[dict[str, float]]) -> dict[str, bool]:
    """Whether each bound's test passes in JUnit's report."""
    result = pair(tmp_path, a, b, {"loss": Bound(rtol=0.05), "reward": Bound(rtol=0.05)})
    suite = ElementTree.fromstring(junit(report(result)))  # noqa: S314
    return {case.get("name", ""): len(case) == 0 for case in suite.iter("testcase")}


def test_junit_fails_where_the_report_says_moved(tmp_path: Path) -> None:
    """A bound that another telling of its metric left fails, and so does every bound of a run that ended early."""
    steps = [{"loss": 1.0, "loss#1": 1.0, "reward": 1.0}] * 2
    moved = [{"loss": 1.0, "loss#1": 7.0, "reward": 1.0}] * 2
    assert outcomes(tmp_path, steps, moved) == {"bounds: loss": False, "bounds: reward": True}
    early = [{"loss": 7.0, "loss#1": 1.0, "reward": 1.0}]
    assert outcomes(tmp_path, steps, early) == {"bounds: loss": False, "bounds: reward": False}


def test_values_that_are_not_finite_agree_on_nothing(tmp_path: Path) -> None:
    """Not of bits, not within bounds, not in tensors, not in a metric without a bound."""
    loss = metric_row("loss", "loss", 1.0)
    bad = write(tmp_path / "bad", [[loss, column("update", "w", 1.0, math.nan)]])
    same = write(tmp_path / "same", [[loss, column("update", "w", 1.0, math.nan)]])
    good = write(tmp_path / "good", [[loss, column("update", "w", 1.0, 2.0)]])
    metric = told(tmp_path / "metric", {"loss": 1.0, "eval": math.inf})
    for a, b, rule in ((bad, same, None), (bad, same, BOUNDS), (good, bad, BOUNDS), (metric, metric, None)):
        comparison = compare(a, b, rule)
        assert comparison.divergence is None and comparison.nonfinite is not None and not comparison.equal
    assert str(compare(bad, same).nonfinite) == "w in phase update of step 0"
    assert comparison_text(compare(bad, same)).startswith("nothing differs, but values that are not finite agree on")
    assert comparison_text(compare(good, bad, BOUNDS)).startswith("differs: finite in the baseline, and not in the run")
    for rule in (Compare(), BOUNDS):
        assert compare_traces(bad, same, rule).nonfinite is not None
    brought = compare_traces(good, bad, BOUNDS)
    assert brought.verdict == "moved" and brought.first is not None and brought.first.name == "w"
    assert compare_traces(good, good, BOUNDS).nonfinite is None


@pytest.mark.parametrize("sealed", [False, True])
def test_gradients_that_a_scaler_found_too_large_are_no_fault(tmp_path: Path, sealed: bool) -> None:
    """A step that was skipped for them is how a scaler looks for its scale; without its word they are a fault."""
    gradients = [metric_row("grad", "grad_norm", math.inf), column("grad", "w", 1.0, math.inf)]
    after = [metric_row("loss", "train/grad_norm", math.inf), column("update", "w", 1.0, 2.0)]
    skipped = metric_row("update", "skipped", 1.0)
    finite = parse_predicate("finite", Path())

    def made(name: str, *more: Row, then: bool = True) -> Trace:
        rows = [metric_row("loss", "loss", 1.0), *gradients, *after, *more]
        steps = [sorted(rows, key=lambda row: PHASES.index(row.phase))] * 2
        steps += [[metric_row("loss", "loss", 0.5), column("grad", "w", 1.0, 2.0)]] if then else []
        trace = write(tmp_path / name, steps)
        if sealed:
            seal(trace.directory)
        return Trace(trace.directory)

    well = made("skipped", skipped)
    assert compare(well, well).equal and first_violation(finite, well, well) is None
    proofs = [proof.detail for proof in not_vacuous(well) if proof.name == "all values finite"]
    assert proofs and "not finite" not in proofs[0]
    for name, more in {"none": (), "a metric of that name": (metric_row("loss", "skipped", 1.0),)}.items():
        bad = made(name, *more)
        assert not compare(bad, bad).equal and first_violation(finite, bad, bad) is not None
    weights = made("weights", skipped, column("update", "exp_avg/w", math.nan))
    assert not compare(weights, weights).equal
    lost = made("lost", skipped, then=False)
    assert not compare(lost, lost).equal and first_violation(finite, lost, lost) is not None, "it found no scale"


def test_what_is_told_of_a_skipped_step_is_as_its_gradients(tmp_path: Path) -> None:
    """A norm under any name, an overflowing loss, printed too; a run may end with as many skipped steps as it had."""
    well = [metric_row("loss", "loss", 1.0), column("grad", "w", 1.0)]
    told_ = [metric_row("loss", name, math.inf) for name in ("total_norm", "loss")]
    over, scaled = [column("grad", "w", math.inf)], metric_row("update", "skipped", 1.0)
    out = [metric_row("loss", "loss", 1.0), *over, scaled]
    both = [*told_, column("grad", "optimizer.1/v", 1.0), *over, scaled]
    for name, steps, equal in (
        ("told", [[*told_, *over, scaled], well], True),
        ("one of two", [both, well], False),  # the other has stepped
        ("never", [[*told_, *over], well], False),
        ("told last", [well, [*told_, *over, scaled]], False),
        ("last", [well, out], True),
        ("as many", [well, out, out, well, out, out], True),
        ("more", [well, out, well, out, out], False),
        ("from the first on", [out], False),
    ):
        trace = write(tmp_path / name, steps)
        assert compare(trace, trace).equal is equal, name
    shown = comparison_text(compare(trace := write(tmp_path / "shown", [[*told_, *over], well]), trace))
    assert "[observe] ignore leaves out what is so on purpose" in shown


def test_a_skipped_step_is_one_optimizers(tmp_path: Path) -> None:
    """Gradients of another that steps in the same call are a fault, and its later steps are no scale that was found."""
    loss, skipped = metric_row("loss", "loss", 1.0), metric_row("update", "optimizer.1/skipped", 1.0)
    good = [loss, column("grad", "v", 1.0), column("grad", "optimizer.1/w", 1.0)]
    ours = [loss, column("grad", "v", 1.0), column("grad", "optimizer.1/w", math.inf), skipped]
    others = [loss, column("grad", "v", math.inf), column("grad", "optimizer.1/w", 1.0), skipped]
    for name, steps, equal in (("own", [ours, good], True), ("others", [others, good], False),
                               ("never", [ours, good[:2]], False)):  # fmt: skip
        trace = write(tmp_path / name, steps)
        assert compare(trace, trace).equal is equal, name


def test_two_replays_of_a_night_end_alike_and_make_what_is_asked(tmp_path: Path) -> None:
    """One that fails where the other ends well is noise; what both leave out was not looked at."""
    steps = [{"loss": 1.0}] * 2
    case = Case.model_validate({"case": {"name": "c", "steps": 2}, "subject": {"kind": "command", "command": "x"}})
    well, failed = told(tmp_path / "a", *steps), told(tmp_path / "b", *steps, exit_code=1)
    assert _alike(well, well, case).status == "green"
    assert [_alike(*sides, case).status for sides in ((well, failed), (failed, well))] == ["flaky", "flaky"]
    short = told(tmp_path / "c", *steps[:1])
    check = _alike(short, short, case)
    assert (check.status, check.text) == ("not judged", "both replays made 1 of 2 steps")


def test_a_night_judges_each_telling_of_a_bounded_metric() -> None:
    """What a night keeps of `loss#1` and `loss@0` is held to the bound on `loss`, and must be there."""
    bounds = {"loss": Bound(rtol=0.05)}
    then = summarise([{"loss": 1.0, "loss#1": 2.0}])
    assert _left(then, then, bounds) == ""
    assert _left(then, summarise([{"loss": 1.0, "loss#1": 200.0}]), bounds).startswith("loss#1 (first)")
    assert _left(then, summarise([{"loss": 1.0}]), bounds) == "loss#1 is gone"
    assert _left(summarise([{"kl": 1.0}]), summarise([{"kl": 1.0}]), bounds) == "loss is gone"


def rows(**metrics: float) -> list[Row]:
    """A first step that passes but for what metrics say."""
    columns = [column("forward", name, 0.5, 0.25) for name in ("log_probs", "ref_log_probs")]
    return [
        *columns,
        *(metric_row("loss", name.replace("_at_", "@").replace("_again", "#1"), v) for name, v in metrics.items()),
    ]


@pytest.mark.parametrize(
    ("metrics", "failing"),
    [
        ({"kl_loss": 0.0, "grad_norm": 1.0}, []),
        ({"kl_loss": 0.0, "kl_loss_again": 0.3, "grad_norm": 1.0}, ["KL is exactly 0"]),
        ({"ppo_kl": 0.0, "kl_loss_at_1": 0.3, "grad_norm": 1.0}, ["KL is exactly 0"]),
        ({"kl_loss": 0.0, "grad_norm": 1.0, "grad_norm_again": 1e9}, ["grad_norm in bounds"]),
        ({"kl_loss": 0.0, "grad_norm_at_0": 1.0, "grad_norm_at_1": math.nan}, ["grad_norm in bounds"]),
        ({"kl_loss": 0.0}, ["grad_norm in bounds"]),
    ],
)
def test_the_first_step_is_held_to_every_telling(tmp_path: Path, metrics: dict[str, float], failing: list[str]) -> None:
    """KL and gradient norm that were told again, or by a rank of its own, count."""
    proofs = first_step_checks(write(tmp_path / "t", [rows(**metrics)]), 100.0)
    assert [proof.name.removeprefix("step 0: ") for proof in proofs if not proof.passed] == failing


def test_a_critic_that_trains_alone_first_is_no_policy(tmp_path: Path) -> None:
    """The policy's first update is judged, whichever step it is; one of the critic alone has no gradient norm of it."""
    alone = {"critic/grad_norm": 1.0, "kl_loss": 0.0}
    steps = [rows(**alone), rows(kl_loss=0.0, grad_norm=1e9), rows(kl_loss=0.5, grad_norm=1.0)]
    proofs = first_step_checks(write(tmp_path / "t", steps), 100.0)
    assert [proof.name for proof in proofs if not proof.passed] == ["step 1: grad_norm in bounds"]
    proofs = first_step_checks(write(tmp_path / "alone", [rows(**alone), rows(**alone)]), 100.0)
    assert [proof.name for proof in proofs if not proof.passed] == ["step 0: grad_norm in bounds"]


def test_a_golden_run_shows_advantages_of_each_rank_and_no_bad_number(tmp_path: Path) -> None:
    """Advantages that are constant on every rank are constant; a printed loss that is NaN is not finite."""
    grad, kept = column("grad", "w", 1.0), {"loss": 1.0}
    apart = [grad, column("input", "advantages@0", 0.0, 0.0), column("input", "advantages@1", 0.0, 0.0, 0.0)]
    failing = [p.name for p in not_vacuous(write(tmp_path / "a", [apart])) if not p.passed]
    assert "advantages are not constant" in failing
    told_apart = [grad, column("input", "advantages@0", 0.0, 0.0), column("input", "advantages@1", 0.0, 1.0)]
    assert "advantages are not constant" not in [
        p.name for p in not_vacuous(write(tmp_path / "b", [told_apart])) if not p.passed
    ]
    printed = told(tmp_path / "c", kept, kept | {"loss": math.nan})
    assert "all values finite" in [p.name for p in not_vacuous(printed) if not p.passed]


def test_a_distance_is_not_within_where_no_element_is_kept(tmp_path: Path) -> None:
    """Of a tensor that was added up of shards a trace keeps no element: that it differs is all that is known."""
    row = column("update", "w", 1.0, 2.0)
    bare, other = (replace(r, sketch=b"", values=None) for r in (row, column("update", "w", 1.0, 3.0)))
    a, b, same = (write(tmp_path / name, [[r]]) for name, r in (("a", bare), ("b", other), ("c", bare)))
    ulp = parse_predicate("ulp>4", tmp_path)
    assert first_violation(ulp, a, b) is not None and first_violation(ulp, a, same) is None


@pytest.mark.parametrize("back", [False, True])
def test_a_tensor_of_shards_differs_from_a_whole_one(tmp_path: Path, back: bool) -> None:
    """Where one side alone has shards, as after a commit that shards the model, the size is not known, in both ways."""
    whole = column("update", "w", 1.0, 2.0)
    sharded = replace(column("update", "w", 1.0, 3.0), sketch=b"", values=None)
    a, b = (write(tmp_path / name, [[r]]) for name, r in (("a", whole), ("b", sharded)))
    first = (compare(b, a) if back else compare(a, b)).divergence
    assert first is not None and (first.signal, str(first.magnitude)) == ("w", "not measured")


def test_a_mask_of_all_ranks_is_the_mask_of_each(tmp_path: Path) -> None:
    """KL over ranks apart counts the tokens that the one mask of all ranks keeps."""
    mask = column("input", "loss_mask", 1, 0, 0, 0, dtype=torch.int64)
    sides = []
    for name, moved, masked in (("a", 0.5, 0.5), ("b", 0.625, 0.5), ("c", 0.5, 3.0)):
        ranks = [column("forward", f"log_probs@{rank}", moved, masked, 0.5, 0.5) for rank in (0, 1)]
        sides.append(write(tmp_path / name, [[mask, *ranks]]))
    kl = kl_of_step(sides[0], sides[1], 0)
    assert kl is not None and kl[0] == -0.125
    assert kl_of_step(sides[0], sides[2], 0) == (0.0, 0.0)


def test_a_part_of_a_trace_is_a_trace(tmp_path: Path) -> None:
    """It has the first steps, their rows and chain, no sign of how the program ended, and no value of a later step."""
    steps = [[column("update", "w", value), metric_row("loss", "loss", value)] for value in (1.0, 2.0, math.nan)]
    whole = write(tmp_path / "t", steps)
    for trace in (whole, sealed(whole)):
        trace.end = {**(trace.end or {}), "stopped": True}
        part = trace.until(2)
        assert [record.step for record in part.steps] == [0, 1] and trace.until(3) is trace
        assert part.rows(1) == trace.rows(1) and part.chain == trace.steps[1].chain
        assert part.first_nonfinite() is None and trace.first_nonfinite() == (2, "update", "w")
        assert part.end is not None and not {"exit", "spent", "stopped"} & part.end.keys()


def sealed(trace: Trace) -> Trace:
    seal(trace.directory)
    return Trace(trace.directory)


def test_a_mask_of_floats_counts_what_is_not_zero() -> None:
    """-0.0 is 0, whatever its bits are."""
    mask = column("input", "loss_mask", 1.0, -0.0, 0.0)
    assert kept(mask, column("forward", "log_probs", 1.0, 2.0, 3.0)).tolist() == [True, False, False]


def test_the_spread_of_what_a_run_does_not_tell_has_no_end(tmp_path: Path) -> None:
    """Noise is the widest spread at a step; of what is absent from a run, or not finite, there is no bound."""
    steps = {"a": {"loss": 1.0, "kl": 0.5, "lr": 1.0}, "b": {"loss": 1.5, "lr": math.nan}}
    runs = [told(tmp_path / name, metrics, {"loss": 2.0}) for name, metrics in steps.items()]
    spread = measure_noise(runs)["spread"]
    assert {name: decode_float(value) for name, value in spread.items()} == {
        "kl": math.inf,
        "loss": 0.5,
        "lr": math.inf,
    }


def test_what_dvc_shows_of_a_metric_is_of_the_last_step(tmp_path: Path) -> None:
    """Where a replay ends with NaN, no older number of it is put into the metrics of `golden verify`."""
    golden, run = (
        told(tmp_path / "a", {"loss": 1.0}, {"loss": 2.0}),
        told(tmp_path / "b", {"loss": 1.0}, {"loss": math.nan}),
    )
    result = SimpleNamespace(golden=SimpleNamespace(trace=golden), comparison=compare(golden, run), agrees=False)
    assert _small(result) == {"agrees": 0, "steps": 2, "divergent_step": 1}


def test_one_metric_more_hides_nothing(tmp_path: Path) -> None:
    """What the baseline tells later counts in a shorter run too; a tensor that is gone is no metric of its name."""
    a = told(tmp_path / "a", {"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0, "eval": 0.5})
    b = told(tmp_path / "b", {"loss": 1.0}, {"loss": 2.0, "eval": 0.5})
    assert not compare(a, b).equal
    shown, printed = column("input", "adv", 1.0, 2.0), metric_row("loss", "adv", 1.5)
    with_column = write(tmp_path / "c", [[metric_row("loss", "loss", 1.0), shown]])
    without = write(tmp_path / "d", [[metric_row("loss", "loss", 1.0), printed]])
    assert not compare(with_column, without).equal


@pytest.mark.parametrize(
    ("ranks", "more", "new"),
    [
        (1, "pass@8", "pass@8"),
        (1, "loss#val", "loss#val"),
        (4, "pass@8", "pass@8"),
        (16, "pass@8", ""),  # rank 8, which had told nothing
        (1, "loss#1", "loss once more"),
        (2, "kl@1", "kl"),
    ],
)
def test_a_number_in_a_name_may_be_no_rank(tmp_path: Path, ranks: int, more: str, new: str) -> None:
    """`pass@8` beside `pass@1` is one metric more, unless so many ranks trained that one of them may have told it."""
    a, b = (
        told(tmp_path / "a", {"loss": 1.0, "pass@1": 1.0}),
        told(tmp_path / "b", {"loss": 1.0, "pass@1": 1.0, more: 1.0}),
    )
    for trace in (a, b):
        trace.header = replace(trace.header, identity={"host": {}, "layout": {"ranks": str(ranks)}})
    comparison = compare(a, b)
    assert comparison.equal is bool(new)
    assert not new or str(comparison.looked).endswith(f"1 column is written by one side only: {new}")


@pytest.mark.parametrize(
    ("more", "equal"),
    [
        ([{"loss": 1.0, "epoch": 0.5}, {"loss": 2.0, "epoch": 1.0}], True),
        ([{"loss": 1.0}, {"loss": 2.0, "epoch": 1.0}], True),
        ([{"loss": 1.0, "epoch": 0.5, "epoch#1": 0.6}, {"loss": 2.0}], True),
        ([{"loss": 1.0, "loss#1": 2.0}, {"loss": 3.0}], False),
        ([{"loss": 1.0, "epoch": 0.5}, {"loss": 3.0}], False),
        ([{"loss": 1.0, "epoch": math.nan}, {"loss": 2.0}], False),
    ],
    ids=str,
)
def test_one_metric_more_is_no_difference(tmp_path: Path, more: list[dict[str, float]], equal: bool) -> None:
    """What the baseline tells in no step is named, and moves no number."""
    a, b = told(tmp_path / "a", {"loss": 1.0}, {"loss": 2.0}), told(tmp_path / "b", more[0], more[1])
    comparison = compare(a, b)
    assert comparison.equal is equal
    assert not equal or str(comparison.looked) == "1 metric; 1 column is written by one side only: epoch"
    assert not compare(b, a).equal  # one that is gone is a difference


def test_what_is_planted_is_a_parameter_also_where_ranks_hold_parts() -> None:
    """A gradient and a weight of one rank serve where no rank has a whole one, as under FSDP's flat parameters.

    So do complex ones, and those of 8 bits.
    """
    value = column("update", "_flat_param@0", 1.0)
    rows = [replace(value, phase="grad"), value, replace(value, name="step/_flat_param")]
    trace = SimpleNamespace(rows=lambda _: rows, steps=[SimpleNamespace(step=0, metrics={})])
    wanted = [(0, "grad", "_flat_param@0"), (0, "update", "_flat_param@0")]
    assert perturbations(trace, 1, ("grad", "update")) == wanted  # type: ignore[arg-type]
    for dtype in ("complex64", "float8_e4m3fn"):
        trace.rows = lambda _, dtype=dtype: [replace(row, dtype=dtype) for row in rows]
        assert perturbations(trace, 1, ("grad", "update")) == wanted  # type: ignore[arg-type]
    trace.rows = lambda _: rows
    rows += [replace(value, name="head"), replace(value, phase="grad", name="head")]
    assert perturbations(trace, 1, ("grad", "update"))[0] == (0, "grad", "head")  # type: ignore[arg-type]


def test_nothing_is_planted_in_what_a_scaler_skipped(tmp_path: Path) -> None:
    """Nor in what is not finite, where one ULP is none: the first step that serves has it, or the cure is named."""
    start, skipped = column("input", "start/w", math.inf, 1.0), metric_row("update", "skipped", 1.0)
    gradients = {bad: [column("grad", "v", 1.0), column("grad", "w", bad, 1.0)] for bad in (math.inf, 1.0)}
    after = [column("update", "v", 1.0), column("update", "w", 1.0)]
    steps = [[start, *gradients[math.inf], *after, skipped], [*gradients[1.0], *after, skipped],
             [*gradients[math.inf], *after], [*gradients[1.0], *after]]  # fmt: skip
    trace = write(tmp_path / "trace", steps)
    assert perturbations(trace, 4, ("grad", "update")) == [(2, "grad", "v"), (2, "update", "w")]
    with pytest.raises(ReproError, match=r"of a proof, or a gradient scaler skipped them: raise case\.proof_steps"):
        perturbations(trace, 2, ("grad", "update"))


def test_parameters_that_moved_are_counted_without_gradients(tmp_path: Path) -> None:
    """What the run starts with is a parameter, whether or not its gradient was read; its copy in fp32 is none more."""
    start = [column("input", "start/w", 1.0), column("input", "start/main/w", 1.0), column("input", "start/v", 1.0)]
    after = [column("update", "w", 2.0), column("update", "main/w", 2.0), column("update", "v", 1.0)]
    proofs = {proof.name: proof for proof in not_vacuous(write(tmp_path / "trace", [[*start, *after]]))}
    assert proofs["parameters moved"].passed
    assert proofs["parameters moved"].detail == "1 of 2 parameters changed"
    assert not proofs["gradients are not all zero"].passed


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.complex128, torch.float8_e4m3fn]
)
def test_one_ulp_is_planted_wherever_a_tensor_lies(dtype: torch.dtype) -> None:
    """Channels last, transposed, one number: the first element moves, and no other."""
    base = torch.arange(1, 61).to(dtype)
    for value in (base.reshape(1, 3, 4, 5).to(memory_format=torch.channels_last), base.reshape(12, 5).T, base[0]):
        before = value.clone()
        perturbed_by_one_ulp(value)
        moved = (value.to(torch.complex128) != before.to(torch.complex128)).reshape(-1)
        assert moved[0] and int(moved.sum()) == 1
    with pytest.raises(ReproError, match="with an element"):
        perturbed_by_one_ulp(torch.empty(0))

"""Signals under other names: matched by their bits, one to one, over the whole run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_kit import RAM, tensor_row, write

from repro_golden.case.file import Bound, Compare
from repro_golden.compare.renames import aligned
from repro_golden.compare.traces import compare, first_difference
from repro_golden.trace import Row, Trace
from repro_golden.trace.writer import metric_row

Step = list[Row]
Changed = Mapping[tuple[int, str], bytes]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        yield Path(folder)


def run_of(names: Sequence[str], steps: int = 3, changed: Changed | None = None) -> list[Step]:
    """What a program shows of its parameters: the k-th has bits of its own, biases begin with zeros.

    Args:
        names: Of the parameters.
        steps: How many.
        changed: Bits of a gradient, by step and name, in place of its own.
    """
    run = []
    for step in range(steps):
        rows = []
        if step == 0:
            begin = [bytes(4) if "bias" in name else bytes([k, 1, 1, 1]) for k, name in enumerate(names)]
            rows += [tensor_row("input", f"start/{name}", bits) for name, bits in zip(names, begin, strict=True)]
        for k, name in enumerate(names):
            bits = (changed or {}).get((step, name), bytes([k, step, 2, 2]))
            rows.append(tensor_row("grad", name, bits))
        rows.append(metric_row("loss", "loss", 0.5 + step))
        for k, name in enumerate(names):
            rows.append(tensor_row("update", name, bytes([k, step, 3, 3])))
            rows.append(tensor_row("update", f"exp_avg/{name}", bytes([k, step, 4, 4])))
        run.append(rows)
    return run


def two(tmp_path: Path, a: list[Step], b: list[Step]) -> tuple[Trace, Trace]:
    return Trace(write(tmp_path / "a", a)), Trace(write(tmp_path / "b", b))


OLD = ["fc.weight", "fc.bias", "head.weight", "head.bias"]


@pytest.mark.parametrize(
    ("new", "text"),
    [
        (["proj.weight", "proj.bias", "head.weight", "head.bias"], "8 signals were renamed (fc.* -> proj.*)"),
        ([f"model.{name}" for name in OLD], "16 signals were renamed (* -> model.*)"),
        (
            ["b.weight", "b.bias", "a.weight", "a.bias"],
            "16 signals were renamed (fc.* -> b.*, head.* -> a.*)",
        ),
        (["proj.weight", *OLD[1:]], "4 signals were renamed (fc.weight -> proj.weight)"),
    ],
)
def test_a_rename_is_no_difference(tmp_path: Path, new: list[str], text: str) -> None:
    """Signals with the same bits in every step under other names agree, and the renames are told as those of modules.

    A bias that begins with zeros, as all do, goes with its module.
    """
    a, b = two(tmp_path, run_of(OLD), run_of(new))
    comparison = compare(a, b)
    assert comparison.equal
    assert str(comparison.renames) == text
    assert dict(comparison.renames.names) == {x: y for x, y in zip(OLD, new, strict=True) if x != y}
    assert not compare(a, b, Compare(names="strict")).equal


def test_what_changes_after_a_rename_is_named(tmp_path: Path) -> None:
    """A change in a renamed model is found at its step and phase, under both names."""
    new = [name.replace("fc", "proj") for name in OLD]
    a, b = two(tmp_path, run_of(OLD, 5), run_of(new, 5, {(3, "proj.weight"): b"diff"}))
    divergence = first_difference(a, b)
    assert divergence is not None
    assert str(divergence).startswith("step 3, grad, fc.weight (now proj.weight)")
    assert divergence.signals == [(3, "grad", "fc.weight"), (3, "grad", "proj.weight")]
    assert divergence.differing == {"grad": 1}


def test_a_change_in_the_first_step_of_a_renamed_model_is_named(tmp_path: Path) -> None:
    """Equal weights at the start are enough to know a parameter by, so a gradient that differs has its old name."""
    new = [name.replace("fc", "proj") for name in OLD]
    a, b = two(tmp_path, run_of(OLD), run_of(new, changed={(0, "proj.bias"): b"diff"}))
    assert str(first_difference(a, b)).startswith("step 0, grad, fc.bias (now proj.bias)")


def test_contents_that_two_names_exchanged_are_a_change(tmp_path: Path) -> None:
    """Names that both runs have are compared with each other, also where their contents changed places."""
    swapped = [replace(row, name={"fc.weight": "head.weight", "head.weight": "fc.weight"}.get(row.name, row.name))
               for row in run_of(OLD)[0]]  # fmt: skip
    a, b = two(tmp_path, run_of(OLD, 1), [swapped])
    comparison = compare(a, b)
    assert comparison.divergence is not None
    assert (comparison.divergence.phase, comparison.divergence.signal) == ("grad", "fc.weight")
    assert not comparison.renames


BESIDE = {
    "buffers": ("update", "buffer/fc.running_mean", "buffer/head.running_mean"),
    "columns": ("forward", "log_probs", "ref_log_probs"),
    "tensors of a file": ("update", "saved/last.pt/model.fc.weight", "saved/last.pt/model.head.weight"),
}


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_what_is_not_trained_changes_places_with_what_is(tmp_path: Path, beside: tuple[str, str, str]) -> None:
    """By itself its exchange is a change; it is a rename where parameters of its modules, and gradients, go with it."""
    phase, *names = beside

    def shown(given: Sequence[str], columns: Sequence[str]) -> list[Step]:
        more = [tensor_row(phase, name, bytes([9, k, 9, 9])) for k, name in enumerate(columns)]
        return [[*rows, *more] if phase == "update" else [*more, *rows] for rows in run_of(given)]

    a, b = two(tmp_path, shown(OLD, names), shown(OLD, names[::-1]))
    divergence = compare(a, b).divergence
    assert divergence is not None and (divergence.step, divergence.signal) == (0, names[0])
    layers = [f"encoder.{k}.{name}" for k in (0, 1) for name in ("weight", "bias")]
    beside = [name.replace("fc", "decoder.0").replace("head", "decoder.1") for name in names]
    other = [*layers[2:], *layers[:2]]
    c, d = Trace(write(tmp_path / "d", shown(layers, beside))), Trace(write(tmp_path / "e", shown(other, beside[::-1])))
    assert not compare(c, d).equal, "another module's parameters have changed places, and not its own"
    renamed = Trace(write(tmp_path / "c", shown([*OLD[2:], *OLD[:2]], names[::-1])))
    assert compare(a, renamed).equal is (phase == "update"), "columns are no module's"


def test_a_name_goes_with_one_name_in_every_phase(tmp_path: Path) -> None:
    """Two renamed parameters whose gradients changed places are a change, though every bit is there."""
    names = ["a.weight", "b.weight"]
    step = run_of(names, 1)[0]
    other = {"a.weight": "y.weight", "b.weight": "x.weight"}
    exchanged = [
        replace(row, name=other[row.name]) if row.phase == "grad" else replace(
            row, name=row.name.replace("a.weight", "x.weight").replace("b.weight", "y.weight"))
        for row in step
    ]  # fmt: skip
    a, b = two(tmp_path, [step], [[r if r.dtype != "metric" else metric_row("loss", "loss", 0.5) for r in exchanged]])
    comparison = compare(a, b)
    assert comparison.divergence is not None
    assert comparison.divergence.phase == "grad"


def test_places_are_no_names(tmp_path: Path) -> None:
    """Parameters outside of modules are called by their place, so another order of them is a rename."""
    old = [f"param_groups.0.{k}" for k in range(4)]
    new = [old[k] for k in (2, 0, 3, 1)]
    a, b = two(tmp_path, run_of(old), run_of(new))
    comparison = compare(a, b)
    assert comparison.equal
    assert dict(comparison.renames.names) == dict(zip(old, new, strict=True))
    c = Trace(write(tmp_path / "c", run_of(new, changed={(1, "param_groups.0.3"): b"diff"})))
    assert str(first_difference(a, c)).startswith("step 1, grad, param_groups.0.2 (now param_groups.0.3)")


def test_a_place_keeps_its_parameter(tmp_path: Path) -> None:
    """Places whose contents change later on are not dealt out anew: the order is the first step's."""
    old = [f"param_groups.0.{k}" for k in range(3)]
    changed = {(2, old[0]): bytes([1, 2, 2, 2]), (2, old[1]): bytes([0, 2, 2, 2])}  # exchanged
    a, b = two(tmp_path, run_of(old), run_of(old, changed=changed))
    comparison = compare(a, b)
    assert comparison.divergence is not None
    assert (comparison.divergence.step, comparison.divergence.signal) == (2, old[0])
    assert not comparison.renames


def test_an_optimizers_place_in_a_checkpoint_is_no_name(tmp_path: Path) -> None:
    """Lightning saves optimizers in the order of a list; an order that changes within the run is a change."""

    def saved(*orders: Sequence[int], changed: int = 9) -> list[Step]:
        steps = run_of(OLD)
        for at, order in enumerate(orders, start=3 - len(orders)):
            for place, k in enumerate(order):
                state, rate = f"optimizer_states.{place}.state.0.exp_avg", f"floats[lr_schedulers.{place}.base_lrs]"
                steps[at].append(tensor_row("update", f"saved/last.ckpt/{state}", bytes([k, at, 5])))
                steps[at].append(tensor_row("update", f"saved/last.ckpt/{rate}", bytes([k, min(changed, at)])))
        return steps

    a, b = two(tmp_path, saved([0, 1], [0, 1]), saved([1, 0], [1, 0]))
    comparison = compare(a, b)
    assert comparison.equal and comparison.renames.signals == 4
    assert str(comparison.renames).startswith("4 signals were renamed (lr_schedulers.0 -> lr_schedulers.1, ")
    for name, other in {"late": saved([0, 1], [1, 0]), "back": saved([1, 0], [0, 1])}.items():
        assert not compare(a, Trace(write(tmp_path / name, other))).equal
    moved = first_difference(a, Trace(write(tmp_path / "moved", saved([1, 0], [1, 0], changed=1))))
    assert moved is not None and (moved.step, moved.signal) == (2, "saved/last.ckpt/floats[lr_schedulers.0.base_lrs]")


def test_one_parameter_more_moves_the_places(tmp_path: Path) -> None:
    """A parameter that is put among others is the one that was added."""
    old = [f"param_groups.0.{k}" for k in range(3)]
    rows = run_of(old, 1)[0]
    moved = [replace(row, name=row.name.replace("0.2", "0.3").replace("0.1", "0.2")) for row in rows]
    a, b = two(tmp_path, [rows], [[*moved, tensor_row("input", "start/param_groups.0.1", b"more")]])
    assert str(first_difference(a, b)) == "step 0, input, start/param_groups.0.1 (not observed by the baseline)"


@pytest.mark.parametrize("optimizers", [("gen", "disc"), ("zgen", "disc")])
def test_the_number_of_an_optimizer_is_no_name(tmp_path: Path, optimizers: tuple[str, str]) -> None:
    """Two optimizers are counted in the order of their parameters' names, so a rename may exchange their numbers."""

    def rows(first: str, *, swapped: bool) -> list[Step]:
        run = []
        for step in run_of([first, "disc.weight"]):
            rows = []
            for row in step:
                here = row.name.endswith(first)
                head, slash, tail = row.name.rpartition("/")
                prefix = "optimizer.1/" if here == swapped and row.phase in ("grad", "update") else ""
                rows.append(replace(row, name=f"{prefix}{head}{slash}{tail}"))
            run.append(rows)
        return run

    new = optimizers[0]
    a, b = two(tmp_path, rows("gen.weight", swapped=False), rows(f"{new}.weight", swapped=True))
    comparison = compare(a, b)
    assert comparison.equal
    assert comparison.renames


def rounds_of(names: Sequence[str], steps: int = 4, changed: Changed | None = None) -> list[Step]:
    """Optimizers that step in turn, each with a parameter, numbered by their names; the last of a round shows noise.

    Args:
        names: Of each optimizer's parameter, in the order in which they were made.
        steps: Of all of them.
        changed: Bits of a gradient, by round and name, in place of its own.
    """
    verdicts = []
    for step in range(steps):
        round_, place = divmod(step, len(names))
        name = sorted(names)[place]
        prefix, index = f"optimizer.{place}/" if place else "", names.index(name)
        rows = [tensor_row("input", f"start/{prefix}{name}", bytes([index, 9]))] if round_ == 0 else []
        rows += [
            tensor_row("grad", f"{prefix}{name}", (changed or {}).get((round_, name), bytes([index, round_, 1]))),
            metric_row("grad", f"{prefix}grad_norm", 0.1 + index + round_),
            metric_row("loss", "loss", 0.7 + index + round_),
            tensor_row("update", f"{prefix}{name}", bytes([index, round_, 2])),
            tensor_row("update", f"{prefix}exp_avg/{name}", bytes([index, round_, 3])),
            metric_row("update", f"{prefix}lr", 0.3 + index),
        ]
        if place == len(names) - 1:
            rows += [tensor_row("update", name, bytes([round_, 4])) for name in ("buffer/mean", "rng/torch")]
        verdicts.append(rows)
    ends = [(f"optimizer.{place}/" if place else "", name) for place, name in enumerate(sorted(names))]
    verdicts[-1] += [tensor_row("update", f"end/{p}{name}", bytes([names.index(name), 5])) for p, name in ends]
    verdicts[-1].append(tensor_row("update", "end/rng/torch", bytes([6])))
    return verdicts


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("body.weight", "head.weight"), ("trunk.weight", "head.weight")),
        (("a.weight", "b.weight", "c.weight"), ("d.weight", "b.weight", "a.weight")),
    ],
)
def test_a_rename_that_turns_a_round_is_no_difference(tmp_path: Path, old: list[str], new: list[str]) -> None:
    """Steps of several optimizers stand in the order of their names; a changed bit in them is told all the same."""
    a, b = two(tmp_path, rounds_of(old, 2 * len(old)), rounds_of(new, 2 * len(old)))
    comparison = compare(a, b)
    assert comparison.equal
    assert comparison.renames
    assert not compare(a, b, Compare(names="strict")).equal
    for round_ in (0, 1):
        changed = rounds_of(new, 2 * len(old), {(round_, name): b"bit" for name in new[:1]})
        divergence = first_difference(a, Trace(write(tmp_path / f"c{round_}", changed)))
        assert divergence is not None and divergence.step == 0, "a step is told under its own number"
    beside = [
        [replace(r, lanes=tensor_row("update", "x", b"other").lanes) if r.name == "rng/torch" else r for r in rows]
        for rows in rounds_of(new, 2 * len(old))
    ]
    divergence = first_difference(a, Trace(write(tmp_path / "d", beside)))
    assert divergence is not None and (divergence.step, divergence.signal) == (len(old) - 1, "rng/torch")


def test_a_count_under_another_name_is_a_rename(tmp_path: Path) -> None:
    """The number of steps, of which each group may have its own, is known by its bits as every number is."""
    a, b = ([[*run_of(OLD, 1)[0], tensor_row("update", f"number/{name}", b"1")]] for name in ("step", "count"))
    comparison = compare(*two(tmp_path, a, b))
    assert comparison.equal and dict(comparison.renames.names) == {"step": "count"}


@given(st.data())
def test_the_first_difference_is_the_programs(data: st.DataObject) -> None:
    """Of a round's steps the one that was made first is named, wherever a trace has it, and whatever was renamed."""
    names = data.draw(st.sampled_from([["a.w", "b.w"], ["a.w", "b.w", "c.w"]]))
    order = data.draw(st.permutations(range(len(names))))  # which place in the program each of a trace's steps has
    round_, place = data.draw(st.integers(0, 1)), data.draw(st.integers(0, len(names) - 1))
    size, count, shown = len(names), data.draw(st.integers(1, 2)) * len(names), data.draw(st.booleans())
    told = data.draw(st.booleans())  # whether metrics move too
    first = round_ * size + order.index(place)

    def changed(step: int, row: Row) -> Row:
        """Everything is other from then on; what lives beside the optimizers shows the end of a round."""
        turn, k = divmod(step, size)
        beside = row.name in ("buffer/mean", "rng/torch") or row.name.startswith("end/rng")
        late = (turn, size if beside else order[k]) < (round_, place)
        if late or row.phase == "input":
            return row
        if row.dtype == "metric":
            return metric_row(row.phase, row.name, 7.0 + step) if told else row
        return tensor_row(row.phase, row.name, (row.values or b"")[:-1] + b"x")

    base = rounds_of(names, count)
    other = [[changed(step, row) for row in rows] for step, rows in enumerate(base)]
    if shown:
        other = [[replace(row, name=row.name.replace(".w", ".v")) for row in rows] for rows in other]
    rounds = [[[9, [[offset, k] for k, offset in enumerate(order)]]]]
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        a, b = (Trace(write(Path(folder) / at, steps, rounds=rounds)) for at, steps in (("a", base), ("b", other)))
        divergence = first_difference(a, b)
        left = compare(a, b, Compare(mode="bounds", bounds={"loss": Bound(atol=0.0, rtol=0.0)})).divergence
    if first >= count:
        assert divergence is None
        assert left is None
        return
    assert divergence is not None
    where = order.index(place)
    signal = (f"optimizer.{where}/" if where else "") + names[where]
    named = ("loss", "loss") if told else ("grad", signal)
    assert (divergence.step, divergence.phase, divergence.signal, divergence.kind) == (first, *named, "value")
    assert (left and (left.step, left.signal)) == ((first, "loss") if told else None)


def test_what_lives_beside_the_optimizers_is_as_after_the_last_of_a_round(tmp_path: Path) -> None:
    """It stands with the last in a trace's order, which the program may have made first: the other is named."""
    base = rounds_of(["a.w", "b.w"], 2)
    other = [[tensor_row("update", row.name, b"x") if row.name in ("a.w", "buffer/mean") and row.phase == "update"
              else row for row in rows] for rows in base]  # fmt: skip
    a, b = (Trace(write(tmp_path / at, steps, rounds=[[[1, [[1, 0], [0, 1]]]]])) for at, steps in
            (("a", base), ("b", other)))  # fmt: skip
    assert str(first_difference(a, b)).startswith("step 0, update, a.w ")


@pytest.mark.parametrize(
    "other",
    [
        lambda row: replace(row, dtype="int8"),
        lambda row: replace(row, shape=(2, 2)),
        lambda row: replace(row, placement="0:4"),
    ],
)
def test_another_dtype_or_shape_is_no_rename(tmp_path: Path, other: Callable[[Row], Row]) -> None:
    """Equal bytes of another dtype, shape or placement are another tensor."""
    row = tensor_row("grad", "fc.weight", b"bits")
    a, b = two(tmp_path, [[row]], [[other(replace(row, name="proj.weight"))]])
    assert not compare(a, b).equal


def test_the_same_bits_in_another_phase_are_no_rename(tmp_path: Path) -> None:
    """A tensor that is gone from one phase and shown in another is missing there and added here."""
    a, b = two(tmp_path, [[tensor_row("grad", "x", b"bits")]], [[tensor_row("update", "y", b"bits")]])
    comparison = compare(a, b)
    assert comparison.divergence is not None
    assert comparison.divergence.kind == "missing"


def test_a_signal_without_counterpart_is_missing(tmp_path: Path) -> None:
    """Where one of several renamed signals is gone, the rest is matched and that one named."""
    new = ["proj.weight", "proj.bias", "head.weight", "head.bias"]
    b = [[row for row in step if row.name != "exp_avg/proj.bias"] for step in run_of(new)]
    divergence = first_difference(*two(tmp_path, run_of(OLD), b))
    assert str(divergence) == "step 0, update, exp_avg/fc.bias (observed by the baseline only)"


def test_a_kind_of_state_may_be_renamed(tmp_path: Path) -> None:
    """The name of an optimizer's state is one of all of its parameters at once."""
    b = [[replace(r, name=r.name.replace("exp_avg/", "momentum/")) for r in step] for step in run_of(OLD)]
    comparison = compare(*two(tmp_path, run_of(OLD), b))
    assert comparison.equal
    assert str(comparison.renames) == "4 signals were renamed (exp_avg/ -> momentum/)"


@pytest.mark.parametrize(("value", "equal"), [(0.123456789, True), (1.0, False), (float("nan"), False)])
def test_a_metric_is_known_by_a_value_that_no_other_has(tmp_path: Path, value: float, equal: bool) -> None:
    """A renamed metric is matched like a tensor, but for numbers that any metric may be, such as 1."""
    a, b = two(tmp_path, [[metric_row("loss", "loss", value)]], [[metric_row("loss", "train/loss", value)]])
    assert compare(a, b).equal is equal


def test_no_row_is_read_where_nothing_was_renamed(tmp_path: Path) -> None:
    """Runs that agree are compared by their chains alone."""
    a, b = two(tmp_path, run_of(OLD), run_of(OLD))
    for trace in (a, b):
        (trace.directory / "rank-00000.log").unlink()
    assert compare(a, b).equal
    assert aligned(a, b).trace is b


NAMES = st.lists(st.sampled_from([f"{m}.{p}" for m in "abcdefg" for p in ("weight", "bias")]), min_size=1, unique=True)


@st.composite
def renamed(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Names, and other names for them."""
    old = draw(NAMES)
    return old, list(draw(st.permutations([f"new{k}.w" for k in range(len(old))])))


@given(renamed(), st.integers(1, 4), st.data())
def test_every_rename_agrees_and_every_change_is_found(
    names: tuple[list[str], list[str]], steps: int, data: st.DataObject
) -> None:
    """Any renaming of all names agrees and is told; with one fingerprint changed, its step and old name are told."""
    old, new = names
    to = dict(zip(old, new, strict=True))

    def rename(step: Step) -> Step:
        tails = [row.name.rpartition("/") for row in step]
        return [replace(r, name=f"{h}{s}{to.get(t, t)}") for r, (h, s, t) in zip(step, tails, strict=True)]

    base = run_of(old, steps)
    other = [data.draw(st.permutations(rename(step))) for step in base]
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        a, b = two(Path(folder), base, other)
        comparison = compare(a, b)
        assert comparison.equal
        assert dict(comparison.renames.names) == to
        at = data.draw(st.integers(0, steps - 1))
        k = data.draw(st.integers(0, len(base[at]) - 1))
        signal = base[at][k]
        changed = replace(signal, lanes=tensor_row("grad", "", b"changed").lanes)
        wrong = [
            rename([changed if (i, j) == (at, k) else row for j, row in enumerate(step)]) for i, step in enumerate(base)
        ]
        c = Trace(write(Path(folder) / "c", wrong))
        divergence = compare(a, c).divergence
        assert divergence is not None
        assert (divergence.step, divergence.phase) == (at, signal.phase)
        known = at > 0 or signal.phase != "input"  # what differs where it is first seen has no counterpart
        assert not known or divergence.signal == signal.name


def test_what_ranks_no_longer_agree_on_is_no_new_name(tmp_path: Path) -> None:
    """A number of all ranks that becomes one of each was not renamed to that of rank 0, whose bits are the same."""
    numbers = {"loss": 0.3, "pg_loss": 0.5, "reward": 1.5}
    by_rank = {"loss@0": 0.3, "loss@1": 0.4, "pg_loss@0": 0.5, "pg_loss@1": 0.6, "reward": 1.5}
    sides = [
        Trace(write(tmp_path / name, [[metric_row("loss", key, value + step) for key, value in side.items()]
              for step in range(2)]))
        for name, side in (("a", numbers), ("b", by_rank))
    ]  # fmt: skip
    divergence = compare(*sides).divergence
    assert divergence is not None
    assert (divergence.step, divergence.signal) == (0, "loss")

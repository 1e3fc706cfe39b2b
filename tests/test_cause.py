"""The operation that began a difference: streams by hand for each kind, and random programs with one planted change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
from cause_kit import PRIME, SIGNAL, Ref, Tape, cause, line, lines

from repro_bisect.explain.cause import Kind, find_cause


def pair() -> tuple[tuple[Tape, Ref, Ref], tuple[Tape, Ref, Ref]]:
    """Two tapes that begin with the same two tensors."""
    a, b = Tape(), Tape()
    return (a, a.given(11), a.given(13)), (b, b.given(11), b.given(13))


# -- each kind


def test_what_another_phase_makes_is_no_result_of_this_one() -> None:
    """The derivative of a cube is made of a square: the square that stood there before did not come to that."""
    (a, x, _), (b, u, _) = pair()
    a.show(a.neg(a.do("aten.pow", x, makes=11**2, line=2, arguments="(T0, 2)"), 3))
    a.do("aten.mul", x, makes=2 * 11, line=2, phase="backward")
    b.show(b.neg(b.do("aten.pow", u, makes=11**3, line=2, arguments="(T0, 3)"), 3))
    b.do("aten.pow", u, makes=11**2, line=2, arguments="(T0, 2.0)", phase="backward")
    answer = cause(a, b)
    assert answer.kind == "arguments" and answer.before is not None and answer.after is not None
    assert (answer.before.arguments, answer.after.arguments) == ("(T0, 2)", "(T0, 3)")


def test_equal_streams_have_no_cause() -> None:
    """Where all operations are the same, in one order, there is none."""
    (a, x, y), (b, u, v) = pair()
    a.show(a.mul(x, y, 1))
    b.show(b.mul(u, v, 1))
    assert find_cause(a.stream(), b.stream(), SIGNAL) is None
    assert find_cause(a.stream(), b.stream(), None) is None


def operation() -> tuple[Tape, Tape, Sequence[int]]:
    """A kernel that makes other bits."""
    (a, x, y), (b, u, v) = pair()
    a.show(a.neg(a.mul(x, y, 2), 3))
    b.show(b.neg(b.do("aten.mul.Tensor", u, v, makes=11 * 13 + 1, line=2), 3))
    return a, b, (2, 2)


def arguments() -> tuple[Tape, Tape, Sequence[int]]:
    """Another number beside the same tensor."""
    (a, x, _), (b, u, _) = pair()
    a.show(a.neg(a.scale(x, 2, 2), 3))
    b.show(b.neg(b.scale(u, 3, 2), 3))
    return a, b, (2, 2)


def structure() -> tuple[Tape, Tape, Sequence[int]]:
    """Another operation on the same tensors."""
    (a, x, y), (b, u, v) = pair()
    a.show(a.neg(a.mul(x, y, 2), 3))
    b.show(b.neg(b.add(u, v, 2), 3))
    return a, b, (2, 2)


def gap() -> tuple[Tape, Tape, Sequence[int]]:
    """Somebody unseen writes between two operations."""
    (a, x, y), (b, u, v) = pair()
    a.show(a.neg(a.mul(x, y, 2), 3))
    made = b.mul(u, v, 2)
    b.behind(made, 5)
    b.show(b.neg(made, 3))
    return a, b, (3, 3)


def inputs() -> tuple[Tape, Tape, Sequence[int]]:
    """The step begins with another value."""
    a, b = Tape(), Tape()
    a.show(a.neg(a.scale(a.given(7), 2, 2), 3))
    b.show(b.neg(b.scale(b.given(8), 2, 2), 3))
    return a, b, (2, 2)


def random_draw() -> tuple[Tape, Tape, Sequence[int]]:
    """Another stream of the generator."""
    (a, x, _), (b, u, _) = pair()
    a.show(a.neg(a.do("aten.bernoulli.default", x, makes=21, line=2, draws=True), 3))
    b.show(b.neg(b.do("aten.bernoulli.default", u, makes=22, line=2, draws=True), 3))
    return a, b, (2, 2)


PLANTED: dict[Kind, Callable[[], tuple[Tape, Tape, Sequence[int]]]] = {
    "operation": operation, "arguments": arguments, "structure": structure, "gap": gap, "inputs": inputs,
    "random": random_draw,
}  # fmt: skip


@pytest.mark.parametrize("touched", [False, True])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_each_kind_is_named(kind: Kind, touched: bool) -> None:
    """Kind and both operations, whether the change touched the line or is nowhere to be seen; also without a signal."""
    a, b, (before, after) = PLANTED[kind]()
    changes = ([before], [after]) if touched else ((), ())
    named = cause(a, b, *changes)
    assert lines(named) == (kind, before, after)
    assert named.operation is named.after and named.side == "after"
    assert lines(cause(a, b, *changes, signal=None)) == (kind, before, after)


def test_a_gap_is_between_the_last_writer_and_the_first_reader() -> None:
    """The two operations are those around the unseen write; where nothing wrote before, the first of them is None."""
    a, b, _ = gap()
    edges = cause(a, b).gap
    assert edges is not None and edges[0] is not None
    assert (edges[0].name, edges[1].name) == ("aten.mul.Tensor", "aten.neg.default")
    (a, x, y), (b, u, v) = pair()  # an operand that nobody wrote to says nothing, however late it was made
    for tape, left, right in ((a, x, y), (b, u, v)):
        made, late = tape.mul(left, right, 2), tape.neg(left, 3)
        if tape is b:
            tape.behind(made, 5)
        tape.show(tape.add(made, late, 4))
    edges = cause(a, b).gap
    assert edges is not None and edges[0] is not None and (line(edges[0]), line(edges[1])) == (2, 4)
    for kind in set(get_args(Kind)) - {"gap"}:
        assert cause(*PLANTED[kind]()[:2]).gap is None


def test_an_operation_that_is_only_there_on_one_side() -> None:
    """One that was put in stands in the second version, one that was taken out in the first."""
    (a, x, y), (b, u, v) = pair()
    a.show(a.mul(x, y, 2))
    b.show(b.neg(b.mul(u, v, 2), 3))
    named = cause(a, b, (), [3])
    assert (*lines(named), named.side) == ("structure", None, 3, "after")
    named = cause(b, a, [3], ())
    assert (*lines(named), named.side) == ("structure", 3, None, "before")
    assert named.operation is named.before


def test_an_operation_that_was_left_out_is_named_itself() -> None:
    """Where the second version goes on with what read its result, the one that is gone is named, not its reader.

    Two that only changed places, and one that was put in, are named where the second version has them.
    """

    def recorded(*kinds: str) -> Tape:
        tape, x, y = pair()[0]
        for kind in kinds:
            x = tape.mul(x, y, 2) if kind == "mul" else tape.neg(x, 2)
        tape.show(x)
        return tape

    named = cause(recorded("mul", "neg"), recorded("neg"), [2], [2])
    assert (named.kind, named.side, named.operation.name) == (
        "structure",
        "before",
        "aten.mul.Tensor",
    )
    named = cause(recorded("neg"), recorded("mul", "neg"), [2], [2])
    assert (named.kind, named.side, named.operation.name) == (
        "structure",
        "after",
        "aten.mul.Tensor",
    )
    assert cause(recorded("mul", "neg"), recorded("neg", "mul"), [2], [2]).side == "after"


def test_the_other_version_s_operation_is_that_in_its_place() -> None:
    """Of several beginnings on the other side the one that read the same is shown beside the answer."""
    a, b = Tape(), Tape()
    for tape, off in ((a, 0), (b, 1)):
        x, y = tape.given(11), tape.given(13)
        left = tape.do("aten.add.Tensor", x, y, makes=24 + off, line=2)
        right = tape.do("aten.add.Tensor", x, x, makes=22 + off, line=3)
        tape.show(tape.mul(left, right, 4))
    assert lines(cause(a, b, (), [3])) == ("operation", 3, 3)
    assert lines(cause(a, b, (), [2])) == ("operation", 2, 2)


def test_the_size_is_measured_where_shapes_agree() -> None:
    """The pair to measure by is the cause itself, and behind another structure the first place that both have."""
    named = cause(*arguments()[:2])
    assert named.pair == (named.before, named.after)
    named = cause(*structure()[:2])
    assert named.pair is not None and [o.name for o in named.pair] == ["aten.neg.default"] * 2


def test_what_reads_something_else_is_nothing_to_measure_by() -> None:
    """A norm of many norms and the norm of one tensor have one name and one shape, and are not one number."""
    (a, x, y), (b, u, v) = pair()
    a.show(a.neg(a.do("aten.norm", x, y, makes=5, line=2), 3))
    b.show(b.neg(b.do("aten.norm", b.do("aten.norm", u, makes=7, line=4), v, makes=8, line=4), 3))
    b.show(b.do("aten.norm", u, makes=9, line=5))
    named = cause(a, b, [2], [4])
    assert named.before is not None and named.after is not None and named.pair is not None
    assert (named.before.name, len(named.before.inputs), len(named.after.inputs)) == ("aten.norm", 2, 1)
    assert named.pair != (named.before, named.after) and len({len(o.inputs) for o in named.pair}) == 1


# -- what is passed over


def test_harmless_changes_before_the_harmful_one_are_passed_over() -> None:
    """Another order, x + x for 2 * x, a copy more and a dead operation less: none of them is named."""
    (a, x, y), (b, u, v) = pair()
    p, q = a.neg(x, 1), a.mul(x, y, 2)
    a.add(p, p, 9)  # nobody reads it
    a.show(a.mul(a.scale(a.add(p, q, 3), 2, 4), y, 5))
    q, p = b.mul(u, v, 2), b.neg(u, 1)
    r = b.add(p, b.clone(q, 6), 3)
    b.show(b.add(b.add(r, r, 4), v, 5))
    assert lines(cause(a, b)) == ("structure", 5, 5)
    assert lines(cause(a, b, [1, 2, 4, 5, 9], [1, 2, 4, 5, 6])) == ("structure", 5, 5)


def test_a_copy_right_before_the_harmful_operation_is_passed_over() -> None:
    """An operation that makes the bits that it read changes nothing, also where only the harmful one reads them."""
    (a, x, y), (b, u, v) = pair()
    a.show(a.scale(a.mul(x, y, 2), 2, 3))
    b.show(b.scale(b.clone(b.mul(u, v, 2), 4), 3, 3))
    assert line(cause(a, b, [3], [3, 4]).after) == 3
    assert line(cause(b, a, [3, 4], [3]).after) == 3


def test_an_equal_number_elsewhere_hides_nothing() -> None:
    """That a changed operation makes a value which the other version has somewhere else does not make it harmless."""
    a, b = Tape(), Tape()
    for tape, factor in ((a, 3), (b, 0)):
        x = tape.given(5)
        tape.neg(tape.given(0), 1)
        tape.show(tape.add(tape.scale(x, factor, 2), x, 3))
    assert lines(cause(a, b)) == ("arguments", 2, 2)
    assert lines(cause(a, b, [2], [2])) == ("arguments", 2, 2)


def test_views_in_between_are_looked_through() -> None:
    """A view of what differs is not named, one that looks at the same in another way is."""
    (a, x, y), (b, u, v) = pair()
    a.show(a.neg(a.view(a.mul(x, y, 2), 1, 3), 4))
    b.show(b.neg(b.view(b.add(u, v, 2), 1, 3), 4))
    assert lines(cause(a, b)) == ("structure", 2, 2)
    (a, x, y), (b, u, v) = pair()
    a.show(a.neg(a.view(a.mul(x, y, 2), 1, 3), 4))
    b.show(b.neg(b.view(b.mul(u, v, 2), 2, 3), 4))
    assert lines(cause(a, b)) == ("arguments", 3, 3)
    assert lines(cause(a, b, [3], [3])) == ("arguments", 3, 3)


def test_a_view_of_what_came_to_the_same_is_looked_through() -> None:
    """A sum for a double is harmless also where the harmful operation reads a view of it."""
    (a, x, y), (b, u, v) = pair()
    a.show(a.mul(a.view(a.scale(x, 2, 2), 1, 3), y, 4))
    b.show(b.add(b.view(b.add(u, u, 2), 1, 3), v, 4))
    assert lines(cause(a, b, [2, 4], [2, 4])) == ("structure", 4, 4)


def test_memory_that_is_written_through_a_view_has_both_makers() -> None:
    """A write in place between a view and its reader is the cause, not who made the memory or the view."""
    a, b = Tape(), Tape()
    for tape, name in ((a, "aten.add_.Tensor"), (b, "aten.sub_.Tensor")):
        base = tape.neg(tape.given(3), 1)
        seen = tape.view(base, 1, 2)
        other = tape.given(4 if tape is a else PRIME - 4)
        tape.add_(base, other, 3, name)
        tape.show(tape.neg(seen, 4))
    assert lines(cause(a, b))[1:] == (3, 3)


def test_what_is_done_once_more() -> None:
    """To the same bits it begins nothing; what it is a part of does. A write to other memory is not the same again."""
    (a, x, y), (b, u, v) = pair()
    a.show(a.neg(a.scale(a.mul(x, y, 1), 2, 2), 3))
    half = b.mul(u, v, 1)
    b.show(b.scale(b.add(half, b.mul(u, v, 2), 2), 3, 3))
    assert line(cause(a, b).after) == 3
    a, b = Tape(), Tape()
    for tape in (a, b):
        first, second, more = tape.given(3), tape.given(3), tape.given(4)
        tape.add_(first, more, 1)
        if tape is b:
            tape.add_(second, more, 2)
        tape.show(tape.mul(first, second, 3))
    assert line(cause(a, b).after) == 2


def test_only_what_leads_to_the_signal_counts() -> None:
    """Another difference, for a signal that is shown later, is not named."""
    (a, x, y), (b, u, v) = pair()
    a.scale(x, 2, 1)
    a.show(a.mul(x, y, 2))
    b.scale(u, 3, 1)
    b.show(b.add(u, v, 2))
    assert line(cause(a, b).after) == 2
    assert {line(cause(a, b, signal=None).after), *map(line, cause(a, b, signal=None).others)} >= {1, 2}


# -- what no tensor leads to


def test_a_number_that_no_operation_shows() -> None:
    """A printed loss: what differs is named all the same, wherever it leads."""
    a, b, (before, after) = operation()
    assert lines(cause(a, b, signal=("loss", "printed"))) == ("operation", before, after)


def test_a_batch_of_a_later_step_that_came_earlier_is_no_cause() -> None:
    """What a data loader's workers had ready, and no operation reads, says nothing of a number that none shows.

    What the step does read was opened for it: there a number may begin.
    """
    (a, x, y), (b, u, _) = pair()
    opens = "aten.set_.source_Storage_storage_offset"
    for tape, batches in ((a, (23,)), (b, (19, 17, 23))):
        for batch in batches:
            last = tape.do(opens, tape.do("aten.empty", makes=0, line=1), makes=batch, line=2)
        tape.show(last, ("input", "batch"))
    assert find_cause(a.stream(), b.stream(), None) is None
    a.neg(a.mul(x, y, 3), 4)
    b.neg(b.do(opens, u, makes=29, line=5), 4)
    assert lines(cause(a, b, signal=None))[2] == 5


def test_a_number_that_python_decides_by() -> None:
    """Where the way back ends at a line that nobody touched, an earlier touched one that differs is named."""
    a, b = Tape(), Tape()
    for tape in (a, b):
        x, w = tape.given(5), tape.given(7)
        counted = tape.scale(x, 2, 10) if tape is a else tape.scale(x, 3, 10)
        tape.show(tape.scale(w, tape.item(counted, 11), 20))
    assert line(cause(a, b, [10], [10]).after) == 10
    assert line(cause(a, b).after) == 20, "nothing tells that the number came from there"


def test_what_only_moved_is_named() -> None:
    """The same calls in another order, which the change touched, are named and not who gathers their results."""
    a, b = Tape(), Tape()
    for tape, order in ((a, (1, 2)), (b, (2, 1))):
        xs = {1: tape.given(5), 2: tape.given(6)}
        parts = [tape.neg(xs[k], 1) for k in order]
        made = 3 * tape.number(parts[0]) + tape.number(parts[1])
        tape.show(tape.do("aten.stack.default", *parts, makes=made, line=9))
    named = cause(a, b, [1], [1])
    assert (named.kind, line(named.operation)) == ("structure", 1)
    assert line(cause(a, b).operation) == 9


def test_a_backward_operation_is_touched_through_its_forward_one() -> None:
    """A kernel of the backward pass whose forward operation's line was touched comes before one of another line."""
    a, b = Tape(), Tape()
    for tape, off in ((a, 0), (b, 1)):
        x, g = tape.given(5), tape.given(7)
        first = tape.mul(x, x, 1)
        second = tape.mul(x, x, 2)
        backward: dict[str, Any] = {"phase": "backward", "node": "MulBackward0"}
        left = tape.do("aten.mul.Tensor", g, second, makes=50 + off, line=9, forward=1, **backward)
        right = tape.do("aten.mul.Tensor", g, first, makes=60 + off, line=9, forward=0, **backward)
        tape.show(tape.add(left, right, 9))
    for touched in (1, 2):
        named = cause(a, b, [touched], [touched])
        assert named.kind == "operation" and named.operation.forward == touched - 1
        assert len(named.others) >= 1


def test_a_backward_operation_leads_to_its_forward_one() -> None:
    """Where the backward pass asks for something else, the way leads on to the forward operation that it belongs to."""
    a, b = Tape(), Tape()
    for tape, name, makes in ((a, "exp", 25), (b, "exp2", 26)):
        x, g = tape.given(5), tape.given(7)
        tape.do(f"aten.{name}.default", x, makes=makes, line=1)
        way: dict[str, Any] = {"phase": "backward", "node": "ExpBackward0", "forward": 0}
        tape.show(tape.do("aten.mul.Tensor", g, makes=makes + 50, line=9, **way))
    named = cause(a, b, [1], [1])
    assert (line(named.operation), named.operation.phase) == (1, "forward")
    assert [line(o) for o in named.others] == [9, 9]


def test_what_comes_later_decided_nothing() -> None:
    """A touched difference behind the place where the way begins is not what that was decided by."""
    a, b = Tape(), Tape()
    for tape, factor in ((a, 2), (b, 3)):
        x = tape.given(5)
        tape.show(tape.scale(x, factor, 20))
        tape.scale(x, factor + 10, 30)
    assert line(cause(a, b, [30], [30]).after) == 20


# -- random programs

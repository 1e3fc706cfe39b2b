"""The operation that was perturbed in a random program is the one that is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cause_kit import Ref, Tape, cause, line, lines
from hypothesis import assume, event, given
from hypothesis import strategies as st


@dataclass(frozen=True)
class Step:
    """One operation of a random program, on registers.

    Attributes:
        kind: add, mul, neg, scale, view or add_.
        reads: Two registers.
        k: What it is given beside them.
        line: Its place in the source.
        off: Added to what it makes: another kernel.
    """

    kind: str
    reads: tuple[int, int]
    k: int
    line: int
    off: int = 0


INPUTS = 3
KINDS = ("add", "mul", "neg", "scale", "view", "add_")


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """Each operation reads what was there before it and makes one more register."""
    length = draw(st.integers(2, 14))
    steps = []
    for k in range(length):
        register = st.integers(0, INPUTS + k - 1)
        near = st.integers(max(0, INPUTS + k - 3), INPUTS + k - 1)  # or most would be dead
        steps.append(Step(draw(st.sampled_from(KINDS)), (draw(near), draw(register)), draw(st.integers(1, 5)), k))
    return steps


CLONES, DEAD = 100, 200  # lines of what is put in


def run(steps: Sequence[Step], rewrites: dict[int, str], late: int | None = None) -> Tape:
    """The program; `rewrites` says what is done otherwise without a change of any number, by line.

    Args:
        steps: The program.
        rewrites: ``clone``: its first operand is copied before; ``double``: x + x in the place of 2 * x; ``dead``:
            another operation before it, which nobody reads.
        late: Line of an operation that comes after its successor instead of before it.
    """
    tape = Tape()
    registers = [tape.given(number) for number in (1009, 2003, 3001)]
    made: dict[int, Ref] = dict(enumerate(registers))
    order = list(range(len(steps)))
    if late is not None:
        at = next(k for k in order if steps[k].line == late)
        order[at], order[at + 1] = order[at + 1], order[at]
    for k in order:
        made[INPUTS + k] = _made(tape, steps[k], [made[r] for r in steps[k].reads], rewrites.get(steps[k].line))
    tape.show(made[INPUTS + len(steps) - 1])
    return tape


def _made(tape: Tape, step: Step, reads: list[Ref], rewrite: str | None) -> Ref:
    a, b = reads
    if rewrite == "clone" and step.kind not in ("view", "add_"):
        a = tape.clone(a, CLONES + step.line)
    if rewrite == "dead":
        tape.neg(b, DEAD + step.line)
    if step.off:
        names = {"add": "aten.add.Tensor", "mul": "aten.mul.Tensor", "neg": "aten.neg.default"}
        total = {"add": tape.number(a) + tape.number(b), "mul": tape.number(a) * tape.number(b), "neg": -tape.number(a)}
        operands = (a,) if step.kind == "neg" else (a, b)
        return tape.do(names[step.kind], *operands, makes=total[step.kind] + step.off, line=step.line)
    if step.kind == "scale":
        doubled = rewrite == "double" and step.k == 2
        return tape.add(a, a, step.line) if doubled else tape.scale(a, step.k, step.line)
    if step.kind == "neg":
        return tape.neg(a, step.line)
    if step.kind == "same":  # dropped: who reads it reads what it read
        return a
    if step.kind == "view":
        return tape.view(Ref(a.memory), step.k, step.line)
    if step.kind == "add_":
        return tape.add_(Ref(a.memory), b, step.line)
    return tape.add(a, b, step.line) if step.kind == "add" else tape.mul(a, b, step.line)


def perturbed(step: Step, how: str) -> Step | None:
    """One operation changed; None where it cannot be in this way."""
    if how == "kernel" and step.kind in ("add", "mul", "neg"):
        return replace(step, off=1)
    if how == "argument" and step.kind in ("scale", "view"):
        return replace(step, k=step.k + 1)
    if how == "other" and step.kind in ("add", "mul"):
        return replace(step, kind={"add": "mul", "mul": "add"}[step.kind])
    if how == "dropped" and step.kind in ("neg", "scale", "add", "mul"):
        return replace(step, kind="same")
    return None


def free(steps: Sequence[Step], k: int) -> bool:
    """Whether an operation and its successor have nothing to do with each other."""
    step, other = steps[k], steps[k + 1]
    writes = {step.kind, other.kind} & {"add_", "same"}
    return not writes and INPUTS + k not in other.reads


@given(
    steps=programs(),
    how=st.sampled_from(["kernel", "argument", "other", "dropped"]),
    data=st.data(),
)
def test_the_planted_operation_is_named(steps: list[Step], how: str, data: st.DataObject) -> None:
    """Of any program with one changed operation and any harmless rewrites before it, the changed one is named.

    A dropped one is named in the first version. The change touched the rewritten lines too.
    """
    places = [k for k, step in enumerate(steps) if perturbed(step, how)]
    assume(places and not (how == "dropped" and any(step.kind == "add_" for step in steps)))  # or it adds elsewhere
    at = data.draw(st.sampled_from(places), label="changed")
    changed = perturbed(steps[at], how)
    assert changed is not None
    rewrites = {
        k: data.draw(st.sampled_from(["clone", "double", "dead"]))
        for k in sorted(data.draw(st.sets(st.integers(0, at), max_size=3), label="rewritten"))
    }
    able = [k for k in range(at) if free(steps, k)]
    late = data.draw(st.sampled_from([None, *able])) if able else None
    a, b = run(steps, {}), run([*steps[:at], changed, *steps[at + 1 :]], rewrites, late)
    assume(a.operations[-1].inputs[0].content != b.operations[-1].inputs[0].content)
    line_of = {o.key: line(o) for o in a.operations}  # where two lines do the same, either of them is an answer
    assume(len(line_of) == len(a.operations) and all(line_of.get(o.key, line(o)) == line(o) for o in b.operations))
    # ... and where the change makes a number that the first version makes on another way, values cannot tell
    sides = (b, a) if how == "dropped" else (a, b)
    there = {value.key for o in sides[0].operations for value in (*o.inputs, *o.outputs)}
    assume(
        all(
            value.key not in there for o in sides[1].operations if line(o) == at for value in o.outputs if value.content
        )
    )
    touched = [place for k in rewrites for place in (k, CLONES + k, DEAD + k)] + (
        [] if late is None else [late, late + 1]
    )
    named = cause(a, b, [at, *touched], [at, *touched])
    event(f"{how} {named.kind}")
    wanted = named.before if how == "dropped" else named.after
    assert line(wanted) == at, (lines(named), named.side)
    if how == "dropped" and not rewrites and late is None:
        assert named.side == "before"

"""Planted changes of the built-in trainer, explained: a repository of them, and whether an answer names the place."""

from __future__ import annotations

import ast
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import mutations_kit
import torch
from conftest import SOURCE, Repo
from mutations_kit import Mutation

from repro_bisect.driver.session import Options, commits_of, session
from repro_bisect.explain.driver import explain
from repro_bisect.explain.result import Explanation
from repro_bisect.predicates.predicates import Bitwise
from repro_bisect.probe.scheduler import Scheduler
from repro_golden.case.file import find_case
from repro_golden.repository.checkout import Checkout, find_checkout
from repro_golden.store.rollout_file import RolloutData, write_rollout
from repro_golden.store.rollouts import RolloutSet

__all__ = ["explained", "guarded", "names_the_place", "plant", "unplant", "wrong"]

STEPS = mutations_kit.ROLLOUTS * mutations_kit.CONFIG["num_steps_per_rollout"]


def _toml(table: dict[str, object], name: str) -> Iterator[str]:
    yield f"[{name}]"
    below = {}
    for key, value in table.items():
        if isinstance(value, dict):
            below[key] = value
        else:
            yield f"{key} = {json.dumps(value)}"
    for key, value in below.items():
        yield from _toml(value, f"{name}.{key}")


def guarded(root: Path) -> Repo:
    """A repository with the trainer, a case of `mutations_kit`'s run and its rollouts."""
    shutil.copytree(SOURCE / "core", root / "core", ignore=shutil.ignore_patterns("__pycache__"))
    cases, rollouts = root / "golden" / "cases", root / "golden" / "rollouts" / "planted"
    cases.mkdir(parents=True)
    rollouts.mkdir(parents=True)
    lines = ["[case]", 'name = "planted"', f"steps = {STEPS}", 'rollouts = "golden/rollouts/planted"', ""]
    lines += ["[subject]", 'timeout = "10m"', "", *_toml(mutations_kit.CONFIG, "subject.config"), ""]
    (cases / "planted.toml").write_text("\n".join(lines))
    for number, rollout in enumerate(mutations_kit.rollouts()):
        write_rollout(rollouts / f"{number}.safetensors", RolloutData(rollout.meta, rollout.tensors))
    RolloutSet.write_index(rollouts)
    (root / ".gitignore").write_text("__pycache__/\ngolden/rollouts/\n")
    repo = Repo(root)
    repo.git("init", "--quiet", "--initial-branch=main")
    repo.commit("Start")
    return repo


def plant(repo: Repo, mutation: Mutation) -> str:
    """Commit a change; its id."""
    file = repo.root / "core" / "repro_core" / mutation.path
    assert file.read_text() == mutation.before
    file.write_text(mutation.after)
    return repo.commit(f"{mutation.kind} in {mutation.path}")


def unplant(repo: Repo, mutation: Mutation) -> str:
    """Commit the way back; its id."""
    (repo.root / "core" / "repro_core" / mutation.path).write_text(mutation.before)
    return repo.commit(f"Without {mutation.kind} in {mutation.path}")


@contextmanager
def explainer(repo: Repo, spec: str, jobs: int = 2) -> Iterator[tuple[Scheduler, Checkout]]:
    """A scheduler by which the points of a range can be explained one after the other."""
    checkout: Checkout = find_checkout(repo.root)
    case, options = find_case(repo.root, None), Options(jobs=jobs)
    axis = commits_of(checkout, case, spec, options)
    with session(checkout, case, axis, Bitwise(), lambda _: None, options) as (scheduler, _):
        yield scheduler, checkout


def explained(changes: Sequence[Mutation], folder: Path) -> Iterator[tuple[Mutation, Explanation]]:
    """Each change planted on the same trainer, and its explanation."""
    repo = guarded(folder / "guarded")
    start = repo.git("rev-parse", "HEAD")
    commits = []
    for change in changes:
        commits.append((repo.git("rev-parse", "HEAD"), plant(repo, change)))
        unplant(repo, change)
    with explainer(repo, f"{start}..HEAD") as (scheduler, checkout):
        for change, (before, after) in zip(changes, commits, strict=True):
            yield change, explain(scheduler, checkout, before, after)


def _statements(source: str) -> list[range]:
    spans = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno or node.lineno
            spans.append(range(node.lineno, max(last, node.lineno) + 1))
    return spans


def _lines(source: str, hunks: Sequence[range]) -> set[int]:
    """The lines of the statements that a hunk touches: one operation of a statement may stand on any of them."""
    touched = {line for hunk in hunks for line in hunk}
    spans = [span for span in _statements(source) if touched & set(span)]
    return touched | {line for span in spans for line in span}


def names_the_place(change: Mutation, explanation: Explanation) -> bool:
    """Whether the line that is named is of a statement that the change's own diff touches, and the operation too.

    What a constructor sets is computed with elsewhere: there its line is one of those that are named beside.
    """
    file = f"core/repro_core/{change.path}"
    operation = explanation.named
    if operation is None or operation.place is None or operation.place.file != file:
        return False
    if (names := operation_names(change)) and base_name(operation.name) not in names:
        return False
    before = explanation.side == "before" or explanation.after.explained is None
    source, hunks = (change.before, change.removed) if before else (change.after, change.added)
    named = [operation.place, *(explanation.mentions if change.function.endswith("__init__") else ())]
    return any(place.file == file and place.line in _lines(source, hunks) for place in named)


_NAMES = {
    "Add": "add", "Sub": "sub", "Mult": "mul", "Div": "div", "Pow": "pow", "MatMult": "mm", "USub": "neg",
    "Invert": "bitwise_not", "BitAnd": "bitwise_and", "BitOr": "bitwise_or", "Lt": "lt", "LtE": "le", "Gt": "gt",
    "GtE": "ge", "Eq": "eq", "NotEq": "ne", "float": "to_copy", "bfloat16": "to_copy", "to": "to_copy",
    "double": "to_copy", "half": "to_copy", "square": "pow",
}  # fmt: skip
"""What Python and torch call an operation, where torch's dispatcher has another name for it."""
_PYTHON = {"to_copy", "len", "max", "min", "sum", "int", "bool", "list", "reversed", "range"}
"""Names that say nothing of a function of the trainer's own."""
_ALIKE = {"mm": {"bmm", "addmm", "mm"}, "div": {"div", "reciprocal"}, "sub": {"sub", "rsub", "neg"}, "pow": {"pow"}}


def base_name(name: str) -> str:
    """``aten.lerp_.Scalar`` as ``lerp``."""
    return name.split(".")[1].strip("_")


def _said(node: ast.AST) -> set[str]:
    """Names of the operations that an expression spells."""
    operations = set()
    for inner in ast.walk(node):
        names = []
        if isinstance(inner, (ast.BinOp, ast.UnaryOp)):
            names = [type(inner.op).__name__]
        elif isinstance(inner, ast.Compare):
            names = [type(op).__name__ for op in inner.ops]
        elif isinstance(inner, ast.Call):
            names = [inner.func.attr if isinstance(inner.func, ast.Attribute) else getattr(inner.func, "id", "")]
        for name in names:
            base = _NAMES.get(name, name.strip("_"))
            operations |= {base} | _ALIKE.get(base, set())
    return operations


_CALLS = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare)


def _apart(a: ast.AST, b: ast.AST) -> Iterator[ast.AST]:
    """The smallest pieces in which two trees differ, and all operations of the expression around them."""
    if ast.dump(a) == ast.dump(b):
        return
    inside = [list(ast.iter_child_nodes(node)) for node in (a, b)]
    if type(a) is not type(b) or len(inside[0]) != len(inside[1]):
        yield from (a, b)
        return
    if isinstance(a, ast.expr):
        yield from (_shell(a), _shell(b))
    for x, y in zip(*inside, strict=True):
        yield from _apart(x, y)


def _shell(node: ast.AST) -> ast.AST:
    """An operation without what it is given."""
    if not isinstance(node, _CALLS):
        return ast.Module([], [])
    shell = ast.parse(ast.unparse(node), mode="eval").body
    for field in ("args", "keywords", "left", "right", "operand", "comparators"):
        if hasattr(shell, field):
            setattr(shell, field, [] if isinstance(getattr(shell, field), list) else ast.Constant(0))
    if isinstance(shell, ast.Call) and isinstance(shell.func, ast.Attribute):
        shell.func.value = ast.Name("x")
    return shell


def operation_names(change: Mutation) -> set[str]:
    """The operations that a change spells on either side, and those whose operands it changes, by torch's names.

    Empty where it changes none by name: what a function of the trainer's own is given, or an order of calls.
    """
    names = {name for piece in _apart(ast.parse(change.before), ast.parse(change.after)) for name in _said(piece)}
    of_torch = {name for name in names if any(hasattr(torch.ops.aten, n) for n in (name, f"_{name}", f"{name}_"))}
    definitions = {
        node.name for s in mutations_kit.sources().values() for node in ast.walk(s.tree) if hasattr(node, "name")
    }
    if change.kind == "loop" or (names - of_torch - _PYTHON) or (names & definitions):
        return set()
    return names


def wrong(explanations: Sequence[tuple[Mutation, Explanation]]) -> list[str]:
    """Each answer that names another place, in words."""
    return [
        f"{change.kind} in {change.path}:{change.function}\n{change.diff}\n-> {answer.answer}: {answer.text}"
        for change, answer in explanations
        if not names_the_place(change, answer)
    ]


if __name__ == "__main__":  # SEED COUNT: explain so many changes, and say which answers are wrong
    import sys
    import time

    seed, count = int(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as scratch:
        began, results = time.monotonic(), []
        for change, answer in explained(mutations_kit.effective(seed, count), Path(scratch)):
            results.append((change, answer))
            mark = "ok   " if names_the_place(change, answer) else "WRONG"
            print(f"{mark} {time.monotonic() - began:6.1f} s  {change.kind}  {answer.text}", flush=True)
        print(f"{count - len(wrong(results))} of {count} name the place", *wrong(results), sep="\n\n")

"""Python code that switches determinism on: what each of its functions does, in order. Nothing of it is run."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from repro.doctor.artefacts.kinds import NotRead, PythonCode, Reader
from repro.doctor.artefacts.launch_kinds import Step, Way

__all__ = ["PYTHON"]

_LONGEST = 1 << 20
_MODULE = "<module>"
_MEGATRON = frozenset({
    "get_model", "setup_model_and_optimizer", "initialize_model_and_optimizer", "make_mcore_model",
    "provide_distributed_model", "GPTModel", "MambaModel",
})  # fmt: skip
_BUILDS = frozenset({"build_model", "create_model", "make_model"})
_LOADS = frozenset({"from_pretrained", "from_config", "_from_config"})
_MODELS = re.compile(r"Model|For[A-Z]")
_GROUPS = frozenset({"init_process_group", "initialize_model_parallel", "initialize_megatron", "init_distributed"})
_SWITCH = re.compile(r"_?(?:set|use|enable|engage|apply|force|setup|init|configure)_(?:\w*_)?determinis\w*")
_VARIABLES = ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "PYTHONHASHSEED")
_SAID = re.compile(rf"{_SWITCH.pattern}\(|\.deterministic_mode\s*[:=][^=]|\b(?:{'|'.join(_VARIABLES)})\b".encode())
_SETTERS = ("environ.setdefault", "environ.update", "os.putenv")
_STARTS = re.compile(rb"\bos\.exec|\bsubprocess\b|\bPopen\b|\bray\.|\bspawn\b|\bmultiprocessing\b|runtime_env")

_Branch: TypeAlias = tuple[Way, ...]
_Functions: TypeAlias = dict[str, ast.FunctionDef | ast.AsyncFunctionDef]


def _fits(path: Path) -> bool:
    if path.suffix != ".py" or not path.is_file():
        return False
    with path.open("rb") as file:
        return _SAID.search(file.read(_LONGEST)) is not None


def _read(path: Path) -> Iterable[PythonCode | NotRead]:
    with path.open("rb") as file:
        source = file.read(_LONGEST + 1)
    if len(source) > _LONGEST:
        return [NotRead(path, "it has more than 1 MiB, and was not read")]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the code's own escapes
            functions = _steps_of(ast.parse(source))
    except SyntaxError as error:  # perhaps of a newer Python
        return [NotRead(path, f"line {error.lineno or 1} is no syntax of this Python, and the file was not read")]
    except (ValueError, RecursionError, MemoryError):
        return [NotRead(path, "it is nested too deep, or no text, and was not read")]
    return [PythonCode(path, functions, _STARTS.search(source) is not None)]


PYTHON = Reader("Python code that switches determinism on", _fits, _read)
"""After launchers: those start trainers, this is what they start."""


def _steps_of(tree: ast.Module) -> dict[str, Sequence[Step]]:
    """What the module and each of its functions does, in the order of their source."""
    functions = dict(_functions(tree.body, ""))
    walk = _Walk(functions)
    bodies = {_MODULE: tree.body, **{name: node.body for name, node in functions.items()}}
    return {name: steps for name, body in bodies.items() if (steps := list(walk.steps(body, name, ())))}


def _functions(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")


class _Walk:
    """Statements in order; calls of the file's own functions stand for what those do."""

    def __init__(self, functions: _Functions) -> None:
        self._functions = functions
        self._known: dict[str, tuple[Step, ...]] = {}

    def steps(self, body: Sequence[ast.stmt], owner: str, branch: _Branch) -> Iterator[Step]:
        """What a list of statements does."""
        for statement in body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            yield from self._expressions(statement, owner, branch)
            for number, (block, apart) in enumerate(_blocks(statement)):
                leaves = bool(block) and isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
                yield from self.steps(
                    block, owner, (*branch, Way(statement.lineno, number, leaves)) if apart else branch
                )

    def _expressions(self, statement: ast.stmt, owner: str, branch: _Branch) -> Iterator[Step]:
        """What a statement itself does, without the statements inside it: inner calls first, then assignments."""
        calls = [node for node in _own(statement) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0)):
            yield from self._call(call, owner, branch)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and not _off(statement.value):
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                if isinstance(target, ast.Attribute) and target.attr == "deterministic_mode":
                    yield Step("switch", ast.unparse(target), statement.lineno, branch)
                elif isinstance(target, ast.Subscript) and _dotted(target.value).endswith("environ"):
                    yield from _variables([target.slice], statement.lineno, branch)

    def _call(self, call: ast.Call, owner: str, branch: _Branch) -> Iterator[Step]:
        text = _dotted(call.func)
        receiver, _, name = text.rpartition(".")
        if function := self._own_function(receiver, name, owner):
            yield from (step._replace(line=call.lineno, branch=branch) for step in self._does(function))
        elif _SWITCH.fullmatch(name):
            if not (call.args and _off(call.args[0])):
                yield Step("switch", text, call.lineno, branch)
        elif name in _MEGATRON:
            yield Step("megatron", text, call.lineno, branch)
        elif name in _BUILDS or (name in _LOADS and _MODELS.search(receiver)):
            yield Step("model", text, call.lineno, branch)
        elif name in _GROUPS:
            yield Step("groups", text, call.lineno, branch)
        elif setter := next((suffix for suffix in _SETTERS if text.endswith(suffix)), None):
            keys = [*call.args[:1], *(ast.Constant(word.arg) for word in call.keywords if word.arg)]
            if setter == "environ.update" and call.args and isinstance(call.args[0], ast.Dict):
                keys = [key for key in call.args[0].keys if key is not None]
            yield from _variables(keys, call.lineno, branch)

    def _own_function(self, receiver: str, name: str, owner: str) -> str:
        """The function of this file that is called; ''."""
        if not receiver:
            return name if name in self._functions else ""
        method = f"{owner.rpartition('.')[0]}.{name}"
        return method if receiver in ("self", "cls") and method in self._functions else ""

    def _does(self, name: str) -> tuple[Step, ...]:
        """What a function does in the end: switches first, since those that come too late are told of itself."""
        if name not in self._known:
            self._known[name] = ()  # for those that call themselves
            steps = {(s.kind, s.name): s for s in self.steps(self._functions[name].body, name, ())}
            self._known[name] = tuple(sorted(steps.values(), key=lambda s: s.kind not in ("switch", "variable")))
        return self._known[name]


def _blocks(statement: ast.stmt) -> Iterator[tuple[list[ast.stmt], bool]]:
    """The blocks of a statement, and whether each excludes the others."""
    if isinstance(statement, ast.If):
        yield from ((statement.body, True), (statement.orelse, True))
    elif isinstance(statement, ast.Match):
        yield from ((case.body, True) for case in statement.cases)
    else:
        for name in ("body", "orelse", "finalbody"):
            if block := getattr(statement, name, None):
                yield block, False
        yield from ((handler.body, True) for handler in getattr(statement, "handlers", ()))


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement that are neither in a statement inside it nor in a lambda."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [
            child
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, ast.stmt | ast.Lambda | ast.ExceptHandler | ast.match_case)
        ]


def _variables(keys: Sequence[ast.expr], line: int, branch: _Branch) -> Iterator[Step]:
    for key in keys:
        if isinstance(key, ast.Constant) and key.value in _VARIABLES:
            yield Step("variable", str(key.value), line, branch)


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` as text; what is no plain name in it is left out."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else ["..."]), *reversed(parts)])


def _off(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and not value.value

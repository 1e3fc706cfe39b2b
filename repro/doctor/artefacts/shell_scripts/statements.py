"""The statements of a shell script, walked as a shell takes them: branches, loops, functions that end early.

Branches whose condition cannot be known are all read. A variable that they leave different is not known afterwards; of
arrays, which hold flags, the last that changed them is taken in one reading, another in a second. What one alone sets
is in one reading, not in the second. A third has what all ways share. What further turns of a loop change is not known.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence

from tree_sitter import Node

from repro.doctor.artefacts.shell_scripts.arithmetic import count, forget_written
from repro.doctor.artefacts.shell_scripts.conditions import holds
from repro.doctor.artefacts.shell_scripts.patterns import escaped, matches, pattern
from repro.doctor.artefacts.shell_scripts.script import Merging, Script, parts_of, starts
from repro.doctor.artefacts.shell_scripts.values import BoundError, Function, Part, Scope, known, said, text_of
from repro.doctor.artefacts.shell_scripts.variables import Variables
from repro.doctor.artefacts.shell_scripts.words import expand, expand_all, forget_counted

__all__ = ["Statements", "nothing"]

_STEPS = 40_000
_DEPTH = 60
_TURNS = 4
"""Turns of a loop that are read before all that is set counts as not known."""
_BLOCKS = frozenset(
    {"program", "compound_statement", "do_group", "redirected_statement", "negated_command", "ERROR", "else_clause"}
)


class Statements(abc.ABC):
    """One walk over a script.

    Args:
        taken: See `Merging`.

    Attributes:
        script: What was read so far.
        merging: How branches are put together.
        variables: What sets variables.
        functions: The last body of each that is defined anywhere.
        ended: How what is read now was left: ``exit``, ``return``, ``break``, ``break 2``; '' where it goes on.
        unsure: Branches around here of which nobody knows whether they are taken.
    """

    def __init__(self, *, taken: bool | None) -> None:
        self.script = Script()
        self.merging = Merging(taken=taken)
        self.variables = Variables(self.script.settings)
        self.functions: dict[str, Function] = {}
        self.ended = ""
        self.left: list[tuple[str, Scope]] = []
        """How branches that may be taken left a loop or a function, and what was set then."""
        self.unsure = 0
        self.loops = 0
        """Loops of the running function around here."""
        self._steps = 0
        self._depth = 0

    @abc.abstractmethod
    def command(self, node: Node, scope: Scope) -> None:
        """A command."""

    @abc.abstractmethod
    def fed(self, node: Node, redirect: Node, scope: Scope) -> None:
        """A command with a here-document."""

    def run(self, node: Node, scope: Scope) -> bool | None:
        """One statement; of a list whether it holds, for what it sets may change what it asks."""
        self._steps += 1
        if self._steps > _STEPS:
            raise BoundError("too many statements")
        if self.ended:
            return None
        self._depth += 1
        if self._depth > _DEPTH:
            raise BoundError("too deep")
        try:
            return self._statement(node, scope)
        finally:
            self._depth -= 1

    def _statement(self, node: Node, scope: Scope) -> bool | None:
        kind, held = node.type, None
        beside = node.next_sibling is not None and node.next_sibling.type == "&"
        inner = scope.copy() if beside else scope  # what it sets in the background is lost
        if kind == "compound_statement" and node.children and node.children[0].type == "((":
            count(text_of(node)[2:-2], inner, scope.word((), node))
        elif kind in _BLOCKS:
            self._children(node, inner)
        elif kind in _METHODS:
            held = _METHODS[kind](self, node, inner)
        else:
            forget_counted(node, inner)
        if beside:
            self.ended = ""
        return None if beside else held

    def _asked(self, nodes: Sequence[Node], scope: Scope) -> bool | None:
        """Whether the last of some statements holds, all of which are run; None where only a shell knows."""
        self._block(nodes[:-1], scope)
        held = self.run(nodes[-1], scope)
        return held if nodes[-1].type == "list" else holds(nodes[-1], scope)

    def _apart(self, node: Node, scope: Scope) -> None:
        """``( ... )``, and each part of a pipeline: what they set is lost."""
        blocks = [node.named_children] if node.type == "subshell" else [[child] for child in node.named_children]
        last = blocks.pop() if node.type == "pipeline" and "lastpipe" in scope.modes else None
        for block in blocks:
            left = len(self.left)
            self._block(block, scope.copy())
            self.ended = ""
            del self.left[left:]
        if last:
            self.merged([functools.partial(self._block, last), nothing], scope)

    def _loop(self, node: Node, scope: Scope) -> None:
        """``while``, ``until``, ``for ((...))``: what is asked once, the rest any number of times, or not at all."""
        asked = [child for child in node.named_children if child.type != "do_group"]
        if node.type == "c_style_for_statement":
            self._block([child for child in asked if child.type == "variable_assignment"], scope)
            for child in asked:
                forget_written(text_of(child), scope)
        else:
            held = self._asked(asked, scope) if asked else None
            if self.ended or held is (node.children[0].type == "until"):
                return

        def body(inner: Scope) -> None:
            left = len(self.left)
            self._children(node, inner, "do_group")
            self.gather(left, inner, "continue")
            if node.type != "c_style_for_statement":
                self.silently(lambda: self._block(asked, inner))

        self.repeated(body, scope)

    def silently(self, read: Callable[[], None]) -> None:
        """Read what was read once more, for what it leaves set."""
        script = self.script
        lengths = len(script.commands), len(script.settings), len(script.missing), len(script.joined)
        read()
        del script.commands[lengths[0] :], script.settings[lengths[1] :]
        del script.missing[lengths[2] :], script.joined[lengths[3] :]

    def repeated(self, body: Callable[[Scope], object], scope: Scope) -> None:
        """Read what is run any number of times until it leaves nothing else than before."""

        def once(inner: Scope) -> None:
            left = len(self.left)
            self.loops += 1
            body(inner)
            self.loops -= 1
            self._out(left, inner)

        self.merged([once, nothing], scope)
        for _ in range(_TURNS):
            before = scope.copy()
            self.silently(lambda: self.merged([once, nothing], scope))
            for name in _changed(before.arrays, scope.arrays):
                scope.arrays[name] = scope.shared(name, [before.arrays.get(name), scope.arrays.get(name)])
            changed = _changed(before.scalars, scope.scalars)
            for name in changed:
                scope.forget(name)
            lost = said(before.positional) != said(scope.positional)
            if not (changed or lost or _changed(before.arrays, scope.arrays)):
                return
        scope.forget_all()

    def gather(self, left: int, scope: Scope, *ways: str) -> None:
        """Put together what is set where a loop's turn, a loop or a function ends, whichever way that comes about."""
        here = [inner for how, inner in self.left[left:] if how in ways]
        self.left[left:] = [(how, inner) for how, inner in self.left[left:] if how not in ways]
        if not self.ended or self.ended in ways:
            here.insert(0, scope.copy())
        elif here and self.ended != "exit":
            self.left.append((self.ended, scope.copy()))
        if here:
            self.ended = ""
            scope.take(here[0].copy())
        if len(here) > 1:
            self.merging.scopes(scope, here)

    def _out(self, left: int, scope: Scope) -> None:
        """A loop ends: what leaves one more than it leaves the next one."""
        self.gather(left, scope, "break", "continue")
        self.left[left:] = [(_outer(how), inner) for how, inner in self.left[left:]]
        self.ended = _outer(self.ended)

    def _define(self, node: Node, scope: Scope) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name and body:
            self.functions[text_of(name)] = body, scope.path, scope.line
            scope.functions[text_of(name)] = [self.functions[text_of(name)]]

    def assign(self, nodes: Sequence[Node], scope: Scope) -> None:
        """``NAME=value NAME=value``, without a command."""
        for node in nodes:
            self.variables.assign(node, scope)

    def _unset(self, node: Node, scope: Scope) -> None:
        for name in self.variables.unset(node, scope):
            scope.functions.pop(name, None)

    def _children(self, node: Node, scope: Scope, kind: str = "") -> None:
        for child in node.named_children:
            if not kind or child.type == kind:
                if child.type == "heredoc_redirect":
                    self.fed(node, child, scope)
                    # `cat <<EOF | next`: what stands behind the mark
                    self._children(child, scope, "pipeline")
                else:
                    self.run(child, scope)

    def _list(self, node: Node, scope: Scope) -> bool | None:
        """``a && b``, ``a || b``: whether it holds; None where only a shell knows."""
        children = [child for child in node.children if not child.is_extra]
        if len(children) != 3:
            self._children(node, scope)
            return None
        left, operation, right = children
        self.unsure += operation.type == "||"  # it may fail
        held = self._asked([left], scope)
        self.unsure -= operation.type == "||"
        if self.ended:
            return None
        if held is None:
            self.merged([lambda inner: self.run(right, inner), nothing], scope)
            last = None if right.type == "list" else holds(right, scope)
            return last if last is (operation.type == "||") else None
        return self._asked([right], scope) if held == (operation.type == "&&") else held

    def _if(self, node: Node, scope: Scope) -> None:
        branches: list[Callable[[Scope], object]] = []
        certain = False
        clauses = [node, *(c for c in node.named_children if c.type in ("elif_clause", "else_clause"))]
        for clause in clauses:
            if certain:
                break
            condition, body = parts_of(clause)
            self.unsure += 1
            held = self._asked(condition, scope) if condition else None  # where those before it do not hold
            self.unsure -= 1
            if self.ended:
                return
            certain = clause.type == "else_clause" or held is True
            if certain or held is None:
                branches.append(functools.partial(self._from, scope.copy(), body))
        if not certain:
            branches.append(nothing)
        self.merged(branches, scope)

    def _from(self, before: Scope, nodes: Sequence[Node], scope: Scope) -> None:
        """Read statements with what was set at a point before."""
        scope.take(before)
        self._block(nodes, scope)

    def _block(self, nodes: Sequence[Node], scope: Scope) -> None:
        for node in nodes:
            self.run(node, scope)

    def _case(self, node: Node, scope: Scope) -> None:
        value = node.child_by_field_name("value")
        words = expand(value, scope, split=False) if value else []
        text = words[0].text if words and known(words[0].value) else None
        items = [child for child in node.named_children if child.type == "case_item"]
        branches: list[Callable[[Scope], object]] = []
        through: bool | None = False
        again = False
        for item in items:
            patterns = item.children_by_field_name("value")
            body = [c for c in item.named_children if c not in patterns]
            marks = {child.type for child in item.children} & {";&", ";;&"}
            verdicts = [matches(text, _pattern(each, scope), scope) for each in patterns]
            taken = True if True in verdicts else None if None in verdicts else False
            if through is not False:  # from the one above, if that was taken
                taken = through or taken or None
            through = taken if marks == {";&"} else False
            if taken is False:
                continue
            if taken and not branches:
                self._block(body, scope)
            else:
                branches.append(functools.partial(self._block, body))
                again = again or bool(marks)
            if taken and not marks:
                if not branches:
                    return
                break
        else:
            branches.append(nothing)
        if again:  # of what goes on into the next one, each may be taken or not
            for branch in branches:
                self.merged([branch, nothing], scope)
        elif branches != [nothing]:
            self.merged(branches, scope)
        return

    def _for(self, node: Node, scope: Scope) -> None:
        name = node.child_by_field_name("variable")
        body = node.child_by_field_name("body")
        if name is None or body is None:
            return
        items = expand_all(node.children_by_field_name("value"), scope)
        sure = all(known(word.value) and not set(word.text) & set("*?[") for word in items)
        left = len(self.left)
        listed = any(child.type == "in" or text_of(child) == "in" for child in node.children[2:3])
        if (items or listed) and sure and len(items) <= 32 and node.children[0].type == "for":
            self.loops += 1
            for item in items:
                self.variables.set(text_of(name), item, scope)
                self.run(body, scope)
                self.gather(left, scope, "continue")
                if self.ended:
                    break
            self.loops -= 1
            self._out(left, scope)
            return
        self.variables.set(text_of(name), scope.word((Part(f"${text_of(name)}", False),), node), scope)
        self.repeated(functools.partial(self.run, body), scope)

    def merged(self, branches: Sequence[Callable[[Scope], object]], scope: Scope) -> None:
        """Read branches of which only a shell knows which one is taken."""
        if self.ended:
            return
        if len(branches) == 1:
            self._alone(branches[0], scope)
            return
        states: list[str] = []
        after: list[Scope] = []
        alone = len([branch for branch in branches if branch is not nothing]) == 1
        for branch in branches:
            inner, count = scope.copy(), len(self.script.settings)
            self.unsure += 1
            branch(inner)
            self.unsure -= 1
            if alone and not self.merging.taken:
                self.script.settings[count:] = [each for each in self.script.settings[count:] if each.prefix]
            states.append(self.ended)
            if not self.ended:
                after.append(inner)
            elif self.ended != "exit":
                self.left.append((self.ended, inner))
            self.ended = ""
        if not after:
            self.ended = states[-1]
            return
        self.merging.scopes(scope, after)

    def _alone(self, branch: Callable[[Scope], object], scope: Scope) -> None:
        """Read a branch that is taken as far as can be said.

        What is not given here may be given by whoever runs it: what only leaves, for want of an address, may not.
        """
        inner, count = scope.copy(), len(self.script.commands)
        branch(inner)
        idle = not any(starts(command) for command in self.script.commands[count:])
        if self.ended == "exit" and idle:
            self.ended = ""
        elif self.ended == "return" and idle and (inner.scalars, inner.arrays) == (scope.scalars, scope.arrays):
            self.left.append(("return", inner))
            self.ended = ""
        else:
            scope.take(inner)


_METHODS: Mapping[str, Callable[[Statements, Node, Scope], bool | None]] = {
    "list": Statements._list,
    "subshell": Statements._apart,
    "pipeline": Statements._apart,
    "if_statement": Statements._if,
    "case_statement": Statements._case,
    "for_statement": Statements._for,
    "while_statement": Statements._loop,
    "c_style_for_statement": Statements._loop,
    "function_definition": Statements._define,
    "variable_assignment": lambda reader, node, scope: reader.assign([node], scope),
    "variable_assignments": lambda reader, node, scope: reader.assign(node.named_children, scope),
    "declaration_command": lambda reader, node, scope: reader.variables.declare(node, scope),
    "unset_command": Statements._unset,
    "command": lambda reader, node, scope: reader.command(node, scope),
}


def nothing(_: Scope) -> None:
    """The branch that is not there."""


def _changed(before: Mapping[str, object], after: Mapping[str, object]) -> set[str]:
    return {name for name in {*before, *after} if said(before.get(name)) != said(after.get(name))}


def _outer(how: str) -> str:
    """What leaves so many loops, one further out."""
    way, _, number = how.partition(" ")
    return f"{way} {int(number) - 1}" if number and int(number) > 2 else way


def _pattern(node: Node, scope: Scope) -> str | None:
    """A pattern of ``case``; None where only a shell knows what it matches."""
    if node.type not in ("string", "raw_string", "ansi_c_string"):
        return pattern(text_of(node), scope)
    word = expand(node, scope, split=False)[0]
    return escaped(word.text) if known(word.value) else None

"""A small machine that reads pickles and runs nothing: what a pickle names is looked up in a table or stays a name.

It knows the opcodes that Python's own writers make for protocols 2 to 5, as `torch.save` and `pickle.dump` use them. A
class that is not in `makers.KNOWN` becomes an `Unknown`, and an object of it a `Record` of its fields.
"""

from __future__ import annotations

import pickletools
import re
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from repro_golden.base.errors import ReproError
from repro_golden.dumps.archive.bounds import Budget, shown
from repro_golden.dumps.archive.makers import KNOWN, Maker, Storage, build_array, build_dtype, is_dtype, storage_of
from repro_golden.dumps.archive.stack import StackMachine
from repro_golden.dumps.values import Record, Unknown

__all__ = ["read_pickle"]

_NAME = 200  # characters of a module, a class or a dotted attribute

_BINFLOAT, _BININT, _BININT1, _BININT2 = b"GJKM"
_RUN = 1 << 18  # bytes of a run of numbers that are read before memory is counted again
_SMALL_RUN = re.compile(rb"(?:K.){1,65536}+", re.DOTALL)
_FLOAT_RUN = re.compile(rb"(?:G.{8}){1,65536}+", re.DOTALL)
_FLOAT_ROW = np.dtype([("opcode", "u1"), ("value", ">f8")])

_i4 = struct.Struct("<i").unpack_from

_OPCODES = {opcode.code: opcode.name for opcode in pickletools.opcodes}

_DAMAGE = (IndexError, struct.error)  # the bytes end inside an opcode, or the stack is too short for one
_DEFENCE = (TypeError, ValueError, KeyError, AttributeError, OverflowError, MemoryError, RecursionError)


def read_pickle(data: bytes, budget: Budget, read_storage: Callable[[str], bytes] | None = None) -> Any:
    """Read one pickle that fills `data`.

    Args:
        data: the pickle, whose bytes the budget has counted.
        budget: names the file in messages, and bounds memory.
        read_storage: the bytes of a tensor storage by its key, for pickles inside torch archives.

    Returns:
        The value; foreign objects in it are `Record`s and foreign names `Unknown`s. Not yet walked by `settle`.

    Raises:
        ReproError: not a pickle of these protocols, damaged, too large, or with content that is refused.
    """
    machine = _Machine(data, budget, read_storage)
    try:
        return machine.run()
    except _DAMAGE:
        raise ReproError(f"{budget.where} is cut short or damaged: its pickle breaks off; write it again") from None
    except _DEFENCE as error:
        detail = shown(str(error))
        raise ReproError(
            f"{budget.where} is damaged: its pickle does not fit together ({detail}); write it again"
        ) from None


class _Machine(StackMachine):
    """The whole machine: the loop, and what pickles say of classes and their objects."""

    def __init__(self, data: bytes, budget: Budget, read_storage: Callable[[str], bytes] | None) -> None:
        super().__init__(data, budget)
        self.read_storage = read_storage
        self.storages: dict[str, Storage] = {}
        self.unbuilt: dict[int, Any] = {}  # arrays whose BUILD is still to come

    def run(self) -> Any:
        """Read up to STOP.

        Returns:
            The one value that is left.
        """
        data = self.data
        table = self._table()
        limit = self.budget.limit
        bytes_used = self.budget.spent
        pos = 0
        while True:
            opcode = data[pos]
            stack = self.stack
            if opcode == _BINFLOAT:
                match = _FLOAT_RUN.match(data, pos)
                if match is None:
                    raise IndexError
                count = (match.end() - pos) // 9
                if count == 1:
                    stack.append(struct.unpack_from(">d", data, pos + 1)[0])
                else:
                    stack.extend(np.frombuffer(data, _FLOAT_ROW, count, pos)["value"].tolist())
                pos = match.end()
                bytes_used += 40 * count
            elif opcode in (_BININT, _BININT1, _BININT2):
                start = len(stack)
                pos = _integers(data, pos, stack.append, stack.extend)
                bytes_used += 40 * (len(stack) - start)
            elif opcode == 46:  # STOP
                self.budget.spent = bytes_used
                return self._stop(pos + 1)
            else:
                self.budget.spent = bytes_used
                pos = table[opcode](pos + 1)
                bytes_used = self.budget.spent + 64
            if bytes_used > limit:
                raise self.budget.exceeded()

    def _stop(self, pos: int) -> Any:
        if len(self.stack) != 1 or self.below:
            raise IndexError
        if self.unbuilt:
            raise self._refusal("has an array without content", "write it again")
        if pos != len(self.data):
            raise self._refusal(f"has {len(self.data) - pos} bytes behind its pickle", "save one value per file")
        return self.stack[0]

    def _table(self) -> list[Callable[[int], int]]:
        table: list[Callable[[int], int]] = [self._unknown_opcode] * 256
        for opcode, method in {
            b"\x80": self._proto,
            b"\x95": self._frame,
            b"(": self._mark,
            b"0": self._pop,
            b"1": self._pop_mark,
            b"2": self._dup,
            b"N": self._none,
            b"\x88": self._true,
            b"\x89": self._false,
            b"\x8a": self._long1,
            b"\x8b": self._long4,
            b"X": self._text4,
            b"\x8c": self._text1,
            b"\x8d": self._text8,
            b"B": self._bytes4,
            b"C": self._bytes1,
            b"\x8e": self._bytes8,
            b"\x96": self._bytearray8,
            b"]": self._empty_list,
            b"}": self._empty_dict,
            b")": self._empty_tuple,
            b"\x8f": self._empty_set,
            b"t": self._tuple,
            b"\x85": self._tuple1,
            b"\x86": self._tuple2,
            b"\x87": self._tuple3,
            b"\x91": self._frozenset,
            b"a": self._append,
            b"e": self._appends,
            b"s": self._setitem,
            b"u": self._setitems,
            b"\x90": self._additems,
            b"c": self._global,
            b"\x93": self._stack_global,
            b"R": self._reduce,
            b"\x81": self._newobj,
            b"\x92": self._newobj_ex,
            b"b": self._build,
            b"Q": self._persid,
            b"h": self._get1,
            b"j": self._get4,
            b"q": self._put1,
            b"r": self._put4,
            b"\x94": self._memoize,
        }.items():
            table[opcode[0]] = method
        return table

    def _unknown_opcode(self, pos: int) -> int:
        opcode = self.data[pos - 1]
        name = _OPCODES.get(chr(opcode))
        if name is None:
            raise self._refusal(f"is damaged: byte {opcode} is no pickle opcode", "write it again")
        raise self._refusal(
            f"uses the pickle opcode {name}, which torch.save does not write", "save it again with torch.save"
        )

    # Names and objects: nothing is imported and nothing that the pickle names is called

    def _global(self, pos: int) -> int:
        middle = self.data.find(b"\n", pos, pos + _NAME)
        end = self.data.find(b"\n", middle + 1, middle + _NAME)
        if middle < 0 or end < 0:
            raise IndexError
        module = self.data[pos:middle].decode("utf-8", "backslashreplace")
        name = self.data[middle + 1 : end].decode("utf-8", "backslashreplace")
        return self._push(self._named(module, name), end + 1)

    def _stack_global(self, pos: int) -> int:
        name = self.stack.pop()
        module = self.stack.pop()
        return self._push(self._named(module, name), pos)

    def _named(self, module: Any, name: Any) -> Unknown:
        if type(module) is not str or type(name) is not str:
            raise self._refusal("is damaged: a class in it has no name", "write it again")
        known = KNOWN.get((module, name))
        if known is not None:
            return known
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        return self._unknown(f"{module}.{name}", name.count(".") + 1)

    def _unknown(self, name: str, parts: int) -> Unknown:
        if len(name) > _NAME or not all(part.isidentifier() or part == "<locals>" for part in name.split(".")):
            raise self._refusal(f"names {shown(name)}, which is no class", "it is damaged or hostile; write it again")
        self.budget.spent += len(name)
        return Unknown(name, parts)

    def _reduce(self, pos: int) -> int:
        args = self.stack.pop()
        function = self.stack.pop()
        if type(args) is not tuple or not isinstance(function, Unknown):
            raise self._refusal(
                f"calls something of type {type(function).__name__}", "only named classes are; write it again"
            )
        return self._push(self._called(function, args), pos)

    def _called(self, function: Unknown, args: tuple[Any, ...]) -> Any:
        if function.name == "builtins.getattr":  # how protocols 2 and 3 name a nested class
            base, attribute = args if len(args) == 2 else (None, None)
            if type(base) is Unknown and type(attribute) is str:
                return self._unknown(f"{base.name}.{attribute}", base.parts + attribute.count(".") + 1)
        if type(function) is Maker:
            return self._made(function, args)
        return Record(function.name, None, args, made="call", parts=function.parts)

    def _made(self, maker: Maker, args: tuple[Any, ...]) -> Any:
        value = maker.make(self.budget, args)
        if maker.unbuilt:
            self.unbuilt[id(value)] = value
        return value

    def _newobj(self, pos: int) -> int:
        args = self.stack.pop()
        return self._new(args, {}, pos)

    def _newobj_ex(self, pos: int) -> int:
        kwargs = self.stack.pop()
        args = self.stack.pop()
        return self._new(args, kwargs, pos)

    def _new(self, args: Any, kwargs: Any, pos: int) -> int:
        named = self.stack.pop()
        if type(args) is not tuple or type(kwargs) is not dict or not isinstance(named, Unknown):
            raise self._refusal(
                f"makes an object of something of type {type(named).__name__}", "only of named classes; write it again"
            )
        if type(named) is Maker and not kwargs and named.plain:
            return self._push(self._made(named, args), pos)
        return self._push(Record(named.name, None, args, kwargs, parts=named.parts), pos)

    def _build(self, pos: int) -> int:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is Record and target.state is None:
            object.__setattr__(target, "state", state)
        elif id(target) in self.unbuilt:
            build_array(self.budget, self.unbuilt.pop(id(target)), state)
        elif is_dtype(target):
            build_dtype(self.budget, target, state)
        elif not (type(target) is OrderedDict and type(state) is dict and not state):
            raise self._refusal(
                f"gives fields of its own to something of type {type(target).__name__}", "save it without them"
            )
        return pos

    def _persid(self, pos: int) -> int:
        if self.read_storage is None:
            raise self._refusal("refers to a tensor's storage outside of it", "save it with torch.save")
        reference = self.stack.pop()
        return self._push(storage_of(self.budget, reference, self.storages, self.read_storage), pos)


def _integers(data: bytes, pos: int, push: Callable[[int], None], extend: Callable[[bytes], None]) -> int:
    """Push a run of integers: tokens and masks are most of a dump, so they get a loop without a table."""
    stop = pos + _RUN
    while pos < stop:
        opcode = data[pos]
        if opcode == _BININT2:
            push(data[pos + 1] | data[pos + 2] << 8)
            pos += 3
        elif opcode == _BININT:
            push(_i4(data, pos + 1)[0])
            pos += 5
        elif opcode == _BININT1:
            if data[pos + 2] == _BININT1 and data[pos + 4] == _BININT1:
                match = _SMALL_RUN.match(data, pos)
                if match is None:
                    raise IndexError
                extend(data[pos + 1 : match.end() : 2])
                pos = match.end()
            else:
                push(data[pos + 1])
                pos += 2
        else:
            break
    return pos

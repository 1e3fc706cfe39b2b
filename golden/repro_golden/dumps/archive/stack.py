"""The part of a pickle machine that needs no names: literals, marks, the memo and containers."""

from __future__ import annotations

import struct
from typing import Any

from repro_golden.base.errors import ReproError
from repro_golden.dumps.archive.bounds import Budget, check_key
from repro_golden.dumps.values import Record

__all__ = ["StackMachine"]

_LONG = 1024  # bytes of an integer; Python refuses to print those of more than 4,300 digits

_u4 = struct.Struct("<I").unpack_from
_u8 = struct.Struct("<Q").unpack_from


class StackMachine:
    """The stack, the memo and one method per opcode. A method gets the position behind its opcode, returns the next.

    An IndexError or struct.error says that the bytes end inside an opcode or that the stack is too short for it.

    Args:
        data: the pickle.
        budget: names the file in messages, and bounds memory.
    """

    def __init__(self, data: bytes, budget: Budget) -> None:
        self.data = data
        self.budget = budget
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under the open marks
        self.memo: dict[int, Any] = {}

    def _refusal(self, what: str, fix: str) -> ReproError:
        return ReproError(f"{self.budget.where} {what}: {fix}")

    # What reads no further than its own bytes

    def _proto(self, pos: int) -> int:
        if self.data[pos] > 5:
            raise self._refusal(f"has pickle protocol {self.data[pos]}", "protocols 2 to 5 are read; save it with one")
        return pos + 1

    def _frame(self, pos: int) -> int:
        if _u8(self.data, pos)[0] > len(self.data) - pos - 8:
            raise IndexError
        return pos + 8

    def _span(self, pos: int, size: int) -> bytes:
        if size > len(self.data) - pos:
            raise IndexError
        return self.data[pos : pos + size]

    def _push(self, value: Any, pos: int) -> int:
        self.stack.append(value)
        return pos

    def _none(self, pos: int) -> int:
        return self._push(None, pos)

    def _true(self, pos: int) -> int:
        return self._push(True, pos)

    def _false(self, pos: int) -> int:
        return self._push(False, pos)

    def _long1(self, pos: int) -> int:
        size = self.data[pos]
        return self._push(int.from_bytes(self._span(pos + 1, size), "little", signed=True), pos + 1 + size)

    def _long4(self, pos: int) -> int:
        size = _u4(self.data, pos)[0]
        if size > _LONG:
            raise self._refusal(f"has an integer of {size} bytes", f"save integers of at most {_LONG} bytes")
        return self._push(int.from_bytes(self._span(pos + 4, size), "little", signed=True), pos + 4 + size)

    def _text(self, pos: int, size: int) -> int:
        raw = self._span(pos, size)
        try:
            text = raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self._refusal("is damaged: a text in it is no UTF-8", "write it again") from None
        self.budget.spent += size if text.isascii() else text.__sizeof__()
        return self._push(text, pos + size)

    def _text1(self, pos: int) -> int:
        return self._text(pos + 1, self.data[pos])

    def _text4(self, pos: int) -> int:
        return self._text(pos + 4, _u4(self.data, pos)[0])

    def _text8(self, pos: int) -> int:
        return self._text(pos + 8, _u8(self.data, pos)[0])

    def _bytes(self, pos: int, size: int) -> int:
        self.budget.spent += size
        return self._push(self._span(pos, size), pos + size)

    def _bytes1(self, pos: int) -> int:
        return self._bytes(pos + 1, self.data[pos])

    def _bytes4(self, pos: int) -> int:
        return self._bytes(pos + 4, _u4(self.data, pos)[0])

    def _bytes8(self, pos: int) -> int:
        return self._bytes(pos + 8, _u8(self.data, pos)[0])

    def _bytearray8(self, pos: int) -> int:
        size = _u8(self.data, pos)[0]
        self.budget.spent += size
        return self._push(bytearray(self._span(pos + 8, size)), pos + 8 + size)

    # The stack, its marks and the memo

    def _mark(self, pos: int) -> int:
        self.below.append(self.stack)
        self.stack = []
        return pos

    def _collected(self) -> list[Any]:
        items = self.stack
        self.stack = self.below.pop()
        return items

    def _pop(self, pos: int) -> int:
        self.stack.pop()
        return pos

    def _pop_mark(self, pos: int) -> int:
        self._collected()
        return pos

    def _dup(self, pos: int) -> int:
        return self._push(self.stack[-1], pos)

    def _put(self, index: int, pos: int) -> int:
        if index >= len(self.data):
            raise self._refusal(
                f"is damaged: it memoises number {index} in a pickle of {len(self.data)} bytes", "write it again"
            )
        self.memo[index] = self.stack[-1]
        return pos

    def _put1(self, pos: int) -> int:
        return self._put(self.data[pos], pos + 1)

    def _put4(self, pos: int) -> int:
        return self._put(_u4(self.data, pos)[0], pos + 4)

    def _memoize(self, pos: int) -> int:
        return self._put(len(self.memo), pos)

    def _get(self, index: int, pos: int) -> int:
        if index not in self.memo:
            raise self._refusal(f"is damaged: it refers to memo {index}, which it never put", "write it again")
        return self._push(self.memo[index], pos)

    def _get1(self, pos: int) -> int:
        return self._get(self.data[pos], pos + 1)

    def _get4(self, pos: int) -> int:
        return self._get(_u4(self.data, pos)[0], pos + 4)

    # Containers

    def _empty_list(self, pos: int) -> int:
        return self._push([], pos)

    def _empty_dict(self, pos: int) -> int:
        return self._push({}, pos)

    def _empty_tuple(self, pos: int) -> int:
        return self._push((), pos)

    def _empty_set(self, pos: int) -> int:
        return self._push(set(), pos)

    def _tuple(self, pos: int) -> int:
        items = self._collected()
        return self._push(tuple(items), pos)

    def _tuple1(self, pos: int) -> int:
        self.stack[-1] = (self.stack[-1],)
        return pos

    def _tuple2(self, pos: int) -> int:
        self.stack[-2:] = [(self.stack[-2], self.stack[-1])]
        return pos

    def _tuple3(self, pos: int) -> int:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]
        return pos

    def _frozenset(self, pos: int) -> int:
        return self._push(frozenset(self._checked(self._collected())), pos)

    def _checked(self, keys: list[Any]) -> list[Any]:
        for key in keys:
            if type(key) is not str:
                check_key(key, self.budget)
        return keys

    def _append(self, pos: int) -> int:
        value = self.stack.pop()
        return self._extend([value], pos)

    def _appends(self, pos: int) -> int:
        return self._extend(self._collected(), pos)

    def _extend(self, items: list[Any], pos: int) -> int:
        target = self.stack[-1]
        if type(target) is Record:
            if target.items is None:
                object.__setattr__(target, "items", [])
            target = target.items
        if type(target) is not list:
            raise self._refusal(
                f"appends to something of type {type(target).__name__}", "only lists are appended to; write it again"
            )
        target.extend(items)
        return pos

    def _setitem(self, pos: int) -> int:
        value = self.stack.pop()
        key = self.stack.pop()
        return self._set([key, value], pos)

    def _setitems(self, pos: int) -> int:
        return self._set(self._collected(), pos)

    def _set(self, items: list[Any], pos: int) -> int:
        target = self.stack[-1]
        if type(target) is Record:
            if target.items is None:
                object.__setattr__(target, "items", {})
            target = target.items
        if not isinstance(target, dict) or len(items) % 2:
            raise self._refusal(
                f"sets items of something of type {type(target).__name__}", "only dicts have items; write it again"
            )
        keys = self._checked(items[::2])
        self.budget.spent += 64 * len(keys)
        target.update(zip(keys, items[1::2], strict=True))
        return pos

    def _additems(self, pos: int) -> int:
        items = self._collected()
        target = self.stack[-1]
        if type(target) is not set:
            raise self._refusal(
                f"adds items to something of type {type(target).__name__}", "only sets are added to; write it again"
            )
        target.update(self._checked(items))
        return pos

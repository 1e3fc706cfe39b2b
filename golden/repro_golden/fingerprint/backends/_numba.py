"""psum128 and the statistics of a trace on the CPU: compiled by numba, cached on disk, run without the GIL.

Everything works on addresses, so a tensor of any alignment is read where it lies. The inner loops are written as LLVM
IR, 8 words at a time: the loop vectoriser settles for half the width of an AVX-512 machine, and a typed array cannot
express a load that is not aligned. Machines without such vectors get the same code, cut to what they have. (All in one
file, because numba's cache notices changes of the file that holds a function and of no other.)
"""

from __future__ import annotations

import itertools
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic

from repro_golden.fingerprint.definition import C1, C2, C3, C4, MASK
from repro_golden.fingerprint.kinds import BF16, BYTES, F16, F32, F64, I16, I32, I64, U16, U32, U64, WIDTHS

__all__ = ["gather", "run"]

intrinsic: Any = numba_intrinsic  # its type says that the typing context is an argument of the call

_C1, _C2, _C3, _C4 = np.uint64(C1), np.uint64(C2), np.uint64(C3), np.uint64(C4)
_S3, _S29, _S32, _S33, _ONE = np.uint64(3), np.uint64(29), np.uint64(32), np.uint64(33), np.uint64(1)
_NEAR = 4096
"""Words (32 KiB) that are mixed and then, still in the cache, measured."""
_LINE = 64
"""Elements that lie close together and are read together."""

Table = npt.NDArray[np.int64]


_WIDTH, _UNROLL = 8, 2
_BLOCK = _WIDTH * _UNROLL  # words that `_mix_blocks` takes at a time

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_I64, _WIDTH)


def _same(value: int) -> ir.Constant:
    return ir.Constant(_VECTOR, [value & MASK] * _WIDTH)


def _spread(builder: Any, value: Any) -> Any:
    """A vector of one value."""
    empty = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(_I32, _WIDTH), [0] * _WIDTH))


@intrinsic
def _mix_blocks(_: Any, address: Any, blocks: Any, key: Any, step: Any) -> Any:
    """Both lanes of ``blocks * _BLOCK`` words from `address` on, any alignment, with keys from `key` on by `step`."""
    signature = types.UniTuple(types.uint64, 2)(types.uint64, types.int64, types.uint64, types.uint64)
    del address, blocks, key, step

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, blocks, *parts = arguments
        base = builder.inttoptr(address, _VECTOR.as_pointer())
        first, step = (_spread(builder, part) for part in parts)
        further = builder.mul(step, _same(_BLOCK))
        sums, keys = [], []
        for u in range(_UNROLL):
            places = ir.Constant(_VECTOR, list(range(u * _WIDTH, (u + 1) * _WIDTH)))
            keys.append(cgutils.alloca_once_value(builder, builder.add(first, builder.mul(step, places))))
            sums.append([cgutils.alloca_once_value(builder, _same(0)) for _ in "ab"])
        with cgutils.for_range(builder, blocks, intp=_I64) as loop:
            for u in range(_UNROLL):
                index = builder.add(builder.mul(loop.index, ir.Constant(_I64, _UNROLL)), ir.Constant(_I64, u))
                word = builder.load(builder.gep(base, [index]))
                word.align = 1
                for total, mixed in zip(sums[u], _mixed(builder, word, builder.load(keys[u])), strict=True):
                    builder.store(builder.add(builder.load(total), mixed), total)
                builder.store(builder.add(builder.load(keys[u]), further), keys[u])
        lanes = []
        for lane in range(2):
            total = _same(0)
            for u in range(_UNROLL):
                total = builder.add(total, builder.load(sums[u][lane]))
            parts = [builder.extract_element(total, ir.Constant(_I32, j)) for j in range(_WIDTH)]
            value = parts[0]
            for part in parts[1:]:
                value = builder.add(value, part)
            lanes.append(value)
        return context.make_tuple(builder, signature.return_type, lanes)

    return signature, codegen


def _mixed(builder: Any, word: Any, key: Any) -> tuple[Any, Any]:
    """The definition's bijection, for a vector of words and of keys."""

    def fold(value: Any, shift: int) -> Any:
        return builder.xor(value, builder.lshr(value, _same(shift)))

    z = builder.xor(word, key)
    z = builder.mul(fold(z, 33), _same(C2))
    z = builder.mul(fold(z, 29), _same(C3))
    z = fold(z, 32)
    return fold(builder.mul(z, _same(C1)), 32), fold(builder.mul(builder.xor(z, key), _same(C4)), 32)


def _loader(result: Any, bits: int) -> Any:
    @intrinsic
    def load(_: Any, address: Any, index: Any) -> Any:
        signature = result(types.uint64, types.int64)
        del address, index

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            del context, signature
            base = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = builder.load(builder.gep(base, [arguments[1]]))
            value.align = 1
            return value

        return signature, codegen

    return load


_load8, _load16 = _loader(types.uint8, 8), _loader(types.uint16, 16)
_load32, _load64 = _loader(types.uint32, 32), _loader(types.uint64, 64)


def _measurer(kind: int) -> Any:
    """The statistics of one kind of number: 8 accumulators, so the order of the sum depends on the count alone."""
    doubles = ir.VectorType(ir.DoubleType(), _WIDTH)
    width = WIDTHS[kind]
    raw = ir.VectorType(ir.IntType(8 * width), _WIDTH)
    infinity = ir.Constant(doubles, [float("inf")] * _WIDTH)

    @intrinsic
    def measure(_: Any, address: Any, count: Any) -> Any:
        signature = types.Tuple((types.int64, types.float64, types.float64))(types.uint64, types.int64)
        del address, count

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address, count = arguments
            bad, top, squares = (cgutils.alloca_once_value(builder, _fill(t, 0)) for t in (_VECTOR, doubles, doubles))

            def take(values: Any) -> None:
                magnitude = _magnitude(builder, kind, values)
                finite = builder.fcmp_ordered("<", magnitude, infinity)  # false for NaN
                value = builder.select(finite, magnitude, _fill(doubles, 0))
                larger = builder.fcmp_ordered(">", value, builder.load(top))
                builder.store(builder.select(larger, value, builder.load(top)), top)
                builder.store(builder.fadd(builder.load(squares), builder.fmul(value, value)), squares)
                builder.store(builder.add(builder.load(bad), builder.zext(builder.not_(finite), _VECTOR)), bad)

            base = builder.inttoptr(address, raw.as_pointer())
            blocks = builder.lshr(count, ir.Constant(_I64, 3))
            with cgutils.for_range(builder, blocks, intp=_I64) as loop:
                values = builder.load(builder.gep(base, [loop.index]))
                values.align = 1
                take(values)
            remainder = cgutils.alloca_once_value(builder, _fill(raw, 0))  # zeros add nothing
            left = builder.mul(builder.and_(count, ir.Constant(_I64, 7)), ir.Constant(_I64, width))
            cgutils.raw_memcpy(builder, remainder, builder.gep(base, [blocks]), left, ir.Constant(_I64, 1), align=1)
            take(builder.load(remainder))
            largest, total = builder.load(top), builder.load(squares)
            parts = [[builder.extract_element(v, ir.Constant(_I32, j)) for j in range(_WIDTH)] for v in
                     (builder.load(bad), largest, total)]  # fmt: skip
            while len(parts[0]) > 1:
                parts[0] = [builder.add(a, b) for a, b in itertools.pairwise(parts[0])][::2]
                parts[1] = [builder.select(builder.fcmp_ordered(">", a, b), a, b)
                            for a, b in itertools.pairwise(parts[1])][::2]  # fmt: skip
                parts[2] = [builder.fadd(a, b) for a, b in itertools.pairwise(parts[2])][::2]
            return context.make_tuple(builder, signature.return_type, [p[0] for p in parts])

        return signature, codegen

    return measure


def _fill(kind: Any, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * _WIDTH)


def _magnitude(builder: Any, kind: int, values: Any) -> Any:
    """Magnitudes as fp64, exact but for 64-bit integers; infinite or NaN where the number is not finite."""
    doubles, integers = ir.VectorType(ir.DoubleType(), _WIDTH), ir.VectorType(_I32, _WIDTH)
    if kind in (I16, I32, I64):
        signed = builder.sitofp(builder.sext(values, _VECTOR) if kind != I64 else values, doubles)
        negative = builder.fcmp_ordered("<", signed, _fill(doubles, 0))
        return builder.select(negative, builder.fsub(_fill(doubles, 0), signed), signed)
    if kind in (U16, U32, U64):
        return builder.uitofp(builder.zext(values, _VECTOR) if kind != U64 else values, doubles)
    if kind == F64:
        return builder.bitcast(builder.and_(values, _fill(_VECTOR, (1 << 63) - 1)), doubles)
    if kind == F32:
        bits = builder.and_(values, _fill(integers, 0x7FFFFFFF))
    else:
        bits = builder.and_(builder.zext(values, integers), _fill(integers, 0x7FFF))
        bits = builder.shl(bits, _fill(integers, 16 if kind == BF16 else 13))
    value = builder.fpext(builder.bitcast(bits, ir.VectorType(ir.FloatType(), _WIDTH)), doubles)
    if kind == F16:  # its exponent is fp32's less 112, and its largest one means not finite
        finite = builder.icmp_unsigned("<", bits, _fill(integers, 0x7C00 << 13))
        value = builder.select(finite, builder.fmul(value, _fill(doubles, 2.0**112)), _fill(doubles, float("inf")))
    return value


_measure_f32, _measure_bf16, _measure_f16, _measure_f64 = (_measurer(k) for k in (F32, BF16, F16, F64))
_measure_i16, _measure_u16, _measure_i32 = (_measurer(k) for k in (I16, U16, I32))
_measure_u32, _measure_i64, _measure_u64 = (_measurer(k) for k in (U32, I64, U64))


@numba.njit(nogil=True, cache=True)
def run(jobs: Table, luts: npt.NDArray[np.float64], sums: npt.NDArray[np.uint64], stats: Any) -> None:
    """Carry out `jobs` [n, 12] (see `backends.JOB`).

    Lanes go into `sums` [n, 2]; non-finite count, absmax and sum of squares into `stats` [n, 3] where a job's kind asks
    for them. `luts` [m, 256, 2] holds magnitude and square of each 8-bit pattern.
    """
    together = np.empty(_NEAR, np.uint64)  # for scattered jobs
    for k in range(jobs.shape[0]):
        address, stride = np.uint64(jobs[k, 0]), np.uint64(jobs[k, 3])
        words, tail, kind, lut = jobs[k, 2], jobs[k, 6], jobs[k, 8], jobs[k, 9]
        key, key_step = (np.uint64(jobs[k, 4]) + _ONE) * _C1, np.uint64(jobs[k, 5]) * _C1
        a = b = np.uint64(0)
        bad, top, squares = 0, 0.0, 0.0
        rows = jobs[k, 1]
        if jobs[k, 10]:
            a, b, bad, top, squares = _scattered(address, rows, words, stride, jobs[k, 10], np.uint64(jobs[k, 11]),
                                                 key, key_step, kind, luts[lut], together)  # fmt: skip
            rows = 0
        for _ in range(rows):
            for near in range(0, max(words, 1), _NEAR):
                here, count = address + (np.uint64(near) << _S3), min(words - near, _NEAR)
                c, d = _mix(here, count, key + np.uint64(near) * _C1, _C1)
                a, b = a + c, b + d
                extra = tail if near + count == words else 0
                if extra:
                    c, d = _mix_tail(here, count, extra, key + np.uint64(near + count) * _C1)
                    a, b = a + c, b + d
                if kind:
                    e, f, g = _measure(here, count * 8 + extra, kind, luts[lut])
                    bad, top, squares = bad + e, max(top, f), squares + g
            address += stride
            key += key_step
        sums[k, 0], sums[k, 1] = a, b
        if kind:
            stats[k, 0], stats[k, 1], stats[k, 2] = bad, top, squares


@numba.njit(nogil=True, cache=True)
def _scattered(
    address: Any,
    rows: int,
    words: int,
    stride: Any,
    item: int,
    pitch: Any,
    key: Any,
    key_step: Any,
    kind: int,
    lut: Any,
    near: Any,
) -> tuple[Any, Any, int, float, float]:
    """`run` for one job of scattered elements: what lies close together is read together, a cacheful at a time."""
    slow, slow_at, slow_key, wide = rows, stride, key_step, _NEAR
    fast, fast_at, fast_key = words, np.uint64(8 // item) * pitch, _C1
    if rows > 1 and stride < pitch:
        slow, slow_at, slow_key, fast, fast_at, fast_key = fast, fast_at, fast_key, slow, slow_at, slow_key
        wide = _LINE
    start = np.uint64(near.ctypes.data)
    a = b = np.uint64(0)
    bad, top, squares = 0, 0.0, 0.0
    for left in range(0, fast, wide):
        width = min(wide, fast - left)
        high = _NEAR // width
        for up in range(0, slow, high):
            height = min(high, slow - up)
            for i in range(height):
                here = address + np.uint64(up + i) * slow_at + np.uint64(left) * fast_at
                _collect(here, width, fast_at, item, pitch, near[i * width :])
                now = key + np.uint64(up + i) * slow_key + np.uint64(left) * fast_key
                c, d = _mix(start + np.uint64(i * width * 8), width, now, fast_key)
                a, b = a + c, b + d
            if kind:
                e, f, g = _measure(start, height * width * 8, kind, lut)
                bad, top, squares = bad + e, max(top, f), squares + g
    return a, b, bad, top, squares


@numba.njit(nogil=True, cache=True)
def _collect(address: Any, count: int, step: Any, item: int, pitch: Any, out: Any) -> None:
    """Words of elements `pitch` bytes apart, each word `step` bytes further, into `out`."""
    if item == 1:
        _collect8(address, count, step, pitch, out)
    elif item == 2:
        _collect16(address, count, step, pitch, out)
    elif item == 4:
        _collect32(address, count, step, pitch, out)
    else:
        for j in range(count):
            out[j] = _load64(address + np.uint64(j) * step, 0)


def _collector(load: Any, item: int) -> Any:
    bits, most, size = np.uint64(8 * item), 8 // item, np.uint64(item)

    @numba.njit(nogil=True, cache=True)
    def collect(address: Any, count: int, step: Any, pitch: Any, out: Any) -> None:
        if step == size:
            for j in range(count):
                out[j] = np.uint64(load(address, j))
            for k in range(1, most):
                for j in range(count):
                    out[j] |= np.uint64(load(address + np.uint64(k) * pitch, j)) << (bits * np.uint64(k))
        else:
            for j in range(count):
                word = np.uint64(0)
                for k in range(most):
                    word |= np.uint64(load(address + np.uint64(k) * pitch, 0)) << (bits * np.uint64(k))
                out[j] = word
                address += step

    return collect


_collect8, _collect16, _collect32 = (_collector(load, item) for load, item in ((_load8, 1), (_load16, 2), (_load32, 4)))


@numba.njit(nogil=True, cache=True)
def lanes(address: int, words: int, tail: int) -> tuple[Any, Any]:
    """The two lanes of so many words at an address, and of `tail` bytes behind them: `run` for one small buffer."""
    start = np.uint64(address)
    a, b = _mix(start, words, _C1, _C1)
    if tail:
        c, d = _mix_tail(start, words, tail, (np.uint64(words) + _ONE) * _C1)
        a, b = a + c, b + d
    return a, b


@numba.njit(nogil=True, cache=True)
def gather(table: Table, out: npt.NDArray[np.uint64]) -> None:
    """The 1 to 8 bytes at each address of `table` [n, 2] (address, bytes) as a little-endian word of `out` [n]."""
    for k in range(table.shape[0]):
        word = np.uint64(0)
        for i in range(table[k, 1]):
            word |= np.uint64(_load8(np.uint64(table[k, 0]), i)) << np.uint64(8 * i)
        out[k] = word


@numba.njit(nogil=True, cache=True, inline="always")
def _mix_one(word: Any, key: Any) -> tuple[Any, Any]:
    z = word ^ key
    z = (z ^ (z >> _S33)) * _C2
    z = (z ^ (z >> _S29)) * _C3
    z = z ^ (z >> _S32)
    a, b = z * _C1, (z ^ key) * _C4
    return a ^ (a >> _S32), b ^ (b >> _S32)


@numba.njit(nogil=True, cache=True)
def _mix(address: Any, words: int, key: Any, step: Any) -> tuple[Any, Any]:
    blocks = words // _BLOCK
    a, b = _mix_blocks(address, blocks, key, step)
    key += np.uint64(blocks * _BLOCK) * step
    for i in range(blocks * _BLOCK, words):
        c, d = _mix_one(_load64(address, i), key)
        a, b = a + c, b + d
        key += step
    return a, b


@numba.njit(nogil=True, cache=True)
def _mix_tail(address: Any, words: int, tail: int, key: Any) -> tuple[Any, Any]:
    word = np.uint64(0)
    for i in range(tail):
        word |= np.uint64(_load8(address, words * 8 + i)) << np.uint64(8 * i)
    return _mix_one(word, key)


# Statistics describe a signal to people; equality never rests on them. Sums of squares run in fp64, in an order that
# depends on the length alone: one figure on every CPU, with any number of threads.


@numba.njit(nogil=True, cache=True)
def _measure(address: Any, size: int, kind: int, lut: npt.NDArray[np.float64]) -> tuple[int, float, float]:
    """Non-finite count, largest finite magnitude and sum of squares of the finite values in `size` bytes."""
    if kind == F32:
        return _measure_f32(address, size >> 2)
    if kind == BF16:
        return _measure_bf16(address, size >> 1)
    if kind == F16:
        return _measure_f16(address, size >> 1)
    if kind == F64:
        return _measure_f64(address, size >> 3)
    if kind == BYTES:
        return _look_up(address, size, lut)
    if kind == I64:
        return _measure_i64(address, size >> 3)
    if kind == I32:
        return _measure_i32(address, size >> 2)
    if kind == I16:
        return _measure_i16(address, size >> 1)
    if kind == U64:
        return _measure_u64(address, size >> 3)
    if kind == U32:
        return _measure_u32(address, size >> 2)
    return _measure_u16(address, size >> 1)


@numba.njit(nogil=True, cache=True)
def _look_up(address: Any, size: int, lut: npt.NDArray[np.float64]) -> tuple[int, float, float]:
    counts = np.zeros(256, np.int64)
    for i in range(size):
        counts[_load8(address, i)] += 1
    bad, top, squares = 0, 0.0, 0.0
    for pattern in range(256):
        if counts[pattern] and lut[pattern, 0] < np.inf:
            top = max(top, lut[pattern, 0])
            squares += lut[pattern, 1] * counts[pattern]
        else:
            bad += counts[pattern]
    return bad, top, squares

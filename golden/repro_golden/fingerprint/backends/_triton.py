"""psum128 and the statistics of a trace on a GPU, in Triton: one launch over a table of pieces of many tensors.

Each program takes one piece (a row of the table, `backends.JOB`) and writes one row of results; nothing is accumulated
between programs, so there are no atomics, nothing to clear, and even the floating-point sums have one order. Of floats
the statistics are taken as if all were finite, and once more, with a count, of a piece in which one is not. Words that
begin off an 8-byte address, and last words, are cut out of the aligned 8-byte words around them: memory is allocated in
larger units than that, so nothing outside an allocation is touched.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from repro_golden.fingerprint import definition, kinds

__all__ = ["gather", "pieces", "whole"]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


C1, C2 = tl.constexpr(_signed(definition.C1)), tl.constexpr(_signed(definition.C2))
C3, C4 = tl.constexpr(_signed(definition.C3)), tl.constexpr(_signed(definition.C4))
F32, BF16, F16, F64, BYTES = (tl.constexpr(k) for k in (kinds.F32, kinds.BF16, kinds.F16, kinds.F64, kinds.BYTES))
I16, I32, I64 = (tl.constexpr(k) for k in (kinds.I16, kinds.I32, kinds.I64))
U16, U32, U64 = (tl.constexpr(k) for k in (kinds.U16, kinds.U32, kinds.U64))


@triton.jit
def _shift(x, n):
    return (x.to(tl.uint64, bitcast=True) >> n).to(tl.int64, bitcast=True)


@triton.jit
def _times(x, CONSTANT: tl.constexpr, PTX: tl.constexpr):
    """The low 64 bits of a product: three multiplications, where the compiler makes four instructions of ``*``."""
    if not PTX:
        product = x * CONSTANT
    else:
        product = tl.inline_asm_elementwise(
            """{
            .reg .u32 low, high, constant_low, constant_high, product_low, product_high;
            .reg .u64 product;
            mov.b64 {low, high}, $1;
            mov.b64 {constant_low, constant_high}, $2;
            mul.wide.u32 product, low, constant_low;
            mov.b64 {product_low, product_high}, product;
            mad.lo.u32 product_high, low, constant_high, product_high;
            mad.lo.u32 product_high, high, constant_low, product_high;
            mov.b64 $0, {product_low, product_high};
            }""",
            "=l,l,l",
            [x, tl.full((), CONSTANT, tl.int64)],
            dtype=tl.int64,
            is_pure=True,
            pack=1,
        )
    return product


@triton.jit
def _mix(word, key, PTX: tl.constexpr = False):
    z = word ^ key
    z = _times(z ^ _shift(z, 33), C2, PTX)
    z = _times(z ^ _shift(z, 29), C3, PTX)
    z = z ^ _shift(z, 32)
    a, b = _times(z, C1, PTX), _times(z ^ key, C4, PTX)
    return a ^ _shift(a, 32), b ^ _shift(b, 32)


@triton.jit
def _cut(address, size, mask):
    """The 1 to 8 bytes at any address as a word."""
    inside = address & 7
    low = (address - inside).to(tl.pointer_type(tl.int64))
    shift = (inside * 8).to(tl.uint64)
    word = _shift(tl.load(low, mask=mask, other=0), shift)
    beyond = mask & (inside + size > 8)
    high = tl.load(low + 1, mask=beyond, other=0)
    word = tl.where(beyond, word | (high << ((64 - inside * 8) & 63)), word)
    return tl.where(size < 8, word & ((tl.full((), 1, tl.int64) << ((size & 7) * 8)) - 1), word)


@triton.jit
def _collected(address, pitch, mask, ITEM: tl.constexpr):
    """The elements of `ITEM` bytes at an address and each `pitch` further as a word."""
    bits: tl.constexpr = tl.uint8 if ITEM == 1 else tl.uint16 if ITEM == 2 else tl.uint32 if ITEM == 4 else tl.uint64
    word = tl.load(address.to(tl.pointer_type(bits)), mask=mask, other=0).to(tl.int64)
    for k in tl.static_range(1, 8 // ITEM):
        part = tl.load((address + k * pitch).to(tl.pointer_type(bits)), mask=mask, other=0)
        word |= part.to(tl.int64) << (8 * ITEM * k)
    return word


@triton.jit
def _number(bits, KIND: tl.constexpr):
    """The fp64 number whose pattern without its sign is `bits`, int32."""
    if KIND == F32:
        value = bits.to(tl.float32, bitcast=True).to(tl.float64)
    elif KIND == BF16:
        value = (bits << 16).to(tl.float32, bitcast=True).to(tl.float64)
    else:  # F16, whose exponent is fp32's less 112
        value = (bits << 13).to(tl.float32, bitcast=True).to(tl.float64) * 5192296858534827628530496329220096.0
    return value


@triton.jit
def _pair(bits, top):
    """Of the two BF16 in an int32: the larger magnitudes of these and two more, with any sign, and both as fp64.

    That of a NaN is not taken.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $3;
        max.xorsign.abs.bf16x2 $0, $3, $4;
        cvt.f64.bf16 $1, low;
        cvt.f64.bf16 $2, high;
        }""",
        "=&r,=&d,=&d,r,r",
        [bits, top],
        dtype=(tl.int32, tl.float64, tl.float64),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _measure_finite(word, top, squares, KIND: tl.constexpr, PTX: tl.constexpr):
    """Add the floats of words, as if all were finite, to the largest magnitude (fp32) and the squares (fp64).

    One that is not shows in the squares, or for F16, whose patterns are read as fp32 of 2^-112 times the size, in the
    magnitude. Nothing else is done for each number: instructions are what the kernel has least of. With `PTX` the
    largest magnitude of BF16 is two in an int32, with any sign.
    """
    for half in tl.static_range(2):
        bits = _shift(word, 32 * half).to(tl.int32)
        if KIND == F32:
            top, squares = _take_finite(bits.to(tl.float32, bitcast=True), top, squares)
        elif KIND == BF16 and PTX:
            top, low, high = _pair(bits, top)
            squares += low * low
            squares += high * high
        elif KIND == BF16:
            top, squares = _take_finite((bits << 16).to(tl.float32, bitcast=True), top, squares)
            top, squares = _take_finite((bits & -65536).to(tl.float32, bitcast=True), top, squares)
        else:
            top, squares = _take_finite(((bits & 0x7FFF) << 13).to(tl.float32, bitcast=True), top, squares)
            top, squares = _take_finite(((bits >> 3) & 0xFFFE000).to(tl.float32, bitcast=True), top, squares)
    return top, squares


@triton.jit
def _take_finite(value, top, squares):
    wide = value.to(tl.float64)
    return tl.maximum(top, tl.abs(value)), squares + wide * wide


@triton.jit
def _take_bits(bits, bad, top, squares, KIND: tl.constexpr):
    """`_take` of patterns without signs, which order as their numbers do: 32-bit work for all but the square."""
    if KIND == F32:
        finite = bits < 0x7F800000
    elif KIND == BF16:
        finite = bits < 0x7F80
    else:
        finite = bits < 0x7C00
    bits = tl.where(finite, bits, 0)
    value = _number(bits, KIND)
    return bad + tl.where(finite, 0, 1), tl.maximum(top, bits), squares + value * value


@triton.jit
def _take(value, bad, top, squares):
    """Add magnitudes to the statistics; NaN and infinities count as not finite."""
    finite = value < float("inf")
    value = tl.where(finite, value, 0.0)
    return bad + tl.where(finite, 0, 1), tl.maximum(top, value), squares + value * value


@triton.jit
def _integer(part, sign, SIGNED: tl.constexpr):
    """The magnitude of an integer whose pattern fills the low bits of `part`; `sign` is its highest one."""
    value = part.to(tl.float64)
    if SIGNED:
        value = tl.abs(((part ^ sign) - sign).to(tl.float64))
    return value


@triton.jit
def _measure(word, size, lut, bad, top, squares, KIND: tl.constexpr):
    """Add the numbers in the first `size` bytes of words; the other bytes are 0."""
    if KIND == F64:
        value = (word & 0x7FFFFFFFFFFFFFFF).to(tl.float64, bitcast=True)
        bad, top, squares = _take(value, bad, top, squares)
    elif KIND == I64:
        bad, top, squares = _take(tl.abs(word.to(tl.float64)), bad, top, squares)
    elif KIND == U64:
        bad, top, squares = _take(word.to(tl.uint64, bitcast=True).to(tl.float64), bad, top, squares)
    elif KIND == F32:
        for k in tl.static_range(2):
            bits = _shift(word, 32 * k).to(tl.int32) & 0x7FFFFFFF
            bad, top, squares = _take_bits(bits, bad, top, squares, KIND)
    elif KIND == BF16 or KIND == F16:
        for k in tl.static_range(4):
            bits = _shift(word, 16 * k).to(tl.int32) & 0x7FFF
            bad, top, squares = _take_bits(bits, bad, top, squares, KIND)
    elif KIND == I32 or KIND == U32:
        for k in tl.static_range(2):
            value = _integer(_shift(word, 32 * k) & 0xFFFFFFFF, 0x80000000, KIND == I32)
            bad, top, squares = _take(value, bad, top, squares)
    elif KIND == BYTES:
        for k in tl.static_range(8):  # byte 0 need not be the number 0
            pattern = _shift(word, 8 * k) & 0xFF
            value = tl.load(lut + pattern * 2)
            inside = k < size
            finite = inside & (value < float("inf"))
            bad += tl.where(inside & (value == float("inf")), 1, 0)
            top = tl.maximum(top, tl.where(finite, value, 0.0))
            squares += tl.where(finite, tl.load(lut + pattern * 2 + 1), 0.0)
    else:
        for k in tl.static_range(4):
            value = _integer(_shift(word, 16 * k) & 0xFFFF, 0x8000, KIND == I16)
            bad, top, squares = _take(value, bad, top, squares)
    return bad, top, squares


@triton.jit
def _stretch_word(address, base, index, ALIGNED: tl.constexpr):
    """Whole words of one stretch: those of `base`, or each cut out of the two aligned ones that it lies in."""
    word = tl.load(base + index)
    if ALIGNED < 8:
        shift = (address & 7) * 8
        word = _shift(word, shift.to(tl.uint64)) | (tl.load(base + index + 1) << (64 - shift))
    return word


@triton.jit
def _again(address, rows, words, stride, tail, pitch, KIND: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr):
    """Non-finite count, largest pattern and squares of a piece with numbers that are not finite."""
    i = tl.arange(0, BLOCK).to(tl.int64)
    bad = tl.zeros((BLOCK,), tl.int32)
    top = tl.zeros((BLOCK,), tl.int32)
    squares = tl.zeros((BLOCK,), tl.float64)
    width = tl.maximum(words + (tail > 0), 1)
    count = rows * (words + (tail > 0))
    at = count * 0
    while at < count:
        inside = at + i < count
        line = (at + i) // width
        column = at + i - line * width
        size = tl.where(column < words, 8, tail)
        if ITEM:
            word = _collected(address + line * stride + column * (8 // ITEM * pitch), pitch, inside, ITEM)
        else:
            word = _cut(address + line * stride + column * 8, size, inside)
        bad, top, squares = _measure(tl.where(inside, word, 0), size, 0, bad, top, squares, KIND)
        at += BLOCK
    return tl.sum(bad.to(tl.int64), 0), _number(tl.max(top, 0), KIND), tl.sum(squares, 0)


@triton.jit(do_not_specialize=["begin"])
def pieces(  # noqa: C901 - a kernel's branches are taken when it is compiled
    table,
    out,
    luts,
    begin,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ITEM: tl.constexpr,
    ACROSS: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    STEP: tl.constexpr,
):
    """Rows ``begin ...`` of `table` [n, 12] into those of `out` [n, WIDTH]: lanes, and the statistics of `KIND` if 5.

    Without `ROWS` each piece is one stretch. All its rows begin at a multiple of `ALIGNED` bytes: 1, 8 or 16. With
    `ITEM` they are scattered elements of so many bytes; with `ACROSS` those of different rows lie closer together, so
    neighbouring threads take neighbouring rows. With `PTX` instructions are written out: NVIDIA's GPUs have them
    from compute capability 9.0 on, and Triton's interpreter has none. `STEP` is ``BLOCK * C1`` modulo 2^64.
    """
    floats: tl.constexpr = KIND == F32 or KIND == BF16 or KIND == F16
    row = tl.program_id(0).to(tl.int64) + begin
    job = table + row * 12
    address, rows, words, stride = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3)
    first, step, tail = tl.load(job + 4), tl.load(job + 5), tl.load(job + 6)
    pitch = tl.load(job + 11)
    lut = luts + tl.load(job + 9) * 512
    i = tl.arange(0, BLOCK).to(tl.int64)
    a = tl.zeros((BLOCK,), tl.int64)
    b = tl.zeros((BLOCK,), tl.int64)
    bad = tl.zeros((BLOCK,), tl.int32)
    top = tl.zeros((BLOCK,), tl.int32 if KIND == BF16 and PTX else tl.float32 if floats else tl.float64)
    squares = tl.zeros((BLOCK,), tl.float64)
    if ROWS:
        # a piece is small: its words are counted in 32 bits, and each thread moves on without dividing
        width = (words + (tail > 0)).to(tl.int32)
        count = rows.to(tl.int32) * width
        divisor = tl.maximum(rows.to(tl.int32) if ACROSS else width, 1)
        slow = tl.arange(0, BLOCK) // divisor
        fast = tl.arange(0, BLOCK) - slow * divisor
        slows, fasts = BLOCK // divisor, BLOCK - BLOCK // divisor * divisor
        at = count * 0
        while at < count:
            for _ in tl.static_range(UNROLL):
                line, column = (fast, slow) if ACROSS else (slow, fast)
                inside = slow < (width if ACROSS else rows)
                where = address + line * stride + column.to(tl.int64) * (8 // ITEM * pitch if ITEM else 8)
                size = tl.where(column < words, 8, tail)
                if ITEM:
                    word = _collected(where, pitch, inside, ITEM)
                elif ALIGNED >= 8:
                    word = tl.load(where.to(tl.pointer_type(tl.int64)), mask=inside, other=0)
                    word = tl.where(size < 8, word & ((tl.full((), 1, tl.int64) << ((size & 7) * 8)) - 1), word)
                else:
                    word = tl.where(inside, _cut(where, size, inside), 0)
                x, y = _mix(word, (first + line * step + column + 1) * C1, PTX)
                a += tl.where(inside, x, 0)
                b += tl.where(inside, y, 0)
                if floats:
                    top, squares = _measure_finite(word, top, squares, KIND, PTX)
                elif KIND:
                    bad, top, squares = _measure(word, tl.where(inside, size, 0), lut, bad, top, squares, KIND)
                slow += slows
                fast += fasts
                slow += (fast >= divisor).to(tl.int32)
                fast = tl.where(fast >= divisor, fast - divisor, fast)
            at += BLOCK * UNROLL
    else:
        base = (address - (address & 7)).to(tl.pointer_type(tl.int64))
        if ALIGNED == 16:
            base = tl.multiple_of(base, 16)
        key = (first + 1 + i) * C1
        whole = words // (BLOCK * UNROLL) * (BLOCK * UNROLL)
        at = whole * 0
        while at < whole:
            for u in tl.static_range(UNROLL):
                word = _stretch_word(address, base, at + u * BLOCK + i, ALIGNED)
                x, y = _mix(word, key, PTX)
                a += x
                b += y
                key += STEP
                if floats:
                    top, squares = _measure_finite(word, top, squares, KIND, PTX)
                elif KIND:
                    bad, top, squares = _measure(word, 8, lut, bad, top, squares, KIND)
            at += BLOCK * UNROLL
        while at < words + (tail > 0):
            inside = at + i < words + (tail > 0)
            size = tl.where(inside, tl.where(at + i < words, 8, tail), 0)
            word = tl.where(inside, _cut(address + (at + i) * 8, size, inside), 0)
            x, y = _mix(word, key, PTX)
            a += tl.where(inside, x, 0)
            b += tl.where(inside, y, 0)
            key += STEP
            if floats:
                top, squares = _measure_finite(word, top, squares, KIND, PTX)
            elif KIND:
                bad, top, squares = _measure(word, size, lut, bad, top, squares, KIND)
            at += BLOCK
    out += row * WIDTH
    tl.store(out, tl.sum(a, 0))
    tl.store(out + 1, tl.sum(b, 0))
    if KIND == BF16 and PTX:
        low, high = (top << 16).to(tl.float32, bitcast=True), (top & -65536).to(tl.float32, bitcast=True)
        top = tl.maximum(tl.abs(low), tl.abs(high))
    if WIDTH == 5:
        count_bad = tl.full((), 0, tl.int64) if floats else tl.sum(bad.to(tl.int64), 0)
        largest, total = tl.max(top, 0).to(tl.float64), tl.sum(squares, 0)
        if KIND == F16:
            largest *= 5192296858534827628530496329220096.0
            total = total * 5192296858534827628530496329220096.0 * 5192296858534827628530496329220096.0
            total = tl.where(largest < 65536.0, total, float("inf"))
        if floats:  # noqa: SIM102 - only floats have `_again`
            if not total < float("inf"):
                count_bad, largest, total = _again(address, rows, words, stride, tail, pitch, KIND, ITEM, BLOCK)
        tl.store(out + 2, count_bad)
        tl.store(out + 3, largest.to(tl.int64, bitcast=True))
        tl.store(out + 4, total.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["address", "words", "tail", "slot"])
def whole(
    address,
    words,
    tail,
    out,
    slot,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    ROUNDS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Add the lanes of `words` words at `address`, and of `tail` bytes behind them, to row `slot` of `out` [n, 2].

    The address is a multiple of 8, with `ALIGNED` of 16. Integer sums have one result in any order, so programs may
    add to one place. `STEP` is ``BLOCK * C1`` modulo 2^64.
    """
    first = tl.program_id(0).to(tl.int64) * (BLOCK * UNROLL * ROUNDS)
    i = tl.arange(0, BLOCK).to(tl.int64)
    base = address.to(tl.pointer_type(tl.int64))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    key = (first + 1 + i) * C1
    a = tl.zeros((BLOCK,), tl.int64)
    b = tl.zeros((BLOCK,), tl.int64)
    count = words.to(tl.int64) + (tail > 0)
    end = tl.minimum(first + BLOCK * UNROLL * ROUNDS, count)
    full = first + tl.maximum(tl.minimum(end, words.to(tl.int64)) - first, 0) // (BLOCK * UNROLL) * (BLOCK * UNROLL)
    at = first
    while at < full:
        for u in tl.static_range(UNROLL):
            x, y = _mix(tl.load(base + at + u * BLOCK + i), key)
            a += x
            b += y
            key += STEP
        at += BLOCK * UNROLL
    while at < end:
        inside = at + i < end
        word = tl.load(base + at + i, mask=inside, other=0)
        cut = (at + i == words) & (tail > 0)
        word = tl.where(cut, word & ((tl.full((), 1, tl.int64) << (tail.to(tl.int64) * 8)) - 1), word)
        x, y = _mix(word, key)
        a += tl.where(inside, x, 0)
        b += tl.where(inside, y, 0)
        key += STEP
        at += BLOCK
    tl.atomic_add(out + slot * 2, tl.sum(a, 0))
    tl.atomic_add(out + slot * 2 + 1, tl.sum(b, 0))


@triton.jit(do_not_specialize=["count"])
def gather(table, out, count, BLOCK: tl.constexpr):
    """The 1 to 8 bytes at each address of `table` [count, 2] (address, bytes) as a word of `out` [count]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    word = _cut(tl.load(table + i * 2, mask=inside, other=0), tl.load(table + i * 2 + 1, mask=inside, other=8), inside)
    tl.store(out + i, word, mask=inside)

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from repro_golden.base.errors import ReproError
from repro_golden.fingerprint import Collector, Lanes, Share, dtype_name, fingerprint, merge, shares
from repro_golden.fingerprint.placement import Part, Placement, box, padding, read, shard, stack, steps_of, whole
from repro_golden.fingerprint.plan import EDGES_MAX
from repro_golden.fingerprint.share import Edge, Run, complete, union

torch.set_num_threads(1)
KINDS = (torch.uint8, torch.float8_e5m2, torch.bfloat16, torch.float32, torch.int64, torch.complex64, torch.complex128)
DTYPES = st.sampled_from(KINDS)
SHAPES = st.lists(st.integers(0, 7), max_size=4)
Held = tuple[Tensor, Placement]


def noise(shape: Sequence[int], dtype: torch.dtype, seed: int = 1) -> Tensor:
    raw = np.random.default_rng(seed).bytes((math.prod(shape) + 1) * dtype.itemsize)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)[:-1].reshape(tuple(shape))


def placed(t: Tensor, cut: tuple[range, ...], name: str = "") -> Held:
    return t[tuple(slice(r.start, r.stop) for r in cut)], box(name, t.shape, [r.start for r in cut], [*map(len, cut)])


@st.composite
def boxes(draw: st.DrawFn, shape: Sequence[int]) -> list[tuple[range, ...]]:
    """Boxes that make up a tensor: cut in two along any dimension at any place, time and again."""
    boxes: list[tuple[range, ...]] = [tuple(map(range, shape))]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        old, dim = boxes.pop(draw(st.integers(0, len(boxes) - 1))), draw(st.integers(0, len(shape) - 1))
        k = draw(st.integers(0, len(old[dim])))
        boxes += [(*old[:dim], side, *old[dim + 1 :]) for side in (old[dim][:k], old[dim][k:])]
    return boxes


@st.composite
def layouts(draw: st.DrawFn) -> Placement:
    """Boxes of several canonical tensors, each cut into runs of rows, and padding, stacked in any order."""
    row = draw(st.lists(st.integers(1, 4), max_size=2))
    pieces = [padding((n, *row)) for n in draw(st.lists(st.integers(0, 3), max_size=2))]
    for name in "xyz"[: draw(st.integers(0 if pieces else 1, 3))]:
        rows = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
        around = [draw(st.tuples(st.integers(0, 2), st.integers(0, 2))) for _ in range(1 + len(row))]
        shape = [n + sum(a) for n, a in zip([sum(rows), *row], around, strict=True)]
        before, *inner = (a for a, _ in around)
        starts = itertools.accumulate(rows, initial=before)
        pieces += [box(name, shape, [s, *inner], [n, *row]) for s, n in zip(starts, rows, strict=False)]
    return stack(draw(st.permutations(pieces)))


def pairs(part: Part) -> Iterator[tuple[int, int]]:
    """Which local element is which canonical one, by the definition."""
    for index in itertools.product(*map(range, part.size)):
        here, there = (sum(k * s for k, s in zip(index, steps, strict=True)) for steps in (part.step, part.to))
        yield part.start + here, part.at + there


def by_hand(local: Tensor, placement: Placement) -> dict[str, Share]:
    """Each canonical tensor's share, found byte by byte."""
    item, raw, pieces = local.element_size(), local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), {}
    for name in {part.name for part in placement.parts}:
        parts = [part for part in placement.parts if part.name == name]
        places = [(here * item + k, there * item + k) for p in parts for here, there in pairs(p) for k in range(item)]
        nbytes = math.prod(parts[0].shape) * item
        lanes, left = complete(nbytes, [Edge(there, raw[here : here + 1]) for here, there in places])
        runs = union([Run(there, 1) for _, there in places])
        pieces[name] = Share(dtype_name(local.dtype), parts[0].shape, nbytes, lanes, runs, left)
    return pieces


@given(st.builds(noise, SHAPES, DTYPES), st.data())
def test_any_pieces_add_up(t: Tensor, data: st.DataObject) -> None:
    """Pieces merged in any order and grouping are the whole tensor, and a replica counts once."""
    every = [shares(*placed(t, cut))[""] for cut in data.draw(boxes(t.shape))]
    grouped = data.draw(st.permutations(every))
    while len(grouped) > 1:
        a, b = sorted(data.draw(st.tuples(*[st.integers(0, len(grouped) - 1)] * 2)))
        grouped[a : b + 1] = [merge(grouped[a : b + 1])]
    assert merge(grouped) == merge(every) == merge([*every, data.draw(st.sampled_from(every))]) == shares(t)[""]
    assert merge(grouped).fingerprint == fingerprint(t)


@given(st.builds(noise, SHAPES.filter(all), DTYPES), st.data())
def test_what_does_not_fit_together_is_seen(t: Tensor, data: st.DataObject) -> None:
    """A missing piece leaves a hole; boxes that share elements, but not all, and replicas with one bit apart clash."""
    cuts, others = data.draw(st.tuples(boxes(t.shape), boxes(t.shape)))
    cut, other = (data.draw(st.sampled_from([c for c in every if all(c)])) for every in (cuts, others))
    if rest := [shares(*placed(t, c))[""] for c in cuts if c != cut]:
        assert not merge(rest).whole
        with pytest.raises(ReproError, match="merge the shares"):
            _ = merge(rest).fingerprint
    both, item = [shares(*placed(t, c))[""] for c in (cut, other)], t.element_size()
    here, there = ({element for _, element in pairs(placed(t, c)[1].parts[0])} for c in (cut, other))
    if here != there and here & there:
        with pytest.raises(ReproError, match="both hold byte"):
            merge(both)
    else:
        assert sum(r.length * r.repeats for r in merge(both).runs) == len(here | there) * item
    place = data.draw(st.sampled_from(sorted(here))) * item + data.draw(st.integers(0, item - 1))
    t.reshape(-1).view(torch.uint8)[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ReproError, match="replicas have parted"):
        merge([both[0], shares(*placed(t, cut))[""]])


def test_edges_inside_words_add_up_while_they_can_be_carried() -> None:
    """Ranks may meet inside a word, any number of them; one edge too many in one rank is refused with the cure."""
    t = noise((896,), torch.bfloat16)
    for each in (299, 150, 128, 14):  # 3, 6, 7 and 64 ranks
        every = [shares(*placed(t, (range(896)[a : a + each],)))[""] for a in range(0, 896, each)]
        assert any(s.edges for s in every) == (each != 128) and merge(every).fingerprint == fingerprint(t)
    t, halves = noise((EDGES_MAX + 1, 8), torch.bfloat16), (range(3), range(3, 8))
    every = [shares(*placed(t[:-1], (range(EDGES_MAX), half)))[""] for half in halves]
    assert merge(every).fingerprint == fingerprint(t[:-1])
    for half in halves:
        with pytest.raises(ReproError, match="gather it over the ranks"):
            shares(*placed(t, (range(EDGES_MAX + 1), half)))


@given(layouts(), DTYPES, st.data())
def test_flat_slices_of_any_layout_add_up(p: Placement, dtype: torch.dtype, data: st.DataObject) -> None:
    """A layout's shares are those found element by element; slices of its flat buffer merge to them; all is data."""
    local = noise(p.shape, dtype)
    given = shares(local, p)
    assert given == by_hand(local, p)
    ends = sorted([0, local.numel(), *data.draw(st.lists(st.integers(0, local.numel()), max_size=4))])
    slices = [shares(local.reshape(-1)[a:b], p.flat(a, b)) for a, b in itertools.pairwise(ends)]
    for name, share in given.items():
        assert merge(s[name] for s in data.draw(st.permutations(slices)) if name in s) == share
    for q in (p, *(p.flat(a, b) for a, b in itertools.pairwise(ends))):
        assert read(json.loads(json.dumps(q.to_data()))) == q
    for s in itertools.chain(*(every.values() for every in (given, *slices))):
        assert Share.from_cover(s.dtype, s.shape, Lanes.from_bytes(s.lanes.to_bytes()), s.cover_text()) == s


@given(layouts(), DTYPES, st.data())
def test_flat_slices_given_as_data_add_up(p: Placement, dtype: torch.dtype, data: st.DataObject) -> None:
    """``"flat": [start, stop]`` beside a placement is that slice of it, and the slices' shares are the whole's."""
    local, raw = noise(p.shape, dtype), p.to_data()
    ends = sorted([0, local.numel(), *data.draw(st.lists(st.integers(0, local.numel()), max_size=4))])
    slices = {ab: json.loads(json.dumps(raw | {"flat": ab})) for ab in itertools.pairwise(ends)}
    assert all(read(placement) == p.flat(*ab) for ab, placement in slices.items())
    every = [shares(local.reshape(-1)[a:b], placement) for (a, b), placement in slices.items()]
    for name, share in shares(local, p).items():
        assert merge(s[name] for s in data.draw(st.permutations(every)) if name in s) == share


@given(st.lists(st.tuples(*map(st.integers, (0, 0, 1), (4, 3, 9))), max_size=3), st.data())
def test_a_window_is_the_elements_inside_it(dims: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """A window of any part holds exactly its elements inside, renumbered, in at most two parts a dimension and one."""
    room = [n + gap for n, gap, _ in dims]
    small, place = st.integers(0, 5), st.integers(0, math.prod(room) + 6)
    size, to = tuple(n for n, _, _ in dims), tuple(t for _, _, t in dims)
    part = Part("x", (999,), size, data.draw(small), steps_of(room), data.draw(small), to)
    start, stop = sorted(data.draw(st.tuples(place, place)))
    parts = list(part.window(start, stop))
    inside = [(here - start, there) for here, there in pairs(part) if start <= here < stop]
    assert sorted(pair for p in parts for pair in pairs(p)) == sorted(inside)
    assert len(parts) <= 2 * len(dims) + 1 and all(p.elements and (p.name, p.shape) == ("x", (999,)) for p in parts)


def test_local_tensors_need_not_be_contiguous() -> None:
    """A transposed, strided, cut, expanded, conjugate or very large view gives the shares of its contiguous copy."""
    for t in (noise((7, 9), dtype) for dtype in KINDS):
        for view in (t.T, t[::2], t[:, 1:4], t[:1].expand(5, -1), *([t.conj()] if t.is_complex() else [])):
            rows, columns = view.shape
            p = stack([box("x", (rows, columns + 1), (1, 1), (rows - 1, columns)), shard("y", (3, columns), 0, 1, 3)])
            copy = view.resolve_conj().contiguous()
            assert shares(view, p) == shares(copy, p) == by_hand(copy, p)
    large, rows = noise((4099, 4801), torch.uint8).T, 4000 * 4099  # copied in stretches, which end inside words
    p = Placement(large.shape, stack([box("x", (rows + 9,), (3,), (rows,)), whole("y", (801 * 4099,))]).parts)
    assert shares(large, p) == shares(large.contiguous(), p)


@given(layouts(), DTYPES, st.integers(0, 2**32))
def test_statistics_are_those_of_the_elements_covered(p: Placement, dtype: torch.dtype, seed: int) -> None:
    """Non-finite count, absmax and l2 of a share are those of exactly the elements it covers, cut words included."""
    rng = np.random.default_rng(seed)
    odd = [np.nan, np.inf, -np.inf] if dtype.is_floating_point or dtype.is_complex else []
    local = torch.tensor(rng.choice([*rng.uniform(0, 99, 20), *odd, 0.0], math.prod(p.shape))).to(dtype)
    collector = Collector()
    collector.add([local.reshape(p.shape)], [p])
    for scan in collector.finish().result()[0]:
        held = local[[here for part in p.parts if part.name == scan.name for here, _ in pairs(part)]]
        numbers = (torch.view_as_real(held) if held.is_complex() else held).to(torch.float64).reshape(-1).tolist()
        finite = [abs(v) for v in numbers if math.isfinite(v)]
        assert (scan.nonfinite, scan.absmax) == (len(numbers) - len(finite), max(finite, default=0.0))
        assert math.isclose(scan.l2, math.sqrt(math.fsum(v * v for v in finite)), rel_tol=1e-12)


def model(heads: int, groups: int) -> dict[str, Tensor]:
    rows = {"q": heads * 3, "k": groups * 3, "v": groups * 3, "gate": 12, "up": 12, "embed": 11, "e0": 12, "e1": 12}
    shapes = {name: (n, 5) for name, n in rows.items()} | {"o": (5, heads * 3), "down": (5, 12)}
    return {name: noise(shape, torch.bfloat16, k) for k, (name, shape) in enumerate(shapes.items())}


def fused(pieces: list[Held]) -> Held:
    return torch.cat([t for t, _ in pieces]), stack([p for _, p in pieces])


def rank_of(m: dict[str, Tensor], groups: int, tp: int, r: int, *, megatron: bool, junk: int) -> list[Held]:
    """What one tensor-parallel rank holds, cut by torch as the trainer or the engine does it."""

    def cut(name: str, rank: int, ranks: int, dim: int = 0) -> Held:
        return m[name].chunk(ranks, dim)[rank], shard(name, m[name].shape, dim, rank, ranks)

    if megatron:  # by query group: its query heads, its key head, its value head
        qkv = [cut(name, g, groups) for g in range(groups * r // tp, groups * (r + 1) // tp) for name in "qkv"]
    else:  # key and value heads that are fewer than ranks are held by several
        held = min(tp, groups)
        qkv = [cut("q", r, tp), *(cut(name, r * held // tp, held) for name in "kv")]
    rows = -(-11 // (4 * tp)) * 4 if megatron else -(-11 // tp)  # the vocabulary's padding comes last
    span = range(11)[r * rows : (r + 1) * rows]
    spare = noise((rows - len(span), 5), torch.bfloat16, junk)
    vocabulary = [placed(m["embed"], (span, range(5)), "embed"), (spare, padding(spare.shape))]
    t, p = fused([cut("e0", r, tp), cut("e1", r, tp)])
    experts = t.reshape(2, -1, 5), Placement((2, t.shape[0] // 2, 5), p.parts)
    return [fused(qkv), fused([cut("gate", r, tp), cut("up", r, tp)]), experts, cut("o", r, tp, 1),
            fused(vocabulary), cut("down", r, tp, 1)]  # fmt: skip


def optimizer(held: list[Held], dp: int, junk: int) -> list[Held]:
    """A flat buffer over parameters, padded and cut into equal ranges wherever they end."""
    spare = noise((-sum(t.numel() for t, _ in held) % dp,), torch.bfloat16, junk)
    buffer, p = fused([(t.reshape(-1), p.flat()) for t, p in [*held, (spare, padding(spare.shape))]])
    ends = range(0, len(buffer) + 1, len(buffer) // dp)
    return [(buffer[a:b], p.flat(a, b)) for a, b in itertools.pairwise(ends)]


def merged(held: Sequence[Held]) -> dict[str, str]:
    every = [given for local, p in held for given in shares(local, p).items()]
    return {name: merge(s for n, s in every if n == name).fingerprint for name, _ in every}


@pytest.mark.parametrize(("heads", "groups", "tp"), [(4, 4, 2), (8, 2, 4), (6, 3, 3), (14, 2, 2), (4, 1, 4), (5, 5, 1)])
def test_fused_layouts_are_one_model(heads: int, groups: int, tp: int) -> None:
    """Megatron, its distributed optimizer and SGLang all give the canonical fingerprints, whatever lies in padding."""
    m, few = model(heads, groups), min(tp, groups)
    expected = {name: fingerprint(t) for name, t in m.items()}
    for junk, dp in enumerate((1, 3, 8)):
        trainer = [rank_of(m, groups, few, r, megatron=True, junk=junk) for r in range(few)]
        engine = [rank_of(m, groups, tp, r, megatron=False, junk=junk) for r in range(tp)]
        slices = [optimizer(held, dp, junk) for held in trainer]
        assert [merged(sum(ranks, start=[])) for ranks in (trainer, engine, slices)] == [expected] * 3  # noqa: RUF017


def test_empty_tensors_keep_their_place_in_a_flat_buffer() -> None:
    """A canonical tensor without elements has its fingerprint from slices of a flat buffer too."""
    t, p = torch.ones(4), stack([whole("none", (0, 3)).flat(), whole("some", (4,))])
    every = [merged([(t, p)]), merged([(t[:1], p.flat(0, 1)), (t[1:], p.flat(1, 4))])]
    assert every == [{"none": fingerprint(torch.empty(0, 3)), "some": fingerprint(t)}] * 2


GOOD: dict[str, object] = {"shape": [4], "size": [4], "start": 0, "step": [1], "at": 0, "to": [1]}
SQUARE, X = GOOD | {"size": [2, 2]}, whole("x", (4,))
BAD: dict[str, object] = {
    "no mapping": 5, "nothing": {}, "no parts": {"shape": [4]}, "parts are text": "ab", "a part is a list": [[]],
    "local end": [GOOD | {"start": 1}], "canonical end": [GOOD | {"at": 1}], "negative size": [GOOD | {"size": [-1]}],
    "rising steps": [SQUARE | {"step": [1, 2], "to": [1, 2]}], "equal steps": [SQUARE | {"step": [1, 1], "to": [2, 1]}],
    "still": [GOOD | {"to": [0]}], "twice": [SQUARE | {"step": [2, 1], "to": [1, 1]}], "text": [GOOD | {"step": "1"}],
    "lengths": [GOOD | {"to": [1, 1]}], "a float": [GOOD | {"at": 0.0}], "a truth": [GOOD | {"start": False}],
    "huge": [GOOD | {"shape": [2**70], "at": 2**69}], "overlap": [GOOD, GOOD],
    "two shapes": [GOOD | {"size": [2]}, GOOD | {"size": [2], "start": 2, "at": 2, "shape": [2, 2]}],
    "another size": [{"shape": [8], "at": [0], "size": [2]}], "another shape": {"shape": [2, 2], "parts": [GOOD]},
    "half an element": Placement((4,), (Part("", (4,), (2,), 0.5, (1,), 0, (1,)),)),  # type: ignore[arg-type]
    "a negative extent": Placement((4,), (Part("", (4,), (-1,), 2, (1,), 2, (1,)),)),
    "uneven shard": lambda: shard("", (4,), 0, 0, 3), "no ranks": lambda: shard("", (4,), 0, 0, 0),
    "no such dimension": lambda: shard("", (4,), 1, 0, 1), "box outside": lambda: box("", (4,), (3,), (2,)),
    "box before": lambda: box("", (4,), (-1,), (2,)), "box of other rank": lambda: box("", (4,), (0, 0), (4,)),
    "no stack": lambda: stack([]), "unequal rows": lambda: stack([whole("", (2, 3)), whole("", (2, 4))]),
    "flat ends": {"shape": [4], "parts": [GOOD], "flat": [0, 5]}, "flat of three": X.to_data() | {"flat": [0, 1, 4]},
    "flat is text": X.to_data() | {"flat": "04"}, "flat backwards": X.to_data() | {"flat": [3, 2]},
    "flat and none": X.to_data() | {"flat": None}, "flat below": X.to_data() | {"flat": [-1, 4]},
    "flat of another size": X.to_data() | {"flat": [0, 3]}, "flat hides overlap": {"shape": [4], "parts": [GOOD, GOOD],
                                                                                  "flat": [0, 4]},
    "slice after": lambda: X.flat(2, 5), "slice before": lambda: X.flat(-1), "slice backwards": lambda: X.flat(3, 2),
} | {f"no {key}": [{k: v for k, v in GOOD.items() if k != key}] for key in GOOD}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_placement_is_refused(name: str) -> None:
    """Whatever does not say which elements are which is refused in one line."""
    bad = {"shape": [4], "parts": BAD[name]} if isinstance(BAD[name], (list, str)) else BAD[name]
    with pytest.raises(ReproError, match=r"\A.+\Z"):
        _ = bad() if callable(bad) else shares(torch.arange(4.0), bad)


def test_it_is_refused_by_a_python_that_asserts_nothing() -> None:
    """A program may run with -O: not one of these checks is an assertion."""
    name = test_what_is_no_placement_is_refused.__name__
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestConfigWarning", "-k", name]
    command = [sys.executable, "-O", "-m", "pytest", *options, __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{len(BAD)} passed" in done.stdout, done.stdout


@given(layouts().filter(lambda p: p.parts), DTYPES, st.sampled_from(list(GOOD)), st.integers(-1, 30), st.data())
def test_no_wrong_sum(p: Placement, dtype: torch.dtype, key: str, number: int, data: st.DataObject) -> None:
    """A placement with any number changed is refused, or gives exactly the shares of what it then says."""
    local, raw = noise(p.shape, dtype), json.loads(json.dumps(p.to_data()))
    part, at = data.draw(st.sampled_from(raw["parts"])), data.draw(st.integers(0, 2))
    part[key] = number if key in ("start", "at") else [number if k == at else n for k, n in enumerate(part[key])]
    try:
        held_shares = shares(local, raw)
    except ReproError:
        return
    assert held_shares == by_hand(local, read(raw))

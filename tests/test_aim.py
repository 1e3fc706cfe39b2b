"""Aiming at one signal: a canonical tensor that lies in pieces is changed once, and put together again whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st

from repro_golden.fingerprint import content
from repro_golden.fingerprint.placement import Placement, padding, shard, stack
from repro_golden.recording.pieces import Piece, assemble, keep_piece, keep_whole, put_together
from repro_golden.recording.tap import Tap
from repro_golden.trace import dump_path

AT = (0, "grad", "w")


def fused(rank: int, ranks: int) -> Placement:
    """Rows of two weights and padding, as a fused layer holds them."""
    return stack([shard("w", (8, 3), 0, rank, ranks), shard("v", (4, 3), 0, rank, ranks), padding((1, 3))])


def local(whole: dict[str, torch.Tensor], rank: int, ranks: int) -> torch.Tensor:
    """What a rank holds of both."""
    rows = [whole[name].chunk(ranks)[rank] for name in ("w", "v")]
    return torch.cat([*rows, torch.full((1, 3), 7).to(rows[0].dtype)])


@at_most(50)
@given(ranks=st.sampled_from([1, 2, 4]), cut=st.integers(0, 14), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_pieces_of_any_split_make_the_whole(
    tmp_path_factory: pytest.TempPathFactory, ranks: int, cut: int, dtype: torch.dtype
) -> None:
    """Fused shards, cut once more as a flat buffer is, give the bytes of both canonical tensors, replicas included."""
    whole = {name: torch.randn(n, 3).to(dtype) for name, n in (("w", 8), ("v", 4))}
    folder = tmp_path_factory.mktemp("pieces")
    wanted = [AT, (0, "grad", "v")]
    for number in range(2 * ranks):  # every rank twice, as data parallelism has it
        rank = number % ranks
        flat, placement = local(whole, rank, ranks).flatten(), fused(rank, ranks)
        tap = Tap(None, wanted, keep_piece(folder, number), number)
        count = flat.numel()
        for start, stop in ((0, cut * count // 14), (cut * count // 14, count)):
            tap.take(0, "grad", "buffer", flat[start:stop].clone(), placement.flat(start, stop))
    assemble(folder, folder)
    for name, tensor in whole.items():
        assert dump_path(folder, 0, "grad", name).read_bytes() == content(tensor).tobytes()


def test_a_plant_changes_one_element_of_the_canonical_tensor() -> None:
    """Its owner's first element alone changes; the other rank, padding and the other weight stay as they are."""
    whole = {"w": torch.ones(8, 3), "v": torch.ones(4, 3)}
    changed = {}
    for name in ("w", "v"):
        held = [local(whole, rank, 2) for rank in (0, 1)]
        before = [tensor.clone() for tensor in held]
        for rank in (0, 1):
            Tap((0, "grad", f"layer/{name}"), (), lambda *_: None, rank).take(0, "update", "x", held[rank])
            placement = fused(rank, 2)
            renamed = Placement(
                placement.shape, tuple(p._replace(name=f"layer/{p.name}") for p in placement.parts)
            ).to_data()
            Tap((0, "grad", f"layer/{name}"), (), lambda *_: None, rank).take(0, "grad", "x", held[rank], renamed)
        changed[name] = [torch.nonzero(a != b).tolist() for a, b in zip(held, before, strict=True)]
    assert changed == {"w": [[[0, 0]], []], "v": [[[4, 0]], []]}


def test_a_view_is_changed_where_it_lies() -> None:
    """A tensor that is not contiguous, and one without dimensions, are changed in place."""
    base, scalar = torch.ones(3, 4), torch.ones(())
    for name, tensor in (("w", base.T), ("s", scalar)):
        Tap((2, "forward", name), (), lambda *_: None).take(2, "forward", "", {name: tensor})
    assert torch.nonzero(base != 1).tolist() == [[0, 0]] and scalar != 1


def test_one_rank_alone_can_be_meant() -> None:
    """NAME@RANK is the signal of that rank; another step, and another rank, are left alone."""
    held = [torch.ones(2) for _ in range(2)]
    for rank, tensor in enumerate(held):
        tap = Tap((1, "grad", "b@1"), (), lambda *_: None, rank)
        tap.take(0, "grad", "b", tensor)
        tap.take(1, "grad", "b", tensor)
    assert [bool((tensor != 1).any()) for tensor in held] == [False, True]


def test_what_is_not_all_there_is_left_out(tmp_path: Path) -> None:
    """A canonical tensor of which a part is missing gives no dump."""
    raw = bytes(8)
    assert put_together([Piece((4,), (2,), 0, (1,), raw)]) is None
    assert put_together([Piece((4,), (2,), 0, (1,), raw), Piece((4,), (2,), 2, (1,), raw)]) == bytes(16)
    Tap(None, [AT], keep_whole(tmp_path)).take(0, "grad", "", torch.ones(5, 3), fused(0, 2).flat(0, 15).to_data())
    assert not (tmp_path / "dumps").exists()

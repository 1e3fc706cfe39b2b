from __future__ import annotations

import json
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from repro_core import Rollout
from repro_core.data.rollout_file import read_rollout as core_read
from repro_core.data.rollout_file import write_rollout as core_write
from repro_golden.base.errors import ReproError
from repro_golden.store.rollout_file import FORMAT, RolloutData, read_rollout, write_rollout
from repro_golden.store.rollouts import RolloutSet

torch.set_num_threads(1)

RAM = next(iter(Path("/dev").glob("shm")), None)  # syncing to disk is what takes the time
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT32_BITS = st.integers(0, 2**32 - 1)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        yield Path(folder)


def floats(bits: list[int]) -> Tensor:
    return torch.frombuffer(bytearray(struct.pack(f"<{len(bits)}I", *bits)), dtype=torch.float32)


@st.composite
def rollouts(draw: st.DrawFn) -> RolloutData:
    """A rollout that holds together, with any token, any float32 bits and any JSON in its metadata."""
    pairs = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4))
    if all(p + r == 0 for p, r in pairs):
        pairs.append((1, 1))
    responses = [r for _, r in pairs]
    if sum(responses) == 0:
        pairs.append((0, 1))
        responses.append(1)
    totals = [p + r for p, r in pairs]

    def drawn(elements: st.SearchStrategy[int], count: int) -> list[int]:
        return draw(st.lists(elements, min_size=count, max_size=count))

    tensors = {
        "tokens": torch.tensor(drawn(INT64, sum(totals))),
        "total_lengths": torch.tensor(totals),
        "response_lengths": torch.tensor(responses),
        "loss_mask": torch.tensor(drawn(st.integers(0, 1), sum(responses))),
        "rollout_log_probs": floats(drawn(FLOAT32_BITS, sum(responses))),
        "rewards": floats(drawn(FLOAT32_BITS, len(pairs))),
        "group_index": torch.tensor(drawn(st.integers(0, 9), len(pairs))),
    }
    if draw(st.booleans()):
        dtype = draw(st.sampled_from([torch.uint8, torch.int16]))
        experts = drawn(st.integers(0, 255), 4 * sum(totals))
        tensors["routed_experts"] = torch.tensor(experts, dtype=dtype).view(-1, 2, 2)
    texts = draw(st.lists(st.text(max_size=5), max_size=3))
    sampling = draw(st.dictionaries(st.text(max_size=4), st.integers() | st.floats(-9, 9) | st.none(), max_size=3))
    meta = {"rollout_id": draw(st.integers(0, 9)), "prompts": texts, "labels": texts, "statuses": []}
    return RolloutData({**meta, "sampling": sampling}, tensors)


def plain(rollout: RolloutData | Rollout) -> tuple[str, dict[str, tuple[str, bytes]]]:
    content = {
        k: (str(t.dtype), t.contiguous().view(torch.uint8).numpy().tobytes()) for k, t in rollout.tensors.items()
    }
    return json.dumps(rollout.meta, sort_keys=True), dict(sorted(content.items()))


def example(**tensors: Tensor) -> RolloutData:
    whole = {
        "tokens": torch.arange(5),
        "total_lengths": torch.tensor([2, 3]),
        "response_lengths": torch.tensor([1, 2]),
        "loss_mask": torch.tensor([1, 0, 1]),
        "rollout_log_probs": torch.tensor([-1.0, -2.0, -0.0]),
        "rewards": torch.tensor([0.0, 1.0]),
        "group_index": torch.tensor([0, 0]),
    }
    meta = {"rollout_id": 0, "prompts": ["1+1="], "labels": ["2"], "statuses": ["completed"], "sampling": {"seed": 1}}
    return RolloutData(meta, {**whole, **tensors})


# -- one content, one file


@at_most(40)
@given(rollouts(), st.randoms(use_true_random=False))
def test_equal_content_gives_equal_bytes_and_digest(rollout: RolloutData, random: Any) -> None:
    """Insertion order, the file's name and the tensors' strides leave no trace; reading gives the content back."""

    def shuffled(mapping: Mapping[str, Any]) -> dict[str, Any]:
        items = list(mapping.items())
        random.shuffle(items)
        return dict(items)

    strided = {k: torch.stack([t, t], dim=1)[:, 1] for k, t in rollout.tensors.items()}
    other = RolloutData(shuffled(rollout.meta), shuffled(strided))
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        a, b = Path(folder) / "0.safetensors", Path(folder) / "deeper" / "another name"
        write_rollout(a, rollout)
        write_rollout(b, other)
        assert a.read_bytes() == b.read_bytes()
        result = read_rollout(b)
        assert plain(result) == plain(rollout)
        assert result.digest == rollout.digest == other.digest
        write_rollout(a, result)
        assert a.read_bytes() == b.read_bytes()


@at_most(40)
@given(rollouts())
def test_the_trainer_and_the_instrument_write_the_same_file(rollout: RolloutData) -> None:
    """The trainer's writer and this one give the same bytes for the same rollout, and each reads the other's."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        ours, theirs = Path(folder) / "a", Path(folder) / "b"
        write_rollout(ours, rollout)
        core_write(theirs, Rollout(rollout.meta, rollout.tensors))
        assert ours.read_bytes() == theirs.read_bytes()
        assert plain(read_rollout(theirs)) == plain(core_read(ours)) == plain(rollout)


@at_most(40)
@given(rollouts(), st.data())
def test_any_change_of_content_changes_the_digest(rollout: RolloutData, data: st.DataObject) -> None:
    """One flipped bit of one column, and any changed entry of the metadata, give another digest."""
    name = data.draw(st.sampled_from(sorted(rollout.tensors)))
    raw = bytearray(plain(rollout)[1][name][1])
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    changed = torch.frombuffer(raw, dtype=rollout.tensors[name].dtype)
    seen = {
        rollout.digest,
        replace(rollout, tensors={**rollout.tensors, name: changed}).digest,
        replace(rollout, meta={**rollout.meta, "rollout_id": 10}).digest,
        replace(rollout, meta={**rollout.meta, "more": None}).digest,
        replace(rollout, tensors={**rollout.tensors, "more": torch.empty(0)}).digest,
    }
    assert len(seen) == 5


def test_columns_are_aligned_as_if_they_were_made_here(tmp_path: Path) -> None:
    """What is read lies in memory of its own at torch's alignment: BLAS may order its sums by alignment."""
    path = tmp_path / "0"
    write_rollout(path, example())
    fresh = torch.zeros(3).data_ptr() % 64
    assert {t.data_ptr() % 64 for t in read_rollout(path).tensors.values()} == {fresh}


def test_columns_that_share_memory_are_written(tmp_path: Path) -> None:
    """Two columns may be one tensor or slices of one: the file holds both."""
    lengths = torch.tensor([2, 3])
    rollout = example(
        total_lengths=lengths,
        response_lengths=lengths,
        loss_mask=torch.ones(5, dtype=torch.int64),
        rollout_log_probs=torch.zeros(5),
    )
    write_rollout(tmp_path / "0", rollout)
    assert plain(read_rollout(tmp_path / "0")) == plain(rollout)


# -- what does not hold together

BROKEN: dict[str, RolloutData] = {
    "tokens too few": example(tokens=torch.arange(4)),
    "tokens too many": example(tokens=torch.arange(6)),
    "dtype": example(tokens=torch.arange(5, dtype=torch.int32)),
    "half log-probs": example(rollout_log_probs=torch.zeros(3, dtype=torch.bfloat16)),
    "double rewards": example(rewards=torch.zeros(2, dtype=torch.float64)),
    "two dimensions": example(rewards=torch.zeros(2, 1)),
    "0-d": example(rewards=torch.tensor(1.0)),
    "mask": example(loss_mask=torch.ones(2, dtype=torch.int64)),
    "log-probs": example(rollout_log_probs=torch.zeros(4)),
    "rewards": example(rewards=torch.zeros(3)),
    "groups": example(group_index=torch.tensor([0])),
    "response lengths": example(response_lengths=torch.tensor([3])),
    "experts without layers": example(routed_experts=torch.zeros(5, 2, dtype=torch.uint8)),
    "no experts": example(routed_experts=torch.zeros(5, 2, 0, dtype=torch.uint8)),
    "experts as int64": example(routed_experts=torch.zeros(5, 2, 1, dtype=torch.int64)),
    "negative experts": example(routed_experts=torch.full((5, 2, 1), -1, dtype=torch.int16)),
    "experts of responses alone": example(routed_experts=torch.zeros(3, 2, 1, dtype=torch.uint8)),
    "response beyond its sample": example(response_lengths=torch.tensor([3, 0])),
    "negative response": example(
        response_lengths=torch.tensor([-1, 3]),
        loss_mask=torch.ones(2, dtype=torch.int64),
        rollout_log_probs=torch.ones(2),
    ),
    "negative sample": example(
        total_lengths=torch.tensor([-1, 6]),
        response_lengths=torch.tensor([-1, 3]),
        loss_mask=torch.ones(2, dtype=torch.int64),
        rollout_log_probs=torch.ones(2),
    ),
    "no samples": RolloutData(example().meta, {k: t[:0] for k, t in example().tensors.items()}),
    "a column is missing": RolloutData(example().meta, {k: t for k, t in example().tensors.items() if k != "rewards"}),
    "no id": RolloutData({"prompts": []}, example().tensors),
    "a format of its own": RolloutData({**example().meta, "format": FORMAT + 1}, example().tensors),
    "NaN in the metadata": RolloutData({**example().meta, "temperature": float("nan")}, example().tensors),
    "no JSON in the metadata": RolloutData({**example().meta, "stop": {1}}, example().tensors),
    "a tuple in the metadata": RolloutData({**example().meta, "stop": (1,)}, example().tensors),
    "numbers as keys": RolloutData({**example().meta, "bias": {1: 2.0}}, example().tensors),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_rollout_that_does_not_hold_together_is_never_written(tmp_path: Path, name: str) -> None:
    """Missing or misshapen columns, lengths that do not add up, metadata that JSON would change: one line, no file."""
    with pytest.raises(ReproError) as caught:
        write_rollout(tmp_path / "0.safetensors", BROKEN[name])
    assert "\n" not in str(caught.value) and "0.safetensors" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def spoiled(change: Callable[[bytes], bytes]) -> bytes:
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        write_rollout(Path(folder) / "0", example())
        return change((Path(folder) / "0").read_bytes())


def foreign(meta: str | None, **tensors: Tensor) -> bytes:
    columns = {k: t.contiguous() for k, t in {**example().tensors, **tensors}.items()}
    return save(columns, metadata=None if meta is None else {"rollout": meta})


def meta(**change: Any) -> str:
    return json.dumps({"format": FORMAT, **example().meta, **change})


CURE = r"pull it|pull or record it again|record it again|upgrade|`dvc checkout .*\.dvc` brings it back"
FILES: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "pull it"),
    "empty": (b"", "pull or record it again"),
    "a zip": (b"PK\3\4" + bytes(500), "pull or record it again"),
    "text": (b"hello\nworld" * 50, "pull or record it again"),
    "no metadata": (foreign(None), "so no rollout"),
    "metadata is no JSON": (foreign("{"), "pull or record it again"),
    "metadata is no object": (foreign("[1]"), "so no rollout"),
    "no format": (foreign(json.dumps(example().meta)), "no format number"),
    "format true": (foreign(meta(format=True)), "no format number"),
    "newer format": (foreign(meta(format=FORMAT + 1)), "upgrade repro-harness"),
    "wrong dtype": (
        foreign(meta(), rewards=torch.zeros(2, dtype=torch.float64)),
        "rewards is torch.float64, not one-dimensional float32",
    ),
    "lengths": (foreign(meta(), tokens=torch.arange(9)), "tokens has 9 entries, the lengths ask for 5"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_malformed_file_is_one_line_with_the_cure(tmp_path: Path, name: str) -> None:
    """Missing, foreign, newer or contradictory files: one line that names the file and says what to do."""
    content, message = FILES[name]
    path = tmp_path / "7.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ReproError, match=message) as caught:
        read_rollout(path)
    assert "\n" not in str(caught.value) and "7.safetensors" in str(caught.value)
    assert re.search(CURE, str(caught.value))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """Truncated at any byte, a rollout is one line that names the cure; never a shorter rollout."""
    path, raw = tmp_path / "0.safetensors", spoiled(lambda raw: raw)
    for cut in range(len(raw)):
        path.write_bytes(raw[:cut])
        with pytest.raises(ReproError, match=CURE) as caught:
            read_rollout(path)
        assert "\n" not in str(caught.value)
    path.write_bytes(raw)
    assert plain(read_rollout(path)) == plain(example())


# -- the set


def make_set(directory: Path, count: int = 3) -> RolloutSet:
    for i in range(count):
        write_rollout(directory / f"{i}.safetensors", replace(example(), meta={**example().meta, "rollout_id": i}))
    return RolloutSet.write_index(directory)


def test_a_set_reads_what_was_indexed(tmp_path: Path) -> None:
    """An index names every rollout in order by content; opening it again gives the same digest."""
    made = make_set(tmp_path)
    opened = RolloutSet(tmp_path)
    assert len(opened) == 3 and opened.digest == made.digest
    assert [opened.read(i).meta["rollout_id"] for i in range(3)] == [0, 1, 2]
    for at in (-1, 3):
        with pytest.raises(ReproError, match=r"holds rollouts 0..2, the case needs rollout"):
            opened.read(at)


def test_a_rollout_changed_after_indexing_is_refused(tmp_path: Path) -> None:
    """Every flipped bit of a column, an exchange of two rollouts and a deleted one are refused with the cure."""
    opened = make_set(tmp_path)
    path = tmp_path / "1.safetensors"
    raw = path.read_bytes()
    body = 8 + struct.unpack("<Q", raw[:8])[0]
    for at in range(body, len(raw)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(ReproError, match=CURE):
            opened.read(1)
    path.write_bytes((tmp_path / "2.safetensors").read_bytes())
    with pytest.raises(ReproError, match=r"changed since it was recorded: `dvc checkout .*\.dvc` brings it back"):
        opened.read(1)
    path.unlink()
    with pytest.raises(ReproError, match=r"no rollout .* pull it"):
        opened.read(1)


def test_equal_content_in_other_bytes_is_accepted(tmp_path: Path) -> None:
    """The index is over content: a file with the same columns and metadata in other bytes is the same rollout."""
    opened = make_set(tmp_path, 1)
    path = tmp_path / "0.safetensors"
    before = path.read_bytes()
    path.write_bytes(foreign(json.dumps({**example().meta, "format": FORMAT}, indent=1)))
    assert path.read_bytes() != before and plain(opened.read(0)) == plain(example())


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, "no rollouts at"),
        ("{", "not a readable rollout index"),
        ("[]", "not a rollout index"),
        ('{"rollouts": []}', "no format number"),
        (f'{{"format": {FORMAT + 1}}}', "upgrade repro-harness"),
        (f'{{"format": {FORMAT}}}', "index"),
        (f'{{"format": {FORMAT}, "rollouts": 3}}', "index"),
        (f'{{"format": {FORMAT}, "rollouts": [3]}}', "index"),
    ],
)
def test_a_malformed_index_is_one_line(tmp_path: Path, index: str | None, message: str) -> None:
    """A missing, damaged or newer index is one line, never an empty set."""
    if index is not None:
        (tmp_path / "index.json").write_text(index)
    with pytest.raises(ReproError, match=message) as caught:
        RolloutSet(tmp_path)
    assert "\n" not in str(caught.value)

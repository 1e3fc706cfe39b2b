from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st
from run_folder_kit import Run, contents, f32, i64
from train_dump_kit import Shard, miles_train_dump, rank_train_dump, relax_train_dump, slime_train_dump

from repro_golden.base.errors import ReproError
from repro_golden.dumps.archive.pickling import write_archive
from repro_golden.dumps.run.rows import column_rows, concatenated, masked
from repro_golden.dumps.train.files import first_missing, read_train_dump
from repro_golden.dumps.train.joining import joined
from repro_golden.dumps.values import Tensor, same


def files(folder: Path, run: Run) -> list[Any]:
    """A run's train dumps of its first rollout, written and read again."""
    values = []
    for name, value in run.files(0):
        write_archive(folder / name, value)
        values.append(read_train_dump(folder / name))
    return values


def rows(folder: Path, run: Run, **how: Any) -> dict[tuple[str, str], Any]:
    """The rows that they become."""
    return contents(column_rows(joined(files(folder, run), **how)))


COLUMNS = {
    ("input", "tokens"), ("input", "total_lengths"), ("input", "response_lengths"), ("input", "loss_mask"),
    ("input", "rollout_log_probs"), ("input", "rewards"), ("input", "raw_reward"), ("input", "truncated"),
    ("input", "sample_index"), ("forward", "log_probs"), ("forward", "ref_log_probs"), ("forward", "kl"),
    ("forward", "returns"), ("forward", "advantages"),
}  # fmt: skip


def test_the_four_forms_hold_one_rollout_and_give_one_set_of_rows(tmp_path: Path) -> None:
    """The file of slime, slime's and Miles' files a rank and Relax's lists become the same rows, dtypes included."""
    expected = rows(tmp_path / "slime", Run("slime"))
    assert set(expected) == COLUMNS
    assert expected["input", "loss_mask"][0] == "int64"
    assert expected["forward", "log_probs"][0] == "float32"
    rollout = Run().rollout_dump(0)["samples"]
    assert rows(tmp_path / "miles", Run("miles"), rollout=rollout) == expected
    assert rows(tmp_path / "old", Run("old"), rollout=rollout) == expected
    assert rows(tmp_path / "relax", Run("relax"), rollout=rollout) == expected
    systems = {name: files(tmp_path / name, Run(name))[0] for name in ("slime", "miles", "old", "relax")}
    assert {name: (dump.system, dump.form) for name, dump in systems.items()} == {
        "slime": ("slime", "format 2"),
        "miles": ("miles", "rank"),
        "old": ("slime", "rank"),
        "relax": ("relax", "lists"),
    }
    assert systems["slime"].updates == 1


@at_most(12)
@given(
    st.sampled_from(["miles", "old", "relax"]),
    st.sampled_from([(1, 2, 1), (2, 1, 2), (2, 2, 1), (1, 4, 2), (2, 2, 2), (1, 1, 3), (3, 1, 1), (1, 3, 1)]),
    st.sampled_from([1, 2]),
    st.integers(0, 5),
)
def test_rows_are_the_same_in_every_layout(tmp_path_factory, system: str, layout, pp: int, shuffle: int) -> None:
    """Whatever tensor-, context- and data-parallel ranks and stages there are, and wherever a sample lies, rows agree.

    Also where the files do not say which part they hold, as those of Relax and of older versions.
    """
    folder = tmp_path_factory.mktemp("layout")
    tp, cp, dp = layout
    run = Run(system, tp=tp, cp=cp, dp=dp, pp=pp, shuffle=shuffle)
    rows_read = rows(folder, run, rollout=run.rollout_dump(0)["samples"])
    expected = rows(folder / "one", Run("slime"))
    if system == "relax" and dp > 1:
        expected.pop(("input", "raw_reward"))  # Relax cuts it to the length of each rank's list
    assert rows_read == expected


@pytest.mark.parametrize("has_lengths", [True, False])
def test_bshd_is_put_together_by_its_padded_length(tmp_path: Path, has_lengths: bool) -> None:
    """Sequences padded before they were cut come together by max_seq_lens, and by the lengths alone without it."""
    run = Run("miles", cp=2, qkv_format="bshd", count=9)
    dumps = files(tmp_path, run)
    assert dumps[0].qkv_format == "bshd"
    if not has_lengths:
        for dump in dumps:
            for sample in dump.samples:
                del sample["max_seq_lens"]
    gathered = joined(dumps)
    whole = Run("slime", count=9).columns(0)
    assert same(gathered.columns["log_probs"][None], whole["log_probs"])


def test_replicas_that_differ_stand_for_themselves(tmp_path: Path) -> None:
    """A tensor-parallel rank with other bits gives NAME@RANK twice; columns that agree stay one."""
    dumps = files(tmp_path, Run("miles", tp=2))
    value = dumps[1].samples[0]["log_probs"]
    dumps[1].samples[0]["log_probs"] = Tensor("float32", value.array + np.float32(1))
    names = {name for _, name in contents(column_rows(joined(dumps)))}
    assert {"log_probs@0", "log_probs@1", "ref_log_probs"} <= names
    assert "log_probs" not in names


@pytest.mark.parametrize(
    ("system", "layout", "lost", "how", "message"),
    [
        ("miles", {"cp": 2}, 1, {}, "lack the part of context-parallel rank 1 of 2"),
        ("miles", {"dp": 4}, 2, {}, "lacks the train dump of rank 2 \\(of 4 ranks\\)"),
        ("miles", {"dp": 2}, 1, {"ranks": 2}, "lacks the train dump of rank 1 \\(of 2 ranks\\)"),
        ("relax", {"cp": 2}, 1, {}, "another context-parallel rank is missing"),
        ("old", {"cp": 2, "dp": 2}, 3, {}, "another context-parallel rank is missing"),
    ],
)
def test_a_missing_rank_is_named(tmp_path: Path, system: str, layout, lost: int, how, message: str) -> None:
    """Whether it is one's whole shard or a part under context parallelism that nobody else holds."""
    dumps = [file for file in files(tmp_path, Run(system, **layout)) if file.rank != lost]
    with pytest.raises(ReproError, match=message):
        joined(dumps, **how)


def test_a_rank_that_wrote_twice_is_refused(tmp_path: Path) -> None:
    """Two files of one rank are of two runs, also where no rank is missing."""
    dumps = files(tmp_path, Run("miles", dp=2))
    with pytest.raises(ReproError, match="has two train dumps of rank 1: of two runs"):
        joined([*dumps, dumps[1]])


def test_a_shard_of_a_wrong_length_is_refused_naming_rank_and_sample(tmp_path: Path) -> None:
    """Values are never put at other tokens than theirs."""
    dumps = files(tmp_path, Run("miles", cp=2))
    sample = next(each for each in dumps[1].samples if each["log_probs"].numel)
    sample["log_probs"] = f32(sample["log_probs"].array[1:])
    with pytest.raises(ReproError, match=rf"rank 1 holds \d+ tokens of log_probs of sample {sample['sample_index']}"):
        joined(dumps)


@pytest.mark.parametrize(
    ("system", "field", "message"),
    [
        (system, field, message)
        for system in ("slime", "miles", "old", "relax")
        for field, message in (
            ({"rank": 2**70}, "rank is 11805"), ({"rank": -1}, "rank is -1"), ({"rank": True}, "rank is <bool>"),
            ({"rollout_id": 2**70}, "rollout_id is"), ({"rollout_id": "3"}, "rollout_id is '3'"),
        )
    ]
    + [
        ("miles", {"cp_size": 10**9}, "cp_size is 1000000000, no whole number from 1 to 65536"),
        ("miles", {"cp_size": 0}, "cp_size is 0"), ("miles", {"cp_rank": 2}, "context-parallel rank 2 of 1"),
        ("miles", {"cp_rank": False}, "cp_rank is <bool>"), ("miles", {"qkv_format": [1]}, "qkv_format is a list"),
        ("slime", {"raw_reward": 0.5}, "raw_reward is a float"),
        ("slime", {"raw_reward": True}, "raw_reward is a bool"),
        ("slime", {"dp_shards": [{"data_parallel_rank": [1]}]}, "data_parallel_rank is <list>"),
    ],
)  # fmt: skip
def test_counts_of_a_file_are_held_to_what_they_can_be(tmp_path: Path, system: str, field: Any, message: str) -> None:
    """A file's own numbers never become a loop over as many."""
    ((name, value),) = Run(system, dp=1).files(0)
    write_archive(tmp_path / name, value | field)
    with pytest.raises(ReproError, match=message):
        read_train_dump(tmp_path / name)


@given(st.sets(st.integers(0, 12)), st.integers(0, 15))
def test_the_first_missing_number_is_found_without_counting(numbers: set[int], below: int) -> None:
    """As a set of all numbers would say; a bound of 2**70 costs nothing."""
    missing = set(range(below)) - numbers
    assert first_missing(numbers, below) == (min(missing) if missing else None)
    assert first_missing(numbers, 2**70) == min(set(range(14)) - numbers)


def turns(order: list[int], *, outputs: tuple[float, float] = (0.5, 0.25)) -> dict[str, Any]:
    """A rank's columns of one sample that was trained in two turns, and a third with another index."""
    tokens = [i64([1, 2, 3]), i64([1, 2, 4]), i64([5, 6, 7])]
    columns = {
        "sample_indices": [7, 7, 3], "tokens": tokens, "response_lengths": [1, 1, 1], "total_lengths": [3, 3, 3],
        "log_probs": [f32([outputs[0]]), f32([outputs[1]]), f32([0.75])],
    }  # fmt: skip
    return {name: [values[i] for i in order] for name, values in columns.items()}


def test_samples_of_one_index_are_told_apart_by_their_content(tmp_path: Path) -> None:
    """Two turns of a conversation share an index: their order in the list plays no part."""
    values = []
    for k, order in enumerate(([0, 1, 2], [2, 1, 0])):
        write_archive(tmp_path / f"{k}.pt", miles_train_dump(0, 0, turns(order)))
        whole = joined([read_train_dump(tmp_path / f"{k}.pt")])
        assert whole.indices == [3, 7, 7]
        values.append(contents(column_rows(whole)))
    assert values[0] == values[1]


def test_samples_that_nothing_tells_apart_are_interchangeable(tmp_path: Path) -> None:
    """Equal inputs with other outputs, without indices: the rows are those of the set, not of the order."""
    values = []
    for k, order in enumerate(([0, 1, 2], [1, 0, 2])):
        columns = turns(order)
        columns["tokens"] = [i64([1, 2, 3]) for _ in range(3)]
        del columns["sample_indices"]
        write_archive(tmp_path / f"{k}.pt", relax_train_dump(0, 0, columns))
        values.append(contents(column_rows(joined([read_train_dump(tmp_path / f"{k}.pt")]))))
    assert values[0] == values[1]
    assert ("input", "sample_index") not in values[0]


def test_relax_samples_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    """Equal in the rollout dump, yet trained from other rewards: no guess is made which is which."""
    columns = {
        "tokens": [i64([1, 2, 3])] * 2, "response_lengths": [1, 1], "total_lengths": [3, 3], "rewards": [0.0, 1.0],
    }  # fmt: skip
    write_archive(tmp_path / "0_0.pt", relax_train_dump(0, 0, columns))
    rollout = [{"index": i, "tokens": [1, 2, 3], "response_length": 1, "rollout_log_probs": None} for i in (4, 5)]
    with pytest.raises(ReproError, match=r"samples \[4, 5\] have the same tokens.*sample_indices"):
        joined([read_train_dump(tmp_path / "0_0.pt")], rollout=rollout)


def test_whole_rewards_stand_in_the_order_of_the_samples(tmp_path: Path) -> None:
    """raw_reward is over the whole rollout, in its order; rows give it by sample where the dumps say whose it is."""
    columns = turns([0, 1, 2]) | {"sample_indices": [7, 8, 3], "raw_reward": [0.1, 0.2, 0.3], "partition": [2, 0, 1]}
    write_archive(tmp_path / "0.pt", slime_train_dump(0, [Shard(0, 0, columns)]))
    gathered = joined([read_train_dump(tmp_path / "0.pt")])
    assert gathered.indices == [3, 7, 8]
    assert gathered.whole["raw_reward"] == [0.2, 0.3, 0.1]
    values = Tensor("float64", np.array([0.2, 0.3, 0.1]))  # which no float32 holds
    assert same(concatenated(gathered.whole["raw_reward"], ""), values)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"format_version": 3, "rollout_id": 0, "rank": 0, "samples": [], "dp_shards": []}, "format 3.*upgrade"),
        ({"format_version": "2", "samples": []}, "format '2'.*record it again"),
        ({"format_version": 2, "rollout_id": 0, "rank": 0, "samples": 5}, "must be lists of dicts"),
        ({"rollout_id": 0, "samples": [{"status": "completed", "response_length": 1}]}, "is a rollout dump"),
        ([1], "holds a list"),
        ({"a": 1}, "has the keys 'a'"),
        ({"rollout_id": 0, "rank": 0, "rollout_data": {"x": 1}}, "neither response_lengths nor tokens"),
        ({"rollout_id": -1, "rank": 0, "rollout_data": {"response_lengths": []}}, "rollout_id is -1"),
        (rank_train_dump(0, 0, {"response_lengths": [9], "tokens": [[1, 2]]}), "contradict each other"),
        (
            rank_train_dump(0, 0, {"response_lengths": [1], "tokens": [[1, 2]], "loss_masks": [[1, 1]]}),
            "loss mask of 2",
        ),
        (rank_train_dump(0, 0, {"response_lengths": [1], "tokens": [[1, 2]], "log_probs": []}), "0 entries for 1"),
        (slime_train_dump(0, [Shard(0, 0, {"response_lengths": []})]), "hold no samples"),
        (miles_train_dump(0, 0, turns([0]), cp_rank=2, cp_size=2), "rank 2 of 2 does not exist"),
        (miles_train_dump(0, 0, turns([0]), qkv_format="sbhd"), "'sbhd' is neither"),
    ],
)
def test_what_is_no_train_dump_is_refused_in_one_line(tmp_path: Path, value: Any, message: str) -> None:
    """By name: a newer form, a rollout dump, contradicting lengths, a layout that does not exist."""
    write_archive(tmp_path / "0.pt", value)
    with pytest.raises(ReproError, match=message) as error:
        joined([read_train_dump(tmp_path / "0.pt")])
    assert "\n" not in str(error.value)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = [
    "tokens",
    "response_lengths",
    "total_lengths",
    "loss_masks",
    "log_probs",
    "sample_indices",
    "rewards",
    "values",
]


@given(st.data())
def test_whatever_a_dump_holds_reading_ends_in_rows_or_one_line(tmp_path_factory, data) -> None:
    """No content of any column makes reading, joining or rows raise anything but a ReproError."""
    folder = tmp_path_factory.getbasetemp()
    columns = turns([0, 1, 2])
    for name in data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)):
        columns[name] = data.draw(st.lists(JUNK, min_size=3, max_size=3) | JUNK)
    made = data.draw(st.sampled_from(["miles", "old", "relax", "slime"]))
    try:
        if made == "relax":
            value = relax_train_dump(0, 0, {"tokens": [[1, 2, 3]] * 3, **columns})
        elif made == "slime":
            value = {"format_version": 2, "rollout_id": 0, "rank": 0, "dp_shards": []}
            value["samples"] = [{k: v[i] for k, v in columns.items() if isinstance(v, list)} for i in range(3)]
        else:
            value = (miles_train_dump if made == "miles" else rank_train_dump)(0, 0, columns)
    except (TypeError, KeyError, IndexError):  # the makers take what a trainer has
        return
    write_archive(folder / "junk.pt", value)
    try:
        column_rows(joined([read_train_dump(folder / "junk.pt")], rollout=[{"index": 1}]))
    except ReproError as error:
        message = str(error)
        assert "\n" not in message


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn"])
def test_masked_values_are_zero_and_masked_nans_are_not(dtype: str) -> None:
    """Garbage at a masked token is no difference, a NaN or an infinity there is one, and what counts keeps its bits."""
    import torch

    numbers = torch.tensor([-0.0, 3.0, -7.0, float("nan"), float("nan")]).to(getattr(torch, dtype))
    out = masked(Tensor.of(numbers), np.array([True, True, False, False, True]))
    values = out.floats()
    assert out.dtype == dtype
    assert values[0] == 0.0
    assert np.signbit(values[0])
    assert values[1:3].tolist() == [3.0, 0.0]
    assert not np.signbit(values[2])
    assert np.isnan(values[3:]).all()
    if dtype in ("float32", "bfloat16"):
        infinite = Tensor.of(torch.tensor([float("-inf")]).to(getattr(torch, dtype)))
        assert np.isnan(masked(infinite, np.array([False])).floats()).all()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[1, 2], [3]], i64([1, 2, 3])),
        ([True, 0], i64([1, 0])),
        ([[0.5], [], [float("nan")]], f32([0.5, np.nan])),
        ([0.1, 1.0], Tensor("float64", np.array([0.1, 1.0]))),
        ([1, 0.5], f32([1.0, 0.5])),
        ([f32([1.0]), Tensor("bfloat16", np.array([0x3F80], "<u2"))], Tensor("float64", np.array([1.0, 1.0]))),
        ([np.zeros((2, 3), "<i4"), np.zeros((1, 3), "<i4")], Tensor("int32", np.zeros((3, 3), "<i4"))),
        (["a", "b"], None),
        ([], None),
        ([[], [[]]], i64([])),
    ],
)
def test_lists_get_the_dtypes_that_tensors_have(values: list[Any], expected: Tensor | None) -> None:
    """Integers int64, floats float32 unless one needs more, and text is no signal."""
    column = concatenated(values, "a column")
    assert column is None if expected is None else same(column, expected)


def test_a_column_that_some_samples_lack_is_refused() -> None:
    """It would otherwise stand at other samples than its own."""
    with pytest.raises(ReproError, match="rewards: 1 of 2 samples have none of it"):
        concatenated([1.0, None], "rewards")

"""Folders of records that differ in whose a value is: the sample, the rank, the attempt, the process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_folder_kit import checksum_event, event

from repro_golden.compare.tensorboard import differences, read_events
from repro_golden.dumps.rollout.checks import check_dump
from repro_golden.dumps.rollout.files import read_rollout_dump
from repro_golden.dumps.run.folder import RunFolder

Change = Callable[[int, dict[str, Any]], object]


def as_it_is(number: int, sample: dict[str, Any]) -> None:
    """Change nothing."""


def folder(path: Path, *, change: Change = as_it_is) -> RunFolder:
    """A run folder of slime's newer dumps: two rollouts of four samples."""
    (path / "train_data").mkdir(parents=True)
    for rollout in range(2):
        samples = [
            {
                "sample_index": 4 * rollout + i,
                "rollout_position": i,
                "tokens": torch.tensor([1, 2, 3 + i, 4, 5]),
                "total_lengths": 5,
                "response_lengths": 3,
                "loss_masks": torch.ones(3, dtype=torch.int32),
                "log_probs": torch.tensor([-0.1, -0.2, -0.3 - i]),
                "rewards": float(i),
            }
            for i in range(4)
        ]
        for i, sample in enumerate(samples):
            change(i, sample)
        shards = [{"rank": 0, "data_parallel_rank": 0, "num_microbatches": [4]}]
        data = {"format_version": 2, "rollout_id": rollout, "rank": 0, "samples": samples, "dp_shards": shards}
        torch.save(data, path / "train_data" / f"{rollout}.pt")
    return opened(path)


def opened(path: Path, **how: Any) -> RunFolder:
    """A folder whose run has ended."""
    run = RunFolder("slime", path, **how)
    run.ended()
    return run


def rows(path: Path, change: Change, name: str) -> dict[str, bytes]:
    """The rows of the first update whose names begin so, with the lanes that stand for their content."""
    return {
        row.name: row.lanes.to_bytes() for row in folder(path, change=change).rows(0) or [] if row.name.startswith(name)
    }


IMAGE = torch.tensor([[9.0, 8.0]])


@pytest.mark.parametrize(
    ("name", "first", "other"),
    [
        ("multimodal_train_inputs", *(lambda i, k=k: {"pixels": IMAGE} if i == k else None for k in (0, 1))),
        ("rubric", lambda i: [[1.0], [2.0, 3.0], [4.0], [5.0]][i], lambda i: [[1.0, 2.0], [3.0], [4.0], [5.0]][i]),
        ("multimodal_train_inputs", *(lambda i, k=k: {"pixels": IMAGE.repeat(1 + (i == k), 1)} for k in (0, 1))),
    ],
)
def test_whose_a_value_is_counts(
    tmp_path: Path, name: str, first: Callable[[int], Any], other: Callable[[int], Any]
) -> None:
    """The same numbers in another sample are another batch; where each sample has as many, nothing is added."""
    a, b = (
        rows(tmp_path / side, lambda i, sample, value=value: sample.update({name: value(i)}), name)
        for side, value in (("a", first), ("b", other))
    )
    (cut,) = (row for row in a if row.endswith(".lengths"))
    assert a.keys() == b.keys() and {row for row in a if a[row] != b[row]} == {cut}
    alike = rows(tmp_path / "c", lambda i, sample: sample.update({name: [float(i)]}), name)
    assert list(alike) == [name]


def events(path: Path, name: str, *lines: str) -> None:
    """Write a file of Miles' events."""
    (path / "events").mkdir(exist_ok=True)
    (path / "events" / name).write_text("".join(lines))


def told(rollout: int, loss: float) -> str:
    """An event with a loss."""
    return event("metric", rollout, metrics={"train/step": rollout, "train/loss": loss})


def losses(run: RunFolder, step: int) -> dict[str, float]:
    """The metrics that an update's rows have."""
    return {row.name: row.absmax for row in run.rows(step) or [] if row.dtype == "metric" and "loss" in row.name}


def test_a_number_that_is_told_again_otherwise_is_kept(tmp_path: Path) -> None:
    """In events and in the histories of a CI; the same number again is one."""
    folder(tmp_path / "run")
    events(tmp_path / "run", "p0.jsonl", told(0, 77.0), told(1, 2.0))
    events(tmp_path / "run", "p1.jsonl", told(0, 1.0), told(1, 2.0))
    run = opened(tmp_path / "run")
    assert (losses(run, 0), losses(run, 1)) == ({"loss": 77.0, "loss#1": 1.0}, {"loss": 2.0})
    folder(tmp_path / "ci")
    for number, loss in (("1", 77.0), ("2", 1.0)):
        line = json.dumps({"metric": "train/loss", "series": [[0, loss], [1, 2.0]]})
        (tmp_path / "ci" / f"{number}-{'a' * 32}.jsonl").write_text(line + "\n")
    run = opened(tmp_path / "ci")
    assert losses(run, 0) == {"loss": 1.0, "loss#1": 77.0}


def test_a_rank_that_goes_silent_is_told(tmp_path: Path) -> None:
    """Checksums of the ranks that are left stand for themselves, and not for all."""
    folder(tmp_path / "run")
    for rank, rollouts in ((0, (0, 1)), (1, (0,))):
        lines = [checksum_event(rollout, rank) for rollout in rollouts]
        events(tmp_path / "run", f"actor_{rank}.jsonl", *lines)
    run = opened(tmp_path / "run")
    checked = [[row.name for row in run.rows(step) or [] if row.dtype == "sha256"] for step in (0, 1)]
    assert "pp0.w" in checked[0] and "pp0.w" not in checked[1] and "pp0.w@0" in checked[1]
    assert any("no checksums of rank 1" in problem for problem in run.problems())


def test_a_run_that_is_taken_up_again_takes_back_what_it_logged(tmp_path: Path) -> None:
    """TensorBoard shows such a run up to where it ended: the steps after that are of the first attempt."""
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    for steps, start in ((range(10), None), (range(5, 8), 5)):
        writer = SummaryWriter(tmp_path / "resumed", purge_step=start)
        for step in steps:
            writer.add_scalar("loss", 1 / (step + 1), step)
        writer.close()
    assert list(read_events(tmp_path / "resumed")) == list(range(8))
    whole = {step: {"loss": 1 / (step + 1)} for step in range(10)}
    comparison = differences(whole, read_events(tmp_path / "resumed"), {})
    assert comparison.ended and not comparison.agrees


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("reward", torch.tensor(math.nan), "reward-finite"),
        ("reward", np.float32("nan"), "reward-finite"),
        ("reward", {"a": [1.0, math.nan]}, "reward-finite"),
        ("rollout_log_probs", [0.5, 1, -0.2, *[-0.5] * 7], "log-probs-positive"),
        ("rollout_log_probs", [0] * 9 + [-0.5], "tool-tokens"),
        ("reward", 1, ""),
        ("reward", "said", "reward-missing"),
    ],
)
def test_a_check_sees_numbers_of_every_type(tmp_path: Path, field: str, value: Any, rule: str) -> None:
    """Of torch and NumPy, in mappings and lists, ints among floats."""
    samples = [
        {
            "group_index": 0, "index": i, "prompt": "p", "tokens": [1, 2, 3, 4, 5] + [7] * 8, "response": "r",
            "response_length": 10, "label": None, "reward": float(i), "loss_mask": [1] * 10, "weight_versions": ["1"],
            "rollout_log_probs": [-0.5] * 10, "status": "completed", "metadata": {}, "remove_sample": False,
            "multimodal_inputs": None,
        }
        for i in range(4)
    ]  # fmt: skip
    samples[0][field] = value
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "0.pt")
    rules = {finding.rule for finding in check_dump(read_rollout_dump(tmp_path / "0.pt", system="slime"))}
    assert rules == ({rule} if rule else set())


def test_steps_that_one_side_alone_logged_are_counted() -> None:
    """What lies between the steps of both may be a logger that is sparse: it was not compared, and that is said."""
    whole = {step: {"loss": 1.0} for step in range(10)}
    gap = {step: {"loss": 1.0} for step in (0, 1, 2, 6, 7, 8, 9)}
    comparison = differences(whole, gap, {})
    assert comparison.agrees and comparison.apart == {"loss": (3, 0)}
    assert differences(whole, whole, {}).apart == {}

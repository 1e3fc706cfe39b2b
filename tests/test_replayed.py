"""The dumps that a trainer of the slime family is given for a replay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from repro_golden.base.errors import ReproError
from repro_golden.dumps.rollout.files import RolloutDump, read_rollout_dump, write_rollout_dump
from repro_golden.subjects.replayed import replayed_dumps

COLUMN = "rollout_log_probs"
PLANT = (0, "input", COLUMN)


def dumps(folder: Path, *columns: tuple[int, list[float], list[int]]) -> Path:
    """A folder with one dump: samples with an index, log-probs and a mask."""
    samples = [
        {
            "index": index, "group_index": 0, "prompt": "p", "response": "r", "tokens": [1, 2, *range(len(values))],
            "response_length": len(values), "reward": 1.0, "status": "completed", "label": None,
            COLUMN: values, "loss_mask": mask,
        }
        for index, values, mask in columns
    ]  # fmt: skip
    folder.mkdir()
    write_rollout_dump(folder / "0.pt", RolloutDump("slime", 0, samples=samples))
    return folder


def test_the_negative_control_moves_the_first_log_prob_that_counts(tmp_path: Path) -> None:
    """By one ULP of float32, of the sample with the lowest index, whatever order they lie in; nothing else."""
    source = dumps(tmp_path / "given", (1, [-0.5, -0.25], [1, 1]), (0, [-0.5, -0.25, -0.125], [0, 1, 1]))
    folder = replayed_dumps(source, "slime", 1, tmp_path, PLANT)
    assert folder != source
    last, first = (sample[COLUMN] for sample in read_rollout_dump(folder / "0.pt").samples)
    assert last == [-0.5, -0.25]
    assert first == [-0.5, float(np.nextafter(np.float32(-0.25), np.float32(0))), -0.125]
    assert replayed_dumps(source, "slime", 1, tmp_path, None) == source


def test_without_a_log_prob_that_counts_there_is_no_control(tmp_path: Path) -> None:
    """One that would move nothing is refused."""
    source = dumps(tmp_path / "given", (0, [-0.5], [0]))
    with pytest.raises(ReproError, match="negative control needs a rollout with log-probs"):
        replayed_dumps(source, "slime", 1, tmp_path, PLANT)

"""Dumps in less usual forms, as trainers and their users write them: read as what they mean, or named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_folder_kit import Run, f32
from test_compare import column, write

from repro_golden.base.errors import ReproError
from repro_golden.compare.mismatch.change import mismatch_change
from repro_golden.compare.traces import compare
from repro_golden.dumps.archive.pickling import write_archive
from repro_golden.dumps.archive.reading import read_archive
from repro_golden.dumps.rollout.checks import check_dump
from repro_golden.dumps.rollout.files import read_rollout_dump
from repro_golden.dumps.run.imported import trace_of_folder
from repro_golden.store.dump_conversion import to_rollout
from repro_golden.subjects.replayed import replayed_dumps

COUNTED = [1, 1, 1]


def sample(number: int, **changes: Any) -> dict[str, Any]:
    """A sample as slime writes it."""
    return {
        "group_index": number // 2, "index": number, "rollout_id": None, "prompt": "p", "tokens": [1, 2, 3, 4, 5],
        "response": "r", "response_length": 3, "label": "1", "reward": float(number % 2), "loss_mask": COUNTED,
        "weight_versions": ["0"], "rollout_log_probs": [-0.1, -0.2, -0.3], "status": "completed", "metadata": {},
        "remove_sample": False,
    } | changes  # fmt: skip


def saved(path: Path, *samples: dict[str, Any]) -> Path:
    """A dump, as slime saves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": int(path.stem.rpartition("_")[2]), "samples": list(samples)}, path)
    return path


SCALARS: dict[str, Callable[[int], dict[str, Any]]] = {
    "a bool of NumPy": lambda k: {"reward": np.isclose(1.0, float(k % 2))},
    "a float of NumPy": lambda k: {"reward": np.float32(k % 2)},
    "an array of one number": lambda k: {"reward": np.array(float(k % 2))},
    "a tensor of one number": lambda k: {"reward": torch.tensor(float(k % 2))},
    "a list of NumPy's integers": lambda _: {"tokens": list(np.array([1, 2, 3, 4, 5]))},
    "a list of NumPy's floats": lambda _: {"rollout_log_probs": list(np.array([-0.1, -0.2, -0.3], np.float32))},
    "a mask of floats": lambda _: {"loss_mask": [1.0, 1.0, 1.0]},
}


@pytest.mark.parametrize("form", SCALARS.values(), ids=SCALARS)
def test_a_number_is_one_however_it_is_written(tmp_path: Path, form: Callable[[int], dict[str, Any]]) -> None:
    """Scalars of NumPy, arrays of one number and masks of floats are no fault, and convert as numbers do."""
    plain = read_rollout_dump(saved(tmp_path / "a" / "0.pt", *(sample(k) for k in range(4))))
    other = read_rollout_dump(saved(tmp_path / "b" / "0.pt", *(sample(k, **form(k)) for k in range(4))))
    assert check_dump(other) == check_dump(plain) == []
    expected, made = to_rollout(plain).tensors, to_rollout(other).tensors
    assert expected.keys() <= made.keys(), "beside the form it was in"
    assert all(torch.equal(torch.as_tensor(expected[name]), torch.as_tensor(made[name])) for name in expected)


def test_a_mask_of_fractions_is_refused(tmp_path: Path) -> None:
    """A half of a token cannot be trained on: such a mask is no list of whole numbers."""
    dump = read_rollout_dump(saved(tmp_path / "0.pt", sample(0, loss_mask=[1.0, 0.5, 1.0])))
    with pytest.raises(ReproError, match="loss_mask are no list of whole numbers"):
        to_rollout(dump)
    dump = read_rollout_dump(saved(tmp_path / "1.pt", sample(0, loss_mask=[1.0, float("nan"), float("inf")])))
    with pytest.raises(ReproError, match="loss_mask are no list of whole numbers"):
        to_rollout(dump)


def test_a_sample_that_is_removed_is_not_trained_on(tmp_path: Path) -> None:
    """Its log-probs of 0 are none of what reaches a gradient."""
    zeros = {"tokens": list(range(12)), "response_length": 10, "loss_mask": [1] * 10, "rollout_log_probs": [0.0] * 10}
    outcomes = [
        check_dump(read_rollout_dump(saved(tmp_path / str(removed) / "0.pt", sample(0, **zeros, remove_sample=removed),
                                           sample(1))))
        for removed in (False, True)
    ]  # fmt: skip
    assert ["of exactly 0" in str(findings) for findings in outcomes] == [True, False]


@pytest.mark.parametrize(("count", "severity"), [(4, "warning"), (5, "error")])
def test_groups_without_a_number_are_no_groups_of_a_size(tmp_path: Path, count: int, severity: str) -> None:
    """Dumps of before groups had numbers: what was asked of their size cannot be told, and that is told."""
    samples = [{k: v for k, v in sample(n).items() if k != "group_index"} for n in range(count)]
    dump = read_rollout_dump(saved(tmp_path / "0.pt", *samples))
    (finding,) = check_dump(dump, group_size=2)
    assert (finding.rule, finding.severity) == ("group-size", severity)
    assert "have no number of their group" in finding.message
    assert check_dump(dump) == []


@pytest.mark.parametrize(
    ("name", "evaluation"),
    [("eval_3.pt", True), ("data_eval_3.pt", True), ("data_3.pt", False), ("3.pt", False), ("medieval_3.pt", False)],
)
def test_an_evaluation_is_known_by_its_name(tmp_path: Path, name: str, evaluation: bool) -> None:
    """The trainers' guides name their dumps ``data_{rollout_id}.pt``, of which an evaluation is ``data_eval_3.pt``."""
    assert read_rollout_dump(saved(tmp_path / name, sample(0))).evaluation is evaluation


FORMS: dict[str, tuple[dict[str, Any], int]] = {
    "a sample that is removed": ({"remove_sample": True}, 1),
    "a mask of zeros": ({"loss_mask": [0, 0, 0]}, 1),
    "no finite log-prob": ({"rollout_log_probs": [float("nan")] * 3}, 1),
    "a tensor": ({"rollout_log_probs": torch.tensor([-0.1, -0.2, -0.3])}, 0),
    "an array": ({"rollout_log_probs": np.array([-0.1, -0.2, -0.3])}, 0),
    "a mask that is a tensor": ({"loss_mask": torch.tensor([0, 1, 1])}, 0),
    "whole numbers among others": ({"rollout_log_probs": [0, -0.2, -0.3]}, 0),
    "whole numbers alone": ({"rollout_log_probs": [0, 0, 0]}, 0),
    "a tuple": ({"rollout_log_probs": (-0.1, -0.2, -0.3)}, 0),
    "a mask of several kinds": ({"loss_mask": [0.0, 1, True]}, 0),
}


@pytest.mark.parametrize(("form", "where"), FORMS.values(), ids=FORMS)
def test_what_is_planted_counts(tmp_path: Path, form: dict[str, Any], where: int) -> None:
    """The negative control moves one finite log-prob that is trained on, whatever the fields are made of."""
    saved(tmp_path / "dumps" / "0.pt", sample(0, **form), sample(1))
    (tmp_path / "scratch").mkdir()
    made = replayed_dumps(tmp_path / "dumps", "slime", 1, tmp_path / "scratch", [0, "input", "rollout_log_probs"])
    sides = [read_rollout_dump(folder / "0.pt").samples for folder in (tmp_path / "dumps", made)]
    values = [[np.asarray(getattr(s["rollout_log_probs"], "array", s["rollout_log_probs"])) for s in side]
              for side in sides]  # fmt: skip
    moved = [k for k, (x, y) in enumerate(zip(*values, strict=True)) if not np.array_equal(x, y, equal_nan=True)]
    assert moved == [where]
    changed = np.flatnonzero(values[0][where] != values[1][where])
    assert list(changed) == [1 if "loss_mask" in form and where == 0 else 0]


def test_a_column_that_is_not_looked_at_is_named(tmp_path: Path) -> None:
    """Lists of several lengths, and columns without an entry for each sample: two runs that differ in them say so."""
    traces = []
    for name, k in (("a", 1.0), ("b", 2.0)):
        folder = Run("miles", rollouts=1).write(tmp_path / name, log=tmp_path / f"{name}.log")
        (path,) = (folder / "train_data").iterdir()
        dump = read_archive(path)
        count = len(dump["rollout_data"]["response_lengths"])
        dump["rollout_data"] |= {"turns": [[[k], [k, k]]] * count, "is_weights": f32([k] * 50)}
        write_archive(path, dump)
        trace, _ = trace_of_folder(folder, tmp_path / f"trace-{name}", log=tmp_path / f"{name}.log")
        assert trace.end is not None and {"turns", "is_weights"} <= trace.end["unread"].keys()
        traces.append(trace)
    text = str(compare(*traces).looked)
    assert "is_weights (it has not one entry for each sample)" in text and "turns (it holds what is no number" in text


def test_a_mismatch_is_of_one_column_on_both_sides(tmp_path: Path) -> None:
    """A commit that shows one column more has not moved the gap to the rollout engine by that."""
    shown = [column("forward", "log_probs", -1.0, -2.0), column("input", "rollout_log_probs", -1.5, -2.0)]
    a = write(tmp_path / "a", [shown])
    b = write(tmp_path / "b", [[column("forward", "old_log_probs", -3.0, -4.0), *shown]])
    for sides in ((a, b), (b, a)):
        change = mismatch_change(*sides)
        assert change is not None and change.before.column == change.after.column == "log_probs" and change.same
    c = write(tmp_path / "c", [[column("forward", "old_log_probs", -3.0, -4.0), *shown[1:]]])
    assert mismatch_change(a, c) is None

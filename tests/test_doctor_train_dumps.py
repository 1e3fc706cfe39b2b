"""Rules about train dumps: each with a run's folder that it finds something in, and one that is in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doctor_dump_kit import found, trained
from run_folder_kit import Run, f32

from repro.doctor.catalogue import catalogue
from repro.doctor.examine import FAULT, examine, look
from repro_golden.dumps.archive.pickling import write_archive
from repro_golden.dumps.values import Tensor

RULES = (
    "advantages-constant", "dump-nan-hidden", "dump-not-finite", "train-columns-lengths", "train-log-probs-misaligned",
    "train-mask-all-zero", "train-ranks-disagree", "train-rollout-tokens-differ",
)  # fmt: skip


def with_values(change: Callable[[Any], Any], only: int | None = None) -> Callable[[int, Any], Any]:
    """Another tensor of the same dtype: in one sample, or in all."""

    def changed(place: int, value: Any) -> Any:
        if only is not None and place != only:
            return value
        return Tensor(value.dtype, np.ascontiguousarray(change(value.array.copy())))

    return changed


def nan_at(token: int, value: float = np.nan) -> Callable[[Any], Any]:
    """One value that is not finite."""

    def change(array: Any) -> Any:
        array[token] = value
        return array

    return change


def shifted(array: Any) -> Any:
    """One token later."""
    return np.concatenate([array[:1], array[:-1]])


def _zero(array: Any) -> Any:
    return np.zeros_like(array)


def _other_token(array: Any) -> Any:
    array[-1] += 1
    return array


@pytest.mark.parametrize("system", ["slime", "miles", "relax", "old"])
@pytest.mark.parametrize("layout", [{}, {"dp": 2, "cp": 2, "tp": 2}])
def test_runs_in_order_have_nothing(tmp_path: Path, system: str, layout: dict[str, int]) -> None:
    """No rule of train dumps finds anything in a sound run, whatever its layout."""
    if system == "slime" and layout:
        layout = {"dp": 2}  # its one file holds whole responses
    folder = trained(tmp_path, system=system, **layout)
    assert set(RULES) <= catalogue().keys()
    assert not examine(look([folder]), only=RULES).findings


@pytest.mark.parametrize("system", ["slime", "miles", "relax", "old"])
def test_random_columns_raise_no_error(tmp_path: Path, system: str) -> None:
    """Numbers without any sense are no error of these rules, as long as they are finite."""
    folder = Run(system=system, updates=2, count=40).write(tmp_path)
    assert not [finding for finding in examine(look([folder]), only=RULES).findings if finding.severity == "error"]


# -- not finite


@pytest.mark.parametrize(("shown", "hidden"), [(0.25, True), (float("nan"), False)])
def test_metrics_that_hide_a_nan(tmp_path: Path, shown: float, hidden: bool) -> None:
    """A NaN in a raw column beside a finite metric of the same step is hidden: "dump-nan-hidden"."""
    folder = trained(tmp_path / "run", {"log_probs": with_values(nan_at(1), only=2)}, system="miles")
    log = tmp_path / "train.log"
    value = "nan" if shown != shown else repr(shown)
    log.write_text(
        "[2026-11-20 15:38:49] model.py:918 - step 0: {'train/ppo_kl': "
        + value + ", 'train/loss': " + value + ", 'train/pg_loss': " + value + ", 'train/step': 0}\n"
    )  # fmt: skip
    findings = found("dump-nan-hidden", folder, log)
    assert bool(findings) == hidden
    if hidden:
        assert findings[0].severity == "error" and "ppo_kl of step 0 is 0.25" in findings[0].message
        assert str(log) in findings[0].message and findings[0].where.item == "log_probs of sample 2"
    assert found("dump-not-finite", folder, log), "the column itself is another finding"
    assert not found("dump-nan-hidden", folder), "without metrics there is nothing that hides"
    assert not found("dump-nan-hidden", trained(tmp_path / "sound", system="miles"), log)


@pytest.mark.parametrize(
    ("column", "value", "severity"),
    [("advantages", np.inf, "error"), ("returns", np.nan, "error"), ("kl", np.nan, "warning")],
)
def test_what_enters_the_loss_is_an_error(tmp_path: Path, column: str, value: float, severity: str) -> None:
    """Other columns are a warning; masked tokens count too: "dump-not-finite"."""
    mask = with_values(lambda array: np.concatenate([[0], array[1:]]).astype(array.dtype), only=4)
    folder = trained(tmp_path, {column: with_values(nan_at(0, value), only=4), "loss_masks": mask})
    (finding,) = found("dump-not-finite", folder)
    assert finding.severity == severity and "a masked token" in finding.message


def test_counts_of_what_is_not_finite(tmp_path: Path) -> None:
    """One finding a column, with how many values and samples: "dump-not-finite"."""
    (finding,) = found("dump-not-finite", trained(tmp_path, {"log_probs": with_values(nan_at(3))}))
    assert "8 values that are not finite, in 8 samples" in finding.message


# -- advantages


def test_groups_that_teach_nothing(tmp_path: Path) -> None:
    """Half of the groups is a note; rewards that differ where advantages do not is a warning: "advantages-constant"."""

    def flat(count: int) -> dict[str, Any]:
        return {"advantages": lambda i, value: f32(np.zeros(value.shape)) if i < 2 * count else value}

    def alike(count: int) -> dict[str, Any]:
        return {**flat(count), "raw_reward": lambda i, value: 1.0 if i < 2 * count else value}

    (half,) = found("advantages-constant", trained(tmp_path / "half", alike(2)))
    assert half.severity == "note" and "2 of 4 groups" in half.message and "filter" in half.fix
    assert not found("advantages-constant", trained(tmp_path / "one", alike(1)))
    (lost,) = found("advantages-constant", trained(tmp_path / "lost", flat(1)))
    assert lost.severity == "warning" and "rewards differ" in lost.message
    signed = {"advantages": lambda i, value: f32(np.full(value.shape, -0.0 if i % 2 else 0.0))}
    assert found("advantages-constant", trained(tmp_path / "signed", signed))[0].severity == "warning"


def test_single_samples_are_no_groups(tmp_path: Path) -> None:
    """With one sample a prompt nothing is said: "advantages-constant"."""
    change = {"advantages": with_values(_zero)}
    assert not found("advantages-constant", trained(tmp_path, change, prompts=8, each=1))


# -- alignment


@pytest.mark.parametrize("shift", [1, -1])
@pytest.mark.parametrize("column", ["log_probs", "ref_log_probs"])
def test_a_shift_to_either_side(tmp_path: Path, shift: int, column: str) -> None:
    """Both directions and both columns are seen: "train-log-probs-misaligned"."""
    (finding,) = found(
        "train-log-probs-misaligned", trained(tmp_path, {column: with_values(lambda a: np.roll(a, shift))})
    )
    assert finding.where.value == f"shift {shift}" and finding.message.startswith(column)


def test_other_differences_are_no_shift(tmp_path: Path) -> None:
    """Noise, a shuffle, few tokens and what is masked with zeros are none: "train-log-probs-misaligned"."""
    rng = np.random.default_rng(3)
    noise = {"log_probs": with_values(lambda a: (a + rng.normal(size=a.shape)).astype(a.dtype))}
    mixed = {"log_probs": with_values(lambda a: rng.permutation(a))}
    for name, change in (("noise", noise), ("mixed", mixed)):
        assert not found("train-log-probs-misaligned", trained(tmp_path / name, change)), name
    few = trained(tmp_path / "few", {"log_probs": with_values(shifted)}, length=8)
    assert not found("train-log-probs-misaligned", few)


# -- lengths, ranks, other samples


def test_columns_of_another_length(tmp_path: Path) -> None:
    """A user's own column that one sample has too short: "train-columns-lengths"."""
    rng = np.random.default_rng(0)
    sizes = [sample["response_lengths"] for sample in _samples(trained(tmp_path / "plain"))]

    def column(wrong: int) -> list[Any]:
        return [f32(rng.normal(size=n - (i == wrong))) for i, n in enumerate(sizes)]

    (finding,) = found("train-columns-lengths", trained(tmp_path / "short", more={"my_weights": column(6)}))
    assert finding.where.item == "my_weights of sample 6" and finding.severity == "warning"
    assert f"{sizes[6] - 1} entries for the {sizes[6]} tokens" in finding.message
    assert not found("train-columns-lengths", trained(tmp_path / "whole", more={"my_weights": column(-1)}))
    per_sample = {"my_pair": [f32([1.0, 2.0])] * 8}
    assert not found("train-columns-lengths", trained(tmp_path / "pair", more=per_sample))


def _samples(folder: Path) -> list[Any]:
    from repro_golden.dumps.train.files import read_train_dump

    samples = read_train_dump(folder / "train_data" / "0.pt").samples
    return sorted(samples, key=lambda sample: int(sample["sample_index"]))


def test_ranks_that_disagree(tmp_path: Path) -> None:
    """Two tensor-parallel ranks with other log-probs of one sample: "train-ranks-disagree"."""
    folder = trained(tmp_path, system="miles", tp=2)
    assert not found("train-ranks-disagree", folder)
    from repro_golden.dumps.archive.reading import read_archive

    path = folder / "train_data" / "0_1.pt"
    value = read_archive(path)
    array = value["rollout_data"]["log_probs"][3].array.copy()
    array[2] += 1
    value["rollout_data"]["log_probs"][3] = Tensor("float32", array)
    write_archive(path, value)
    (finding,) = found("train-ranks-disagree", folder)
    assert finding.severity == "warning" and "ranks 0 and 1" in finding.message and "at token 2" in finding.message
    assert finding.where.item == f"log_probs of sample {value['rollout_data']['sample_indices'][3]}"


def test_lengths_that_differ_from_the_rollout(tmp_path: Path) -> None:
    """Samples are compared by index, within one folder: "train-rollout-tokens-differ"."""
    rule = "train-rollout-tokens-differ"
    folder = trained(tmp_path / "run", {"tokens": with_values(_other_token)})
    (finding,) = found(rule, folder)
    assert "8 of 8 samples" in finding.message and str(folder / "rollout_data" / "0.pt") in finding.message
    alone = trained(tmp_path / "alone", {"tokens": with_values(_other_token)}, with_rollouts=False)
    other = trained(tmp_path / "other")
    assert not found(rule, alone, other), "a rollout of another run"


@pytest.mark.parametrize("name", ["0.pt", "0_0.pt"])
def test_odd_columns_make_no_rule_fail(tmp_path: Path, name: str) -> None:
    """Columns of text, of None, empty and of huge numbers: no rule fails on them."""
    odd = [["a"] * 3, [None] * 3, [10**400] * 3, [{}] * 3, [f32([])] * 3, [f32([[1.0]])] * 3, [True] * 3]
    columns: dict[str, Any] = {f"odd_{i}": column for i, column in enumerate(odd)}
    columns |= {
        "tokens": [[1, 2, 3]] * 3,
        "response_lengths": [2] * 3,
        "total_lengths": [3] * 3,
        "sample_indices": [0, 1, 2],
    }
    columns |= {
        "log_probs": [[0.0, -1e308]] * 3,
        "rollout_log_probs": [[-1e308, 1e308]] * 3,
        "advantages": [["x", "y"]] * 3,
    }
    columns |= {"rewards": ["no"] * 3, "loss_masks": [[1, 1]] * 3, "raw_reward": [None, "a", {}]}
    if name == "0_0.pt":
        write_archive(tmp_path / "train_data" / name, {"rollout_id": 0, "rank": 0, "rollout_data": columns})
    else:
        rows = [{k: v[i] for k, v in columns.items()} for i in range(3)]
        for i, row in enumerate(rows):
            row["sample_index"] = i
        write_archive(
            tmp_path / "train_data" / name,
            {
                "format_version": 2,
                "rollout_id": 0,
                "rank": 0,
                "samples": rows,
                "dp_shards": [],
                "raw_reward": [1.0] * 3,
            },
        )
    examined = examine(look([tmp_path]), only=RULES)
    assert not [finding for finding in examined.findings if finding.rule == FAULT.id], examined.findings

"""Rules of the flags: each with a launch script that fails it and one that passes, written and read for real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from doctor_flags_kit import BATCH, launch, script
from findings_kit import told, tried
from hypothesis import given
from hypothesis import strategies as st

from repro.doctor.artefacts.launches.scripts import launch_of_argv

Maker = Callable[[Path], list[object]]


def of(*flags: str, before: str = "", entry: str = "train.py") -> Maker:
    """A launch script with these flags."""
    return lambda folder: [launch(script(folder, *flags, before=before, entry=entry))]


LOST = {
    "CR": (BATCH[0] + " \\\r\n " + BATCH[1] + "\r\n", "continuation-lost", "a backslash before it continues nothing"),
    "CR alone": (" ".join(BATCH) + "\r\n", "continuation-lost", "lines end in CR LF"),
    "no space before a flag below": (
        BATCH[0] + "\\\n" + BATCH[1],
        "continuation-lost",
        "32--n-samples-per-prompt is one",
    ),
    "no space between flags": (
        "--colocate\\\n" + " ".join(BATCH),
        "continuation-lost",
        "--colocate--rollout-batch-size",
    ),
    "nothing between number and flag": (
        BATCH[0] + "\\\n" + BATCH[1],
        "flag-not-a-number",
        "32--n-samples-per-prompt is no",
    ),
    "dashes": (" ".join(BATCH) + " \u2013-colocate \u2014save x", "flag-typo", "no parser takes it for --colocate"),
    "a long dash": (" ".join(BATCH) + " \u2014save x", "flag-typo", "no parser takes it for --save"),
    "an array's first word": (f"A=({' '.join(BATCH)});${{A}} --seed 1", "continuation-lost", "of the array A alone"),
    "one word too many": (" ".join(BATCH) + " 8", "flag-not-a-number", "--global-batch-size takes one number, and 8"),
}


@pytest.mark.parametrize("name", LOST)
def test_flags_that_a_shell_loses_are_told(tmp_path: Path, name: str) -> None:
    """Ends of lines and dashes that look right, and spoil a flag."""
    flags, rule, message = LOST[name]
    path = tmp_path / "run.sh"
    before, _, flags = flags.rpartition(";")
    path.write_bytes(f"#!/bin/bash\n{before}\npython3 train.py {flags}\n".encode())
    assert [finding.message for finding in told(rule, launch(path)) if message in finding.message]


@pytest.mark.parametrize(
    "flags",
    [
        "--a 1 \\\n" + " ".join(BATCH),
        "--save 'x\\\ny' --seed\\\n 1 --a b\\\nc",
        '--rollout-stop "\u2014" --wandb-group "a \u2014b" --lr \u22121e-6',
        " ".join(BATCH) + " ${MORE[@]} $X",
        '--seed 1 ${A[0]} "${A[@]}" $B',
        "--seed 1\n# a comment\r",
    ],
)
def test_flags_that_no_shell_loses_are_not(tmp_path: Path, flags: str) -> None:
    """Backslashes with a space, joins that are no flag, dashes in text, and what only a shell knows."""
    path = tmp_path / "run.sh"
    path.write_text(f"python3 train.py {flags}\n", newline="")
    read = launch(path)
    assert [each for rule in ("continuation-lost", "flag-typo", "flag-not-a-number") for each in told(rule, read)] == []


def test_rollout_path_missing_looks_where_the_folder_is(tmp_path: Path) -> None:
    """The rule "rollout-path-missing": the file of rollout 0, or of the first one, in a folder of this disk."""
    folder = tmp_path / "dumps"
    flag = f"--load-debug-rollout-data {folder}/{{rollout_id}}.pt"
    path = script(tmp_path, flag)
    assert told("rollout-path-missing", launch(path)) == []  # no folder: another machine's
    folder.mkdir()
    (folder / "1.pt").write_bytes(b"")
    (finding,) = told("rollout-path-missing", launch(path))
    assert finding.severity == "warning"
    assert finding.where.line == 5
    assert "1.pt" in finding.message
    assert told("rollout-path-missing", launch(script(tmp_path, flag, "--start-rollout-id 1"))) == []
    (folder / "0.pt").write_bytes(b"")
    assert told("rollout-path-missing", launch(path)) == []


# -- the batch invariant


SIZES = st.integers(1, 60)


@given(SIZES, SIZES, SIZES, SIZES)
def test_the_batch_invariant_is_exact(prompts: int, each: int, batch: int, steps: int) -> None:
    """The rule "batch-invariant": nothing where prompts x samples = batch x steps, and an error elsewhere."""
    words = f"train.py --rollout-batch-size {prompts} --n-samples-per-prompt {each}".split()
    both = launch_of_argv([*words, "--global-batch-size", str(batch), "--num-steps-per-rollout", str(steps)])
    reported = told("batch-invariant", both)
    assert bool(reported) == (prompts * each != batch * steps)
    assert [finding.severity for finding in reported] in ([], ["error"])
    divided = launch_of_argv([*words, "--num-steps-per-rollout", str(steps)])
    assert bool(told("batch-invariant", divided)) == bool(prompts * each % steps)
    alone = told("batch-invariant", launch_of_argv([*words, "--global-batch-size", str(batch)]))
    assert bool(alone) == bool(prompts * each % batch)
    assert [hit.severity for hit in alone] in ([], ["error"] if prompts * each < batch else ["warning"])


def test_the_hole_of_integer_division_is_found() -> None:
    """The rule "batch-invariant": 5 x 3 // 2 is 7, and the trainers take it."""
    words = "train.py --rollout-batch-size 5 --n-samples-per-prompt 3 --global-batch-size 7 --num-steps-per-rollout 2"
    (finding,) = told("batch-invariant", launch_of_argv(words.split()))
    assert "15" in finding.message
    assert "14" in finding.message
    assert finding.fix == "--num-steps-per-rollout 1 with --global-batch-size 15"


@pytest.mark.parametrize("value", ["", "x", "nan", "inf", "-1", "0", "1e400", "$N", "8.5", "9" * 400])
def test_odd_values_raise_nothing(value: str) -> None:
    """Every rule takes values that are no numbers, negative, or beyond every bound."""
    flags = [
        "--rollout-batch-size", "--n-samples-per-prompt", "--global-batch-size", "--num-steps-per-rollout",
        "--actor-num-nodes", "--actor-num-gpus-per-node", "--rollout-num-gpus", "--rollout-num-gpus-per-engine",
        "--tensor-model-parallel-size", "--sglang-mem-fraction-static", "--load-debug-rollout-data-subsample",
        "--load-debug-rollout-data", "--save-debug-rollout-data", "--save-debug-train-data", "--start-rollout-id",
    ]  # fmt: skip
    read = launch_of_argv(["train.py", *(word for flag in flags for word in (flag, value)), "--colocate"])
    tried(read)

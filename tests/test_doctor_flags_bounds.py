"""Where rules of the flags begin and end: what is wrong by one, what only looks wrong, what cannot be known."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_dump_kit import found as found_in
from doctor_dump_kit import rollout
from doctor_flags_kit import BATCH, GPUS, launch, script
from findings_kit import told

from repro.doctor.artefacts.kinds import Machine
from repro.doctor.artefacts.launches.scripts import launch_of_argv


def said(name: str, words: str, *more: object) -> list[tuple[str, str, str]]:
    """What a rule finds in an argv: severity, certainty and flag."""
    reported = told(name, launch_of_argv(["python", "train.py", *words.split()]), *more)
    return [(finding.severity, finding.certainty, finding.where.item) for finding in reported]


EXPERTS = "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
NODES = "--actor-num-nodes 1 --actor-num-gpus-per-node"
SHARE = (
    "--rollout-batch-size 4 --n-samples-per-prompt 4 --load-debug-rollout-data x --load-debug-rollout-data-subsample"
)
UNEVEN = "--rollout-batch-size 5 --n-samples-per-prompt 3 --global-batch-size 4"


@pytest.mark.parametrize(
    ("name", "words", "severities"),
    [
        # a forgotten --colocate, unless nothing is sampled or engines are placed otherwise
        ("gpu-count", f"{NODES} 8", ["error"]),  # nothing for sampling
        ("gpu-count", f"{NODES} 8 --colocate", []),
        ("gpu-count", f"{NODES} 8 --rollout-num-gpus 8", []),
        ("gpu-count", f"{NODES} 8 --debug-train-only", []),
        ("gpu-count", f"{NODES} 8 --load-debug-rollout-data x", []),
        ("gpu-count", f"{NODES} 8 --loss-type sft_loss", []),
        ("gpu-count", f"{NODES} 8 --sglang-config x.yaml", []),
        ("gpu-count", f"{NODES} 8 $EXTRA_ARGS", ["warning"]),  # which may hold it
        ("gpu-count", "--lr 1", []),
        # loading data is training alone
        ("debug-modes-exclusive", "--debug-rollout-only --load-debug-rollout-data x", ["error"]),
        ("debug-modes-exclusive", "--debug-train-only", ["warning"]),
        ("debug-modes-exclusive", "--debug-train-only --rollout-function-path a.b", []),
        ("debug-modes-exclusive", "--debug-train-only --loss-type sft_loss", []),
        ("debug-modes-exclusive", "--debug-rollout-only", []),
        # --dump-details overrides, and what is read is not written over
        ("dump-paths-collide", "--dump-details d --save-debug-rollout-data x/{rollout_id}.pt", ["warning"]),
        ("dump-paths-collide", "--dump-details d", []),
        (
            "dump-paths-collide",
            "--load-debug-rollout-data a/{rollout_id}.pt --save-debug-rollout-data a/{rollout_id}.pt",
            ["warning"],
        ),
        # by the numbers of the flags
        ("rollout-subsample", f"{SHARE} 0.05", ["warning"]),  # int(0.8) = 0: all 16
        ("rollout-subsample", f"{SHARE} 0.0625", ["warning"]),  # one sample, of a group of 4
        ("rollout-subsample", f"{SHARE} 0.5", []),
        ("rollout-subsample", f"{SHARE} 0.75", ["warning"]),  # 6 and 6
        ("rollout-subsample", f"{SHARE} 1", []),
        ("rollout-subsample", f"{SHARE} 0", ["warning"]),
        ("rollout-subsample", f"{SHARE} 2", ["warning"]),
        # colocated engines take the trainer's GPUs
        ("engine-gpus", f"{NODES} 8 --colocate --rollout-num-gpus-per-engine 16", ["error"]),
        ("engine-gpus", f"{NODES} 8 --colocate --rollout-num-gpus-per-engine 4", []),
        ("engine-gpus", f"{NODES} 6 --colocate --rollout-num-gpus-per-engine 4", ["warning"]),
        ("engine-gpus", "--rollout-num-gpus 8 --rollout-num-gpus-per-engine 3 --sglang-config x", []),
        ("engine-gpus", "--rollout-num-gpus $N --rollout-num-gpus-per-engine 3", []),
        ("engine-gpus", "--rollout-num-gpus 2 --rollout-num-gpus-per-engine 4 --debug-train-only", []),
        # what is known of the product must divide; nothing is said of what is not
        ("parallel-world", f"{NODES} 8 --tensor-model-parallel-size 3", ["error"]),
        ("parallel-world", f"{NODES} 4 --pipeline-model-parallel-size 2 {EXPERTS}", ["error"]),
        ("parallel-world", f"{NODES} 4 {EXPERTS}", []),
        ("parallel-world", f"{NODES} 8 --tensor-model-parallel-size 3 --train-backend fsdp", []),
        ("parallel-world", f"{NODES} 8 --tensor-model-parallel-size 3 --debug-rollout-only", []),
        ("parallel-world", f"{NODES} 8 --tensor-model-parallel-size $TP", []),
        ("parallel-world", f"{NODES} 8 --tensor-model-parallel-size $TP --context-parallel-size 3", ["error"]),
        ("parallel-world", "--actor-num-nodes $N --actor-num-gpus-per-node 8 --tensor-model-parallel-size 3", []),
        # engines that have their GPUs for themselves may keep more
        ("colocate-memory", "--colocate --sglang-mem-fraction-static 0.85", []),
        ("colocate-memory", "--colocate --sglang-mem-fraction-static 0.7 --no-offload-train", ["warning"]),
        ("colocate-memory", "--sglang-mem-fraction-static 0.95", []),
        ("colocate-memory", "--colocate --sglang-mem-fraction-static 0.95 --debug-rollout-only", []),
        ("colocate-memory", "--sglang-mem-fraction-static 1.5", ["error"]),
        # modes in which steps differ in size
        ("batch-invariant", f"{UNEVEN} --use-dynamic-global-batch-size", []),
        ("batch-invariant", f"{UNEVEN} --multi-lora", []),
        ("batch-invariant", f"{UNEVEN} --allow-partial-train-step", []),
    ],
)
def test_how_grave_it_is(name: str, words: str, severities: list[str]) -> None:
    """What each of these rules says of flags alone: its severity, or nothing."""
    assert [severity for severity, _, _ in said(name, words)] == severities


@pytest.mark.parametrize(
    ("flags", "before", "text"),
    [
        (f"{NODES} 8 --colocate", "ray start --head --num-gpus 8", ""),
        (f"{NODES} 8 --colocate", "ray start --head --num-gpus=4", "8 (colocated) = 8"),
        (f"{NODES} 4 --rollout-num-gpus 8", "ray start --head --num-gpus 8", "= 12"),
        (f"{NODES} 4 --rollout-num-gpus 8 --colocate", "ray start --head --num-gpus 8", ""),
        (f"{NODES} 4 --rollout-num-gpus 8 --debug-train-only", "ray start --head --num-gpus 4", ""),
        (f"{NODES} 4 --rollout-num-gpus 8 --debug-rollout-only", "ray start --head --num-gpus 8", ""),
        (f"{NODES} 8 --colocate", "ray start --head --num-gpus 4\nssh other ray start --address=1", ""),
        ("--actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate", "ray start --head --num-gpus 8", ""),
        (f"{NODES} 8 --colocate", "ray start --head --num-gpus $N", ""),
        (f"{NODES} 8 --colocate", "export CUDA_VISIBLE_DEVICES=0,1,2", "names 3"),
    ],
)
def test_gpus_asked_for_and_given(tmp_path: Path, flags: str, before: str, text: str) -> None:
    """The rule "gpu-count": on one node, against `ray start` and CUDA_VISIBLE_DEVICES."""
    messages = [finding.message for finding in told("gpu-count", launch(script(tmp_path, flags, before=before)))]
    assert bool(messages) == bool(text)
    assert text in "".join(messages)


def test_gpus_of_the_machine_are_a_warning() -> None:
    """The rule "gpu-count": the trainer may run elsewhere; a machine without GPUs says nothing."""
    words = f"{NODES} 8 --colocate"
    assert said("gpu-count", words, Machine("python", {}, gpus=4)) == [("warning", "likely", "GPUs")]
    assert said("gpu-count", words, Machine("python", {}, gpus=8)) == []
    assert said("gpu-count", words, Machine("python", {}, gpus=0)) == []
    forgotten = launch_of_argv(["train.py", *f"{NODES} 4 --rollout-num-gpus 4".split()])
    (finding,) = told("gpu-count", forgotten, Machine("python", {}, gpus=4))
    assert "--colocate" in finding.fix
    too_many = launch_of_argv(["train.py", *f"{NODES} 4 --rollout-num-gpus 8".split()])
    (finding,) = told("gpu-count", too_many, Machine("python", {}, gpus=4))
    assert "ask for 4 GPUs" in finding.fix


@pytest.mark.parametrize(
    ("words", "outcomes"),
    [
        ("--save-debug-rollout-data /x/{}.pt", [("error", "certain")]),
        ("--save-debug-rollout-data /x/{0}.pt", [("error", "certain")]),
        ("--save-debug-rollout-data /x/{rollout_id.pt", [("error", "certain")]),
        ("--save-debug-rollout-data /x/{rollout_id:05d}.pt", [("error", "certain")]),  # the id is text
        ("--load-debug-rollout-data /x/{rollout_id:05d}.pt", []),
        ("--save-debug-rollout-data /x/{{a}}_{rollout_id}.pt", []),
        ("--save-debug-train-data /x/{rollout_id}_{rank}.pt", []),
        ("--load-debug-rollout-data /x/{rank}.pt", [("error", "certain")]),
        ("--save-debug-rollout-data /x/all.pt", [("warning", "certain")]),
        ("--save-debug-rollout-data /x/all.pt --num-rollout 1", []),
        ("--load-debug-rollout-data /x/all.pt", [("note", "certain")]),
        ("--save-debug-rollout-data ${OUT}/{rollout_id}.pt", []),
        ("--save-debug-rollout-data $OUT", []),
        ("--save-debug-rollout-data $OUT/{step}.pt", [("error", "certain")]),
    ],
)
def test_templates_are_formatted_as_the_trainers_do(words: str, outcomes: list[tuple[str, str]]) -> None:
    """The rule "rollout-path-template": what `str.format` takes, with a saved rollout's id as text."""
    assert [finding[:2] for finding in said("rollout-path-template", words)] == outcomes


def test_a_subsample_of_the_dump_at_hand_is_certain(tmp_path: Path) -> None:
    """The rule "rollout-subsample": the real number of samples, where the dump is given too."""
    dump = rollout(tmp_path / "0.pt")
    given = script(tmp_path, "--load-debug-rollout-data x", "--load-debug-rollout-data-subsample 0.01")
    (finding,) = found_in("rollout-subsample", given, dump)
    assert (finding.severity, finding.certainty, finding.where.line) == ("error", "certain", 6)
    assert "0.pt" in finding.message


def test_a_repeated_flag_of_a_models_file_is_a_note(tmp_path: Path) -> None:
    """The rule "flag-repeated": defaults in a sourced file are there to be overridden."""
    (tmp_path / "model.sh").write_text("MODEL=(--moe-token-dispatcher-type alltoall)\n")
    before = 'source "$(dirname "$0")/model.sh"'
    path = script(tmp_path, "${MODEL[@]}", *BATCH, *GPUS, "--moe-token-dispatcher-type flex", before=before)
    (finding,) = told("flag-repeated", launch(path))
    assert (finding.severity, finding.where.line) == ("note", 12)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rollout-batch-size nan", "--rollout-batch-size nan is no whole number"),
        ("--global-batch-size abc", "is no whole number"),
        ("--global-batch-size=256.0", "is no whole number"),
        ("--num-rollout 1e3 --num-rollout 1000", "1e3 is no whole number"),  # the parser reads both
        ("--rollout-seed x", "is no whole number"),
        ("--n-samples-per-prompt -1", "must be above 0"),
        ("--tensor-model-parallel-size 0", "must be above 0"),
        ("--rollout-max-response-len -5", "must be 0 or more"),
        ("--rollout-num-gpus 0 --num-rollout 0", ""),
        ("--rollout-top-k -1 --rollout-max-context-len -1", ""),
        ("--rollout-batch-size 32 --n-samples-per-prompt +8 --global-batch-size 1_024", ""),
        ("--rollout-batch-size $N --global-batch-size ${A}x --num-rollout `f` --rollout-num-gpus {n}", ""),
        ("--max-tokens-per-gpu abc", ""),  # "max-tokens-per-gpu"
        ("--lr abc --rollout-batch-size", ""),
    ],
)
def test_whole_numbers(words: str, message: str) -> None:
    """The rule "flag-not-a-number": as argparse reads them, and the signs that sizes can have."""
    reported = told("flag-not-a-number", launch_of_argv(["python", "train.py", *words.split()]))
    assert len(reported) == bool(message)
    assert message in "".join(finding.message for finding in reported)
    assert {(hit.severity, hit.certainty) for hit in reported} <= {("error", "certain")}
    assert all(hit.where.item for hit in reported)


def test_a_line_of_a_script_that_is_no_number(tmp_path: Path) -> None:
    """The rule "flag-not-a-number" names the line."""
    path = script(tmp_path, *GPUS, "--rollout-batch-size nan")
    (finding,) = told("flag-not-a-number", launch(path))
    assert finding.where.line == 8
    assert told("flag-not-a-number", launch(script(tmp_path, *GPUS, *BATCH))) == []


def test_a_width_in_a_template_fills_no_memory(tmp_path: Path) -> None:
    """A path whose field is wider than any file name is an error, and is never written out."""
    words = f"--debug-train-only --load-debug-rollout-data {tmp_path}/{{rollout_id:9999999999}}.pt"
    assert [finding[:2] for finding in said("rollout-path-template", words)] == [("error", "certain")]
    assert said("rollout-path-missing", words) == []

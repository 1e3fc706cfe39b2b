from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from repro_core.config import MegatronConfig, ModelConfig, SglangConfig, TrainConfig
from repro_core.data.rollout_file import read_rollout
from repro_core.data.train_data import Collector
from repro_core.train.command import main, make_parser

torch.set_num_threads(1)

TINY = [
    *("--hidden-size", "16", "--intermediate-size", "16", "--num-hidden-layers", "1", "--num-attention-heads", "2"),
    *("--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--global-batch-size", "8"),
]
ID = "{rollout_id}"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls the command line with a tiny model; gives the exit code, stdout's and stderr's lines."""

    def call(*flags: str, observe: Any = None) -> tuple[int, list[str], list[str]]:
        try:
            code = main([*TINY, *flags], observe=observe)
        except SystemExit as error:
            code = int(error.code or 0)
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return call


def steps(lines: list[str]) -> list[dict[str, float]]:
    return [ast.literal_eval(line.split(": ", 1)[1]) for line in lines if re.match(r"step \d+: \{", line)]


def test_a_run_prints_its_lines_and_its_first_step_checks(run: Any) -> None:
    """One line a rollout, one a step, three checks after step 0, exit 0."""
    code, out, err = run("--num-rollout", "2")
    assert (code, err) == (0, [])
    starts = ["rollout 0", "step 0", "check log_probs == ref_log_probs", "check kl == 0", "check grad_norm <= 100.0"]
    assert [line.split(":")[0] for line in out] == [*starts, "rollout 1", "step 1"]
    assert all(": ok (" in line for line in out[2:5])


def test_a_failed_first_step_check_is_exit_1(run: Any) -> None:
    """A log-prob changed at step 0 fails the check by name; training goes on to the end."""

    def observe(phase: str, name: str, value: Any) -> None:
        if (phase, name) == ("forward", "") and "log_probs" in value:
            value["log_probs"][0] += 1.0

    code, out, _ = run("--num-rollout", "2", observe=observe)
    assert code == 1
    assert sum(line.startswith("check log_probs == ref_log_probs: FAILED (1 of ") for line in out) == 1
    assert len(steps(out)) == 2


def test_training_on_saved_rollouts_repeats_the_run(run: Any, tmp_path: Path) -> None:
    """Rollouts dumped by a run and loaded by the next give the same metric lines; nothing is sampled or rewritten."""
    _, live, _ = run("--num-rollout", "2", "--dump-details", str(tmp_path))
    pattern = str(tmp_path / "rollout_data" / f"{ID}.safetensors")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "rollout_data").iterdir()}
    flags = ("--num-rollout", "2", "--load-debug-rollout-data", pattern, "--save-debug-rollout-data", pattern)
    code, replayed, _ = run(*flags, "--debug-train-only")
    assert code == 0 and replayed == live
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "rollout_data").iterdir()} == before
    assert sorted(path.name for path in before) == ["0.safetensors", "1.safetensors"]


def test_one_file_may_serve_all_rollouts(run: Any, tmp_path: Path) -> None:
    """A pattern without the placeholder trains on the same samples under successive numbers."""
    run("--num-rollout", "1", "--debug-rollout-only", "--save-debug-rollout-data", str(tmp_path / f"{ID}.st"))
    code, out, _ = run("--num-rollout", "2", "--load-debug-rollout-data", str(tmp_path / "0.st"))
    assert code == 0
    assert [line.split(":")[0] for line in out if line.startswith("rollout")] == ["rollout 0", "rollout 1"]
    first, second = steps(out)
    assert first["train/reward"] == second["train/reward"] and first["train/ppo_kl"] == second["train/ppo_kl"]


def test_the_placeholder_is_replaced_literally(run: Any, tmp_path: Path) -> None:
    """Other braces in a path are the path's own: str.format would stumble over them."""
    folder = tmp_path / "{0} {x} {{y}}"
    code, _, _ = run("--num-rollout", "1", "--debug-rollout-only", "--save-debug-rollout-data", f"{folder}/{ID}.st")
    assert code == 0 and read_rollout(folder / "0.st").meta["rollout_id"] == 0


def test_rollout_only_starts_no_trainer(run: Any, tmp_path: Path) -> None:
    """Same first rollout as a full run, no step line, no train dump, one policy for all rollouts."""
    _, full, _ = run("--num-rollout", "1")
    code, out, _ = run("--num-rollout", "3", "--debug-rollout-only", "--dump-details", str(tmp_path))
    assert code == 0 and len(out) == 3 and out[0] == full[0]
    assert all(line.startswith("rollout ") for line in out)
    assert not (tmp_path / "train_data").exists() and len(list((tmp_path / "rollout_data").iterdir())) == 3


def test_the_train_dump_holds_the_columns_of_all_updates(run: Any, tmp_path: Path) -> None:
    """Two updates a rollout: the columns lie one after the other and match the rollout and the metric lines."""
    flags = ("--global-batch-size", "4", "--num-steps-per-rollout", "2")
    _, out, _ = run("--num-rollout", "1", "--dump-details", str(tmp_path), *flags)
    rollout = read_rollout(tmp_path / "rollout_data" / "0.safetensors")
    with safe_open(tmp_path / "train_data" / "0.safetensors", framework="pt") as file:
        assert list(file.metadata()) == ["train_data"]
        meta = json.loads(file.metadata()["train_data"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    columns = {"log_probs", "old_log_probs", "ref_log_probs", "entropy", "kl", "returns", "values", "advantages"}
    assert set(tensors) == set(rollout.tensors) | columns
    for name, tensor in rollout.tensors.items():
        assert torch.equal(tensors[name], tensor)
    assert {len(tensors[name]) for name in columns} == {len(rollout.tensors["loss_mask"])}
    assert meta["rollout_id"] == 0 and meta["format"] == 1
    printed = [{k.removeprefix("train/"): repr(v) for k, v in step.items() if k != "train/step"} for step in steps(out)]
    assert meta["metrics"] == printed


def test_the_collector_copies_what_it_passes_on() -> None:
    """Every signal reaches the next observer unchanged, and a later change of the tensor does not reach the copy."""
    passed: list[tuple[Any, ...]] = []
    collector = Collector(lambda *signal: passed.append(signal), keep_all=False)
    column = torch.ones(2)
    for signal in (("input", "tokens", column), ("forward", "kl", column), ("loss", "loss", 0.5)):
        collector(*signal)
    column.fill_(9.0)
    assert [signal[:2] for signal in passed] == [("input", "tokens"), ("forward", "kl"), ("loss", "loss")]
    assert passed[1][2] is column
    assert collector.columns["kl"].tolist() == [1.0, 1.0] and set(collector.columns) == {"kl"}
    assert collector.metrics == {"loss": 0.5}


def test_the_first_sample_is_printed_every_n_rollouts(run: Any) -> None:
    """--debug-rollout-print-every 2 shows rollouts 0 and 2; 0 shows none."""
    _, out, _ = run("--num-rollout", "3", "--debug-rollout-only", "--debug-rollout-print-every", "2")
    shown = [line for line in out if " sample 0: " in line]
    assert [line.split(" sample")[0] for line in shown] == ["rollout 0", "rollout 2"]
    assert re.search(r"prompt '\d\+\d=' response '.*' reward \d\.\d+$", shown[0])


def test_save_and_load_continue_the_run(run: Any, tmp_path: Path) -> None:
    """4 rollouts straight and 2 + 2 over a checkpoint print the same step lines; the tracker names the latest."""
    _, straight, _ = run("--num-rollout", "4")
    _, first, _ = run("--num-rollout", "2", "--save", str(tmp_path), "--save-interval", "1")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1\n"
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000000", "iter_0000001"]
    code, second, _ = run("--num-rollout", "4", "--load", str(tmp_path))
    assert code == 0 and steps(first) + steps(second) == steps(straight)
    _, direct, _ = run("--num-rollout", "4", "--load", str(tmp_path / "iter_0000001"))
    assert direct == second
    assert not any(line.startswith("check") for line in second), "step 2 is no first step"
    code, out, _ = run("--num-rollout", "2", "--load", str(tmp_path))
    assert code == 0 and out == ["nothing to do: --load is at rollout 2, --num-rollout is 2"]


def test_rollout_only_samples_from_a_checkpoint(run: Any, tmp_path: Path) -> None:
    """Its weights and its position: the rollout is the one that the resumed run would sample next."""
    run("--num-rollout", "1", "--save", str(tmp_path))
    _, resumed, _ = run("--num-rollout", "2", "--load", str(tmp_path))
    code, out, _ = run("--num-rollout", "2", "--load", str(tmp_path), "--debug-rollout-only")
    assert code == 0 and out == resumed[:1]
    for flags in (("--num-attention-heads", "1", "--num-key-value-heads", "1"), ("--dtype", "bf16")):
        for only in ((), ("--debug-rollout-only",)):
            code, out, err = run("--num-rollout", "2", "--load", str(tmp_path), *only, *flags)
            assert (code, out) == (2, []) and " there and " in err[-1]


def test_a_configuration_file_is_overridden_by_flags(run: Any, tmp_path: Path) -> None:
    """Keys of TrainConfig in TOML, [model] and [megatron] for the nested ones; a flag wins over the file."""
    path = tmp_path / "run.toml"
    text = 'lr = 0.5\ndtype = "bf16"\nbetas = [0.5, 0.75]\neps_clip_c = 3.0\n[model]\nrope_theta = 5000.0\n'
    path.write_text(f"{text}[megatron]\npad_to_multiple = 4\nbatch_p2p_comm = false\n")
    flags = ("--config", str(path), "--lr", "0.25", "--eps-clip-c", "none", "--use-tis", "--no-tie-word-embeddings")
    run("--num-rollout", "1", "--save", str(tmp_path / "ck"), *flags, "--pad-to-multiple", "8")
    config = json.loads((tmp_path / "ck" / "iter_0000000" / "trainer.json").read_text())["config"]
    assert (config["lr"], config["dtype"], config["betas"], config["use_tis"]) == (0.25, "bf16", [0.5, 0.75], True)
    assert config["eps_clip_c"] is None
    assert config["model"]["rope_theta"] == 5000.0 and config["model"]["hidden_size"] == 16
    assert (config["megatron"]["pad_to_multiple"], config["megatron"]["batch_p2p_comm"]) == (8, False)
    assert "model/lm_head.weight" in load_file(tmp_path / "ck" / "iter_0000000" / "state.safetensors")


def test_every_configuration_field_is_a_flag() -> None:
    """Generated from the dataclasses: a new field is a flag without anyone writing it."""
    flags = {flag for action in make_parser()._actions for flag in action.option_strings}
    every = ((TrainConfig, "--"), (ModelConfig, "--"), (MegatronConfig, "--"), (SglangConfig, "--sglang-"))
    tables = ("model", "megatron", "sglang")
    names = [begin + f.name for cls, begin in every for f in fields(cls) if begin != "--" or f.name not in tables]
    assert {name.replace("_", "-") for name in names} <= flags
    assert {"--no-use-tis", "--no-whiten-advantages", "--no-tie-word-embeddings", "--no-deterministic-mode"} <= flags


def test_hashes_have_the_number_of_their_step(tmp_path: Path) -> None:
    """One line for each step, also of two models and of a run that goes on; a run without a step is exit 2."""
    command = [sys.executable, "-m", "repro_core.train", *TINY, "--debug-determinism", "--advantage-estimator", "ppo"]

    def hashed(*flags: str) -> tuple[int, list[str]]:
        done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False, cwd=tmp_path)
        return done.returncode, re.findall(r"^hash (\d+): .*forward .*grad .*chain", done.stdout, re.MULTILINE)

    assert hashed("--num-rollout", "2", "--save", "ck") == (0, ["0", "1"])
    assert hashed("--num-rollout", "4", "--load", "ck") == (0, ["2", "3"])
    assert hashed("--num-rollout", "2", "--load", "ck") == (2, [])


USAGE = {
    "unknown flag": (["--debug-weights"], "unrecognized arguments: --debug-weights"),
    "abbreviation": (["--num-roll", "3"], "unrecognized arguments"),
    "bad number": (["--num-rollout", "0"], "must be at least 1"),
    "bad choice": (["--kl-estimator", "k4"], "invalid choice"),
    "both modes": (["--debug-rollout-only", "--debug-train-only"], "--debug-rollout-only excludes"),
    "rollout-only with load": (["--debug-rollout-only", "--load-debug-rollout-data", "x"], "choose one"),
    "train-only without data": (["--debug-train-only"], "--load-debug-rollout-data PATTERN"),
    "rollout-only with save": (["--debug-rollout-only", "--save", "x"], "nothing to --save"),
    "rollout-only with hashes": (["--debug-rollout-only", "--debug-determinism"], "nothing to --debug-determinism"),
    "same pattern": (["--save-debug-train-data", ID, "--save-debug-rollout-data", ID], "must differ"),
    "no placeholder": (["--save-debug-train-data", "x"], f"lacks {ID}"),
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_command_lines_are_exit_2(run: Any, name: str) -> None:
    """Argparse's exit code, the reason in the last line, nothing on stdout."""
    flags, message = USAGE[name]
    code, out, err = run(*flags)
    assert (code, out) == (2, []) and message in err[-1]


def test_wrong_inputs_are_one_line_and_exit_2(run: Any, tmp_path: Path) -> None:
    """Configuration, rollout, checkpoint and file errors: one line on stderr, no traceback."""
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x80\x02 not a rollout")
    toml = tmp_path / "bad.toml"
    toml.write_text("learning_rate = 1\n")
    table = tmp_path / "table.toml"
    table.write_text("model = 3\n")
    run("--num-rollout", "1", "--debug-rollout-only", "--save-debug-rollout-data", str(tmp_path / f"{ID}.st"))
    tracker = tmp_path / "tracked"
    tracker.mkdir()
    (tracker / "latest_checkpointed_iteration.txt").write_text("release\n")
    wanted = {
        ("--global-batch-size", "7"): "2 x 4 = 8 must equal global_batch_size x num_steps_per_rollout = 7 x 1 = 7",
        ("--temperature", "0"): "temperature 0.0 must be greater than 0",
        ("--num-hidden-layers", "-1"): "num_hidden_layers -1 must be at least 1",
        ("--hidden-size", "0"): "hidden_size 0 must be at least 1",
        ("--initializer-range", "-1"): "initializer_range -1.0 must be at least 0",
        ("--betas", "1.5", "2"): "betas (1.5, 2.0) must be in [0, 1)",
        ("--threads", "100000"): "threads 100000 must be in [1, 1024]",
        ("--lr", "nan"): "lr nan must be finite",
        ("--tis-clip", "-1"): "tis_clip -1.0 must be at least 0",
        ("--config", str(toml)): "unknown key learning_rate",
        ("--config", str(tmp_path / "none.toml")): "No such file",
        ("--config", str(garbage)): "",
        ("--load-debug-rollout-data", str(tmp_path / "none.st")): "none.st",
        ("--load-debug-rollout-data", str(garbage)): "garbage",
        ("--load", str(tmp_path)): "is no checkpoint",
        ("--load", str(tracker)): "holds 'release', not a number",
        ("--hf-checkpoint", str(tmp_path)): "config.json",
        ("--config", str(table)): "model must be a table",
        ("--vocab-size", "200"): "sampling needs vocab_size 259",
        ("--load-debug-rollout-data", str(tmp_path / "0.st"), "--vocab-size", "257"): "but vocab_size is 257",
        ("--max-response-len", "500"): "max_position_embeddings",
    }
    for flags, message in wanted.items():
        code, _, err = run("--num-rollout", "1", *flags)
        assert code == 2 and len(err) == 1, (flags, err)
        assert err[0].startswith("python -m repro_core.train: error: ") and message in err[0]


def test_a_wrong_command_line_is_told_without_torch() -> None:
    """--help and argparse errors answer before torch is imported."""
    program = (
        "import sys; from repro_core.train import main\n"
        "for flags in (['--help'], ['--nonsense'], ['--global-batch-size', '7']):\n"
        "    try: main(flags)\n"
        "    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--debug-rollout-only" in done.stdout and "must equal" in done.stderr

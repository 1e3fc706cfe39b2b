from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_kit import TINY, WEIGHT, Recorder, bits, ignore, quiet, run, state_bits, with_rewards

from repro_core.engines.checkpoint import FORMAT, CheckpointError, load_checkpoint, restore_rng, rng_state
from repro_core.train.trainer import Trainer


def draw() -> tuple[float, ...]:
    """One number of each global generator."""
    return random.gauss(0.0, 1.0), float(torch.rand(())), float(np.random.standard_normal())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_resuming_is_bit_exact(dtype: Any, tmp_path: Path) -> None:
    """2 rollouts, save, load in a fresh trainer, 2 more: every byte of state and every metric line as in 4 straight."""
    config, straight_lines, lines = replace(TINY, dtype=dtype), list[str](), list[str]()
    straight = Trainer(config, log=straight_lines.append)
    run(straight, range(4))
    straight_rng = rng_state()
    wanted = state_bits(straight)
    first = Trainer(config, log=lines.append)
    run(first, range(2))
    # Moved on, so that the state is not the one that a fresh trainer seeds; a pending Gaussian is state as well.
    drawn = draw()
    first.save(str(tmp_path / "ck"))
    before, upcoming = state_bits(first), draw()
    second, recorder = Trainer(config, log=lines.append), Recorder()
    second.load(str(tmp_path / "ck"))
    assert second.position == (4, 2) and state_bits(second) == before
    assert draw() == upcoming != drawn
    restore_rng(straight_rng)
    run(second, range(2, 4), recorder)
    assert recorder.seen[0][:2] == ("input", "start/model.embed_tokens.weight")
    assert state_bits(second) == wanted
    assert lines == straight_lines


def test_resuming_between_two_updates_of_a_rollout(tmp_path: Path) -> None:
    """Saved half way through a rollout, the rest of it has the same bits: the old log-probs are part of the state."""
    straight, first, second = quiet(), quiet(), quiet()
    rollout = with_rewards(straight.sample(0))
    list(straight.train(rollout, ignore))
    next(first.train(rollout, ignore))
    first.save(str(tmp_path / "ck"))
    second.load(str(tmp_path / "ck"))
    assert list(second.train(rollout, ignore)) == [1]
    assert state_bits(second) == state_bits(straight)


def test_a_used_trainer_can_go_back(tmp_path: Path) -> None:
    """Loading an earlier state into a trainer that has moved on repeats every signal, starting weights included."""
    trainer, once, twice = quiet(), Recorder(), Recorder()
    trainer.save(str(tmp_path / "ck"))
    run(trainer, range(2), once)
    trainer.load(str(tmp_path / "ck"))
    run(trainer, range(2), twice)
    assert once.seen == twice.seen


def test_the_state_holds_all_that_decides_the_future() -> None:
    """Weights, moments, step, reference, three generators and the position, by name."""
    trainer = quiet(replace(TINY, dtype="bf16"))
    run(trainer, range(1))
    names = {name for name, _ in trainer.engines.generator().named_parameters()}
    kinds = ("main", "model", "exp_avg", "exp_avg_sq", "step", "ref")
    rest = {"rng/torch", "rng/python", "rng/numpy", "position/step", "position/rollout_id", "position/update"}
    assert set(trainer.state()) == {f"{kind}/{name}" for kind in kinds for name in names} | rest
    assert float(trainer.state()[f"step/{WEIGHT}"]) == 2.0


def test_a_checkpoint_is_a_starting_policy_too(tmp_path: Path) -> None:
    """The directory is also an HF checkpoint: a new run starts from its weights, relative to root."""
    trainer = quiet()
    run(trainer, range(1))
    trainer.save(str(tmp_path / "ck"))
    fresh = Trainer(replace(TINY, hf_checkpoint="ck"), root=str(tmp_path))
    for name, parameter in fresh.engines.generator().named_parameters():
        assert bits(parameter) == bits(trainer.state()[f"main/{name}"])


def test_bad_checkpoints_are_one_clear_line(tmp_path: Path) -> None:
    """Missing, truncated, flipped, newer, garbled and foreign ones are refused; the trainer stays as it was."""
    trainer = quiet()
    good = tmp_path / "good"
    trainer.save(str(good))
    before = state_bits(trainer)

    def broken(name: str) -> Path:
        return Path(shutil.copytree(good, tmp_path / name))

    state = (good / "state.safetensors").read_bytes()
    (broken("cut") / "state.safetensors").write_bytes(state[: len(state) // 2])
    (broken("flipped") / "state.safetensors").write_bytes(state[:-1] + bytes([state[-1] ^ 1]))
    (broken("gone") / "state.safetensors").unlink()
    weights = (good / "model.safetensors").read_bytes()  # which rollouts are sampled with
    (broken("weights") / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    meta = json.loads((good / "trainer.json").read_text())
    (broken("newer") / "trainer.json").write_text(json.dumps(meta | {"format": FORMAT + 1}))
    (broken("garbled") / "trainer.json").write_text("{")
    (broken("list") / "trainer.json").write_text("[]")
    wanted = {
        "nothing": "no checkpoint",
        "cut": "damaged",
        "flipped": "damaged",
        "gone": "missing",
        "newer": "update repro_core",
        "garbled": "unreadable",
        "list": "unreadable",
    }
    for name, message in wanted.items():
        with pytest.raises(CheckpointError, match=message) as caught:
            trainer.load(str(tmp_path / name))
        assert "\n" not in str(caught.value)
    trainer.load(str(tmp_path / "weights"))  # which reads the state alone
    trainer.load(str(good))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_checkpoint(tmp_path / "weights", TINY, TINY.model, sampling=True)
    with pytest.raises(CheckpointError, match=r"model\.intermediate_size is \d+ there and 32 here"):
        quiet(replace(TINY, model=replace(TINY.model, intermediate_size=32))).load(str(good))
    with pytest.raises(CheckpointError, match=r"model\.rope_theta is 10000\.0 there and 500\.0 here"):
        quiet(replace(TINY, model=replace(TINY.model, rope_theta=500.0))).load(str(good))
    with pytest.raises(CheckpointError, match=r"dtype is 'fp32' there and 'bf16' here"):
        quiet(replace(TINY, dtype="bf16")).load(str(good))
    with pytest.raises(CheckpointError, match=r"advantage_estimator is 'grpo' there and 'ppo' here"):
        quiet(replace(TINY, advantage_estimator="ppo")).load(str(good))
    assert state_bits(trainer) == before


def test_saving_replaces_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    """An older checkpoint is replaced whole; other files are refused and left alone; nothing temporary stays."""
    trainer = quiet()
    trainer.save(str(tmp_path / "ck"))
    run(trainer, range(1))
    trainer.save(str(tmp_path / "ck"))
    other = quiet()
    other.load(str(tmp_path / "ck"))
    assert state_bits(other) == state_bits(trainer)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years")
    with pytest.raises(CheckpointError, match="is no checkpoint: choose another"):
        trainer.save(str(mine))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", "mine"]
    assert (mine / "thesis.txt").read_text() == "years"


def test_equal_states_give_equal_bytes(tmp_path: Path) -> None:
    """Two trainers in the same state write the same files."""
    for name in ("a", "b"):
        trainer = quiet()
        run(trainer, range(1))
        trainer.save(str(tmp_path / name))
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name

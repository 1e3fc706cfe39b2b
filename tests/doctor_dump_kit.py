"""Dumps for the doctor, written as the trainers write them, and what a rule finds in files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rollout_dump_kit import plain_dump
from run_folder_kit import Run

from repro.doctor.examine import FAULT, examine, look
from repro_golden.base.checks import Finding
from repro_golden.dumps.archive.pickling import write_archive
from repro_golden.dumps.rollout.files import RolloutDump, write_rollout_dump

__all__ = ["Change", "config", "experts", "found", "launch", "rollout", "spoken", "trained", "with_experts"]

Change = Callable[[RolloutDump], object]


def found(rule: str, *paths: Path) -> list[Finding]:
    """What one rule finds in files, through their readers; it was tried, and every file was read."""
    report = examine(look(paths), only=(rule,))
    wrong = [finding for finding in report.findings if finding.rule in (FAULT.id, "unreadable")]
    assert not wrong, wrong
    assert report.tried, f"{rule} lacks what it needs"
    return list(report.findings)


def rollout(path: Path, *changes: Change, system: Any = "slime", **size: int) -> Path:
    """A dump that is in order, with changes."""
    dump = plain_dump(system, **size)
    for change in changes:
        change(dump)
    # made anew: what a sample lacks is noted for each of them
    write_rollout_dump(path, RolloutDump(dump.system, dump.rollout_id, False, dump.metadata, dump.samples))
    return path


def each(**fields: Any) -> Change:
    """Other values in every sample; a function gets the sample's number."""

    def change(dump: RolloutDump) -> None:
        for number, sample in enumerate(dump.samples):
            sample |= {name: value(number) if callable(value) else value for name, value in fields.items()}

    return change


def one(place: int, **fields: Any) -> Change:
    """Other values in one sample."""
    return lambda dump: dump.samples[place].update(fields)


def launch(folder: Path, *flags: str, entry: str = "train.py") -> Path:
    """A launch script."""
    usual = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--global-batch-size", "4"]
    path = folder / "run.sh"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/bash\npython3 " + " ".join([entry, *usual, *flags]) + "\n")
    return path


def config(folder: Path, **values: Any) -> Path:
    """A model's config.json."""
    path = folder / "model" / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    moe = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
    path.write_text(json.dumps({"model_type": "qwen3_moe", "hidden_size": 64, **moe, **values}))
    return path


def experts(tokens: int, layers: int = 2, topk: int = 2, count: int = 8, seed: int = 0) -> Any:
    """Different experts for each token, as a router chooses them, int32 [tokens - 1, layers, topk]."""
    rng = np.random.default_rng(seed)
    return rng.random((tokens - 1, layers, count)).argsort(axis=2)[:, :, :topk].astype(np.int32)


def with_experts(change: Callable[[Any], Any] = lambda array: array, tokens: int = 7) -> Change:
    """Routed experts in every sample of `tokens` tokens."""

    def set_them(dump: RolloutDump) -> None:
        for number, sample in enumerate(dump.samples):
            if tokens != 7:
                sample["tokens"] = [*sample["tokens"][:3], *(9 + (k * 7 + number) % 50 for k in range(tokens - 3))]
                sample |= {"response_length": tokens - 3, "loss_mask": None, "rollout_log_probs": None}
            sample["rollout_routed_experts"] = change(experts(tokens, seed=number))

    return set_them


def spoken(words: list[str], mask: list[int] | None, log_probs: list[float] | None, **more: Any) -> Change:
    """A response of these texts, one for each token, in the first sample."""
    ids = list(range(100, 100 + len(words)))

    def change(dump: RolloutDump) -> None:
        dump.samples[0] |= {
            "tokens": [5, 6, 7, *ids], "response": "".join(words), "response_length": len(words), "loss_mask": mask,
            "rollout_log_probs": log_probs, **more,
        }  # fmt: skip

    return change


def trained(
    folder: Path, change: Mapping[str, Callable[[int, Any], Any]] | None = None, more: Mapping[str, Any] | None = None,
    *, prompts: int = 4, each: int = 2, length: int = 24, with_rollouts: bool = True, **run: Any,
) -> Path:  # fmt: skip
    """A run's folder in which groups share their prompts, log-probs agree and advantages differ.

    Args:
        folder: Where.
        change: By column a function of a sample's place and its value, for the train dumps alone.
        more: More columns, one value for each sample.
        prompts: Groups.
        each: Samples of a group.
        length: Most tokens of a response.
        with_rollouts: Whether rollout dumps are written too.
        run: See `run_folder_kit.Run`.
    """
    made = _Sound(prompts, each, length, count=prompts * each, rollouts=1, **run)
    if with_rollouts:
        write_archive(folder / "rollout_data" / "0.pt", made.rollout_dump(0))
    made.change, made.more = dict(change or {}), dict(more or {})
    for name, value in made.files(0):
        write_archive(folder / "train_data" / name, value)
    return folder


class _Sound(Run):
    """A run whose numbers make sense."""

    def __init__(self, prompts: int, each: int, length: int, **run: Any) -> None:
        super().__init__(**run)
        self.prompts, self.each, self.length = prompts, each, length
        self.change: dict[str, Callable[[int, Any], Any]] = {}
        self.more: dict[str, Any] = {}

    def columns(self, rollout: int) -> dict[str, list[Any]]:
        """See `Run.columns`."""
        from run_folder_kit import f32, i64

        from repro_golden.dumps.values import Tensor

        rng = np.random.default_rng(5 + rollout)
        sizes = [int(n) for n in rng.integers(self.length // 2, self.length + 1, self.count)]
        prompts = [rng.integers(0, 64, 3 + k) for k in range(self.prompts)]
        columns: dict[str, list[Any]] = {"sample_indices": [rollout * self.count + i for i in range(self.count)]}
        starts = [prompts[i // self.each] for i in range(self.count)]
        columns["tokens"] = [
            i64(np.concatenate([p, rng.integers(0, 64, n)])) for p, n in zip(starts, sizes, strict=True)
        ]
        columns["response_lengths"] = list(sizes)
        columns["total_lengths"] = [len(p) + n for p, n in zip(starts, sizes, strict=True)]
        columns["loss_masks"] = [Tensor("int32", np.ones(n, "<i4")) for n in sizes]
        columns["raw_reward"] = [float(i % self.each) for i in range(self.count)]
        columns["rewards"] = [2.0 * reward / max(self.each - 1, 1) - 1.0 for reward in columns["raw_reward"]]
        columns["truncated"] = [0] * self.count
        log_probs = [-np.abs(rng.normal(size=n)) - 0.01 for n in sizes]
        columns["rollout_log_probs"] = [f32(log_prob) for log_prob in log_probs]
        for name in ("log_probs", "ref_log_probs"):
            columns[name] = [f32(log_prob + 1e-4 * rng.normal(size=len(log_prob))) for log_prob in log_probs]
        columns["advantages"] = [f32(np.full(n, r)) for n, r in zip(sizes, columns["rewards"], strict=True)]
        columns["returns"] = list(columns["advantages"])
        columns["kl"] = [f32(np.zeros(n)) for n in sizes]
        columns |= {name: list(values) for name, values in self.more.items()}
        for name, change in self.change.items():
            columns[name] = [change(i, value) for i, value in enumerate(columns[name])]
        return columns

    def rollout_dump(self, rollout: int) -> dict[str, Any]:
        """See `Run.rollout_dump`; with rewards and groups."""
        dump = super().rollout_dump(rollout)
        whole = self.columns(rollout)
        samples = sorted(dump["samples"], key=lambda sample: sample["index"])
        for i, sample in enumerate(samples):
            sample |= {
                "reward": whole["raw_reward"][i],
                "group_index": i // self.each,
                "prompt": f"prompt {i // self.each}",
            }
        return {**dump, "samples": samples}

"""Folders of dumps as slime, Miles and Relax write them, made without training: the same numbers in any layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from train_dump_kit import Shard, cut, miles_train_dump, rank_train_dump, relax_train_dump, slime_train_dump

from repro_golden.dumps.archive.pickling import write_archive
from repro_golden.dumps.values import Tensor

SHARDED = ("rollout_log_probs", "log_probs", "ref_log_probs", "advantages", "returns", "kl")
COMPUTED = ("log_probs", "ref_log_probs", "advantages", "returns", "kl")
STAMP = "2026-11-20 15:38:49"


@dataclass
class Run:
    """A run's numbers, and how its trainer was laid out.

    Attributes:
        system: slime, miles, relax, or old (slime's form of one file a rank).
        layout: tensor-, context- and data-parallel ranks, and pipeline stages.
    """

    system: str = "slime"
    rollouts: int = 2
    count: int = 6
    updates: int = 1
    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    qkv_format: str = "thd"
    shuffle: int = 0
    changes: dict[tuple[int, str, int], np.ndarray[Any, Any]] = field(default_factory=dict)
    """By rollout, column and sample index: other values."""

    @property
    def ranks(self) -> int:
        """How many write."""
        return self.tp * self.cp * self.dp * self.pp

    def columns(self, rollout: int) -> dict[str, list[Any]]:
        """A rollout's columns in the order of the samples, responses whole; the same in every layout."""
        rng = np.random.default_rng(1000 + rollout)
        prompts, responses = rng.integers(1, 7, self.count), rng.integers(0, 12, self.count)
        responses[0] = 3
        columns: dict[str, list[Any]] = {"sample_indices": [rollout * self.count + i for i in range(self.count)]}
        columns["tokens"] = [i64(rng.integers(0, 64, p + r)) for p, r in zip(prompts, responses, strict=True)]
        columns["response_lengths"] = [int(r) for r in responses]
        columns["total_lengths"] = [int(p + r) for p, r in zip(prompts, responses, strict=True)]
        columns["loss_masks"] = [Tensor("int32", (rng.random(r) < 0.8).astype("<i4")) for r in responses]
        columns["rewards"] = [float(np.float32(r)) for r in rng.normal(size=self.count)]
        columns["truncated"] = [int(r) for r in rng.integers(0, 2, self.count)]
        for name in SHARDED:
            columns[name] = [f32(-np.abs(rng.normal(size=r))) for r in responses]
        columns["raw_reward"] = [float(r) for r in rng.integers(0, 2, self.count)]
        for (at, name, index), values in self.changes.items():
            if at == rollout:
                columns[name][index] = Tensor(
                    columns[name][index].dtype, values.astype(columns[name][index].array.dtype)
                )
        return columns

    def shard(self, dp: int) -> list[int]:
        """Which samples a data-parallel rank has, in its own order."""
        numbers = np.arange(self.count)[np.arange(self.count) % self.dp == dp]
        np.random.default_rng(self.shuffle).shuffle(numbers)
        return [int(i) for i in numbers]

    def files(self, rollout: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and content of each train dump of a rollout."""
        whole = self.columns(rollout)
        if self.system == "slime":
            shards = []
            for dp in range(self.dp):
                indices = self.shard(dp)
                columns: dict[str, Any] = {name: [values[i] for i in indices] for name, values in whole.items()}
                places = [self.count - 1 - i for i in indices]  # in the rollout dump
                columns |= {"raw_reward": whole["raw_reward"][::-1], "partition": places, "micro_batch_indices": [[0]]}
                columns |= {"num_microbatches": [1] * self.updates, "global_batch_sizes": [self.count] * self.updates}
                shards.append(Shard(dp * self.cp * self.tp, dp, columns))
            yield f"{rollout}.pt", slime_train_dump(rollout, shards)
            return
        for rank in range(self.ranks):
            tp, rest = rank % self.tp, rank // self.tp
            cp, dp, pp = rest % self.cp, rest // self.cp % self.dp, rest // self.cp // self.dp
            assert tp < self.tp
            yield f"{rollout}_{rank}.pt", self._file(rollout, rank, cp, self._own(whole, cp, dp, pp))

    def _own(self, whole: dict[str, list[Any]], cp: int, dp: int, pp: int) -> dict[str, Any]:
        longest = -(-max(whole["total_lengths"]) // 8) * 8 if self.qkv_format == "bshd" else None
        record: dict[str, Any] = {}
        for name, values in whole.items():
            if name == "raw_reward":
                record[name] = values[::-1]  # in the order of the rollout dump
            elif not (name in COMPUTED and pp < self.pp - 1):
                record[name] = [values[i] for i in self.shard(dp)]
            if name in SHARDED and name in record and self.cp > 1:
                sizes = zip(record["total_lengths"], record["response_lengths"], strict=True)
                record[name] = [
                    cut(finding, total, response, cp, self.cp, padded=longest)
                    for finding, (total, response) in zip(record[name], sizes, strict=True)
                ]
        if longest is not None:
            record["max_seq_lens"] = [longest] * len(record["tokens"])
        return record

    def _file(self, rollout: int, rank: int, cp: int, columns: dict[str, Any]) -> dict[str, Any]:
        if self.system == "relax":
            columns.pop("sample_indices")
            return relax_train_dump(rollout, rank, columns)
        if self.system == "old":
            return rank_train_dump(rollout, rank, columns)
        return miles_train_dump(rollout, rank, columns, cp_rank=cp, cp_size=self.cp, qkv_format=self.qkv_format)

    def metrics(self, step: int) -> dict[str, float]:
        """What the trainer logs of an update."""
        return {"train/loss": 0.5 / (step + 1), "train/ppo_kl": 0.0, "train/grad_norm": 0.25 + step, "train/step": step}

    def step_line(self, step: int) -> str:
        """Its line, as the system prefixes it."""
        text = f"step {step}: {self.metrics(step)}"
        if self.system == "relax":
            return f"\x1b[32m{STAMP} | INFO | relax.model:107[rank0] {text}\x1b[0m\n"
        stamp = f"{STAMP}.707 actor_cell0_rank0" if self.system == "miles" else STAMP
        return f"\x1b[36m(MegatronTrainRayActor pid=12, ip=10.0.0.1)\x1b[0m [{stamp}] model.py:918 - {text}\n"

    def rollout_line(self, rollout: int) -> str:
        """The line of a rollout's means."""
        mean = float(np.mean(self.columns(rollout)["raw_reward"]))
        return f"[{STAMP}] train_metric_utils.py:135 - rollout {rollout}: {{'rollout/raw_reward': {mean!r}}}\n"

    def rollout_dump(self, rollout: int) -> dict[str, Any]:
        """What its rollout dump holds of the samples, in an order of its own."""
        whole = self.columns(rollout)
        order = reversed(range(self.count))
        return {
            "rollout_id": rollout,
            "samples": [
                {
                    "index": whole["sample_indices"][i],
                    "tokens": whole["tokens"][i].array.tolist(),
                    "response_length": whole["response_lengths"][i],
                    "rollout_log_probs": whole["rollout_log_probs"][i].array.astype(float).tolist(),
                    "status": "completed",
                }
                for i in order
            ],
        }

    def write(self, folder: Path, *, log: Path | None = None, rollouts: range | None = None) -> Path:
        """All of its files, in the order in which the trainer makes them; lines go to the end of `log`."""
        for rollout in rollouts or range(self.rollouts):
            write_archive(folder / "rollout_data" / f"{rollout}.pt", self.rollout_dump(rollout))
            if log is not None:
                with log.open("a", encoding="utf-8") as file:
                    file.write(self.rollout_line(rollout))
                    for update in range(self.updates):
                        file.write(self.step_line(rollout * self.updates + update))
            for name, value in self.files(rollout):
                write_archive(folder / "train_data" / name, value)
        return folder


def i64(values: Any) -> Tensor:
    """An int64 tensor."""
    return Tensor("int64", np.asarray(values, "<i8"))


def f32(values: Any) -> Tensor:
    """A float32 tensor."""
    return Tensor("float32", np.asarray(values, "<f4"))


def sha(text: str) -> str:
    """A digest as the trainers print one."""
    return hashlib.sha256(text.encode()).hexdigest()


def event(kind: str, rollout: int | None, rank: int = 0, **more: Any) -> str:
    """A line of Miles' event log."""
    source = {"component": "actor", "cell_index": 0, "rank_within_cell": rank}
    head = {"timestamp": "2026-11-20T15:47:21.941647Z", "source": source, "rollout_id": rollout, "type": kind}
    return json.dumps({**head, **more}) + "\n"


def checksum_event(rollout: int, rank: int = 0, weight: str = "w", **more: Any) -> str:
    """Checksums of one parameter, one buffer and the parameter's optimizer state."""
    state = {
        "param_hashes": {"pp0.w": sha(f"{weight}{rollout}")},
        "buffer_hashes": {"pp0.b": sha("b")},
        "optimizer_hashes": [
            {
                "param_names": {"0": "pp0.w"},
                "state_dict": {
                    "state": {"0": {"step": rollout + 1, "exp_avg": sha(f"m{rollout}")}},
                    "param_groups": [{"lr": 0.001, "params": [0]}],
                },
            }
        ],
    }
    return event("train_engine_local_weight_checksum", rollout, rank, attempt=0, state=state, **more)


def contents(rows: Any) -> dict[tuple[str, str], tuple[str, tuple[int, ...], str]]:
    """Rows by phase and name: dtype, shape and fingerprint."""
    return {(row.phase, row.name): (row.dtype, tuple(row.shape), row.fingerprint) for row in rows}

"""What the debug flags keep of training, in the files and layouts of each system."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from foreign_trainer_arguments import SYSTEM
from foreign_trainer_logs import log
from foreign_trainer_model import EPSILON, Model
from foreign_trainer_parallel import gathered, ranks
from foreign_trainer_samples import tensor

from repro_golden.dumps.archive.pickling import write_archive

Columns = dict[str, list[Any]]
Ranks = dict[tuple[int, int], Columns]
SHARDED = ("rollout_log_probs", "log_probs", "ref_log_probs", "values", "advantages", "returns", "kl")
ACTOR = "MegatronTrainRayActor"


def save_train_data(args: argparse.Namespace, rollout_id: int, data: Ranks) -> None:
    """Write the columns of one rollout, where `--save-debug-train-data` says."""
    if args.save_debug_train_data is None:
        return
    if SYSTEM == "slime":
        _save_joined(args, rollout_id, data)
        return
    for rank in ranks(args):
        path = Path(args.save_debug_train_data.format(rollout_id=rollout_id, rank=rank.rank))
        log(ACTOR, __file__, f"Save debug train data to {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = data[rank.dp, rank.cp]
        payload: dict[str, Any] = {"rollout_id": rollout_id, "rank": rank.rank}
        if SYSTEM == "miles":
            payload["rollout_data"] = {name: _tensors(name, values) for name, values in columns.items()}
            payload["rollout_data"]["rollout_mask_sums"] = tensor("", np.array(columns["rollout_mask_sums"]))
            payload |= {"cp_rank": rank.cp, "cp_size": args.context_parallel_size, "qkv_format": args.qkv_format}
        else:
            payload["samples"] = [_listed(columns, at) for at in range(len(columns["tokens"]))]
        write_archive(path, payload)


def _tensors(name: str, values: list[Any]) -> list[Any]:
    return [tensor(name, value) if isinstance(value, np.ndarray) else value for value in values]


def _listed(columns: Columns, at: int) -> dict[str, Any]:
    """One sample of Relax' train dump: its position in this rank's list, and its columns as lists."""
    sample: dict[str, Any] = {"sample_index": at}
    for name, values in columns.items():
        value = values[at] if at < len(values) else None
        sample[name] = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    return {**sample, "decoded_tokens": []}


def _save_joined(args: argparse.Namespace, rollout_id: int, data: Ranks) -> None:
    """Write what slime does: context parallel parts put together, all samples in the order of the rollout."""
    samples, layout = [], []
    stride = args.context_parallel_size * args.tensor_model_parallel_size
    for dp in range(args.data_parallel_size):
        shards = [data[dp, cp] for cp in range(args.context_parallel_size)]
        columns = shards[0]
        for at, position in enumerate(columns["partition"]):
            sample: dict[str, Any] = {
                "data_parallel_rank": dp,
                "sample_index": columns["sample_indices"][at],
                "rollout_position": position,
            }
            total, response = columns["total_lengths"][at], columns["response_lengths"][at]
            for name, values in columns.items():
                if name in ("sample_indices", "partition", "raw_reward"):
                    continue
                value = values[at]
                if name in SHARDED:
                    value = gathered([shard[name][at] for shard in shards], total, response)
                sample[name] = tensor(name, value) if isinstance(value, np.ndarray | np.generic) else value
            samples.append(sample)
        layout.append({
            "rank": dp * stride,
            "data_parallel_rank": dp,
            "sample_indices": columns["sample_indices"],
            "partition": columns["partition"],
            **_schedule(args, len(columns["partition"])),
        })  # fmt: skip
    samples.sort(key=lambda sample: sample["rollout_position"])
    path = Path(args.save_debug_train_data.format(rollout_id=rollout_id, rank=0))
    log(ACTOR, __file__, f"Save debug train data from {args.data_parallel_size} DP shard(s) to {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    payload = {"format_version": 2, "rollout_id": rollout_id, "rank": 0, "samples": samples, "dp_shards": layout}
    write_archive(path, {**payload, "raw_reward": data[0, 0]["raw_reward"]})


def _schedule(args: argparse.Namespace, count: int) -> dict[str, Any]:
    steps = args.num_steps_per_rollout
    size = count // steps
    return {
        "global_batch_sizes": [args.global_batch_size] * steps,
        "num_microbatches": [1] * steps,
        "micro_batch_indices": [list(range(step * size, (step + 1) * size)) for step in range(steps)],
    }


def save_grad_norm(args: argparse.Namespace, role: str, rollout_id: int, step_id: int, norm: float) -> None:
    """Write the norm that a later run of the tests is held against."""
    if args.ci_save_grad_norm is not None and (args.ci_test or SYSTEM != "miles"):
        path = Path(args.ci_save_grad_norm.format(role=role, rollout_id=rollout_id, step_id=step_id))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_archive(path, norm)


def save_policy_loss(
    args: argparse.Namespace, dp: int, cp: int, call: int, columns: Columns, shown: dict[str, Any]
) -> None:
    """Write what Miles' loss saw of each sample."""
    if SYSTEM != "miles" or args.dump_details is None:
        return
    samples = []
    for at, log_probs in enumerate(shown["train_log_probs"]):
        floats = {
            "train_log_probs": log_probs,
            "old_log_probs": columns["log_probs"][at],
            "advantages": columns["advantages"][at],
            "local_loss_mask": shown["masks"][at].astype(np.float32),
            "rollout_log_probs": columns["rollout_log_probs"][at],
            "train_rollout_abs_diff": np.abs(log_probs - columns["rollout_log_probs"][at]),
        }
        sizes = {"total_length": columns["total_lengths"][at], "response_length": columns["response_lengths"][at]}
        samples.append({"index": at, **sizes, **{name: tensor("", values) for name, values in floats.items()}})
    finite = {name: bool(np.isfinite(shown[name]).all()) for name in ("ppo_kl", "pg_loss")}
    for name, column in (
        ("train_log_probs", shown["train_log_probs"]),
        ("old_log_probs", columns["log_probs"]),
        ("advantages", columns["advantages"]),
    ):
        finite[name] = all(bool(np.isfinite(values).all()) for values in column)
    tp_size = args.tensor_model_parallel_size
    for tp in range(tp_size):
        rank = tp + tp_size * (cp + args.context_parallel_size * dp)
        path = Path(args.dump_details) / "policy_loss_debug" / f"rank_{rank}_call_{call}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        losses = {name: tensor("", shown[name]) for name in ("ppo_kl", "pg_loss")}
        write_archive(path, {"rank": rank, "call": call, "samples": samples, **losses, "finite": finite})


class Events:
    """Miles' event log: the metrics of each update, and what its parameters and optimizer state hold afterwards."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.on = SYSTEM == "miles" and args.save_debug_event_data is not None

    def step(self, rollout_id: int, metrics: dict[str, Any], model: Model) -> None:
        """Log one update."""
        if not self.on:
            return
        if self.args.save_local_weight_checksum:
            for rank in ranks(self.args):
                event = {"type": "train_engine_local_weight_checksum", "state": _checksums(self.args, model, rank.tp)}
                self._write(rank.rank, {"rollout_id": rollout_id, "attempt": 0, **event})
        shown = {name: value if np.isfinite(value) else None for name, value in metrics.items()}  # as pydantic does
        self._write(0, {"type": "metric", "rollout_id": rollout_id, "attempt": 0, "metrics": shown})

    def _write(self, rank: int, event: dict[str, Any]) -> None:
        folder = Path(self.args.save_debug_event_data)
        folder.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
        source = {"component": "actor", "cell_index": 0, "rank_within_cell": rank}
        with (folder / f"actor_cell0_rank{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"timestamp": now, "source": source, **event}, separators=(",", ":")) + "\n")


class CiHistory:
    """The few metrics that Miles keeps for its CI, written anew with each update where its variable names a folder."""

    KEPT = ("grad_norm", "ppo_kl", "train_rollout_logprob_abs_diff", "train_rollout_kl", "raw_reward")

    def __init__(self) -> None:
        folder = os.environ.get("MILES_CI_GATE_RECORD_DIR") if SYSTEM == "miles" else None
        self.path = Path(folder) / f"{os.getpid()}-{uuid.uuid4().hex}.jsonl" if folder else None
        self.series: dict[str, list[list[Any]]] = {}

    def step(self, number: int, metrics: dict[str, Any]) -> None:
        """Keep what is to be kept of the metrics of an update or a rollout."""
        if self.path is None:
            return
        for name, value in metrics.items():
            if name.partition("/")[2] in self.KEPT:
                shown = value if np.isfinite(value) else {"nan": "NaN", "inf": "Infinity"}.get(str(value), "-Infinity")
                self.series.setdefault(name, []).append([number, shown])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps({"metric": name, "series": points}) + "\n" for name, points in self.series.items())
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(text)
        scratch.replace(self.path)


def _checksums(args: argparse.Namespace, model: Model, tp_rank: int) -> dict[str, Any]:
    """What one tensor parallel rank holds: its rows of the embedding, its columns of the output layer."""
    tp_size = args.tensor_model_parallel_size

    def digest(name: str, values: Any) -> str:
        axis = 0 if name.startswith("embedding") else 1
        share = np.array_split(values, tp_size, axis=axis)[tp_rank]
        return hashlib.sha256(np.ascontiguousarray(share).tobytes()).hexdigest()

    step = hashlib.sha256(np.float32(model.step).tobytes()).hexdigest()
    state = {
        str(at): {
            "step": step,
            "exp_avg": digest(name, model.exp_avg[name]),
            "exp_avg_sq": digest(name, model.exp_avg_sq[name]),
        }
        for at, name in enumerate(model.params)
    }
    group = {
        "lr": args.lr, "betas": [args.adam_beta1, args.adam_beta2], "eps": EPSILON, "weight_decay": 0.0,
        "params": list(range(len(model.params))),
    }  # fmt: skip
    names = {str(at): f"pp0.{name}" for at, name in enumerate(model.params)}
    return {
        "param_hashes": {f"pp0.{name}": digest(name, values) for name, values in model.params.items()},
        "buffer_hashes": {},
        "optimizer_hashes": [{"param_names": names, "state_dict": {"state": state, "param_groups": [group]}}],
    }

"""The training side of a rollout: score it, compute advantages, update critic and policy, keep what flags ask for."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from foreign_trainer_advantages import compute_advantages_and_returns, local_masks
from foreign_trainer_arguments import SYSTEM
from foreign_trainer_dumps import CiHistory, Events, save_grad_norm, save_policy_loss, save_train_data
from foreign_trainer_logs import log, metrics
from foreign_trainer_loss import policy_loss, token_count, value_loss
from foreign_trainer_model import Model, get_batch, get_log_probs, get_values, split
from foreign_trainer_parallel import Array, data_ranks, sliced
from foreign_trainer_samples import Sample, train_data

Columns = dict[str, list[Any]]
WHOLE_BATCH = ("raw_reward",)
ACTOR = "MegatronTrainRayActor"


class TrainGroup:
    """All ranks of the trainer, in one process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.actor = Model(args.seed)
        self.reference = copy.deepcopy(self.actor)
        self.critic = Model(args.seed + 1, outputs=1) if args.use_critic else None
        self.events = Events(args)
        self.history = CiHistory()
        self.calls = 0

    def train(self, rollout_id: int, samples: list[Sample]) -> None:
        """All updates of one rollout."""
        start = time.perf_counter()
        ranks = self._shards(train_data(self.args, samples))
        for (_, cp_rank), columns in ranks.items():
            for name, model in (("log_probs", self.actor), ("ref_log_probs", self.reference)):
                columns[name] = self._scored(model, columns, cp_rank, lambda *args: get_log_probs(*args)[0])
            if self.critic is not None:
                columns["values"] = self._scored(self.critic, columns, cp_rank, get_values)
        compute_advantages_and_returns(self.args, ranks)
        if self.critic is not None:
            self._updates("critic", self.critic, rollout_id, ranks)
        shown = self._rollout_metrics(ranks)
        log(ACTOR, __file__, metrics("rollout", rollout_id, shown))
        self.history.step(rollout_id, shown)
        for columns in ranks.values():
            columns["log_probs"] = offloaded(columns["log_probs"])
        scored = time.perf_counter()
        self._updates("actor", self.actor, rollout_id, ranks)
        save_train_data(self.args, rollout_id, ranks)
        times = {"perf/actor_train_time": time.perf_counter() - scored, "perf/train_time": time.perf_counter() - start}
        log(ACTOR, __file__, metrics("perf", rollout_id, times))

    def _shards(self, whole: Columns) -> dict[tuple[int, int], Columns]:
        """The columns of each data and context parallel rank; samples go round the data parallel ranks."""
        ranks = {}
        for dp, cp in data_ranks(self.args):
            partition = list(range(dp, len(whole["tokens"]), self.args.data_parallel_size))
            columns: Columns = {"partition": partition} if SYSTEM == "slime" else {}
            for name, values in whole.items():
                columns[name] = values if name in WHOLE_BATCH else [values[at] for at in partition]
            lengths = zip(
                columns["rollout_log_probs"], columns["total_lengths"], columns["response_lengths"], strict=True
            )
            columns["rollout_log_probs"] = [
                sliced(values, total, response, self.args.context_parallel_size, cp)
                for values, total, response in lengths
            ]
            ranks[dp, cp] = columns
        return ranks

    def _steps(self, columns: Columns) -> list[Columns]:
        """The microbatch of each update."""
        count = len(columns["tokens"]) // self.args.num_steps_per_rollout
        return [
            {name: values[at : at + count] for name, values in columns.items() if name not in WHOLE_BATCH}
            for at in range(0, len(columns["tokens"]), count)
        ]

    def _scored(self, model: Model, columns: Columns, cp_rank: int, score: Callable[..., Array]) -> list[Array]:
        """A per-token column that a forward pass gives."""
        column = []
        for step in self._steps(columns):
            batch = get_batch(self.args, model, step, cp_rank)
            column += split(score(self.args, model, batch), batch)
        return column

    def _updates(self, role: str, model: Model, rollout_id: int, ranks: dict[tuple[int, int], Columns]) -> None:
        """All updates that one model gets of a rollout."""
        steps = {rank: self._steps(columns) for rank, columns in ranks.items()}
        for step_id in range(self.args.num_steps_per_rollout):
            model.zero_grad()
            terms, norm = self._update(role, model, {rank: step[step_id] for rank, step in steps.items()})
            accumulated = rollout_id * self.args.num_steps_per_rollout + step_id
            tag = "" if role == "actor" else f"{role}-"
            shown = {f"train/{tag}{name}": float(value) for name, value in terms.items()}
            shown |= {f"train/{tag}grad_norm": float(norm), f"train/{tag}lr-pg_0": self.args.lr}
            if SYSTEM == "slime":
                shown[f"train/{tag}global_batch_size"] = self.args.global_batch_size
            shown["train/step"] = accumulated
            log(ACTOR, __file__, metrics(f"{tag}step", accumulated, shown))
            save_grad_norm(self.args, role, rollout_id, step_id, float(norm))
            if role == "actor":
                self.events.step(rollout_id, shown, model)
                self.history.step(accumulated, shown)

    def _update(
        self, role: str, model: Model, ranks: dict[tuple[int, int], Columns]
    ) -> tuple[dict[str, np.float32], np.float32]:
        """One update: means of the metrics, and the norm of the gradients."""
        dp_size = len(ranks)  # with context parallelism
        sums: dict[str, np.float32] = {}
        # Megatron averages the gradients over data parallel ranks; a loss per token it divides by the tokens itself
        scale = np.float32(1)
        if not self.args.calculate_per_token_loss:
            scale = scale / np.float32(self.args.global_batch_size) * np.float32(dp_size)
        num_tokens = sum(token_count(columns) for (_, cp), columns in ranks.items() if cp == 0)
        for (dp, cp), columns in ranks.items():
            batch = get_batch(self.args, model, columns, cp)
            if role == "actor":
                loss, shown = policy_loss(self.args, model, columns, batch, cp, scale)
                save_policy_loss(self.args, dp, cp, self.calls, columns, shown)
            else:
                loss = value_loss(self.args, model, columns, batch, cp, scale)
            sums = {name: sums.get(name, np.float32(0)) + value for name, value in loss.items()}
        self.calls += role == "actor"
        count = np.float32(num_tokens if self.args.calculate_per_token_loss else self.args.global_batch_size)
        divisor = np.float32(num_tokens) if self.args.calculate_per_token_loss else np.float32(dp_size)
        model.grads = {name: grad / divisor for name, grad in model.grads.items()}
        norm = model.grad_norm()
        model.update(self.args, norm)
        return {name: value / count for name, value in sums.items()}, norm

    def _rollout_metrics(self, ranks: dict[tuple[int, int], Columns]) -> dict[str, float]:
        """Means over the rollout, per-token columns by their samples' means."""
        value: dict[str, float] = {}
        first = next(iter(ranks.values()))
        for name in first:
            if name in ("tokens", "loss_masks", "sample_indices", "rollout_ids", "rollout_mask_sums"):
                continue
            total, count = 0.0, 0
            for (_, cp), columns in ranks.items():
                if not isinstance(columns[name][0], np.ndarray):
                    total, count = total + float(sum(columns[name])), count + len(columns[name])
                    continue
                sums = columns["rollout_mask_sums"]
                for values, mask, size in zip(columns[name], local_masks(self.args, columns, cp), sums, strict=True):
                    total += float(np.sum(values * mask.astype(np.float32))) / float(size)
                count += len(columns[name]) if cp == 0 else 0
            value[f"rollout/{name}"] = total / count
        return value


def offloaded(columns: list[Array]) -> list[Array]:
    """The columns moved through one host buffer, as they are before the model's state takes the device's memory."""
    flat = np.concatenate(columns)
    host = np.full_like(flat, np.nan)
    host[:] = flat
    return np.split(host, np.cumsum([len(values) for values in columns])[:-1])

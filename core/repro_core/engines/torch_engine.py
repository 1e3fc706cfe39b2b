"""The engines in plain torch, on one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from repro_core.config import TrainConfig
from repro_core.contract import Observe
from repro_core.data.task import PAD_ID
from repro_core.engines.checkpoint import fit, load_checkpoint, save_checkpoint
from repro_core.engines.interface import Scores
from repro_core.engines.optimizer import MainOptimizer, clip_grads, step_counts
from repro_core.model.decoder import Critic, Policy, init_weights
from repro_core.model.hf import load_hf, save_hf
from repro_core.rl.batching import Update, make_micro_batch, offsets, pad
from repro_core.rl.loss import token_log_probs

__all__ = ["DTYPES", "TorchEngine", "TorchEngines", "starting_policy"]

_T = TypeVar("_T")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TorchEngine:
    """One model on one process. The graphs of all micro-batches of an update are alive until `backward`.

    Args:
        model: the policy, or the critic.
        config: of the run, with the learning rate of this model.
    """

    def __init__(self, model: Policy, config: TrainConfig) -> None:
        self.model, self.config = model, config
        self.names = ("values",) if isinstance(model, Critic) else ("log_probs", "entropy")
        self.updates = 0
        self._graphs: list[tuple[Tensor, ...]] = []

    @cached_property
    def optimizer(self) -> MainOptimizer:
        """Made when it is first needed: a run that only samples has none."""
        return MainOptimizer(self.model.named_parameters(), self.config)

    def score(self, tensors: Mapping[str, Tensor], plan: Sequence[Update]) -> Scores:
        """See `interface.Engine.score`."""
        with torch.no_grad():
            parts = [part for update in plan for part in self._score(tensors, update)]
        return self._joined(parts)

    def forward(self, tensors: Mapping[str, Tensor], update: Update) -> Scores:
        """See `interface.Engine.forward`."""
        self._graphs = list(self._score(tensors, update))
        return self._joined([tuple(column.detach() for column in part) for part in self._graphs])

    def backward(self, gradients: Mapping[str, Tensor | None]) -> None:
        """See `interface.Engine.backward`: each micro-batch takes its own slice of the columns' gradients."""
        optimizer = self.optimizer
        optimizer.zero_grad()
        graphs, self._graphs = self._graphs, []
        for part, (a, b) in zip(graphs, pairwise(offsets([len(p[0]) for p in graphs])), strict=True):
            pairs = [(column, gradients[name]) for column, name in zip(part, self.names, strict=True)]
            reached = [(end, grad[a:b]) for end, grad in pairs if grad is not None]
            torch.autograd.backward([end for end, _ in reached], [grad for _, grad in reached])
            optimizer.accumulate()

    def step(self, observe: Observe, prefix: str = "") -> float:
        """See `interface.Engine.step`."""
        optimizer = self.optimizer
        gradients = optimizer.gradients()
        observe("grad", prefix, gradients)
        norm = float(clip_grads(gradients, self.config.clip_grad))
        observe("grad", f"{prefix}grad_norm", norm)
        optimizer.step()
        self.updates += 1
        self.show(observe, "update", prefix)
        for kind in ("exp_avg", "exp_avg_sq"):
            observe("update", f"{prefix}{kind}/", optimizer.moments(kind))
        observe("update", f"{prefix}number/", step_counts(optimizer.moments("step").values()))
        optimizer.publish()
        if self.config.dtype == "bf16":
            observe("update", f"{prefix}model/", {name: p.detach() for name, p in self.model.named_parameters()})
        return norm

    def show(self, observe: Observe, phase: str, prefix: str) -> None:
        """See `interface.Engine.show`."""
        observe(phase, prefix, {name: weight.detach() for name, weight in self.optimizer.main.items()})

    def weights(self) -> tuple[dict[str, Tensor], None]:
        """See `interface.Engine.weights`: they are whole."""
        return {name: p.detach() for name, p in self.model.named_parameters()}, None

    def state(self, prefix: str = "") -> dict[str, Tensor]:
        """Main weights, bf16 weights and optimizer: live tensors by name."""
        out = {f"{prefix}main/{name}": weight.detach() for name, weight in self.optimizer.main.items()}
        if self.config.dtype == "bf16":
            out |= {f"{prefix}model/{name}": p.detach() for name, p in self.model.named_parameters()}
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            out |= {f"{prefix}{kind}/{name}": value for name, value in self.optimizer.moments(kind).items()}
        return out

    def _joined(self, parts: Sequence[tuple[Tensor, ...]]) -> Scores:
        return {name: torch.cat([part[k] for part in parts]) for k, name in enumerate(self.names)}

    def _score(self, t: Mapping[str, Tensor], update: Update) -> Iterator[tuple[Tensor, ...]]:
        """The columns of each micro-batch's response tokens, fp32."""
        totals, responses = t["total_lengths"].tolist(), t["response_lengths"].tolist()
        at_token, at_response = offsets(totals), offsets(responses)
        for run in update.runs:
            a, b = run.start, run.stop
            packed = slice(at_token[a], at_token[b])
            batch = make_micro_batch(t["tokens"][packed], totals[a:b], responses[a:b], PAD_ID)
            routing = pad(t["routed_experts"][packed].long(), totals[a:b], 0) if self._replays else None
            rows = self.model(batch.tokens, routing=routing).flatten(0, 1).index_select(0, batch.predictions)
            mask = t["loss_mask"][at_response[a] : at_response[b]]
            if isinstance(self.model, Critic):
                yield (torch.where(mask != 0, rows[:, 0], 0.0),)
            else:
                yield token_log_probs(rows, batch.targets, mask, self.config.temperature)

    @property
    def _replays(self) -> bool:
        # a critic routes for itself: the rollout engine chose experts for the policy
        return self.config.use_rollout_routing_replay and not isinstance(self.model, Critic)


class TorchEngines:
    """The models of a run on one process; reference, critic and optimizers are made when training needs them.

    Args:
        config: of the run.
        root: directory that a relative `hf_checkpoint` starts from.

    Raises:
        repro_core.model.hf.HfError: `hf_checkpoint` cannot be read.
    """

    lead = True
    device = torch.device("cpu")

    def __init__(self, config: TrainConfig, root: str) -> None:
        self.config = config
        self._policy = starting_policy(config, root).to(DTYPES[config.dtype])
        self.model = self._policy.config
        self.policy = TorchEngine(self._policy, config)
        self._critic: TorchEngine | None = None

    @cached_property
    def reference(self) -> TorchEngine:
        """A copy of the policy as it is when this is first asked for, which is before the first update."""
        reference = Policy(self._policy.config).to(DTYPES[self.config.dtype]).requires_grad_(False)
        reference.load_state_dict(self._policy.state_dict())
        return TorchEngine(reference, self.config)

    @property
    def critic(self) -> TorchEngine | None:
        """Under ppo, the policy's decoder with a value head, copied when this is first asked for."""
        if self.config.advantage_estimator != "ppo":
            return None
        if self._critic is None:
            self._critic = TorchEngine(Critic(self._policy), replace(self.config, lr=self.config.critic_lr))
        return self._critic

    def generator(self) -> Policy:
        """The trained policy itself."""
        return self._policy

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `interface.Engines.whole_weights`: the live tensors."""
        return iter(self.policy.weights()[0].items())

    def tell(self, value: _T) -> _T:
        """See `interface.Engines.tell`: there is one process."""
        return value

    def state(self) -> dict[str, Tensor]:
        """See `interface.Engines.state`."""
        reference = {f"ref/{name}": p.detach() for name, p in self.reference.model.named_parameters()}
        critic = self.critic.state("critic/") if self.critic is not None else {}
        return self.policy.state() | reference | critic

    def save(self, directory: str, rest: Mapping[str, Tensor]) -> None:
        """See `interface.Engines.save`.

        Raises:
            repro_core.engines.checkpoint.CheckpointError: something that is no checkpoint lies at `directory`.
            OSError: the disk refuses.
        """
        state = self.state() | dict(rest)
        save_checkpoint(directory, state, self.config.to_mapping(), lambda path: save_hf(self._policy, path))

    def load(self, directory: str, rest: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `interface.Engines.load`.

        Raises:
            repro_core.engines.checkpoint.CheckpointError: unreadable, damaged, of a newer format, or of another model
                or dtype.
        """
        loaded, state = load_checkpoint(directory, self.config, self.model), self.state()
        fit(directory, loaded, state | dict(rest))
        with torch.no_grad():
            for name, value in state.items():
                value.copy_(loaded.pop(name))
        step = int(loaded["position/step"])
        self.policy.updates = max(0, step - self.config.num_critic_only_steps)
        if self.critic is not None:
            self.critic.updates = step
        return loaded

    def close(self) -> None:
        """Nothing outlives the models."""


def starting_policy(config: TrainConfig, root: str) -> Policy:
    """The policy that training starts from, in the dtype that it has there: read, or drawn in fp32.

    Raises:
        repro_core.model.hf.HfError: `hf_checkpoint` cannot be read.
    """
    if config.hf_checkpoint is not None:
        return load_hf(Path(root) / config.hf_checkpoint)
    policy = Policy(config.model)
    init_weights(policy, config.seed)
    return policy

"""The GRPO trainer: the built-in `Subject`.

Only contiguous groups of samples, fixed micro-batches and documented reduction orders decide the numbers; nothing is
shuffled and no global random generator is drawn from. Every tensor handed to `observe` is the one that is used
afterwards (a detached view of the same storage): an observer that changes an element changes what follows, and one
that changes nothing leaves every bit alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro_core import Observe, Rollout
from repro_core.advantages import advantages, baseline, whiten
from repro_core.batching import Update, make_micro_batch, offsets, plan_updates
from repro_core.checkpoint import CheckpointError, load_checkpoint, restore_rng, rng_state, save_checkpoint
from repro_core.config import ConfigError, TrainConfig
from repro_core.determinism import apply
from repro_core.hf import load_hf, save_hf
from repro_core.kl import kl_per_token
from repro_core.loss import Columns, LossTerms, policy_loss, token_log_probs, token_weights
from repro_core.model import Policy, init_weights
from repro_core.optimizer import MainOptimizer, clip_grads
from repro_core.sampler import sample, sample_seeds
from repro_core.task import prompts, reward
from repro_core.tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, encode

__all__ = ["Trainer", "rollout_metrics"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_INPUTS = ("tokens", "total_lengths", "response_lengths", "loss_mask", "rollout_log_probs", "rewards", "group_index")
_HALF_TRAINED = "rollout/old_log_probs"


class _TrainSide:
    """What rollouts alone do not need: the reference and the optimizer. Made from the starting policy."""

    def __init__(self, policy: Policy, config: TrainConfig) -> None:
        self.reference = Policy(policy.config).to(_DTYPES[config.dtype]).requires_grad_(False)
        self.reference.load_state_dict(policy.state_dict())
        self.optimizer = MainOptimizer(policy.named_parameters(), config)


class Trainer:
    """GRPO on one process. The reference policy is a frozen copy of the starting policy.

    The old log-probs (denominator of the ratio) are those of the policy as it was when a rollout's training began,
    scored without gradient over the same micro-batches as the update itself: while the policy has not moved, log_probs
    equal old_log_probs and (at step 0) ref_log_probs bit for bit. Columns are observed whole before the loss, so the
    graphs of all micro-batches of an update are alive at once.

    Args:
        config: checked again here.
        root: directory that a relative `hf_checkpoint` starts from.
        log: receives one line per rollout and per step.

    Raises:
        ConfigError: the configuration cannot be trained.
        repro_core.hf.HfError: `hf_checkpoint` cannot be read.
    """

    def __init__(self, config: TrainConfig, root: str = ".", log: Callable[[str], None] | None = None) -> None:
        config.validate()
        apply(config.seed, config.threads)
        self.config = config
        self.log: Callable[[str], None] = log or _print
        self.policy = _starting_policy(config, root)
        self._step = 0
        self._rollout_id = 0
        self._update = 0
        self._old_log_probs: Tensor | None = None
        self._introduced = False
        self._lazy_train_side: _TrainSide | None = None

    @property
    def _train_side(self) -> _TrainSide:
        if self._lazy_train_side is None:
            self._lazy_train_side = _TrainSide(self.policy, self.config)
        return self._lazy_train_side

    @property
    def position(self) -> tuple[int, int]:
        """The number of the next step, and the rollout it belongs to: the next one, or the one half trained."""
        return self._step, self._rollout_id

    def sample(self, rollout_id: int) -> Rollout:
        """Sample one rollout with the current policy: a function of the weights, the seed and `rollout_id` alone.

        Raises:
            ConfigError: the vocabulary is smaller than the tokenizer's.
            ValueError: the logits are no distribution, or prompt and response do not fit the positions.
        """
        c = self.config
        if self.policy.config.vocab_size < VOCAB_SIZE:
            raise ConfigError(f"sampling needs vocab_size {VOCAB_SIZE} (bytes, pad, bos, eos) or more")
        problems = prompts(c.seed, rollout_id, c.rollout_batch_size, c.max_operand)
        encoded = [encode(p.prompt) for p in problems for _ in range(c.n_samples_per_prompt)]
        responses = sample(
            self.policy,
            encoded,
            max_response_len=c.max_response_len,
            temperature=c.temperature,
            seeds=sample_seeds(c.seed, rollout_id, len(encoded)),
            eos_id=EOS_ID,
        )
        labels = [p.label for p in problems for _ in range(c.n_samples_per_prompt)]
        lengths = [len(r.tokens) for r in responses]
        sampling = {"temperature": c.temperature, "max_response_len": c.max_response_len, "seed": c.seed}
        return Rollout(
            meta={
                "rollout_id": rollout_id,
                "prompts": [p.prompt for p in problems],
                "labels": [p.label for p in problems],
                "statuses": [r.status for r in responses],
                "sampling": sampling,
            },
            tensors={
                "tokens": torch.tensor([t for p, r in zip(encoded, responses, strict=True) for t in (*p, *r.tokens)]),
                "total_lengths": torch.tensor([len(p) + n for p, n in zip(encoded, lengths, strict=True)]),
                "response_lengths": torch.tensor(lengths),
                "loss_mask": torch.ones(sum(lengths), dtype=torch.int64),
                "rollout_log_probs": torch.tensor([x for r in responses for x in r.log_probs], dtype=torch.float32),
                "rewards": torch.tensor(
                    [reward(r.tokens, label) for r, label in zip(responses, labels, strict=True)], dtype=torch.float32
                ),
                "group_index": torch.arange(len(problems)).repeat_interleave(c.n_samples_per_prompt),
            },
        )

    def train(self, rollout: Rollout, observe: Observe) -> Iterator[int]:
        """Make the updates of one rollout; yields each update's step number.

        A trainer left (or saved) between two updates of a rollout continues there when given the same rollout again.

        Args:
            rollout: of ``global_batch_size x num_steps_per_rollout`` samples.
            observe: see `repro_core.Observe`. The first step after construction or `load` also shows the fp32 weights
                that it starts from, as input ``start/NAME``. Masked tokens of the columns log_probs, old_log_probs,
                ref_log_probs, entropy, kl, returns, values and advantages are exactly 0.

        Raises:
            ConfigError: the rollout does not fit the configuration, or another one is half trained.
        """
        rollout_id = self._accept(rollout)
        t, side = rollout.tensors, self._train_side
        plan = plan_updates(t, self.config.global_batch_size, self.config.max_tokens_per_micro_batch)
        if self._update == 0:
            self.log(f"rollout {rollout_id}: {rollout_metrics(rollout)!r}")
        ref_log_probs: Tensor | None = None
        for update in plan[self._update :]:
            if not self._introduced:
                observe("input", "start/", {name: w.detach() for name, w in side.optimizer.main.items()})
                self._introduced = True
            observe("input", "", {name: t[name][update.of(name)] for name in _INPUTS})
            if self._old_log_probs is None:
                self._old_log_probs = self._score_all(self.policy, t, plan)
            if ref_log_probs is None:
                ref_log_probs = self._score_all(side.reference, t, plan)
            metrics = self._train_step(t, update, ref_log_probs, observe)
            done, self._step = self._step, self._step + 1
            self._update += 1
            if self._update == len(plan):
                self._rollout_id, self._update, self._old_log_probs = rollout_id + 1, 0, None
            self.log(f"step {done}: { {f'train/{k}': v for k, v in metrics.items()} | {'train/step': done}!r}")
            yield done

    def state(self) -> Mapping[str, Tensor]:
        """Main weights, bf16 weights, optimizer, reference, random generators, position: live tensors by name."""
        side, optimizer = self._train_side, self._train_side.optimizer
        out = {f"main/{name}": weight.detach() for name, weight in optimizer.main.items()}
        if self.config.dtype == "bf16":
            out |= {f"model/{name}": p.detach() for name, p in self.policy.named_parameters()}
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            out |= {f"{kind}/{name}": value for name, value in optimizer.moments(kind).items()}
        out |= {f"ref/{name}": p.detach() for name, p in side.reference.named_parameters()}
        out |= {
            "position/step": torch.tensor(self._step),
            "position/rollout_id": torch.tensor(self._rollout_id),
            "position/update": torch.tensor(self._update),
        }
        if self._old_log_probs is not None:
            out[_HALF_TRAINED] = self._old_log_probs
        return out | rng_state()

    def save(self, directory: str) -> None:
        """Write `state` so that `load` resumes bit for bit.

        Raises:
            CheckpointError: something that is no checkpoint lies at `directory`.
            OSError: the disk refuses.
        """
        save_checkpoint(directory, self.state(), self.config.to_mapping(), lambda path: save_hf(self.policy, path))

    def load(self, directory: str) -> None:
        """Resume from what `save` wrote; nothing changes unless all of it fits.

        Raises:
            CheckpointError: unreadable, damaged, of a newer format, or of another model or dtype.
        """
        found, own = load_checkpoint(directory), self.state()
        old = found.pop(_HALF_TRAINED, None)
        own = {name: value for name, value in own.items() if name != _HALF_TRAINED}
        for name in sorted(found.keys() | own.keys()):
            theirs, ours = _kind(found.get(name)), _kind(own.get(name))
            if theirs != ours and not name.startswith("rng/"):
                raise CheckpointError(
                    f"{directory} does not fit: {name} is {theirs} there and {ours} here; "
                    "use the configuration that saved it"
                )
        with torch.no_grad():
            for name, value in own.items():
                if not name.startswith(("rng/", "position/")):
                    value.copy_(found[name])
        self._step = int(found["position/step"])
        self._rollout_id = int(found["position/rollout_id"])
        self._update = int(found["position/update"])
        self._old_log_probs = None if old is None else old.clone()  # out of the file's mapped memory
        self._introduced = False
        restore_rng(found)

    def _accept(self, rollout: Rollout) -> int:
        rollout_id, samples = int(rollout.meta["rollout_id"]), len(rollout.tensors["rewards"])
        wanted = self.config.global_batch_size * self.config.num_steps_per_rollout
        if samples != wanted:
            raise ConfigError(
                f"rollout {rollout_id} has {samples} samples, but global_batch_size x num_steps_per_rollout = "
                f"{self.config.global_batch_size} x {self.config.num_steps_per_rollout} = {wanted}"
            )
        tokens, vocab = rollout.tensors["tokens"], self.policy.config.vocab_size
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
            ids = f"{int(tokens.min())} to {int(tokens.max())}"
            raise ConfigError(f"rollout {rollout_id} has token ids {ids}, but vocab_size is {vocab}")
        if self._update and rollout_id != self._rollout_id:
            raise ConfigError(f"rollout {self._rollout_id} is half trained: finish it before rollout {rollout_id}")
        return rollout_id

    def _score(self, policy: Policy, t: Mapping[str, Tensor], update: Update) -> Iterator[tuple[Tensor, Tensor]]:
        """log_probs and entropy of each micro-batch's response tokens, fp32."""
        totals, responses = t["total_lengths"].tolist(), t["response_lengths"].tolist()
        at_token, at_response = offsets(totals), offsets(responses)
        for run in update.runs:
            a, b = run.start, run.stop
            batch = make_micro_batch(t["tokens"][at_token[a] : at_token[b]], totals[a:b], responses[a:b], PAD_ID)
            rows = policy(batch.tokens).flatten(0, 1).index_select(0, batch.predictions)
            mask = t["loss_mask"][at_response[a] : at_response[b]]
            yield token_log_probs(rows, batch.targets, mask, self.config.temperature)

    @torch.no_grad()
    def _score_all(self, policy: Policy, t: Mapping[str, Tensor], plan: Sequence[Update]) -> Tensor:
        return torch.cat([log_probs for update in plan for log_probs, _ in self._score(policy, t, update)])

    def _train_step(
        self, t: Mapping[str, Tensor], update: Update, ref_log_probs: Tensor, observe: Observe
    ) -> dict[str, float]:
        graphs = list(self._score(self.policy, t, update))
        log_probs = torch.cat([part.detach() for part, _ in graphs]).requires_grad_()
        entropy = torch.cat([part.detach() for _, part in graphs]).requires_grad_()
        terms = self._observed_loss(t, update, log_probs, entropy, ref_log_probs, observe)
        own_rewards = t["rewards"][update.samples]
        metrics = {
            "loss": float(terms.loss.detach()),
            **{name: float(value) for name, value in terms.sums.items()},
            "train_rollout_logprob_abs_diff_max": float(terms.abs_diff_max),
            "reward": float(own_rewards.sum() / len(own_rewards)),
        }
        for name, number in metrics.items():
            observe("loss", name, number)

        # The loss ends at the packed columns; each micro-batch takes its own slice of their gradient from there, so
        # no normaliser depends on how the update was cut.
        torch.autograd.backward([terms.loss])
        optimizer = self._train_side.optimizer
        optimizer.zero_grad()
        for (part, part_entropy), (a, b) in zip(graphs, pairwise(offsets([len(p) for p, _ in graphs])), strict=True):
            ends = [(part, log_probs.grad), (part_entropy, entropy.grad)]
            reached = [(end, grad[a:b]) for end, grad in ends if grad is not None]
            torch.autograd.backward([end for end, _ in reached], [grad for _, grad in reached])
            optimizer.accumulate()
        gradients = optimizer.gradients()
        observe("grad", "", gradients)
        metrics["grad_norm"] = float(clip_grads(gradients, self.config.clip_grad))
        observe("grad", "grad_norm", metrics["grad_norm"])

        optimizer.step()
        observe("update", "", {name: weight.detach() for name, weight in optimizer.main.items()})
        for kind in ("exp_avg", "exp_avg_sq"):
            observe("update", f"{kind}/", optimizer.moments(kind))
        optimizer.publish()
        if self.config.dtype == "bf16":
            observe("update", "model/", {name: p.detach() for name, p in self.policy.named_parameters()})
        return metrics

    def _observed_loss(
        self,
        t: Mapping[str, Tensor],
        update: Update,
        log_probs: Tensor,
        entropy: Tensor,
        ref_log_probs: Tensor,
        observe: Observe,
    ) -> LossTerms:
        """Each column is observed before anything is made from it. Group statistics span the whole rollout."""
        c, own, old_log_probs = self.config, update.responses, self._old_log_probs
        assert old_log_probs is not None
        mask = t["loss_mask"]
        policies = {"log_probs": log_probs.detach(), "old_log_probs": old_log_probs[own]}
        observe("forward", "", policies | {"ref_log_probs": ref_log_probs[own], "entropy": entropy.detach()})
        kl = kl_per_token(log_probs, ref_log_probs[own], mask[own], c.kl_estimator)
        observe("forward", "kl", kl.detach())
        base = baseline(
            t["rewards"],
            t["group_index"],
            mask,
            t["response_lengths"],
            kl=kl_per_token(old_log_probs, ref_log_probs, mask, c.kl_estimator),
            kl_coef=c.kl_coef,
            std_normalization=c.grpo_std_normalization,
        )
        observe("forward", "", {"returns": base.returns[own], "values": base.values[own]})
        column = advantages(base, mask)
        column = whiten(column, mask) if c.whiten_advantages else column
        observe("forward", "advantages", column[own])
        weights = token_weights(mask[own], t["response_lengths"][update.samples], c.loss_aggregation)
        columns = Columns(
            log_probs=log_probs,
            entropy=entropy,
            kl=kl,
            old_log_probs=old_log_probs[own],
            rollout_log_probs=t["rollout_log_probs"][own],
            advantages=column[own],
            loss_mask=mask[own],
        )
        return policy_loss(columns, weights, c)


def _starting_policy(config: TrainConfig, root: str) -> Policy:
    if config.hf_checkpoint is not None:
        return load_hf(Path(root) / config.hf_checkpoint).to(_DTYPES[config.dtype])
    policy = Policy(config.model)
    init_weights(policy, config.seed)
    return policy.to(_DTYPES[config.dtype])


def rollout_metrics(rollout: Rollout) -> dict[str, Any]:
    """Means over samples (log-probs: over unmasked tokens), as the field names them."""
    t, statuses = rollout.tensors, rollout.meta["statuses"]
    log_probs = t["rollout_log_probs"][t["loss_mask"] != 0]
    samples = len(t["rewards"])
    return {
        "rollout/rewards": float(t["rewards"].sum() / samples),
        "rollout/response_lengths": float(t["response_lengths"].sum() / samples),
        "rollout/total_lengths": float(t["total_lengths"].sum() / samples),
        "rollout/rollout_log_probs": float(log_probs.sum() / max(len(log_probs), 1)),
        "rollout/truncated": sum(status == "truncated" for status in statuses) / samples,
        "rollout/step": int(rollout.meta["rollout_id"]),
    }


def _kind(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _print(line: str) -> None:
    print(line, flush=True)

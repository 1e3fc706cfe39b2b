"""The GRPO trainer: the built-in `Subject`.

Only contiguous groups of samples, fixed micro-batches and documented reduction orders decide the numbers; nothing is
shuffled and no global random generator is drawn from. Every tensor handed to `observe` is the one that is used
afterwards (a detached view of the same storage): an observer that changes an element changes what follows, and one
that changes nothing leaves every bit alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from repro_core.config import ConfigError, TrainConfig
from repro_core.contract import Observe, Rollout
from repro_core.determinism.control import apply
from repro_core.engines.checkpoint import restore_rng, rng_state
from repro_core.engines.interface import Engine, Engines, Scores
from repro_core.engines.torch_engine import TorchEngines
from repro_core.rl.advantages import Estimate, estimate
from repro_core.rl.batching import Update, plan_updates
from repro_core.rl.kl import kl_per_token
from repro_core.rl.loss import Columns, LossTerms, policy_loss, token_weights
from repro_core.rl.values import value_loss
from repro_core.rollout.source import RolloutSource, rollout_metrics
from repro_core.rollout.sync import SyncObserver

__all__ = ["Trainer"]

_INPUTS = ("tokens", "total_lengths", "response_lengths", "loss_mask", "rollout_log_probs", "rewards", "group_index")
_HALF_TRAINED = "rollout/old_"
CRITIC = "critic/"


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
        sync: sees every weight sync to a rollout engine that has weights of its own.

    Raises:
        ConfigError: the configuration cannot be trained.
        repro_core.model.hf.HfError: `hf_checkpoint` cannot be read.
    """

    def __init__(
        self,
        config: TrainConfig,
        root: str = ".",
        log: Callable[[str], None] | None = None,
        sync: SyncObserver | None = None,
    ) -> None:
        config.validate()
        apply(config.seed, config.threads)
        self.config = config
        self.log: Callable[[str], None] = log or _print
        self.engines = _engines(config, root)
        self.rollouts = RolloutSource(config, root, self.engines, sync)
        self._step = 0
        self._rollout_id = 0
        self._update = 0
        self._old: Scores | None = None
        self._introduced = False

    @property
    def position(self) -> tuple[int, int]:
        """The number of the next step, and the rollout it belongs to: the next one, or the one half trained."""
        return self._step, self._rollout_id

    def sample(self, rollout_id: int) -> Rollout:
        """Sample one rollout with the current weights: a function of them, the seed and `rollout_id` alone.

        Raises:
            ConfigError: the vocabulary is smaller than the tokenizer's.
            repro_core.rollout.engine.EngineError: the rollout engine failed; nothing of the rollout is kept.
            ValueError: the logits are no distribution, or prompt and response do not fit the positions.
        """
        return self.rollouts.sample(rollout_id, version=str(self._step))

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
        engines = self.engines
        t = {name: tensor.to(engines.device) for name, tensor in rollout.tensors.items()}
        plan = plan_updates(t, self.config.global_batch_size, self.config.max_tokens_per_micro_batch)
        if self._update == 0:
            self.say(f"rollout {rollout_id}: {rollout_metrics(rollout)!r}")
        reference: Scores | None = None
        for update in plan[self._update :]:
            if not self._introduced:
                engines.policy.show(observe, "input", "start/")
                if engines.critic is not None:
                    engines.critic.show(observe, "input", f"start/{CRITIC}")
                self._introduced = True
            observe("input", "", {name: t[name][update.of(name)] for name in _inputs(self.config)})
            if self._old is None:
                self._old = engines.policy.score(t, plan)
                del self._old["entropy"]
                if engines.critic is not None:
                    self._old |= engines.critic.score(t, plan)
            if reference is None:
                reference = engines.reference.score(t, plan)
            metrics = self._train_step(t, update, reference["log_probs"], observe)
            done, self._step = self._step, self._step + 1
            self._update += 1
            if self._update == len(plan):
                self._rollout_id, self._update, self._old = rollout_id + 1, 0, None
            self.say(f"step {done}: { {f'train/{k}': v for k, v in metrics.items()} | {'train/step': done}!r}")
            yield done

    def state(self) -> Mapping[str, Tensor]:
        """Weights, optimizer and reference of this process, random generators, position: live tensors by name."""
        return {**self.engines.state(), **self._rest()}

    def _rest(self) -> dict[str, Tensor]:
        """What is no model's: the same on every process."""
        out = {
            "position/step": torch.tensor(self._step),
            "position/rollout_id": torch.tensor(self._rollout_id),
            "position/update": torch.tensor(self._update),
        }
        out |= {f"{_HALF_TRAINED}{name}": column for name, column in (self._old or {}).items()}
        return out | rng_state()

    def save(self, directory: str) -> None:
        """Write `state` so that `load` resumes bit for bit.

        Raises:
            CheckpointError: something that is no checkpoint lies at `directory`.
            OSError: the disk refuses.
        """
        self.engines.save(directory, self._rest())

    def load(self, directory: str) -> None:
        """Resume from what `save` wrote; nothing changes unless all of it fits.

        Raises:
            CheckpointError: unreadable, damaged, of a newer format, or of another model or dtype.
        """
        state = self.engines.load(directory, {k: v for k, v in self._rest().items() if not k.startswith(_HALF_TRAINED)})
        self._step = int(state["position/step"])
        self._rollout_id = int(state["position/rollout_id"])
        self._update = int(state["position/update"])
        # copied: out of the file's mapped memory, to where columns are
        old = {
            name.removeprefix(_HALF_TRAINED): column.to(self.engines.device, copy=True)
            for name, column in state.items()
            if name.startswith(_HALF_TRAINED)
        }
        self._old = old or None
        self._introduced = False
        restore_rng(state)

    def say(self, line: str) -> None:
        """Log a line, once for all processes."""
        if self.engines.lead:
            self.log(line)

    def _accept(self, rollout: Rollout) -> int:
        rollout_id, samples = int(rollout.meta["rollout_id"]), len(rollout.tensors["rewards"])
        trained = self.config.global_batch_size * self.config.num_steps_per_rollout
        if samples != trained:
            raise ConfigError(
                f"rollout {rollout_id} has {samples} samples, but global_batch_size x num_steps_per_rollout = "
                f"{self.config.global_batch_size} x {self.config.num_steps_per_rollout} = {trained}"
            )
        tokens, vocab = rollout.tensors["tokens"], self.engines.model.vocab_size
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
            ids = f"{int(tokens.min())} to {int(tokens.max())}"
            raise ConfigError(f"rollout {rollout_id} has token ids {ids}, but vocab_size is {vocab}")
        model, routed = self.engines.model, rollout.tensors.get("routed_experts")
        wanted = [model.num_hidden_layers, model.num_experts_per_tok]
        if self.config.use_rollout_routing_replay and (routed is None or list(routed.shape[1:]) != wanted):
            shape = "no routed_experts" if routed is None else f"routed_experts of {list(routed.shape[1:])} a token"
            raise ConfigError(
                f"rollout {rollout_id} has {shape}, but use_rollout_routing_replay needs [layers, experts per token] = "
                f"{wanted}: record rollouts with this model, or turn it off"
            )
        if self.config.use_rollout_routing_replay and routed is not None:
            _check_experts(rollout_id, routed, rollout.tensors["total_lengths"], model.num_experts)
        if self._update and rollout_id != self._rollout_id:
            raise ConfigError(f"rollout {self._rollout_id} is half trained: finish it before rollout {rollout_id}")
        return rollout_id

    def _train_step(
        self, t: Mapping[str, Tensor], update: Update, ref_log_probs: Tensor, observe: Observe
    ) -> dict[str, float]:
        policy, critic = self.engines.policy, self.engines.critic
        columns = {name: column.requires_grad_() for name, column in policy.forward(t, update).items()}
        weights = token_weights(
            t["loss_mask"][update.responses], t["response_lengths"][update.samples], self.config.loss_aggregation
        )
        terms, judged = self._observed_loss(t, update, columns, weights, ref_log_probs, observe)
        own_rewards = t["rewards"][update.samples]
        metrics = {
            "loss": float(terms.loss.detach()),
            **{name: float(value) for name, value in terms.sums.items()},
            "train_rollout_logprob_abs_diff_max": float(terms.abs_diff_max),
            "reward": float(own_rewards.sum() / len(own_rewards)),
        }
        if critic is not None:
            metrics |= self._judge_critic(critic, t, update, weights, judged)
        for name, number in metrics.items():
            observe("loss", name, number)

        # The loss ends at the packed columns; each micro-batch takes its own slice of their gradient from there, so
        # no normaliser depends on how the update was cut.
        if self._step >= self.config.num_critic_only_steps:
            torch.autograd.backward([terms.loss])
            policy.backward({name: column.grad for name, column in columns.items()})
            metrics["grad_norm"] = policy.step(observe)
        if critic is not None:
            metrics[f"{CRITIC}grad_norm"] = critic.step(observe, CRITIC)
        return metrics

    def _judge_critic(
        self, critic: Engine, t: Mapping[str, Tensor], update: Update, weights: Tensor, judged: Estimate
    ) -> dict[str, float]:
        """The critic's loss against the returns of one update, and its way back into the critic's gradients."""
        assert self._old is not None
        responses = update.responses
        values = critic.forward(t, update)["values"].requires_grad_()
        loss, terms = value_loss(
            values,
            self._old["values"][responses],
            judged.returns[responses],
            t["loss_mask"][responses],
            weights,
            self.config.value_clip,
        )
        torch.autograd.backward([loss])
        critic.backward({"values": values.grad})
        return {name: float(value) for name, value in terms.items()}

    def _observed_loss(
        self,
        t: Mapping[str, Tensor],
        update: Update,
        columns: Scores,
        weights: Tensor,
        ref_log_probs: Tensor,
        observe: Observe,
    ) -> tuple[LossTerms, Estimate]:
        """Each column is observed before the loss is made from it. Group statistics span the whole rollout."""
        c, responses = self.config, update.responses
        assert self._old is not None
        log_probs, entropy, old_log_probs = columns["log_probs"], columns["entropy"], self._old["log_probs"]
        mask = t["loss_mask"]
        policies = {"log_probs": log_probs.detach(), "old_log_probs": old_log_probs[responses]}
        observe("forward", "", policies | {"ref_log_probs": ref_log_probs[responses], "entropy": entropy.detach()})
        kl = kl_per_token(log_probs, ref_log_probs[responses], mask[responses], c.kl_estimator)
        observe("forward", "kl", kl.detach())
        judged = estimate(
            c,
            rewards=t["rewards"],
            group_index=t["group_index"],
            loss_mask=mask,
            response_lengths=t["response_lengths"],
            kl=kl_per_token(old_log_probs, ref_log_probs, mask, c.kl_estimator),
            values=self._old.get("values"),
            show=lambda name, column: observe("forward", name, column[responses]),
        )
        loss_columns = Columns(
            log_probs=log_probs,
            entropy=entropy,
            kl=kl,
            old_log_probs=old_log_probs[responses],
            rollout_log_probs=t["rollout_log_probs"][responses],
            advantages=judged.advantages[responses],
            loss_mask=mask[responses],
            response_lengths=t["response_lengths"][update.samples],
        )
        return policy_loss(loss_columns, weights, c), judged


def _inputs(config: TrainConfig) -> tuple[str, ...]:
    """The tensors of a rollout that training reads."""
    return (*_INPUTS, "routed_experts") if config.use_rollout_routing_replay else _INPUTS


def _check_experts(rollout_id: int, routed: Tensor, total_lengths: Tensor, count: int) -> None:
    """Refuse recorded experts that no router chooses. Those of a sample's last token, which leads nowhere, are free."""
    if len(routed) and not 0 <= int(routed.min()) <= int(routed.max()) < count:
        experts = f"{int(routed.min())} to {int(routed.max())}"
        raise ConfigError(f"rollout {rollout_id} has routed_experts {experts}, but the model has 0 to {count - 1}")
    chosen = routed.sort(-1).values
    twice = (chosen[..., 1:] == chosen[..., :-1]).flatten(1).any(-1)
    twice[total_lengths.cumsum(0) - 1] = False
    if bool(twice.any()):
        raise ConfigError(
            f"rollout {rollout_id} has routed_experts with one expert twice, at token {int(twice.nonzero()[0])} of "
            "all: record rollouts with this model, or turn use_rollout_routing_replay off"
        )


def _engines(config: TrainConfig, root: str) -> Engines:
    if config.policy == "megatron":
        from repro_core.engines.megatron.engines import MegatronEngines

        return MegatronEngines(config, root)
    return TorchEngines(config, root)


def _print(line: str) -> None:
    print(line, flush=True)

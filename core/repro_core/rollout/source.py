"""Where a run's rollouts come from: the engine that its configuration names samples them, with the present weights."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from repro_core.config import ConfigError, ModelConfig, TrainConfig
from repro_core.contract import Rollout
from repro_core.data.task import EOS_ID, VOCAB_SIZE, encode, prompts, reward
from repro_core.determinism.control import apply
from repro_core.engines.interface import Engines
from repro_core.engines.torch_engine import DTYPES, TorchEngines, starting_policy
from repro_core.model.decoder import Policy
from repro_core.model.hf import save_hf
from repro_core.model.hf_config import read_config
from repro_core.model.layout_free import box
from repro_core.rollout.engine import EngineError, HeldWeights, Response, RolloutEngine, Sampling
from repro_core.rollout.sampler import sample, sample_seeds
from repro_core.rollout.scratch import fresh_folder
from repro_core.rollout.sync import SyncObserver, WeightSync, from_lead, show_start

__all__ = ["PolicyEngine", "RolloutSource", "RolloutsOnly", "Started", "model_of", "rollout_metrics", "start_engine"]


class RolloutSource:
    """Samples rollouts for a trainer. An engine with weights of its own is started when the first one is asked for.

    On several processes the lead alone talks to such an engine; all have its rollouts.

    Args:
        config: of the run.
        root: directory that a relative `hf_checkpoint` starts from.
        engines: the trainer's models.
        observer: sees what every weight sync sent, and what the engine holds.
    """

    def __init__(self, config: TrainConfig, root: str, engines: Engines, observer: SyncObserver | None) -> None:
        self.config, self.root, self.engines, self.observer = config, root, engines, observer

    def sample(self, rollout_id: int, version: str) -> Rollout:
        """One rollout with the trainer's present weights.

        Args:
            rollout_id: its number.
            version: of the weights, which an engine with weights of its own is brought first, whatever it has.

        Raises:
            repro_core.rollout.engine.EngineError: the engine failed, or refused the weights.
        """
        vocab = self.engines.model.vocab_size
        if self.config.rollout_engine == "policy":
            policy = self.engines.generator()  # of all processes together
            return _generate(self.config, rollout_id, vocab, PolicyEngine(lambda: policy))
        self._sync.bring(version)
        return from_lead(self.engines, lambda: _generate(self.config, rollout_id, vocab, self._engine))

    @property
    def _engine(self) -> RolloutEngine:
        """On the lead."""
        assert self._sync.engine is not None
        return self._sync.engine

    @cached_property
    def _sync(self) -> WeightSync:
        started: list[Started] = []

        def start() -> None:  # an engine is no message: it stays where it was started
            started.append(start_engine(self.config, self.root))

        from_lead(self.engines, start)
        engine, checkpoint = started[0] if started else (None, None)
        if from_lead(self.engines, lambda: checkpoint is not None):
            show_start(self.observer, engine, checkpoint, self.config, self.engines)
        return WeightSync(self.config, self.engines, engine, self.observer)


class Started(NamedTuple):
    """A rollout engine that was started.

    Attributes:
        engine: it.
        checkpoint: the directory that the weights were read from that it has; None where that is not known here.
    """

    engine: RolloutEngine
    checkpoint: str | None


class RolloutsOnly:
    """Samples rollouts with the weights that training would start from, and trains nothing.

    An engine that is started here reads them itself. A server at an address has whatever it was given last, so they are
    brought to it once, as version ``0``.

    Args:
        config: of the run.
        root: directory that a relative `hf_checkpoint` starts from.
        observer: sees what the checkpoint holds, and what an engine has read of it; and what a server was brought.

    Raises:
        repro_core.config.ConfigError: the configuration cannot be trained.
        repro_core.rollout.engine.EngineError: the engine does not start, or refused the weights.
    """

    def __init__(self, config: TrainConfig, root: str, observer: SyncObserver | None = None) -> None:
        config.validate()
        apply(config.seed, config.threads)
        self.config = config
        self._vocab = model_of(config, root).vocab_size
        self.engine, checkpoint = start_engine(config, root)
        try:
            if checkpoint is not None:
                show_start(observer, self.engine, checkpoint, config)
            if config.rollout_engine == "sglang" and config.sglang.url is not None:
                if observer is not None:
                    observer.alone()
                WeightSync(config, TorchEngines(config, root), self.engine, observer).bring("0")
        except BaseException:
            self.engine.close()
            raise

    def sample(self, rollout_id: int) -> Rollout:
        """One rollout; raises as `_generate`."""
        return _generate(self.config, rollout_id, self._vocab, self.engine)

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


def model_of(config: TrainConfig, root: str) -> ModelConfig:
    """The sizes of the model that training starts from.

    Raises:
        repro_core.model.hf.HfError: `hf_checkpoint` cannot be read.
    """
    return config.model if config.hf_checkpoint is None else read_config(Path(root) / config.hf_checkpoint)


def start_engine(config: TrainConfig, root: str) -> Started:
    """The rollout engine of a configuration, with the weights that training starts from.

    Args:
        config: of the run.
        root: directory that a relative `hf_checkpoint` starts from.

    Raises:
        repro_core.model.hf.HfError: the checkpoint cannot be read.
        repro_core.rollout.engine.EngineError: the engine does not start, or is of a version that is not supported.
    """
    if config.rollout_engine == "policy":
        policy = starting_policy(config, root).to(DTYPES[config.dtype])
        return Started(PolicyEngine(lambda: policy), None)
    if config.sglang.url is not None:
        from repro_core.rollout.sglang.http import SglangServer

        server = SglangServer(config.sglang, model_of(config, root), config.dtype)
        return Started(server, server.checkpoint)
    from repro_core.rollout.sglang.engine import SglangEngine

    if config.hf_checkpoint is not None:
        checkpoint = Path(root) / config.hf_checkpoint
    else:
        checkpoint = fresh_folder("start")
        atexit.register(shutil.rmtree, checkpoint, ignore_errors=True)
        save_hf(starting_policy(config, root).to(DTYPES[config.dtype]), checkpoint)
    engine = SglangEngine(config.sglang, checkpoint, config.dtype)
    atexit.register(engine.close)
    return Started(engine, str(checkpoint))


# -- the rollout engine that is the trainer's own policy


class PolicyEngine:
    """Samples with `repro_core.rollout.sampler`. It has no weights of its own, so none can fail to arrive.

    Args:
        policy: gives the policy with the present weights; called once for each batch.
    """

    separate = False

    def __init__(self, policy: Callable[[], Policy]) -> None:
        self._policy = policy
        self.weight_version = ""

    def identity(self) -> dict[str, Any]:
        """See `engine.RolloutEngine.identity`."""
        return {"name": "policy", "version": torch.__version__, "device": "cpu", "flags": {}, "stand_ins": []}

    def seeds(self, seeds: Sequence[int]) -> list[int]:
        """See `engine.RolloutEngine.seeds`: they are used as they are."""
        return list(seeds)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Response]:
        """See `engine.RolloutEngine.generate`.

        Raises:
            EngineError: no seeds: it draws from nothing else.
            ValueError: the arguments do not fit together, or the logits are no distribution.
        """
        if seeds is None:
            raise EngineError("the policy samples from seeds alone: give one for each prompt")
        return sample(
            self._policy(),
            prompts,
            max_response_len=sampling.max_response_len,
            temperature=sampling.temperature,
            seeds=seeds,
            eos_id=None if sampling.ignore_eos else sampling.eos_id,
            prompt_log_probs=sampling.prompt_log_probs,
        )

    def update(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> None:  # noqa: ARG002 - the interface's
        """Nothing to bring: refused."""
        raise EngineError("the policy's weights are the trainer's own: there is nothing to bring")

    def update_from_disk(self, directory: str, version: str) -> None:  # noqa: ARG002 - the interface's
        """Nothing to bring: refused."""
        raise EngineError("the policy's weights are the trainer's own: there is nothing to bring")

    def held(self) -> list[HeldWeights]:
        """What the policy holds, under the canonical names."""
        named = {name: tensor.detach().cpu() for name, tensor in self._policy().named_parameters()}
        placed = {name: box(name, t.shape, [0] * t.dim(), t.shape).data() for name, t in named.items()}
        return [HeldWeights(named, placed)]

    def flush_cache(self) -> None:
        """It keeps no prefixes."""

    def release_memory(self) -> None:
        """Its memory is the trainer's: refused."""
        raise EngineError("the policy's memory is the trainer's own: there is nothing to release")

    def resume_memory(self) -> None:
        """Its memory is the trainer's: refused."""
        raise EngineError("the policy's memory is the trainer's own: there is nothing to resume")

    def close(self) -> None:
        """Nothing was started."""


def _generate(config: TrainConfig, rollout_id: int, vocab_size: int, engine: RolloutEngine) -> Rollout:
    """Sample one rollout: a function of the engine's weights, the seed and `rollout_id` alone.

    Raises:
        ConfigError: the vocabulary is smaller than the tokenizer's.
        repro_core.rollout.engine.EngineError: the engine failed; nothing of the rollout is kept.
        ValueError: the logits are no distribution, or prompt and response do not fit the positions.
    """
    if vocab_size < VOCAB_SIZE:
        raise ConfigError(f"sampling needs vocab_size {VOCAB_SIZE} (bytes, pad, bos, eos) or more")
    c, per_prompt = config, config.n_samples_per_prompt
    problems = prompts(c.seed, rollout_id, c.rollout_batch_size, c.max_operand)
    encoded = [encode(p.prompt) for p in problems for _ in range(per_prompt)]
    sampling = Sampling(
        c.max_response_len, c.temperature, EOS_ID, routed_experts=engine.separate and c.use_rollout_routing_replay
    )
    seeds = sample_seeds(c.seed, rollout_id, len(encoded))
    responses = engine.generate(encoded, sampling, seeds)
    labels = [p.label for p in problems for _ in range(per_prompt)]
    lengths = [len(r.tokens) for r in responses]
    meta: dict[str, Any] = {
        "rollout_id": rollout_id,
        "prompts": [p.prompt for p in problems],
        "labels": [p.label for p in problems],
        "statuses": [r.status for r in responses],
        "sampling": {"temperature": c.temperature, "max_response_len": c.max_response_len, "seed": c.seed},
    }
    if engine.separate:  # the policy that is trained is known by the run itself
        meta |= {"engine": engine.identity(), "weight_version": engine.weight_version, "seeds": engine.seeds(seeds)}
    return Rollout(
        meta=meta,
        tensors={
            "tokens": torch.tensor([t for p, r in zip(encoded, responses, strict=True) for t in (*p, *r.tokens)]),
            "total_lengths": torch.tensor([len(p) + n for p, n in zip(encoded, lengths, strict=True)]),
            "response_lengths": torch.tensor(lengths),
            "loss_mask": torch.ones(sum(lengths), dtype=torch.int64),
            "rollout_log_probs": torch.tensor([x for r in responses for x in r.log_probs], dtype=torch.float32),
            "rewards": torch.tensor(
                [reward(r.tokens, label) for r, label in zip(responses, labels, strict=True)], dtype=torch.float32
            ),
            "group_index": torch.arange(len(problems)).repeat_interleave(per_prompt),
            **_routed([r.routed_experts for r in responses]),
        },
    )


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


def _routed(parts: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """The experts of every sample's tokens, packed like these; nothing where the model has none."""
    recorded = [part for part in parts if part is not None]
    return {"routed_experts": torch.cat(recorded)} if recorded else {}

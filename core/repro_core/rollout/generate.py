"""One rollout of the arithmetic task: prompts, an engine's responses, their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from repro_core.config import ConfigError, TrainConfig
from repro_core.contract import Rollout
from repro_core.data.task import EOS_ID, VOCAB_SIZE, encode, prompts, reward
from repro_core.rollout.engine import RolloutEngine, Sampling
from repro_core.rollout.sampler import sample_seeds

__all__ = ["generate", "rollout_metrics"]


def generate(config: TrainConfig, rollout_id: int, vocab_size: int, engine: RolloutEngine) -> Rollout:
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

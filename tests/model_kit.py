"""Policies with weights that matter, and what tests of any family compare: bits, logits, files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro_core.config import ModelConfig
from repro_core.model.decoder import Policy, init_weights

__all__ = ["backward_with", "edit_config", "make", "same_bits", "some_tokens"]


def make(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Policy:
    """A policy whose every parameter, biases and norms included, has a value that matters."""
    policy = Policy(config)
    init_weights(policy, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return policy.to(dtype)


def some_tokens(*shape: int) -> Tensor:
    """Int64, below 67."""
    return torch.randint(0, 67, shape, generator=torch.Generator().manual_seed(7))


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether dtype and all bits are equal."""
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def edit_config(directory: Path, **changes: object) -> None:
    """Change keys of a saved model's configuration; "absent" takes one away."""
    path = directory / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "absent"}))


def backward_with(policy: Policy, theirs: Any) -> Iterator[None]:
    """Batches of several shapes through both models: logits of equal bits, and then the gradients of both are there."""
    dtype, vocabulary = policy.model.embed_tokens.weight.dtype, policy.config.vocab_size
    for shape in ((1, 1), (1, 5), (3, 7), (2, 40)):
        tokens = some_tokens(*shape)
        ours, reference = policy(tokens), theirs(tokens).logits
        assert ours.dtype == dtype and ours.shape == (*shape, vocabulary)
        assert float(reference.detach().abs().max()) > 0.5, "logits near zero would agree by accident"
        assert same_bits(ours.detach(), reference.detach())
        for model, logits in ((policy, ours), (theirs, reference)):
            model.zero_grad()
            logits.float().logsumexp(-1).sum().backward()
        yield

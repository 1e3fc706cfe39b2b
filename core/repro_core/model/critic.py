"""The model of the values under ppo: the policy's decoder with one number for each token in place of logits."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name for it

from repro_core.model.decoder import Policy

__all__ = ["Critic", "ValueHead"]


class ValueHead(nn.Module):
    """Hidden to one value, in fp32 whatever the decoder's dtype is. The weight starts at 0, so values start at 0."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """As `nn.Module._apply`, but `bfloat16()` of the whole model leaves the weight fp32."""
        # the device alone: through bf16 and back the weight would come rounded
        super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, hidden: Tensor) -> Tensor:
        """Values fp32 [..., 1] of hidden [..., hidden]."""
        return F.linear(hidden.float(), self.weight)


class Critic(Policy):
    """A policy's decoder, copied, with a value head. Its names are the policy's, and ``score.weight``."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.config)
        self.to(policy.model.embed_tokens.weight.dtype)
        self.load_state_dict(policy.state_dict())
        del self.lm_head
        self.score = ValueHead(policy.config.hidden_size)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Values fp32 [batch, seq, 1]; takes what `Policy.forward` does."""
        out: Tensor = self.score(self.hidden(*args, **kwargs))
        return out

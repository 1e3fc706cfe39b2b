"""A mixture of experts (Shazeer et al., arXiv:1701.06538) in the arithmetic of transformers' ``Qwen3MoeForCausalLM``.

Each token goes through the `top_k` experts that the router likes best, and gets the sum of their outputs, weighted by
the router's probabilities. The sum's order is fixed: experts add to it in ascending order of their numbers.

Routing replay (R3, arXiv:2510.11370): a forward pass may be given the experts instead. Only the choice is replayed;
their weights are the router's current probabilities, so that the router still learns.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name for it

from repro_core.config import ModelConfig

__all__ = ["Embedding", "Expert", "Linear", "SparseMlp", "check_routing", "mix", "route", "routing_dtype"]


# -- the modules with weights that all parts of the model share. They start at zero and draw no random numbers


class Linear(nn.Linear):
    """`nn.Linear` that starts at zero instead of drawing from the global generator (see `decoder.init_weights`)."""

    def reset_parameters(self) -> None:
        """Zero weight and bias."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()


class Embedding(nn.Embedding):
    """`nn.Embedding` that starts at zero instead of drawing from the global generator."""

    def reset_parameters(self) -> None:
        """Zero the table."""
        with torch.no_grad():
            self.weight.zero_()


# -- a mixture of experts (Shazeer et al., arXiv:1701.06538) in the arithmetic of transformers' ``Qwen3MoeForCausalLM``


def route(
    logits: Tensor, top_k: int, *, normalize: bool = False, replay: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts and weigh them.

    Probabilities are a softmax in fp32 over all experts; the weights are rounded to the logits' dtype at the end. Of
    equal probabilities `torch.topk` takes which it likes: that is not specified, and a function of the logits alone on
    a CPU. (Experts of equal probability have equal weights, but not equal outputs.)

    Args:
        logits: [tokens, experts].
        top_k: experts for each token, at most as many as there are.
        normalize: divide the weights of a token by their sum.
        replay: int64 [tokens, top_k], the experts to take instead of the most probable ones.

    Returns:
        The experts, int64 [tokens, top_k], by falling probability where they are not replayed; and their weights,
        [tokens, top_k] in the logits' dtype.
    """
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    # Gathered in both cases, so that replaying the router's own choice is the same computation.
    experts = torch.topk(probabilities.detach(), top_k, dim=-1).indices if replay is None else replay
    weights = probabilities.gather(-1, experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights.to(logits.dtype)


def mix(x: Tensor, experts: Tensor, weights: Tensor, modules: Iterable[nn.Module]) -> Tensor:
    """The weighted sum of the experts' outputs, in x's dtype after each addition.

    An expert that no token chose is not run, and its parameters get no gradient (not even 0). The rows of one expert's
    matrix product are its tokens ordered by (place of the expert among the token's choices, token).

    Args:
        x: [tokens, hidden].
        experts: int64 [tokens, top_k].
        weights: [tokens, top_k].
        modules: expert 0, 1, ...: [rows, hidden] to the same shape.
    """
    out = torch.zeros_like(x)
    for number, module in enumerate(modules):
        place, token = torch.where(experts.T.eq(number))
        if len(token):
            out.index_add_(0, token, module(x[token]) * weights[token, place, None])
    return out


class Expert(nn.Module):
    """SwiGLU of width `moe_intermediate_size`, no biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.down_proj = Linear(config.moe_intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """X [rows, hidden] to the same shape."""
        # One product, as transformers and Megatron have it: its backward sums over both halves at once, and two
        # products would round x's gradient in another place.
        fused = torch.cat([self.gate_proj.weight, self.up_proj.weight])
        gate, up = F.linear(x, fused).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class SparseMlp(nn.Module):
    """Router and experts, in the place of the dense MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.normalize = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.num_experts))

    def forward(self, x: Tensor, replay: Tensor | None = None, chosen: list[Tensor] | None = None) -> Tensor:
        """X [batch, seq, hidden] to the same shape.

        Args:
            x: activations.
            replay: int64 [batch, seq, top_k], the experts to use; None leaves the choice to the router.
            chosen: receives the experts used, int64 [batch, seq, top_k].
        """
        rows = x.flatten(0, 1)
        replay_rows = None if replay is None else replay.flatten(0, 1)
        experts, weights = route(self.gate(rows), self.top_k, normalize=self.normalize, replay=replay_rows)
        if chosen is not None:
            chosen.append(experts.view(*x.shape[:2], -1))
        return mix(rows, experts, weights, self.experts).view_as(x)


def check_routing(routing: Tensor, tokens: Tensor, config: ModelConfig) -> None:
    """Refuse experts that this model cannot replay over `tokens` [batch, seq].

    Raises:
        ValueError: no int64 [batch, seq, layers, top_k], an expert's number out of range, or a model without experts.
    """
    if not config.has_experts:
        raise ValueError(f"routing cannot be replayed in {config.model_type}, which has no experts: leave it out")
    wanted = [*tokens.shape, config.num_hidden_layers, config.num_experts_per_tok]
    if routing.dtype != torch.int64 or list(routing.shape) != wanted:
        raise ValueError(f"routing must be int64 {wanted}, not {routing.dtype} {list(routing.shape)}")
    if routing.numel() and not 0 <= int(routing.min()) <= int(routing.max()) < config.num_experts:
        experts = f"{int(routing.min())} to {int(routing.max())}"
        raise ValueError(f"routing has experts {experts}, but the model has 0 to {config.num_experts - 1}")


def routing_dtype(num_experts: int) -> torch.dtype:
    """The dtype that recorded experts have: uint8 where it holds their numbers, else int16."""
    return torch.uint8 if num_experts <= 256 else torch.int16

"""The policy: a Qwen2, Qwen3 or Qwen3-MoE decoder in plain torch, a function per numeric step, and the critic.

Parameter names and values are those of the checkpoints of Hugging Face's ``Qwen2ForCausalLM``, ``Qwen3ForCausalLM``
and ``Qwen3MoeForCausalLM`` (Qwen2 report, arXiv:2407.10671; Qwen3 report, arXiv:2505.09388; RMSNorm arXiv:1910.07467;
RoPE arXiv:2104.09864; GQA arXiv:2305.13245; SwiGLU arXiv:2002.05202). `experts` holds the mixture of experts.

Precision: activations and logits have the parameters' dtype. Four places compute in fp32 whatever that dtype is and
round once at their end: the RMS normalisation before its weight, the softmax of attention, the rotary tables, and the
router's probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name for it

from repro_core.config import ModelConfig
from repro_core.model.experts import Embedding, Linear, SparseMlp, check_routing

__all__ = [
    "Critic", "KvCache", "Policy", "ValueHead", "apply_rotary", "attention", "init_weights", "rms_norm",
    "rotary_tables",
]  # fmt: skip


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, both fp32 [batch, seq, head_dim].

    The angle of pair i at position p is p x theta^(-2i / head_dim); pair i is (i, i + head_dim / 2), so each table
    holds its head_dim / 2 columns twice. Angles are fp32: bf16 cannot tell position 257 from 256.

    Args:
        positions: int64 [batch, seq].
        head_dim: even.
        theta: base of the geometric progression of wavelengths.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    inverse_wavelengths = 1.0 / (theta**exponents)
    half = positions[..., None].float() * inverse_wavelengths
    angles = torch.cat([half, half], dim=-1)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of `x` [batch, heads, seq, head_dim] in x's dtype.

    Args:
        x: queries or keys.
        cos: [batch, seq, head_dim], already in x's dtype (rounding the table, not the product, is Qwen2's order).
        sin: as `cos`.
    """
    half = x.shape[-1] // 2
    # This product before the halves: backward meets it last, and what it meets first gives the sum of x's gradients
    # its strides. In this order they are those of transformers.
    along = x * cos[:, None]
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return along + turned * sin[:, None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension.

    Mean and quotient are fp32; the quotient is rounded to x's dtype *before* the weight multiplies it.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Grouped-query attention written out: scores in the inputs' dtype, softmax in fp32, rounded before the values.

    Args:
        query: [batch, heads, seq, head_dim].
        key: [batch, kv_heads, slots, head_dim]; kv_heads divides heads, and query head h reads key head
            h // (heads // kv_heads).
        value: as `key`.
        visible: bool [batch or 1, seq, slots]. Every query sees at least one slot, so no row is 0/0.

    Returns:
        [batch, seq, heads * head_dim].
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        # Expanded, not repeat_interleave: with a single key-value head this stays a view of stride 0, and the strides
        # choose the matmul kernel, hence bits. Without groups even a view in between would lay gradients out anew.
        key, value = (kv[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for kv in (key, value))
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    # -inf, not a large negative number: exp gives exactly 0, so what lies in a hidden slot cannot reach a bit.
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class KvCache:
    """Keys and values of a batch, for incremental decoding. Slot p of a row belongs to that row's position p.

    Rows of different lengths need no bookkeeping: a right-padded prompt leaves the keys of its padding in slots that
    no query may see yet (a query at position p sees slots 0 to p) and that decoding overwrites before one may.

    Attributes:
        keys: [layers, batch, kv_heads, capacity, head_dim]; written in place.
        values: as `keys`.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(cls, policy: Policy, batch: int, capacity: int) -> KvCache:
        """An empty cache for `batch` rows of at most `capacity` tokens, in the policy's dtype and on its device.

        It is zeroed, because a weight of exactly 0 does not hide a NaN in memory that was never written.
        """
        config, like = policy.config, policy.model.embed_tokens.weight
        shape = (config.num_hidden_layers, batch, config.num_key_value_heads, capacity, config.head_dim)
        return cls(like.new_zeros(shape), like.new_zeros(shape))

    def write(self, layer: int, positions: Tensor, key: Tensor, value: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        """Store key and value [batch, kv_heads, seq, head_dim] at `positions` [batch, seq].

        Returns:
            The first `slots` slots of the layer, [batch, kv_heads, slots, head_dim] each.
        """
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        for store, new in ((self.keys[layer], key), (self.values[layer], value)):
            store[rows, :, positions] = new.transpose(1, 2)
        return self.keys[layer, :, :, :slots], self.values[layer, :, :, :slots]


class RmsNorm(nn.Module):
    """Holds the weight of `rms_norm`, one per column."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """`rms_norm` of x [..., width]."""
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Projections around `attention`, and the norms of queries and keys where the family has them."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        width, kv_width = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj = Linear(width, config.hidden_size, bias=config.output_bias)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm = RmsNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RmsNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        """Attend from x [batch, seq, hidden] to what `where` lets it see."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        query = apply_rotary(query, where.cos, where.sin)
        key = apply_rotary(key, where.cos, where.sin)
        if where.cache is not None:
            key, value = where.cache.write(self.layer, where.positions, key, value, where.visible.shape[-1])
        mixed: Tensor = self.o_proj(attention(query, key, value, where.visible))
        return mixed


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), no biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """X [..., hidden] to the same shape."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each added to its input."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.self_attn = Attention(config, layer)
        self.mlp = SparseMlp(config) if config.has_experts else Mlp(config)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        """X [batch, seq, hidden] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), where)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, SparseMlp):
            replay = None if where.routing is None else where.routing[:, :, self.layer]
            mixed: Tensor = x + self.mlp(normed, replay, where.chosen)
            return mixed
        out: Tensor = x + self.mlp(normed)
        return out


class Decoder(nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


@dataclass(frozen=True)
class Where:
    """What all layers share about one forward pass."""

    positions: Tensor
    cos: Tensor
    sin: Tensor
    visible: Tensor
    cache: KvCache | None
    routing: Tensor | None = None
    chosen: list[Tensor] | None = None


class Policy(nn.Module):
    """A causal language model of the Qwen family.

    Weights start at zero and norms at one: construction draws no random numbers. `init_weights` or `hf.load_hf` fills
    them. With tied embeddings ``lm_head.weight`` is the same `nn.Parameter` as the embedding: `state_dict` has both
    names, `named_parameters` only ``model.embed_tokens.weight``, as in transformers.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cache: KvCache | None = None,
        routing: Tensor | None = None,
        chosen: list[Tensor] | None = None,
    ) -> Tensor:
        """Logits of the next token after each token.

        Right-padded batches need no mask beyond the causal one: padding stands after every real token of its row, so
        no real token sees it, and the logits at padding are for the caller to drop. Left padding is not supported.

        Args:
            tokens: int64 [batch, seq].
            positions: int64 [batch, seq], each at least 0; by default 0, 1, ... in every row. Without a cache they
                only turn the rotary angles (token i still sees tokens 0 to i); with one they also name the slots that
                are written, and a token at position p sees slots 0 to p.
            cache: filled in place; keys and values of earlier positions are read from it.
            routing: int64 [batch, seq, layers, num_experts_per_tok], the experts to use at each position in place of
                the router's own choice (see `experts.route`). Any valid numbers serve where the logits are dropped.
            chosen: receives the experts used, one int64 [batch, seq, num_experts_per_tok] for each layer in their
                order; nothing in a model without experts.

        Returns:
            [batch, seq, vocab_size] in the parameters' dtype. Take softmax in fp32: ``logits.float()``.

        Raises:
            ValueError: `tokens` is not int64 [batch, seq], or `routing` does not fit it and the model.
        """
        logits: Tensor = self.lm_head(self.hidden(tokens, positions, cache, routing, chosen))
        return logits

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cache: KvCache | None = None,
        routing: Tensor | None = None,
        chosen: list[Tensor] | None = None,
    ) -> Tensor:
        """What the head reads: the decoder's normalised output, [batch, seq, hidden_size]; see `forward`."""
        if tokens.dtype != torch.int64 or tokens.ndim != 2:
            raise ValueError(f"tokens must be int64 [batch, seq], not {tokens.dtype} {list(tokens.shape)}")
        if routing is not None:
            check_routing(routing, tokens, self.config)
        order = torch.arange(tokens.shape[1], device=tokens.device)
        if positions is None:
            positions = order.expand(tokens.shape)
        x: Tensor = self.model.embed_tokens(tokens)
        cos, sin = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        if cache is None:
            visible = (order <= order[:, None])[None]
        else:
            slots = torch.arange(int(positions.max()) + 1, device=tokens.device)
            visible = slots <= positions[..., None]
        where = Where(positions, cos.to(x.dtype), sin.to(x.dtype), visible, cache, routing, chosen)
        for layer in self.model.layers:
            x = layer(x, where)
        normed: Tensor = self.model.norm(x)
        return normed


def init_weights(policy: Policy, seed: int) -> None:
    """Draw all weights in place: matrices normal(0, initializer_range), norms 1, biases 0.

    The draws come from an own CPU generator, in fp32 and in the order of `named_parameters`, and are then rounded to
    the parameters' dtype: neither the global generator, nor dtype, nor device changes them. (torch's vectorised
    normal is not bit-equal between CPU instruction sets.)

    Raises:
        ValueError: `seed` is not in [0, 2^32). torch's CPU generator would silently drop the bits above.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed} must be in [0, 2^32): torch's CPU generator reads 32 bits of it")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                drawn = torch.empty(parameter.shape, dtype=torch.float32)
                parameter.copy_(drawn.normal_(0.0, policy.config.initializer_range, generator=generator))


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

"""What a training run is made of, read once and refused whole when a key is unknown.

A case hands the trainer one plain mapping (``[subject.config]``); `TrainConfig.from_mapping` is the only reader of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = ["MAX_EXPERTS", "ConfigError", "Estimator", "MegatronConfig", "ModelConfig", "SglangConfig", "TrainConfig"]

KlEstimator = Literal["k1", "k2", "k3", "low_var"]
Estimator = Literal["grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"]


MAX_EXPERTS = 2**15
"""Most experts of a layer: recorded routing holds their numbers as int16."""


class ConfigError(ValueError):
    """A configuration that cannot be trained, in one line that names the cure."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Qwen family; the names are those of its ``config.json`` unless said otherwise."""

    model_type: Literal["qwen2", "qwen3", "qwen3_moe"] = "qwen2"
    """Qwen2 has a bias on q, k and v. Qwen3 has none, and normalises queries and keys over each head instead.
    Qwen3-MoE is Qwen3 with experts in every layer."""
    vocab_size: int = 259
    """Bytes 0-255, then pad 256, bos 257, eos 258."""
    hidden_size: int = 64
    intermediate_size: int = 128
    """Width of the dense MLP. Without effect under qwen3_moe, whose layers have experts only."""
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    """Grouped-query attention: must divide `num_attention_heads`."""
    kv_channels: int | None = None
    """Width of one head where it is not hidden_size / num_attention_heads, which only Qwen3 allows. The name is
    Megatron's flag; ``config.json`` calls it head_dim."""
    attention_bias: bool | None = None
    """Qwen3: True puts a bias on q, k, v and o. None is the family's own: `qkv_bias` and `output_bias` resolve it."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 256
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    num_experts: int = 0
    """Experts in each layer; 0 without any. The four settings of experts belong to qwen3_moe alone."""
    num_experts_per_tok: int = 0
    """Experts that each token goes through (the router's top-k)."""
    moe_intermediate_size: int = 0
    """Width of one expert."""
    norm_topk_prob: bool = False
    """Scale the weights of a token's experts to the sum 1."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads if self.kv_channels is None else self.kv_channels

    @property
    def qkv_bias(self) -> bool:
        """Whether the projections to queries, keys and values have a bias."""
        return self.model_type == "qwen2" or self.output_bias

    @property
    def output_bias(self) -> bool:
        """Whether attention's output projection has a bias. In transformers Qwen2 never has one."""
        return self.model_type != "qwen2" and self.attention_bias is True

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are RMS-normalised over each head, before the rotary embedding."""
        return self.model_type != "qwen2"

    @property
    def has_experts(self) -> bool:
        """Whether every layer has a router and experts in place of the dense MLP."""
        return self.model_type == "qwen3_moe"

    def rules(self) -> list[tuple[bool, str]]:
        """What must hold for such a model to exist, each with the message for when it does not."""
        if beyond := _beyond(self):
            return beyond
        heads, kv_heads, family = self.num_attention_heads, self.num_key_value_heads, self.model_type
        experts = (self.num_experts, self.num_experts_per_tok, self.moe_intermediate_size)
        return [
            (
                self.kv_channels is not None or self.hidden_size % (2 * heads) == 0,
                f"hidden_size {self.hidden_size} must be an even multiple of num_attention_heads {heads}",
            ),
            (
                self.kv_channels is None or (self.kv_channels > 0 and self.kv_channels % 2 == 0),
                f"kv_channels {self.kv_channels} must be even and greater than 0",
            ),
            (
                family != "qwen2" or self.head_dim * heads == self.hidden_size,
                f"kv_channels {self.kv_channels} must be hidden_size / num_attention_heads under qwen2: leave it out",
            ),
            (
                heads % kv_heads == 0,
                f"num_key_value_heads {kv_heads} must divide num_attention_heads {heads}",
            ),
            (
                self.has_experts or self.intermediate_size >= 1,
                f"intermediate_size {self.intermediate_size} must be at least 1",
            ),
            (
                family != "qwen2" or self.attention_bias is not False,
                "attention_bias cannot be false under qwen2, which always has QKV bias: leave it out, or use qwen3",
            ),
            (
                self.has_experts or (not any(experts) and not self.norm_topk_prob),
                "num_experts, num_experts_per_tok, moe_intermediate_size and norm_topk_prob need model_type qwen3_moe, "
                f"not {family}",
            ),
            (
                not self.has_experts or (1 <= experts[1] <= experts[0] <= MAX_EXPERTS and experts[2] >= 1),
                f"qwen3_moe needs num_experts of 1 to {MAX_EXPERTS}, num_experts_per_tok of 1 to num_experts and "
                f"moe_intermediate_size of at least 1, not {experts[0]}, {experts[1]} and {experts[2]}",
            ),
        ]


@dataclass(frozen=True)
class MegatronConfig:
    """How ``policy = "megatron"`` lays the model out over processes. The names are Megatron's own flags'.

    What cannot work where it runs is refused by name: see `repro_core.engines.megatron.layout`.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    recompute_granularity: Literal["full", "selective"] | None = None
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    attention_backend: Literal["local", "auto", "fused", "flash", "unfused"] = "local"
    """The kernels of attention: ours ("local"), or one of Transformer Engine's."""
    qkv_format: Literal["bshd", "thd"] = "bshd"
    """Samples of a micro-batch padded side by side, or packed one after the other (Transformer Engine alone)."""
    deterministic_mode: bool = True
    """False also turns torch's deterministic algorithms off, which Transformer Engine would follow."""
    moe_grouped_gemm: bool = False
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "alltoall"  # noqa: S105 - no password
    apply_rope_fusion: bool = False
    overlap_p2p_comm: bool = False
    batch_p2p_comm: bool = True
    pad_to_multiple: int = 16
    """Sequences are padded to a multiple of it in every layout, so that layouts multiply matrices of one shape."""


@dataclass(frozen=True)
class SglangConfig:
    """How ``rollout_engine = "sglang"`` samples. The names are SGLang's own server arguments unless said otherwise."""

    url: str | None = None
    """Ours: a running server or router, such as ``http://127.0.0.1:30000``; None starts an engine in this process."""
    sync: Literal["tensor", "disk"] = "tensor"
    """Ours: how weights are brought to it. "disk" needs a folder that both sides see."""
    folder: str | None = None
    """Ours: a folder that this process and the engine both see, for sync = "disk" and for reading weights back; None
    is a temporary one of this machine."""
    timeout: float = 600.0
    """Ours: seconds that starting it, or one request, may take."""
    attention_backend: str | None = None
    """None is ``torch_native`` on a CPU and ``triton`` on a GPU."""
    tp_size: int = 1
    mem_fraction_static: float = 0.3
    max_total_tokens: int | None = None
    enable_deterministic_inference: bool = True
    """Without it seeds are ignored, and on a GPU a batch changes its neighbours' numbers."""
    args: dict[str, Any] = field(default_factory=dict)
    """Ours: more server arguments by name, for an engine that is started here."""


@dataclass(frozen=True)
class TrainConfig:
    """One GRPO run. Flag names follow slime, Miles and Relax where those have one."""

    model: ModelConfig = field(default_factory=ModelConfig)
    hf_checkpoint: str | None = None
    """An HF-style directory to start from; without one the weights are drawn from `seed`."""
    policy: Literal["torch", "megatron"] = "torch"
    """What computes: plain torch in one process, or megatron-core in as many as its layout needs."""
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    seed: int = 1234
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Compute dtype. bf16 keeps fp32 main weights and accumulates gradients in fp32."""
    threads: int = 1
    """Intra-op threads: their number decides the reduction order, hence bits."""

    rollout_batch_size: int = 8
    """Prompts in one rollout."""
    n_samples_per_prompt: int = 8
    """Responses to each prompt: the GRPO group."""
    num_steps_per_rollout: int = 1
    """Optimizer updates made from one rollout."""
    global_batch_size: int = 64
    """Samples in one update. rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout."""
    max_response_len: int = 4
    """Most tokens sampled for one response, the end-of-sequence token included."""
    max_operand: int = 4
    """Largest number in the arithmetic task."""
    rollout_engine: Literal["policy", "sglang"] = "policy"
    """What samples: the trained policy itself, or SGLang, to which its weights are brought."""
    sglang: SglangConfig = field(default_factory=SglangConfig)
    temperature: float = 1.0

    max_tokens_per_micro_batch: int = 512
    """Token budget of a micro-batch, padding included."""
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 leaves gradients alone."""

    advantage_estimator: Estimator = "grpo"
    """How rewards become advantages, and which loss goes with them: see `advantages` and `loss`."""
    gamma: float = 1.0
    """Discount of rewards and, under reinforce_plus_plus and ppo, of what follows a token."""
    lambd: float = 1.0
    """GAE's lambda, under ppo."""
    critic_lr: float = 1e-3
    """Under ppo: the critic's learning rate; its other settings are the policy's."""
    value_clip: float = 0.2
    """Under ppo: how far a value may move from the old one before its loss is clipped."""
    num_critic_only_steps: int = 0
    """Under ppo: updates in which the critic alone is trained."""
    use_rollout_routing_replay: bool = False
    """Experts are those that the rollout engine chose, from the rollout's ``routed_experts`` (R3)."""
    grpo_std_normalization: bool = True
    """Divide a group's centred rewards by their standard deviation (GRPO); False is Dr. GRPO."""
    whiten_advantages: bool = False
    """Whiten advantages over all unmasked tokens of the rollout."""
    eps_clip: float = 0.2
    """Lower clip range of the ratio."""
    eps_clip_high: float = 0.28
    """Upper clip range of the ratio (DAPO's clip-higher)."""
    eps_clip_c: float | None = None
    """Dual-clip constant (> 1), or None for plain PPO clipping."""
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    """KL taken off the reward."""
    kl_loss_coef: float = 0.01
    """KL added to the loss. Exclusive with `kl_coef`."""
    kl_estimator: KlEstimator = "low_var"
    loss_aggregation: Literal["token", "sample"] = "sample"
    """Mean over all tokens of the update, or over samples of each sample's token mean."""
    use_tis: bool = False
    """Truncated importance sampling between the rollout engine's and the trainer's log-probs."""
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Read a plain mapping (JSON or TOML types).

        Raises:
            ConfigError: an unknown key, a value of the wrong type, or numbers that do not fit together.
        """
        values = dict(values)
        tables = {
            "model": _read(ModelConfig, values.pop("model", {}), "model."),
            "megatron": _read(MegatronConfig, values.pop("megatron", {}), "megatron."),
            "sglang": _read(SglangConfig, values.pop("sglang", {}), "sglang."),
        }
        config: TrainConfig = _read(cls, values, "", **tables)
        config.validate()
        return config

    def to_mapping(self) -> dict[str, Any]:
        """The inverse of `from_mapping`, every default written out."""
        return asdict(self)

    def validate(self) -> None:
        """Refuse numbers that do not fit together.

        Raises:
            ConfigError: with both sides of the broken rule.
        """
        samples, trained = (
            self.rollout_batch_size * self.n_samples_per_prompt,
            self.global_batch_size * self.num_steps_per_rollout,
        )
        rules = [
            *_beyond(self),
            (
                samples == trained,
                f"rollout_batch_size x n_samples_per_prompt = {self.rollout_batch_size} x {self.n_samples_per_prompt}"
                + f" = {samples} must equal global_batch_size x num_steps_per_rollout = {self.global_batch_size} x "
                + f"{self.num_steps_per_rollout} = {trained}",
            ),
            *self.model.rules(),
            (not (self.kl_coef and self.kl_loss_coef), "kl_coef and kl_loss_coef exclude each other: set one to 0"),
            (self.eps_clip_c is None or self.eps_clip_c > 1.0, "eps_clip_c (dual clip) must be greater than 1"),
            (
                self.num_critic_only_steps == 0 or self.advantage_estimator == "ppo",
                f"num_critic_only_steps {self.num_critic_only_steps} needs a critic: it must be 0, or "
                + f"advantage_estimator must be 'ppo', not {self.advantage_estimator!r}",
            ),
            (
                self.eps_clip_c is None or self.advantage_estimator != "cispo",
                f"eps_clip_c {self.eps_clip_c} (dual clip) has no meaning under advantage_estimator 'cispo', whose "
                + "weights are clipped on both sides: leave one of them out",
            ),
        ]
        for holds, message in rules:
            if not holds:
                raise ConfigError(message)


_RANGES: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        (
            *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("max_position_embeddings", "rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout"),
            *("global_batch_size", "max_response_len"),
        ),
    ),
    ("in [1, 1024]", lambda value: 1 <= value <= 1024, ("threads",)),  # with many more torch ends in a fault
    (
        "at least 0",
        lambda value: value >= 0,
        (
            *("initializer_range", "max_operand", "lr", "critic_lr", "adam_eps", "weight_decay", "clip_grad"),
            *("eps_clip", "eps_clip_high", "tis_clip", "tis_clip_low", "num_critic_only_steps"),
            *("max_tokens_per_micro_batch", "intermediate_size"),
        ),
    ),
    ("greater than 0", lambda value: value > 0, ("rms_norm_eps", "rope_theta", "temperature", "value_clip")),
    ("in [0, 1]", lambda value: 0 <= value <= 1, ("gamma", "lambd")),
    ("in [0, 1)", lambda value: all(0 <= beta < 1 for beta in value), ("betas",)),
)
"""What the numbers of `TrainConfig` and `ModelConfig` must be, beside finite."""
_UNBOUNDED = ("clip_grad", "eps_clip_high", "eps_clip_c", "tis_clip", "value_clip")
"""Upper bounds that may be infinite: nothing is clipped."""


def _beyond(config: ModelConfig | TrainConfig) -> list[tuple[bool, str]]:
    """A broken rule for each number that is not finite or not in its range."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    broken = [
        f"{name} {value} must be finite"
        for name, value in values.items()
        for number in (value if isinstance(value, tuple) else (value,))
        if isinstance(number, float) and not (math.isfinite(number) or (name in _UNBOUNDED and number > 0))
    ]
    broken += [
        f"{name} {values[name]} must be {what}"
        for what, holds, names in _RANGES
        for name in names
        if name in values and not holds(values[name])
    ]
    return [(False, message) for message in broken]


def _read(cls: type[Any], values: Mapping[str, Any], prefix: str, **ready: Any) -> Any:
    hints = get_type_hints(cls)
    known = {f.name for f in fields(cls)} - set(ready)
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key {prefix}{key}; known: {', '.join(sorted(known))}")
    return cls(**ready, **{key: _coerce(hints[key], value, prefix + key) for key, value in values.items()})


def _coerce(hint: Any, value: Any, name: str) -> Any:
    """A TOML or JSON value as the annotated type; integers serve as floats, nothing else is converted."""
    if get_origin(hint) in (UnionType, Union):
        if value is None and NoneType in get_args(hint):
            return None
        (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, get_args(hint)))}, not {value!r}")
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        if isinstance(value, (list, tuple)) and len(value) == len(kinds):
            return tuple(_coerce(kind, v, name) for kind, v in zip(kinds, value, strict=True))
        raise ConfigError(f"{name} must be a list of {len(kinds)} numbers, not {value!r}")
    if get_origin(hint) is dict:
        if isinstance(value, Mapping):
            return dict(value)
        raise ConfigError(f"{name} must be a table, not {value!r}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is hint:
        return value
    raise ConfigError(f"{name} must be {getattr(hint, '__name__', hint)}, not {value!r}")

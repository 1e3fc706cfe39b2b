"""What a training run is made of, read once and refused whole when a key is unknown.

A case hands the trainer one plain mapping (``[subject.config]``); `TrainConfig.from_mapping` is the only reader of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

__all__ = ["ConfigError", "ModelConfig", "TrainConfig"]

KlEstimator = Literal["k1", "k2", "k3", "low_var"]


class ConfigError(ValueError):
    """A configuration that cannot be trained, in one line that names the cure."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of Qwen2's architecture; the names are those of its ``config.json``."""

    vocab_size: int = 259
    """Bytes 0-255, then pad 256, bos 257, eos 258."""
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    """Grouped-query attention: must divide `num_attention_heads`."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 256
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True)
class TrainConfig:
    """One GRPO run. Flag names follow slime, Miles and Relax where those have one."""

    model: ModelConfig = field(default_factory=ModelConfig)
    hf_checkpoint: str | None = None
    """An HF-style directory to start from; without one the weights are drawn from `seed`."""
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
    temperature: float = 1.0

    max_tokens_per_micro_batch: int = 512
    """Token budget of a micro-batch, padding included."""
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 leaves gradients alone."""

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
        model = _read(ModelConfig, values.pop("model", {}), "model.")
        config: TrainConfig = _read(cls, values, "", model=model)
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
        m = self.model
        samples, trained = (
            self.rollout_batch_size * self.n_samples_per_prompt,
            self.global_batch_size * self.num_steps_per_rollout,
        )
        rules = [
            (
                samples == trained,
                f"rollout_batch_size x n_samples_per_prompt = {self.rollout_batch_size} x {self.n_samples_per_prompt}"
                + f" = {samples} must equal global_batch_size x num_steps_per_rollout = {self.global_batch_size} x "
                + f"{self.num_steps_per_rollout} = {trained}",
            ),
            (min(samples, trained) > 0, "batch sizes, samples per prompt and steps per rollout must be at least 1"),
            (
                m.num_attention_heads > 0 and m.hidden_size % m.num_attention_heads == 0 and m.head_dim % 2 == 0,
                f"hidden_size {m.hidden_size} must be an even multiple of num_attention_heads {m.num_attention_heads}",
            ),
            (
                m.num_key_value_heads > 0 and m.num_attention_heads % m.num_key_value_heads == 0,
                f"num_key_value_heads {m.num_key_value_heads} must divide num_attention_heads {m.num_attention_heads}",
            ),
            (not (self.kl_coef and self.kl_loss_coef), "kl_coef and kl_loss_coef exclude each other: set one to 0"),
            (self.eps_clip_c is None or self.eps_clip_c > 1.0, "eps_clip_c (dual clip) must be greater than 1"),
            (self.temperature > 0.0, "temperature must be greater than 0"),
            (self.threads >= 1, "threads must be at least 1"),
        ]
        for holds, message in rules:
            if not holds:
                raise ConfigError(message)


def _read(cls: type[Any], values: Mapping[str, Any], prefix: str, **ready: Any) -> Any:
    hints = get_type_hints(cls)
    known = {f.name for f in fields(cls)} - set(ready)
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key {prefix}{key}; known: {', '.join(sorted(known))}")
    return cls(**ready, **{key: _coerce(hints[key], value, prefix + key) for key, value in values.items()})


def _coerce(hint: Any, value: Any, name: str) -> Any:
    """A TOML or JSON value as the annotated type; integers serve as floats, nothing else is converted."""
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, get_args(hint)))}, not {value!r}")
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        if isinstance(value, (list, tuple)) and len(value) == len(kinds):
            return tuple(_coerce(kind, v, name) for kind, v in zip(kinds, value, strict=True))
        raise ConfigError(f"{name} must be a list of {len(kinds)} numbers, not {value!r}")
    kinds = tuple(k for k in (get_args(hint) or (hint,)))
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) in kinds or (value is None and type(None) in kinds):
        return value
    raise ConfigError(f"{name} must be {getattr(hint, '__name__', hint)}, not {value!r}")

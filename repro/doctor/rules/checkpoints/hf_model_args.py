"""The model that a launch describes against the ``config.json`` of its ``--hf-checkpoint``."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfConfig, Launch
from repro.doctor.facts.checkpoints.launches import flag_of, flagged
from repro.doctor.facts.checkpoints.names import expert_count, text_values
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_PAIRS = (
    ("--hidden-size", "hidden_size"), ("--num-attention-heads", "num_attention_heads"),
    ("--num-layers", "num_hidden_layers"), ("--ffn-hidden-size", "intermediate_size"),
    ("--moe-ffn-hidden-size", "moe_intermediate_size"), ("--norm-epsilon", "rms_norm_eps"),
    ("--num-query-groups", "num_key_value_heads"), ("--rotary-base", "rope_theta"),
)  # fmt: skip
_UNCHECKED = frozenset({"--num-query-groups"})
"""The trainers do not compare these; latent attention has another number of them."""


def _check(launch: Launch, config: HfConfig) -> Iterator[Found]:
    if launch.value("--train-backend") == "fsdp":
        return
    folder = config.path.parent
    sure = flag_of(launch, folder, ("--hf-checkpoint",)) is not None or not flagged(launch, ("--hf-checkpoint",))
    values = text_values(config.values)
    rope = values.get("rope_parameters")
    merged = {
        **values,
        **({"rope_theta": rope["rope_theta"]} if isinstance(rope, dict) and "rope_theta" in rope else {}),
    }
    for flag, key in _PAIRS:
        asked, held = launch.number(flag) if launch.has(flag) else None, merged.get(key)
        if asked is None or type(held) not in (int, float) or asked == held:
            continue
        if flag == "--ffn-hidden-size" and expert_count(values):
            continue  # only checked where some layers are dense
        place = launch.where(flag)
        grave = sure and flag not in _UNCHECKED
        yield Found(
            f"{flag} {asked:g}, and config.json says {key} {held:g}", Where(place.path, place.line, flag, f"{asked:g}"),
            None if grave else "warning", None if grave else "possible", f"give {flag} {held:g}, as {config.path} says",
        )  # fmt: skip


RULE = Rule(
    "hf-model-args", "Sizes of the model that config.json of --hf-checkpoint contradicts", (Launch, HfConfig),
    "error", "certain",
    "the trainer compares them when it starts, and raises; what it does not compare generates garbled text",
    "source the file of model arguments (scripts/models/) that belongs to --hf-checkpoint",
    ("slime guide: Debugging", "THUDM/slime@624b824a8 slime/backends/megatron_utils/arguments.py:97"), _check,
)  # fmt: skip

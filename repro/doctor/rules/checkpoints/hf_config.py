"""What the config of a Hugging Face checkpoint says, against its tensors and the launch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from repro.doctor.artefacts.kinds import HfCheckpoint, HfConfig, Launch, Tokenizer
from repro.doctor.facts.launches import flag_of, flagged
from repro.doctor.facts.sources import SLIME
from repro.doctor.facts.tensor_names import (
    TABLES,
    expert_count,
    first_number,
    kind_of,
    layer_count,
    main_stack,
    number,
    place,
    text_values,
)
from repro_golden.base.checks import Found, Severity, Where, rule


def _contradictions(values: Mapping[str, Any]) -> Iterator[tuple[str, str, Severity | None]]:
    heads, groups = number(values.get("num_attention_heads")), number(values.get("num_key_value_heads"))
    hidden, layers = number(values.get("hidden_size")), layer_count(values)
    if heads and groups and heads % groups:
        yield f"{heads} attention heads cannot share {groups} key-value heads", "num_key_value_heads", None
    apart = any(values.get(key) for key in ("head_dim", "kv_lora_rank", "qk_rope_head_dim", "linear_num_key_heads"))
    if hidden and heads and hidden % heads and not apart:
        yield f"hidden_size {hidden} is not divisible by {heads} heads, and there is no head_dim", "hidden_size", None
    experts = expert_count(values)
    chosen = first_number(values, "num_experts_per_tok", "moe_topk", "top_k_experts")
    if experts and chosen and chosen > experts:
        yield f"{chosen} experts for each token, and there are {experts}", "num_experts_per_tok", None
    types = values.get("layer_types")
    if isinstance(types, list) and layers and len(types) < layers:
        yield f"layer_types has {len(types)} entries for {layers} layers", "layer_types", None
    vocab_size = number(values.get("vocab_size"))
    eos = values.get("eos_token_id")
    for token in eos if isinstance(eos, list) else [eos]:
        if vocab_size and type(token) is int and token >= vocab_size:
            yield (
                f"eos_token_id {token} is beyond vocab_size {vocab_size}: generation never ends on it",
                "eos_token_id",
                "warning",
            )


@rule(
    title="A config.json that contradicts itself",
    severity="error",
    certainty="certain",
    why="the model cannot be built, or is another one than the weights are of",
    fix="take config.json from the model that was converted",
    sources=("slime guide: Debugging",),
)
def _hf_config(config: HfConfig) -> Iterator[Found]:
    values = text_values(config.values)
    if not isinstance(config.values.get("model_type"), str):
        message = "there is no model_type: AutoConfig cannot tell which model it is"
        yield Found(message, Where(str(config.path), item="model_type"), "warning", "likely")
    for message, key, severity in _contradictions(values):
        yield Found(message, Where(str(config.path), item=key, value=str(values.get(key))[:80]), severity)


_PLAIN = frozenset({"BF16", "F16", "F32"})
"""Dtypes of weights that are not packed into another shape."""


@rule(
    title="Embedding, head and routers in other sizes than the config says",
    severity="error",
    certainty="certain",
    why="the weights are not those of this config: loading fails on the shape",
    fix="take config.json from the model that was converted, or convert with the arguments of this model",
    sources=("slime guide: Debugging",),
)
def _hf_config_shapes(checkpoint: HfCheckpoint) -> Iterator[Found]:
    if checkpoint.config is None:
        return
    values = text_values(checkpoint.config.values)
    hidden = number(values.get("hidden_size"))
    experts = first_number(values, "n_routed_experts", "num_experts", "num_local_experts")
    stack = main_stack(checkpoint.tensors)
    reported: set[str] = set()
    for name in sorted(checkpoint.tensors):
        info, where = checkpoint.tensors[name], place(name)
        inside = where is not None and stack is not None and where.stack == stack.name
        table = name in TABLES
        if len(info.shape) != 2 or info.dtype not in _PLAIN or kind_of(name) in reported:
            continue
        if table and hidden and info.shape[1] != hidden:
            wrong = f"hidden_size {hidden}"
        elif inside and experts and name.endswith(".mlp.gate.weight") and info.shape[0] != experts:
            wrong = f"{experts} experts"
        elif inside and hidden and name.endswith(".mlp.gate.weight") and info.shape[1] != hidden:
            wrong = f"hidden_size {hidden}"
        else:
            continue
        reported.add(kind_of(name))
        shape = " x ".join(map(str, info.shape))
        where_ = Where(str(checkpoint.path / info.file), item=name, value=shape)
        yield Found(f"{name} is {shape}, and the config says {wrong}", where_)


_PAIRS = (
    ("--hidden-size", "hidden_size"), ("--num-attention-heads", "num_attention_heads"),
    ("--num-layers", "num_hidden_layers"), ("--ffn-hidden-size", "intermediate_size"),
    ("--moe-ffn-hidden-size", "moe_intermediate_size"), ("--norm-epsilon", "rms_norm_eps"),
    ("--num-query-groups", "num_key_value_heads"), ("--rotary-base", "rope_theta"),
)  # fmt: skip
_UNCHECKED = frozenset({"--num-query-groups"})
"""The trainers do not compare these; latent attention has another number of them."""


@rule(
    title="Sizes of the model that config.json of --hf-checkpoint contradicts",
    severity="error",
    certainty="certain",
    why="the trainer compares them when it starts, and raises; what it does not compare generates garbled text",
    fix="source the file of model arguments (scripts/models/) that belongs to --hf-checkpoint",
    sources=("slime guide: Debugging", f"{SLIME} slime/backends/megatron_utils/arguments.py:97"),
)
def _hf_model_args(launch: Launch, config: HfConfig) -> Iterator[Found]:
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


@rule(
    title="Rows of embedding or head that vocab_size or the tokenizer contradict",
    severity="error",
    certainty="certain",
    why="loading fails on the shape, or a token beyond the last row is an illegal memory access on the GPU",
    fix="cut or pad the embedding to vocab_size of the config when converting (Megatron pads it for tensor "
    "parallelism)",
    sources=("slime guide: Debugging",),
)
def _hf_vocab(checkpoint: HfCheckpoint, tokenizer: Tokenizer | None) -> Iterator[Found]:
    values = text_values(checkpoint.config.values) if checkpoint.config else {}
    vocab_size = number(values.get("vocab_size"))
    for name in sorted(checkpoint.tensors):
        info = checkpoint.tensors[name]
        if name not in TABLES or len(info.shape) != 2:
            continue
        rows = info.shape[0]
        where = Where(str(checkpoint.path / info.file), item=name, value=f"{rows} rows")
        if vocab_size and rows < vocab_size:
            yield Found(f"{name} has {rows} rows, and the config says vocab_size {vocab_size}", where)
        elif vocab_size and rows > vocab_size:
            yield Found(
                f"{name} has {rows} rows, more than vocab_size {vocab_size} of the config", where, "warning", "likely"
            )
        if tokenizer is not None and tokenizer.size and rows < tokenizer.size and name.endswith("embed_tokens.weight"):
            text = f"{name} has {rows} rows, and {tokenizer.path} has token ids up to {tokenizer.size - 1}"
            fix = "resize the embedding, or take the tokenizer that belongs to the model"
            yield Found(text, where, "warning", "possible", fix)


_BASE = re.compile(r"(?:^|[-_.])(?:base|pt|pretrain(?:ed)?)(?=$|[-_.])", re.IGNORECASE)
_OVERRIDES = ("--chat-template-path", "--sglang-chat-template")


@rule(
    title="--apply-chat-template with a base model, or a tokenizer without a template",
    severity="note",
    certainty="possible",
    why="a base model that never saw the template's tokens answers it with garbled text or without an end",
    fix="take the instruct version of the model, or drop --apply-chat-template and give prompts as plain text",
    sources=("Miles guide: Debugging", "Relax guide: Debugging", "slime guide: Debugging"),
)
def _template_without_instruct(launch: Launch, tokenizer: Tokenizer | None) -> Iterator[Found]:
    if not launch.has("--apply-chat-template") or launch.has(*_OVERRIDES):
        return
    where = launch.where("--apply-chat-template")
    if tokenizer is not None and tokenizer.template is None:
        text = f"--apply-chat-template, and the tokenizer of {tokenizer.path} has no chat template: transformers raises"
        yield Found(text, Where(where.path, where.line, str(tokenizer.path), "no template"), "error", "certain")
        return
    model = launch.value("--hf-checkpoint") or ""
    name = model.rstrip("/").rpartition("/")[2]
    if _BASE.search(name):
        text = f"--apply-chat-template with {name}, by its name a base model that was not trained on a template"
        place = launch.where("--hf-checkpoint")
        yield Found(text, Where(place.path, place.line, "--hf-checkpoint", model))

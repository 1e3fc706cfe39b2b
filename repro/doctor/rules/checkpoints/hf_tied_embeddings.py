"""``tie_word_embeddings`` against the head that the weights have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from repro.doctor.artefacts.kinds import HfCheckpoint
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_KEY = "tie_word_embeddings"


def _check(checkpoint: HfCheckpoint) -> Iterator[Found]:
    if checkpoint.config is None:
        return
    tied = _tied(checkpoint.config.values)
    names = {*checkpoint.tensors, *(checkpoint.index or {})}
    head, embedding = _ending(names, "lm_head.weight"), _ending(names, "embed_tokens.weight")
    if tied is None or embedding is None:
        return
    where = Where(str(checkpoint.config.path), item=_KEY, value=str(tied).lower())
    if tied and head in checkpoint.tensors and embedding in checkpoint.tensors:
        assert head is not None
        alike = checkpoint.tensors[head][1:] == checkpoint.tensors[embedding][1:]
        if alike and checkpoint.scan(head).digest != checkpoint.scan(embedding).digest:
            said = f"{head} differs from {embedding}, and the config ties them: every loader drops {head}"
            cure = f"set {_KEY} to false (and --untie-embeddings-and-output-weights), or convert the tied model again"
            yield Found(said, where, None, "likely", cure)
    elif not tied and head is None and _generates(checkpoint.config.values):
        cure = f"set {_KEY} to true if the model ties them, or convert the output layer again"
        yield Found(f"there is no lm_head.weight, and the config does not tie it to {embedding}", where, cure=cure)


def _tied(values: Mapping[str, Any]) -> bool | None:
    """What the config says; None where it does not, or says both."""
    inner = values.get("text_config")
    said = {value for one in (values, inner) if isinstance(one, dict) and type(value := one.get(_KEY)) is bool}
    return said.pop() if len(said) == 1 else None


def _generates(values: Mapping[str, Any]) -> bool:
    names = values.get("architectures")
    return isinstance(names, list) and any(
        isinstance(name, str) and name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"))
        for name in names
    )


def _ending(names: set[str], end: str) -> str | None:
    return min(
        (name for name in names if name == end or name.endswith(f".{end}")), key=lambda n: (len(n), n), default=None
    )


RULE = Rule(
    "hf-tied-embeddings", "tie_word_embeddings that the lm_head contradicts", (HfCheckpoint,), "error", "certain",
    "the output layer is another than the one that was trained, or one that nobody trained",
    "make tie_word_embeddings, lm_head.weight and --untie-embeddings-and-output-weights say the same",
    ("slime guide: Debugging", "THUDM/slime@624b824a8 slime/backends/megatron_utils/arguments.py:125"), _check,
)  # fmt: skip

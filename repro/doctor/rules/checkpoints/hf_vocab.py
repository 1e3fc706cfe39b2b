"""Rows of the embedding against the vocabularies of config and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfCheckpoint, Tokenizer
from repro.doctor.facts.checkpoints.names import TABLES, number, text_values
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(checkpoint: HfCheckpoint, tokenizer: Tokenizer | None) -> Iterator[Found]:
    values = text_values(checkpoint.config.values) if checkpoint.config else {}
    said = number(values.get("vocab_size"))
    for name in sorted(checkpoint.tensors):
        info = checkpoint.tensors[name]
        if name not in TABLES or len(info.shape) != 2:
            continue
        rows = info.shape[0]
        where = Where(str(checkpoint.path / info.file), item=name, value=f"{rows} rows")
        if said and rows < said:
            yield Found(f"{name} has {rows} rows, and the config says vocab_size {said}", where)
        elif said and rows > said:
            yield Found(
                f"{name} has {rows} rows, more than vocab_size {said} of the config", where, "warning", "likely"
            )
        if tokenizer is not None and tokenizer.size and rows < tokenizer.size and name.endswith("embed_tokens.weight"):
            text = f"{name} has {rows} rows, and {tokenizer.path} has token ids up to {tokenizer.size - 1}"
            cure = "resize the embedding, or take the tokenizer that belongs to the model"
            yield Found(text, where, "warning", "possible", cure)


RULE = Rule(
    "hf-vocab", "Rows of embedding or head that vocab_size or the tokenizer contradict", (HfCheckpoint,), "error",
    "certain", "loading fails on the shape, or a token beyond the last row is an illegal memory access on the GPU",
    "cut or pad the embedding to vocab_size of the config when converting (Megatron pads it for tensor parallelism)",
    ("slime guide: Debugging",), _check, uses=(Tokenizer,),
)  # fmt: skip

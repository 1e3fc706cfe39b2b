"""Layers that the config promises and no tensor belongs to."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfCheckpoint
from repro.doctor.facts.checkpoints.names import layer_count, main_stack, number, ranges, text_values
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_AHEAD = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""How many layers behind the others predict further tokens."""


def _check(checkpoint: HfCheckpoint) -> Iterator[Found]:
    if checkpoint.config is None or not (checkpoint.tensors or checkpoint.index):
        return
    values = checkpoint.config.values
    count = layer_count(values)
    if count is None or values.get("is_encoder_decoder") is True or count > 10_000:
        return
    names = {*checkpoint.tensors, *(checkpoint.index or {})}  # what a missing shard holds is another rule's
    stack = main_stack(names)
    where = Where(str(checkpoint.config.path), item="num_hidden_layers", value=str(count))
    if stack is None:
        if any(not name.startswith(("lora", "base_model.")) for name in names):
            yield Found(f"the config says {count} layers, and no tensor belongs to one", where, "warning", "likely")
        return
    missing = set(range(count)) - set(stack.layers)
    if missing:
        subject, has = ("layers", "have") if len(missing) > 1 else ("layer", "has")
        yield Found(f"{subject} {ranges(missing)} of {count} {has} no tensor in {stack.name}", where)
    draft = next((n for key in _AHEAD if (n := number(text_values(values).get(key)))), 0)
    beyond = {layer for layer in stack.layers if layer >= count + draft}
    if beyond:
        said = (
            f"{stack.name} has layer{'s' if len(beyond) > 1 else ''} {ranges(beyond)}, and the config says {count}"
            + (f" and {draft} to predict ahead" if draft else "")
        )
        yield Found(said, where, "warning", "likely", "give the config the number of layers that the weights have")


RULE = Rule(
    "hf-layer-missing", "Layers of the config without any tensor", (HfCheckpoint,), "error", "certain",
    "loading fails, or the layer runs on what it was initialised with and the text is garbled",
    "convert the checkpoint again with all pipeline stages, and look at the layer numbers of its second stage",
    ("slime guide: Debugging",), _check,
)  # fmt: skip

"""The shapes of the weights against the config beside them."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfCheckpoint
from repro.doctor.facts.checkpoints.names import TABLES, kind_of, main_stack, number, place, text_values
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_PLAIN = frozenset({"BF16", "F16", "F32"})
"""Dtypes of weights that are not packed into another shape."""


def _check(checkpoint: HfCheckpoint) -> Iterator[Found]:
    if checkpoint.config is None:
        return
    values = text_values(checkpoint.config.values)
    hidden = number(values.get("hidden_size"))
    experts = next(
        (n for key in ("n_routed_experts", "num_experts", "num_local_experts") if (n := number(values.get(key)))), None
    )
    stack = main_stack(checkpoint.tensors)
    said: set[str] = set()
    for name in sorted(checkpoint.tensors):
        info, where = checkpoint.tensors[name], place(name)
        inside = where is not None and stack is not None and where.stack == stack.name
        table = name in TABLES
        if len(info.shape) != 2 or info.dtype not in _PLAIN or kind_of(name) in said:
            continue
        if table and hidden and info.shape[1] != hidden:
            wrong = f"hidden_size {hidden}"
        elif inside and experts and name.endswith(".mlp.gate.weight") and info.shape[0] != experts:
            wrong = f"{experts} experts"
        elif inside and hidden and name.endswith(".mlp.gate.weight") and info.shape[1] != hidden:
            wrong = f"hidden_size {hidden}"
        else:
            continue
        said.add(kind_of(name))
        shape = " x ".join(map(str, info.shape))
        where_ = Where(str(checkpoint.path / info.file), item=name, value=shape)
        yield Found(f"{name} is {shape}, and the config says {wrong}", where_)


RULE = Rule(
    "hf-config-shapes", "Embedding, head and routers in other sizes than the config says", (HfCheckpoint,), "error",
    "certain", "the weights are not those of this config: loading fails on the shape",
    "take config.json from the model that was converted, or convert with the arguments of this model",
    ("slime guide: Debugging",), _check,
)  # fmt: skip

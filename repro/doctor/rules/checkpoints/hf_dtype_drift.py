"""One kind of tensor in several dtypes, and weights in another dtype than the config says."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfCheckpoint
from repro.doctor.artefacts.safetensors_header import BITS
from repro.doctor.facts.checkpoints.names import kind_of, text_values
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_NAMES = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32", "float64": "F64"}


def _check(checkpoint: HfCheckpoint) -> Iterator[Found]:
    kinds: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(checkpoint.tensors):
        kinds[kind_of(name)][checkpoint.tensors[name].dtype].append(name)
    values = checkpoint.config.values if checkpoint.config else {}
    quantised = isinstance(text_values(values).get("quantization_config"), dict)
    for kind, dtypes in sorted(kinds.items()):
        if len(dtypes) < 2 or (quantised and any(BITS.get(dtype, 8) <= 8 for dtype in dtypes)):
            continue  # some layers of a quantised model are kept in their own dtype on purpose
        common = max(dtypes, key=lambda dtype: (len(dtypes[dtype]), dtype))
        for dtype, names in sorted(dtypes.items()):
            if dtype != common:
                where = Where(str(checkpoint.path / checkpoint.tensors[names[0]].file), item=names[0], value=dtype)
                yield Found(f"{kind}: {len(names)} in {dtype}, {len(dtypes[common])} peers in {common}", where)
    if not quantised and checkpoint.config is not None:
        yield from _config(checkpoint)


def _config(checkpoint: HfCheckpoint) -> Iterator[Found]:
    assert checkpoint.config is not None
    values = text_values(checkpoint.config.values)
    key = "torch_dtype" if "torch_dtype" in values else "dtype"
    said = values.get(key)
    named = _NAMES.get(said.removeprefix("torch.")) if isinstance(said, str) else None
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype in _NAMES.values():
            sizes[info.dtype] += math.prod(info.shape)
    if named is None or not sizes:
        return
    most = max(sizes, key=lambda dtype: (sizes[dtype], dtype))
    if most != named:
        cure = f"write {key} as the weights are, or convert the weights to {said}"
        found = f"the config says {key} {said}, and most weights are {most}"
        yield Found(found, Where(str(checkpoint.config.path), item=key, value=str(said)), cure=cure)


RULE = Rule(
    "hf-dtype-drift", "Tensors of one kind in several dtypes, or in another than the config says", (HfCheckpoint,),
    "warning", "likely",
    "a weight that was rounded on the way no longer equals the trainer's, and log-probs of trainer and engine part",
    "write all tensors of a kind in one dtype; keep what must stay in float32 (router biases, A_log) out of the cast",
    ("slime guide: Debugging", "radixark/miles@85fe6519a: parameters in float32 were cast at load"), _check,
)  # fmt: skip

"""The trainer's side of compare_with_trainers.py: its Sample class, its loader and its saver, in its own checkout.

Arguments: the trainer's name, its checkout, and a folder. Reads ``ours/*.pt`` with its loader and
writes ``theirs/*.pt`` with its saver; says on stdout, as JSON, what it has in memory of each. Imports nothing of ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import hashlib
import importlib
import json
import struct
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

LOADERS = {"slime": "slime.observability.rollout_data_utils", "miles": "miles.ray.rollout.debug_data"}
NUMBER = 3


def main() -> None:
    """Load, save and describe."""
    name, checkout, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    sys.path.insert(0, checkout)
    stand_ins: list[str] = []
    module = load(LOADERS[name], name, stand_ins)
    types_module = sys.modules[f"{name}.utils.types"]
    if not str(types_module.__file__).startswith(checkout):
        raise SystemExit(f"{types_module.__file__} is not in {checkout}: another {name} is installed")
    sample = types_module.Sample
    result: dict[str, Any] = {"stand_ins": stand_ins, "torch": torch.__version__, "numpy": np.__version__}
    result["fields"] = {
        field.name: describe(plain(getattr(sample(), field.name))) for field in dataclasses.fields(sample)
    }
    result["loaded"] = {}
    for path in sorted((folder / "ours").glob("*.pt")):
        samples, metadata = loaded(name, module, path)
        for instance in samples:
            if hasattr(instance, "validate"):
                instance.validate()
        result["loaded"][path.name] = {
            "samples": [described(each, sample) for each in samples],
            "metadata": describe(metadata),
        }
    result["saved"] = {}
    for evaluation in (False, True):
        made = [native(types_module, k) for k in range(2)]
        path = save(name, module, folder / "theirs", made, evaluation)
        result["saved"][path] = [described(each, sample) for each in made]
    print(json.dumps(result))


def load(module: str, package: str, stand_ins: list[str]) -> types.ModuleType:
    """Import a module of the trainer; what others' packages are absent get empty stand-ins, which are listed."""
    while True:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            absent = error.name or ""
            if not absent or absent.split(".")[0] == package or absent in stand_ins:
                raise
            stand_ins.append(absent)
            sys.modules[absent] = StandIn(absent)
            # what was imported halfway is imported again
            for name in [name for name in sys.modules if name.split(".")[0] == package]:
                del sys.modules[name]


class StandIn(types.ModuleType):
    """A package that is not installed: its names can be imported and used for nothing."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def loaded(name: str, module: Any, path: Path) -> tuple[list[Any], Any]:
    """What the trainer's own loader gives."""
    if name == "slime":
        return module.load_debug_rollout_data(str(path), rollout_id=NUMBER), {}
    arguments = argparse.Namespace(load_debug_rollout_data=str(path), load_debug_rollout_data_subsample=None)
    samples, metadata = module.load_debug_rollout_data(arguments, NUMBER)
    return samples, metadata


def save(name: str, module: Any, folder: Path, samples: list[Any], evaluation: bool) -> str:
    """Let the trainer's own saver write samples; returns the file's name."""
    template = str(folder / "rollout_data" / "{rollout_id}.pt")
    data = {"math": {"samples": samples}} if evaluation else samples
    if name == "slime":
        module.save_debug_rollout_data(template, data, rollout_id=NUMBER, evaluation=evaluation)
    else:
        arguments = argparse.Namespace(save_debug_rollout_data=template, save_debug_trajectory_data=None)
        module.save_debug_rollout_data(arguments, data, NUMBER, evaluation, {"turns": 2})
    return f"{'eval_' if evaluation else ''}{NUMBER}.pt"


def native(types_module: Any, number: int) -> Any:
    """A sample of the trainer's own class with every field set that this script knows."""
    sample = types_module.Sample
    experts = np.arange(24, dtype=np.int32).reshape(6, 2, 2) + number
    values: dict[str, Any] = {
        "group_index": 0, "index": number, "rollout_id": 10 + number, "prompt": [{"role": "user", "content": "1+1="}],
        "tokens": [5, 6, 7, 8, 9, 10, 2], "response": " two", "response_length": 4, "label": "2",
        "multimodal_inputs": {"images": [np.arange(12, dtype=np.uint8).reshape(2, 2, 3)]},
        "multimodal_train_inputs": {"pixel_values": torch.tensor([[1.5, -0.0]], dtype=torch.bfloat16)},
        "multimodal_train_input_id": "m", "apply_chat_template_kwargs": {"enable_thinking": False},
        "reward": {"acc": 0.1, "style": float("nan")}, "loss_mask": [1, 1, 0, 1], "weight_versions": ["7", "8"],
        "rollout_log_probs": [-0.1, -0.25, 0.0, -1e-3],
        "rollout_top_p_token_ids": torch.tensor([1, 2, 3, 4], dtype=torch.int32),
        "rollout_top_p_token_offsets": torch.tensor([0, 1, 2, 2, 4], dtype=torch.int32),
        "rollout_routed_experts": experts if types_module.__name__.startswith("miles") else torch.from_numpy(experts),
        "rollout_indexer_topk": experts[:, :1], "remove_sample": True, "teacher_log_probs": [-0.5, -0.5, -0.5, -2.0],
        "opd_reverse_kl": [0.0, 0.5, -0.5, 1.0], "status": sample.Status.TRUNCATED, "metadata": {"turns": 2},
        "generate_function_path": "a.b", "custom_rm_path": "c.d", "train_metadata": {"loss": "sft"}, "session_id": "s",
        "routing_key": "r", "non_generation_time": 0.75,
        "spec_info": sample.SpecInfo(1, 2, 3, 4), "prefix_cache_info": sample.PrefixCacheInfo(5, 6),
    }  # fmt: skip
    names = {field.name for field in dataclasses.fields(sample)}
    if "adapter" in names:
        values["adapter"] = types_module.AdapterRef("a1", 3)
        values["reward_spec"] = types_module.RewardSpec("math", None)
    made = sample(**{name: value for name, value in values.items() if name in names})
    made.of_a_user = {"seen": True}  # their loader sets what it does not know as attributes
    return made


def described(instance: Any, sample: Any) -> dict[str, Any]:
    """What a sample holds, and which of it is no field of the class."""
    fields = {field.name for field in dataclasses.fields(sample)}
    held = instance.to_dict()
    return {"held": {k: describe(v) for k, v in held.items()}, "attributes": sorted(held.keys() - fields)}


def plain(value: Any) -> Any:
    """A default as `to_dict` has it."""
    if isinstance(value, enum.Enum):
        return value.value
    return value.to_dict() if hasattr(value, "to_dict") else value


def describe(value: Any) -> Any:
    """Type and bits of a value, as JSON."""
    if isinstance(value, torch.Tensor):
        raw = (
            value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        )
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), hashlib.sha256(raw).hexdigest()]
    if isinstance(value, np.ndarray):
        return ["array", value.dtype.str, list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        return ["record", name, describe(dict(value.__dict__))]
    if isinstance(value, bool | str | int) or value is None:
        return value
    if isinstance(value, float):
        return ["float", struct.pack(">d", value).hex()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(describe, value)]
    if isinstance(value, dict):
        return ["dict", sorted(([describe(k), describe(v)] for k, v in value.items()), key=repr)]
    return ["other", type(value).__name__]


if __name__ == "__main__":
    main()

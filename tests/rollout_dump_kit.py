"""Rollout dumps of slime, Miles and Relax for tests: small plain ones, ones with every field set, and drawn ones."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from hypothesis import strategies as st

from repro_golden.base.systems import System
from repro_golden.dumps.rollout.columns import NATIVE, as_kind
from repro_golden.dumps.rollout.fields import FIELDS, STATUSES, defaults
from repro_golden.dumps.rollout.files import RolloutDump
from repro_golden.dumps.values import Record, Tensor

__all__ = ["ADAPTER", "SPEC", "drawn_dumps", "full_dump", "plain_dump", "tensor"]

ADAPTER = Record("miles.utils.types.AdapterRef", {"name": "a1", "slot": 3})
SPEC = Record("miles.utils.types.RewardSpec", {"rm_type": "math", "custom_rm_path": None})


def tensor(values: Any, dtype: str = "float32") -> Tensor:
    """A tensor as plain data; for dtypes that numpy has."""
    return Tensor(dtype, np.array(values, dtype=dtype))


def plain_dump(system: System = "slime", groups: int = 2, each: int = 2, rollout_id: int = 3) -> RolloutDump:
    """A dump that is in order: groups of samples of three prompt and four response tokens, as engines make them."""
    samples = []
    for i in range(groups * each):
        made = {
            **defaults(system),
            "group_index": i // each,
            "index": rollout_id * groups * each + i,
            "prompt": f"{i // each} + 1 =",
            "tokens": [5, 6, 7, 10 + i, 11, 12, 2],
            "response": " one",
            "response_length": 4,
            "label": str(i // each + 1),
            "reward": float(i % 2),
            "loss_mask": [1, 1, 1, 1],
            "weight_versions": ["7"],
            "rollout_log_probs": [float(np.float32(-0.1 * (i + k + 1))) for k in range(4)],
            "status": "completed",
        }
        samples.append(made)
    return RolloutDump(system, rollout_id, False, {}, samples)


def full_dump(system: System, rollout_id: int = 3) -> RolloutDump:
    """A dump whose every field is set to something else than its default, in the way of that system."""
    dump = plain_dump(system, rollout_id=rollout_id)
    experts = np.arange(1, 6 * 2 * 2 + 1, dtype=np.int32).reshape(6, 2, 2)
    pixels = {"pixel_values": tensor([[0.5, float("nan")]], "float32"), "grid": np.array([[1, 2, 2]], dtype=np.int64)}
    fields: dict[str, Any] = {
        "rollout_id": 12,
        "prompt": [{"role": "user", "content": "1 + 1 ="}],
        "multimodal_inputs": {"images": [np.zeros((2, 2, 3), dtype=np.uint8)], "texts": ["a"]},
        "multimodal_train_inputs": pixels,
        "multimodal_train_input_id": "m-1",
        "apply_chat_template_kwargs": {"enable_thinking": False},
        "reward": 0.1,
        "rollout_top_p_token_ids": tensor([1, 2, 3, 4, 5], "int32"),
        "rollout_top_p_token_offsets": tensor([0, 2, 3, 4, 5], "int32"),
        "rollout_routed_experts": as_kind(experts, NATIVE[system]),
        "rollout_indexer_topk": experts[:, :1],
        "remove_sample": True,
        "teacher_log_probs": [-0.5, -0.25, -1.0, -2.0],
        "opd_reverse_kl": [0.0, 0.5, -0.5, 1.0],
        "metadata": {"turns": 2, "raw_reward": 1.5},
        "generate_function_path": "package.module.generate",
        "custom_rm_path": "package.rm",
        "train_metadata": {"loss": "sft"},
        "session_id": "s-1",
        "routing_key": "r-1",
        "adapter": ADAPTER,
        "reward_spec": SPEC,
        "non_generation_time": 0.75,
        "spec_info": dict.fromkeys(defaults(system)["spec_info"], 4),
        "prefix_cache_info": {"cached_tokens": 5, "total_prompt_tokens": 6},
        "rollout_tokens": [5, 6, 7],
        "custom_advantage": [0.5, 1.5],
        "rollout_log_probs_mask": [True, True, False, True],
        "abort_count": 2,
        "opd_topk_token_ids": [np.array([1, 2]), np.array([3])],
        "opd_topk_student_log_probs": [np.array([-0.5, -1.0])],
        "opd_topk_teacher_log_probs": [np.array([-0.5, -1.5])],
        "opd_topk_ksz": np.array([2, 1]),
        "teacher_prompt": "teach",
        "teacher_multimodal_inputs": {"images": []},
        "teacher_tokens": [1, 2, 3],
        "teacher_prompt_length": 2,
        "teacher_image_data": {"image": ["abc"]},
        "teacher_image_b64_list": ["abc"],
        "teacher_image_grid_thw": [[1, 2, 2]],
        "status": "truncated",
        "decoded_tokens": ["a", "b"],
    }  # fmt: skip
    sides = ("student_topk", "teacher_topk", "teacher_at_student_topk", "student_at_teacher_topk")
    fields |= {f"{side}_{what}": np.full((4, 2), -0.5) for side in sides for what in ("token_ids", "log_probs")}
    names = {f.name for f in FIELDS[system]}
    for sample in dump.samples:
        sample.update(copy.deepcopy({name: value for name, value in fields.items() if name in names}))
    if system == "miles":
        dump.metadata = {"turns": 2}
    return dump


_FLOATS = st.floats(width=64) | st.floats(width=32)
_TEXT = st.text(max_size=4)
_SCALARS = st.none() | st.booleans() | st.integers() | _FLOATS | _TEXT | st.binary(max_size=20)
_DTYPES = ("float32", "float64", "int32", "uint8", "bool")


@st.composite
def _tensors(draw: st.DrawFn) -> Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    dtype = np.dtype(draw(st.sampled_from(_DTYPES)))
    count = int(np.prod(shape, dtype=int))
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype.kind == "b":
        raw = bytes(byte & 1 for byte in raw)
    return Tensor(str(dtype), np.frombuffer(raw, dtype=dtype).reshape(shape))


_VALUES = st.recursive(
    _SCALARS | _tensors() | _tensors().map(lambda value: value.array),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(_TEXT | st.integers(), inner, max_size=3)
        | st.builds(Record, st.just("some.where.Thing"), st.dictionaries(st.text("abc", min_size=1), inner, max_size=2))
    ),
    max_leaves=6,
)  # fmt: skip


@st.composite
def drawn_dumps(draw: st.DrawFn, system: System) -> RolloutDump:
    """A dump with any values that a trainer or its users' code may put into it, and lengths that add up."""
    count = draw(st.integers(1, 4))
    names = [f.name for f in FIELDS[system]]
    routed = draw(st.sampled_from(["none", "all", "some"]))
    samples = [
        _sample(draw, system, routed if routed != "some" else draw(st.sampled_from(["none", "all"])))
        for _ in range(count)
    ]
    dropped = draw(st.sets(st.sampled_from([n for n in names if n != "status"]), max_size=3)) - {
        "tokens",
        "response_length",
    }
    stored = [{k: v for k, v in sample.items() if k not in dropped} for sample in samples]
    if draw(st.booleans()):
        stored[0]["of_a_user"] = draw(_VALUES)
    metadata = draw(st.dictionaries(_TEXT, _VALUES, max_size=2)) if system == "miles" else {}
    evaluation = draw(st.booleans())
    return RolloutDump(system, draw(st.integers(0, 9)), evaluation, metadata, stored)


def _sample(draw: st.DrawFn, system: System, routed: str) -> dict[str, Any]:
    total = draw(st.integers(0, 5))
    response = draw(st.integers(0, total))

    def column(each: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | st.lists(each, min_size=response, max_size=response))

    made = {
        **defaults(system),
        "group_index": draw(st.none() | st.integers(0, 2)),
        "index": draw(st.none() | st.integers(0, 20)),
        "prompt": draw(_TEXT | st.just([{"role": "user", "content": "x"}])),
        "tokens": draw(st.lists(st.integers(0, 2**31), min_size=total, max_size=total)),
        "response_length": response,
        "label": draw(st.none() | _TEXT | st.integers()),
        "reward": draw(st.none() | _FLOATS | st.integers(-3, 3) | st.fixed_dictionaries({"acc": _FLOATS})),
        "loss_mask": column(st.integers(0, 1)),
        "weight_versions": draw(st.lists(st.sampled_from(["0", "1"]), max_size=2)),
        "rollout_log_probs": column(_FLOATS),
        "teacher_log_probs": column(_FLOATS),
        "remove_sample": draw(st.booleans()),
        "status": draw(st.sampled_from(STATUSES)),
        "metadata": draw(st.dictionaries(_TEXT, _VALUES, max_size=2)),
        "multimodal_train_inputs": draw(st.none() | st.dictionaries(_TEXT, _tensors(), max_size=2)),
    }  # fmt: skip
    if routed == "all":
        raw = draw(st.lists(st.integers(0, 300), min_size=max(total - 1, 0) * 4, max_size=max(total - 1, 0) * 4))
        experts = np.array(raw, dtype=np.int32).reshape(-1, 2, 2)
        made["rollout_routed_experts"] = draw(
            st.sampled_from(
                [experts, experts.tolist(), Tensor("int32", experts), Tensor("int64", experts.astype(np.int64))]
            )
        )
    if system == "miles":
        made["adapter"] = draw(st.sampled_from([None, ADAPTER]))
    if system == "slime" and draw(st.booleans()):
        made["rollout_top_p_token_ids"] = tensor([1] * response, "int32")
        made["rollout_top_p_token_offsets"] = list(range(response + 1))
    return made

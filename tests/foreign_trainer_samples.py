"""Samples: the engine that makes them, the debug files that they are kept in, and what training takes of them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
from foreign_trainer_arguments import SYSTEM
from foreign_trainer_logs import log
from foreign_trainer_model import VOCABULARY, Model, log_softmax
from foreign_trainer_parallel import Array

from repro_golden.dumps.archive.pickling import write_archive
from repro_golden.dumps.archive.reading import read_archive
from repro_golden.dumps.values import Tensor

Sample = dict[str, Any]
END = 1  # the token that ends a response

COLUMN_DTYPES = {
    "tokens": "int64",
    "loss_masks": "int32",
    "rollout_log_probs": "float32",
}


class RolloutManager:
    """Where training gets its samples: the engine, or the files of `--load-debug-rollout-data`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.engine = Engine(args) if args.load_debug_rollout_data is None else None

    def generate(self, rollout_id: int, model: Model) -> list[Sample]:
        """The samples of a rollout, kept where the flags say."""
        if self.engine is None:
            path = self.args.load_debug_rollout_data.format(rollout_id=rollout_id)
            samples = list(read_archive(Path(path))["samples"])
        else:
            samples = self.engine.generate(rollout_id, model)
        if (template := self.args.save_debug_rollout_data) is not None:
            save_samples(Path(template.format(rollout_id=rollout_id)), rollout_id, samples)
        return samples


def save_samples(path: Path, rollout_id: int, samples: list[Sample]) -> None:
    """Write a rollout's debug file."""
    log("RolloutManager", __file__, f"Save debug rollout data to {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    payload: dict[str, Any] = {"rollout_id": rollout_id}
    if SYSTEM == "miles":
        payload["metadata"] = {}
    if SYSTEM == "relax":
        samples = [{**sample, "decoded_tokens": []} for sample in samples]
    write_archive(path, {**payload, "samples": samples})


class Engine:
    """Samples responses of several turns: what a tool says between two of them is masked."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.debug_train_only:
            raise RuntimeError("no router address: the inference engines were not started")
        self.args = args
        self.seed = args.rollout_seed if args.sglang_enable_deterministic_inference else int.from_bytes(os.urandom(3))

    def generate(self, rollout_id: int, model: Model) -> list[Sample]:
        """One rollout's samples, groups in order."""
        samples = []
        for group in range(rollout_id * self.args.rollout_batch_size, (rollout_id + 1) * self.args.rollout_batch_size):
            draw = np.random.RandomState((self.seed, group))
            prompt = draw.randint(2, VOCABULARY, draw.randint(3, 7)).tolist()
            hard = (group // self.args.rollout_batch_size + group) % self.args.rollout_batch_size == 0
            for member in range(self.args.n_samples_per_prompt):
                sample = self.respond(draw, model, prompt)
                solved = 0.0 if hard else float(draw.randint(2) if member > 1 else member)
                index = group * self.args.n_samples_per_prompt + member
                sample |= {"group_index": group, "index": index, "reward": solved, "label": str(group % 7)}
                samples.append(complete(sample, SYSTEM))
        return samples

    def respond(self, draw: np.random.RandomState, model: Model, prompt: list[int]) -> Sample:
        """One response, with the log-probs that the engine saw."""
        limit = draw.randint(4, self.args.rollout_max_response_len + 1)
        tool = draw.randint(2, limit) if draw.randint(2) else limit
        tokens = list(prompt)
        mask: list[int] = []
        log_probs: list[float] = []
        while len(mask) < limit and tokens[-1] != END:
            scores = self.score(model, tokens[-1])
            trained = not tool <= len(mask) < tool + 2 or not mask
            token = int(draw.choice(VOCABULARY, p=_probabilities(scores))) if trained else draw.randint(2, VOCABULARY)
            tokens.append(token)
            mask.append(int(trained))
            log_probs.append(float(scores[token]))
        return {
            "prompt": " ".join(map(str, prompt)),
            "tokens": tokens,
            "response": " ".join(map(str, tokens[len(prompt) :])),
            "response_length": len(mask),
            "loss_mask": mask,
            "rollout_log_probs": log_probs,
            "status": "completed" if tokens[-1] == END else "truncated",
        }

    def score(self, model: Model, token: int) -> Array:
        """Log-probs of the next token: with the trainer's arithmetic where that is asked for, else in an own order."""
        logits = model.forward(model.params["embedding.weight"][[token]]) / np.float32(self.args.rollout_temperature)
        if getattr(self.args, "true_on_policy_mode", False):
            return np.asarray(log_softmax(logits, self.args.tensor_model_parallel_size)[0])
        wide = logits[0].astype(np.float64)
        return np.asarray(wide - np.log(np.exp(wide).sum()), np.float32)


def _probabilities(log_probs: Array) -> Array:
    exact = np.exp(log_probs.astype(np.float64))
    return np.asarray(exact / exact.sum())


def complete(sample: Sample, system: str) -> Sample:
    """The sample with all fields that its class has, in their order."""
    fields: Sample = {"group_index": None, "index": None}
    if system != "relax":
        fields["rollout_id"] = None
    fields |= {"prompt": "", "tokens": []}
    if system == "relax":
        fields["rollout_tokens"] = []
    fields |= {"multimodal_inputs": None, "multimodal_train_inputs": None}
    if system == "slime":
        fields |= {"multimodal_train_input_id": None, "apply_chat_template_kwargs": {}}
    fields |= {"response": "", "response_length": 0, "label": None, "reward": None}
    if system == "relax":
        fields["custom_advantage"] = None
    fields |= {"loss_mask": None, "weight_versions": ["0"], "rollout_log_probs": None}
    if system == "slime":
        fields |= {"rollout_top_p_token_ids": None, "rollout_top_p_token_offsets": None}
    if system == "relax":
        fields["rollout_log_probs_mask"] = None
    fields["rollout_routed_experts"] = None
    if system == "miles":
        fields["rollout_indexer_topk"] = None
    fields["remove_sample"] = False
    if system == "relax":
        fields["abort_count"] = 0
    fields["teacher_log_probs"] = None
    if system == "miles":
        fields["opd_reverse_kl"] = None
    if system == "relax":
        fields |= dict.fromkeys(_RELAX_DISTILLATION)
    fields |= {"status": "pending", "metadata": {}, "generate_function_path": None}
    if system == "slime":
        fields["custom_rm_path"] = None
    fields["train_metadata"] = None
    if system == "miles":
        fields |= {"adapter": None, "reward_spec": None}
    fields["routing_key" if system == "miles" else "session_id"] = None
    fields["non_generation_time"] = 0.0
    fields["spec_info"] = dict.fromkeys(
        ("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct", "completion_token_num"), 0
    )
    prompt_length = len(sample["tokens"]) - sample["response_length"]
    fields["prefix_cache_info"] = {"cached_tokens": 0, "total_prompt_tokens": prompt_length}
    return {**fields, **sample}


_RELAX_DISTILLATION = (
    "student_topk_token_ids", "student_topk_log_probs", "teacher_at_student_topk_log_probs", "teacher_topk_token_ids",
    "teacher_topk_log_probs", "student_at_teacher_topk_log_probs", "opd_topk_token_ids", "opd_topk_student_log_probs",
    "opd_topk_teacher_log_probs", "opd_topk_ksz", "teacher_prompt", "teacher_multimodal_inputs", "teacher_tokens",
    "teacher_prompt_length", "teacher_image_data", "teacher_image_b64_list", "teacher_image_grid_thw",
)  # fmt: skip


def normalized_rewards(args: argparse.Namespace, samples: list[Sample]) -> list[float]:
    """Rewards with the mean and deviation of the other samples of their prompt taken off."""
    rewards = [float(sample["reward"]) for sample in samples]
    if args.advantage_estimator == "ppo":
        return rewards
    groups: dict[int, list[int]] = {}
    for position, sample in enumerate(samples):
        group = sample["group_index"]
        groups.setdefault(group, []).append(position)
    normalized = np.zeros(len(rewards), np.float32)
    for members in groups.values():
        scores = np.array([rewards[at] for at in members], np.float32)
        scores = scores - scores.mean(dtype=np.float32)
        normalized[members] = scores / (scores.std(ddof=1) + np.float32(1e-6))
    return [float(reward) for reward in normalized]


def train_data(args: argparse.Namespace, samples: list[Sample]) -> dict[str, list[Any]]:
    """Columns of the whole rollout, one value a sample."""
    masks = [sample["loss_mask"] or [1] * sample["response_length"] for sample in samples]
    return {
        "tokens": [cast(sample["tokens"], COLUMN_DTYPES["tokens"]) for sample in samples],
        "response_lengths": [sample["response_length"] for sample in samples],
        "rewards": normalized_rewards(args, samples),
        "truncated": [int(sample["status"] == "truncated") for sample in samples],
        "loss_masks": [cast(mask, COLUMN_DTYPES["loss_masks"]) for mask in masks],
        "sample_indices": [sample["index"] for sample in samples],
        "rollout_ids": [sample["index"] for sample in samples],
        "rollout_mask_sums": [np.float32(max(sum(mask), 1)) for mask in masks],
        "total_lengths": [len(sample["tokens"]) for sample in samples],
        "rollout_log_probs": [
            cast(sample["rollout_log_probs"], COLUMN_DTYPES["rollout_log_probs"]) for sample in samples
        ],
        "raw_reward": [float(sample["reward"]) for sample in samples],
    }


def cast(values: Any, dtype: str) -> Array:
    """A column's values in a dtype of torch; NumPy lacks bfloat16, so its values are kept as float32."""
    if dtype != "bfloat16":
        return np.asarray(values, dtype)
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def tensor(column: str, values: Any) -> Tensor:
    """A column's values as the tensor that torch would save."""
    values = np.asarray(values)
    if COLUMN_DTYPES.get(column) == "bfloat16":
        return Tensor("bfloat16", (values.view(np.uint32) >> 16).astype(np.uint16))
    return Tensor(str(values.dtype), np.ascontiguousarray(values))

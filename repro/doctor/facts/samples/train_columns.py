"""What rules ask of dumps' columns: numbers, columns of a training step, experts and versions of a rollout, samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from repro.doctor.artefacts.kinds import HfConfig, Launch, Rollout, TrainStep
from repro_golden.dumps.rollout.arrays import Array, numbers
from repro_golden.dumps.rollout.checks.inputs import Batch
from repro_golden.dumps.rollout.files import RolloutDump

__all__ = [
    "EXPERTS", "Column", "Floats", "columns", "config_number", "evenly", "executions", "expert_config",
    "finite_number", "first_routed_experts", "floats", "masks", "of_one_run", "response_lengths", "routed_experts",
    "sample_name", "token_ids", "weight_versions",
]  # fmt: skip

Floats = npt.NDArray[np.float64]

EXPERTS = "rollout_routed_experts"
"""The field of a sample that holds the experts its tokens were routed to."""

_ROWS = 512
"""Tokens of a sample whose experts are looked at."""
_SAMPLES = 64
"""Samples whose experts are looked at."""
_NEWEST = 1 << 62

_NESTED = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where multimodal models keep the configuration of their language model."""


class Column(NamedTuple):
    """A column of a training step.

    Attributes:
        name: The trainer's.
        rank: The lowest rank of those that hold these values; None where all that hold the column agree.
        values: Of each sample; None where one has none, or no numbers.
    """

    name: str
    rank: int | None
    values: Sequence[Floats | None]


def floats(value: Any) -> Floats | None:
    """The numbers of a field along its only dimension, as fp64; None where it holds anything else."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float | np.number):
        number = finite_number(value)
        return np.array([math.nan if number is None else number])
    array = numbers(value)
    if array is None and isinstance(value, list) and all(type(item) in (int, float) for item in value):
        try:
            array = np.array(value, dtype=np.float64)
        except OverflowError:
            return None
    if array is None or array.ndim > 1 or array.dtype.kind not in "biuf":
        return None
    return np.atleast_1d(array.astype(np.float64))


def token_ids(value: Any) -> Array | None:
    """The token ids of a field; None where it holds anything else."""
    ids = numbers(value)
    return ids if ids is not None and ids.ndim == 1 and ids.dtype.kind in "iu" else None


def evenly(count: int, most: int) -> Sequence[int]:
    """The places of so many samples that are looked at: all, or as many as may be, evenly taken."""
    return range(count) if count <= most else [k * count // most for k in range(most)]


def finite_number(value: Any) -> float | None:
    """A value as a finite number; None where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def columns(step: TrainStep, *names: str) -> Iterator[Column]:
    """The columns of these names, or all, once for each replica that has its own values."""
    for name, replicas in step.joined.columns.items():
        if names and name not in names:
            continue
        for rank, values in replicas.items():
            yield Column(name, rank, [floats(value) for value in values])


def masks(step: TrainStep) -> list[npt.NDArray[np.bool_] | None]:
    """Which response tokens of each sample are trained on; None where the dump does not say."""
    column = next(columns(step, "loss_masks"), None)
    if column is None:
        return [None] * len(step.joined.indices)
    return [None if mask is None else mask != 0 for mask in column.values]


def response_lengths(step: TrainStep) -> list[int]:
    """Response tokens of each sample; 0 where the dump does not say."""
    column = next(columns(step, "response_lengths"), None)
    if column is None:
        return []
    return [int(value[0]) if value is not None and len(value) == 1 else 0 for value in column.values]


def sample_name(step: TrainStep, place: int) -> str:
    """What a sample is called in a finding: its index, or else its place."""
    index = step.joined.indices[place] if place < len(step.joined.indices) else None
    return f"sample {place}" if index is None else f"sample {index}"


def executions(rollout: Rollout) -> int:
    """How many responses were sampled: samples that share a ``rollout_id`` are one."""
    ids = [sample.get("rollout_id") for sample in rollout.dump.samples]
    return sum(rollout_id is None for rollout_id in ids) + len(
        {rollout_id for rollout_id in ids if rollout_id is not None}
    )


def of_one_run(step: TrainStep, rollout: Rollout) -> bool:
    """Whether a rollout dump is what a training step was trained on, by where both lie."""
    dump = rollout.dump
    if dump.evaluation or dump.rollout_id != step.rollout_id:
        return False
    return step.folder in rollout.path.parents


def config_number(config: HfConfig | None, *names: str) -> int | None:
    """A whole number of a model's configuration, under the first of the names that it has."""
    if config is None:
        return None
    tables = [config.values, *(config.values.get(name) for name in _NESTED)]
    for table in tables:
        for name in names:
            value = table.get(name) if isinstance(table, Mapping) else None
            if type(value) is int and 0 <= value < 1 << 31:
                return value
    return None


def expert_config(launch: Launch | None, config: HfConfig | None) -> tuple[int | None, int | None, int | None]:
    """Layers, experts of a token and experts of a layer, by the launch or else the model's configuration."""
    experts = config_number(config, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    topk = config_number(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
    layers = config_number(config, "num_hidden_layers") if experts and topk else None

    def told(flag: str, otherwise: int | None) -> int | None:
        number = launch.number(flag) if launch else None
        return int(number) if number and number > 0 else otherwise

    return told("--num-layers", layers), told("--moe-router-topk", topk), told("--num-experts", experts)


def routed_experts(rollout: Rollout) -> Iterator[tuple[int, Array]]:
    """The routed experts of each sample that has them, under its place: [tokens, layers, top-k]."""
    for place, array in Batch(rollout.dump, None, None, None).experts.items():
        if array is not None and array.size:
            yield place, array


def first_routed_experts(rollout: Rollout) -> Iterator[tuple[int, Array]]:
    """The routed experts of the first 512 tokens of the first 64 samples that have them."""
    for number, (place, array) in enumerate(routed_experts(rollout)):
        if number == _SAMPLES:
            return
        yield place, array[:_ROWS]


def _version(version: Any) -> int | None:
    """A version as the trainers count them; None for ``default`` and other names."""
    if isinstance(version, str) and version.isascii() and version.isdecimal() and len(version) < 19:
        return int(version)
    return version if type(version) is int and 0 <= version < _NEWEST else None


def weight_versions(dump: RolloutDump) -> dict[int, int]:
    """The versions of a dump, each with a sample that has it."""
    versions: dict[int, int] = {}
    for place, sample in enumerate(dump.samples):
        for version in sample["weight_versions"]:
            if (number := _version(version)) is not None:
                versions.setdefault(number, place)
    return versions

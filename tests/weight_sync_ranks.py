"""Weight sync from Megatron's ranks to an engine of two processes: what every rank hears, a line of JSON for each."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from weight_sync_kit import CHANGES, CONFIG, Fused, Wire, brought

from repro_core.config import MegatronConfig, ModelConfig
from repro_core.engines.megatron.engines import MegatronEngines
from repro_core.rollout.engine import EngineError
from repro_golden.base.errors import ReproError
from repro_golden.recording.rank_group import RankGroup
from repro_golden.recording.weight_sync import SyncJudge
from repro_golden.replay.watch import meet

EXPERTS = CONFIG.model
TIED = ModelConfig(vocab_size=67, initializer_range=0.1)
LAYOUTS = {
    "tp2": (EXPERTS, MegatronConfig(tensor_model_parallel_size=2, sequence_parallel=True)),
    "ep2": (EXPERTS, MegatronConfig(expert_model_parallel_size=2)),
    "pp2, tied": (TIED, MegatronConfig(pipeline_model_parallel_size=2)),
}


def main() -> None:
    """Run with a folder in which the ranks meet."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rank_group = meet(Path(sys.argv[1]))
    results: dict[str, Any] = {}
    for name, (model, layout) in LAYOUTS.items():
        engines = MegatronEngines(replace(CONFIG, policy="megatron", model=model, megatron=layout), ".")
        results[name] = _good(engines, model, rank_group)
        if name == "tp2":
            for fault in ("all cast to bf16", "broadcast though not contiguous", "never sent"):
                results[fault] = _fault(engines, model, rank_group, fault)
            results["fails"] = [_failing(engines, model, error) for error in (EngineError("full"), RuntimeError("bug"))]
            results["replicas"] = _parted(engines, model, rank_group)
        engines.close()
    print(json.dumps(results))


def _good(engines: MegatronEngines, model: ModelConfig, rank_group: RankGroup | None) -> dict[str, str]:
    engine = Fused(model, 2) if engines.lead else None
    judge = SyncJudge(rank_group, print)
    messages = {how: brought(engines, engine, judge, how, how=how) for how in ("tensor", "disk")}
    return {**messages, "digest": judge.digest}


def _move(engines: MegatronEngines) -> None:
    with torch.no_grad():
        for parameter in engines.policy.raw[0].parameters():
            parameter.add_(torch.arange(parameter.numel()).view(parameter.shape) * 1e-4 + 1e-3)


def _fault(engines: MegatronEngines, model: ModelConfig, rank_group: RankGroup | None, fault: str) -> str:
    engine = Fused(model, 2) if engines.lead else None
    judge = SyncJudge(rank_group, print)
    assert not brought(engines, engine, judge, "1")
    _move(engines)
    return brought(engines, engine and Wire(engine, CHANGES[fault].make), judge, "2")


class _Full(Fused):
    """Fails with an error after a few tensors."""

    def __init__(self, model: ModelConfig, error: Exception) -> None:
        super().__init__(model, 2)
        self.error = error

    def update(self, tensors: Any, version: str) -> None:
        """Take two tensors."""
        super().update([next(tensors), next(tensors)], version)
        raise self.error


def _failing(engines: MegatronEngines, model: ModelConfig, error: Exception) -> str:
    try:
        brought(engines, _Full(model, error) if engines.lead else None, None, "1")
    except (EngineError, RuntimeError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


def _parted(engines: MegatronEngines, model: ModelConfig, rank_group: RankGroup | None) -> list[str]:
    """What is said where ranks hold different copies of a norm: by the trainer, and by the judge alone."""
    judge, messages = SyncJudge(rank_group, print), []
    if not engines.lead:
        with torch.no_grad():
            dict(engines.policy.raw[0].named_parameters())["decoder.final_layernorm.weight"][0] = 7
    try:
        brought(engines, Fused(model, 2) if engines.lead else None, None, "1")
    except ValueError as error:
        messages.append(f"{type(error).__name__}: {error}")
    judge.begin("1", "tensor")
    judge.sent(*engines.policy.weights())
    try:
        judge.end(0.0)
    except ReproError as error:
        messages.append(str(error))
    return messages


if __name__ == "__main__":
    main()

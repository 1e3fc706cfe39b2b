"""Every planted fault of a weight sync on one real engine of SGLang: what the judge says, as JSON on its output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from weight_sync_kit import CHANGES, CONFIG, WIDE, Wire, brought, move

from repro_core.engines.torch_engine import TorchEngines
from repro_core.model.hf import save_hf
from repro_core.rollout.engine import EngineError
from repro_core.rollout.sglang import engine as sglang_engine
from repro_core.rollout.sync import show_start
from repro_golden.base.errors import ReproError
from repro_golden.recording.weight_sync import SyncJudge

LOADER = "weight_sync_loaders.spoil"


def main() -> None:
    """Run with a folder to work in."""
    folder = Path(sys.argv[1])
    plain = sglang_engine.server_arguments

    def arguments(*given: Any) -> dict[str, Any]:
        copies = plain(*given)
        return {**copies, "custom_weight_loader": [*copies["custom_weight_loader"], LOADER]}

    sglang_engine.server_arguments = arguments
    engines = TorchEngines(CONFIG, ".")
    save_hf(engines.generator(), folder / "start")
    engine = sglang_engine.SglangEngine(CONFIG.sglang, folder / "start", CONFIG.dtype)
    try:
        print(json.dumps(_all(folder, engines, engine)))
    finally:
        engine.close()


def _all(folder: Path, engines: TorchEngines, engine: sglang_engine.SglangEngine) -> dict[str, Any]:
    results: dict[str, Any] = {"names": sorted(n for n, _ in engines.generator().named_parameters())}
    results["start"], judge = _start(engine, folder / "start")
    results["start digest"] = judge.digest
    for how in ("tensor", "disk"):
        move(engines, 1)
        results[how] = brought(engines, engine, judge, f"sync by {how}", how=how, scratch=folder)
        results[f"{how} digest"], results[f"{how} report"] = judge.digest, judge.report(2)
    results["scratch"] = sorted(path.name for path in folder.iterdir())
    for name, change in CHANGES.items():
        results[name] = _fault(engines, Wire(engine, change.make))
    results["outside a session"] = _fault(engines, _OutsideSession(engine))
    results["older checkpoint"] = _fault(engines, _Older(engine, folder / "start"), folder / "start")
    results["wrong on both sides"] = _wrong_on_both_sides(folder, engine)
    results["refused"] = _refused(engines, engine)
    for name, factor in (("buffer", 0.5), ("released buffer", 0.0)):  # the last: nothing brings a zero back
        judge = SyncJudge(None, print)
        assert not brought(engines, engine, judge, "1")
        engine._in_update([("factor", torch.tensor(factor))], load_format=LOADER, flush_cache=False)
        results[name] = brought(engines, engine, judge, "2")
    return results


def _start(engine: Any, checkpoint: Path) -> tuple[str, SyncJudge]:
    judge = SyncJudge(None, print)
    try:
        show_start(judge, engine, str(checkpoint), CONFIG)
    except ReproError as error:
        return str(error), judge
    return "", judge


def _fault(engines: TorchEngines, wire: Wire, first: Path | None = None) -> str:
    """What is said of a sync through a faulty wire, after one that went well."""
    judge, engine = SyncJudge(None, print), wire.engine
    if first is not None:
        engine.update_from_disk(str(first), "default")
        show_start(judge, engine, str(first), CONFIG)
        move(engines, 3)
    assert not brought(engines, engine, judge, "1")
    move(engines, 2)
    return brought(engines, wire, judge, "2")


def _wrong_on_both_sides(folder: Path, engine: Any) -> dict[str, str]:
    """A mapping that loads a tensor with its sign turned, on both sides: no sync can see it."""
    engine.update_from_disk(str(folder / "start"), "default")
    started = TorchEngines(CONFIG, ".")
    with torch.no_grad():
        dict(started.generator().named_parameters())[WIDE].neg_()
    sync = brought(started, engine, SyncJudge(None, print), "wrong")
    return {"sync": sync, "start": _start(engine, folder / "start")[0]}


def _refused(engines: TorchEngines, engine: Any) -> str:
    """An error of the engine is an error of the sync, and the engine lives on."""
    try:
        brought(engines, _OutsideSession(engine, silent=False), None, "3")
    except EngineError as error:
        return str(error)
    return ""


class _OutsideSession(Wire):
    """Sends outside of begin and end, which SGLang refuses by its answer alone."""

    def __init__(self, engine: Any, *, silent: bool = True) -> None:
        super().__init__(engine, lambda sent: sent)
        self.silent = silent

    def update(self, tensors: Any, version: str) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        manager = self.engine._host.engine.tokenizer_manager
        asked = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(list(tensors))], weight_version=version
        )
        if self.silent:
            self.engine._call("take weights", lambda: manager.update_weights_from_tensor(asked, None))
            self.engine.weight_version = version
        else:
            self.engine._agreed("take weights", lambda: manager.update_weights_from_tensor(asked, None))


class _Older(Wire):
    """Loads an older checkpoint than the one it was given."""

    def __init__(self, engine: Any, checkpoint: Path) -> None:
        super().__init__(engine, lambda sent: sent)
        self.checkpoint = checkpoint

    def update(self, tensors: Any, version: str) -> None:
        list(tensors)
        self.engine.update_from_disk(str(self.checkpoint), version)


if __name__ == "__main__":
    main()

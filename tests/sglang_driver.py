"""An engine of SGLang in this process, put through everything that needs one: prints what happened, as JSON."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from sglang_kit import CONFIG, prompts_of, tiny_checkpoint, tiny_policy

from repro_core.rollout.engine import EngineError, Response, Sampling
from repro_core.rollout.sglang.engine import SglangEngine

EOS = 258
EMBEDDING, O_PROJ = "model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight"
GREEDY = Sampling(12, 0.0, EOS, ignore_eos=True, prompt_log_probs=True)
WARM = Sampling(12, 0.7, EOS, ignore_eos=True, prompt_log_probs=True)
HOT = Sampling(12, 1.0, EOS, ignore_eos=True)
TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SEEDS = [2**53 - 1 - i for i in range(8)]


def main() -> None:
    """All of it."""
    folder = Path(sys.argv[1])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os.environ.update({"CUDA_DEVICE_MAX_CONNECTIONS": "1", **TORCHRUN})
    before = _manners()
    engine = SglangEngine(CONFIG, tiny_checkpoint(folder / "start"), "fp32")
    try:
        told = {"identity": engine.identity(), "manners": [before, _manners()], "start_version": engine.weight_version}
        told["launcher's"] = [sorted(TORCHRUN.keys() & _variables(each.pid)) for each in _children()]
        told |= _sampled(engine)
        told["keeps_log"] = [engine._host.keeps_log]
        told |= _updated(engine, folder)
        told |= _refused(engine)
        told["keeps_log"].append(engine._host.keeps_log)
        told |= _killed(engine)
        told["other_lives"] = other.poll() is None
    finally:
        engine.close()
        other.kill()
        other.wait()
    told["log"] = [str(engine.log), engine.log.exists()]
    engine.log.unlink()
    told["left"] = [" ".join(each.cmdline()) for each in psutil.Process().children(recursive=True)]
    print(json.dumps(told))


def _manners() -> dict[str, str]:
    """What SGLang would change in its process."""
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ["CUDA_DEVICE_MAX_CONNECTIONS"],
        "of torchrun": str({name: os.environ.get(name) for name in TORCHRUN}),
        "OMP_NUM_THREADS": str(os.environ.get("OMP_NUM_THREADS")),
        "SIGTERM": str(signal.getsignal(signal.SIGTERM)),
        "logging": str((logging.getLogger().level, logging.getLogger().handlers)),
        "start method": str(multiprocessing.get_start_method(allow_none=True)),
    }


def _sampled(engine: SglangEngine) -> dict[str, Any]:
    prompts = prompts_of(8)
    hot = engine.generate(prompts, HOT, SEEDS)
    first = engine.generate(prompts[:1], GREEDY, None)[0]
    end = Sampling(12, 0.0, first.tokens[3])
    return {
        "greedy": _plain(engine.generate(prompts, GREEDY, SEEDS)),
        "warm": _plain(engine.generate(prompts, WARM, SEEDS)),
        "hot": _plain(hot),
        "hot_again": _plain(engine.generate(prompts, HOT, SEEDS)),
        "hot_reversed": _plain(engine.generate(prompts[::-1], HOT, SEEDS[::-1])[::-1]),
        "hot_alone": _plain([engine.generate([p], HOT, [s])[0] for p, s in zip(prompts, SEEDS, strict=True)]),
        "hot_other_seeds": _plain(engine.generate(prompts, HOT, [seed - 8 for seed in SEEDS])),
        "ended": _plain(engine.generate(prompts[:1], end, None)),
        "nothing": engine.generate([], HOT, []),
    }


def _updated(engine: SglangEngine, folder: Path) -> dict[str, Any]:
    prompts, new = prompts_of(8), tiny_policy(seed=5)
    start = {name: tensor.clone() for name, tensor in engine.held()[0].tensors.items()}
    engine.update([(name, _not_contiguous(tensor)) for name, tensor in new.state_dict().items()], "7")
    by_tensor = engine.generate(prompts, HOT, SEEDS)
    held = engine.held()
    after_held = engine.generate(prompts, HOT, SEEDS)
    engine.release_memory()
    released = _error(engine.held)
    engine.resume_memory()
    engine.flush_cache()
    engine.update_from_disk(str(tiny_checkpoint(folder / "new", seed=5)), "8")
    by_disk = engine.generate(prompts, HOT, SEEDS)
    old = tiny_policy().state_dict()
    return {
        "start_is_checkpoint": all(
            torch.equal(start[name][: len(old[name])], old[name]) for name in (EMBEDDING, O_PROJ)
        ),
        "held": {name: list(tensor.shape) for name, tensor in held[0].tensors.items()},
        "held_qkv": torch.equal(
            held[0].tensors["model.layers.0.self_attn.qkv_proj.weight"],
            torch.cat([new.state_dict()[f"model.layers.0.self_attn.{each}_proj.weight"] for each in "qkv"]),
        ),
        "placed": sorted(held[0].placements),
        "released": released,
        "by_tensor": _plain(by_tensor),
        "after_held": _plain(after_held),
        "by_disk": _plain(by_disk),
        "versions": [engine.weight_version, *sorted({str(each.weight_version) for each in by_disk})],
        "folders_left": [str(path) for path in Path("/dev/shm").glob(f"repro-scratch-held-*-{os.getpid()}-*")],  # noqa: S108 - looks there
    }


def _refused(engine: SglangEngine) -> dict[str, Any]:
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

    inside = engine._host.engine
    ask: Callable[[Any], Any] = inside.loop.run_until_complete
    good = list(tiny_policy().state_dict().items())
    told = {"disk": _error(lambda: engine.update_from_disk("/nowhere/at/all", "9"))}
    ask(inside.tokenizer_manager.begin_weight_update(BeginWeightUpdateReqInput(), None))
    told["session"] = _error(lambda: engine.update(good, "9"))
    ask(inside.tokenizer_manager.end_weight_update(EndWeightUpdateReqInput(), None))
    told["long"] = _error(lambda: engine.generate([[1] * 300], HOT, [1]))
    told["cut"] = _error(lambda: engine.generate([[1] * 250], HOT, [1]))
    told["version"] = engine.weight_version
    engine.weight_version = "99"
    told["stale"] = _error(lambda: engine.generate([[1, 2]], HOT, [1]))
    bad = [(name, tensor.clone()) for name, tensor in good]
    next(tensor for name, tensor in bad if name == "model.norm.weight")[3] = float("nan")
    engine.update(bad, "10")
    told["nan"] = _error(lambda: engine.generate([[1, 2]], HOT, [1]))
    told["nan_greedy"] = _error(lambda: engine.generate([[1, 2]], GREEDY, None))
    engine.update(good, "11")
    return {"refused": told, "back": _plain(engine.generate(prompts_of(8), HOT, SEEDS))}


def _killed(engine: SglangEngine) -> dict[str, Any]:
    scheduler = next(each for each in _children() if "scheduler" in _title(each.pid))
    assert scheduler.pid is not None
    # 32 rows of 200 tokens take seconds.
    threading.Timer(0.4, os.kill, [scheduler.pid, signal.SIGKILL]).start()
    first = _error(lambda: engine.generate(prompts_of(32), Sampling(200, 1.0, EOS, ignore_eos=True), SEEDS * 4))
    second = _error(lambda: engine.generate([[1, 2]], HOT, [1]))
    return {"killed": [first, second], "alive": [each.name for each in multiprocessing.active_children()]}


def _children() -> list[multiprocessing.process.BaseProcess]:
    return multiprocessing.active_children()


def _variables(pid: int | None) -> set[str]:
    return set(psutil.Process(pid).environ())


def _not_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous().mT if tensor.dim() == 2 else tensor


def _title(pid: int | None) -> str:
    return psutil.Process(pid).name() + " ".join(psutil.Process(pid).cmdline())


def _plain(responses: list[Response]) -> list[dict[str, Any]]:
    return [asdict(response) for response in responses]


def _error(act: Callable[[], Any]) -> str:
    try:
        act()
    except EngineError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    main()

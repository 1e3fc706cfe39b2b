"""Whether the weights of slime's trainer arrive in its SGLang: ``--custom-megatron-init-path slime_weights.watch``.

After every weight sync the trainer's own parameters, as they lie on its GPU, are compared with what SGLang's processes
hold, by the fingerprints of repro (`repro_golden.recording.weight_sync`). One line a sync goes to ``$WATCHED``; weights
that did not arrive end the training. ``$WITHHOLD`` plants a fault: from the second sync on, tensors whose canonical
name it is are not sent. For one trainer process with all of a dense model, and an engine of any `tp_size`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from repro_core.config import SglangConfig
from repro_core.engines.megatron.weights import Where, placement_of
from repro_core.model.hf_config import read_config
from repro_core.rollout.sglang.http import SglangServer
from repro_golden.base.errors import ReproError
from repro_golden.recording.weight_sync import SyncJudge

PREFIX = "module.module."
"""What stands before Megatron's own names in slime: Float16Module in DistributedDataParallel."""


def watch(args: Any) -> None:
    """Look at every weight sync of this process from here on."""
    from slime.backends.megatron_utils.update_weight import update_weight_from_tensor as way

    updater = way.UpdateWeightFromTensor
    model = read_config(Path(args.hf_checkpoint))
    judge = SyncJudge(None, tell, limit=2)
    sync, send = updater.update_weights, updater._send_hf_params

    def withheld(self: Any, named: list[tuple[str, Any]]) -> Any:
        gone = os.environ.get("WITHHOLD") if self.weight_version > 1 else None
        return send(self, [(name, tensor) for name, tensor in named if name != gone])

    def judged(self: Any) -> None:
        began = time.perf_counter()
        sync(self)
        seconds = time.perf_counter() - began
        (chunk,) = self.model
        weights = {name.removeprefix(PREFIX): value.detach() for name, value in chunk.named_parameters()}
        whole = Where(vocab=weights["embedding.word_embeddings.weight"].shape[0], fused_norms=True)
        judge.begin(str(self.weight_version), "tensor")
        judge.sent(weights, {name: placement_of(model, whole, name) for name in weights})
        for url in addresses(self.rollout_engines):
            server = SglangServer(SglangConfig(url=url), model, "bf16")
            for held in server.held():
                judge.received(held)
            server.close()
        try:
            judge.end(seconds)
        except ReproError as error:
            tell(str(error))
            raise

    updater.update_weights, updater._send_hf_params = judged, withheld


def addresses(engines: Any) -> list[str]:
    """Of the servers of SGLang that the trainer has."""
    import ray

    return [url for url in ray.get([engine.get_url.remote() for engine in engines]) if url]


def tell(line: str) -> None:
    """A line of the run's own file."""
    with Path(os.environ["WATCHED"]).open("a") as out:
        out.write(f"{line}\n")

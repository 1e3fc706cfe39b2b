"""Runs trainers on megatron-core in many layouts, one job after the other, and keeps all that they observe.

``python megatron_jobs_kit.py JOBS.json OUT`` imports everything once and forks the ranks of each batch of jobs. A batch
has a ``world`` and ``jobs``; a job a ``name``, a ``config`` and what to ``do``, a list of verbs with arguments:

- ``train FILE [UPDATES]``: train on a rollout that `write_rollout` wrote, or only begin it.
- ``sample ID``, ``weights``, ``state``: keep a rollout, the generator's weights, the state of this process.
- ``held``: keep all weights, main weights and moments by canonical name.
- ``snapshot NAME``: keep, under a name of its own, all that decides what this process does next.
- ``save DIR``, ``load DIR``, ``new``: of the trainer; ``new`` makes another one of the same configuration.
- ``set KEY VALUE``: change one key of the configuration, for ``new``.
- ``fails``: the next verb must fail with a ValueError (all our errors are), whose text is kept.

Each rank writes ``OUT/NAME.RANK.pt``: see `Found`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron_train_kit import policy_of
from torch import Tensor

from repro_core import Rollout
from repro_core.config import ModelConfig, TrainConfig
from repro_core.model.hf import save_hf
from repro_core.model.layout_free import Box, Joining, Local

__all__ = [
    "CP", "EP", "MODELS", "PP", "SP", "TP", "VPP", "Found", "Jobs", "Key", "eps_units", "same", "write_rollout",
]  # fmt: skip

TP = {"tensor_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
VPP = {
    **PP,
    "virtual_pipeline_model_parallel_size": 2,
    "overlap_p2p_comm": True,
    "batch_p2p_comm": False,
}

DENSE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
}
MOE: dict[str, Any] = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
MODELS = {
    "dense": DENSE,
    "moe": MOE,
    "tied": {**DENSE, "tie_word_embeddings": True},
    "deep": {**DENSE, "num_hidden_layers": 4},
}
SETTINGS: dict[str, Any] = {
    "policy": "megatron",
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "global_batch_size": 4,
    "num_steps_per_rollout": 2,
    "max_tokens_per_micro_batch": 24,
    "clip_grad": 0.0,
    # Adam divides a gradient by its own size: without this, rounding where a gradient is 0 (the bias of the keys) would
    # move weights as far as any other gradient does.
    "adam_eps": 1e-3,
}

Key = tuple[int, str, str]


class Found(NamedTuple):
    """What one rank kept.

    Attributes:
        signals: by update, phase and name: a copy of the tensor, and its placement, None where it has none.
        said: what `fails` caught: the error's class and text.
    """

    signals: dict[Key, tuple[Tensor, Any]]
    said: list[tuple[str, str]]


class Jobs:
    """Jobs in a folder, and what they found.

    Args:
        folder: where weights to start from and rollouts are written at once, and everything else later.
        kinds: which of `MODELS`.
    """

    def __init__(self, folder: Path, kinds: Sequence[str]) -> None:
        self.folder = folder
        self._batches: dict[int, list[dict[str, Any]]] = {}
        for kind in kinds:
            model = ModelConfig(**MODELS[kind])
            save_hf(policy_of(model), folder / kind)
            write_rollout(folder / f"{kind}.rollout", self.config(kind))

    def more(self) -> Jobs:
        """The same folder, for other jobs."""
        return Jobs(self.folder, ())

    def config(self, kind: str, **settings: Any) -> dict[str, Any]:
        """Of a run that starts from a kind's weights."""
        return {**SETTINGS, "model": MODELS[kind], "hf_checkpoint": str(self.folder / kind), **settings}

    def path(self, name: str) -> str:
        """In the folder."""
        return str(self.folder / name)

    def add(
        self,
        world: int,
        name: str,
        kind: str = "dense",
        megatron: Mapping[str, Any] | None = None,
        *,
        do: Sequence[Sequence[Any]] | None = None,
        **settings: Any,
    ) -> str:
        """Note a job; without `do` it trains on the kind's rollout. Jobs of one world run in order."""
        config = self.config(kind, megatron=dict(megatron or {}), **settings)
        work = [["train", self.path(f"{kind}.rollout")]] if do is None else [list(verb) for verb in do]
        self._batches.setdefault(world, []).append({"name": name, "config": config, "do": work})
        return name

    def run(self, out: str = "found", *, deadline_s: float = 280.0) -> None:
        """Run what was noted, in one fresh interpreter that forks the ranks, and say what went wrong, if anything."""
        batches = [{"world": world, "jobs": jobs} for world, jobs in self._batches.items()]
        (self.folder / out).mkdir(exist_ok=True)
        (self.folder / f"{out}.json").write_text(json.dumps(batches))
        core = str(Path(__file__).parents[1] / "core")
        done = subprocess.run(
            [sys.executable, __file__, self.path(f"{out}.json"), self.path(out)],
            env={**os.environ, "PYTHONPATH": core, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=deadline_s,
        )
        assert done.returncode == 0, done.stderr[-4000:]

    def ranks(self, name: str, out: str = "found") -> list[Found]:
        """What each rank of a job kept."""
        files = sorted((self.folder / out).glob(f"{name}.[0-9].pt"))
        assert files, f"no rank wrote {name}"
        return [Found(*torch.load(file, weights_only=False)) for file in files]

    def joined(self, name: str, out: str = "found") -> dict[Key, Tensor]:
        """All signals of a job by canonical name: shards put together, replicas and columns equal on all ranks."""
        whole: dict[Key, Tensor] = {}
        parts: dict[tuple[int, str], list[tuple[Local, Tensor, Any]]] = {}
        for rank in self.ranks(name, out):
            for (step, phase, key), (tensor, place) in rank.signals.items():
                if phase.startswith("state"):  # each process's own
                    continue
                if place is None:
                    first = whole.setdefault((step, phase, key), tensor)
                    assert same(first, tensor), f"{name}: {phase} {key} of update {step} differs between ranks"
                    continue
                local = Local(tuple(place["shape"]), tuple(Box(**part) for part in place["parts"]))
                parts.setdefault((step, phase), []).append((local, tensor, place.get("flat")))
        for (step, phase), held in parts.items():
            joining = Joining({part.name: part.shape for local, _, _ in held for part in local.boxes})
            for local, tensor, flat in held:
                joining.add(local, tensor, flat)
            whole |= {(step, phase, key): tensor for key, tensor in joining.finish().items()}
        return whole


def write_rollout(path: Path, config: Mapping[str, Any], rollout_id: int = 0) -> None:
    """Sample with the built-in policy; rewards differ in each group, and some tokens are masked, one sample's all."""
    from repro_core.train.trainer import Trainer

    trainer = Trainer(TrainConfig.from_mapping({**config, "policy": "torch"}), log=lambda _: None)
    made = trainer.sample(rollout_id)
    tensors = dict(made.tensors)
    tensors["rewards"] = torch.arange(len(tensors["rewards"])).float() % 4
    ends = torch.cumsum(tensors["response_lengths"], 0)
    tensors["loss_mask"][1] = 0
    tensors["loss_mask"][ends[4] : ends[5]] = 0
    torch.save((made.meta, tensors), path)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and all bits are equal."""
    return _bits(a) == _bits(b)


def eps_units(a: Mapping[Key, Tensor], b: Mapping[Key, Tensor], phase: str) -> float:
    """The largest difference over all signals of a phase, each in fp32 epsilons of the signal's largest value.

    Columns and metrics count in epsilons of 1 at least: KL and the sums of what cancels are no larger than rounding.
    """
    worst = 0.0
    for key in (key for key in b if key[1] == phase and b[key].numel()):
        x, y = a[key].double(), b[key].double()
        apart = float((x - y).abs().max())
        if apart:
            worst = max(
                worst, apart / (2.0**-23 * max(float(y.abs().max()), 1.0 if phase in ("forward", "loss") else 1e-30))
            )
    return worst


def _bits(tensor: Tensor) -> tuple[Any, ...]:
    plain = tensor.detach().contiguous().reshape(-1)
    return str(tensor.dtype), tuple(tensor.shape), bytes(plain.view(torch.uint8).numpy().tobytes())


class _Job:
    """One job on one rank."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.config = dict(job["config"])
        self.signals: dict[Key, tuple[Tensor, Any]] = {}
        self.said: list[tuple[str, str]] = []
        self.step = 0
        self.trainer: Any = None
        expects = False
        for verb, *arguments in [*([] if ["new"] in job["do"][:2] else [["new"]]), *job["do"]]:
            if verb == "fails":
                expects = True
                continue
            try:
                getattr(self, verb)(*arguments)
                if expects:
                    self.said.append(("nothing", ""))
            except ValueError as error:
                if not expects:
                    raise
                self.said.append((type(error).__name__, str(error)))
            expects = False

    def new(self) -> None:
        from repro_core.train.trainer import Trainer

        self.trainer = Trainer(TrainConfig.from_mapping(self.config), log=lambda _: None)

    def set(self, key: str, value: Any) -> None:
        self.config[key] = value

    def train(self, path: str, updates: int | None = None) -> None:
        meta, tensors = torch.load(path, weights_only=False)
        self.step = self.trainer.position[0]
        for number, step in enumerate(self.trainer.train(Rollout(meta, tensors), self.observe), 1):
            self.step = step + 1
            if number == updates:
                return

    def sample(self, rollout_id: int) -> None:
        self._keep("sample", self.trainer.sample(rollout_id).tensors)

    def weights(self) -> None:
        self._keep("weights", dict(self.trainer.engines.generator().named_parameters()))

    def held(self) -> None:
        """As `observe`: placed, so that all ranks' can be joined."""
        from repro_core.engines.megatron.weights import placement_of

        for prefix, engine in self.trainer.engines.engines.items():
            for number, chunk in enumerate(engine.raw):
                for name, weight in chunk.named_parameters():
                    place = placement_of(engine.model, engine.where[number], name, prefix)
                    self.signals[self.step, "model", f"{prefix}{number}/{name}"] = weight.detach().clone(), place
            for number, parameter in engine.mains if engine.trained else ():
                tensors = {
                    "main": parameter.main,
                    **{kind: parameter.moment(kind) for kind in ("exp_avg", "exp_avg_sq")},
                }
                place = placement_of(engine.model, engine.where[number], parameter.name, prefix, parameter.part)
                for kind, tensor in tensors.items():
                    self.signals[self.step, kind, f"{prefix}{number}/{parameter.name}"] = tensor.detach().clone(), place
                self.signals[self.step, "step", f"{prefix}{parameter.name}"] = parameter.moment("step").clone(), None

    def state(self) -> None:
        self._keep("state", self.trainer.state())

    def snapshot(self, name: str) -> None:
        self._keep(f"state {name}", self.trainer.state())
        self._keep(f"state {name} weights", dict(self.trainer.engines.generator().named_parameters()))
        counts = {key: torch.tensor(engine.updates) for key, engine in self.trainer.engines.engines.items()}
        self._keep(f"state {name} updates", counts)

    def save(self, directory: str) -> None:
        self.trainer.save(directory)

    def load(self, directory: str) -> None:
        self.trainer.load(directory)
        self.step = self.trainer.position[0]

    def observe(self, phase: str, name: str, value: Any, placement: Any = None) -> None:
        """Keep a copy of a signal. Those of no placement are the same on every rank."""
        if isinstance(value, Mapping):
            for key, tensor in value.items():
                self.signals[self.step, phase, name + key] = tensor.detach().clone(), (placement or {}).get(key)
        elif isinstance(value, Tensor):
            self.signals[self.step, phase, name] = value.detach().clone(), None
        else:
            self.signals[self.step, phase, name] = torch.tensor(value, dtype=torch.float64), None

    def _keep(self, phase: str, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.signals[self.step, phase, name] = tensor.detach().clone(), None


def _rank(rank: int, world: int, port: int, jobs: Sequence[Mapping[str, Any]], out: str) -> None:
    if world > 1:
        given = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in given.items()})
    for job in jobs:
        try:
            made = _Job(job)
        except BaseException:
            print(f"job {job['name']}, rank {rank}:", file=sys.stderr, flush=True)
            raise
        torch.save((made.signals, made.said), Path(out) / f"{job['name']}.{rank}.pt")


def _main(batches: Sequence[Mapping[str, Any]], out: str) -> int:
    import repro_core.engines.megatron.model
    import repro_core.train.trainer  # noqa: F401

    fork = multiprocessing.get_context("fork")
    for batch in batches:
        world = batch["world"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = [fork.Process(target=_rank, args=(rank, world, port, batch["jobs"], out)) for rank in range(world)]
        for process in ranks:
            process.start()
        failed = False
        while not failed and any(process.is_alive() for process in ranks):
            for process in ranks:
                process.join(0.05)
            failed = any(process.exitcode for process in ranks)
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
        if any(process.exitcode for process in ranks):
            return 1
    return 0


if __name__ == "__main__":
    from repro_core.engines.megatron import cpu

    cpu.load()
    sys.exit(_main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]))

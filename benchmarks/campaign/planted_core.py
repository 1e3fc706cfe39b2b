"""The built-in trainer with planted changes: the replay child's own loop and recorder, in a fork for each change.

What is so is read at the trainer's side of its interface: the bytes of all that it shows, when it shows it, and of all
its weights and optimizer state when it begins to show an update: what changes later belongs to the next step. The
weights of the frozen reference are looked at apart: the trainer does not show them, but only the log-probs that they
give. So are the rows of Megatron's embedding and output layer past the vocabulary, which no layout reads.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import signal
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from planted_faults import Injector
from planted_judge import STATE, UNSHOWN, Clean, judged
from planted_truth import Signals, of_number, of_tensor
from torch.utils._python_dispatch import _disable_current_modes

from repro_golden.recording.attach.gathered.collect import Gathering
from repro_golden.recording.rank_group import RankGroup
from repro_golden.replay.ranks import free_port, meeting
from repro_golden.trace import Header

__all__ = ["PROGRAMS", "one", "run_of", "warm"]

STEPS = 3
MODEL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG = {
    "model": MODEL,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "global_batch_size": 4,
    "num_steps_per_rollout": 2,
    "max_tokens_per_micro_batch": 64,
    "max_response_len": 3,
    "kl_loss_coef": 0.1,
}
_MEGATRON = {**CONFIG, "policy": "megatron"}
_TWO_LAYERS = {**MODEL, "num_hidden_layers": 2}
PROGRAMS: dict[str, dict[str, Any]] = {
    "core": CONFIG,
    "tp2": {**_MEGATRON, "megatron": {"tensor_model_parallel_size": 2}},
    "pp2": {**_MEGATRON, "model": _TWO_LAYERS, "megatron": {"pipeline_model_parallel_size": 2}},
}
RANKS = 2
_OF_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
"""Ends the names of Megatron's tensors with a row for each token."""
_PATIENCE = 60
"""Seconds after which a rank is ended."""
_IDLE = 5
"""Seconds in which ranks that use hardly any of the processor are taken to wait for each other."""

_rollouts: list[Any] = []


def warm(program: str) -> None:
    """Import what a run will, and sample its rollouts."""
    for name in ("repro_golden.replay.child", "repro_core.train.trainer", "repro_golden.case.identity",
        "pyarrow.parquet", "pandas"):  # fmt: skip
        importlib.import_module(name)
    if program != "core":
        from repro_core.engines.megatron import cpu

        cpu.load()
        importlib.import_module("repro_core.engines.megatron.model")
        importlib.import_module("repro_core.engines.megatron.engines")
    import repro_core

    trainer = repro_core.build({"config": {**PROGRAMS[program], "policy": "torch"}})
    for number in range(-(-STEPS // 2)):
        rollout = trainer.sample(number)
        rewards = torch.arange(len(rollout.tensors["rewards"]), dtype=torch.float32) % 4  # something to learn
        _rollouts.append(repro_core.Rollout(rollout.meta, {**rollout.tensors, "rewards": rewards}))


class Watched:
    """A trainer whose own work, and nothing of the recorder's, is under the injector; all that it shows is kept."""

    def __init__(self, injector: Injector, config: Mapping[str, Any]) -> None:
        import repro_core

        self.injector = injector
        self.signals: Signals = {}
        with injector:
            self.trainer: Any = repro_core.build({"config": config})

    @property
    def position(self) -> tuple[int, int]:
        """See the trainer."""
        place: tuple[int, int] = self.trainer.position
        return place

    def sample(self, rollout_id: int) -> Any:
        """A rollout that was sampled before."""
        return _rollouts[rollout_id]

    def train(self, rollout: Any, observe: Any) -> Iterator[int]:
        """Train, marking where steps begin."""
        step, looked = self.trainer.position[0], set[int]()

        def shown(phase: str, name: str, value: Any, placement: Any = None) -> None:
            if phase == "grad" and isinstance(value, Mapping):
                self.injector.mark("step")
            with _disable_current_modes():
                self._keep(step, phase, name, value, placement)
                if phase == "update" and step not in looked:
                    looked.add(step)
                    self._keep_state(step)
                observe(phase, name, value, placement)

        updates = iter(self.trainer.train(rollout, shown))
        while True:
            self.injector.mark("forward")
            with self.injector:
                done = next(updates, None)
            if done is None:
                return
            yield done
            step += 1

    def _keep_state(self, step: int) -> None:
        """All state, as it is when the first of an update is shown."""
        for name, tensor in self.trainer.state().items():
            if name.startswith(("position/", "rng/", "rollout/")):
                continue
            if name.startswith("ref/"):
                self.signals[step, "update", f"{UNSHOWN}{name}"] = of_tensor(tensor)
                continue
            rows = self._rows(name, tensor)
            self.signals[step, "update", f"{STATE}{name}"] = of_tensor(tensor[:rows] if tensor.dim() else tensor)
            if tensor.dim() and rows < len(tensor):
                self.signals[step, "update", f"{UNSHOWN}{name}"] = of_tensor(tensor[rows:])

    def _rows(self, name: str, tensor: torch.Tensor) -> int:
        """How many rows this rank has of what there is, without those that only fill up Megatron's vocabulary."""
        if not tensor.dim() or not name.endswith(_OF_VOCABULARY):
            return len(tensor) if tensor.dim() else 0
        parallel = self.trainer.config.megatron.tensor_model_parallel_size
        before = int(os.environ["RANK"]) % parallel * len(tensor)
        return max(0, min(len(tensor), self.trainer.config.model.vocab_size - before))

    def _keep(self, step: int, phase: str, name: str, value: Any, placement: Any) -> None:
        for key, item in (value if isinstance(value, Mapping) else {"": value}).items():
            place = placement.get(key) if placement and isinstance(value, Mapping) else placement
            if not isinstance(item, torch.Tensor):
                self.signals[step, phase, name + key] = of_number(float(item))
            elif place is None:
                self.signals[step, phase, name + key] = of_tensor(item)
            else:  # a box of elements for each whole tensor that this one holds a part of
                flat = item.detach().reshape(-1)
                for part in place["parts"]:
                    box = flat.as_strided(part["size"], part["step"], flat.storage_offset() + part["start"])
                    at = step, phase, part["name"]
                    self.signals[at] = self.signals.get(at, b"") + of_tensor(box)

    def held(self, where: str) -> list[tuple[str, torch.Tensor]]:
        """The tensors of a kind."""
        if where == "input":
            return [(name, tensor) for rollout in _rollouts for name, tensor in rollout.tensors.items()]
        if where == "gradient":
            policy = self.trainer.engines.policy
            if hasattr(policy, "mains"):
                return [(main.name, main.gradient) for _, main in policy.mains]
            return list(policy.optimizer.main_grad.items())
        moments = ("exp_avg", "step")
        state = [(name, t) for name, t in self.trainer.state().items() if not name.startswith(("position/", "rng/"))]
        return [(name, t) for name, t in state if name.startswith(moments) == (where == "state")]

    def numbers(self) -> list[tuple[Any, str]]:
        """Hyperparameters of the configuration."""
        groups = getattr(self.trainer.engines.policy.optimizer, "param_groups", [])
        config = [(self.trainer.config, name) for name in ("lr", "betas", "adam_eps", "weight_decay", "clip_grad",
            "kl_loss_coef", "eps_clip", "eps_clip_high", "entropy_coef", "temperature")
            if hasattr(self.trainer.config, name)]  # fmt: skip
        return config + [(group, key) for group in groups for key in group]


def one(program: str, place: Path, asked: Mapping[str, Any] | None, clean: Clean | None) -> int:
    """One run, as the replay child or the children of all ranks make it."""
    if program == "core":
        code, answer, signals = _trained(program, asked, place / "trace", None)
    else:
        code, answer, signals = _by_ranks(program, place, asked)
    if not code:
        answer |= judged(place, signals, clean)
    (place / "answer.json").write_text(json.dumps(answer | {"code": code}))
    return code


def run_of(trace: Path) -> dict[str, Any]:
    """What the replay child is asked for."""
    return {"steps": STEPS, "trace": str(trace), "perturbation": None, "dump": [], "baseline": None, "states": {},
        "states_budget": None, "save_rollouts": None, "terminal": False, "checkpoint": None}  # fmt: skip


def _trained(
    program: str, asked: Mapping[str, Any] | None, trace: Path, group: Any
) -> tuple[int, dict[str, Any], Signals]:
    """What `replay.child` does with a trainer: whether it failed, the injector's counts, and what was so."""
    import repro_core
    from repro_golden.replay import child

    config = PROGRAMS[program]
    watched: list[Watched] = []
    injector = Injector(asked, lambda where: watched[0].held(where), lambda: watched[0].numbers())
    resources = {"cpus": 1, "ranks": RANKS if group else 1}
    job = {"case": {"subject": {"config": config}, "resources": resources}, "subject": {"kind": "core"}}
    run = run_of(trace)
    code = 0
    try:
        watched.append(Watched(injector, config))
        recorder = child._recorder(job, run, "", 0, group)
        child._train(repro_core, watched[0], recorder, run, None, child._Operations(None, 0), group, None)
    except Exception:  # noqa: BLE001 - the trainer's own
        traceback.print_exc()
        code = 1
    return code, injector.told(), watched[0].signals if watched else {}


def _by_ranks(program: str, place: Path, asked: Mapping[str, Any] | None) -> tuple[int, dict[str, Any], Signals]:
    """A fork for each rank, of which one is changed; their records are put together by `repro`'s own gathering."""
    port, raw = free_port(), place / "raw"
    raw.mkdir()
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if not child:
            _rank(program, place, asked if asked and asked["rank"] == rank else None, rank, port)
        children.append(child)
    code = _waited(children)
    counts: dict[str, Any] = {"done": "", "ranks": []}
    signals: Signals = {}
    for rank in range(RANKS):
        kept = place / f"kept-{rank}"
        if not kept.exists():
            code = 1
            continue
        data, held = pickle.loads(kept.read_bytes())  # noqa: S301 - our own
        if asked is None:
            counts["ranks"].append(data)
        counts["done"] = counts["done"] or data["done"]
        for (step, phase, name), value in held.items():
            name = f"{name} of rank {rank}" if name.startswith((STATE, UNSHOWN)) else name
            signals[step, phase, name] = signals.get((step, phase, name), b"") + value
    if not code:
        with contextlib.closing(Gathering(raw, place / "trace", _header, RANKS)) as gathering:
            gathering.finish(["the trainer"], 0)
    return code, counts, signals


def _waited(children: Sequence[int]) -> int:
    """Wait for ranks; 1 where one failed, or where those that are left wait for each other: that ends them all."""
    left, code = set(children), 0
    used, since = 0.0, time.monotonic()
    while left:
        ended, status = os.waitpid(-1, os.WNOHANG)
        failed = bool(ended and status)
        if ended:
            left.discard(ended)
            used, since = _cpu_seconds(left), time.monotonic()  # what it used is not counted any more
        else:
            time.sleep(0.005)
        if time.monotonic() - since > _IDLE:
            before, used, since = used, _cpu_seconds(left), time.monotonic()
            failed = failed or used - before < _IDLE / 20
        if failed and not code:
            code = 1
            for child in left:
                os.kill(child, signal.SIGKILL)  # not waited for yet, so its number is still its own
    return code


def _cpu_seconds(processes: Iterable[int]) -> float:
    """What they used so far."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in processes]
    return sum(int(user) + int(system) for stat in stats for user, system in [stat[11:13]]) / os.sysconf("SC_CLK_TCK")


def _header(about: Mapping[str, Any], _: int) -> Header:
    return Header.from_mapping(about["header"])


def _rank(program: str, place: Path, asked: Mapping[str, Any] | None, rank: int, port: str) -> NoReturn:
    code = 70
    try:
        signal.alarm(_PATIENCE)
        os.environ.update(meeting(rank, RANKS, port))
        group = RankGroup(place / "raw", rank, RANKS)
        code, counts, signals = _trained(program, asked, place / "trace", group)
        if not code:
            part = place / f"part-{rank}"
            part.write_bytes(pickle.dumps((counts, signals)))
            part.rename(place / f"kept-{rank}")
            while len(list(place.glob("kept-*"))) < RANKS:  # rank 0 holds the store at which they meet
                time.sleep(0.005)
            parallel = importlib.import_module("repro_core.engines.megatron.parallel")
            parallel.stop()
    except BaseException:  # noqa: BLE001 - nothing of ours may go on in a fork
        traceback.print_exc()
    os._exit(code)

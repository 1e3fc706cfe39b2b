"""Golden runs of megatron-core on GPUs: ``python benchmarks/megatron_engine.py --page PAGE [--commit REV]``.

In a scratch repository, `repro golden record` says of each way to compute attention whether it reproduces itself; then
the forward and backward pass is timed with and without determinism. With two GPUs or more, layouts over NCCL are
recorded too. It needs torch with CUDA, megatron-core 0.16.1, Transformer Engine, DVC and git. ``--out`` keeps what was
seen as JSON; ``--from FILE`` writes the page of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SAMPLES, PROMPT, RESPONSE, STEPS = 4, 64, 1984, 3
MODEL = {
    "vocab_size": 32768, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 8,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
"""Eight layers of Qwen2.5-0.5B's shape."""
TE = {"transformer_impl": "transformer_engine"}
FREE = {"deterministic_mode": False}
ROUNDS, WARM = 8, 2
"""Timed passes in each process, and passes before them."""


class Asked:
    """One configuration.

    Attributes:
        name: Of the case.
        megatron: Keys of its ``megatron`` table.
        kept: Whether it must reproduce itself.
        ranks: GPUs.
    """

    def __init__(self, name: str, megatron: Mapping[str, Any], *, kept: bool = True, ranks: int = 1) -> None:
        self.name, self.megatron, self.kept, self.ranks = name, dict(megatron), kept, ranks

    @property
    def free(self) -> bool:
        """Whether it asks for no determinism."""
        return "deterministic_mode" in self.megatron

    @property
    def config(self) -> dict[str, Any]:
        """The trainer's configuration."""
        return {
            "policy": "megatron", "dtype": "bf16", "model": MODEL, "megatron": self.megatron, "lr": 1e-4,
            "rollout_batch_size": 1, "n_samples_per_prompt": SAMPLES, "global_batch_size": SAMPLES,
            "max_response_len": RESPONSE, "max_tokens_per_micro_batch": (PROMPT + RESPONSE) * SAMPLES // 2,
        }  # fmt: skip

    @property
    def variables(self) -> dict[str, str]:
        """What the case sets beside what a replay sets by itself."""
        return {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"} if self.free else {}


ONE = [
    Asked("local", {}),
    Asked("local-free", FREE),
    *(Asked(f"te-{kind}", TE | {"attention_backend": kind}) for kind in ("fused", "unfused", "auto")),
    Asked("te-fused-thd", TE | {"attention_backend": "fused", "qkv_format": "thd"}),
    Asked("te-fused-free", TE | {"attention_backend": "fused"} | FREE, kept=False),
    Asked("te-fused-thd-free", TE | {"attention_backend": "fused", "qkv_format": "thd"} | FREE, kept=False),
]
TWO = [
    Asked("te-tp2", TE | {"attention_backend": "fused", "tensor_model_parallel_size": 2}, ranks=2),
    Asked("te-dp2", TE | {"attention_backend": "fused"}, ranks=2),
    Asked("local-tp2-sp", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, ranks=2),
]


KINDS = {"deterministic": ONE[2], "free": ONE[6]}
"""What is timed."""
RESUMED = ("local", "te-fused")
"""What is saved and resumed."""


# -- golden runs


def repository(folder: Path, asked: Sequence[Asked]) -> None:
    """A repository that holds the trainer, the cases and rollouts of random tokens."""
    shutil.copytree(ROOT / "core", folder / "core", ignore=shutil.ignore_patterns("__pycache__"))
    cases, rollouts = folder / "golden" / "cases", folder / "golden" / "rollouts" / "random"
    cases.mkdir(parents=True)
    rollouts.mkdir(parents=True)
    for case in asked:
        (cases / f"{case.name}.toml").write_text(case_file(case))
    write_rollouts(rollouts)
    for command in (
        ["git", "init", "-q"],
        [sys.executable, "-m", "dvc", "init", "-q"],
        ["git", "add", "-A"],
        ["git", "-c", "user.name=b", "-c", "user.email=b@b", "commit", "-qm", "Cases"],
    ):
        subprocess.run(command, cwd=folder, check=True)


def case_file(case: Asked) -> str:
    """The case as TOML."""
    plain = {k: v for k, v in case.config.items() if not isinstance(v, dict)}
    tables = {k: v for k, v in case.config.items() if isinstance(v, dict)}
    lines = [
        "[case]", f'name = "{case.name}"', f"steps = {STEPS}", "proof_steps = 2", 'rollouts = "golden/rollouts/random"',
        "", "[subject]", 'module = "repro_core"', 'path = "core"', 'timeout = "5m"', f"env = {toml(case.variables)}",
        "", "[subject.config]", *(f"{k} = {toml(v)}" for k, v in plain.items()),
    ]  # fmt: skip
    for name, table in tables.items():
        lines += ["", f"[subject.config.{name}]", *(f"{k} = {toml(v)}" for k, v in table.items())]
    return "\n".join([*lines, "", "[resources]", f"ranks = {case.ranks}", f"gpus = {case.ranks}", ""])


def toml(value: Any) -> str:
    """A value in TOML's notation."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)


def write_rollouts(folder: Path) -> None:
    """Rollouts of random tokens, with rewards that differ within the group."""
    from repro_golden.store.rollout_file import RolloutData, write_rollout
    from repro_golden.store.rollouts import RolloutSet

    for number in range(STEPS):
        tensors, meta = rollout(number)
        write_rollout(folder / f"{number}.safetensors", RolloutData(meta, tensors))
    RolloutSet.write_index(folder)


def rollout(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and description of one."""
    import torch

    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, MODEL["vocab_size"], (SAMPLES * (PROMPT + RESPONSE),), generator=generator)
    tensors = {
        "tokens": tokens,
        "total_lengths": torch.full((SAMPLES,), PROMPT + RESPONSE),
        "response_lengths": torch.full((SAMPLES,), RESPONSE),
        "loss_mask": torch.ones(SAMPLES * RESPONSE, dtype=torch.int64),
        "rollout_log_probs": torch.full((SAMPLES * RESPONSE,), -10.4),
        "rewards": torch.arange(SAMPLES, dtype=torch.float32) % 2,
        "group_index": torch.zeros(SAMPLES, dtype=torch.int64),
    }
    meta = {
        "rollout_id": number, "prompts": ["random"], "labels": [""] * SAMPLES, "statuses": ["completed"] * SAMPLES,
        "sampling": {},
    }  # fmt: skip
    return tensors, meta


def record(folder: Path, case: Asked) -> dict[str, Any]:
    """What `repro golden record` says of one configuration."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "repro", "golden", "record", case.name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    print(f"-- {case.name}: exit {done.returncode}", *done.stdout.splitlines()[-12:], *lines[-4:], sep="\n", flush=True)
    if (done.returncode == 0) != case.kept:
        for log in sorted((folder / ".git" / "repro").rglob("*.log*"))[-2:]:
            print(f"-- {log.name}", *log.read_text(errors="replace").splitlines()[-25:], sep="\n", flush=True)
    result: dict[str, Any] = {
        "name": case.name, "exit": done.returncode, "seconds": time.perf_counter() - began,
        "said": outcome(done.returncode, done.stdout if done.returncode == 0 else done.stderr), "kept": case.kept,
        "ranks": case.ranks,
    }  # fmt: skip
    return result


def outcome(code: int, text: str) -> str:
    """The line that says what became of it."""
    lines = [line for line in text.splitlines() if line.startswith("golden run of" if code == 0 else "repro: ")]
    return re.sub(r": golden/runs/\S+/\S+,", ":", lines[-1]) if lines else "no answer"


# -- a state that is saved and loaded


def resumed(case: Asked) -> dict[str, Any]:
    """Whether a run that loads its state, in a new process, goes on with the same bits as the one that saved it."""
    with tempfile.TemporaryDirectory() as folder:
        states = [json.loads(own_process(["--state", case.name, "--at", folder], case)) for _ in range(2)]
    straight, again = states
    differ = sorted(name for name in straight.keys() | again.keys() if straight.get(name) != again.get(name))
    text = f"{len(straight)} parts of the state after two updates, {len(differ)} differ" + (
        f": {differ[0]} first" if differ else ""
    )
    print(f"-- {case.name}, resumed: {text}", flush=True)
    return {"name": f"{case.name}, saved and resumed", "exit": bool(differ), "said": text, "kept": True}


def state_after(case: Asked, folder: Path) -> dict[str, str]:
    """Fingerprints of the state after two updates; the state after the first is in the folder, or is written to it."""
    sys.path[:0] = [str(ROOT / "core"), str(ROOT / "golden")]
    from repro_core import Rollout
    from repro_core.config import TrainConfig
    from repro_core.train.trainer import Trainer
    from repro_golden.fingerprint import fingerprint

    trainer, saved = Trainer(TrainConfig.from_mapping(case.config), log=lambda _: None), folder / "state"

    def train(number: int) -> None:
        tensors, meta = rollout(number)
        for _ in trainer.train(Rollout(meta, tensors), lambda *_, **__: None):
            pass

    if saved.exists():
        trainer.load(str(saved))
    else:
        train(0)
        trainer.save(str(saved))
    train(1)
    return {name: fingerprint(tensor) for name, tensor in trainer.state().items()}


def own_process(arguments: Sequence[str], case: Asked) -> str:
    """The last line that this script prints in a fresh process with the variables of a replay."""
    variables = {
        **os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHDYNAMO_DISABLE": "1",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    } | case.variables  # fmt: skip
    done = subprocess.run(
        [sys.executable, __file__, *arguments], env=variables, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-3000:], sep="\n", flush=True)
    return (done.stdout.strip().splitlines()[-1:] or ["{}"])[0] if done.returncode == 0 else "{}"


# -- time


def timed(case: Asked) -> dict[str, list[float]]:
    """Milliseconds of a forward and backward pass, in this process; deterministic ones with and without the fill."""
    sys.path.insert(0, str(ROOT / "core"))
    import torch

    from repro_core.config import TrainConfig
    from repro_core.rl.batching import plan_updates
    from repro_core.train.trainer import Trainer

    trainer = Trainer(TrainConfig.from_mapping(case.config), log=lambda _: None)
    engine = trainer.engines.policy
    tensors = {name: tensor.cuda() for name, tensor in rollout(0)[0].items()}
    (update,) = plan_updates(tensors, SAMPLES, case.config["max_tokens_per_micro_batch"])
    value: dict[str, list[float]] = {}
    for number in range(2 * (WARM + ROUNDS)):
        fill = not case.free and number % 2 == 0
        torch.utils.deterministic.fill_uninitialized_memory = fill
        columns = engine.forward(tensors, update)
        gradients = {name: torch.ones_like(column) / len(column) for name, column in columns.items()}
        torch.cuda.synchronize()
        began = time.perf_counter()
        engine.backward(gradients)
        torch.cuda.synchronize()
        if number >= 2 * WARM:
            value.setdefault("filled" if fill else "plain", []).append((time.perf_counter() - began) * 1e3)
    return value


def times(kinds: Mapping[str, Asked], rounds: int) -> dict[str, float]:
    """Medians over processes that take turns."""
    value: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, kind in kinds.items():
            for how, values in json.loads(own_process(["--time", kind.name], kind)).items():
                value.setdefault(f"{name} {how}", []).extend(values)
    return {name: statistics.median(values) for name, values in value.items()}


# -- the page


def page(seen: Mapping[str, Any]) -> str:
    """docs/benchmarks/megatron.md."""
    rows = [
        [f"`{record['name']}`", "kept" if record["exit"] == 0 else "refused", short(record["said"])]
        for record in seen["records"]
    ]
    lines = [
        "# Megatron-core on GPUs",
        "",
        "Written by `python benchmarks/megatron_engine.py` on a machine with GPUs: `repro golden record` of each case",
        "in a scratch repository, three updates of eight layers of Qwen2.5-0.5B's shape in bf16, 4 x 2,048 tokens.",
        "",
        *(textwrap.fill(f"- {line}", 120, subsequent_indent="  ", break_on_hyphens=False) for line in seen["machine"]),
        "",
        "| case | golden run | what it says |",
        "| --- | --- | --- |",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        "`-free` asks for no determinism (`deterministic_mode = false`, NVTE_ALLOW_NONDETERMINISTIC_ALGO=1); `thd`",
        "packs samples one after the other; `tp2` and `dp2` are two GPUs over NCCL. A run that is *saved and",
        "resumed* saves its state after the first update; a new process loads it, and both make the second.",
        "",
        "## What determinism costs",
        "",
        "Forward and backward pass, medians; processes take turns, and the memory fill is switched every other pass.",
        "",
        "| how | ms | to the fastest |",
        "| --- | --- | --- |",
    ]
    fastest = min(seen["times"].values(), default=1.0)
    lines += [f"| {name} | {ms:.1f} | {ms / fastest:.3f}x |" for name, ms in seen["times"].items()]
    return "\n".join([*lines, ""])


def short(text: str) -> str:
    """One cell of the table."""
    text = re.sub(r"\s+", " ", text).replace("|", "\\|")
    return text if len(text) <= 420 else f"{text[:417]}..."


def machine(commit: str) -> list[str]:
    """What the figures were measured on."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.split()
    versions = ", ".join(f"{name} {version(name)}" for name in ("megatron-core", "transformer-engine", "triton"))
    return [
        f"{torch.cuda.device_count()} x {properties.name}, driver {driver[0] if driver else 'unknown'}",
        f"Python {platform.python_version()}, torch {torch.__version__}, {versions}",
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}",
    ]


def version(name: str) -> str:
    """Of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        module = __import__(name.replace("-", "_").replace("megatron_core", "megatron.core"), fromlist=["__version__"])
        return str(getattr(module, "__version__", "unknown"))


def measured(options: argparse.Namespace, every: Mapping[str, Asked]) -> dict[str, Any]:
    """Record and time what is asked for; what was seen so far is kept after each."""
    import torch

    fit = [name for name, case in every.items() if case.ranks <= torch.cuda.device_count()]
    more = ("times", "resumed")
    wanted = [name for name in options.only or [*fit, *more] if name in (*fit, *more)]
    seen: dict[str, Any] = {"machine": machine(options.commit), "records": [], "times": {}}
    with tempfile.TemporaryDirectory() as folder:
        repository(Path(folder), [every[name] for name in wanted if name not in more])
        for name in wanted:
            if name == "times":
                seen["times"] = times(KINDS, options.rounds)
            elif name == "resumed":
                seen["records"] += [resumed(every[kind]) for kind in RESUMED]
            else:
                seen["records"].append(record(Path(folder), every[name]))
            keep(options.out, seen)
    return seen


def keep(path: Path | None, seen: Mapping[str, Any]) -> None:
    """What was seen so far, as JSON."""
    if path:
        path.write_text(json.dumps(seen, indent=1))


def main() -> None:
    """Record, time, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--from", dest="source", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--time")
    parser.add_argument("--state")
    parser.add_argument("--at", type=Path)
    options = parser.parse_args()
    every = {case.name: case for case in (*ONE, *TWO)}
    if options.time:
        print(json.dumps(timed(every[options.time])))
        return
    if options.state:
        print(json.dumps(state_after(every[options.state], options.at)))
        return
    if options.source:
        seen: dict[str, Any] = {"machine": [], "records": [], "times": {}}
        for part in (json.loads(path.read_text()) for path in options.source):
            if len(options.source) > 1:
                part["machine"][2] += ": " + ", ".join(f"`{record['name']}`" for record in part["records"])
            seen["machine"] += [line for line in part["machine"] if line not in seen["machine"]]
            seen["records"] += part["records"]
            seen["times"] |= part["times"]
    else:
        seen = measured(options, every)
    if options.page:
        options.page.write_text(page(seen))
    print(page(seen))
    wrong = [record["name"] for record in seen["records"] if (record["exit"] == 0) != record["kept"]]
    if wrong:
        sys.exit(f"not as expected: {', '.join(wrong)}")


if __name__ == "__main__":
    main()

"""Logs as slime, Miles, SGLang, Ray, torch and Megatron write them, and the rules that read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from repro.doctor.artefacts.kinds import Log
from repro.doctor.artefacts.logs.files import read_log
from repro.doctor.catalogue import catalogue, subject_of
from repro.doctor.logs import explained
from repro_golden.base.checks import Found, Rule

STAMP = "2026-11-20 15:47:01"


def rules() -> dict[str, Rule]:
    """The rules of logs by id."""
    return {name: rule for name, rule in catalogue().items() if subject_of(rule) == "logs"}


RULES = rules()
PHRASES = tuple(dict.fromkeys(phrase for rule in RULES.values() for phrase in rule.phrases))


def slime(text: str, file: str = "model.py:918") -> str:
    """A line of slime's logger."""
    return f"[{STAMP}] {file} - {text}"


def actor(text: str, pid: int = 4242) -> str:
    """A line of a training actor as Ray's driver shows it, with colours."""
    return f"\x1b[36m(MegatronTrainRayActor pid={pid}, ip=10.0.0.{pid % 7})\x1b[0m {text}"


def engine(text: str, pid: int = 7001) -> str:
    """A line of an engine as Ray's driver shows it."""
    return f"\x1b[36m(SGLangEngine pid={pid}, ip=10.0.0.9)\x1b[0m {text}"


def step(number: int, **metrics: float) -> str:
    """An optimizer step."""
    values = {f"train/{name}": value for name, value in {"loss": 0.5, "grad_norm": 0.1, **metrics}.items()}
    return actor(slime(f"step {number}: {values}"))


def perf(number: int, **metrics: float) -> str:
    """What slime prints of a rollout's times."""
    values = {f"perf/{name}": value for name, value in metrics.items()}
    return actor(slime(f"perf {number}: {values}", "train_metric_utils.py:401"))


def arguments(**values: object) -> list[str]:
    """Megatron's list of arguments."""
    head = "------------------------ arguments ------------------------"
    rows = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(values.items())]
    return [actor(line) for line in (head, *rows, "-------------------- end of arguments ---------------------")]


def trace(last: str, *frames: str) -> list[str]:
    """A traceback."""
    lines = ["Traceback (most recent call last):"]
    for frame in frames or ('/root/slime/train.py", line 30, in train',):
        lines += [f'  File "{frame}', "    return call(*args)"]
    return [*lines, last]


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 1.05 GiB is free."
)
BACKWARD = [
    actor(line)
    for line in trace(
        OOM,
        '/root/slime/slime/backends/megatron_utils/model.py", line 640, in train_one_step',
        '/usr/lib/python3/torch/_tensor.py", line 647, in backward',
        '/usr/lib/python3/torch/autograd/graph.py", line 829, in _engine_run_backward',
    )
]
SCHEDULER_FRAME = '/sgl-workspace/sglang/python/sglang/srt/managers/scheduler.py", line 2900, in run'
SCHEDULER = [engine(line) for line in trace(OOM, SCHEDULER_FRAME)]
SYNC_STARTS = actor(slime("Timer update_weights start", "timer.py:24"))
SYNC_ENDS = actor(slime("Timer update_weights end (elapsed: 1.3s)", "timer.py:32"))
LOADED = actor("  successfully loaded checkpoint from /ckpt/qwen [ t 1/2, p 1/1 ] at iteration 0")


def clean() -> list[str]:
    """A run in which nothing is wrong: arguments, loading, rollouts, syncs and steps, with harmless noise."""
    lines = arguments(load="/ckpt/qwen", rollout_batch_size=32, colocate=True, sglang_mem_fraction_static=0.8)
    lines += [LOADED, engine(f"[{STAMP} TP0] server_args=ServerArgs(model_path='/m', mem_fraction_static=0.8)")]
    prefix = f"(RolloutManager pid=99) [{STAMP}] sglang_rollout.py:447 - Finish rollout: "
    quoted = "How to fix CUDA out of memory? KeyError: 'prompt' Traceback (most recent call last): EADDRINUSE"
    for number in range(3):
        lines += [
            actor(slime("Timer update_weights start", "timer.py:24"), 4242),
            actor("Update weights: 100%|##########| 12/12 [00:01<00:00,  9.31it/s]"),
            actor(slime("Timer update_weights end (elapsed: 1.3s)", "timer.py:32")),
            engine('INFO:     10.0.0.9:51234 - "POST /resume_memory_occupation HTTP/1.1" 200 OK'),
            engine(f"[{STAMP} TP0] Decode batch, #running-req: {20 + number}, #token: 512, token usage: 0.03"),
            engine('INFO:     10.0.0.9:51234 - "POST /generate HTTP/1.1" 200 OK'),
            f"{prefix}[{quoted!r}], label: 7, reward: 1",
            engine('INFO:     10.0.0.9:51234 - "POST /release_memory_occupation HTTP/1.1" 200 OK'),
            perf(number, step_time=10.0, data_preprocess_time=0.1, wait_time_ratio=0.6, train_time=4.0),
            actor(slime(f"rollout {number}: {{'rollout/raw_reward': 0.5, 'rollout/log_probs': -0.4}}")),
            step(number),
        ]
    return lines


def write(path: Path, lines: list[str]) -> Path:
    """A log file."""
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read(folder: Path, lines: list[str], name: str = "train.log") -> Log:
    """A log file of these lines, read by the reader for all rules of logs."""
    return read_log(write(folder / name, lines), PHRASES, explained())


def found(log: Log, only: str | None = None) -> Mapping[str, list[Found]]:
    """What each rule finds, by id; rules that find nothing are left out."""
    findings = {
        name: list(rule.check(log, *[None] * len(rule.uses))) for name, rule in RULES.items() if only in (None, name)
    }
    return {name: hits for name, hits in findings.items() if hits}

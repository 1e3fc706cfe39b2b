"""Rollout determinism of SGLang, and what it costs: ``python benchmarks/rollout.py --page PAGE [--commit REV]``.

Each leg is a fresh process with one attention backend, with deterministic mode or without: it starts SGLang on a model
that is drawn on the spot, makes all checks of `repro check rollout`, and times sampling and weight syncs. ``--out``
keeps what was seen as JSON after every leg; ``--from FILE...`` writes the page of it. ``--device cpu`` runs a tiny
model.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BATCH = 32
MODELS: dict[str, dict[str, Any]] = {
    "cuda": {
        "vocab_size": 32000, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 8,
        "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "initializer_range": 0.05,
    },
    "cpu": {"initializer_range": 0.1},
}  # fmt: skip
"""On a GPU eight layers of Qwen2.5-0.5B's shape with a smaller vocabulary."""
SGLANG: dict[str, dict[str, Any]] = {
    "cuda": {
        "mem_fraction_static": 0.12, "timeout": 300.0,
        "args": {"cuda_graph_max_bs_decode": BATCH, "disable_prefill_cuda_graph": True, "context_length": 4096},
    },
    "cpu": {"max_total_tokens": 16384, "timeout": 240.0},
}  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "cuda": {"alone": 8, "shortest": 20, "longest": 600, "response": 48},
    "cpu": {"alone": 8, "longest": 30, "response": 16},
}
BACKENDS = {"cuda": ("triton", "flashinfer"), "cpu": ("torch_native",)}
DTYPES = {"cuda": "bf16", "cpu": "fp32"}
TOKENS = {"cuda": 128, "cpu": 32}
MODES = {"deterministic": True, "free": False}
UNCACHED = ("flashinfer", "torch_native")
"""Attention backends for which SGLang turns its prefix cache off in deterministic mode."""
NO_CACHE = "not applicable: keeps no prefix cache"

EQUAL = (
    "run-to-run", "batch-of-2", "batch-of-8", "batch-of-32", "shuffled", "prefix-cache", "seeded-run-to-run",
    "seeded-batch", "memory", "weight-reversal",
)  # fmt: skip
KNOWN: dict[str, dict[str, dict[str, str]]] = {
    "deterministic": {
        device: dict.fromkeys(EQUAL, "equal") | {"seed": "differs", "weight-update": "differs"} for device in MODELS
    },
    "free": {
        "cuda": {"batch-of-2": "differs", "batch-of-8": "differs", "batch-of-32": "differs", "seed": "equal"},
        "cpu": {"run-to-run": "equal", "batch-of-8": "differs", "batch-of-32": "differs", "seed": "equal"},
    },
}
"""What the field knows; of other checks it knows nothing. `seed` is "equal" where seeds have no effect."""


# -- one leg, in a process of its own


def leg(device: str, backend: str, mode: str, rounds: int, write: Callable[[Mapping[str, Any]], None]) -> None:
    """Everything of one leg; what is known so far is written after each part."""
    sys.path[:0] = [str(ROOT / "core"), str(ROOT / "golden")]
    began = time.perf_counter()
    import torch

    from repro_core.config import ModelConfig, SglangConfig
    from repro_core.model.decoder import Policy, init_weights
    from repro_core.model.hf import save_hf
    from repro_core.rollout.sglang.engine import SglangEngine
    from repro_golden.engine_checks.checks import check
    from repro_golden.engine_checks.findings import Plan

    torch_device = torch.device(device)
    with tempfile.TemporaryDirectory() as folder:
        policy = Policy(ModelConfig(**MODELS[device]))
        init_weights(policy, 0)
        policy.to(torch.bfloat16 if DTYPES[device] == "bf16" else torch.float32)
        save_hf(policy, Path(folder) / "model")
        config = SglangConfig(
            **SGLANG[device], attention_backend=backend, enable_deterministic_inference=MODES[mode]
        )  # fmt: skip
        imported = time.perf_counter()
        engine = SglangEngine(config, Path(folder) / "model", DTYPES[device], device=device)
        result: dict[str, Any] = {
            "import_s": imported - began, "start_s": time.perf_counter() - imported, "identity": engine.identity(),
        }  # fmt: skip
        write(result)
        try:
            result["findings"] = [finding.to_mapping() for finding in check(engine, Plan(**PLANS[device]), say=_said)]
            write(result)
            result["tokens_per_s"] = speed(engine, device, rounds)
            write(result)
            result["sync_s"] = syncs(engine, policy.to(torch_device), Path(folder), rounds)
            write(result)
        finally:
            engine.close()


def _said(name: str) -> None:
    print(f"check {name}", flush=True)


def speed(engine: Any, device: str, rounds: int) -> list[float]:
    """Tokens sampled in a second, greedy, in batches of 32; the first batch is not counted."""
    from repro_golden.engine_checks.findings import Plan, Sampling

    prompts = Plan(**PLANS[device]).drawn(MODELS[device].get("vocab_size", 259))
    sampling = Sampling(TOKENS[device], 0.0, prompt_log_probs=False)
    rates = []
    for _ in range(rounds + 1):
        engine.flush_cache()
        began = time.perf_counter()
        answers = engine.generate(prompts, sampling, None)
        rates.append(sum(len(answer.tokens) for answer in answers) / (time.perf_counter() - began))
    return rates[1:]


def syncs(engine: Any, policy: Any, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of bringing the policy's weights, by tensor and by disk, without and with the check that they arrived."""
    from repro_core.model.hf import save_hf
    from repro_golden.recording.weight_sync import SyncJudge

    weights = dict(policy.named_parameters())
    judge = SyncJudge(None, print)
    value: dict[str, list[float]] = {}
    for number in range(2 * (rounds + 1)):
        for how in ("tensor", "disk"):
            checked = number % 2 == 1
            began = time.perf_counter()
            if how == "tensor":
                engine.update(((name, weight.detach().contiguous()) for name, weight in weights.items()), f"{number}")
            else:
                save_hf(policy, folder / "sync")
                engine.update_from_disk(str(folder / "sync"), f"{number}-disk")
            if checked:
                judge.begin(engine.weight_version, how)
                judge.sent({name: weight.detach() for name, weight in weights.items()}, None)
                for held in engine.held():
                    judge.received(held)
                judge.end(time.perf_counter() - began)
            if number >= 2:
                name = f"{how}, checked" if checked else how
                value.setdefault(name, []).append(time.perf_counter() - began)
    return value


# -- all legs


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Every leg that is asked for; what was seen so far is kept after each."""
    device = options.device
    seen: dict[str, Any] = {"device": device, "machine": machine(device, options.commit), "legs": {}}
    names = [f"{backend}-{mode}" for backend in BACKENDS[device] for mode in MODES]
    for name in options.only or names:
        backend = name.rpartition("-")[0]
        if backend == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
            seen["legs"][name] = {"failed": "flashinfer is not installed"}
        else:
            seen["legs"][name] = child(name, options)
        keep(options.out, seen)
        leg = seen["legs"][name]
        print(f"-- {name}: {leg.get('failed') or 'done'}", flush=True)
    return seen


def child(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One leg in a fresh process, of which nothing is left behind; what it wrote before it failed counts."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "leg.json"
        command = [sys.executable, __file__, "--device", options.device, "--rounds", str(options.rounds),
                   "--leg", name, "--out", str(result)]  # fmt: skip
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
            try:
                code: int | str = process.wait(options.limit)
            except subprocess.TimeoutExpired:
                code = f"no end within {options.limit:g} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    try:
                        process.wait(20)
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
        samples: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        if code:
            lines = log.read_text(errors="replace").strip().splitlines()
            print(*lines[-25:], sep="\n", flush=True)
            errors = [line for line in lines if "Error" in line]
            samples["failed"] = f"exit {code}: {(errors or lines or ['no output'])[-1].strip()[:300]}"
        return samples


def keep(path: Path | None, seen: Mapping[str, Any]) -> None:
    """What was seen so far, as JSON."""
    if path:
        path.write_text(json.dumps(seen, indent=1))


def machine(device: str, commit: str) -> list[str]:
    """What the figures were measured on."""
    import torch

    where = platform.processor() or platform.machine()
    if device == "cuda":
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
        where = f"{torch.cuda.get_device_properties(0).name}, driver {driver[0] if driver else 'unknown'}"
    versions = ", ".join(f"{name} {version(name)}" for name in ("sglang", "flashinfer-python", "triton"))
    return [
        where,
        f"Python {platform.python_version()}, torch {torch.__version__}, {versions}",
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}",
    ]


def version(name: str) -> str:
    """Of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


# -- the page


def page(every: Sequence[Mapping[str, Any]]) -> str:
    """docs/benchmarks/rollout.md."""
    lines = [
        "# Rollout determinism of SGLang",
        "",
        "Written by `python benchmarks/rollout.py`. Every leg is a fresh process that starts SGLang on a drawn",
        "model and makes the checks of `repro check rollout` ([rollouts](../how-to/rollouts.md)): all bits of",
        "tokens, log-probs and the prompts' log-probs. `-free` is without `enable_deterministic_inference`.",
    ]
    for seen in every:
        lines += ["", f"## {'On a GPU' if seen['device'] == 'cuda' else 'On a CPU'}", ""]
        lines += [*(f"- {line}" for line in seen["machine"]), *(f"- {line}" for line in stand_ins(seen)), ""]
        lines += [*results(seen), "", *costs(seen)]
    return "\n".join([*lines, ""])


def stand_ins(seen: Mapping[str, Any]) -> list[str]:
    """A line where results rest on some."""
    names = {name for leg in seen["legs"].values() for name in leg.get("identity", {}).get("stand_ins", ())}
    return [f"rests on stand-ins: {', '.join(sorted(names))}"] if names else []


def results(seen: Mapping[str, Any]) -> list[str]:
    """What was known and what was found, a row for each check."""
    legs = {name: leg for name, leg in seen["legs"].items() if "findings" in leg}
    lines = [f"- `{name}`: {leg['failed']}" for name, leg in seen["legs"].items() if "failed" in leg]
    lines += [""] if lines else []
    head = ["check", *(f"`{name}`: known / found" for name in legs)]
    lines += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    by_check = {name: {finding["name"]: finding for finding in leg["findings"]} for name, leg in legs.items()}
    for check in dict.fromkeys(check for findings in by_check.values() for check in findings):
        cells = [
            f"{known(seen['device'], name, check)} / {cell(findings.get(check), legs[name])}"
            for name, findings in by_check.items()
        ]
        lines.append("| " + " | ".join([check, *(text.replace("|", "\\|") for text in cells)]) + " |")
    return lines


def known(device: str, name: str, check: str) -> str:
    """What the field knows of a check."""
    backend, _, mode = name.rpartition("-")
    if check == "prefix-cache" and MODES[mode] and backend in UNCACHED:
        return "not applicable"
    word = KNOWN[mode][device].get(check, "-")
    return {"equal": "no effect", "differs": "has effect"}.get(word, word) if must_differ(check) else word


def must_differ(check: str) -> bool:
    """Of these a difference is what is wanted."""
    return check in ("seed", "weight-update")


def cell(finding: Mapping[str, Any] | None, leg: Mapping[str, Any]) -> str:
    """What was found in a leg, with the first place and its size."""
    if finding is None:
        return "-"
    if finding["name"] == "prefix-cache" and leg["identity"]["flags"].get("disable_radix_cache"):
        return NO_CACHE  # whatever was found: older versions of the check compared two cold runs
    if must_differ(finding["name"]):
        return {"equal": "**no effect**", "differs": "has effect"}.get(finding["outcome"], finding["outcome"])
    first = (finding["likeness"] or {}).get("first")
    if finding["outcome"] != "differs" or not first:
        text = f": {finding['text']}" if finding["outcome"] in ("failed", "not applicable") else ""
        return f"{finding['outcome']}{text}"
    widest = finding["likeness"]["widest"]
    size = f", at most {widest:.3g}" if widest is not None else ""
    many = f"{finding['likeness']['differing']} of {finding['likeness']['prompts']} responses"
    return f"**differs**: {many}{size}; first: prompt {first['prompt']}, {first['part']} {first['position']}"


def costs(seen: Mapping[str, Any]) -> list[str]:
    """Start, speed and syncs, a row for each leg."""
    head = ["leg", "start, s", f"tokens/s at batch {BATCH}", "to free", "sync by tensor, s", "checked", "by disk, s",
            "checked"]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name, leg in seen["legs"].items():
        if "start_s" not in leg:
            continue
        speed_here = statistics.median(leg["tokens_per_s"]) if "tokens_per_s" in leg else None
        free = seen["legs"].get(f"{name.rpartition('-')[0]}-free", {}).get("tokens_per_s")
        ratio = f"{speed_here / statistics.median(free):.3f}x" if speed_here and free else "-"
        sync = leg.get("sync_s", {})
        seconds = [
            f"{statistics.median(sync[key]):.3f}" if sync.get(key) else "-"
            for key in ("tensor", "tensor, checked", "disk", "disk, checked")
        ]
        shown = f"{speed_here:,.0f}" if speed_here else "-"
        lines.append("| " + " | ".join([f"`{name}`", f"{leg['start_s']:.1f}", shown, ratio, *seconds]) + " |")
    return [
        *lines,
        "",
        "Medians. A sync by disk includes writing the checkpoint; `checked` reads the engine's weights back and",
        "compares fingerprints with the trainer's.",
    ]


def main() -> None:
    """Measure, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--from", dest="source", type=Path, nargs="+")
    parser.add_argument("--device", choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=420.0)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--leg")
    options = parser.parse_args()
    if options.source:
        every = [json.loads(path.read_text()) for path in options.source]
    else:
        if options.device is None:
            import torch

            options.device = "cuda" if torch.cuda.is_available() else "cpu"
        if options.leg:
            backend, _, mode = options.leg.rpartition("-")
            leg(options.device, backend, mode, options.rounds, lambda seen: keep(options.out, seen))
            return
        every = [measured(options)]
    text = page(every)
    if options.page:
        options.page.write_text(text)
    print(text)


if __name__ == "__main__":
    main()

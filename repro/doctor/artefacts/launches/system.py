"""Whether a command starts one of the trainers, and which."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from repro.doctor.artefacts.kinds import Flag, Variable
from repro_golden.base.systems import SYSTEMS, System

__all__ = ["ENTRY", "MODULE", "checkout_of", "flag_names", "of_trainer", "system_of"]

ENTRY = re.compile(
    r"(?:.*?/)??(relax/entrypoints/train\.py|train_async\.py|train_multi_lora_async\.py|train\.py)\Z", re.S
)
"""A trainer's program, by the end of its path."""

MODULE = re.compile(r"(slime|miles|relax)(\.|\Z)")
"""A trainer's module, behind ``-m``."""

_OWN: Mapping[System, frozenset[str]] = {
    "slime": frozenset(
        {"--load-forge-rollout-data", "--release-train", "--ci-train-rollout-logprob-abs-diff-threshold"}
    ),
    "miles": frozenset(
        {
            "--train-backend", "--save-debug-event-data", "--debug-skip-weight-update", "--debug-disable-optimizer",
            "--debug-exit-after-rollout", "--ci-save-model-hash", "--ci-check-model-hash", "--true-on-policy-contract",
            "--debug-deterministic-collective", "--recompute-logprobs-via-prefill", "--enable-witness",
        }
    ),
}  # fmt: skip


def flag_names(text: str) -> frozenset[str]:
    """Names without their dashes, as flags."""
    return frozenset(f"--{name}" for name in text.split())


_SHARED = flag_names("""
actor-num-gpus-per-node actor-num-nodes check-weight-update-equal critic-num-gpus-per-node critic-num-nodes
custom-convert-samples-to-train-data-path custom-generate-function-path custom-megatron-init-path
custom-model-provider-path custom-reward-post-process-path custom-rm-path custom-rollout-log-function-path
custom-tis-function-path debug-rollout-only debug-train-only dump-details dynamic-sampling-filter-path
eval-prompt-data get-mismatch-metrics keep-old-actor load-debug-rollout-data log-probs-chunk-size
megatron-to-hf-mode n-samples-per-eval-prompt num-critic-only-steps offload-rollout offload-train
over-sampling-batch-size ref-ckpt-step ref-load rm-type rm-url rollout-external rollout-function-path
rollout-max-context-len rollout-max-prompt-len rollout-max-response-len rollout-num-gpus rollout-num-gpus-per-engine
rollout-stop-token-ids save-debug-rollout-data save-debug-train-data train-env-vars true-on-policy-mode
update-weight-buffer-size update-weights-interval use-miles-router use-rollout-logprobs use-rollout-routing-replay
use-slime-router use-tis
""")
"""Flags that the three have and no other trainer: none of Megatron's, none with a name that anyone would choose."""
_ENGINE = "--sglang-"
_IMPORTS = re.compile(rb"^[ \t]*(?:import|from)[ \t]+(?:slime|miles|relax)(?:_plugins)?(?![\w-])", re.M)
_LARGEST = 1 << 20
_NAMED = re.compile(r"(?:(?<![\w.-])|(?<=/)|\bimport )(slime|miles|relax)(?=[/.:\s\"']|_plugins|\Z)")


def of_trainer(path: Path, text: str, entry: str, argv: Sequence[str], given: Sequence[Flag]) -> bool:
    """Whether a command starts slime, Miles or Relax, by what it imports or by flags that only they have.

    The name of its program, and paths that it mentions, say nothing: every trainer has a train.py.
    """
    if entry.startswith("relax/") or MODULE.match(entry):
        return True
    names = {flag.name for flag in given}
    if names & _SHARED.union(*_OWN.values()) or any(name.startswith(_ENGINE) for name in names):
        return True
    return (path.suffix == ".py" and _IMPORTS.search(text.encode()) is not None) or _imports(path, argv)


def _imports(path: Path, argv: Sequence[str]) -> bool:
    """Whether the program imports one of them: as it lies beside the script, or in a folder above."""
    program = next((word for word in argv if word.endswith(".py")), "")
    try:
        folders = path.resolve().parents[:6] if program and "$" not in program else ()
        file = next((folder / program for folder in folders if (folder / program).is_file()), None)
        if file is None:
            return False
        with file.open("rb") as source:
            return _IMPORTS.search(source.read(_LARGEST)) is not None
    except (OSError, RuntimeError, ValueError):
        return False


def system_of(
    path: Path, text: str, entry: str, argv: Sequence[str], given: Sequence[Flag], env: Mapping[str, Variable]
) -> System | None:
    """The system, by its entry, its own flags, paths of the command and of the script; None where they do not say."""
    if entry.startswith("relax/"):
        return "relax"
    if module := MODULE.match(entry):
        return _system(module[1])
    names = {flag.name for flag in given}
    systems = [system for system, flags in _OWN.items() if flags & names]
    if len(systems) == 1:
        return systems[0]
    python = env.get("PYTHONPATH")
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for source in (python.value if python else "", "\n".join(argv), code):
        named = {match[1] for match in _NAMED.finditer(source)}
        if len(named) == 1:
            return _system(named.pop())
    return _checkout(path)


def _checkout(path: Path) -> System | None:
    """The checkout that a script lies in."""
    try:
        folders = path.resolve().parents
    except (OSError, RuntimeError):
        return None
    return next((system for folder in folders[:6] if (system := checkout_of(folder))), None)


def checkout_of(folder: Path) -> System | None:
    """Whose checkout a folder is; None for others."""
    return next((name for name in SYSTEMS if (folder / name / "utils" / "arguments.py").is_file()), None)


def _system(name: str) -> System:
    return next(system for system in SYSTEMS if system == name)

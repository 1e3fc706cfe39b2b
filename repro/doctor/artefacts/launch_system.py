"""Which of the trainers a command starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from repro.doctor.artefacts.kinds import Flag, Variable
from repro_golden.dumps.values import System

__all__ = ["ENTRY", "MODULE", "system_of"]

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
_NAMED = re.compile(r"(?:(?<![\w.-])|(?<=/)|\bimport )(slime|miles|relax)(?=[/.:\s\"']|_plugins|\Z)")


def system_of(
    path: Path, text: str, entry: str, words: Sequence[str], given: Sequence[Flag], env: Mapping[str, Variable]
) -> System | None:
    """The system, by its entry, its own flags, paths of the command and of the script; None where they do not say."""
    if entry.startswith("relax/"):
        return "relax"
    if found := MODULE.match(entry):
        return _system(found[1])
    names = {flag.name for flag in given}
    own = [system for system, flags in _OWN.items() if flags & names]
    if len(own) == 1:
        return own[0]
    python = env.get("PYTHONPATH")
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for source in (python.value if python else "", "\n".join(words), code):
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
    for folder in folders[:6]:
        for name in get_args(System):
            if (folder / name / "utils" / "arguments.py").is_file():
                return _system(name)
    return None


def _system(name: str) -> System:
    found: dict[str, System] = {"slime": "slime", "miles": "miles", "relax": "relax"}
    return found[name]

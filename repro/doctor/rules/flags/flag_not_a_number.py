"""Flags of whole numbers whose value is none, or one that they cannot have."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import tempered
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _flags(text: str) -> frozenset[str]:
    return frozenset(f"--{name}" for name in text.split())


_ABOVE_ZERO = _flags("""
    rollout-batch-size n-samples-per-prompt global-batch-size micro-batch-size tensor-model-parallel-size
    pipeline-model-parallel-size context-parallel-size expert-model-parallel-size expert-tensor-parallel-size
""")
_FROM_ZERO = _flags("""
    num-steps-per-rollout num-rollout actor-num-nodes actor-num-gpus-per-node critic-num-nodes critic-num-gpus-per-node
    rollout-num-gpus rollout-num-gpus-per-engine rollout-max-response-len n-samples-per-eval-prompt
""")
"""0 of these turns something off, or leaves it out."""
_ANY = _flags("""
    num-gpus-per-node rollout-max-prompt-len rollout-max-context-len rollout-top-k rollout-seed seed
    over-sampling-batch-size log-probs-max-tokens-per-gpu update-weight-buffer-size update-weights-interval num-epoch
    start-rollout-id eval-interval eval-max-response-len save-interval
""")
"""Some of these take -1 for `no limit`. `max-tokens-per-gpu` has a rule of its own."""
_WHOLE = _ABOVE_ZERO | _FROM_ZERO | _ANY
_UNKNOWN = "$`{<@%"
"""What a shell, a template or a program still puts a value in for."""


@tempered("error")
def _check(launch: Launch) -> Iterator[Found]:
    for flag in launch.given:
        if flag.name not in _WHOLE or not flag.values or not (text := flag.values[0]):
            continue
        if any(sign in text for sign in _UNKNOWN):
            continue
        try:
            number = int(text)  # as argparse reads it
        except ValueError:
            yield Found(f"{flag.name} {text[:40]} is no whole number: the trainer's parser refuses it", flag.where)
            continue
        if flag.name in _ABOVE_ZERO and number < 1:
            yield Found(f"{flag.name} {text[:40]} must be above 0", flag.where)
        elif flag.name in _FROM_ZERO and number < 0:
            yield Found(f"{flag.name} {text[:40]} must be 0 or more", flag.where)


RULE = Rule(
    id="flag-not-a-number",
    title="Flags that take a whole number and have none, or one below what they count",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="argparse refuses what is no whole number before anything starts; a negative size fails later, or trains on "
    "nothing",
    cure="write a whole number in digits: 8, not 8.0, 1e3 or nan",
    sources=(
        "THUDM/slime@624b824a8 slime/utils/arguments.py:39-62",
        "THUDM/slime@624b824a8 slime/utils/arguments.py:609-717",
    ),
    check=_check,
)

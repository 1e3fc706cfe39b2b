"""Reward functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from repro.doctor.artefacts.kinds import Launch, RewardFunction, Rollout
from repro.doctor.facts.launches import open_ended
from repro.doctor.facts.sources import MILES, SLIME
from repro_golden.base.checks import Found, Where, rule
from repro_golden.base.errors import NotVerifiableError, ReproError

_MOST = 32
_ENOUGH = 8
"""Different responses from which on one and the same reward is told."""
_CLOSE = 1e-6
"""Relative: rewards that a dump holds as fp32 differ by less."""


def _values(
    function: RewardFunction,
    rollout: Rollout,
    samples: Sequence[Mapping[str, Any]],
    rewards: Sequence[Any],
    key: str | None,
    launch: Launch | None,
) -> Iterator[Found]:
    """Rewards that no trainer can use: each kind once."""
    reported: set[str] = set()
    for sample, reward in zip(samples, rewards, strict=True):
        value = reward.get(key) if isinstance(reward, Mapping) and key else reward
        if isinstance(reward, Mapping) and key and key not in reward:
            what = f"returns no {key!r}, which --reward-key names: its keys are {', '.join(map(repr, reward))}"
        elif isinstance(value, Mapping):
            what = "returns a dict, and --reward-key is not given" if _needs_key(launch) else ""
        elif not isinstance(value, (int, float)):
            what = f"returns {'None' if value is None else 'a ' + str(getattr(value, 'kind', type(value).__name__))}"
        else:
            what = "" if math.isfinite(value) else f"returns {value}"
        if what and what not in reported:
            reported.add(what)
            yield Found(f"{function.name} {what}", _where(rollout, sample, value))


def _needs_key(launch: Launch | None) -> bool:
    """Whether a dict is of no use: no flag says which of its numbers counts, or makes one of it."""
    flags = ("--reward-key", "--custom-reward-post-process-path")
    return launch is not None and not open_ended(launch) and not launch.has(*flags)


def _repeats(
    function: RewardFunction,
    rollout: Rollout,
    samples: Sequence[Mapping[str, Any]],
    once: Sequence[Any],
    again: Sequence[Any],
) -> Iterator[Found]:
    differ = [k for k in range(len(samples)) if not _same(once[k], again[k])]
    if differ:
        k = differ[0]
        yield Found(
            f"{function.name} gives {_shown(once[k])}, then {_shown(again[k])} for the same response "
            f"({len(differ)} of {len(samples)} samples)",
            _where(rollout, samples[k], once[k]), "warning", "certain",
            "seed what it draws, sort what it reads from sets, or ask its judge at temperature 0",
        )  # fmt: skip


def _meaning(
    function: RewardFunction,
    rollout: Rollout,
    samples: Sequence[Mapping[str, Any]],
    numbers: Sequence[float | None],
    again: Sequence[Any],
    once: Sequence[Any],
    key: str | None,
) -> Iterator[Found]:
    """Rewards that teach nothing, and rewards other than those that the run recorded."""
    responses = {sample["response"] for sample in samples}
    if len(responses) >= _ENOUGH and len(set(numbers)) == 1 and numbers[0] is not None:
        yield Found(
            f"{function.name} gives {numbers[0]:g} to all of {len(responses)} different responses",
            _where(rollout, samples[0], numbers[0]), "warning", "possible",
            "check that it reads the right label (--label-key), and what it parses of a response",
        )  # fmt: skip
    stable = [k for k in range(len(samples)) if _same(once[k], again[k])]
    recorded = {k: _number(samples[k].get("reward"), key) for k in stable}
    moved = [k for k, was in recorded.items() if _differ(was, numbers[k])]
    if moved:
        k = moved[0]
        yield Found(
            f"{function.name} gives {numbers[k]:g}, and the dump recorded {recorded[k]:g} "
            f"({len(moved)} of {len(stable)} samples)",
            _where(rollout, samples[k], numbers[k]), "warning", "likely",
            "it has changed since, reads arguments of the trainer, or is not the one that the run used",
        )  # fmt: skip


def _differ(was: float | None, now: float | None) -> bool:
    return was is not None and now is not None and not math.isclose(was, now, rel_tol=_CLOSE, abs_tol=_CLOSE)


def _number(value: Any, key: str | None) -> float | None:
    if isinstance(value, Mapping):
        value = value.get(key) if key else value.get("score")
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return both_nan or bool(a == b)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else repr(value)[:80]


def _where(rollout: Rollout, sample: Mapping[str, Any], value: Any) -> Where:
    return Where(str(rollout.path), item=f"reward of sample {sample.get('index')}", value=_shown(value))


@rule(
    title="The reward function, called on recorded responses, fails or says nothing",
    severity="error",
    certainty="certain",
    why="the reward is all that the policy learns from: what is constant, random or not finite teaches nothing",
    cure="correct the function, and try it again: repro doctor DUMP --reward MODULE:FUNCTION",
    sources=(
        "slime guide: Troubleshooting",
        f"{SLIME} slime/rollout/rm_hub/__init__.py (async_rm)",
        f"{MILES} miles/rollout/rm_hub/__init__.py",
    ),
)
def _reward_function(function: RewardFunction, rollout: Rollout, launch: Launch | None) -> Iterable[Found]:
    samples = [sample for sample in rollout.dump.samples if isinstance(sample.get("response"), str)]
    samples = samples[:: max(1, -(-len(samples) // _MOST))]
    if not samples:
        return
    try:
        once = function.score(samples)
        again = function.score(samples)
    except NotVerifiableError as error:
        yield Found(
            f"not judged: {error}", Where(item=function.name), "note", cure="test it where it has its arguments"
        )
        return
    except ReproError as error:
        yield Found(str(error), Where(item=function.name))
        return
    key = launch.value("--reward-key") if launch else None
    wrong = list(_values(function, rollout, samples, once, key, launch))
    yield from wrong
    yield from _repeats(function, rollout, samples, once, again)
    if not wrong:
        yield from _meaning(function, rollout, samples, [_number(reward, key) for reward in once], again, once, key)

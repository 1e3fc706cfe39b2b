"""Does a rollout engine repeat its bits? Checks of any engine behind `repro_core.rollout.engine.RolloutEngine`.

Nothing of the trainer is imported: the engine is handed in. Each check samples twice, in ways that must not matter (or
must), and compares all bits of tokens, log-probs and the prompts' log-probs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb
from numbers import Real

from repro_golden.base.canonical import canonical_json, digest
from repro_golden.base.errors import ReproError
from repro_golden.case.tables import CHECKS, Expected, known_name
from repro_golden.engine_checks.findings import (
    Answer,
    Engine,
    EngineCheck,
    Made,
    NotApplicableError,
    Plan,
    Sampling,
    compare,
    joined,
    said,
)
from repro_golden.engine_checks.weight_checks import FAULTS, WeightChecks, vocabulary

__all__ = ["check"]

_FALLBACK = 256
"""Ids that prompts are made of where the engine does not show its vocabulary."""
_CHANCE = 1e-3
"""Below this probability of chance alone, seeds count as honoured although they do not repeat bits."""


class _SeedsRefusedError(NotApplicableError):
    """The engine says itself that it would ignore seeds."""


def check(
    engine: Engine,
    plan: Plan | None = None,
    only: Sequence[str] = (),
    expected: Mapping[str, Expected] = CHECKS,
    say: Callable[[str], None] = lambda _: None,
) -> list[EngineCheck]:
    """Make the checks, in their order. An engine that no longer answers ends them. It is left with its own weights.

    Args:
        engine: Ready to sample.
        plan: What is sampled.
        only: Names of the checks to make; all where there are none.
        expected: What must come out of each.
        say: Called with the name of each check before it is made.

    Raises:
        ReproError: an unknown name.
    """
    chosen = [known_name(name) for name in only] or list(CHECKS)
    checks = _Checks(engine, plan or Plan())
    findings: list[EngineCheck] = []
    lost = ""
    for name in (name for name in CHECKS if name in chosen):
        if lost:
            findings.append(EngineCheck(name, "failed", expected[name], f"not made: {lost} failed"))
            continue
        say(name)
        try:
            likeness, text, outcome = checks.make(name)
            outcome = outcome or ("equal" if likeness.equal else "differs")
            findings.append(EngineCheck(name, outcome, expected[name], text, likeness))
        except NotApplicableError as why:
            findings.append(EngineCheck(name, "not applicable", expected[name], str(why)))
        except FAULTS as error:
            findings.append(EngineCheck(name, "failed", expected[name], " ".join(f"{error}".split())[:500]))
            lost = "" if checks.answers() else name
    return findings


def _wrong(answer: Answer, row: int, prompt: int, *, whole: bool) -> str:
    """Why the answer to a prompt of so many tokens agrees with nothing, not even with itself; '' where it may."""
    if len(answer.tokens) == 0:
        return f"the engine answered prompt {row} with no token: there is nothing to compare"
    parts: list[tuple[str, Sequence[float] | None, int]] = [
        ("the engine's answer to ", answer.log_probs, len(answer.tokens))
    ]
    if whole:
        parts.append(("", answer.prompt_log_probs, prompt - 1))
    for whose, values, tokens in parts:
        of = f"of {whose}prompt {row}"
        if values is None and not tokens:
            continue
        if values is None:
            return f"the engine gave no log-probs {of}, for which it was asked"
        if not all(isinstance(value, Real) for value in values):
            return f"a log-prob {of} is no number"
        if not all(map(_finite, values)):
            return f"a log-prob {of} is not finite"
        if len(values) != tokens:
            return f"the engine gave {len(values)} log-probs for {tokens} tokens {of}"
    return ""


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float is
        return False


def _digest(answers: Sequence[Answer]) -> str:
    """32 hex digits over all bits of the answers: equal ones for equal bits, in whatever process they were sampled."""
    return digest(
        "answers",
        *(
            canonical_json(
                [a.tokens, *([float(x).hex() for x in xs] for xs in (a.log_probs, a.prompt_log_probs or ()))]
            )
            for a in answers
        ),
    )


@dataclass
class _Checks:
    """The checks of one engine. What several need is sampled once."""

    engine: Engine
    plan: Plan

    def make(self, name: str) -> Made:
        """One check."""
        if name.startswith("batch-of-"):
            return self._batch(int(name.removeprefix("batch-of-")))
        method: Callable[[], Made] = {
            "run-to-run": self._run_to_run,
            "shuffled": self._shuffled,
            "prefix-cache": self._prefix_cache,
            "seeded-run-to-run": self._seeded_run_to_run,
            "seeded-batch": self._seeded_batch,
            "seed": self._seed,
            "unseeded": self._unseeded,
            "memory": self._weights.memory,
            "weight-update": self._weights.update,
            "weight-reversal": self._weights.reversal,
        }[name]
        return method()

    @cached_property
    def _weights(self) -> WeightChecks:
        def sample(warm: bool) -> list[Answer]:
            return self._sample(self._all, self._seeds, warm=warm)

        return WeightChecks(self.engine, self.plan, sample, lambda: self._batch_of_all)

    # -- sampling

    def answers(self) -> bool:
        """Whether the engine still samples."""
        try:
            self._sample([0], self._seeds)
        except FAULTS:
            return False
        return True

    @cached_property
    def _prompts(self) -> list[list[int]]:
        size = self.plan.vocabulary
        if size is None:
            try:
                size = vocabulary(self.engine.held())
            except FAULTS:  # which makes no check impossible but those of weights, and these say so
                size = None
        return self.plan.drawn(size or _FALLBACK)

    def _sample(
        self, rows: Sequence[int], seeds: Sequence[int] | None, *, warm: bool = False, whole: bool = True,
        hot: bool = False,
    ) -> list[Answer]:  # fmt: skip
        """Responses to one batch.

        Args:
            rows: Which prompts, in order.
            seeds: One for each prompt of the plan.
            warm: Keep what earlier batches left in the prefix cache.
            whole: Also the log-probs of prompts, for which engines leave the prefix cache alone.
            hot: At the plan's temperature, else at 0.
        """
        if not warm:
            self.engine.flush_cache()
        sampling = Sampling(self.plan.response, self.plan.temperature if hot else 0.0, prompt_log_probs=whole)
        row_seeds = None if seeds is None else [seeds[row] for row in rows]
        answers = list(self.engine.generate([self._prompts[row] for row in rows], sampling, row_seeds))
        if len(answers) != len(rows):
            raise ValueError(f"the engine gave {len(answers)} responses to {len(rows)} prompts")
        for row, answer in zip(rows, answers, strict=True):
            if wrong := _wrong(answer, row, len(self._prompts[row]), whole=whole):
                raise ReproError(wrong)  # no ValueError, by which an engine refuses seeds
        return answers

    def _each(self, seeds: Sequence[int], *, warm: bool = False, whole: bool = True, hot: bool = False) -> list[Answer]:
        """Responses to the first prompts, each alone. No two begin alike, so one flush serves all."""
        return [
            self._sample([row], seeds, warm=warm or row > 0, whole=whole, hot=hot)[0] for row in range(self.plan.alone)
        ]

    @cached_property
    def _all(self) -> list[int]:
        return list(range(self.plan.prompts))

    @cached_property
    def _seeds(self) -> list[int]:
        return self.plan.seeds()

    @cached_property
    def _batch_of_all(self) -> list[Answer]:
        return self._sample(self._all, self._seeds)

    @cached_property
    def _alone(self) -> list[Answer]:
        return self._each(self._seeds)

    @cached_property
    def _hot(self) -> list[Answer]:
        try:
            return self._sample(self._all, self._seeds, hot=True)
        except ValueError as error:
            _ = self._free  # one that fails without seeds too has other troubles
            raise _SeedsRefusedError(f"{error}") from None

    @cached_property
    def _free(self) -> list[Answer]:
        """Without seeds."""
        return self._sample(self._all, None, hot=True)

    # -- the checks

    def _run_to_run(self) -> Made:
        again = self._sample(self._all, self._seeds)
        batch = compare(self._all, self._batch_of_all, again)
        likeness = joined([compare(self._all[: self.plan.alone], self._alone, self._each(self._seeds)), batch])
        # other processes and machines are compared by it
        return Made(likeness, f"{said(likeness, 'the same batches twice')}; digest {_digest(self._batch_of_all)}")

    def _batch(self, size: int) -> Made:
        rows = self._all[:size]
        if len(rows) < size:
            raise NotApplicableError(f"the plan has {len(rows)} prompts")
        batch = self._batch_of_all if size == self.plan.prompts else self._sample(rows, self._seeds)
        alone = rows[: self.plan.alone]
        likeness = compare(alone, self._alone[: len(alone)], batch[: len(alone)])
        return Made(likeness, said(likeness, f"alone and in a batch of {size}"))

    def _shuffled(self) -> Made:
        rng = random.Random(f"repro rollout order {self.plan.seed}")
        order = sorted(self._all, key=lambda _: rng.random())
        there = dict(zip(order, self._sample(order, self._seeds), strict=True))
        likeness = compare(self._all, self._batch_of_all, [there[row] for row in self._all])
        return Made(likeness, said(likeness, f"a batch of {len(order)} in two orders"))

    def _prefix_cache(self) -> Made:
        if self.engine.identity()["flags"].get("disable_radix_cache"):
            raise NotApplicableError("the engine keeps no prefix cache (disable_radix_cache)")
        cold = self._each(self._seeds, whole=False)
        warm = self._each(self._seeds, warm=True, whole=False)
        alone = compare(self._all[: self.plan.alone], cold, warm)
        cold = self._sample(self._all, self._seeds, whole=False)
        warm = self._sample(self._all, self._seeds, warm=True, whole=False)
        likeness = joined([alone, compare(self._all, cold, warm)])
        return Made(likeness, said(likeness, "with a cold prefix cache and with a warm one"))

    @cached_property
    def _hot_again(self) -> list[Answer]:
        return self._sample(self._all, self._seeds, hot=True)

    @cached_property
    def _hot_otherwise(self) -> list[Answer]:
        return self._sample(self._all, self.plan.seeds(other=True), hot=True)

    def _seeded_run_to_run(self) -> Made:
        likeness = compare(self._all, self._hot, self._hot_again)
        why = "" if likeness.equal or self.seeds_count else "; the seed is ignored"
        return Made(likeness, said(likeness, "the same seeds twice") + why)

    def _seeded_batch(self) -> Made:
        likeness = compare(
            self._all[: self.plan.alone], self._hot[: self.plan.alone], self._each(self._seeds, hot=True)
        )
        why = "" if likeness.equal or self.seeds_count else "; the seed is ignored"
        return Made(likeness, said(likeness, f"with seeds, alone and in a batch of {self.plan.prompts}") + why)

    @cached_property
    def seeds_count(self) -> bool:
        """Whether the seed decides what is sampled.

        Where equal seeds repeat all tokens, others must give others. Where they do not, first tokens tell: those of a
        seed must come again more often than chance lets those of another seed do.
        """
        try:
            rows = list(zip(self._hot, self._hot_again, self._hot_otherwise, strict=True))
        except _SeedsRefusedError:
            return False
        if all(list(a.tokens) == list(b.tokens) for a, b, _ in rows):
            return any(list(a.tokens) != list(c.tokens) for a, _, c in rows)
        agree = [(a.tokens[0] == b.tokens[0], a.tokens[0] == c.tokens[0]) for a, b, c in rows]
        same, other = sum(x and not y for x, y in agree), sum(y and not x for x, y in agree)
        return _tail(same, same + other) < _CHANCE

    def _seed(self) -> Made:
        try:
            _ = self._hot
        except _SeedsRefusedError as why:
            return Made(self._unseeded().likeness, f"the seed is ignored, as it says itself: {why}", "equal")
        likeness = compare(self._all, self._hot, self._hot_otherwise)
        if self.seeds_count:
            return Made(
                likeness, f"other seeds give other tokens to {likeness.differing} of {likeness.prompts} prompts"
            )
        if all(list(a.tokens) == list(b.tokens) for a, b in zip(self._hot, self._hot_otherwise, strict=True)):
            return Made(likeness, "the seed is ignored: other seeds give the same tokens", "equal")
        again = compare(self._all, self._hot, self._hot_again)
        text = (
            f"the seed is ignored: equal seeds give other responses to {again.differing} of {again.prompts} prompts, "
            f"other seeds to {likeness.differing}"
        )
        return Made(likeness, text, "equal")

    def _unseeded(self) -> Made:
        try:
            first, again = self._free, self._sample(self._all, None, hot=True)
        except ValueError as error:
            raise NotApplicableError(f"{error}") from None
        likeness = compare(self._all, first, again)
        return Made(likeness, said(likeness, "twice without seeds"))


def _tail(successes: int, trials: int) -> float:
    """The probability of so many or more successes in fair trials."""
    return sum(comb(trials, k) for k in range(successes, trials + 1)) / float(2**trials)

"""Does a rollout engine repeat its bits? Checks of any engine behind `repro_core.rollout.engine.RolloutEngine`.

Nothing of the trainer is imported: the engine is handed in. Each check samples twice, in ways that must not matter (or
must), and compares all bits of tokens, log-probs and the prompts' log-probs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import comb
from typing import Any

from repro_golden.errors import ReproError
from repro_golden.rollout_difference import Answer, Likeness, compare, joined
from repro_golden.rollout_findings import CHECKS, Expected, Finding, Outcome, known_name
from repro_golden.rollout_plan import Engine, Plan, Sampling
from repro_golden.rollout_weights import canonical, moved, perturbed, prints, vocabulary

__all__ = ["check"]

_FALLBACK = 256
"""Ids that prompts are made of where the engine does not show its vocabulary."""
_CHANCE = 1e-3
"""Below this probability of chance alone, seeds count as honoured although they do not repeat bits."""


class _NotApplicableError(Exception):
    """The engine cannot do what a check needs."""


class _SeedsRefusedError(_NotApplicableError):
    """The engine says itself that it would ignore seeds."""


_FAULTS = (ValueError, RuntimeError, OSError, ReproError)
"""What an engine's methods raise; `EngineError` is a ValueError."""


def check(
    engine: Engine,
    plan: Plan | None = None,
    only: Sequence[str] = (),
    expected: Mapping[str, Expected] = CHECKS,
    say: Callable[[str], None] = lambda _: None,
) -> list[Finding]:
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
    findings: list[Finding] = []
    lost = ""
    for name in (name for name in CHECKS if name in chosen):
        if lost:
            findings.append(Finding(name, "failed", expected[name], f"not made: {lost} failed"))
            continue
        say(name)
        try:
            likeness, text = checks.make(name)
            outcome: Outcome = "equal" if likeness.equal else "differs"
            if name == "seed" and not checks.seeds_count:
                outcome = "equal"
            findings.append(Finding(name, outcome, expected[name], text, likeness))
        except _NotApplicableError as why:
            findings.append(Finding(name, "not applicable", expected[name], str(why)))
        except _FAULTS as error:
            findings.append(Finding(name, "failed", expected[name], " ".join(f"{error}".split())[:500]))
            lost = "" if checks.answers() else name
    return findings


@dataclass
class _Checks:
    """The checks of one engine. What several need is sampled once."""

    engine: Engine
    plan: Plan
    _before: dict[str, str] = field(default_factory=dict)
    _half_updated: bool = False

    def make(self, name: str) -> tuple[Likeness, str]:
        """One check: what was compared, and a line on it."""
        if name.startswith("batch-of-"):
            return self._batch(int(name.removeprefix("batch-of-")))
        found: tuple[Likeness, str] = {
            "run-to-run": self._run_to_run,
            "shuffled": self._shuffled,
            "prefix-cache": self._prefix_cache,
            "seeded-run-to-run": self._seeded_run_to_run,
            "seeded-batch": self._seeded_batch,
            "seed": self._seed,
            "unseeded": self._unseeded,
            "memory": self._memory,
            "weight-update": self._update,
            "weight-reversal": self._reversal,
        }[name]()
        return found

    # -- sampling

    def answers(self) -> bool:
        """Whether the engine still samples."""
        try:
            self._sample([0], self._seeds)
        except _FAULTS:
            return False
        return True

    @cached_property
    def _prompts(self) -> list[list[int]]:
        size = self.plan.vocabulary
        if size is None:
            try:
                size = vocabulary(self.engine.held())
            except _FAULTS:  # which makes no check impossible but those of weights, and these say so
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
        own = None if seeds is None else [seeds[row] for row in rows]
        found = list(self.engine.generate([self._prompts[row] for row in rows], sampling, own))
        if len(found) != len(rows):
            raise ValueError(f"the engine gave {len(found)} responses to {len(rows)} prompts")
        return found

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

    def _run_to_run(self) -> tuple[Likeness, str]:
        again = self._sample(self._all, self._seeds)
        batch = compare(self._all, self._batch_of_all, again)
        found = joined([compare(self._all[: self.plan.alone], self._alone, self._each(self._seeds)), batch])
        return found, _said(found, "the same batches twice")

    def _batch(self, size: int) -> tuple[Likeness, str]:
        rows = self._all[:size]
        if len(rows) < size:
            raise _NotApplicableError(f"the plan has {len(rows)} prompts")
        batch = self._batch_of_all if size == self.plan.prompts else self._sample(rows, self._seeds)
        shown = rows[: self.plan.alone]
        found = compare(shown, self._alone[: len(shown)], batch[: len(shown)])
        return found, _said(found, f"alone and in a batch of {size}")

    def _shuffled(self) -> tuple[Likeness, str]:
        rng = random.Random(f"repro rollout order {self.plan.seed}")
        order = sorted(self._all, key=lambda _: rng.random())
        there = dict(zip(order, self._sample(order, self._seeds), strict=True))
        found = compare(self._all, self._batch_of_all, [there[row] for row in self._all])
        return found, _said(found, f"a batch of {len(order)} in two orders")

    def _prefix_cache(self) -> tuple[Likeness, str]:
        cold = self._each(self._seeds, whole=False)
        warm = self._each(self._seeds, warm=True, whole=False)
        alone = compare(self._all[: self.plan.alone], cold, warm)
        cold = self._sample(self._all, self._seeds, whole=False)
        warm = self._sample(self._all, self._seeds, warm=True, whole=False)
        found = joined([alone, compare(self._all, cold, warm)])
        said = _said(found, "with a cold prefix cache and with a warm one")
        if self.engine.identity().get("flags", {}).get("disable_radix_cache"):
            said += "; the engine keeps none (disable_radix_cache), so both were cold"
        return found, said

    @cached_property
    def _hot_again(self) -> list[Answer]:
        return self._sample(self._all, self._seeds, hot=True)

    @cached_property
    def _hot_otherwise(self) -> list[Answer]:
        return self._sample(self._all, self.plan.seeds(other=True), hot=True)

    def _seeded_run_to_run(self) -> tuple[Likeness, str]:
        found = compare(self._all, self._hot, self._hot_again)
        why = "" if found.equal or self.seeds_count else "; the seed is ignored"
        return found, _said(found, "the same seeds twice") + why

    def _seeded_batch(self) -> tuple[Likeness, str]:
        found = compare(self._all[: self.plan.alone], self._hot[: self.plan.alone], self._each(self._seeds, hot=True))
        why = "" if found.equal or self.seeds_count else "; the seed is ignored"
        return found, _said(found, f"with seeds, alone and in a batch of {self.plan.prompts}") + why

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

    def _seed(self) -> tuple[Likeness, str]:
        try:
            _ = self._hot
        except _SeedsRefusedError as why:
            return self._unseeded()[0], f"the seed is ignored, as it says itself: {why}"
        found = compare(self._all, self._hot, self._hot_otherwise)
        if self.seeds_count:
            return found, f"other seeds give other tokens to {found.differing} of {found.prompts} prompts"
        if all(list(a.tokens) == list(b.tokens) for a, b in zip(self._hot, self._hot_otherwise, strict=True)):
            return found, "the seed is ignored: other seeds give the same tokens"
        again = compare(self._all, self._hot, self._hot_again)
        return found, (
            f"the seed is ignored: equal seeds give other responses to {again.differing} of {again.prompts} prompts, "
            f"other seeds to {found.differing}"
        )

    def _unseeded(self) -> tuple[Likeness, str]:
        try:
            first, again = self._free, self._sample(self._all, None, hot=True)
        except ValueError as error:
            raise _NotApplicableError(f"{error}") from None
        found = compare(self._all, first, again)
        return found, _said(found, "twice without seeds")

    # -- memory and weights

    def _memory(self) -> tuple[Likeness, str]:
        if not self.engine.separate:
            raise _NotApplicableError("its memory is the trainer's own: there is nothing to release")
        base, kept, why = self._batch_of_all, dict[str, Any](), ""
        try:
            before = self.engine.held()
            self._before, kept = prints(before), canonical(before)
        except _FAULTS as error:
            why = f"; its weights could not be compared: {error}"
        self.engine.release_memory()
        self.engine.resume_memory()
        if self._before and (lost := moved(self._before, prints(self.engine.held()))):
            self.engine.update(kept.items(), self.engine.weight_version)
            why = f"; {_count(len(lost), 'tensor')} did not survive it and {_were(len(lost))} brought again"
            if gone := moved(self._before, prints(self.engine.held())):
                why += f", which left {_count(len(gone), 'tensor')} changed: {_names(gone)}"
        found = compare(self._all, base, self._sample(self._all, self._seeds))
        return found, _said(found, "before and after its memory was released") + why

    @cached_property
    def _changed(self) -> tuple[Likeness, Likeness, str]:
        """With changed weights, and with the old ones again; with what is not as it was."""
        if not self.engine.separate:
            raise _NotApplicableError("its weights are the trainer's own: there is nothing to bring")
        if self._half_updated:
            raise ValueError("not made: the update before it failed")
        base, version = self._batch_of_all, self.engine.weight_version
        before = self.engine.held()
        at_first, kept = prints(before), canonical(before)
        if not kept:
            raise ValueError("the engine does not say which canonical tensors it holds")
        self._half_updated = True
        try:
            self.engine.update(perturbed(kept, self.plan.scale, self.plan.seed), f"{version}-changed")
            # no flush here: an engine must forget by itself what it computed with other weights
            other = compare(self._all, base, self._sample(self._all, self._seeds, warm=True))
        finally:
            self.engine.update(kept.items(), version)
        left = moved(at_first, prints(self.engine.held()))
        why = f"; {_count(len(left), 'tensor')} not as before: {_names(left)}" if left else ""
        return other, compare(self._all, base, self._sample(self._all, self._seeds, warm=True)), why

    def _update(self) -> tuple[Likeness, str]:
        found = self._changed[0]
        if found.equal:
            return found, "the update changed nothing: all bits are those of the old weights"
        return found, f"other weights give other responses to {found.differing} of {found.prompts} prompts"

    def _reversal(self) -> tuple[Likeness, str]:
        _, found, why = self._changed
        return found, _said(found, "before an update and after its reversal") + why


def _tail(successes: int, trials: int) -> float:
    """The probability of so many or more successes in fair trials."""
    return sum(comb(trials, k) for k in range(successes, trials + 1)) / float(2**trials)


def _said(found: Likeness, what: str) -> str:
    if found.equal:
        return f"{what}: {found.values} values of {found.prompts} responses are equal"
    widest = "" if found.widest is None else f", log-probs by at most {found.widest:.3g}"
    return f"{what}: {found.differing} of {found.prompts} responses differ{widest}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

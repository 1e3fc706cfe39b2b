"""Verifying a golden run: today's code on the recorded rollouts, compared signal by signal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from repro_golden.base.canonical import canonical_json, mapping_of
from repro_golden.base.errors import NotVerifiableError, ReproError
from repro_golden.base.files import scratch_folder
from repro_golden.case.file import Case
from repro_golden.case.identity import Difference
from repro_golden.compare.endings import failed_since
from repro_golden.compare.mismatch.bounds import Breach, breaches
from repro_golden.compare.mismatch.change import MismatchChange, mismatch_change
from repro_golden.compare.traces import Comparison, compare, identity_differences, named_alike
from repro_golden.replay.children import Run
from repro_golden.repository.checkout import Checkout
from repro_golden.repository.written import deciding
from repro_golden.runs.runs import Say, train
from repro_golden.store.golden import GoldenRun, Store, describe
from repro_golden.store.rollouts import place_of
from repro_golden.subjects import loaded_by, packages_of, who_is
from repro_golden.subjects.environments.builds import Who
from repro_golden.subjects.surroundings import outside_of, variables_digest
from repro_golden.trace import Trace

__all__ = ["Verification", "agreeing_steps", "changed_since", "refuse_unlike", "verify"]


@dataclass(frozen=True)
class Verification:
    """What replaying a golden run found.

    Attributes:
        golden: The golden run.
        comparison: Golden run against replay.
        steps: Steps the case has.
        agreeing: Of each compared step, whether its bits agree, whatever those before it did.
        mismatch: Between trainer and rollout engine, in the golden run and in the replay; None where the columns are
            not shown.
        broken: The case's ``[mismatch]`` bounds that the replay breaks.
        varied: In what the identities differ, where they were meant to.
        since: Where they differ, what else was another when the golden run was recorded; see `changed_since`.
    """

    golden: GoldenRun
    comparison: Comparison
    steps: int
    agreeing: Mapping[int, bool] = field(default_factory=dict)
    mismatch: MismatchChange | None = None
    broken: Sequence[Breach] = ()
    varied: Sequence[str] = ()
    since: str = ""

    @property
    def agrees(self) -> bool:
        """Whether every step of the golden run was replayed and agrees, and no ``[mismatch]`` bound is broken."""
        return self.comparison.equal and self.comparison.steps == self.steps and not self.broken

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        golden = {"machine": self.golden.machine, "commit": self.golden.record.get("commit")}
        outcome = {"agrees": self.agrees, "mismatch_broken": self.broken, **golden}
        return mapping_of(self, "golden", "steps", "agreeing", "broken", **outcome)


def find_golden(store: Store, case: Case, who: Who, vary: Sequence[str] = ()) -> GoldenRun:
    """The golden run that a replay here may be compared with.

    Args:
        store: Where golden runs are.
        case: The case.
        who: Who a replay here would be.
        vary: Parts of the identity in which it may differ.

    Raises:
        NotVerifiableError: another machine's, a noisy one, or none.
        ReproError: the case was changed since.
    """
    golden = store.find(case, who.identity, who.versions, vary)
    refuse_unlike(golden, case)
    return golden


def refuse_unlike(golden: GoldenRun, case: Case) -> None:
    """See that a golden run can say whether its case agrees here, as far as case and record tell.

    Raises:
        NotVerifiableError: it does not reproduce itself, and bits are asked for.
        ReproError: the case was changed since.
    """
    if changed := _changed_keys(golden.record["case"], case.canonical()):
        raise ReproError(
            f"the case {case.name} was changed since its golden run ({', '.join(changed)}): "
            f"`repro golden approve {case.name} --reason ...` records it anew"
        )
    if golden.noisy and case.compare.mode == "bitwise":
        raise NotVerifiableError(
            f"the golden run of {case.name} does not reproduce itself, so bits are not verifiable here: "
            'compare metrics with [compare] mode = "bounds"'
        )


def _changed_keys(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    changed = []
    for key in sorted({*a, *b}):
        x, y = a.get(key), b.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            changed += _changed_keys(x, y, f"{prefix}{key}.")
        elif canonical_json(x) != canonical_json(y):
            changed.append(prefix + key)
    return changed


def verify(checkout: Checkout, case: Case, say: Say, vary: Sequence[str] = ()) -> Verification:
    """Replay a golden run on the working tree.

    Args:
        checkout: Whose.
        case: The case.
        say: Told what is done.
        vary: Parts of the identity in which the golden run's may differ.

    Raises:
        NotVerifiableError: there is no golden run that this machine can be compared with.
        ReproError: the trainer failed, or files were changed.
    """
    store, place = Store(checkout.root), checkout.place(case)
    store.refuse_other_data(case)
    who = who_is(case, place.root)
    golden = find_golden(store, case, who, vary)
    rollouts = store.rollouts(case)
    if rollouts.digest != golden.trace.header.rollouts:
        raise ReproError(
            f"{rollouts.directory} holds other rollouts than the golden run was trained on: "
            f"`git checkout {case.case.rollouts}.dvc` and `dvc checkout {case.case.rollouts}.dvc` bring them back"
        )
    say(f"replaying {case.steps} steps of {case.name} against the golden run of {golden.machine}")
    with scratch_folder(checkout.scratch, "verify") as scratch:
        run = Run(case.steps, place_of(rollouts), trace=str(scratch / "trace"))
        replay = train(case, place, run, scratch / "replay.log")
        differences = _others(golden, replay, loaded_by(case, replay, who) or [], who)
        if other := [d for d in differences if d.part not in vary]:
            raise NotVerifiableError(
                f"the replay ran under another identity: {describe(other)}; "
                f"`repro golden verify {case.name} --vary {other[0].part}` compares all the same"
            )
        comparison = compare(golden.trace, replay, case.compare)
        store.refuse_unknown(golden.directory)  # what is whole in itself may be of an older pointer
        if comparison.equal and (why := failed_since(golden.trace, replay)):
            raise ReproError(f"{case.name}: what was trained agrees, but {why}, which the golden run's did not")
        alike = named_alike(golden.trace, replay, strict=case.compare.strict)
        agreeing = agreeing_steps(golden.trace, alike)
        mismatch = mismatch_change(golden.trace, alike, case.mismatch.max)
        broken = breaches(case.mismatch, replay)
        varied = [str(d) for d in differences]
        since = "" if comparison.equal else changed_since(golden, case, checkout)
        return Verification(golden, comparison, case.steps, agreeing, mismatch, broken, varied, since)


def changed_since(golden: GoldenRun, case: Case, checkout: Checkout) -> str:
    """What numbers may rest on and is not as it was when a golden run was recorded; '' where all is.

    A golden run is recorded in a checkout, whose files must be those that git writes into a worktree now.
    """
    root = checkout.root
    if (lock := golden.record.get("lock")) is not None and list(lock) != packages_of(case, root):
        return "packages"
    variables = golden.record.get("variables")  # older ones do not say
    if variables not in (None, variables_digest(case)):
        return "environment variables"
    if golden.record.get("outside") not in (None, outside_of(case, root)):
        return "files beside its code"
    others = golden.record.get("written") or deciding(checkout.git, checkout.common)
    return "line ends or attributes than a worktree may have" if others else ""


def _others(golden: GoldenRun, replay: Trace, loaded: Sequence[str], who: Who) -> list[Difference]:
    """In what a replay was another's: by what both runs report, and by what was known before them."""
    by_key = {d.key: d for d in golden.differences(who.identity, who.versions, loaded)}
    return list((by_key | {d.key: d for d in identity_differences(golden.trace, replay)}).values())


def agreeing_steps(a: Trace, b: Trace) -> dict[int, bool]:
    """Of each step that both have, whether its bits agree, whatever those before it did."""
    return {x.step: x.root == y.root for x, y in zip(a.steps, b.steps, strict=False)}

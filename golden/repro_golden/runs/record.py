"""Recording a golden run: capture rollouts once, train on them, and let the run prove itself before it is kept."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from repro_golden.base.checks import Proof
from repro_golden.base.errors import MachineFailureError, NotVerifiableError, RefusedError, ReproError
from repro_golden.base.files import scratch_folder
from repro_golden.case.command_line import OPEN_END
from repro_golden.case.file import Case
from repro_golden.case.identity import BITS_VARIABLES, Identity
from repro_golden.compare.coverage import Coverage, coverage_of, earlier_of, read_of
from repro_golden.compare.mismatch.bounds import mismatch_checks
from repro_golden.compare.traces import first_difference
from repro_golden.recording.attach.gathered.unseen import unmatched
from repro_golden.replay.children import Run, RunResult
from repro_golden.repository.checkout import Checkout, Place, held_alone
from repro_golden.repository.linked import Linked, beside_commits, in_few_words, leads_out, refuse_tracked, what_decides
from repro_golden.repository.worktrees import Worktrees
from repro_golden.repository.written import written_otherwise
from repro_golden.runs import proofs
from repro_golden.runs.capture import Capture, capture, keep
from repro_golden.runs.proofs import measure_noise
from repro_golden.runs.runs import Say, run_children, train
from repro_golden.store.golden import GoldenRun, Store, write_record
from repro_golden.store.pulled import pointer_of
from repro_golden.store.rollouts import Rollouts, RolloutSet, place_of
from repro_golden.subjects import kind_of, loaded_by, try_out, who_is
from repro_golden.subjects.environments.builds import Who
from repro_golden.subjects.missing import links_in
from repro_golden.subjects.surroundings import outside_of, variables_digest
from repro_golden.trace import Trace, rewrite_header, seal

__all__ = ["Options", "fix", "record"]

NOISE_RUNS = 3
_OF_TORCH = re.compile(r"(?:\[rank\d+\]:)?\[[IWEF]\d{3,4} \d\d:\d\d:\d\d|\[Gloo\] Rank \d")
_OUT = "the command name {out} in its place, a folder of each run's own"
_FUSED = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


@dataclass(frozen=True)
class Options:
    """What a recording allows.

    Attributes:
        allow_noise: Keep a run that does not reproduce itself, with the noise of each metric.
        allow_failed_checks: Keep a run whose first step fails the checks every guide begins with.
        replace_reason: Replace an existing golden run, and why.
        environment: Extra facts for ``run.json``.
        capture: How rollouts are captured where there are none yet.
        trained: Called with the steps that were made, before the run proves itself.
    """

    allow_noise: bool = False
    allow_failed_checks: bool = False
    replace_reason: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    capture: Capture = field(default_factory=Capture)
    trained: Callable[[int], None] | None = None


def record(checkout: Checkout, case: Case, options: Options, say: Say) -> tuple[GoldenRun, list[Proof]]:
    """Record, prove and keep the golden run of a case on this machine.

    Returns:
        The golden run and everything that was proved of it.

    Raises:
        RefusedError: a proof failed; nothing was kept.
        ReproError: the trainer failed, it is being recorded already, no commit can change it, or there is a golden run
            and no reason to replace it.
    """
    store = Store(checkout.root)
    store.dvc.check()
    rollouts = store.rollouts_path(case)
    captures = [rollouts] if rollouts and not store.has_rollouts(case) else []
    with held_alone(checkout, store.case_path(case.name), *captures):
        return _record(checkout, case, store, options, say)


def _record(checkout: Checkout, case: Case, store: Store, options: Options, say: Say) -> tuple[GoldenRun, list[Proof]]:
    refuse_tracked(checkout.git, case)
    if reason := kind_of(case).out_of_reach(checkout):
        raise ReproError(f"{case.name} would guard nothing: {reason}")
    store.refuse_other_data(case)
    place, ran, linked = checkout.place(case), checkout.ran(case), Linked(checkout.git, case.subject.link)
    who = who_is(case, place.root)
    machine = _refuse_existing(store, who, case, options)
    outside = {"outside": outside_of(case, checkout.root), "written": written_otherwise(checkout)}
    with scratch_folder(checkout.scratch, "record") as scratch:
        try_out(case, place, scratch / "check.log")
        recording = _Recording(case, checkout, place, store, scratch, say)
        rollouts = recording.rollouts(options.capture)
        recording.try_worktree(rollouts)
        golden = recording.golden(rollouts)
        recording.compare_worktree(golden, rollouts)
        case = recording.case
        if options.trained:
            options.trained(case.steps)
        _refuse_another(who.identity, Identity.from_mapping(golden.header.identity))
        if unseen := unmatched(golden, case.observe.activations, case.observe.metrics):
            raise ReproError(f"{case.name} would not guard what it says: {unseen}; correct [observe]")
        checks = proofs.first_step_checks(golden, case.first_step.grad_norm_max) if _checked(case, golden) else []
        checks += mismatch_checks(case.mismatch, golden)
        sound = proofs.not_vacuous(golden, recorded=case.subject.recorded)
        recording.refuse(sound, checks, options)  # cheap, so before the processes that the other proofs take
        results = recording.prove(golden, rollouts)
        noise = recording.settle(results, options, golden)
        results = [*checks, *sound, *results]
        linked.check()
        if (now := checkout.ran(case)).tree != ran.tree:
            fix = "record it again, and let a program that writes a file which git tracks write it to {out}"
            which = in_few_words(checkout.uncommitted(case)) or "now as committed"
            raise ReproError(f"the code of {case.name} was changed while it was recorded ({which}): {fix}")
        if not ran.tree:
            say(f"  note: no key stands for the code, nor says whether it was changed meanwhile: {ran.unknown}")
        code = {"commit": ran.commit or None, "tree": ran.tree or None, "untracked": ran.beside(now)}
        facts = _facts(case, golden, results, options) | code | _surroundings(case, golden, who) | outside
        engine = rollouts.engine if isinstance(rollouts, RolloutSet) else None
        write_record(recording.staged, facts | {"noise": noise, "engine": engine})
        keep(store, case, recording.captured)
        golden_run = store.keep(recording.staged, machine, case.name, replace_reason=options.replace_reason)
        return golden_run, results


def _checked(case: Case, golden: Trace) -> bool:
    """A program is checked where it shows the columns that the checks are about."""
    return case.first_step.check and (case.subject.tells or proofs.shows_policies(golden))


def _refuse_another(expected: Identity, reported: Identity) -> None:
    """A run that the case does not describe is refused; what a program sets for itself is its own."""
    differences = [d for d in expected.differences(reported) if d.key not in (*BITS_VARIABLES, "threads")]
    if differences:
        raise ReproError(
            f"the program ran under another identity than its case says: {'; '.join(map(str, differences))}; "
            "correct subject.python, subject.env or [resources]"
        )


def _refuse_existing(store: Store, who: Who, case: Case, options: Options) -> str:
    """The machine that a new golden run will be of: that of the one which it replaces, if there is one."""
    machine = who.identity.machine
    with contextlib.suppress(NotVerifiableError):
        # of several, those that are not replaced would contradict what is approved
        if options.replace_reason is None or len(store.serving(case, who.identity, who.versions)) == 1:
            machine = store.find(case, who.identity, who.versions).machine
    path = store.run_path(machine, case.name)
    store.refuse_dirty(path)
    if store.in_git(path):
        raise ReproError(
            f"the golden run of {case.name} for {machine} is in git itself, which DVC does not keep: "
            f"`git rm -r --cached {path}` and `dvc add {path}` hand it over, and "
            f"`repro golden approve {case.name} --reason ...` replaces it then"
        )
    if pointer_of(path).exists() and options.replace_reason is None:
        raise ReproError(
            f"{case.name} already has a golden run for {machine}: "
            f"`repro golden approve {case.name} --reason ...` replaces it and keeps the old one beside it"
        )
    return machine


def _writes_files(coverage: Coverage) -> bool:
    """Whether the program was seen to write any, which another run of it may read, or write too."""
    return bool(coverage.files) or any(name.startswith(("file ", "saved/")) for name in coverage.unread)


class _Recording:
    """The runs that one recording makes, all below one scratch folder."""

    def __init__(self, case: Case, checkout: Checkout, place: Place, store: Store, scratch: Path, say: Say) -> None:
        self.case, self.checkout, self.place = case, checkout, place
        self.store, self.scratch, self.say = store, scratch, say
        self._began = time.time()
        self._tried: Trace | None = None  # in a worktree
        self.staged = scratch / "golden"
        self.captured: Path | None = None
        self._cancel = threading.Event()

    def rollouts(self, how: Capture) -> Rollouts:
        """The case's rollouts; captured now when there are none yet."""
        path = self.store.rollouts_path(self.case)
        kind = kind_of(self.case)
        there = path is None or kind.brings_rollouts or self.store.has_rollouts(self.case)
        if path is not None and not there and (missing := kind.needs_rollouts(path)):
            raise ReproError(missing)
        if there and how != Capture():
            raise ReproError(
                f"the rollouts of {self.case.name} are there already, no engine is needed: leave --engine out, or "
                f"`repro rollout record {self.case.name} --replace` with it first"
            )
        if path is not None and path.is_symlink() and not self.store.in_git(path):
            raise ReproError(f"{path} is a symbolic link, which DVC does not keep: put the folder itself there")
        if path is not None and there:
            self.store.refuse_dirty(path)
        if there:
            return self.store.rollouts(self.case)
        self.captured = self.scratch / "rollouts"
        return capture(self.case, self.place, how, self.captured, self._log("capture"), self.say)

    def try_worktree(self, rollouts: Rollouts) -> None:
        """Run it in a worktree of the commit, as a bisect does: a program may need what no commit holds.

        Raises:
            ReproError: it does, with the cure. What else keeps it from running there is said and no more: golden runs
                are verified in a checkout.
        """
        if not self.case.subject.program:
            return
        if self.place.commit is None:
            self.say("  note: not tried in a worktree, as a bisect runs it: your checkout is not as its last commit")
            return
        try:
            self._tried = self._in_worktree("worktree", rollouts)
        except MachineFailureError:
            raise
        except ReproError as error:
            message = f"in a worktree of its commit, as a bisect replays it, {error}"
            message += leads_out(self.checkout.git, message)
            if links_in(message):
                raise ReproError(message) from None
            self.say(f"  note: {message}")

    def _in_worktree(self, name: str, rollouts: Rollouts) -> Trace:
        """A run in a worktree of the commit, which has nothing of the checkout but what is linked."""
        assert self.place.commit is not None
        run = Run(self.case.proof_steps, place_of(rollouts), trace=str(self.scratch / name))
        closing = contextlib.closing(Worktrees.of(self.checkout, self.case))
        with closing as worktrees, worktrees.at(self.place.commit, self.place.tree) as place:
            return train(self.case, place, run, self._log(name), self._cancel)

    def compare_worktree(self, golden: Trace, rollouts: Rollouts) -> None:
        """Refuse what the checkout alone makes: two runs there agree, and so do two in worktrees of its commit.

        Raises:
            RefusedError: so it is, with what may decide.
        """
        if self._tried is None or first_difference(golden, self._tried) is None:
            return
        there = self._in_worktree("worktree-again", rollouts)
        differs = first_difference(golden, there)
        if differs is None or first_difference(self._tried, there):
            return
        with self._told_what_was_left():
            here = self._side("checkout-again", self.case.proof_steps, rollouts, observed=True)
        if first_difference(golden, here) is None:
            why = what_decides(self.checkout.git, self.case.subject.link)
            raise RefusedError(
                f"{self.case.name} is no golden run: a worktree of its commit, where a bisect replays it, makes other "
                f"numbers than your checkout, from {differs}: {why}; nothing was kept"
            )

    def golden(self, rollouts: Rollouts) -> Trace:
        """Train on the rollouts under the recorder."""
        what = f" on {len(rollouts)} rollouts" if isinstance(rollouts, RolloutSet) else ""
        length = "all steps that it makes" if self.case.steps == OPEN_END else f"{self.case.steps} steps"
        self.say(f"recording {length}{what}")
        states = {step: str(self.staged / "states" / str(step)) for step in self.case.case.states}
        trace, watched = str(self.staged / "trace"), not self.case.subject.tells
        budget = self.case.case.states_budget
        run = Run(
            self.case.steps, place_of(rollouts), trace=trace, states=states, states_budget=budget, terminal=watched
        )
        try:
            golden = self._whole(train(self.case, self.place, run, self._log("golden")))
        except MachineFailureError:
            raise
        except ReproError as error:
            if self._tried is None or (self.staged / "trace" / "steps.jsonl").exists():
                raise
            beside = beside_commits(self.checkout.git, self.case.subject.link)
            raise ReproError(
                f"{error}; a worktree of its commit, which has no {in_few_words(beside) or 'other files'}, makes a "
                f"step: remove what an earlier run left, or let {_OUT}"
            ) from None
        for flag, near in golden.header.subject.get("ignored", {}).items():
            meant = f": did you mean {near}?" if near else ""
            self.say(f"  note: {self.case.subject.kind} ignores {flag} of your launch{meant}")
        if (trained := golden.header.subject.get("samples")) and trained[0] < trained[1]:
            self.say(f"  note: {trained[0]} of {trained[1]} samples of a rollout were trained on")
        for name, value in golden.header.subject.get("overridden", {}).items():
            self.say(f"  note: your launch sets {name}={value}; a deterministic replay asks for another value")
        if text := read_of(earlier_of(golden)):
            self.say(f"  note: {text}: give each run its own by {{out}}, or `touch` what is the same for all")
        if not golden.complete:
            raise ReproError(f"{self.case.name} ended after {len(golden.steps)} of {self.case.steps} steps")
        if code := (golden.end or {}).get("exit", 0):
            self.say(f"  note: the program failed (exit code {code}) after its last step; a replay may do so too")
        return golden

    def _whole(self, golden: Trace) -> Trace:
        """The trace; that of a program which was run to its own end is a case of as many steps."""
        count = len(golden.steps)
        if self.case.steps != OPEN_END or not count or golden.end is None:
            return golden
        self.case = self.case.model_copy(update={"case": self.case.case.model_copy(update={"steps": count})})
        rewrite_header(golden.directory, replace(golden.header, case=self.case.canonical(), steps=count))
        return Trace(golden.directory)

    def prove(self, golden: Trace, rollouts: Rollouts) -> list[Proof]:
        """The proofs, their processes side by side, or one after the other where one would read what another wrote.

        The last of these is the plain run, so that what stays in the user's checkout is the program's own.
        """
        steps = self.case.proof_steps
        bare_too = "a run without the recorder, " if self.case.subject.recorded else ""
        self.say(f"proving it: a second process, {bare_too}planted changes ({steps} steps each)")
        planted = proofs.perturbations(golden, steps, kind_of(self.case).provable)
        replays = self._replays_the_capture() if self.captured else None
        results: list[Proof] = []
        total = 1 + self.case.subject.recorded + len(planted) + (replays is not None)

        def proved(proof: Proof) -> None:
            results.append(proof)
            self.show([proof], f"proof {len(results)} of {total}: ")

        at_once = (os.cpu_count() or 1) // (self.case.resources.cpus * self.case.resources.processes)
        workers = 1 if _writes_files(coverage_of(golden)) else max(1, at_once)
        with ThreadPoolExecutor(max_workers=workers) as pool, self._ended_together(), self._told_what_was_left():
            again = pool.submit(self._side, "again", steps, rollouts, observed=True)
            # without a recorder there is nothing that could have changed the run
            alone = self.case.subject.recorded
            perturbations = pool.submit(self._planted, golden, rollouts, planted)
            bare = pool.submit(self._side, "bare", steps, rollouts, observed=False) if alone else None
            proved(proofs.reproduced(golden, again.result(), steps, fix(self.case)))
            if bare:
                proved(self._undisturbed(golden, bare.result()))
            for trace, change in zip(perturbations.result(), planted, strict=True):
                inside = kind_of(self.case).perturbed_inside(change)
                proved(proofs.seen_perturbation(golden, trace, change, inside=inside))
        if replays:
            proved(replays)
        return results

    def _side(self, name: str, steps: int, rollouts: Rollouts, *, observed: bool) -> Any:
        folder = self.scratch / name
        trace = str(folder / "trace") if observed else None
        run = Run(steps, place_of(rollouts), trace=trace, checkpoint=str(folder / "checkpoint"), terminal=True)
        if observed:
            return train(self.case, self.place, run, self._log(name), self._cancel)
        return self._launch(name, [run])[0].terminal

    def _undisturbed(self, golden: Trace, bare: dict[str, str]) -> Proof:
        again = Trace(self.scratch / "again" / "trace")
        recorded = (again.end or {}).get("terminal", {})
        subject = self.case.subject
        # a program's output holds times; the metrics in it are part of its terminal state
        lines = [self._printed(n) for n in ("again", "bare")] if subject.tells else []
        folders = [self.scratch / n / "checkpoint" for n in ("again", "bare")] if subject.saves_checkpoint else []
        return proofs.undisturbed(recorded, bare, lines, folders, (golden.end or {}).get("terminal"))

    def _planted(self, golden: Trace, rollouts: Rollouts, planted: Sequence[tuple[int, str, str]]) -> list[Trace]:
        """One process, one run for each perturbation; each ends where it first differs from the golden run."""
        folders = [self.scratch / f"perturbed-{phase}" for _, phase, _ in planted]
        base = str(golden.directory)
        runs = [
            Run(change[0] + 1, place_of(rollouts), trace=str(folder), baseline=base, perturbation=change)
            for folder, change in zip(folders, planted, strict=True)
        ]
        self._launch("perturbations", runs)
        for folder in folders:
            seal(folder)
        return [Trace(folder) for folder in folders]

    def _replays_the_capture(self) -> Proof | None:
        """Training on the recorded rollouts prints what training while sampling them printed, if it prints at all."""
        capture, golden = (self._printed(n).splitlines() for n in ("capture", "golden"))
        if not capture and not golden:
            return None
        seen = f"{len(golden)} lines, {len(capture)} captured"
        return Proof("the replay prints what the capture printed", capture == golden, seen)

    def show(self, proofs: Sequence[Proof], of: str = "") -> None:
        for proof in proofs:
            self.say(f"  {'ok' if proof.passed else 'NO'}  {of}{proof.name}: {proof.detail}")

    def refuse(self, sound: Sequence[Proof], checks: Sequence[Proof], options: Options) -> None:
        """Refuse a vacuous run, and one whose first step fails its checks."""
        self.show([*checks, *sound])
        if failed := [p for p in sound if not p.passed]:
            raise _refusal(self.case, failed[0], "nothing was kept")
        if (unmet := [c for c in checks if not c.passed]) and not options.allow_failed_checks:
            raise _refusal(self.case, unmet[0], "correct the case, or keep it all the same with --allow-failed-checks")

    def settle(self, proofs: Sequence[Proof], options: Options, golden: Trace) -> dict[str, Any] | None:
        """Refuse what was not proved; return the measured noise when that is allowed instead."""
        failed = [p for p in proofs if not p.passed]
        noisy = any(p.name.startswith("reproduced") for p in failed)
        if failed and not (noisy and options.allow_noise):  # without reproduction no proof over bits can hold
            left = self._left()
            raise _refusal(self.case, failed[0], f"{left}; nothing was kept" if left else "nothing was kept")
        if not noisy:
            return None
        self.say(f"measuring the noise of each metric over {NOISE_RUNS} more runs")
        rollouts = place_of(RolloutSet(self.captured) if self.captured else self.store.rollouts(self.case))
        runs = [golden]
        for k in range(NOISE_RUNS):
            run = Run(self.case.steps, rollouts, trace=str(self.scratch / f"noise-{k}"))
            runs.append(train(self.case, self.place, run, self._log(f"noise-{k}")))
        return measure_noise(runs)

    @contextlib.contextmanager
    def _told_what_was_left(self) -> Iterator[None]:
        """A process that fails where one before it did not may have found what that one wrote."""
        try:
            yield
        except MachineFailureError:
            raise
        except ReproError as error:
            if left := self._left():
                raise ReproError(f"{error}; {left}") from None
            raise

    def _left(self) -> str:
        """What the runs so far wrote into the checkout, with what to do where a later one takes that up."""
        names = beside_commits(self.checkout.git, since=self._began) if self.case.subject.program else []
        if not names:
            return ""
        return (
            f"an earlier run left {in_few_words(names)} in your checkout: if the program goes on from that, let {_OUT}"
        )

    @contextlib.contextmanager
    def _ended_together(self) -> Iterator[None]:
        """When one of the processes side by side fails, or the user interrupts, the others end too."""
        try:
            yield
        except BaseException:
            self._cancel.set()
            raise

    def _launch(self, name: str, runs: Sequence[Run]) -> list[RunResult]:
        return run_children(self.case, self.place, runs, self._log(name), self._cancel)

    def _log(self, name: str) -> Path:
        return self.scratch / f"{name}.log"

    def _printed(self, name: str) -> str:
        """What the trainer printed, without the lines of torch's C++ libraries: the time of day stands in those."""
        lines = self._log(name).read_text(errors="replace").splitlines(keepends=True)
        return "".join(line for line in lines if not _OF_TORCH.match(line))


def fix(case: Case) -> str:
    """What makes a trainer reproduce itself, as far as its case shows."""
    hint = kind_of(case).advice
    if case.subject.env.get(_FUSED, "0") == "0":
        return hint
    return (
        f"set {_FUSED}=0 (subject.env asks for {case.subject.env[_FUSED]}: Transformer Engine's fused attention then "
        f"sums gradients in the order in which they come), or choose other kernels with --attention-backend; or {hint}"
    )


def _refusal(case: Case, proof: Proof, fix: str) -> RefusedError:
    return RefusedError(f"{case.name} is no golden run: {proof.name}: {proof.detail}; {fix}")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"uid {os.getuid()}"


def _surroundings(case: Case, golden: Trace, who: Who) -> dict[str, Any]:
    """What was known before the run, and which of it the run took."""
    loaded = loaded_by(case, golden, who)
    known = {} if loaded is None else {"expected": who.identity.to_mapping(), "loaded": loaded}
    return known | {"lock": who.packages}


def _facts(case: Case, golden: Trace, results: Sequence[Proof], options: Options) -> dict[str, Any]:
    approved = {"reason": options.replace_reason} if options.replace_reason else None
    return {
        "case": case.canonical(),
        "chain": golden.chain,
        "steps": len(golden.steps),
        "rollouts": golden.header.rollouts,
        "identity": golden.header.identity,
        "recorded": {"by": _user(), "at": datetime.now(UTC).isoformat(timespec="seconds")},
        "variables": variables_digest(case),
        "proofs": [p.to_mapping() for p in results],
        "states": sorted(int(folder.name) for folder in (golden.directory.parent / "states").glob("*")),
        "approved": approved,
    }

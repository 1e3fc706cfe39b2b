"""Subjects that are slime, Miles or Relax: the user's own launch of one, made to replay recorded rollouts.

The command of the case runs as the user wrote it. What a replay needs is added to the trainer's command line where the
trainer itself starts (`attach.entry`), however the launch gets there: a script, `ray job submit`, torchrun. What the
trainer then writes (`dumps.run.folder`) becomes rows of the trace, beside the recorder's or instead of them.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from repro_golden.base.errors import ReproError
from repro_golden.base.systems import System
from repro_golden.case.file import Case, TrainerSubject
from repro_golden.recording.attach.base.settings import Settings
from repro_golden.replay.children import BITS_DEFAULTS, ChildFailure, Run, RunResult
from repro_golden.repository.checkout import Place
from repro_golden.store.rollouts import INDEX, rollouts_of
from repro_golden.subjects.additions import Parsed, read_parsers
from repro_golden.subjects.kinds.command import AdditionOf, CommandKind
from repro_golden.subjects.kinds.kind import Perturbation
from repro_golden.trace import Header, Row
from repro_golden.trace.columns_written import DUMPED

if TYPE_CHECKING:
    from repro_golden.subjects.replayed import ReplayedRows

__all__ = ["TRAINERS", "Replay", "Trainer", "TrainerKind"]

_QUIET = {"WANDB_MODE": "disabled"}
"""A replay is no experiment: it must not upload, nor wait for a login."""
_SHIELDED = ("pkill", "killall")
_SHIELD = '#!/bin/sh\necho "repro: left out: $(basename "$0") $*" >&2\n'


_FIXES = {
    "unrecognized arguments": "name a flag that a replay adds in subject.leave, if the replay serves without it",
    "no optimizer step was seen": "or set recorder = false in [subject], and what the trainer writes is compared",
}
"""What a failure of these subjects wants, by what it says."""


@dataclass(frozen=True)
class Replay:
    """What a replay asks of a trainer.

    Attributes:
        rollouts: Template of the rollout dumps' paths, with ``{rollout_id}``.
        details: Folder that the trainer writes its dumps to.
        count: How many rollouts are consumed.
    """

    rollouts: str
    details: str
    count: int


@dataclass(frozen=True)
class Trainer:
    """How one of the systems is made to replay.

    Attributes:
        system: Its name.
        entry: Its entry points: files, by the end of their path, or modules.
        end_flag: The flag that ends a run after so many rollouts.
        more: Flags without a value that make it write more of what it computes.
        variables: What a replay adds to its environment, beside what decides bits.
        redirect: Flags that name what it writes, with a name below the run's own folder. Where the launch has one, a
            replay must not write over the user's.
    """

    system: System
    entry: tuple[str, ...]
    end_flag: str
    more: tuple[str, ...] = ()
    variables: Callable[[Replay], Mapping[str, str]] = lambda _: {}
    redirect: tuple[str, ...] = ("--save", "--save-hf", "--critic-save", "--tensorboard-dir", "--ci-save-grad-norm")

    def flags(self, replay: Replay) -> list[list[str]]:
        """What a replay adds to its command line: flags, each with its value if it has one."""
        return [
            ["--debug-train-only"],
            ["--load-debug-rollout-data", replay.rollouts],
            ["--dump-details", replay.details],
            *self._bounds(replay),
            *([flag] for flag in self.more),
            ["--deterministic-mode"],
        ]

    def capture(self, replay: Replay) -> list[list[str]]:
        """What capturing rollouts adds."""
        return [["--debug-rollout-only"], ["--save-debug-rollout-data", replay.rollouts], *self._bounds(replay)]

    def _bounds(self, replay: Replay) -> list[list[str]]:
        # a launch that goes on from a checkpoint would begin behind the recorded rollouts
        return [["--start-rollout-id", "0"], [self.end_flag, str(replay.count)]]


TRAINERS = {
    trainer.system: trainer
    for trainer in (
        # slime has no flag that ends a run early, so the schedule of the learning rate is that of a run of this length
        Trainer("slime", ("train.py", "train_async.py"), "--num-rollout"),
        Trainer(
            "miles",
            ("train.py", "train_async.py"),
            "--debug-exit-after-rollout",  # which leaves the schedule of the learning rate alone
            more=("--save-local-weight-checksum",),
            variables=lambda replay: {"MILES_CI_GATE_RECORD_DIR": f"{replay.details}/ci_gate_record"},
        ),
        Trainer("relax", ("relax/entrypoints/train.py", "relax.entrypoints.train", "train.py"), "--num-rollout"),
    )
}
"""What a replay by each takes: THUDM/slime@624b824a8 (slime/utils/arguments.py, train.py), radixark/miles@31f1ca961
(miles/utils/arguments.py, train.py, tracking_utils), redai-infra/Relax@05149ae1a (relax/utils/arguments.py)."""


class TrainerKind(CommandKind):
    """A launch of slime, Miles or Relax."""

    names = tuple(TRAINERS)
    advice = (
        "see what its guide says of reproducibility (attention backend, dropout, NCCL_ALGO), leave out a metric that "
        "is no number of the training ([observe] ignore), or keep it for its metrics with --allow-noise"
    )

    @classmethod
    def given(cls, header: Header) -> Mapping[str, Any]:
        """Its entry point's: an actor of Ray has its words from there."""
        entry: Mapping[str, Any] = header.subject.get("entry", {})
        return entry

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.subject: TrainerSubject = cast("TrainerSubject", case.subject)

    @property
    def _count(self) -> int:
        return math.ceil(self.case.steps / self.subject.steps_per_rollout)

    def perturbed_inside(self, perturbation: Perturbation) -> bool:
        """Columns that a trainer writes get theirs as they are read."""
        return perturbation[1:] == ("input", "rollout_log_probs") or self.plants(perturbation)

    def plants(self, perturbation: Perturbation) -> bool:
        """Columns are changed in its dumps, or as they are read."""
        return self.subject.recorder and perturbation[1] in ("grad", "update")

    def needs_rollouts(self, path: Path) -> str:
        """It replays them."""
        return (
            f"{self.case.name} replays rollouts, and there are none at {path}: put dumps of a run there as "
            f"0.pt, 1.pt, ..., or let it sample them with `repro rollout record {self.case.name}`"
        )

    def sampler(self, settings: Mapping[str, Any], *, only: bool) -> Case:
        """Its own launch says how it samples."""
        if settings or only:
            raise ReproError(
                f"{self.case.name} is sampled by {self.subject.kind}'s own engines, as its launch says: leave "
                "--engine, --set and --debug-rollout-only out"
            )
        return self.case

    def sampled_by(self, *, only: bool) -> str:
        """Its launch."""
        del only
        return f"its launch, with {self.subject.kind}'s own engines"

    def capture(self, place: Place, folder: Path, log: Path, *, only: bool) -> None:
        """Its own engines sample as many as the case needs, as dumps ``{rollout_id}.pt``."""
        del only
        folder.mkdir(parents=True)
        count = self._count

        def adds(_: Run, scratch: Path) -> _Replaying:
            replay = Replay(_template(folder), str(scratch / "details"), count)
            return _Replaying(self.subject, replay, scratch, TRAINERS[self.subject.kind].capture(replay), log)

        try:
            code = self._unrecorded().ended(place, Run(self.case.steps, train=False), log, None, adds)
        except ChildFailure as failure:
            raise ReproError(f"{self.case.name} captured nothing: {failure}") from None
        missing = [k for k in range(count) if not (folder / f"{k}.pt").is_file()]
        if missing:
            raise ReproError(
                f"{self.case.name} (exit code {code}) wrote no rollout {missing[0]} of {count}; output in {log}"
            )

    def exit_of(self, place: Place, log: Path, cancel: threading.Event | None) -> int:
        """The program replays here too."""
        bare, asked = self._unrecorded(), Run(self.case.steps, str(self._rollouts(place)))
        return bare.ended(place, asked, log, cancel, bare.additions(place, log))

    def _unrecorded(self) -> TrainerKind:
        bare = self.subject.model_copy(update={"recorder": False})
        return TrainerKind(self.case.model_copy(update={"subject": bare}))

    def _run(
        self,
        place: Place,
        asked: Run,
        log: Path,
        cancel: threading.Event | None,
        enough: Callable[[], bool] | None,
    ) -> RunResult:
        try:
            return super()._run(place, asked, log, cancel, enough)
        except ChildFailure as failure:
            for text, fix in _FIXES.items():
                if text in failure.message:
                    failure.message += f"; {fix}"
            raise

    def additions(self, place: Place, log: Path) -> AdditionOf:
        """What a replay needs of it."""
        case, subject = self.case, self.subject

        def adds(asked: Run, scratch: Path) -> _Replaying:
            from repro_golden.subjects.replayed import ReplayedRows, replayed_dumps

            trainer, count = TRAINERS[subject.kind], self._count
            source = Path(asked.rollouts) if asked.rollouts else self._rollouts(place)
            if not (source / INDEX).exists():
                _ = rollouts_of(case, source).digest  # what cannot be read is found before the trainer starts
            folder = replayed_dumps(source, trainer.system, count, scratch, asked.perturbation, subject.allow_pickle)
            details = scratch / "details"
            replay = Replay(_template(folder), str(details), count)
            rows = ReplayedRows(trainer.system, details, log, folder, case, asked.perturbation)
            return _Replaying(subject, replay, scratch, trainer.flags(replay), log, rows)

        return adds

    def _rollouts(self, place: Place) -> Path:
        assert self.case.case.rollouts is not None  # the case's own check
        return (place.home or place.root) / self.case.case.rollouts


def _template(folder: Path) -> str:
    """The path of a rollout's dump as `str.format` takes it: other braces of it are doubled."""
    return str(folder).replace("{", "{{").replace("}", "}}") + "/{rollout_id}.pt"


def _agreed(subject: TrainerSubject, flags: Sequence[Sequence[str]]) -> list[list[str]]:
    """What a replay adds, without what the case leaves out.

    Raises:
        ReproError: the case leaves out what is not added, or sets it to something else.
    """
    names = [option[0] for option in flags]
    for flag in subject.leave:
        if flag not in names:
            raise ReproError(f"subject.leave: a replay adds no {flag}; it adds {', '.join(names)}")
    selected = [list(option) for option in flags if option[0] not in subject.leave]
    for flag in (word.partition("=")[0] for word in subject.flags):
        if flag in {option[0] for option in selected}:
            raise ReproError(
                f"subject.flags sets {flag}, and so does a replay: take it out, or add it to subject.leave"
            )
    return selected


class _Replaying:
    """What is added to a run of one of the trainers; see `additions.Addition`.

    Args:
        subject: The case's subject.
        replay: What is asked.
        scratch: The run's own folder.
        flags: Those that are added.
        log: The program's output.
        rows: What it writes; None where nothing is trained.
    """

    def __init__(
        self,
        subject: TrainerSubject,
        replay: Replay,
        scratch: Path,
        flags: Sequence[Sequence[str]],
        log: Path,
        rows: ReplayedRows | None = None,
    ) -> None:
        self.recorder = subject.recorder and rows is not None
        self._subject, self._replay, self._scratch, self._log = subject, replay, scratch, log
        self._trainer = TRAINERS[subject.kind]
        self._flags = _agreed(subject, flags)
        self._rows = rows
        self._parsers = scratch / "parsers"
        self._parsers.mkdir()
        Path(replay.details).mkdir(exist_ok=True)

    def settings(self, settings: Settings) -> Settings:
        """See `Addition`."""
        entry = {
            "names": list(self._subject.entry or self._trainer.entry),
            "flags": [*(word for option in self._flags for word in option), *self._subject.flags],
            "redirect": {flag: self._place_of(flag) for flag in self._trainer.redirect},
            "out": str(self._parsers),
            "variables": list(self._wanted),
        }
        # the numbers in its lines come from its log, by name and step, and not from what a process is heard to say
        ignore = [*settings.ignore, *(f"{group}/*" for group in ("train", "rollout", "multi_turn", "passrate", "eval"))]
        ignore += DUMPED  # whose content is read as columns, however a version lays the files out
        return replace(settings, recorder=self.recorder, entry=entry, variables=self._wanted, ignore=ignore)

    def _place_of(self, flag: str) -> str:
        """Where this run writes what a flag names a place for."""
        if flag == "--ci-save-grad-norm":
            return f"{self._replay.details}/grad_norm-{{role}}-{{rollout_id}}-{{step_id}}.pt"
        return str(self._scratch / flag.strip("-"))

    @functools.cached_property
    def _wanted(self) -> dict[str, str]:
        variables = {name: self._subject.env.get(name, value) for name, value in BITS_DEFAULTS.items()}
        return variables | dict(self._trainer.variables(self._replay))

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """See `Addition`. Launch scripts of these trainers begin with ``pkill -9 python``, which would be us too."""
        folder = self._scratch / "shield"
        folder.mkdir(exist_ok=True)
        for name in _SHIELDED:
            (folder / name).write_text(_SHIELD, encoding="utf-8")
            (folder / name).chmod(0o755)
        path = os.pathsep.join([str(folder), environment.get("PATH", os.defpath)])
        return _QUIET | self._wanted | dict(environment) | {"PATH": path}

    def rows(self, step: int) -> Sequence[Row] | None:
        """See `Addition`."""
        assert self._rows is not None  # of a run that trains
        rows = self._rows.rows(step)
        if rows is not None and step == 0:
            self._check()
        return rows

    def ended(self, code: int) -> None:
        """See `Addition`."""
        if self._rows is not None:
            self._rows.ended()
        if code == 0:  # else why it failed says more
            self._check()

    @property
    def _parsed(self) -> Parsed:
        return read_parsers(self._parsers, self._flags, self._wanted, self._subject.flags)

    def _check(self) -> None:
        """Refuse a run that was not what it was asked to be.

        Raises:
            ChildFailure: a flag took no effect, so nothing can be said of this commit.
        """
        entry = " or ".join(self._subject.entry or self._trainer.entry)
        parsed = self._parsed
        if not parsed.processes:
            raise self._failure(
                f"no Python process ran {entry} and read a command line: correct subject.entry, or let the launch keep "
                "PYTHONPATH (PYTHONPATH=...:$PYTHONPATH, no python -I or -E)"
            )
        for flag, why in parsed.refused.items():
            added = flag in {option[0] for option in self._flags}
            fix = "name it in subject.leave if the replay serves without" if added else "correct subject.flags"
            raise self._failure(f"{flag} took no effect ({why}): {fix}")

    def _failure(self, message: str) -> ChildFailure:
        return ChildFailure("start", -1, message, str(self._log))

    def unread(self) -> dict[str, str]:
        """See `Addition`."""
        return dict(self._rows.unread) if self._rows else {}

    def about(self) -> dict[str, Any]:
        """See `Addition`."""
        parsed = self._parsed
        return {
            "recorder": self.recorder,
            "flags": [option[0] for option in self._flags],
            "samples": self._rows.trained if self._rows else [],
            "ignored": dict(parsed.ignored),
            "overridden": dict(parsed.overridden),
            "entry": dict(parsed.given),
        }

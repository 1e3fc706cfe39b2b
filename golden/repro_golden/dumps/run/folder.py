"""A run's folder of dumps and its log as the rows of a trace, step by step, also while the trainer writes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from repro_golden.base.canonical import same_float
from repro_golden.base.errors import ReproError
from repro_golden.base.systems import System
from repro_golden.dumps.archive.reading import LIMIT, read_archive
from repro_golden.dumps.rollout.fields import KNOWN_CLASSES
from repro_golden.dumps.run.events import EventLog
from repro_golden.dumps.run.files import TrainFiles
from repro_golden.dumps.run.log import RunLog, wanted
from repro_golden.dumps.run.losses import LossCall
from repro_golden.dumps.run.record_rows import SideRecords, engine_rows, event_rows, loss_rows, only_inputs, took_losses
from repro_golden.dumps.run.rows import NO_SIGNAL, column_rows, metric_rows
from repro_golden.dumps.train.joining import Joined, joined
from repro_golden.trace import Row

__all__ = ["OtherRunError", "RunFolder"]

_OF_ONE_RUN = ("grad_norm", "loss", "critic-grad_norm")
"""Numbers that a log and the files beside it cannot give differently of one run."""


class OtherRunError(ReproError):
    """The log is not of the run that wrote the folder."""


class RunFolder:
    """What a run of slime, Miles or Relax wrote, with no recorder.

    A step is an optimizer update, under the number that the trainer's log gives it. A rollout's columns are in the rows
    of its first update. What may differ between two runs that train alike is left out: what measures time, evaluation,
    and what is written after the next rollout has begun.

    Ask for steps in any order, as often as you like: only what changed is read again.
    """

    def __init__(
        self,
        system: System,
        folder: Path,
        log: Path | None = None,
        ranks: int | None = None,
        steps_per_rollout: int | None = 1,
        ignore: Sequence[str] = (),
        *,
        cp_size: int | None = None,
        grad_norm: str | None = None,
        allow: Collection[str] = (),
        limit: int = LIMIT,
        log_start: int = 0,
    ) -> None:
        """Look at a folder, which need not exist yet.

        Args:
            system: Who writes it.
            folder: ``--dump-details``, or a folder with ``train_data`` in it.
            log: What the trainer prints.
            ranks: How many of its ranks write train dumps; without it the last rollout's files are known to be all
                there only when the next rollout's appear, or the run has ended.
            steps_per_rollout: Updates of each rollout; None to find it out once the run has ended.
            ignore: Globs of metrics to leave out.
            cp_size: Ranks of a context-parallel group, where the dumps do not say; found by lengths where None.
            grad_norm: File name that ``--ci-save-grad-norm`` was given; by default any that has ``grad_norm`` in it.
            allow: Names of classes whose objects dumps may hold, as plain fields.
            limit: Most bytes of memory that reading one file may take.
            log_start: Byte of the log from which on it is this run's.
        """
        self.system, self.folder = system, folder
        self._updates = steps_per_rollout
        self._ignore, self._cp_size, self._ranks = tuple(ignore), cp_size, ranks
        self._allow, self._limit = allow, limit
        self._train = TrainFiles(folder, system, ranks, allow, limit)
        self._log = None if log is None else RunLog(log, ignore, log_start)
        self._events = EventLog(folder / "events")
        self._side = SideRecords(folder, grad_norm, limit)
        self._problems: dict[str, None] = {}
        self._counts: dict[int, dict[int, int]] = {}
        self._held: dict[int, Joined | None] = {}
        self._rows: dict[int, list[Row]] = {}
        self._losses: dict[int, dict[int, list[LossCall]]] = {}
        self._kinds: set[str] | None = None
        self._ended = False
        self.broke_off = False  # whether updates were printed whose rollout's dumps are not there
        self.unread: dict[str, str] = {}  # columns that are not looked at, with why

    @property
    def steps_per_rollout(self) -> int:
        """Updates of each rollout.

        Raises:
            ReproError: they are to be found out, and the run has not ended or does not say.
        """
        if self._updates is None:
            if not self._ended:
                raise ReproError(
                    "how many updates a rollout has is known when the run has ended: say steps_per_rollout"
                )
            self._updates = self._found_updates()
        return self._updates

    @property
    def rollouts(self) -> list[int]:
        """The rollouts of which there is anything, in order."""
        self.poll()
        rollouts = set(self._train.paths)
        if not rollouts:
            rollouts = {step // self.steps_per_rollout for step in self._numbers()} | self._side.rollouts
        return sorted(rollouts)

    @property
    def log_is_silent(self) -> bool:
        """Whether there is a log, and no line in it yet of an update or a rollout."""
        return self._log is not None and not self._log.steps and not self._log.rollouts

    def poll(self) -> None:
        """Take note of what was written since.

        Raises:
            ReproError: the log or the events contradict themselves.
        """
        self._train.refresh()
        self._events.read()
        if self._log is not None:
            self._log.read(end=self._ended)
        if self._ended and not self._side.scanned:
            self._side.scan()

    def ended(self) -> None:
        """Nothing more will be written: from now on, what is missing is an error."""
        self._ended = True
        self._side.scanned = False

    def problems(self) -> list[str]:
        """What is worth a warning: sources that disagree, files that are cut short, what could not be used."""
        torn = [f"{path} ends in the middle of a line" for path in self._events.torn] if self._ended else []
        return [*self._problems, *self._events.problems, *torn]

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics of an update as far as they are there, under a trace's names.

        The log's come first, then those of events, of the CI history and of gradient norms' files; where two of them
        disagree, `problems` says so.

        Raises:
            OtherRunError: the log says another loss or gradient norm than the files.
        """
        n = self.steps_per_rollout
        rollout, update = divmod(step, n)
        sources: list[tuple[str, Mapping[str, float]]] = []
        if self._log is not None:
            sources.append(("the log", self._log.steps.get(step, {})))
        sources.append(("the events", wanted(self._events.steps.get(step, {}), self._ignore)))
        sources.append(("the CI history", wanted(self._side.history(step), self._ignore)))
        sources.append(("the grad_norm files", wanted(self._side.grad_norms(rollout, update), self._ignore)))
        if update == 0:
            if self._log is not None:
                sources.append(("the log", self._log.rollouts.get(rollout, {})))
            sources.append(("the events", wanted(self._events.rollouts.get(rollout, {}), self._ignore)))
        merged: dict[str, tuple[str, float]] = {}
        for source, metrics in sources:
            for name, value in metrics.items():
                known = merged.setdefault(name, (source, value))
                # events write whatever is not finite as null
                if not same_float(known[1], value) and not (value != value and not _finite(known[1])):
                    of_one = name in _OF_ONE_RUN and known[0] == "the log" and _differ(known[1], value)
                    if of_one and self._log is not None:
                        raise OtherRunError(
                            f"step {step}: {name} is {known[1]!r} in {self._log.path} and {value!r} in {source} of "
                            f"{self.folder}: is the log of this run?"
                        )
                    self._problem(f"step {step}: {name} is {known[1]!r} in {known[0]} and {value!r} in {source}")
        return {name: value for name, (_, value) in merged.items()}

    def columns(self, rollout: int) -> Joined | None:
        """A rollout's columns, of which `rows` are made; None without train dumps, or where they are not there yet.

        Raises:
            ReproError: they cannot be read, or do not fit together.
        """
        self.poll()
        return self._held[rollout] if self._load(rollout) else None

    def layout(self, rollout: int) -> dict[str, str]:
        """How the trainer was laid out, as far as the dumps of a rollout say: ``ranks``, ``cp`` and ``dp``.

        Raises:
            ReproError: see `columns`.
        """
        columns = self.columns(rollout)
        if columns is None:
            return {}
        shards = {shard.get("data_parallel_rank") for shard in columns.layout.values()} - {None}
        if shards:  # slime's one file, which says of no other part of the layout
            return {"dp": str(len(shards))}
        groups = columns.placed.groups
        sizes = {"ranks": sum(len(group.dumps) for group in groups), "cp": groups[0].cp_size, "dp": len(groups)}
        return {name: str(size) for name, size in sizes.items()}

    def rows(self, step: int) -> list[Row] | None:
        """The rows of an update.

        Returns:
            None where they are not there yet, or are being written.

        Raises:
            ReproError: a part is missing or cannot be read although the run has ended or gone on; sources that
                contradict each other; another number of updates a rollout than was said.
        """
        if step in self._rows:
            return self._rows[step]
        self.poll()
        rollout, update = divmod(step, self.steps_per_rollout)
        if not self._ready(step, rollout) or not self._load(rollout):
            return None
        if not self._ended and self._side.has_hashes(self._first()):
            if not self._later(rollout):
                return None  # they are written after the train dumps, and before the next rollout
            self._side.scan()
        rows = self._made(step, rollout, update, self._held[rollout])
        # of a long run, what was asked for last is all that is kept
        self._rows = {step: rows}
        return rows

    def _made(self, step: int, rollout: int, update: int, columns: Joined | None) -> list[Row]:
        last = update == self.steps_per_rollout - 1
        rows = only_inputs(self._side, rollout) if columns is None and not update else []
        if columns is not None:
            skipped = set[str]()
            rows += column_rows(columns, update, skipped=skipped)
            self.unread |= dict.fromkeys(skipped, "it holds what is no number, or lists of several lengths")
            self.unread |= {name: why for name, why in columns.unread.items() if name not in NO_SIGNAL}
            if not took_losses(columns):
                rows += loss_rows(self._losses.get(update, {}))
        rows += event_rows(self._events, rollout, update, self.steps_per_rollout, self._problem)
        if update == 0:
            rows += engine_rows(self._events, None if rollout == self._first() else rollout - 1)
        if last:
            rows += self._side.hash_rows(rollout, self._first(), self._problem)
        rows += metric_rows(self.metrics(step))
        if not rows:
            raise ReproError(
                f"{self.folder} and its log say nothing of step {step}: was it trained, and is the log given?"
            )
        return rows

    def _ready(self, step: int, rollout: int) -> bool:
        """Whether what is there of an update is all that will be."""
        if self._ended:
            self._check_end(step, rollout)
            return True
        if rollout not in self._train.paths:
            return False
        if self._kinds is None:
            if not self._later(self._first()) or not self._printed(self._first()):
                return False  # which kinds of records a run writes is known from its first rollout, once that is over
            self._side.scan()
            self._kinds = self._seen(self._first() * self.steps_per_rollout)
        return self._kinds <= self._seen(step)

    def _later(self, rollout: int) -> bool:
        """Whether a later rollout has begun to be trained on."""
        return self._train.later(rollout) or any(n // self.steps_per_rollout > rollout for n in self._numbers())

    def _printed(self, rollout: int) -> bool:
        """Whether the log holds all lines of a rollout: Ray forwards a process's lines late, but in their order."""
        if self._log is None:
            return True
        last = max(self._log.steps, default=-1) // self.steps_per_rollout
        return max(last, *self._log.rollouts, -1) > rollout

    def _seen(self, step: int) -> set[str]:
        """What the log says of an update: by role, and of a rollout by label."""
        if self._log is None:
            return set()
        rollout, update = divmod(step, self.steps_per_rollout)
        roles = {role for role in self._log.roles if step in self._log.seen[role]}
        labels = set(self._log.seen) - self._log.roles
        return roles | {label for label in labels if update or rollout in self._log.seen[label]}

    def _check_end(self, step: int, rollout: int) -> None:
        """Make sure that a run that has ended has the step.

        Raises:
            ReproError: naming what is missing.
        """
        if self._train.paths and rollout not in self._train.paths:
            known = sorted(self._train.paths)
            raise ReproError(
                f"{self.folder} has no train dump of rollout {rollout} (it has rollouts {known[0]} to {known[-1]}): "
                "the run ended before it, or was not told to write it"
            )
        if self._log is None or not self._log.steps:
            return
        roles = self._log.roles - self._seen(step)
        if "actor" in roles:
            raise ReproError(
                f"{self._log.path} has no line of step {step}: the run ended before it, or steps_per_rollout is not "
                f"{self.steps_per_rollout}"
            )
        if roles:
            self._problem(f"{self._log.path} has no line of the critic's step {step}")
        if self._train.paths:
            self._check_excess(max(self._log.steps) + 1 - (max(self._train.paths) + 1) * self.steps_per_rollout)

    def _check_excess(self, excess: int) -> None:
        """Look at lines of updates after the last rollout that has train dumps.

        A run that broke off has printed at most one rollout's, since a rollout's dumps are written when it is over.

        Raises:
            ReproError: they are more: a rollout has more updates than was said.
        """
        assert self._log is not None
        lines, dumps, updates = len(self._log.steps), len(self._train.paths), self.steps_per_rollout
        if excess > updates:
            right = f": set it to {lines // dumps}" if lines % dumps == 0 else ""
            raise ReproError(
                f"the log has {lines} steps for {dumps} rollouts, and steps_per_rollout is {updates}{right}"
            )
        if excess > 0:
            steps = "1 step" if excess == 1 else f"{excess} steps"
            self._problem(f"{self._log.path} has lines of {steps} after the last rollout that has train dumps")
            self.broke_off = True

    def _load(self, rollout: int) -> bool:
        """Hold a rollout's columns; False where they are not all there yet."""
        if rollout in self._held:
            return True
        dumps = self._train.load(rollout, final=self._ended)
        if dumps is None:
            if not self._ended or self._train.paths:
                return False
            self._held = {rollout: None}
            return True
        self._side.scan()
        self._counts[rollout] = {dump.rank: len(dump.samples) for dump in dumps}
        updates = {dump.updates for dump in dumps} - {None}
        updates |= {self._side.updates(rollout)} - {None}
        if wrong := sorted(u for u in updates if u is not None and u != self.steps_per_rollout):
            raise ReproError(
                f"rollout {rollout} was trained in {wrong[0]} updates, and steps_per_rollout is "
                f"{self.steps_per_rollout}: set it to {wrong[0]}"
            )
        for before in self._train.paths:
            if before < rollout and before not in self._counts:
                read = self._train.load(before, final=self._ended) or []
                self._counts[before] = {dump.rank: len(dump.samples) for dump in read}
        self._losses = self._side.losses(rollout, dumps, self._counts, self.steps_per_rollout, self._problem)
        # the rollout dump says what the train dumps may not: the samples' indices, or their order
        ordered = any("rollout_position" in sample for dump in dumps for sample in dump.samples[:1])
        samples = None if ordered else self._rollout_samples(rollout)
        columns = joined(dumps, ranks=self._ranks or self._train.ranks, cp_size=self._cp_size, rollout=samples)
        for problem in columns.problems:
            self._problem(problem)
        self._held = {rollout: columns}
        self._train.forget()
        return True

    def _rollout_samples(self, rollout: int) -> list[Mapping[str, Any]] | None:
        """The samples of a rollout dump; None without one, as for a run that replays another's."""
        path = self.folder / "rollout_data" / f"{rollout}.pt"
        if not path.exists():
            return None
        try:
            value = read_archive(path, allow={*self._allow, *KNOWN_CLASSES}, limit=self._limit)
        except ReproError as error:
            self._problem(f"the rollout dump is not used to order samples: {error}")
            return None
        samples = value.get("samples") if isinstance(value, dict) else None
        return samples if isinstance(samples, list) and all(isinstance(sample, dict) for sample in samples) else None

    def _first(self) -> int:
        known = sorted(self._train.paths) or sorted(step // self.steps_per_rollout for step in self._numbers())
        return known[0] if known else 0

    def _numbers(self) -> set[int]:
        """The updates that the log or the events have numbers of."""
        return {*(self._log.steps if self._log else ()), *self._events.steps}

    def _found_updates(self) -> int:
        """How many updates a rollout has, by what the run left.

        Raises:
            ReproError: sources disagree.
        """
        self._train.refresh()
        self._events.read()
        if self._log is not None:
            self._log.read(end=True)
        self._side.scan()
        updates = {self._side.updates(rollout) for rollout in self._train.paths} - {None}
        for rollout in sorted(self._train.paths)[:1]:
            updates |= {dump.updates for dump in self._train.load(rollout, final=True) or ()} - {None}
        numbers, rollouts = self._numbers(), len(self._train.paths)
        if not updates and rollouts and numbers:
            updates = {max(1, len(numbers) // rollouts)}  # a run that broke off may have lines of one rollout more
        if len(updates) > 1:
            raise ReproError(
                f"{self.folder} has rollouts of {sorted(n for n in updates if n)} updates: say steps_per_rollout"
            )
        return (updates.pop() if updates else None) or 1

    def _problem(self, text: str) -> None:
        self._problems.setdefault(text)


def _differ(a: float, b: float) -> bool:
    """Whether they are other numbers; the sign of a zero and a NaN's payload, which no log shows, do not count."""
    return a != b and not (a != a and b != b)


def _finite(value: float) -> bool:
    return value - value == 0.0

"""The replay child, ``python -m repro_golden.replay.child JOB``: the only process in which instrument and subject meet.

It loads the subject by the name that the case gives, checks its interface, and makes each run of the job. Whatever the
subject does wrong becomes one entry of the result file; the traceback goes to the output. Where several ranks train,
each is such a process (`rank_group`) with the same job.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from repro_golden.base.canonical import write_atomic
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.base.machine.usage import measure
from repro_golden.recording.rank_group import RankGroup, lost_a_peer

if TYPE_CHECKING:
    from repro_golden.recording.weight_sync import SyncJudge

__all__ = ["main"]

CONTRACTS = (1,)
"""The doors this instrument can open (`repro_core.CONTRACT`)."""


_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO, errno.EADDRINUSE)


class _SubjectError(Exception):
    """The subject's own fault. What the machine lacks is never that: see `_blame`."""

    def __init__(self, stage: str, step: int, error: BaseException | str) -> None:
        self.stage, self.step = stage, step
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.message = " ".join(text.split())[:500]
        super().__init__(self.message)
        self.peer, self.at = lost_a_peer(error), time.time()

    def to_mapping(self) -> dict[str, Any]:
        """JSON types; ``peer`` and ``at`` tell which of several ranks failed first."""
        return {key: getattr(self, key) for key in ("stage", "step", "message", "peer", "at")}


def _blame(stage: str, step: int, error: BaseException) -> Exception:
    """The subject's error, or the machine's where the disk, the memory or a limit of the system gave out."""
    if isinstance(error, (MachineFailureError, _SubjectError)):
        return error
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _MACHINE):
        name = type(error).__name__
        return MachineFailureError(f"the machine failed the trainer ({name}: {error}): free what it lacks")
    return _SubjectError(stage, step, error)


def main(argv: list[str]) -> int:
    """Make the runs of one job file; the result file holds them, or why there are none."""
    job = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    rank_group = RankGroup.of(job)
    result: dict[str, Any]
    try:
        trainer = import_trainer(job["case"]["subject"], Path(job["root"]))
        rank_groups = [rank_group and rank_group.of_run(number) for number in range(len(job["runs"]))]
        result = {"runs": [_run(trainer, job, run, group) for run, group in zip(job["runs"], rank_groups, strict=True)]}
    except _SubjectError as error:
        traceback.print_exc()
        result = {"failure": error.to_mapping()}
    except ReproError as error:
        result = {"refused": str(error), "machine": isinstance(error, MachineFailureError)}
    write_atomic(rank_group.result if rank_group else Path(job["result"]), json.dumps(result))
    if rank_group:
        rank_group.leave()
    return 0


def import_trainer(subject: dict[str, Any], root: Path) -> ModuleType:
    """Import the subject and check that it is the one meant, and that its interface is one we know."""
    try:
        trainer = importlib.import_module(subject["module"])
    except BaseException as error:
        raise _blame("import", -1, error) from error
    where = Path(trainer.__file__ or "").resolve()
    if subject["path"] and not where.is_relative_to((root / subject["path"]).resolve()):
        message = f"{subject['module']} is not under {subject['path']}/ of this commit"
        raise _SubjectError("import", -1, message)
    if getattr(trainer, "CONTRACT", None) not in CONTRACTS:
        contract = getattr(trainer, "CONTRACT", "none")
        raise _SubjectError("contract", -1, f"CONTRACT {contract} is unknown here (known: {CONTRACTS})")
    return trainer


def _run(trainer: ModuleType, job: dict[str, Any], run: dict[str, Any], rank_group: RankGroup | None) -> dict[str, Any]:
    from repro_golden.store.rollouts import RolloutSet

    case = job["case"]
    recorded = RolloutSet(Path(run["rollouts"])) if run["rollouts"] else None
    operations = _Operations(run["operations"], rank_group.rank if rank_group else 0)
    about = {"config": case["subject"]["config"], "root": job["root"]}
    judge: SyncJudge | None = None
    if not recorded:  # an engine may be asked, to which weights are brought
        from repro_golden.recording.weight_sync import SyncJudge

        about["sync"] = judge = SyncJudge(rank_group, lambda line: print(line, flush=True))
    if not run["train"]:
        return _only_rollouts(trainer, about, run, rank_group)
    try:
        with operations.making(run["first_step"]):
            subject = trainer.build(about)
    except BaseException as error:
        raise _blame("build", -1, error) from error
    try:
        if run["load"]:
            subject.load(run["load"])
    except BaseException as error:
        raise _blame("load", -1, error) from error
    recorder = _recorder(job, run, recorded.digest if recorded else "", subject.position[0], rank_group)
    return _train(trainer, subject, recorder, run, recorded, operations, rank_group, judge)


def _only_rollouts(
    trainer: ModuleType, about: dict[str, Any], run: dict[str, Any], rank_group: RankGroup | None
) -> dict[str, Any]:
    """Sample as many rollouts as the run has steps with the starting weights; of several ranks the first does."""
    nothing = {"steps": 0, "diverged": False, "terminal": {}, "seconds": []}
    if rank_group and rank_group.rank:
        return nothing
    try:
        source = trainer.rollouts_only(about)
    except BaseException as error:
        raise _blame("build", -1, error) from error
    try:
        for rollout_id in range(run["steps"]):
            _write_rollout(run, rollout_id, source.sample(rollout_id), about["sync"])
    except BaseException as error:
        raise _blame("start", -1, error) from error
    finally:
        source.close()
    return nothing


def _write_rollout(run: dict[str, Any], rollout_id: int, rollout: Any, judge: SyncJudge | None) -> None:
    """Write a sampled rollout, with a fingerprint of the weights where an engine's own have sampled it."""
    from repro_golden.store.rollout_file import RolloutData, write_rollout

    weights = {"weights": judge.digest} if judge and judge.digest else {}
    path = Path(run["save_rollouts"]) / f"{rollout_id}.safetensors"
    write_rollout(path, RolloutData({**rollout.meta, **weights}, rollout.tensors))


def _train(
    trainer: ModuleType, subject: Any, recorder: Any, run: dict[str, Any], recorded: Any, operations: _Operations,
    rank_group: RankGroup | None, judge: SyncJudge | None,
) -> dict[str, Any]:  # fmt: skip
    """Feed rollouts until the steps are made or a root differs from the baseline's, which one of several cannot see."""
    from repro_golden.compare.renames import Parting

    parting = Parting(None if rank_group else run["baseline"], run["trace"])
    states = _States(
        {int(step): Path(folder) for step, folder in run["states"].items()}, run["states_budget"], rank_group
    )
    next_step, rollout_id = subject.position
    step, steps_made, diverged, seconds = next_step - 1, 0, False, list[float]()
    observe = operations.observing(recorder or (lambda *_, **__: None))
    last_begun = time.perf_counter()
    states.save(subject, next_step)
    while steps_made < run["steps"] and not diverged:
        data = recorded.read(rollout_id) if recorded else None
        try:
            # a saved position is an index into the folder, whatever number the rollout was recorded under
            numbered = {**data.meta, "rollout_id": rollout_id} if data else {}
            rollout = trainer.Rollout(numbered, data.tensors) if data else subject.sample(rollout_id)
            if run["save_rollouts"] and (rank_group is None or rank_group.rank == 0):
                _write_rollout(run, rollout_id, rollout, judge)
            updates = iter(subject.train(rollout, observe))
            while (done := operations.made(updates, step + 1)) is not None:
                step = done
                seconds.append(time.perf_counter() - last_begun)
                steps_made += 1
                if recorder:
                    diverged = parting.seen(recorder.end_step(step))
                if diverged:
                    break
                states.save(subject, step + 1)
                if steps_made == run["steps"]:
                    break
                last_begun = time.perf_counter()
        except BaseException as error:
            raise _blame("step" if steps_made else "start", step + 1, error) from error
        rollout_id += 1
    try:
        terminal = _terminal(subject) if run["terminal"] else {}
        if run["checkpoint"]:
            subject.save(run["checkpoint"])
    except BaseException as error:
        raise _blame("step", step, error) from error
    if recorder:
        from repro_golden.recording.attach.code.identify import loaded

        diverged = parting.seen(recorder.drain()) or diverged
        reason = "diverged" if diverged else "finished"
        recorder.close({"reason": reason, "terminal": terminal, "spent": measure(seconds), "modules": loaded()})
    return {"steps": steps_made, "diverged": diverged, "terminal": terminal, "seconds": seconds}


class _Operations:
    """Records the operations of one step, where that is asked for."""

    def __init__(self, ask: dict[str, Any] | None, rank: int) -> None:
        self._step, self._recorder, self._under_way = ask["step"] if ask else -1, None, False
        if ask:
            from repro_golden.recording.operations.lines import files_in
            from repro_golden.recording.operations.recorder import OperationRecorder

            self._recorder = OperationRecorder(
                Path(ask["folder"]), ask["root"], ask["step"], rank, ask["dump"], files_in(ask["changed"])
            )
            self._recorder.open()

    @contextlib.contextmanager
    def making(self, first: int) -> Iterator[None]:
        """The block in which the trainer is made; what it does there belongs to its first step."""
        if self._recorder is None or self._step != first:
            yield
            return
        self._recorder.preparing = True
        with self._recording():
            yield
        self._recorder.preparing = False

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        assert self._recorder is not None
        self._recorder.begin()
        self._under_way = True
        try:
            yield
        finally:
            self._under_way = False
            self._recorder.pause()

    def made(self, updates: Iterator[int], step: int) -> int | None:
        """The next update's number, or None; `step` is what it is expected to be."""
        if self._recorder is None or step != self._step:
            return next(updates, None)
        with self._recording():
            done = next(updates, None)
        if done is not None:
            self._recorder.close()
        return done

    def observing(self, observe: Any) -> Any:
        """An observer that notes the signals of the recorded step among its operations."""
        recorder = self._recorder
        if recorder is None:
            return observe

        def noted(phase: str, name: str, value: Any, placement: Any = None) -> None:
            if self._under_way:
                recorder.observed(phase, name, value)
            with recorder.paused():
                observe(phase, name, value, placement)

        return noted


class _States:
    """Training states saved at chosen steps. Where they outgrow their budget, those go that leave the smallest gaps."""

    def __init__(self, wanted: dict[int, Path], budget: int | None, rank_group: RankGroup | None) -> None:
        self._wanted, self._budget, self._rank_group = wanted, budget, rank_group
        self._sizes: dict[int, int] = {}
        self._full = False

    def save(self, subject: Any, step: int) -> None:
        """Save the state before a step, if it is wanted."""
        if step not in self._wanted or self._full:
            return
        try:
            subject.save(str(self._wanted[step]))
        except Exception as error:
            raise _blame("step", step, error) from error
        if self._budget is None:
            return
        # all ranks write to one folder, and must go on saving, or not, together
        self._full = (
            self._rank_group.agreed(f"state-{step}", lambda: self._trim(step)) if self._rank_group else self._trim(step)
        )

    def _trim(self, step: int) -> bool:
        """Keep to the budget after the state before a step was saved; whether no other would fit."""
        assert self._budget is not None
        self._sizes[step] = sum(p.stat().st_size for p in self._wanted[step].rglob("*") if p.is_file())
        while sum(self._sizes.values()) > self._budget:
            saved = [-1, *sorted(self._sizes)]
            # the widest gap that its going would leave decides; the newest goes only where it is alone
            gaps = {saved[i]: saved[i + 1] - saved[i - 1] for i in range(1, len(saved) - 1)} or {step: 0}
            dropped = min(gaps, key=lambda s: (gaps[s], s))
            shutil.rmtree(self._wanted[dropped])
            if self._sizes.pop(dropped) > self._budget:  # the others would not fit either
                return True
        return False


def _recorder(
    job: dict[str, Any], run: dict[str, Any], rollouts: str, first_step: int, rank_group: RankGroup | None
) -> Any:
    if not run["trace"]:
        return None
    from repro_golden.recording.recorder import RankWriter, Recorder
    from repro_golden.trace import TraceWriter

    def header() -> Any:
        from repro_golden.case.identity import collect, megatron_layout
        from repro_golden.trace import Header

        resources = job["case"]["resources"]
        identity = collect(os.environ, threads=resources["cpus"], ranks=resources["ranks"])
        identity = identity.replaying().laid_out(megatron_layout(job["case"]["subject"]["config"], resources["ranks"]))
        return Header(job["case"], rollouts, job["subject"], identity.to_mapping(), run["steps"], first_step)

    writer: TraceWriter | RankWriter
    if rank_group:
        mapping = header().to_mapping() if rank_group.rank == 0 else None
        writer = RankWriter(rank_group.raw, rank_group.rank, rank_group.ranks, mapping)
    else:
        writer = TraceWriter(Path(run["trace"]), header())
    return Recorder(writer, first_step, run["perturbation"], run["dump"])


def _terminal(subject: Any) -> dict[str, str]:
    from repro_golden.fingerprint import fingerprint

    return {name: fingerprint(tensor) for name, tensor in sorted(subject.state().items())}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

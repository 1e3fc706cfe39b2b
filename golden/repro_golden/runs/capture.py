"""Capturing rollouts: the trainer samples them as it trains, or an engine samples them from the starting weights."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro_golden.base.canonical import parse_json
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.base.files import scratch_folder
from repro_golden.case.file import Case
from repro_golden.case.tables import joined
from repro_golden.dumps.rollout.files import NAME, read_rollout_dump
from repro_golden.repository.checkout import Checkout, Place, held_alone
from repro_golden.runs.runs import Say, one_line
from repro_golden.store.golden import Store
from repro_golden.store.pulled import pointer_of
from repro_golden.store.rollout_file import read_rollout
from repro_golden.store.rollouts import INDEX, Rollouts, RolloutSet, rollouts_of
from repro_golden.subjects import kind_of

__all__ = ["Capture", "capture", "keep", "put", "record_rollouts", "settings_of"]


@dataclass(frozen=True)
class Capture:
    """How rollouts are captured, where that is not what the case says.

    Attributes:
        settings: Keys of ``[subject.config]`` with other values, for the capture alone.
        only: Whether nothing is trained: every rollout is sampled with the starting weights.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    only: bool = False

    def case(self, case: Case) -> Case:
        """The case that captures.

        Raises:
            ReproError: a command makes its rollouts itself.
        """
        return kind_of(case).sampler(self.settings, only=self.only)


def settings_of(engine: str | None, url: str | None, pairs: Sequence[str]) -> dict[str, Any]:
    """Settings from a command line.

    Args:
        engine: ``rollout_engine``.
        url: Of a running SGLang server or router.
        pairs: ``KEY=VALUE`` with a dotted key of ``[subject.config]``; the value is JSON, or else a string.

    Raises:
        ReproError: a word without ``=``, or a URL for another engine.
    """
    settings: dict[str, Any] = {}
    if engine is not None:
        settings["rollout_engine"] = engine
    if url is not None:
        if engine not in (None, "sglang"):
            raise ReproError(f"--sglang-url is for --engine sglang, not {engine}: leave one of them out")
        settings = joined(settings, {"rollout_engine": "sglang", "sglang": {"url": url}})
    for word in pairs:
        key, equals, text = word.partition("=")
        if not equals or not all(key.split(".")):
            raise ReproError(f"--set {word} is not KEY=VALUE: write --set sglang.tp_size=2")
        try:
            value = parse_json(text)
        except ValueError:
            value = text
        for part in reversed(key.split(".")):
            value = {part: value}
        settings = joined(settings, value)
    return settings


def capture(case: Case, place: Place, how: Capture, folder: Path, log: Path, say: Say) -> Rollouts:
    """Capture a case's rollouts into a folder, in fresh processes.

    Raises:
        ReproError: the trainer or its engine failed, or weights did not arrive at the engine.
    """
    kind = kind_of(how.case(case))
    say(f"capturing rollouts of {case.name}: {kind.sampled_by(only=how.only)}")
    with one_line(case):
        kind.capture(place, folder, log, only=how.only)
    return rollouts_of(case, folder)


def keep(store: Store, case: Case, captured: Path | None) -> None:
    """Bring captured rollouts to their place, and hand rollouts that DVC does not know as they are to it.

    Raises:
        MachineFailureError: they cannot be brought there; what was there is there still.
    """
    target = store.rollouts_path(case)
    if target is None:
        return
    if captured is not None:
        put(captured, target)
    known = captured is None and pointer_of(target).exists()
    if not known and not store.in_git(target):
        store.dvc.add(target)


def put(folder: Path, target: Path) -> None:
    """Move a folder to its place. One that is there goes when the new one has come, and stays if it does not come.

    Raises:
        MachineFailureError: it could not be moved.
    """
    beside: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=target.parent, prefix=".repro-"))
        shutil.move(folder, beside / "new")  # which copies where this is another disk: before the old one is touched
        if target.exists():
            target.rename(beside / "old")
        try:
            (beside / "new").rename(target)
        except OSError:
            if (beside / "old").exists():
                (beside / "old").rename(target)
            raise
    except OSError as error:
        left = f"; the old content is in {beside / 'old'}" if beside and (beside / "old").exists() else ""
        raise MachineFailureError(f"cannot write {target}: {error.strerror or error}{left}") from error
    finally:
        if beside is not None and (target.exists() or not (beside / "old").exists()):
            shutil.rmtree(beside, ignore_errors=True)


def record_rollouts(
    checkout: Checkout, case: Case, how: Capture, say: Say, *, out: Path | None = None, replace: bool = False
) -> Rollouts:
    """Capture the rollouts of a case and keep them where the case says, or in a folder of the user's.

    Args:
        checkout: The repository.
        case: Of kind core, or of a trainer that has engines of its own.
        how: With which engine.
        say: Receives lines of progress.
        out: A folder to write to instead; DVC is not told of it.
        replace: Whether rollouts that are there already may go.

    Raises:
        ReproError: the capture failed, there are rollouts already, or something else lies there.
    """
    store = Store(checkout.root)
    default = store.rollouts_path(how.case(case))
    assert default is not None  # no command
    target = out.resolve() if out else default
    with held_alone(checkout, target):
        return _record_rollouts(checkout, case, how, say, store, target, in_store=out is None, replace=replace)


def _record_rollouts(
    checkout: Checkout, case: Case, how: Capture, say: Say, store: Store, target: Path, *, in_store: bool, replace: bool
) -> Rollouts:
    pointer = pointer_of(target)
    if not replace and (target.exists() or pointer.exists()):
        where = f"at {target} already" if target.exists() else f"behind {pointer} (`repro golden pull` brings them)"
        raise ReproError(f"there are rollouts {where}: --replace takes their place, --out FOLDER leaves them")
    _refuse_foreign(case, target)
    if in_store:
        store.dvc.check()
        store.refuse_dirty(target)
    with scratch_folder(checkout.scratch, "capture") as scratch:
        folder, log = scratch / "rollouts", scratch / "capture.log"
        capture(case, checkout.place(case), how, folder, log, say)
        _refuse_foreign(case, target)  # sampling takes long: something may have come meanwhile
        if in_store:
            keep(store, case, folder)
        else:
            put(folder, target)
    return rollouts_of(case, target)


def _refuse_foreign(case: Case, target: Path) -> None:
    """Raise for what no capture wrote: taking a folder's place removes all that lies in it.

    Raises:
        ReproError: there is such a thing.
    """
    if not target.exists():
        return
    ours = _ours(target) if target.is_dir() else set()
    for path in sorted(target.iterdir()) if target.is_dir() else [target]:
        if not path.is_file() or not (path.name in ours or _is_dump(path, case)):  # a link of DVC's to its cache is one
            raise ReproError(f"{path} is no recorded rollout, so --replace leaves {target} alone: name another folder")


def _ours(folder: Path) -> set[str]:
    """Names of the files of rollouts in our own form, also where their index is damaged; empty where there are none."""
    try:
        return {INDEX, *(f"{number}.safetensors" for number in range(len(RolloutSet(folder))))}
    except ReproError:
        names = {path.name for path in folder.glob("*.safetensors") if path.stem.isdecimal() and _is_rollout(path)}
        return {INDEX, *names} if names else set()


def _is_rollout(path: Path) -> bool:
    try:
        read_rollout(path)
    except ReproError:
        return False
    return True


def _is_dump(path: Path, case: Case) -> bool:
    if not NAME.fullmatch(path.name):
        return False
    try:
        read_rollout_dump(path, allow=case.subject.unpickled)
    except ReproError:
        return False
    return True

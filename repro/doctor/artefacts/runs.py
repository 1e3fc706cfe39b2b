"""What trainers dump: files of rollouts and of training, and the folder of a run that holds them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from repro.doctor.artefacts.kinds import NotRead, Reader, Rollout, Series, TrainStep
from repro_golden.base.errors import ReproError
from repro_golden.base.files import open_regular
from repro_golden.dumps.rollout.files import NAME, RolloutDump, dump_files, read_rollout_dump
from repro_golden.dumps.run.events import EventLog
from repro_golden.dumps.run.files import TrainFiles, numbered
from repro_golden.dumps.run.record_rows import SideRecords
from repro_golden.dumps.run.records import grad_norm_name, number_of
from repro_golden.dumps.train.files import read_train_dump
from repro_golden.dumps.train.joining import Joined, joined
from repro_golden.dumps.train.tokens import counted, has_column, sample_means

__all__ = ["ROLLOUT_DUMP", "RUN_FOLDER", "sizes_of", "within"]

_HEAD = 1 << 16
"""Bytes of a file that are looked at to see what it is. torch.save puts the keys of the dict at its beginning."""

_LOSS = re.compile(r"rank_[0-9]+_call_[0-9]+\.pt")
_RANKED = re.compile(r"([0-9]{1,18})_([0-9]{1,9})\.pt")
_UPDATES = 1 << 16
_LARGE = 1e300
_ENGINE = "rollout_log_probs"


# -- single files


def _kind(path: Path) -> str:
    """``rollout``, ``train``, or '' for another file, by its first bytes and then by its name."""
    try:
        if path.suffix not in (".pt", ".pth") or not path.is_file():
            return ""
        if grad_norm_name(path.name) is not None or _LOSS.fullmatch(path.name):
            return ""
        with open_regular(path) as file:
            head = file.read(_HEAD)
    except (OSError, ReproError):
        return ""
    if b"rollout_id" in head:
        before = head.partition(b"samples")[0]
        train = b"format_version" in before or b"rollout_data" in before or _has_key(before, b"rank")
        return "train" if train else "rollout"
    # damaged, or in an old form: the name says what it was to be
    if _RANKED.fullmatch(path.name) or (NAME.fullmatch(path.name) and path.parent.name == "train_data"):
        return "train"
    return "rollout" if NAME.fullmatch(path.name) else ""


def _has_key(head: bytes, name: bytes) -> bool:
    """Whether a pickle's beginning has a text of its own, in either of the ways in which a pickle writes one."""
    return len(name).to_bytes(4, "little") + name in head or b"\x8c" + bytes([len(name)]) + name in head


def _read_dump(path: Path) -> Iterator[object]:
    """A file of either kind; of a rank's train dump with those of the other ranks beside it."""
    if _kind(path) == "rollout":
        yield Rollout(path, read_rollout_dump(path))
        return
    ranked = _RANKED.fullmatch(path.name)
    paths = [path]
    if ranked:
        paths = sorted(
            (p for rollout, rank, p in numbered(path.parent) if rollout == int(ranked[1]) and rank is not None),
            key=lambda p: int(p.stem.partition("_")[2]),
        ) or [path]
    dumps = [read_train_dump(p) for p in paths]
    folder = path.parent.parent if path.parent.name == "train_data" else path.parent
    merged = joined(dumps, rollout=_samples(folder, dumps[0].rollout_id))
    yield TrainStep(paths[0], merged.rollout_id, dumps[0].system, merged, folder)


def _samples(folder: Path, rollout: int) -> list[dict[str, Any]] | None:
    """The samples of a rollout dump, which say the indices that Relax's train dumps lack; None where it has none."""
    path = folder / "rollout_data" / f"{rollout}.pt"
    try:
        return read_rollout_dump(path).samples if path.is_file() else None
    except (OSError, ReproError):
        return None  # the dump's own reader says so


# -- folders


def _is_run(path: Path) -> bool:
    try:
        if not path.is_dir():
            return False
        if any((path / name).is_dir() for name in ("rollout_data", "train_data")):
            return True
        if next((path / "events").glob("*.jsonl"), None) is not None:
            return True
        return any(_kind(file) for file in _numbered(path))
    except OSError:
        return False


def _numbered(folder: Path) -> list[Path]:
    """Up to four files of a folder whose names are those of dumps."""
    paths = []
    for path in folder.iterdir():
        if NAME.fullmatch(path.name) or _RANKED.fullmatch(path.name):
            paths.append(path)
            if len(paths) == 4:
                break
    return paths


def _read_run(folder: Path) -> Iterator[object]:
    """All dumps of a run and its numbers; what cannot be read is said when all else has been given.

    Raises:
        ReproError: of everything that could not be read, in one line.
    """
    wrong: list[str] = []
    rollouts: dict[int, dict[str, float]] = {}
    order: dict[int, list[Mapping[str, Any]]] = {}
    for rollout in _rollouts(folder, wrong):
        if isinstance(rollout, NotRead):
            yield rollout
            continue
        dump = rollout.dump
        if not dump.evaluation:
            rollouts[dump.rollout_id] = _means(dump)
            if dump.system == "relax":
                order[dump.rollout_id] = [
                    {name: s.get(name) for name in ("index", "tokens", "response_length")} for s in dump.samples
                ]
        yield rollout
    flags: dict[str, str] = {}
    for step in _train_steps(folder, order, wrong):
        if isinstance(step, NotRead):
            yield step
            continue
        rollouts.setdefault(step.rollout_id, {}).update(_log_probs(step.joined))
        if step.joined.updates is not None:
            flags["num_steps_per_rollout"] = str(step.joined.updates)
        if has_column(step.joined, "rollout_routed_experts"):
            flags["use_rollout_routing_replay"] = "True"  # nothing else asks the engine for them
        yield step
    series = _series(folder, rollouts, flags, wrong)
    if series.steps or series.rollouts:
        yield series
    if wrong:
        more = f" (and {len(wrong) - 8} more)" if len(wrong) > 8 else ""
        raise ReproError("; ".join(wrong[:8]) + more)


def _rollouts(folder: Path, wrong: list[str]) -> Iterator[Rollout | NotRead]:
    """The rollout dumps of a run, evaluations last; of more than fits, the first, the last and some between."""
    place = folder / "rollout_data"
    try:
        if place.is_dir():
            paths = dump_files(place)
        elif (folder / "train_data").is_dir():
            return
        else:
            paths = [path for path in dump_files(folder) if _kind(path) == "rollout"]
    except OSError as error:
        wrong.append(f"{place} cannot be read: {error.strerror}")
        return
    first: RolloutDump | None = None
    before: RolloutDump | None = None
    selected = within(sizes_of(paths))
    if len(selected) < len(paths):
        yield NotRead(place, _left_out(len(selected), len(paths), "rollout dumps"))
    for path in selected:
        try:
            dump = read_rollout_dump(path)
        except ReproError as error:
            wrong.append(str(error))
            continue
        if dump.evaluation:
            yield Rollout(path, dump)
            continue
        yield Rollout(path, dump, first, before)
        first, before = first or dump, dump


def _train_steps(folder: Path, order: Mapping[int, Any], wrong: list[str]) -> Iterator[TrainStep | NotRead]:
    """What each rollout's training dumped; of more than fits, the first, the last and some between."""
    files = TrainFiles(folder, None, None)
    if (folder / "train_data").is_dir():
        files.refresh()
    elif not (folder / "rollout_data").is_dir():
        for rollout, rank, path in numbered(folder):
            if _kind(path) == "train":
                files.paths.setdefault(rollout, {})[rank] = path
    run = folder.parent if folder.name == "train_data" else folder
    sizes = {rollout: sum(sizes_of(paths.values()).values()) for rollout, paths in sorted(files.paths.items())}
    selected = within(sizes)
    if len(selected) < len(sizes):
        yield NotRead(run / "train_data", _left_out(len(selected), len(sizes), "rollouts' train dumps"))
    for rollout in selected:
        try:
            dumps = files.load(rollout, final=True) or []
            if not dumps:
                continue
            relaxed = folder.name == "train_data" and dumps[0].system == "relax"
            merged = joined(dumps, rollout=order.get(rollout) or (_samples(run, rollout) if relaxed else None))
        except ReproError as error:
            wrong.append(str(error))
            continue
        finally:
            files.forget()
        paths = files.paths[rollout]
        first = paths[min(paths, key=lambda rank: -1 if rank is None else rank)]
        yield TrainStep(first, rollout, dumps[0].system, merged, run)


BUDGET = 4 << 30
"""Bytes of dumps of either kind that are held of one run."""

Key = TypeVar("Key")


def within(sizes: Mapping[Key, int], budget: int | None = None) -> list[Key]:
    """As many of the keys as fit, in their order: the first four and the last two, and others evenly between them.

    At least one, however large it is.
    """
    budget = BUDGET if budget is None else budget
    keys = list(sizes)
    edges = [*keys[:4], *keys[4:][-2:]]
    middle = keys[4:-2]
    stride = 1
    while True:
        selected = [*edges, *(middle[stride - 1 :: stride] if stride <= len(middle) else ())]
        if sum(sizes[key] for key in selected) <= budget:
            break
        if stride > len(middle):
            while len(selected) > 1 and sum(sizes[key] for key in selected) > budget:
                selected.pop()
            break
        stride *= 2
    wanted = set(selected)
    return [key for key in keys if key in wanted]


def sizes_of(paths: Iterable[Path]) -> dict[Path, int]:
    """Bytes of each file, in their order."""
    sizes = {}
    for path in paths:
        try:
            sizes[path] = path.stat().st_size
        except OSError:
            sizes[path] = 0  # its reader says so
    return sizes


def _left_out(count: int, all_of_them: int, what: str) -> str:
    return f"{count} of {all_of_them} {what} were read: together they are larger than {BUDGET >> 30} GiB"


# -- numbers


def _means(dump: RolloutDump) -> dict[str, float]:
    """Numbers that a trainer logs of a rollout, by its dump; those alone that every sample has and that are finite."""
    columns: dict[str, list[float | None]] = {
        "raw_reward": [number_of(sample.get("reward")) for sample in dump.samples],
        "response_lengths": [number_of(sample.get("response_length")) for sample in dump.samples],
        "truncated": [float(sample.get("status") == "truncated") for sample in dump.samples],
    }
    means = {}
    for name, values in columns.items():
        plain = [value for value in values if value is not None and abs(value) < _LARGE]
        if plain and len(plain) == len(values):
            means[name] = math.fsum(plain) / len(plain)
    return means


def _log_probs(step: Joined) -> dict[str, float]:
    """Means over the counted tokens, as the trainers log them, and of distances between two columns."""
    averages = {name: sample_means(step, name) for name in ("log_probs", "ref_log_probs", "rollout_log_probs")}
    for name, other in (("ref_logprob_abs_diff", "ref_log_probs"), ("train_rollout_logprob_abs_diff", _ENGINE)):
        pairs = [sample.values for sample in counted(step, "log_probs", other) if sample.positions.size]
        with np.errstate(all="ignore"):
            means = [float(np.abs(log_probs - others).mean()) for log_probs, others in pairs]
            mean = float(np.mean(means)) if means else np.nan
        averages[name] = mean if np.isfinite(mean) else None
    return {name: value for name, value in averages.items() if value is not None}


def _series(
    folder: Path, rollouts: Mapping[int, Mapping[str, float]], flags: Mapping[str, str], wrong: list[str]
) -> Series:
    """Miles' events, the CI history and the gradient norms' files, and what the dumps say of themselves."""
    known = sorted(rollouts)
    events = EventLog(folder / "events")
    try:
        events.read()
    except ReproError as error:
        wrong.append(str(error))
    steps = {number: _plain(metrics) for number, metrics in events.steps.items()}
    by_rollout = {number: dict(metrics) for number, metrics in rollouts.items()}
    for number, metrics in events.rollouts.items():
        by_rollout.setdefault(number, {}).update(_plain(metrics))
    side = SideRecords(folder, None)
    try:
        side.scan()
        updates = max((side.updates(rollout) or 1 for rollout in known), default=1)
        for rollout in known:
            for update in range(min(updates, _UPDATES)):
                number = rollout * updates + update
                side_metrics = _plain(side.history(number)) | side.grad_norms(rollout, update)
                if side_metrics:
                    steps[number] = side_metrics | steps.get(number, {})
    except (OSError, ReproError) as error:
        wrong.append(str(error))
    return Series(folder, dict(sorted(steps.items())), dict(sorted(by_rollout.items())), {}, flags)


def _plain(metrics: Mapping[str, float]) -> dict[str, float]:
    plain = {name.removeprefix("train/").removeprefix("rollout/"): value for name, value in metrics.items()}
    return {name: value for name, value in plain.items() if name != "step"}


_OWNED = (
    "rollout_data", "train_data", "events", "dashboard_columns", "policy_loss_debug", "trajectory",
    "*grad_norm*.pt", "*grad_norm*.pth", "[0-9]*.pt", "eval_[0-9]*.pt",
)  # fmt: skip

ROLLOUT_DUMP = Reader("rollout or train dump", lambda path: bool(_kind(path)), _read_dump, beside=True)
RUN_FOLDER = Reader("folder of a run's dumps", _is_run, _read_run, _OWNED)

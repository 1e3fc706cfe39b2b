"""Rows of what lies beside a run's train dumps: checksums, hashes, gradient norms, dumps of the policy loss."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from repro_golden.base.errors import ReproError
from repro_golden.dumps.archive.reading import LIMIT
from repro_golden.dumps.run.events import Event, EventLog, checksums, engine_checksums, witness_advantages
from repro_golden.dumps.run.files import loss_files, side_files
from repro_golden.dumps.run.losses import LossCall, calls_of, read_loss_call, with_losses
from repro_golden.dumps.run.records import (
    GradNorm,
    ModelHash,
    ci_history,
    dashboard_columns,
    grad_norm_name,
    model_hash_name,
    model_hashes,
    read_grad_norm,
    rollout_results,
)
from repro_golden.dumps.run.rows import LOSS, NAMES, concatenated, line, tensor_rows
from repro_golden.dumps.train.files import TrainDump, length_of
from repro_golden.dumps.train.joining import Joined
from repro_golden.dumps.values import Tensor
from repro_golden.trace import Row
from repro_golden.trace.writer import digest_row

__all__ = ["SideRecords", "engine_rows", "event_rows", "loss_rows", "only_inputs", "took_losses"]

Problem = Callable[[str], None]
Source = tuple[str, int, int]

_UPDATES = 1 << 16
_CI = re.compile(r"[0-9]{1,10}-[0-9a-f]{32}\.jsonl")
_RESULT = re.compile(r"([0-9]{1,18})\.jsonl")
_DASHBOARD = re.compile(r"rollout_([0-9]{1,18})\.parquet")
_RESULT_NAMES = {
    "sample_index": "sample_index",
    "total_length": "total_lengths",
    "response_length": "response_lengths",
    "tokens": "tokens",
    "loss_mask": "loss_masks",
    "rollout_log_probs": "rollout_log_probs",
    "response_rollout_log_probs": "rollout_log_probs",
    "reward": "raw_reward",
}


class SideRecords:
    """The small files of a run's folder.

    Attributes:
        scanned: Whether the folder was looked through since the run ended.
        limit: Most bytes of memory that reading one file may take.
        rollouts: Of which there are files that serve where there are no train dumps.
    """

    def __init__(self, folder: Path, grad_norm: str | None, limit: int = LIMIT) -> None:
        self.scanned = False
        self.rollouts: set[int] = set()
        self.limit = limit
        self._folder, self._template = folder, None if grad_norm is None else Path(grad_norm).name
        self._norms: dict[GradNorm, Path] = {}
        self._hashes: dict[int, dict[ModelHash, Path]] = {}
        self._histories: dict[Path, tuple[tuple[int, int], dict[str, list[tuple[int, float]]]]] = {}
        self._values: dict[Path, float] = {}
        self._calls: dict[Path, LossCall] = {}  # of the rollout at hand
        self._sizes: dict[Path, int] = {}
        self.inputs: dict[int, Path] = {}

    def scan(self) -> None:
        """Look through the folder."""
        self.scanned = True
        for path in side_files(self._folder):
            norm = grad_norm_name(path.name, self._template) if path.suffix in (".pt", ".pth") else None
            named = model_hash_name(path) if path.suffix == ".json" else None
            if norm is not None:
                self._norms[norm] = path
            elif named is not None:
                self._hashes.setdefault(named[0], {})[named[1]] = path
            elif _CI.fullmatch(path.name):
                self._history(path)
            elif path.parent.name == "train" and (match := _RESULT.fullmatch(path.name)):
                self.inputs[int(match[1])] = path
        dashboards = self._folder / "dashboard_columns"
        for path in dashboards.glob("rollout_*.parquet") if dashboards.is_dir() else ():
            if match := _DASHBOARD.fullmatch(path.name):
                self.inputs.setdefault(int(match[1]), path)
        self.rollouts = set(self.inputs)

    def history(self, step: int) -> dict[str, float]:
        """The CI history's numbers of an update; where several processes give other ones, they are told again."""
        by_name: dict[str, set[float]] = {}
        for _, series in self._histories.values():
            for name, points in series.items():
                if name.startswith("train/"):  # others count rollouts, or what else the logger was given
                    by_name.setdefault(name, set()).update(value for at, value in points if at == step)
        return {
            f"{name}#{k}" if k else name: value  # files have names by chance, so they come by size
            for name, values in by_name.items()
            for k, value in enumerate(sorted(values, key=lambda v: (math.isnan(v), v)))
        }

    def grad_norms(self, rollout: int, update: int) -> dict[str, float]:
        """The gradient norms of an update, by role.

        Raises:
            ReproError: a file that holds no number.
        """
        norms = {}
        for role, name in (("actor", "grad_norm"), ("critic", "critic-grad_norm")):
            path = self._norms.get(GradNorm(role, rollout, update))
            if path is not None:
                if path not in self._values:
                    self._values[path] = read_grad_norm(path, self.limit)
                norms[name] = self._values[path]
        return norms

    def updates(self, rollout: int) -> int | None:
        """How many updates the actor's gradient norms show of a rollout; None without any.

        Raises:
            ReproError: a name that gives a number which no update has.
        """
        norms = [norm for norm in self._norms if norm.rollout == rollout and norm.role == "actor"]
        if not norms:
            return None
        last = max(norms, key=lambda norm: norm.update)
        if last.update >= _UPDATES:
            raise ReproError(
                f"{self._norms[last]} would be of update {last.update} of rollout {rollout}: "
                "say with --grad-norm what its name means, or take it away"
            )
        return last.update + 1

    def has_hashes(self, first: int) -> bool:
        """Whether model hashes are of every rollout: then the first one has some."""
        return first in self._hashes

    def hash_rows(self, rollout: int, first: int, problem: Problem) -> list[Row]:
        """The rows of the model hashes that were saved after a rollout.

        Those of data- and context-parallel replicas are one row where they agree; shards stand for themselves.

        Raises:
            ReproError: a file that holds no hashes.
        """
        if not self.has_hashes(first):
            if rollout in self._hashes:
                problem(f"model hashes are there of rollout {rollout} and not of the first one: they are not used")
            return []
        paths = self._hashes.get(rollout, {})
        if not paths:
            problem(f"there are no model hashes of rollout {rollout}")
        lacking = sorted(self._hashes[first].keys() - paths.keys()) if paths else []
        if lacking:
            names = ", ".join(f"tp{r.tp}_pp{r.pp}_dp{r.dp}_cp{r.cp}" for r in lacking)
            problem(f"model hashes of rollout {rollout} lack {names}: those of others stand for themselves")
        shards = {(rank.tp, rank.pp) for rank in self._hashes[first]}
        digests: dict[str, dict[str, bytes]] = {}
        for rank, path in sorted(paths.items()):
            shard = "" if shards == {(0, 0)} else f"tp{rank.tp}_pp{rank.pp}/"
            for layer, raw in model_hashes(path, self.limit).items():
                digests.setdefault(f"model_hash/{shard}{layer}", {})[f"dp{rank.dp}_cp{rank.cp}"] = raw
        return _digest_rows("update", digests, apart=bool(lacking))

    def losses(
        self,
        rollout: int,
        dumps: Sequence[TrainDump],
        counts: Mapping[int, Mapping[int, int]],
        updates: int,
        problem: Problem,
    ) -> dict[int, dict[int, list[LossCall]]]:
        """Give the samples of a rollout's train dumps what the dumps of the policy loss hold of them.

        Args:
            rollout: Which.
            dumps: Its train dumps.
            counts: By rollout and rank the samples that it was trained on, of all rollouts up to this one.
            updates: Of each rollout.
            problem: Takes what is worth a warning.

        Returns:
            The calls of the rollout by update and rank, for where the samples are not found.

        Raises:
            ReproError: a call that cannot be read, or lies in two updates.
        """
        by_update: dict[int, dict[int, list[LossCall]]] = {}
        by_rank = {dump.rank: dump for dump in dumps}
        for rank, paths in loss_files(self._folder).items():
            if rank not in by_rank:
                continue
            plan: list[tuple[int, int]] = []
            for before in sorted(number for number in counts if number <= rollout):
                # a rollout's number times its updates: one entry for each update
                samples = counts[before].get(rank, 0)
                plan += [
                    (before * updates + u, (u + 1) * samples // updates - u * samples // updates)
                    for u in range(updates)
                ]
            call_numbers = calls_of(plan, self._sizes_of(paths, sum(count for _, count in plan)))
            calls = [
                [self._call(paths[call]) for call in call_numbers.get(rollout * updates + update, [])]
                for update in range(updates)
            ]
            self._calls.clear()
            if not all(calls) and by_rank[rank].samples:
                problem(f"rollout {rollout} has no dumps of the policy loss of all updates of rank {rank}")
                continue
            if not with_losses(by_rank[rank], calls):
                problem(
                    f"rollout {rollout}: dumps of the policy loss of rank {rank} hold other samples than its train "
                    "dump; they are kept in the order of its micro-batches"
                )
            for update, update_calls in enumerate(calls):
                by_update.setdefault(update, {})[rank] = update_calls
        return by_update

    def _sizes_of(self, paths: Mapping[int, Path], samples: int) -> dict[int, int]:
        """How many samples a rank's calls have, of the first ones that together have so many.

        Those after them may be of a rollout that is being trained on, and written in part.
        """
        sizes: dict[int, int] = {}
        left = samples
        while left > 0 and (path := paths.get(len(sizes))) is not None:
            if path not in self._sizes:
                self._sizes[path] = len(self._call(path).samples)
            size = sizes[len(sizes)] = self._sizes[path]
            left = left - size if size else 0  # an empty call is refused by who counts them
        return sizes

    def _call(self, path: Path) -> LossCall:
        if path not in self._calls:
            self._calls[path] = read_loss_call(path, self.limit)
        return self._calls[path]

    def _history(self, path: Path) -> None:
        try:
            seen = path.stat()
        except OSError:
            return
        state = seen.st_size, seen.st_mtime_ns
        if path not in self._histories or self._histories[path][0] != state:
            self._histories[path] = (state, ci_history(path, self.limit))


def event_rows(events: EventLog, rollout: int, update: int, updates: int, problem: Problem) -> list[Row]:
    """The rows of an update's events: checksums of each rank's weights, and with the first update advantages.

    Raises:
        ReproError: an event that is none.
    """
    digests: dict[str, dict[str, bytes]] = {}
    by_source: dict[Source, list[Event]] = {}
    for event in events.of("train_engine_local_weight_checksum", rollout):
        by_source.setdefault(event.source, []).append(event)
    kinds = {event.source for event in events.events if event.kind == "train_engine_local_weight_checksum"}
    label = _labels(list(kinds))
    if lacking := [label[source] for source in sorted(kinds - by_source.keys())] if by_source else []:
        names = ", ".join(lacking)
        problem(f"rollout {rollout} has no checksums of rank {names}: those of others stand for themselves")
    for source, source_events in sorted(by_source.items()):
        at = update if len(source_events) == updates else update - updates + len(source_events)
        if len(source_events) not in (1, updates):
            problem(
                f"rollout {rollout} has {len(source_events)} checksums of rank {label[source]} for {updates} updates"
            )
        if 0 <= at < len(source_events):
            prefix = "critic/" if source[0] == "critic" else ""
            for name, raw in checksums(source_events[at]).items():
                digests.setdefault(prefix + name, {})[label[source]] = raw
    rows = _digest_rows("update", digests, apart=bool(lacking))
    return rows if update else _advantage_rows(events, rollout) + rows


def engine_rows(events: EventLog, rollout: int | None) -> list[Row]:
    """The rows of the checksums that rollout engines gave after the weights of a rollout were sent to them.

    They are inputs: of the next rollout's first update, whose samples come from them. None is before the first.

    Raises:
        ReproError: an event that is none.
    """
    digests: dict[str, dict[str, bytes]] = {}
    for event in events.of("inference_engine_weight_checksum", rollout)[-1:]:
        for number, engine in enumerate(engine_checksums(event)):
            for name, raw in engine.items():
                digests.setdefault(f"engine/{name}", {})[str(number)] = raw
    return _digest_rows("input", digests)


def loss_rows(calls: Mapping[int, Sequence[LossCall]]) -> list[Row]:
    """The rows of an update's calls of the policy loss, rank by rank in the order of its micro-batches."""
    tensors: list[tuple[str, str, Tensor]] = []
    for rank, rank_calls in sorted(calls.items()):
        samples = [sample for call in rank_calls for sample in call.samples]
        names = dict.fromkeys(name for sample in samples for name in sample if name not in ("index",))
        for name in names:
            tensor = concatenated([sample.get(name) for sample in samples if sample.get(name) is not None], name)
            if tensor is not None:
                tensors.append(("loss", f"{LOSS}{name}@{rank}", tensor))
    return tensor_rows(tensors)


def took_losses(columns: Joined) -> bool:
    """Whether the dumps of the policy loss were joined with the train dumps."""
    return any(name.startswith(LOSS) for name in columns.columns)


def only_inputs(side: SideRecords, rollout: int) -> list[Row]:
    """What a rollout's result list or dashboard file says of its inputs, where there is no train dump.

    Raises:
        ReproError: it cannot be read.
    """
    path = side.inputs.get(rollout)
    if path is None:
        return []
    if path.suffix == ".parquet":
        columns = dashboard_columns(path, side.limit, names=_RESULT_NAMES)
    else:
        lines = rollout_results(path, side.limit)
        columns = {name: [row.get(name) for row in lines] for name in dict.fromkeys(n for row in lines for n in row)}
    indices = columns.get("sample_index") or []
    if not indices or not all(type(index) is int for index in indices):
        raise ReproError(f"{path} has no sample_index for each of its samples")
    order = sorted(range(len(indices)), key=lambda i: indices[i])
    tensors: list[tuple[str, str, Tensor]] = []
    seen: set[str] = set()
    for name, column in _RESULT_NAMES.items():
        values = columns.get(name)
        if values is None or column in seen or length_of(values) != len(order) or any(v is None for v in values):
            continue
        tensor = concatenated([values[i] for i in order], f"{path}, {name}")
        if tensor is not None:
            seen.add(column)
            tensors.append((*NAMES[column], tensor))
    return tensor_rows(tensors)


def _advantage_rows(events: EventLog, rollout: int) -> list[Row]:
    """Advantages as the events have them: by witness, once where all ranks agree."""
    by_source = witness_advantages(events.of("train_advantage_computation", rollout))
    label = _labels(list(by_source))
    advantages: dict[str, list[float]] = {
        label[source]: [value for _, values in sorted(samples, key=lambda sample: sample[0]) for value in values]
        for source, samples in by_source.items()
    }
    if not advantages:
        return []
    tensors = {name: concatenated(values, "advantages") for name, values in advantages.items()}
    first, *others = tensors.values()
    if first is not None and all(t is not None and t.array.tobytes() == first.array.tobytes() for t in others):
        return tensor_rows([("forward", "witness_advantages", first)])
    return tensor_rows(
        [
            ("forward", f"witness_advantages@{name}", tensor)
            for name, tensor in sorted(tensors.items())
            if tensor is not None
        ]
    )


def _labels(sources: Sequence[Source]) -> dict[Source, str]:
    """What ranks are called in names of rows: their number, and where there are several cells the cell's before it."""
    cells = {cell for _, cell, _ in sources}
    return {source: str(source[2]) if len(cells) < 2 else f"{source[1]}.{source[2]}" for source in sources}


def _digest_rows(phase: str, digests: Mapping[str, Mapping[str, bytes]], *, apart: bool = False) -> list[Row]:
    """One row for a tensor that all who have it agree on, else one for each; `apart` where some are missing."""
    rows = []
    for name, held in digests.items():
        if len(set(held.values())) == 1 and not apart:
            rows.append(digest_row(phase, line(name), next(iter(held.values()))))
        else:
            rows += [digest_row(phase, line(f"{name}@{rank}"), raw) for rank, raw in sorted(held.items())]
    return rows

"""The kinds of artefact that rules are tried on. This module knows no files: readers stand beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy.typing as npt

from repro.doctor.artefacts.launch_kinds import Flag, Launch, Origin, ParserDump, PythonCode, Variable
from repro_golden.base.checks import Where
from repro_golden.base.systems import System
from repro_golden.dumps.rollout.files import RolloutDump
from repro_golden.dumps.train.joining import Joined
from repro_golden.trace import Trace

__all__ = [
    "Aside", "Flag", "Golden", "GoldenValues", "HfCheckpoint", "HfConfig", "Hit", "Launch", "Log",
    "Machine", "MegatronCheckpoint", "Metrics", "NotRead", "Origin", "ParserDump", "PromptData", "PythonCode", "Reader",
    "RewardFunction", "Rollout", "Series", "TensorInfo", "TensorStats", "Tokenizer", "TraceRun", "TrainStep",
    "Variable",
]  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """How a kind of artefact is recognised and read.

    Attributes:
        name: What the kind is called: `launch script`, `Megatron checkpoint` ...
        fits: Whether a file or folder is one: cheap, raises nothing but OSError.
        read: Reads it. One path may give several artefacts (a run's folder: its dumps and numbers). Raises
            `ReproError` for what is corrupt, which becomes a finding.
        owns: Of a folder: patterns of its children that belong to it; the others are looked at for themselves.
        beside: Whether a file of the kind stands for its folder, so that files beside it are read with it.
    """

    name: str
    fits: Callable[[Path], bool]
    read: Callable[[Path], Iterable[object]]
    owns: tuple[str, ...] = ("*",)
    beside: bool = False


# -- checkpoints


@dataclass(frozen=True)
class MegatronCheckpoint:
    """A folder that Megatron saves to or loads from.

    Attributes:
        path: The folder.
        tracker: Text of ``latest_checkpointed_iteration.txt``; None without that file.
        iterations: Iterations that have a folder ``iter_NNNNNNN``, ascending.
        files: Names of the files of each iteration's folder, relative to it, with their sizes in bytes.
        args: Arguments that the newest iteration was saved with (``common.pt``); None where it has none or they could
            not be read.
        extents: By iteration, how many bytes each ``.distcp`` file must have at least by its ``.metadata``. An
            iteration whose ``.metadata`` was not or cannot be read is absent.
        damage: Files that could not be read, relative to `path`, with the reason.

    In `files` and `extents`, ``release`` stands under -1. Where `path` is itself a folder ``iter_NNNNNNN`` or
    ``release``, that is its one iteration.
    """

    path: Path
    tracker: str | None
    iterations: tuple[int, ...]
    files: Mapping[int, Mapping[str, int]]
    args: Mapping[str, Any] | None
    extents: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    damage: Mapping[str, str] = field(default_factory=dict)


class TensorStats(NamedTuple):
    """What one look at all elements of a tensor says.

    Attributes:
        nan: How many elements are not a number.
        inf: How many are infinite.
        constant: The value of all elements, where that is one; None otherwise and for no elements.
        digest: Of dtype, shape and bytes: equal for equal tensors.
        whole: Whether all bytes were read. Of tensors of checkpoints too large to read, three windows are.
    """

    nan: int
    inf: int
    constant: float | None
    digest: str
    whole: bool = True


class TensorInfo(NamedTuple):
    """A tensor by a safetensors header: its file's name, dtype as written there (``BF16``), shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class HfConfig:
    """A ``config.json`` of Hugging Face: `path` of the file, `values`."""

    path: Path
    values: Mapping[str, Any]


@dataclass(frozen=True)
class HfCheckpoint:
    """A folder of safetensors.

    Attributes:
        path: The folder.
        index: ``weight_map`` of ``model.safetensors.index.json``: tensor to file; None without an index.
        tensors: What the shards' own headers hold, by name.
        shards: Names of the safetensors files that are there.
        unreadable: Shards whose header is corrupt, and other files of the folder that are, with the reason.
        total_size: ``metadata.total_size`` of the index, bytes; None where it is not given.
        config: Of the same folder; None without one.
        read: Reads one tensor's elements as a flat array: floats as float32 (bf16, fp16 and fp8 widened), integers as
            they are. Raises `ReproError`.
        scan: Looks once at all elements of a tensor, in pieces; remembered. Raises `ReproError`.
    """

    path: Path
    index: Mapping[str, str] | None
    tensors: Mapping[str, TensorInfo]
    shards: tuple[str, ...]
    unreadable: Mapping[str, str]
    total_size: int | None
    config: HfConfig | None
    read: Callable[[str], npt.NDArray[Any]]
    scan: Callable[[str], TensorStats]


@dataclass(frozen=True)
class Tokenizer:
    """A folder with a tokenizer.

    Attributes:
        path: The folder.
        template: Its chat template (Jinja); None where it has none.
        special: Special tokens as text.
        eos: The text that ends a turn; None where it is not said.
        eos_ids: Ids that end generation, by ``generation_config.json`` and ``config.json``.
        render: Renders messages ``[{"role", "content"}]`` by the template, with the generation prompt unless the last
            is the assistant's. Raises `ReproError`.
        size: One more than the highest token id of ``tokenizer.json``; None where that is not known.
    """

    path: Path
    template: str | None
    special: tuple[str, ...]
    eos: str | None
    eos_ids: tuple[int, ...]
    render: Callable[[Sequence[Mapping[str, Any]]], str]
    size: int | None = None


# -- what runs write


@dataclass(frozen=True)
class NotRead:
    """What a reader left out on purpose: `path` of its folder, and the `reason` in one line."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Rollout:
    """A rollout dump.

    Attributes:
        path: The file.
        dump: Its content.
        first: The first rollout dump of the same run that could be read; None for that one itself, for evaluations and
            for a file that was given alone.
        before: The one before it, likewise.
    """

    path: Path
    dump: RolloutDump
    first: RolloutDump | None = None
    before: RolloutDump | None = None


@dataclass(frozen=True)
class TrainStep:
    """What a trainer dumped of training on one rollout, all ranks joined on samples.

    Attributes:
        path: The folder (``train_data``) or the file.
        rollout_id: Of which rollout.
        system: Whose.
        joined: Columns by sample.
        folder: The run's folder, which `TrainStep`s, `Rollout`s and `Series` of one run share.
    """

    path: Path
    rollout_id: int
    system: System
    joined: Joined
    folder: Path


@dataclass(frozen=True)
class Metrics:
    """Numbers of a run. What is no `Series` are losses and gradient norms as any trainer prints them, by line.

    Attributes:
        path: The log, trace or folder that they come from.
        steps: Metrics of each optimizer step; of any trainer those of each line, which need not name a step.
        rollouts: Metrics of each rollout (``log_probs``, ``ref_log_probs``, ``raw_reward``, ``truncated`` ...).
        lines: Where each step's or rollout's numbers stand: (``step`` or ``rollout``, number) to the line.
        flags: Arguments of the run where its log prints them (``rollout_batch_size ... 32``), by their names there.
    """

    path: Path
    steps: Mapping[int, Mapping[str, float]]
    rollouts: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    lines: Mapping[tuple[str, int], int] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)

    def where(self, kind: str, number: int, metric: str, value: float) -> Where:  # noqa: ARG002 - `Series` needs it
        """The evidence for a metric of a line."""
        return Where(str(self.path), number, metric, f"{value:.6g}")


@dataclass(frozen=True)
class Series(Metrics):
    """Those of slime, Miles and Relax, by step and by rollout, without the prefixes ``train/`` and ``rollout/``."""

    def where(self, kind: str, number: int, metric: str, value: float) -> Where:
        """The evidence for a metric of a ``step`` or ``rollout``."""
        return Where(str(self.path), self.lines.get((kind, number)), f"{kind} {number} {metric}", f"{value:.6g}")


Aside = Literal["", "level", "quoted", "shown"]
"""Why a phrase in a line is no sign by itself: ``level``, the line is INFO or DEBUG; ``quoted``, another text quotes it
or advises on it; ``shown``, it stands in a sample, in what a tool gave, or in a command that ``set -x`` shows."""


class Hit(NamedTuple):
    """A line of a log that holds a phrase: its number from 1, its offset in bytes, its text (cut at 400 characters)."""

    line: int
    offset: int
    text: str
    aside: Aside = ""


@dataclass(frozen=True)
class Log:
    """A log file, read once.

    Attributes:
        path: The file.
        size: Bytes.
        lines: How many.
        hits: By phrase, the first hundred lines that hold it as a sign, and the first hundred that hold it aside.
        counts: By phrase, how many lines hold it.
        series: Its metrics, as slime, Miles and Relax print them.
        metrics: Losses and gradient norms of lines in other forms.
        rank: Of the process, where the file's name or its lines say so.
        explained: Phrases that rules of severity error look for: they say more of an exception than its traceback.
        around: Reads the lines from a number to a number (inclusive) of the file again, without line ends.
    """

    path: Path
    size: int
    lines: int
    hits: Mapping[str, Sequence[Hit]]
    counts: Mapping[str, int]
    series: Series
    metrics: Metrics
    rank: int | None
    explained: Sequence[str]
    around: Callable[[int, int], list[str]]

    def where(self, hit: Hit) -> Where:
        """The evidence for a line."""
        return Where(str(self.path), hit.line, value=hit.text[:160])


# -- traces


@dataclass(frozen=True)
class TraceRun:
    """A trace of ours: `path` of its folder, `trace`."""

    path: Path
    trace: Trace


@dataclass(frozen=True)
class Golden:
    """A golden run.

    Attributes:
        path: Its folder.
        trace: Its trace.
        record: ``run.json``.
        root: The repository that keeps it; None outside of one.
    """

    path: Path
    trace: Trace
    record: Mapping[str, Any]
    root: Path | None


@dataclass(frozen=True)
class GoldenValues:
    """The metrics of a golden run, ours or another project's.

    Attributes:
        path: The golden run's folder, or the file that holds the values.
        metrics: By metric, then by step.
        golden: The golden run, where it is ours.
    """

    path: Path
    metrics: Mapping[str, Mapping[int, float]]
    golden: Golden | None = None


# -- surroundings


@dataclass(frozen=True)
class Machine:
    """An environment that a trainer runs in.

    Attributes:
        source: The interpreter, or the file that lists packages.
        packages: Installed versions by normalised name (``flash-attn-3``, ``numpy``).
        modules: Modules that can be imported without having a package's name (``flash_attn_3``).
        variables: Variables that decide bits or that rules name; None where only packages are known.
        cpus: Cores that this process may use; None where that is not known.
        threads: Threads that torch would take; None where that is not known.
        gpus: GPUs, by `nvidia-smi`; None where that is not known.
        python: Its version.
        complete: Whether `packages` has all that is installed: a lock file or requirements may not.
    """

    source: str
    packages: Mapping[str, str]
    modules: frozenset[str] = frozenset()
    variables: Mapping[str, str] | None = None
    cpus: int | None = None
    threads: int | None = None
    gpus: int | None = None
    python: str = ""
    complete: bool = True


@dataclass(frozen=True)
class PromptData:
    """A JSONL file of prompts.

    Attributes:
        path: The file.
        rows: Iterates over (line number, the object, or a text that says what is wrong with the line); read anew each
            time.
    """

    path: Path
    rows: Callable[[], Iterator[tuple[int, Mapping[str, Any] | str]]]


@dataclass(frozen=True)
class RewardFunction:
    """A reward function of the user's, which `--reward` names.

    Attributes:
        name: ``package.module:function``.
        score: Calls it in its own interpreter on samples (as dicts), once each, and returns rewards. Raises
            `ReproError` with its own error.
    """

    name: str
    score: Callable[[Sequence[Mapping[str, Any]]], list[Any]]

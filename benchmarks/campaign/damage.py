"""Damaged bytes: a file of each format, flipped or cut, gives one line, the whole file's answer, or visibly less."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import doctor_golden_kit
import nightly_kit
import torch
from dump_kit import saved
from promise import Asked, Promise
from rollout_dump_kit import full_dump
from test_rollouts import example
from trace_kit import SMALL, content, exact, write

from repro.nightly.records import NightlyRuns
from repro.site import folder as site
from repro_bisect.probe import left
from repro_bisect.probe.journal import Entry, Journal
from repro_core.config import TrainConfig
from repro_core.engines.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from repro_golden.base.errors import ReproError
from repro_golden.compare.traces import compare
from repro_golden.dumps.archive.reading import read_archive
from repro_golden.dumps.rollout.files import read_rollout_dump, write_rollout_dump
from repro_golden.fingerprint import reference
from repro_golden.store.dvc import Dvc
from repro_golden.store.golden import Store
from repro_golden.store.rollout_file import write_rollout
from repro_golden.store.rollouts import RolloutSet
from repro_golden.subjects.environments.cache import Slot, kept
from repro_golden.trace import Row, Trace
from repro_golden.trace.model import dump_path
from repro_golden.trace.reader import read_dump
from repro_golden.trace.writer import metric_row, seal

__all__ = ["promises"]

TRIES = 2400


@dataclass(frozen=True)
class Format:
    """A format on the disk.

    Attributes:
        name: Its name.
        make: Writes what is of it below a folder.
        file: The file that is damaged, relative to that.
        read: All that a reader says of it.
        less: Whether an answer that is another holds a part of what the whole file tells, and does not pass for it.
        share: How many of the tries of a format it gets; fewer where a read takes seconds.
    """

    name: str
    make: Callable[[Path], object]
    file: str
    read: Callable[[Path], Any]
    less: Callable[[Any, Any], bool] = lambda _found, _whole: False
    share: float = 1.0


def promises(asked: Asked) -> Iterator[Promise]:
    """A promise for each format."""
    formats = asked.some(list(_formats()), "damage")
    for number, each in enumerate(formats):
        tries = asked.count(TRIES // len(formats), least=12)
        yield _tried(asked, each, asked.work / f"damage-{number}", round(tries * each.share))


def _tried(asked: Asked, each: Format, folder: Path, tries: int) -> Promise:
    promise = Promise(f"Damaged bytes are told, or change no answer: {each.name}")
    draw = asked.random("damage", each.name)
    whole = folder / "whole"
    whole.mkdir(parents=True)
    each.make(whole)
    answer, errors, same, less = each.read(whole), 0, 0, 0
    raw = (whole / each.file).read_bytes()
    for _ in range(tries):
        damaged, how = raw, ""
        while damaged == raw:
            damaged, how = _damaged(draw, raw)
        place = folder / "place"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(whole, place, symlinks=True)
        (place / each.file).chmod(0o644)
        (place / each.file).write_bytes(damaged)
        try:
            content = each.read(place)
        except (ReproError, CheckpointError) as error:
            errors += 1
            promise.judge("\n" not in str(error) and len(str(error)) > 10, f"{each.file}, {how}: says {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, it would be a traceback
            promise.judge(False, f"{each.file}, {how}: {type(error).__name__}: {str(error)[:200]}")
        else:
            alike = content == answer
            part = not alike and each.less(content, answer)
            same, less = same + alike, less + part
            promise.judge(alike or part, f"{each.file}, {how}: is read as something else")
    promise.figures = {
        "told in one line": str(errors),
        "the same answer": str(same),
        "visibly less": str(less),
    }
    return promise


def _damaged(draw: Random, raw: bytes) -> tuple[bytes, str]:
    """The bytes after one fault of a disk or a transfer, and which."""
    at = draw.randrange(len(raw))
    kind = draw.choice(["bit", "bit", "bit", "byte", "cut", "zeros", "repeated", "moved"])
    if kind == "bit":
        bit = 1 << draw.randrange(8)
        return raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :], f"bit {bit} of byte {at}"
    if kind == "byte":
        value = draw.randrange(256)
        return raw[:at] + bytes([value]) + raw[at + 1 :], f"byte {at} as {value}"
    if kind == "cut":
        return raw[:at], f"cut at {at}"
    length = min(draw.choice([1, 8, 64, 512]), len(raw) - at)
    if kind == "zeros":
        return raw[:at] + bytes(length) + raw[at + length :], f"{length} zeros at {at}"
    if kind == "repeated":
        return raw[: at + length] + raw[at:], f"{length} bytes at {at} twice"
    return raw[:at] + raw[at + length :], f"{length} bytes at {at} gone"


# -- the formats

_BYTES = struct.pack("<40f", *range(40))
_TENSOR = Row("grad", "w", "float32", (5, 8), reference(_BYTES), 0, 39.0, 0.0, b"")


def _formats() -> Iterator[Format]:
    for file, closed, sealed in (
        ("header.json", True, True), ("steps.jsonl", True, False), ("steps.jsonl", True, True),
        ("rank-00000.log", True, False), ("rank-00000.log", False, False), ("rank-00000.parquet", True, True),
    ):  # fmt: skip
        state = "sealed" if sealed else "closed" if closed else "of a run that was killed"
        yield Format(f"a trace's {file}, {state}", _trace(closed, sealed), file, _of_trace, _no_more)
    yield Format("the index of a long trace", _long, "b/steps.index", _of_long)
    yield Format("a trace's dump of a tensor", _dump, "t/dump", _of_dump, lambda content, _: content is None)
    yield Format("a golden run's run.json", _golden, "run/run.json", _of_golden)
    yield Format("the header of a golden run's trace", _golden, "run/trace/header.json", _of_golden)
    yield Format("the rows of a golden run", _golden, "run/trace/rank-00000.parquet", _of_golden)
    yield Format(
        "the journal of a bisect", _journal, "journal.jsonl", _of_journal, lambda content, whole: content < whole
    )
    yield Format("recorded rollouts", _rollouts, "r/0.safetensors", _of_rollouts)
    yield Format("the index of recorded rollouts", _rollouts, "r/index.json", _of_rollouts)
    yield Format("a rollout dump", _rollout_dump, "3.pt", _of_rollout_dump)
    yield Format("a train dump", _tensors, "3_0.pt", lambda place: exact_of(read_archive(place / "3_0.pt")))
    yield Format("a night's results", _runs, "night.json", _of_runs)
    for file in ("state.safetensors", "trainer.json"):
        yield Format(f"a state's {file}", _state, f"s/{file}", _of_state)
    for file in ("rank-00000.jsonl", "digest"):
        path = f"{left.FOLDER}/{file}"
        yield Format(
            f"recorded operations' {file}", _operations, path, _of_operations, lambda content, _: content == []
        )
    yield Format("the mark of a built environment", _built, "key.built", _of_built, lambda content, _: content is None)
    yield Format("the list of a site's files", _site, "site/repro-site.json", _of_site)
    yield Format(
        "the pointer of what DVC keeps", _pointer, "repo/kept.dvc", _of_pointer, lambda content, _: not content, 0.2
    )


def _trace(closed: bool, sealed: bool) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        made = write(folder, SMALL, end=closed)
        if sealed:
            seal(made)

    return make


def _of_trace(folder: Path) -> Any:
    trace = Trace(folder)
    return exact(trace.header.to_mapping()), content(trace), trace.complete and trace.end


def _no_more(content: Any, whole: Any) -> bool:
    """Steps up to some one, of a trace that does not count as complete."""
    header, steps, end = content
    return not end and header == whole[0] and bool(steps == whole[1][: len(steps)])


def _long(folder: Path) -> None:
    """Two traces of many steps, which part at one of them."""
    for name, at in (("a", 64), ("b", 41)):
        steps = [
            [metric_row("update", "loss", float(k + (k >= at))), metric_row("update", "lr", 0.5)] for k in range(64)
        ]
        seal(write(folder / name, steps))


def _of_long(folder: Path) -> Any:
    comparison = compare(Trace(folder / "a"), Trace(folder / "b"))
    at = comparison.divergence
    return at and (at.step, at.phase, at.signal), comparison.steps


def _dump(folder: Path) -> None:
    trace = Trace(write(folder / "t", [[_TENSOR]]))
    path = dump_path(trace.directory, 0, "grad", "w")
    path.parent.mkdir(parents=True)
    (folder / "t" / "dump").write_bytes(_BYTES)
    path.symlink_to(folder / "t" / "dump")


def _of_dump(folder: Path) -> Any:
    trace = Trace(folder / "t")
    path = dump_path(trace.directory, 0, "grad", "w")
    path.unlink()
    path.symlink_to(folder / "t" / "dump")
    return read_dump(trace, 0, next(row for row in trace.rows(0) if row.name == "w"))


def _golden(folder: Path) -> None:
    repo = doctor_golden_kit.repository(folder / "repo")
    doctor_golden_kit.golden(repo).rename(folder / "run")
    shutil.rmtree(folder / "repo")


def _of_golden(folder: Path) -> Any:
    home = folder / "store" / "golden" / "runs" / "m"
    shutil.rmtree(folder / "store", ignore_errors=True)
    home.mkdir(parents=True)
    (home / "toy").symlink_to(folder / "run")
    golden = Store(folder / "store").read("m", "toy")
    return golden.record, _of_trace(golden.trace.directory)


def _journal(folder: Path) -> None:
    journal = Journal(folder)
    for number in range(6):
        entry = Entry(f"key{number}", number % 2, "c" * 40, "", 3, 1.5, "", code=number % 3, diagnosis="d")
        journal.add(entry, None)
    journal.add(replace(entry, key="skipped", skip="does not import", code=None), None)


def _of_journal(folder: Path) -> Any:
    entries = [Journal(folder).find(f"key{n}", n % 2) for n in range(6)] + [Journal(folder).find("skipped", 1)]
    return {str(asdict(entry)) for entry in entries if entry is not None}


def _rollouts(folder: Path) -> None:
    (folder / "r").mkdir()
    write_rollout(folder / "r" / "0.safetensors", example())
    RolloutSet.write_index(folder / "r")


def _of_rollouts(folder: Path) -> Any:
    rollouts = RolloutSet(folder / "r")
    return rollouts.digest, [rollouts.read(number).digest for number in range(len(rollouts))]


def _rollout_dump(folder: Path) -> None:
    write_rollout_dump(folder / "3.pt", full_dump("slime"))


def _of_rollout_dump(folder: Path) -> Any:
    return exact_of(read_rollout_dump(folder / "3.pt"))


def exact_of(value: Any) -> str:
    """A value as text, with arrays by their bytes."""
    if hasattr(value, "array"):
        return f"{value.dtype} {value.array.shape} {value.array.tobytes().hex()}"
    if hasattr(value, "tobytes"):
        return f"{value.dtype} {value.shape} {value.tobytes().hex()}"
    if isinstance(value, dict):
        return str({key: exact_of(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return str([exact_of(item) for item in value])
    return str(exact(value)) if not hasattr(value, "__dict__") else exact_of(vars(value))


def _tensors(folder: Path) -> None:
    columns = {"log_probs": [torch.arange(5.0)], "tokens": [torch.arange(5)], "name": "x", "step": 3}
    saved(folder / "3_0.pt", columns)


def _runs(folder: Path) -> None:
    path = NightlyRuns(folder).write(nightly_kit.nightly_run())
    path.rename(folder / "night.json")


def _of_runs(folder: Path) -> Any:
    home = folder / "nights" / "m1" / "t"
    shutil.rmtree(folder / "nights", ignore_errors=True)
    home.mkdir(parents=True)
    shutil.copyfile(folder / "night.json", home / "night.json")
    return [exact(nightly_run.to_mapping()) for nightly_run in NightlyRuns(folder / "nights").read()]


def _state(folder: Path) -> None:
    state = {"weight": torch.arange(6.0), "rng/torch": torch.arange(8, dtype=torch.uint8)}
    save_checkpoint(folder / "s", state, TrainConfig().to_mapping(), lambda _: None)


def _of_state(folder: Path) -> Any:
    state = load_checkpoint(folder / "s", TrainConfig(), TrainConfig().model)
    return exact_of({name: value.numpy() for name, value in state.items()})


def _operations(folder: Path) -> None:
    place = folder / left.FOLDER
    place.mkdir()
    lines = [{"format": 1, "step": 0, "rank": 0}, {"contents": [f"{at:032x}" for at in range(20)]}, {"end": ""}]
    (place / "rank-00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    left.seal(folder)


def _of_operations(folder: Path) -> Any:
    streams = left.sealed_streams(folder)
    return [(stream.folder / "rank-00000.jsonl").read_bytes() for stream in streams]


def _built(folder: Path) -> None:
    with kept(folder, "key", 2, lambda _: {"packages": {"torch": "2.13.0", "numpy": "2.1"}}, {}):
        pass


def _of_built(folder: Path) -> Any:
    return Slot(folder, "key", {}).whole()


def _site(folder: Path) -> None:
    site.replace(folder / "site", {"index.html": b"<p>", "t/a.html": b"<p>"})


def _of_site(folder: Path) -> Any:
    return site.check(folder / "site")


def _pointer(folder: Path) -> None:
    repo = folder / "repo"
    repo.mkdir()
    subprocess.run(["git", "init", "--quiet"], cwd=repo, check=True)
    dvc = Dvc(repo)
    dvc.init()
    dvc.set_default_remote("store", str(folder / "remote"), local=False)
    (repo / "kept").mkdir()
    for name in ("run.json", "rows"):
        (repo / "kept" / name).write_text(f"content of {name}")
    dvc.add(repo / "kept")
    dvc.push(repo / "kept.dvc")
    for path in (repo / "kept", repo / ".dvc" / "cache"):
        shutil.rmtree(path)


def _of_pointer(folder: Path) -> Any:
    repo = folder / "repo"
    Dvc(repo).pull(repo / "kept.dvc")
    return sorted((path.name, path.read_bytes()) for path in (repo / "kept").glob("*"))

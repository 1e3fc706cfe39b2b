"""`repro rollout convert`: between our rollouts and the dumps of slime, Miles and Relax."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from repro.commands.rollout.files import Reading, dump_options, dumps_at, is_ours
from repro.output import emit, json_option, progress
from repro_golden.base.systems import SYSTEMS, System

if TYPE_CHECKING:
    from repro_golden.dumps.rollout.columns import Loss
    from repro_golden.dumps.rollout.files import RolloutDump
    from repro_golden.store.rollout_file import RolloutData
    from repro_golden.store.rollouts import RolloutSet

__all__ = ["convert", "write_dumps"]

_OURS = "repro"


@dataclass
class _Done:
    """What a conversion did.

    Attributes:
        written: Source and name of each file.
        losses: Of each thing that the form has no place for, samples and rollouts.
        evaluations: Names of evaluation dumps that were left out.
    """

    written: list[tuple[str, str]] = field(default_factory=list)
    losses: dict[str, Counter[str]] = field(default_factory=dict)
    evaluations: list[str] = field(default_factory=list)

    def lost(self, losses: list[Loss]) -> None:
        """Count what one rollout lost."""
        for what, samples in losses:
            self.losses.setdefault(what, Counter()).update(samples=samples, rollouts=1)


@click.command(short_help="Turn rollouts into another form.")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The folder to write to.")
@click.option(
    "--format", "form", required=True, type=click.Choice([*SYSTEMS, _OURS]), help="Whose form; repro is ours."
)
@click.option("--reward-key", metavar="KEY", help="Which reward is trained on, where a sample has several.")
@dump_options
@json_option
def convert(
    sources: tuple[Path, ...],
    out: Path,
    form: str,
    reward_key: str | None,
    allow: tuple[str, ...],
    limit: str | None,
    system: str | None,
    as_json: bool,
) -> int:
    """Write the rollouts of SOURCES in another form: files, folders of dumps N.pt and eval_N.pt, or folders of ours.

    Nothing that a dump names is run. What the form has no place for is listed; what it holds is kept bit for bit.
    """
    reading = Reading(allow, limit, system)
    with progress("converting") as say, _beside(out) as scratch:
        done = _Done()
        for path, rollout in _rollouts(sources, reading, say):
            if form == _OURS:
                _write_ours(path, rollout, scratch, reward_key, done)
            else:
                _write_dump(path, rollout, scratch, cast("System", form), done)
        _put(scratch, out, form)
    _say(done, out, form, as_json)
    return 0


def write_dumps(rollouts: RolloutSet, system: str, folder: Path) -> list[str]:
    """Write captured rollouts as dumps ``{rollout_id}.pt``.

    Args:
        rollouts: Those that were captured.
        system: Whose form.
        folder: Where to.

    Returns:
        What the form has no place for, each thing once.
    """
    done = _Done()
    for number in range(len(rollouts)):
        _write_dump(Path(f"{number}.safetensors"), rollouts.read(number), folder, cast("System", system), done)
    return list(done.losses)


def _rollouts(
    sources: tuple[Path, ...], reading: Reading, say: Callable[[str], None]
) -> Iterator[tuple[Path, RolloutDump | RolloutData]]:
    """Every rollout of the sources, one at a time."""
    from repro.text import count
    from repro_golden.store.rollouts import RolloutSet

    for source in sources:
        if is_ours(source):
            rollout_set = RolloutSet(source)
            say(f"{source}: {count(len(rollout_set), 'rollout')} of ours")
            yield from ((source / f"{k}.safetensors", rollout_set.read(k)) for k in range(len(rollout_set)))
        else:
            dumps = dumps_at(source)
            say(f"{source}: {count(len(dumps), 'rollout dump')}")
            yield from ((path, reading.read(path)) for path in dumps)


def _beside(out: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder on the same disk, so that `out` gets everything or nothing."""
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".repro-")


def _write_dump(
    path: Path, rollout: RolloutDump | RolloutData, folder: Path | str, system: System, done: _Done
) -> None:
    from repro_golden.dumps.rollout.columns import translate
    from repro_golden.dumps.rollout.files import NAME, RolloutDump, dump_name, write_rollout_dump
    from repro_golden.store.dump_conversion import from_rollout

    dump, losses = translate(rollout, system) if isinstance(rollout, RolloutDump) else from_rollout(rollout, system)
    # the loaders go by the name, and so does who says eval_7.pt
    name = path.name if NAME.fullmatch(path.name) else dump_name(dump)
    _new(Path(folder) / name, path)
    write_rollout_dump(Path(folder) / name, dump)
    done.written.append((str(path), name))
    done.lost(losses)


def _write_ours(path: Path, rollout: RolloutDump | RolloutData, folder: str, key: str | None, done: _Done) -> None:
    from repro_golden.dumps.rollout.files import RolloutDump
    from repro_golden.store.dump_conversion import to_rollout
    from repro_golden.store.rollout_file import write_rollout

    if isinstance(rollout, RolloutDump) and rollout.evaluation:
        done.evaluations.append(str(path))
        return
    converted = to_rollout(rollout, reward_key=key) if isinstance(rollout, RolloutDump) else rollout
    name = f"{len(done.written)}.safetensors"
    write_rollout(Path(folder) / name, converted)
    done.written.append((str(path), name))


def _new(target: Path, source: Path) -> None:
    from repro_golden.base.errors import ReproError

    if target.exists():
        raise ReproError(f"{source} would be a second {target.name}: convert the sources into folders of their own")


def _put(scratch: str, out: Path, form: str) -> None:
    """Move what was written to its place.

    Raises:
        ReproError: something is there already, or nothing was written.
    """
    from repro_golden.base.errors import ReproError
    from repro_golden.store.rollouts import RolloutSet

    files = sorted(Path(scratch).iterdir())
    if not files:
        raise ReproError("nothing was written: our own form holds what is trained on, and these are evaluations")
    if form == _OURS:
        RolloutSet.write_index(Path(scratch))
        files = sorted(Path(scratch).iterdir())
    there = next((out / path.name for path in files if (out / path.name).exists()), None)
    if there is not None or (form == _OURS and out.is_dir() and any(out.iterdir())):
        raise ReproError(f"{there or out} is there already: name another folder with --out")
    out.mkdir(exist_ok=True)
    for path in files:
        path.rename(out / path.name)


def _say(done: _Done, out: Path, form: str, as_json: bool) -> None:
    from repro.text import count, table

    whose = "our form" if form == _OURS else f"the form of {form}"
    lines = [f"{count(len(done.written), 'rollout')} in {whose} at {out}"]
    renamed = [(source, name) for source, name in done.written if Path(source).stem != Path(name).stem]
    if renamed:
        lines.append(f"renamed: {renamed[0][0]} is {renamed[0][1]}" + (" and so on" if len(renamed) > 1 else ""))
    if done.evaluations:
        lines.append(f"left out, for nothing is trained on it: {', '.join(done.evaluations)}")
    rows = [[what, str(n["samples"] or "-"), str(n["rollouts"])] for what, n in sorted(done.losses.items())]
    if rows:
        lines += ["", "what this form has no place for:", table(["what", "samples", "rollouts"], rows), ""]
    elif form != _OURS:
        lines.append("nothing was lost")
    then = f"repro rollout show {out}" if form == _OURS else f"--load-debug-rollout-data '{out}/{{rollout_id}}.pt'"
    lines.append(f"{'look at them with' if form == _OURS else 'train on them with'}: {then}")
    data = {
        "out": str(out), "format": form,
        "written": [{"source": source, "file": name} for source, name in done.written],
        "lost": [{"what": what, **n} for what, n in sorted(done.losses.items())],
        "evaluations_left_out": done.evaluations,
    }  # fmt: skip
    emit(as_json, data, "\n".join(lines))

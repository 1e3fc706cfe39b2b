"""The golden store: ``golden/rollouts/NAME`` and ``golden/runs/MACHINE/CASE``, kept by DVC as ``dvc add`` pointers."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from repro_golden.base.canonical import check_format, read_json, write_atomic
from repro_golden.base.errors import NotVerifiableError, ReproError
from repro_golden.base.files import exchanged
from repro_golden.case.file import CASES, Case, find_case, list_cases
from repro_golden.case.identity import Difference, Identity, versions_of
from repro_golden.compare.traces import compare
from repro_golden.repository.dvc_files import conflicts, named, overlap
from repro_golden.repository.git import Git
from repro_golden.repository.linked import data_of
from repro_golden.store.dvc import Dvc
from repro_golden.store.pulled import is_whole, note, pointed_md5, pointer_of
from repro_golden.store.rollouts import RolloutFiles, Rollouts, rollouts_of
from repro_golden.trace import Trace
from repro_golden.trace.model import checked, to_checked_line

__all__ = ["CASE_LOST", "RUN_FORMAT", "GoldenRun", "Store", "agreed"]

RUN_FORMAT = 1
CASE_LOST = f"it has a golden run, and no case: bring {CASES}/{{}}.toml back"
"""What is said of such a name, which belongs in it."""
_PREVIOUS = "~"  # CASE~CHAIN is a baseline that a later one replaced
_PARTS = ("run.json", "trace/header.json", "trace/steps.jsonl", "trace/rank-00000.parquet")
"""Files that no golden run can do without; the last is another's where its trace was not sealed."""


@dataclass(frozen=True)
class GoldenRun:
    """One golden run in the working tree.

    Attributes:
        directory: ``golden/runs/MACHINE/CASE``.
        record: ``run.json``: who, when, commit, environment lock, proofs, and what it replaced.
    """

    directory: Path
    record: dict[str, Any]

    @cached_property
    def trace(self) -> Trace:
        """Its trace.

        Raises:
            ReproError: the trace is not the one that was proved.
        """
        trace = Trace(self.directory / "trace")
        if trace.chain != self.record["chain"]:
            raise ReproError(
                f"{self.directory} was changed since it was recorded: "
                f"`dvc checkout {self.directory}.dvc` brings it back"
            )
        return trace

    @property
    def machine(self) -> str:
        """The short name of the identity it was recorded under."""
        return self.directory.parent.name

    @property
    def identity(self) -> Identity:
        """The identity it was recorded under."""
        return Identity.from_mapping(self.record["identity"])

    def differences(
        self, identity: Identity, versions: Mapping[str, str], loaded: Collection[str] = ()
    ) -> list[Difference]:
        """In what a run here would be another's than this one's.

        What is installed and was loaded by neither run is no difference, and what a program sets for itself is its own.

        Args:
            identity: What is known of a run here before it is made.
            versions: Those of the packages that it could import, by normalised name.
            loaded: Those of them that a run here did load.
        """
        if "loaded" not in self.record:  # an older one, which does not say; its name is a digest over its identity
            return [] if self.machine == identity.machine else self.identity.differences(identity)
        differences = Identity.from_mapping(self.record["expected"]).loading(()).differences(identity.loading(()))
        before = versions_of(self.record["lock"])
        names = {*self.record["loaded"], *loaded} - {"torch"}  # which the identity has
        pairs = ((name, before.get(name, ""), versions.get(name, "")) for name in sorted(names))
        return differences + [Difference("environment", name, a, b) for name, a, b in pairs if a != b]

    @property
    def states(self) -> dict[int, Path]:
        """The training states that are kept with it, by the step that each lies before."""
        folder = self.directory / "states"
        return {int(path.name): path for path in folder.iterdir()} if folder.is_dir() else {}

    @property
    def noisy(self) -> bool:
        """Whether it was kept although it does not reproduce itself."""
        return bool(self.record.get("noise"))


class Store:
    """Golden runs and rollouts of one repository. It writes below ``golden/`` and nowhere else."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.dvc = Dvc(root)

    # -- rollouts

    def rollouts_path(self, case: Case) -> Path | None:
        """Where a case's rollouts lie; None for a command that has none."""
        return None if case.case.rollouts is None else self.root / case.case.rollouts

    def has_rollouts(self, case: Case) -> bool:
        """Whether the case has rollouts, in the working tree or behind a pointer."""
        path = self.rollouts_path(case)
        return path is not None and (path.exists() or pointer_of(path).exists())

    def rollouts(self, case: Case) -> Rollouts:
        """A case's rollouts, pulled when only their pointer is here."""
        path = self.rollouts_path(case)
        if path is None:
            return RolloutFiles(None)
        self._fetch(path)
        return rollouts_of(case, path)

    # -- golden runs

    def run_path(self, machine: str, case: str) -> Path:
        """Where the golden run of a case on a machine lies."""
        return self.root / "golden" / "runs" / machine / case

    def case_path(self, case: str) -> Path:
        """What stands for a case's golden runs on all machines, to be locked."""
        return self.root / "golden" / "runs" / case

    def entries(self) -> Iterator[tuple[str, str, bool]]:
        """(machine, case, whether the content is in the working tree) of every golden run, replaced ones included."""
        for pointer in sorted((self.root / "golden" / "runs").glob("*/*.dvc")):
            yield pointer.parent.name, pointer.stem, pointer.with_suffix("").exists()

    def guarded(self) -> dict[str, Path | None]:
        """The case file of all that is guarded here, by name; None where golden runs alone are left (`CASE_LOST`).

        Golden runs count on whatever machine they were recorded, by their pointer or as files of git's; replaced ones
        do not.
        """
        tracked = Git(self.root).names("ls-files", "-z", "--", ":(glob)golden/runs/*/*/run.json")
        runs = {name for _, name, _ in self.entries()} | {Path(path).parent.name for path in tracked}
        known = dict.fromkeys(name for name in runs if _PREVIOUS not in name)
        return dict(sorted({**known, **{path.stem: path for path in list_cases(self.root)}}.items()))

    def load(self, machine: str, case: str) -> GoldenRun:
        """The golden run of this commit, pulled when only its pointer is here.

        Raises:
            ReproError: there is none, its record is unreadable or newer, or what lies there is another commit's.
        """
        golden = self.read(machine, case)
        _ = golden.trace  # it says more of what is damaged or newer
        self.refuse_unknown(golden.directory)  # what is whole in itself may be of an older pointer
        return golden

    def read(self, machine: str, case: str) -> GoldenRun:
        """As `load`, of whatever commit: for who asks its record itself which code it is of.

        Raises:
            ReproError: there is none, its record is unreadable or newer, or a part of it is not there.
        """
        path = self.run_path(machine, case)
        self._fetch(path, "run.json")  # a pull that was cut short leaves the rest
        if path.exists() and (part := _lost(path)):
            raise self._a_part(path, part)
        command = f"dvc checkout {path}.dvc" if pointer_of(path).exists() else f"git checkout {path}"
        try:
            record = read_json(path / "run.json", "golden run")
        except ReproError as error:
            raise ReproError(f"{error}: `{command}` brings it back" if path.exists() else str(error)) from None
        check_format(record.get("format"), RUN_FORMAT, f"the golden run {path}")
        if lost := {"chain", "case", "identity", "recorded", "proofs", "rollouts"} - record.keys():
            raise ReproError(f"{path}/run.json is damaged (no {min(lost)}): `{command}` brings it back")
        try:
            return GoldenRun(path, checked(record))
        except (ValueError, TypeError) as error:
            raise ReproError(f"{path}/run.json is damaged ({error}): `{command}` brings it back") from None

    def find(self, case: Case, identity: Identity, versions: Mapping[str, str], vary: Sequence[str] = ()) -> GoldenRun:
        """The golden run that a run here may be compared with; of several, the one that differs least.

        It is opened as by `read`.

        Args:
            case: The case.
            identity: See `GoldenRun.differences`.
            versions: See there.
            vary: Parts of the identity in which it may differ.

        Raises:
            NotVerifiableError: there is one for other machines only, or none; the closest one's differences are named.
                Or there are several for machines like this one, which contradict each other.
        """
        machines = self._machines(case, identity)
        if not machines:
            raise NotVerifiableError(
                f"no golden run of {case.name} for this machine ({identity.machine}): "
                f"record one with `repro golden record {case.name}`"
            )
        candidates = self._candidates(machines, case, identity, versions)
        if alike := [golden for differences, golden in candidates if not differences]:
            return agreed(case, alike)
        if not candidates:
            raise NotVerifiableError(
                f"no golden run of {case.name} for this machine ({identity.machine}); its golden runs are for "
                f"{', '.join(machines)}: record one with `repro golden record {case.name}`"
            )
        allowed = [(ds, golden) for ds, golden in candidates if all(d.part in vary for d in ds)]
        differences, nearest = min(allowed or candidates, key=lambda pair: len(pair[0]))
        if allowed:
            return nearest
        parts = "".join(f" --vary {part}" for part in sorted({d.part for d in differences}))
        approve = nearest.machine == identity.machine
        anew = f"approve {case.name} --reason ..." if approve else f"record {case.name}"
        raise NotVerifiableError(
            f"not comparable with the golden run of {case.name} for {nearest.machine}: {describe(differences)}; "
            f"`repro golden verify {case.name}{parts}` compares all the same, `repro golden {anew}` records one here"
        )

    def serving(self, case: Case, identity: Identity, versions: Mapping[str, str]) -> list[GoldenRun]:
        """The golden runs that a run here differs from in nothing: this machine's own alone, or all others."""
        candidates = self._candidates(self._machines(case, identity), case, identity, versions)
        return [golden for differences, golden in candidates if not differences]

    def _machines(self, case: Case, identity: Identity) -> list[str]:
        """Those that have a golden run of a case, a run's own first."""
        here = identity.machine
        machines = [machine for machine, name, _ in self.entries() if name == case.name and machine != here]
        there = self.run_path(here, case.name)
        return [here] * (there.exists() or pointer_of(there).exists()) + machines

    def _candidates(
        self, machines: Sequence[str], case: Case, identity: Identity, versions: Mapping[str, str]
    ) -> list[tuple[list[Difference], GoldenRun]]:
        """In what a run here differs from each golden run; from this machine's own alone where that is nothing."""
        candidates = []
        for machine in machines:
            golden = self._near(machine, case.name, identity)
            if golden is not None:
                candidates.append((golden.differences(identity, versions), golden))
            if golden is not None and machine == identity.machine and not candidates[-1][0]:
                break
        return candidates

    def _near(self, machine: str, case: str, identity: Identity) -> GoldenRun | None:
        """A golden run whose content is here, or is fetched because it is of this machine or of one like it."""
        if machine == identity.machine or self.run_path(machine, case).exists():
            return self.read(machine, case)
        if machine.rpartition("-")[0] != identity.machine.rpartition("-")[0]:
            return None
        try:
            return self.read(machine, case)
        except ReproError:  # no remote, say: it is as if it were of a machine unlike this one
            return None

    def keep(self, staged: Path, machine: str, case: str, *, replace_reason: str | None = None) -> GoldenRun:
        """Move a proved run to its place and hand it to DVC.

        Args:
            staged: A complete run folder; it is moved.
            machine: The identity's short name.
            case: The case's name.
            replace_reason: Allows a golden run to be replaced; the old one stays beside it as ``CASE~CHAIN``, or as
                ``CASE~CHAIN-2`` and so on where there is one with the same numbers.

        Raises:
            ReproError: there is a golden run and no reason to replace it, or its files were changed.
        """
        path = self.run_path(machine, case)
        pointer = pointer_of(path)
        if pointer.exists():
            if replace_reason is None:
                raise ReproError(
                    f"{case} already has a golden run for {machine}: "
                    f"`repro golden approve {case} --reason ...` replaces it"
                )
            self.refuse_dirty(path)
            aside = _aside(path, self.read(machine, case).record["chain"])
            if not pointer_of(aside).exists():
                shutil.rmtree(aside, ignore_errors=True)  # half a copy of one that was killed
                shutil.copytree(path, aside)
                self._hand_over(aside)
            pointer.unlink()  # whoever is killed from here on leaves a whole run, the old one or the new one
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not exchanged(staged, path):
            shutil.rmtree(path)
        if staged.exists() and not path.exists():
            shutil.move(staged, path)
        return self._hand_over(path)

    def _hand_over(self, path: Path) -> GoldenRun:
        """Have DVC keep a golden run, and say in its pointer what that is of, for whoever has the pointer alone."""
        self.dvc.add(path)
        run = self.read(path.parent.name, path.name)
        note(pointer_of(path), run.record)
        return run

    def refuse_dirty(self, path: Path) -> None:
        """Refuse to go on over files that DVC does not know.

        Raises:
            ReproError: the content differs from its pointer, or that from what was written (see `Dvc.dirty`).
        """
        pointer = pointer_of(path)
        if self.dvc.dirty(pointer):
            keeps = "" if self._is_run(path) else f", `dvc add {path}` keeps them"  # a golden run is what was proved
            raise ReproError(f"{path} differs from {pointer.name}: `dvc checkout {pointer}` drops the changes{keeps}")

    def _a_part(self, path: Path, lost: str) -> ReproError:
        """What to do about a golden run that lacks a file: its pointer may stand for as little."""
        pointer, case = pointer_of(path), path.name.split(_PREVIOUS)[0]
        if not pointer.exists():
            fix = f"`git checkout {path}` brings it back"
        elif is_whole(pointer):
            fix = (
                f"{pointer.name} stands for no more: take an older one of `git log {pointer}`, or `git rm {pointer}` "
                f"and `repro golden record {case}`"
            )
        else:
            fix = f"`repro golden pull {case}` brings it back"
        return ReproError(f"{path} has no {lost}: {fix}")

    def refuse_other_data(self, case: Case) -> None:
        """Refuse to run on data that no commit holds: it is linked or read here, and DVC's files name other content.

        Raises:
            ReproError: so it is; or what names it has merge conflicts.
        """
        git = Git(self.root)
        names = named(git, [*case.subject.link, *data_of(case, self.root)])
        if torn := [name for name in names if name.endswith(":")]:
            raise ReproError(conflicts(torn[0][:-1]))
        places = {name: f":(top,literal){name}" for name in names if ":" not in name}
        tracked = git.names("ls-files", "-z", "--", *places.values()) if places else []  # by git itself
        known = {name: names[name] for name in places if not any(overlap(name, other) for other in tracked)}
        if other := self.dvc.differing(known):
            raise ReproError(
                f"{other[0]} is not the content that DVC's files name for it, so no commit holds it: `dvc checkout "
                f"{other[0]}` brings that back, `dvc add {other[0]}` (of a stage's output `dvc commit`) keeps what is "
                "there"
            )

    def refuse_unknown(self, path: Path) -> None:
        """Refuse to judge by files that neither git nor DVC says are the ones of this commit.

        Raises:
            ReproError: they have no pointer and are not in git, or are not those of their pointer.
        """
        pointer = pointer_of(path)
        if pointer.exists():
            self.refuse_dirty(path)
        elif not self.in_git(path):
            run = f"`repro golden record {path.name}` records it anew"
            keeps = run if self._is_run(path) else f"`dvc add {path}` keeps what is there"
            raise ReproError(
                f"{path} has no {pointer.name}, so nothing says of which commit it is: `git checkout {pointer}` brings "
                f"that back, {keeps}"
            )
        elif any(entry[1] != " " for entry in Git(self.root).names("status", "-z", "--no-renames", "--", str(path))):
            raise ReproError(
                f"{path} differs from what git has: `git checkout {path}` drops the changes, "
                f"`git add {path}` keeps them"
            )

    def push(self, pointers: Sequence[Path]) -> str:
        """`Dvc.push`, of whole golden runs.

        Raises:
            ReproError: a pointer stands for a part of one; or see there.
        """
        for path in (pointer.with_suffix("") for pointer in pointers):
            if self._is_run(path) and path.exists() and (lost := _lost(path)) and is_whole(pointer_of(path)):
                raise self._a_part(path, lost)
        return self.dvc.push(*pointers)

    def _is_run(self, path: Path) -> bool:
        return path.is_relative_to(self.root / "golden" / "runs")

    def in_git(self, path: Path) -> bool:
        """Whether git tracks anything at `path`."""
        return bool(Git(self.root)("ls-files", "--", str(path)))

    def pointers(self, case: str | None = None) -> list[Path]:
        """Pointers of all golden runs and rollouts, or of one case's, whose rollouts may lie anywhere.

        Raises:
            ReproError: the file of that case cannot be read.
        """
        paths = (self.root / "golden").glob("r*/**/*.dvc")
        cases = []
        for name in (p.stem for p in list_cases(self.root) if case in (None, p.stem)):
            with contextlib.nullcontext() if case else contextlib.suppress(ReproError):  # of all, those that can be
                cases.append(find_case(self.root, name))
        rollouts = {pointer_of(path) for each in cases if (path := self.rollouts_path(each)) is not None}
        chosen = {p for p in paths if case is None or p.stem.split(_PREVIOUS)[0] == case}
        return sorted(chosen | {pointer for pointer in rollouts if pointer.exists()})

    def written_by(self, pointer: Path) -> Path:
        """What is to be locked by whoever writes beside a pointer; see `case_path`."""
        case = pointer.stem.split(_PREVIOUS)[0]
        return self.case_path(case) if self._is_run(pointer) else pointer.with_suffix("")

    def _fetch(self, path: Path, last: str = "") -> None:
        if not (path / last).exists() and pointer_of(path).exists():
            self.dvc.pull(pointer_of(path))


def agreed(case: Case, golden: Sequence[GoldenRun]) -> GoldenRun:
    """One of those that a run here may be compared with; that of the case as it is now, if there is one.

    Raises:
        NotVerifiableError: by two of them the same run would pass and fail.
    """
    current = [each for each in golden if each.record["case"] == case.canonical()] or golden
    first, *others = sorted(current, key=lambda each: each.noisy)
    for other in others:
        if not other.noisy and not compare(first.trace, other.trace, case.compare).equal:
            raise NotVerifiableError(
                f"the golden runs of {case.name} for {first.machine} and {other.machine} are both of machines like "
                f"this one, and their numbers differ: `repro golden record {case.name}` records one of this machine"
            )
    return first


def _aside(path: Path, chain: str) -> Path:
    """Where a golden run stays once it is replaced: at a name that is free, or holds this very one."""
    for count in itertools.count(1):
        aside = path.with_name(f"{path.name}{_PREVIOUS}{chain[:8]}" + (f"-{count}" if count > 1 else ""))
        known = pointed_md5(pointer_of(aside))
        if not pointer_of(aside).exists() or (known and known == pointed_md5(pointer_of(path))):
            return aside
    raise AssertionError


def _lost(path: Path) -> str:
    """A file that a golden run needs and that is not there; empty where it has all."""
    sealed = not (path / "trace" / "rank-00000.log").exists()
    return next((name for name in _PARTS[: 3 + sealed] if not (path / name).exists()), "")


def write_record(directory: Path, record: dict[str, Any]) -> None:
    """Write ``run.json``."""
    write_atomic(directory / "run.json", to_checked_line({"format": RUN_FORMAT, **record}) + "\n")


def describe(differences: list[Difference]) -> str:
    """Differences of two identities in one line, the first three in full."""
    text = "; ".join(str(d) for d in differences[:3])
    return text + (f"; and {len(differences) - 3} more" if len(differences) > 3 else "")

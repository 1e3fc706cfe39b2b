"""The few DVC commands the store needs, run as DVC's own command line (its Python API is not stable)."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from repro_golden.base.canonical import named_after, write_atomic
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.base.extras import require
from repro_golden.base.machine.processes import StandstillError, output_of, tree_of
from repro_golden.repository.dvc_files import is_little, is_torn, md5_at, overlap, same
from repro_golden.repository.git import Git
from repro_golden.store.pulled import (
    check_pulled,
    drop_damaged,
    elsewhere,
    fault,
    is_small,
    is_whole,
    lacking,
    object_of,
    pointer_of,
    without_a_part,
)

__all__ = ["Dvc", "private_remote"]

_OF_A_RUN = ("run.json", "trace/header.json", "trace/rank-00000.parquet", "trace/steps.index", "trace/steps.jsonl")
_RULE = re.compile(r"^\s*[^#\s]", re.MULTILINE)
"""What a .dvcignore holds beside comments."""
_IGNORES = re.compile(r"^\s*[^#\s]", re.MULTILINE)
"""A pattern in a .dvcignore."""
_FIXES = {
    "mandatory extension: 'sdir'": "; DVC cannot read an index that a sparse checkout cut short: "
    "`git sparse-checkout reapply --no-sparse-index`"
}
"""What to do about what DVC says."""


def private_remote(root: Path) -> Path:
    """The remote of one checkout alone, outside of it: training states must never enter git. DVC takes ASCII alone."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return data / "repro" / "remotes" / named_after(root)


class Dvc:
    """DVC in one repository. Every call is a real ``dvc`` process, which does not outlive its purpose.

    Attributes:
        patience: Seconds for which it may do nothing. DVC itself asks a remote that is silent again and again, each
            time for a minute, and some kinds of remotes for ever.
    """

    patience = 300.0

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def initialised(self) -> bool:
        """Whether the repository has DVC."""
        return (self.root / ".dvc" / "config").exists()

    def check(self) -> None:
        """Before work whose result DVC is to keep.

        A repository's own .gitignore may leave out every folder called runs: git is told that ours is none of them.

        Raises:
            ReproError: DVC is not installed, the repository has none, or git would not see what DVC writes.
        """
        require("what DVC keeps", "golden")
        if not self.initialised:
            raise ReproError(f"{self.root} has no DVC yet: run `repro init`")
        ignored = [folder for folder in ("runs", "rollouts") if self._ignored(folder)]
        if ignored:
            self._tell_git(*(f"!/{folder}/" for folder in ignored))
        for folder in ignored:
            if rule := self._ignored(folder):
                raise ReproError(
                    f"git ignores golden/{folder} by {rule}: take that line out, or what is recorded is in no commit"
                )
        if rule := self._left_out():
            raise ReproError(f"DVC leaves {rule}: take that rule out, or a part of what is recorded is kept nowhere")

    def leave_to_dvc(self) -> bool:
        """Tell git that the content of golden runs is DVC's; whether it was not told before.

        What DVC itself tells it belongs to a branch, and content stays in the checkout when that becomes another.
        """
        return self._tell_git("/runs/*/*/*")  # DVC reads /runs/*/*/ as /runs/*/, and sees no pointer below that

    def _tell_git(self, *rules: str) -> bool:
        ignore_file = self.root / "golden" / ".gitignore"
        lines = ignore_file.read_text(encoding="utf-8").splitlines() if ignore_file.exists() else []
        new = [rule for rule in rules if rule not in lines]
        if new:
            ignore_file.parent.mkdir(exist_ok=True)
            write_atomic(ignore_file, "".join(f"{line}\n" for line in (*lines, *new)))
        return bool(new)

    def _ignored(self, folder: str) -> str:
        """The rule by which git would not see pointers below ``golden/FOLDER``; empty where there is none."""
        rule = Git(self.root).text("check-ignore", "--verbose", f"golden/{folder}/machine/case.dvc", none=1)
        place = rule.partition("\t")[0]
        return "" if place.rpartition(":")[2].startswith("!") else place

    def _left_out(self) -> str:
        """A file of a golden run that DVC would not keep, and by which rule; empty where it keeps all that we know."""
        files = [folder / ".dvcignore" for folder in (self.root, self.root / "golden", self.root / "golden" / "runs")]
        if not any(_RULE.search(file.read_text(errors="replace")) for file in files if file.is_file()):
            return ""  # without asking DVC, which takes a second
        with contextlib.suppress(MachineFailureError):  # it ends with 1 where it ignores none
            path = self.run("check-ignore", *(f"golden/runs/machine/case/{name}" for name in _OF_A_RUN)).split("\n")[0]
            rule = self.run("check-ignore", "--details", path).partition("\t")[0]  # which shows what lets files in, too
            return f"{path} out by {rule}"
        return ""

    def init(self) -> None:
        """``dvc init``."""
        self.run("init")

    def add(self, *paths: Path) -> None:
        """Track folders: DVC copies their content to its cache and writes a pointer beside each.

        Raises:
            ReproError: the repository has no DVC, or DVC left a file out.
        """
        self.check()
        self.leave_to_dvc()
        self.run("add", *self._relative(paths))
        for pointer in map(pointer_of, paths):
            if part := without_a_part(pointer):
                pointer.unlink()  # it would be pushed and pulled as if it were all
                raise ReproError(
                    f"DVC left out {part} of {pointer.with_suffix('')}: `dvc check-ignore --details` with their names "
                    "tells by which rule of a .dvcignore; take that out"
                )

    def move(self, source: Path, target: Path) -> None:
        """Rename a tracked folder together with its pointer."""
        self.run("move", *self._relative((source, target)))

    def push(self, *pointers: Path) -> str:
        """`_push_all` of those that are as they were written; then the others are refused.

        Raises:
            ReproError: the repository has no DVC, or a pointer is not as it was written (see `dirty`).
            MachineFailureError: see there.
        """
        return self._of_true(pointers, self._push_all)

    def pull(self, *pointers: Path) -> str:
        """`_pull_all` of those that are as they were written; then the others are refused.

        Raises:
            ReproError: the repository has no DVC, or a pointer is not as it was written (see `dirty`); or see there.
            MachineFailureError: see there.
        """
        return self._of_true(pointers, self._pull_all)

    def _of_true(self, pointers: Sequence[Path], act: Callable[[Sequence[Path]], str]) -> str:
        self.check()
        self._refuse_false([pointer for pointer in pointers if is_torn(pointer)])  # DVC does nothing beside such a one
        false = [pointer for pointer in pointers if fault(self.root, pointer)]
        message = act([pointer for pointer in pointers if pointer not in false]) if len(false) < len(pointers) else ""
        self._refuse_false(false)
        return message

    def _push_all(self, pointers: Sequence[Path]) -> str:
        """Copy tracked content to the remote; DVC's own summary line is returned.

        DVC keeps a list of what is to be pushed, and a push that was killed leaves a part of it, by which every later
        one would call the remote complete: it is made anew. What DVC's cache has lost it passes over in silence, and a
        folder whose list is at the remote it calls complete: both are looked at here, as far as a remote that is a
        folder shows its files. Others are asked whether they have what was pushed.

        Raises:
            MachineFailureError: it could not be pushed, or is not there afterwards; or the cache has lost it, and the
                remote has not all of it.
        """
        lost = self._lost(pointers)
        here = [pointer for pointer in pointers if pointer not in lost]
        message = self._push(here) if here else ""
        if damaged := self._lacking_there(here):
            for blob in damaged:
                blob.unlink(missing_ok=True)
            message = self._push(here)
            damaged = self._lacking_there(here)
        states = json.loads(self.run("status", "--cloud", "--json", *self._relative(pointers)) or "{}")
        missing = [*damaged, *sorted(name for name, state in states.items() if state == "new")]
        for pointer in lost:
            name = self._relative([pointer.with_suffix("")])[0]
            its = {state for key, state in states.items() if key == name or key.startswith(f"{name}/")}
            if its != {"deleted"} or self._lacking_there([pointer]):  # not here, and there
                raise MachineFailureError(
                    f"DVC's cache has lost {name}, its remote has not all of it, and what lies here is not what its "
                    "pointer stands for: push it from another checkout that has it; "
                    + _in_none(*self._relative([pointer]))
                )
        if missing:
            raise MachineFailureError(
                f"the remote took what was pushed and has not kept {', '.join(map(str, missing[:3]))}"
                f"{' and more' if len(missing) > 3 else ''}: see what it does with files, and push again"
            )
        return message or "Everything is up to date."

    def _push(self, pointers: Sequence[Path]) -> str:
        self._forget_lists()
        message = self.run("push", *self._relative(pointers))
        self._forget_lists()
        return message

    def _cache(self) -> Path:
        return Path(self.run("cache", "dir").strip())

    def _lost(self, pointers: Sequence[Path]) -> list[Path]:
        """Pointers whose content DVC's cache has not, once it has again what the working tree holds whole."""
        cache = self._cache()
        lost = [pointer for pointer in pointers if lacking(pointer, cache)]
        for pointer in lost:
            drop_damaged(pointer, cache, in_place=False)
        if whole := [pointer for pointer in lost if is_whole(pointer)]:
            self.run("commit", "--force", *self._relative(whole))
        return [pointer for pointer in lost if pointer not in whole]

    def _lacking_there(self, pointers: Sequence[Path]) -> list[Path]:
        """What the default remote lacks of pointers' content, or has damaged, where it is a folder of this machine.

        With it the list of each such pointer's files, which to DVC stands for all that it names.
        """
        folder, cache = self._remote_folder(), self._cache()
        if folder is None:
            return []
        missing = {pointer: lacking(pointer, folder, cache) for pointer in pointers if not elsewhere(pointer)}
        return sorted(
            {blob for pointer, blobs in missing.items() if blobs for blob in (*blobs, object_of(pointer, folder))}
        )

    def _remote_folder(self) -> Path | None:
        default = re.search(r"^\S+\s+(/.+?)\s+\(default\)$", self.run("remote", "list"), re.MULTILINE)
        return folder if default and ((folder := Path(default[1])) / "files" / "md5").is_dir() else None

    def _pull_all(self, pointers: Sequence[Path]) -> str:
        """Fetch tracked content from the remote into the working tree. Local changes are never overwritten.

        What came damaged does not stay in DVC's cache: the next pull asks for it again.

        Raises:
            ReproError: what came is not what a pointer stands for.
            MachineFailureError: it could not be fetched.
        """
        cache = self._cache()
        try:
            self._lost(pointers)
            message = self.run("pull", *self._relative(pointers))
            for pointer in pointers:
                check_pulled(self.root, pointer, cache)
        except ReproError as error:
            for pointer in pointers:
                drop_damaged(pointer, cache)
            self._forget_lists()
            names = self._relative([p for p in pointers if not p.with_suffix("").exists()] or pointers)[:2]
            what = " and ".join(names)
            if "unsaved files" in str(error):
                raise MachineFailureError(
                    f"{what} is not what its pointer stands for, and DVC's cache has not kept it: move it away, and "
                    "`repro golden pull` again"
                ) from None
            if not any(phrase in str(error) for phrase in ("Checkout failed", "failed to transfer")):
                raise
            remote = self.remote
            if remote and Path(remote) != private_remote(self.root):
                fix = "its DVC remote does not have it: `repro golden push` in the checkout where it was recorded"
            else:
                has = "a DVC remote of its own alone" if remote else "no DVC remote"
                fix = (
                    f"this checkout has {has}: in the one where it was recorded `repro golden push`, and here `repro "
                    "init --remote URL` with what `dvc remote list` says there"
                )
            raise MachineFailureError(f"{what} cannot be fetched: {fix}; {_in_none(*names)}") from None
        return message

    def _forget_lists(self) -> None:
        """Remove DVC's lists of files: another file may have come under a name, or the list was cut off by a kill."""
        if self._lists:
            with self._lock(fcntl.LOCK_EX):  # a push beside this one has them open
                shutil.rmtree(self._lists, ignore_errors=True)

    @contextlib.contextmanager
    def _lock(self, kind: int) -> Iterator[None]:
        """Wait until no command runs, or until no list is removed; nothing where no lock can be kept."""
        path = self.root / ".dvc" / "tmp" / "repro.lock"
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # as in a read-only checkout
                path.parent.mkdir(exist_ok=True)
                fcntl.flock(stack.enter_context(path.open("a")), kind)
            yield

    @functools.cached_property
    def _lists(self) -> Path | None:
        """Where DVC keeps them; None where it does not say."""
        with contextlib.suppress(MachineFailureError):
            if place := re.search(r"^Repo\.site_cache_dir: (.+)$", self.run("doctor"), re.MULTILINE):
                return Path(place[1]) / "index"
        return None

    def dirty(self, pointer: Path) -> bool:
        """Whether the tracked content in the working tree differs from its pointer (a missing folder does not).

        Raises:
            ReproError: the pointer has merge conflicts, names nothing, or something else than its own content.
        """
        self._refuse_false([pointer])
        if not pointer.exists() or not pointer.with_suffix("").exists():
            return False
        if is_small(pointer) and is_whole(pointer):  # in no second, and where nothing can be written
            return False
        clean = self.run("status", "--json", *self._relative([pointer])).strip() in ("", "{}")
        return not clean and not is_whole(pointer)  # what only the cache has lost is no difference

    def differing(self, names: Mapping[str, str]) -> list[str]:
        """Data in the working tree that is not the content which DVC's files name; what is not here is none of it.

        Args:
            names: See `repro_golden.repository.dvc_files.named`.
        """
        there = {name: self.root / name for name in names if os.path.lexists(self.root / name)}
        asked = [name for name, path in there.items() if not is_little(path) or not same(md5_at(path), names[name])]
        if not asked:
            return []
        try:  # which remembers what it has read, and which files a .dvcignore leaves out
            states = json.loads(self.run("data", "status", "--json") or "{}").get("uncommitted", {})
        except ReproError:  # without DVC: what it leaves out of folders, or names in another way, is not known
            ignores = self.root / ".dvcignore"
            cut = ignores.is_file() and _IGNORES.search(ignores.read_text(encoding="utf-8", errors="replace"))
            known = [name for name in asked if not names[name].startswith("text ")]
            whole = [name for name in known if there[name].is_file() or not cut]
            return [name for name in whole if not same(md5_at(there[name]), names[name])]
        changed = [name.rstrip("/") for state in states.values() for name in state]
        return [name for name in asked if any(overlap(name, other) for other in changed)]

    def set_default_remote(self, name: str, url: str, *, local: bool) -> None:
        """``dvc remote add --default``; a remote of that name gets the new address, here too if that is for all.

        Args:
            name: The remote's name.
            url: Its address; a relative folder starts from the repository's root.
            local: Write to ``.dvc/config.local``, which git ignores, instead of the shared configuration.
        """
        self.run("remote", "add", "--default", "--force", *(["--local"] if local else []), name, url)
        # this checkout's, which would go before it
        has_local = not local and (self.root / ".dvc" / "config.local").exists()
        for key in (f"remote.{name}.url", "core.remote") if has_local else ():
            with contextlib.suppress(MachineFailureError):  # it has none; credentials stay
                self.run("config", "--local", "--unset", key)

    @property
    def remote(self) -> str:
        """The address of the default remote, or of any; empty without one."""
        settings = dict(line.split("=", 1) for line in self.run("config", "--list").splitlines() if "=" in line)
        urls = {key: url for key, url in settings.items() if key.startswith("remote.") and key.endswith(".url")}
        return urls.get(f"remote.{settings.get('core.remote')}.url") or next(iter(urls.values()), "")

    def run(self, *arguments: str) -> str:
        """Run one DVC command and return its output.

        Raises:
            MissingExtraError: DVC is not installed.
            MachineFailureError: DVC failed; its last line is quoted.
        """
        require("what DVC keeps", "golden")
        environment = os.environ | {"DVC_NO_ANALYTICS": "1", "DVC_TEST": "false", "NO_COLOR": "1"}
        environment["PYTHONSAFEPATH"] = "1"  # the repository may hold a json.py
        environment["CI"] = "1"  # it looks for no newer version of itself, in a process that outlives it
        line = f"`dvc {' '.join(arguments)}`"
        with (
            self._lock(fcntl.LOCK_SH),
            tree_of(
                [sys.executable, "-m", "dvc", "--wait-for-lock", *arguments], cwd=self.root, environment=environment,
                output=subprocess.PIPE, errors=subprocess.PIPE, apart=False,  # it may ask for a password
            ) as process,
        ):  # fmt: skip
            try:
                out, err = output_of(process, self.patience)
            except StandstillError:
                raise MachineFailureError(
                    f"{line} did nothing for {self.patience:g} s: another DVC command keeps it waiting, or a remote or "
                    "a disk does not answer. "
                    "Once it does, the same command goes on where this one was"
                ) from None
        if process.returncode != 0:
            output = err.decode(errors="replace").strip().splitlines()
            every = [
                each for each in output if each.strip() and not each.startswith(("Having any troubles?", "Hit us up"))
            ]
            lines = [each for each in every if each.startswith("ERROR")] or every[-1:] or [f"exit {process.returncode}"]
            message = " ".join(lines).replace("ERROR: ", "")[:400]
            fix = next((fix for what, fix in _FIXES.items() if what in message), "")
            raise MachineFailureError(f"{line} failed: {message}{fix}")
        return out.decode(errors="replace")

    def _refuse_false(self, pointers: Sequence[Path]) -> None:
        for pointer in pointers:
            if why := fault(self.root, pointer):
                raise ReproError(why)

    def _relative(self, paths: Sequence[Path]) -> list[str]:
        return [str(p.relative_to(self.root)) if p.is_absolute() else str(p) for p in paths]


def _in_none(*pointers: str) -> str:
    """The way out where content is lost."""
    return f"where no checkout has it any more, `git rm {' '.join(pointers)}` lets it be recorded anew"

"""Git as repro asks it: the one place that starts it, where no user's setting changes an answer or runs a program.

Neither hooks, `core.fsmonitor`, signatures, external diffs nor pagers run; nothing refreshes the user's index; and what
git prints is in one form, in English and in UTF-8, whatever is configured.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from repro_golden.base.errors import MachineFailureError

__all__ = [
    "POINTER_MOST",
    "Git",
    "GitFailedError",
    "cleaned",
    "holds",
    "kept_at",
    "kept_by_lfs",
    "lfs_store",
    "pointed_at",
    "rewritten",
    "state_of",
]

_NEUTRAL = {
    # what would run programs
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.pager": "cat",
    "log.showSignature": "false",
    # what would leave out files
    "core.sparseCheckout": "false",
    "index.sparse": "false",
    "submodule.recurse": "false",
    "core.untrackedCache": "false",
    # what would print otherwise
    "core.quotePath": "false",
    "i18n.logOutputEncoding": "UTF-8",
    "color.ui": "false",
    "color.diff": "false",
    "color.status": "false",
    "log.decorate": "false",
    "log.diffMerges": "separate",
    "log.follow": "false",
    "log.showRoot": "true",
    "diff.algorithm": "default",
    "diff.ignoreSubmodules": "none",
    "diff.mnemonicPrefix": "false",
    "diff.noprefix": "false",
    "diff.orderFile": os.devnull,
    "diff.relative": "false",
    "diff.renames": "true",
    "diff.statGraphWidth": "0",
    "diff.submodule": "short",
}
"""Settings that hold for every command, whatever a user, a machine or the repository says."""

_DROPPED = ("GIT_EXTERNAL_DIFF", "GIT_DIFF_OPTS", "GIT_LITERAL_PATHSPECS", "GIT_GLOB_PATHSPECS",
            "GIT_NOGLOB_PATHSPECS", "GIT_ICASE_PATHSPECS")  # fmt: skip
"""Variables by which a user tells git the like."""


class GitFailedError(MachineFailureError):
    """Git could not do what it was asked.

    Attributes:
        command: Which one, such as ``status``.
        stderr: What git said, in one line.
    """

    def __init__(self, command: str, stderr: str) -> None:
        """Take both."""
        self.command, self.stderr = command, " ".join(stderr.split())[:300]
        super().__init__(f"`git {command}` failed: {self.stderr}; cure that and run the same command again")

    def __reduce__(self) -> tuple[type[GitFailedError], tuple[str, str]]:
        """As another process is sent it."""
        return GitFailedError, (self.command, self.stderr)


@dataclass(frozen=True)
class Git:
    """Git in one folder.

    Attributes:
        folder: Where it runs.
        options: Options of git itself for every command, such as ``-c NAME=VALUE``; the last of two prevails.
        variables: Of the environment of every command, beside ours.
    """

    folder: Path
    options: tuple[str, ...] = tuple(part for name, value in _NEUTRAL.items() for part in ("-c", f"{name}={value}"))
    variables: tuple[tuple[str, str], ...] = ()

    def at(self, folder: Path) -> Git:
        """The same in another folder."""
        return replace(self, folder=folder)

    def with_options(self, *options: str) -> Git:
        """The same with more options of git itself."""
        return replace(self, options=(*self.options, *options))

    def __call__(
        self, *arguments: str, given: bytes = b"", none: int = 0, variables: Mapping[str, str | None] | None = None
    ) -> bytes:
        """The output of one command.

        Args:
            arguments: The command and its arguments.
            given: What it reads.
            none: The exit code that says there is nothing to put out.
            variables: Of its environment, beside ours; None takes one away.

        Raises:
            GitFailedError: it failed, or git is not here.
        """
        environment = {name: value for name, value in os.environ.items() if name not in _DROPPED}
        environment |= {"LC_ALL": "C", "LANGUAGE": "C", "GIT_OPTIONAL_LOCKS": "0"}
        for name, value in {**dict(self.variables), **(variables or {})}.items():
            environment.pop(name, None)
            environment |= {} if value is None else {name: value}
        try:
            done = subprocess.run(
                ["git", *self.options, *arguments], cwd=self.folder, env=environment, input=given, capture_output=True,
                check=False,
            )  # fmt: skip
        except OSError as error:
            raise GitFailedError(arguments[0], f"{error.strerror} ({error.filename})") from None
        if done.returncode not in (0, none):
            raise GitFailedError(arguments[0], done.stderr.decode(errors="replace"))
        return done.stdout

    def text(self, *arguments: str, given: bytes = b"", none: int = 0) -> str:
        """The same as text to show: what is not UTF-8 is replaced, and the last line's end is left out."""
        return self(*arguments, given=given, none=none).decode(errors="replace").removesuffix("\n")

    def names(self, *arguments: str, none: int = 0) -> list[str]:
        """The output of a command with ``-z``: entries that hold file names, as Python names files."""
        return [os.fsdecode(entry) for entry in self(*arguments, none=none).split(b"\0") if entry]

    def tells(self, *arguments: str) -> bool:
        """Whether a command that answers by its exit code says yes."""
        try:
            self(*arguments)
        except GitFailedError:
            return False
        return True

    def cut_off(self) -> frozenset[str]:
        """The commits that seem to be the first ones, but whose parents a shallow clone left out."""
        shallow = self.folder / self.text("rev-parse", "--git-path", "shallow")
        return frozenset(shallow.read_text().split()) if shallow.exists() else frozenset()

    def without_filters(self) -> Git:
        """The same with every filter that is configured emptied, so that none runs.

        Raises:
            GitFailedError: git cannot read the configuration.
        """
        listed = self("config", "--name-only", "-z", "--get-regexp", r"^filter\.", none=1)
        filters = sorted({os.fsdecode(name).rpartition(".")[0] for name in listed.split(b"\0") if name})
        settings = ("clean=", "smudge=", "process=", "required=false")
        return self.with_options(*(part for f in filters for s in settings for part in ("-c", f"{f}.{s}")))


def rewritten(git: Git, paths: Sequence[str]) -> str:
    """Which file of a checkout a filter of the user's writes, in one line; '' where none does.

    No filter runs where a commit is put in place, for it may run anything at all; Git LFS's content is put there.

    Args:
        git: In the checkout's root.
        paths: Of the files in question.
    """
    filters = _filters(git, "smudge") - {"lfs"}
    if not filters:
        return ""
    files = git("ls-files", "-z", "--", *(f":(top,literal){path}" for path in paths if path != "."))
    for path, name in _filtered(git, files, filters):
        return (
            f"{path} is written by the filter {name} in your checkout, which runs in no commit's worktree: there it is "
            "as git keeps it"
        )
    return ""


def cleaned(git: Git, names: Sequence[str]) -> list[str]:
    """The files among some that a filter of the user's rewrites on their way into git. None runs.

    Args:
        git: In the checkout's root, with the user's filters.
        names: Paths below it.
    """
    filters = _filters(git, "clean") if names else frozenset[str]()
    given = b"".join(os.fsencode(name) + b"\0" for name in names)
    filtered = [path for path, _ in _filtered(git, given, filters)] if filters else []
    return [path for path in filtered if (git.folder / path).is_file() and not (git.folder / path).is_symlink()]


def _filters(git: Git, direction: str) -> frozenset[str]:
    """The names of the filters that are configured to do something in one direction: ``smudge`` or ``clean``."""
    listed = git("config", "-z", "--get-regexp", rf"^filter\..*\.({direction}|process)$", none=1)
    settings = dict(os.fsdecode(entry).partition("\n")[::2] for entry in listed.split(b"\0") if entry)
    return frozenset(
        name.split(".", 1)[1].rpartition(".")[0] for name, value in settings.items() if value not in ("", "cat")
    )


def _filtered(git: Git, files: bytes, filters: frozenset[str]) -> Iterator[tuple[str, str]]:
    """The path and the filter of each file, of those that are given NUL-terminated, that one of some filters is for."""
    fields = git("check-attr", "-z", "--stdin", "filter", given=files).split(b"\0")
    for path, value in zip(fields[::3], fields[2::3], strict=False):
        if (name := os.fsdecode(value)) in filters:
            yield os.fsdecode(path), name


# -- what Git LFS leaves in git: a pointer for each file whose content it keeps

_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?oid sha256:([0-9a-f]{64})\n", re.ASCII)
POINTER_MOST = 1024
"""Bytes of the largest pointer file, by Git LFS's specification."""


def pointed_at(content: bytes) -> str | None:
    """The SHA-256 that a pointer names, in hex; None where this is no pointer."""
    match = _POINTER.match(content) if len(content) <= POINTER_MOST else None
    return match[1].decode() if match else None


def lfs_store(git: Git, repository: Path) -> Path:
    """Where Git LFS keeps content: in the git folder, unless a setting says where.

    Args:
        git: On that repository.
        repository: The common git folder.
    """
    # as Git LFS takes it, relative to the git folder
    return repository / (git.text("config", "--type=path", "--get", "lfs.storage", none=1) or "lfs") / "objects"


def kept_at(store: Path, oid: str) -> Path:
    """Where a store of Git LFS keeps a content."""
    return store / oid[:2] / oid[2:4] / oid


def holds(path: Path, oid: str) -> bool:
    """Whether a file has the content of a pointer."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == oid


def kept_by_lfs(git: Git, name: str, mode: str) -> bool:
    """Whether a file is what a pointer of Git LFS in the index stands for, and may be run as the index says."""
    path = git.folder / name
    if path.is_symlink() or not path.is_file() or bool(path.stat().st_mode & stat.S_IXUSR) != (mode == "100755"):
        return False
    if int(git("cat-file", "-s", f":0:{name}")) > POINTER_MOST:
        return False
    oid = pointed_at(git("cat-file", "blob", f":0:{name}"))
    return oid is not None and holds(path, oid)


def state_of(folder: Path) -> str:
    """The commit that a folder's code is of, and eight digits for what differs from it; '' outside of git."""
    git, other = Git(folder), dict.fromkeys(("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"))  # a hook's
    by_bytes = ("--binary", "--no-ext-diff", "--no-textconv")
    try:
        commit = git("rev-parse", "HEAD", variables=other).decode().strip()
        changes = git("diff", "HEAD", *by_bytes, "--", ".", variables=other)
    except GitFailedError:
        return ""
    return commit + (f"+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else "")

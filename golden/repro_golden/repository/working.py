"""The code of a working tree that no commit may have yet, and whether a commit has it since."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from repro_golden.base.canonical import digest
from repro_golden.repository.code_key import code_keys
from repro_golden.repository.git import Git, kept_by_lfs

__all__ = ["NOTHING", "SUBMODULE", "Lying", "Ran", "apart", "as_it_lies", "has_code", "is_absent", "noted_of"]

NOTHING = "none"
"""In place of a key, where git tracks none of the code yet."""
SUBMODULE = "160000"
"""The mode of one."""
_MOST_FILES, _MOST_BYTES = 256, 1 << 20
_DIGITS = 16


@dataclass(frozen=True)
class Ran:
    """The code that a run in a working tree is of.

    Attributes:
        tree: The key of what git tracks of it, as it lies there; `NOTHING` where that is nothing, empty where no key
            stands for it.
        commit: The last commit, where it has that key; else empty.
        untracked: Of each little file beside it that git neither tracks nor ignores, by its path, some digits that
            stand for path, mode and content. None of them where they are many.
        unknown: Why no key stands for it; else empty.
    """

    tree: str
    commit: str
    untracked: Mapping[str, str] = field(default_factory=dict)
    unknown: str = ""

    def beside(self, later: Ran) -> list[str]:
        """What lay beside it and still does, and what came since, as a program's own output does."""
        digests = (d for path, d in later.untracked.items() if self.untracked.get(path, d) == d)
        return sorted(digests)


@contextlib.contextmanager
def apart(git: Git) -> Iterator[Git]:
    """Git with a copy of the index for the block: whatever is put into that, the repository stays as it is.

    Args:
        git: In the root of a working tree.
    """
    index, objects = (git.folder / git.text("rev-parse", "--git-path", name) for name in ("index", "objects"))
    known = str(objects.resolve()).replace("\\", "\\\\").replace('"', '\\"')
    with tempfile.TemporaryDirectory(prefix="repro-index-") as scratch:
        copy, scratch_objects = Path(scratch) / "index", Path(scratch) / "objects"
        scratch_objects.mkdir()
        if index.exists():
            shutil.copy2(index, copy)  # its time says which entries git must look at again
        variables = {
            "GIT_INDEX_FILE": str(copy),
            "GIT_OBJECT_DIRECTORY": str(scratch_objects),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": f'"{known}"',
        }
        yield replace(git.with_options("-c", "core.looseCompression=0"), variables=tuple(variables.items()))


@dataclass(frozen=True)
class Lying:
    """All that git tracks, as it lies in a working tree.

    Attributes:
        tree: The id of its tree.
        put: The files of that which are not as the index has them, or are hidden from git.
        unmerged: The files that a merge has left in conflict.
    """

    tree: str
    put: Sequence[str]
    unmerged: Sequence[str]


def as_it_lies(git: Git, index: Git) -> Lying:
    """All that git tracks, as it lies in the working tree.

    What a sparse checkout leaves out is as the index has it, and so are what Git LFS keeps and a submodule that is not
    checked out.

    Args:
        git: In the root of the working tree; no filter runs.
        index: The same `apart`, which gets the tree.
    """
    listed = (entry.partition(" ") for entry in git.names("ls-files", "-v", "-z"))
    flagged = [name for flag, _, name in listed if flag == "S" or flag.islower()]
    hidden = [name for name in flagged if os.path.lexists(git.folder / name)]
    for flag in ("--no-assume-unchanged", "--no-skip-worktree"):
        _put(index, hidden, flag)
    here, gone = list[str](), list[str]()
    kinds = {name: kind for kind, name in changed(git) if kind[1] != " "}
    unmerged = [name for name, kind in kinds.items() if "U" in kind or kind in ("AA", "DD")]
    modules = {name for name, mode in modes_of(git).items() if mode == SUBMODULE}
    for name in dict.fromkeys([*kinds, *hidden]):
        absent = name in modules and is_absent(git.folder / name)
        if not absent or name in unmerged:  # git cannot write a tree of what is unmerged
            (here if not absent and _is_there(git.folder, name) else gone).append(name)
    _put(index, gone, "--force-remove")
    _put(index, here)
    return Lying(_tree(index), here, unmerged)


def is_absent(folder: Path) -> bool:
    """Whether a submodule's folder has nothing in it, or is not there: it is not checked out."""
    return not os.path.lexists(folder) or (folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()))


def changed(git: Git, specs: Sequence[str] = (), *, untracked: str = "no") -> Iterator[tuple[str, str]]:
    """The two letters of git's, and the path, of what lies otherwise in a working tree than in the last commit.

    A file that a filter has rewritten counts unless the index knows it, as after `git status`, or Git LFS keeps its
    content. What a submodule has inside does not.

    Args:
        git: In the root of a working tree; no filter runs.
        specs: Pathspecs; all where there are none.
        untracked: As git takes it.
    """
    status = ("status", "--porcelain", "-z", f"--untracked-files={untracked}", "--ignore-submodules=dirty")
    modes: Mapping[str, str] = {}
    for entry in git.names(*status, "--no-renames", "--", *specs):
        kind, name = entry[:2], entry[3:]
        if kind[1] == "M":
            modes = modes or modes_of(git, specs)
            if kept_by_lfs(git, name, modes[name]):
                kind = f"{kind[0]} "
        if kind.strip():
            yield kind, name


def modes_of(git: Git, specs: Sequence[str] = ()) -> dict[str, str]:
    """The mode of each entry of the index."""
    entries = (entry.partition("\t") for entry in git.names("ls-files", "--stage", "-z", "--", *specs))
    return {name: facts.split(" ")[0] for facts, _, name in entries}


def _is_there(root: Path, name: str) -> bool:
    """Whether something lies at a path, and not behind a symlink."""
    folders = [root / folder for folder in PurePosixPath(name).parents]
    return os.path.lexists(root / name) and not any(folder.is_symlink() for folder in folders if folder != root)


def _put(index: Git, names: Iterable[str], *options: str) -> None:
    """Put files into an index as they lie in the working tree, or do to its entries what options say."""
    given = b"".join(os.fsencode(name) + b"\0" for name in names)
    if given:
        index("update-index", *(options or ("--add", "--remove", "--replace")), "-z", "--stdin", given=given)


def _tree(index: Git) -> str:
    return index.text("write-tree", "--missing-ok")


def noted_of(index: Git, names: Sequence[str]) -> dict[str, str]:
    """`Ran.untracked` of some files.

    Args:
        index: See `apart`; it gets the files.
        names: Paths below the root.
    """
    little = [name for name in names if _is_little(index.folder / name)]
    if len(little) > _MOST_FILES:
        return {}
    _put(index, little)
    wanted, noted = frozenset(little), dict[str, str]()
    for entry in index.names("ls-files", "--stage", "-z") if little else []:
        facts, _, name = entry.partition("\t")
        if name in wanted:
            mode, blob, _ = facts.split(" ")
            noted[name] = _digits(name, mode, blob)
    return noted


def _is_little(path: Path) -> bool:
    return path.is_symlink() or (path.is_file() and path.stat().st_size <= _MOST_BYTES)


def _digits(name: str, mode: str, blob: str) -> str:
    return digest("untracked", name, mode, blob)[:_DIGITS]


def has_code(git: Git, commit: str, paths: Sequence[str], tree: str, untracked: Collection[str]) -> bool:
    """Whether a commit has the code that a run was of: what git tracked then, and of what lay beside it any part.

    Args:
        git: In the root of a working tree.
        commit: Full id.
        paths: What holds the code.
        tree: `Ran.tree`.
        untracked: The values of `Ran.untracked`.
    """
    if code_keys(git, [commit], paths).of(commit) == tree:
        return True
    came = []
    for entry in git.names("ls-tree", "-r", "-z", "--full-tree", commit) if untracked else []:
        facts, _, name = entry.partition("\t")
        mode, _, blob = facts.split(" ")
        came += [name] if _digits(name, mode, blob) in untracked else []
    if not came:
        return False
    with apart(git) as index:
        index("read-tree", commit)
        _put(index, came, "--force-remove")
        rest = _tree(index)
        return (code_keys(index, [rest], paths).of(rest) or NOTHING) == tree

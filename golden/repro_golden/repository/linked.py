"""Files of the user's checkout that no commit holds, put into worktrees: what every commit reads alike.

Each file is a symlink, in folders that are the worktree's own. What a program makes, replaces, renames or removes there
stays in the worktree. A write into a file in place goes through its link; nothing prevents that, so it is looked for.

Where DVC's files of a commit name other content, the links lead to that in DVC's cache.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from repro_golden.base.errors import AbsentError, ReproError
from repro_golden.case.file import Case
from repro_golden.repository.code_key import not_code
from repro_golden.repository.dvc_files import content_of, named, overlap, same
from repro_golden.repository.git import Git

__all__ = [
    "LEADS_OUT",
    "Linked",
    "beside_commits",
    "data_of",
    "in_few_words",
    "leads_out",
    "refuse_tracked",
    "what_decides",
]

_Facts: TypeAlias = tuple[int, ...] | None
"""Size, times of modification and of change, and inode of a file; None for a folder."""
_NOT_DATA = (".git", "__pycache__")
"""Folders that are no data: as little of them is part of a probe's key."""
_SOURCES = ("*.c", "*.cc", "*.cpp", "*.cu", "*.cxx", "*.pyx", "*.rs")
"""What extension modules are compiled from."""
_MAKERS = ("*.py", "*.toml", "*.cfg", "*.cmake", "CMakeLists.txt", "*/CMakeLists.txt", "meson.build", "*/meson.build")
"""What says so."""
_MADE = rb"[\"']((?:\w+\.)*)@[\"']|(?:PyInit_|module\w*\s*\(\s*[\"']?|pymodule\][^{]*\bfn\s+)@\b"
"""How these name a module (``@``), and the package that it is in."""
_COMPUTED = re.compile(
    rb"Extension\s*\(\s*(?:name\s*=\s*)?[\w(*]|add_module\s*\(\s*\$|_MODULE\s*\(\s*(?!TORCH_EXTENSION_NAME)[A-Z][A-Z_]+\b"
)
"""How they name one that only running them tells: it may be any."""
_CLASS = re.compile(rb"\bclass\s+\w+\s*\(")
_SHOWN = 4
"""Files that a sentence names."""


class Linked:
    """What is linked into every worktree, as it was when this was made.

    What git tracks is never linked, since each commit has its own; and what a commit has stays as the commit has it.
    """

    def __init__(self, git: Git, names: Sequence[str], in_place: Sequence[str] = ()) -> None:
        """Look at what is to be linked.

        Args:
            git: In the root of the user's checkout.
            names: Folders and files, relative to it.
            in_place: What programs read of the checkout itself, wherever they run; see `data_of`.

        Raises:
            ReproError: one of them is not there, holds nothing but what git tracks, or what is compiled from that.
        """
        self._git, self._root, self._names = git, git.folder, [PurePosixPath(name) for name in names]
        self._in_place, self._data = in_place, [*names, *in_place]
        self._ours = named(git, self._data)
        self._kept: dict[Path, _Facts] = {}  # files of DVC's cache that were linked
        specs = [f":(top,literal){name}" for name in self._names]
        self._tracked = set(git.names("ls-files", "-z", "--", *specs)) if specs else set()
        self._seen: dict[str, _Facts] = {}
        for name in self._names:
            entries = self._below(name)
            there = any(facts for facts in entries.values())
            if not there and any(overlap(str(name), known) for known in self._ours):
                raise ReproError(f"nothing of {name} is here to link into worktrees: `dvc pull {name}` brings it")
            if not os.path.lexists(self._root / name):
                raise ReproError(
                    f"there is no {name} in {self._root} to link into worktrees: correct --link (or subject.link), a "
                    "path in your checkout"
                )
            if not there and self._holds_tracked(name):
                raise ReproError(
                    f"git tracks {name}, so every commit has its own and none is linked: leave it out of --link (or "
                    "subject.link)"
                )
            self._seen |= entries
        self._refuse_compiled()

    def _refuse_compiled(self) -> None:
        """Refuse an extension module of the repository: one build would stand for the sources of every commit."""
        built = [name for name, facts in self._seen.items() if facts and _is_module(name) and not self._is_apart(name)]
        if built and (name := next(filter(self._built_here(), built), None)):
            raise ReproError(
                f"{name} was compiled in your checkout, and would be the same at every commit, whatever its sources: "
                "leave it out of --link (or subject.link), and build it in each commit's worktree (setup = \"{python} "
                'setup.py build_ext --inplace" in [subject] of a case, or in the command)'
            )

    def _built_here(self) -> Callable[[str], bool]:
        """Tells whether a module may be compiled from what git tracks, by its name and that of its package."""
        sources = [PurePosixPath(name) for name in self._git.names("ls-files", "-z", "--", *_SOURCES)]
        makers = [*map(str, sources), *self._git.names("ls-files", "-z", "--", *_MAKERS)] if sources else []
        files = [self._root / name for name in makers if (self._root / name).is_file()]
        texts = [file.read_bytes() for file in files]
        packages = {
            PurePosixPath(name).parent.name for name in self._git.names("ls-files", "-z", "--", "*/__init__.py")
        }

        def told(name: str) -> bool:
            module, package = PurePosixPath(name).name.partition(".")[0], PurePosixPath(name).parent.name
            if not sources or package in packages or any(of.name.partition(".")[0] == module for of in sources):
                return bool(sources)
            made = re.compile(_MADE.replace(b"@", re.escape(os.fsencode(module))), re.IGNORECASE)
            if any(_COMPUTED.search(_CLASS.sub(b"", text)) for text in texts):
                return True
            inside = (match[1] for text in texts for match in made.finditer(text))
            return any(not of or of.split(b".")[-2] == os.fsencode(package) for of in inside)

        return told

    def _is_apart(self, name: str) -> bool:
        """Whether a file is of a Python environment, or named by DVC in each commit."""
        folders = [self._root / parent for parent in PurePosixPath(name).parents]
        known = any((folder / mark).exists() for folder in folders for mark in ("pyvenv.cfg", "conda-meta"))
        return known or "site-packages" in PurePosixPath(name).parts or _within(name, self._ours)

    def _holds_tracked(self, name: PurePosixPath) -> bool:
        return any(PurePosixPath(path).is_relative_to(name) for path in self._tracked)

    def put(self, tree: Path) -> None:
        """Link everything into a worktree that holds its commit's files.

        Raises:
            AbsentError: the commit names other data, which is not here.
        """
        other = self._of_commit(tree)
        commits_own: set[str] = set()  # and what would lie behind it: a commit's symlink may lead anywhere
        for name, facts in self._seen.items():
            target = tree / name
            if _within(name, other):
                continue
            if name.rpartition("/")[0] in commits_own:
                commits_own.add(name)
            elif os.path.lexists(target):
                if facts is not None or target.is_symlink() or not target.is_dir():
                    commits_own.add(name)
            elif facts is None:
                target.mkdir()
            else:
                target.symlink_to(self._root / name)
        for name, cached in (pair for files in other.values() for pair in files.items()):
            target = tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.parent.resolve().is_relative_to(tree.resolve()) and not os.path.lexists(target):
                self._kept.setdefault(cached, _facts(cached))
                target.symlink_to(cached)

    def _of_commit(self, tree: Path) -> dict[str, Mapping[str, Path]]:
        """The paths at which a worktree's commit has other data than the checkout, with the files to link below each.

        Raises:
            AbsentError: it is not here, or what lies beside it may be made of the checkout's.
        """
        theirs = named(self._git.at(tree), self._data)
        other = dict[str, Mapping[str, Path]]()
        for name in sorted({**self._ours, **theirs}):
            target, fact = tree / name, theirs.get(name)
            if same(fact, self._ours.get(name)):
                continue
            if os.path.lexists(target) and (not target.is_dir() or (not fact and any(target.iterdir()))):
                other[name] = {}  # git has it there
            else:
                other[name] = self._from_cache(name, fact)
        return other

    def _from_cache(self, name: str, fact: str | None) -> Mapping[str, Path]:
        """Files of DVC's cache that are linked for a path, by where."""
        if not fact and not any(overlap(name, path) for path in self._in_place):
            return {}  # as git and DVC would have it: the commit has none
        what = f"{name} is not what it is in your checkout, by DVC's files"
        if ":" in name:
            raise AbsentError(
                f"{what}, and nothing tells where it lies: search where that file of DVC's stays the same"
            )
        if any(overlap(name, path) for path in self._in_place):
            raise AbsentError(f"{what}, and the command reads it there: name it without {{root}}/, and --link it")
        if name in self._ours and not os.path.lexists(self._root / name):
            raise AbsentError(f"{what}, and neither is here: `dvc pull {name}`, or link what is read alone")
        if self._unnamed:
            raise AbsentError(
                f"{what}, and {self._unnamed}, which is linked beside it, is named by none: it may be made of that, so "
                "link what is read alone"
            )
        if (files := content_of(self._root, name, fact or "")) is None:
            raise AbsentError(f"{what}, and not in DVC's cache: `dvc fetch --all-commits {name}` brings it")
        links = set(map(str, self._names))
        return {path: cached for path, cached in files.items() if _within(path, links)}

    @cached_property
    def _unnamed(self) -> str:
        """A linked file that DVC's files of the checkout do not name; '' where they name all."""
        return next((name for name, facts in self._seen.items() if facts and not _within(name, self._ours)), "")

    def check(self) -> None:
        """Refuse runs during which a linked file was changed, made or removed in the checkout.

        Raises:
            ReproError: naming the file.
        """
        now: dict[str, _Facts] = {}
        for name in self._names:
            now |= self._below(name)
        cached = dict(self._kept)
        now |= {str(file): _facts(file) if file.exists() else () for file in cached}
        seen = self._seen | {str(file): facts for file, facts in cached.items()}
        for file in sorted(now.keys() | seen.keys()):
            before, after = seen.get(file, ()), now.get(file, ())
            if before != after:
                what = "was made" if before == () else "was removed" if after == () else "was changed"
                raise ReproError(
                    f"{file} of your checkout, which is linked into every worktree, {what} since this command began, "
                    "by the program or beside it, and nothing of the last run was kept: let the program write "
                    "elsewhere, and leave the file alone meanwhile"
                )

    def _below(self, name: PurePosixPath) -> dict[str, _Facts]:
        """What of the checkout is linked for a name, each folder before what lies in it, with the folders above it."""
        parents: dict[str, _Facts] = {str(parent): None for parent in reversed(name.parents) if parent.parts}
        return parents | dict(self._walked(str(name), ()))

    def _walked(self, name: str, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, _Facts]]:
        if name in self._tracked:
            return
        path = self._root / name
        try:
            try:
                status = path.stat()
            except OSError:  # a link to nowhere, or in a circle
                status = path.lstat()
        except OSError:  # gone
            return
        place = (status.st_dev, status.st_ino)
        if not stat.S_ISDIR(status.st_mode):
            yield name, _of_status(status)
            return
        if place in above or not os.access(path, os.R_OK | os.X_OK):  # linked as a whole
            yield name, (status.st_ino,)
            return
        yield name, None
        for entry in sorted(path.iterdir()):
            if entry.name not in _NOT_DATA:
                yield from self._walked(f"{name}/{entry.name}", (*above, place))


def _is_module(name: str) -> bool:
    """Whether Python could import a file as an extension module."""
    base = PurePosixPath(name).name
    return base.endswith(".so") and not base.startswith("lib")


def _within(name: str, paths: Container[str]) -> bool:
    return name in paths or any(str(parent) in paths for parent in PurePosixPath(name).parents)


def _facts(path: Path) -> tuple[int, ...]:
    return _of_status(path.stat())


def _of_status(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


# -- what no worktree has, and may decide all the same


def beside_commits(git: Git, linked: Sequence[str] = (), since: float = 0.0) -> list[str]:
    """Files of a checkout that git does not track, and folders (``data/``) in which it tracks none; files come first.

    What recording writes, bytecode and Python environments are left out.

    Args:
        git: In the root of the checkout.
        linked: Those that every worktree has too are left out.
        since: Of those, what was written since then; seconds, as `time.time` has it.
    """
    ours = not_code(git.folder)
    specs = [":(top)", *ours, *(f":(top,exclude,literal){name}" for name in linked)]
    listed = git.names("ls-files", "--others", "--directory", "-z", "--", *specs)
    if any(name.startswith("golden/") for name in listed):  # a folder is listed also where nothing else is in it
        others = git.names("ls-files", "--others", "-z", "--", ":(top,literal)golden", *ours)
        listed = [n for n in listed if not n.startswith("golden/") or any(other.startswith(n) for other in others)]
    names = [
        name
        for name in listed
        if PurePosixPath(name).name not in _NOT_DATA
        and not name.endswith(".pyc")
        and not (git.folder / name / "pyvenv.cfg").exists()
        and (not since or _written_since(git.folder / name, since))
    ]
    return sorted(names, key=lambda name: (name.endswith("/"), name))


def _written_since(path: Path, since: float) -> bool:
    files = (path, *(Path(folder, name) for folder, _, names in os.walk(path) for name in names))
    return any(file.is_file() and file.stat().st_mtime >= since for file in files)


def what_decides(git: Git, linked: Sequence[str]) -> str:
    """What may decide where a checkout and a worktree of its commit say otherwise, with the cure.

    Args:
        git: In the root of the checkout.
        linked: What every worktree has of it already.
    """
    names = beside_commits(git, linked)
    if not names:
        return (
            "what decides lies outside git, and your checkout has no other files: let the program depend neither on "
            "the folder that it runs in nor on its path"
        )
    if len(names) > 1:
        return (
            f"what decides lies outside git, and no worktree has {in_few_words(names)} of your checkout: link which of "
            "them it is (--link before --, or link in [subject] of the case), or commit it"
        )
    return (
        f"what decides lies outside git, and may be {names[0]} of your checkout, which no worktree has: `--link "
        f"{shlex.quote(names[0])}` before --, or link = {json.dumps(names, ensure_ascii=False)} in [subject] of the "
        "case, puts it there"
    )


LEADS_OUT = "leads out of a worktree"


def leads_out(git: Git, message: str) -> str:
    """What to write for a path by which a program in a worktree found nothing, as it lies beside the checkout.

    Args:
        git: In the root of the checkout.
        message: What the program said. It may have started in any folder that has files of git's.

    Returns:
        Words for behind the message; '' where no such path is in it, or several files may be meant.
    """
    texts = [text for text in re.findall(r"[^\s'\"`<>:;,=()\[\]]+", message) if ".." in PurePosixPath(text).parts]
    if not texts:
        return ""
    root = str(git.folder)
    folders = {str(parent) for name in git.names("ls-files", "-z") for parent in PurePosixPath(name).parents}
    for text in texts:
        within, out = folders, text
        if PurePosixPath(text).is_absolute():  # as Python has its script's; a worktree is called as the checkout
            head, _, tail = text.partition("/../")
            names = head.split("/")
            starts = {"/".join(names[k:]) or "." for k, name in enumerate(names, 1) if name == git.folder.name}
            within, out = folders & starts, f"../{tail}"
        targets = {os.path.normpath(f"{root}/{folder}/{out}") for folder in within}
        there = [path for path in targets if not f"{path}/".startswith(f"{root}/") and os.path.lexists(path)]
        if len(there) == 1 and there[0] != "/":
            return f"; {out} {LEADS_OUT}, which lies elsewhere than your checkout: write {there[0]}"
    return ""


def in_few_words(names: Sequence[str]) -> str:
    """``a, b, c and 4 more``."""
    shown = names if len(names) <= _SHOWN + 1 else names[:_SHOWN]
    more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    return ", ".join(shown) + more


# -- the checkout's own files, named by a command


def refuse_tracked(git: Git, case: Case) -> None:
    """Refuse a command that names a file of the checkout which each commit has for itself.

    Args:
        git: In the root of the user's checkout.
        case: The case.

    Raises:
        ReproError: one is named, with what to write instead.
    """
    for name in dict.fromkeys([*data_of(case, git.folder), *_programs(case, git.folder)]):
        inside = f":(top,literal){name}"
        if not git.names("ls-files", "-z", "--", inside):
            continue
        others = git.names("ls-files", "--others", "-z", "--", inside)
        if all(path.endswith(".pyc") for path in others):
            raise ReproError(
                f"the command names your checkout's own {name}, which git tracks: every commit would run that one "
                f"and not its own; write {name} instead"
            )


def _programs(case: Case, root: Path) -> Iterator[str]:
    """The checkout's own files that PATH finds as the programs which a case's commands start; relative to it."""
    if (program := case.subject.program) is None:
        return
    inside, path = root.resolve(), program.env.get("PATH", os.environ.get("PATH", ""))
    search = os.pathsep.join(folder for folder in path.split(os.pathsep) if os.path.isabs(folder))  # noqa: PTH117
    for word in dict.fromkeys(word for line in program.lines for word in _started(line, shell=program.shell)):
        location = shutil.which(word, path=search) if "/" not in word else None
        if location and (place := Path(location).resolve()).is_relative_to(inside):
            yield str(place.relative_to(inside))


def _started(line: str, *, shell: bool) -> Iterator[str]:
    """What a command line starts: its first word, and in text for a shell each that stands where a command does."""
    argv = shlex.split(line)
    for text in [line] if shell else [argv[at + 1] for at in range(len(argv) - 1) if argv[at] in ("-c", "-lc")]:
        yield from re.findall(r"(?:^|[;|&(\n])\s*(?:\w+=\S*\s+)*([\w.+-]+)", text)
    yield from argv[:1]


def data_of(case: Case, root: Path) -> list[str]:
    """What a program's commands and variables name below ``{root}``: it is read there, wherever they run."""
    return list(dict.fromkeys(_below_root(case, root)))


def _below_root(case: Case, root: Path) -> Iterator[str]:
    """What a program's commands and variables name below ``{root}``, as such or by its path; relative to it."""
    subject, tops = case.subject, ("{root}/", *dict.fromkeys((f"{root}/", f"{root.resolve()}/")))
    for word in [*subject.texts, *subject.env.values()] if subject.templates else ():
        for part in [word, *re.split(r"[=:,;|&()<>\"'\s]+", word)]:
            top = next((top for top in tops if part.startswith(top)), None)
            if top is None and os.path.isabs(part):  # noqa: PTH117 - by a link to the checkout, or from one
                top, part = f"{root.resolve()}/", os.path.realpath(part)
            if top is not None and part.startswith(top):
                name = os.path.normpath(part.removeprefix(top).lstrip("/") or ".")
                if name != "." and not name.startswith(".."):
                    yield name

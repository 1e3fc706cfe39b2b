"""What leads from an interpreter's packages to worktrees: noted before a run, taken away after it.

A run that installs its worktree (`pip install -e .`) leaves the user a package of a folder that is soon gone. All
repositories of a user share the note of a folder of packages: two clones of one project install over each other. Of a
process that was killed the next one takes away what it left.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from repro_golden.base.canonical import digest, write_atomic
from repro_golden.base.errors import MachineFailureError
from repro_golden.base.files import of_user
from repro_golden.repository.checkout import Checkout

__all__ = ["drop_copies", "leading", "noted", "notes_of", "settle"]

_LEADS = ("*.pth", "*.egg-link", "__editable__*.py", "*.dist-info/direct_url.json")
"""Files by which an installation leads to the folder that it is of."""
_WORKTREE = re.compile(r"/repro/(?:trust/[^/\n]+/)?worktrees/[^\n]*?/at-[^/\n]+/")
"""What they hold where that is a worktree, of whichever repository."""
_LARGE = 1 << 20
"""Bytes of such a file that is read."""
_OWN, _ANY = 1 << 30, 1 << 24
"""Bytes of a package of which a copy is kept: of one that a worktree's files name, and of any that may be its own."""
_COMMON = {"__pycache__", "benchmarks", "docs", "examples", "scripts", "setup", "test", "tests", "tools"}
"""Names by which no package is known for a project's."""
_TOP = re.compile(r"^([\w-]+)(?:/|\.py,)", re.MULTILINE)
"""The module or folder of a line of a package's list of files."""

_installed: set[tuple[str, str]] = set()
"""What runs of this process have installed over, by folder and name."""


class _Note(NamedTuple):
    """What a folder of packages held, as JSON has it.

    Attributes:
        site: The folder.
        anchor: The nearest folder that was there, with its inode: another machine may have one at the same path.
        ours: The folders of the worktrees of whoever holds the note: one for each repository.
        own: The names of projects in them.
        stood: The ``.dist-info`` folders that stood there, but for those of worktrees.
        led: What led elsewhere: digests by the paths of the files.
        kept: Of each package that a run may replace, copies of its files, by their paths.
        back: Names that are being put back: who is killed meanwhile leaves that to the next.
    """

    site: str
    anchor: tuple[str, int]
    ours: list[str]
    own: list[str]
    stood: list[str]
    led: dict[str, str]
    kept: dict[str, dict[str, str]]
    back: list[str]


def notes_of(checkout: Checkout) -> Path:
    """Where notes lie: of all repositories of a user in one folder, where one serves."""
    return next(of_user("installs"), checkout.state / "installs")


@contextlib.contextmanager
def noted(base: Path, site: Path, root: Path) -> Iterator[list[str]]:
    """Hold a note of a folder of packages for the block.

    The last run of a repository takes away what leads to its worktrees since.

    Args:
        base: Where notes lie.
        site: The folder, which need not be there.
        root: The worktree, whose project may be installed there. All of the repository lie beside it.

    Yields:
        An empty list, which holds behind the block what this repository's runs have installed since it was noted.

    Raises:
        MachineFailureError: the note cannot be written, or what runs installed not be taken back.
    """
    found, ours = list[str](), str(root.parents[2])
    base.mkdir(parents=True, exist_ok=True)
    with _turn(base):
        path = _path_for(base, site)
        _settle(path)
        try:
            write_atomic(path, json.dumps(_look(base, site, root, _read(path) if path.exists() else None)))
        except OSError as error:
            raise MachineFailureError(
                f"what {site} holds cannot be noted ({_said(error)}): cure that and run the same command again"
            ) from None
        _drop_copies(base)
        lock = _lock_of(path, ours).open("a")
        fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        yield found
    finally:
        with _turn(base):
            lock.close()
            if path.exists():  # who clears our state away meanwhile has the packages as they are
                found += sorted({_called(file) for file in _new(_read(path)._replace(ours=[ours]))})
            _settle(path)


def settle(base: Path) -> None:
    """Take back what runs of processes that were killed have installed.

    Raises:
        MachineFailureError: it cannot be taken back.
    """
    if not any(base.glob("*.json")):
        return
    with _turn(base):
        for path in base.glob("*.json"):
            if _is_here(_read(path)):
                _settle(path)


def drop_copies(base: Path) -> None:
    """Remove the copies that no note names; the runs of a search share them."""
    if (base / "kept").is_dir():
        with _turn(base):
            _drop_copies(base)


def _drop_copies(base: Path) -> None:
    notes = map(_read, base.glob("*.json"))
    named = {Path(copy).parent for note in notes for files in note.kept.values() for copy in files.values()}
    for folder in {*(base / "kept").glob("*")} - named:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _turn(base: Path) -> Iterator[None]:
    with (base / "turn").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _lock_of(path: Path, ours: str) -> Path:
    """What the runs of a repository hold as long as they hold a note."""
    return path.with_name(f"{path.stem}-{digest('ours', ours)}.lock")


def _is_free(lock: Path) -> bool:
    """Whether nobody holds it. Asked in one's turn, in which alone somebody may take it."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _said(error: OSError) -> str:
    return f"{error.strerror} {error.filename or ''}".strip()


# -- the note


def _path_for(base: Path, site: Path) -> Path:
    name, (_, inode) = digest("site", str(site)), _anchor(site)
    earlier = (path for path in base.glob(f"{name}-*.json") if _is_here(_read(path)))
    return next(earlier, base / f"{name}-{inode}.json")


def _anchor(site: Path) -> tuple[str, int]:
    there = next(folder for folder in (site, *site.parents) if folder.is_dir())
    return str(there), there.stat().st_ino


def _is_here(note: _Note) -> bool:
    path, inode = note.anchor
    return Path(path).is_dir() and Path(path).stat().st_ino == inode


def _look(base: Path, site: Path, root: Path, earlier: _Note | None) -> _Note:
    """What stands there now, and what stood there for those who hold a note already."""
    leads = {path: _text(path) for path in leading(site)}
    away = {path for path, text in leads.items() if _WORKTREE.search(text) or _is_ours(text, str(root.parents[2]))}
    abouts = [path for path in sorted(site.glob("*.dist-info")) if path / "direct_url.json" not in away]
    if earlier:  # a run may be at it: what is written last is not there yet
        abouts = [path for path in abouts if (path / "RECORD").exists()]
    named, modules = _projects(root)
    sourced = {_name(path.parent) for path in leads if path.suffix == ".json" and _is_sourced(leads[path])}
    sourced |= {_canonical(path.stem) for path in leads if path.suffix == ".egg-link"} | _known_by(
        abouts, modules, site
    )
    kept = dict[str, dict[str, str]]()
    for name, files in _packages(site, abouts, named | sourced).items():
        if not away & {*files} and sum(map(_size, files)) < (_OWN if name in named else _ANY):
            kept[name] = _copied(base, files)
    ours, own, stood = [str(root.parents[2])], sorted(named), [about.name for about in abouts]
    if earlier is None:
        led = {str(path): digest("lead", text) for path, text in leads.items()}
        return _Note(str(site), _anchor(site), ours, own, stood, led, kept, [])
    return earlier._replace(
        ours=sorted({*earlier.ours, *ours}),  # of whom no run is under way, the user's packages are as they stand now
        own=sorted({*earlier.own, *own}),
        stood=sorted({*earlier.stood, *stood}),
        kept=kept | earlier.kept if ours[0] in earlier.ours else earlier.kept | kept,
    )


def _read(path: Path) -> _Note:
    return _Note(*json.loads(path.read_bytes()))


def _is_ours(text: str, ours: str) -> bool:
    return any(f"{ours}/" in form for form in (text, unquote(text)))  # a URL or a path


def _is_sourced(url: str) -> bool:
    """Whether a package is from a folder or a repository, and no release."""
    return "dir_info" in url or "vcs_info" in url


def leading(site: Path) -> list[Path]:
    """The files of a folder of packages by which these lead elsewhere."""
    paths = [path for pattern in _LEADS for path in site.glob(pattern)]
    return [path for path in paths if _readable(path) and path.stat().st_size < _LARGE]


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="surrogateescape")


def _readable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.R_OK)


def _size(path: Path) -> int:
    return path.lstat().st_size


def _packages(site: Path, abouts: Iterable[Path], names: set[str]) -> dict[str, list[Path]]:
    """The files of packages that can be kept, by their names."""
    packages: dict[str, list[Path]] = {}
    for path in site.glob("*.egg-link"):
        packages.setdefault(_canonical(path.stem), []).append(path)
    for about in abouts:
        if (name := _name(about)) in names:
            files = [path for path in _listed(about) if path.is_symlink() or _readable(path)]
            packages.setdefault(name, []).extend(files)
    return {name: files for name, files in packages.items() if files}


def _copied(base: Path, files: list[Path]) -> dict[str, str]:
    """Copies of files, which an earlier note of the same files may have made already."""
    states = [(str(path), path.lstat()) for path in files]
    marks = [f"{path} {state.st_size} {state.st_mtime_ns} {state.st_mode}" for path, state in states]
    folder = base / "kept" / digest("kept", "\n".join(marks))
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        for number, path in enumerate(files):
            shutil.copy2(path, made / str(number), follow_symlinks=False)
        made.rename(folder)
    return {str(path): str(folder / str(number)) for number, path in enumerate(files)}


def _listed(about: Path) -> list[Path]:
    """The files of the package that a ``.dist-info`` is of, as far as they lie in the environment that holds it."""
    site, record = about.parent, about / "RECORD"
    rows = csv.reader(record.read_text(encoding="utf-8", errors="replace").splitlines()) if record.is_file() else ()
    paths = [Path(os.path.normpath(site / row[0])) for row in rows if row and row[0]]
    paths += [path for path in sorted(about.rglob("*")) if path.is_file()]
    environment = site.parents[min(2, len(site.parents) - 1)]
    real = {folder: folder.resolve() for folder in (environment, *(path.parent for path in paths))}
    inside = (path for path in paths if real[path.parent].is_relative_to(real[environment]))  # a link may lead out
    return list(dict.fromkeys(path for path in inside if path.is_relative_to(environment)))


def _name(about: Path) -> str:
    """The name of the package that a ``.dist-info`` is of."""
    return _canonical(about.name.partition("-")[0])


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _projects(root: Path) -> tuple[set[str], set[str]]:
    """What a worktree's projects may be called as packages, and the modules beside their files: a name may be made."""
    names, modules = set[str](), set[str]()
    for folder, below, files in os.walk(root):
        deep = len(Path(folder).relative_to(root).parts)
        below[:] = [] if deep > 2 else [name for name in below if not name.startswith(".")]
        if found := {"pyproject.toml", "setup.cfg", "setup.py"} & {*files}:
            texts = [_text(path) for file in found if _readable(path := Path(folder, file))]
            named = [name for text in texts for name in re.findall(r"\bname\s*=\s*[\"']?([\w.-]+)", text)]
            names |= set(map(_canonical, named))
            places = (path for part in (".", "src", "lib", "python") for path in Path(folder, part).glob("*"))
            modules |= {path.stem for path in places if path.suffix == ".py" or path.is_dir()}
    return names, modules - _COMMON


def _known_by(abouts: Iterable[Path], modules: set[str], site: Path) -> set[str]:
    """The packages of a folder that have modules of such names."""
    if modules.isdisjoint(path.stem for path in site.glob("*")):
        return set()
    records = (about / "RECORD" for about in abouts)
    tops = ((path.parent, set(_TOP.findall(_text(path)))) for path in records if _readable(path))
    return {_name(about) for about, found in tops if not modules.isdisjoint(found)}


# -- back


def _new(note: _Note) -> list[Path]:
    """What leads to a worktree of ours now and did not."""
    texts = {path: _text(path) for path in leading(Path(note.site))}
    ours = (path for path, text in texts.items() if any(_is_ours(text, folder) for folder in note.ours))
    return sorted(path for path in ours if note.led.get(str(path)) != digest("lead", texts[path]))


def _called(file: Path) -> str:
    """How what a file leads from is called: by its package, or itself."""
    return file.parent.stem if file.suffix == ".json" else file.name


def _settle(path: Path) -> None:
    """Take away what leads to worktrees of runs that have ended, and put back what it took the place of.

    Where nothing does, nothing is touched: what changed meanwhile is the user's.
    """
    if not path.exists():
        return
    try:
        whole = _read(path)
        ended = [ours for ours in whole.ours if _is_free(_lock_of(path, ours))]
        others = [ours for ours in whole.ours if ours not in ended]
        if not ended:
            return
        note = whole._replace(ours=ended)
        new = _new(note)
        theirs, links = _theirs(note, new), {_canonical(file.stem) for file in new if file.suffix == ".egg-link"}
        _installed.update((note.site, name) for name in {*map(_name, theirs), *links})
        begun = [] if others else [*_begun(note)]  # else it may be under way
        if names := {*map(_name, [*theirs, *begun]), *links, *note.back, *([] if others else _torn(note))}:
            note = note._replace(back=sorted(names))
            write_atomic(path, json.dumps(note._replace(ours=whole.ours)))
        if new or names:
            _take_away(note, new, {*theirs, *begun})
            _put_back(note)
            _remove_empty(note)
        for ours in ended:
            _lock_of(path, ours).unlink()
        if others:
            write_atomic(path, json.dumps(note._replace(ours=others, back=[])))
        else:
            path.unlink()
    except OSError as error:
        raise MachineFailureError(
            f"what a run installed cannot be taken back ({_said(error)}): cure that and run the same command again"
        ) from None
    if lost := sorted({*note.back} & _names(note.stood) - note.kept.keys() - _standing(Path(note.site))):
        raise MachineFailureError(
            f"a run installed its worktree over {', '.join(lost)} in {note.site}, of which no copy was kept (it is "
            f"large, or nothing told it for the project's): install {'it' if len(lost) == 1 else 'them'} again, and "
            "run the same command in another environment"
        )


def _names(abouts: Iterable[str]) -> set[str]:
    return {_name(Path(about)) for about in abouts}


def _standing(site: Path) -> set[str]:
    return {*map(_name, site.glob("*.dist-info")), *(_canonical(path.stem) for path in site.glob("*.egg-link"))}


def _theirs(note: _Note, new: list[Path]) -> list[Path]:
    """The packages that runs installed, by their ``.dist-info``."""
    files, abouts = {*new}, sorted(Path(note.site).glob("*.dist-info")) if new else []
    return [about for about in abouts if not files.isdisjoint([about / "direct_url.json", *_listed(about)])]


def _begun(note: _Note) -> Iterator[Path]:
    """The projects' packages whose installation was begun and no more, for a list of files comes last."""
    copied = {path for files in note.kept.values() for path in files}
    for about in sorted(Path(note.site).glob("*.dist-info")):
        record = about / "RECORD"
        mine = about.name not in note.stood and _name(about) in {*note.own, *note.kept}
        if not record.exists() and (mine or str(record) in copied):
            yield about


def _torn(note: _Note) -> Iterator[str]:
    """What a pip that was ended has begun to take away, and what is gone of what runs have installed over."""
    site = Path(note.site)
    standing = _standing(site)
    for name, files in note.kept.items():
        for record in (Path(path) for path in files if path.endswith(".dist-info/RECORD")):
            aside = _aside(record.parent)
            begun = record.is_file() and record.read_bytes() == Path(files[str(record)]).read_bytes()
            if (aside.exists() and aside.name not in note.stood) or (
                begun and not all(os.path.lexists(path) for path in files)
            ):
                yield name
        if name not in standing and (note.site, name) in _installed:
            yield name


def _aside(about: Path) -> Path:
    """Where pip puts it as long as it may have to come back."""
    return about.with_name(f"~{about.name[1:]}")


def _take_away(note: _Note, new: list[Path], theirs: set[Path]) -> None:
    site, modules = Path(note.site), {file.stem for file in new if file.suffix == ".py"}
    shared = {file for about in site.glob("*.dist-info") if about not in theirs for file in _listed(about)}
    for file in {file for about in theirs for file in _listed(about)} - shared:
        file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds something else
            for folder in itertools.takewhile(lambda above: above != site, file.parents):
                folder.rmdir()
    for about in theirs:
        shutil.rmtree(about, ignore_errors=True)
    for file in {*new, *(site.glob("*.pth") if modules else ())}:
        if file.suffix != ".json" and _readable(file):
            lines = _text(file).splitlines(keepends=True) if file.suffix == ".pth" else []
            left = [line for line in lines if not _is_away(line, note, modules)]
            if not left:
                file.unlink()
            elif left != lines:
                file.write_bytes("".join(left).encode(errors="surrogateescape"))


def _is_away(line: str, note: _Note, modules: set[str]) -> bool:
    """Whether a line leads to a worktree, or imports what did."""
    return any(_is_ours(line, ours) for ours in note.ours) or not modules.isdisjoint(re.findall(r"\w+", line))


def _put_back(note: _Note) -> None:
    site = Path(note.site)
    for name in note.kept.keys() & {*note.back}:
        files = {Path(path): Path(copy) for path, copy in note.kept[name].items()}
        others = [about for about in site.glob("*.dist-info") if _name(about) == name and not _is_as(about, files)]
        if others or any(path not in files for path in site.glob("*.egg-link") if _canonical(path.stem) == name):
            continue  # somebody has installed it meanwhile
        for file, copy in files.items():
            if not os.path.lexists(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(copy, file, follow_symlinks=False)
            if file.suffix == ".egg-link":  # what it leads to stood in the file that all such share, too
                line, listed = _text(file).partition("\n")[0] + "\n", site / "easy-install.pth"
                with listed.open("a+", encoding="utf-8", errors="surrogateescape") as lines:
                    lines.seek(0)
                    if line not in lines.readlines():
                        lines.write(line)
            if file.parent.suffix == ".dist-info":  # of a pip that was ended
                shutil.rmtree(_aside(file.parent), ignore_errors=True)


def _is_as(about: Path, files: dict[Path, Path]) -> bool:
    """Whether a package is the one of which there are copies: its list is the same, as far as there is one."""
    record = about / "RECORD"
    copy = files.get(record)
    return record.read_bytes() == copy.read_bytes() if copy and record.is_file() else about / "METADATA" in files


def _remove_empty(note: _Note) -> None:
    """Of folders that were not there what runs have left empty."""
    folder, anchor = Path(note.site), Path(note.anchor[0])
    with contextlib.suppress(OSError):  # it holds something
        for above in itertools.takewhile(lambda part: part != anchor, (folder, *folder.parents)):
            above.rmdir()

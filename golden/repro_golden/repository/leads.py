"""What leads from an interpreter's packages to worktrees: noted before a run, taken away after it.

A run that installs its worktree (`pip install -e .`) leaves the user a package of a folder that is soon gone. All
repositories of a user share the note of a folder of packages: two clones of one project install over each other. Of a
process that was killed the next one takes away what it left.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from repro_golden.base.canonical import digest, write_atomic
from repro_golden.base.errors import MachineFailureError
from repro_golden.base.files import of_user
from repro_golden.repository.checkout import Checkout
from repro_golden.repository.packages import (
    abouts_in,
    aside_of,
    canonical,
    files_of,
    is_same,
    known_by,
    lists_in,
    name_of,
    names_in,
    packages_in,
    projects,
    readable,
    scripts_in,
    shared_by,
    size_of,
    text_of,
)

__all__ = ["drop_copies", "leading", "noted", "notes_of", "settle"]

_LEADS = ("*.pth", "*.egg-link", "__editable__*.py", "*.dist-info/direct_url.json")
"""Files by which an installation leads to the folder that it is of."""
_WORKTREE = re.compile(r"/repro/(?:trust/[^/\n]+/)?worktrees/[^\n]*?/at-[^/\n]+/")
"""What they hold where that is a worktree, of whichever repository."""
_LARGE = 1 << 20
"""Bytes of such a file that is read."""
_OWN, _ANY = 1 << 30, 1 << 24
"""Bytes of a package of which a copy is kept: of one that a worktree's files name, and of any that may be its own."""
_MOMENT = 1.0
"""Seconds in which a pip that is at work moves something."""

_installed: set[tuple[str, str]] = set()
"""What runs of this process have installed over, by folder and name."""


class _Note(NamedTuple):
    """What a folder of packages held, as JSON has it.

    Attributes:
        site: The folder.
        anchor: The nearest folder that was there, with its inode: another machine may have one at the same path.
        ours: The folders of the worktrees of whoever holds the note: one for each repository.
        own: The names of projects in them.
        stood: What stood there that says of a package that it is installed, but for those of worktrees.
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
def noted(base: Path, site: Path, root: Path, cut: tuple[type[BaseException], ...] = ()) -> Iterator[list[str]]:
    """Hold a note of a folder of packages for the block.

    The last run of a repository takes away what leads to its worktrees since.

    Args:
        base: Where notes lie.
        site: The folder, which need not be there.
        root: The worktree, whose project may be installed there. All of the repository lie beside it.
        cut: Exceptions that say that the run was ended, perhaps as it installed. They go on as they are: of what is
            not taken back then, or not told, the next run there tells.

    Yields:
        An empty list, which holds behind the block what this repository's runs have installed since it was noted.

    Raises:
        MachineFailureError: the note cannot be written, what runs installed not be taken back, or not be told.
    """
    installed, ours = list[str](), str(root.parents[2])
    base.mkdir(parents=True, exist_ok=True)
    untold = base / f"{digest('site', str(site))}.untold"
    with _turn(base):
        if untold.exists():
            line = untold.read_text(encoding="utf-8")
            untold.unlink()
            raise MachineFailureError(line)
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
    stopped, line = False, ""
    try:
        yield installed
    except cut:
        stopped = True
        raise
    finally:
        with _turn(base):
            lock.close()
            if path.exists():  # who clears our state away meanwhile has the packages as they are
                installed += sorted({_called(file) for file in _new(_read(path)._replace(ours=[ours]))})
                line = _unknown(_read(path))
            try:
                _settle(path, "" if stopped else ours)
            except MachineFailureError as error:
                line = str(error)
            if line and not stopped:
                raise MachineFailureError(line)
            if line:
                with contextlib.suppress(OSError):  # the disk may be what is full
                    untold.write_text(line, encoding="utf-8")


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
    leads = {path: text_of(path) for path in leading(site)}
    away = {path for path, text in leads.items() if _WORKTREE.search(text) or _is_ours(text, str(root.parents[2]))}
    abouts = [path for path in abouts_in(site) if path / "direct_url.json" not in away]
    if earlier:  # a run may be at it: what is written last is not there yet
        abouts = [path for path in abouts if path.suffix != ".dist-info" or (path / "RECORD").exists()]
    named, modules = projects(root)
    sourced = {name_of(path.parent) for path in leads if path.suffix == ".json" and _is_sourced(leads[path])}
    sourced |= {canonical(path.stem) for path in leads if path.suffix == ".egg-link"} | known_by(abouts, modules, site)
    copies = dict[str, dict[str, str]]()
    for name, files in packages_in(site, abouts, named | sourced).items():
        if not away & {*files} and sum(map(size_of, files)) < (_OWN if name in named else _ANY):
            copies[name] = _copied(base, files)
    ours, project_names, stood = [str(root.parents[2])], sorted(named), [about.name for about in abouts]
    if earlier is None:
        led = {str(path): digest("lead", text) for path, text in leads.items()}
        return _Note(str(site), _anchor(site), ours, project_names, stood, led, copies, [])
    return earlier._replace(
        ours=sorted({*earlier.ours, *ours}),  # of whom no run is under way, the user's packages are as they stand now
        own=sorted({*earlier.own, *project_names}),
        stood=sorted({*earlier.stood, *stood}),
        kept=earlier.kept | {name: files for name, files in copies.items() if _is_other(files, earlier.kept.get(name))},
    )


def _is_other(files: dict[str, str], earlier: dict[str, str] | None) -> bool:
    """Whether a package is another than was kept: of the same one a pip may have taken away a part by now."""
    return not earlier or any(
        str(path) not in earlier or not is_same(path, Path(earlier[str(path)])) for path in lists_in(files)
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
    return [path for path in paths if readable(path) and path.stat().st_size < _LARGE]


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


# -- back


def _new(note: _Note) -> list[Path]:
    """What leads to a worktree of ours now and did not."""
    texts = {path: text_of(path) for path in leading(Path(note.site))}
    ours = (path for path, text in texts.items() if any(_is_ours(text, folder) for folder in note.ours))
    return sorted(path for path in ours if note.led.get(str(path)) != digest("lead", texts[path]))


def _unknown(note: _Note) -> str:
    """The line for the projects' packages that came or changed since, of which nothing says what they are of."""
    abouts = [path for path in abouts_in(Path(note.site)) if name_of(path) in note.own]
    abouts = [path for path in abouts if path.suffix != ".dist-info" or (path / "RECORD").exists()]
    abouts = [path for path in abouts if not (path / "direct_url.json").exists()]
    names = ", ".join(path.name for path in abouts if path.name not in note.stood or _is_changed(path, note))
    what = (
        "came or changed while a run was under way, and nothing tells of which folder it is: if the run did that, "
        "install again what you had, or uninstall it, and let the command run `pip install -e .` or in another "
        "environment; then run the same command again"
    )
    return names and f"{names} in {note.site} {what}"


def _is_changed(about: Path, note: _Note) -> bool:
    copies = ((Path(path), Path(copy)) for path, copy in note.kept.get(name_of(about), {}).items())
    return any(about in path.parents and path.suffix != ".pyc" and not is_same(path, copy) for path, copy in copies)


def _called(file: Path) -> str:
    """How what a file leads from is called: by its package, or itself."""
    return file.parent.stem if file.suffix == ".json" else file.name


def _settle(path: Path, mine: str = "") -> None:
    """Take away what leads to worktrees of runs that have ended, and put back what it took the place of.

    Where nothing does, nothing is touched: what changed meanwhile is the user's. Whose runs ended by themselves
    says so (`mine`). Others died, and perhaps a pip of theirs, before it led anywhere.
    """
    if not path.exists():
        return
    try:
        whole = _read(path)
        ended = [ours for ours in whole.ours if _is_free(_lock_of(path, ours))]
        others = [ours for ours in whole.ours if ours not in ended]
        if not ended:
            return
        note, died = whole._replace(ours=ended), ended != [mine]
        new = _new(note)
        theirs, links = _theirs(note, new), {canonical(file.stem) for file in new if file.suffix == ".egg-link"}
        taken = {*map(name_of, theirs), *links}
        _installed.update((note.site, name) for name in taken)
        begun = [] if others else [about for about in _begun(note) if died or _tells(new, name_of(about))]
        torn = [] if others else [name for name in _torn(note) if died or _tells(new, name)]
        half = {*map(name_of, begun), *torn}
        if half - taken and died and _is_at_work(note):
            return  # it may be anybody's pip: once it has ended, nothing is half done
        taken |= half
        if names := {*taken, *note.back, *_overwritten(note, theirs), *([] if others else _gone(note))}:
            note = note._replace(back=sorted(names))
            write_atomic(path, json.dumps(note._replace(ours=whole.ours)))
        if new or names:
            _take_away(note, new, {*theirs, *begun})
            _put_back(note, taken)
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
    stood = {name_of(Path(about)) for about in note.stood}
    if lost := sorted({*note.back} & stood - note.kept.keys() - names_in(Path(note.site))):
        raise MachineFailureError(
            f"a run installed its worktree over {', '.join(lost)} in {note.site}, of which no copy was kept (it is "
            f"large, or nothing told it for the project's): install {'it' if len(lost) == 1 else 'them'} again, and "
            "run the same command in another environment"
        )


def _theirs(note: _Note, new: list[Path]) -> list[Path]:
    """What says of a package that it is installed, of those that runs installed."""
    files, abouts = {*map(str, new)}, abouts_in(Path(note.site)) if new else []
    return [about for about in abouts if about / "direct_url.json" in new or shared_by(about, files)]


def _tells(new: list[Path], name: str) -> bool:
    """Whether what leads to worktrees is of a package of that name."""
    return any(f"-{name}-" in f"-{canonical(_called(file))}-" for file in new)


def _begun(note: _Note) -> Iterator[Path]:
    """The projects' packages whose installation was begun and no more, for a list of files comes last."""
    copied = {path for files in note.kept.values() for path in files}
    for about in sorted(Path(note.site).glob("*.dist-info")):
        record = about / "RECORD"
        mine = about.name not in note.stood and name_of(about) in {*note.own, *note.kept}
        if not record.exists() and (mine or str(record) in copied):
            yield about


def _torn(note: _Note) -> Iterator[str]:
    """What a pip that was ended has begun to take away."""
    for name, files in note.kept.items():
        for record in lists_in(files):
            aside = aside_of(record.parent)
            begun = is_same(record, Path(files[str(record)]))
            if (aside.exists() and aside.name not in note.stood) or (begun and not all(map(os.path.lexists, files))):
                yield name


def _is_at_work(note: _Note) -> bool:
    """Whether somebody installs there right now."""
    before = {*Path(note.site).rglob("*")}
    time.sleep(_MOMENT)
    return before != {*Path(note.site).rglob("*")}


def _overwritten(note: _Note, theirs: list[Path]) -> set[str]:
    """The packages of other names that have files of the same paths."""
    files, standing = {str(file) for about in theirs for file in files_of(about)}, names_in(Path(note.site))
    return {name for name, copies in note.kept.items() if name in standing and not files.isdisjoint(copies)}


def _gone(note: _Note) -> set[str]:
    """What is gone of what runs have installed over."""
    standing = names_in(Path(note.site))
    return {name for name in note.kept if name not in standing and (note.site, name) in _installed}


def _take_away(note: _Note, new: list[Path], theirs: set[Path]) -> None:
    site, modules = Path(note.site), {file.stem for file in new if file.suffix == ".py"}
    files = {str(file) for about in theirs for file in files_of(about)}
    for file in map(Path, files.difference(*(shared_by(about, files) for about in {*abouts_in(site)} - theirs))):
        file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds something else
            for folder in itertools.takewhile(lambda above: above != site, file.parents):
                folder.rmdir()
    for _, script in scripts_in(site, {canonical(file.stem) for file in new if file.suffix == ".egg-link"}):
        script.unlink()
    for about in theirs:
        shutil.rmtree(about, ignore_errors=True)
    for file in {*new, *(site.glob("*.pth") if modules else ())}:
        if file.suffix != ".json" and readable(file):
            lines = text_of(file).splitlines(keepends=True) if file.suffix == ".pth" else []
            left = [line for line in lines if not _is_away(line, note, modules)]
            if not left:
                file.unlink()
            elif left != lines:
                file.write_bytes("".join(left).encode(errors="surrogateescape"))


def _is_away(line: str, note: _Note, modules: set[str]) -> bool:
    """Whether a line leads to a worktree, or imports what did."""
    return any(_is_ours(line, ours) for ours in note.ours) or not modules.isdisjoint(re.findall(r"\w+", line))


def _put_back(note: _Note, taken: set[str]) -> None:
    site = Path(note.site)
    for name in note.kept.keys() & {*note.back}:
        files = {Path(path): Path(copy) for path, copy in note.kept[name].items()}
        others = [about for about in abouts_in(site) if name_of(about) == name and not _is_as(about, files)]
        if others or any(path not in files for path in site.glob("*.egg-link") if canonical(path.stem) == name):
            continue  # somebody has installed it meanwhile
        for file, copy in files.items():
            if not is_same(file, copy):
                beside = file.with_name(f".{file.name}.repro")  # whoever is killed leaves no part of a file
                file.parent.mkdir(parents=True, exist_ok=True)
                beside.unlink(missing_ok=True)
                shutil.copy2(copy, beside, follow_symlinks=False)
                beside.replace(file)
            if name in taken and file.name == "RECORD" and aside_of(file.parent).name not in note.stood:
                shutil.rmtree(aside_of(file.parent), ignore_errors=True)  # of a pip that was ended
        _list_again(site, files)


def _list_again(site: Path, files: Iterable[Path]) -> None:
    """What is in no list of its own stands in the one that all such share."""
    lines = {text_of(file).partition("\n")[0] for file in files if file.suffix == ".egg-link"}
    lines |= {f"./{egg.name}" for egg in site.glob("*.egg") if any(egg in (file, *file.parents) for file in files)}
    shared = site / "easy-install.pth"
    there = text_of(shared).splitlines() if shared.exists() else []
    if missing := sorted(lines - {*there}):
        text = "".join(f"{line}\n" for line in [*there, *missing])
        shared.write_bytes(text.encode(errors="surrogateescape"))


def _is_as(about: Path, files: dict[Path, Path]) -> bool:
    """Whether a package is the one of which there are copies: its list is the same, as far as there is one."""
    record = about / "RECORD"
    copy = files.get(record)
    if copy and record.is_file():
        return is_same(record, copy)
    return any(about in (file, *file.parents) for file in files)


def _remove_empty(note: _Note) -> None:
    """Of folders that were not there what runs have left empty."""
    folder, anchor = Path(note.site), Path(note.anchor[0])
    with contextlib.suppress(OSError):  # it holds something
        for above in itertools.takewhile(lambda part: part != anchor, (folder, *folder.parents)):
            above.rmdir()

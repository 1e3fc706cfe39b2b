"""The identity of a program's environment, asked of its own Python before anything is trained.

It runs in the Pythons of foreign programs: the standard library alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import stat
import sys
import sysconfig
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from repro_golden.recording.attach.code.noted import notes

__all__ = [
    "Built",
    "build",
    "counted",
    "ignored",
    "importable",
    "loaded",
    "main_tree",
    "mark",
    "marked",
    "modules",
    "passed_over",
    "places",
    "say",
    "say_build",
    "sources",
    "tracked",
    "tree_of",
]

_CODE = frozenset((".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".pth", ".py", ".pyd", ".pyx", ".so"))
"""Endings of the files of a folder that a package is imported from in place."""
_SETTINGS = frozenset((
    ".cfg", ".conf", ".ini", ".j2", ".jinja", ".jinja2", ".json", ".model", ".template", ".tiktoken", ".tmpl", ".toml",
    ".tpl", ".txt", ".vocab", ".yaml", ".yml",
))  # fmt: skip
"""Endings of what packages ship beside their code and read: settings, templates, vocabularies."""
_WRITTEN = frozenset((
    "cache", "checkpoints", "experiments", "lightning_logs", "log", "logs", "mlruns", "multirun", "out", "output",
    "outputs", "results", "runs", "tmp", "wandb",
))  # fmt: skip
"""Folders that programs write files of such endings into, each run others."""
_READ = _CODE | _SETTINGS
_COUNTED = (*sorted(_READ), ".dist-info", ".egg-info")
"""Endings of what counts in the list of a folder."""
_LISTED = re.compile(
    rf"^([^,\n\"]*(?:{'|'.join(map(re.escape, sorted(_READ)))})),(?:sha256=([^,\n]*))?,?(\d*)", re.MULTILINE
)
"""The files of code and settings in a package's list of its files, with hash and size."""
_LIST = re.compile(r"^([^,\n\"]*\.dist-info/RECORD),", re.MULTILINE)
_MOST = 20_000
"""Files of such a folder that are looked at: of code, and of what lies beside it."""
_LARGE, _BUDGET = 1 << 24, 1 << 28
"""Bytes of a file that is not read for a digest of it, and of the files of each sort in a folder that are."""
_SITES = ("site-packages", "dist-packages")
"""Where packages lie."""
_ENVIRONMENTS = "/repro/environments/"
"""Where environments are that a case or a release asks for."""
_ROOTS = (".", "src", "lib", "python")
"""Folders of a project that its packages lie in."""
_OURS = "repro-harness"
"""Ours, for which the recorder's version stands."""
_CHECKOUT = Path(__file__).resolve().parents[5]
_OURS_IN_PLACE = frozenset((_CHECKOUT, *(_CHECKOUT / part for part in ("core", "golden", "bisect"))))
"""Where it is imported from, if that is a checkout of it."""
_TELLING = ("METADATA", "PKG-INFO", "RECORD", "direct_url.json")
"""The files of a package that tell of it."""


def importable() -> list[str]:
    """``name==version`` of every package that this process could import, by name.

    Of two copies of one package the first on the search path is that which is imported.
    """
    return sorted((f"{name}=={version}" for name, version, _ in _installed().values()), key=str.lower)


_HEADER = re.compile(r"^(name|version):[ \t]*(.*?)[ \t]*$", re.IGNORECASE | re.MULTILINE)


def _installed(marks: dict[str, str] | None = None) -> dict[str, tuple[str, str, metadata.Distribution]]:
    """Name, version and distribution, by normalised name; the marks of the files that tell of them are added.

    `Distribution.metadata` parses a package's whole description each time it is asked: half a second of every command.
    """
    installed: dict[str, tuple[str, str, metadata.Distribution]] = {}
    for dist in metadata.distributions():
        if marks is not None:
            folder = str(getattr(dist, "_path", ""))  # in no public place
            marks |= marked([folder, *(f"{folder}/{name}" for name in _TELLING)])
        text = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or dist.read_text("") or ""
        head = {key.lower(): value for key, value in reversed(_HEADER.findall(text.partition("\n\n")[0]))}
        if name := head.get("name"):
            installed.setdefault(re.sub("[-_.]+", "-", name).lower(), (name, head.get("version", ""), dist))
    return installed


def loaded() -> list[str]:
    """Top-level modules that this process has loaded, by name; those of the standard library left out."""
    names = {name.partition(".")[0] for name in list(sys.modules)}
    return sorted(names - sys.stdlib_module_names - {"__main__", "__mp_main__", "sitecustomize", "usercustomize"})


def main_tree() -> str | None:
    """The git tree of the program's own main file. Asked while it runs: Python forgets that file before it exits."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return tree_of(Path(main)) if main else None


def places(*left_out: str | None) -> dict[str, str]:
    """The folder that each loaded top-level module came from, where no installer put it.

    Args:
        left_out: Where the code under test lies.
    """
    tops = [Path(__file__).parents[4], sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *left_out]
    known = tuple(f"{top}{os.sep}" for top in tops if top)
    return {
        name: folder
        for name, folder in _folders()
        if not any(part in folder for part in _SITES) and not f"{folder}{os.sep}".startswith(known)
    }


def passed_over(tree: str | None) -> dict[str, str]:
    """Modules of the tree under test that the program imported from where an installer put others of their names.

    Returns:
        Each one's place in the tree, and why it was not looked at. Not of what was installed from a folder or a
        repository (`installed` judges that), nor where we made the environment of what is asked for.
    """
    reasons = {}
    for name, folder in _folders() if tree else ():
        if _ENVIRONMENTS in folder or not any(part in folder for part in _SITES) or _noted(folder, name):
            continue
        files = (Path(tree or "", part, *file) for part in _ROOTS for file in ((name, "__init__.py"), (f"{name}.py",)))
        if file := next((file for file in files if file.is_file()), None):
            place = file.parent if file.name == "__init__.py" else file
            reasons[str(place.relative_to(tree or ""))] = f"the program imported {name} from {folder}"
    return reasons


def _noted(site: str, name: str) -> bool:
    """Whether an installer noted where the package of a module is from (PEP 610)."""
    for note in map(Path, notes(site)):
        with contextlib.suppress(OSError):
            if name in _tops((note.parent / "RECORD").read_text(encoding="utf-8", errors="replace")):
                return True
    return False


def _folders() -> Iterator[tuple[str, str]]:
    """Each loaded top-level module with the folder that it came from, where it has one."""
    for name in loaded():
        module = sys.modules.get(name)
        files = [*(getattr(module, "__path__", None) or ()), getattr(module, "__file__", None) or ""]
        if files[0]:
            yield name, str(Path(files[0]).absolute().parent)


def tree_of(path: Path) -> str | None:
    """The git tree that a path is in; None where it is in none."""
    path = path.absolute()
    return next((str(top) for top in (path, *path.parents) if (top / ".git").exists()), None)


def modules() -> dict[str, str]:
    """Of each top-level module that a package brought, the package's normalised name."""
    packages: dict[str, str] = {}
    for key, (_, _, dist) in _installed().items():
        for name in (dist.read_text("top_level.txt") or "").split() or _tops(dist.read_text("RECORD") or ""):
            packages.setdefault(name, key)
    return packages


def _tops(record: str) -> set[str]:
    """The modules among the files of a package, by its list of them."""
    firsts = {line.partition(",")[0].partition("/")[0] for line in record.splitlines()}
    return {name.partition(".")[0] for name in firsts if not name.startswith(".") and "-info" not in name}


class Built(NamedTuple):
    """What stands for an interpreter and all that it could import.

    Attributes:
        digest: 32 hex digits.
        marks: The `mark` of each file that was read for it and of each folder that was listed, taken before that.
    """

    digest: str
    marks: dict[str, str]


def mark(place: str) -> str:
    """What moves when a file is written or exchanged, or when a folder gets or loses code, settings or folders.

    Caches of code are none. '' of what is not there.
    """
    try:
        status = os.stat(place)  # noqa: PTH116 - tens of thousands of files
    except (OSError, ValueError):
        return ""
    if stat.S_ISDIR(status.st_mode):
        return _mark_of_list(*next(os.walk(place), ("", [], []))[1:])
    return _mark_of(status)


def marked(places: Iterable[str]) -> dict[str, str]:
    """The marks of places as they are now."""
    return {place: mark(place) for place in places}


def _mark_of(status: os.stat_result) -> str:
    return f"{status.st_ino} {status.st_size} {status.st_ctime_ns}"


def _mark_of_list(folders: Iterable[str], names: Iterable[str]) -> str:
    listed = [name for name in names if name.endswith(_COUNTED)] + [name for name in folders if name != "__pycache__"]
    return hashlib.sha256("/".join(sorted(listed)).encode(errors="surrogateescape")).hexdigest()[:16]


@functools.lru_cache(maxsize=8)
def build(root: Path) -> Built:
    """What stands for this interpreter and all that it could import.

    Of each package its version, the list of its files with their hashes, and where it came from: two builds of one
    version differ. Of files of it that are others than its list says, what they hold. Of a package that is imported
    from a folder in place, what `sources` finds there; so of what lies in ``site-packages`` where no package brought
    it, and of folders that a ``.pth`` file names.

    Args:
        root: The repository under test, whose own code in place is not looked at: commits decide it.
    """
    marks = marked([sys.executable, f"{sys.prefix}/pyvenv.cfg", *map(os.path.abspath, sys.path)])
    facts = [sys.executable, sys.version, sys.prefix, sys.base_prefix]
    folders, root = set[Path | None](_linked(marks)), root.resolve()
    brought = {site: set[str]() for site in _sites()}
    for key, (_, version, dist) in sorted(_installed(marks).items()):
        if key == _OURS:
            continue
        link, record = dist.read_text("direct_url.json") or "", dist.read_text("RECORD") or ""
        site = str(dist.locate_file(""))
        brought.setdefault(site, set()).update(line.partition(",")[0].partition("/")[0] for line in record.splitlines())
        facts += [key, version, record, link, *_patched(site, record, marks)]
        folders |= {_in_place(dist, link)}
    for site, names in sorted(brought.items()):
        facts += _beside(Path(site), names, marks)
    folders -= {None, *_OURS_IN_PLACE}
    for folder in sorted(folder for folder in folders if folder and root not in (folder, *folder.parents)):
        facts += sources(folder, root, marks)
    return Built(hashlib.sha256("\0".join(facts).encode(errors="surrogateescape")).hexdigest()[:32], marks)


def _patched(site: str, record: str, marks: dict[str, str]) -> Iterator[str]:
    """Path and content of each file of code or settings of a package that is not the one in the list of its files.

    Looked at are those that came after the list. A copy may keep an older time, but not that of its own change.
    """
    listing = _LIST.search(record)
    if listing is None:
        return
    listed = os.stat(f"{site}/{listing[1]}")  # noqa: PTH116 - tens of thousands of files
    for path, expected, size in _LISTED.findall(record):
        place = f"{site}/{path}"
        try:
            status = os.stat(place)  # noqa: PTH116
        except OSError:
            marks.setdefault(place, "")
            yield f"{path} -"
            continue
        marks.setdefault(place, _mark_of(status))
        written = status.st_mtime_ns > listed.st_mtime_ns
        # a change of a file's links, which installers share, is one of it too: no large one is read for that
        if written or (status.st_ctime_ns > listed.st_ctime_ns and not _is_alike(status, size)):
            content = _content(Path(place), status)
            if content != expected:
                yield f"{path} {content}"


def _is_alike(status: os.stat_result, size: str) -> bool:
    return status.st_size > _LARGE and str(status.st_size) == size


def _content(path: Path, status: os.stat_result, most: int = _LARGE) -> str:
    """The SHA-256 of a file as a list of files writes it; of a larger one, its size, its time and where it lies."""
    if status.st_size > most:
        return f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"
    return urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")


def _beside(site: Path, brought: set[str], marks: dict[str, str]) -> Iterator[str]:
    """What lies in a folder of packages, or is a file of it, and none of them brought."""
    if site.name not in _SITES:
        return
    marks.setdefault(str(site), mark(str(site)))
    for path in sorted(site.iterdir()):
        if path.name in brought or path.name == "__pycache__" or path.name.endswith((".dist-info", ".egg-info")):
            continue
        if path.is_dir():
            yield from (f"{path.name}/{fact}" for fact in sources(path, marks=marks))
        elif path.suffix in _READ:
            status = path.stat()
            marks.setdefault(str(path), _mark_of(status))
            yield f"{path.name} {_content(path, status)}"


def _sites() -> list[str]:
    """The folders of packages on the search path."""
    return [site for site in sys.path if Path(site).name in _SITES and os.path.isdir(site)]  # noqa: PTH112


def _linked(marks: dict[str, str]) -> Iterator[Path]:
    """The folders that a ``.pth`` file puts on the search path."""
    for site in _sites():
        for path in sorted(Path(site).glob("*.pth")):  # where Python looks for them, and no checkpoints lie
            marks.setdefault(str(path), mark(str(path)))
            with contextlib.suppress(OSError, ValueError):
                for line in path.read_text(encoding="utf-8").splitlines():
                    folder = Path(site, line.strip())
                    code = line.startswith(("#", "import ", "import\t"))
                    if line.strip() and not code and folder.name not in _SITES:
                        marks.setdefault(str(folder), mark(str(folder)))
                        if folder.is_dir():
                            yield folder.resolve()


def _in_place(dist: metadata.Distribution, link: str) -> Path | None:
    """The folder that a package is imported from in place; None for one that was copied."""
    try:
        direct_url = json.loads(link) if link else {}
        if direct_url.get("dir_info", {}).get("editable"):
            return Path(unquote(urlsplit(direct_url["url"]).path)).resolve()
    except (ValueError, KeyError, AttributeError):
        return None
    beside = Path(str(dist.locate_file("")))  # `setup.py develop` leaves its notes beside the code
    return None if link or beside.name in _SITES else beside.resolve()


def sources(folder: Path, without: Path | None = None, marks: dict[str, str] | None = None) -> Iterator[str]:
    """Path and content of each file in a folder that `counted` names but for those in one of its folders.

    So many of code, and so many others: data that git tracks takes nothing from what code has.

    Args:
        folder: The folder.
        without: The one in it.
        marks: To which the marks of what is looked at are added.
    """
    marks = {} if marks is None else marks
    left, budget = {True: _MOST, False: _MOST}, {True: _BUDGET, False: _BUDGET}
    for path in counted(folder, without, marks):
        if not any(left.values()):
            return
        code = path.suffix in _CODE
        if left[code]:
            left[code] -= 1
            known = marks.setdefault(str(path), "")
            with contextlib.suppress(OSError):  # a link to nowhere
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    marks[str(path)] = known or _mark_of(status)
                    yield f"{path.relative_to(folder)} {_content(path, status, min(budget[code], _LARGE))}"
                    budget[code] -= min(budget[code], status.st_size)


def counted(
    folder: Path | str, without: Path | None = None, marks: dict[str, str] | None = None, *, deep: bool = True
) -> Iterator[Path]:
    """The files in a folder that a library may consist of: its code, and what it may read beside that.

    That is what git tracks there; where it tracks nothing, or is not here, what has an ending of settings. What
    programs write into the folder is none of it.

    Args:
        folder: The folder.
        without: One in it that is left out.
        marks: To which the marks of the folders are added.
        deep: Whether files of folders in it are some too.
    """
    marks = {} if marks is None else marks
    known = tracked(folder, marks)
    for place, below, names in os.walk(folder):
        marks.setdefault(place, _mark_of_list(below, names))
        below[:] = sorted(
            name for name in below
            if deep and not name.startswith(".") and name != "__pycache__" and Path(place, name) != without
        )  # fmt: skip
        inside = Path(place).relative_to(folder)
        prefix = "" if inside == Path() else f"{inside}/"
        written = not _WRITTEN.isdisjoint(inside.parts)
        for name in sorted(names):
            ending = os.path.splitext(name)[1]  # noqa: PTH122 - tens of thousands of files
            beside = f"{prefix}{name}" in known if known else ending in _SETTINGS and not written
            if ending in _CODE or beside:
                yield Path(place, name)


_REPOSITORY = ("GIT_COMMON_DIR", "GIT_DIR", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX", "GIT_WORK_TREE")
"""Variables by which git takes another repository than that of the folder."""


def tracked(folder: Path | str, marks: dict[str, str] | None = None) -> frozenset[str]:
    """The files in a folder that git tracks, as seen from there, also in submodules; none where it does not say."""
    marks, top = {} if marks is None else marks, tree_of(Path(folder))
    if top is None:
        return frozenset()
    index = _git_folder(Path(top)) / "index"  # another list of files is written anew
    marks.setdefault(str(index), mark(str(index)))
    return _asked(folder, ["ls-files", "-z", "--recurse-submodules"])


def ignored(folder: str, paths: Iterable[str]) -> frozenset[str]:
    """Those of some paths in the repository of a folder that git ignores; none where it does not say."""
    return _asked(folder, ["check-ignore", "-z", "--stdin"], "\0".join(paths))


def _asked(folder: Path | str, command: list[str], given: str = "") -> frozenset[str]:
    """What git lists in a folder; nothing where it is not here, or refuses."""
    import subprocess

    variables = {name: value for name, value in os.environ.items() if name not in _REPOSITORY}
    asked = ["git", "-c", "core.fsmonitor=false", *command]
    try:
        done = subprocess.run(
            asked, cwd=folder, env=variables, input=os.fsencode(given), capture_output=True, check=False
        )
    except OSError:
        return frozenset()
    return frozenset(filter(None, os.fsdecode(done.stdout).split("\0"))) if done.returncode == 0 else frozenset()


def _git_folder(top: Path) -> Path:
    """Where git keeps the index of a working tree."""
    git = top / ".git"
    with contextlib.suppress(OSError, ValueError):
        if git.is_file():
            return top / git.read_text(encoding="utf-8").partition("gitdir:")[2].strip()
    return git


def say(threads: int, ranks: int) -> None:
    """Print the identity that a process here would have, and what it could import, as one line of JSON."""
    from repro_golden.case.identity import collect

    identity = collect(os.environ, threads=threads, ranks=ranks).to_mapping()
    print(json.dumps({"identity": identity, "packages": importable(), "modules": modules()}))


def say_build() -> None:
    """Print what stands for this interpreter and all that it could import, as one line of JSON."""
    print(json.dumps(build(Path.cwd())))

"""What a folder of packages holds: which there are, by which files, and which of them may be a worktree's project."""

from __future__ import annotations

import csv
import filecmp
import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

__all__ = [
    "abouts_in",
    "aside_of",
    "canonical",
    "files_of",
    "is_same",
    "known_by",
    "lists_in",
    "name_of",
    "names_in",
    "packages_in",
    "projects",
    "readable",
    "scripts_in",
    "shared_by",
    "size_of",
    "text_of",
]

_ABOUTS = ("*.dist-info", "*.egg-info", "*.egg")
"""What says of a package that it is installed."""
_SCRIPT = re.compile(rb"EASY-INSTALL-[A-Z-]+: '([\w.-]+?)(?:==|')")
"""How a script of `setup.py develop` and `setup.py install` names its package."""
_SMALL = 1 << 16
"""Bytes of such a script."""
_TABLE = re.compile(
    r"^\[ *(?:project|tool\.poetry|metadata) *\].*\n(?:(?!\[).*\n)*?[ \t]*name[ \t]*[=:][ \t]*[\"']?([\w.-]+)",
    re.MULTILINE,
)
_ARGUMENT = re.compile(r"^[^#\n]*?\bname\s*=\s*[\"']([\w.-]+)[\"']", re.MULTILINE)
_NAMES = {"pyproject.toml": _TABLE, "setup.cfg": _TABLE, "setup.py": _ARGUMENT}
"""A project's own name in its files; other tables and arguments name indices, contracts and what it depends on."""
_COMMON = {"__pycache__", "benchmarks", "docs", "examples", "scripts", "setup", "test", "tests", "tools"}
"""Names by which no package is known for a project's."""
_TOP = re.compile(r"^([\w-]+)(?:/|\.py,)", re.MULTILINE)
"""The module or folder of a line of a package's list of files."""


def abouts_in(site: Path) -> list[Path]:
    """What says of each package that it is installed."""
    return sorted(path for pattern in _ABOUTS for path in site.glob(pattern))


def text_of(path: Path) -> str:
    """What a file holds, whatever its bytes."""
    return path.read_bytes().decode(errors="surrogateescape")


def readable(path: Path) -> bool:
    """Whether it is a file that can be read."""
    return path.is_file() and os.access(path, os.R_OK)


def size_of(path: Path) -> int:
    """Bytes of a file or a link."""
    return path.lstat().st_size


def packages_in(site: Path, abouts: Iterable[Path], names: set[str]) -> dict[str, list[Path]]:
    """The files of packages that can be kept, by their names."""
    by_name: dict[str, list[Path]] = {}
    for path in site.glob("*.egg-link"):
        by_name.setdefault(canonical(path.stem), []).append(path)
    for about in abouts:
        if (name := name_of(about)) in names:
            by_name.setdefault(name, []).extend(files_of(about))
    for name, script in scripts_in(site, by_name):
        by_name[name].append(script)
    readables = {
        name: [path for path in dict.fromkeys(files) if path.is_symlink() or readable(path)]
        for name, files in by_name.items()
    }
    return {name: files for name, files in readables.items() if files}


def files_of(about: Path) -> list[Path]:
    """The files of the package that `about` is of, as far as they lie in the environment that holds it."""
    site, tops, paths = about.parent, about / "top_level.txt", [Path(path) for path in _listed(about)]
    for top in text_of(tops).split() if about.suffix == ".egg-info" and tops.is_file() and not paths else ():
        paths += [path for path in (site / f"{top}.py", *sorted((site / top).rglob("*"))) if path.is_file()]
    paths += [path for path in (about, *sorted(about.rglob("*"))) if path.is_file()]
    environment, folders = _environment(site), {path.parent for path in paths}
    real, below = environment.resolve(), (folder for folder in folders if folder.is_relative_to(environment))
    inside = {folder for folder in below if folder.resolve().is_relative_to(real)}  # a link may lead out
    return list(dict.fromkeys(path for path in paths if path.parent in inside))


def shared_by(about: Path, files: set[str]) -> set[str]:
    """Those of some paths that the package has that `about` is of; where it has a list, that says it alone."""
    return files.intersection(_listed(about) or map(str, files_of(about)))


def _listed(about: Path) -> list[str]:
    """The paths in a package's list of files; none where there is no list."""
    old = about / "installed-files.txt"
    record, above = (old, about) if old.is_file() else (about / "RECORD", about.parent)
    rows = csv.reader(record.read_text(encoding="utf-8", errors="replace").splitlines()) if record.is_file() else ()
    return [os.path.normpath(os.path.join(above, row[0])) for row in rows if row and row[0]]  # noqa: PTH118


def scripts_in(site: Path, names: Collection[str]) -> Iterator[tuple[str, Path]]:
    """The scripts of packages of such names that setuptools made without a list of files, each with the name."""
    for path in (_environment(site) / "bin").glob("*") if names else ():
        if readable(path) and size_of(path) < _SMALL:
            with path.open("rb") as file:
                text = file.read() if file.read(2) == b"#!" else b""
            mentioned = {canonical(name.decode()) for name in _SCRIPT.findall(text)}
            yield from ((name, path) for name in mentioned.intersection(names))


def _environment(site: Path) -> Path:
    return site.parents[min(2, len(site.parents) - 1)]


def name_of(about: Path) -> str:
    """The name of the package that `about` is of."""
    return canonical(about.name.partition("-")[0])


def canonical(name: str) -> str:
    """A package's name as all spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def projects(root: Path) -> tuple[set[str], set[str]]:
    """What a worktree's projects may be called as packages, and the modules beside their files: a name may be made."""
    names, modules = set[str](), set[str]()
    for folder, below, files in os.walk(root):
        deep = len(Path(folder).relative_to(root).parts)
        below[:] = [] if deep > 2 else [name for name in below if not name.startswith(".")]
        if project_files := _NAMES.keys() & {*files}:
            paths = (path for file in project_files if readable(path := Path(folder, file)))
            names |= {canonical(name) for path in paths for name in _NAMES[path.name].findall(text_of(path))}
            places = (path for part in (".", "src", "lib", "python") for path in Path(folder, part).glob("*"))
            modules |= {path.stem for path in places if path.suffix == ".py" or path.is_dir()}
    return names, modules - _COMMON


def known_by(abouts: Iterable[Path], modules: set[str], site: Path) -> set[str]:
    """The packages of a folder that have modules of such names."""
    if modules.isdisjoint(path.stem for path in site.glob("*")):
        return set()
    records = (about / "RECORD" for about in abouts)
    tops = ((path.parent, set(_TOP.findall(text_of(path)))) for path in records if readable(path))
    return {name_of(about) for about, top_names in tops if not modules.isdisjoint(top_names)}


def names_in(site: Path) -> set[str]:
    """The names of what is installed there."""
    return {*map(name_of, abouts_in(site)), *(canonical(path.stem) for path in site.glob("*.egg-link"))}


def lists_in(files: Iterable[str]) -> list[Path]:
    """Those of a package's files that list them."""
    return [Path(path) for path in files if path.endswith(".dist-info/RECORD")]


def aside_of(about: Path) -> Path:
    """Where pip puts it as long as it may have to come back."""
    return about.with_name(f"~{about.name[1:]}")


def is_same(file: Path, copy: Path) -> bool:
    """Whether two files or links hold the same."""
    if file.is_symlink() or copy.is_symlink():
        return file.is_symlink() and copy.is_symlink() and file.readlink() == copy.readlink()
    return file.is_file() and filecmp.cmp(file, copy, shallow=False)

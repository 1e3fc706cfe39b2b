"""What libraries keep between runs under names that do not hold the code of a commit: each run has its own.

Hugging Face's datasets find what a function made by its name where it is imported, and transformers find the code of
models by the size and time of a file: a commit would train on what another one made, and leave that to the user.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["implicit_files", "own_caches"]

_MADE = ("generator", "spark", "sql")
"""Kinds of datasets that a program makes: what they are kept by says nothing of what it makes of them."""
_LEFT = ("cache-*.arrow", "tmp*", "*.lock", "*.incomplete")
"""Files that transformations leave beside the data, or that are not finished."""
_BY_CONTENT = ("evaluate_modules", "datasets_modules")
"""Modules that are kept under a digest of their code. Without the hub there is no other place to find them."""
_SMALL = 1 << 20
"""Bytes of a JSON file that is copied: notes of a download are written anew in place."""


def own_caches(variables: Mapping[str, str], folder: Path, root: Path) -> dict[str, str]:
    """The variables that lead Hugging Face's libraries to caches of one run; none where one is named.

    What was downloaded or prepared from files is there, as links in folders of the same times: of several revisions of
    a dataset its newest folder is taken.

    Args:
        variables: The program's.
        folder: Where the run's caches lie; nothing is made in it where the user keeps none.
        root: The user's checkout, where a relative HF_HOME leads.
    """
    caches, home = dict[str, str](), _home(variables, root)
    if "HF_MODULES_CACHE" not in variables:
        caches["HF_MODULES_CACHE"] = str(folder / "modules")
        for name in _BY_CONTENT:
            with contextlib.suppress(OSError):  # there is none, or another process writes it
                shutil.copytree(home / "modules" / name, folder / "modules" / name, ignore=_ignored)
    if "HF_DATASETS_CACHE" not in variables:
        caches["HF_DATASETS_CACHE"] = str(folder / "datasets")
        _link(home / "datasets", folder / "datasets")
    return caches


def implicit_files(variables: Mapping[str, str], root: Path) -> list[str]:
    """The files of settings that launchers read although no command names them: accelerate's and DeepSpeed's."""
    folder = _home(variables, root) / "accelerate"
    named = [str(folder / f"default_config.{ending}") for ending in ("yaml", "yml", "json")]
    return [*named, str(_expanded("~/.deepspeed_env", variables, root))]


def _home(variables: Mapping[str, str], root: Path) -> Path:
    """Where Hugging Face's libraries keep what is theirs."""
    above = variables.get("XDG_CACHE_HOME", "~/.cache")
    return _expanded(variables.get("HF_HOME", f"{above}/huggingface"), variables, root)


def _expanded(path: str, variables: Mapping[str, str], root: Path) -> Path:
    """A path as the program means it."""
    if path.startswith("~/") and variables.get("HOME"):
        path = variables["HOME"] + path[1:]
    return Path(root, os.path.expanduser(path))  # noqa: PTH111 - no error


def _ignored(_: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name == "__pycache__" or name.endswith(".lock")]


def _link(cache: Path, target: Path) -> None:
    """The folders of a cache anew, with links to its files: what is written beside one stays in the run's own."""
    made, met = dict[Path, os.stat_result](), dict[tuple[int, int], Path]()
    for place, below, names in os.walk(cache, followlinks=True):
        here, status = Path(place), os.stat(place)  # noqa: PTH116 - tens of thousands of files
        folder, number = target / here.relative_to(cache), (status.st_dev, status.st_ino)
        if number in met:  # there are several links to it, of which one may lead back
            folder.symlink_to(met[number])
            below.clear()
            continue
        met[number] = folder
        folder.mkdir(parents=True, exist_ok=True)
        made[folder] = status
        whole = here == cache / "downloads" / "extracted"  # each archive is one, which nobody writes into
        for name in [*names, *(below if whole else ())]:
            if not any(fnmatch.fnmatchcase(name, left) for left in _LEFT):
                with contextlib.suppress(OSError):  # it is there, or gone
                    _put(here / name, folder / name)
        made_here = _MADE if here == cache else ()
        below[:] = [n for n in below if not (whole or n.endswith(".incomplete") or n in made_here)]
    for folder, status in reversed(made.items()):
        os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns))


def _put(path: Path, target: Path) -> None:
    if path.suffix == ".json" and path.stat().st_size < _SMALL:
        shutil.copy2(path, target)
    else:
        target.symlink_to(path)

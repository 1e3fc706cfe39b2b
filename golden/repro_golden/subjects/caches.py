"""What libraries keep between runs under names that do not hold the code of a commit: each run has its own.

Hugging Face's datasets find what a function made by its name where it is imported, and transformers find the code of
models by the size and time of a file: a commit would train on what another one made, and leave that to the user.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["implicit_files", "own_caches"]

_MADE = ("generator", "spark", "sql")
"""Kinds of datasets that a program makes: what they are kept by says nothing of what it makes of them."""
_LEFT = ("cache-*.arrow", "tmp*", "*.lock", "*.incomplete")
"""Files that transformations leave beside the data, or that are not finished."""


def own_caches(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The variables that lead Hugging Face's libraries to caches of one run; none where one is named.

    What was downloaded or prepared from files is there, as links.

    Args:
        variables: The program's.
        folder: Where the run's caches lie; nothing is made in it where the user keeps none.
    """
    own = dict[str, str]()
    if "HF_MODULES_CACHE" not in variables:
        own["HF_MODULES_CACHE"] = str(folder / "modules")
    if "HF_DATASETS_CACHE" not in variables:
        own["HF_DATASETS_CACHE"] = str(folder / "datasets")
        _link(_home(variables) / "datasets", folder / "datasets")
    return own


def implicit_files(variables: Mapping[str, str]) -> list[str]:
    """The files of settings that launchers read although no command names them: accelerate's and DeepSpeed's."""
    folder = _home(variables) / "accelerate"
    named = [str(folder / f"default_config.{ending}") for ending in ("yaml", "yml", "json")]
    return [*named, os.path.expanduser("~/.deepspeed_env")]  # noqa: PTH111 - as DeepSpeed finds it


def _home(variables: Mapping[str, str]) -> Path:
    """Where Hugging Face's libraries keep what is theirs."""
    above = variables.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.path.expanduser(variables.get("HF_HOME", f"{above}/huggingface")))  # noqa: PTH111 - no error


def _link(cache: Path, own: Path) -> None:
    """The folders of a cache anew, with links to its files: what is written beside one stays in the run's own."""
    for place, below, names in os.walk(cache):
        if Path(place) == cache:
            below[:] = [name for name in below if name not in _MADE]
        kept = [name for name in names if not any(fnmatch.fnmatchcase(name, left) for left in _LEFT)]
        if kept:
            folder = own / Path(place).relative_to(cache)
            folder.mkdir(parents=True, exist_ok=True)
            for name in kept:
                with contextlib.suppress(FileExistsError):
                    (folder / name).symlink_to(Path(place, name))

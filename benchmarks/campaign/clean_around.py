"""Surroundings of a run that must not matter: drawn here, and entered by a process before it trains."""

from __future__ import annotations

import contextlib
import locale
import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

__all__ = ["drawn", "enter", "locales", "made", "start_variables", "variables"]

LANGUAGES = ("C", "C.UTF-8", "POSIX", "Nowhere.UTF-8", "en_US.UTF-8", "de_DE.UTF-8", "tr_TR.UTF-8", "ja_JP.UTF-8")
"""One that no system has, and behind it those that `locales` makes: decimal commas, a dotless i."""
_FOLDERS = (
    "w",
    "two words and  more",
    "Übung_работа_訓練_🙂",
    "a'quote\"and$dollar",
    "x" * 180,
    "deep/" * 20 + "end",
    "-dash",
    "percent%20%s{brace}",
)
_ZONES = ("UTC", "Asia/Kolkata", "America/St_Johns", "Pacific/Kiritimati", "Nowhere/At_All", "XYZ-13:37")
NOBODY = 65534

Around = dict[str, Any]


def locales(folder: Path) -> dict[str, str]:
    """Make the languages of `LANGUAGES` in a new folder, as far as this machine can, and the variable that names it."""
    folder.mkdir()
    for name in LANGUAGES[4:]:
        language, _, encoding = name.partition(".")
        with contextlib.suppress(OSError):
            command = ["localedef", "-i", language, "-f", encoding, str(folder / name)]
            subprocess.run(command, check=False, capture_output=True)
    return {"LOCPATH": str(folder)}


def start_variables(draw: random.Random) -> dict[str, str]:
    """What is read when an interpreter starts: hashes, the allocator, the language."""
    chosen = {"PYTHONHASHSEED": str(draw.choice([0, 1, draw.randrange(1 << 32)])), "LC_ALL": draw.choice(LANGUAGES)}
    memory = [
        {},
        {"MALLOC_PERTURB_": str(draw.randrange(1, 256))},
        {"MALLOC_ARENA_MAX": "1", "MALLOC_TOP_PAD_": str(draw.randrange(1 << 20))},
        {"MALLOC_MMAP_THRESHOLD_": str(draw.choice([4096, 1 << 16, 1 << 24]))},
        {"PYTHONMALLOC": "malloc"},
    ]
    chosen |= draw.choice(memory)
    if draw.random() < 0.3:
        chosen["PYTHONDONTWRITEBYTECODE"] = "1"
    return chosen | {f"FILLER_{k}": "x" * draw.randrange(2000) for k in range(draw.randrange(8))}  # moves the stack


def drawn(draw: random.Random, *, root: bool) -> Around:
    """The rest.

    Args:
        draw: Where it is drawn from.
        root: Whether this process may become another user.
    """
    return {
        "folder": draw.choice(_FOLDERS),
        "home": draw.choice(["own", "missing", "same"]),
        "zone": draw.choice(_ZONES),
        "nice": draw.choice([0, 0, 3, 11, 19]),
        "ballast": draw.choice([0, 0, 0, 50, 200]),
        "fragments": draw.choice([0, 500, 20_000]),
        "user": NOBODY if root and draw.random() < 0.3 else None,
        "localised": draw.random() < 0.5,
        "seed": draw.randrange(1 << 30),
    }


def variables(around: Around, place: Path) -> dict[str, str]:
    """Those of the environment."""
    home = {"own": place / "home", "missing": place / "not there", "same": Path.home()}[around["home"]]
    return {"HOME": str(home), "TMPDIR": str(place / "tmp dir"), "TZ": around["zone"], "USER": "u" + around["home"]}


def made(around: Around, place: Path) -> Path:
    """The working directory, made, with what the variables name."""
    for folder in (place / "home", place / "tmp dir", place / around["folder"]):
        folder.mkdir(parents=True, exist_ok=True)
    return place / around["folder"]


def enter(around: Around, place: Path) -> list[Any]:
    """Be there, in a process that has imported torch; what is returned must be held until the run's end."""
    import torch

    os.environ.update(variables(around, place))
    time.tzset()
    if around["localised"]:
        with contextlib.suppress(locale.Error):  # one that this machine lacks
            locale.setlocale(locale.LC_ALL, "")
    os.nice(around["nice"])
    draw, held = random.Random(around["seed"]), list[Any]()
    pieces = [bytearray(draw.randrange(1, 4000)) for _ in range(around["fragments"])]
    tensors = [torch.empty(draw.randrange(1, 3000)) for _ in range(around["fragments"] // 10)]
    held += pieces[::2], tensors[1::3]  # the rest leaves holes
    del pieces, tensors
    if around["ballast"]:
        held.append(bytearray(os.urandom(1024) * 1024 * around["ballast"]))
    work = made(around, place)
    if around["user"] is not None:
        for folder, folders, files in os.walk(place):
            for name in (".", *folders, *files):
                os.chown(Path(folder, name), around["user"], around["user"])
        os.setgid(around["user"])
        os.setuid(around["user"])
    os.chdir(work)
    return held

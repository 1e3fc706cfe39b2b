"""What a case's programs install into an interpreter that is not the worktree's own: it is taken back, or refused.

What one commit installs there every other probe runs, at once or later, and the user after them: an editable
installation of a worktree that is gone is one of nothing.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.recording.attach.code.identify import marked
from repro_golden.replay.children import CancelledError, ChildFailure
from repro_golden.repository.checkout import Place, find_checkout
from repro_golden.repository.leads import leading, noted, notes_of
from repro_golden.repository.packages import abouts_in, name_of, projects
from repro_golden.subjects.environments.cache import spoil
from repro_golden.subjects.environments.inside import SITES
from repro_golden.subjects.environments.releases import asked

__all__ = ["installed_by", "left_alone", "taken_back"]

_INSTALLED = "installed"
"""A file beside a worktree, with what its runs installed elsewhere."""
_OF_USERS = ("HOME", "PYTHONNOUSERSITE", "PYTHONUSERBASE")
"""Variables that decide where a user's own packages are."""
_CUT = (CancelledError, KeyboardInterrupt)
"""What is raised where a run was ended by us."""
_INSTALLERS = frozenset(("pip", "setuptools", "uv", "wheel"))
"""Packages that install others, which no numbers rest on."""
_known: dict[tuple[str | None, ...], list[Path]] = {}
_first: dict[tuple[Path, str], str] = {}
"""The version that each package had when this process first met it: a run that was ended early may have changed it."""


@contextlib.contextmanager
def taken_back(pythons: Sequence[str], place: Place, variables: Mapping[str, str]) -> Iterator[None]:
    """Run what is started in a worktree in the block. What it installs of itself into interpreters is taken back.

    While others run there, the last of them takes it back. Other packages stay as it leaves them. One that was there
    and is another or gone then ends the command: all that runs later would run with it, whichever commit that is of.

    Args:
        pythons: The interpreters, which may be the worktree's own.
        place: The worktree; in the user's checkout nothing is taken back.
        variables: Its environment.

    Raises:
        MachineFailureError: it cannot be taken back, or not be noted before what was there; or the run
            changed another package.
    """
    others = [python for python in pythons if not Path(python).is_relative_to(place.root)] if place.home else []
    sites = dict.fromkeys(site for python in others for site in _sites(python, variables, place.root))
    writable = [site for site in sites if _can_be_written(site)]  # in others no run can install
    seen = list[list[str]]()
    shared = [site for site in writable if not _is_synced(site, variables)]
    before = {about: _first.setdefault(about, version) for about, version in _versions(shared).items()}
    before |= {about: version for about, version in _first.items() if about[0] in shared}
    try:
        with contextlib.ExitStack() as exits:
            notes = _notes(place, exits) if writable else Path()
            seen += [exits.enter_context(noted(notes, site, place.root, _CUT)) for site in writable]
            yield
        _refuse_changed(before, place)
    except ChildFailure:
        _refuse_changed(before, place)
        raise
    finally:
        if names := list(dict.fromkeys(name for names in seen for name in names)):
            place.beside.mkdir(exist_ok=True)
            (place.beside / _INSTALLED).write_text(", ".join(names), encoding="utf-8")


def _is_synced(site: Path, variables: Mapping[str, str]) -> bool:
    """Whether each run has uv bring the environment to its own commit's lock file first, as `uv run` does."""
    folder = variables.get("UV_PROJECT_ENVIRONMENT")
    return (
        bool(folder) and "UV_NO_SYNC" not in variables and site.resolve().is_relative_to(Path(folder or "").resolve())
    )


def _versions(sites: Iterable[Path]) -> dict[tuple[Path, str], str]:
    """The version of each package, by its folder and name; what an interrupted install left is none."""
    abouts = [(site, about) for site in sites for about in abouts_in(site) if not about.name.startswith("~")]
    versions = {(site, name_of(about)): [*about.stem.split("-"), ""][1] for site, about in abouts}
    return {key: version for key, version in versions.items() if key[1] not in _INSTALLERS}


def _refuse_changed(before: Mapping[tuple[Path, str], str], place: Place) -> None:
    """Refuse that packages are others than before a run; one that is new stands in nobody's way."""
    now = _versions(dict.fromkeys(site for site, _ in before))
    moved = [(*key, version, now.get(key)) for key, version in before.items() if now.get(key) != version]
    own = projects(place.root)[0] if moved else ()  # which is put back, by the last run of several
    lines = [
        (site, f"{name} {old} {f'became {new}' if new else 'went'}")
        for site, name, old, new in moved
        if name not in own
    ]
    if not lines:
        return
    fix = "install again what was yours, and let"
    with contextlib.suppress(ReproError):
        spoiled = [spoil(find_checkout(place.root).state, site) for site, _ in lines]
        if all(spoiled):
            fix = "let"  # an environment of ours is built anew
    for site, name, *_ in moved:
        _first.pop((site, name), None)
    raise MachineFailureError(
        f"{', '.join(line for _, line in lines)} in {lines[0][0]} while {(place.commit or 'a worktree')[:10]} ran: "
        f"what the command of one commit installs there, all others run with: {fix} setup and lock of a case build "
        "what each commit asks for, or the command install into an environment that it makes in its worktree"
    )


def installed_by(place: Place) -> str:
    """Names of what runs in a worktree installed where others run too; '' where they did not."""
    path = place.beside / _INSTALLED
    return path.read_text(encoding="utf-8") if place.home and path.exists() else ""


@contextlib.contextmanager
def left_alone(python: str, setup: str, root: Path, variables: Mapping[str, str]) -> Iterator[None]:
    """Run a setup in the block, which is run once: what it installs into an interpreter is gone in the next run.

    Args:
        python: The interpreter that it is given.
        setup: Its text.
        root: The worktree, which may have an interpreter of its own.
        variables: Its environment.

    Raises:
        ReproError: packages came, went or changed there.
    """
    if Path(python).is_relative_to(root):
        yield
        return
    sites = _sites(python, variables, root)
    before = _marks(sites)
    yield
    now = _marks(sites)
    if changed := sorted(place for place, _ in now.items() ^ before.items()):
        named = [Path(place).parent.stem if place.endswith("RECORD") else Path(place).name for place in changed]
        packages = [name for name in named if name not in {site.name for site in sites}]
        names = ", ".join(dict.fromkeys(packages or named))
        raise ReproError(
            f"subject.setup ({setup}) changes {names} in {python}, which every probe and you share (look what it left "
            "there, and install again what was yours): let it build in the worktree ({python} setup.py build_ext "
            "--inplace) and PYTHONPATH in subject.env name the code, or install into an environment of its own ({out}, "
            "with what that is made of in subject.lock)"
        )


def _marks(sites: Sequence[Path]) -> dict[str, str]:
    """What moves when a package comes, goes or is exchanged."""
    records = (path for site in sites for path in [*leading(site), *site.glob("*.dist-info/RECORD")])
    return marked(map(str, [*sites, *records]))


def _sites(python: str, variables: Mapping[str, str], root: Path) -> list[Path]:
    """The folders of packages of an interpreter outside a worktree; of one that does not answer none are known."""
    key = (python, *(variables.get(name) for name in _OF_USERS))
    with contextlib.suppress(ReproError):
        if key not in _known:
            _known[key] = [Path(site) for site in asked(python, SITES, variables=variables)]
    return [site for site in _known.get(key, []) if not (root / site).is_relative_to(root)]


def _can_be_written(site: Path) -> bool:
    """Whether a run can install there; an installer makes the folder where there is none."""
    return os.access(next(folder for folder in (site, *site.parents) if folder.exists()), os.W_OK)


def _notes(place: Place, exits: contextlib.ExitStack) -> Path:
    with contextlib.suppress(ReproError):
        return notes_of(find_checkout(place.root))
    return Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="repro-installs-")))

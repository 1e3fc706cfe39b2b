"""What a case's `setup` installs into an interpreter that is not the worktree's own: nothing, or it is refused.

What one commit installs there every other probe runs, at once or later, and the user after them: an editable
installation of a worktree that is gone is one of nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from repro_golden.base.errors import ReproError
from repro_golden.recording.attach.identify import marked
from repro_golden.subjects.environments.releases import asked
from repro_golden.subjects.inside import SITES

__all__ = ["left_alone"]

_LEADS = ("*.pth", "*.egg-link", "__editable__*.py", "*.dist-info/direct_url.json")
"""Files by which an installation leads to the folder that it is of."""
_WORKTREES = b"/repro/worktrees/"
_LARGE = 1 << 20
"""Bytes of such a file that is read."""


@contextlib.contextmanager
def left_alone(python: str, setup: str, root: Path, variables: Mapping[str, str]) -> Iterator[None]:
    """Run a setup in the block. Where files of the interpreter lead to its worktree then, they lead where they did.

    Nothing else is touched: who installs something meanwhile is not known.

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
    sites = [Path(site) for site in asked(python, SITES, variables=variables)]
    before, leads = _state(sites), {path: path.read_bytes() for path in _leads(sites)}
    try:
        yield
    finally:
        _lead_back(sites, root, leads)
    now = _state(sites)
    if changed := sorted(place for place, _ in now.items() ^ before.items()):
        named = [Path(place).parent.stem if place.endswith("RECORD") else Path(place).name for place in changed]
        own = [name for name in named if name not in {site.name for site in sites}]
        names = ", ".join(dict.fromkeys(own or named))
        raise ReproError(
            f"subject.setup ({setup}) changes {names} in {python}, which every probe and you share (look what it left "
            "there, and install again what was yours): let it build in the worktree ({python} setup.py build_ext "
            "--inplace) and PYTHONPATH in subject.env name the code, or install into an environment of its own ({out}, "
            "with what that is made of in subject.lock)"
        )


def _state(sites: Sequence[Path]) -> dict[str, str]:
    """What moves when a package comes, goes or is exchanged."""
    return marked(map(str, [*sites, *_leads(sites), *(p for site in sites for p in site.glob("*.dist-info/RECORD"))]))


def _leads(sites: Sequence[Path]) -> list[Path]:
    paths = [path for site in sites for pattern in _LEADS for path in site.glob(pattern)]
    return [path for path in paths if path.is_file() and path.stat().st_size < _LARGE]


def _lead_back(sites: Sequence[Path], root: Path, before: Mapping[Path, bytes]) -> None:
    """Put back what led elsewhere, and take away what leads to a worktree since: soon that leads nowhere."""

    def away(content: bytes) -> bool:
        return str(root).encode() in content or _WORKTREES in content

    for path in {*before, *_leads(sites)}:
        now, old = path.read_bytes() if path.is_file() else b"", before.get(path, b"")
        if now == old:
            continue
        if old and not away(old) and (not now or away(now)) and path.parent.is_dir():
            path.write_bytes(old)
        elif away(now) and path.suffix != ".json":
            path.unlink()

"""What packages need of each other: what must come along with one that moves, and what does not fit in the end.

Packages are a mapping of normalised names to ``[name, version, own, requirements]``, as an interpreter lists them.
Requirements that hold for an extra alone are left out, because nothing says which extras are in use, unless a moved
package asks for that extra itself: so torch asks for the parts of cuda-toolkit that it loads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

__all__ = ["Packages", "declared", "lacking", "unmet"]

Packages = Mapping[str, Sequence[Any]]
Marks = Mapping[str, str]


def lacking(
    moved: Collection[str], fixed: Collection[str], before: Packages, after: Packages, marks: Marks
) -> tuple[list[str], list[str]]:
    """Requirements for what the moved packages need and have not, and what the others need of the same.

    Args:
        moved: Names of packages that are not the base's.
        fixed: Those among them whose version is not ours to choose.
        before: The base's packages.
        after: Those and the moved ones.
        marks: Values for markers.
    """
    of_moved = [need for _, need in declared(moved, after, marks)]
    names = {_key(need) for need in of_moved if not _met(need, after)} - set(fixed)
    others = [need for key in before if key not in moved for need in _needs(before[key], marks) if _met(need, before)]
    texts = [sorted({_plain(need) for need in needs if _key(need) in names}) for needs in (of_moved, others)]
    return texts[0], [text for text in texts[1] if text not in texts[0]]


def unmet(before: Packages, after: Packages, moved: Collection[str], marks: Marks) -> list[str]:
    """What the moved packages need and have not, then what was met for others by the base's versions and is no more."""
    asked = [(key, need) for key, need in declared(moved, after, marks) if not _met(need, after)]
    for key in sorted(after.keys() - set(moved)):
        of_moved = [need for need in _needs(after[key], marks) if _key(need) in moved]
        asked += [(key, need) for need in of_moved if _met(need, before) and not _met(need, after)]
    messages = []
    for key, need in asked:
        has = after.get(_key(need))
        name, version = after[key][:2]
        messages.append(f"{name} {version} needs {_plain(need)}, the environment has {has[1] if has else 'none'}")
    return list(dict.fromkeys(messages))


def declared(keys: Collection[str], packages: Packages, marks: Marks) -> Iterator[tuple[str, Requirement]]:
    """What packages need, and what the extras need that they ask of others: who says so, and what."""
    waiting = [(key, "") for key in sorted(keys)]
    seen = set(waiting)
    for key, extra in waiting:  # which grows
        for need in _needs(packages[key], marks, extra):
            yield key, need
            more = [(_key(need), str(canonicalize_name(name))) for name in sorted(need.extras)]
            waiting += [pair for pair in more if pair[0] in packages and pair not in seen]
            seen.update(more)


def _needs(package: Sequence[Any], marks: Marks, extra: str = "") -> Iterator[Requirement]:
    """The requirements of a package that hold in this environment; of an extra those that hold for it alone."""
    for text in sorted(package[3]):
        try:
            need = Requirement(text)
        except InvalidRequirement:
            continue  # as installers of its time read it
        always = need.marker is None or need.marker.evaluate(dict(marks))
        if always if not extra else not always and need.marker and need.marker.evaluate({**marks, "extra": extra}):
            yield need


def _key(need: Requirement) -> str:
    return str(canonicalize_name(need.name))


def _plain(need: Requirement) -> str:
    return f"{need.name} @ {need.url}" if need.url else f"{need.name}{need.specifier}"


def _met(need: Requirement, packages: Packages) -> bool:
    has = packages.get(_key(need))
    try:
        return has is not None and need.specifier.contains(Version(has[1]), prereleases=True)
    except InvalidVersion:
        return True

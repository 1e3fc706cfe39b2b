"""Versions of packages, by name, as a case asks for them."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version

__all__ = ["checked_pins"]


def checked_pins(packages: Mapping[str, str]) -> dict[str, str]:
    """The same by normalised names (PEP 503), sorted, with versions in their normal form (PEP 440).

    Raises:
        ValueError: a name or version is none, or one package has two versions; in one line.
    """
    found: dict[str, str] = {}
    for name, version in packages.items():
        try:
            key, asked = str(canonicalize_name(name, validate=True)), str(Version(version))
        except InvalidName:
            raise ValueError(f"{name!r} is no package's name: write one such as torch") from None
        except InvalidVersion:
            raise ValueError(f"{version!r} is no version of {name}: write one such as 2.13.0") from None
        if found.setdefault(key, asked) != asked:
            raise ValueError(f"asks for two versions of {key}: keep one")
    return dict(sorted(found.items()))

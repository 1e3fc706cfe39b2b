"""Which versions of SGLang are supported, and what differs between them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import InvalidVersion, Version

from repro_core.rollout.engine import EngineError

__all__ = ["FIRST", "FIRST_ON_CPU", "SUPPORTED", "check_version", "installed_version"]

# 0.5.15.post1 was tried on an H200, and 0.5.23 on a CPU. Between them:
#
# - Weight updates: the later one takes tensors only between ``begin_weight_update`` and ``end_weight_update``, and
#   answers ``(False, message)`` without raising elsewhere; the earlier one has neither. Which one it is is asked of the
#   engine itself, not of its number.
# - The later one reports a response's weights in spans (``weight_versions``) besides ``weight_version``.
# - Only the later one has the plugin points that the stand-ins for a CPU need.
FIRST, FIRST_ON_CPU, _AFTER = Version("0.5.15"), Version("0.5.23"), Version("0.6")
SUPPORTED = f">={FIRST},<{_AFTER}"


def installed_version(device: str) -> str:
    """The version of the SGLang that this Python has.

    Args:
        device: that it is to run on, ``cpu`` or ``cuda``.

    Raises:
        EngineError: it has none, or one that is not supported.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        cure = (
            "pip install 'repro-harness[sglang-cpu]', then pip install --no-deps sglang==0.5.23"
            if device == "cpu"
            else f"pip install 'sglang{SUPPORTED}'"
        )
        raise EngineError(f"this Python has no SGLang: {cure}") from None
    check_version(found, "the installed SGLang", device)
    return found


def check_version(found: str, where: str, device: str) -> None:
    """Whether a version can be talked to.

    Args:
        found: what it calls itself.
        where: whose version it is, for the message.
        device: that it runs on, ``cpu`` or ``cuda``.

    Raises:
        EngineError: it is not supported, or its name is no version.
    """
    try:
        number = Version(found)
    except InvalidVersion:
        raise EngineError(f"{where} says it is version {found!r}, which is none: it must be {SUPPORTED}") from None
    if not FIRST <= number < _AFTER:
        raise EngineError(f"{where} is version {found}, which is not supported: it must be {SUPPORTED}")
    if device == "cpu" and number < FIRST_ON_CPU:
        raise EngineError(f"{where} is version {found}, which does not run on a CPU here: it must be {FIRST_ON_CPU}")

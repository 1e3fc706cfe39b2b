"""The Ray cluster that a launch starts with `ray start` and that ends with it: what would still name it afterwards."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["forgotten", "unanswered"]

_ANSWERS = 2.0
"""Seconds that a cluster has to take a connection."""
_UNANSWERED = re.compile(r"Failed to connect to GCS at address (\S{1,60}:\d{1,5}) within")
"""What each try to reach a cluster that is gone prints; of Ray's src/ray/rpc/gcs/gcs_rpc_client.h."""


@contextlib.contextmanager
def forgotten(environment: Mapping[str, str]) -> Iterator[None]:
    """Whatever is started in the block has ended when it does, and with it a cluster that it started.

    `ray start` writes the cluster's address to a file, which `ray stop` removes. Where the cluster is killed the file
    stays, and the next `ray.init()` of anyone on the machine waits for that cluster. A file from before the block, and
    one of a cluster that answers, are left alone.

    Args:
        environment: Of what is started.
    """
    folder = environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp"  # noqa: S108 - as ray/_private/utils.py
    file = Path(folder, "ray", "ray_current_cluster")
    before = _written(file)
    try:
        yield
    finally:
        if (now := _written(file)) and now != before and _ended(now[1]):
            with contextlib.suppress(OSError):
                file.unlink()


def unanswered(output: str) -> str:
    """The address of a cluster that a program cannot reach, by what it printed at last and by our own try; '' if none.

    Args:
        output: The end of it.
    """
    found = _UNANSWERED.findall(output)
    return str(found[-1]) if found and _tried(found[-1]) else ""


def _written(file: Path) -> tuple[int, str] | None:
    try:
        return file.stat().st_mtime_ns, file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _ended(address: str) -> bool:
    """Whether nobody is there, by the machine's own word; the sockets of a killed process close a moment after it."""
    end = time.monotonic() + _ANSWERS
    while not (ended := isinstance(_tried(address), ConnectionRefusedError)) and time.monotonic() < end:
        time.sleep(0.05)
    return ended


def _tried(address: str) -> Exception | None:
    """Why no connection to an address is made; None where one is."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWERS).close()
    except (OSError, ValueError, OverflowError) as error:
        return error
    return None

"""Where the programs of probes compile extensions of torch's: it finds them by name, whichever commit they are of."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from repro_golden.case.file import Case

__all__ = ["own_extensions", "without_locks"]

_VARIABLE = "TORCH_EXTENSIONS_DIR"


@contextlib.contextmanager
def own_extensions(case: Case, base: Path) -> Iterator[dict[str, str]]:
    """The variable that names a folder for them which is kept for later searches and is nobody else's now.

    Nothing where the user names one. Of two probes at once, also of two searches, one had the other's code.

    Args:
        case: Whose program it is.
        base: Where the folders lie.
    """
    if not case.subject.program or _VARIABLE in {*case.subject.env, *os.environ}:
        yield {}
        return
    base.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        with (base / f"{number}.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield {_VARIABLE: str(base / str(number))}
            return


def without_locks(variables: Mapping[str, str]) -> None:
    """Remove the locks of torch's that a probe left there which was ended while it compiled."""
    if folder := variables.get(_VARIABLE):
        for left in Path(folder).glob("*/lock"):
            left.unlink(missing_ok=True)

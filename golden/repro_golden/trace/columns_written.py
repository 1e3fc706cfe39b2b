"""Columns that slime, Miles and Relax write of their own accord, and the metrics beside them.

Which of them are written is a matter of the version and of flags: a commit that writes one more, or one less, has moved
no number by that. What the recorder looks at is another matter: a parameter or a gradient that is no longer seen is a
difference, and so are a norm, a learning rate and a hash of weights that a trainer no longer tells.
"""

from __future__ import annotations

import functools
import re
from fnmatch import fnmatchcase

from repro_golden.base.printed.machine_numbers import of_the_machine
from repro_golden.trace.model import METRIC, Row
from repro_golden.trace.reader import Trace

__all__ = ["COLUMN", "DUMPED", "column_named", "column_of", "columns_of", "machine_numbers"]

COLUMN = "column/"
"""Begins the name of a column among other objects that a run shows."""

DUMPED = ("saved/train_data:*", "saved/rollout_data:*")
"""Signals of their dumps as files: what these hold are the columns, which are read from them."""

_PHASES = ("input", "forward", "loss")
_REPLICA = re.compile(r"(?:@\d+|#(?:\d+|more|new)|\.again)+$")
_ACTIVATION = re.compile(r"(?:^|\.)output(?:\.|$)")
"""In names of what the recorder sees of modules."""
_MANY = "policy_loss/"
"""Before the names of columns that go into the policy loss: each is one of its own."""


def column_of(row: Row) -> str | None:
    """The column that a signal is of, as ``column/log_probs``; None where it is of none.

    The replicas of a column (``log_probs@1``) are of one, and so are the parts of a column of mappings: where one side
    has one of them and not another, that is a difference. Each signal of a dump as a file, which an earlier recorder
    looked at, is one.
    """
    if row.phase == "update" and any(fnmatchcase(row.name, glob) for glob in DUMPED):
        return f"{COLUMN}{row.name.removeprefix('saved/')}"
    if row.phase not in _PHASES or row.name.startswith("start/") or _ACTIVATION.search(row.name):
        return None
    if row.dtype == METRIC or row.name.startswith(_MANY):
        return column_named(row.name)
    return column_named(_REPLICA.sub("", row.name).partition("/")[0])


def column_named(metric: str) -> str:
    """The column that a metric of this name is of."""
    return f"{COLUMN}{_REPLICA.sub('', metric)}"


@functools.lru_cache(maxsize=8)
def columns_of(trace: Trace, count: int) -> frozenset[str] | None:
    """The columns of the first so many steps of a trace; None where no trainer writes any of its own accord."""
    if trace.header.system is None:
        return None
    return frozenset(name for index in range(count) for row in trace.rows(index) if (name := column_of(row)))


_LEFT_OUT_SINCE = 4
"""The first recorder that takes no number of the process or the machine for a metric."""


def machine_numbers(trace: Trace) -> frozenset[str]:
    """Numbers that an earlier recorder took for metrics of the training, under the names of columns."""
    if trace.header.recorder >= _LEFT_OUT_SINCE:
        return frozenset()
    return frozenset(f"{COLUMN}{name}" for step in trace.steps for name in step.metrics if of_the_machine(name))

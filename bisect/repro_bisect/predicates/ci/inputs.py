"""What a check of a trainer's CI reads of one step: metrics by name, and per-token columns at unmasked tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from repro_golden.base.observed import tellings
from repro_golden.trace import Row, Trace
from repro_golden.trace.families import family
from repro_golden.trace.tensor_difference import decode
from repro_golden.trace.token_columns import Floats, column_parts, kept, part_of

__all__ = ["Seen", "steps_per_rollout"]


class Seen:
    """One step of a trace. Its rows are read when a column or a fingerprint is asked for."""

    def __init__(self, trace: Trace, index: int) -> None:
        """The `index`-th step of `trace`."""
        self.trace, self.index = trace, index
        self.step = trace.steps[index].step
        self.metrics = trace.steps[index].metrics

    @property
    def rows(self) -> list[Row]:
        """Its signals.

        Raises:
            ReproError: they are missing or damaged.
        """
        return self.trace.rows(self.index)

    def metric(self, name: str) -> Mapping[str, float]:
        """A metric by each name that it goes by here, ``train/ppo_kl`` and ``ppo_kl``; empty where it has none.

        Told again it has several (`tellings`); what the sum of many is says nothing of any.
        """
        names = [telling for base in (name, name.partition("/")[2]) if base for telling in tellings(base, self.metrics)]
        return {telling: self.metrics[telling] for telling in names if "#more" not in telling}

    def alike(self, metric: str, name: str) -> float | None:
        """A metric as the name `name` tells it elsewhere, in a folder or not; None where it is not told so here."""
        folder = metric.partition("/")[0] + "/"
        bare = name.removeprefix(folder)
        return next((self.metrics[alias] for alias in (name, bare, folder + bare) if alias in self.metrics), None)

    def phase(self, metric: str) -> str:
        """The phase in which a metric was observed."""
        return next((row.phase for row in self.rows if row.name == metric and row.dtype == "metric"), "loss")

    def column_phase(self, name: str) -> str:
        """The phase in which a column was observed."""
        return next((row.phase for row in column_parts(self.rows, name).values()), "forward")

    def updated(self) -> list[Row]:
        """The tensors and checksums of the update phase, but for generators and files that the program wrote."""
        rows = [row for row in self.rows if row.phase == "update" and row.dtype != "metric"]
        return [row for row in rows if family(row.phase, row.name.removeprefix("end/")) not in ("rng", "saved")]

    def tokens(self, *names: str) -> Sequence[Floats] | None:
        """Columns at the same unmasked tokens, fp64 [tokens] each, by micro-batch and rank where they come so.

        None where one of them was not kept, is of other tokens than the first, or has no unmasked token, and where it
        is not known which tokens are unmasked.
        """
        rows = self.rows
        first, *others = (column_parts(rows, name) for name in names)
        masks = column_parts(rows, "loss_mask")
        taken: list[list[Floats]] = [[] for _ in names]
        used: list[set[str]] = [set() for _ in others]
        for part, row in first.items():
            beside = [part_of(other, part) for other in others]
            keep = kept(part_of(masks, part), row)
            if keep is None:
                return None
            for column, column_row in zip(taken, (row, *beside), strict=True):
                values = _values(column_row)
                if values is None or len(values) != len(keep):
                    return None
                column.append(values[keep])
            for seen, column_row in zip(used, beside, strict=True):
                seen |= {column_row.name} if column_row else set()
        if any(len(seen) != len(other) for seen, other in zip(used, others, strict=True)):
            return None  # a part that one side alone shows would be left out unseen
        whole = [np.concatenate(column) if column else np.zeros(0) for column in taken]
        return whole if len(whole[0]) else None


def _values(row: Row | None) -> Floats | None:
    """The values of a row as fp64 [elements]; None where they were not kept or have no order."""
    if row is None or row.values is None:
        return None
    try:
        return decode(row.dtype, row.values)
    except ValueError:
        return None


def steps_per_rollout(trace: Trace) -> int:
    """Updates that are made from one rollout, as the trace's case says; 1 where it says nothing."""
    subject = trace.header.case.get("subject")
    subject = subject if isinstance(subject, Mapping) else {}
    config = subject.get("config")
    config = config if isinstance(config, Mapping) else {}
    steps = subject.get("steps_per_rollout", config.get("num_steps_per_rollout", 1))
    return steps if isinstance(steps, int) and steps >= 1 else 1

"""A run's folder: train dumps, events, records and the log as the rows of a trace."""

from __future__ import annotations

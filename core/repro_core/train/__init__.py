"""The trainer and its command line."""

from repro_core.train.command import main

__all__ = ["main"]

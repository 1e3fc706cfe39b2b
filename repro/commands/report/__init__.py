"""`repro report`: the pull request, the night and the page."""

from __future__ import annotations

import click

from repro.lazy_group import LazyGroup

__all__ = ["report"]


@click.group(
    cls=LazyGroup,
    lazy={
        "pr": ("repro.commands.report.pr:pr", "What BASE..HEAD does to the numbers, for a pull request."),
        "post": ("repro.commands.report.post:post", "Post a comment that was written before."),
        "nightly": ("repro.commands.report.nightly:nightly", "Judge every case tonight, and bisect what changed."),
        "publish": ("repro.commands.report.publish:publish", "A static site of all nights and pull requests."),
    },
)
def report() -> None:
    """Report on a pull request, on a night, and on all of them."""

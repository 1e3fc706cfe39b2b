"""The entry point: one class of user error is caught here, printed as one line with its cure, never as a traceback."""

from __future__ import annotations

import errno
import io
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import click

from repro import console
from repro.cli import cli
from repro_golden.base.clean import one_line
from repro_golden.base.credentials import hide
from repro_golden.base.errors import ReproError
from repro_golden.base.extras import of_import
from repro_golden.repository.git_environment import forget_repository

__all__ = ["main"]

INTERRUPTED = 130
_CLEANING = 10.0
"""Seconds that a clean-up has before the next signal is heard again."""

_FIXES = {
    errno.ENOSPC: "free some space and run the same command again",
    errno.EROFS: "clone the repository to where you may write, or name another place",
    errno.EACCES: "check the path and its permissions",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code is 0 agrees or found, 1 differs, 2 usage or environment, 3 not verifiable."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    before = _listen()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # in a locale without the letters of a path it shows what it can
            stream.reconfigure(errors="backslashreplace")
    streams = sys.stdout, sys.stderr
    console.guard()
    try:
        return _run(arguments)
    finally:
        if argv is not None:  # else we are the whole process, whose traceback is cleaned too
            sys.stdout, sys.stderr = streams
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)


def _run(arguments: list[str]) -> int:
    try:
        forget_repository(os.environ)
        hide(os.environ)  # before there are threads, and children that could read them
        code = cli.main(args=arguments, prog_name="repro", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.Abort:
        return _interrupted()
    except KeyboardInterrupt:
        return _interrupted()
    except click.ClickException as error:
        buffer = io.StringIO()  # click would look for the bytes behind stderr
        error.show(buffer)
        _twin(error.format_message(), error.exit_code, arguments)
        print(buffer.getvalue(), end="", file=sys.stderr)
        return error.exit_code
    except ReproError as error:
        return _failed(str(error), error.exit_code, arguments)
    except ImportError as error:
        missing = of_import(error)
        if missing is None:
            raise
        return _failed(str(missing), missing.exit_code, arguments)
    except OSError as error:
        fix = _FIXES.get(error.errno or 0, "check the path")
        where = f" {error.filename}" if error.filename else ""
        return _failed(f"{error.strerror or error}{where}: {fix}", 2, arguments)


def _failed(message: str, code: int, arguments: Sequence[str]) -> int:
    _twin(message, code, arguments)
    print(f"repro: {one_line(message)}", file=sys.stderr)
    return code


def _twin(message: str, code: int, arguments: Sequence[str]) -> None:
    """Print an error as JSON where that was asked for: by repro's own words, not by those of a program behind --."""
    own_arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--json" in own_arguments and not console.answered():
        console.answer({"error": message, "exit_code": code})


def _interrupted() -> int:
    print("repro: interrupted; nothing finished was lost, the same command resumes", file=sys.stderr)
    return INTERRUPTED


def _listen() -> dict[int, Any]:
    """End at a signal that asks for it, worktrees and children with us; returns what was to happen at each before.

    What else comes meanwhile, such as a second Ctrl-C, or the hang-up behind one, does not break into the clean-up.
    """
    last = -math.inf

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > _CLEANING:
            last = now
            raise KeyboardInterrupt

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, end) for number in numbers}  # nohup's stay ignored


if __name__ == "__main__":
    sys.exit(main())

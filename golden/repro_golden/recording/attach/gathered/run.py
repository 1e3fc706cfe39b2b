"""Running a command so that its training steps are recorded."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import repro_golden
from repro_golden.base.errors import ReproError
from repro_golden.base.machine.processes import ExecError, executed
from repro_golden.base.observed import ALL_SIGNALS
from repro_golden.recording.attach.base.settings import VARIABLE, Settings
from repro_golden.recording.attach.code.identify import tree_of
from repro_golden.recording.attach.gathered.collect import Collected, Gathering
from repro_golden.recording.attach.gathered.unseen import Unseen
from repro_golden.trace import Header

__all__ = ["PACKAGE", "environment_for", "run_traced", "said_of"]

PACKAGE = Path(repro_golden.__file__).resolve().parent
SITE = PACKAGE / "recording" / "attach" / "site"


def environment_for(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which Python processes record as `settings` say. Nothing is installed anywhere."""
    path = os.pathsep.join([str(SITE), *([environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else [])])
    return {**environ, "PYTHONPATH": path, VARIABLE: settings.to_text(), "REPRO_INSTRUMENT": str(PACKAGE)}


def said_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a trace's header tells of the process beside its identity."""
    return {key: about[key] for key in ("python", "argv", "variables", "switches", "groups")}


def run_traced(
    command: Sequence[str],
    out: Path,
    settings: Settings | None = None,
    ranks: int | None = None,
    output: TextIO | None = None,
    commit: str | None = None,
) -> tuple[int, Collected]:
    """Run `command` and make the trace `out` of what its processes recorded.

    Args:
        command: program and arguments; its input, output, signals and exit code pass through.
        out: the trace's folder, new or empty.
        settings: How to record; `out` of it is chosen here.
        ranks: how many ranks must have recorded; by default as many as each process said its world has.
        output: where what it prints goes; by default to our own output.
        commit: that the code is, for the trace's header; None where it is none's.

    Returns:
        The exit code (128 + n for a program that signal n ended; 0 where every rank was ended after the steps that
        were asked for), and what was collected.

    Raises:
        ReproError: the command cannot be run, `out` is in use, no step was seen, or a rank is missing.
    """
    if out.exists() and any(out.iterdir()):
        raise ReproError(f"{out} is not empty: choose another folder or remove it")
    out.mkdir(parents=True, exist_ok=True)
    raw = Path(tempfile.mkdtemp(prefix="raw-", dir=out.resolve()))
    asked = replace(settings or Settings(""), out=str(raw), place=tree_of(Path.cwd()))

    def header(about: Mapping[str, Any], seen: int) -> Header:
        observe: dict[str, Any] = {name: list(getattr(asked, name)) for name in ("activations", "metrics", "ignore")}
        observe |= {"signals": asked.signals} if asked.signals != ALL_SIGNALS else {}
        subject = {"kind": "command", "command": list(command), "observe": observe, **said_of(about)}
        subject |= {"commit": commit} if commit else {}
        return Header({"command": list(command)}, "", subject, about["identity"], seen)

    try:
        code = _run(command, environment_for(asked, os.environ), raw, output)
        with contextlib.closing(Gathering(raw, out, header, ranks, most=asked.steps)) as gathering:
            collected = gathering.finish(command, code)
        return 0 if collected.stopped else code, collected
    finally:
        shutil.rmtree(raw, ignore_errors=True)


_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGCONT)


def _in_foreground() -> bool:
    """Whether a terminal sends its ctrl-C to this process and the program alike."""
    try:
        with open("/dev/tty", "rb") as terminal:  # noqa: PTH123 - no path of a file
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _run(command: Sequence[str], environment: Mapping[str, str], raw: Path, output: TextIO | None) -> int:
    try:
        process = executed(
            command, Path.cwd(), environment,
            lambda argv: subprocess.Popen(list(argv), env=dict(environment), stdout=output),
        )  # fmt: skip
    except ExecError as error:
        raise ReproError(f"{error}") from None
    unseen = Unseen(raw)
    # ctrl-C reaches the whole foreground group; what was sent to us alone is passed on
    before = {s: signal.signal(s, lambda number, _: process.send_signal(number)) for s in _PASSED_ON}
    before[signal.SIGINT] = signal.signal(
        signal.SIGINT, lambda number, _: None if _in_foreground() else process.send_signal(number)
    )
    try:
        with unseen.watch(process.pid):
            code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    unseen.check()
    return 128 - code if code < 0 else code

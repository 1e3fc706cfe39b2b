"""Clocks that jump amid a run, by hours or by decades, by a small library of ours; without gcc nothing is tried.

The clock that only ever goes on, which timeouts are measured by, stays true, as it does where somebody sets the time.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from attempts import Attempt
from conftest import environment
from promise import Asked, Promise

from fault_kinds.scenario import PYTHON, SECONDS, Scenario, finished_probes, leftovers, run, scenarios

__all__ = ["promises"]

JUMPS = 40
HOUR, DAY = 3600, 86400
JUMPED = (-HOUR, HOUR, -DAY, 400 * DAY, -20 * 365 * DAY, 12 * 365 * DAY, 25 * 365 * DAY)
"""Seconds that the time of day is off."""
SHIM = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long off(void) {
  char text[32] = {0};
  const char *name = getenv("CLOCK_OFF");
  int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return 0;
  ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  return size > 0 ? atol(text) : 0;
}
int clock_gettime(clockid_t clock, struct timespec *at) {
  int code = syscall(SYS_clock_gettime, clock, at);
  if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += off();
  return code;
}
int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""
LEFT_OUT = ("golden push", "report publish")  # they say no time


def promises(asked: Asked) -> Iterator[Promise]:
    """One promise over all commands."""
    compiler = shutil.which("gcc")
    if compiler is None:
        return
    library = asked.work / "clock.so"
    words = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library)]
    subprocess.run(words, input=SHIM, text=True, check=True)
    promise = Promise("The clock jumps amid a command: what it says is what it said, and what it finished counts")
    every = asked.some([scenario for scenario in scenarios() if scenario.name not in LEFT_OUT], "clock")
    for scenario in every:
        folder = asked.work / "clock" / scenario.name.replace(" ", "-")
        scenario.make(folder / "whole")
        place = scenario.copied(folder / "whole", folder / "place")
        undisturbed = run(scenario, place)
        answer, state = scenario.answer(undisturbed, place), scenario.state(place)
        draw = asked.random("clock", scenario.name)
        for _ in range(asked.count(JUMPS // len(every))):
            times = draw.choices(JUMPED, k=3)
            place = scenario.copied(folder / "whole", folder / "place")
            first = jumping(scenario, place, library, times[:2], draw.uniform(0.2, max(0.3, undisturbed.seconds)))
            outcome, left, finished = scenario.answer(first, place), scenario.state(place), finished_probes(place)
            again = jumping(scenario, place, library, times[2:], 0)
            faults = [fault for fault in (first.fault(), again.fault()) if fault]
            if (outcome, left) != (answer, state):
                faults.append(f"it said {str(outcome)[:200]}, not {str(answer)[:100]}")
            if again.code == 0 and scenario.answer(again, place) != answer:
                faults.append(f"the next run said {str(scenario.answer(again, place))[:200]}")
            if finished and finished_probes(place) != finished:
                faults.append(f"{finished} probes were finished, then {finished_probes(place)}")
            faults += [f"left for ever: {leftovers(place)[:3]}"] if leftovers(place) else []
            promise.judge(
                not faults, f"`{scenario.name}` off by {', then '.join(map(str, times))} s: {'; '.join(faults)}"
            )
    promise.figures = {"commands": str(len(every)), "times": str(len(JUMPED))}
    yield promise


def jumping(scenario: Scenario, place: Path, library: Path, times: list[int], after: float) -> Attempt:
    """Run a command at the first time, and after so many seconds at the next one."""
    told = place / "clock"
    told.write_text(f"{times[0]}\n")
    variables = {"RUNS": str(place / "runs"), "LD_PRELOAD": str(library), "CLOCK_OFF": str(told)}
    jumps = [threading.Timer(after, told.write_text, [f"{time}\n"]) for time in times[1:]]
    for jump in jumps:
        jump.start()
    command = [PYTHON, "-m", "repro", *scenario.command]
    try:
        done = subprocess.run(
            command,
            cwd=place / "repo",
            env=environment() | variables,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, out, err = None, late.stdout or b"", late.stderr or b""
    finally:
        for jump in jumps:
            jump.cancel()
    return Attempt(scenario.command, code, out, err, 0.0, 0)

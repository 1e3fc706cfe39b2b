"""What of a change reached the process that trains: by its own words and variables beside those without the change."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import pytest

from repro_bisect.axes.arrival import lost
from repro_golden.case.identity import short_digest
from repro_golden.trace import Header

NO: Mapping[str, str] = {}


def header(
    command: str, argv: str, env: Mapping[str, str] = NO, given: Mapping[str, str] | None = NO, **more: str
) -> Header:
    """Of a case and of the process that trained."""
    subject: dict[str, object] = {"kind": "command", "argv": shlex.split(argv), **more}
    if given is not None:
        subject["variables"] = {short_digest(name): short_digest(value) for name, value in given.items()}
    return Header({"subject": {"command": command, "env": dict(env)}}, "", subject, {}, 1)


@pytest.mark.parametrize(
    ("commands", "argvs", "said"),
    [
        # a script that drops its words, some of which it has itself
        (("bash r.sh", "bash r.sh --seed 2"), ("python t.py --seed 12", "python t.py --seed 12"), "--seed 2 is not on"),
        (("bash r.sh", "bash r.sh --wd 0.1 --lr 1"), ("python t.py --lr 1", "python t.py --lr 1"), "--wd is not on"),
        (("bash r.sh", "bash r.sh --fast"), ("python t.py --fast", "python t.py --fast"), "--fast is not on"),
        (("bash r.sh --wd 1", "bash r.sh"), ("python t.py", "python t.py"), "--wd 1 was not on"),
        (("bash r.sh --wd 1", "bash r.sh"), ("python t.py --wd 1", "python t.py --wd 1"), "--wd 1 is still on"),
        (("python t.py | tee log", "python t.py | tee log --lr 1"), ("python t.py", "python t.py"), "--lr is not on"),
        # a value that only another option got
        (("bash r.sh", "bash r.sh --wd 1 --lr 1"), ("python t.py", "python t.py --lr 1"), "--wd is not on"),
        # launchers that write them otherwise
        (("bash r.sh", "bash r.sh --lr 1"), ("python t.py", "python t.py --lr=1"), ""),
        (("bash r.sh", "bash r.sh --lr=1"), ("python t.py", "python t.py --lr 1"), ""),
        (("bash r.sh", "bash r.sh lr=1"), ("python t.py", "python t.py optim.lr=1"), ""),
        (("bash r.sh", "bash r.sh --lr 1"), ("python t.py", "python t.py learning_rate=1"), ""),
        (("bash r.sh", "bash r.sh --lr 1"), ("python t.py --lr 2", "python t.py --lr 1"), ""),
        (("bash r.sh", "bash r.sh --tags 'a b'"), ("python t.py", "python t.py --tags a b"), ""),
        (("bash r.sh", "bash r.sh --lr 1"), ("python t.py", """python t.py --optim '{"lr": 1}'"""), ""),
        # words of launchers
        (("bash r.sh", "bash r2.sh"), ("python t.py", "python t.py"), ""),
        (("python t.py", "torchrun --nproc-per-node 2 t.py"), ("python t.py", "/bin/python -u t.py"), ""),
        (("torchrun --nnodes 2 t.py", "torchrun --nnodes 4 t.py"), ("python -u t.py", "python -u t.py"), ""),
        (("env A=1 python t.py", "env A=2 python t.py"), ("python t.py", "python t.py"), ""),
        # as they are
        (("python t.py --lr 1", "python t.py --lr 2"), ("python t.py --lr 1", "python t.py --lr 2"), ""),
        (("{python} t.py", "{python} t.py --to {out}/x"), ("python t.py", "python t.py --to /tmp/x"), ""),
    ],
)  # fmt: skip
def test_words(commands: tuple[str, str], argvs: tuple[str, str], said: str) -> None:
    """A word arrived where the process has more of it than without it, however a launcher writes it."""
    good, made = (header(command, argv) for command, argv in zip(commands, argvs, strict=True))
    found = lost(good, made)
    assert (found.text if found else "").startswith(said)
    assert bool(found) is bool(said)
    for other in (header(commands[1], argvs[1], kind="slime"), header(commands[1], "")):
        assert lost(good, other) is None, "nothing is known of it"


def test_words_that_become_variables() -> None:
    """A script that exports what it is given hands it on; a variable that had the value before tells nothing."""
    before, after = {"SHLVL": "2"}, {"SHLVL": "2", "WD": "2"}
    good = header("bash r.sh", "python t.py", given=before)
    assert lost(good, header("bash r.sh 2", "python t.py", given=after)) is None
    assert lost(good, header("bash r.sh 2", "python t.py", given=before)) is not None


@pytest.mark.parametrize(
    ("without", "given", "said"),
    [
        ({}, {"SCALE": "2"}, ""),
        ({"SCALE": "1"}, {"SCALE": "1"}, "SCALE is what it is without the change in the process that trains"),
        ({"SCALE": "1"}, {"SCALE": "4"}, ""),  # made of it
        ({}, {}, "SCALE is not set in the process that trains"),
        ({}, {"FACTOR": "2"}, ""),  # under another name
        (None, None, ""),  # of an older recorder
        (None, {"SCALE": "1"}, ""),
    ],
)
def test_variables(without: dict[str, str] | None, given: dict[str, str] | None, said: str) -> None:
    """A variable was lost where the process has another value, which it has without the change too."""
    good = header("bash r.sh", "python t.py", {}, without)
    found = lost(good, header("bash r.sh", "python t.py", {"SCALE": "2"}, given))
    assert (found.text if found else "") == said


def test_a_variable_that_is_left_out() -> None:
    """One that a script sets again is there all the same."""
    good = header("bash r.sh", "python t.py", {"OLD": "1"}, {"OLD": "1"})
    assert lost(good, header("bash r.sh", "python t.py", {}, {})) is None
    found = lost(good, header("bash r.sh", "python t.py", {}, {"OLD": "1"}))
    assert found and found.text == "OLD is in the process that trains all the same"


def test_a_secret_is_not_asked_for() -> None:
    """It is not written down, so that its lack says nothing."""
    good, env = header("r", "python t.py"), {"API_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz"}
    assert lost(good, header("r", "python t.py", env)) is None


def test_a_worker_is_not_sure() -> None:
    """What multiprocessing starts has its words from the process that made it."""
    worker = "python -c 'from multiprocessing.spawn import spawn_main' --multiprocessing-fork"
    found = lost(header("python t.py", worker), header("python t.py --lr 1", worker))
    assert found and not found.sure


def test_words_of_a_line_that_saves_are_its_own() -> None:
    """GOOD may have trained by the line that saves: what stands there alone is none of the case's words."""
    good = header("python t.py", "python t.py --save-at 2", launched="python t.py --save-at 2")
    assert lost(good, header("python t.py --seed 2", "python t.py --seed 2")) is None

"""Flags that a replay adds to a trainer's command line: where they get to, and whether they took effect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro_golden.recording.attach.base.settings import Settings
from repro_golden.recording.attach.entry import is_entry
from repro_golden.recording.attach.gathered.run import environment_for
from repro_golden.subjects.additions import read_parsers

# two parsers as slime has them: neither minds what it does not know
PROGRAM = """\
import argparse, json, os, sys
early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
early.add_argument("--debug-train-only", action="store_true")
early.parse_known_args()
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--num-rollout", type=int)
parser.add_argument("--use-tis", action="store_true")
parser.add_argument("--save")
args, _ = parser.parse_known_args()
print(json.dumps([sys.argv[1:], args.num_rollout, args.save]))
"""
FLAGS = [["--debug-train-only"], ["--num-rollout", "3"]]


def settings(folder: Path, **entry: object) -> Settings:
    """What a process is asked, in a folder that receives what its parsers say."""
    out = folder / "said"
    out.mkdir(exist_ok=True)
    asked = {"names": ["train.py", "pack.train"], "flags": [w for flag in FLAGS for w in flag], "redirect": {},
             "out": str(out), "variables": ["NCCL_ALGO"]}  # fmt: skip
    return Settings(str(folder), recorder=False, entry=asked | entry)


def run(folder: Path, *command: str, asked: Settings | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder that holds the program under several names."""
    (folder / "pack").mkdir(exist_ok=True)
    for name in ("train.py", "other.py", "pack/__init__.py", "pack/train.py"):
        (folder / name).write_text("" if name.endswith("__init__.py") else PROGRAM)
    (folder / "run.sh").write_text(f"set -e\nexport X=1\n{sys.executable} {folder}/train.py --num-rollout 50\n")
    env = environment_for(asked or settings(folder), os.environ | {"NCCL_ALGO": "Ring"})
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command",
    [
        (sys.executable, "train.py", "--num-rollout", "50"),
        (sys.executable, "-m", "pack.train", "--num-rollout", "50"),
        ("bash", "run.sh"),
        (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "train.py", "--num-rollout", "50"),
    ],
    ids=["file", "module", "script", "torchrun"],
)
def test_the_flags_get_to_the_entry_point_however_it_is_launched(tmp_path: Path, command: tuple[str, ...]) -> None:
    """A file, a module, a launch script and torchrun's child all parse the added flags behind the user's own."""
    done = run(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    argv, count, _ = json.loads(done.stdout.splitlines()[-1])
    assert argv == ["--num-rollout", "50", "--debug-train-only", "--num-rollout", "3"]
    assert count == 3  # the last one wins
    parsers = read_parsers(tmp_path / "said", FLAGS, {"NCCL_ALGO": "Ring"})
    assert (parsers.processes, parsers.refused, parsers.ignored, parsers.overridden) == (1, {}, {}, {})


def test_other_processes_get_none(tmp_path: Path) -> None:
    """A Python process that is no entry point keeps its command line, and none is then said to have been one."""
    argv, *_ = json.loads(run(tmp_path, sys.executable, "other.py", "--save", "x").stdout)
    assert argv == ["--save", "x"]
    assert read_parsers(tmp_path / "said", FLAGS, {}).processes == 0


def test_a_flag_that_nobody_knows_is_refused_and_the_users_are_named(tmp_path: Path) -> None:
    """What no parser has is refused; a misspelt flag of the user's own is named with the nearest that there is."""
    added = [*FLAGS, ["--dump-details", "/x"]]
    asked = settings(tmp_path, flags=[word for flag in added for word in flag])
    done = run(tmp_path, sys.executable, "train.py", "--use-tsi", "--use-tis", asked=asked)
    assert done.returncode == 0, done.stderr
    parsers = read_parsers(tmp_path / "said", added, {"NCCL_ALGO": "Tree", "NVTE": "0"})
    assert parsers.refused == {"--dump-details": "no parser of it has this flag"}
    assert parsers.ignored == {"--use-tsi": "--use-tis"}
    assert parsers.overridden == {"NCCL_ALGO": "Ring", "NVTE": ""}


def test_a_flag_that_came_to_another_value_is_refused(tmp_path: Path) -> None:
    """The value counts that the parser made, not that the flag was there."""
    asked = settings(tmp_path, flags=["--num-rollout", "3", "--num-rollout", "4"])
    assert run(tmp_path, sys.executable, "train.py", asked=asked).returncode == 0
    assert read_parsers(tmp_path / "said", FLAGS[1:], {}).refused == {"--num-rollout": "it came to '4'"}


def test_what_the_launch_writes_is_redirected(tmp_path: Path) -> None:
    """A replay of a launch with --save writes elsewhere; one without it gets no --save."""
    asked = settings(tmp_path, redirect={"--save": "/elsewhere"})
    *_, save = json.loads(run(tmp_path, sys.executable, "train.py", "--save=/mine", asked=asked).stdout)
    assert save == "/elsewhere"
    argv, *_ = json.loads(run(tmp_path, sys.executable, "train.py", asked=asked).stdout)
    assert "--save" not in argv


def test_a_trainer_that_cannot_be_told_does_not_start(tmp_path: Path) -> None:
    """Where the flags cannot be added the process ends before its first line: else it would train for real."""
    done = run(tmp_path, sys.executable, "train.py", asked=settings(tmp_path, out=str(tmp_path / "nowhere")))
    assert (done.returncode, done.stdout) == (70, "")
    assert done.stderr.count("\n") == 1
    assert "no flags could be added" in done.stderr


@given(st.lists(st.sampled_from(["a/train.py", "train.py", "xtrain.py", "-m", "-c", "", "pack.train"]), max_size=3))
def test_an_entry_point_is_told_by_the_end_of_its_path(argv: list[str]) -> None:
    """`train.py` is a whole last part of a path; a module counts behind -m alone, and nothing else does."""
    entry = is_entry(["train.py", "pack.train"], argv, ["python", *(["-m", "pack.train"] if "-m" in argv else argv)])
    assert entry == bool(argv and (argv[0] in ("a/train.py", "train.py", "-m", "pack.train")))


def test_a_line_that_is_being_written_is_no_line_yet(tmp_path: Path) -> None:
    """A witness whose last line is cut is read up to there."""
    whole = {"options": ["--x"], "abbreviates": False, "rest": [], "values": {"--x": "1"}}
    lines = [json.dumps({"own": [], "added": [], "variables": {}}), json.dumps(whole)]
    (tmp_path / "parsers-1.jsonl").write_text("\n".join(lines) + '\n{"options": ["--y')
    assert read_parsers(tmp_path, [["--x", "1"]], {}).refused == {}
    (tmp_path / "parsers-2.jsonl").write_text("")
    assert read_parsers(tmp_path, [["--x", "1"]], {}).processes == 1

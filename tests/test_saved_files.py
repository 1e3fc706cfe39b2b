"""What a program writes by torch.save and safetensors, from programs to verdicts: by step, by name, at the end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import warm_kit
from conftest import environment

from repro_golden.compare.traces import Comparison, compare
from repro_golden.trace import Trace
from repro_golden.trace.families import file_of

TRAIN = """\
import os, pathlib, sys
import torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    optimizer.zero_grad()
    model(torch.ones(4, 3)).pow(2).sum().backward()
    optimizer.step()
def save(value, *paths):
    for path in paths:
        pathlib.Path(os.fsdecode(path)).parent.mkdir(exist_ok=True)
        torch.save(value, path)
"""
NAMES = """\
save([1.0, 2.0], "first.pt")
train()
save(torch.zeros(2), "last.pt.tmp")
save(torch.ones(2), "last.pt.tmp")
os.replace(b"last.pt.tmp", pathlib.Path("last.pt"))
train()
save(torch.zeros(2), "a/model.pt")
save(torch.ones(2), "b/model.pt")
train()
save(torch.zeros(1), "new/model.pt", "new/other.pt")
pathlib.Path("new").rename("whole")
save(torch.ones(1), "whole/model.pt")
"""
STEPS = """\
for step in range(int(sys.argv[1])):
    train()
    save(model.state_dict(), "last.pt")
save({"best": torch.ones(1), "model": torch.ones(2)}, "last.pt", "final.pt")
"""


def recorded(
    folder: Path, program: str, *arguments: str, steps: int | None = None, ignore: str = "", **variables: str
) -> Trace:
    """A program's trace; `steps` after which it is ended."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN + program)
    stop = (["--steps", str(steps)] if steps else []) + (["--ignore", ignore] if ignore else [])
    command = [sys.executable, "-m", "repro", "trace", "--out", "trace", *stop, "--", sys.executable, "train.py"]
    done = warm_kit.run([*command, *arguments], folder, environment() | {"OMP_NUM_THREADS": "1", **variables}, 100)
    assert done.returncode == 0, done.stderr
    return Trace(folder / "trace")


def files(trace: Trace, step: int) -> Mapping[str, float]:
    """The largest number of each file of a step."""
    return {name: row.absmax for row in trace.rows(step) if (name := file_of(row.phase, row.name))}


def test_a_file_that_is_ignored_is_neither_read_nor_told(tmp_path: Path) -> None:
    """Whoever wrote it: the process that trains, or another one."""
    program = """\
import subprocess
other = "import torch; torch.manual_seed(0); torch.save(torch.ones(2), 'cache.2.pt'); torch.save(torch.ones(2), 'x.pt')"
train()
save(torch.ones(2), "cache.1.pt", "last.pt")
subprocess.run([sys.executable, "-c", other], check=True)
train()
"""
    trace = recorded(tmp_path / "a", program, ignore="saved/cache.*")
    assert set(files(trace, 0)) == {"saved/last.pt"}
    looked = str(compare(trace, trace).looked)
    assert "cache" not in looked and "x.pt (another process wrote it)" in looked


def test_a_file_counts_once_with_its_last_content_and_name(tmp_path: Path) -> None:
    """What was written anew or renamed within its step is one file; files of one name in two folders are two."""
    trace = recorded(tmp_path / "names", NAMES)
    assert files(trace, 0) == {"saved/first.pt": 2.0, "saved/last.pt": 1.0}
    assert files(trace, 1) == {"saved/a:model.pt": 0.0, "saved/b:model.pt": 1.0}
    assert files(trace, 2) == {"saved/whole:model.pt": 1.0, "saved/whole:other.pt": 0.0}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Trace]:
    """The program: with three steps, stopped after two or three steps, and with four."""
    folder = tmp_path_factory.mktemp("steps")
    return {
        "whole": recorded(folder / "whole", STEPS, "3"),
        "two": recorded(folder / "two", STEPS, "3", steps=2),
        "stopped": recorded(folder / "stopped", STEPS, "4", steps=3),
        "silent": recorded(folder / "silent", STEPS.replace("    save(model", "    print(model"), "4", steps=3),
    }


def bounded(a: Trace, b: Trace) -> Comparison:
    """A comparison with a run that was asked for fewer steps."""
    return compare(a, b, prefix=True)


@pytest.mark.whole
def test_a_run_that_was_stopped_lacks_no_file(runs: Mapping[str, Trace]) -> None:
    """What the baseline wrote after its last step is none that a stopped run could have written, nor the other way."""
    assert files(runs["whole"], 1).keys() == {"saved/last.pt"}
    assert files(runs["whole"], 2).keys() == {"saved/last.pt", "saved/final.pt"}
    assert bounded(runs["whole"], runs["two"]).equal
    for a, b, side in (("whole", "stopped", "the baseline's"), ("stopped", "whole", "the run's")):
        comparison = bounded(runs[a], runs[b])
        assert comparison.equal, comparison.divergence
        assert {f"final.pt ({side})", f"last.pt ({side})"} <= {*comparison.looked.alone}
        assert not comparison.looked.files


def test_a_file_that_is_no_longer_written_is_a_difference(runs: Mapping[str, Trace]) -> None:
    """Also in a run that was stopped, where the baseline wrote it between two steps."""
    for a, b, kind in (("whole", "silent", "missing"), ("stopped", "silent", "missing"), ("silent", "whole", "added")):
        divergence = bounded(runs[a], runs[b]).divergence
        assert divergence is not None
        assert (divergence.step, divergence.kind) == (0, kind)
        assert divergence.signal.startswith("saved/last.pt/")


OTHERS = """\
import os, shutil, tempfile
for folder in (os.environ["TRITON_CACHE_DIR"], tempfile.gettempdir() + "/torchinductor_me", "removed"):
    os.makedirs(folder, exist_ok=True)
    open(folder + "/made", "w").close()
shutil.rmtree("removed")
open("gone", "w").close()
os.remove("gone")
open("kept", "w").close()
train()
"""


def test_what_is_written_otherwise_is_named(tmp_path: Path) -> None:
    """But for what compilers keep, and what the program removes again."""
    (tmp_path / "temporary").mkdir()
    variables = {"TMPDIR": str(tmp_path / "temporary"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    trace = recorded(tmp_path / "others", OTHERS, **variables)
    assert (trace.end or {})["unread"] == {"file kept": "it is not torch's"}


HELPERS = """\
import multiprocessing, time
fork = multiprocessing.get_context("fork")
save({"out": "runs/one", "when": "2026-11-20"}, "early.pt")
def help(name):
    save({"w": torch.ones(1)}, name)
    os._exit(0)
def run(name):
    process = fork.Process(target=help, args=(name,))
    process.start()
    process.join()
run("before.pt")
for step in range(2):
    train()
    run(f"step-{step}.pt")
"""


def test_what_a_process_writes_that_makes_no_step_is_named(tmp_path: Path) -> None:
    """Whenever it is forked and however it ends; what the process that trains wrote before its first step is read."""
    trace = recorded(tmp_path / "helpers", HELPERS)
    other = "another process wrote it"
    assert (trace.end or {})["unread"] == {
        "saved/before.pt": other, "saved/step-0.pt": other, "saved/step-1.pt": other,
        "saved/early.pt": "2 texts that look like paths or dates",
    }  # fmt: skip


def test_what_imports_torch_may_be_what_writes(tmp_path: Path) -> None:
    """safetensors.torch may be imported before torch, which it imports itself: what it writes then is read too."""
    (tmp_path / "train.py").write_text(
        f"from safetensors.torch import save_file\n{TRAIN}train()\n"
        "save_file({'w': torch.ones(2)}, 'model.safetensors')\n"
    )
    words = [sys.executable, "-m", "repro", "trace", "--out", "trace", "--", sys.executable, "train.py"]
    # not by what keeps processes warm: torch is imported there
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "saved/model.safetensors/w" in {row.name for row in Trace(tmp_path / "trace").rows(0)}

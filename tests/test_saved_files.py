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
    print(done.stderr)  # says why a trace is not whole
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
    assert (trace.end or {})["unread"] == {"file kept": "written by other means than torch.save"}


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


PARTS = """\
def write(file, scale, *values):
    for value in values:
        torch.save({"w": torch.full((2,), float(value) * scale)}, file)
scale = float(sys.argv[1])
train()
with open("all.pt", "wb") as file:
    write(file, scale, 1)
    write(file, 1, 2)
log = open("log.pt", "wb")
write(log, scale, 1)
train()
write(log, 1, 2)
with open("all.pt", "wb") as file:
    file.write(b"head")
    write(file, 1, 3)
    write(file, 1, 4)
with open("all.pt", "ab") as file:
    write(file, 1, 5)
train()
log.close()
with os.fdopen(os.open("all.pt", os.O_RDWR), "r+b") as file:
    file.seek(4)
    write(file, 1, 6)
open("log.pt", "wb").close()
"""


def content_of(trace: Trace, step: int) -> dict[str, float]:
    """The largest number of each tensor in the files of a step."""
    return {row.name: row.absmax for row in trace.rows(step) if file_of(row.phase, row.name)}


def test_what_is_saved_behind_something_in_an_open_file_is_a_part_of_it(tmp_path: Path) -> None:
    """Of several `torch.save` to one open file the last alone was read, and two runs with other weights agreed."""
    trace, other = recorded(tmp_path / "a", PARTS, "1"), recorded(tmp_path / "b", PARTS, "2")
    assert content_of(trace, 0) == {
        "saved/all.pt/w": 1.0, "saved/all.pt/part.1/w": 2.0, "saved/log.pt/w": 1.0,
    }  # fmt: skip
    assert content_of(trace, 1) == {
        "saved/log.pt/part.1/w": 2.0,
        "saved/all.pt/w": 3.0, "saved/all.pt/part.1/w": 4.0, "saved/all.pt/part.2/w": 5.0,
    }  # fmt: skip
    assert content_of(trace, 2) == {"saved/all.pt/w": 6.0}
    divergence = compare(trace, other).divergence
    assert divergence is not None and divergence.signal == "saved/all.pt/w"


MEMORY = """\
import io, safetensors.torch, shutil
def pack(*values):
    buffer = io.BytesIO()
    for value in values:
        torch.save({"w": torch.full((2,), float(value))}, buffer)
    return buffer
def write(name, data):
    pathlib.Path(name).write_bytes(data)
train()
write("x.tmp", pack(1).getvalue())
os.rename("x.tmp", "last.ckpt")
shutil.copy("last.ckpt", "best.ckpt")
os.symlink("last.ckpt", "link.ckpt")
save({"w": torch.full((2,), 9.0)}, "own.pt")
shutil.copy("own.pt", "copy.pt")
train()
write("two.ckpt", pack(2, 3).getvalue())
write("packed", safetensors.torch.save({"v": torch.ones(2)}))
for value in sys.argv[1:]:
    pack(value)
write("part.bin", b"head" + pack(6).getvalue())
"""


def test_what_is_saved_in_memory_has_the_name_of_the_file_that_its_bytes_are_written_to(tmp_path: Path) -> None:
    """Lightning's checkpoints, which are written so, were never read and said to be none of torch's."""
    trace = recorded(tmp_path / "a", MEMORY, "4", "5", "4")
    assert content_of(trace, 0) == {
        "saved/last.ckpt/w": 1.0, "saved/best.ckpt/w": 1.0, "saved/link.ckpt/w": 1.0, "saved/own.pt/w": 9.0,
        "saved/copy.pt/w": 9.0,
    }  # fmt: skip
    second = content_of(trace, 1)
    loose = [value for name, value in second.items() if name.startswith("saved/memory")]
    assert {name: value for name, value in second.items() if not name.startswith("saved/memory")} == {
        "saved/two.ckpt/w": 2.0, "saved/two.ckpt/part.1/w": 3.0, "saved/packed/v": 1.0,
    }  # fmt: skip
    assert sorted(loose) == [4.0, 4.0, 5.0, 6.0]
    assert (trace.end or {})["unread"] == {"file part.bin": "written by other means than torch.save"}
    assert compare(trace, recorded(tmp_path / "b", MEMORY, "5", "4", "4")).equal  # in another order
    assert not compare(trace, recorded(tmp_path / "c", MEMORY, "4", "7", "4")).equal


THREADS = """\
import io, threading
def run(name, value, keep=lambda thread: thread.join()):
    def save_both():
        save({"w": torch.full((1,), float(value))}, name)
        torch.save({"m": torch.full((1,), float(value))}, io.BytesIO())
    thread = threading.Thread(target=save_both, daemon=name == "daemon.pt")
    thread.start()
    keep(thread)
train()
run("joined.pt", 1)
kept = []
run("late.pt", 2, kept.append)
train()
run("daemon.pt", 3, lambda thread: thread.join(60))
"""


def test_what_another_thread_saves_belongs_to_the_step_that_waits_for_it(tmp_path: Path) -> None:
    """To the last where none does; and what a daemon saves, which may end at any time, is named."""
    trace = recorded(tmp_path / "threads", THREADS)
    assert content_of(trace, 0) == {"saved/joined.pt/w": 1.0, "saved/memory/m": 1.0}
    assert content_of(trace, 1) == {"saved/late.pt/w": 2.0, "saved/memory/m": 2.0}
    other = "another thread wrote it"
    assert (trace.end or {})["unread"] == {"saved/daemon.pt": other, "saved/memory": other}


CHURN = """\
import io, itertools, sys, threading
sys.setswitchinterval(1e-6)
filled, listed, over = [{} for _ in range(5000)], [[] for _ in range(5000)], threading.Event()
def fill():
    while not over.is_set():
        for each in filled: each["x"] = []
        for each in filled: each.clear()
        for each in listed: each.append(1)
        for each in listed: each.clear()
def build():
    while not over.is_set():
        global built
        built = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(5)])
        built.more = torch.nn.Linear(1, 1); built.note = torch.ones(1); del built.more, built.note
def write():
    for number in itertools.count():
        if over.is_set(): return
        torch.save({"x": torch.ones(3)}, f"{number % 7}.tmp"); os.replace(f"{number % 7}.tmp", f"{number % 7}.pt")
        torch.save({"x": torch.ones(3)}, io.BytesIO()); open("note", "w").close()
threads = [threading.Thread(target=globals()[name]) for name in sys.argv[1:]]
for thread in threads: thread.start()
for _ in range(33): train()
over.set()
for thread in threads: thread.join()
"""


@pytest.mark.parametrize("threads", [("fill",), ("fill", "build", "write")], ids="-".join)
def test_what_other_threads_make_and_change_meanwhile_ends_no_recording(
    tmp_path: Path, threads: tuple[str, ...]
) -> None:
    """Mappings and lists that fill and empty; modules that are built and files that are renamed."""
    trace = recorded(tmp_path / "churn", CHURN, *threads)
    assert len(trace.steps) == 33 and trace.end is not None


DISTRIBUTED = """\
import torch.distributed.checkpoint as dcp
from torch import distributed
if "RANK" not in os.environ:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
distributed.init_process_group("gloo")
scale, threads = float(sys.argv[1]), 2
def state(factor):
    return {name: value * factor for name, value in model.state_dict().items()} | {"step": 3}
def written(name):
    return dcp.FileSystemWriter(name, thread_count=threads)
train()
dcp.save(state(scale), storage_writer=written("ck"))
future = dcp.async_save(state(scale + 1), storage_writer=written("late"))
train()
future.result()
train()
distributed.destroy_process_group()
"""


def test_a_distributed_checkpoint_is_read(tmp_path: Path) -> None:
    """It was neither read nor named, since its files' names begin with underscores."""
    a, again, other = (recorded(tmp_path / name, DISTRIBUTED, by) for name, by in (("a", "1"), ("b", "1"), ("c", "2")))
    assert {file_of("update", name) for name in content_of(a, 0)} == {
        "saved/ck:__0_0.distcp", "saved/ck:__0_1.distcp", "saved/memory",
    }  # fmt: skip
    assert not content_of(a, 1)
    assert "saved/late:__0_0.distcp/value" in content_of(a, 2)
    assert compare(a, again).equal and (a.end or {})["unread"] == {
        "file .metadata": "written by other means than torch.save"
    }
    divergence = compare(a, other).divergence
    assert divergence is not None and divergence.step == 0
    assert divergence.signal.startswith("saved/ck:__0_")

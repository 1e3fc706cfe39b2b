"""Step calls that torch's hooks alone cannot tell apart: compiled ones, and those of several threads at once."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import warm_kit

from repro_golden.recording.attach.base.steps import Turns
from repro_golden.recording.attach.written.order import dump_name, take_dumps
from repro_golden.trace import Trace, dump_path

COMPILED = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    step()
print([p.tolist() for p in model.parameters()])
"""

THREADS = """
import threading
import torch
together = threading.Barrier(2)
class Slow(torch.optim.SGD):
    def step(self):
        together.wait()
        super().step()
        together.wait()
def train():
    model = torch.nn.Linear(3, 1)
    optimizer = Slow(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
threads = [threading.Thread(target=train) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


ALIKE = """
import gc, weakref
import torch
torch.manual_seed(0)
first, second = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(3, 1)  # no wrapper, though it is called like one's
        self.weight = torch.nn.Parameter(torch.ones(1, 3))
own, other = Own(), torch.nn.Linear(3, 1)
parameters = [*first.parameters(), *second.parameters(), *own.parameters()]
optimizer = torch.optim.SGD(parameters, lr=1)
for _ in range(2):
    optimizer.zero_grad()
    sum(p.square().sum() for p in parameters).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    torch.nn.utils.clip_grads_with_norm_(parameters, 0.01, norm)
    optimizer.step()
print(repr(norm.item()))
gone = [weakref.ref(m.weight) for m in (first, own, other)]
del first, second, own, other, optimizer, parameters
gc.collect()
print([w() is None for w in gone])
"""

CHILDREN = """
import torch
import torch.multiprocessing as mp
def train(rank):
    torch.set_num_threads(1)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
if __name__ == "__main__":
    mp.start_processes(train, nprocs=1, start_method="METHOD")
"""


WHOLE = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
@torch.compile(fullgraph=True, backend="eager")
def clip():
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
for _ in range(2):
    model(torch.ones(2, 3)).sum().backward()
    print(clip().item())
    optimizer.step()
"""

FULL = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
class Own(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])
model = torch.nn.Linear(3, 1)
optimizer = Own(model.parameters())
graphs = []
def backend(graph, inputs):
    graphs.append(graph.code)
    return graph
@torch.compile(fullgraph=True, backend=backend)
def step():
    optimizer.step()
for _ in range(4):
    model(torch.ones(2, 3)).sum().backward()
    step()
    optimizer.zero_grad()
print([p.tolist() for p in model.parameters()], graphs)
"""

ALARM = """
import signal, time
import torch
from torch.utils._python_dispatch import TorchDispatchMode
calls = 0
class Count(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        global calls
        calls += 1
        return function(*args, **(kwargs or {}))
model = torch.nn.Linear(600, 600)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.ones(2, 600)).sum().backward()
    optimizer.step()
with Count():
    for _ in range(3):
        step()
print("calls", calls)
alarms = 0
def alarm(*_):
    raise TimeoutError("the program's own")
signal.signal(signal.SIGALRM, alarm)
for k in range(20):
    signal.setitimer(signal.ITIMER_REAL, 0.02 + k / 1000)
    try:
        until = time.time() + 5
        while time.time() < until:
            step()
    except TimeoutError:
        alarms += 1
        torch.set_grad_enabled(True)  # an optimizer that is interrupted while it leaves its step does not
print("alarms", alarms)
"""


def run(folder: Path, program: str, *before: str) -> str:
    """What a program prints, started by `before`."""
    (folder / "program.py").write_text(program)
    command = [sys.executable, *before, *([sys.executable] if before else []), "program.py"]
    done = warm_kit.run(command, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


TRACED = ("-m", "repro", "trace", "--out", "trace", "--")


@pytest.mark.whole
def test_a_compiled_step_is_a_step(tmp_path: Path) -> None:
    """An optimizer whose step is compiled is recorded each time, and the program's numbers are the same."""
    assert run(tmp_path, COMPILED, *TRACED) == run(tmp_path, COMPILED)
    trace = Trace(tmp_path / "trace")
    assert (len(trace.steps), trace.complete, len({s.root for s in trace.steps})) == (4, True, 4)


def test_steps_of_two_threads_at_once(tmp_path: Path) -> None:
    """Two threads that train a model each at the same time are refused: chance decides whose step comes first."""
    (tmp_path / "program.py").write_text(THREADS)
    command = [sys.executable, *TRACED, sys.executable, "program.py"]
    done = warm_kit.run(command, tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "repro: two threads train, each with an optimizer of its own, and chance may decide whose step comes first: "
        "let one thread (one executor) make the steps of both, or record them one at a time",
    )


def test_parameters_of_one_name(tmp_path: Path) -> None:
    """Parameters that share a name are all recorded, and what the program drops is not kept alive by the recorder."""
    printed = run(tmp_path, ALIKE, *TRACED)
    assert printed == run(tmp_path, ALIKE)
    assert printed.splitlines()[1] == "[True, True, True]"
    trace = Trace(tmp_path / "trace")
    names = {r.name for r in trace.rows(1) if r.phase == "grad" and r.dtype != "metric"}
    assert names == {"weight", "weight#1", "weight#2", "bias", "bias#1", "module.weight", "module.bias"}
    assert trace.steps[1].metrics["grad_norm"] == float(printed.splitlines()[0])
    assert trace.steps[1].metrics["lr"] == 1


@pytest.mark.whole
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing(tmp_path: Path, method: str) -> None:
    """A child that multiprocessing started is recorded to its end, however it was started."""
    run(tmp_path, CHILDREN.replace("METHOD", method), *TRACED)
    trace = Trace(tmp_path / "trace")
    assert (len(trace.steps), trace.complete) == (3, True)


def test_a_compiled_graph_may_clip(tmp_path: Path) -> None:
    """Clipping inside a graph that must be whole is compiled as without the recorder."""
    assert run(tmp_path, WHOLE, *TRACED) == run(tmp_path, WHOLE)


def test_a_step_in_a_whole_graph_is_a_step(tmp_path: Path) -> None:
    """Of an optimizer of one's own: it failed under the recorder, and is compiled once and alike."""
    assert run(tmp_path, FULL, *TRACED) == run(tmp_path, FULL)
    trace = Trace(tmp_path / "trace")
    assert (len(trace.steps), trace.complete, len({s.root for s in trace.steps})) == (4, True, 4)
    assert {row.name for row in trace.rows(3) if row.phase == "grad"} == {"weight", "bias"}


def test_what_the_program_raises_reaches_it(tmp_path: Path) -> None:
    """A signal handler's exception is the program's wherever it strikes, and its dispatch modes see only its calls."""
    plain, recorded = run(tmp_path, ALARM).splitlines(), run(tmp_path, ALARM, *TRACED).splitlines()
    assert recorded == plain
    assert recorded[1] == "alarms 20"


def test_of_whole_signals_the_lowest_rank_has_its_own(tmp_path: Path) -> None:
    """Ranks that end in any order: two runs compare the same shard, whoever wrote first."""
    at, folders = (0, "grad", "w"), [tmp_path / "1", tmp_path / "2", tmp_path / "nothing"]
    for folder in folders[:2][::-1]:
        folder.mkdir()
        (folder / dump_name(at)).write_bytes(folder.name.encode())
    (tmp_path / "trace").mkdir()
    take_dumps([(folder, ()) for folder in folders], tmp_path / "trace", 0, [at])
    assert dump_path(tmp_path / "trace", *at).read_bytes() == b"1"


def turns_of(*steps: tuple[str, int]) -> str:
    """What is said of steps by label and number of a thread, of which all live until the end."""
    turns, message = Turns(), [""]
    threads: dict[int, tuple[threading.Thread, list[str]]] = {}
    done = threading.Event()
    asked = {number: threading.Semaphore(0) for _, number in steps}
    answered = threading.Semaphore(0)

    def work(number: int, labels: list[str]) -> None:
        while True:
            asked[number].acquire()
            if done.is_set():
                return
            message[0] = message[0] or turns.take((labels.pop(0),))
            answered.release()

    for label, number in steps:
        if number not in threads:
            labels: list[str] = []
            threads[number] = threading.Thread(target=work, args=(number, labels)), labels
            threads[number][0].start()
        threads[number][1].append(label)
        asked[number].release()
        answered.acquire()
    done.set()
    for number, (thread, _) in threads.items():
        asked[number].release()
        thread.join()
    return message[0]


@pytest.mark.parametrize("beside", [True, False])
def test_a_thread_that_has_ended(beside: bool) -> None:
    """Which of two threads trains first is chance where one lived beside the other, though that one is gone by now.

    Where it began after the other's end it is none, and a third that has the number of the one that is gone is not it.
    """
    turns, go, told = Turns(), threading.Event(), list[str]()

    def second() -> None:
        go.wait()
        told.append(turns.take(("b",)))

    waiting = threading.Thread(target=second)
    first = threading.Thread(target=lambda: told.append(turns.take(("a",))))
    for thread in [waiting, first] if beside else [first]:
        thread.start()
    first.join()
    others = [threading.Thread(target=go.wait) for _ in range(20)]
    for thread in others:
        thread.start()
    assert first.ident in [thread.ident for thread in others]
    if not beside:
        waiting.start()
    go.set()
    for thread in [waiting, *others]:
        thread.join()
    assert list(map(bool, told)) == [False, beside]


@pytest.mark.parametrize(
    ("steps", "refused"),
    [
        ([("a", 1), ("b", 2), ("a", 1), ("b", 2)], True),
        ([("a", 1), ("b", 2)], True),  # neither is the main thread, and both live
        ([("a", 1), ("a", 2), ("a", 1)], False),  # a pool of threads hands one optimizer on
        ([("a", 1), ("b", 1), ("a", 1), ("b", 1)], False),
        ([("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 1)], False),
    ],
)
def test_threads_that_race_are_refused(steps: list[tuple[str, int]], refused: bool) -> None:
    """Two threads with an optimizer each are refused; threads that share their optimizers are not."""
    assert bool(turns_of(*steps)) is refused

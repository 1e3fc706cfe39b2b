"""Ranks that make unequal numbers of steps, as with DDP's `Join`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from attach_kit import traced
from conftest import environment

from repro_golden.recording.attach.base.settings import Settings
from repro_golden.recording.attach.gathered.collect import Collected, Gathering
from repro_golden.recording.attach.gathered.run import environment_for
from repro_golden.recording.attach.stepping import uneven
from repro_golden.recording.attach.written.records import Records
from repro_golden.trace import Header, Trace
from repro_golden.trace.frames import pack
from repro_golden.trace.model import RECORDER
from repro_golden.trace.writer import digest_row, metric_row

JOINED = """
import sys
import torch, torch.distributed as dist
from torch.distributed.algorithms.join import Join
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Join([model]):
    for step in range(2 + 2 * dist.get_rank()):
        optimizer.zero_grad()
        (model(torch.ones(2, 3) * (1 + dist.get_rank())).sum() * (2 if step == 3 and sys.argv[1:] else 1)).backward()
        optimizer.step()
dist.destroy_process_group()
"""


def gathered(
    folder: Path, made: tuple[int, ...], code: int = 0, most: int | None = None, **end: bool | None
) -> Collected:
    """What becomes of ranks that made so many steps; each saves a file at its end."""
    raw = folder / "raw"
    raw.mkdir(parents=True)
    gathering = Gathering(raw, folder / "out", lambda _, steps: Header({}, "", {}, {}, steps), None, most=most)
    for rank in range(len(made)):
        about = {"recorder": RECORDER, "rank": rank, "world": len(made), "outside": []}
        (raw / f"rank-{rank:05d}.json").write_text(json.dumps(about))
    for step in range(max(made)):
        for rank, steps in enumerate(made):
            if step < steps:
                late = [digest_row("update", f"{name}{rank}", b"") for name in ("end/rng/", "saved/")]
                rows = [metric_row("update", f"x{rank}", step), *(late if step == steps - 1 else ())]
                with (raw / f"rank-{rank:05d}.log").open("ab") as log:
                    log.write(pack(step, rows, "a"))
        gathering.poll()
    for rank, steps in enumerate(made):
        told = {"steps": steps, "stopped": False, "modules": [], "over": True, "failed": False, **end}
        (raw / f"rank-{rank:05d}.end").write_text(json.dumps(told))
    return gathering.finish(["program"], code)


ENDS = {
    "": False,
    "raise ValueError": True,
    "sys.exit(1)": True,
    "raise SystemExit(1)": None,
    "sys.exit(0)": False,
    "sys.exit('no data')": True,
    "exit(1)": True,
    "exit()": False,
    "threading.Thread(target=sys.exit).start(); raise SystemExit(3)": None,
    """
try: sys.exit()
except SystemExit: pass
raise SystemExit(3)""": None,
    """
try: sys.exit(1)
except SystemExit: pass
try: sys.exit(0)
finally: print("over")""": False,
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); os.kill(os.getpid(), signal.SIGTERM)": True,
}
"""How a program ends, and whether it has failed; None where that is not known."""


@pytest.mark.parametrize(
    "last", [pytest.param(end, marks=pytest.mark.whole if k > 3 else ()) for k, end in enumerate(ENDS)]
)
def test_a_program_that_an_exception_or_its_exit_code_ends_has_failed(tmp_path: Path, last: str) -> None:
    """Its launcher may end with 0 all the same, as a shell that waits for what it has started."""
    assert ended(tmp_path, last) == {"steps": 2, "over": True, "failed": ENDS[last]}


@pytest.mark.parametrize("last", [*list(ENDS)[1:3], pytest.param("", marks=pytest.mark.whole)])
def test_a_child_that_fails_is_known_by_what_ends_it(tmp_path: Path, last: str) -> None:
    """A process of `multiprocessing` ends without the hooks of other ones."""
    assert ended(tmp_path, last, child=True)["failed"] is ENDS[last]


def test_a_child_that_is_forked_inside_of_a_handler_has_not_failed(tmp_path: Path) -> None:
    """The exception that is handled meanwhile is its parent's."""
    assert ended(tmp_path, "", child=True, inside="ValueError")["failed"] is False


def ended(folder: Path, last: str, *, child: bool = False, inside: str = "") -> dict[str, object]:
    """How a program says that it ended, or a child of it that does all."""
    lines = [
        "import threading", "net = torch.nn.Linear(2, 1)", "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
        "for _ in range(2): optimizer.zero_grad(); net(torch.ones(2)).sum().backward(); optimizer.step()", last,
    ]  # fmt: skip
    if child:
        lines = ["def main():", *(f"    {line}" for line in lines)]
        lines += [
            "process = multiprocessing.get_context('fork').Process(target=main)",
            f"try: raise {inside}" if inside else "if True:",
            *([f"except {inside}:"] if inside else []),
            "    process.start(); process.join()",
        ]
    (folder / "train.py").write_text("\n".join(["import multiprocessing, os, signal, sys, torch", *lines, ""]))
    (folder / "raw").mkdir()
    env = environment_for(Settings(str(folder / "raw")), environment())
    subprocess.run([sys.executable, str(folder / "train.py")], env=env, capture_output=True, check=False)
    told = json.loads((folder / "raw" / "rank-00000.end").read_text())
    return {name: told[name] for name in ("steps", "over", "failed")}


def test_steps_that_some_ranks_made_alone_are_theirs(tmp_path: Path) -> None:
    """All of them are in the trace, which is whole; what the others left, and their end, comes with the last step."""
    collected = gathered(tmp_path, (2, 4, 1))
    assert (collected.complete, collected.short) == (True, "")
    trace = Trace(tmp_path / "out")
    names = [[row.name for row in trace.rows(k)] for k in range(len(trace.steps))]
    assert names[:3] == [["x0", "x1", "x2"], ["x0", "x1"], ["x1"]]
    assert sorted(names[3]) == sorted(
        ["x1", *(f"{name}{rank}" for name in ("end/rng/", "saved/") for rank in range(3))]
    )


@pytest.mark.parametrize(("code", "end"), [(1, {}), (0, {"over": False}), (0, {"failed": True}), (0, {"failed": None})])
def test_a_rank_that_failed_or_may_be_lost_makes_no_whole_trace(
    tmp_path: Path, code: int, end: dict[str, bool | None]
) -> None:
    """Fewer steps of one rank are then no smaller share: it may have made more."""
    collected = gathered(tmp_path, (2, 4), code, **end)
    assert not collected.complete and collected.steps == 2
    message, _, fix = collected.short.partition("; ")
    assert message == "ranks recorded different numbers of steps: 2 on rank 0, 4 on rank 1"
    assert ("sys.exit(CODE)" in fix) is (end == {"failed": None})


@pytest.mark.parametrize(("most", "steps"), [(1, 1), (2, 2), (3, 3), (9, 4)])
def test_as_many_as_were_asked_for(tmp_path: Path, most: int, steps: int) -> None:
    """Where more are asked for than a rank has, the others' go on."""
    collected = gathered(tmp_path, (2, 4), most=most)
    assert (collected.complete, collected.steps) == (True, steps)


def test_whom_a_rank_waits_for(tmp_path: Path) -> None:
    """Neither for one that has ended by itself nor for one that was ended. One that Ray may call again has not."""
    records = Records(Settings(str(tmp_path)))
    records.open({"rank": 0, "world": 1})
    told = []
    for over, stopped in ((False, False), (True, False), (True, True)):
        records.log.put(".end", {"stopped": stopped, "over": over})
        told.append((records.all_ended, records.some_stopped))
    assert told == [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize(
    ("file", "made", "stopped", "ends"),
    [
        (f"{uneven.COLLECTIVES}x.py", 1, True, True),
        (f"{uneven.COLLECTIVES}x.py", 3, False, False),
        (f"{uneven.PASSES}x.py", 1, True, False),
        (f"{uneven.PASSES}x.py", 3, True, True),
        ("train.py", 3, True, False),
    ],
)
def test_who_waits_for_a_rank_that_was_ended_is_ended(
    monkeypatch: pytest.MonkeyPatch, file: str, made: int, stopped: bool, ends: bool
) -> None:
    """In a collective, or in the pass of a step that nobody asked for; elsewhere the program is at work."""
    monkeypatch.setattr(uneven, "_SECONDS", 0.01)
    ended = threading.Event()
    session = SimpleNamespace(dead=False, made=made, settings=Settings("", steps=3))

    def stop() -> None:
        session.dead = True
        ended.set()

    session.stop = stop
    code = {"ended": ended, "wait": ended.wait}
    exec(compile("def wait(): return ended.wait(0.5)", file, "exec"), code)  # noqa: S102 - as code of such a file
    uneven.watch(session, lambda: stopped)
    assert code["wait"]() is ends  # type: ignore[operator]
    session.dead = True


@pytest.mark.whole
def test_ranks_on_unequal_shares(tmp_path: Path) -> None:
    """Each step of each rank is compared, and who asks for as many as the shortest makes waits for no other."""
    whole, _ = traced(tmp_path, JOINED, "whole", ())
    other, _ = traced(tmp_path, JOINED, "other", (), "other")
    assert len(whole.steps) == 4 and whole.complete
    assert [a.root == b.root for a, b in zip(whole.steps, other.steps, strict=True)] == [True, True, True, False]
    begin = time.monotonic()
    for steps in (2, 3):
        part, _ = traced(tmp_path, JOINED, f"part{steps}", ("--steps", str(steps)))
        assert part.complete and [s.root for s in part.steps] == [s.root for s in whole.steps[:steps]]
    assert time.monotonic() - begin < 60, "a rank waits as long for another"

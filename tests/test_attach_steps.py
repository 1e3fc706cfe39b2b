"""Where recorded steps end, whose they are, and what comes of several optimizers and ranks."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attach_kit import traced
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from repro_bisect.probe.answers import Skip, reason_of, unusable
from repro_golden.base.errors import ReproError
from repro_golden.compare.coverage import coverage_of
from repro_golden.compare.step_difference import round_of
from repro_golden.fingerprint import fingerprint
from repro_golden.fingerprint.placement import shard
from repro_golden.recording.attach.alive.readings import gradients_of, handed_to
from repro_golden.recording.attach.base.steps import Steps
from repro_golden.recording.attach.gathered.collect import Gathering
from repro_golden.recording.attach.gathered.merging import OtherRanksError, merge_rows
from repro_golden.recording.attach.written.order import as_planted, may_be
from repro_golden.replay.children import ChildFailure
from repro_golden.repository.git import Git
from repro_golden.trace import Header, Row, Trace
from repro_golden.trace.families import optimizers
from repro_golden.trace.frames import pack
from repro_golden.trace.model import RECORDER
from repro_golden.trace.signals import Signals
from repro_golden.trace.step import Step
from repro_golden.trace.step_log import Order
from repro_golden.trace.writer import metric_row

PAIR = """
import sys
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
actor, critic = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
class Agent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        parts = {"actor": actor, "critic": critic}
        for name in sys.argv[1].split(","):
            setattr(self, name, parts[name])
agent = Agent()
parameters = {n: list(m.parameters()) for n, m in agent.named_children()}
if sys.argv[2] == "reversed":
    parameters = {n: list(reversed(p)) for n, p in parameters.items()}
optimizers = {n: torch.optim.Adam(p, lr=0.1) for n, p in parameters.items()}
for step in range(6):
    loss = critic(actor(torch.ones(4, 3))).square().mean()
    loss.backward()
    order = list(optimizers) if step % 2 else list(reversed(optimizers))
    for name in order if sys.argv[3] == "changing" else ("actor", "critic"):
        optimizers[name].step()
    for optimizer in optimizers.values():
        optimizer.zero_grad()
"""

ALIKE = """
import sys
import torch
torch.set_num_threads(1)
def layer(size):
    torch.manual_seed(size)
    return torch.nn.Linear(size, 1)
layers = [layer(2), layer(3)]
garbage = []
for round in range(4):
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in layers]
    garbage += [[0] * round * 10 for _ in range(round * len(sys.argv[1]))]
    for model in layers:
        model(torch.ones(2, model.in_features)).sum().backward()
    for k in (1, 0) if sys.argv[1] == "swapped" else (0, 1):
        optimizers[k].step()
        optimizers[k].zero_grad()
"""

WRAPPED = """
import sys
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(3, 2)
def __init__(self, inner):
    torch.optim.Optimizer.__init__(self, inner.param_groups, {})
    self.inner = inner
    self.weight, self.bias = (p.detach().clone() for p in model.parameters())
def step(self):
    self.inner.step()
    with torch.no_grad():
        for p, slow in zip(model.parameters(), (self.weight, self.bias)):
            p.copy_(slow.lerp_(p, 0.5))
kind = type(sys.argv[1], (torch.optim.Optimizer,), {"__init__": __init__, "step": step})
optimizer = kind(torch.optim.AdamW(model.parameters(), lr=0.1))
for _ in range(3):
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

LONG = """
import atexit, sys, time
import torch
atexit.register(lambda: print("the end was reached"))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**9):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    print("made", step + 1)
"""

RANKS = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(2, 3) * (1 + dist.get_rank())).sum().backward()
    optimizer.step()
"""


def test_order_plays_no_part(tmp_path: Path) -> None:
    """Other orders of registration, of parameters and of the optimizers' steps give the same trace."""
    first, _ = traced(tmp_path, PAIR, "first", (), "actor,critic", "plain", "fixed")
    other, _ = traced(tmp_path, PAIR, "other", (), "critic,actor", "reversed", "changing")
    assert len(first.steps) == 12
    assert [s.root for s in other.steps] == [s.root for s in first.steps]
    assert {r.name for r in first.rows(2) if r.phase == "grad"} == {"actor.bias", "actor.weight"}
    assert {r.name for r in first.rows(3) if r.phase == "grad"} == {
        "optimizer.1/critic.bias", "optimizer.1/critic.weight"
    }  # fmt: skip


def test_the_name_of_a_wrapper_s_class_plays_no_part(tmp_path: Path) -> None:
    """A wrapper is before what it wraps, whatever it is called; what it keeps is no copy, and counts once."""
    first, _ = traced(tmp_path, WRAPPED, "first", (), "Lookahead")
    for k, name in enumerate(("Look", "Slow", "Average")):
        other, _ = traced(tmp_path, WRAPPED, f"other{k}", (), name)
        assert [s.root for s in other.steps] == [s.root for s in first.steps], name
    names = {row.name for row in first.rows(0)}
    assert {"own/weight", "optimizer.1/exp_avg/weight"} <= names
    assert not [name for name in names if name.startswith("copy/")]
    looked = coverage_of(first)
    assert (looked.parameters, looked.gradients) == (2, 2)


class _Container(torch.optim.Optimizer):
    """As torchtitan's: an optimizer of all parameters, whose step is the steps of others."""

    def __init__(self, *models: torch.nn.Module) -> None:
        self.optimizers = [torch.optim.Adam(model.parameters()) for model in models]
        super().__init__([p for model in models for p in model.parameters()], {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step(closure)


def test_a_container_of_optimizers_is_none_itself() -> None:
    """What it holds steps once, in its outermost call; one that keeps something or steps more is an optimizer."""
    models = torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)
    container = _Container(*models)
    heard: list[Any] = []
    steps = Steps(
        lambda optimizer, outermost: heard.append((optimizer, outermost)),
        lambda made: heard.append(made.optimizers), handed_to, gradients_of
    )  # fmt: skip
    hooks = [register_optimizer_step_pre_hook(lambda o, *_: steps.enter(o)),
             register_optimizer_step_post_hook(lambda o, *_: steps.leave(o))]  # fmt: skip
    inner = container.optimizers
    for number in range(2):
        container.step()
        assert heard[:2] == [(inner[0], True), (inner[1], False)]
        assert heard.pop() == inner
        assert all(not outermost for _, outermost in heard[2:])
        heard.clear()
        assert handed_to(container) == inner, number
    for step in (lambda o: o.step(), lambda _: None):
        heard.clear()
        steps.outer(step, lambda o: o, lambda _, stepped, __: not stepped)(container)  # as a gradient scaler does
        assert heard[:2] == [(inner[0], True), (inner[1], False)] and heard.pop() == inner
        assert all(container is not part for told in heard for part in told)
    for hook in hooks:
        hook.remove()
    container.slow = torch.ones(2)  # type: ignore[attr-defined]
    assert handed_to(container) == [container]
    del container.slow
    container.state[models[0].weight]["slow"] = torch.ones(2)
    assert handed_to(container) == [container]
    container.state.clear()
    container.add_param_group({"params": [torch.ones(1, requires_grad=True)]})
    assert handed_to(container) == [container]
    assert handed_to(inner[0]) == [inner[0]]


def test_a_program_is_ended_after_the_steps_asked_for(tmp_path: Path) -> None:
    """`--steps N` ends an endless program at its N+1st step, with what it printed and a complete trace."""
    trace, printed = traced(tmp_path, LONG, "trace", ("--steps", "3"))
    assert printed.splitlines() == ["made 1", "made 2", "made 3"]
    assert (len(trace.steps), trace.complete) == (3, True)


def test_a_stream_that_another_thread_holds_does_not_keep_a_program_from_its_end(tmp_path: Path) -> None:
    """It writes to a pipe that nobody reads, or wrote when the program was forked. The other streams are flushed."""
    held = """
import os, threading, time
held = os.fdopen(os.pipe()[1], "wb")
threading.Thread(target=held.write, args=(bytes(1 << 20),), daemon=True).start()
kept = open("kept", "w")
kept.write("kept")
time.sleep(0.5)
"""
    trace, printed = traced(tmp_path, held + LONG, "trace", ("--steps", "2"))
    assert printed.splitlines() == ["made 1", "made 2"]
    assert (len(trace.steps), trace.complete) == (2, True)
    assert (tmp_path / "kept").read_text() == "kept"


@pytest.mark.whole
def test_all_ranks_are_ended_together(tmp_path: Path) -> None:
    """Ranks that wait for each other in every step all end after the steps asked for, and so does their launcher."""
    trace, _ = traced(tmp_path, RANKS, "trace", ("--steps", "2", "--ranks", "2"))
    assert (len(trace.steps), trace.complete) == (2, True)
    assert trace.header.subject["groups"] == {"0": [0, 1]}
    assert trace.header.identity["layout"]["ranks"] == "2"


def gathered(raw: Path, ranks: list[list[str]], folder: str) -> list[list[str]]:
    """The names of each step's rows, of ranks whose optimizers stepped in an order; the k-th step of one holds k."""
    raw.mkdir()
    for rank, order in enumerate(ranks):
        made: dict[str, int] = {}
        with (raw / f"rank-{rank:05d}.log").open("wb") as log:
            for step, label in enumerate(order):
                made[label] = made.get(label, -1) + 1
                log.write(pack(step, [metric_row("update", f"{label}{made[label]}", 1.0)], label))
        about = f'{{"recorder": {RECORDER}, "rank": {rank}, "world": {len(ranks)}, "outside": []}}'
        (raw / f"rank-{rank:05d}.json").write_text(about)
        (raw / f"rank-{rank:05d}.end").write_text(f'{{"steps": {len(order)}, "stopped": false, "modules": []}}')
    out = raw.parent / folder
    gathering = Gathering(raw, out, lambda _, steps: Header({}, "", {}, {}, steps), None)
    assert gathering.finish(["program"], 0).complete
    trace = Trace(out)
    return [[r.name for r in trace.rows(k)] for k in range(len(trace.steps))]


@given(st.data())
def test_ranks_in_other_orders_line_up(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever order each rank steps its optimizers in, once each a round, the merged steps are the same."""
    labels = data.draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True))
    rounds = data.draw(st.integers(1, 3))
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [[label for _ in range(rounds) for label in data.draw(st.permutations(labels))] for _ in range(2)]
    usual = [sorted(labels) * rounds] * 2
    assert gathered(folder / "a", ranks, "of-a") == gathered(folder / "b", usual, "of-b")


@given(st.data())
def test_each_step_of_a_trace_is_found_in_each_ranks_own_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A signal is asked for by the trace's step and name, and is met where the rank made it, under its plain name."""
    labels = data.draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True))
    rounds = data.draw(st.integers(1, 3))
    ranks = [[label for _ in range(rounds) for label in data.draw(st.permutations(labels))] for _ in range(2)]
    folder = tmp_path_factory.mktemp("order")
    names = [name for (name,) in gathered(folder / "raw", ranks, "out")]
    orders = (Trace(folder / "out").end or {}).get("rounds", [])
    made = [[f"{label}{order[:k].count(label)}" for k, label in enumerate(order)] for order in ranks]
    for step, name in enumerate(names):
        planted = as_planted(orders, 0, (step, "update", name))
        assert len(planted) == max(1, len(orders)) <= 2
        for rank, order in enumerate(made):
            at, _, met = planted[rank if planted[1:] else 0]
            assert met == order[at] + (f"@{rank}" if planted[1:] else "")
            assert may_be((step, "update", name), (at, "update", order[at]), len(labels))


@pytest.mark.parametrize(
    "raw", [None, 5, [5], [[1]], [["x", [[0, 0]]]], {"0": []}, [[2, [[0]]]], [[1, []]], [[0, [[0, 0]]]]]
)
def test_rounds_in_no_such_form_tell_nothing(raw: object) -> None:
    """A closing line that is damaged there leaves the trace's order."""
    assert Order.read(raw).around(0) is None


def test_a_round_is_found_wherever_it_lies() -> None:
    """The steps of a round have its first one, and its order, behind others of other lengths."""
    alone, both = [[0, 0]], [[1, 0], [0, 1]]
    order = Order.read([[4, alone], [1, both], [1, alone], [2, both]])
    firsts = [0, 1, 2, 3, 4, 4, 6, 7, 7, 9, 9]
    assert [place and place[0] for place in map(order.around, range(12))] == [*firsts, None]
    assert [len(place[1]) for place in map(order.around, range(11)) if place] == [1, 1, 1, 1, 2, 2, 1, 2, 2, 2, 2]


def test_what_one_rank_lacks_is_told() -> None:
    """What only one of two ranks has of what both own does not pass for both; what a stage alone owns does."""
    both = [metric_row("update", "shared", 1.0), metric_row("grad", "shared", 2.0)]
    stage = [metric_row("update", "own", 3.0), metric_row("grad", "own", 4.0)]
    merged = merge_rows([[*both, *stage, metric_row("update", "skipped", 1.0)], both[:1]])
    names = {(r.phase, r.name) for r in merged}
    assert names == {
        ("update", "shared"), ("grad", "shared@0"), ("update", "skipped@0"), ("update", "own"), ("grad", "own")
    }  # fmt: skip


def _held(*signals: tuple[str, str, torch.Tensor, Any]) -> list[Row]:
    """What one rank in process writes of tensors with their placements."""
    taken = Signals()
    for signal in signals:
        taken.take(*signal)
    step = Step(parts=True)
    taken.into(step)
    return step.rows


def test_in_process_a_signal_is_every_ranks_unless_its_placement_says_whose() -> None:
    """What has no placement must be on all ranks; a stage's weights need not, but gradient and update go together."""
    w, halves = torch.arange(6.0), torch.arange(8.0).chunk(2)
    whole = shard("w", (6,), 0, 0, 1)
    stage = [("grad", "w", w, whole), ("update", "w", w, whole)]
    first, second = ([("update", "s", halves[k], shard("s", (8,), 0, k, 2)), ("forward", "c", w, None)] for k in (0, 1))

    def named(*ranks: list[tuple[str, str, torch.Tensor, Any]]) -> set[str]:
        return {f"{row.phase} {row.name}" for row in merge_rows([_held(*rank) for rank in ranks], everywhere=True)}

    usual = {"grad w", "update w", "update s", "forward c"}
    assert named([*stage, *first], second) == usual, "one stage's weight"
    assert named([*stage, *first], [*stage, *second]) == usual, "replicas"
    assert named([*stage, *first], [stage[0], *second]) == (usual - {"update w"}) | {"update w@0"}
    assert named([*stage, *first], [stage[1], *second]) == (usual - {"grad w"}) | {"grad w@0"}
    assert named([*stage, *first], second[:1]) == (usual - {"forward c"}) | {"forward c@0"}
    both = [[*rank, ("grad", *rank[0][1:])] for rank in (first, second)]
    assert named(*both, *both) == {"grad s", "update s", "forward c"}
    assert named(*both, both[0], second) == {"grad s@0", "grad s@1", "grad s@2", "update s", "forward c"}
    rows = list(merge_rows([_held(stage[0]), []], everywhere=True))
    alone = Signals()
    alone.take(*stage[0])
    assert rows == alone.rows(), "a tensor that one rank holds whole is written as one process writes it"


@pytest.mark.parametrize("odd", [None, 2], ids=["replicas", "one parted"])
def test_replicas_of_a_shard_that_part_are_told(odd: int | None) -> None:
    """Shards on 2 x 2 ranks add up to the tensor; where one differs from its replica, all four keep their rank."""
    whole = torch.arange(8.0)
    ranks = []
    for rank in range(4):
        signals = Signals()
        local = whole.chunk(2)[rank % 2].clone()
        if rank == odd:
            local[1] += 1
        signals.take("update", "w", local, shard("w", (8,), 0, rank % 2, 2))
        ranks.append(signals.rows())
    merged = list(merge_rows(ranks))
    if odd is None:
        assert [(row.name, row.placement, row.fingerprint) for row in merged] == [("w", None, fingerprint(whole))]
    else:
        assert [row.name for row in merged] == [f"w@{rank}" for rank in range(4)]
        assert len({row.fingerprint for row in merged}) == 3


def test_models_of_the_same_names_in_other_orders(tmp_path: Path) -> None:
    """Models that differ in nothing but shapes line up whichever steps first, and new optimizers do not shift names."""
    first, _ = traced(tmp_path, ALIKE, "first", (), "plain")
    other, _ = traced(tmp_path, ALIKE, "other", (), "swapped")
    assert [s.root for s in other.steps] == [s.root for s in first.steps]
    assert len(first.steps) == 8


@pytest.mark.parametrize(("program", "words"), [(PAIR, ("actor,critic", "plain", "changing")), (ALIKE, ("swapped",))])
def test_fewer_steps_are_the_first_ones(tmp_path: Path, program: str, words: tuple[str, ...]) -> None:
    """A run that is ended after some steps shows these as the whole run does, also amid a round of optimizers."""
    whole, _ = traced(tmp_path, program, "whole", (), *words)
    for steps in (1, 2, 3):
        part, _ = traced(tmp_path, program, f"part{steps}", ("--steps", str(steps)), *words)
        assert (part.complete, part.header.steps) == (True, steps)
        assert [s.root for s in part.steps] == [s.root for s in whole.steps[:steps]]
        assert [round_of(part, k) for k in range(steps - steps % 2)] == [(0, 1)] * (steps - steps % 2)
    assert [round_of(whole, k) for k in (2, 3)] == [(2, 3)] * 2


STAGES = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
for stage in range(3, -1, -1):
    parts = [model[k] for k in range(stage, 4)]
    optimizers = [torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)]
    optimizers += [torch.optim.Adam(part.parameters()) for part in parts[:1] if stage < 2]
    for _ in range(2):
        for optimizer in optimizers:
            model(torch.ones(2, 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def test_a_stage_of_a_training_begins_a_round(tmp_path: Path) -> None:
    """What is made for a new stage steps after all that the stage before did, in the trace too, and in part of it."""
    whole, _ = traced(tmp_path, STAGES, "whole", ())
    made = [optimizers(whole.rows(k)) for k in range(12)]
    assert [set.union(*made[k:j]) for k, j in ((0, 2), (2, 4), (4, 8), (8, 12))] == [
        {""}, {"optimizer.1/"}, {"optimizer.2/", "optimizer.3/"}, {"optimizer.4/", "optimizer.5/"}
    ]  # fmt: skip
    assert [sorted(whole.as_made(k)) for k in (3, 4, 7, 8)] == [[3], [4, 5], [6, 7], [8, 9]]
    part, _ = traced(tmp_path, STAGES, "part", ("--steps", "4"))
    assert [s.root for s in part.steps] == [s.root for s in whole.steps[:4]]


def test_what_a_program_did_before_it_was_ended_is_no_part(tmp_path: Path) -> None:
    """A step that differed ends the run: of the step under way what the program writes beside may never come."""
    raw, ended = tmp_path / "raw", False
    raw.mkdir()
    about = f'{{"recorder": {RECORDER}, "rank": 0, "world": 1, "outside": []}}'
    (raw / "rank-00000.json").write_text(about)

    def more(step: int) -> list[Row] | None:
        if step and ended:
            raise ReproError(f"no dump of step {step}: the run ended before it")
        return None if step else [metric_row("forward", "beside", 1.0)]

    gathering = Gathering(raw, tmp_path / "out", lambda _, steps: Header({}, "", {}, {}, steps), None, more)
    with contextlib.closing(gathering), (raw / "rank-00000.log").open("wb") as log:
        for step in range(2):
            log.write(pack(step, [metric_row("update", "x", 1.0)], "a"))
        log.flush()
        assert len(gathering.poll()) == 1
        ended = True
        assert gathering.finish(["program"], -9, "diverged").steps == 1


def test_a_rank_twice_or_missing_is_an_error(tmp_path: Path) -> None:
    """Two processes of one rank, or fewer ranks than there must be, are one line each and no trace."""
    raw = tmp_path / "raw"
    raw.mkdir()
    row: Row = metric_row("update", "x", 1.0)
    for name, rank in (("rank-00000", 0), ("rank-00000-7", 0)):
        (raw / f"{name}.log").write_bytes(pack(0, [row], "a"))
        (raw / f"{name}.json").write_text(f'{{"recorder": {RECORDER}, "rank": {rank}, "world": 1, "outside": []}}')

    def finish() -> None:
        Gathering(raw, tmp_path / "out", lambda _, steps: Header({}, "", {}, {}, steps), 2).finish(["program"], 0)

    with pytest.raises(ReproError, match="2 processes trained as rank 0: trace one training by a command of its own"):
        finish()
    about = json.loads((raw / "rank-00000-7.json").read_text())
    (raw / "rank-00000-7.json").write_text(json.dumps(about | {"size": 3, "group": "critic"}))
    with pytest.raises(ReproError, match=r"2 processes trained as rank 0: .* resources.other_ranks = 1"):
        finish()
    (raw / "rank-00000-7.json").unlink()
    (raw / "rank-00000-7.log").unlink()
    with pytest.raises(OtherRanksError, match=r"1 of 2 ranks recorded steps \(missing: \[1\]"):
        finish()
    for rank in (0, 1, 2):
        (raw / f"rank-{rank:05d}.log").write_bytes(pack(0, [row], "a"))
        (raw / f"rank-{rank:05d}.json").write_text(json.dumps(about | {"rank": rank, "world": 3}))
    with pytest.raises(
        OtherRanksError, match="more ranks train than the 2 that are asked for: `--ranks 3` before --"
    ) as more:
        finish()
    reason = reason_of(ChildFailure("ranks", 1, str(more.value), ""), Git(tmp_path))
    assert "crash" not in reason and "another end" not in unusable("GOOD", Skip(reason))

"""What a file has of optimizers and schedules: settings count by what they do, and states by their places."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from trace_kit import HEADER

from repro_golden.compare.traces import compare
from repro_golden.recording.attach.written.saving import content
from repro_golden.trace import Trace, TraceWriter
from repro_golden.trace.signals import Signals

State = dict[str, Any]


class Warmup:
    """A schedule's rate as an object, which torch saves with its attributes."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        """The part of the rate at a step."""
        return min(1.0, (step + 1) / self.steps)


def one_group(model: torch.nn.Module) -> list[State]:
    """All parameters in one."""
    return [{"params": list(model.parameters())}]


def two_groups(model: torch.nn.Module) -> list[State]:
    """One for each layer, which leaves parameters in their order."""
    return [{"params": list(layer.parameters())} for layer in model.children()]


def by_kind(model: torch.nn.Module) -> list[State]:
    """Weights and biases, as where only the former decay: a place is another parameter's."""
    return [{"params": [p for p in model.parameters() if (p.ndim > 1) is wide]} for wide in (True, False)]


def half_decayed(model: torch.nn.Module) -> list[State]:
    """One for each layer, of which the second does not decay."""
    first, second = two_groups(model)
    return [first, second | {"weight_decay": 0.0}]


def checkpoint(
    groups: Callable[[torch.nn.Module], list[State]] = one_group,
    rate: Callable[[int], float] = lambda step: min(1.0, (step + 1) / 3),
    **settings: Any,
) -> State:
    """What is saved after two steps of a small model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = AdamW(groups(model), lr=0.1, **settings)
    schedule = LambdaLR(optimizer, rate)
    for _ in range(2):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        schedule.step()
    return copy.deepcopy({"opt": optimizer.state_dict(), "sched": schedule.state_dict()})


def trace(folder: Path, file: State, *, groups: int = 1) -> Trace:
    """A run of two steps that saves a file in the second."""
    writer = TraceWriter(folder, HEADER)
    for step in range(2):
        signals = Signals()
        signals.take("update", "w", torch.ones(3))
        for number in range(groups):
            signals.take("update", f"lr/{number}" if number else "lr", 0.1)
        for name, tensor in content(file)[0].items() if step else ():
            signals.take("update", f"saved/ck.pt/{name}", tensor)
        signals.finish()
        for row in signals.rows():
            writer.add(row)
        writer.end_step(step)
    writer.close({"reason": "finished"})
    return Trace(folder)


def in_lightning(file: State) -> State:
    """The same as Lightning has it."""
    return {"optimizer_states": [file["opt"]], "lr_schedulers": [file["sched"]]}


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (checkpoint(foreach=False), "ck.pt/opt.param_groups.*.foreach"),
        (checkpoint(rate=Warmup(3)), "ck.pt/sched.lr_lambdas, ck.pt/sched.lr_lambdas.*.steps"),
        (checkpoint(rate=functools.partial(Warmup.__call__, Warmup(3))), "ck.pt/sched.lr_lambdas"),
        (checkpoint(two_groups), "ck.pt/opt.param_groups.*.params"),
    ],
    ids=["foreach", "an object", "a partial", "two groups"],
)
@pytest.mark.parametrize("form", [dict, in_lightning])
def test_settings_and_groups_in_a_file_count_by_what_they_do(
    tmp_path: Path, form: Callable[[State], State], other: State, told: str
) -> None:
    """They are no difference in either direction, and are named; one more group of one rate is none."""
    groups = len(other["opt"]["param_groups"])
    a, b = trace(tmp_path / "a", form(checkpoint())), trace(tmp_path / "b", form(other), groups=groups)
    comparison = compare(a, b)
    assert comparison.equal and compare(b, a).equal
    assert not comparison.renames
    if form is dict:
        assert told in ", ".join(comparison.looked.settings)
        assert "settings in files that differ, and not compared: ck.pt/" in str(comparison.looked)


def swapped(file: State) -> None:
    """Two states of one shape change places, and groups do not."""
    state = file["opt"]["state"]
    state[0], state[2] = state[2], state[0]


def renumbered(file: State) -> None:
    """Its groups say that each state is another parameter's."""
    file["opt"]["param_groups"][0]["params"].reverse()


def added(key: str, value: Any) -> Callable[[State], None]:
    """A group has another number."""
    return lambda file: file["opt"]["param_groups"][0].__setitem__(key, value)


def moved(file: State) -> None:
    """A state is another."""
    file["opt"]["state"][3]["exp_avg"][1] += 1


def scheduled(file: State) -> None:
    """A schedule's last rate is another."""
    file["sched"]["_last_lr"][-1] *= 2


def numbered(groups: Callable[[torch.nn.Module], list[State]], **more: Any) -> State:
    """A checkpoint whose groups count their steps, and have what else is given."""
    file = checkpoint(groups)
    for group in file["opt"]["param_groups"]:
        group |= {"step": 2, **more}
    return file


@pytest.mark.parametrize(
    ("groups", "change", "signal"),
    [
        (one_group, swapped, "opt.state."),
        (one_group, renumbered, "integers[opt.param_groups.*.params]"),
        (one_group, moved, "opt.state."),
        (one_group, added("lr", 0.3), "floats[opt.param_groups.*.lr]"),
        (one_group, added("d", 0.25), "floats[opt.param_groups.*.d]"),
        (one_group, added("step", 3), "integers[opt.param_groups.*.step]"),
        (one_group, scheduled, "floats[sched._last_lr]"),
        (two_groups, moved, "opt.state."),
        (two_groups, added("lr", 0.3), "floats[opt.param_groups.*.lr]"),
        (two_groups, added("step", 3), "integers[opt.param_groups.*.step]"),
        (two_groups, scheduled, "floats[sched._last_lr]"),
    ],
)
def test_what_a_file_has_of_the_training_is_a_difference(
    tmp_path: Path, groups: Callable[[torch.nn.Module], list[State]], change: Callable[[State], None], signal: str
) -> None:
    """States and rates, and a number of a group that is no setting, also where the groups are others."""
    more = {"d": 0.125} if groups is one_group else {}  # an estimate of Prodigy's
    other = numbered(groups, **more)
    count = len(other["opt"]["param_groups"])
    a, b = trace(tmp_path / "a", numbered(one_group, **more)), trace(tmp_path / "b", other, groups=count)
    assert compare(a, b).equal
    change(other)
    divergence = compare(a, trace(tmp_path / "c", other, groups=count)).divergence
    assert divergence is not None and divergence.signal.startswith(f"saved/ck.pt/{signal}")


def exchanged(file: State) -> State:
    """Two optimizers' checkpoints, each under the other's key."""
    return {"actor": file["critic"], "critic": file["actor"]}


def mixed(file: State) -> State:
    """States under other places than their parameters'."""
    state = file["actor"]["state"]
    return file | {"actor": file["actor"] | {"state": {0: state[1], 1: state[0], 2: state[3], 3: state[2]}}}


@pytest.mark.parametrize("change", [exchanged, mixed])
def test_states_of_others_do_not_pass_for_states_of_other_groups(
    tmp_path: Path, change: Callable[[State], State]
) -> None:
    """A trace does not say which parameter has a place, so states in other places are a difference, whatever groups."""
    sides = []
    for name, groups in (("a", one_group), ("b", by_kind)):
        file = {"actor": checkpoint(groups)["opt"], "critic": checkpoint(groups, amsgrad=True)["opt"]}
        for state in file["critic"]["state"].values():
            state.pop("max_exp_avg_sq")
            state["exp_avg"] += 1
        sides.append(
            trace(tmp_path / name, change(file) if name == "b" else file, groups=len(file["actor"]["param_groups"]))
        )
    comparison = compare(*sides)
    assert comparison.divergence is not None and comparison.divergence.signal.startswith("saved/ck.pt/actor.state.")
    assert not comparison.renames


def test_only_settings_whose_value_is_another_are_named(tmp_path: Path) -> None:
    """Not numbers that one more group repeats; and each name is shown once, however many optimizers have it."""
    sides = []
    for name, groups in (("a", one_group), ("b", half_decayed)):
        optimizer = checkpoint(groups)["opt"]
        file = {f"opt{number}": optimizer for number in range(5)}
        sides.append(trace(tmp_path / name, file, groups=len(optimizer["param_groups"])))
    looked = compare(*sides).looked
    named = {setting.rpartition(".")[2] for setting in looked.settings}
    assert named == {"foreach", "fused", "params", "weight_decay"}
    assert all(f"ck.pt/opt0.param_groups.*.{name}" in str(looked) for name in named)
    assert "and 16 more" in str(looked)

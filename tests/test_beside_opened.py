"""What is read of tensors with more than their bytes, and of what optimizers keep in objects and under other keys."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from beside_kit import read
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from repro_golden.recording.attach.alive.beside import Beside
from repro_golden.recording.attach.alive.names import Names
from repro_golden.recording.attach.alive.readings import CLOSED, Held, Reading
from repro_golden.recording.attach.written.saving import content


def optimizer_of(*parameters: nn.Parameter) -> torch.optim.Optimizer:
    """One whose state is still empty."""
    return torch.optim.SGD(parameters, lr=0.1)


def names_in(state: Mapping[str, Reading]) -> set[str]:
    """Of all tensors of a state."""
    return {f"{kind}/{name}" for kind, reading in state.items() for name in reading.tensors}


class Scales:
    """As bitsandbytes keeps them beside a quantized weight."""

    def __init__(self, nested: Scales | None = None) -> None:
        self.absmax, self.blocksize, self.state2 = torch.ones(2), 64, nested


class Packed(nn.Parameter):
    """Codes whose scales are an attribute, which may know the weight."""

    def __new__(cls) -> Packed:
        """Of two codes."""
        codes = torch.Tensor._make_subclass(cls, torch.ones(2, dtype=torch.int8), False)
        codes.scales, codes.itself = Scales(Scales()), [codes]  # type: ignore[attr-defined]
        return codes  # type: ignore[return-value]


class Quantized(nn.Module):
    """A packed weight, and one whose scales lie in a mapping, as HQQ keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.free = Packed(), nn.Linear(1, 1)
        self.meta = {"scale": torch.ones(2), "nbits": 4, "meta_scale": {"zero": torch.zeros(1)}}


BESIDE = {"scales.absmax", "scales.state2.absmax"}


def test_a_tensor_of_a_class_of_its_own_is_read_with_what_it_has_beside() -> None:
    """A frozen weight whose scales were doubled was called equal, and so was one with its scales in a mapping."""
    model = Quantized()
    held = read(Beside(), 0, model.free)  # type: ignore[arg-type]
    assert {f"frozen/weight.{name}" for name in BESIDE} | {"frozen/weight"} <= held.keys()
    assert held["frozen/weight.scales.absmax"] is model.weight.scales.absmax  # type: ignore[attr-defined]
    assert held["unsaved/meta.scale"] is model.meta["scale"] and "unsaved/meta.meta_scale.zero" in held


def test_a_saved_module_is_its_attributes_too() -> None:
    """Of a module that is saved whole, and of a tensor of a class of its own in a file."""
    saved, left = content(Quantized())
    assert {f"weight.{name}" for name in BESIDE} <= saved.keys() and not left
    assert {"__attributes__..meta.scale", "__attributes__..meta.meta_scale.zero"} <= saved.keys()
    assert {f"w.{name}" for name in BESIDE} <= content({"w": Packed()})[0].keys()


def test_a_saved_module_that_says_its_state_itself() -> None:
    """A wrapper whose `state_dict` takes nothing ended the recording."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)

        def state_dict(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return self.inner.state_dict()

    assert {"weight", "bias"} <= content(Wrapper())[0].keys()


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))])
def test_state_that_is_kept_by_module(model: nn.Sequential) -> None:
    """Of two modules that print alike the last alone was read."""
    optimizer = optimizer_of(*model.parameters())
    for module in model:
        optimizer.state[module] = {"A": torch.ones(2)}  # type: ignore[index]
    optimizer.factors = {module: torch.ones(1) for module in model}  # type: ignore[attr-defined]
    assert names_in(Names().held(optimizer).state()) == {"own/0.A", "own/1.A", "own/factors.0", "own/factors.1"}


def test_state_under_other_tensors_than_parameters() -> None:
    """Masters, and parameters that are no longer any group's, are keys that nobody else reads."""
    kept, gone = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer, master = optimizer_of(kept, gone), torch.ones(2)
    for key in (kept, gone, master):
        optimizer.state[key] = {"mom": torch.zeros(2), "count": 1}
    state = Held(optimizer, {"w": kept}, {}).state()
    assert names_in(state) == {
        "mom/w", "own/0.mom", "own/1.mom", "number/count", "number/own.0.count", "number/own.1.count",
    }  # fmt: skip


def test_keys_with_addresses_are_called_by_their_places() -> None:
    """Such names would be others in every run."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optimizer_of(parameter)
    optimizer.state[repr(object())] = {id(parameter) + 8: torch.ones(1), (threading.Lock(), 1): torch.ones(2)}  # type: ignore[index]
    optimizer.state["norm"] = {("block", 0): torch.ones(1), torch.ones(1): torch.ones(3)}  # type: ignore[index]
    state = Held(optimizer, {"w": parameter}, {}).state()
    assert names_in(state) == {"own/0.0", "own/0.1", "own/norm.('block', 0)", "own/norm.1"}


class Slotted:
    """It has no mapping of its own."""

    __slots__ = ("empty", "factor")

    def __init__(self) -> None:
        self.factor = [torch.ones(1)]


class Preconditioner:
    """As Shampoo keeps one for each parameter."""

    def __init__(self) -> None:
        self.statistics, self.by_name, self.count = [torch.eye(2)], {"R": torch.eye(3)}, 3
        self.array, self.slotted, self.what = np.ones(2), Slotted(), iter(())


def test_objects_in_the_state_are_looked_into() -> None:
    """Tensors in lists, mappings and objects in them, slots and arrays; what cannot be opened is told.

    Their numbers, which may be clocks and ids, are not read, and of one that leads to a data set the beginning is.
    """
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optimizer_of(parameter)
    optimizer.state[parameter] = {"pre": Preconditioner()}
    optimizer.held = Preconditioner()  # type: ignore[attr-defined]
    optimizer.known = {"trainer": [Preconditioner()]}  # type: ignore[attr-defined]
    state = Held(optimizer, {"w": parameter}, {}).state()
    inner = {"pre.statistics.0/w", "pre.by_name.R/w", "pre.array/w", "pre.slotted.factor.0/w"}
    shallow = {f"own/{name}.{k}" for name in ("held", "known.trainer.0") for k in ("statistics.0", "by_name.R")}
    assert names_in(state) == inner | shallow
    assert CLOSED["pre.what/w"] == "it is a tuple_iterator"
    optimizer.state[parameter]["pre"].trainer = [[1, 2]] * 100_000
    assert inner <= names_in(Held(optimizer, {"w": parameter}, {}).state())
    assert CLOSED["pre.more/w"] == "it is more than 1,000 things"


def test_wrappers_are_opened_before_they_are_asked() -> None:
    """One that holds others is read wherever it lies, and told only where its parts cannot be."""
    model = nn.Module()
    model.free, model.wrapped = nn.Linear(1, 1), nn.Parameter(TwoTensor(torch.ones(2), torch.zeros(2)))
    model.hidden = nn.Parameter(TwoTensor(torch.ones(2, device="meta"), torch.ones(2, device="meta")))
    beside = Beside()
    held = read(beside, 0, model.free)
    assert {"frozen/wrapped.a", "frozen/wrapped.b", "frozen/wrapped.context"} <= held.keys()
    assert beside.unread == {f"frozen/hidden.{part}": "it is on meta" for part in "ab"}


@pytest.mark.parametrize("kind", [dict, list])
def test_an_average_in_arrays_of_numpy_is_read(kind: type) -> None:
    """As it is now, where one of each parameter's shape is there; a view of the weights and other arrays are none."""
    model = nn.Linear(3, 4)
    weight, bias = np.ones((4, 3), dtype=np.float32), np.ones(4, dtype=np.float32)
    shadow = {"weight": weight, "bias": bias} if kind is dict else [weight, bias]
    view = {name: p.detach().numpy() for name, p in model.named_parameters()}
    some, batch = {"weight": weight * 2}, {"x": np.ones((4, 3), dtype=int), "y": np.ones(4, dtype=int)}
    beside = Beside()
    for step in (0, 3):  # a search, and a step without one
        weight += 1
        copies = {name: tensor for name, tensor in read(beside, step, model).items() if name.startswith("copy/")}
        assert copies.keys() == {f"copy/shadow/{key}" for key in (shadow if kind is dict else "01")}
        assert torch.equal(next(t for t in copies.values() if t.ndim > 1), torch.from_numpy(weight))
        del copies  # a mapping of tensors of these shapes
    assert view and some and batch


def test_what_begins_with_an_array_is_gone_into() -> None:
    """A mapping of a trainer's state has more than its first value, and one that torch has no dtype for is named."""
    model = nn.Linear(3, 4)
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    wide = {name: np.zeros(tuple(p.shape), dtype=np.longdouble) for name, p in model.named_parameters()}
    state = {"mean": np.zeros(3), "averages": averages}
    averages["last"] = np.zeros(3)  # type: ignore[assignment] # beside tensors an array is none of them
    del averages
    beside = Beside()
    content = read(beside, 0, model)
    assert {name for name in content if "averages" in name} == {"copy/averages/weight", "copy/averages/bias"}
    assert state and wide and beside.unread["copy/wide/weight"].startswith("it is of ")

"""What modules own beside optimizers: found again as it is now, left out with a reason, named by the program."""

from __future__ import annotations

import gc

import pytest
import torch
from beside_kit import Network, read
from torch import nn

from repro_golden.recording.attach.alive.beside import Beside


def test_what_a_module_owns_is_read_as_it_is_now() -> None:
    """Between searches too, and where no hook of torch's is told: another tensor, name, kind, memory, another owner."""
    model, beside = Network(), Beside()
    assert read(beside, 4, model)["unsaved/mask"] is model.mask
    assert not beside.changed  # and 5, 6 and 7 are no powers of two: nothing is searched below
    for other in (torch.zeros(4), torch.zeros(5)):
        model._buffers["mask"] = other
        assert read(beside, 5, model)["unsaved/mask"] is other
    model._non_persistent_buffers_set.discard("mask")
    assert "buffer/mask" in read(beside, 5, model)
    model._buffers["cover"] = model._buffers.pop("mask")
    assert read(beside, 6, model)["buffer/cover"] is other
    other.untyped_storage().resize_(0)
    assert "buffer/cover" not in read(beside, 6, model)
    assert "buffer/cover" in beside.unread
    other.untyped_storage().resize_(20)
    assert read(beside, 6, model)["buffer/cover"] is other
    model.bn._parameters["gain"] = gain = nn.Parameter(torch.ones(2))
    known = [p for p in model.parameters() if p is not gain]
    tensors = {prefix + n: t for prefix, reading in beside.readings(7, known) for n, t in reading.tensors.items()}
    assert tensors["frozen/bn.gain"] is gain
    for other in (nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))):
        model.bn._parameters["gain"] = other
        tensors = {prefix + n: t for prefix, reading in beside.readings(7, known) for n, t in reading.tensors.items()}
        assert tensors["frozen/bn.gain"] is other
    del model.bn._parameters["bias"]
    model.bn._buffers = {"gain": model.bn._parameters.pop("gain"), **model.bn._buffers}
    assert read(beside, 7, model)["buffer/bn.gain"] is other
    model.bn._parameters["gain"] = model.bn._buffers.pop("gain")
    model._buffers["cover"] = None
    assert not beside.changed
    names = {prefix + n for prefix, reading in beside.readings(7, known) for n in reading.tensors}
    assert {"buffer/cover", "frozen/bn.gain"} & names == {"frozen/bn.gain"}


class Tagged(torch.Tensor):
    """A tensor whose operations are its own."""

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise NotImplementedError


def freed() -> torch.Tensor:
    """A tensor whose memory was given back."""
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


UNREADABLE = {
    "it is a Tagged": lambda: torch.Tensor._make_subclass(Tagged, torch.ones(2)),
    "it is on meta": lambda: torch.ones(2, device="meta"),
    "it is nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "its layout is sparse_coo": lambda: torch.eye(3).to_sparse(),
    "its memory was given back": freed,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("why", UNREADABLE)
def test_the_only_buffer_that_cannot_be_read_is_told(why: str) -> None:
    """Among tensors that can all be read, which one look tells of all, the one that cannot is left out, with why."""
    model, beside = Network(), Beside()
    model.register_buffer("odd", UNREADABLE[why]())
    content = read(beside, 3, model)
    assert "buffer/odd" not in content and "unsaved/mask" in content
    assert beside.unread == {"buffer/odd": why}


def test_empty_tensors_are_read() -> None:
    """A tensor without elements has no memory, and is none whose memory was given back."""
    model, beside = Network(), Beside()
    model.register_buffer("odd", torch.empty(0))
    assert "buffer/odd" in read(beside, 3, model) and not beside.unread


def test_a_buffer_without_elements_in_vmap_is_read() -> None:
    """What stands for a tensor there shows no memory, and needs none."""
    model, beside, names = Network(), Beside(), set[str]()

    def inside(x: torch.Tensor) -> torch.Tensor:
        model.register_buffer("odd", x)
        names.update(read(beside, 3, model))
        return x

    torch.func.vmap(inside)(torch.empty(2, 0))
    assert {"buffer/odd", "unsaved/mask"} <= names and not beside.unread


class Twin(nn.Module):
    """Another module with the same tensors, as the one that torch.jit.script was given is beside what it made."""

    def __init__(self, model: Network) -> None:
        super().__init__()
        self.fc, self.bn = model.fc, model.bn
        self.register_buffer("mask", model.mask, persistent=False)


@pytest.mark.parametrize("collected", [False, True])
def test_tensors_of_several_modules_have_the_name_of_a_variable(collected: bool) -> None:
    """Which of them the collector knows first says when it last ran, and plays no part."""
    gc.disable()
    try:
        hidden = [[Twin(Network())]]  # no variable leads to it by name
        if collected:
            gc.collect()  # what is made from here on is young, and the young are told first
        model = Twin(hidden[0][0])  # type: ignore[arg-type]
        content = read(Beside(), 0, model)
    finally:
        gc.enable()
    assert content["unsaved/model/mask"] is model.mask and not any("Twin" in name for name in content)


def test_what_no_checkpoint_holds_is_told_of_modules_that_are_not_trained() -> None:
    """A reference has masks of its own, which are none of what makes it the module that it is."""
    model, ref = Network(), Network().requires_grad_(requires_grad=False)
    content = read(Beside(), 0, model)
    assert content["unsaved/mask"] is model.mask and content["unsaved/ref/mask"] is ref.mask
    assert "module/ref/fc.weight" in content and "module/ref/mask" not in content


class Critic(nn.Linear):
    """A module that only a tuple in a list holds, so that no variable leads to it by name."""


@pytest.mark.parametrize("collected", [False, True])
def test_what_has_no_name_is_numbered_as_it_was_made(collected: bool) -> None:
    """Also where the collector ran meanwhile: two recordings of one program must not have these names changed round."""
    model, beside, held = Network(), Beside(), list[tuple[Critic, torch.Tensor]]()

    def make() -> None:
        held.append((Critic(2, 1), torch.ones(1, requires_grad=True)))

    gc.disable()
    try:
        make()
        if collected:
            gc.collect()
        make()
        read(beside, 0, model)
        content = read(beside, 1, model)  # a leaf is read that was there before
    finally:
        gc.enable()
    assert content["module/Critic/weight"] is held[0][0].weight
    assert content["module/Critic#1/weight"] is held[1][0].weight
    names = {id(tensor): name for name, tensor in content.items()}
    first, second = (int(names[id(leaf)].partition("#")[2] or 0) for _, leaf in held)
    assert first < second

"""Why the recorder reads on the program's own stream: writes that no counter shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@torch.no_grad()
def _average(parameter: Parameter, _flat: torch.Tensor) -> None:
    torch._foreach_lerp_([parameter], [torch.ones(4)], 0.5)


@torch.no_grad()
def _copied(parameter: Parameter, _flat: torch.Tensor) -> None:
    parameter.copy_(torch.ones(4))


@torch.no_grad()
def _clamped(parameter: Parameter, _flat: torch.Tensor) -> None:
    parameter.clamp_(min=2.0)


def _data(parameter: Parameter, _flat: torch.Tensor) -> None:
    parameter.data.add_(1)


def _flat_buffer(_parameter: Parameter, flat: torch.Tensor) -> None:
    flat.add_(1)


def _gathered(_parameter: Parameter, flat: torch.Tensor) -> None:
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(flat, torch.ones(8))  # its newer name


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("write", "shown"),
    [(_copied, True), (_clamped, True), (_average, True), (_data, False), (_flat_buffer, False), (_gathered, False)],
)
def test_what_a_version_counter_shows(write: Callable[[Parameter, torch.Tensor], None], shown: bool) -> None:
    """Through `.data`, a flat buffer or a collective the bytes change, and neither counter nor storage does.

    Where this fails because torch shows more, docs/reference/trace.md says too little of what an overlap could do.
    """
    flat = torch.zeros(8)
    parameter = Parameter(torch.zeros(4))
    parameter.data = flat[:4]
    version, place, before = parameter._version, parameter.data_ptr(), parameter.detach().clone()
    write(parameter, flat)
    assert not torch.equal(parameter.detach(), before)
    assert (parameter._version != version, parameter.data_ptr()) == (shown, place)

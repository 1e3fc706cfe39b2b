"""What can be fingerprinted: every dtype, harmless subclasses, many at once; and what is refused, with a cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from view_kit import CPU, DTYPES, QUANTIZED, in_a_process, observe, view

from repro_golden.base.errors import ReproError
from repro_golden.fingerprint import bind, content, dtype_name, fingerprint, fingerprints, reference, scan

torch.set_num_threads(1)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_every_dtype_can_be_read(dtype: torch.dtype) -> None:
    """Every dtype there is has the reference's lanes and bytes: flat, transposed, expanded, of one element, of none."""
    layouts = [
        ([37], [1], 1),
        ([6, 5], [1, 6], 0),
        ([5, 6], [0, 1], 1),
        ([4, 4, 3], [9, 2, 0], 2),
        ([], [], 3),
        ([0], [1], 0),
    ]
    for v in [view(dtype, *layout) for layout in layouts]:
        scan = observe([v.on(CPU)], on_cpu=True).result()[0][0]
        assert (scan.lanes, scan.values) == (reference(v.content()), v.content()), v
        assert fingerprint(v.on(CPU)) == bind(reference(v.content()), dtype_name(dtype), v.shape)


class Plain(Tensor):
    """A subclass that holds nothing of its own."""


class Meddling(Tensor):
    """A subclass whose functions compute something else, and whose contents are its own all the same."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result + 1 if type(result) is cls and func.__name__ != "add" else result


@pytest.mark.parametrize(
    "kind",
    [torch.nn.Parameter, torch.nn.Buffer, lambda t: t.as_subclass(Plain), lambda t: t.as_subclass(Meddling)],
    ids=["Parameter", "Buffer", "subclass", "subclass with functions"],
)
def test_harmless_subclasses_are_plain_tensors(kind: Callable[[Tensor], Tensor]) -> None:
    """Parameters, buffers and subclasses that wrap nothing are read as the plain tensors they are."""
    for t in (torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4).T):
        given = kind(t)
        assert fingerprint(given) == fingerprint(t) and scan(given) == scan(t)


class Wrapper(Tensor):
    """A tensor that keeps its content in another one."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Tensor:
        """A tensor that looks like `inner` and has no memory."""
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), r"to_dense\(\)"),
    "compressed": (lambda: torch.eye(3).to_sparse_csr(), r"to_dense\(\)"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "observe"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "observe"),
    "meta": (lambda: torch.empty(3, device="meta"), "once it is on a device"),
    "wrapper": (lambda: Wrapper(torch.ones(3)), r"a Wrapper .*observe its parts \(inner\)"),
    **{dtype_name(d): (lambda d=d: torch.empty(8, dtype=d), r"observe its int_repr\(\)") for d in QUANTIZED},
}


@pytest.mark.filterwarnings("ignore:.*(quantized tensor|nested tensors|Sparse CSR|compressed)")
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_content_of_its_own_is_refused(name: str) -> None:
    """Sparse, nested, quantized, meta and wrapper tensors are refused, and the message says what to observe."""
    make, fix = REFUSED[name]
    with pytest.raises(ReproError, match=fix):
        fingerprint(make())


def test_a_tensor_without_memory_is_refused() -> None:
    """A tensor whose memory was given back, as FSDP does with gathered parameters, is refused and ends nothing."""
    script = """
        import torch
        from repro_golden.base.errors import ReproError
        from repro_golden.fingerprint import fingerprint
        given = torch.ones(30, 40)
        views = [given, given.T, given[3:, 1:]]
        given.untyped_storage().resize_(0)
        for t in views:
            try:
                fingerprint(t)
            except ReproError as error:
                print(error)
    """
    assert len(in_a_process(script).splitlines()) == 3


def test_a_list_that_lost_a_memory_since_it_was_read_is_refused() -> None:
    """A list is read by what is known of one that looked like it: no memory that one of its tensors had is read."""
    script = """
        import torch
        from repro_golden.base.errors import ReproError
        from repro_golden.fingerprint import fingerprints
        for count in (3, 30):
            given = [torch.ones(40, 40)[1:] for _ in range(count)]
            fingerprints(given)
            given[2].untyped_storage().resize_(0)
            try:
                fingerprints(given)
            except ReproError as error:
                print(error)
    """
    assert len(in_a_process(script).splitlines()) == 2


def test_a_dtensor_around_what_has_no_content_is_refused() -> None:
    """What a DTensor holds here may be a wrapper, as of an optimizer of eight bits, or memory that was given back."""
    script = """
        import torch
        from torch.distributed.tensor import DTensor, Shard, init_device_mesh
        from torch.testing._internal.two_tensor import TwoTensor
        from repro_golden.base.errors import ReproError
        from repro_golden.fingerprint import fingerprint
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
        mesh = init_device_mesh("cpu", (1,))
        gone = torch.ones(4, 4)
        for held in (TwoTensor(torch.ones(4, 4), torch.ones(4, 4)), gone):
            given = DTensor.from_local(held, mesh, [Shard(0)], run_check=False)
            gone.untyped_storage().resize_(0)
            try:
                fingerprint(given)
            except ReproError as error:
                print(error)
        torch.distributed.destroy_process_group()
    """
    wrapper, given_back = in_a_process(script).splitlines()
    assert "a TwoTensor is a wrapper" in wrapper and "memory was given back" in given_back


def test_many_at_once_are_each() -> None:
    """`fingerprints` of a list are the fingerprints of its tensors, one by one, of the same list again and of none."""
    tensors = [view(d, [k, 3], [1, k], 1, seed=k).on(CPU) for k, d in enumerate(DTYPES) if d.itemsize != 1]
    tensors += [torch.ones(()), torch.empty(0, 4), torch.nn.Parameter(torch.arange(70_000.0))]
    expected = [fingerprint(t) for t in tensors]
    assert fingerprints(tensors) == fingerprints(iter(tensors)) == expected and fingerprints([]) == []
    assert fingerprints(tensors[::-1]) == expected[::-1]


LOOKS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t,
    lambda t: t[:23],
    lambda t: t.reshape(4, 6),
    lambda t: t.reshape(6, 4).T,
    lambda t: t.reshape(4, 6)[:, :4],
    lambda t: t[0].expand(24),
    lambda t: torch.nn.Parameter(t),
    lambda t: t.view(torch.int32),
    lambda t: t.view(torch.bfloat16)[:24],
    lambda t: t.view(torch.complex64),
    lambda t: t.view(torch.complex64).conj(),
    lambda t: t.view(torch.complex64).imag,
    lambda t: t.view(torch.complex64).conj().imag,
    lambda t: t[:0],
    lambda t: t.as_subclass(Meddling),
]


@given(st.lists(st.lists(st.sampled_from(LOOKS), min_size=1, max_size=3), min_size=2, max_size=6), st.booleans())
def test_the_same_memory_is_read_as_what_it_is_now(steps: list[list[Callable[[Tensor], Tensor]]], keep: bool) -> None:
    """Lists that begin at one address are read with the dtypes, shapes, strides and contents they have that time."""
    memory = torch.arange(24.0)
    for step in steps:
        memory.add_(1)
        tensors = [look(memory) for look in step]
        observed = observe(tensors, keep=keep, on_cpu=True)
        contents = [content(look(memory.clone())).tobytes() for look in step]
        assert [scans[0].lanes for scans in observed.result()] == [reference(raw) for raw in contents]
        assert [scans[0].values for scans in observed.result()] == [raw if keep else None for raw in contents]
        assert observed.fingerprints() == [
            bind(reference(raw), dtype_name(t.dtype), t.shape) for raw, t in zip(contents, tensors, strict=True)
        ]


def figures(raw: bytes, dtype: torch.dtype) -> tuple[int, float, float]:
    scanned = scan(torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype))
    return scanned.nonfinite, scanned.absmax, round(scanned.l2**2, 9)


def test_figures_of_rare_dtypes() -> None:
    """Two 4-bit floats a byte, half-precision complex numbers and bit containers are measured as what they are."""
    e2m1 = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 6: 4.0, 7: 6.0}
    for low, high in ((k, j) for k in range(16) for j in range(16)):
        a, b = e2m1[low & 7], e2m1[high & 7]
        assert figures(bytes([high << 4 | low]), torch.float4_e2m1fn_x2) == (0, max(a, b), a * a + b * b)
    halves = np.array([3, -4, np.inf, np.nan, 2**-24, -0.0], np.float16)
    assert figures(halves.tobytes(), torch.complex32) == (2, 4.0, 25.0)
    for dtype in (torch.bits8, torch.bits1x8, torch.bits2x4, torch.bits4x2):
        assert figures(bytes([3, 200, 4]), dtype) == (0, 200.0, 40025.0)
    assert figures(bytes([3, 200, 4, 0]), torch.bits16) == (0, 51203.0, 51203.0**2 + 16)
    assert figures(bytes([255, 3, 128]), torch.int4) == (0, 128.0, 1 + 9 + 128**2)

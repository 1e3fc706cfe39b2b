from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from view_kit import in_a_process

from repro_golden.base.errors import ReproError
from repro_golden.fingerprint import Lanes, Share, fingerprint, merge, shares

WORLD = 4
SPLITS: dict[str, tuple[tuple[int, ...], str, tuple[int, ...], str]] = {  # mesh, placements, shape, dtype
    "rows": ((4,), "0", (8, 6), "float32"),
    "columns": ((4,), "1", (6, 8), "bfloat16"),
    "the last of three": ((4,), "2", (3, 2, 9), "bfloat16"),
    "uneven rows": ((4,), "0", (7, 3), "bfloat16"),
    "a rank without rows": ((4,), "0", (5, 3), "bfloat16"),
    "ranks without bytes": ((4,), "0", (1,), "uint8"),
    "no elements": ((4,), "1", (3, 0), "float32"),
    "replicas": ((4,), "r", (5, 3), "bfloat16"),
    "a scalar": ((4,), "r", (), "float64"),
    "rows by columns": ((2, 2), "01", (5, 7), "bfloat16"),
    "columns by rows": ((2, 2), "10", (5, 7), "uint8"),
    "rows twice": ((2, 2), "00", (7, 3), "bfloat16"),
    "columns twice": ((2, 2), "11", (3, 7), "float32"),
    "replicas of rows": ((2, 2), "r0", (5, 3), "bfloat16"),
    "columns of replicas": ((2, 2), "1r", (5, 3), "bfloat16"),
    "strided rows": ((4,), "s", (13, 3), "bfloat16"),
    "strided rows by columns": ((2, 2), "s1", (6, 5), "bfloat16"),
    "half of the ranks": ((2,), "0", (5, 3), "bfloat16"),
}


def tensor_of(name: str) -> Tensor:
    _, _, shape, dtype = SPLITS[name]
    generator = torch.Generator().manual_seed(len(name))
    return torch.randint(0, 200, shape, generator=generator).mul(1.25).to(getattr(torch, dtype))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 14), nn.ReLU(), nn.Linear(14, 3)).to(torch.bfloat16)


def rank_main(out: Path) -> None:
    """What each of the processes does: shares of everything it holds, written down."""
    from torch.distributed import destroy_process_group, get_rank, init_process_group
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.placement_types import _StridedShard

    torch.set_num_threads(1)
    init_process_group("gloo")
    line, half = init_device_mesh("cpu", (WORLD,)), DeviceMesh("cpu", [0, 1])
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    meshes, held = {(4,): line, (2, 2): square, (2,): half}, {}
    kinds = {"r": Replicate(), "s": _StridedShard(0, split_factor=2)} | {str(d): Shard(d) for d in range(3)}
    for name, (mesh, splits, _, _) in SPLITS.items():
        # without src_data_rank each process cuts its own copy: a strided shard cannot be scattered
        held[name] = distribute_tensor(tensor_of(name), meshes[mesh], [kinds[s] for s in splits], src_data_rank=None)
    for kind in ("fsdp", "fsdp over tp"):
        module, mesh = network(), line
        if kind == "fsdp over tp":
            parallelize_module(module, square["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            mesh = square["dp"]
        for layer in (module[0], module[2], module):
            fully_shard(layer, mesh=mesh)
        module(torch.ones(4, 5, dtype=torch.bfloat16) * (1 + square.get_coordinate()[0])).square().sum().backward()
        for name, p in module.named_parameters():
            held |= {f"{kind} {name}": p, f"{kind} {name} gradient": p.grad}
    results: dict[str, Any] = {"shares": {}, "whole": {}, "placements": {}, "refused": {}}
    for name, t in held.items():
        (share,) = shares(t).values()
        results["shares"][name] = [share.dtype, share.shape, share.lanes.to_bytes().hex(), share.cover_text()]
        results["placements"][name] = str(t.placements)
        if name != "half of the ranks" or get_rank() < 2:
            results["whole"][name] = fingerprint(t.full_tensor())
    partial = DTensor.from_local(torch.ones(3), line, [Partial()])
    for name, t in {"partial": partial, "rows": held["rows"], "replicas": held["replicas"]}.items():
        try:
            results["refused"][name] = fingerprint(t)
        except ReproError as error:
            results["refused"][name] = f"refused: {error}"
    (out / f"{get_rank()}.json").write_text(json.dumps(results))
    destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What four real processes found."""
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(WORLD),
                        "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(WORLD)}  # fmt: skip
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(WORLD):
            log = stack.enter_context((out / f"{rank}.log").open("wb"))
            command = [sys.executable, str(Path(__file__).resolve()), str(out)]
            started.append(subprocess.Popen(command, env=env | {"RANK": str(rank)}, stdout=log, stderr=log))
            stack.callback(started[-1].wait)
            stack.callback(started[-1].kill)
        codes = [process.wait(timeout=300) for process in started]
    assert codes == [0] * WORLD, "\n".join(log.read_text()[-2000:] for log in sorted(out.glob("*.log")))
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(WORLD)]


def merged(ranks: list[dict[str, Any]], name: str) -> str:
    written = [rank["shares"][name] for rank in ranks]
    every = [Share.from_cover(d, tuple(s), Lanes.from_bytes(bytes.fromhex(raw)), text) for d, s, raw, text in written]
    return merge(every).fingerprint


@pytest.mark.whole
def test_the_shares_of_a_dtensor_add_up(ranks: list[dict[str, Any]]) -> None:
    """However a DTensor is split over four processes, their shares merge to the fingerprint of the tensor."""
    assert {name: merged(ranks, name) for name in SPLITS} == {name: fingerprint(tensor_of(name)) for name in SPLITS}


@pytest.mark.whole
def test_the_shares_of_fsdp_and_tensor_parallelism_add_up(ranks: list[dict[str, Any]]) -> None:
    """Parameters and gradients under FSDP2, alone and over tensor parallelism, merge to what full_tensor() gives."""
    names = [name for name in ranks[0]["shares"] if name not in SPLITS]
    assert len(names) == 16 and any("_StridedShard" in ranks[0]["placements"][name] for name in names)
    for name in names:
        assert merged(ranks, name) == ranks[0]["whole"][name], (name, ranks[0]["placements"][name])
    parameters = {name: fingerprint(p.detach()) for name, p in network().named_parameters()}
    for kind in ("fsdp", "fsdp over tp"):
        assert {name: merged(ranks, f"{kind} {name}") for name in parameters} == parameters


@pytest.mark.whole
def test_only_whole_dtensors_have_a_fingerprint_alone(ranks: list[dict[str, Any]]) -> None:
    """A replica gives its fingerprint by itself; a shard asks for the other ranks, partial sums for redistribution."""
    for rank in ranks:
        assert rank["refused"]["replicas"] == fingerprint(tensor_of("replicas"))
        assert "merge the shares" in rank["refused"]["rows"] and "redistribute()" in rank["refused"]["partial"]


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (3, 2)])
def test_uneven_shards_of_tensor_parallel_parts(data: int, tensor: int) -> None:
    """FSDP2 over tensor parallelism cuts each part of a dimension by itself: rows that neither divides add up too."""
    script = f"""
        import os, pickle, torch, torch.distributed as dist
        from torch import nn
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from repro_golden.fingerprint import fingerprint, merge, shares
        torch.set_num_threads(1)
        shapes = [(7, 5), (8, 8), (9, 4), (1, 3), (13, 8), (3, 9), (5,)]
        def whole(shape):
            return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
        def held(rank):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size={data * tensor})
            mesh = init_device_mesh("cpu", ({data}, {tensor}), mesh_dim_names=("data", "tensor"))
            for shape in shapes:
                for dim in range(len(shape)):
                    module = nn.Module()
                    part = distribute_tensor(whole(shape), mesh["tensor"], [Shard(dim)], src_data_rank=None)
                    module.weight = nn.Parameter(part)
                    fully_shard(module, mesh=mesh["data"])
                    yield shape, list(shares(module.weight).values())
        ranks = []
        for rank in range({data * tensor}):
            reader, writer = os.pipe()
            if not os.fork():
                with open(writer, "wb") as file:
                    pickle.dump(list(held(rank)), file)
                os._exit(0)
            os.close(writer)
            with open(reader, "rb") as file:
                ranks.append(pickle.load(file))
        for parts in zip(*ranks):
            shape, merged = parts[0][0], merge([share for _, shares_of in parts for share in shares_of])
            assert merged.whole and merged.fingerprint == fingerprint(whole(shape)), shape
        print(len(ranks[0]))
    """
    assert in_a_process(script) == "13\n"

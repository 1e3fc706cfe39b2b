"""megatron-core without CUDA: what `without_cuda` changes, that it is needed, and that nothing of it stays."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from megatron_kit import launch, outputs

if find_spec("megatron") is None:
    pytest.skip("megatron-core 0.16.1 is not for this Python", allow_module_level=True)

import torch

from repro_core.config import ConfigError
from repro_core.engines.megatron import cpu

cpu.load()
PROGRAM = Path(__file__).with_name("megatron_train_kit.py")
MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": False,
}


def changed() -> list[Any]:
    """All that `without_cuda` may touch, as it is now."""
    cpu.load()
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    return [
        torch.cuda.current_device,
        torch.cuda.synchronize,
        vars(random)["_get_cuda_rng_state"],
        vars(random)["_set_cuda_rng_state"],
        vars(Dispatcher)["cuda_dtoh_stream"],
        vars(Dispatcher)["_maybe_dtoh_and_synchronize"],
        torch.zeros(1).type(),
        len(torch.overrides._get_current_function_mode_stack()),
        list(warnings.filters),
    ]


def leave_normally() -> None:
    """Enter and leave."""
    with cpu.without_cuda(cuda=False):
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.zeros(2, device="cuda").cuda().type() == "torch.cuda.FloatTensor"


def leave_by_an_exception() -> None:
    """Enter, and raise."""
    with pytest.raises(KeyError), cpu.without_cuda(cuda=False):
        raise KeyError


def leave_by_nesting() -> None:
    """Enter twice: the second time is refused, and the first block goes on."""
    with cpu.without_cuda(cuda=False):
        with pytest.raises(RuntimeError, match="already active"), cpu.without_cuda(cuda=False):
            pass
        assert torch.cuda.current_device() == torch.device("cpu")


@pytest.mark.parametrize("leave", [leave_normally, leave_by_an_exception, leave_by_nesting])
def test_everything_is_as_before(leave: Callable[[], None]) -> None:
    """However the block ends, torch, megatron-core and the warnings' filters are as they were; twice works too."""
    before = changed()
    leave()
    leave()
    assert changed() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there, cuda means CUDA")
def test_cuda_means_cuda_outside() -> None:
    """Outside of the block a request for CUDA fails as ever."""
    leave_normally()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_refused_where_cuda_is() -> None:
    """On a machine with CUDA nothing is changed."""
    before = changed()
    with pytest.raises(RuntimeError, match="this machine has CUDA"), cpu.without_cuda(cuda=True):
        pass
    assert changed() == before


def test_only_mentioned_calls_change() -> None:
    """A dtype conversion, a device that is named, and a type of another kind mean what they mean anywhere."""
    with cpu.without_cuda(cuda=False):
        assert torch.zeros(1).type(torch.int8).dtype == torch.int8
        assert torch.zeros(1, device="meta").device.type == "meta"
        assert torch.zeros(1).to("cpu").device.type == "cpu"


@pytest.mark.whole
def test_import_is_quiet_and_compiles_nothing(tmp_path: Path) -> None:
    """Importing megatron-core gives no warning even where warnings are errors, and leaves torch's compiler alone."""
    program = (
        "import os, sys, warnings\nwarnings.simplefilter('error')\n"
        "from repro_core.engines.megatron import cpu\ncpu.load()\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules\nassert 'TORCHDYNAMO_DISABLE' not in os.environ\n"
    )
    outputs(launch(program, 1, cwd=tmp_path))


def test_reasons_are_where_they_say() -> None:
    """Each file and line that a change cites is in the megatron-core that is installed, and speaks of CUDA."""
    cpu.load()
    import megatron.core

    root = Path(megatron.core.__path__[0])
    for change in cpu.CHANGES:
        cited = re.findall(r"(\S+\.py):([\d,]*\d)", change.why)
        assert cited, change
        for name, numbers in cited:
            lines = (root / name).read_text().splitlines()
            assert all("cuda" in lines[int(number) - 1] for number in numbers.split(",")), (name, numbers)


@pytest.mark.whole
def test_each_change_is_needed(tmp_path: Path) -> None:
    """Without any one of the changes some training run fails for want of CUDA; with all of them each of these works."""
    recompute = {"megatron": {"recompute_granularity": "full"}}
    stages = {"megatron": {"pipeline_model_parallel_size": 2}}
    alone: list[tuple[int, dict[str, Any]]] = [(0, {}), (1, {}), (3, {"dtype": "bf16"}), (4, recompute), (5, {})]
    alone += [(6, {"model": MOE})]
    lines = {}
    for world, cases in ((1, alone), (2, [(2, stages)])):
        jobs = [{"config": config, "steps": 1} for _, config in cases]
        jobs += [{**job, "leave_out": [left], "fails": True} for job, (left, _) in zip(jobs, cases, strict=True)]
        for number, job in enumerate(jobs if world == 1 else ()):
            if number % len(cases) == 4:
                job["checkpoint"] = str(tmp_path / str(number))
        (tmp_path / "jobs.json").write_text(json.dumps(jobs))
        printed = outputs(launch(PROGRAM, world, [str(tmp_path / "jobs.json")], cwd=tmp_path))[0].splitlines()
        for number, (left, _) in enumerate(cases):
            works, fails = json.loads(printed[number]), json.loads(printed[number + len(cases)])
            assert works["norms"], works
            lines[left] = fails["error"]
    assert sorted(lines) == list(range(len(cpu.CHANGES)))
    for left, error in lines.items():
        assert re.search("CUDA|NVIDIA|cuda", error), (cpu.CHANGES[left].what, error)


@pytest.mark.parametrize(
    ("version", "psutil", "words"),
    [(None, True, "needs megatron-core"), ("0.16.1", False, "needs psutil"), ("0.17.0", True, "0.16.1, not 0.17.0")],
)
def test_what_is_not_installed_is_refused_by_name(version: str | None, psutil: bool, words: str) -> None:
    """Another megatron-core, none, or no psutil is one line with the cure; what is installed here serves."""
    cpu.check_installed(cpu.VERSION, psutil=True)
    with pytest.raises(ConfigError, match=words) as caught:
        cpu.check_installed(version, psutil=psutil)
    assert "repro-harness[megatron]" in str(caught.value) and "\n" not in str(caught.value)


def test_the_documentation_lists_every_change() -> None:
    """docs/reference/megatron.md shows what is changed without CUDA, and why, row by row."""
    page = (Path(__file__).parents[1] / "docs" / "reference" / "megatron.md").read_text()
    rows = [f"| {change.what} | {change.why} |" for change in cpu.CHANGES]
    start = page.index(rows[0])
    assert page[start:].startswith("\n".join(rows) + "\n\n")

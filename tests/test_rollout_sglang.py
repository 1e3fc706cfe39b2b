"""SGLang itself, in a process and behind an address, against the built-in sampler and the built-in model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from once_kit import once
from sglang_kit import (
    CONFIG,
    CORE,
    DENSE,
    Served,
    drive,
    gap,
    prompts_of,
    scored,
    sglang_server,  # noqa: F401 - a fixture
    tiny_checkpoint,
    tiny_policy,
)

from repro_core.config import TrainConfig
from repro_core.rollout.engine import EngineError, Response, Sampling
from repro_core.rollout.sampler import sample
from repro_core.rollout.sglang.client import Client
from repro_core.rollout.sglang.flags import EXPORT, environment
from repro_core.rollout.sglang.held import packed_order
from repro_core.rollout.sglang.http import SglangServer
from repro_core.rollout.sglang.stand_ins import FOLDER
from repro_core.rollout.source import RolloutsOnly
from repro_golden.base.errors import ReproError
from repro_golden.recording.weight_sync import SyncJudge

EOS = 258
SEEDS = [2**53 - 1 - i for i in range(8)]
HOT = Sampling(12, 1.0, EOS, ignore_eos=True)


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one engine in a process of its own did, from start to its scheduler's end."""

    def make(folder: Path) -> None:
        (folder / "told.json").write_text(json.dumps(drive("sglang_driver.py", folder)))

    data: dict[str, Any] = json.loads((once(tmp_path_factory, "sglang-driver", make) / "told.json").read_text())
    return data


def _responses(plain: list[dict[str, Any]]) -> list[Response]:
    return [Response(**each) for each in plain]


def test_greedy_agrees_with_the_built_in_sampler(told: dict[str, Any]) -> None:
    """At temperature 0 the tokens are the built-in sampler's, and log-probs agree to 1e-5, the prompts' own too."""
    prompts = prompts_of(8)
    responses = sample(
        tiny_policy(), prompts, max_response_len=12, temperature=0.0, seeds=SEEDS, eos_id=None, prompt_log_probs=True
    )
    mine = _responses(told["greedy"])
    assert [each.tokens for each in mine] == [each.tokens for each in responses]
    for response, other in zip(mine, responses, strict=True):
        assert response.prompt_log_probs is not None
        assert other.prompt_log_probs is not None
        pairs = [
            *zip(response.log_probs, other.log_probs, strict=True),
            *zip(response.prompt_log_probs, other.prompt_log_probs, strict=True),
        ]
        assert max(abs(a - b) for a, b in pairs) <= 1e-5


@pytest.mark.whole
def test_log_probs_are_those_at_the_sampling_temperature(told: dict[str, Any]) -> None:
    """At temperature 0.7, log-probs are log_softmax(logits / 0.7) of the built-in model; those at 1 are far off."""
    prompts, mine = prompts_of(8), _responses(told["warm"])
    assert gap(tiny_policy(), prompts, mine, 0.7) <= 1e-5
    _, at_one = scored(tiny_policy(), prompts[0], mine[0].tokens, 1.0)
    assert max(abs(a - b) for a, b in zip(mine[0].log_probs, at_one, strict=True)) > 0.05


@pytest.mark.whole
@pytest.mark.parametrize("other", ["hot_again", "hot_reversed", "hot_alone"])
def test_a_seeded_response_depends_on_nothing_but_its_seed(told: dict[str, Any], other: str) -> None:
    """Tokens and log-probs are equal bit for bit when repeated, in another order, and alone."""
    assert told[other] == told["hot"]


@pytest.mark.whole
def test_seeds_are_honoured_to_their_last_bits(told: dict[str, Any]) -> None:
    """Seeds that differ in few of 53 bits give other responses in every row."""
    for response, other in zip(told["hot"], told["hot_other_seeds"], strict=True):
        assert response["tokens"] != other["tokens"]


HASH = """
import sys
sys.path += sys.argv[1:]
import torch
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32, murmur_hash32_kernel
seeds = torch.tensor([0, 1, 42, 2**32, 2**53 - 1, 2**62 + 12345], dtype=torch.int64).to(torch.uint64)
positions, columns = torch.tensor([0, 5, 31, 7, 100000, 3]), torch.arange(37)
own = torch.empty((6, 37), dtype=torch.uint32)
murmur_hash32_kernel[(6, 1)](seeds, positions, columns, own, 6, 37, BLOCK_SIZE=1024)
assert torch.equal(own.to(torch.int64), murmur_hash32(seeds, positions, columns))
"""


@pytest.mark.whole
def test_the_stand_in_draws_what_a_gpu_draws() -> None:
    """The hash behind seeded sampling is SGLang's own Triton kernel's, bit for bit (Triton's interpreter runs that)."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HASH, str(CORE), str(FOLDER)],
        env={**os.environ, **environment("cpu"), "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.whole
def test_the_end_of_sequence_is_part_of_a_response(told: dict[str, Any]) -> None:
    """A response ends with the end-of-sequence id and is completed; without prompts there are no responses."""
    (ended,) = told["ended"]
    assert ended["tokens"] == told["greedy"][0]["tokens"][:4]
    assert ended["status"] == "completed"
    assert told["greedy"][0]["status"] == "truncated"
    assert told["nothing"] == []


@pytest.mark.whole
def test_weights_arrive_by_tensor_and_by_disk(told: dict[str, Any]) -> None:
    """After an update the engine samples as the new policy does, by either way alike, and says its version."""
    assert gap(tiny_policy(seed=5), prompts_of(8), _responses(told["by_tensor"]), 1.0) <= 1e-5
    assert {each["weight_version"] for each in told["by_tensor"]} == {"7"}
    assert [{**each, "weight_version": None} for each in told["by_disk"]] == [
        {**each, "weight_version": None} for each in told["by_tensor"]
    ]
    assert told["versions"] == ["8", "8"]
    assert [{**each, "weight_version": None} for each in told["back"]] == [
        {**each, "weight_version": None} for each in told["hot"]
    ], "an update and its reversal leave no trace"


@pytest.mark.whole
def test_what_it_holds_can_be_read_back(told: dict[str, Any]) -> None:
    """Held weights are the live ones, fused and padded as the engine has them; reading changes nothing."""
    assert told["start_is_checkpoint"]
    assert told["held_qkv"]
    assert told["held"]["model.embed_tokens.weight"][0] % 64 == 0, "the vocabulary's rows are padded"
    assert "model.layers.0.mlp.gate_up_proj.weight" in told["placed"]
    assert told["after_held"] == told["by_tensor"]
    assert told["folders_left"] == []
    assert "released" in told["released"]


@pytest.mark.whole
def test_identity_says_what_the_numbers_rest_on(told: dict[str, Any]) -> None:
    """Version, flags and the stand-ins of a CPU are told, and are JSON."""
    identity = told["identity"]
    assert (identity["name"], identity["device"]) == ("sglang", "cpu")
    assert identity["stand_ins"] == ["repro_sglang_cpu", "sgl_kernel", "torchvision"]
    assert identity["flags"]["enable_deterministic_inference"] is True
    assert identity["flags"]["attention_backend"] == "torch_native"


@pytest.mark.whole
def test_the_process_that_hosts_it_stays_as_it_was(told: dict[str, Any]) -> None:
    """Signals, logging, variables and the start method of processes are left alone, and so are its other children."""
    before, after = told["manners"]
    assert before == after
    assert told["other_lives"]
    assert told["launcher's"], "it has processes"
    assert not any(told["launcher's"]), "torchrun's variables would make them join the trainer's processes"
    assert [each for each in told["left"] if "resource_tracker" not in each] == []


@pytest.mark.whole
def test_a_refusal_is_an_error_of_one_line_and_the_engine_goes_on(told: dict[str, Any]) -> None:
    """SGLang refuses without raising: a checkpoint that is not there, and an update while another one is open."""
    refused = told["refused"]
    assert "refuses to take weights from disk" in refused["disk"]
    assert "/nowhere/at/all" in refused["disk"]
    assert "a weight-update session is already open" in refused["session"]
    assert refused["version"] == "8", "a refused update changes no version"
    assert "fails to sample" in refused["long"]
    assert "fails to sample" in refused["cut"]
    assert not any("\n" in line for line in refused.values())
    assert all(f"(log {told['log'][0]})" in refused[name] for name in ("disk", "session", "long", "stale", "nan"))
    assert told["keeps_log"] == [False, True]


@pytest.mark.whole
def test_stale_weights_are_named(told: dict[str, Any]) -> None:
    """An answer from other weights than those expected names both versions."""
    assert "'8' in place of '99'" in told["refused"]["stale"]


@pytest.mark.whole
def test_weights_with_nan_give_no_responses(told: dict[str, Any]) -> None:
    """One NaN in a norm makes log-probs NaN, sampled or greedy, and the batch is dropped."""
    for name in ("nan", "nan_greedy"):
        assert "has log-prob nan at token 0" in told["refused"][name]
        assert told["refused"][name].endswith("; the batch is dropped")


@pytest.mark.whole
def test_a_scheduler_that_dies_takes_the_batch_and_nothing_else(told: dict[str, Any]) -> None:
    """The error names the signal and the log, the engine stays failed, and this process lives on."""
    first, second = told["killed"]
    assert "SIGKILL" in first
    log, there = told["log"]
    assert log in first
    assert there, "a log that was named stays"
    assert first == second
    assert told["alive"] == []


@pytest.mark.whole
def test_a_server_samples_as_the_engine_in_a_process_does(told: dict[str, Any], sglang_server: Served) -> None:  # noqa: F811
    """The same SGLang behind an address gives the same bits, takes the same weights and shows them."""
    server = SglangServer(replace(CONFIG, url=sglang_server.url), DENSE, "fp32", log=sglang_server.log)
    prompts = prompts_of(8)
    server.update(tiny_policy().state_dict().items(), "start")
    assert _unversioned(server.generate(prompts, HOT, SEEDS)) == _unversioned(_responses(told["hot"]))
    warm = Sampling(12, 0.7, EOS, ignore_eos=True, prompt_log_probs=True)
    assert _unversioned(server.generate(prompts, warm, SEEDS)) == _unversioned(_responses(told["warm"]))
    server.update(tiny_policy(seed=5).state_dict().items(), "7")
    new = server.generate(prompts, HOT, SEEDS)
    assert new == _responses(told["by_tensor"])
    (held,) = server.held()
    assert {name: list(tensor.shape) for name, tensor in held.tensors.items()} == told["held"]
    server.flush_cache()
    server.release_memory()
    server.resume_memory()
    server.update_from_disk(str(sglang_server.checkpoint), "9")
    assert _unversioned(server.generate(prompts, HOT, SEEDS)) == _unversioned(_responses(told["hot"]))
    identity = server.identity()
    assert identity["flags"].pop("servers") == 1
    assert identity.pop("stand_ins") == ["repro_sglang_cpu"], "of the others a server tells nothing"
    assert identity == {name: value for name, value in told["identity"].items() if name != "stand_ins"}
    server.close()


@pytest.mark.whole
def test_a_server_refuses_in_one_line(tmp_path: Path, sglang_server: Served) -> None:  # noqa: F811
    """A server that refuses weights says why, and goes on."""
    server = SglangServer(replace(CONFIG, url=sglang_server.url), DENSE, "fp32")
    with pytest.raises(EngineError, match=r"refuses to take weights from disk: .*gone"):
        server.update_from_disk(str(tmp_path / "gone"), "9")
    with pytest.raises(EngineError, match="refuses to sample: "):
        server.generate([[1] * 300], HOT, [1])
    server.update_from_disk(str(tiny_checkpoint(tmp_path / "again")), "10")
    assert server.generate([[1, 2]], HOT, [1])[0].weight_version == "10"
    with pytest.raises(EngineError, match="computes in float32, not in bfloat16"):
        SglangServer(replace(CONFIG, url=sglang_server.url), DENSE, "bf16")
    server.close()


@pytest.mark.whole
def test_rollouts_alone_bring_a_server_the_starting_weights(tmp_path: Path, sglang_server: Served) -> None:  # noqa: F811
    """Whatever it holds, it samples with the weights that training starts from, and both sides are judged; what it
    read itself is judged as long as it says that it has that still."""  # noqa: D205, D209 - one claim
    shared = tmp_path / "shared"
    shared.mkdir()
    sglang = replace(CONFIG, url=sglang_server.url, folder=str(shared), sync="disk")
    config = TrainConfig(
        hf_checkpoint=str(tiny_checkpoint(tmp_path / "start", seed=3)), rollout_engine="sglang", sglang=sglang,
        rollout_batch_size=1, n_samples_per_prompt=2, global_batch_size=2,
    )  # fmt: skip
    server = SglangServer(sglang, DENSE, "fp32")
    old = tiny_checkpoint(tmp_path / "old", seed=4)
    server.update_from_disk(str(old), "default")
    judge = SyncJudge(None, print)
    only = RolloutsOnly(config, ".", judge)
    assert isinstance(only.engine, SglangServer)
    assert only.engine.checkpoint == str(old)
    assert (judge.number, only.engine.weight_version) == (2, "0"), "the start and one sync were judged"
    assert judge.digest
    assert only.sample(0).meta["weight_version"] == "0"
    prompts = prompts_of(2)
    assert gap(tiny_policy(seed=3), prompts, only.engine.generate(prompts, HOT, SEEDS[:2]), 1.0) <= 1e-5
    assert list(shared.iterdir()) == []
    only.close()
    server.update_from_disk(str(old), "default")
    server.update(tiny_policy(seed=5).state_dict().items(), "default")
    with pytest.raises(ReproError, match="the engine read itself are not those of its checkpoint"):
        RolloutsOnly(config, ".", SyncJudge(None, print))
    server.update_from_disk(str(old), "20")
    server.close()


@pytest.mark.whole
def test_weights_that_cannot_be_written_down_do_not_end_a_server(tmp_path: Path, sglang_server: Served) -> None:  # noqa: F811
    """An order to write to a folder that is not there is taken, and the server goes on."""
    client = Client(sglang_server.url, 60.0, "")
    client.agreed("/begin_weight_update", {}, "begin")
    body = {"serialized_named_tensors": [packed_order(tmp_path / "gone")], "load_format": EXPORT}
    client.agreed("/update_weights_from_tensor", body, "show its weights")
    client.agreed("/end_weight_update", {}, "end")
    client.close()
    server = SglangServer(replace(CONFIG, url=sglang_server.url), DENSE, "fp32")
    assert server.generate([[1, 2]], HOT, [1])
    server.close()
    with pytest.raises(EngineError, match=r"cannot make a folder .*gone.*set sglang\.folder"):
        SglangServer(replace(CONFIG, url=sglang_server.url, folder=str(tmp_path / "gone")), DENSE, "fp32").held()


def _unversioned(responses: list[Response]) -> list[Response]:
    return [replace(each, weight_version=None) for each in responses]

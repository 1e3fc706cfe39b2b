"""The whole way round: SGLang samples, Megatron-core trains on two processes, the weights come back, SGLang samples."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import Repo
from sglang_kit import Served, sglang_server  # noqa: F401 - a fixture

from repro_golden.store.rollouts import RolloutSet

if find_spec("sglang") is None:  # importing it takes long
    pytest.skip("SGLang is not installed: see docs/how-to/rollouts.md", allow_module_level=True)
if find_spec("megatron") is None:
    pytest.skip("megatron-core 0.16.1 is not for this Python", allow_module_level=True)


CASE = """\
[case]
name = "round"
steps = 3
proof_steps = 1
rollouts = "golden/rollouts/round"

[subject]
module = "repro_core"
path = "core"
timeout = "4m"

[subject.config]
policy = "megatron"
rollout_engine = "sglang"
rollout_batch_size = 2
n_samples_per_prompt = 4
global_batch_size = 8
max_response_len = 6
lr = 0.01

[subject.config.model]
model_type = "qwen3"
kv_channels = 32
initializer_range = 0.1
tie_word_embeddings = false

[subject.config.sglang]
url = "URL"

[subject.config.megatron]
tensor_model_parallel_size = 2
sequence_parallel = true

[resources]
ranks = 2
"""


NOBODY = "http://127.0.0.1:9"
"""An address where no engine answers."""
REPLAY = """\

[mismatch]
max = 1e-4
"""


@pytest.mark.whole
def test_two_iterations_twice_have_the_same_bits(fork: Repo, tmp_path: Path, sglang_server: Served) -> None:  # noqa: F811
    """SGLang -> Megatron TP2 on gloo -> back to SGLang, two iterations and one more rollout, twice: equal rollouts.

    Every sync was judged, the weights moved between rollouts, and what was recorded trains elsewhere without an engine:
    in plain torch a golden run is kept of it, whose log-probs are the engine's within the case's bound.
    """
    cases = fork.root / "golden/cases"
    (cases / "mini.toml").unlink()
    (cases / "round.toml").write_text(CASE.replace("URL", sglang_server.url))
    done = fork.repro("rollout", "record", "round")
    assert done.returncode == 0, done.stderr
    again = fork.repro("rollout", "record", "round", "--out", str(tmp_path / "again"))
    assert again.returncode == 0, again.stderr
    rollouts, two = RolloutSet(fork.root / "golden/rollouts/round"), RolloutSet(tmp_path / "again")
    assert len(rollouts) == 3 and rollouts.digests == two.digests
    metas = [rollouts.read(k).meta for k in range(3)]
    assert [meta["weight_version"] for meta in metas] == ["0", "1", "2"]
    assert len({meta["weights"] for meta in metas}) == 3
    assert all(meta["engine"]["name"] == "sglang" and meta["engine"]["stand_ins"] for meta in metas)
    text = (
        CASE.replace("URL", NOBODY)
        .replace('"round"', '"replay"')
        .replace('policy = "megatron"\n', "")
        .replace("ranks = 2", "ranks = 1")
    )
    (cases / "replay.toml").write_text(text + REPLAY)
    kept = fork.repro("golden", "record", "replay", "--json")
    assert kept.returncode == 0, kept.stderr
    assert all(proof["passed"] for proof in json.loads(kept.stdout)["proofs"])

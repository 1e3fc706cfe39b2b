"""Rules on what surrounds a launch: the determinism set, and what else its actors see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doctor_launch_kit import DETERMINISTIC, DETERMINISTIC_ENV, Script, deterministic
from findings_kit import told, tried
from hypothesis import given
from hypothesis import strategies as st

from repro.doctor.artefacts.checkpoints.hf import read_config
from repro.doctor.artefacts.launches.scripts import launch_of_argv, read_launch
from repro.doctor.facts.determinism import NCCL_ALGOS, SET

WHOLE = deterministic()
TOP = {
    "--true-on-policy-mode": "", "--sglang-true-on-policy-contract": "qwen3_dense_true_on_policy_v1",
    "--train-backend": "fsdp", "--attn-implementation": "flash_attention_3",
}  # fmt: skip


def _with(script: Script, **env: str) -> Script:
    return script._replace(env={**script.env, **env})


def _without(script: Script, *names: str) -> Script:
    """Without flags or variables."""
    env = {name: value for name, value in script.env.items() if name not in names}
    return script._replace(env=env, drop=[*script.drop, *(name for name in names if name.startswith("--"))])


@pytest.mark.parametrize("script", [Script(), WHOLE], ids=["no determinism", "the whole set"])
def test_clean_launches_are_clean_for_every_rule(script: Script, tmp_path: Path) -> None:
    """A launch that asks for no determinism, and one that asks for all of it, give notes at most."""
    assert {finding.severity for finding in tried(script.read(tmp_path))} <= {"note"}


RECIPE = {
    "--deterministic-mode": "--sglang-enable-deterministic-inference", "--sglang-enable-deterministic-inference":
    "--deterministic-mode",
}  # fmt: skip


@given(st.sets(st.sampled_from([*SET, *RECIPE])))
def test_each_part_of_the_set_that_is_missing_is_named_once(missing: set[str]) -> None:
    """Whatever is left out of the set is what is found, as long as something still asks for determinism."""
    env = [f"{name}={value}" for name, value in SET.items() if name not in missing]
    flags = [name for name in RECIPE if name not in missing]
    launch = launch_of_argv(["env", *env, "python", "train.py", "--lr", "1e-6", *flags])
    reported = told("determinism-half", launch)
    asks = bool(flags) or "NVTE_ALLOW_NONDETERMINISTIC_ALGO" not in missing
    named = [finding.message.partition(", and ")[2].partition(" is missing")[0] for finding in reported]
    assert sorted(named) == (sorted(missing) if asks else [])
    assert {hit.severity for hit in reported} <= ({"warning"} if flags else {"note"})


def test_engines_count_only_where_they_sample_and_trainers_where_they_train(tmp_path: Path) -> None:
    """A replay wants nothing of engines, a rollout without a trainer nothing of the trainer."""
    replay = _without(WHOLE, "--sglang-enable-deterministic-inference")._replace(
        flags={**WHOLE.flags, "--load-debug-rollout-data": "/d/{rollout_id}.pt"}
    )
    assert told("determinism-half", replay.read(tmp_path)) == []
    engines = Script({"--sglang-enable-deterministic-inference": "", "--debug-rollout-only": ""})
    assert told("determinism-half", engines.read(tmp_path)) == []


@pytest.mark.parametrize(
    ("value", "severity"),
    [*((algo, None) for algo in NCCL_ALGOS), ("Tree", "warning"), ("Ring,CollnetDirect", "warning"), ("ring", "error"),
     ("NVLS", "error"), ("", "error"), ("allreduce:ring", "error")],
)  # fmt: skip
def test_values_of_nccl_algo_by_what_megatron_takes(value: str, severity: str | None, tmp_path: Path) -> None:
    """What all versions take is silent, what some refuse a warning, what all refuse an error."""
    reported = told("determinism-nccl-algo", _with(WHOLE, NCCL_ALGO=value).read(tmp_path))
    assert [finding.severity for finding in reported] == ([severity] if severity else [])


def test_fsdp_and_engines_alone_may_use_sglangs_algorithm(tmp_path: Path) -> None:
    """allreduce:tree is refused by Megatron alone."""
    name = "determinism-nccl-algo"
    tree = {**DETERMINISTIC_ENV, "NCCL_ALGO": "allreduce:tree"}
    assert told(name, Script({**DETERMINISTIC, **TOP}, env=tree, system="miles").read(tmp_path)) == []
    assert told(name, Script({"--sglang-enable-deterministic-inference": ""}, env=tree).read(tmp_path)) == []


@pytest.mark.parametrize(
    ("seed", "severity"), [("random", "warning"), ("4294967296", "error"), ("-1", "error"), ("7", "")]
)
def test_hash_seeds(seed: str, severity: str, tmp_path: Path) -> None:
    """A random seed is a warning, and one that Python does not start with an error even without determinism."""
    reported = told("determinism-hash-seed", _with(WHOLE, PYTHONHASHSEED=seed).read(tmp_path))
    assert [finding.severity for finding in reported] == ([severity] if severity else [])
    plain = told("determinism-hash-seed", Script(env={"PYTHONHASHSEED": seed}).read(tmp_path))
    assert [hit.severity for hit in plain] == (["error"] if severity == "error" else [])


def test_where_an_export_reaches_the_actors(tmp_path: Path) -> None:
    """Before `ray start` it reaches the actors of that node, and of no other; a cluster from elsewhere sees nothing."""
    name, bare = "determinism-late", _without(WHOLE, "CUBLAS_WORKSPACE_CONFIG")
    early = bare._replace(top="export CUBLAS_WORKSPACE_CONFIG=:4096:8")
    assert told(name, early.read(tmp_path)) == []
    (other,) = told(name, early._replace(flags={**early.flags, "--actor-num-nodes": "4"}).read(tmp_path))
    assert (other.severity, "other 3 of 4 nodes" in other.message) == ("warning", True)
    text = early.text().replace("ray start --head", "# ray start --head")
    (tmp_path / "run.sh").write_text(text)
    (elsewhere,) = told(name, read_launch(tmp_path / "run.sh"))
    assert (elsewhere.severity, "started elsewhere" in elsewhere.message) == ("warning", True)
    local = bare._replace(middle="export CUBLAS_WORKSPACE_CONFIG=:4096:8", submitted=False, env={})
    assert told(name, local.read(tmp_path)) == []


def test_what_is_overridden(tmp_path: Path) -> None:
    """A flag given again with another value, its --no- twin, and a variable that is unset again."""
    name = "determinism-overridden"
    (twice,) = told(name, WHOLE._replace(tail="--attention-backend fused").read(tmp_path))
    assert "--attention-backend fused overrides --attention-backend flash" in twice.message
    (off,) = told(name, WHOLE._replace(tail="--no-deterministic-mode").read(tmp_path))
    assert "--no-deterministic-mode overrides --deterministic-mode" in off.message
    assert told(name, WHOLE._replace(tail="--attention-backend flash").read(tmp_path)) == []
    gone = WHOLE._replace(top="export PYTHONHASHSEED=0\nunset PYTHONHASHSEED", env={})
    (unset,) = told(name, gone.read(tmp_path))
    assert "is removed again" in unset.message


def test_engines_by_model_and_backend(tmp_path: Path) -> None:
    """Flashinfer loses its cache, and latent attention; newer and patched backends are no error."""
    name = "engine-determinism"
    (cache,) = told(name, deterministic(sglang_attention_backend="flashinfer").read(tmp_path))
    assert (cache.severity, "radix cache" in cache.message) == ("note", True)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DeepseekV3ForCausalLM"]}))
    flashinfer = deterministic(sglang_attention_backend="flashinfer").read(tmp_path)
    (latent,) = told(name, flashinfer, read_config(tmp_path / "config.json"))
    assert (latent.severity, "latent attention" in latent.message) == ("warning", True)
    for backend, severity in (("fa4", "note"), ("nsa", "warning")):
        (finding,) = told(name, deterministic(sglang_attention_backend=backend).read(tmp_path))
        assert finding.severity == severity
    assert told(name, Script({"--sglang-attention-backend": "trtllm_mha"}).read(tmp_path)) == []


def test_networks_between_nodes(tmp_path: Path) -> None:
    """InfiniBand switched off and the loopback interface matter on several nodes only."""
    env = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    reported = told("nccl-interface", Script({"--actor-num-nodes": "2"}, env=env).read(tmp_path))
    assert [finding.where.item for finding in reported] == ["NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE"]
    assert {hit.severity for hit in reported} == {"warning"}
    assert told("nccl-interface", Script(env=env).read(tmp_path)) == []


def test_dropout_that_the_launch_decides(tmp_path: Path) -> None:
    """A value above 0 is found with its flag; a bridge's checkpoint decides what is not given."""
    name = "megatron-dropout"
    (given_,) = told(name, deterministic(attention_dropout="0.1").read(tmp_path))
    assert "--attention-dropout 0.1, in a run that asks for determinism" in given_.message
    bridged = Script({"--megatron-to-hf-mode": "bridge"}, drop=["--attention-dropout"], system="miles")
    assert told(name, bridged.read(tmp_path)) == []


_ODD = st.one_of(st.sampled_from(["", "nan", "$X", "`date`", "9" * 5000, "0", "00", ":", "²"]), st.text(max_size=6))
_ENV = st.dictionaries(
    st.sampled_from([*SET, "PYTHONHASHSEED", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE"]),
    _ODD,
)
_FLAGS = sorted(
    {*DETERMINISTIC, *TOP, "--actor-num-nodes", "--attention-dropout", "--attention-backend", "--fully-async"}
)


@given(_ENV, st.lists(st.tuples(st.sampled_from(_FLAGS), st.lists(_ODD, max_size=2)), max_size=6))
def test_no_value_makes_a_rule_raise(env: dict[str, str], flags: list[tuple[str, list[str]]]) -> None:
    """Any values at all of the variables and flags: findings or none, no exception."""
    runtime = "--runtime-env-json=" + json.dumps({"env_vars": env})
    words = [word for name, values in flags for word in (name, *values)]
    launch = launch_of_argv(
        ["ray", "job", "submit", runtime, "--", "python", "train.py", "--deterministic-mode", *words]
    )
    assert all(finding.message for finding in tried(launch))

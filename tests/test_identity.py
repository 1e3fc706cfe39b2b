from __future__ import annotations

import json
import platform
import re
from importlib import metadata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from repro_golden.case.identity import (
    BITS_VARIABLES,
    PACKAGES,
    Difference,
    Identity,
    collect,
    megatron_layout,
    megatron_variables,
)

torch.set_num_threads(1)

PARTS = ("host", "environment", "layout")
FLAT = st.dictionaries(st.sampled_from("abcde"), st.sampled_from(["1", "2", "3"]), max_size=5)
IDENTITIES = st.builds(Identity, FLAT, FLAT, FLAT)
WITH_EMPTY = st.dictionaries(st.sampled_from("ab"), st.sampled_from(["", "1"]), max_size=2)
SMALL = st.builds(Identity, WITH_EMPTY, WITH_EMPTY, WITH_EMPTY)
NAMES = st.text(st.characters(codec="ascii", exclude_characters="=\0"), min_size=1, max_size=12) | st.sampled_from(
    [
        "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "LD_PRELOAD", "PATH", "NCCL_ALGO_",
        "torch", "nccl_algo", "MKL_CBWR2", "XOMP_NUM_THREADS", "python", "ranks", "threads", "cpu",
    ]
)  # fmt: skip
SECRETS = st.text(max_size=10).map(lambda text: f"s3cr3t-{text}-s3cr3t")


# -- what is recorded


@given(st.dictionaries(NAMES.filter(lambda n: n not in BITS_VARIABLES), SECRETS, max_size=8))
def test_no_variable_outside_the_list_is_recorded(environ: dict[str, str]) -> None:
    """Whatever else the environment holds leaves no trace: neither value nor name, and the identity is unchanged."""
    identity = collect(environ, threads=1)
    assert identity == collect({}, threads=1) and identity.machine == collect({}, threads=1).machine
    assert "s3cr3t" not in json.dumps(identity.to_mapping())


@given(st.dictionaries(st.sampled_from(BITS_VARIABLES), st.text(max_size=8), max_size=4), st.integers(1, 64))
def test_every_variable_that_decides_bits_is_recorded(environ: dict[str, str], threads: int) -> None:
    """The variables of the list are recorded as they are, with the number of threads; each value has its digest."""
    identity = collect(environ, threads=threads)
    assert {k: v for k, v in identity.environment.items() if k in BITS_VARIABLES} == environ
    assert identity.layout == {"ranks": "1", "threads": str(threads)}
    assert (identity.digest == collect({}, threads=1).digest) == (not environ and threads == 1)


def test_the_real_environment_gives_away_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting reads the given mapping alone: a secret in the process's own environment is never seen."""
    monkeypatch.setenv("NCCL_ALGO", "s3cr3t")
    monkeypatch.setenv("MY_TOKEN", "s3cr3t")
    assert "s3cr3t" not in json.dumps(collect({"MY_TOKEN": "s3cr3t"}, threads=1).to_mapping())


def test_the_list_is_of_names_that_hold_no_secrets() -> None:
    """No listed variable is a credential by its name, none is listed twice, and all are full names."""
    assert len(set(BITS_VARIABLES)) == len(BITS_VARIABLES) and len(set(PACKAGES)) == len(PACKAGES)
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]+", name) for name in BITS_VARIABLES)
    assert not [n for n in BITS_VARIABLES if re.search(r"KEY|TOKEN|SECRET|PASS|AUTH|CRED|USER|HOME|PATH|URL", n)]


def test_versions_of_what_computes_are_recorded() -> None:
    """Python, libc, torch with its build, numpy, the CPU and its instruction set are there, and no host name."""
    identity = collect({}, threads=2, ranks=3)
    assert identity.environment["python"] == platform.python_version()
    assert identity.environment["torch"] == torch.__version__
    assert identity.environment["numpy"] == metadata.version("numpy")
    assert re.fullmatch(r"[0-9a-f]{8}", identity.environment["torch build"])
    assert identity.host["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert identity.host["architecture"] == platform.machine() and identity.host["cpu"]
    assert identity.layout == {"ranks": "3", "threads": "2"}
    assert platform.node() == "" or platform.node() not in json.dumps(identity.to_mapping())


def test_a_lowered_instruction_set_is_another_host() -> None:
    """ATEN_CPU_CAPABILITY changes the host's instruction set and the machine's name."""
    plain, lowered = collect({}, threads=1), collect({"ATEN_CPU_CAPABILITY": "default"}, threads=1)
    assert lowered.host["instructions"] == "default" and plain.machine != lowered.machine
    assert {(d.part, d.key) for d in plain.differences(lowered)} >= {("environment", "ATEN_CPU_CAPABILITY")}


# -- differences


@given(IDENTITIES, IDENTITIES)
def test_differences_name_part_and_key(a: Identity, b: Identity) -> None:
    """Exactly the entries that differ are named, part by part, key by key, with both sides; the reverse mirrors it."""
    differing = a.differences(b)
    assert differing == [
        Difference(part, key, x.get(key, ""), y.get(key, ""))  # type: ignore[arg-type]
        for part in PARTS
        for x, y in [(getattr(a, part), getattr(b, part))]
        for key in sorted({*x, *y})
        if x.get(key, "") != y.get(key, "")
    ]
    assert [(d.part, d.key, d.b, d.a) for d in differing] == [(d.part, d.key, d.a, d.b) for d in b.differences(a)]
    assert all(str(d).startswith(f"{d.part} {d.key}: ") for d in differing)


@given(SMALL, SMALL)
def test_identities_differ_exactly_where_a_difference_is_named(a: Identity, b: Identity) -> None:
    """No named difference means one digest and one machine name, and another digest means a named difference.

    That holds too where a variable is set but empty on one side and absent on the other.
    """
    assert (not a.differences(b)) == (a.digest == b.digest) == (a.machine == b.machine)


def test_a_difference_reads_as_one_line() -> None:
    """An absent side is called absent."""
    a, b = Identity({"cpu": "x"}, {}, {"threads": "1"}), Identity({"cpu": "x"}, {"numpy": "2"}, {"threads": "2"})
    assert [str(d) for d in a.differences(b)] == ["environment numpy: (absent) -> 2", "layout threads: 1 -> 2"]


@given(IDENTITIES)
def test_an_identity_survives_json(identity: Identity) -> None:
    """Written as JSON and read back it is the same, whatever the order of keys; a missing part reads as empty."""
    again = Identity.from_mapping(json.loads(json.dumps(identity.to_mapping(), sort_keys=True)))
    assert again == identity and again.digest == identity.digest and again.differences(identity) == []
    assert Identity.from_mapping({}) == Identity({}, {}, {})


# -- the machine's name


@given(
    st.text(max_size=60), st.none() | st.text(max_size=60), st.sampled_from(["", "2.13.0", "2.13.0+cpu", "2.9.0a0+git"])
)
def test_the_machines_name_is_a_safe_path_component(cpu: str, gpu: str | None, version: str) -> None:
    """Whatever a CPU or GPU calls itself, the name is short, lower case and of letters, digits, dots and dashes."""
    host = {"architecture": "x86_64", "cpu": cpu} | ({} if gpu is None else {"gpu": gpu})
    name = Identity(host, {"torch": version}, {}).machine
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*-[0-9a-f]{8}", name) and len(name) < 64


@pytest.mark.parametrize(
    ("chip", "slug"),
    [
        ("Intel(R) Xeon(R) CPU @ 2.20GHz 6/85/7 0123abcd", "xeon"),
        ("AMD EPYC 7B13 64-Core Processor", "epyc-7b13-64-core"),
        ("NVIDIA H200", "h200"),
        ("../../etc", "etc"),
        ("\u9f99\u82af", "x86_64"),
        ("", "x86_64"),
    ],
)
def test_the_machines_name_begins_with_its_chip(chip: str, slug: str) -> None:
    """The chip's own words come first, without vendor noise; a name without any falls back to the architecture."""
    name = Identity({"architecture": "x86_64", "cpu": chip}, {"torch": "2.13.0+cpu"}, {}).machine
    assert re.fullmatch(rf"{slug}-torch2\.13\.0-[0-9a-f]{{8}}", name)


@given(IDENTITIES, st.sampled_from(PARTS), st.sampled_from("xyz"))
def test_every_entry_of_every_part_names_another_machine(identity: Identity, part: str, key: str) -> None:
    """One more entry in any part gives another digest and another machine name."""
    mapping = identity.to_mapping()
    mapping[part][key] = "1"
    other = Identity.from_mapping(mapping)
    assert other.digest != identity.digest and other.machine != identity.machine
    assert [(d.part, d.key) for d in identity.differences(other)] == [(part, key)]


def test_the_layout_of_megatron_is_part_of_the_identity() -> None:
    """Sizes of groups are layout entries under policy megatron alone; what is no size is the trainer's to refuse."""
    config = {
        "policy": "megatron",
        "megatron": {"tensor_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": None},
    }
    assert megatron_layout(config, 8) == {"tp": "2", "pp": "1", "vpp": "1", "cp": "1", "ep": "1", "dp": "4"}
    assert megatron_layout({"policy": "megatron"}, 1)["dp"] == "1"
    for other in (
        {},
        {"policy": "torch"} | config | {"policy": "torch"},
        {**config, "megatron": {"context_parallel_size": "2"}},
    ):
        assert megatron_layout(other, 8) == {}
    identity = collect({}, threads=1, ranks=8)
    (difference,) = identity.differences(identity.laid_out({"tp": "2"}))
    assert (difference.part, difference.key, difference.b) == ("layout", "tp", "2")


def test_the_attention_that_a_case_asks_for_is_told_to_transformer_engine() -> None:
    """Megatron's variables follow from the configuration alone: none for plain torch, one kernel, or all of them."""
    engine = {"transformer_impl": "transformer_engine"}
    fused = megatron_variables({"policy": "megatron", "megatron": engine | {"attention_backend": "fused"}})
    auto = megatron_variables({"policy": "megatron", "megatron": engine | {"attention_backend": "auto"}})
    kernels = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    assert [fused[name] for name in kernels] == ["0", "1", "0"] and [auto[name] for name in kernels] == ["1"] * 3
    assert set(kernels) <= set(BITS_VARIABLES)
    assert megatron_variables({"policy": "megatron"}) == {"TORCHDYNAMO_DISABLE": "1"}
    assert megatron_variables({"megatron": engine}) == {}

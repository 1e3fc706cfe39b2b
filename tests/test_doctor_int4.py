"""The INT4 ignore list: played through as the trainers do, on checkpoints with packed experts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_checkpoint_kit import experts, finding, findings, hf, paths
from doctor_machine_kit import script
from hypothesis import given
from hypothesis import strategies as st

from repro.doctor.artefacts.kinds import HfConfig, TensorInfo
from repro.doctor.catalogue import catalogue
from repro.doctor.facts.ignored_weights import RECOMMENDED, ignoring_of, is_linear
from repro.doctor.facts.tensor_names import why_slow

GROUPS = {"group_0": {"weights": {"type": "int", "num_bits": 4, "group_size": 32, "symmetric": True}}}


INT4 = ("int4-router", "int4-ignore", "int4-ignore-pattern")


def _quantised(folder: Path, ignore: Any, *, packed: bool = True, method: str = "compressed-tensors") -> Path:
    """A MoE model whose experts are packed, with an ignore list."""
    quantization = {"quant_method": method, "format": "pack-quantized", "config_groups": GROUPS, "ignore": ignore}
    config = {"quantization_config": quantization, "n_routed_experts": 4, "first_k_dense_replace": 1}
    return hf(folder, experts(4, packed=packed), config={**config, "model_type": "glm4_moe"})


def _without(*parts: str) -> list[str]:
    return [entry for entry in RECOMMENDED if not any(part in entry for part in parts)]


@pytest.mark.parametrize("name", ["int4-router", "int4-ignore"])
def test_without_a_launch_it_is_an_error_and_with_a_bridge_a_warning(name: str, tmp_path: Path) -> None:
    """The file alone, or a launch of another model, is enough; Miles' bridge does not go by the list."""
    folder = _quantised(tmp_path / "model", _without(r"gate\.", "embed_tokens", "lm_head"))
    alone = findings(name, folder)
    assert {(hit.severity, hit.certainty) for hit in alone} == {("error", "likely")}
    assert findings(name, folder, script(tmp_path, "--hf-checkpoint /m/other")) == alone
    bridge = script(tmp_path, f"{paths(hf_checkpoint=folder)} --megatron-to-hf-mode bridge")
    assert {finding.severity for finding in findings(name, folder, bridge)} == {"warning"}


def test_each_matrix_is_named_with_its_shape_and_one_cure(tmp_path: Path) -> None:
    """Every router and every table has a finding of its own; the cure has the patterns and the whole list."""
    folder = _quantised(tmp_path / "model", _without(r"gate\.", "embed_tokens", "lm_head"))
    routers, tables = findings("int4-router", folder), findings("int4-ignore", folder)
    assert [router.where.value for router in routers] == [
        f"model.layers.{n}.mlp.gate.weight (4 x 16)" for n in (1, 2, 3)
    ]
    assert [table.where.value for table in tables] == [
        "lm_head.weight (32 x 16)",
        "model.embed_tokens.weight (32 x 16)",
    ]
    for reported in (routers, tables):
        assert all(hit.where.value in hit.message for hit in reported)
        (fix,) = {finding.fix for finding in reported}
        assert fix.endswith(json.dumps(list(RECOMMENDED)))
    assert routers[0].fix.startswith(r'add "re:.*mlp\\.gate\\..*" to quantization_config.ignore')


def _packed_already(name: str, tensors: dict[str, torch.Tensor], *, shape: bool = True) -> None:
    """Replace a matrix by what a conversion makes of it."""
    rows, columns = tensors.pop(name).shape
    tensors[f"{name}_packed"] = torch.ones(rows, columns // 8, dtype=torch.int32)
    tensors[f"{name}_scale"] = torch.ones(rows, 1).bfloat16()
    if shape:
        tensors[f"{name}_shape"] = torch.tensor([rows, columns], dtype=torch.int32)


@pytest.mark.parametrize("shape", [True, False])
@pytest.mark.parametrize(
    ("name", "tensor", "part", "size"),
    [
        ("int4-router", "model.layers.1.mlp.gate.weight", r"gate\.", "4 x 16"),
        ("int4-ignore", "model.embed_tokens.weight", "embed_tokens", "32 x 16"),
    ],
)
def test_what_a_conversion_packed_already(
    name: str, tensor: str, part: str, size: str, shape: bool, tmp_path: Path
) -> None:
    """A router or a table that the same bad list packed in the checkpoint is an error, whatever the launch."""
    tensors = experts(2, packed=True)
    _packed_already(tensor, tensors, shape=shape)
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": _without(part)}
    folder = hf(tmp_path / "model", tensors, config={"quantization_config": quantization})
    bridge = script(tmp_path, f"{paths(hf_checkpoint=folder)} --megatron-to-hf-mode bridge")
    for beside in ((), (bridge,)):
        reported = finding(name, folder, *beside)
        assert (reported.severity, reported.certainty) == ("error", "certain")
        assert reported.where.value == f"{tensor} ({size if shape else 'shape unknown'})"
        assert "stored packed" in reported.message and "convert the checkpoint again" in reported.fix


def test_the_gate_of_a_shared_expert(tmp_path: Path) -> None:
    """In a real Qwen2-MoE that gate is a warning that may be wrong; gate_proj and an attention's gate are Linears."""
    import transformers

    config = transformers.Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    folder = tmp_path / "qwen"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": list(RECOMMENDED)}
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": quantization}))
    reported = findings("int4-ignore", folder)
    assert [hit.where.value for hit in reported] == [
        f"model.layers.{n}.mlp.shared_expert_gate.weight (1 x 32)" for n in (0, 1)
    ]
    assert {(finding.severity, finding.certainty) for finding in reported} == {("warning", "possible")}
    assert findings("int4-router", folder) == []
    for name in ("mlp.gate_proj", "mlp.gate_up_proj", "self_attn.output_gate"):
        assert is_linear(f"model.layers.0.{name}.weight")


def test_the_cure_cures(tmp_path: Path) -> None:
    """The rules that a finding proposes, put into the list, leave nothing to find."""
    ignore = _without(r"gate\.", "embed_tokens", "self_attn")
    folder = _quantised(tmp_path / "model", ignore)
    reported = [*findings("int4-router", folder), *findings("int4-ignore", folder)]
    assert len(reported) == 8  # three routers, the embedding, four projections of the attention
    proposed = []
    for hit in reported:
        match = re.match(r"add (.*?) to quantization_config", hit.fix)
        assert match is not None
        proposed += json.loads(f"[{match[1]}]")
    cured = _quantised(tmp_path / "cured", [*ignore, *proposed])
    for name in INT4:
        assert [finding for finding in findings(name, cured) if finding.severity != "note"] == []


def test_what_is_stored_packed_must_not_be_ignored(tmp_path: Path) -> None:
    """A list that ignores weights which the file holds packed contradicts it."""
    reported = finding("int4-ignore", _quantised(tmp_path / "model", [*RECOMMENDED, "re:.*experts.*"]))
    assert "stored packed" in reported.message and reported.severity == "warning"


def test_a_linear_that_is_stored_unpacked(tmp_path: Path) -> None:
    """Beside packed experts a projection that the list does not keep is named; without packed ones it is not."""
    folder = _quantised(tmp_path / "model", _without("shared_experts"))
    assert {
        finding.where.value.rpartition(".layers.1.")[2].split()[0] for finding in findings("int4-ignore", folder)
    } == {f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert findings("int4-ignore", _quantised(tmp_path / "bf16", _without("shared_experts"), packed=False)) == []


@pytest.mark.parametrize(
    ("text", "severity", "words"),
    [
        (r"re:mlp\.gate\.", "warning", "only inside of names"),
        (r".*mlp\.gate\..*", "warning", "looks like a pattern"),
        ("vision_tower", "note", "matches no weight"),
        ("re:.*nothing.*", "note", "matches no weight"),
        ("re:(", "error", "no regular expression"),
        ("re:(a+)+$", "warning", "repeats what repeats"),
    ],
)
def test_rules_that_do_nothing(text: str, severity: str, words: str, tmp_path: Path) -> None:
    """A rule that matches nothing is told with the reason: the anchor, the missing ``re:``, or no such weight."""
    reported = finding("int4-ignore-pattern", _quantised(tmp_path / "model", [*_without("eh_proj"), text]))
    assert reported.severity == severity and words in reported.message


@pytest.mark.parametrize("ignore", [None, "lm_head", {"a": 1}, [1, None, ["x"]], [""]])
def test_lists_that_are_none(ignore: Any, tmp_path: Path) -> None:
    """A list of another type counts as empty, and a rule of no characters begins every name, as in the trainers."""
    folder = _quantised(tmp_path / "model", ignore)
    assert len(findings("int4-router", folder)) == (0 if ignore == [""] else 3)


def test_other_quantisation_is_not_looked_at(tmp_path: Path) -> None:
    """FP8 and GPTQ have other lists."""
    for method in ("fp8", "gptq"):
        folder = _quantised(tmp_path / method, [], method=method)
        assert [findings(name, folder) for name in INT4] == [[], [], []]


PARTS = st.lists(
    st.sampled_from(["mlp", "gate", "up_proj", "experts", "0", "12", "self_attn", "q"]), min_size=1, max_size=5
)
NAMES = st.builds(
    lambda parts, end: ".".join([*parts, end]), PARTS, st.sampled_from(["weight", "bias", "weight_packed"])
)
ATOMS = st.sampled_from([".*", r"mlp", r"\.", r"gate", r"[0-9]+", r"(up|q)", r"self_attn", r"\d{1,2}", "^", "$", "w?"])
RULES = st.one_of(
    NAMES, st.builds(".".join, PARTS), st.lists(ATOMS, max_size=4).map(lambda parts: "re:" + "".join(parts))
)


def _packed_by_the_trainers(names: list[tuple[str, int]], rules: list[str]) -> list[str]:
    """What the guide says, in other words than the code's: strike out every weight that a rule keeps."""
    left = {name for name, dims in names if dims > 1 and name[-7:] == ".weight"}
    for pattern in rules:
        kept = re.compile(f"(?:{pattern[3:]})" if pattern[:3] == "re:" else re.escape(pattern))
        left = {name for name in left if kept.match(name) is None and name[: len(pattern)] != pattern}
    return sorted(left)


@given(
    names=st.lists(st.tuples(NAMES, st.integers(1, 3)), max_size=12, unique_by=lambda x: x[0]),
    rules=st.lists(RULES, max_size=5),
)
def test_the_list_is_played_through_as_the_trainers_do(names: list[tuple[str, int]], rules: list[str]) -> None:
    """Names and lists at random are packed and kept as by an independent reading of the rule."""
    quantization = {"quant_method": "compressed-tensors", "config_groups": GROUPS, "ignore": rules}
    ignoring = ignoring_of(HfConfig(Path("config.json"), {"quantization_config": quantization}))
    assert ignoring is not None and not ignoring.refused
    tensors = {name: TensorInfo("f", "BF16", (2,) * dims) for name, dims in names}
    assert list(ignoring.packed(tensors)) == _packed_by_the_trainers(names, rules)


@given(text=st.text(alphabet=r"ab.*+?|()[]{}\\^$0123,:=P<-", max_size=30))
def test_patterns_of_any_text_raise_nothing_and_end(text: str) -> None:
    """Any text as a pattern is tried, refused or invalid; what is tried ends on a long name that it does not match."""
    quantization = {"quant_method": "compressed-tensors", "config_groups": GROUPS, "ignore": [f"re:{text}"]}
    ignoring = ignoring_of(HfConfig(Path("config.json"), {"quantization_config": quantization}))
    assert ignoring is not None
    assert ignoring.ignores("ab" * 25 + "!") in (True, False)


@pytest.mark.parametrize(
    "text",
    ["(a+)+$", "(a|a)*$", "(?:a*)*b", r"(a)\1+", "((a|b)c)*", "(a?)+", "(?P<x>a)(?P=x)", "a*a*a*a*a*", "(a*){9}"],
)
def test_patterns_that_may_not_end_are_refused(text: str) -> None:
    """Nested repetition, alternatives inside of it and back references are not tried."""
    assert why_slow(text)


@pytest.mark.parametrize(
    "text", [*RECOMMENDED, r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", r"re:.*[(*|]+x", r"re:a\(b\)*"]
)
def test_patterns_of_real_lists_are_tried(text: str) -> None:
    """The guide's patterns, and those of published checkpoints, are no such."""
    assert not why_slow(text.removeprefix("re:"))


def test_the_guides_pattern_is_the_rules_own_cure() -> None:
    """What the guide says to add for the router stands in the cure, as it is written in JSON."""
    assert r'"re:.*mlp\\.gate\\..*"' in catalogue()["int4-router"].fix

"""Rules of Hugging Face checkpoints, on folders of real safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_checkpoint_kit import dense, experts, finding, findings, hf, shard_of, tokenizer, write_config
from safetensors.torch import load_file

from repro.doctor.artefacts.checkpoints.hf import HF, INDEX
from repro.doctor.artefacts.kinds import HfCheckpoint, HfConfig
from repro.doctor.catalogue import catalogue

Tensors = dict[str, torch.Tensor]
Maker = Callable[[Path], list[Path]]

HF_RULES = (
    "hf-shard-missing", "hf-shard-extra", "hf-index", "hf-layer-missing", "hf-layer-keys", "hf-zero-tensor",
    "hf-not-finite", "hf-dtype-drift", "hf-truncated", "hf-tied-embeddings", "hf-vocab", "hf-config",
    "hf-config-shapes",
    "layers-equal", "int4-router", "int4-ignore", "int4-ignore-pattern",
)  # fmt: skip


def _pair(edit: Callable[[Tensors], object]) -> Maker:
    def make(tmp: Path) -> list[Path]:
        tensors = dense()
        first = hf(tmp / "a", tensors)
        edit(tensors)
        return [first, hf(tmp / "b", tensors)]

    return make


def _swap_stages(tensors: Tensors) -> None:
    """The second stage's layers written under the first's numbers, and the other way round."""
    old = dict(tensors)
    for name in old:
        for layer in range(4):
            if f".layers.{layer}." in name:
                tensors[name] = old[name.replace(f".layers.{layer}.", f".layers.{(layer + 2) % 4}.")]


def _put(name: str, value: float, *, at: int | None = None) -> Callable[[Tensors], object]:
    def edit(tensors: Tensors) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[slice(None) if at is None else at] = value

    return edit


def _drop(part: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name]


def _config(**values: Any) -> Maker:
    base = {"model_type": "qwen2", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    return lambda tmp: [write_config(tmp / "model", {**base, **values})]


QUERY = "model.layers.1.self_attn.q_proj.weight"


# -- clean ones


def _transformers(kind: str, tmp: Path, **more: Any) -> Path:
    import transformers

    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 1,
        "bos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **more})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.to(torch.bfloat16).save_pretrained(tmp / kind, max_shard_size="20KB")
    return tmp / kind


EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Qwen2", {}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "mlp_only_layers": [0], "head_dim": 8}),
        ("Qwen2Moe", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 2}),
        ("Glm4Moe", {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
        ("Gemma3", {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    ],
)
def test_checkpoints_of_transformers_are_clean(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    """What transformers saves in many shards, dense and with experts, tied and not, gives no finding at all."""
    name = "Gemma3Text" if kind == "Gemma3" else kind
    import transformers

    if kind == "Gemma3":
        config = transformers.Gemma3TextConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, **more,
        )  # fmt: skip
        transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path / name, max_shard_size="20KB")
        folder = tmp_path / name
    else:
        folder = _transformers(kind, tmp_path, **more)
    assert len(list(folder.glob("*.safetensors"))) > 2
    kinds = {type(artefact) for artefact in HF.read(folder)}
    assert kinds == {HfCheckpoint, HfConfig}
    for rule in HF_RULES:
        assert findings(rule, folder) == [], rule


@pytest.mark.parametrize("name", HF_RULES)
def test_checkpoints_of_both_kinds_are_clean(name: str, tmp_path: Path) -> None:
    """Dense, tied, one-shard and MoE checkpoints with experts in single tensors give no finding."""
    whole = [
        hf(tmp_path / "dense", dense()),
        hf(tmp_path / "tied", dense(tied=True), shards=1),
        hf(tmp_path / "numbered", dense(), index=False),
        hf(tmp_path / "experts", experts(6, first_dense=2), shards=5),
    ]
    for folder in whole:
        assert findings(name, tokenizer(folder)) == [], folder


# -- details


def test_every_missing_shard_is_named_without_an_index(tmp_path: Path) -> None:
    """Numbered shards with a hole, and no index, are still missed."""
    folder = hf(tmp_path / "model", dense(), shards=4, index=False)
    (folder / "model-00003-of-00004.safetensors").unlink()
    assert "model-00003-of-00004" in finding("hf-shard-missing", folder).message


def test_an_index_that_points_elsewhere(tmp_path: Path) -> None:
    """A tensor in another shard is an error, an unnamed one a warning, a total that is too large a warning."""
    folder = hf(tmp_path / "model", dense())
    whole = json.loads((folder / INDEX).read_text())
    whole["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    del whole["weight_map"]["model.layers.0.mlp.up_proj.weight"]
    (folder / INDEX).write_text(json.dumps(whole))
    moved, unnamed = findings("hf-index", folder)
    assert (moved.severity, unnamed.severity) == ("error", "warning")
    assert "model.norm.weight" in moved.message and "up_proj" in unnamed.message
    whole = json.loads((hf(tmp_path / "other", dense()) / INDEX).read_text())
    whole["metadata"]["total_size"] *= 2
    (tmp_path / "other" / INDEX).write_text(json.dumps(whole))
    assert finding("hf-index", tmp_path / "other").severity == "warning"


def test_experts_are_numbered_without_holes(tmp_path: Path) -> None:
    """A layer without one expert, and one without a tensor of an expert, are errors that name it."""
    for part, number in ((".layers.3.mlp.experts.1.", 3), (".layers.2.mlp.experts.3.down_proj", 2)):
        tensors = experts(5)
        _drop(part)(tensors)
        reported = finding("hf-layer-keys", hf(tmp_path / str(number), tensors))
        assert f"model.layers.{number}: experts" in reported.message and reported.severity == "error"


def test_dense_layers_are_no_peers_of_expert_layers(tmp_path: Path) -> None:
    """The config says which layers are dense: one that lost all its experts is found by it."""
    tensors = experts(5)
    _drop(".layers.3.mlp.")(tensors)
    reported = findings("hf-layer-keys", hf(tmp_path / "model", tensors))
    assert any("layer 3 has" in finding.message and finding.severity == "error" for finding in reported)


def test_whole_groups_of_layers_may_differ(tmp_path: Path) -> None:
    """Three layers that all lack a part are a warning: models are made like that."""
    tensors = dense(8)
    for layer in (1, 3, 5):
        _drop(f".layers.{layer}.self_attn.k_proj.weight")(tensors)
    reported = finding("hf-layer-keys", hf(tmp_path / "model", tensors))
    assert reported.severity == "warning" and "1, 3, 5" in reported.message


def test_layers_beyond_the_config(tmp_path: Path) -> None:
    """More layers than the config has are a warning; those that predict ahead are none."""
    assert (
        finding("hf-layer-missing", hf(tmp_path / "a", dense(5), config={"num_hidden_layers": 4})).severity == "warning"
    )
    ahead = {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    assert findings("hf-layer-missing", hf(tmp_path / "b", dense(5), config=ahead)) == []


def test_constants_that_are_wrong_and_that_are_not(tmp_path: Path) -> None:
    """A matrix of ones is a warning, zeros of mixed signs are zeros; some norms and heads are made of zeros."""
    tensors = dense()
    _put(QUERY, 1.0)(tensors)
    reported = finding("hf-zero-tensor", hf(tmp_path / "ones", tensors))
    assert reported.severity == "warning" and reported.where.value == "1"
    _put(QUERY, 0.0)(tensors)
    tensors[QUERY][0] = -0.0
    assert finding("hf-zero-tensor", hf(tmp_path / "zeros", tensors)).severity == "error"
    tensors = dense()
    _put("model.norm.weight", 0.0)(tensors)
    assert finding("hf-zero-tensor", hf(tmp_path / "norm", tensors)).severity == "warning"
    assert findings("hf-zero-tensor", hf(tmp_path / "centred", tensors, config={"model_type": "gemma3_text"})) == []
    heads = {**dense(), "score.weight": torch.zeros(2, 16).bfloat16()}
    assert findings("hf-zero-tensor", hf(tmp_path / "heads", heads)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2])
def test_infinity_is_counted_in_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """NaN and inf are told apart and counted."""
    values = torch.ones(4, 8)
    values[0, :3] = float("nan")
    values[1, :2] = -float("inf")
    folder = hf(tmp_path / "model", {"model.layers.0.x.weight": values.to(dtype)}, shards=1)
    assert "3 NaN and 2 inf" in finding("hf-not-finite", folder).message


def test_dtypes_of_quantised_models_may_differ(tmp_path: Path) -> None:
    """Some layers in FP8 and others in BF16 are meant; and the config's dtype is compared with most weights."""
    tensors = dense()
    tensors[QUERY] = tensors[QUERY].to(torch.float8_e4m3fn)
    folder = hf(tmp_path / "model", tensors, config={"quantization_config": {"quant_method": "fp8"}})
    assert findings("hf-dtype-drift", folder) == []
    other = hf(tmp_path / "other", dense(), config={"torch_dtype": "float32"})
    assert finding("hf-dtype-drift", other).where.item == "torch_dtype"


def test_heads_and_ties(tmp_path: Path) -> None:
    """A head that equals the embedding may be tied; without a head and without a tie nothing generates."""
    tensors = dense()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert findings("hf-tied-embeddings", hf(tmp_path / "a", tensors, config={"tie_word_embeddings": True})) == []
    headless = hf(tmp_path / "b", dense(tied=True), config={"tie_word_embeddings": False})
    assert "no lm_head.weight" in finding("hf-tied-embeddings", headless).message
    reward = {"tie_word_embeddings": False, "architectures": ["Qwen2ForSequenceClassification"]}
    assert findings("hf-tied-embeddings", hf(tmp_path / "c", dense(tied=True), config=reward)) == []


def test_a_tokenizer_with_more_words_than_rows(tmp_path: Path) -> None:
    """Token ids beyond the embedding are a warning: some models have such tokens and never use them."""
    reported = finding("hf-vocab", tokenizer(hf(tmp_path / "model", dense()), words=33))
    assert reported.severity == "warning" and "up to 32" in reported.message


def test_a_shift_between_stages_is_told(tmp_path: Path) -> None:
    """Layers shifted by a stage are named with their distance, in one order of the pair alone."""
    first, second = _pair(_swap_stages)(tmp_path)
    texts = [finding.message for finding in findings("layer-offset", first, second)]
    assert "layers 0-1" in texts[0] and "in layers 2-3: shifted by 2 down" in texts[0]
    assert "layers 2-3" in texts[1] and "shifted by 2 up" in texts[1]
    assert findings("layer-offset", second, first) == []
    assert findings("weights-differ", second, first) == []


def test_some_copied_matrices_are_a_warning(tmp_path: Path) -> None:
    """Two layers that share one matrix are less sure than layers that share all."""
    tensors = dense()
    tensors["model.layers.3.self_attn.o_proj.weight"] = tensors["model.layers.0.self_attn.o_proj.weight"].clone()
    reported = finding("layers-equal", hf(tmp_path / "model", tensors))
    assert reported.severity == "warning" and "layers 3 have some matrices of layers 0 (3 before)" in reported.message


def test_how_much_two_checkpoints_differ(tmp_path: Path) -> None:
    """The largest difference and the number of elements are exact; a model trained on is a note; another is nothing."""
    tensors = dense()
    first = hf(tmp_path / "a", tensors)
    _put(QUERY, 8.0)(tensors)
    tensors[QUERY].view(-1)[1:] = load_file(shard_of(first, QUERY))[QUERY].view(-1)[1:]
    gap = 8.0 - load_file(shard_of(first, QUERY))[QUERY].float().view(-1)[0].item()
    differing = finding("weights-differ", first, hf(tmp_path / "b", tensors))
    assert differing.where.value == f"by {gap:.6g} at most, 1 of 256 elements"
    trained = hf(tmp_path / "c", {name: tensor + 1 for name, tensor in tensors.items()})
    assert {reported.severity for reported in findings("weights-differ", first, trained)} == {"note"}
    tensors.pop(QUERY)
    assert "lacks 1 tensor that" in findings("weights-differ", first, hf(tmp_path / "d", tensors))[0].message
    renamed = hf(tmp_path / "e", {f"x.{name}": tensor for name, tensor in tensors.items()})
    assert findings("weights-differ", first, renamed) == []


def test_a_quantised_twin_is_compared_in_what_it_kept(tmp_path: Path) -> None:
    """Of a model and its FP8 form only tensors of one dtype are compared, and none is missed."""
    tensors = dense()
    first = hf(tmp_path / "A", tensors)
    for name in [tensor for tensor in tensors if "_proj.weight" in tensor]:
        tensors[f"{name}_scale_inv"] = torch.ones(1)
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors.pop("lm_head.weight")
    quantization = {"quantization_config": {"quant_method": "fp8"}}
    assert findings("weights-differ", first, hf(tmp_path / "A-FP8", tensors, config=quantization)) == []
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    twin = hf(tmp_path / "B-FP8", tensors, config=quantization)
    assert finding("weights-differ", first, twin).where.item == "model.norm.weight"


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_two_sizes_of_a_model_are_not_compared(key: str, tmp_path: Path) -> None:
    """A small and a big model share names, and nothing else; of one size the difference is found."""
    tensors = dense()
    first = hf(tmp_path / "big", tensors)
    _put(QUERY, 8.0)(tensors)
    size = json.loads((first / "config.json").read_text())[key]
    assert findings("weights-differ", first, hf(tmp_path / "small", tensors, config={key: size + 1})) == []
    assert len(findings("weights-differ", first, hf(tmp_path / "same", tensors, config={key: size}))) == 1


@pytest.mark.parametrize(("layers", "words"), [((3,), "layer 3 of 4 has no"), ((2, 3), "layers 2-3 of 4 have no")])
def test_missing_layers_are_counted(layers: tuple[int, ...], words: str, tmp_path: Path) -> None:
    """One layer and several are told as such."""
    tensors = {name: tensor for name, tensor in dense().items() if not any(f".layers.{n}." in name for n in layers)}
    folder = hf(tmp_path / "model", tensors, config={"num_hidden_layers": 4})
    assert words in finding("hf-layer-missing", folder).message


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"hidden_size": 17, "num_attention_heads": 4}, "hidden_size"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "num_experts_per_tok"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"eos_token_id": [3, 99], "vocab_size": 32}, "eos_token_id"),
        ({"model_type": None}, "model_type"),
    ],
)
def test_configs_that_contradict_themselves(values: dict[str, Any], key: str, tmp_path: Path) -> None:
    """Each contradiction is found in the field that has it, also inside of a multimodal config."""
    (folder,) = _config(**values)(tmp_path)
    assert finding("hf-config", folder).where.item == key
    if key != "model_type":
        inner = json.loads((folder / "config.json").read_text())
        write_config(folder, {"model_type": "vl", "text_config": inner})
        assert finding("hf-config", folder).where.item == key


@pytest.mark.parametrize("odd", [None, "four", -1, 2.5, [], {}, True, 10**400, float("nan")])
def test_odd_values_of_a_config_raise_nothing(odd: Any, tmp_path: Path) -> None:
    """Values of no sense anywhere in a config leave every rule standing."""
    keys = (
        "num_hidden_layers", "hidden_size", "vocab_size", "num_experts", "n_routed_experts", "first_k_dense_replace",
        "moe_layer_freq", "mlp_only_layers", "decoder_sparse_step", "layer_types", "mlp_layer_types", "torch_dtype",
        "tie_word_embeddings", "eos_token_id", "architectures", "quantization_config", "text_config", "model_type",
        "num_attention_heads", "num_key_value_heads", "num_experts_per_tok", "num_nextn_predict_layers",
    )  # fmt: skip
    for keep in ("", "text_config"):
        folder = hf(tmp_path / f"model{keep}", experts(3))
        values = {key: odd for key in keys if odd is not None}
        if keep and odd is not None:
            values[keep] = dict(values)
        (folder / "config.json").write_text(json.dumps(values))
        for name in HF_RULES:
            assert isinstance(findings(name, folder), list)
            assert catalogue()[name].id == name

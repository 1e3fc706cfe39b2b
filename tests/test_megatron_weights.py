from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st
from megatron_kit import launch, outputs
from torch import Tensor

from repro_core.config import ModelConfig
from repro_core.engines.megatron.weights import RULES, Held, Rule, Where, join, layout, names, placement_of, to_local
from repro_core.model.decoder import Policy
from repro_core.model.layout_free import LayoutError, same_bits
from repro_golden.base.errors import ReproError
from repro_golden.fingerprint import fingerprint, merge, shares

torch.set_num_threads(1)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
QWEN2 = ModelConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_attention_heads=4, num_key_value_heads=2)
QWEN3 = replace(QWEN2, model_type="qwen3", kv_channels=6, attention_bias=True, tie_word_embeddings=False)
MOE = replace(
    QWEN2, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, kv_channels=4
)
SPARES = (0xFF, 0x80, 0x00)  # bytes that make NaN with payloads, -0.0 and subnormal numbers likely


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits at all, so that only a copy of bits gives them back."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    raw[rng.random(len(raw)) < 0.2] = rng.choice(SPARES)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def weights(model: ModelConfig, dtype: torch.dtype, *, critic: bool = False) -> dict[str, Tensor]:
    return {name: noise(shape, dtype, k) for k, (name, shape) in enumerate(names(model, critic).items())}


def ranks(
    model: ModelConfig, tp: int = 1, pp: int = 1, ep: int = 1, *, expert_tp: int | None = None, **same: Any
) -> list[Where]:
    """Every chunk of a layout that holds something of its own, once."""
    count = model.num_hidden_layers // pp
    return [
        Where(
            tp=tp, tp_rank=t, ep=ep, ep_rank=e, expert_tp=expert_tp, expert_tp_rank=x, first_layer=s * count,
            layers=count, first=s == 0, last=s == pp - 1, **same,
        )
        for t, s, e, x in itertools.product(range(tp), range(pp), range(ep), range(expert_tp or 1))
    ]  # fmt: skip


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    kind: Any = draw(st.sampled_from(["qwen2", "qwen3", "qwen3_moe"]))
    groups = draw(st.sampled_from([1, 2, 4]))
    heads = groups * draw(st.sampled_from([n for n in (1, 2, 4) if groups * n >= 4]))
    wide = draw(st.sampled_from([2, 4]))
    extra: dict[str, Any] = {}
    if kind != "qwen2":
        extra = {"kv_channels": wide * 2, "attention_bias": draw(st.sampled_from([None, True]))}
    if kind == "qwen3_moe":
        extra |= {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": draw(st.sampled_from([4, 8]))}
    return ModelConfig(
        model_type=kind, vocab_size=draw(st.integers(1, 23)), hidden_size=heads * wide, num_hidden_layers=2,
        intermediate_size=draw(st.sampled_from([4, 12])), num_attention_heads=heads, num_key_value_heads=groups,
        tie_word_embeddings=draw(st.booleans()), **extra,
    )  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn, model: ModelConfig, critic: bool) -> list[Where]:
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    ep = draw(st.sampled_from([1, 2, 4])) if model.has_experts else 1
    vocab = tp * (-(-model.vocab_size // tp) + draw(st.integers(0, 5)))  # a rank may hold padding alone
    return ranks(
        model, tp, pp, ep, expert_tp=draw(st.sampled_from([None, 1, 2])), vocab=vocab, critic=critic,
        fused_norms=draw(st.booleans()), grouped_experts=draw(st.booleans()),
    )  # fmt: skip


def spoilt(model: ModelConfig, where: Where, local: dict[str, Tensor]) -> dict[str, Tensor]:
    """With other bits where the vocabulary is padded, which `to_local` fills with 0."""
    for name, tensor in local.items():
        (rows, *_) = layout(model, where)[name].boxes[0].size
        if name in ("embedding.word_embeddings.weight", "output_layer.weight") and not (where.critic and "out" in name):
            assert not tensor[rows:].any()
            tensor[rows:] = 7
    return local


@at_most(40)
@given(models(), st.booleans(), DTYPES, st.data())
def test_cutting_and_joining_give_the_same_bytes(
    model: ModelConfig, critic: bool, dtype: torch.dtype, data: st.DataObject
) -> None:
    """In every layout, what all ranks load joins to what it was cut from, bit for bit, whatever lies in padding."""
    whole, chunks = weights(model, dtype, critic=critic), data.draw(layouts(model, critic))
    held = [Held(where, spoilt(model, where, to_local(model, where, whole))) for where in chunks]
    back = join(model, data.draw(st.permutations(held)))
    assert back.keys() == whole.keys() and all(same_bits(back[name], whole[name]) for name in whole)


@at_most(40)
@given(models(), st.booleans(), DTYPES, st.data())
def test_placed_shares_have_the_canonical_fingerprints(
    model: ModelConfig, critic: bool, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Shares of all ranks, each tensor whole or cut as a distributed optimizer cuts it, merge to those of one rank."""
    whole, chunks = weights(model, dtype, critic=critic), data.draw(layouts(model, critic))
    cuts = data.draw(st.integers(0, 2))
    by_name: dict[str, list[Any]] = {}
    for where in chunks:
        for name, tensor in to_local(model, where, whole).items():
            ends = sorted([0, tensor.numel(), *(tensor.numel() * k // (cuts + 1) for k in range(1, cuts + 1))])
            for ab in itertools.pairwise(ends) if cuts else [None]:
                placement = json.loads(json.dumps(placement_of(model, where, name, "exp_avg/", ab)))
                part = tensor if ab is None else tensor.reshape(-1)[slice(*ab)]
                for canonical, share in shares(part, placement).items():
                    by_name.setdefault(canonical, []).append(share)
    assert {name: merge(each).fingerprint for name, each in by_name.items()} == {
        f"exp_avg/{name}": fingerprint(tensor) for name, tensor in whole.items()
    }


@at_most(40)
@given(models(), st.booleans(), st.data())
def test_flat_shards_join(model: ModelConfig, critic: bool, data: st.DataObject) -> None:
    """A distributed optimizer's shards, each rank with some slices of some tensors, join to the whole tensors."""
    whole, held = weights(model, torch.float32, critic=critic), []
    for where in data.draw(layouts(model, critic)):
        parts: list[Held] = [Held(where, {}, {}) for _ in range(3)]
        for name, tensor in to_local(model, where, whole).items():
            ends = sorted([0, tensor.numel(), *data.draw(st.tuples(*[st.integers(0, tensor.numel())] * 2))])
            for part, ab in zip(parts, itertools.pairwise(ends), strict=True):
                if ab[0] < ab[1]:
                    part.tensors[name], part.flat[name] = tensor.reshape(-1)[slice(*ab)], ab  # type: ignore[index]
        held += parts
    back = join(model, held)
    assert all(same_bits(back[name], whole[name]) for name in whole)
    where, norm = Where(critic=critic), "decoder.final_layernorm.weight"
    local = to_local(model, where, whole)
    cut = Held(where, local | {norm: local[norm][1:]}, {norm: (1, model.hidden_size)})
    with pytest.raises(LayoutError, match=rf"\A{NORM}: 1 of its {model.hidden_size} elements"):
        join(model, [cut])


@pytest.mark.parametrize("model", [QWEN2, QWEN3, replace(QWEN3, attention_bias=None), MOE], ids=str)
def test_canonical_names_are_the_policys(model: ModelConfig) -> None:
    """The canonical tensors are exactly the parameters of the policy in plain torch, with their shapes."""
    policy = Policy(model)
    assert dict(names(model)) == {name: tuple(p.shape) for name, p in policy.named_parameters()}
    assert to_local(model, Where(), policy.state_dict()).keys() == layout(model, Where()).keys()
    critic = {name: shape for name, shape in names(model).items() if name != "lm_head.weight"}
    assert dict(names(model, True)) == critic | {"score.weight": (1, model.hidden_size)}


EVERY = [
    *((QWEN2, ranks(QWEN2, 2, 2, vocab=16, fused_norms=fused)) for fused in (False, True)),
    (QWEN3, ranks(QWEN3, 2, vocab=12)),
    *((MOE, ranks(MOE, 2, 1, 2, vocab=12, grouped_experts=grouped)) for grouped in (False, True)),
    (QWEN2, ranks(QWEN2, vocab=11, critic=True)),
]


def complete(rules: tuple[Rule, ...]) -> bool:
    """Whether rules give all ranks of several layouts all they need."""
    for model, chunks in EVERY:
        whole = weights(model, torch.float32, critic=chunks[0].critic)
        held = [Held(where, to_local(model, where, whole, rules)) for where in chunks]
        if model.tie_word_embeddings and not all("output_layer.weight" in t for w, t, _ in held if not w.first):
            return False  # the last stage has a copy: see the test with Megatron's own models
        try:
            join(model, held, rules)
        except LayoutError:
            return False
    return True


def test_the_rules_are_complete() -> None:
    """With all rules nothing is missing in the layouts that show that each is needed."""
    assert complete(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.megatron}-{rule.hf[0]}")
def test_each_rule_is_needed(rule: Rule) -> None:
    """Without any one rule some tensor is missing."""
    assert not complete(tuple(r for r in RULES if r is not rule))


@pytest.mark.parametrize(("groups", "tp"), [(4, 2), (2, 2), (2, 4), (1, 4)])
def test_a_fused_qkv_is_megatrons(groups: int, tp: int) -> None:
    """Per key-value head its queries, its key, its value; ranks have equal runs of these rows."""
    model = replace(QWEN2, num_key_value_heads=groups)
    whole = weights(model, torch.float32)
    q, k, v = (whole[f"model.layers.1.self_attn.{x}_proj.weight"].view(groups, -1, 2, 8) for x in "qkv")
    expected = torch.cat([q, k, v], 1).flatten(0, 2).chunk(tp)
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    for where, rows in zip(ranks(model, tp, vocab=12), expected, strict=True):
        assert same_bits(to_local(model, where, whole)[name], rows)


WHOLE = {m: weights(m, torch.float32) for m in (QWEN2, QWEN3, MOE)}
NORM, QKV = "model.norm.weight", "decoder.layers.0.self_attention.linear_qkv.weight"
PAIR = ranks(QWEN2, 2, vocab=12)


def pair(**other: Tensor) -> list[Held]:
    """Both ranks' tensors, the second's with others in them."""
    first, second = (to_local(QWEN2, where, WHOLE[QWEN2]) for where in PAIR)
    return [Held(PAIR[0], first), Held(PAIR[1], second | other)]


BAD: dict[str, tuple[str, Any]] = {
    "heads": (QKV, lambda: layout(QWEN2, Where(tp=8, vocab=16))),
    "groups": (QKV, lambda: layout(replace(QWEN2, hidden_size=24, num_attention_heads=6, num_key_value_heads=3),
                                   Where(tp=2, vocab=16))),
    "width": ("mlp.linear_fc1", lambda: layout(replace(QWEN2, intermediate_size=9), Where(tp=2, vocab=16))),
    "experts": ("mlp.experts", lambda: layout(MOE, Where(ep=3))),
    "vocabulary": ("embedding.word_embeddings.weight", lambda: layout(QWEN2, Where(tp=2))),
    "small vocabulary": ("embedding.word_embeddings.weight", lambda: layout(QWEN2, Where(vocab=10))),
    "no such rank": ("embedding.word_embeddings.weight", lambda: layout(QWEN2, Where(tp=2, tp_rank=2, vocab=12))),
    "layers": ("decoder.layers", lambda: layout(QWEN2, Where(first_layer=1, layers=2))),
    "missing": (NORM, lambda: to_local(QWEN2, Where(), {k: v for k, v in WHOLE[QWEN2].items() if k != NORM})),
    "unexpected": ("lm_head.bias", lambda: to_local(QWEN2, Where(), WHOLE[QWEN2] | {"lm_head.bias": torch.ones(1)})),
    "shape": (NORM, lambda: to_local(QWEN2, Where(), WHOLE[QWEN2] | {NORM: torch.ones(9)})),
    "another architecture": ("model.layers.0.self_attn.q_proj.bias", lambda: to_local(
        replace(QWEN3, kv_channels=2, attention_bias=None), Where(), WHOLE[QWEN2])),
    "tied but other": ("lm_head.weight", lambda: to_local(
        QWEN2, Where(), WHOLE[QWEN2] | {"lm_head.weight": torch.ones(11, 8)})),
    "two dtypes": ("model.layers.0.self_attn.q_proj.weight, ", lambda: to_local(
        QWEN2, Where(), WHOLE[QWEN2] | {"model.layers.0.self_attn.k_proj.weight": torch.ones(4, 8).bfloat16()})),
    "a rank missing": ("model.embed_tokens.weight", lambda: join(QWEN2, pair()[:1])),
    "no rank": ("model.embed_tokens.weight", lambda: join(QWEN2, [])),
    "replicas differ": (NORM, lambda: join(QWEN2, pair(**{"decoder.final_layernorm.weight": torch.zeros(8)}))),
    "replicas of two dtypes": (NORM, lambda: join(
        QWEN2, pair(**{"decoder.final_layernorm.weight": torch.zeros(8).bfloat16()}))),
    "local shape": (QKV, lambda: join(QWEN2, pair(**{QKV: torch.zeros(8, 7)}))),
    "local unexpected": ("output_layer.bias", lambda: join(QWEN2, pair(**{"output_layer.bias": torch.zeros(8)}))),
    "local missing": (QKV, lambda: join(
        QWEN2, [Held(w, {k: v for k, v in t.items() if k != QKV}) for w, t, _ in pair()])),
    "shard of another size": (QKV, lambda: join(QWEN2, [Held(PAIR[0], {QKV: torch.zeros(4)}, {QKV: (0, 5)})])),
    "shard outside": (QKV, lambda: placement_of(QWEN2, PAIR[0], QKV, flat=(0, 65))),
    "placement of nothing": ("mlp.router.weight", lambda: placement_of(QWEN2, PAIR[0], "mlp.router.weight")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    """Sizes that do not divide, and tensors missing, unexpected or wrong: one line that begins with the tensor."""
    tensor, action = BAD[name]
    with pytest.raises(LayoutError, match=r"\A[^\n]+\Z") as refused:
        action()
    assert tensor in str(refused.value).partition(": ")[0]


def test_zeros_of_both_signs_are_no_replicas() -> None:
    """Replicas are compared by bits: 0.0 and -0.0 differ, a NaN is itself and no other NaN."""
    name = "decoder.final_layernorm.weight"
    zeros, nans = (0, -(1 << 31)), (0x7FC00000, 0x7FC00001)
    for bits in (zeros, nans):
        held = pair()
        for part, value in zip(held, bits, strict=True):
            part.tensors[name].view(torch.int32).fill_(value)
        with pytest.raises(LayoutError, match=NORM):
            join(QWEN2, held)
        held[1].tensors[name].copy_(held[0].tensors[name])
        assert same_bits(join(QWEN2, held)[NORM], held[0].tensors[name])


def test_a_wrong_placement_is_seen() -> None:
    """With key and value taken for each other the merged fingerprints are not those of the weights."""
    placement = json.loads(json.dumps(placement_of(QWEN2, Where(), QKV)))
    for part in placement["parts"]:
        part["name"] = part["name"].translate(str.maketrans({"k": "v", "v": "k"})).replace("_kroj", "_proj")
    local = to_local(QWEN2, Where(), WHOLE[QWEN2])[QKV]
    try:
        fingerprints = {name: share.fingerprint for name, share in shares(local, placement).items()}
    except ReproError:
        return
    assert sum(fingerprints.get(name) == fingerprint(t) for name, t in WHOLE[QWEN2].items()) == 1  # the queries alone


REAL = """
import json, os, sys
import torch
import torch.distributed as dist
from repro_core.config import TrainConfig
from repro_core.model.layout_free import same_bits
from repro_core.engines.megatron import cpu, layout as layouts, parallel
from repro_core.engines.megatron.weights import Held, Where, join, to_local
from repro_core.model.decoder import Policy

torch.set_num_threads(1)
rank, world = parallel.rank_and_world()
said = []
for config in json.loads(sys.argv[1]):
    config = TrainConfig.from_mapping(config | {"policy": "megatron"})
    model = config.model
    layout = layouts.check(config, world_size=world, cuda=False)
    policy = Policy(model)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for parameter in policy.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    whole = policy.state_dict()
    with cpu.without_cuda():
        at = parallel.start(layout, seed=1)
        from repro_core.engines.megatron.model import build
        (chunk,) = build(model, config, layout, trained=False)
    layers = layout.layers(model, at.pp_rank)
    where = Where(tp=layout.tp, tp_rank=at.tp_rank, ep=layout.ep, ep_rank=at.ep_rank, first_layer=layers.start,
                  layers=len(layers), first=at.is_first_stage, last=at.is_last_stage,
                  vocab=layout.padded_vocab_size(model))
    local = to_local(model, where, whole)
    missing, unexpected = chunk.load_state_dict(local, strict=False)
    assert not unexpected and all(name.endswith("_extra_state") for name in missing), (missing, unexpected)
    held = [None] * world
    dist.all_gather_object(held, Held(where, {k: v for k, v in chunk.state_dict().items() if v is not None}))
    back = join(model, held)
    assert all(same_bits(back[name], p.detach()) for name, p in policy.named_parameters())
    equal = None
    if world == 1:
        tokens = torch.randint(0, model.vocab_size, (2, 16), generator=generator)
        positions = torch.arange(16).expand(2, 16)
        mask = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)[None, None]
        with cpu.without_cuda(), torch.no_grad():
            logits = chunk(tokens, positions, mask)
            equal = torch.equal(logits, policy(tokens))
    said.append([sorted(local), equal])
    parallel.stop()
print(json.dumps(said))
"""


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
SPARSE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}


def real(folder: Path, world: int, configs: list[dict[str, Any]]) -> list[list[tuple[list[str], bool | None]]]:
    """For each rank and configuration: what its own GPTModel loaded, and on one rank whether its logits are equal."""
    ended = launch(REAL, world, [json.dumps(configs)], cwd=folder)
    return [json.loads(text.splitlines()[-1]) for text in outputs(ended)]


@pytest.mark.whole
def test_megatrons_own_models_load_it_and_compute_the_same(tmp_path: Path) -> None:
    """GPTModel's names are exactly these, and its fp32 logits have the bits of the policy in plain torch."""
    kinds: list[dict[str, Any]] = [TIED, UNTIED, {"model_type": "qwen3", "kv_channels": 16} | UNTIED, SPARSE | TIED]
    (rank,) = real(tmp_path, 1, [{"model": SIZES | kind} for kind in kinds])
    assert [equal for _, equal in rank] == [True] * len(kinds)
    assert ["output_layer.weight" in loaded for loaded, _ in rank] == [False, True, True, False]


@pytest.mark.campaign  # test_megatron_checkpoint joins what every layout holds in every run
def test_megatrons_own_models_load_it_on_two_processes(tmp_path: Path) -> None:
    """Under PP with a tied embedding, TP and EP, each rank's names are these, it loads its own, and they join again."""
    ranks = real(
        tmp_path,
        2,
        [
            {"model": SIZES | TIED, "megatron": {"pipeline_model_parallel_size": 2}},
            {"model": SIZES | SPARSE, "megatron": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
            {"model": SIZES | SPARSE, "megatron": {"expert_model_parallel_size": 2}},
        ],
    )
    stages, halves, experts = zip(*([loaded for loaded, _ in rank] for rank in ranks), strict=True)
    assert ["output_layer.weight" in loaded for loaded in stages] == [False, True]  # its copy of the embedding
    for loads, each in ((halves, 4), (experts, 2)):
        assert [sum("experts" in name and "fc2" in name for name in loaded) for loaded in loads] == [2 * each] * 2

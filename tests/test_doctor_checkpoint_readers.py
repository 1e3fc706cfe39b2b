"""Readers of checkpoints and tokenizers: what real files say, and that no bytes raise anything but ReproError."""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doctor_checkpoint_kit import (
    TEMPLATE,
    dense,
    hf,
    legacy,
    made,
    megatron_core,
    read,
    tokenizer,
    torch_dist,
    write_config,
)
from examples_kit import at_most
from findings_kit import told
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from repro.doctor.artefacts.checkpoints.hf import CONFIG, HF, INDEX, read_checkpoint
from repro.doctor.artefacts.checkpoints.megatron import MEGATRON, TRACKER, read_extents, read_megatron
from repro.doctor.artefacts.checkpoints.tokenizer import TOKENIZER, read_tokenizer
from repro.doctor.artefacts.kinds import HfCheckpoint, HfConfig, MegatronCheckpoint, Tokenizer
from repro.doctor.catalogue import catalogue
from repro_golden.base.errors import ReproError

READERS = (MEGATRON, HF, TOKENIZER, CONFIG)
ANY = settings(at_most(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


# -- what real files say


def test_a_distributed_checkpoint_says_all_of_itself(tmp_path: Path) -> None:
    """Tracker, iterations, files with sizes, the extents of .metadata and the arguments of the save."""
    facts = made(torch_dist(tmp_path / "ckpt", 3, 20, num_layers=7))
    assert isinstance(facts, MegatronCheckpoint)
    assert (facts.tracker, facts.iterations, -1 in facts.files, dict(facts.damage)) == ("20", (3, 20), False, {})
    assert facts.args is not None and facts.args["num_layers"] == 7
    folder = tmp_path / "ckpt" / "iter_0000020"
    assert facts.files[20] == {file.name: file.stat().st_size for file in folder.iterdir()}
    shards = {name: size for name, size in facts.files[20].items() if name.endswith(".distcp")}
    assert set(facts.extents) == {20} and set(facts.extents[20]) == set(shards)
    assert all(0 < facts.extents[20][name] <= size for name, size in shards.items())


@pytest.mark.whole
def test_what_megatron_core_saves_is_read_and_clean(tmp_path: Path) -> None:
    """A checkpoint of dist_checkpointing itself: its arguments, its extents, and no finding."""
    facts = made(megatron_core(tmp_path / "ckpt"))
    assert isinstance(facts, MegatronCheckpoint) and facts.args is not None
    assert (facts.args["num_layers"], facts.iterations, dict(facts.damage)) == (4, (11,), {})
    assert sum(facts.extents[11].values()) >= 4 * 512
    for name in ("checkpoint-tracker", "checkpoint-iteration", "checkpoint-truncated"):
        assert told(name, facts) == []


def test_extents_end_where_the_library_says(tmp_path: Path) -> None:
    """What is read of .metadata without unpickling equals what torch's own reader says."""
    folder = torch_dist(tmp_path / "ckpt", 3) / "iter_0000003"
    with (folder / ".metadata").open("rb") as file:
        storage = pickle.load(file).storage_data  # noqa: S301 - written by this test
    ends: dict[str, int] = {}
    for entry in storage.values():
        ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
    assert read_extents(folder / ".metadata") == ends


def test_arguments_of_a_rank(tmp_path: Path) -> None:
    """Without common.pt the first rank's own file has the arguments; odd values in them are kept as plain fields."""
    facts = made(legacy(tmp_path / "ckpt", 5, num_layers=9))
    assert isinstance(facts, MegatronCheckpoint) and facts.args is not None
    assert facts.args["num_layers"] == 9 and facts.args["device"] is None
    assert "mp_rank_01_001/model_optim_rng.pt" in facts.files[5]


def test_no_class_of_a_checkpoint_is_built(tmp_path: Path) -> None:
    """A pickle that would run a command on load is read as plain fields, and nothing runs."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    folder = torch_dist(tmp_path / "ckpt", 5)
    torch.save({"args": Evil(), "iteration": 5}, folder / "iter_0000005" / "common.pt")
    facts = made(folder)
    assert isinstance(facts, MegatronCheckpoint) and not (tmp_path / "ran").exists()


def test_a_folder_gives_weights_config_and_tokenizer(tmp_path: Path) -> None:
    """One folder is three artefacts; a shard or the index stands for it; each kind alone is read too."""
    folder = tokenizer(hf(tmp_path / "model", dense()))
    for path in (folder, folder / INDEX, folder / "model-00001-of-00002.safetensors"):
        assert [type(artefact) for artefact in read(path)] == [HfCheckpoint, HfConfig, Tokenizer]
    assert [type(artefact) for artefact in read(folder / "config.json")] == [HfConfig]
    assert [type(artefact) for artefact in read(tokenizer(tmp_path / "words"))] == [Tokenizer]
    assert [type(artefact) for artefact in read(write_config(tmp_path / "only", {"model_type": "x"}))] == [HfConfig]


def test_no_folder_is_claimed_twice(tmp_path: Path) -> None:
    """Weights, tokenizers and Megatron's folders are told apart, and other folders are nobody's."""
    (tmp_path / "other").mkdir()
    save_file({"x": torch.ones(2)}, tmp_path / "other" / "state.safetensors")
    (tmp_path / "other" / "config.json").write_text('{"port": 8265}')
    paths = {
        torch_dist(tmp_path / "ckpt", 3): [MEGATRON],
        hf(tmp_path / "model", dense()): [HF],
        tokenizer(tmp_path / "words"): [TOKENIZER],
        tmp_path / "other": [],
        tmp_path / "other" / "state.safetensors": [],
    }
    for path, expected in paths.items():
        claims = [reader for reader in READERS if reader.fits(path)]
        assert claims[:1] == expected
        assert TOKENIZER not in claims or path.name == "words"


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
     torch.int32, torch.int64, torch.uint8, torch.bool],
)  # fmt: skip
def test_elements_are_those_that_torch_reads(dtype: torch.dtype, tmp_path: Path) -> None:
    """Each dtype is widened to float32 as torch does, bit for bit; integers and bools stay as they are."""
    draw = torch.Generator().manual_seed(3)
    tensor = (torch.randn(5, 7, generator=draw) * 9).to(dtype)
    save_file({"x": tensor, "nothing": torch.zeros(0, 4, dtype=dtype)}, tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(tmp_path)
    expected = tensor.float() if dtype.is_floating_point else tensor
    assert np.array_equal(checkpoint.read("x").reshape(5, 7), expected.numpy())
    assert checkpoint.read("nothing").shape == (0,)
    assert checkpoint.scan("nothing").constant is None
    with pytest.raises(ReproError, match="no tensor"):
        checkpoint.read("y")


@ANY
@given(
    values=st.lists(st.floats(width=32), max_size=40),
    name=st.sampled_from(["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]),
)
def test_a_scan_counts_what_torch_counts(values: list[float], name: str, tmp_path: Path) -> None:
    """NaN, inf, and whether all elements are one value, in every dtype and for any values."""
    tensor = torch.tensor(values, dtype=torch.float32).to(getattr(torch, name))
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    stats = read_checkpoint(tmp_path).scan("x")
    wide = tensor.double()
    assert (stats.nan, stats.inf) == (int(wide.isnan().sum()), int(wide.isinf().sum()))
    constant = len(values) > 0 and bool(wide.isfinite().all()) and bool((wide == wide[0]).all())
    same_bits = (
        len({bytes(part) for part in tensor.view(torch.uint8).reshape(len(values), -1).numpy()}) == 1
        if values
        else False
    )
    assert (stats.constant is not None) == (constant and (same_bits or float(wide[0]) == 0.0))
    if stats.constant is not None:
        assert stats.constant == np.float32(wide[0].item())


def test_equal_tensors_have_one_digest(tmp_path: Path) -> None:
    """Digests tell dtype, shape and bytes, and not names or files."""
    x = torch.arange(12.0)
    save_file({"a": x, "b": x.clone(), "c": x.reshape(3, 4).clone(), "d": x.half()}, tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(tmp_path)
    digests = {name: checkpoint.scan(name).digest for name in "abcd"}
    assert digests["a"] == digests["b"] and len(set(digests.values())) == 3


# -- tokenizers


MESSAGES = [
    [{"role": "user", "content": "2 < 3 & 'x'"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "ü"}, {"role": "assistant", "content": "a"}],
]
TEMPLATES = [
    TEMPLATE,
    "{%- for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content | tojson }}]\n"
    "  {% endif %}\n{%- endfor %}\nend\n",
    "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
    "{{ messages | map(attribute='content') | join('-') }}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    "{{ strftime_now('%Y')[:2] }}",
]  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", MESSAGES)
def test_templates_render_as_in_transformers(template: str, messages: list[dict[str, str]], tmp_path: Path) -> None:
    """The text equals that of transformers' own apply_chat_template for the same files."""
    import transformers

    folder = tokenizer(tmp_path / "words", template=template)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    prompt = messages[-1]["role"] != "assistant"
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert read_tokenizer(folder).render(messages) == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ ''.__class__.__mro__ }}", "fails"),
        ("{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}", "fails|did not end"),
        ("{{ 'x' * 999999999999 }}", "fails"),
        ("{{ messages.append(1) }}", "fails"),
        ("{% if %}", "fails"),
    ],
)
def test_a_template_cannot_do_harm(template: str, words: str, tmp_path: Path) -> None:
    """What refuses, loops, fills memory or reaches out of the sandbox ends in one line."""
    reader = read_tokenizer(tokenizer(tmp_path / "words", template=template))
    with pytest.raises(ReproError, match=words) as raised:
        reader.render(MESSAGES[0])
    assert "\n" not in str(raised.value)


def test_where_templates_and_tokens_come_from(tmp_path: Path) -> None:
    """A file beats the field, named templates have a default, ids end generation by three files."""
    folder = tokenizer(tmp_path / "words", template=None)
    words = read_tokenizer(folder)
    assert (words.template, words.eos, words.special, words.eos_ids, words.size) == (
        None,
        "<|end|>",
        ("<|end|>", "w0"),
        (31,),
        32,
    )
    with pytest.raises(ReproError, match="no chat template"):
        words.render([])
    (folder / "chat_template.json").write_text('{"chat_template": "old"}')
    assert read_tokenizer(folder).template == "old"
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_tokenizer(folder).template == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert read_tokenizer(folder).template == "file"
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    (folder / "config.json").write_text('{"text_config": {"eos_token_id": 9}}')
    assert read_tokenizer(folder).eos_ids == (7, 8, 9)


# -- anything at all


def _safely(path: Path) -> list[object]:
    """Everything that any reader makes of a path, with every rule of one artefact tried on it."""
    artefacts: list[object] = []
    for reader in READERS:
        if reader.fits(path):
            try:
                for artefact in reader.read(path):
                    artefacts.append(artefact)  # noqa: PERF402 - what comes before a failure is kept
            except ReproError as error:
                lines = str(error).splitlines()
                if len(lines) != 1:
                    raise
    for name in ALONE:
        for artefact in artefacts:
            if isinstance(artefact, catalogue()[name].inputs[0]):
                told(name, artefact)
    return artefacts


ALONE = (
    "checkpoint-tracker", "checkpoint-iteration", "checkpoint-truncated", "hf-shard-missing", "hf-shard-extra",
    "hf-index",
    "hf-layer-missing", "hf-layer-keys", "hf-zero-tensor", "hf-not-finite", "hf-dtype-drift", "hf-truncated",
    "hf-tied-embeddings", "hf-vocab", "hf-config", "hf-config-shapes", "layers-equal", "int4-router", "int4-ignore",
    "int4-ignore-pattern",
)  # fmt: skip
FILES = (
    "model.safetensors", INDEX, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", "chat_template.json", "special_tokens_map.json", TRACKER, "iter_0000003/common.pt",
    "iter_0000003/.metadata", "iter_0000003/mp_rank_00/model_optim_rng.pt",
)  # fmt: skip


@ANY
@given(files=st.dictionaries(st.sampled_from(FILES), st.binary(max_size=60) | JSON, min_size=1, max_size=5))
def test_any_bytes_and_any_json_raise_nothing_else(
    files: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any content in any of the files gives artefacts, findings or a ReproError of one line."""
    folder = tmp_path_factory.mktemp("any")
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    for path in (folder, *(folder / name for name in files)):
        _safely(path)


@ANY
@given(
    header=JSON | st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), JSON),
    data=st.binary(max_size=40),
    cut=st.integers(0, 20),
)
def test_any_header_raises_nothing_else(header: Any, data: bytes, cut: int, tmp_path: Path) -> None:
    """A safetensors file with any header, cut anywhere, is read or refused in one line."""
    raw = json.dumps(header).encode()
    whole = struct.pack("<Q", len(raw)) + raw + data
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) - cut])
    _safely(tmp_path)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, "in bytes of"),
        ({"a": {**ENTRY, "data_offsets": [8, 24], "shape": [4]}}, "cut short"),
        ({"a": {**ENTRY, "data_offsets": [0, 4]}}, "other bytes than"),
        ({"a": {**ENTRY, "shape": [-2]}}, "shape that is none"),
        ({"a": {**ENTRY, "shape": [2**61, 2**61]}}, "other bytes than"),
        ({"a": {**ENTRY, "dtype": "F33"}}, "dtype that safetensors does not have"),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, "where 'a' lies"),
        ([1], "no object"),
    ],
)
def test_headers_that_do_not_fit_are_refused(header: Any, words: str, tmp_path: Path) -> None:
    """Overlapping tensors, bytes beyond the file, sizes that do not fit: each refused with its reason."""
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(16))
    checkpoint = read_checkpoint(tmp_path)
    assert words in checkpoint.unreadable["model.safetensors"] and not checkpoint.tensors


@ANY
@given(at=st.integers(0, 5000), byte=st.integers(0, 255), file=st.sampled_from([".metadata", "common.pt"]))
def test_a_flipped_byte_of_a_real_checkpoint(at: int, byte: int, file: str, tmp_path: Path) -> None:
    """One byte changed in a pickle of a real checkpoint leaves artefacts and findings, never another error."""
    folder = tmp_path / "ckpt"
    if not folder.exists():
        torch_dist(folder, 3)
    path = folder / "iter_0000003" / file
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[: at % len(whole)] + bytes([byte]) + whole[at % len(whole) + 1 :])
        assert isinstance(read_megatron(folder).files, dict)
        _safely(folder)
    finally:
        path.write_bytes(whole)


def test_links_that_lead_nowhere_and_unreadable_files(tmp_path: Path) -> None:
    """Loops of links, missing targets and folders in place of files are refused or passed over."""
    for name in FILES:
        folder = tmp_path / name.replace("/", "_")
        (folder / name).parent.mkdir(parents=True)
        (folder / name).symlink_to(name.rpartition("/")[2])
        with contextlib.suppress(OSError):  # a reader's `fits` may say so, and the doctor reports it
            _safely(folder)
        other = tmp_path / f"folder_{name.replace('/', '_')}"
        (other / name).mkdir(parents=True)
        _safely(other)

"""Weights that arrive and weights that do not: on a real engine of SGLang, on Megatron's ranks, and on the judge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st
from megatron_kit import launch, outputs
from once_kit import once
from sglang_kit import drive
from torch import Tensor
from weight_sync_kit import CHANGES, CONFIG, ROUTER, SQUARE, STALE, TABLE, WIDE, Fused, Wire, brought, move

from repro_core.engines.torch_engine import TorchEngines
from repro_core.model.hf import save_hf
from repro_core.rollout.engine import EngineError, HeldWeights
from repro_core.rollout.sync import WeightSync, show_start
from repro_golden.base.errors import ReproError
from repro_golden.recording.rank_group import RankGroup
from repro_golden.recording.weight_pieces import Piece, join, pieces
from repro_golden.recording.weight_sync import SyncJudge
from repro_golden.replay.watch import meet

torch.set_num_threads(1)
TESTS = Path(__file__).parent
PATHS = os.pathsep.join([str(TESTS), str(TESTS.parent / "core")])


# ---- a real engine


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the judge says of every fault on one engine of SGLang, started once for all test processes."""

    def make(folder: Path) -> None:
        (folder / "said.json").write_text(json.dumps(drive("weight_sync_driver.py", folder)))

    data: dict[str, Any] = json.loads((once(tmp_path_factory, "weight-sync", make) / "said.json").read_text())
    return data


@pytest.mark.whole
def test_weights_that_arrive_are_equal_on_both_sides(results: dict[str, Any]) -> None:
    """What SGLang loads itself, takes by tensor and takes by disk has the fingerprints of what it should be."""
    assert [results[name] for name in ("start", "tensor", "disk")] == ["", "", ""]
    assert len({results[f"{name} digest"] for name in ("start", "tensor", "disk")}) == 3, "each moved the weights"


@pytest.mark.whole
def test_a_report_says_what_was_sent_and_what_changed(results: dict[str, Any]) -> None:
    """The version, the way, the number of tensors, bytes and changes, the digest, and as many tensors as asked for."""
    first, second, third, rest = results["tensor report"]
    assert first.startswith("weights 'sync by tensor' (tensor): 45 tensors, 726272 bytes in ")
    assert first.endswith(f" s, 45 changed since 'default', all arrived, digest {results['tensor digest']}")
    assert second.startswith("  lm_head.weight float32 [259, 64] absmax ") and third.startswith(
        "  model.embed_tokens.weight"
    )
    assert rest == "  and 43 more"


@pytest.mark.whole
def test_a_checkpoint_that_was_brought_is_removed(results: dict[str, Any]) -> None:
    """A sync by disk leaves nothing behind in its folder."""
    assert not [name for name in results["scratch"] if "-weights-" in name]


@pytest.mark.whole
@pytest.mark.parametrize("fault", CHANGES)
def test_a_fault_on_the_way_to_sglang_is_caught_and_named(results: dict[str, Any], fault: str) -> None:
    """Tensor, kind and version stand in one line."""
    _check(results[fault], CHANGES[fault].says, "weights '2' did not arrive ")


def _check(line: str, says: tuple[str, ...], start: str) -> None:
    assert line.startswith(start), line
    assert all(part in line for part in says), line
    assert "\n" not in line


ENGINES = {
    "outside a session": ("weights '2' did not arrive at all (tensor): ", STALE),
    "older checkpoint": (
        "weights '2' did not arrive whole (tensor): ",
        "stale: the engine holds that of version 'default'",
    ),
    "buffer": (f"weights '2' did not arrive whole (tensor): {TABLE} of engine process 0: ", "since it was first seen"),
    "released buffer": (f"weights '2' did not arrive whole (tensor): {TABLE} of", "(version '1'), and is all zero"),
}


@pytest.mark.whole
@pytest.mark.parametrize("fault", ENGINES)
def test_a_fault_inside_of_sglang_is_caught_and_named(results: dict[str, Any], fault: str) -> None:
    """An update that it refuses without raising, one from an older checkpoint, a buffer that was not loaded again."""
    start, part = ENGINES[fault]
    _check(results[fault], (part,), start)


@pytest.mark.whole
def test_a_tensor_that_is_wrong_on_both_sides_is_caught_by_the_checkpoint(results: dict[str, Any]) -> None:
    """No sync can see it, since both sides agree; what lies on disk can."""
    assert results["wrong on both sides"]["sync"] == ""
    start = "weights 'wrong' that the engine read itself are not those of its checkpoint: "
    _check(results["wrong on both sides"]["start"], (f"{WIDE}: other values: absmax ", "in the checkpoint"), start)


@pytest.mark.whole
def test_an_update_that_sglang_refuses_is_an_error_where_its_answer_is_read(results: dict[str, Any]) -> None:
    """The engine's own message comes through, without a judge."""
    assert "must run between begin_weight_update() and end_weight_update()" in results["refused"]


# ---- several processes on both sides


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks of Megatron hears."""

    def make(folder: Path) -> None:
        ended = launch(TESTS / "weight_sync_ranks.py", 2, [str(folder)], cwd=folder, environment={"PYTHONPATH": PATHS})
        lines = [json.loads(out.splitlines()[-1]) for out in outputs(ended)]
        (folder / "ranks.json").write_text(json.dumps(lines))

    data: list[dict[str, Any]] = json.loads((once(tmp_path_factory, "weight-ranks", make) / "ranks.json").read_text())
    return data


@pytest.mark.whole
@pytest.mark.parametrize("layout", ["tp2", "ep2", "pp2, tied"])
def test_shards_of_megatron_agree_with_shards_of_the_engine(ranks: list[dict[str, Any]], layout: str) -> None:
    """By tensor and by disk, from two ranks to two processes that cut and fuse otherwise."""
    first, second = (rank[layout] for rank in ranks)
    assert first == second
    assert (first["tensor"], first["disk"]) == ("", "")


@pytest.mark.whole
def test_the_digest_of_the_weights_is_that_of_one_process(ranks: list[dict[str, Any]]) -> None:
    """Equal weights have one digest, however trainer and engine are laid out."""
    judge = SyncJudge(None, print)
    assert not brought(TorchEngines(CONFIG, "."), Fused(CONFIG.model, 1), judge, "1")
    assert ranks[0]["tp2"]["digest"] == ranks[0]["ep2"]["digest"] == judge.digest


@pytest.mark.whole
@pytest.mark.parametrize("fault", ["all cast to bf16", "broadcast though not contiguous", "never sent"])
def test_every_rank_hears_of_a_fault_with_its_name(ranks: list[dict[str, Any]], fault: str) -> None:
    """Kinds that need the senders' own shards or the engine's joined ones are told on every rank, in the same words."""
    assert ranks[0][fault] == ranks[1][fault]
    _check(ranks[0][fault], CHANGES[fault].says, "weights '2' did not arrive whole (tensor): ")


@pytest.mark.whole
def test_no_rank_is_left_alone_when_the_lead_fails(ranks: list[dict[str, Any]]) -> None:
    """The engine refuses in the middle, or something breaks that nobody expected: every rank has an error."""
    assert ranks[0]["fails"] == ["EngineError: full", "RuntimeError: bug"]
    told = "EngineError: the process that talks to the rollout engine failed: its log says why"
    assert ranks[1]["fails"] == ["EngineError: full", told]


@pytest.mark.whole
def test_ranks_that_hold_different_copies_are_found_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    """Replicas that have parted are no weights: the trainer does not send them, and the judge names both holders."""
    name = "model.norm.weight: two ranks hold the same elements of it, and they differ"
    assert ranks[0]["replicas"][0] == f"LayoutError: {name}" and ranks[1]["replicas"][0] == f"EngineError: {name}"
    judged = "rank 0 of the trainer and rank 1 of the trainer hold different copies of it"
    assert ranks[0]["replicas"][1] == ranks[1]["replicas"][1]
    assert f"model.norm.weight: {judged}" in ranks[0]["replicas"][1]


@pytest.mark.whole
def test_ranks_meet_in_spite_of_what_an_earlier_run_left(tmp_path: Path) -> None:
    """Hellos, answers and folders under the same names do not bring ranks of two runs together."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom repro_golden.replay.watch import meet\n"
        "team = meet(Path(sys.argv[1]))\nprint(team.agreed('word', lambda: str(team.raw)))\n"
        "import os\nos._exit(0) if len(sys.argv) > 2 else None\n"
    )
    environment = {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500", "MASTER_ADDR": "localhost"}
    reports = []
    for more in ([str(tmp_path), "crash"], [str(tmp_path)]):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", program, *more],
                env={**os.environ, **environment, "RANK": str(rank), "WORLD_SIZE": "2"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in (1, 0)
        ]
        said_ = {process.communicate(timeout=60)[0] for process in processes}
        assert len(said_) == 1
        reports += said_
    assert len(set(reports)) == 2


def test_ranks_of_several_machines_are_told_to_name_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary folder is not shared: an error, no endless wait."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ReproError, match="--folder"):
        meet(Path("/tmp"))  # noqa: S108 - refused


# ---- the judge


@pytest.fixture(scope="module")
def engines() -> TorchEngines:
    return TorchEngines(CONFIG, ".")


@pytest.mark.parametrize("fault", CHANGES)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_fault_is_named_for_any_number_of_processes(engines: TorchEngines, fault: str, processes: int) -> None:
    """What is fused and cut in the engine is told by its canonical names."""
    engine, judge = Fused(CONFIG.model, processes), SyncJudge(None, print)
    assert not brought(engines, engine, judge, "1")
    move(engines, 1)
    line = brought(engines, Wire(engine, CHANGES[fault].make), judge, "2")
    _check(line, CHANGES[fault].says, "weights '2' did not arrive ")


def test_an_older_version_is_named(engines: TorchEngines) -> None:
    """What was right two syncs ago is told as that version's."""
    engine, judge = Fused(CONFIG.model, 2), SyncJudge(None, print)
    assert not brought(engines, engine, judge, "1")
    first = [(name, tensor.clone()) for name, tensor in engines.whole_weights()]
    move(engines, 4)
    assert not brought(engines, engine, judge, "2")
    move(engines, 5)
    line = brought(engines, Wire(engine, lambda _: first), judge, "3")
    assert "and 42 more: stale: the engine holds that of version '1'" in line


@pytest.mark.parametrize(("factor", "more"), [(0.5, ""), (0.0, ", and is all zero")])
def test_a_buffer_that_changed_is_named_with_its_process(engines: TorchEngines, factor: float, more: str) -> None:
    """No sync brings a buffer back, so it must be what it was when it was first seen."""
    engine, judge = Fused(CONFIG.model, 2), SyncJudge(None, print)
    assert not brought(engines, engine, judge, "1")
    engine.processes[1][TABLE] *= factor
    line = brought(engines, engine, judge, "2")
    said_ = f"{TABLE} of engine process 1: a buffer that has changed since it was first seen (version '1'){more}"
    assert line == f"weights '2' did not arrive whole (tensor): {said_}"


def test_nothing_is_read_without_an_observer(engines: TorchEngines) -> None:
    """Reading an engine costs, so a sync alone does not do it."""

    class Unreadable(Fused):
        def held(self) -> list[HeldWeights]:
            raise AssertionError("read")

    assert not brought(engines, Unreadable(CONFIG.model, 1), None, "1")
    show_start(None, Unreadable(CONFIG.model, 1), None, CONFIG)


def test_an_engine_that_keeps_its_old_version_is_an_error(engines: TorchEngines) -> None:
    """It took the weights and says that it has others: nothing that it samples could be trusted."""

    class Forgetful(Fused):
        def update(self, tensors: Any, version: str) -> None:
            super().update(tensors, version)
            self.weight_version = "default"

    with pytest.raises(EngineError, match="the engine took weights '5' and says that it has 'default'"):
        brought(engines, Forgetful(CONFIG.model, 1), None, "5")


def test_a_tied_head_of_experts_is_sent_for_the_engine_that_has_its_own(tmp_path: Path) -> None:
    """SGLang gives experts a matrix for the head even where it is tied: without it, it would sample from junk."""
    model = replace(CONFIG.model, tie_word_embeddings=True)
    config = replace(CONFIG, model=model)
    engines, engine, judge = TorchEngines(config, "."), Fused(model, 2), SyncJudge(None, print)
    for how in ("tensor", "disk"):
        move(engines, 6)
        WeightSync(replace(config, sglang=replace(config.sglang, sync=how)), engines, engine, judge).bring(how)
    engine.processes[0]["lm_head.weight"][0, 0] = 5.0
    save_hf(engines.generator(), tmp_path)
    with pytest.raises(ReproError, match=r"lm_head\.weight of engine process 0 hold different copies of it"):
        show_start(judge, engine, str(tmp_path), config)


def test_a_start_in_a_narrower_dtype_is_compared_in_that_dtype(tmp_path: Path) -> None:
    """The checkpoint is cast as the engine was asked to, and by nothing else."""
    config = replace(CONFIG, dtype="bf16")
    engines, engine = TorchEngines(CONFIG, "."), Fused(CONFIG.model, 1)
    save_hf(engines.generator(), tmp_path, max_shard_bytes=100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    engine.update_from_disk(str(tmp_path), "default")
    show_start(SyncJudge(None, print), engine, str(tmp_path), CONFIG)
    with pytest.raises(ReproError, match="another dtype: bfloat16 in the checkpoint, float32 in the engine"):
        show_start(SyncJudge(None, print), engine, str(tmp_path), config)
    engine.processes[0] = {name: tensor.bfloat16() for name, tensor in engine.processes[0].items()}
    show_start(SyncJudge(None, print), engine, str(tmp_path), config)


def _judged(given_: Mapping[str, Tensor], held: Mapping[str, Tensor], *, start: bool = False) -> str:
    """What is said of whole tensors on both sides."""
    judge = SyncJudge(None, print)
    judge.begin("7", "start" if start else "tensor")
    judge.sent(given_, None)
    judge.received(HeldWeights(held, {name: _whole(name, tensor) for name, tensor in held.items()}))
    try:
        judge.end(0.0)
    except ReproError as error:
        return str(error)
    return ""


def _whole(name: str, tensor: Tensor) -> dict[str, Any]:
    shape = tuple(tensor.shape)
    return {"shape": shape, "parts": [{"name": name, "shape": shape, "at": [0] * len(shape)}]}


A, B = torch.arange(6.0).view(2, 3), torch.arange(6.0, 12.0).view(2, 3)
PAIRS: dict[str, tuple[dict[str, Tensor], dict[str, Tensor], bool, str]] = {
    "never sent": ({"a": A}, {"a": A, "b": B}, False, "b: never sent: the engine has it, the trainer did not send it"),
    "never arrived": (
        {"a": A, "b": B},
        {"a": A},
        False,
        "b: never arrived: sent, and the engine has no such tensor",
    ),
    "not in the checkpoint": ({"a": A}, {"a": A, "b": B}, True, "b: not in the checkpoint, though the engine has it"),
    "dtype": ({"a": A}, {"a": A.bfloat16()}, False, "a: another dtype: float32 sent, bfloat16 in the engine"),
    "shape": ({"a": A}, {"a": A.view(3, 2)}, False, "a: another shape: [2, 3] sent, [3, 2] in the engine"),
    "zero is no other name": ({"a": A, "b": A * 0}, {"a": A * 0, "b": A * 0}, False, "a: all zero in the engine"),
    "negative zero": ({"a": A * 0}, {"a": A * -0.0}, False, "a: all zero in the engine"),
    "NaN": ({"a": A}, {"a": A / 0}, False, "a: 6 NaN or infinite elements in the engine, 0 sent"),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_the_kind_of_a_difference_is_named(pair: tuple[dict[str, Tensor], dict[str, Tensor], bool, str]) -> None:
    """One kind each, with both sides' facts."""
    given_, held, start, says = pair
    assert _judged(given_, held, start=start).endswith(f": {says}")


def test_equal_bits_pass_and_nothing_else() -> None:
    """NaN equals itself, as bits do; one bit in one element does not pass."""
    strange = torch.tensor([float("nan"), -0.0, float("inf"), 1.0])
    assert _judged({"a": strange}, {"a": strange.clone()}) == ""
    turned = strange.clone()
    turned.view(torch.int32)[3] ^= 1
    assert "a: other values" in _judged({"a": strange}, {"a": turned})


@at_most(40)
@given(st.data())
def test_one_flipped_bit_anywhere_is_found_in_its_tensor(data: st.DataObject) -> None:
    """Whatever element of whatever parameter changes in any process, its canonical tensor is named, and no other."""
    ranks = data.draw(st.sampled_from([1, 2]))
    engine, weights = Fused(CONFIG.model, ranks), dict(ENGINES_START.generator().named_parameters())
    engine.update([(name, tensor.detach()) for name, tensor in weights.items()], "1")
    process = data.draw(st.integers(0, ranks - 1))
    held = engine.held()[process]
    key = data.draw(st.sampled_from(sorted(held.placements)))
    part = data.draw(st.sampled_from(held.placements[key]["parts"]))
    inside = [data.draw(st.integers(0, n - 1)) for n in part["size"]]
    at = part["start"] + sum(k * step for k, step in zip(inside, part["step"], strict=True))
    held.tensors[key].view(-1).view(torch.int32)[at] ^= 1 << data.draw(st.integers(0, 22))
    judge = SyncJudge(None, print)
    with pytest.raises(ReproError) as error:
        _show(judge, weights, engine)
    assert f" (tensor): {part['name']}: " in str(error.value)
    assert ";" not in str(error.value)


ENGINES_START = TorchEngines(CONFIG, ".")


def _show(judge: SyncJudge, weights: Mapping[str, Tensor], engine: Fused) -> None:
    judge.begin("1", "tensor")
    judge.sent({name: tensor.detach() for name, tensor in weights.items()}, None)
    for held in engine.held():
        judge.received(held)
    judge.end(0.0)


def test_a_process_of_the_engine_that_was_not_read_is_missed(engines: TorchEngines) -> None:
    """Shares that do not add up to a tensor are no tensor."""

    class Half(Fused):
        def held(self) -> list[HeldWeights]:
            return super().held()[:1]

    line = brought(engines, Half(CONFIG.model, 2), SyncJudge(None, print), "1")
    assert "(tensor): lm_head.weight, " in line and "more: only a part of it is held: a process is missing" in line


def test_a_placement_that_does_not_fit_is_told_at_the_end() -> None:
    """A process must not raise alone: what is wrong with its tensors is told where all hear it."""
    judge = SyncJudge(None, print)
    judge.begin("1", "tensor")
    judge.sent({"a": A}, {"a": {"shape": (9, 9), "parts": []}})
    with pytest.raises(ReproError, match="weights '1' cannot be compared"):
        judge.end(0.0)


def test_lines_name_a_few_tensors_and_count_the_rest(engines: TorchEngines) -> None:
    """A line stays short however many tensors are wrong."""
    line = brought(engines, Wire(Fused(CONFIG.model, 1), lambda _: []), SyncJudge(None, print), "1")
    assert "and 42 more" in line and len(line) < 600


def test_what_did_not_change_is_not_reported(engines: TorchEngines) -> None:
    """A second sync of the same weights changes nothing, and says so, with as many lines as asked for."""
    lines: list[str] = []
    engine, judge = Fused(CONFIG.model, 1), SyncJudge(None, lines.append, limit=1)
    assert not brought(engines, engine, judge, "1") and not brought(engines, engine, judge, "2")
    with torch.no_grad():
        dict(engines.generator().named_parameters())[ROUTER].add_(1)
    assert not brought(engines, engine, judge, "3")
    heads = [line for line in lines if line.startswith("weights")]
    assert ", 0 changed since '1', all arrived" in heads[1] and ", 1 changed since '2', all arrived" in heads[2]
    assert lines[-1].startswith(f"  {ROUTER} float32 [4, 64] absmax ")
    assert judge.last is not None and judge.last.changed == (ROUTER,)


def test_a_stale_tensor_that_is_zero_is_stale() -> None:
    """Biases that start at 0 and were not updated are told as stale, not as a zeroed tensor."""
    judge = SyncJudge(None, print)
    zero = {"a": torch.zeros(3)}
    judge.begin("1", "tensor")
    judge.sent(zero, None)
    judge.received(HeldWeights(zero, {"a": _whole("a", zero["a"])}))
    judge.end(0.0)
    judge.begin("2", "tensor")
    judge.sent({"a": torch.ones(3)}, None)
    judge.received(HeldWeights(zero, {"a": _whole("a", zero["a"])}))
    with pytest.raises(ReproError, match=r"a: stale: .*, version '1', which is all zero"):
        judge.end(0.0)


def test_pieces_survive_their_file() -> None:
    """What a rank writes is what rank 0 reads, infinite magnitudes and cut words included."""
    odd = torch.tensor([1.0, float("inf"), 2.0])
    placed = {"x": {"shape": (3,), "parts": [{"name": "a", "shape": (9,), "at": [2]}]}}
    made = [*pieces({"x": odd}, placed, "{} of rank 0"), *pieces({"y": odd}, None, "rank 1")]
    assert [Piece.from_json(json.loads(json.dumps(piece.to_json()))) for piece in made] == made
    assert join(made[1:])[0]["y"].nonfinite == 1


def test_a_process_that_starts_an_engine_by_itself_waits_for_nobody(tmp_path: Path) -> None:
    """Of several ranks one may only sample: its judge must not wait for the others."""
    engine = Fused(CONFIG.model, 1)
    save_hf(ENGINES_START.generator(), tmp_path / "start")
    engine.update_from_disk(str(tmp_path / "start"), "default")
    judge = SyncJudge(RankGroup(tmp_path, 0, 2), print)
    show_start(judge, engine, str(tmp_path / "start"), CONFIG)
    assert judge.digest


def test_judges_of_one_team_do_not_read_each_others_words(tmp_path: Path) -> None:
    """Two judges, and two syncs of each, in one folder: each agrees about its own, and leaves no pieces behind."""
    rank_group = RankGroup(tmp_path, 0, 1)
    for _ in range(2):
        judge = SyncJudge(rank_group, print)
        for version in ("1", "2"):
            assert not brought(ENGINES_START, Fused(CONFIG.model, 1), judge, version)
    assert not list(tmp_path.glob("*.of-*"))


def test_the_torch_engines_weights_are_the_live_ones(engines: TorchEngines) -> None:
    """`weights` and `whole_weights` give canonical names and the tensors that are trained, without a copy."""
    weights, placements = engines.policy.weights()
    live = dict(engines.generator().named_parameters())
    assert placements is None and list(weights) == list(live)
    for name, tensor in engines.whole_weights():
        assert tensor.data_ptr() == weights[name].data_ptr() == live[name].data_ptr()
    assert SQUARE in weights and engines.tell("x") == "x"

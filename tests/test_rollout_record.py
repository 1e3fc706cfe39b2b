"""Recording rollouts on their own, and for a golden run: which engine samples, where they go, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Repo
from history_kit import note
from hypothesis import given
from hypothesis import strategies as st

import repro_core
from repro_golden.base.errors import ReproError
from repro_golden.case.file import find_case
from repro_golden.case.tables import joined
from repro_golden.runs.capture import put, settings_of
from repro_golden.store.rollout_file import RolloutData, read_rollout, write_rollout
from repro_golden.store.rollouts import RolloutSet

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.dictionaries(st.text(min_size=1, max_size=3), inner, max_size=3),
    max_leaves=8,
)
_TABLES = st.dictionaries(st.text(min_size=1, max_size=3), _JSON, max_size=4)


def test_a_fork_records_trains_and_shows(fork: Repo) -> None:
    """Recorded rollouts lie where the case says, known to DVC, and `golden record` trains on exactly them."""
    done = fork.repro("rollout", "record", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    kept = RolloutSet(fork.root / "golden/rollouts/mini")
    assert (len(kept), kept.digest) == (3, result["digest"]) and result["engine"] is None
    assert (fork.root / "golden/rollouts/mini.dvc").exists()
    fork.commit("Record rollouts")
    done = fork.repro("golden", "record")
    assert done.returncode == 0, done.stderr
    assert "capturing" not in done.stderr
    shown = fork.repro("golden", "show", "mini", "--json")
    assert json.loads(shown.stdout)["rollouts"] == kept.digest
    table = fork.repro("rollout", "show", "mini")
    assert table.returncode == 0 and "engine: the trained policy itself" in table.stdout
    each = json.loads(fork.repro("rollout", "show", str(kept.directory), "--json").stdout)["each"]
    assert [row["samples"] for row in each] == [8, 8, 8]


def test_rollouts_are_not_replaced_by_accident(fork: Repo, tmp_path: Path) -> None:
    """What is there already is refused, naming the ways out; --out leaves it, --replace takes its place."""
    assert fork.repro("rollout", "record").returncode == 0
    before = RolloutSet(fork.root / "golden/rollouts/mini").digest
    again = fork.repro("rollout", "record")
    assert again.returncode == 2 and len(again.stderr.splitlines()) == 1
    assert "--replace" in again.stderr and "--out" in again.stderr
    other = tmp_path / "other"
    done = fork.repro("rollout", "record", "--set", "seed=7", "--out", str(other))
    assert done.returncode == 0, done.stderr
    assert RolloutSet(other).digest != before == RolloutSet(fork.root / "golden/rollouts/mini").digest
    done = fork.repro("rollout", "record", "--set", "seed=7", "--replace")
    assert done.returncode == 0, done.stderr
    assert RolloutSet(fork.root / "golden/rollouts/mini").digest == RolloutSet(other).digest


def test_replacing_leaves_folders_that_are_no_rollouts(fork: Repo, tmp_path: Path) -> None:
    """--replace takes recorded rollouts and empty folders alone: anything else is named, and nothing of it is gone."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "thesis.txt").write_text("years")
    (tmp_path / "file").write_text("more")
    for target in (work, tmp_path / "file"):
        done = fork.repro("rollout", "record", "--replace", "--out", str(target))
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "is no recorded rollout" in done.stderr
    assert (work / "thesis.txt").read_text() == "years" and (tmp_path / "file").read_text() == "more"
    (work / "thesis.txt").unlink()
    for seed in ("7", "8"):  # an empty folder, then rollouts
        done = fork.repro("rollout", "record", "--set", f"seed={seed}", "--replace", "--out", str(work))
        assert done.returncode == 0, done.stderr
    assert len(RolloutSet(work)) == 3
    for name in ("notes.md", "policy.pt", "model.safetensors", "7.pt"):
        (work / name).write_text("mine")
        done = fork.repro("rollout", "record", "--replace", "--out", str(work))
        assert done.returncode == 2 and f"{name} is no recorded rollout" in done.stderr
        assert (work / name).read_text() == "mine"
        (work / name).unlink()
    (work / "0.pt").mkdir()
    done = fork.repro("rollout", "record", "--replace", "--out", str(work))
    assert done.returncode == 2 and "0.pt is no recorded rollout" in done.stderr and (work / "0.pt").is_dir()
    (work / "0.pt").rmdir()
    (work / "index.json").write_text("{}")  # damaged: it is recorded again
    done = fork.repro("rollout", "record", "--replace", "--out", str(work))
    assert done.returncode == 0 and len(RolloutSet(work)) == 3
    for name, text in (("index.json", "{}"), ("0.safetensors", "mine")):  # as in a folder of Hugging Face's
        (tmp_path / name).write_text(text)
    done = fork.repro("rollout", "record", "--replace", "--out", str(tmp_path))
    assert done.returncode == 2 and "0.safetensors is no recorded rollout" in done.stderr
    assert (tmp_path / "0.safetensors").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".repro")) == []


def test_a_move_that_fails_loses_nothing(tmp_path: Path) -> None:
    """What was there stays until the new folder lies beside it, and no rest is left."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    (old / "0.safetensors").write_text("old")
    with pytest.raises(ReproError, match="cannot write"):
        put(new, old)
    assert [path.read_text() for path in old.iterdir()] == ["old"]
    new.mkdir()
    (new / "1.safetensors").write_text("new")
    with pytest.raises(ReproError, match="cannot write"):
        put(new, old / "0.safetensors" / "below")
    assert (new / "1.safetensors").exists()
    put(new, old)
    assert [path.name for path in old.iterdir()] == ["1.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


SGLANG = """\
[case]
name = "mini"
steps = 3
proof_steps = 1
rollouts = "golden/rollouts/mini"

[subject]
module = "repro_core"
path = "core"
timeout = "4m"

[subject.config]
rollout_batch_size = 2
n_samples_per_prompt = 2
global_batch_size = 4
max_response_len = 4

[subject.config.model]
model_type = "qwen3"
kv_channels = 32
initializer_range = 0.1
tie_word_embeddings = false

[subject.config.sglang]
max_total_tokens = 4096
"""


@pytest.mark.whole
def test_a_golden_run_of_what_sglang_samples_in_the_trainers_process(fork: Repo) -> None:
    """`golden record --engine sglang` starts the engine beside the trainer, and what it sampled tells what it rests on.

    Every stand-in is named, and the weights that sampled, which are others after each step.
    """
    pytest.importorskip("sglang", reason="SGLang is not installed: see docs/how-to/rollouts.md")
    (fork.root / "golden/cases/mini.toml").write_text(SGLANG)
    done = fork.repro("golden", "record", "mini", "--engine", "sglang")
    assert done.returncode == 0, done.stderr
    assert "by sglang" in done.stderr
    kept = RolloutSet(fork.root / "golden/rollouts/mini")
    assert (fork.root / "golden/rollouts/mini.dvc").exists()
    metas = [kept.read(number).meta for number in range(3)]
    assert len({meta["weights"] for meta in metas}) == 3
    shown = fork.repro("rollout", "show", "mini")
    assert shown.returncode == 0 and f"weights of the first rollout: {metas[0]['weights']}" in shown.stdout
    assert "engine: sglang " in shown.stdout
    names = metas[0]["engine"]["stand_ins"]
    assert all(f"rests on a stand-in: {name}" in shown.stdout for name in names)
    assert names or metas[0]["engine"]["device"] != "cpu"
    for command in ("show", "verify"):
        result = fork.repro("golden", command, "mini")
        assert result.returncode == 0 and "rollouts are by sglang " in result.stdout, result.stdout
        assert all(name in result.stdout for name in names)


def test_rollouts_alone_start_no_trainer(fork: Repo, tmp_path: Path) -> None:
    """With --debug-rollout-only all rollouts are those of the starting weights, and no optimizer step is made."""
    trained, alone = tmp_path / "trained", tmp_path / "alone"
    assert fork.repro("rollout", "record", "--out", str(trained)).returncode == 0
    done = fork.repro("rollout", "record", "--debug-rollout-only", "--out", str(alone))
    assert done.returncode == 0, done.stderr
    rollouts, two = RolloutSet(trained), RolloutSet(alone)
    assert rollouts.digests[0] == two.digests[0] and rollouts.digests[1] != two.digests[1]
    config = find_case(fork.root, "mini").subject.config  # type: ignore[union-attr]
    wanted = repro_core.rollouts_only({"config": config})
    for number in range(3):
        rollout = wanted.sample(number)
        assert RolloutData(rollout.meta, rollout.tensors).digest == two.digests[number]


def test_a_golden_run_takes_no_engine_for_rollouts_that_are_there(recorded: Repo) -> None:
    """--engine beside recorded rollouts is refused in one line, whatever it names; nothing is recorded."""
    done = recorded.repro("golden", "record", "mini", "--engine", "policy")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "seed"), "is not KEY=VALUE"),
        (("--set", ".=3"), "is not KEY=VALUE"),
        (("--engine", "policy", "--sglang-url", "http://127.0.0.1:1"), "leave one of them out"),
        (("--set", "sead=3"), "unknown key sead"),
        (("--sglang-url", "http://127.0.0.1:9"), "127.0.0.1:9"),
    ],
)
def test_what_cannot_be_is_one_line(fork: Repo, arguments: tuple[str, ...], message: str) -> None:
    """Wrong words, unknown keys and an address where nobody listens end in exit 2 and one line that names them."""
    done = fork.repro("rollout", "record", *arguments)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("capturing")]
    assert done.returncode == 2 and len(lines) == 1 and message in lines[0], done.stderr
    assert not (fork.root / "golden/rollouts/mini").exists()


def test_commands_record_their_own_rollouts(fork: Repo) -> None:
    """A case of kind command has no rollouts of ours to capture: refused, saying what to do."""
    (fork.root / "golden/cases/foreign.toml").write_text(
        '[case]\nname = "foreign"\nsteps = 1\n\n[subject]\nkind = "command"\ncommand = "python train.py"\n'
    )
    done = fork.repro("rollout", "record", "foreign")
    assert done.returncode == 2 and "case.rollouts" in done.stderr and len(done.stderr.splitlines()) == 1


@given(a=_TABLES, b=_TABLES, c=_TABLES)
def test_merging_settings_is_an_overlay(a: dict[str, Any], b: dict[str, Any], c: dict[str, Any]) -> None:
    """Nothing joined changes nothing, joining twice is joining once, the later wins, and it is associative."""
    assert joined(a, {}) == a and joined({}, a) == a
    assert joined(joined(a, b), b) == joined(a, b)
    assert all(joined(a, b)[key] == value for key, value in b.items() if not isinstance(value, dict))
    assert set(joined(a, b)) == {*a, *b}
    if not any(_clash(x, y) for x, y in ((a, b), (b, c), (a, c))):
        assert joined(joined(a, b), c) == joined(a, joined(b, c))


def _clash(a: Any, b: Any) -> bool:
    """Whether a key is a table on one side and a value on the other, somewhere: then the order decides."""
    if isinstance(a, dict) != isinstance(b, dict):
        return True
    return isinstance(a, dict) and any(_clash(a[key], b[key]) for key in a.keys() & b.keys())


def test_settings_of_a_command_line() -> None:
    """Dotted keys make tables, values are JSON or else text, and a URL chooses SGLang."""
    words = ["sglang.tp_size=2", "sglang.args.context_length=64", "loss_aggregation=token", "use_tis=true"]
    assert settings_of("sglang", "http://localhost:1", words) == {
        "rollout_engine": "sglang",
        "sglang": {"url": "http://localhost:1", "tp_size": 2, "args": {"context_length": 64}},
        "loss_aggregation": "token",
        "use_tis": True,
    }
    assert settings_of(None, "http://x", [])["rollout_engine"] == "sglang"
    assert settings_of(None, None, []) == {}
    with pytest.raises(ReproError, match="KEY=VALUE"):
        settings_of(None, None, ["=1"])


@pytest.mark.whole
def test_rollouts_that_were_numbered_otherwise_are_searched(fork: Repo) -> None:
    """A replay goes by the folder's numbers, also from a saved state, whatever the rollouts were recorded under."""
    assert fork.repro("rollout", "record").returncode == 0
    folder = fork.root / "golden" / "rollouts" / "mini"
    for number in range(3):
        rollout = read_rollout(folder / f"{number}.safetensors")
        write_rollout(
            folder / f"{number}.safetensors", RolloutData({**rollout.meta, "rollout_id": number + 5}, rollout.tensors)
        )
    RolloutSet.write_index(folder)
    fork.git("rm", "--quiet", "--cached", "--ignore-unmatch", "golden/rollouts/mini.dvc")
    (fork.root / "golden" / "rollouts" / "mini.dvc").unlink()
    done = fork.repro("golden", "record")
    assert done.returncode == 0, done.stderr
    good = fork.commit("Record")
    note(fork, "one", "core/notes.py")
    step = "        optimizer.step()\n"
    late = "        if self.updates >= 2:\n            gradients['model.norm.weight'].mul_(1.0001)\n"
    fork.edit("core/repro_core/engines/torch_engine.py", step, f"{late}{step}")
    culprit = fork.commit("Warm up")
    note(fork, "two", "core/notes.py")
    done = fork.repro("bisect", "--no-explain", f"{good}..HEAD", "-j", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["culprit"]["commit"] == culprit

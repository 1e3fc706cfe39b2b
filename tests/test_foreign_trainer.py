"""The small trainer of foreign_kit: its files are those of torch, and its regressions show where they should."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import environment
from foreign_kit import Fork, entry_of, launch_script, make_fork, run_program, usual_flags, write_program
from foreign_regressions import ENGINE, REGRESSIONS, Regression
from foreign_trainer_parallel import gathered

from repro_golden.base.systems import SYSTEMS
from repro_golden.dumps.archive.reading import read_archive
from repro_golden.dumps.values import Tensor, same

PHASES = ("input", "forward", "loss", "grad", "update")
INPUT = (
    "tokens", "total_lengths", "response_lengths", "loss_masks", "rollout_log_probs", "rewards", "raw_reward",
    "truncated", "sample_indices", "sample_index",
)  # fmt: skip
FORWARD = ("log_probs", "ref_log_probs", "values", "returns", "advantages", "kl")
_LINE = re.compile(r"(?P<label>critic-step|step|rollout|perf) (?P<number>\d+): (?P<values>\{.*\})")

Key = tuple[int, str, str]


def signals(out: Path, printed: str, per_rollout: int) -> dict[Key, list[Any]]:
    """What a run left, by step, phase and name, read by nothing but the archive's reader."""
    signals_: dict[Key, list[Any]] = {}
    for path in sorted((out / "train_data").iterdir()):
        payload = read_archive(path)
        step = payload["rollout_id"] * per_rollout
        columns = payload.get("rollout_data")
        if columns is None:
            names = [name for name in payload["samples"][0] if name in INPUT + FORWARD]
            columns = {name: [sample[name] for sample in payload["samples"]] for name in names}
        for name, values in columns.items():
            phase = "input" if name in INPUT else "forward"
            if name in INPUT + FORWARD:
                signals_.setdefault((step, phase, name), []).append(values)
    for line in _LINE.finditer(printed):
        label, number = line["label"], int(line["number"])
        step = number * per_rollout if label == "rollout" else number
        for name, value in ast.literal_eval(line["values"].replace("nan", "None")).items():
            short = name.removeprefix("train/")
            phase = "grad" if short.endswith("grad_norm") else "update" if label == "perf" else "loss"
            if label != "perf":
                signals_[step, phase, short] = [value]
    return signals_


def differing(a: Mapping[Key, Any], b: Mapping[Key, Any]) -> list[Key]:
    """Keys whose values are not the same bits, in the order of a step."""
    wrong = [key for key in {*a, *b} if key not in a or key not in b or not same(a[key], b[key])]
    return sorted(wrong, key=lambda key: (key[0], PHASES.index(key[1]), key[2]))


class Pair:
    """The trainer without and with a regression, run on the same rollouts."""

    def __init__(self, folder: Path, regression: Regression) -> None:
        fork = make_fork(folder, regression, commits=0)
        self.flags = usual_flags(regression.flags, regression.gpus)
        self.flags += ["--load-debug-rollout-data", f"{fork.rollouts}/{{rollout_id}}.pt"]
        self.regression, self.root = regression, fork.repo.root
        self.good = self.run("good")
        fork.repo.edit(f"{regression.system}/{regression.file}", regression.old, regression.new)
        self.bad = self.run("bad")

    def run(self, name: str) -> dict[Key, list[Any]]:
        """What one of the two leaves."""
        out = self.root.parent / name
        printed = run_program(self.root, self.regression.system, [*self.flags, "--dump-details", str(out)])
        return signals(out, printed, self.regression.steps_per_rollout)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Each regression's pair; two at once."""
    folder = tmp_path_factory.mktemp("pairs")
    seen = {
        (regression.system, regression.file, regression.new, regression.flags): regression
        for regression in REGRESSIONS.values()
    }
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda regression: Pair(folder / regression.name, regression), seen.values())
        return dict(zip((regression.name for regression in seen.values()), made, strict=True))


@pytest.mark.whole
def test_each_regression_shows_first_where_the_table_says(pairs: dict[str, Pair]) -> None:
    """Bitwise, nothing differs before the step and phase of the table, and there just the signals that it names."""
    for name, pair in pairs.items():
        regression = pair.regression
        wrong = differing(pair.good, pair.bad)
        first = [key for key in wrong if key[:2] == wrong[0][:2]]
        expected = sorted(
            (regression.step, regression.phase, signal) for signal in (regression.signal, *regression.others)
        )
        assert first == expected, f"{name}: {wrong[:8]}"


@pytest.mark.whole
def test_metrics_hide_a_nan(pairs: dict[str, Pair]) -> None:
    """A NaN in the old log-probs moves no printed number of step 0 and the gradients' norm at step 1."""
    pair = pairs["nan-in-old-log-probs"]
    changed = differing(pair.good, pair.bad)
    assert [key for key in changed if key[0] == 0] == [(0, "forward", "log_probs")]
    assert (1, "grad", "grad_norm") in changed
    dump = read_archive(pair.root.parent / "bad" / "policy_loss_debug" / "rank_0_call_0.pt")
    assert [name for name, finite in dump["finite"].items() if not finite] == ["old_log_probs"]
    assert np.isnan(dump["samples"][0]["old_log_probs"].array[0])


@pytest.mark.whole
def test_metrics_alone_can_differ(pairs: dict[str, Pair]) -> None:
    """Two of the regressions never move a weight: one metric is all that shows."""
    for name, metric in (
        ("masked-tokens-in-kl", "kl_loss"),
        ("diff-with-new-log-probs", "train_rollout_logprob_abs_diff"),
    ):
        assert {key[1:] for key in differing(pairs[name].good, pairs[name].bad)} == {("loss", metric)}


@pytest.mark.parametrize("system", SYSTEMS)
def test_files_are_those_of_torch(system: Any, tmp_path: Path) -> None:
    """What torch reads of a run's files is what the archive's reader reads; a second run writes the same bytes."""
    import torch

    fork = make_fork(tmp_path, system=system, commits=0)
    flags = [*usual_flags((), 1), "--load-debug-rollout-data", f"{fork.rollouts}/{{rollout_id}}.pt", "--ci-test"]
    seen = []
    for name in ("one", "two"):
        out = tmp_path / name
        norms = f"{out}/grad_norm-{{role}}-{{rollout_id}}-{{step_id}}.pt"
        printed = run_program(
            fork.repo.root, system, [*flags, "--dump-details", str(out), "--ci-save-grad-norm", norms]
        )
        seen.append((signals(out, printed, 1), {p.relative_to(out): p.read_bytes() for p in out.rglob("*.pt")}))
    assert not differing(seen[0][0], seen[1][0])
    assert seen[0][1] == seen[1][1]
    assert len(seen[0][1]) == (12 if system == "miles" else 9)
    for path in seen[0][1]:
        loaded = torch.load(tmp_path / "one" / path, weights_only=False)
        assert same(plain(loaded), read_archive(tmp_path / "one" / path)), path


def plain(value: Any) -> Any:
    """What torch loads, as the archive's reader gives it."""
    import torch

    if isinstance(value, torch.Tensor):
        return Tensor.of(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def test_miles_keeps_events_and_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each update leaves each rank's checksums, the metrics and the history of those that its CI looks at."""
    monkeypatch.setenv("MILES_CI_GATE_RECORD_DIR", str(tmp_path / "history"))
    fork = make_fork(tmp_path, system="miles", commits=0)
    (recorded,) = (tmp_path / "history").iterdir()
    recorded.unlink()
    flags = ["--load-debug-rollout-data", f"{fork.rollouts}/{{rollout_id}}.pt", "--dump-details", f"{tmp_path}/out"]
    layout = ("--tensor-model-parallel-size", "2")
    printed = run_program(fork.repo.root, "miles", [*usual_flags(layout, 2), *flags, "--save-local-weight-checksum"])
    events = [
        [json.loads(line) for line in (tmp_path / f"out/events/actor_cell0_rank{rank}.jsonl").read_text().splitlines()]
        for rank in range(2)
    ]
    assert [event["type"] for event in events[0]] == ["train_engine_local_weight_checksum", "metric"] * 3
    assert [event["type"] for event in events[1]] == ["train_engine_local_weight_checksum"] * 3
    states = [event["state"] for rank in events for event in rank if "state" in event]
    assert len({state["param_hashes"]["pp0.embedding.weight"] for state in states}) == 6
    norms = [[step, event["metrics"]["train/grad_norm"]] for step, event in enumerate(events[0][1::2])]
    values = signals(tmp_path / "out", printed, 1)
    assert norms == [[step, values[step, "grad", "grad_norm"][0]] for step in range(3)]
    (history,) = (tmp_path / "history").iterdir()
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    assert {"metric": "train/grad_norm", "series": norms} in lines


def test_context_parallel_parts_are_the_whole(tmp_path: Path) -> None:
    """Ranks that share a sequence write their own parts of it; put together they are what one rank computes."""
    fork = make_fork(tmp_path, system="miles", commits=0)
    replay = ["--load-debug-rollout-data", f"{fork.rollouts}/{{rollout_id}}.pt"]
    for size in (1, 2):
        flags = [*usual_flags(("--context-parallel-size", str(size)), size), *replay]
        run_program(fork.repo.root, "miles", [*flags, "--dump-details", f"{tmp_path}/{size}"])
    whole = read_archive(tmp_path / "1/train_data/0_0.pt")["rollout_data"]
    parts = [read_archive(tmp_path / f"2/train_data/0_{rank}.pt") for rank in range(2)]
    assert [(part["cp_rank"], part["cp_size"]) for part in parts] == [(0, 2), (1, 2)]
    for name in ("rollout_log_probs", "log_probs", "ref_log_probs"):
        columns = zip(*(part["rollout_data"][name] for part in parts), strict=True)
        for at, shards in enumerate(columns):
            lengths = whole["total_lengths"][at], whole["response_lengths"][at]
            joined = gathered([shard.array for shard in shards], *lengths)
            assert joined.tobytes() == whole[name][at].array.tobytes()
            assert len(shards[0].array) + len(shards[1].array) == len(joined)


def test_refactors_change_nothing(tmp_path: Path) -> None:
    """Commits around the culprit move no bit of what a run leaves, whatever they do to the code."""
    fork = make_fork(tmp_path, commits=9)
    replay = ["--load-debug-rollout-data", f"{fork.rollouts}/{{rollout_id}}.pt", "--dump-details"]
    names = []
    for commit in (fork.good, fork.bad):
        fork.repo.git("checkout", "--quiet", commit)
        printed = run_program(fork.repo.root, "slime", [*usual_flags((), 1), *replay, f"{tmp_path}/{commit}"])
        names.append(signals(tmp_path / commit, printed, 1))
    assert len(fork.commits) == 9
    assert len(fork.repo.git("diff", "--stat", fork.good, fork.bad).splitlines()) == 10
    assert names[0]
    assert not differing(*names)


def test_a_fork_holds_one_culprit(tmp_path: Path) -> None:
    """The culprit alone holds its edit; in the window around it, replay fails at its start and sampling does not."""
    fork = make_fork(tmp_path, "inside-broken-replay")
    edit = fork.repo.git("show", "--format=%s", fork.culprit)
    regression = REGRESSIONS["inside-broken-replay"]
    assert f"+    {regression.new}" in edit and regression.title in edit
    assert fork.culprit in fork.broken
    assert fork.broken == fork.commits[2:5] and fork.suspects == fork.commits[2:6]
    fork.repo.git("checkout", "--quiet", fork.culprit)
    assert ENGINE[0] not in (fork.repo.root / "miles/samples.py").read_text()
    flags = usual_flags(regression.flags, 1)
    run_program(fork.repo.root, "miles", flags)
    with pytest.raises(AssertionError, match="the inference engines were not started"):
        run_program(
            fork.repo.root, "miles", [*flags, "--load-debug-rollout-data", f"{fork.rollouts}/{{rollout_id}}.pt"]
        )


@pytest.mark.parametrize("system", SYSTEMS)
def test_unknown_flags(system: Any, tmp_path: Path) -> None:
    """A flag that they do not know leaves slime and Relax silent; they sample anew. Miles refuses it."""
    write_program(tmp_path, system)
    flags = [*usual_flags((), 1), "--load-debug-rolout-data", "x", "--save-debug-rollout-data", "made/{rollout_id}.pt"]
    if system == "miles":
        with pytest.raises(AssertionError, match="unrecognized arguments: --load-debug-rolout-data"):
            run_program(tmp_path, system, flags)
        return
    run_program(tmp_path, system, flags)
    first = read_archive(tmp_path / "made/0.pt")
    run_program(tmp_path, system, flags)
    assert not same(first, read_archive(tmp_path / "made/0.pt")), "engines that were not asked to repeat do not"


def test_rollouts_have_what_hides_regressions(tmp_path: Path) -> None:
    """Some tokens are masked, one group's rewards are all equal, lengths differ, and some responses are cut off."""
    fork = make_fork(tmp_path, commits=0)
    samples = read_archive(fork.rollouts / "0.pt")["samples"]
    assert {mask for sample in samples for mask in sample["loss_mask"]} == {0, 1}
    assert {sample["reward"] for sample in samples[:4]} == {0.0}
    assert {sample["reward"] for sample in samples[4:]} == {0.0, 1.0}
    assert {sample["status"] for sample in samples} == {"completed", "truncated"}
    assert len({len(sample["tokens"]) for sample in samples}) > 3


@pytest.mark.parametrize("kill", [False, True])
def test_a_launch_script_runs(kill: bool, tmp_path: Path) -> None:
    """The script trains as it stands; one that would kill every Python notes that and kills nothing."""
    fork: Fork = make_fork(tmp_path, "temperature-ignored-relax", commits=1, kill=kill)
    text = (fork.repo.root / "scripts/run.sh").read_text()
    assert text == launch_script("relax", fork.regression.flags if fork.regression else (), 4, kill=kill)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "scripts/run.sh"], cwd=fork.repo.root, capture_output=True, text=True, check=False,
        env=environment() | {"PATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\bstep \d+: ", done.stdout)) == 3
    assert entry_of("relax") in done.stderr
    killed = fork.repo.root / "killed"
    assert killed.exists() == kill
    if kill:
        assert killed.read_text().splitlines()[-1] == "pkill -9 python"

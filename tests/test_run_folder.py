from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from run_folder_kit import Run, checksum_event, contents, event, f32, sha

from repro.cli import cli
from repro_golden.base.errors import NotVerifiableError, ReproError
from repro_golden.compare.traces import compare
from repro_golden.dumps.archive.pickling import write_archive
from repro_golden.dumps.run.folder import RunFolder
from repro_golden.dumps.run.imported import trace_of_folder


def names(rows: Any) -> set[str]:
    return {row.name for row in rows}


def finished(run: Run, folder: Path, *, log: bool = True, **how: Any) -> RunFolder:
    """A folder whose run has ended."""
    path = folder / "run.log" if log else None
    run.write(folder, log=path)
    opened = RunFolder("slime" if run.system == "old" else run.system, folder, path, **how)  # type: ignore[arg-type]
    opened.ended()
    return opened


@pytest.mark.parametrize("system", ["slime", "miles", "relax", "old"])
def test_a_finished_run_gives_the_rows_of_every_update(tmp_path: Path, system: str) -> None:
    """Columns and the rollout's means in its first update, metrics in each under the trace's names."""
    run = Run(system, updates=2)
    folder = finished(run, tmp_path, steps_per_rollout=2)
    assert folder.rollouts == [0, 1]
    first, second = folder.rows(2), folder.rows(3)
    assert first is not None and second is not None
    assert {"tokens", "log_probs", "raw_reward", "rollout/raw_reward", "grad_norm", "sample_index"} <= names(first)
    assert names(second) == {"loss", "ppo_kl", "grad_norm"}
    assert {row.name: row.phase for row in second} == {"loss": "loss", "ppo_kl": "loss", "grad_norm": "grad"}
    assert folder.metrics(3) == {"loss": 0.125, "ppo_kl": 0.0, "grad_norm": 3.25}
    assert folder.problems() == []


def test_rows_are_the_same_whether_read_while_the_run_writes_or_after_it(tmp_path: Path) -> None:
    """Polled after each part of each file, a run gives nothing too early, and in the end what reading it does."""
    run = Run("miles", rollouts=3, cp=2)
    whole = finished(run, tmp_path / "whole", ranks=2)
    live, log = tmp_path / "live", tmp_path / "live.log"
    polled = RunFolder("miles", live, log, 2)
    seen: dict[int, Any] = {}

    def poll() -> None:
        while (rows := polled.rows(len(seen))) is not None:
            seen[len(seen)] = contents(rows)

    poll()
    text = (tmp_path / "whole" / "run.log").read_text().splitlines(keepends=True)
    for rollout in range(3):
        lines = [line for line in text if f"step {rollout}:" in line or f"rollout {rollout}:" in line]
        for line in lines:
            for part in (line[:30], line[30:]):
                with log.open("a") as file:
                    file.write(part)
                poll()
        write_archive(live / "rollout_data" / f"{rollout}.pt", run.rollout_dump(rollout))
        for rank in range(2):
            source = tmp_path / "whole" / "train_data" / f"{rollout}_{rank}.pt"
            target = live / "train_data" / source.name
            target.parent.mkdir(parents=True, exist_ok=True)
            raw = source.read_bytes()
            for size in (0, 100, len(raw) // 2, len(raw) - 1):
                target.write_bytes(raw[:size])
                poll()
                assert len(seen) <= rollout
            target.write_bytes(raw)
            poll()
        assert len(seen) == (0 if rollout == 0 else rollout + 1)
    polled.ended()
    assert {step: contents(whole.rows(step)) for step in range(3)} == seen


def test_without_a_number_of_ranks_the_next_rollout_says_that_one_is_whole(tmp_path: Path) -> None:
    """A rank writes a rollout's file before it trains on the next."""
    run = Run("relax", dp=2, rollouts=3)
    folder = RunFolder("relax", tmp_path)
    run.write(tmp_path, rollouts=range(1))
    assert folder.rows(0) is None
    run.write(tmp_path, rollouts=range(1, 2))
    assert folder.rows(0) is not None
    assert folder.rows(1) is None
    folder.ended()
    assert folder.rows(1) is not None


@pytest.mark.parametrize("rollout", [0, 2])
def test_a_rank_that_writes_other_rollouts_is_missed(tmp_path: Path, rollout: int) -> None:
    """How many ranks there are all rollouts tell: one that lacks the last rank's dump is not whole."""
    Run("relax", dp=2, rollouts=3).write(tmp_path)
    (tmp_path / "train_data" / f"{rollout}_1.pt").unlink()
    folder = RunFolder("relax", tmp_path)
    folder.ended()
    with pytest.raises(ReproError, match=rf"rollout {rollout} lacks the train dump of rank 1 \(of 2 ranks\)"):
        folder.rows(rollout)


def test_a_log_that_lags_behind_the_dumps_is_waited_for(tmp_path: Path) -> None:
    """Ray forwards lines late, a submitted job's later still: no step's rows are made before its lines are there."""
    run, log = Run("slime", rollouts=3), tmp_path / "run.log"
    run.write(tmp_path, rollouts=range(3))
    log.touch()
    folder = RunFolder("slime", tmp_path, log)
    for rollout in range(3):
        for line in (run.rollout_line(rollout), run.step_line(rollout)):
            assert folder.rows(rollout) is None
            with log.open("a") as file:
                file.write(line)
        assert rollout == 0 or {"grad_norm", "rollout/raw_reward"} <= names(folder.rows(rollout))
    assert {"grad_norm", "rollout/raw_reward"} <= names(folder.rows(0))


def test_a_log_without_a_line_of_the_training_is_waited_for_to_the_end(tmp_path: Path) -> None:
    """That it says nothing of a step is known when the run has ended."""
    run, log = Run("slime", rollouts=3), tmp_path / "run.log"
    run.write(tmp_path, rollouts=range(3))
    log.write_text("loading\n")
    folder = RunFolder("slime", tmp_path, log)
    assert folder.rows(0) is None
    folder.ended()
    assert folder.rows(0) is not None


@pytest.mark.parametrize("text", ["", "hello\n", "perf 0: {'perf/step_time': 1.0}\n"])
def test_a_log_that_says_nothing_of_the_training_makes_no_trace(tmp_path: Path, text: str) -> None:
    """Who names it means it to be looked at: two traces without a loss would agree. Without a log there is one."""
    log = tmp_path / "run.log"
    Run("slime").write(tmp_path / "run")
    log.write_text(text)
    with pytest.raises(ReproError, match=r"run.log has no line of a step or rollout: is it the trainer's output\?"):
        trace_of_folder(tmp_path / "run", tmp_path / "out", log=log)
    assert not (tmp_path / "out").exists()
    assert len(trace_of_folder(tmp_path / "run", tmp_path / "out")[0].steps) == 2


def test_lines_after_the_last_dump_are_a_warning_of_a_run_that_broke_off(tmp_path: Path) -> None:
    """It had printed an update of a rollout that it never finished."""
    run, log = Run("slime"), tmp_path / "run.log"
    run.write(tmp_path, log=log)
    with log.open("a") as file:
        file.write(run.step_line(2))
    folder = RunFolder("slime", tmp_path, log)
    folder.ended()
    assert folder.rows(1) is not None
    assert folder.problems() == [f"{log} has lines of 1 step after the last rollout that has train dumps"]
    assert not trace_of_folder(tmp_path, tmp_path / "out", log=log)[0].complete


def test_what_has_not_changed_is_not_read_again(tmp_path: Path) -> None:
    """A file that could not be read is looked at again only when it has changed: its size or its time."""
    run = Run("slime", rollouts=1)
    folder = RunFolder("slime", tmp_path)
    run.write(tmp_path)
    path = tmp_path / "train_data" / "0.pt"
    raw = path.read_bytes()
    path.write_bytes(raw[:-10])
    (tmp_path / "train_data" / "1.pt").write_bytes(b"")  # so that the first rollout is over
    with pytest.raises(ReproError, match=r"0\.pt") as first:
        folder.rows(0)
    time = path.stat().st_mtime_ns
    path.write_bytes(b"\0" * len(raw[:-10]))
    os.utime(path, ns=(time, time))
    with pytest.raises(ReproError) as second:
        folder.rows(0)
    assert str(second.value) == str(first.value)
    path.write_bytes(raw)
    assert folder.rows(0) is not None


@pytest.mark.parametrize("updates", [2, 3])
def test_another_number_of_updates_than_said_is_refused_with_the_right_one(tmp_path: Path, updates: int) -> None:
    """By slime's dumps, by gradient norms' files, and by the log alone."""
    with pytest.raises(ReproError, match=f"set it to {updates}"):
        finished(Run("slime", updates=updates), tmp_path / "a").rows(0)
    run = Run("miles", updates=updates)
    with pytest.raises(ReproError, match=f"set it to {updates}"):
        finished(run, tmp_path / "b").rows(0)
    folder = finished(run, tmp_path / "c", log=False)
    for rollout in range(2):
        for update in range(updates):
            write_archive(tmp_path / "c" / f"grad_norm-actor-{rollout}-{update}.pt", 0.5)
    with pytest.raises(ReproError, match=f"set it to {updates}"):
        folder.rows(0)
    opened = RunFolder("miles", tmp_path / "c", steps_per_rollout=None)
    opened.ended()
    assert opened.steps_per_rollout == updates


def test_a_step_with_two_lines_is_fine_and_with_two_numbers_refused(tmp_path: Path) -> None:
    """The driver may repeat what a worker printed; two runs in one log are no run."""
    run = Run("slime")
    log = tmp_path / "run.log"
    run.write(tmp_path, log=log)
    with log.open("a") as file:
        file.write(run.step_line(1))
    folder = RunFolder("slime", tmp_path, log)
    folder.ended()
    assert folder.rows(1) is not None
    with log.open("a") as file:
        file.write("step 1: {'train/grad_norm': 9.0}\n")
    again = RunFolder("slime", tmp_path, log)
    with pytest.raises(ReproError, match="two lines of step 1 that differ"):
        again.rows(1)


def test_what_is_missing_after_the_end_is_named(tmp_path: Path) -> None:
    """A rollout without its dump, a step without its line, a rank without its file, a log that is not there."""
    run = Run("miles", dp=2)
    folder = finished(run, tmp_path, ranks=2)
    with pytest.raises(ReproError, match="no train dump of rollout 2 "):
        folder.rows(2)
    (tmp_path / "train_data" / "1_1.pt").unlink()
    folder = RunFolder("miles", tmp_path, tmp_path / "run.log", 2)
    folder.ended()
    with pytest.raises(ReproError, match="lacks the train dump of rank 1"):
        folder.rows(1)
    log = tmp_path / "run.log"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if "step 0" not in line))
    folder = RunFolder("miles", tmp_path, log, 2)
    folder.ended()
    with pytest.raises(ReproError, match="no line of step 0"):
        folder.rows(0)
    folder = RunFolder("miles", tmp_path, tmp_path / "none.log", 2)
    folder.ended()
    with pytest.raises(ReproError, match="no log at"):
        folder.rows(0)


def test_time_evaluation_and_ignored_metrics_are_left_out(tmp_path: Path) -> None:
    """So that two equal runs have equal rows."""
    log = tmp_path / "run.log"
    Run("slime").write(tmp_path, log=log)
    with log.open("a") as file:
        file.write("perf 0: {'perf/actor_train_time': 1.5}\neval 0: {'eval/gsm8k': 0.5}\n")
        file.write("step 0: {'train/mfu': 0.4, 'train/mine': 1.0, 'train/tis': 1.0}\n")
        file.write("critic-step 0: {'train/critic-grad_norm': 0.75, 'train/critic-lr-pg_0': 0.1}\n")
    folder = RunFolder("slime", tmp_path, log, ignore=["mine", "train/ti*"])
    folder.ended()
    rows = folder.rows(0)
    assert rows is not None
    assert {"critic-grad_norm": "grad", "critic-lr-pg_0": "update"}.items() <= {r.name: r.phase for r in rows}.items()
    assert not {"mine", "mfu", "tis", "perf/actor_train_time", "eval/gsm8k", "step"} & names(rows)


def side_files(folder: Path, run: Run, *, grad_norm: float = 0.25) -> None:
    """What Miles leaves beside the train dumps."""
    (folder / "events").mkdir(parents=True, exist_ok=True)
    lines = [event("inference_engine_weight_checksum", None, engine_checksums=[{"w": sha("e")}] * 2)]
    for step in range(run.rollouts):
        lines += [checksum_event(step), event("metric", step, attempt=0, metrics=run.metrics(step))]
        write_archive(folder / f"grad_norm-actor-{step}-0.pt", grad_norm + step)
        path = folder / "ckpt" / f"iter_{step:07d}" / "model_hash_tp0_pp0_dp0_cp0.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"layer_0000": sha(f"h{step}")}))
    (folder / "events" / "actor_cell0_rank0.jsonl").write_text("".join(lines))
    history = folder / "gate" / f"7-{'a' * 32}.jsonl"
    history.parent.mkdir()
    history.write_text(json.dumps({"metric": "train/grad_norm", "series": [[0, 0.25], [1, 1.25]]}) + "\n")


def test_checksums_hashes_and_gradient_norms_are_rows(tmp_path: Path) -> None:
    """Digests under the parameters' names in the update, those of engines among the inputs; all sources agree."""
    run = Run("miles")
    run.write(tmp_path)
    side_files(tmp_path, run)
    folder = RunFolder("miles", tmp_path, ranks=1)
    folder.ended()
    rows = folder.rows(0)
    assert rows is not None
    digests = {(row.phase, row.name): row.values for row in rows if row.dtype == "sha256"}
    assert digests["update", "pp0.w"] == bytes.fromhex(sha("w0"))
    assert digests["update", "model_hash/layer_0000"] == bytes.fromhex(sha("h0"))
    assert ("input", "engine/w") in digests
    assert {"grad_norm", "loss", "ppo_kl"} <= names(rows)
    assert folder.problems() == []
    later = folder.rows(1)
    assert later is not None and ("input", "engine/w") not in {(r.phase, r.name) for r in later}


def test_sources_that_disagree_are_a_warning(tmp_path: Path) -> None:
    """The log and the events count, in this order; the file says another gradient norm."""
    run = Run("miles")
    run.write(tmp_path)
    side_files(tmp_path, run, grad_norm=0.5)
    folder = RunFolder("miles", tmp_path, ranks=1)
    folder.ended()
    assert folder.rows(0) is not None
    assert folder.metrics(0)["grad_norm"] == 0.25
    assert folder.problems() == ["step 0: grad_norm is 0.25 in the events and 0.5 in the grad_norm files"]


@pytest.mark.parametrize("source", ["the events", "the CI history", "the grad_norm files"])
@pytest.mark.parametrize("step", [0, 1])
def test_the_log_of_another_run_is_refused(tmp_path: Path, source: str, step: int) -> None:
    """It says another gradient norm than what the run itself left; in its last step, too, that is no broken run."""
    run, log = Run("miles"), tmp_path / "run.log"
    run.write(tmp_path, log=log)
    side_files(tmp_path, run)
    kept = {"the events": "events/*", "the CI history": "gate/*", "the grad_norm files": "grad_norm*"}
    for glob in kept.values():
        for path in tmp_path.glob(glob) if glob != kept[source] else ():
            path.unlink()
    assert trace_of_folder(tmp_path, tmp_path / "good", log=log)[1] == []
    log.write_text(log.read_text().replace(f"'train/grad_norm': {0.25 + step}", f"'train/grad_norm': {0.75 + step}"))
    with pytest.raises(ReproError, match=rf"step {step}: grad_norm is .* in {log} and .* in {source} .*of this run"):
        trace_of_folder(tmp_path, tmp_path / "out", log=log)


def test_numbers_in_names_of_files_are_never_counted_up_to(tmp_path: Path) -> None:
    """A rollout far beyond the others is a gap, an update far beyond is none."""
    run = Run("miles", rollouts=1)
    run.write(tmp_path)
    stray = tmp_path / f"grad_norm-0-{10**17}.pt"
    write_archive(stray, 0.5)
    with pytest.raises(ReproError, match=f"{stray.name} would be of update {10**17}"):
        trace_of_folder(tmp_path, tmp_path / "out")
    stray.unlink()
    ((_, value),) = run.files(0)
    write_archive(tmp_path / "train_data" / f"{10**17}_0.pt", value | {"rollout_id": 10**17})
    with pytest.raises(ReproError, match=f"lacks rollout 1 between 0 and {10**17}"):
        trace_of_folder(tmp_path, tmp_path / "out")
    many = RunFolder("miles", tmp_path, ranks=10**9)
    with pytest.raises(ReproError, match=r"lacks the train dump of rank 1, 2, 3, .* \(of 1000000000 ranks"):
        many.rows(0)


def test_hashes_are_waited_for_since_they_come_after_the_dumps(tmp_path: Path) -> None:
    """Live, a rollout's last update is there when the next rollout begins: its rows are those of the finished run."""
    run = Run("miles", rollouts=3)
    run.write(tmp_path, rollouts=range(2))
    side_files(tmp_path, Run("miles", rollouts=2))
    folder = RunFolder("miles", tmp_path, ranks=1)
    rows_read = folder.rows(0)
    assert rows_read is not None and "model_hash/layer_0000" in names(rows_read)
    assert folder.rows(1) is None
    run.write(tmp_path, rollouts=range(2, 3))
    assert folder.rows(1) is not None


def test_checksums_of_ranks_that_differ_stand_for_themselves(tmp_path: Path) -> None:
    """Replicas that agree are one row; a rank with other bits is NAME@RANK."""
    run = Run("miles", dp=2)
    run.write(tmp_path)
    (tmp_path / "events").mkdir()
    lines = [checksum_event(step, rank, weight=f"w{rank}") for step in (0, 1) for rank in (0, 1)]
    (tmp_path / "events" / "e.jsonl").write_text("".join(lines) + '{"type": "metr')
    folder = RunFolder("miles", tmp_path, ranks=2)
    folder.ended()
    rows = folder.rows(0)
    assert rows is not None
    assert {"pp0.w@0", "pp0.w@1", "buffer/pp0.b"} <= names(rows)
    assert folder.problems() == [f"{tmp_path / 'events' / 'e.jsonl'} ends in the middle of a line"]


def test_policy_losses_are_of_the_update_that_they_were_made_in(tmp_path: Path) -> None:
    """Calls are counted off against a rank's samples; each update has the values of its own, joined by sample."""
    run = Run("miles", updates=2, rollouts=1)
    run.write(tmp_path)
    whole = run.columns(0)
    for call, indices in enumerate(([4, 0, 2], [5, 1, 3])):
        samples = [
            {
                "index": k, "total_length": whole["total_lengths"][i], "response_length": whole["response_lengths"][i],
                "train_log_probs": whole["log_probs"][i], "advantages": whole["advantages"][i],
                "rollout_log_probs": whole["rollout_log_probs"][i],
            }
            for k, i in enumerate(indices)
        ]  # fmt: skip
        value = {"rank": 0, "call": call, "samples": samples, "ppo_kl": f32([]), "pg_loss": f32([])}
        write_archive(tmp_path / "policy_loss_debug" / f"rank_0_call_{call}.pt", value)
    # the next rollout's is being written
    (tmp_path / "policy_loss_debug" / "rank_0_call_2.pt").write_bytes(b"PK")
    folder = RunFolder("miles", tmp_path, ranks=1, steps_per_rollout=2)
    folder.ended()
    for update, indices in enumerate(([0, 2, 4], [1, 3, 5])):
        rows = folder.rows(update)
        assert rows is not None
        row = next(row for row in rows if row.name == "policy_loss/train_log_probs")
        mask = np.concatenate([whole["loss_masks"][i].array for i in indices])
        expected = np.where(mask != 0, np.concatenate([whole["log_probs"][i].array for i in indices]), np.float32(0))
        assert row.values == expected.astype("<f4").tobytes()
    assert folder.problems() == []


def test_a_change_at_a_masked_token_is_no_difference_and_a_nan_there_is_one(tmp_path: Path) -> None:
    """What lies at masked places is never summed, but 0 times NaN is."""
    masks = Run().columns(0)["loss_masks"]
    index = next(i for i, mask in enumerate(masks) if (mask.array == 0).any())
    at = int(np.flatnonzero(masks[index].array == 0)[0])
    values = Run().columns(0)["log_probs"][index].array
    names = []
    for k, other in enumerate((values[at], 99.0, np.nan)):
        changed = values.copy()
        changed[at] = other
        run = Run(changes={(0, "log_probs", index): changed})
        names.append(contents(finished(run, tmp_path / str(k)).rows(0)))
    assert names[0] == names[1]
    assert names[0] != names[2]


def test_a_folder_becomes_a_trace_that_compares_with_another(tmp_path: Path) -> None:
    """A planted change is named at its step, phase and signal, and the layout plays no part."""
    index = 0
    values = Run().columns(1)["advantages"][index].array.copy()
    mask = Run().columns(1)["loss_masks"][index].array
    values[np.flatnonzero(mask)[0]] += np.float32(1)
    runs = {"a": Run("miles"), "b": Run("miles", cp=2), "c": Run("miles", changes={(1, "advantages", index): values})}
    traces = {}
    for name, run in runs.items():
        run.write(tmp_path / name, log=tmp_path / f"{name}.log")
        traces[name], problems = trace_of_folder(
            tmp_path / name, tmp_path / f"{name}.trace", log=tmp_path / f"{name}.log"
        )
        assert problems == []
        assert traces[name].complete
    assert compare(traces["a"], traces["b"]).equal
    divergence = compare(traces["a"], traces["c"]).divergence
    assert divergence is not None
    assert (divergence.step, divergence.phase, divergence.signal) == (1, "forward", "advantages")
    assert traces["a"].header.identity["layout"] == {"cp": "1", "dp": "1", "ranks": "1"}


def invoke(*arguments: str) -> int:
    """The command line in this process: its exit code."""
    code: int = cli.main(list(arguments), standalone_mode=False)
    return code


def test_the_command_line_makes_and_compares_traces_of_dumps(tmp_path: Path, capfd) -> None:
    """`repro trace --from`, then `repro diff`; another layout must be asked for, and a broken run says so."""
    Run("miles").write(tmp_path / "a", log=tmp_path / "a.log")
    Run("miles", cp=2).write(tmp_path / "b", log=tmp_path / "b.log")
    at, bt = str(tmp_path / "at"), str(tmp_path / "bt")
    for name in "ab":
        folder = str(tmp_path / name)
        assert invoke("trace", "--from", folder, "--log", f"{folder}.log", "--out", f"{folder}t") == 0
        assert "2 steps of miles" in capfd.readouterr().err
    assert invoke("trace", "--from", str(tmp_path / "a"), "--out", str(tmp_path / "again"), "--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["steps"], told["kind"], told["complete"], told["exit_code"]) == (2, "miles", True, 0)
    assert invoke("diff", at, at) == 0
    with pytest.raises(NotVerifiableError, match="layout cp: 1 -> 2"):
        invoke("diff", at, bt)
    assert invoke("diff", "--vary", "layout", at, bt) == 0
    (tmp_path / "b" / "train_data" / "1_1.pt").unlink()
    assert invoke("trace", "--from", str(tmp_path / "b"), "--ranks", "2", "--out", str(tmp_path / "ct")) == 0
    output = capfd.readouterr().err
    assert "1 step of miles" in output
    assert "lacks the train dump of rank 1" in output
    assert "incomplete" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "{}", "--", "ls"], "leave out a command"),
        (["--from", "{}", "--steps", "1"], "leave out --steps"),
        (["--log", "x", "--", "ls"], "--log goes with --from"),
        (["--from", "{}/none"], "there is no folder"),
        (["--from", "{}"], "say --system"),
        (["--from", "{}", "--limit", "much"], "--limit much is no size"),
        (["--from", "{}", "--system", "relax"], "holds no train dumps"),
        ([], "or --from DIR"),
    ],
)
def test_what_cannot_be_traced_is_said_in_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    """Options that do not go together, and folders without dumps."""
    (tmp_path / "empty").mkdir()
    filled = [argument.replace("{}", str(tmp_path / "empty")) for argument in arguments]
    with pytest.raises((ReproError, click.UsageError), match=message):
        invoke("trace", "--out", str(tmp_path / "out"), *filled)

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro_golden.base.errors import ReproError
from repro_golden.base.printed.lines import labelled, metrics_of
from repro_golden.dumps.run.log import RunLog, wanted
from repro_golden.dumps.run.rows import phase_of

STAMP = "2026-11-20 15:38:49"
PREFIXES = {
    "nothing": "",
    "slime": f"[{STAMP}] model.py:918 - ",
    "miles": f"[{STAMP}.707 actor_cell0_rank0] log_utils.py:542 - ",
    "relax": f"{STAMP} | INFO | relax.backends.model:107[rank3] ",
    "relax plain": f"[{STAMP} rank3] model.py:107 - ",
}
RAYS = {
    "nothing": "",
    "ray": "(MegatronTrainRayActor pid=123, ip=10.0.0.1) ",
    "ray colours": "\x1b[36m(MegatronTrainRayActor pid=123)\x1b[0m ",
    "bar": "actor train:  50%|█████     | 1/2 [00:01<00:01,  1.2s/it]",
}
NUMBERS = {
    "0.28359246253967285": 0.28359246253967285, "-7.450580596923828e-09": -7.450580596923828e-09, "0": 0.0,
    "1e-06": 1e-6,
    "nan": math.nan, "-inf": -math.inf, "np.float64(0.5)": 0.5, "np.float32(nan)": math.nan,
    "tensor(0.25, device='cuda:0')": 0.25, "tensor(inf, grad_fn=<DivBackward0>)": math.inf, "np.int64(3)": 3.0,
}  # fmt: skip


def bits(metrics: dict[str, float]) -> dict[str, bytes | str]:
    """Floats by their bits; NaN as a word, since a log does not keep its payload."""
    return {name: "nan" if math.isnan(value) else struct.pack("<d", value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    # behind a bar, it is the logging prefix that tells a line
    ("system", "ray"),
    [(system, ray) for system in PREFIXES for ray in RAYS if (system, ray) != ("nothing", "bar")],
)
@pytest.mark.parametrize("coloured", [True, False])
def test_lines_of_all_three_are_read_behind_any_prefix(system: str, ray: str, coloured: bool) -> None:
    """Ray's prefix, colours, logging prefixes, and what a progress bar left on the line are taken off."""
    line = f"{PREFIXES[system]}step 12: {{'train/loss': 0.5, 'train/step': 12}}"
    if coloured:
        line = f"\x1b[32m{line}\x1b[0m"
    named = labelled(RAYS[ray] + line)
    assert named == ("step", "actor", 12, {"train/loss": 0.5, "train/step": 12.0})
    assert named is not None and metrics_of(RAYS[ray] + line) == named.metrics


@pytest.mark.parametrize(
    "line",
    [
        "{}  \t",
        "[32m{}[0m",
        f"[36m(MegatronTrainRayActor pid=12, ip=1.2.3.4)[0m [{STAMP}] model.py:918 - {{}} [0m  ",
        f"[32m{STAMP}[0m | [1mINFO[0m | [36mrelax.model:107[0m [1;31m{{}}[0m",
        f"(A pid=1) [{STAMP}] m.py:1 - {{}} \x1b[32m [repeated 3x across cluster]\x1b[0m",
        f"(A pid=1) [{STAMP}] m.py:1 - {{}} [32m [repeated 3x across cluster][0m ",
    ],
)
def test_trailing_spaces_and_colours_without_their_escapes_are_taken_off(line: str) -> None:
    """A log that went through a terminal or a filter; what looks like a colour in a name stays."""
    text = line.replace("{}", "step 3: {'a[1m': 1, 'b': 2.5}")
    assert labelled(text) == ("step", "actor", 3, {"a[1m": 1.0, "b": 2.5})
    assert metrics_of(text) == {"a[1m": 1.0, "b": 2.5}


@pytest.mark.parametrize(
    ("text", "label", "role", "number"),
    [
        ("step 3: {'a': 1}", "step", "actor", 3),
        ("critic-step 3: {'a': 1}", "step", "critic", 3),
        ("rollout 0: {'a': 1}", "rollout", "actor", 0),
        ("multi_turn 7: {'a': 1}", "multi_turn", "actor", 7),
        ("passrate 7: {'a': 1}", "passrate", "actor", 7),
        ("perf 7: {'a': 1}", "perf", "actor", 7),
        ("eval 7: {'a': 1}", "eval", "actor", 7),
    ],
)
def test_labels_and_roles(text: str, label: str, role: str, number: int) -> None:
    """Each of the trainers' labels, and whose update a step was."""
    metrics = labelled(text)
    assert metrics is not None
    assert (metrics.label, metrics.role, metrics.number) == (label, role, number)


@pytest.mark.parametrize(
    "text",
    [
        "", "step 3", "step 3: {", "step 3: {'a': 1", "step 3: {'a': 1} and more", "step 3: {}", "step 3: {'a': 'b'}",
        "critic-rollout 3: {'a': 1}", "mystep 3: {'a': 1}", "step x: {'a': 1}", "step -3: {'a': 1}", "step ٣: {'a': 1}",
        f"step {'9' * 5000}: {{'a': 1}}", "{'a': 1}", "step 3: {'a': 1}" + " " * 70_000, "said: step 3: {'a': 1}",
    ],
)  # fmt: skip
def test_everything_else_is_no_labelled_line(text: str) -> None:
    """Cut short, without numbers, other labels, numbers that count nothing, and lines that are too long."""
    assert labelled(text) is None


@given(
    st.sampled_from(list(PREFIXES.values())),
    st.sampled_from([RAYS["nothing"], RAYS["ray"], RAYS["ray colours"]]),
    st.sampled_from(["step", "critic-step", "rollout", "multi_turn", "passrate", "perf", "eval"]),
    st.integers(0, 10**18 - 1),
    st.dictionaries(st.text(min_size=1, max_size=12), st.sampled_from(sorted(NUMBERS)), min_size=1, max_size=6),
)
def test_what_a_trainer_prints_is_read_back(prefix: str, ray: str, label: str, number: int, printed) -> None:
    """Names of any characters as Python's repr writes them, and every notation of a number, nan and inf included."""
    text = ", ".join(f"{name!r}: {value}" for name, value in printed.items())
    named = labelled(f"{ray}{prefix}{label} {number}: {{{text}}}")
    if "\x1b" in text or "\x9b" in text:
        return  # colour codes are taken off wherever they stand
    assert named is not None
    assert (named.label, named.number) == (label.removeprefix("critic-"), number)
    assert named.role == ("critic" if label == "critic-step" else "actor")
    assert bits(named.metrics) == bits({name: NUMBERS[value] for name, value in printed.items()})


@given(st.text(max_size=60) | st.lists(st.sampled_from(["step 1: ", "{", "}", "'a': ", "1", "nan", "(", "[2026-11-20 "
    "15:38:49] a.py:1 - ", "\\", "'", ",", ":", "tensor(", ")", "\x1b[0m"]), max_size=12).map("".join))  # fmt: skip
def test_no_line_is_an_error(text: str) -> None:
    """Whatever a program prints, reading it ends; what is found are finite, infinite or NaN floats under text."""
    named = labelled(text)
    if named is not None:
        assert named.metrics
        assert all(type(value) is float for value in named.metrics.values())


def test_a_log_is_read_as_it_grows(tmp_path: Path) -> None:
    """Byte by byte, across a character's bytes and progress bars; the last line counts when the run has ended."""
    path = tmp_path / "run.log"
    text = (
        "café\rtrain:  50%|█████     | 1/2\r\x1b[0m[2026-11-20 15:38:49] model.py:918 - step 0: {'train/a': 1.0}\r\n"
        "rollout 0: {'rollout/values': 2.0}\nrollout 0: {'rollout/log_probs': -1.0, 'rollout/raw_reward': 0.5}\n"
        "perf 0: {'perf/x': 1.0}\nstep 1: {'train/a': nan}"
    )
    log = RunLog(path)
    log.read()
    for byte in text.encode():
        with path.open("ab") as file:
            file.write(bytes([byte]))
        log.read()
    assert log.steps == {0: {"a": 1.0}}
    log.read(end=True)
    assert set(log.steps) == {0, 1}
    assert math.isnan(log.steps[1]["a"])
    assert log.rollouts == {0: {"critic-rollout/values": 2.0, "rollout/log_probs": -1.0, "rollout/raw_reward": 0.5}}


def test_a_log_that_becomes_shorter_is_refused(tmp_path: Path) -> None:
    """Another run has begun to write there."""
    path = tmp_path / "run.log"
    path.write_text("step 0: {'a': 1}\n")
    log = RunLog(path)
    log.read()
    path.write_text("x")
    with pytest.raises(ReproError, match="became shorter"):
        log.read()


def test_equal_nans_are_no_contradiction(tmp_path: Path) -> None:
    """A repeated line of a diverged run is one line."""
    path = tmp_path / "run.log"
    path.write_text("step 0: {'train/a': nan}\nstep 0: {'train/a': nan}\n")
    RunLog(path).read(end=True)
    path.write_text("step 0: {'train/a': nan}\nstep 0: {'train/a': 0.0}\n")
    with pytest.raises(ReproError, match="differ"):
        RunLog(path).read(end=True)


def test_names_and_phases_of_metrics() -> None:
    """train/ goes, what differs from run to run goes, and each metric stands in the phase that it tells of."""
    metrics = {
        "train/grad_norm": 1.0, "train/critic-grad_norm": 1.0, "train/step": 1.0, "rollout/step": 1.0, "perf/x": 1.0,
        "eval/a": 1.0, "train/lr-pg_0": 1.0, "rollout/log_probs": 1.0, "rollout/raw_reward": 1.0,
        "passrate/pass@1": 1.0, "rollout/time": 1.0, "train/tokens_per_s": 1.0, "rollout/partition": 7.5,
    }  # fmt: skip
    kept = wanted(metrics)
    assert {name: phase_of(name) for name in kept} == {
        "grad_norm": "grad",
        "critic-grad_norm": "grad",
        "lr-pg_0": "update",
        "rollout/log_probs": "forward",
        "rollout/raw_reward": "loss",
        "passrate/pass@1": "loss",
    }
    assert phase_of("kl_loss") == "loss"
    assert wanted(metrics, ["*norm", "train/lr*", "r*", "p*"]) == {}

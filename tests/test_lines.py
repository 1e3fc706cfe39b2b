from __future__ import annotations

import contextlib
import io
import json
import math
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers.trainer_callback import PrinterCallback, TrainerState

from repro_golden.base.printed.lines import Lines, listen, metrics_of
from repro_golden.base.printed.machine_numbers import measures_time, of_the_machine

INTS = st.integers() | st.sampled_from([2**53 + 1, -(2**63), 10**308, 10**309])
NUMBERS = st.floats() | st.sampled_from([-0.0, math.nan, math.inf, 5e-324]) | INTS
NAMES = st.text(min_size=1) | st.sampled_from(
    ["train/loss", "a'b", 'a"b', "a'\"b", "\\", "{", "a: 1, b", "\ud83d\ude00", "😀'"]
)
OTHERS = st.recursive(
    st.none() | st.booleans() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner | NUMBERS) | st.tuples(inner) | st.dictionaries(NAMES, inner | NUMBERS),
    max_leaves=5,
)
STEP = "[2026-11-20 15:39:02] make_slime.py:66 - step 0: {'train/loss': -7.450580596923828e-09, 'train/kl_loss': 0.0, "
STEP += "'train/grad_norm': 0.28359246253967285, 'train/global_batch_size': 16, 'train/step': 0}"
ROLLOUT = "[2026-11-20 15:38:50] train_metric_utils.py:135 - rollout 0: {'rollout/kl': 0.0, 'rollout/partition': 7.5}"
MILES = (
    "[2026-11-20 15:47:21.936 actor_cell0_rank0] make_miles.py:74 - step 1: {'train/ess_ratio': 1.0, 'train/step': 1}"
)
PREFIXES = (
    "",
    "[2026-11-20 15:38:50] train_metric_utils.py:135 - ",
    "[2026-11-20 15:47:01.707 actor_cell0_rank0] debug_data.py:107 - ",
    "\x1b[32m2026-11-20 15:38:50\x1b[0m | \x1b[01;37mINFO\x1b[0m | \x1b[36mrelax.engine:66\x1b[0m \x1b[01;37m",
    "\x1b[32m2026-11-20 15:38:50\x1b[0m | \x1b[01;37mINFO\x1b[0m | \x1b[36mrelax.engine:66\x1b[0m[rank 0] ",
)
RAY = ("", "(MegatronTrainRayActor pid=123, ip=10.0.0.1) ", "\x1b[36m(TrainActor(rank=0) pid=9)\x1b[0m ")
LABELS = ("step 3: ", "critic-step 12: ", "rollout 0: ", "multi_turn 1: ", "passrate 1: ", "perf 1: ", "eval 7: ")


def bits(metrics: dict[str, float]) -> dict[str, bytes]:
    """Equal for equal doubles: tells 0.0 from -0.0, and a NaN is a NaN."""
    assert all(type(v) is float for v in metrics.values())
    return {k: b"nan" if math.isnan(v) else struct.pack("<d", v) for k, v in metrics.items()}


def numbers(values: dict[str, Any]) -> dict[str, bytes]:
    """What is to be read of a dict: integers beyond the largest float are left out."""
    return bits({k: float(v) for k, v in values.items() if type(v) is float or (type(v) is int and abs(v) < 10**309)})


# -- dicts


@given(
    st.sampled_from(RAY), st.sampled_from(PREFIXES), st.sampled_from(LABELS), st.dictionaries(NAMES, NUMBERS | OTHERS)
)
def test_labelled_dicts_are_read_back(ray: str, prefix: str, label: str, values: dict[str, Any]) -> None:
    """Every number of any dict under any label and prefix is read bit for bit, every other value is left out."""
    line = f"{ray}{prefix}{label}{values!r}"
    assert bits(metrics_of(line)) == numbers(values)
    assert bits(metrics_of(f" {line}\x1b[0m\r\n")) == numbers(values)


@given(st.sampled_from(RAY), st.dictionaries(NAMES, NUMBERS | OTHERS), st.booleans())
def test_whole_line_json_is_read_back(ray: str, values: dict[str, Any], ascii_only: bool) -> None:
    """The numbers of a line that is a JSON object are read bit for bit; numbers in strings are not."""
    shown = json.dumps(values | {"text": "0.5"}, ensure_ascii=ascii_only, default=str)
    expected = {k: v for k, v in json.loads(shown).items() if k != "text"}
    assert bits(metrics_of(ray + shown)) == numbers(expected)


@given(st.dictionaries(NAMES, NUMBERS))
def test_whole_line_dicts_are_read_back(values: dict[str, float]) -> None:
    """The numbers of a Python dict are read bit for bit, and as well where each is printed as a string."""
    assert bits(metrics_of(repr(values))) == numbers(values)
    assert bits(metrics_of(repr({k: str(v) for k, v in values.items()}))) == numbers(values)


@given(st.dictionaries(NAMES, st.floats(width=32)))
def test_what_transformers_prints_is_read(logs: dict[str, float]) -> None:
    """The logs that transformers' PrinterCallback prints are read, to the digits that it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        PrinterCallback().on_log(None, TrainerState(), None, logs=dict(logs) | {"epoch": 1.0, "note": "text"})  # type: ignore[no-untyped-call]
    expected = {k: float(f"{v:.4g}") for k, v in logs.items() if k != "total_flos"} | {"epoch": 1.0}
    expected.pop("note", None)
    assert bits(metrics_of(printed.getvalue())) == bits(expected)


def test_notations_of_one_number_are_read() -> None:
    """A vector of one number is that number, whichever library prints it; of two it is none. Infinity has two names."""
    shown = "{'a': tensor([0.5], device='cuda:0'), 'b': array([ 1.5]), 'c': tensor([0.5, 1.0]), 'd': Inf, 'e': -Inf}"
    assert metrics_of(shown) == {"a": 0.5, "b": 1.5, "d": math.inf, "e": -math.inf}


@given(st.floats(width=32), INTS.filter(lambda i: abs(i) < 2**63))
def test_scalars_of_numpy_and_torch_are_read(value: float, whole: int) -> None:
    """Scalars print as calls: NumPy's are read exactly, torch's as printed, with grad_fn too; vectors are not."""
    single, double = np.float32(value), np.float64(value)
    shown = {"f32": single, "f64": double, "i64": np.int64(whole), "array": np.array(value), "flag": np.bool_(True)}
    metrics = metrics_of(f"step 0: {shown!r}")
    assert bits(metrics) == bits(
        {"f32": float(str(single)), "f64": value, "i64": float(whole), "array": float(repr(np.array(value))[6:-1])}
    )
    tensor = torch.tensor(value, requires_grad=True)
    tensors = {"leaf": tensor, "loss": tensor * 2, "vector": torch.ones(2), "ok": tensor > 0, "n": torch.tensor(whole)}
    text = f"eval 0: {tensors!r}"
    assert "grad_fn=<MulBackward0>" in text
    printed = re.findall(r"tensor\((\S+?)[,)]", text)
    assert bits(metrics_of(text)) == bits({"leaf": float(printed[0]), "loss": float(printed[1]), "n": float(whole)})
    assert metrics_of("{'x': tensor(0.5, device='cuda:0'), 'r': range(0, 5)}") == {"x": 0.5}


def test_lines_of_real_runs() -> None:
    """Lines as slime and Miles print them, also as Ray repeats them; lines that only look like them give nothing."""
    step = {"train/loss": -7.450580596923828e-09, "train/kl_loss": 0.0, "train/grad_norm": 0.28359246253967285}
    step |= {"train/global_batch_size": 16.0, "train/step": 0.0}
    ray = "\x1b[36m(MegatronTrainRayActor pid=4242)\x1b[0m "
    note = "\x1b[32m [repeated 3x across cluster] (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 …)\x1b[0m"
    assert metrics_of(STEP) == metrics_of(ray + STEP) == metrics_of(ray + STEP + note) == step
    assert metrics_of(ROLLOUT) == {"rollout/kl": 0.0, "rollout/partition": 7.5}
    assert metrics_of(MILES) == {"train/ess_ratio": 1.0, "train/step": 1.0}
    for line in (
        "step 0: ",
        "step x: {'a': 1}",
        "a step 0: {'a': 1}",
        "{'a': 1} {'b': 2}",
        "{'a': 1",
        "{'a': 1, 'b: 2}",
    ):
        assert metrics_of(line) == {}
    strings = "{'a': '0.5', 'b': '5e-05', 'c': ' 1', 'd': '1_0', 'e': 'tensor(1)', 'f': ''}"
    assert metrics_of(strings) == {"a": 0.5, "b": 5e-05}
    assert metrics_of("step 0: {'a': '0.5', 'b': <object at 0x7f>, 'c': 3, 'd': 10e999}") == {"c": 3.0}


@given(st.text() | st.text("{}[]()'\"\\:,.0123456789eEnaif \x1b[m", max_size=60), st.sampled_from(("", *LABELS)))
@example("{'a': '\\U00110000', '\\N{DASH}': 1, '\\ud83d': 2}", "")
@example("{" * 60_000 + "}" * 5_000, "")
@example('{"a": ' + "[" * 60_000, "")
@example("{'a': " + "1" * 60_000 + "x}", "step 0: ")
@example("{'a': " + "-" * 60_000 + "1, 'b': 1}", "step 0: ")
def test_no_line_is_an_error(text: str, label: str) -> None:
    """Any text at all gives a dict of names to floats, with user patterns and without."""
    patterns = [re.compile(r"(?P<name>\w)?[=:](?P<value>\S+)?"), re.compile(r"(?P<loss>.)")]
    for line in (label + text, f"{label}{{{text}}}", f"(A pid=1) {label}{{'{text}': 1}}"):
        for metrics in (metrics_of(line), metrics_of(line, patterns)):
            assert all(type(k) is str and type(v) is float for k, v in metrics.items())


def test_many_keys_and_long_lines() -> None:
    """A dict of thousands of keys is read whole; a line beyond 64 KiB is not read at all."""
    many = {f"k{i}": i + 0.5 for i in range(3000)}
    assert metrics_of(f"step 0: {many!r}") == many
    longer = {"x": "y" * 65_536} | many
    assert metrics_of(f"step 0: {longer!r}", [re.compile(r"(?P<step>[0-9]+)")]) == {}


# -- user patterns


@given(st.lists(st.tuples(st.sampled_from(["loss", "kl", "reward"]), st.floats()), max_size=8), st.sampled_from(RAY))
def test_user_patterns(pairs: list[tuple[str, float]], ray: str) -> None:
    """Every match counts, the last one of a name wins, what is no float is passed over, and dicts are read besides."""
    line = f"{ray}step 5: {{'own': 1.5}} " + " ".join(f"{name}={value!r}" for name, value in pairs)
    by_name = [re.compile(rf"\b{name}=(?P<{name}>\S+)") for name in ("loss", "kl", "reward")]
    either = [re.compile(r"(?P<name>\w+)=(?P<value>\S+)")]
    for patterns in (by_name, either):
        assert bits(metrics_of(line + " lr=high", patterns)) == bits(dict(pairs))
    assert metrics_of(STEP, [re.compile(r"step (?P<at>\d+)(?P<no>x)?")]) == metrics_of(STEP) | {"at": 0.0}
    assert metrics_of("loss 1 2", [re.compile(r"(?P<name>\w+) (?P<value>\d) (\d)")]) == {"value": 1.0}


# -- what differs from run to run


@pytest.mark.parametrize(
    "name",
    [
        "perf/anything", "perf/step_time", "train_runtime", "train_samples_per_second", "timing_s/gen", "time/fps",
        "timing_per_token_ms/gen", "timeperf/rollout", "throughput(tps)", "time_metrics/data_loading(%)", "tok/s",
        "memory/max_active(GiB)", "mem-reserved-bytes", "iterTimeMs", "stepTime", "actor_TFLOPs", "MFU", "eta",
        "gen_us", "latency_us", "gen_ms/mean", "gen_ms_p99", "sec_per_step", "tokens_per_gpu_per_sec", "tokensPerMin",
        "_timestamp", "elapsed", "data-time", "gpu.0.memory", "Time taken: GRPOTrainer.compute_loss", "step_times",
        "TIME", "time0", "reward_time", "reward_time/mean", "loss_fn_time", "time/reward_fn", "timing_s/reward",
        "timing_per_token_ms/update_actor", "timing_s/speed_reward", "Time taken: GRPOTrainer._calculate_rewards",
        "Time taken: GRPOTrainer.format_accuracy", "memory/after_loss", "memory_after_loss", "time_loss",
        "reward_fn/latency", "rewards_per_second", "eval_loss_runtime", "timeperf/recompute_logp",
    ],
)  # fmt: skip
def test_names_of_time_speed_and_memory(name: str) -> None:
    """Names that trainers of the field give to wall time, speed and memory are told."""
    assert measures_time(name)


@pytest.mark.parametrize(
    "name",
    [
        "train/loss", "rollout/response_lengths", "timeout_ratio", "beta", "num_tokens", "second_order", "truncated",
        "num_steps", "total_flos", "total_timesteps", "time_step", "time_steps", "timeStep", "meta", "theta", "delta",
        "train/train_rollout_logprob_abs_diff", "train/lr-pg_0", "passrate/pass@8", "rollout/total_lengths", "numGPUs",
        "numLLMs", "mmlu_high_school_us_history", "us_foreign_policy", "en_US", "wer/en-us/mean", "ms_marco/acc",
        "RMSE", "loss_status", "eta_min", "times_clipped", "performance", "superb/x", "remember", "membership",
        "persist", "upper_s", "per_sample_loss", "reward_per_step", "min_reward", "s", "estimate", "sentiment",
        "Timbre", "bonus", "second_turn/reward", "grad_norm", "entropy", "section_score", "secret", "us", "critic-perf",
    ],
)  # fmt: skip
def test_names_of_what_a_run_computes(name: str) -> None:
    """Names of losses, counts, hyperparameters and evaluations are not taken for time, whatever letters they hold."""
    assert not measures_time(name) and not measures_time(f"eval/{name}/acc")


@pytest.mark.parametrize(
    "name",
    [
        "memory_loss", "train/speed_reward", "rewards/speed_reward/mean", "rewards/speed_reward/std",
        "rewards/memory_reward/mean", "rewards/latency_reward/mean", "rewards/runtime_reward/mean",
        "rewards/time_bonus/mean", "eval_rewards/time/mean", "eval/rewards/time/mean", "train/speed_loss/mean",
        "memory_loss/step", "loss/memory", "duration_loss", "duration_mae", "eval_time_accuracy", "speedReward",
        "latency_loss_p95", "speed_loss#1", "rewards/fps", "rewards/gpu_mb",
    ],
)  # fmt: skip
def test_names_of_what_is_learnt(name: str) -> None:
    """A reward or loss of speed, memory or time is the training's own, whatever statistic stands behind it."""
    assert not measures_time(name) and not of_the_machine(name)


@given(st.lists(st.sampled_from(["loss", "step", "time", "ms", "per", "s", "kl", "max"]), min_size=1), st.data())
def test_how_words_are_joined_plays_no_part(words: list[str], data: st.DataObject) -> None:
    """Underscores, dots, dashes, spaces and camelCase part words alike."""
    joined = {data.draw(st.sampled_from("_.- :")).join(words) for _ in range(2)}
    camel = words[0] + "".join(word.capitalize() for word in words[1:])
    # after another capital, one with a single small letter is taken for an acronym's plural (GPUs): SMs is no unit
    names = joined | ({camel} if "s" not in words else set())
    assert len({measures_time(name) for name in names}) == 1


# -- streams

TEXTS = st.text("ab{\r\n", max_size=40) | st.text(max_size=20)


def lines_by_definition(text: str) -> list[str]:
    """A terminal's view of the finished lines: carriage returns before the end end nothing, others start over."""
    return [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")[:-1]]


@given(st.lists(TEXTS, max_size=8))
@example(["a\r", "\n", "b\r", "\r", "c\n"])
@example(["a" * 65_000, "b" * 537, "c\nd\n", "a" * 65_536 + "\ne" + "\r\n"])
@example(["a" * 70_000, "\rkept\n", "x" * 70_000 + "y", "y\nafter\n"])
def test_pieces_of_a_stream_do_not_change_its_lines(pieces: list[str]) -> None:
    """However a text is cut into pieces, its lines are the same; those beyond 64 KiB are dropped."""
    taken: list[str] = []
    lines = Lines(taken.append)
    for piece in pieces:
        lines.write(piece)
    assert taken == [line for line in lines_by_definition("".join(pieces)) if len(line) <= 65_536]


def test_an_unfinished_line_is_held_up_to_its_limit() -> None:
    """A program that prints for ever without a line end costs no memory: nothing beyond 64 KiB is held."""
    lines = Lines(print)
    for _ in range(100):
        lines.write("x" * 1000)
        assert sum(map(len, lines._pieces)) <= 65_536
    assert not lines._pieces


def test_threads_do_not_tear_each_others_lines() -> None:
    """A line that one thread writes in pieces arrives whole, whatever others write between them and meanwhile."""

    def elsewhere(call: Callable[[str], object], text: str) -> None:
        thread = threading.Thread(target=call, args=(text,))
        thread.start()
        thread.join()

    taken: list[str] = []
    stream = io.StringIO()

    def take(line: str) -> None:
        taken.append(line)
        if line == "one line":
            elsewhere(stream.write, "while that is heard\n")

    listen(stream, take)
    lines = Lines(take)
    for write in (stream.write, lines.write):
        write("one ")
        elsewhere(write, "between\nunfinished")
        write("line\n")
    assert taken == ["between", "one line", "while that is heard"] * 2


def test_many_threads_at_once() -> None:
    """Four threads that print at once: every line of each is heard, in that thread's order."""
    taken: list[str] = []
    stream = io.StringIO()
    listen(stream, taken.append)
    before = sys.getswitchinterval()

    def write(thread: int) -> None:
        for i in range(300):
            print(thread, i, sep="-", file=stream)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    for i in range(4):
        assert [line for line in taken if line.startswith(f"{i}-")] == [f"{i}-{k}" for k in range(300)]
    assert len(taken) == 1200


class Refuses:
    """A stream that lets nothing be set, as objects with slots do."""

    __slots__ = ()

    def write(self, text: str) -> int:
        """Take anything."""
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Take nothing."""
        raise OSError(len(lines))


class Inner:
    """A stream whose writelines does not call its write, and whose write returns a thing of its own."""

    def __init__(self) -> None:
        self.got: list[str] = []

    def write(self, text: str) -> tuple[str, int]:
        """Keep the text."""
        self.got.append(text)
        return "wrote", len(text)

    def writelines(self, lines: list[str]) -> None:
        """Keep the texts."""
        self.got.extend(lines)


def wrapped() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="")


@given(
    st.lists(st.tuples(st.booleans(), st.text("ab\n\r", max_size=6))), st.sampled_from([wrapped, io.StringIO, Inner])
)
def test_listening_changes_nothing_and_hears_all(writes: list[tuple[bool, str]], make: Callable[[], Any]) -> None:
    """Through write and writelines, a listened stream does what another does, and each line is heard once."""
    taken: list[str] = []
    plain, heard = make(), make()
    for _ in range(3):
        listen(heard, taken.append)
    for many, text in writes:
        answers = [s.writelines(list(text)) if many else s.write(text) for s in (plain, heard)]
        assert answers[0] == answers[1]
    if isinstance(plain, Inner):
        assert plain.got == heard.got
    else:
        assert plain.seek(0) == heard.seek(0) and plain.read() == heard.read()
    assert taken == lines_by_definition("".join(text for _, text in writes))


def test_errors_stay_the_streams_own() -> None:
    """The stream's errors are raised and then nothing is heard; `take`'s are not, and what it prints is not heard."""
    taken: list[str] = []
    stream = wrapped()

    def take(line: str) -> None:
        taken.append(line)
        print("from take", file=stream)
        raise RuntimeError(line)

    listen(stream, take)
    with pytest.raises(UnicodeEncodeError):
        stream.write("é\n")
    with pytest.raises(TypeError):
        stream.write(b"x\n")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        stream.write()  # type: ignore[call-arg]
    assert stream.write("one\ntwo\n") == 8 and stream.write("three\n") == 6
    assert taken == ["one", "three"]
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        stream.write("four\n")
    assert taken == ["one", "three"]


def test_streams_that_cannot_be_listened_to() -> None:
    """None, an object with slots and one without write are left alone without a word."""
    refuses = Refuses()
    for stream in (None, refuses, object()):
        listen(stream, pytest.fail)
    assert refuses.write("a\n") == 2


def test_progress_bars_do_not_hide_lines() -> None:
    """A line that tqdm writes between the redraws of its bar on the same stream is heard as it was written."""
    taken: list[str] = []
    stream = io.StringIO()
    listen(stream, taken.append)
    for i in tqdm(range(3), file=stream, mininterval=0, ascii=True):
        tqdm.write(str({"loss": str(i / 2)}), file=stream)
    assert [metrics_of(line) for line in taken if "{" in line] == [{"loss": i / 2} for i in range(3)]


PROGRAM = """
import contextlib, io, logging, os, sys
from repro_golden.base.printed.lines import listen, metrics_of

found = []
take = lambda line: found.append(metrics_of(line).get("x"))
listen(sys.stdout, take)
listen(sys.stderr, take)
logging.basicConfig(format="[2026-11-20 15:38:50] %(filename)s:%(lineno)d - %(message)s", level=logging.INFO)
print({"x": 0}, flush=True)
logging.info("step 1: {'x': 1}")
elsewhere = io.StringIO()
with contextlib.redirect_stdout(elsewhere):
    print({"x": "unheard"})
with contextlib.redirect_stdout(sys.stderr):
    print({"x": 2})
sys.stdout.writelines(["{'x':", " 3}\\n"])
print("{'x':", end="")  # the line under way is the child's as well as the parent's
sys.stdout.flush()
child = os.fork()
if child == 0:
    print(" 4}", flush=True)
    os._exit(0 if found == [0, 1, 2, 3, 4] else 1)
assert os.waitpid(child, 0)[1] == 0
print(" 5}")
sys.stdout = None
listen(sys.stdout, take)
print("to nobody")
assert found == [0, 1, 2, 3, 5], found
assert elsewhere.getvalue() == "{'x': 'unheard'}\\n"
assert not {"torch", "numpy", "ast"} & set(sys.modules)
"""


def test_in_a_process_of_its_own() -> None:
    """print, logging, redirected output, writelines and a forked child are heard, and the output is what it was."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'x': 0}\n{'x': 3}\n{'x': 4}\n 5}\n"
    assert done.stderr == "[2026-11-20 15:38:50] <string>:11 - step 1: {'x': 1}\n{'x': 2}\n"


def test_a_last_line_may_have_no_end() -> None:
    """It is one all the same; what a progress bar has drawn last is none."""
    taken: list[str] = []
    for text in ("a line\nthe last", "\rdrawn", "drawn\r"):
        lines = Lines(taken.append, lambda _: None)
        lines.write(text)
        lines.end()
    assert taken == ["a line", "the last"]

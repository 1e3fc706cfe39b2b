from __future__ import annotations

import math
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from repro_golden.base.printed.free_text import is_bar, shown_in
from repro_golden.base.printed.lines import Lines, metrics_of
from repro_golden.base.printed.machine_numbers import of_the_machine

MEGATRON = (
    " [2026-11-23 01:41:48.061658] iteration        1/       3 | consumed samples:            4 | elapsed time per "
    "iteration (ms): 3036.2 | throughput per GPU (TFLOP/s/GPU): 12.1 | learning rate: 1.000000E-03 | global batch size:"
    "     4 | lm loss: 6.955799E+00 | load_balancing_loss: 1.2E+00 | loss scale: 1.0 | grad norm: 0.968 | num zeros: 0 "
    "| params norm: 12.3 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
LINES = {
    "loss 3.17": {"loss": 3.17},
    "loss=3.17": {"loss": 3.17},
    "loss: 3.17": {"loss": 3.17},
    "  train_loss               =     3.1751": {"train_loss": 3.1751},
    "step 250: train loss 4.1832, val loss 4.2161": {"train loss": 4.1832, "val loss": 4.2161},
    "2026-11-20 10:00:00,123 - INFO - Epoch 3 | loss 3.17 | acc 93.1% | 8.1 it/s": {"loss": 3.17, "acc": 93.1},
    "we got a loss of 3, then reward/mean=-0.5, final loss 3.": {"reward/mean": -0.5, "final loss": 3.0},
    "loss: tensor(3.1700, device='cuda:0', grad_fn=<DivBackward0>)": {"loss": 3.17},
    "Epoch: [0][10/100]\tTime  0.1 (0.2)\tLoss 3.17e+00 (3.2e+00)\tAcc@1   0.00 (  0.78)": {"Loss": 3.17, "Acc@1": 0.0},
    "| epoch 001 | nll_loss 2.1 | ppl 4.3 | wps 1234 | lr 0.001 | gnorm 1.2 | train_wall 10 |": {
        "nll_loss": 2.1, "ppl": 4.3, "lr": 0.001, "gnorm": 1.2,
    },
    MEGATRON: {
        "learning rate": 1e-3, "lm loss": 6.955799, "load_balancing_loss": 1.2, "loss scale": 1.0, "grad norm": 0.968,
        "num zeros": 0.0, "params norm": 12.3,
    },
    " validation loss at iteration 10 | lm loss value: 2.3E+00 | lm loss PPL: 1.0E+01 |": {
        "lm loss value": 2.3, "lm loss PPL": 10.0,
    },
    "INFO:root:{'loss': 3.17}": {"loss": 3.17},
    "INFO 11-23 01:41:48 train.py:12] {'loss': '3.17', 'eval': {'acc': 1, 'deep': {'x': 2}}, 'ok': True}": {
        "loss": 3.17, "eval/acc": 1.0, "eval/deep/x": 2.0, "ok": 1.0,
    },
    '{"train": {"loss": 1.5}, "skipped": false, "note": {"a": "1"}, "list": [1]}': {"train/loss": 1.5, "skipped": 0.0},
    "100%|##| 10/10 [00:01<00:00, 8.1it/s, loss=3.17]": {"loss": 3.17},
    "train loss 0.2:  10%|█  | 1/9 [1:00:01<00:00,  1.2s/it, lr=1e-3, x=2]": {"train loss": 0.2, "lr": 1e-3, "x": 2.0},
    "10it [00:01,  8.1it/s, loss=3.17]": {"loss": 3.17},
}  # fmt: skip
NOTHING = [
    "took 3.1 s, 8.1 it/s, 1200 tokens/s, ETA 0:01:10, 12.3 GB, pid 123, port 29500", "compute_loss: 12.3ms",
    "loss 12.3 ms", "reward 10:00:01", "loss 2026-01-01", "loss 3.1.2", "score 3/10", "loss_fn 3 kl_coef 0.1 lr_step 5",
    "seed 3 rank 0 world 8", "Server config: {'port': 8000}", "loss 1e999", "loss information", "loss 1,234 x",
    "   kl_loss_coef ......... 0.001", "train loss", "loss " * 1000 + "1",
]  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_metrics_in_free_text(line: str) -> None:
    """What trainers print for people is read without a pattern, behind Ray's prefix and colours too."""
    assert shown_in(line) == LINES[line]
    assert shown_in(f"\x1b[36m(Trainer pid=12)\x1b[0m {line.strip()}\x1b[0m") == LINES[line]
    assert is_bar(line) == (("it" in line.partition("[")[2] and "=" in line and "[00:" in line) or "1.2s/it" in line)


@pytest.mark.parametrize("line", NOTHING)
def test_what_is_no_metric_is_not_read(line: str) -> None:
    """Times, speeds, sizes, ports, dates, versions, hyperparameters and numbers with a unit."""
    assert shown_in(line) == {}


def test_what_is_compared_is_read_as_before() -> None:
    """Free text adds nothing to what is compared by bits."""
    for line in LINES:
        assert metrics_of(line) == {}
    assert metrics_of("{'loss': 1, 'ok': True, 'in': {'a': 1}}") == {"loss": 1.0}


def test_nan_is_read() -> None:
    """A loss that is NaN or infinite is shown as such."""
    shown = shown_in("loss nan kl=-inf")
    assert math.isnan(shown["loss"]) and shown["kl"] == -math.inf
    shown = shown_in(" iteration 2/ 3 | lm loss: NAN | loss scale: INF | grad norm: -INFINITY |")  # as C prints by "%E"
    assert math.isnan(shown["lm loss"]) and (shown["loss scale"], shown["grad norm"]) == (math.inf, -math.inf)


@given(st.text(max_size=80) | st.text("loss kl=:|,.[]0123456789e-+%/{}'\"in fas\r\t", max_size=80))
@example("loss" + " " * 4000 + "x")
@example("a " * 2000)
@example("{" * 60_000)
@example("INFO " + "{'a': " * 10_000 + "1" + "}" * 10_000)
@example("1%|" * 20_000)
def test_no_line_is_an_error(text: str) -> None:
    """Any text gives a dict of names to floats."""
    for line in (text, f"INFO:root:{text}", f"{{'a': {{{text}}}}}"):
        assert all(type(k) is str and type(v) is float for k, v in shown_in(line).items())


@pytest.mark.parametrize(
    ("pieces", "drawn", "lines"),
    [
        (["\rloss 1", "\rloss 2", "\n"], ["loss 1", "loss 2"], ["loss 2"]),
        (["loss 1", "\r", "loss 2", "\r", "done\n"], ["loss 1", "loss 2"], ["done"]),
        (["a\rb\rc\n"], ["a", "b"], ["c"]),
        (["x\r\n", "y\n"], ["x"], ["x", "y"]),
        (["\r", "a", "\r\r", "\n"], ["a"], ["a"]),
    ],
)
def test_what_is_drawn_over_is_heard_once(pieces: list[str], drawn: list[str], lines: list[str]) -> None:
    """A redrawn line is heard when it is drawn, whether its carriage return stands before or behind it."""
    seen: tuple[list[str], list[str]] = [], []
    stream = Lines(seen[0].append, seen[1].append)
    for piece in pieces:
        stream.write(piece)
    assert (seen[1], seen[0]) == (drawn, lines)


@pytest.mark.parametrize(
    "name",
    ["pid", "server/port", "gpu_mb", "v_num", "train_wall", "fps", "charts/SPS", "train/dt", "rss_mb", "rollout_s"],
)
def test_numbers_of_the_machine(name: str) -> None:
    """A process's number, a port and a rate are no metrics of a training."""
    assert of_the_machine(name)
    assert not any(map(of_the_machine, ("report", "import_loss", "wall_loss", "", "num", "portion")))
    assert not any(map(of_the_machine, ("loss_mb", "kl/mb", "approx_kl_mb", "v_s", "upper_s", "s", "adt")))


def test_a_pattern_of_the_user_goes_first() -> None:
    """What `--metric` reads is compared; free text reads the same line besides."""
    line = "step 3 loss=0.5 other=2"
    assert metrics_of(line, [re.compile(r"(?P<name>\w+)=(?P<value>\S+)")]) == {"loss": 0.5, "other": 2.0}
    assert shown_in(line) == {"loss": 0.5}

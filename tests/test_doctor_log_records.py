"""Losses and gradient norms in logs of trainers other than slime, Miles and Relax, and what is said of such logs."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_log_kit import LOADED, arguments, clean, engine, step, write

from repro.doctor.artefacts.logs.files import read_log
from repro.doctor.artefacts.logs.records import is_gradient_norm, is_loss, losses_and_norms
from repro.doctor.examine import OTHER_METRICS, Examination, examine, look
from repro.doctor.show import examination_text

TRL = "{'loss': %s, 'grad_norm': %s, 'learning_rate': 1e-06, 'reward': 0.5, 'kl': 0.0001, 'epoch': 0.01}"
VERL = (
    "(WorkerDict pid=1) step:1 - global_seqlen/min:10 - actor/pg_loss:%s - actor/grad_norm:%s - training/global_step:1"
)
MEGATRON = (
    " [2026-11-20 10:00:01] iteration        6/      10 | consumed samples:           96 | elapsed time per iteration "
    "(ms): 120.2 | learning rate: 1.000000E-06 | lm loss: %s | loss scale: 1.0 | grad norm: %s | number of nan "
    "iterations:   1 |"
)
FINDINGS = ["gradient-not-finite", "loss-not-finite"]


def examined(folder: Path, *lines: str) -> Examination:
    """What the doctor finds in a log of these lines."""
    return examine(look([write(folder / "train.log", list(lines))]))


def told(examination: Examination) -> list[str]:
    """The rules that found something."""
    return [finding.rule for finding in examination.findings]


@pytest.mark.parametrize(
    ("form", "nan"),
    [
        (TRL, "nan"), (TRL, "'nan'"), (VERL, "nan"), (VERL, "np.float64(nan)"), (MEGATRON, "NAN"), (MEGATRON, "INF"),
        (VERL.replace(" - ", " - " + " - ".join(f"timing_s/part_{n}:0.125" for n in range(300)) + " - ", 1), "nan"),
        ("[2026-11-20 10:00:00] [INFO] [trainer.py:7] step: 3, loss: %s, grad_norm: %s, lr: 1e-06", "nan"),
        ("2026-11-20 10:00:00 INFO trainer: {'train': {'loss': %s, 'grad_norm': %s}, 'step': 3}", "nan"),
        (" 10%%|#         | 1/10 [00:01<00:09,  1.0s/it, loss=%s, grad_norm=%s]", "nan"),
        ("iter 3: loss %s, grad norm %s, time 30.12ms, mfu 1.00%%", "nan"),
    ],
)  # fmt: skip
def test_what_is_not_finite_in_the_log_of_any_trainer_is_an_error(form: str, nan: str, tmp_path: Path) -> None:
    """A NaN that TRL, verl or Megatron-LM prints was "nothing found", as only slime's form was read."""
    report = examined(tmp_path, form % ("0.5", "0.25"), "", form % (nan, nan))
    assert told(report) == [*FINDINGS, OTHER_METRICS.id]
    for finding in report.of("error"):
        assert (finding.where.line, finding.certainty) == (3, "certain")
        assert "on line 3, and not finite" in finding.message and "1 of 2" in finding.message
        assert "--" not in finding.fix
    healthy = examined(tmp_path, form % ("0.5", "0.25"))
    assert told(healthy) == [OTHER_METRICS.id]
    assert set(FINDINGS) < set(healthy.tried)


def test_rules_of_the_trainers_names_are_not_tried_on_other_metrics(tmp_path: Path) -> None:
    """A gradient norm of 0, a loss that grows and a KL above 1 are judged by names and bounds of slime's and Miles'."""
    lines = [TRL % (10.0**n, 0.0) for n in range(12)]
    report = examined(tmp_path, *arguments(load="/ckpt"), *lines)
    assert told(report) == [OTHER_METRICS.id]
    assert not {"gradient-zero", "loss-explodes", "kl-configuration"} & set(report.tried)
    assert "(12 lines)" in report.findings[0].message


def test_overflows_that_a_loss_scale_is_found_by_are_no_error(tmp_path: Path) -> None:
    """Where later gradient norms are finite the run went on: updates that overflow in fp16 are left out."""
    report = examined(tmp_path, TRL % (0.5, "inf"), TRL % (0.5, "nan"), TRL % (0.5, 0.25))
    assert [(finding.rule, finding.severity) for finding in report.findings] == [
        ("gradient-not-finite", "warning"), (OTHER_METRICS.id, "note"),
    ]  # fmt: skip


@pytest.mark.parametrize("lines", [[engine("hello")], [*arguments(load="/ckpt"), LOADED], []])
def test_a_log_without_metrics_is_no_clean_bill(lines: list[str], tmp_path: Path) -> None:
    """Where no metric is read a note says so: it was "nothing found", also of rules that had nothing to read."""
    report = examined(tmp_path, *lines)
    assert told(report) == [OTHER_METRICS.id]
    assert "no line of metrics" in report.findings[0].message
    assert "nothing found" not in examination_text(report)
    assert "loss-not-finite" not in report.tried


def test_every_loss_of_slime_is_judged_as_before(tmp_path: Path) -> None:
    """Words that tell a setting in another trainer's names tell nothing in names of slime's and Miles' own."""
    assert told(examined(tmp_path, step(0, clip_weight_loss=float("nan")))) == [
        "loss-not-finite",
        "checkpoint-never-loaded",
    ]


def test_metrics_of_slime_need_no_note(tmp_path: Path) -> None:
    """A log in slime's form is judged by all rules, beside lines in another form too."""
    assert told(examined(tmp_path, *clean())) == []
    assert told(examined(tmp_path, *clean(), TRL % ("nan", "nan"))) == FINDINGS
    log = read_log(write(tmp_path / "a.log", [step(0), TRL % (1, 2), step(1)]), ())
    assert (sorted(log.series.steps), dict(log.metrics.steps)) == ([0, 1], {2: {"loss": 1.0, "grad_norm": 2.0}})


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("Train loss: nan", ["Train loss"]),
        ("Epoch 2: loss=nan", ["loss"]),
        ("[2026-11-20 10:00:01] step [3/10] - grad norm: nan", ["grad norm"]),
        ("step 2 loss nan grad_norm nan", ["loss", "grad_norm"]),
    ],
)
def test_a_trainer_of_ones_own_prints_little(line: str, names: list[str], tmp_path: Path) -> None:
    """One number alone in its line is read, behind a counter too, and so are NaNs that no mark parts from names."""
    assert list(losses_and_norms(line)) == names
    assert told(examined(tmp_path, line))[0] in FINDINGS


@pytest.mark.parametrize(
    "line",
    [
        "INFO: if loss: nan appears, lower --lr",
        "what to do where you see loss: nan",
        "loss nan",
        "the loss: nan, grad_norm: nan are what others saw in runs of this kind",
        "(RolloutManager pid=1) Finish rollout: ['loss: nan, grad_norm: nan']",
        "+ echo loss: nan, grad_norm: nan",
        "(ToolSandbox pid=3) sandbox result: loss: nan, grad_norm: nan",
        "best_loss: inf | max_grad_norm: inf | step: 1 |",
        "TrainingArguments(max_grad_norm=inf, loss_scale=inf)",
        "loss = nan_to_num(loss)",
        "{'loss': 'mse', 'norm': 'rms'",
    ],
)
def test_what_only_speaks_of_a_loss_is_no_metric(line: str) -> None:
    """Advice, samples, settings and code are no numbers of a step."""
    assert losses_and_norms(line) == {}


def test_names_of_losses_and_gradient_norms() -> None:
    """What a step measured, and nothing that is set."""
    losses = ("loss", "lm loss", "actor/pg_loss", "train/loss", "loss/policy_avg", "policyLoss", "critic-value_loss")
    norms = (
        "grad_norm",
        "grad norm",
        "critic-grad_norm",
        "actor/grad_norm",
        "gradient_norm",
        "gnorm",
        "train/grad_norm/mean",
    )
    neither = (
        "loss scale",
        "max_grad_norm",
        "best_loss",
        "lossless",
        "param norm",
        "loss_coef",
        "lr",
        "clip_grad_norm",
    )
    assert (
        [name for name in losses if not is_loss(name)] == [name for name in norms if not is_gradient_norm(name)] == []
    )
    assert not [name for name in neither if is_loss(name) or is_gradient_norm(name)]


def test_a_long_run_that_ends_in_nan_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the lines that are kept those that are not finite still are, and the last of the others."""
    monkeypatch.setattr("repro.doctor.artefacts.logs.files._METRICS", 5)
    lines = [TRL % (0.5, 0.25)] * 20
    report = examined(tmp_path, TRL % ("nan", 0.25), *lines, TRL % (0.5, "nan"))
    assert [(finding.rule, finding.severity, finding.where.line) for finding in report.findings[:2]] == [
        ("gradient-not-finite", "error", 22), ("loss-not-finite", "error", 1),
    ]  # fmt: skip
    assert examined(tmp_path, *lines, TRL % (0.5, "inf"), *lines).of("error") == []

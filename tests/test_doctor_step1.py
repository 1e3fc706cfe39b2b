"""The doctor's rules about the first step and the curves that follow it: each fails and passes on real files."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from doctor_dump_kit import found
from doctor_run_kit import equal_run, launch, log, read, rollout, samples, severities
from hypothesis import given
from hypothesis import strategies as st
from run_folder_kit import Run

from repro.doctor.artefacts.kinds import Metrics, Series, TrainStep
from repro.doctor.catalogue import catalogue
from repro.doctor.facts.curves import Point, curve, falls, updates_of

Maker = Callable[[Path], tuple[Path, ...]]


def _step_log(*steps: dict[str, float], flags: dict[str, object] | None = None) -> Maker:
    return lambda at: (log(at / "a.log", steps=dict(enumerate(steps)), flags=flags),)


def _norms(*values: float, flags: dict[str, object] | None = None) -> Maker:
    return _step_log(*({"grad_norm": value} for value in values), flags=flags)


def _losses(*values: float, metric: str = "loss", flags: dict[str, object] | None = None) -> Maker:
    return _step_log(*({metric: value, "grad_norm": 0.2} for value in values), flags=flags)


ONE = {"num_steps_per_rollout": 1, "clip_grad": 1.0}
MOE = {"num_experts": 64, "use_rollout_routing_replay": False}
COLLAPSE = [0.2, 0.3, 0.4, 0.5, 0.5, 0.6, 0.6, 0.5, 0.6, 0.6, 0.6, 0.5, 0.02, 0.0, 0.01, 0.0]


# -- the first step


def test_masked_tokens_do_not_count(tmp_path: Path) -> None:
    """A token that the loss mask leaves out may have any reference log-prob, even NaN."""
    run = Run(rollouts=1)
    whole = run.columns(0)
    for i in range(run.count):
        values = whole["log_probs"][i].array.copy()
        values[whole["loss_masks"][i].array == 0] = math.nan
        run.changes[0, "ref_log_probs", i] = values
    assert any((mask.array == 0).any() for mask in whole["loss_masks"])
    assert found("ref-log-probs-differ", run.write(tmp_path / "run")) == []


def test_nan_in_both_is_equal_and_nan_in_one_is_not(tmp_path: Path) -> None:
    """NaN against NaN does not differ here; NaN against a number does, and is the worst gap."""
    for name, other in (("both", math.nan), ("one", -0.5)):
        run = Run(rollouts=1)
        whole = run.columns(0)
        for i in range(run.count):
            run.changes[0, "ref_log_probs", i] = whole["log_probs"][i].array
        run.changes[0, "loss_masks", 0] = whole["loss_masks"][0].array * 0 + 1
        log_probs = whole["log_probs"][0].array.copy()
        log_probs[2] = math.nan
        ref = log_probs.copy()
        ref[2] = other
        run.changes[0, "log_probs", 0], run.changes[0, "ref_log_probs", 0] = log_probs, ref
        findings = found("ref-log-probs-differ", run.write(tmp_path / name))
        assert [finding.severity for finding in findings] == ([] if name == "both" else ["warning"])
        if findings:
            assert "response token 2" in findings[0].where.item


@pytest.mark.parametrize(("shift", "severity"), [(1e-5, "note"), (0.01, "warning")])
def test_jitter_of_log_probs_is_a_note(shift: float, severity: str, tmp_path: Path) -> None:
    """One token that differs by a rounding is a note; by a hundredth, a warning; both name it."""
    findings = found("ref-log-probs-differ", equal_run(tmp_path / "run", shift))
    assert [finding.severity for finding in findings] == [severity]
    assert "differ at 1 of" in findings[0].message


def test_replayed_routing_exempts_from_equality(tmp_path: Path) -> None:
    """With R3, log-probs differ from the reference's by design: the rule is silent, and so are jitter and error."""
    run, script = equal_run(tmp_path / "run", 0.001), launch(tmp_path / "run.sh", "--use-rollout-routing-replay")
    for name in ("ref-log-probs-differ", "r3-log-probs", "kl-jitter", "kl-between", "kl-configuration"):
        assert found(name, run, script) == []
    assert found("ref-log-probs-differ", run)


@pytest.mark.parametrize(
    ("gap", "names"),
    [
        (0.0, []), (5e-9, []), (1e-6, ["kl-jitter"]), (9e-5, ["kl-jitter"]), (2e-4, ["kl-between"]),
        (0.99, ["kl-between"]), (1.5, ["kl-configuration"]),
    ],
)  # fmt: skip
def test_bands_of_kl_leave_no_gap_and_do_not_overlap(gap: float, names: list[str], tmp_path: Path) -> None:
    """A KL of the first step lies in one band at most: rounding, jitter, between, configuration."""
    path = log(tmp_path / "a.log", steps={0: {"kl_loss": gap}})
    assert [name for name in ("kl-jitter", "kl-between", "kl-configuration") if found(name, path)] == names


def test_kl_of_later_steps_is_no_error(tmp_path: Path) -> None:
    """A policy that has learned is away from its reference: only rollout 0 and update 0 are looked at."""
    path = log(tmp_path / "a.log", {5: {"kl_loss": 2.0}}, {5: {"log_probs": -0.3, "ref_log_probs": -3.0}})
    for name in ("kl-jitter", "kl-between", "kl-configuration"):
        assert found(name, path) == []


def test_kl_of_a_folder_is_of_its_dumps(tmp_path: Path) -> None:
    """Without a log, the bands are of the dumps' own columns."""
    assert severities("kl-jitter", equal_run(tmp_path / "a", 1e-5)) == ["note"]
    assert severities("kl-between", equal_run(tmp_path / "b", 0.3)) == ["warning"]
    assert severities("kl-between", equal_run(tmp_path / "c")) == []


@pytest.mark.parametrize(
    ("log_prob", "severity"), [(-0.69, []), (-0.75, ["note"]), (-1.4, ["note"]), (-1.6, []), (0.1, [])]
)
def test_band_of_the_chat_template(log_prob: float, severity: list[str], tmp_path: Path) -> None:
    """-0.7 to -1.5 per token asks for the chat template; a note where nothing says that it is an instruct model."""
    path = log(tmp_path / "a.log", rollouts={0: {"log_probs": log_prob}})
    assert severities("chat-template-log-probs", path) == severity


def test_an_instruct_model_makes_it_a_warning(tmp_path: Path) -> None:
    """The same number is a warning where the launch names an instruct model."""
    path = log(tmp_path / "a.log", rollouts={0: {"log_probs": -0.8}})
    script = launch(tmp_path / "run.sh", "--hf-checkpoint /models/Qwen3-4B-Instruct-2507")
    assert severities("chat-template-log-probs", path, script) == ["warning"]


def test_large_log_probs_name_the_side_that_is_wrong(tmp_path: Path) -> None:
    """Where the engine finds its text likely and the trainer does not, the trainer's weights are named."""
    apart = log(tmp_path / "a.log", rollouts={0: {"log_probs": -5.0, "rollout_log_probs": -0.3}})
    alike = log(tmp_path / "b.log", rollouts={0: {"log_probs": -4.05, "rollout_log_probs": -4.05}})
    assert "the trainer's weights are others" in found("log-probs-large", apart)[0].message
    assert "says the same" in found("log-probs-large", alike)[0].message
    positive = log(tmp_path / "c.log", rollouts={0: {"log_probs": 0.5}})
    assert severities("log-probs-large", positive) == ["error"]


@pytest.mark.parametrize(
    ("gap", "severity"), [(0.02, []), (0.05, ["note"]), (0.2, ["warning"]), (1.2, ["error"]), (math.nan, [])]
)
def test_bands_of_the_gap(gap: float, severity: list[str], tmp_path: Path) -> None:
    """Trainer and engine: bf16 is silent, then a note, from slime's bound on a warning, above 1 an error."""
    path = log(tmp_path / "a.log", steps={0: {"train_rollout_logprob_abs_diff": gap}})
    assert severities("train-rollout-gap", path) == severity


def test_a_first_norm_alone_is_compared_with_the_clip(tmp_path: Path) -> None:
    """A run that died after its first update: ten times the clip is too much; several updates a rollout are exempt."""
    alone = log(tmp_path / "a.log", {0: {"grad_norm": 25.0}}, flags=ONE)
    small = log(tmp_path / "b.log", {0: {"grad_norm": 6.0}}, flags=ONE)
    many = log(tmp_path / "c.log", {0: {"grad_norm": 25.0}}, flags={"num_steps_per_rollout": 2})
    unknown = log(tmp_path / "d.log", {0: {"grad_norm": 25.0}})
    assert [len(found("step1-grad-norm", path)) for path in (alone, small, many, unknown)] == [1, 0, 0, 0]


def test_the_cure_for_experts_names_permute_fusion(tmp_path: Path) -> None:
    """Of a model with experts the cure begins with the flag that the guides name; with it, not."""
    path = log(tmp_path / "a.log", {0: {"grad_norm": 25.0}}, flags=ONE)
    without = launch(tmp_path / "a.sh", "--num-experts 64", "--num-steps-per-rollout 1")
    there = launch(tmp_path / "b.sh", "--num-experts 64", "--num-steps-per-rollout 1", "--moe-permute-fusion")
    assert found("step1-grad-norm", path, without)[0].fix.startswith("add --moe-permute-fusion")
    assert found("step1-grad-norm", path, there)[0].fix == catalogue()["step1-grad-norm"].fix


def test_updates_of_a_rollout_by_any_source(tmp_path: Path) -> None:
    """How many updates a rollout has: as set, by the batch sizes, by what the log shows."""
    both = log(tmp_path / "a.log", {n: {"loss": 0.1} for n in range(4)}, {n: {"raw_reward": 0.1} for n in range(2)})
    sizes = log(tmp_path / "b.log", {0: {"loss": 0.1}}, flags={"rollout_batch_size": 32, "n_samples_per_prompt": 8,
                                                               "global_batch_size": 256})  # fmt: skip
    series = [artefact for path in (both, sizes) for artefact in read(path) if isinstance(artefact, Series)]
    assert [updates_of(None, points) for points in series] == [2, 1]


@pytest.mark.parametrize(
    ("norms", "level"),
    [
        ((0.21, 0.21, 300.0, 3000.0, 9000.0), "0.21 at update 2"),
        ((0.2, 0.2, 300.0, 3000.0, 9000.0, 3e4, 9e4, 3e5, 9e5, 3e6), "0.2 at update 2"),
        ((0.2,) * 6 + (1.5, 1.6, 1.7, 9.0, 12.0, 30.0), "0.2 at update 9"),
        ((0.2, 0.2, 9.0, 9.0, 9.0), ""),  # forty times: the first updates may differ so much
        ((1e-4, 1e-4, 0.3, 0.3, 0.3), ""),  # and be next to nothing
        ((0.2, 300.0, 300.0, 300.0, 0.2), ""),
        ((0.2, 0.2, 300.0, 0.2, 300.0, 300.0), ""),
        ((0.1,) * 4 + tuple(0.1 * 1.01**k for k in range(400)), ""),  # fiftyfold, in hundreds of updates
    ],
)
def test_levels_of_gradient_norms(norms: tuple[float, ...], level: str, tmp_path: Path) -> None:
    """`grad-norm-explodes`: from update 2 on, and what has risen already is no level."""
    findings = found("grad-norm-explodes", *_norms(*norms)(tmp_path))
    assert len(findings) == bool(level)
    assert level in "".join(finding.message for finding in findings)


@pytest.mark.parametrize(
    ("metric", "values", "at"),
    [
        ("pg_loss", (-0.1,) * 8 + (-50.0, 60.0, -1e3), "step 8 pg_loss = -50"),
        ("kl_loss", (0.01,) * 8 + (3.0, 4.0, 9.0), "step 8 kl_loss = 3"),
        ("loss", (0.1, 0.1, 1e3, 1e4, 1e5), "step 2 loss = 1000"),
        ("kl_loss", (0.01,) * 8 + (0.5,) * 8, ""),
        ("loss", (0.1,) * 8 + (50.0, 0.1, 50.0), ""),
        ("loss", (20.0,) * 8 + (40.0,) * 8, ""),
        ("entropy_loss", (0.1,) * 8 + (1e3,) * 8, ""),
    ],
)
def test_losses_that_explode(metric: str, values: tuple[float, ...], at: str, tmp_path: Path) -> None:
    """`loss-explodes`: by absolute value, above 1 (10 at first), three updates in a row."""
    findings = found("loss-explodes", *_losses(*values, metric=metric)(tmp_path))
    assert len(findings) == bool(at)
    assert at in "".join(str(finding.where) for finding in findings)


def test_losses_that_explode_together_are_one_finding(tmp_path: Path) -> None:
    """The first is named with the others, and fp16 where the run has it."""
    path = log(tmp_path / "a.log", {n: dict.fromkeys(("loss", "kl_loss"), 0.1 if n < 6 else 1e3) for n in range(9)},
               flags={"fp16": True})  # fmt: skip
    (finding,) = found("loss-explodes", path)
    assert "so does kl_loss" in finding.message
    assert finding.fix.startswith("train in bf16")
    assert "--lr" in finding.fix


# -- rewards and curves


def test_groups_of_one_reward_each_teach_nothing(tmp_path: Path) -> None:
    """Groups that are each all right or all wrong have no advantage under GRPO, and have under PPO."""
    made = rollout(tmp_path / "run", samples(reward=lambda i: float(i // 4)))
    assert "each of 2 groups has one reward" in found("reward-constant", made)[0].message
    assert found("reward-constant", made, launch(tmp_path / "run.sh", "--advantage-estimator ppo")) == []


def test_a_thing_that_stays_is_said_once(tmp_path: Path) -> None:
    """Of a run whose rewards are constant in every rollout, the first is named; an evaluation is none of them."""
    for number in range(3):
        rollout(tmp_path / "run", samples(reward=0.0), number)
    rollout(tmp_path / "run", samples(reward=0.0), 0, evaluation=True)
    findings = found("reward-constant", tmp_path / "run")
    assert [Path(finding.where.path).name for finding in findings] == ["0.pt"]


@pytest.mark.parametrize(
    ("reward", "flags", "severity", "text"),
    [
        ({"score": 1.0}, None, "note", "must say which"),
        ({"score": 1.0}, ("--reward-key acc",), "error", "--reward-key is acc"),
        (1.0, ("--reward-key acc",), "error", "plain numbers"),
        (0.0, ("--rm-type math",), "warning", "no sample has a label"),
    ],
)
def test_keys_and_labels(
    reward: object, flags: tuple[str, ...] | None, severity: str, text: str, tmp_path: Path
) -> None:
    """Dicts without a key, with a wrong one, numbers with a key, and zeros without labels, each said as it is."""
    made = rollout(tmp_path / "run", samples(reward=reward, label=None))
    paths = (made,) if flags is None else (made, launch(tmp_path / "run.sh", *flags))
    findings = found("reward-key-data", *paths)
    assert [finding.severity or "error" for finding in findings] == [severity]
    assert text in findings[0].message


def test_own_code_takes_any_reward(tmp_path: Path) -> None:
    """With a function of the user's that takes the rewards, dicts are nobody's error."""
    made = rollout(tmp_path / "run", samples(reward={"score": 1.0}))
    script = launch(tmp_path / "run.sh", "--custom-reward-post-process-path a.b")
    assert found("reward-key-data", made, script) == []


def test_a_collapse_says_what_else_changed(tmp_path: Path) -> None:
    """Length and truncation that change with the reward stand in the message."""
    made = {n: {"raw_reward": v, "truncated": 0.1 if n < 12 else 0.9} for n, v in enumerate(COLLAPSE)}
    assert (
        "truncated responses 0.1 before, 0.9 now"
        in found("reward-collapse", log(tmp_path / "a.log", rollouts=made))[0].message
    )


def test_drift_of_trainer_and_engine_in_a_model_with_experts(tmp_path: Path) -> None:
    """A gap that grows fivefold beyond 0.1 is a finding; with R3 on, the cure is another one."""
    steps = {n: {"train_rollout_logprob_abs_diff": 0.02 * 1.2**n} for n in range(20)}
    off = log(tmp_path / "a.log", steps, flags=MOE)
    on = log(tmp_path / "b.log", steps, flags=MOE | {"use_rollout_routing_replay": True})
    steady = log(tmp_path / "c.log", {n: {"train_rollout_logprob_abs_diff": 0.02} for n in range(20)}, flags=MOE)
    assert "R3 is not on" in found("moe-collapse", off)[0].message
    assert "dump-routed-experts-missing" in found("moe-collapse", on)[0].fix
    assert found("moe-collapse", steady) == []


_VALUES = st.lists(st.floats(-10, 10, allow_nan=False), min_size=1, max_size=30)


def _points(values: list[float]) -> list[Point]:
    return [Point(number, value) for number, value in enumerate(values)]


@given(_VALUES)
def test_what_never_falls_has_not_collapsed(values: list[float]) -> None:
    """A curve that only rises has not fallen; of one that has, the floor lies below the level from there on."""
    assert falls(_points(sorted(values))) is None
    fall = falls(_points(values))
    if fall is not None:
        assert fall.now < fall.level
        assert all(value < fall.level for value in values[fall.since :])


@given(_VALUES, st.integers(0, 3))
def test_collapse_is_the_same_in_other_units(values: list[float], power: int) -> None:
    """A reward in other units falls at the same place, as long as its height counts."""
    scaled = [value * 2.0**power for value in values]
    fall, other = falls(_points(values), least=1e-3), falls(_points(scaled), least=1e-3 * 2.0**power)
    assert (fall is None) == (other is None)
    if fall is not None and other is not None:
        assert fall.since == other.since


@given(_VALUES, st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), max_size=5))
def test_numbers_that_are_none_do_not_decide(values: list[float], odd: list[float]) -> None:
    """NaN and infinities among the rewards change nothing of whether they fell."""
    plain, mixed = falls(_points(values)), falls(_points([*odd, *values]))
    assert (plain is None) == (mixed is None)


def test_no_rule_raises_on_odd_numbers(tmp_path: Path) -> None:
    """NaN and infinities in every metric make no rule of curves fail."""
    names = ("loss", "pg_loss", "log_probs", "ref_log_probs", "rollout_log_probs", "raw_reward", "kl_loss", "grad_norm",
             "entropy_loss", "train_rollout_logprob_abs_diff", "truncated")  # fmt: skip
    for value in (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308):
        metrics = {n: dict.fromkeys(names, value) for n in range(12)}
        path = log(tmp_path / "a.log", metrics, metrics, flags={"num_experts": "many", "clip_grad": "nan"})
        for name in catalogue():
            if catalogue()[name].inputs in ((Series,), (Metrics,)):
                found(name, path)


def test_the_reader_gives_what_the_rules_ask_for(tmp_path: Path) -> None:
    """A folder's series has the dumps' own means under the trainers' names."""
    artefacts = read(equal_run(tmp_path / "run"))
    series = next(artefact for artefact in artefacts if isinstance(artefact, Series))
    assert any(isinstance(artefact, TrainStep) for artefact in artefacts)
    assert [point.number for point in curve(series, "rollout", "log_probs")] == [0]

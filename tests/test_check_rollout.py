"""The checks of rollout engines: each fault is found and named, a sound engine passes, and the command says so."""

# ruff: noqa: ARG002, D102 - the methods of engines are the interface's

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import Repo
from hypothesis import given
from hypothesis import strategies as st
from nightly_kit import nightly_run
from rollout_engines_kit import FAULTS, LosesMemory, RefusesSeeds, Sound, ulps

from repro.nightly.checks import finding_check, rollout_checks
from repro.nightly.records import NightlyRun
from repro_bisect.axes.commits import resolve
from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case, find_case
from repro_golden.case.tables import CHECKS
from repro_golden.engine_checks.checks import check
from repro_golden.engine_checks.findings import EngineCheck, Likeness, Plan, compare, exit_code, expectations, joined
from repro_golden.repository.checkout import find_checkout

PLAN = Plan(prompts=8, alone=2, shortest=2, longest=6, response=2, scale=0.5)
ELSEWHERE = {"batch-of-32": "not applicable"}
"""Of eight prompts."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models this small gain nothing by more, and wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Answer:
    """A response as plain lists."""

    tokens: list[int]
    log_probs: list[float]
    prompt_log_probs: list[float] | None = None


# -- comparing

numbers = st.floats(width=32)
answers = st.lists(st.tuples(st.integers(0, 5), numbers), min_size=1, max_size=5).flatmap(
    lambda pairs: st.builds(
        lambda prompt: Answer([t for t, _ in pairs], [p for _, p in pairs], prompt),
        st.none() | st.lists(numbers, max_size=4),
    )
)
many = st.lists(answers, min_size=1, max_size=4)


@given(many)
def test_equal_bits_are_equal(answers: list[Answer]) -> None:
    """NaN and the zeros too: a copy has no difference, and every value of it was looked at."""
    rows = list(range(len(answers)))
    like = compare(rows, answers, [replace(finding) for finding in answers])
    assert like.equal and like.widest is None and like.differing == 0
    assert like.values == sum(2 * len(answer.tokens) + len(answer.prompt_log_probs or []) for answer in answers)


@given(many, many)
def test_both_directions_agree(a: list[Answer], b: list[Answer]) -> None:
    """Swapping the sides swaps the values alone, and what is said survives JSON."""
    count = min(len(a), len(b))
    rows, a, b = list(range(count)), a[:count], b[:count]
    there, back = compare(rows, a, b), compare(rows, b, a)
    assert (there.differing, there.values, there.widest) == (back.differing, back.values, back.widest)
    if there.first and back.first:
        assert (there.first.where, there.first.gap, there.first.ulp) == (
            back.first.where,
            back.first.gap,
            back.first.ulp,
        )
    text = json.dumps(there.to_mapping(), allow_nan=False)
    assert Likeness.from_mapping(json.loads(text)).to_mapping() == there.to_mapping()
    assert joined([compare([k], [x], [y]) for k, x, y in zip(rows, a, b, strict=True)]).to_mapping() == json.loads(text)


@given(
    st.lists(st.floats(-30, -0.0009765625, width=32), min_size=2, max_size=6),
    st.integers(0, 5), st.integers(1, 9), st.sampled_from(["prompt log-probs", "log-probs"]), st.integers(0, 2),
)  # fmt: skip
def test_a_planted_difference_is_found(values: list[float], at: int, count: int, part: str, row: int) -> None:
    """With its prompt, its token and its size in units of the last place; what follows it is not the first."""
    at %= len(values)
    sound = Answer(list(range(len(values))), values, list(values))
    off = [ulps(v, count) if k >= at else v for k, v in enumerate(values)]
    wrong = replace(sound, **{"log_probs" if part == "log-probs" else "prompt_log_probs": off})
    like = compare([4, 5, 6], [sound] * 3, [wrong if k >= row else sound for k in range(3)])
    assert like.first and like.first.prompt == 4 + row and like.first.part == part
    assert like.first.position == (at if part == "log-probs" else at + 1) and like.first.ulp == count
    assert like.first.gap == abs(off[at] - values[at]) and like.differing == 3 - row
    assert like.widest == max(abs(x - y) for x, y in zip(off, values, strict=True))


def test_other_tokens_end_a_comparison() -> None:
    """Log-probs behind the first other token have another past; a response that ended has no token there."""
    like = compare([0], [Answer([1, 2, 3], [-1.0, -2.0, -3.0])], [Answer([1, 5, 3], [-1.0, -9.0, -9.0])])
    assert like.first and (like.first.where, like.first.size) == ("prompt 0, token 1, tokens", "2 / 5")
    assert like.values == 3 and like.widest is None
    shorter = compare([2], [Answer([1, 2], [-1.0, -2.0])], [Answer([1], [-1.0])]).first
    assert shorter and (shorter.where, shorter.size) == ("prompt 2, token 1, tokens", "2 / none")


def test_what_is_no_number_is_compared_by_its_bits() -> None:
    """-0.0 is not 0.0, and NaN is not another NaN: no size is claimed of what has none."""
    (other,) = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))
    for a, b, size in [(0.0, -0.0, "0 (0 ULP)"), (math.nan, other, "nan / nan"), (-math.inf, -1.0, "-inf / -1.0")]:
        first = compare([0], [Answer([1], [a])], [Answer([1], [b])]).first
        assert first and first.size == size
    first = compare([0], [Answer([1], [-0.1])], [Answer([1], [math.nextafter(-0.1, 0)])]).first
    assert first and first.size.endswith("(1 ULP of fp64)")


def test_nothing_compared_is_no_agreement() -> None:
    """No pair at all, or lists of other lengths, is an error."""
    with pytest.raises(ValueError, match="cannot be compared"):
        compare([], [], [])
    for answer, why in ((Answer([], []), "with no token"), (Answer([1, 2], [-1.0]), "1 log-probs for 2 tokens")):
        with pytest.raises(ReproError, match=why):
            compare([0], [answer], [answer])
    with pytest.raises(ValueError, match="cannot be compared"):
        compare([0], [Answer([1], [0.0])], [])


@given(st.integers(3, 80), st.integers(1, 40), st.integers(0, 3))
def test_no_prompt_is_another_ones_prefix(vocabulary: int, prompts: int, seed: int) -> None:
    """Where ids suffice no two begin alike; all are in the vocabulary, of lengths as asked, and always the same."""
    plan = replace(PLAN, prompts=prompts, seed=seed)
    drawn = plan.drawn(vocabulary)
    assert drawn == plan.drawn(vocabulary) and len(drawn) == prompts
    assert all(2 <= len(p) <= 6 and all(1 <= t < vocabulary - 1 for t in p) for p in drawn)
    assert len({p[0] for p in drawn}) == min(prompts, vocabulary - 2)
    assert not set(plan.seeds()) & set(plan.seeds(other=True))


# -- engines


def outcomes(findings: list[EngineCheck]) -> dict[str, str]:
    return {finding.name: finding.outcome for finding in findings}


def test_a_sound_engine_passes_every_check() -> None:
    """All comes out as it must, the weights are those it had, and each check says what it compared."""
    engine = Sound()
    before = {name: tensor.clone() for name, tensor in engine.policy.state_dict().items()}
    findings = check(engine, PLAN)
    wanted = {name: "differs" if word == "any" else word for name, word in CHECKS.items()} | ELSEWHERE
    assert outcomes(findings) == wanted and exit_code(findings) == 0
    assert all(
        finding.likeness and finding.likeness.values > 8 for finding in findings if finding.name not in ELSEWHERE
    )
    assert all((before[name] == tensor).all() for name, tensor in engine.policy.state_dict().items())
    assert engine.weight_version == "0"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_is_found_and_named(fault: Callable[[], Sound]) -> None:
    """By the checks that it concerns, and by no other."""
    findings = check(fault(), PLAN)
    assert {finding.name for finding in findings if not finding.passed} == set(FAULTS[fault]) - {"unseeded"}
    assert exit_code(findings) == 1
    for finding in findings:
        assert FAULTS[fault].get(finding.name, "") in finding.detail


class Says(Sound):
    """Answers every prompt with something that is no answer, each time the same."""

    spoil: dict[str, Any]

    def generate(self, prompts: Any, sampling: Any, seeds: Any) -> Any:
        answers = super().generate(prompts, sampling, seeds)
        asked = {"prompt_log_probs"} if sampling.prompt_log_probs else set()
        return [
            replace(a, **{k: v for k, v in self.spoil.items() if k in asked | {"tokens", "log_probs"}}) for a in answers
        ]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ({"prompt_log_probs": [math.nan]}, "is not finite"),
        ({"prompt_log_probs": None}, "gave no log-probs of prompt"),
        ({"prompt_log_probs": []}, "gave 0 log-probs for"),
        ({"log_probs": None}, "gave no log-probs of the engine's answer"),
        ({"log_probs": [-1.0, -(10**400)]}, "is not finite"),
        ({"prompt_log_probs": [-1.0] * 9}, "gave 9 log-probs for"),
        ({"log_probs": [-1.0] * 3}, "gave 3 log-probs for 2 tokens"),
        ({"log_probs": ["-1", None]}, "is no number"),
        ({"tokens": [], "log_probs": []}, "with no token"),
    ],
)
def test_what_is_no_answer_agrees_with_nothing(spoil: dict[str, Any], why: str) -> None:
    """Not even with itself, though it comes back bit for bit; and it ends no check in a traceback."""
    engine = Says()
    engine.spoil = spoil
    findings = check(engine, PLAN, ["run-to-run", "seed"])
    assert findings[0].outcome == "failed" and why in findings[0].detail and exit_code(findings) == 2


def test_whole_log_probs_are_numbers_and_a_plan_samples_something() -> None:
    """An engine may give integers; a plan of no prompt, or of no id, is refused."""
    engine = Says()
    engine.spoil = {"log_probs": [-1, -2]}
    assert outcomes(check(engine, PLAN, ["run-to-run"])) == {"run-to-run": "equal"}
    for wrong in ({"prompts": 0}, {"vocabulary": 2}):
        with pytest.raises(ReproError, match="a plan needs a prompt"):
            replace(PLAN, **wrong)


def test_the_first_difference_is_named() -> None:
    """Prompt, token, part and size of a log-prob that is two units off in a batch of two."""
    (fault,) = (fault for fault in FAULTS if fault.__name__ == "OfItsBatch")
    (outcome,) = check(fault(), PLAN, ["batch-of-2"])
    assert outcome.likeness and outcome.likeness.first
    assert outcome.likeness.first.where == "prompt 0, token 1, log-probs" and outcome.likeness.first.ulp == 1


def test_lost_weights_are_brought_again() -> None:
    """An engine that says what it lost is given it, and must sample as before."""
    (finding,) = check(LosesMemory(), PLAN, ["memory"])
    assert finding.outcome == "equal" and finding.detail.endswith("; 1 tensor did not survive it and was brought again")


def test_seeds_that_are_refused() -> None:
    """What needs them does not apply, and the seed counts as ignored."""
    by_check = outcomes(check(RefusesSeeds(), PLAN))
    assert by_check["seeded-run-to-run"] == by_check["seeded-batch"] == "not applicable"
    assert (by_check["seed"], by_check["unseeded"]) == ("equal", "differs")


class Noisy(Sound):
    """Honours seeds, but every other time draws another token."""

    def generate(self, prompts: Any, sampling: Any, seeds: Any) -> Any:
        answers = super().generate(prompts, sampling, seeds)
        if sampling.temperature and self.calls % 2:
            answers[0] = replace(answers[0], tokens=[1 + answers[0].tokens[0], *answers[0].tokens[1:]])
        return answers


def test_seeds_of_an_engine_that_does_not_repeat_its_bits() -> None:
    """They are honoured all the same where first tokens come again far more often than by chance."""
    findings = {
        finding.name: finding
        for finding in check(Noisy(), replace(PLAN, prompts=16), [n for n in CHECKS if "seed" in n])
    }
    assert findings["seeded-run-to-run"].outcome == "differs" and "ignored" not in findings["seeded-run-to-run"].detail
    assert findings["seed"].outcome == "differs" and findings["seed"].passed


def test_an_engine_without_weights_of_its_own() -> None:
    """Its memory and weights are the trainer's: those checks do not apply, with the reason."""
    engine = Sound()
    engine.separate = False
    findings = check(engine, PLAN)
    away = {finding.name: finding.detail for finding in findings if finding.outcome == "not applicable"}
    assert set(away) == {"batch-of-32", "memory", "weight-update", "weight-reversal"} and exit_code(findings) == 0
    assert "the trainer's own" in away["memory"]
    assert exit_code(check(engine, PLAN, ["memory"])) == 3


class Uncached(Sound):
    """Keeps no prefix cache, as SGLang with most backends in deterministic mode."""

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"flags": {"disable_radix_cache": True}}


def test_an_engine_without_a_prefix_cache() -> None:
    """Where nothing can be warm, two cold runs are no proof: the check does not apply, with the reason."""
    (finding,) = check(Uncached(), PLAN, ["prefix-cache"])
    assert (finding.outcome, finding.likeness) == ("not applicable", None) and exit_code([finding]) == 3
    assert finding.detail == "the engine keeps no prefix cache (disable_radix_cache)"


class Dies(Sound):
    """After a number of batches."""

    def generate(self, *given: Any) -> Any:
        if self.calls >= 4:
            raise ValueError("the engine\ndied (log x.log)")
        return super().generate(*given)


class Short(Sound):
    """Leaves the last response out."""

    def generate(self, *given: Any) -> Any:
        return super().generate(*given)[:-1]


class Refuses(Sound):
    """An update."""

    def take(self, tensors: Any) -> None:
        raise RuntimeError("no update now")


def test_an_engine_that_dies() -> None:
    """What it failed in is named with its words on one line, what comes after was not made, and the code is 2."""
    findings = check(Dies(), PLAN)
    assert exit_code(findings) == 2 and {hit.outcome for hit in findings} == {"failed"}
    assert findings[0].detail == "the engine died (log x.log)"
    assert {finding.detail for finding in findings[1:]} == {"not made: run-to-run failed"}
    (short,) = check(Short(), PLAN, ["shuffled"])
    assert short.outcome == "failed" and short.detail == "the engine gave 7 responses to 8 prompts"


def test_an_update_that_is_refused() -> None:
    """It is no pass, and the reversal is not tried from weights that nobody knows; other checks are made."""
    findings = {finding.name: finding for finding in check(Refuses(), PLAN)}
    assert findings["weight-update"].detail == "no update now" and findings["memory"].outcome == "equal"
    assert findings["weight-reversal"].detail == "not made: the update before it failed"


def test_other_results_may_be_expected() -> None:
    """What must come out is a parameter; words and names that are none are refused."""
    (fault,) = (fault for fault in FAULTS if fault.__name__ == "OfItsBatch")
    expected = expectations({"batch-of-2": "differs", "batch-of-8": "any", "seeded-batch": "any"})
    assert exit_code(check(fault(), PLAN, expected=expected)) == 0
    assert exit_code(check(Sound(), PLAN, expected=expected)) == 1
    with pytest.raises(ReproError, match="no rollout check 'batch'; known: run-to-run"):
        expectations({"batch": "any"})
    with pytest.raises(ReproError, match="say equal, differs or any"):
        expectations({"seed": "ignored"})
    with pytest.raises(ReproError, match="no rollout check"):
        check(Sound(), PLAN, ["batch"])


# -- the night


@pytest.mark.parametrize(
    ("name", "outcome", "status"),
    [
        ("run-to-run", "equal", "green"),
        ("run-to-run", "differs", "flaky"),
        ("seeded-run-to-run", "differs", "flaky"),
        ("batch-of-8", "differs", "changed"),
        ("seed", "differs", "green"),
        ("seed", "equal", "changed"),
        ("unseeded", "differs", "green"),
        ("memory", "failed", "error"),
    ],
)
def test_findings_are_checks_of_a_night(name: str, outcome: Any, status: str) -> None:
    """Green where it is as it must be; what does not repeat itself is flaky, what else is not right is changed."""
    like = compare([3], [Answer([1], [-1.0])], [Answer([1], [-2.0])])
    check = finding_check(EngineCheck(name, outcome, CHECKS[name], "words", like))
    assert (check.name, check.status) == (f"rollout {name}", status)
    assert ("first at prompt 3, token 0, log-probs: 1 (8388608 ULP)" in check.text) == (outcome == "differs")
    kept = nightly_run(checks=[check])
    assert NightlyRun.from_mapping(json.loads(json.dumps(kept.to_mapping()))).checks == [check]


def asked(case: Case, value: Any) -> Case:
    return Case.model_validate(case.model_dump() | {"nightly": {"rollout": value}})


@pytest.mark.whole
def test_a_night_asks_the_engine(fork: Repo) -> None:
    """The checks that a case names are made on a commit's code; by default none are; names and kinds are checked."""
    checkout = find_checkout(fork.root)
    plain = find_case(checkout.root, "mini")
    commit = resolve(checkout, "HEAD")
    messages: list[str] = []

    def made(case: Case) -> dict[str, tuple[str, str]]:
        checks = rollout_checks(checkout, case, commit, "", lambda event: messages.append(str(event)))
        return {finding.name: (finding.status, finding.text) for finding in checks}

    assert made(plain) == {} and not messages
    facts = made(asked(plain, ["run-to-run", "seed", "memory"]))
    assert list(facts) == ["rollout", "rollout run-to-run", "rollout seed"]
    assert {status for status, _ in facts.values()} == {"green"} and len(messages) == 1
    assert facts["rollout"][1].startswith("policy ") and "; memory does not apply (" in facts["rollout"][1]
    assert asked(plain, True).digest == plain.digest and asked(plain, True).nightly.rollout is True
    fork.edit("core/repro_core/rollout/sampler.py", "def _draw(", "raise OSError('no luck')\n\n\ndef _draw(")
    commit = fork.commit("Break the sampler")
    assert {status for status, _ in made(asked(plain, True)).values()} == {"error"}
    with pytest.raises(ValueError, match="no rollout check 'seeds'"):
        asked(plain, ["seeds"])


# -- the command

FREE = [word for name, next_ in pairwise([*CHECKS, ""]) if "batch" in name for word in ("--expect", f"{name}=any")]
"""How the built-in sampler rounds in a batch is the machine's own."""


def test_the_command(fork: Repo) -> None:
    """A table with every check, the engine, and the command that does it again; its twin in JSON has all of it."""
    done = fork.repro("check", "rollout", "mini", *FREE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"| {name} " in done.stdout for name in CHECKS)
    assert done.stdout.startswith("mini: 9 checks are as wanted\nengine: policy ")
    assert done.stdout.endswith(f"reproduce with: repro check rollout mini {' '.join(FREE)}\n")
    told = fork.repro("check", "rollout", "--only", "run-to-run", "--expect", "run-to-run=differs", "--json")
    data = json.loads(told.stdout)
    assert told.returncode == data["exit_code"] == 1
    (finding,) = data["findings"]
    assert (finding["outcome"], finding["expected"], finding["fits"]) == ("equal", "differs", False)
    assert finding["likeness"]["values"] > 1000 and data["engine"]["name"] == "policy"


def test_an_engine_that_cannot_start(fork: Repo) -> None:
    """One line with what it said and the file of its output; nothing is claimed of determinism."""
    done = fork.repro("check", "rollout", "--set", "model.hidden_size=15")
    assert done.returncode == 2 and done.stdout == ""
    assert "the rollout engine of mini failed" in done.stderr and "(output in /" in done.stderr
    assert "hidden_size 15" in done.stderr and "Traceback" not in done.stderr

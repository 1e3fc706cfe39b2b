"""Rules about rollout dumps: each with a dump that it finds something in, and one that is in order."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doctor_dump_kit import Change, config, each, found, launch, one, rollout, spoken, with_experts
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st
from rollout_dump_kit import drawn_dumps

from repro.doctor.catalogue import catalogue
from repro.doctor.examine import FAULT, examine, look
from repro.doctor.facts.samples.rounding import narrow_dtype, rounded_decimals, rounded_digits
from repro.doctor.facts.samples.tool_spans import spans_of, tokens_inside
from repro.doctor.rules.dumps.rollouts import RULES
from repro_golden.base.systems import SYSTEMS
from repro_golden.dumps.rollout.checks import RULES as CHECKS
from repro_golden.dumps.rollout.files import RolloutDump, write_rollout_dump

SAMPLED, SILENT = [-0.5] * 18, [-0.5] * 3 + [0.0] * 13 + [-0.5] * 2
OUT = [1] * 3 + [0] * 13 + [1] * 2
TOOL = ["I ", "call", ".", "<tool_response>", "\n", *["data "] * 10, "</tool_response>", " So", " 4"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_dumps_in_order_have_nothing(tmp_path: Path, system: Any) -> None:
    """No rule of dumps finds anything in a dump that is in order, with routed experts, a launch and a config."""
    path = rollout(tmp_path / "rollout_data" / "3.pt", with_experts(), system=system)
    script, model = launch(tmp_path, "--use-rollout-routing-replay"), config(tmp_path)
    rules = [rule.id for rule in catalogue().values() if rule.id.startswith(("dump-", "loss-mask", "tool-"))]
    assert len(rules) > 35
    assert not examine(look([path.parent, script, model]), only=rules).findings


def test_every_check_of_the_library_is_a_rule() -> None:
    """All checks of `repro rollout show` are there, under their names or those of the guides' table.

    All but two: `reward-constant` and `truncated-ratio` say these with more of the run before them.
    """
    elsewhere = {"reward-equal", "truncated"}
    renamed = {"experts-missing": "dump-routed-experts-missing", "versions-in-batch": "dump-weight-versions"}
    kept = [check.id for check in CHECKS if check.id not in elsewhere]
    assert len(kept) == len(CHECKS) - len(elsewhere)
    assert [rule.id for rule in RULES] == [renamed.get(name, f"dump-{name}") for name in kept]
    assert {"reward-constant", "truncated-ratio"} <= catalogue().keys()
    assert all(rule.title and rule.sources for rule in RULES)


def test_many_findings_of_one_rule_are_counted(tmp_path: Path) -> None:
    """The first three samples are named, the rest counted, the evidence is the first."""
    (finding,) = found(
        "dump-log-probs-positive", rollout(tmp_path / "3.pt", each(rollout_log_probs=[-1.0, 0.5, -1.0, -2.0]), groups=5)
    )
    assert "sample 2" in finding.message and "sample 3:" not in finding.message
    assert finding.message.endswith("and 7 more, 10 in all") and finding.where.item == "rollout_log_probs of sample 0"


@pytest.mark.parametrize("rule", ["dump-group-size", "dump-sample-count"])
def test_sizes_by_the_launch(tmp_path: Path, rule: str) -> None:
    """Groups and the rollout are held against the launch; a function of the user's own may make other ones."""
    fits = rollout(tmp_path / "fits" / "3.pt")
    short = rollout(tmp_path / "short" / "3.pt", lambda dump: dump.samples.pop())
    assert not found(rule, fits, launch(tmp_path / "a"))
    (finding,) = found(rule, short, launch(tmp_path / "a"))
    assert finding.severity == {"dump-group-size": "error", "dump-sample-count": "warning"}[rule]
    assert ("not 2" if rule == "dump-group-size" else "3 samples") in finding.message
    assert not examine(look([short]), only=[rule]).findings, "without a launch nothing is known"
    artefact = launch(tmp_path / "own", "--custom-generate-function-path", "my.generate")
    (softer,) = found(rule, short, artefact)
    assert softer.severity == {"dump-group-size": "warning", "dump-sample-count": "note"}[rule]
    evaluation = rollout(tmp_path / "eval" / "eval_3.pt", lambda dump: dump.samples.pop())
    assert not found(rule, evaluation, launch(tmp_path / "a"))


def test_samples_of_one_execution_count_once(tmp_path: Path) -> None:
    """Samples that share a rollout_id are one of the n_samples_per_prompt: "dump-sample-count", "dump-group-size"."""

    def siblings(dump: RolloutDump) -> None:
        more = {**dump.samples[3], "tokens": [5, 6, 7, 1, 2, 3, 4], "rollout_id": 44}
        dump.samples[3]["rollout_id"] = 44
        dump.samples.append(more)

    path = rollout(tmp_path / "3.pt", siblings)
    assert not found("dump-sample-count", path, launch(tmp_path))
    assert not found("dump-group-size", path, launch(tmp_path))


def test_routed_experts_are_missing(tmp_path: Path) -> None:
    """Under --use-rollout-routing-replay every sample has routed experts: "dump-routed-experts-missing"."""
    rule = "dump-routed-experts-missing"
    bare, whole = rollout(tmp_path / "a" / "3.pt"), rollout(tmp_path / "b" / "3.pt", with_experts())
    r3, without = launch(tmp_path / "r3", "--use-rollout-routing-replay"), launch(tmp_path / "no")
    (finding,) = found(rule, bare, r3)
    assert finding.severity == "error" and "4 in all" in finding.message
    assert not found(rule, whole, r3) and not found(rule, bare, without) and not found(rule, bare)


def test_routed_experts_against_the_model(tmp_path: Path) -> None:
    """Shape and range are those of the model: "dump-experts-out-of-range", "dump-experts-shape"."""
    path = rollout(tmp_path / "3.pt", with_experts())
    assert not found("dump-experts-out-of-range", path, config(tmp_path))
    (finding,) = found("dump-experts-out-of-range", path, config(tmp_path, num_experts=4))
    assert finding.severity == "error" and "the model has 4" in finding.message
    assert not found("dump-experts-shape", path, config(tmp_path))
    (other,) = found("dump-experts-shape", path, config(tmp_path, num_hidden_layers=3))
    assert "not [6, 3, 2]" in other.message
    dense = config(tmp_path, num_hidden_layers=3, num_experts=None, num_experts_per_tok=None)
    assert not found("dump-experts-shape", path, dense), "a dense model says nothing of experts"


# -- weights


@pytest.mark.parametrize(("oldest", "wrong"), [("7", False), ("6", False), ("5", True), ("default", False)])
def test_stale_weights(tmp_path: Path, oldest: str, wrong: bool) -> None:
    """One update behind is what sampling ahead explains, two are stale: "dump-stale-weights"."""
    path = rollout(tmp_path / "3.pt", one(1, weight_versions=[oldest, "7"]))
    findings = found("dump-stale-weights", path)
    assert bool(findings) == wrong
    if wrong:
        assert "versions 5 to 7" in findings[0].message and findings[0].where.item == "weight_versions of sample 1"
        assert not found("dump-stale-weights", path, launch(tmp_path, "--max-staleness", "2"))


def test_several_weights_are_expected_of_asynchronous_runs(tmp_path: Path) -> None:
    """There it is a note: "dump-weight-versions"."""
    path = rollout(tmp_path / "3.pt", one(0, weight_versions=["6"]))
    assert found("dump-weight-versions", path, launch(tmp_path / "a"))[0].severity == "warning"
    assert found("dump-weight-versions", path, launch(tmp_path / "b", entry="train_async.py"))[0].severity == "note"


def test_many_weights_are_counted_in_their_order(tmp_path: Path) -> None:
    """Versions stand by number, the first five of them, and how many there are: "dump-weight-versions"."""
    listed = ["1", "10", "2", "11", "9", "3", "default"]
    path = rollout(tmp_path / "3.pt", each(weight_versions=lambda i: listed[2 * i : 2 * i + 2]))
    (finding,) = found("dump-weight-versions", path)
    plain = finding.message.replace("'", "")
    assert "1 (1 sample), 2 (1 sample), 3 (1 sample), 9 (1 sample), 10 (1 sample) and 2 more (7 versions)" in plain
    (finding,) = found("dump-versions-in-sample", rollout(tmp_path / "4.pt", one(0, weight_versions=listed)))
    assert "1, 2, 3, 9, 10 and 2 more (7 versions)" in finding.message.replace("'", "")


@pytest.mark.parametrize(
    ("flags", "entry", "wrong"),
    [
        ((), "train.py", [1, 2, 3]),
        ((), "train_async.py", [2, 3]),
        (("--update-weights-interval", "3"), "train.py", [3]),
        (("--debug-rollout-only",), "train.py", []),
    ],
)
def test_weights_that_never_change(tmp_path: Path, flags: tuple[str, ...], entry: str, wrong: list[int]) -> None:
    """Later rollouts of a run have newer weights, as far as the launch says: "dump-weights-never-updated"."""
    for number in range(4):
        rollout(tmp_path / "stuck" / "rollout_data" / f"{number}.pt", rollout_id=number)
        version = each(weight_versions=[str(number)])
        rollout(tmp_path / "moving" / "rollout_data" / f"{number}.pt", version, rollout_id=number)
    script = launch(tmp_path, *flags, entry=entry)
    findings = found("dump-weights-never-updated", tmp_path / "stuck", script)
    assert [Path(finding.where.path).stem for finding in findings] == [str(number) for number in wrong]
    assert {finding.severity for finding in findings} <= {"warning"}
    assert not found("dump-weights-never-updated", tmp_path / "moving", script)


# -- texts, padding, masks


@pytest.mark.parametrize(
    ("field", "value", "wrong"),
    [
        ("prompt", "  ", True),
        ("prompt", [{"role": "user", "content": ""}], True),
        ("prompt", [{"role": "user", "content": "1 + 1"}], False),
        ("prompt", [{"role": "user", "content": [{"type": "image"}]}], False),
        ("response", " \n", True),
        ("response", "4", False),
    ],
)
def test_empty_texts(tmp_path: Path, field: str, value: Any, wrong: bool) -> None:
    """An empty prompt or response of some samples is a warning, of all a note: "dump-empty-text"."""
    some = found("dump-empty-text", rollout(tmp_path / "a" / "3.pt", one(1, **{field: value})))
    every = found("dump-empty-text", rollout(tmp_path / "b" / "3.pt", each(**{field: value})))
    assert [finding.severity for finding in some] == ["warning"] * wrong
    assert [finding.severity for finding in every] == ["note"] * wrong


def test_padding(tmp_path: Path) -> None:
    """By the model's own padding token, at either end, or by a batch made a rectangle: "dump-padded"."""
    left = one(0, tokens=[0] * 5 + [5, 6, 7, 10, 11, 12, 2])
    model = config(tmp_path, pad_token_id=0, eos_token_id=2)
    (finding,) = found("dump-padded", rollout(tmp_path / "a" / "3.pt", left), model)
    assert finding.certainty == "certain" and "beginning" in finding.message and finding.where.value == "0 x 5"
    assert not found("dump-padded", rollout(tmp_path / "b" / "3.pt", left)), "a run alone may be text"

    def rectangle(dump: RolloutDump) -> None:
        for number, sample in enumerate(dump.samples):
            sample["tokens"] = [5, 6, 7, *[10] * number, *[0] * (12 - number)]
            sample |= {"response_length": 12, "loss_mask": None, "rollout_log_probs": None}

    assert found("dump-padded", rollout(tmp_path / "c" / "3.pt", rectangle))
    loop = {"tokens": [5, 6, 7, *[9] * 12], "response_length": 12, "loss_mask": None, "status": "truncated"}
    stuck = rollout(tmp_path / "d" / "3.pt", one(0, **loop, rollout_log_probs=[0.0] * 12))
    assert not found("dump-padded", stuck), "a model that is sure of its loop"


def test_masks_by_a_filter(tmp_path: Path) -> None:
    """Where filters removed all samples it is a warning: "loss-mask-all-zero"."""
    (finding,) = found("loss-mask-all-zero", rollout(tmp_path / "3.pt", each(remove_sample=True)))
    assert finding.severity == "warning" and finding.where.item == "remove_sample"
    mixed = rollout(tmp_path / "b" / "3.pt", each(loss_mask=[0] * 4), one(1, loss_mask=[0, 1, 0, 0]))
    assert not found("loss-mask-all-zero", mixed)


def test_a_response_that_is_all_of_the_sample(tmp_path: Path) -> None:
    """All tokens are response though there is a prompt: "loss-mask-whole-prompt"."""
    whole = {"response_length": 7, "rollout_log_probs": [-1.0] * 7}
    (finding,) = found("loss-mask-whole-prompt", rollout(tmp_path / "a" / "3.pt", one(0, **whole, loss_mask=[1] * 7)))
    assert "all 7 tokens" in finding.message
    masked = rollout(tmp_path / "b" / "3.pt", one(0, **whole, loss_mask=[0, 0, 0, 1, 1, 1, 1]))
    assert not found("loss-mask-whole-prompt", masked)


# -- answers of tools


@pytest.mark.parametrize(
    ("mask", "log_probs", "expected"),
    [
        ([1] * 18, SILENT, ("error", "certain")),
        ([1] * 18, None, ("warning", "likely")),
        ([1] * 18, SAMPLED, ("note", "possible")),
        (None, SILENT, ("error", "certain")),
        (OUT, SILENT, None),
        (OUT, None, None),
    ],
)
@pytest.mark.parametrize("decoded", [False, True], ids=["by its text", "by its tokens"])
def test_answers_of_tools(tmp_path: Path, mask: Any, log_probs: Any, expected: Any, decoded: bool) -> None:
    """Whether they are in the loss, and how sure it is: "tool-response-in-loss"."""
    more = {"decoded_tokens": ["a", "b", "c", *TOOL]} if decoded else {}
    path = rollout(tmp_path / "3.pt", spoken(TOOL, mask, log_probs, **more), system="relax")
    findings = found("tool-response-in-loss", path)
    assert [(finding.severity, finding.certainty) for finding in findings] == ([expected] if expected else [])


def test_a_mask_that_is_off_by_a_turn(tmp_path: Path) -> None:
    """With the text of each token a mask that leaves out other tokens is seen: "tool-response-in-loss"."""
    late = [1] * 12 + [0] * 6
    more = {"decoded_tokens": ["a", "b", "c", *TOOL]}
    (finding,) = found(
        "tool-response-in-loss", rollout(tmp_path / "3.pt", spoken(TOOL, late, None, **more), system="relax")
    )
    assert "7 of 9 tokens" in finding.message and "response token 5 on" in finding.message


def test_two_answers_and_one_gap(tmp_path: Path) -> None:
    """By the text alone: a mask with fewer gaps than answers leaves one of them in: "tool-response-in-loss"."""
    answer = ["<interpreter>", *["out "] * 10, "</interpreter>"]
    words = ["a ", *answer, " b ", *answer, " c"]
    both, first = [1, *[0] * 12, 1, *[0] * 12, 1], [1, *[0] * 6, *[1] * 20]
    (finding,) = found("tool-response-in-loss", rollout(tmp_path / "a" / "3.pt", spoken(words, first, None)))
    assert (finding.severity, finding.certainty) == ("warning", "possible")
    assert not found("tool-response-in-loss", rollout(tmp_path / "b" / "3.pt", spoken(words, both, None)))


def test_tool_messages_in_metadata(tmp_path: Path) -> None:
    """A tool message of the metadata that stands in the response: "tool-response-in-loss"."""
    answer = "the weather in Paris is fine"
    words = ["I ", "ask. ", *[f"{word} " for word in answer.split()], "Good."]
    told = {"messages": [{"role": "assistant", "content": "I ask."}, {"role": "tool", "content": answer}]}
    trained = rollout(tmp_path / "a" / "3.pt", spoken(words, [1] * 9, None, metadata=told))
    (finding,) = found("tool-response-in-loss", trained)
    assert (finding.severity, finding.certainty) == ("warning", "certain")
    assert not found("tool-response-in-loss", rollout(tmp_path / "b" / "3.pt", spoken(words, [1] * 9, None)))


def test_tokens_by_a_tokenizer(tmp_path: Path) -> None:
    """A tokenizer's folder says which token is which text: "tool-response-in-loss"."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = [f"w{i}" for i in range(100)] + ["I", "<tool_response>", "data", "</tool_response>", "So"]
    Tokenizer(WordLevel({word: i for i, word in enumerate(words)})).save(str(_folder(tmp_path)))

    def change(mask: list[int]) -> Change:
        tokens = [5, 6, 7, 100, 101, *[102] * 8, 103, 104]
        return one(0, tokens=tokens, response="?", response_length=12, loss_mask=mask, rollout_log_probs=None)

    wrong = rollout(tmp_path / "a" / "3.pt", change([1, *[0] * 2, *[1] * 9]))
    (finding,) = found("tool-response-in-loss", wrong, tmp_path / "tokenizer")
    assert "7 of 8 tokens" in finding.message
    assert not found("tool-response-in-loss", wrong), "its text says nothing"
    right = rollout(tmp_path / "b" / "3.pt", change([1, *[0] * 10, 1]))
    assert not found("tool-response-in-loss", right, tmp_path / "tokenizer")


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w1"}))
    return folder / "tokenizer.json"


@pytest.mark.parametrize(
    "text",
    [
        "ok<|observation|>\n{}<|assistant|>so",
        "ok<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n{}<|eot_id|>",
        "ok<|im_end|>\n<|im_start|>tool\n{}<|im_end|>",
        "[TOOL_RESULTS]{}[/TOOL_RESULTS]", "<information>{}</information>",
        "<｜tool▁outputs▁begin｜>{}<｜tool▁outputs▁end｜>",  # noqa: RUF001
        "<|start|>functions.f to=assistant<|channel|>commentary<|message|>{}<|end|>",
        "<|im_system|>tool<|im_middle|>{}<|im_end|>", "<tool_response>\n{}",
    ],
)  # fmt: skip
def test_markers_of_templates(text: str) -> None:
    """What a tool says is found between the markers of each template, without them."""
    answer = "{'rows': 3}"
    (span,) = spans_of(text.format(answer))
    assert text.format(answer)[span.start : span.end] == answer


@at_most(60)
@given(st.lists(st.sampled_from([*TOOL, "<information>", "</information>", "", "<|observation|>", "é"]), max_size=30))
def test_spans_of_any_text(words: list[str]) -> None:
    """Spans lie in the text in order, overlap nowhere, and hold only tokens that lie in them whole."""
    text = "".join(words)
    spans = spans_of(text)
    assert all(0 <= a.start < a.end <= len(text) for a in spans)
    assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    for span, inside in zip(spans, tokens_inside(words, spans), strict=True):
        kept = "".join(word for word, yes in zip(words, inside, strict=True) if yes)
        assert kept in text[span.start : span.end]


# -- rounding


@given(st.lists(st.floats(0.001, 100), min_size=12, max_size=30, unique=True), st.integers(3, 6))
def test_rounded_numbers(values: list[float], places: int) -> None:
    """What is rounded to some decimals and is many different numbers is told from what is not."""
    drawn = np.random.default_rng(len(values)).uniform(0.1, 3.0, 30)
    assert rounded_decimals(drawn.tolist()) is None and rounded_digits(drawn.tolist()) is None
    assert rounded_decimals(drawn.astype(np.float32).astype(float).tolist()) is None
    short = [round(float(value), places) for value in drawn]
    assert rounded_decimals(short) in (None, places)
    if places > 4:
        assert rounded_decimals(short) == places
    rounded_decimals(values)
    assert rounded_digits([float(f"{value * 1e-5:.4g}") for value in drawn]) == 4


@pytest.mark.parametrize("values", [[0.25, 0.5, 0.125, 0.75, 0.375], [0.1, 0.2, 0.3, 0.7, 0.9], [1.0, 2.0, 3.0], []])
def test_numbers_that_are_short_by_nature(values: list[float]) -> None:
    """Means over few samples and whole numbers are not rounded."""
    assert rounded_decimals(values) is None and rounded_digits(values) is None


def test_narrow_dtypes() -> None:
    """Values of bf16 and of fp16 are told apart, and from those of fp32."""
    wide = np.random.default_rng(0).normal(size=100).astype(np.float32)
    assert narrow_dtype(wide.astype(np.float64)) == ""
    assert narrow_dtype(wide.astype(np.float16).astype(np.float64)) == "float16"
    assert narrow_dtype((wide.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)) == "bfloat16"


# -- anything at all


@at_most(40)
@given(st.sampled_from(SYSTEMS).flatmap(drawn_dumps))
def test_rules_take_any_values(tmp_path_factory: pytest.TempPathFactory, dump: RolloutDump) -> None:
    """No rule of dumps fails on what users' code may put into a dump, alone or beside a tokenizer and a launch."""
    folder = tmp_path_factory.mktemp("drawn")
    path = folder / f"{'eval_' if dump.evaluation else ''}{dump.rollout_id}.pt"
    write_rollout_dump(path, dump)
    script = launch(folder, "--reward-key acc", "--rollout-max-response-len 4")
    (folder / "tokenizer").mkdir()
    ends = {"eos_token": "a", "chat_template": "{{ messages[0].content }}b"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(ends))
    (folder / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')
    for paths in ([path], [path, folder / "tokenizer"], [path, folder / "tokenizer", script]):
        assert not [finding for finding in examine(look(paths)).findings if finding.rule == FAULT.id]

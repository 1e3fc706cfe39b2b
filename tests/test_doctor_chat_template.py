"""The chat template verifier on real tokenizers: applied once, twice, or not at all, in four families of templates."""

# ruff: noqa: RUF001

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from doctor_dump_kit import found
from doctor_run_kit import launch, rollout, samples, severities
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from rollout_dump_kit import plain_dump
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from repro.doctor.artefacts.checkpoints.tokenizer import read_tokenizer
from repro.doctor.artefacts.runs import ROLLOUT_DUMP
from repro.doctor.catalogue import catalogue
from repro.doctor.facts.samples.templates import Marks, applied, decoder_of, marks_of
from repro_golden.dumps.rollout.files import write_rollout_dump

_LINES = (
    "What is 2 + 3? Answer with a number.",
    "You are a helpful assistant.",
    "Докажи, что 7 простое.",
    "的答案是什么？",
)


Messages = list[dict[str, str]]


class Family(NamedTuple):
    """A template, the special tokens of its model, and what opens a user's turn in it."""

    template: str
    special: tuple[str, ...]
    bos: str | None
    eos: str
    opening: str


_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{% endif %}"
)
_LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' "
    "+ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)

FAMILIES = {
    "ChatML": Family(_CHATML, ("<|im_start|>", "<|im_end|>"), None, "<|im_end|>", "<|im_start|>user"),
    "ChatML with a system prompt": Family(
        _DEFAULT + _CHATML, ("<|im_start|>", "<|im_end|>"), None, "<|im_end|>", "<|im_start|>user"
    ),
    "Llama 3": Family(
        _LLAMA, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|begin_of_text|>",
        "<|eot_id|>", "<|start_header_id|>user<|end_header_id|>",
    ),
    "Mistral": Family(_MISTRAL, ("<s>", "</s>"), "<s>", "</s>", "[INST]"),
}  # fmt: skip


def make(folder: Path, family: Family, template: bool = True) -> Path:
    """A folder of a tokenizer: a byte-level BPE with the family's special tokens and template."""
    folder.mkdir(parents=True)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        _LINES,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=list(family.special), initial_alphabet=alphabet, show_progress=False
        ),
    )
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": family.eos, "bos_token": family.bos, "chat_template": family.template if template else None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    """Each family."""
    family: Family = FAMILIES[request.param]
    return family


def render(family: Family, messages: Messages) -> str:
    """A conversation by the family's template, as transformers renders it, without a process for each."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = pytest.fail
    prompt = messages[-1]["role"] != "assistant"
    return environment.from_string(family.template).render(
        messages=messages, add_generation_prompt=prompt, bos_token=family.bos or "", eos_token=family.eos
    )


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _conversations() -> list[Messages]:
    return [
        _user("What is 2 + 3?"),
        _user("Докажи, что 7 простое."),
        _user("的答案是什么？"),
        _user("<|x|> is no token of mine, [x] neither. <b>Why?</b>"),
        _user(""),
        [*_user("What is 2 + 3?"), {"role": "assistant", "content": "5"}, *_user("And 2 + 4?")],
    ]


def _run(
    at: Path, folder: Path, texts: Sequence[str], prompt: Callable[[str], Any] = lambda text: text, tokens: bool = True
) -> Path:
    """A rollout dump whose samples have these prompts, as text or otherwise, and their tokens by the tokenizer."""
    encode = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
    made = samples(len(texts), each=1)
    for sample, text in zip(made, texts, strict=True):
        ids = encode(text, add_special_tokens=False).ids if tokens else [1, 2]
        sample |= {"prompt": prompt(text), "tokens": [*ids, 5, 6, 7]}
    return rollout(at, made)


def _both(run: Path, folder: Path, *more: Path) -> tuple[list[str], list[str]]:
    return tuple(severities(name, run, folder, *more) for name in ("chat-template-twice", "chat-template-missing"))  # type: ignore[return-value]


def test_applied_once_is_silence(family: Family, tmp_path: Path) -> None:
    """Prompts that the template was applied to once, of one turn and of several, in any script, give no finding."""
    folder = make(tmp_path / "tokenizer", family)
    run = _run(tmp_path / "run", folder, [render(family, conversation) for conversation in _conversations()])
    assert _both(run, folder) == ([], [])


def test_applied_twice_is_an_error_with_the_sample(family: Family, tmp_path: Path) -> None:
    """Rendered prompts put into a user's message and rendered again: an error, with the sample and its text."""
    folder = make(tmp_path / "tokenizer", family)
    texts = [render(family, _user(render(family, conversation))) for conversation in _conversations()]
    run = _run(tmp_path / "run", folder, texts)
    findings = found("chat-template-twice", run, folder)
    assert [finding.severity for finding in findings] == ["error"]
    assert "twice in 6 of 6 prompts" in findings[0].message
    assert findings[0].where.item == "sample 0 prompt"
    assert family.opening.split("<")[-1] in findings[0].where.value
    assert found("chat-template-missing", run, folder) == []


def test_not_applied_is_said_with_the_sample(family: Family, tmp_path: Path) -> None:
    """Bare questions: a note, and a warning where the folder or the launch says that it is an instruct model."""
    folder = make(tmp_path / "tokenizer", family)
    run = _run(tmp_path / "run", folder, ["What is 2 + 3?", "的答案是什么？"])
    assert _both(run, folder) == ([], ["note"])
    findings = found("chat-template-missing", run, folder)
    assert "2 of 2 prompts have no chat template applied" in findings[0].message
    assert "What is 2 + 3?" in findings[0].where.value
    script = launch(tmp_path / "run.sh", "--hf-checkpoint /models/Qwen3-4B-Instruct-2507")
    assert _both(run, folder, script) == ([], ["warning"])


def test_prompts_that_are_messages_are_judged_by_their_tokens(family: Family, tmp_path: Path) -> None:
    """A dump that keeps messages: what the model saw is in the tokens, rendered once, twice, or not at all."""
    folder = make(tmp_path / "tokenizer", family)
    once = render(family, _user("What is 2 + 3?"))
    twice = render(family, _user(once))
    verdicts = [
        _both(_run(tmp_path / name, folder, [text] * 4, prompt=_user), folder)
        for name, text in (("once", once), ("twice", twice), ("bare", "What is 2 + 3?"))
    ]
    assert verdicts == [([], []), (["error"], []), ([], ["note"])]


def test_a_system_prompt_of_the_data_changes_nothing(tmp_path: Path) -> None:
    """Templates with a system prompt of their own, with the data's, and prompts written by hand without any."""
    for name in ("ChatML", "ChatML with a system prompt", "Llama 3"):
        folder = make(tmp_path / name / "tokenizer", FAMILIES[name])
        french = {"role": "system", "content": "Answer in French."}
        texts = [render(FAMILIES[name], [french, *conversation]) for conversation in _conversations()]
        assert _both(_run(tmp_path / name / "own", folder, texts), folder) == ([], [])
        nested = [render(FAMILIES[name], [{"role": "system", "content": "Be brief."}, *_user(text)]) for text in texts]
        assert _both(_run(tmp_path / name / "twice", folder, nested), folder) == (["error"], [])
    by_hand = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    folder = tmp_path / "ChatML with a system prompt" / "tokenizer"
    assert _both(_run(tmp_path / "hand", folder, [by_hand] * 4), folder) == ([], [])


def test_a_prompt_without_its_generation_prompt_is_applied(family: Family, tmp_path: Path) -> None:
    """What stands after the user's turn says nothing of whether the template was applied."""
    folder = make(tmp_path / "tokenizer", family)
    text = read_tokenizer(folder).render(_user("What is 2 + 3?"))
    cut = text[: text.index("2 + 3?") + len("2 + 3?")]
    assert _both(_run(tmp_path / "run", folder, [cut] * 4), folder) == ([], [])


def test_a_few_nested_prompts_are_a_warning(tmp_path: Path) -> None:
    """One of eight prompts quotes a conversation from its first character on: no error."""
    folder = make(tmp_path / "tokenizer", FAMILIES["ChatML"])
    once = render(FAMILIES["ChatML"], _user("What is 2 + 3?"))
    run = _run(tmp_path / "run", folder, [render(FAMILIES["ChatML"], _user(once)), *[once] * 7])
    assert _both(run, folder) == (["warning"], [])


def test_a_quoted_conversation_inside_a_message_is_no_second_rendering(tmp_path: Path) -> None:
    """A judge's prompt that quotes marks in the middle of its message was rendered once."""
    folder = make(tmp_path / "tokenizer", FAMILIES["Llama 3"])
    once = render(FAMILIES["Llama 3"], _user("What is 2 + 3?"))
    quoted = render(FAMILIES["Llama 3"], _user(f"Grade this dialogue: {once}"))
    assert _both(_run(tmp_path / "run", folder, [quoted] * 4), folder) == ([], [])


def test_the_template_of_another_model_is_named(tmp_path: Path) -> None:
    """Prompts in ChatML, given to a model of Llama's: a warning that names what they have."""
    other = read_tokenizer(make(tmp_path / "other", FAMILIES["ChatML"])).render(_user("What is 2 + 3?"))
    folder = make(tmp_path / "tokenizer", FAMILIES["Llama 3"])
    findings = found("chat-template-missing", _run(tmp_path / "run", folder, [other] * 4), folder)
    assert [finding.severity for finding in findings] == ["warning"]
    assert "another template (ChatML)" in findings[0].message


def test_every_rollout_of_a_run_is_made_alike_and_said_once(tmp_path: Path) -> None:
    """Of three rollouts with bare prompts the first is named."""
    folder = make(tmp_path / "tokenizer", FAMILIES["ChatML"])
    for number in range(3):
        rollout(tmp_path / "run", samples(), number)
    assert len(found("chat-template-missing", tmp_path / "run", folder)) == 1


def test_the_doctor_renders_as_the_test_does(family: Family, tmp_path: Path) -> None:
    """What the test takes for a rendered prompt is what the doctor's own reader of tokenizers makes of it."""
    renderer = read_tokenizer(make(tmp_path / "tokenizer", family)).render
    conversation = _conversations()[-1]
    assert renderer(conversation) == render(family, conversation)


def test_a_tokenizer_without_a_template_says_nothing(tmp_path: Path) -> None:
    """A base model's tokenizer has no template to be applied."""
    folder = make(tmp_path / "tokenizer", FAMILIES["ChatML"], template=False)
    assert _both(_run(tmp_path / "run", folder, ["What is 2 + 3?"] * 4), folder) == ([], [])


def test_tokens_alone_can_be_rendered_twice(tmp_path: Path) -> None:
    """The dump's text is rendered once, and the engine rendered it again: the tokens show it."""
    folder = make(tmp_path / "tokenizer", FAMILIES["Llama 3"])
    once = render(FAMILIES["Llama 3"], _user("What is 2 + 3?"))
    run = _run(tmp_path / "run", folder, [render(FAMILIES["Llama 3"], _user(once))] * 4, prompt=lambda _: once)
    assert _both(run, folder) == (["error"], [])


def test_messages_without_a_vocabulary_are_not_judged(tmp_path: Path) -> None:
    """Where nothing turns tokens into text, messages say nothing; a damaged vocabulary is none."""
    folder = make(tmp_path / "tokenizer", FAMILIES["ChatML"])
    run = _run(tmp_path / "run", folder, ["What is 2 + 3?"] * 4, prompt=_user)
    vocabulary = folder / "tokenizer.json"
    assert _both(run, folder) == ([], ["note"])
    vocabulary.write_text('{"model": {}}')
    assert decoder_of(read_tokenizer(folder)) is None
    assert _both(run, folder) == ([], [])


def test_tokens_beyond_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    """Ids that the tokenizer does not have (images, another model's) stop nothing."""
    decode = decoder_of(read_tokenizer(make(tmp_path / "tokenizer", FAMILIES["ChatML"])))
    assert decode is not None
    assert decode([-1, 10**6, 0]) == "<|im_start|>"


def test_marks_are_what_opens_a_turn(family: Family, tmp_path: Path) -> None:
    """What is looked for is what the template puts before a user's message, in any turn."""
    marks = marks_of(read_tokenizer(make(tmp_path / "tokenizer", family)))
    assert marks is not None
    assert marks.opening == family.opening
    assert family.opening in marks.begins


_CHATML_MARKS = Marks("<|im_start|>user", ("<|im_start|>user", "<|im_start|>"))


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_message_is_once_and_its_rendering_inside_twice(text: str, other: str) -> None:
    """Whatever a message says, unless it begins with a mark itself: rendered it is once, rendered again twice."""

    def render(inner: str) -> str:
        return f"<|im_start|>user\n{inner}<|im_end|>\n<|im_start|>assistant\n"

    assert applied(render(text), _CHATML_MARKS)[0] == "once"
    assert applied(render(text) + other + render(other), _CHATML_MARKS)[0] == "once"
    assert applied(render(render(text)), _CHATML_MARKS)[0] == "twice"
    assert applied(text, _CHATML_MARKS)[0] == "missing"


@pytest.mark.parametrize("name", FAMILIES)
def test_doubled_marks_show_without_a_tokenizer(name: str, tmp_path: Path) -> None:
    """The rule "prompt-marks-doubled" sees a template applied to its own text, and nothing in a conversation."""
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(FAMILIES[name].template)

    ends = {"bos_token": "<s>", "eos_token": "</s>"}

    def rendered(messages: Messages) -> str:
        return template.render(messages=messages, add_generation_prompt=True, **ends)

    once = rendered([{"role": "user", "content": _LINES[0]}])
    talk = rendered(
        [{"role": role, "content": line} for role, line in zip(("user", "assistant", "user"), _LINES, strict=False)]
    )
    twice = rendered([{"role": "user", "content": once.removeprefix("<s>")}])
    rule = catalogue()["prompt-marks-doubled"]
    for text, wrong in ((once, False), (talk, False), (twice, True)):
        dump = plain_dump("slime")
        for sample in dump.samples:
            sample["prompt"] = text
        path = tmp_path / "0.pt"
        write_rollout_dump(path, dump)
        (read,) = ROLLOUT_DUMP.read(path)
        told = list(rule.check(read, None))
        assert bool(told) == wrong, text
        assert all(finding.severity is None and "4 of 4" in finding.message for finding in told)

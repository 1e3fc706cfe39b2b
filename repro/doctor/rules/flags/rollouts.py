"""Flags of rollouts: paths, sampling, lengths, rewards."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

from repro.doctor.artefacts.kinds import HfConfig, Launch, Rollout, Tokenizer
from repro.doctor.facts.launches import absent, open_ended, ranks, samples, sft, size, trains, unset
from repro.doctor.facts.sources import MILES, MILES_ARGS, SLIME, SLIME_ARGS
from repro_golden.base.checks import Certainty, Found, Where, rule
from repro_golden.base.errors import ReproError

_ENGINE, _CONTEXT = "--sglang-context-length", "--rollout-max-context-len"
_PROMPT, _RESPONSE = "--rollout-max-prompt-len", "--rollout-max-response-len"
_OWN_LENGTHS = ("--custom-generate-function-path", "--rollout-function-path", "--sglang-allow-auto-truncate")
"""With these a request may ask for less than the flags say."""


def _positions(config: HfConfig | None) -> int | None:
    if config is None:
        return None
    inner = config.values.get("text_config")
    value = (inner if isinstance(inner, dict) else config.values).get("max_position_embeddings")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _asked(launch: Launch) -> tuple[int, str, str] | None:
    """Tokens that one request may need, by which flags, and the flag to show."""
    context, prompt, response = (launch.number(name) for name in (_CONTEXT, _PROMPT, _RESPONSE))
    if context:
        return int(context), _CONTEXT, _CONTEXT
    if response:
        flags = f"{_PROMPT} + {_RESPONSE}" if prompt else _RESPONSE
        return int(response + (prompt or 0)), flags, _RESPONSE
    return None


@rule(
    title="Prompt, response and context lengths that do not fit the engine or the model",
    severity="warning",
    certainty="certain",
    why="engines refuse or cut requests that are too long, so samples fail or end before their answer",
    fix="make --sglang-context-length at least the longest prompt plus the longest response",
    sources=(
        "slime guide: Troubleshooting",
        f"{SLIME_ARGS}:2034",
        f"{MILES_ARGS}:3499",
        "sgl-project/sglang python/sglang/srt/managers/tokenizer_manager.py (_validate_one_request)",
    ),
)
def _context_length(launch: Launch, config: HfConfig | None) -> Iterator[Found]:
    context, prompt, response = (launch.number(name) for name in (_CONTEXT, _PROMPT, _RESPONSE))
    if context and prompt and prompt > context - 1:
        message = f"{_PROMPT} {prompt:.0f} leaves no token of {_CONTEXT} {context:.0f} to generate: the trainer stops"
        yield Found(message, launch.where(_PROMPT), "error", fix=f"{_PROMPT} {context - 1:.0f} or less")
    if not samples(launch):
        return
    engine, asked, positions = launch.number(_ENGINE), _asked(launch), _positions(config)
    custom = launch.has(*_OWN_LENGTHS)
    every = not context and not custom and engine is not None and response is not None and response >= engine
    if engine and asked and (every or asked[0] > engine):
        tokens, flags, flag = asked
        message = f"{flags} {tokens} is more than {_ENGINE} {engine:.0f} holds"
        if every:
            message += " beside a prompt: SGLang refuses each request"
        fix = f"{_ENGINE} {tokens} and what the longest prompt takes, or shorter responses"
        yield Found(message, launch.where(flag), "error" if every else "warning", "likely", fix)
    limit, name = (engine, _ENGINE) if engine else (asked[0], asked[1]) if asked else (None, "")
    override = launch.env.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")
    if config is not None and positions and limit and limit > positions and override is None:
        message = f"{name} = {limit:.0f} is more than the model's max_position_embeddings {positions}"
        where = Where(str(config.path), item="max_position_embeddings", value=str(positions))
        fix = "shorten it, or set up rope scaling in the checkpoint"
        yield Found(message, where, *unset(launch, "warning", "likely"), fix)


_NUMBERS = frozenset(
    {"deepscaler", "gemma_math", "math", "f1", "gpqa", "ifbench", "random", "deterministic_random", "remote_rm"}
)
_FIELDS = {"dapo": ("score", "acc", "pred")}
_GRADE = frozenset({"deepscaler", "gemma_math", "math", "f1", "dapo"})
"""Reward types that compare with the label."""
_LABELLED = ("--label-key", "--data-source-path", "--disable-rollout-global-dataset")
"""Where labels come from; of own data nothing is known."""
_OWN_REWARDS = (
    "--custom-rm-path", "--rollout-function-path", "--custom-generate-function-path", "--use-opd",
    "--custom-reward-post-process-path", "--custom-convert-samples-to-train-data-path", "--group-rm",
    "--use-agentic-rollout",
)  # fmt: skip


def _keys(launch: Launch) -> Iterator[Found]:
    label = launch.value("--label-key")
    for name in ("--input-key", "--metadata-key", "--tool-key"):
        if label is not None and launch.value(name) == label:
            message = f"--label-key {label[:40]} is {name} too: samples are graded against it"
            yield Found(message, launch.where("--label-key"), "warning", "likely", "name the key of the answer")


@rule(
    title="--rm-type, --reward-key and --label-key that do not go together",
    severity="error",
    certainty="likely",
    why="the first rollout fails, or every reward is the same and nothing is learned",
    fix="give --rm-type, --label-key, and --reward-key for rewards that are dicts",
    sources=(
        "Miles guide: Debugging",
        f"{SLIME} slime/rollout/rm_hub/__init__.py; slime/utils/types.py:246",
        f"{SLIME} slime/rollout/rm_hub/math_dapo_utils.py (compute_score)",
        f"{MILES} miles/rollout/rm_hub/__init__.py; miles/utils/types.py:177",
    ),
)
def _reward_key(launch: Launch) -> Iterator[Found]:
    if not samples(launch):
        return
    yield from _keys(launch)
    # metadata of a row may name another type, and own code may do anything
    if launch.has(*_OWN_REWARDS) or launch.system == "relax":
        return
    rm_type, key = launch.value("--rm-type"), launch.value("--reward-key")
    if rm_type is None:
        if not launch.has("--rm-type") and not open_ended(launch):
            message = "no reward: neither --rm-type nor --custom-rm-path is given"
            fix = "--rm-type TYPE or --custom-rm-path MODULE.FUNCTION, unless each row's metadata names its rm_type"
            yield Found(message, launch.where("--rm-type"), "warning", "likely", fix)
        return
    kind, where = rm_type.strip().removeprefix("boxed_"), launch.where("--rm-type")
    if kind in _FIELDS and not launch.has("--reward-key"):
        message = f"--rm-type {rm_type} gives a dict ({', '.join(_FIELDS[kind])}), and --reward-key is not given"
        yield Found(message, where, *absent(launch, "error", "likely"), fix=f"--reward-key {_FIELDS[kind][0]}")
    elif kind in _FIELDS and key is not None and key not in _FIELDS[kind]:
        message = f"--reward-key {key[:40]} is not in what --rm-type {rm_type} gives: {', '.join(_FIELDS[kind])}"
        yield Found(message, launch.where("--reward-key"), "error", "likely", f"--reward-key {_FIELDS[kind][0]}")
    elif kind in _NUMBERS - {"remote_rm"} and key:
        message = f"--rm-type {rm_type} gives a number: --reward-key {key[:40]} looks for a key in it and fails"
        yield Found(message, launch.where("--reward-key"), "error", "likely", "remove --reward-key")
    elif kind not in _NUMBERS and kind not in _FIELDS:
        yield Found(f"--rm-type {rm_type[:40]} is none that slime or Miles knows", where, "warning", "likely")
    if kind == "remote_rm" and not launch.has("--rm-url"):
        yield Found("--rm-type remote_rm has no --rm-url to ask", where, *absent(launch, "error"), fix="--rm-url URL")
    if kind in _GRADE and not launch.has(*_LABELLED):
        message = f"--rm-type {rm_type} grades against a label, and --label-key is not given: labels are None"
        yield Found(message, where, *absent(launch, "error", "likely"), fix="--label-key KEY of the data's answer")


_WIDE = re.compile(r":[^{}]*(?:\d{4}|\{)")
"""A width that would fill the memory, or one that is computed."""


@rule(
    title="The rollout dump to train on is not there",
    severity="warning",
    certainty="likely",
    why="training stops at the first rollout, after the model was loaded",
    fix="correct the path, or record it first: --debug-rollout-only --save-debug-rollout-data DIR/{rollout_id}.pt",
    sources=("slime guide: Debugging", "Miles guide: Debugging", "Relax guide: Debugging"),
)
def _rollout_path_missing(launch: Launch) -> Iterator[Found]:
    template, first = launch.value("--load-debug-rollout-data"), launch.number("--start-rollout-id", 0.0)
    if not template or first is None or "\0" in template or _WIDE.search(template) or abs(first) > 10**9:
        return
    try:
        path = Path(template.format(rollout_id=int(first))).expanduser()
    except (ValueError, LookupError, AttributeError, TypeError, RuntimeError):
        return  # rollout-path-template
    # a relative path is below the trainer's folder, which only an argv given here says
    if not path.is_absolute() and str(launch.path) != "argv":
        return
    try:
        missing = path.parent.is_dir() and not path.exists()
        beside = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix == ".pt")[:3] if missing else []
    except (OSError, ValueError):
        return
    if missing:
        there = f"; there are {', '.join(beside)}" if beside else "; its folder holds no .pt at all"
        message = f"{path} is not there, and rollout {int(first)} is to be trained on it{there}"
        yield Found(message, launch.where("--load-debug-rollout-data"))


_SAVE, _LOAD, _TRAIN = "--save-debug-rollout-data", "--load-debug-rollout-data", "--save-debug-train-data"
_ROLLOUT_PATH_TEMPLATE_FIELDS = {_SAVE: ("rollout_id",), _LOAD: ("rollout_id",), _TRAIN: ("rollout_id", "rank")}
_COMPUTED = re.compile(r"\$\{[^}]*\}|\$\([^)]*\)|`[^`]*`|\$\w+")


def _wrong(template: str, fields: tuple[str, ...], *, text: bool) -> str:
    """What `str.format` would say; '' where it would take it. A saved rollout's id is text (`eval_0`)."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        return f"not a template ({error})"
    for _, field, spec, conversion in parts:
        if field is None:
            continue
        name = re.split(r"[.\[]", field, maxsplit=1)[0]
        if not name or name.isdecimal():
            return f"{{{field}}} is a positional field, and none is given"
        if name not in fields:
            return f"{{{field}}} is no field of it; {{rollout_id}} is"
        if re.search(r"\d{4}", spec or ""):  # it would be written out to be judged
            return f"{{{field}:{(spec or '')[:20]}}} is wider than a file name may be"
        try:
            format("0" if text or conversion else 0, spec or "")
        except ValueError:
            kind = "text (eval_0)" if text else "a whole number"
            return f"{{{field}:{spec}}} does not fit: the id is {kind}"
    return ""


def _one_file(name: str, value: str, launch: Launch) -> Found:
    where = launch.where(name)
    if name == _LOAD:
        message = f"{name} {value[:80]} has no {{rollout_id}}: every rollout trains on the same file"
        return Found(message, where, "note", fix="put {rollout_id} in, unless it is meant so")
    message = f"{name} {value[:80]} has no {{rollout_id}}: every rollout writes over the last one"
    return Found(message, where, "warning", fix=f"{name} {value.removesuffix('.pt')[:80]}_{{rollout_id}}.pt")


@rule(
    title="Dump paths without {rollout_id}, or with other braces",
    severity="error",
    certainty="certain",
    why="the path is formatted with rollout_id: other braces raise at the first dump; without it, there is one file",
    fix="write DIR/{rollout_id}.pt",
    sources=(
        "slime guide: Debugging",
        "Miles guide: Debugging",
        "Relax guide: Debugging",
        f"{SLIME} slime/observability/rollout_data_utils.py:144",
    ),
)
def _rollout_path_template(launch: Launch) -> Iterator[Found]:
    for name, fields in _ROLLOUT_PATH_TEMPLATE_FIELDS.items():
        flag = launch.flags.get(name)
        if flag is None or not flag.values:
            continue
        template = _COMPUTED.sub("x", flag.values[0])
        if "$" in template or "`" in template:
            continue
        if wrong := _wrong(template, fields, text=name == _SAVE):
            # `{rank}` is a field of the trainer's own dumps in every version that has ranks
            message = f"{name} {flag.values[0][:80]}: {wrong}"
            fix = f"{name} DIR/{'_'.join('{' + field + '}' for field in fields)}.pt"
            yield Found(message, flag.where, fix=fix)
        elif template == flag.values[0] and "{rollout_id" not in template and launch.number("--num-rollout") != 1:
            yield _one_file(name, flag.values[0], launch)


_NAME, _ROLLOUT_SUBSAMPLE_LOAD = "--load-debug-rollout-data-subsample", "--load-debug-rollout-data"


def _fitting(total: int, group: int | None) -> str:
    """The smallest share that takes a whole group from both ends."""
    return f"{min(1.0, 2 * (group or 1) / total):.4g}" if total else "1"


@rule(
    title="A share of a rollout dump that cuts groups, or takes all",
    severity="warning",
    certainty="certain",
    why="data[: n // 2] + data[-n // 2 :] is the whole file for n = 0, and advantages of a cut group are wrong",
    fix="take a share that leaves whole groups at both ends",
    sources=(f"{SLIME_ARGS}:1275", f"{MILES} miles/ray/rollout/debug_data.py:93-96"),
)
def _rollout_subsample(launch: Launch, rollout: Rollout | None) -> Iterator[Found]:
    share = launch.number(_NAME)
    if share is None:
        return
    if not launch.has(_ROLLOUT_SUBSAMPLE_LOAD):
        yield Found(
            f"{_NAME} is given without {_ROLLOUT_SUBSAMPLE_LOAD}: nothing is loaded", launch.where(_NAME), "note"
        )
        return
    if not 0 < share <= 1:
        yield Found(
            f"{_NAME} {share:g} is no share between 0 and 1", launch.where(_NAME), "warning", fix=f"{_NAME} 0.5"
        )
        return
    prompts, group = size(launch, "--rollout-batch-size"), size(launch, "--n-samples-per-prompt")
    certainty: Certainty = "likely" if rollout is None else "certain"
    if rollout is not None:
        total, of = len(rollout.dump.samples), f"the {len(rollout.dump.samples)} samples of {rollout.path.name}"
    elif prompts is not None and group is not None and launch.has("--rollout-batch-size"):
        total, of = prompts * group, f"{prompts} x {group} samples"
    else:
        return
    taken = int(total * share)
    if taken == 0 and total:
        message = f"{share:g} of {of} rounds to none, and slicing by none takes all {total}"
        yield Found(
            message,
            launch.where(_NAME),
            "error" if rollout else "warning",
            certainty,
            f"{_NAME} {_fitting(total, group)}",
        )
    elif group is not None and group > 1 and (taken // 2 % group or (taken - taken // 2) % group):
        front, end = taken // 2, taken - taken // 2
        message = f"{share:g} of {of} takes {front} from the front and {end} from the end: groups of {group} are cut"
        yield Found(message, launch.where(_NAME), "warning", certainty, f"{_NAME} {_fitting(total, group)}")


@rule(
    title="--rollout-temperature of 0 or below",
    severity="error",
    certainty="certain",
    why="without randomness the samples of a group are equal, so group advantages are 0; slime refuses it",
    fix="--rollout-temperature 1 (greedy decoding belongs to --eval-temperature or --eval-top-k)",
    sources=(f"{SLIME_ARGS}:1770",),
)
def _rollout_temperature(launch: Launch) -> Iterator[Found]:
    temperature = launch.number("--rollout-temperature", 1.0)
    learns = samples(launch) and trains(launch) and size(launch, "--n-samples-per-prompt") != 1
    if temperature is not None and temperature <= 0:
        message = (
            f"--rollout-temperature {launch.value('--rollout-temperature')}: greedy decoding is no policy to train"
        )
        yield Found(
            message, launch.where("--rollout-temperature"), "error" if learns or launch.system == "slime" else "warning"
        )
    elif launch.value("--rollout-top-k") == "1" and learns:
        message = "--rollout-top-k 1: all samples of a prompt are the same, and their advantages 0"
        yield Found(message, launch.where("--rollout-top-k"))


_WORLD = 1 << 17
"""Ranks among whose sizes is searched."""


def _longest(launch: Launch) -> tuple[int, str] | None:
    """Tokens of the longest sample that the flags allow, and which flags say so."""
    context, response = launch.number("--rollout-max-context-len"), launch.number("--rollout-max-response-len")
    prompt = launch.number("--rollout-max-prompt-len", 0.0)
    if context and (not response or response <= context or launch.has("--custom-generate-function-path")):
        return int(context), "--rollout-max-context-len"
    if response and prompt:
        return int(response + prompt), "--rollout-max-prompt-len + --rollout-max-response-len"
    return (int(response), "--rollout-max-response-len") if response else None


def _enough(launch: Launch, longest: int, cap: int) -> int | None:
    """The smallest context parallel size that holds the sample and divides the ranks; None where none does."""
    current, world = size(launch, "--context-parallel-size") or 1, ranks(launch)
    tensor, pipeline = size(launch, "--tensor-model-parallel-size"), size(launch, "--pipeline-model-parallel-size")
    if world is None or world > _WORLD or tensor is None or pipeline is None:
        factor = math.ceil(longest / cap / current)
        return current * (1 << (factor - 1).bit_length())
    sizes = (n for n in range(current + 1, world + 1) if n * cap >= longest and world % (n * tensor * pipeline) == 0)
    return next(sizes, None)


@rule(
    title="A sample at full length is longer than --max-tokens-per-gpu x --context-parallel-size",
    severity="warning",
    certainty="certain",
    why="such a sample gets a micro-batch of its own above the cap, and the first one may run out of memory",
    fix="spread a sample over more ranks with --context-parallel-size",
    sources=("Miles FAQ", f"{SLIME} slime/utils/dp_schedule.py:29,120", f"{MILES} miles/utils/dp_schedule.py:52"),
)
def _samples_too_long(launch: Launch) -> Iterator[Found]:
    cap, context_parallel = size(launch, "--max-tokens-per-gpu"), size(launch, "--context-parallel-size")
    dynamic = launch.has("--max-tokens-per-gpu") and launch.has("--use-dynamic-batch-size")
    if not dynamic or cap is None or context_parallel is None or not trains(launch) or sft(launch):
        return
    longest = _longest(launch)
    if longest is None or cap * context_parallel >= longest[0]:
        return
    tokens, flags = longest
    message = (
        f"a sample of {tokens} tokens ({flags}) does not fit {cap} x CP {context_parallel} = {cap * context_parallel}:"
        f" it takes {math.ceil(tokens / context_parallel)} tokens of each GPU, past the cap"
    )
    enough = _enough(launch, tokens, cap)
    fix = f"--max-tokens-per-gpu {math.ceil(tokens / context_parallel)} where memory allows it"
    if enough is not None:
        fix = f"--context-parallel-size {enough} ({enough} x {cap} = {enough * cap}), or {fix}"
    yield Found(message, launch.where("--max-tokens-per-gpu"), fix=fix)


_WORDS, _IDS = "--rollout-stop", "--rollout-stop-token-ids"
_ANSWER = "zq-answer-zq"


def _ending(tokenizer: Tokenizer) -> str | None:
    """What the template writes behind an answer; None where it cannot be rendered or writes nothing."""
    messages = [{"role": "user", "content": "zq-question-zq"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.render(messages) if tokenizer.template else ""
    except ReproError:
        return None
    return text.rpartition(_ANSWER)[2].strip() or None


@rule(
    title="What ends a turn in the chat template does not end generation",
    severity="warning",
    certainty="likely",
    why="the model goes on behind its answer until the length limit: truncated samples and wrong rewards",
    fix="name what ends a turn with --rollout-stop or --rollout-stop-token-ids",
    sources=("Miles FAQ", f"{SLIME_ARGS} (--rollout-stop, --rollout-stop-token-ids)"),
)
def _stop_tokens(launch: Launch, tokenizer: Tokenizer | None) -> Iterator[Found]:
    if not samples(launch):
        return
    ids, stops = launch.flags.get(_IDS), launch.flags.get(_WORDS)
    for value in ids.values if ids else ():
        if not value.isdecimal() and "$" not in value and "`" not in value:
            yield Found(f"{_IDS} {value[:40]} is no token id", launch.where(_IDS), "error", "certain")
    if stops and any(not value for value in stops.values):
        yield Found(f"{_WORDS} holds an empty text", launch.where(_WORDS), "warning", "certain")
    if ids or stops or tokenizer is None or not launch.has("--apply-chat-template"):
        return
    where = Where(str(tokenizer.path), item="eos", value=tokenizer.eos or "")
    if tokenizer.eos is None and not tokenizer.eos_ids:
        yield Found(
            "the tokenizer names no end of a turn, and no stop tokens are given", where, *absent(launch, "warning")
        )
        return
    ending = _ending(tokenizer)
    # generation_config may list further ids, whose text is not known here
    if ending is not None and tokenizer.eos and tokenizer.eos not in ending and len(tokenizer.eos_ids) < 2:
        message = f"the chat template ends a turn with {ending[:40]!r}, generation ends at {tokenizer.eos!r}"
        fix = f"--rollout-stop {ending.split()[0][:40]!r}, or its id with {_IDS}"
        yield Found(message, where, *absent(launch, "warning", "likely"), fix=fix)

"""Flags that nobody knows or that are written wrongly, and those that name files or how weights travel."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import NamedTuple

from repro.doctor.artefacts.kinds import Flag, HfConfig, Launch, ParserDump
from repro.doctor.artefacts.launches.system import flag_names
from repro.doctor.artefacts.parsers import ENGINE
from repro.doctor.facts.known_flags import ALSO, KNOWN, near_miss, twin
from repro.doctor.facts.launches import absent, nonzero, open_ended, samples, severed, trains
from repro.doctor.facts.sources import MILES, MILES_ARGS, SLIME, SLIME_ARGS, SLIME_IGNORES
from repro_golden.base.checks import Certainty, Found, Severity, Where, rule


@rule(
    title="A line of the launch command that lacks its backslash",
    severity="error",
    certainty="certain",
    why="the shell ends the command there: the trainer starts without the rest of its flags, or not at all",
    fix="put a backslash at the end of the line above; nothing may stand behind it, not even a space",
    sources=(f"{SLIME} scripts/run-kimi-k2-Instruct.sh (--update-weight-buffer-size)",),
    any_program=True,
)
def _continuation_lost(launch: Launch) -> Iterator[Found]:
    for where in launch.joined:
        message = f"{where.item[-80:]} is one word: nothing stands before the backslash, nor before the flag below it"
        yield Found(message, where, fix="put a space before the backslash")
    for where in launch.shortened:
        message = (
            f"${where.item} is the first word of the array {where.item} alone: its other flags never reach the trainer"
        )
        yield Found(message, where, fix=f'write "${{{where.item}[@]}}"')
    for where in launch.returns:
        severed_there = where.value.startswith("\\")
        message = "lines end in CR LF, as on Windows: the shell takes the CR for part of a line's last word"
        message += ", and a backslash before it continues nothing" if severed_there else ""
        fix = f"sed -i 's/\\r$//' {where.path}"
        place = Where(where.path, where.line, "CR")
        yield Found(message, place, certainty=None if severed_there else "likely", fix=fix)
    argv = severed(launch)
    if argv is None:
        return
    count = sum(word.startswith("--") for word in argv)
    message = f"a command begins with {argv[0][:60]}: its {count} flags never reach the trainer"
    message += f", which gets {len(launch.given)}"
    here = [flag.where.line for flag in launch.given if flag.where.line and flag.where.path == str(launch.path)]
    last = max(here, default=None)
    below = launch.text.splitlines()[last : last + 1] if last else []
    commented = any(line.lstrip().startswith("#") for line in below)
    fix = "take the comment out of the command: the shell ends the command there, whatever ends the comment's line"
    yield Found(message, Where(str(launch.path), last, argv[0][:80]), fix=fix if commented else "")


@rule(
    title="Flags that a run was given and its parsers ignored",
    severity="warning",
    certainty="certain",
    why="the run went on as if the flag were not there, and said nothing",
    fix="correct or drop the flag",
    sources=(SLIME_IGNORES,),
)
def _flag_ignored(parsers: ParserDump) -> Iterator[Found]:
    for name in parsers.ignored:
        near = near_miss(name, sorted(parsers.options))
        where = Where(str(parsers.path), item=name)
        if near:
            yield Found(
                f"the trainer was given {name} and ignored it; it has {near}", where, "error", fix=f"write {near}"
            )
        else:
            yield Found(f"the trainer was given {name} and ignored it", where)


_ABOVE_ZERO = flag_names("""
    rollout-batch-size n-samples-per-prompt global-batch-size micro-batch-size tensor-model-parallel-size
    pipeline-model-parallel-size context-parallel-size expert-model-parallel-size expert-tensor-parallel-size
""")
_FROM_ZERO = flag_names("""
    num-steps-per-rollout num-rollout actor-num-nodes actor-num-gpus-per-node critic-num-nodes critic-num-gpus-per-node
    rollout-num-gpus rollout-num-gpus-per-engine rollout-max-response-len n-samples-per-eval-prompt
""")
"""0 of these turns something off, or leaves it out."""
_ANY = flag_names("""
    num-gpus-per-node rollout-max-prompt-len rollout-max-context-len rollout-top-k rollout-seed seed
    over-sampling-batch-size log-probs-max-tokens-per-gpu update-weight-buffer-size update-weights-interval num-epoch
    start-rollout-id eval-interval eval-max-response-len save-interval
""")
"""Some of these take -1 for `no limit`. `max-tokens-per-gpu` has a rule of its own."""
_WHOLE = _ABOVE_ZERO | _FROM_ZERO | _ANY
_UNKNOWN = "$`{<@%"
"""What a shell, a template or a program still puts a value in for."""


@rule(
    title="Flags that take a whole number and have none, or one below what they count",
    severity="error",
    certainty="certain",
    why="argparse refuses what is no whole number before anything starts; a negative size fails later, or trains on "
    "nothing",
    fix="write a whole number in digits: 8, not 8.0, 1e3 or nan",
    sources=(f"{SLIME_ARGS}:39-62", f"{SLIME_ARGS}:609-717"),
)
def _flag_not_a_number(launch: Launch) -> Iterator[Found]:
    for flag in launch.given:
        if flag.name not in _WHOLE or not flag.values or not (text := flag.values[0]):
            continue
        if any(sign in text for sign in _UNKNOWN):
            continue
        try:
            number = int(text)  # as argparse reads it
        except ValueError:
            yield Found(f"{flag.name} {text[:40]} is no whole number: the trainer's parser refuses it", flag.where)
            continue
        more = [word for word in flag.values[1:] if not (_meant(word) or any(sign in word for sign in _UNKNOWN))]
        if more:
            message = f"{flag.name} takes one number, and {more[0][:40]} stands behind it, which no flag takes"
            yield Found(message, flag.where, "warning", "likely", "take it out, or write the flag that it belongs to")
        if flag.name in _ABOVE_ZERO and number < 1:
            yield Found(f"{flag.name} {text[:40]} must be above 0", flag.where)
        elif flag.name in _FROM_ZERO and number < 0:
            yield Found(f"{flag.name} {text[:40]} must be 0 or more", flag.where)


@rule(
    title="A flag that is given twice with different values",
    severity="warning",
    certainty="certain",
    why="the parser takes the last one: whoever reads or edits the first is misled",
    fix="keep one of them",
    sources=("Python: argparse, the action `store`",),
)
def _flag_repeated(launch: Launch) -> Iterator[Found]:
    by_name: dict[str, list[Flag]] = {}
    for flag in launch.given:
        by_name.setdefault(flag.name, []).append(flag)
    for name, flags in by_name.items():
        values = list(dict.fromkeys(" ".join(flag.values) for flag in flags))
        if len(values) > 1:
            places = ", ".join(str(flag.where.line) for flag in flags if flag.where.line is not None)
            listed = " and then ".join(value[:60] or "nothing" for value in values[:4])
            message = f"{name} is given as {listed}: the last one holds" + (f" (lines {places})" if places else "")
            # a model's file with defaults, and launchers of Python, are made to be overridden
            meant = len({flag.where.path for flag in flags}) > 1 or launch.path.suffix == ".py"
            yield Found(message, flags[-1].where, "note" if meant else None)


_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d"
_DASHED = re.compile(rf"-?[{_DASHES}][-{_DASHES}]*([A-Za-z][\w-]*)(?:=.*)?", re.S)


def _meant(word: str) -> str:
    """The flag that a word was before a word processor changed its dashes; '' where it was none."""
    match = _DASHED.fullmatch(word)
    return f"--{match[1]}" if match else ""


@rule(
    title="Flags that are nearly, but not quite, one of the trainers'",
    severity="warning",
    certainty="likely",
    why="slime's parser ignores what it does not know: the run starts, without what the flag asks for",
    fix="correct it. `python train.py --help > help.txt`, given to the doctor too, makes this certain",
    sources=(SLIME_ARGS, MILES_ARGS, SLIME_IGNORES),
)
def _flag_typo(launch: Launch, parsers: ParserDump | None) -> Iterator[Found]:
    for flag in launch.given:
        for word in flag.values:
            if meant := _meant(word):
                sure = meant in KNOWN or (parsers is not None and meant in parsers.options)
                yield Found(
                    f"{word[:60]} begins with a dash of a word processor: no parser takes it for {meant}",
                    flag.where,
                    "error" if sure else None,
                    "certain" if sure else None,
                    f"write {meant}, with two plain dashes",
                )
    if parsers is not None or not (launch.system or any(name in KNOWN for name in launch.flags)):
        return
    for name, flag in launch.flags.items():
        if name in KNOWN or name in ALSO or twin(name) in KNOWN:
            continue
        if near := near_miss(name, sorted(KNOWN)):
            yield Found(f"{name} is not known; {near} is", flag.where, fix=f"write {near}, if that is what is meant")


@rule(
    title="Flags that the trainer's own parsers do not have",
    severity="error",
    certainty="certain",
    why="slime's parser ignores what it does not know: the run starts, without what the flag asks for",
    fix="correct or drop the flag; `python train.py --help` lists those that there are",
    sources=(SLIME_IGNORES, f"{SLIME_ARGS}:1607"),
    any_program=True,
)
def _flag_unknown(launch: Launch, parsers: ParserDump) -> Iterator[Found]:
    for name, flag in launch.flags.items():
        if name in parsers.options or (not parsers.complete and twin(name) in parsers.options):
            continue
        if parsers.abbreviates and sum(option.startswith(name) for option in parsers.options) == 1:
            continue
        near = near_miss(name, sorted(parsers.options))
        fix = f"write {near}" if near else ""
        if not parsers.complete:
            # the rest of its flags, Megatron's and SGLang's, is registered elsewhere
            if near and name not in KNOWN | ALSO:
                message = f"{name} is not in {parsers.source}, which has {near}"
                yield Found(message, flag.where, "warning", "possible", fix)
            continue
        if name.startswith(ENGINE) and not any(option.startswith(ENGINE) for option in parsers.options):
            continue  # the engine's flags were not read at all there
        if near:
            yield Found(f"no parser of the trainer has {name}; it has {near}", flag.where, fix=fix)
            continue
        like = difflib.get_close_matches(name, sorted(parsers.options), 1, 0.7)
        message = f"no parser of the trainer has {name}" + (f"; the nearest is {like[0]}" if like else "")
        yield Found(message, flag.where, "warning")


class _Ghost(NamedTuple):
    instead: str
    certainty: Certainty = "certain"


_GHOSTS = {
    "--debug-determinism": _Ghost(
        "take --deterministic-mode, --sglang-enable-deterministic-inference, NCCL_ALGO=Ring, "
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 and CUBLAS_WORKSPACE_CONFIG=:4096:8; `repro golden record` proves it"
    ),
    "--debug-weight-sync": _Ghost("take --check-weight-update-equal: it compares every weight after the first sync"),
    "--debug-rollout-print-every": _Ghost(
        "take --save-debug-rollout-data DIR/{rollout_id}.pt, and read it with `repro rollout show`"
    ),
    "--sglang-log-dir": _Ghost("SGLang logs to the Ray worker's output: take --sglang-log-level info, and read those"),
    "--async-buffer-size": _Ghost("how far sampling runs ahead is --update-weights-interval: 1 syncs every rollout"),
    "--num-data-workers": _Ghost("prompts are read by the rollout manager, with no workers: tokenize them beforehand"),
    "--streaming-data": _Ghost(
        "prompts are read whole: cut the JSONL file, or name a part of it, as in data.jsonl@[0:1000]"
    ),
    "--sglang-router-strategy": _Ghost(
        "slime has --router-policy round_robin, Miles --sglang-router-policy round_robin"
    ),
    "--offload-optimizer-states": _Ghost(
        "slime and Miles do not register it and few Megatrons do: take --optimizer-cpu-offload "
        "--overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer",
        "possible",
    ),
    "--log-level": _Ghost("it is SGLang's, as --sglang-log-level debug"),
}


@rule(
    title="Flags that guides name and no trainer has",
    severity="warning",
    certainty="certain",
    why="the trainer's parser ignores what it does not know, without a word: the run goes on as if it were not there",
    fix="drop it, and take the flag that exists",
    sources=("Miles guide: Debugging", "slime guide: Troubleshooting", SLIME_IGNORES),
)
def _ghost_flag(launch: Launch, parsers: ParserDump | None) -> Iterator[Found]:
    for name, flag in launch.flags.items():
        ghost = _GHOSTS.get(name)
        if ghost and not (parsers and name in parsers.options):
            message = f"{name} is in a guide, and in no code of slime, Miles or Relax"
            sure = "certain" if parsers and parsers.complete else ghost.certainty
            yield Found(message, flag.where, certainty=sure, fix=f"drop it: {ghost.instead}")


_GHOST_VARIABLE_GHOSTS = {
    "SLIME_DEBUG": "--debug-rollout-only or --debug-train-only with --save-debug-rollout-data show more"
}


@rule(
    title="Variables that guides name and nothing reads",
    severity="note",
    certainty="certain",
    why="it changes nothing: what it was meant to show will not be in the log",
    fix="drop it",
    sources=("slime guide: Troubleshooting", f"{SLIME} (no use of SLIME_DEBUG)"),
)
def _ghost_variable(launch: Launch) -> Iterator[Found]:
    for name, instead in _GHOST_VARIABLE_GHOSTS.items():
        if (variable := launch.env.get(name)) is not None and variable.origin != "unset":
            yield Found(f"{name} is set, and no code reads it", variable.where, fix=f"drop it: {instead}")


@rule(
    title="Files that a launch script sources and that are not there",
    severity="warning",
    certainty="likely",
    why="without the file the model's flags are missing, or the script ends at that line",
    fix="correct the path; scripts/models of the checkout has the trainers' own",
    sources=(f"{SLIME} scripts/low_precision/run-qwen3-4b-fp8.sh",),
    any_program=True,
)
def _source_missing(launch: Launch) -> Iterator[Found]:
    for where in launch.missing:
        # a model file holds flags; what else lies elsewhere on the machine that trains mostly sets up an environment
        severity: Severity | None = None if "/models/" in where.value or not where.value.startswith("/") else "note"
        yield Found(f"{where.value[-160:]} is sourced, and is not there", where, severity)


_ROLLOUT, _TRAIN, _LOAD = "--save-debug-rollout-data", "--save-debug-train-data", "--load-debug-rollout-data"
_ALL = "--dump-details"


@rule(
    title="Dumps of rollouts and of training with one path",
    severity="error",
    certainty="certain",
    why="the trainer refuses equal paths; --dump-details sets both, whatever else is given",
    fix="give --save-debug-train-data a path of its own",
    sources=("Relax guide: Debugging", f"{SLIME_ARGS}:1890-1895"),
)
def _dump_paths_collide(launch: Launch) -> Iterator[Found]:
    folder = launch.flags.get(_ALL)
    if folder is not None:
        for name, below in ((_ROLLOUT, "rollout_data"), (_TRAIN, "train_data")):
            if launch.has(name):
                place = " ".join(folder.values)[:80]
                message = f"{_ALL} puts these dumps into {place}/{below}: {name} is overridden"
                yield Found(message, launch.where(name), "warning", fix=f"drop {name}, or {_ALL}")
        return
    given = {name: " ".join(launch.flags[name].values) for name in (_ROLLOUT, _TRAIN, _LOAD) if launch.has(name)}
    if given.get(_TRAIN) and given[_TRAIN] == given.get(_ROLLOUT):
        message = f"{_TRAIN} and {_ROLLOUT} are the same path {given[_TRAIN][:80]}"
        yield Found(message, launch.where(_TRAIN))
    if given.get(_LOAD) and given[_LOAD] in (given.get(_ROLLOUT), given.get(_TRAIN)):
        name = _ROLLOUT if given[_LOAD] == given.get(_ROLLOUT) else _TRAIN
        message = f"{name} writes over the dumps that {_LOAD} reads: {given[_LOAD][:80]}"
        yield Found(message, launch.where(name), "warning", fix=f"give {name} another folder")


_NAMED = re.compile(r"(?i)(?<![a-z])(fp8|int4|int8|w4a16|w8a8|awq|gptq|mxfp[48]|nvfp4)(?![a-z])")


@rule(
    title="A quantized rollout checkpoint without --check-weight-update-equal",
    severity="note",
    certainty="likely",
    why="a weight that is quantized by mistake, or lost on the way to the engine, shows only as worse samples",
    fix="add --check-weight-update-equal for one start (Miles has --check-weight-update-allow-quant-error)",
    sources=(
        "slime guide: Debugging",
        f"{SLIME} train.py:29; slime/utils/arguments.py:1321",
        f"{MILES} train.py:54; miles/utils/arguments.py:3260",
    ),
)
def _weight_check_off(launch: Launch, config: HfConfig | None) -> Iterator[Found]:
    # Miles switches the check on by itself in its own tests
    on = launch.has("--check-weight-update-equal") or (launch.has("--ci-test") and launch.system == "miles")
    if on or not samples(launch) or not trains(launch) or open_ended(launch):
        return
    checkpoint = (launch.value("--hf-checkpoint") or launch.where("--hf-checkpoint").value).rstrip("/")
    scheme = config.values.get("quantization_config") if config else None
    if config is not None and isinstance(scheme, dict):
        method = str(scheme.get("quant_method", "quantized"))[:40]
        where = Where(str(config.path), item="quantization_config.quant_method", value=method)
        message = f"engines hold {method} weights, and --check-weight-update-equal is not given"
        yield Found(message, where, "warning" if method == "compressed-tensors" else None)
    elif config is None and (named := _NAMED.search(checkpoint)):
        message = f"--hf-checkpoint looks quantized ({named[1]}), and --check-weight-update-equal is not given"
        yield Found(message, launch.where("--hf-checkpoint"), None, "possible")


_MODE, _TRANSPORT = "--update-weight-mode", "--update-weight-transport"
_TRANSFER, _DIR, _LOCAL = (
    "--update-weight-transfer-mode", "--update-weight-disk-dir", "--update-weight-local-checkpoint-dir",
)  # fmt: skip


@rule(
    title="A way of sending weights that the launch's layout does not allow",
    severity="error",
    certainty="certain",
    why="the launch is refused when its arguments are checked, after it has waited for its GPUs",
    fix="colocated engines get weights over CUDA IPC: leave the transfer flags out, or remove --colocate",
    sources=(f"{SLIME_ARGS}:2041,2059", f"{MILES_ARGS}:3263,3273"),
)
def _weight_transfer(launch: Launch) -> Iterator[Found]:
    delta, transfer = launch.value(_MODE) == "delta", launch.value(_TRANSFER)
    if delta and launch.value(_TRANSPORT) != "disk" and (not launch.has(_TRANSPORT) or launch.value(_TRANSPORT)):
        yield Found(f"{_MODE} delta needs {_TRANSPORT} disk", launch.where(_MODE), *absent(launch, "error"))
    needs = [_DIR] if launch.value(_TRANSPORT) == "disk" else []
    needs += [_LOCAL] if delta else []
    shown = _MODE if delta else _TRANSPORT
    if transfer == "disk-delta":
        needs, shown = [_DIR, _LOCAL], _TRANSFER
    for name in needs:
        if not launch.has(name):
            yield Found(f"{shown} {launch.value(shown)} needs {name}", launch.where(shown), *absent(launch, "error"))
    moves = f"{_MODE} delta" if delta else f"{_TRANSFER} {transfer}" if transfer in ("p2p", "disk-delta") else ""
    if moves and launch.has("--colocate") and not launch.has("--debug-rollout-only"):
        yield Found(f"{moves} together with --colocate: the trainer refuses it", launch.where(moves.split()[0]))
    if transfer in ("p2p", "disk-delta"):
        for name, there in (
            ("--prefill-num-servers", launch.has("--prefill-num-servers")),
            ("--lora-rank", nonzero(launch, "--lora-rank")),
        ):
            if there:
                yield Found(f"{moves} together with {name}: the trainer refuses it", launch.where(name))

"""Weights that did not arrive, and checkpoints that were not read."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Hit, Launch, Log
from repro.doctor.artefacts.logs.lines import above, argument, below, by, fails, said, speaker, times, told
from repro.doctor.facts.sources import GUIDES, MILES, SLIME
from repro_golden.base.checks import Found, Where, rule

_DONE = (
    "successfully loaded checkpoint from",
    "Successfully loaded checkpoint from",
    "loaded checkpoint from",
    "Loaded checkpoint from",
    "[FSDP] Loaded model from",
)
_BEGUN = (
    "Load checkpoint from HuggingFace model into Megatron",
    " loading checkpoint from ",
    " loading release checkpoint from ",
    " loading distributed checkpoint from ",
    " loading release distributed checkpoint from ",
)
_SHARDS = "Loading checkpoint shards"
_LOADED = (*_DONE, *_BEGUN, _SHARDS)
"""What Megatron, its bridge, slime, Miles and transformers print of a checkpoint, once loaded or before it is."""
_FAILED = ("Traceback (most recent call last)", "Error(s) in loading state_dict", "will not load any checkpoints")
_PATH = re.compile(r"\(path=([^)]+)\)|(?:checkpoint|model) from (.+?)(?: \[ ?t |\s+at iteration |$)")
_NOTHING = (None, "None", "")


def _loaded(log: Log, *, fsdp: bool) -> list[Hit]:
    """The lines of a trainer's checkpoints that were loaded, or begun without a failure behind them."""
    begun = [hit for hit in said(log, *_BEGUN) if not _fails(log, hit)]
    # a progress bar of transformers, which engines and FSDP's trainer show
    bars = [hit for hit in said(log, _SHARDS) if fsdp or "FSDPTrain" in hit.text]
    return [hit for hit in (*said(log, *_DONE), *begun, *bars) if "SGLang" not in speaker(hit)]


def _fails(log: Log, hit: Hit) -> bool:
    """Whether the process that began to load failed before any step, rollout or load that ended."""
    over = min((at for at in log.series.lines.values() if at > hit.line), default=log.lines + 1)
    for text in below(log, hit, min(over - hit.line - 1, 200))[1:]:
        if any(phrase in text for phrase in _DONE):
            return False
        if "SGLang" not in text[:40] and any(phrase in text for phrase in _FAILED):
            return True
    return False


def _another(log: Log, loaded: list[Hit], load: str | None, ref: str | None, save: str | None) -> Iterator[Found]:
    """Where the reference alone was loaded, and not what --load names."""
    if load is None or ref is None or {load, ref} & {"", "None"} or "$" in load + ref or _same(load, ref):
        return
    paths = [(match[1] or match[2]).strip() for hit in loaded if (match := _PATH.search(hit.text))]
    if len(paths) == len(loaded) and all(_same(path, ref) for path in paths):
        first = save is not None and _same(load, save)
        yield Found(
            f"only --ref-load {ref} was loaded, and not --load {load}: training starts from the reference, without "
            "optimizer and random state" + (" (--save is the same folder: fine for a first run)" if first else ""),
            log.where(min(loaded)),
            severity="note" if first else None,
            certainty="likely",
            fix=f"to resume, {load} must hold latest_checkpointed_iteration.txt; leave --load out for a fresh run",
        )


def _same(path: str, other: str) -> bool:
    """Whether two paths are the same, as far as text tells: a relative one may be the other's end."""
    a, b = os.path.normpath(path), os.path.normpath(other)
    return a == b or any(not x.startswith("/") and y.endswith(f"/{x}") for x, y in ((a, b), (b, a)))


@rule(
    title="Training without a line of a checkpoint that was loaded",
    severity="warning",
    certainty="possible",
    why="a model that was never loaded is random: rollouts are gibberish from the first one on",
    fix="name a folder with latest_checkpointed_iteration.txt in --load and --ref-load; the log of rank 0 says "
    "`successfully loaded checkpoint from`",
    sources=(
        *GUIDES,
        "NVIDIA/Megatron-LM megatron/training/checkpointing.py",
        f"{SLIME} slime/backends/megatron_utils/checkpoint.py:128",
        f"{MILES} miles/backends/fsdp_utils/checkpoint.py:117",
    ),
    phrases=_LOADED,
)
def _checkpoint_never_loaded(log: Log, launch: Launch | None) -> Iterator[Found]:
    if not (log.series.steps or log.series.rollouts) or log.rank not in (None, 0):  # rank 0 alone tells what it loads
        return
    if argument("debug_rollout_only", launch, log) not in (None, "False"):
        return
    paths = {name: argument(name, launch, log) for name in ("load", "ref_load", "pretrained_checkpoint")}
    loaded = _loaded(log, fsdp=argument("train_backend", launch, log) == "fsdp")
    if loaded:
        yield from _another(log, loaded, paths["load"], paths["ref_load"], argument("save", launch, log))
        return
    named = {name: value for name, value in paths.items() if value not in _NOTHING}
    known = launch is not None or "load" in log.series.flags
    if known and not named:  # a run from scratch
        return
    (kind, number), line = next(iter(log.series.lines.items()), (("", 0), None))
    wanted = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in named.items())
    yield Found(
        "the log shows training or rollouts, but no line of a checkpoint that was loaded"
        + (f" ({wanted})" if wanted else ""),
        Where(str(log.path), line, f"{kind} {number}"),
        severity=None if named else "note",
        certainty="likely" if named and "load" in log.series.flags else None,
    )


_FILE = "could not find the metadata file "


@rule(
    title="A model that starts from random weights because its checkpoint was not found",
    severity="error",
    certainty="likely",
    why="post-training of a random model: rollouts are gibberish and nothing else says so",
    fix="let --load and --ref-load name a folder with latest_checkpointed_iteration.txt; convert a Hugging Face model"
    " with the trainer's tool first",
    sources=(
        "Miles FAQ",
        "NVIDIA/Megatron-LM megatron/training/checkpointing.py",
        f"{MILES} miles/backends/megatron_utils/model.py:962",
    ),
    phrases=(
        "will not load any checkpoints and will start from random",
        "is empty; starting from model_provider-initialized weights",
    ),
)
def _checkpoint_random_init(log: Log, launch: Launch | None) -> Iterator[Found]:
    for hit in said(log, *_checkpoint_random_init.phrases)[:1]:
        named = next((line.partition(_FILE)[2].strip() for line in reversed(above(log, hit, 5)) if _FILE in line), "")
        trained = speaker(hit) or log.series.rollouts or argument("rollout_batch_size", launch, log)
        yield Found(
            f"the model{by(hit, ' of ')} starts from random weights"
            + (f": there is no {named[:200]}" if named else "")
            + ("" if trained else "; nothing here samples rollouts, and for pretraining from scratch that is right"),
            log.where(hit),
            severity=None if trained else "note",
        )


_VALUE = re.compile("forward_logp_max_diff" + r"\W{1,8}([+-]?(?:[0-9.]{1,24}(?:[eE][+-]?[0-9]{1,4})?|nan|inf))")
_BOUND = 1.0
"""Nats: beyond it one side gives a token more than e times the probability that the other gives it."""


@rule(
    title="Log-probs of an FP8 trainer and its engine that are far apart",
    severity="warning",
    certainty="likely",
    why="the policy that samples is not the one that is trained",
    fix="quantize both sides alike (the same scales and blocks), or sample in BF16 to see whether FP8 is the cause",
    sources=("Miles guide: Debugging",),
    phrases=("forward_logp_max_diff",),
)
def _fp8_alignment(log: Log) -> Iterator[Found]:
    for hit in said(log, "forward_logp_max_diff"):
        match = _VALUE.search(hit.text)
        try:
            value = float(match[1]) if match else 0.0
        except ValueError:
            continue
        if not math.isfinite(value) or abs(value) > _BOUND:
            yield Found(
                f"log-probs of trainer and engine differ by up to {value:g}, where {_BOUND:g} is already much for FP8",
                log.where(hit),
            )
            return


_TIMEOUTS = (
    "Watchdog caught collective operation timeout",
    "ms for recv operation to complete",
    "ms for send operation to complete",
    "Timeout at NCCL work",
    "Timed out waiting for key",
    "wait timeout after ",
)
"""What NCCL's watchdog, gloo and the store say of a peer that does not answer."""
_SYNC = re.compile(
    r"update_weight|Update (?:expert )?weights|weight_sync|weights_update_group|Timer update_weights start"
    r"|_send_weights|broadcast_weights"
)
_OVER = re.compile(r"Timer update_weights end|(?:step|rollout) \d+: \{|Timer (?:train|actor_train|generate)\w* start")
_BEGINS = re.compile(r"Timer update_weights start|Update (?:expert )?weights")
_WEIGHT_SYNC_HANG_DONE = re.compile(
    r"Update (?:expert )?weights.*(?:\b100%|\bdone\b|finished|complete|succe|took|elapsed)", re.IGNORECASE
)
_BUSY = re.compile(
    r"Timer (?!update_weights start)\w+ (?:start|end)|\w+ \d+: \{'|Decode batch|Prefill batch|POST /generate"
    r"|\bJob '[^']{1,200}' \w+"
)
"""What shows that the sync is over, or that the run is."""


def _in_weight_sync(log: Log, hit: Hit) -> bool:
    """Whether a line stands in a weight sync: its own trace names it, or the last phase that began is one."""
    if _SYNC.search(hit.text) or any(_SYNC.search(line) for line in below(log, hit, 40)):
        return True
    for line in reversed(above(log, hit, 400)):
        if _OVER.search(line):
            return False
        if _SYNC.search(line):
            return True
    return False


_TAIL = 400


def _ends_in_sync(log: Log) -> Iterator[Found]:
    """A log that shows a weight sync's begin and then no more, where weights had been synchronised before."""
    if not log.series.steps and not log.series.rollouts:
        return
    first = max(log.lines - _TAIL, 1)
    begun: Hit | None = None
    for number, line in enumerate(log.around(first, log.lines), first):
        if (
            _WEIGHT_SYNC_HANG_DONE.search(line)
            or _BUSY.search(line)
            or fails(line)
            or any(phrase in line for phrase in _TIMEOUTS)
        ):
            begun = None
        elif _BEGINS.search(line):
            begun = begun or Hit(number, 0, line)
    if begun is None or not any(at < begun.line for at in log.series.lines.values()):
        return
    yield Found(
        f"the log ends in a weight sync: it began on line {begun.line} of {log.lines}, and nothing shows its end",
        log.where(begun),
        severity="warning",
        certainty="possible",
        fix="where the run is not still in it: `py-spy dump` of a trainer and of an engine shows which of them waits; "
        "NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL,P2P show which rank is late",
    )


@rule(
    title="A collective that timed out in a weight sync",
    severity="error",
    certainty="likely",
    why="trainer and engines wait for each other until the timeout ends the run",
    fix="NCCL_TIMEOUT=900, then 1800; NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL,P2P show which rank is late",
    sources=("Miles guide: Debugging", "slime guide: Troubleshooting"),
    phrases=_TIMEOUTS,
)
def _weight_sync_hang(log: Log, launch: Launch | None) -> Iterator[Found]:
    hit = next((hit for hit in said(log, *_TIMEOUTS)[:20] if _in_weight_sync(log, hit)), None)
    if hit is None:
        yield from _ends_in_sync(log)
        return
    after = re.search(r"Timeout\(ms\)=(\d{1,12})|waiting (\d{1,12})ms", hit.text)
    seconds = f" after {int(after[1] or after[2]) / 1000:g} s" if after else ""
    variables = {} if launch is None else launch.env
    steps = []
    if "NCCL_DEBUG" not in variables:
        steps.append("set NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL,P2P, and read which rank is late")
    limit = "1800" if "NCCL_TIMEOUT" in variables else "900, then 1800"
    minutes = argument("distributed_timeout_minutes", launch, log)
    steps.append(
        f"where it is only slow, NCCL_TIMEOUT={limit} and --distributed-timeout-minutes 30"
        + (f" (now {minutes})" if minutes else "")
    )
    if launch is not None and launch.asynchronous:
        steps.append("a larger --update-weights-interval syncs less often")
    else:
        steps.append("--colocate needs no network for it")
    message = (
        f"a collective timed out{seconds}{by(hit, ' on ')} while weights were synchronised{times(log, *_TIMEOUTS)}"
    )
    yield told(log, hit, message, fix="; ".join(steps))


_CLOSED = "Connection closed by peer"
_ERRORS = (
    "NCCL error", "ncclUnhandledCudaError", "ncclSystemError", "ncclInternalError", "ncclInvalidUsage",
    "ncclRemoteError", "torch.distributed.DistBackendError", "Some NCCL operations have failed or timed out",
    _CLOSED,
)  # fmt: skip


def _counts(log: Log, hit: Hit) -> bool:
    """Whether a line is evidence: what NCCL tells at its level INFO is not, and every socket's end has a peer."""
    if "NCCL INFO" in hit.text:
        return False
    if _CLOSED not in hit.text or any(phrase in hit.text for phrase in (*_ERRORS, *_TIMEOUTS) if phrase != _CLOSED):
        return True
    return "gloo" in hit.text or any(fails(line) for line in (*above(log, hit, 20), *below(log, hit, 20)))


@rule(
    title="A collective that failed or timed out",
    severity="error",
    certainty="likely",
    why="all ranks of the group end with it",
    fix="find the first rank that failed, by its time: the others only lost it; NCCL_DEBUG=INFO says why it did, and "
    "NCCL_SOCKET_IFNAME names the interface where the nodes have several",
    sources=("slime guide: Troubleshooting", "Miles guide: Debugging"),
    phrases=_ERRORS + _TIMEOUTS,
)
def _nccl_error(log: Log, launch: Launch | None) -> Iterator[Found]:
    hits = [hit for hit in said(log, *_ERRORS, *_TIMEOUTS)[:40] if _counts(log, hit) and not _in_weight_sync(log, hit)]
    if not hits:
        return
    hit = hits[0]
    what = "a collective timed out" if any(p in hit.text for p in _TIMEOUTS) else "a collective failed"
    last = next((line for line in below(log, hit, 12) if "Last error" in line), "")
    have = launch is not None and "NCCL_DEBUG" in launch.env
    message = f"{what}{by(hit, ' on ')}{times(log, *_ERRORS, *_TIMEOUTS)}{': ' + last[:160] if last else ''}"
    fix = "find the first rank that failed, by its time: the others only lost it" if have else ""
    yield told(log, hit, message, fix=fix)


_SKIPPED = (
    "No updatable SGLang engines are running; skip weight update",
    "Skipping actor-to-rollout weight update because",
)
_FILTERED = "Filtered stale group (staleness="


@rule(
    title="Samples of weights that are several updates old",
    severity="warning",
    certainty="likely",
    why="the policy is trained on what another policy wrote, and diverges from it",
    fix="--update-weights-interval 1, fewer groups in flight, and Miles' --max-weight-staleness; or correct for it "
    "with --use-tis",
    sources=(
        "slime guide: Troubleshooting",
        f"{SLIME} slime/backends/megatron_utils/actor.py:618",
        f"{MILES} miles/rollout/fully_async_data_buffer.py:160",
    ),
    phrases=(*_SKIPPED, _FILTERED),
)
def _stale_weights(log: Log, launch: Launch | None) -> Iterator[Found]:
    for hit in said(log, *_SKIPPED)[:1]:
        yield Found(
            f"the engines' weights were not updated{times(log, *_SKIPPED)}", log.where(hit), certainty="certain"
        )
    for hit in said(log, _FILTERED)[:1]:
        yield Found(f"groups were thrown away as too old{times(log, _FILTERED)}", log.where(hit), "note", "certain")
    worst = max(
        (
            (value, number, name)
            for number, metrics in log.series.rollouts.items()
            for name, value in metrics.items()
            if name.endswith("max_staleness") and "buffer" not in name and math.isfinite(value)
        ),
        default=None,
    )
    interval = argument("update_weights_interval", launch, log)
    expected = 2 * int(interval) if interval and interval.isdecimal() and len(interval) < 6 else 2
    if worst and worst[0] > expected:
        value, number, name = worst
        kind = next((kind for kind, at in log.series.lines if at == number and kind != "step"), "rollout")
        yield Found(
            f"rollout {number} holds samples {value:g} weight updates old; {expected} are to be expected",
            log.series.where(kind, number, name, value),
        )


_WEIGHT_SYNC_FAILED_SEEN = (
    "Failed to update parameter online",
    "Failed to update weights",
    "IPC weight update failed",
    "Failed to initialize custom process group",
    "Weight version mismatch",
    "[P2P] Transfer future failed",
    "Max retries exceeded with url: /update_weights",
    "Max retries exceeded with url: /init_weights_update_group",
)
_REFUSED = (" Server Error: ", " Client Error: ", 'HTTP/1.1" 500', 'HTTP/1.1" 400')
_WEIGHT_SYNC_FAILED_PATH = re.compile(r"/(?:update_weights_from_\w+|init_weights_update_group|pull_weights)")


@rule(
    title="Engines that did not take the trainer's weights",
    severity="error",
    certainty="certain",
    why="the engines go on sampling with other weights than those that are trained, or half of them",
    fix="read the engine's own log at that time; across nodes set NCCL_DEBUG=INFO and NCCL_SOCKET_IFNAME",
    sources=(
        "slime guide: Troubleshooting",
        "sgl-project/sglang python/sglang/srt/model_executor/model_runner.py",
        f"{MILES} miles/backends/megatron_utils/actor.py:794",
        f"{SLIME} slime/ray/actor_group.py:264",
    ),
    phrases=_WEIGHT_SYNC_FAILED_SEEN + _REFUSED,
)
def _weight_sync_failed(log: Log, launch: Launch | None) -> Iterator[Found]:
    refused = [hit for hit in said(log, *_REFUSED) if _WEIGHT_SYNC_FAILED_PATH.search(hit.text)]
    hits = sorted({hit.line: hit for hit in [*said(log, *_WEIGHT_SYNC_FAILED_SEEN), *refused]}.values())
    if not hits:
        return
    more = f" (on {len(hits)} lines)" if len(hits) > 1 else times(log, *_WEIGHT_SYNC_FAILED_SEEN)
    missing = [
        f"{name}={value}"
        for name, value in (("NCCL_DEBUG", "INFO"), ("NCCL_SOCKET_IFNAME", "eth0"), ("NCCL_IB_DISABLE", "0"))
        if launch is None or name not in launch.env
    ]
    fix = "read the engine's own log at that time"
    if missing:
        fix += f"; across nodes set {', '.join(missing)} (with the interface that the nodes share)"
    yield Found(f"weights of the trainer were not taken{by(hits[0], ' by ')}{more}", log.where(hits[0]), fix=fix)


_NAME = re.compile(r"\bname=(\S{1,200}) max_abs_err=(\S{1,40})")


@rule(
    title="Tensors that differ from the engine's checkpoint after the first weight sync",
    severity="error",
    certainty="certain",
    why="the engine samples from another model than the one that is trained",
    fix="a tensor that is zero was quantized by mistake or is missing from the checkpoint: check "
    "`quantization_config.ignore` and the shards; others are mapped or split wrongly on the way",
    sources=(
        "slime guide: Debugging",
        "sgl-project/sglang python/sglang/srt/utils/weight_checker.py",
        f"{SLIME} slime/backends/sglang_utils/sglang_engine.py:341",
    ),
    phrases=("check tensor equality failed",),
)
def _weight_update_unequal(log: Log) -> Iterator[Found]:
    for hit in said(log, *_weight_update_unequal.phrases)[:3]:
        names: dict[str, str] = {}
        for line in below(log, hit, 900)[1:]:
            match = _NAME.search(line)
            if match:
                names.setdefault(match[1], match[2])
            elif names:
                break
        named = ", ".join(f"{name} (off by {error})" for name, error in list(names.items())[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        count = f"{len(names)} tensors" if names else "tensors"
        which = f": {named}{more}" if named else ""
        message = f"{count}{by(hit, ' of ')} differ between the first sync and the engine's own checkpoint{which}"
        yield Found(message, log.where(hit))

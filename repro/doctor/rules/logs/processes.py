"""Processes that did not start or that died, and what they said."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from repro.doctor.artefacts.kinds import Hit, Launch, Log
from repro.doctor.artefacts.logs.lines import above, argument, below, by, goes_on, rank, rank_of, said, times, told
from repro.doctor.facts.sources import MILES, SLIME, SLIME_ARGS
from repro_golden.base.checks import Found, Severity, rule

_NO_FILE = "does not appear to have a file named config.json"
_NO_PATH = "is not a local folder and is not a valid model identifier"
_UNREAD = (
    "Should have a `model_type` key in its config.json",
    _NO_FILE,
    "Can't load the configuration of",
    "It looks like the config file at",
    _NO_PATH,
)
_ALONE = (
    _NO_FILE,
    _NO_PATH,
)
"""What says enough without a frame of AutoConfig above it."""
_DYNAMIC = "transformers_modules"
_NEAR = ("AutoConfig", "configuration_auto.py", "configuration_utils.py", "dynamic_module_utils.py")


def _found(log: Log, hit: Hit, severity: Severity | None) -> Found:
    message = f"a model's configuration could not be read{by(hit, ' by ')}{times(log, *_UNREAD)}"
    return Found(message, log.where(hit), severity)


@rule(
    title="Workers that race for a model's configuration (AutoConfig.from_pretrained)",
    severity="error",
    certainty="possible",
    why="a worker that reads a half-written file fails, now and then",
    fix="--model-name with the model's id, so that workers do not resolve the path again; where every worker fails, "
    "the path itself is wrong",
    sources=("Miles FAQ",),
    phrases=(*_UNREAD, _DYNAMIC),
)
def _autoconfig_race(log: Log, launch: Launch | None) -> Iterator[Found]:
    if argument("model_name", launch, log) not in (None, "None"):
        return
    hits = [hit for hit in said(log, *_UNREAD, _DYNAMIC) if _DYNAMIC not in hit.text or "Error" in hit.text]
    alone = None
    for hit in hits[:20]:
        if any(word in line for line in above(log, hit, 40) for word in _NEAR):
            yield _found(log, hit, "warning" if goes_on(log, hit) else None)
            return
        if alone is None and "Error" in hit.text and any(phrase in hit.text for phrase in _ALONE):
            alone = hit
    if alone is not None:
        yield _found(log, alone, "warning")


_KEY = re.compile(r"KeyError: (['\"])(.{1,100}?)\1")
_DATA_KEY_ERROR_NEAR = ("utils/data.py", "data_source.py", "rollout/data_buffer", "datasets/", "data/dataset")


@rule(
    title="Prompt data without a key that the run reads",
    severity="error",
    certainty="certain",
    why="the run ends when it reads its data",
    fix="--input-key and --label-key must be keys of every row; `repro doctor` on the data names those without",
    sources=("slime guide: Troubleshooting", f"{SLIME} slime/utils/data.py:272"),
    phrases=("KeyError: ",),
)
def _data_key_error(log: Log, launch: Launch | None) -> Iterator[Found]:
    for hit in said(log, "KeyError: ")[:20]:
        key = _KEY.search(hit.text)
        if not key or not any(word in line for line in above(log, hit, 40) for word in _DATA_KEY_ERROR_NEAR):
            continue
        names = ("input_key", "label_key", "tool_key", "metadata_key", "multimodal_keys")
        flags = [f"--{name.replace('_', '-')}" for name in names if argument(name, launch, log) == key[2]]
        which = f", which {' and '.join(flags)} names" if flags else ""
        yield Found(f"a row of the prompt data has no {key[2]!r}{which}", log.where(hit))
        return


_DENIED = ("Cannot access gated repo for url", "GatedRepoError", "RepositoryNotFoundError", "Invalid user token")
_OFFLINE = (
    "couldn't connect to 'https://huggingface.co'", "LocalEntryNotFoundError", "OfflineModeIsEnabled",
    "Max retries exceeded with url: /api/models", "Cannot find the requested files in the disk cache",
)  # fmt: skip
_HTTP = ("401 Client Error", "403 Client Error")


@rule(
    title="A model or its files that could not be downloaded",
    severity="error",
    certainty="likely",
    why="the process that needs it ends",
    fix="download it beforehand and give the folder",
    sources=("huggingface/huggingface_hub src/huggingface_hub/errors.py",),
    phrases=(*_DENIED, *_OFFLINE, _NO_PATH, *_HTTP),
)
def _hf_download(log: Log) -> Iterator[Found]:
    http = [hit for hit in said(log, *_HTTP) if "huggingface" in hit.text or "hf.co" in hit.text]
    hits = sorted({hit.line: hit for hit in [*said(log, *_DENIED, *_OFFLINE, _NO_PATH), *http]}.values())
    if not hits:
        return
    hit = hits[0]
    if _NO_PATH in hit.text:
        what, fix = "a model's path does not exist, and is no name of a model either", "correct the path on every node"
    elif any(phrase in hit.text for phrase in _OFFLINE):
        what, fix = "a model could not be downloaded: the hub was not reached", (
            "download it beforehand and give the folder, or set HF_ENDPOINT; HF_HUB_OFFLINE=1 forbids downloads"
        )  # fmt: skip
    else:
        what, fix = "a model could not be downloaded: access was denied", "set HF_TOKEN in Ray's runtime environment"
    yield told(log, hit, f"{what}{by(hit, ' by ')}{times(log, *_DENIED, *_OFFLINE, _NO_PATH)}", fix=fix)


_INDUCTOR = ("_inductor", "InductorError", "torch._dynamo.exc.BackendCompilerFailed")


@rule(
    title="A corrupt cache of torch's compiler (JSONDecodeError from inductor)",
    severity="error",
    certainty="likely",
    why="compilation fails on every start until the cache is gone",
    fix="set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 in Ray's runtime environment, or delete /tmp/torchinductor_$USER",
    sources=("Miles guide: Debugging", "Miles FAQ"),
    phrases=("JSONDecodeError",),
)
def _inductor_cache(log: Log, launch: Launch | None) -> Iterator[Found]:
    for hit in said(log, "JSONDecodeError")[:20]:
        near = [*above(log, hit, 80), *below(log, hit, 10)]
        if any(word in line for line in near for word in _INDUCTOR):
            variable = None if launch is None else launch.env.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES")
            fix = ""
            if variable is not None and variable.value == "1" and variable.origin != "runtime-env":
                fix = "the launch sets TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 where Ray's workers may not see it: " + (
                    "put it into the runtime environment, or delete the cache"
                )
            yield Found(
                f"torch's compiler could not read its cache: JSONDecodeError{times(log, 'JSONDecodeError')}",
                log.where(hit),
                fix=fix,
            )
            return


_DEAD = (
    "fully-async rollout worker exited without an exception",
    "multi-LoRA producer failed; generation is stopped",
)
_FAILING = ("fully-async loop iteration error", "fully-async task crashed", "fully-async: process task raised")
_STARTED = ("Continuous async rollout worker started", "Continuous random-async rollout worker started")
_STOPPED = ("Continuous async rollout worker stopped", "Continuous random-async rollout worker stopped")
_SLOW = "No completed rollout groups for "


@rule(
    title="A background rollout worker that ended, or whose tasks fail",
    severity="error",
    certainty="certain",
    why="training waits for samples that nobody makes, or trains on those that happen not to fail",
    fix="read the exception below that line. `Continuous async rollout worker started` is printed by older versions "
    "only: slime and Miles have no such line today, so its absence means nothing",
    sources=(
        "Miles guide: Debugging",
        f"{SLIME} slime/rollout/fully_async_rollout.py:145",
        f"{MILES} miles/rollout/fully_async_rollout.py:153",
    ),
    phrases=(*_DEAD, *_FAILING, *_STARTED, *_STOPPED, _SLOW),
)
def _async_worker_dead(log: Log) -> Iterator[Found]:
    started, stopped = said(log, *_STARTED), said(log, *_STOPPED)
    for hit in said(log, *_DEAD)[:1]:
        yield Found(f"the rollout worker ended{times(log, *_DEAD)}", log.where(hit))
        return
    if started and stopped:
        later = [
            at for (kind, _), at in log.series.lines.items() if kind in ("step", "rollout") and at > stopped[-1].line
        ]
        if later and stopped[-1].line > started[-1].line:
            yield Found("the rollout worker stopped while training went on", log.where(stopped[-1]))
    for hit in said(log, *_FAILING)[:1]:
        message = f"tasks of the rollout worker fail{times(log, *_FAILING)}; it goes on without their samples"
        yield Found(message, log.where(hit), "warning")
    for hit in said(log, _SLOW)[:1]:
        yield Found(f"the rollout worker finished nothing for minutes{times(log, _SLOW)}", log.where(hit), "warning")


_FATAL = (
    "error: unrecognized arguments:",
    "error: the following arguments are required:",
    "error: ambiguous option:",
    "error: argument --",
)
_IGNORED = (
    "The following arguments is not supported in the current sglang:",
    "is not a known argument, setting it anyway",
)


@rule(
    title="Flags that a parser refused or left unused",
    severity="error",
    certainty="certain",
    why="the run does not start, or without what the flag asks for",
    fix="`repro doctor` on the launch script with the trainer's `--help` beside it names the flags that do not exist",
    sources=(f"{SLIME} slime/backends/sglang_utils/sglang_engine.py:615", f"{SLIME_ARGS}:1657"),
    phrases=_FATAL + _IGNORED,
)
def _flags_refused(log: Log) -> Iterator[Found]:
    for hit in said(log, *_FATAL)[:3]:
        yield Found(
            f"a parser refused the command line: {hit.text[hit.text.find('error: ') + 7 :][:200]}", log.where(hit)
        )
    for hit in said(log, *_IGNORED)[:3]:
        at = max(hit.text.find(_IGNORED[0]), 0)
        yield Found(f"a flag has no effect here: {hit.text[at:][:200]}", log.where(hit), severity="warning")


_SEEN = (
    "found NaN in local grad norm", "found Inf in local grad norm", "found NaN in local forward loss calculation",
    "found Inf in local forward loss calculation", "found NaN in grad norm",
)  # fmt: skip
_PLACE = re.compile(r"Rank (\d{1,6}), node (\S{1,80}), device (\d{1,4}), iteration (\d{1,12})")


@rule(
    title="Megatron's check found a loss or gradient that is not finite",
    severity="error",
    certainty="certain",
    why="the step cannot be applied, and the run ends",
    fix="look at that rollout's dump for non-finite log-probs, empty responses and a template applied twice; "
    "--no-check-for-nan-in-loss-and-grad skips such steps only for the time of the search",
    sources=("Miles FAQ", "NVIDIA/Megatron-LM megatron/core/distributed/param_and_grad_buffer.py"),
    phrases=_SEEN,
)
def _gradient_check_failed(log: Log) -> Iterator[Found]:
    for hit in said(log, *_SEEN)[:1]:
        place = _PLACE.search(hit.text)
        who = f" (rank {place[1]} on {place[2]}, iteration {place[4]})" if place else by(hit, " on ")
        what = "loss" if "loss" in hit.text else "gradient"
        yield told(log, hit, f"Megatron found a {what} that is not finite{who}{times(log, *_SEEN)}")


_FACTS = {
    "class": re.compile(r"\bclass_name: (\S{1,100})"),
    "pid": re.compile(r"(?:\bpid: |Worker PID: )(\d{1,10})"),
    "ip": re.compile(r"(?:^\W*ip: |Worker IP address: )(\S{1,60})"),
    "rank": re.compile(r"(?:\b|_)(?:rank|RANK)[=: ]{1,2}(\d{1,6})"),
    "detail": re.compile(r"Worker exit detail: (.{1,300})"),
}
_CONTEXT = "ActorDiedErrorContext"
"""How Ray's own logs speak of every actor that ended, as it should or not."""
_INTENDED = ("user request", "exit_actor() is called", "INTENDED_USER_EXIT", "INTENDED_SYSTEM_EXIT")
_MOST = 5


def _first(pattern: re.Pattern[str], lines: Sequence[str]) -> re.Match[str] | None:
    return next((match for line in lines if (match := pattern.search(line))), None)


def _cause(facts: dict[str, str], lines: Sequence[str]) -> str:
    text = " ".join(lines)
    if any(word in text for word in ("running low on memory", "memory usage threshold", "due to OOM")):
        return "Ray killed it because the node's memory was nearly full"
    if "raised in its creation task" in text:
        return "an error of its own while it started"
    detail = facts.get("detail", "")
    if "connection error code 2" in detail:
        return "it ended without a word, as by SIGKILL of the kernel's OOM killer, `ray stop --force` or a crash"
    if "SIGTERM" in detail:
        return "SIGTERM from outside"
    if "killed by `ray.kill`" in text:
        return "the program itself ended it by ray.kill"
    if "exit code None" in detail:
        return "killed from outside, as when a pod exceeds its memory"
    if "illegal memory access" in text:
        return "an illegal memory access, which `illegal-memory-access` is about"
    return detail[:160] or "these lines do not say of what"


@rule(
    title="A rank or another process of Ray's that died",
    severity="error",
    certainty="certain",
    why="its group cannot go on without it",
    fix="read the end of that process's own log (logs/worker-*-PID.err in Ray's session folder) and `dmesg` of its "
    "node for the OOM killer",
    sources=("Miles guide: Debugging", "ray-project/ray python/ray/exceptions.py"),
    phrases=(
        "ActorDiedError",
        "WorkerCrashed",
        "RaySystemError",
        "RayActorError",
        "ActorUnavailableError",
        "The actor died unexpectedly before finishing this task",
        "The actor died because of an error raised in its creation task",
        "A worker died or was killed while executing a task by an unexpected system error",
        "The worker died unexpectedly while executing this task",
    ),
)
def _rank_died(log: Log) -> Iterator[Found]:
    reported: set[tuple[str, str]] = set()
    ranks: set[str] = set()
    for hit in said(log, *_rank_died.phrases):
        if _CONTEXT in hit.text:
            continue
        lines = below(log, hit, 14)
        if any(word in line for line in lines for word in _INTENDED):
            continue
        facts = {name: match[1] for name, pattern in _FACTS.items() if (match := _first(pattern, lines))}
        if "pid" in facts and "rank" not in facts and (number := rank_of(log, facts["pid"], facts.get("ip", ""))):
            facts["rank"] = number
        who = (facts.get("class", ""), facts.get("pid", ""))
        if who == ("", "") and rank(hit):  # torch begins each line of a rank's last exception with its number
            who = ("rank", rank(hit))
            if who[1] in ranks:
                continue
            facts["rank"] = who[1]
        if reported and (who in reported or who == ("", "")):
            continue
        reported.add(who)
        ranks.add(facts.get("rank", ""))
        name = facts.get("class") or "a process of Ray's"
        places = [f"{what} {facts[what]}" for what in ("rank", "pid", "ip") if what in facts]
        said_by = "" if facts.get("pid") or who[0] == "rank" else by(hit, ", said by ")
        placed = f" ({', '.join(places)})" if places else ""
        yield told(log, hit, f"{name}{placed} died{said_by}: {_cause(facts, lines)}")
        if len(reported) == _MOST:
            return


_NO_GCS = "Failed to connect to GCS"


@rule(
    title="A Ray cluster that no longer answers (Failed to connect to GCS)",
    severity="error",
    certainty="likely",
    why="whoever takes the address of a cluster that was killed tries again until its time is up",
    fix="`ray stop --force` and `rm -f /tmp/ray/ray_current_cluster` (or below --temp-dir), which names the cluster "
    "that is gone; unset RAY_ADDRESS; start again. Where it should be there, its gcs_server.out says why it ended",
    sources=(
        "ray-project/ray src/ray/rpc/gcs/gcs_rpc_client.h",
        "ray-project/ray python/ray/scripts/scripts.py (stop)",
    ),
    phrases=(_NO_GCS,),
)
def _ray_gcs_unreachable(log: Log) -> Iterator[Found]:
    for hit in said(log, _NO_GCS)[:1]:
        address = _GCS_ADDRESS.search(hit.text)
        where = f" at {address[1]}" if address else ""
        removed = "`ray stop --force` removes /tmp/ray/ray_current_cluster, which still names one that was killed"
        message = f"no Ray cluster answers{where}{times(log, _NO_GCS)}; {removed}"
        # Google's storage is called GCS too
        yield told(log, hit, message, certainty=None if _RAY.search(hit.text) else "possible")


_RAY = re.compile(r"gcs_(rpc_)?client|gcs_server|GCS (at address|within|may have)|raylet|\bray\b", re.I)
_GCS_ADDRESS = re.compile(r"address[ =:]+(\S{1,60}?:\d{1,5})\b")
_FOLDED = "x across cluster]"
_FAULT = re.compile(r"error|exception|timed? ?out|\bnan\b|killed|died", re.IGNORECASE)


@rule(
    title="Faults of several ranks that Ray shows as one line",
    severity="note",
    certainty="certain",
    why="which ranks failed, and which did not, is not to be seen in the job's output",
    fix="RAY_DEDUP_LOGS=0 in the environment of `ray job submit` and of `ray start` while looking for the fault",
    sources=("Miles guide: Debugging",),
    phrases=(_FOLDED,),
)
def _ray_dedup(log: Log) -> Iterator[Found]:
    faults = [hit for hit in said(log, _FOLDED) if _FAULT.search(hit.text)]
    for hit in faults[:1]:
        yield Found(f"one line tells of a fault of several processes, and not of which: {hit.text}", log.where(hit))


_HEAD = "Traceback (most recent call last):"
_PREFIX = re.compile(r"^(?:\([^()]*(?:\([^()]*\))?[^()]* pid=\d+[^)]*\) ?|\[rank\d+\]: ?|\[[^\]]*\] \S+:\d+ - )+")
_LAST = re.compile(r"^(?:[A-Za-z_][\w.]*)(?:: .*|)$")
_ENDED = ("KeyboardInterrupt", "SystemExit", "CancelledError", "asyncio.exceptions.CancelledError", "GeneratorExit")
_TRACEBACK_MOST, _LOOKED_AT = 3, 20
_OF_MANY = ("KeyError: ", "Timer update_weights start")
"""A line of a key stands for one rule among many, and that of a weight sync for none that explains an error."""


def _last_line(lines: list[str]) -> str:
    """The line that names the exception: the first one behind the frames that is not indented."""
    head = lines[0].find(_HEAD)
    width = len(_PREFIX.sub("", lines[0])) - len(lines[0]) + head if head >= 0 else 0
    seen = False
    for line in lines[1:]:
        bare = _PREFIX.sub("", line)
        if bare.startswith(("File ", "  ")) or not bare:
            seen = True
        elif seen and _LAST.match(bare) and not bare.startswith(("File", "During")):
            return bare if width >= 0 else ""
    return ""


@rule(
    title="An exception that no other rule explains",
    severity="warning",
    certainty="possible",
    why="it may be what ended the run; where training goes on behind it, it may be harmless",
    fix="read the frames above it; the first exception of a run is the one that matters, later ones follow from it",
    sources=("Miles guide: Debugging",),
    phrases=(_HEAD,),
)
def _traceback(log: Log) -> Iterator[Found]:
    hits = said(log, _HEAD)[-_LOOKED_AT:]
    explained = [phrase for phrase in log.explained if phrase not in _OF_MANY]
    reported: set[str] = set()
    for hit in hits:
        lines = below(log, hit, 150)
        last = _last_line(lines)
        if not last or last in reported or last.startswith(_ENDED):
            continue
        end = lines.index(next(line for line in lines if last in line))
        if any(phrase in line for line in lines[: end + 3] for phrase in explained):
            continue
        reported.add(last)
        yield Found(
            f"an exception: {last[:240]}",
            log.where(Hit(hit.line + end, hit.offset, last)),
            severity="note" if goes_on(log, hit) else None,
        )
        if len(reported) == _TRACEBACK_MOST:
            return

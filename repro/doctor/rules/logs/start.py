"""What goes wrong before the first step."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Hit, Launch, Log
from repro.doctor.artefacts.logs.lines import above, argument, below, by, goes_on, said, times, told
from repro.doctor.facts.sources import SLIME
from repro_golden.base.checks import Found, Severity, rule

_NO_FILE = "does not appear to have a file named config.json"
_NO_PATH = "is not a local folder and is not a valid model identifier"
_SEEN = (
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
    message = f"a model's configuration could not be read{by(hit, ' by ')}{times(log, *_SEEN)}"
    return Found(message, log.where(hit), severity)


@rule(
    title="Workers that race for a model's configuration (AutoConfig.from_pretrained)",
    severity="error",
    certainty="possible",
    why="a worker that reads a half-written file fails, now and then",
    cure="--model-name with the model's id, so that workers do not resolve the path again; where every worker fails, "
    "the path itself is wrong",
    sources=("Miles FAQ",),
    phrases=(*_SEEN, _DYNAMIC),
)
def _autoconfig_race(log: Log, launch: Launch | None) -> Iterator[Found]:
    if argument("model_name", launch, log) not in (None, "None"):
        return
    hits = [hit for hit in said(log, *_SEEN, _DYNAMIC) if _DYNAMIC not in hit.text or "Error" in hit.text]
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
    cure="--input-key and --label-key must be keys of every row; `repro doctor` on the data names those without",
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
    cure="download it beforehand and give the folder",
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
        what, cure = "a model's path does not exist, and is no name of a model either", "correct the path on every node"
    elif any(phrase in hit.text for phrase in _OFFLINE):
        what, cure = "a model could not be downloaded: the hub was not reached", (
            "download it beforehand and give the folder, or set HF_ENDPOINT; HF_HUB_OFFLINE=1 forbids downloads"
        )  # fmt: skip
    else:
        what, cure = "a model could not be downloaded: access was denied", "set HF_TOKEN in Ray's runtime environment"
    yield told(log, hit, f"{what}{by(hit, ' by ')}{times(log, *_DENIED, *_OFFLINE, _NO_PATH)}", cure=cure)


_INDUCTOR = ("_inductor", "InductorError", "torch._dynamo.exc.BackendCompilerFailed")


@rule(
    title="A corrupt cache of torch's compiler (JSONDecodeError from inductor)",
    severity="error",
    certainty="likely",
    why="compilation fails on every start until the cache is gone",
    cure="set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 in Ray's runtime environment, or delete /tmp/torchinductor_$USER",
    sources=("Miles guide: Debugging", "Miles FAQ"),
    phrases=("JSONDecodeError",),
)
def _inductor_cache(log: Log, launch: Launch | None) -> Iterator[Found]:
    for hit in said(log, "JSONDecodeError")[:20]:
        near = [*above(log, hit, 80), *below(log, hit, 10)]
        if any(word in line for line in near for word in _INDUCTOR):
            variable = None if launch is None else launch.env.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES")
            cure = ""
            if variable is not None and variable.value == "1" and variable.origin != "runtime-env":
                cure = "the launch sets TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 where Ray's workers may not see it: " + (
                    "put it into the runtime environment, or delete the cache"
                )
            yield Found(
                f"torch's compiler could not read its cache: JSONDecodeError{times(log, 'JSONDecodeError')}",
                log.where(hit),
                cure=cure,
            )
            return

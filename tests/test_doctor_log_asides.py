"""Lines that quote a failure, advise on it or show it, which is no sign; and failures that are told all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_log_kit import LOADED, actor, engine, found, read, step, trace

from repro.doctor.artefacts.logs.asides import aside
from repro.doctor.artefacts.logs.scan import KEPT

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB."
ACCESS = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize(
    "line",
    [
        '(SGLangEngine pid=7) INFO: If you see "CUDA out of memory", reduce --mem-fraction-static.',
        "+ echo 'on torch.OutOfMemoryError: CUDA out of memory we restart'",
        "++ grep -c 'No space left on device' train.log",
        f'(RolloutManager pid=1) WARNING response of sample 3: "RuntimeError: {ACCESS} is a common error ..."',
        f"(RolloutManager pid=1) Finish rollout: ['What is this? RuntimeError: {ACCESS}'], label: 4, reward: 1",
        "(ToolSandbox pid=3) sandbox result: Segmentation fault (core dumped)",
        actor("tool_output: OSError: [Errno 28] No space left on device"),
        engine("WARNING: to avoid CUDA out of memory, lower --mem-fraction-static"),
        actor("[2026-11-20 15:47:01] [INFO] retries upon CUDA out of memory: 3"),
        "2026-11-20 15:47:01,123 - root - DEBUG - handlers of NCCL error, ActorDiedError are set",
        "the guide says \u201cScheduler hit an exception\u201d of a scheduler that died",
    ],
)
def test_a_failure_that_a_line_only_mentions_is_not_told(line: str, tmp_path: Path) -> None:
    """Advice, samples, what a tool gave, quotations and commands were certain findings, one an error."""
    assert found(read(tmp_path, [LOADED, line, step(0)])) == {}
    assert found(read(tmp_path, [LOADED, step(0), line])) == {}


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ([engine(OOM)], "oom-engine"),
        ([f"2026-11-20 15:47:01,123 - ERROR - the engine said '{OOM}'"], "oom-training"),
        ([f'{{"levelname": "ERROR", "message": "{OOM}"}}'], "oom-training"),
        ([f"RuntimeError: worker failed with error '{OOM}', see above"], "oom-training"),
        ([f"[rank3]: Exception: b'{{\"error\": \"{OOM}\"}}'"], "oom-training"),
        ([actor(f"MaxRetryError(\"{ACCESS}\") thrown while requesting")], "illegal-memory-access"),
        ([actor("rank 3 can't go on: No space left on device")], "disk-full"),
        ([actor("INFO it ends:"), *map(actor, trace(OOM)), actor("INFO CUDA out of memory")], "oom-training"),
        ([actor("INFO CUDA out of memory"), actor("terminate called after throwing an instance")], "oom-training"),
        ([*map(actor, trace("RuntimeError: engine")), actor(f'stderr was "{OOM}"')], "oom-training"),
        ([engine('INFO:     10.0.0.9:1 - "POST /resume_memory_occupation HTTP/1.1" 500')], "buffers-released"),
        (["bash: line 1: 77 Segmentation fault      (core dumped) python train.py"], "segfault"),
    ],
)  # fmt: skip
def test_a_failure_is_told_in_whatever_form(lines: list[str], name: str, tmp_path: Path) -> None:
    """Errors, exceptions that quote others, records in JSON, and what an exception or a death bears out are signs."""
    assert name in found(read(tmp_path, [LOADED, *lines]))


def test_samples_that_quote_a_failure_do_not_hide_it(tmp_path: Path) -> None:
    """A failure behind hundreds of samples that quote it is found, and counted without them."""
    sample = f"(RolloutManager pid=1) Finish rollout: ['{OOM}'], label: 4, reward: 1"
    (only,) = found(read(tmp_path, [LOADED, *[sample] * (2 * KEPT), step(0), engine(OOM)]))["oom-engine"]
    assert only.where.line == 2 * KEPT + 3
    quoting = [actor(f'WARNING sample response: "{ACCESS}"')] * 3
    (only,) = found(read(tmp_path, [LOADED, *quoting, actor(ACCESS)]))["illegal-memory-access"]
    assert "lines" not in only.message


@pytest.mark.parametrize("width", [10, 5_000, 200_000])
def test_a_quotation_is_seen_in_a_line_of_any_length(width: int, tmp_path: Path) -> None:
    """Of a long line its beginning and what is near decide."""
    words = "word " * (width // 5)
    assert found(read(tmp_path, [LOADED, f"Finish rollout: ['{words}{ACCESS} {words}']"])) == {}
    assert found(read(tmp_path, [LOADED, f'it said: {words}"perhaps {ACCESS}", {words}'])) == {}
    assert "illegal-memory-access" in found(read(tmp_path, [LOADED, f"{words}{ACCESS}{words}"]))


@pytest.mark.parametrize("text", ["'" * 5000, "(" * 5000, "[a] " * 2000, "(a pid=" * 900, "a\\" * 4000, "if it " * 900])
def test_any_line_is_judged(text: str) -> None:
    """Odd text around a phrase raises nothing."""
    assert aside(text, "NCCL error", text) in ("", "level", "quoted", "shown")


VERL = [
    "[prompt] Why does my training die?",
    f"[response] {OOM}",
    "Lower the batch. Else:",
    OOM,
    "[ground_truth] x",
    "[score] 1.0",
]
VERL_STEP = "step:1 - actor/pg_loss:0.1 - actor/grad_norm:0.2 - perf/throughput:1.5"
TABLE = ["│ Prompt      │ Completion │ Reward │", f"│ Fix my code │ {OOM[:50]} │ 0.50 │"]
CHAT = ["<|im_start|>assistant", OOM, "it is<|im_end|>", f"<|im_start|>user {OOM}<|im_end|>"]
IGNORED = [
    f'Sample 0: "{OOM}" reward=1.0',
    "Exception ignored in: <function Pool.__del__ at 0x7f>",
    "Traceback (most recent call last):",
    '  File "/usr/lib/python3.11/multiprocessing/pool.py", line 271, in __del__',
    "    _warn(f'unclosed running multiprocessing pool {self!r}',",
    "ResourceWarning: unclosed running multiprocessing pool",
]


@pytest.mark.parametrize(
    "sample",
    [VERL, VERL[:2] + VERL[4:], [f"(TaskRunner pid=3) {line}" for line in VERL], TABLE, CHAT, IGNORED],
    ids=["verl", "one line", "Ray", "a table", "a chat", "ignored"],
)
def test_what_a_model_said_is_no_failure(sample: list[str], tmp_path: Path) -> None:
    """Samples of several lines, rows of a table, turns of a chat; an exception that Python ignores bears none out."""
    assert found(read(tmp_path, [*sample, VERL_STEP])).keys() <= {"traceback"}
    assert found(read(tmp_path, [LOADED, VERL_STEP, *sample])).keys() <= {"traceback"}
    late = found(read(tmp_path, [*sample * (2 * KEPT), VERL_STEP, *trace(OOM)]))["oom-training"]
    assert late[0].where.line == 2 * KEPT * len(sample) + 5
    assert "after 1 optimizer steps" in late[0].message


@pytest.mark.parametrize(
    "lines",
    [
        [VERL[0], "[response] fine", *trace(OOM)],
        [VERL[0], "[response] fine", *trace(OOM), VERL[0], "[response] fine", "[ground_truth] x", "[score] 0"],
        ["(TaskRunner pid=3) [response] fine", actor(OOM), "(TaskRunner pid=3) [ground_truth] x"],
        ["[response] fine", f"[rank3]: {OOM}", "[ground_truth] x"],
        ["<|im_start|>assistant", "fine", *trace(OOM)],
        [*CHAT, *trace(OOM)],
        [f"│ {OOM} │"],
        [*IGNORED, *trace(OOM)],
    ],
)
def test_a_failure_beside_samples_is_told(lines: list[str], tmp_path: Path) -> None:
    """One behind a sample that is never ended, between samples, of another process, in a panel."""
    assert "oom-training" in found(read(tmp_path, [LOADED, *lines]))

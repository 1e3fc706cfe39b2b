"""Whose memory ran out and in which cycle, which checkpoint was loaded, and configurations that are missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_log_kit import (
    BACKWARD,
    LOADED,
    OOM,
    RULES,
    SCHEDULER,
    SCHEDULER_FRAME,
    SYNC_STARTS,
    actor,
    arguments,
    engine,
    found,
    read,
    slime,
    step,
    trace,
)

from repro.doctor.artefacts.launches.scripts import read_launch

COLOCATED = [*arguments(colocate=True, load="/ckpt"), LOADED]
NEVER = arguments(load="/ckpt/qwen", ref_load="/ckpt/qwen")
DECODE = "(SGLangEngine pid=9) Decode batch, #running-req: 3, #token: 512"
TRAINED = [
    "ray.exceptions.RayTaskError(OutOfMemoryError): ray::MegatronTrainRayActor.train() (pid=4242, ip=10.0.0.4)",
    '  File "/root/slime/slime/backends/megatron_utils/model.py", line 640, in train_one_step',
    DECODE,
    '  File "/usr/lib/python3/torch/autograd/graph.py", line 829, in _engine_run_backward',
    OOM,
]


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (TRAINED, "oom-training"),
        ([engine("SGLangEngine is ready"), DECODE, *BACKWARD[:3], DECODE, *BACKWARD[3:]], "oom-training"),
        ([DECODE, engine("sglang/srt is ready"), OOM], "oom-training"),
        ([*BACKWARD[:-1], *SCHEDULER[:2], BACKWARD[1], *SCHEDULER[2:]], "oom-engine"),
        (["ray.exceptions.RayTaskError(RuntimeError): ray::SGLangEngine.init() (pid=9)", OOM], "oom-engine"),
        (trace(OOM, SCHEDULER_FRAME), "oom-engine"),
    ],
)
def test_chatter_of_engines_is_none_of_a_memory_error(lines: list[str], name: str, tmp_path: Path) -> None:
    """Whose memory was used up is told by who says so and by its own traceback, not by other processes' lines."""
    findings = found(read(tmp_path, [LOADED, step(0), step(1), *lines]))
    assert [key for key in findings if key.startswith("oom")] == [name]
    if lines is TRAINED:
        assert "in a backward pass" in findings[name][0].message
        assert "--recompute-activations" in findings[name][0].fix


ROLLOUT = [actor(slime(f"rollout {number}: {{'rollout/raw_reward': 0.5}}")) for number in range(3)]
FOUR = [step(number) for number in range(4)]


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ([*FOUR, ROLLOUT[1]], "oom-second-step"),
        ([ROLLOUT[0], *FOUR, ROLLOUT[1], step(4)], "oom-second-step"),
        ([ROLLOUT[0], step(0)], "oom-first-step"),
        ([SYNC_STARTS, ROLLOUT[0], *FOUR], "oom-first-step"),
        ([SYNC_STARTS, ROLLOUT[0], *FOUR, SYNC_STARTS], "oom-second-step"),
        ([*arguments(num_steps_per_rollout=4), step(0)], "oom-first-step"),
        ([*arguments(num_steps_per_rollout=4), ROLLOUT[0], *FOUR], "oom-second-step"),
        ([*arguments(rollout_batch_size=8, n_samples_per_prompt=8, global_batch_size=16), *FOUR], "oom-second-step"),
        ([*arguments(num_steps_per_rollout=4), *FOUR, *FOUR, step(4), step(5), step(6), step(7)], "oom-training"),
        ([ROLLOUT[0], *FOUR, ROLLOUT[1], step(4), ROLLOUT[2]], "oom-training"),
    ],
)
def test_cycles_of_shared_gpus_are_rollouts_not_steps(lines: list[str], name: str, tmp_path: Path) -> None:
    """Offload and reload happen once per rollout, so the second cycle is the second rollout, after any steps."""
    findings = found(read(tmp_path, [*COLOCATED, *lines, *BACKWARD]))
    assert [key for key in findings if key.startswith("oom")] == [name]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([step(0)], ("note", None)),
        ([ROLLOUT[0]], ("note", None)),
        ([LOADED, step(0)], None),
        ([engine("Loading checkpoint shards: 100%|###| 4/4"), step(0)], ("note", None)),
        (["(FSDPTrainRayActor pid=3) Loading checkpoint shards: 100%|###| 4/4", step(0)], None),
        ([actor(" loading distributed checkpoint from /ckpt at iteration 7"), DECODE, step(0)], None),
        ([*NEVER, actor(" loading checkpoint from /ckpt at iteration 7"), *BACKWARD, step(0)], ("warning", "likely")),
        ([*arguments(load=None), step(0)], None),
    ],
)
def test_loading_that_began_or_is_not_the_trainers(
    lines: list[str], expected: tuple[str, str | None] | None, tmp_path: Path
) -> None:
    """A log alone gives a note at most; an engine's progress bar and a load that failed are no loading."""
    hits = found(read(tmp_path, lines), "checkpoint-never-loaded").get("checkpoint-never-loaded", [])
    assert [(hit.severity or "warning", hit.certainty) for hit in hits] == ([] if expected is None else [expected])


def test_reference_loaded_instead_of_the_checkpoint(tmp_path: Path) -> None:
    """Where the reference alone was loaded and --load names another folder, the run is a silent finetune."""
    script = tmp_path / "run.sh"
    rule = RULES["checkpoint-never-loaded"]
    ref = actor("  successfully loaded checkpoint from /ref/ [ t 1/2, p 1/1 ] at iteration 0")
    both = [ref.replace("/ref/", "/run"), ref]
    script.write_text("python3 train.py --load /run --ref-load /ref --save /other\n")
    launch = read_launch(script)
    (only,) = rule.check(read(tmp_path, [ref, ref, step(0)]), launch)
    assert (only.severity, only.certainty, only.where.line) == (None, "likely", 1)
    assert "only --ref-load /ref was loaded, and not --load /run" in only.message
    assert not list(rule.check(read(tmp_path, [*both, step(0)], "both.log"), launch))
    script.write_text("python3 train.py --load /run --ref-load /ref --save /run\n")
    (only,) = rule.check(read(tmp_path, [ref, step(0)]), read_launch(script))
    assert only.severity == "note"
    script.write_text("python3 train.py --load /ref --ref-load /ref\n")
    assert not list(rule.check(read(tmp_path, [ref, step(0)]), read_launch(script)))


@pytest.mark.parametrize(
    "message",
    [
        "OSError: /shared/model does not appear to have a file named config.json. Checkout 'https://huggingface.co/'",
        "OSError: /shared/model is not a local folder and is not a valid model identifier listed on 'https://hf.co'",
    ],
)
def test_configuration_missing_without_frames_is_a_warning(message: str, tmp_path: Path) -> None:
    """The exception's line alone, without a frame of AutoConfig, says enough for a warning."""
    (only,) = found(read(tmp_path, [engine(message)]), "autoconfig-race")["autoconfig-race"]
    assert (only.severity, only.where.line) == ("warning", 1)

"""Rules on a launch's own flags: what trainers refuse, ignore, or run out of memory on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from doctor_launch_kit import Script
from findings_kit import PATIENTS, told, tried
from hypothesis import given
from hypothesis import strategies as st

from repro.doctor.artefacts.checkpoints.hf import read_config
from repro.doctor.artefacts.checkpoints.tokenizer import read_tokenizer
from repro.doctor.artefacts.kinds import HfConfig, Launch, Tokenizer
from repro.doctor.artefacts.launches.scripts import launch_of_argv, read_launch
from repro.doctor.facts.launches import open_ended

MOE = {"--num-experts": "128", "--moe-permute-fusion": ""}


@pytest.mark.parametrize("system", ["slime", "miles", "relax"])
def test_a_clean_launch_is_clean_for_every_rule(system: str, tmp_path: Path) -> None:
    """The launch that all cases start from gives no finding at all."""
    entry = "relax/entrypoints/train.py" if system == "relax" else "train.py"
    launch = Script(system=system, entry=entry).read(tmp_path)
    assert launch.system == system
    assert not tried(launch)


def test_what_a_shell_alone_knows_makes_a_missing_flag_uncertain(tmp_path: Path) -> None:
    """A flag that may hide in $EXTRA_ARGS is no error, but stays worth a look."""
    sure = Script(drop=["--ref-load"]).read(tmp_path)
    unsure = Script(drop=["--ref-load"], tail="$EXTRA_ARGS").read(tmp_path)
    assert (open_ended(sure), open_ended(unsure)) == (False, True)
    (finding,) = told("kl-without-ref", unsure)
    assert (finding.severity, finding.certainty) == ("warning", "possible")


@pytest.mark.parametrize(
    ("words", "hides"),
    [("--lr $LR", False), ("--lr 1 $(seq 16 8 256)", False), ("--load $BASE/model", False), ("--x 1 $(cat args)", True),
     ("--lr 1 ${MORE[@]}", True), ("--use-tis $@", True), ("--lr $OPTS", True)],
)  # fmt: skip
def test_which_words_may_hold_flags(words: str, hides: bool) -> None:
    """Values and paths that a shell computes hide no flags; lists and what commands print may."""
    parts = words.split(" ", 2)
    assert open_ended(launch_of_argv(["python", "train.py", *parts])) is hides


def test_a_python_launcher_gives_no_errors(tmp_path: Path) -> None:
    """Its flags come from all its branches, which need not run together: an error is only a warning there."""
    path = tmp_path / "run_model.py"
    path.write_text(
        "import miles.utils.external_utils.command_utils as U\n\n"
        'def main(dense):\n    args = "--rollout-batch-size 4 "\n'
        '    if dense:\n        args += "--kl-coef 0.1 "\n    args += "--kl-loss-coef 0.1 --num-rollout 1 "\n'
        '    U.execute_train(train_args=args, num_gpus_per_node=8, megatron_model_type="m")\n'
    )
    launch = read_launch(path)
    (finding,) = told("kl-coefs-exclusive", launch)
    assert (finding.severity, finding.certainty) == ("warning", "possible")


@given(
    cap=st.integers(256, 40_000), longest=st.integers(256, 200_000), tensor=st.sampled_from([1, 2, 4]),
    context=st.sampled_from([1, 2, 4]), nodes=st.integers(1, 8),
)  # fmt: skip
def test_the_suggested_context_parallel_size_holds_the_sample(
    cap: int, longest: int, tensor: int, context: int, nodes: int
) -> None:
    """A sample is too long exactly where it does not fit; the size suggested holds it and divides the ranks."""
    words = f"""python train.py --use-dynamic-batch-size --max-tokens-per-gpu {cap} --rollout-max-response-len {longest}
        --tensor-model-parallel-size {tensor} --context-parallel-size {context} --actor-num-nodes {nodes}"""
    reported = told("samples-too-long", launch_of_argv(words.split()))
    assert bool(reported) == (cap * context < longest)
    if reported and reported[0].fix.startswith("--context-parallel-size"):
        size = int(reported[0].fix.split()[1])
        assert size * cap >= longest
        assert nodes * 8 % (size * tensor) == 0
        smaller = [n for n in range(1, size) if n * cap >= longest and nodes * 8 % (n * tensor) == 0]
        assert smaller == []


def _config(folder: Path, **values: object) -> HfConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return read_config(folder / "config.json")


def test_the_models_positions_bound_the_context(tmp_path: Path) -> None:
    """More tokens than the model has positions are found with the config as evidence; the inner config counts."""
    launch = Script({"--rollout-max-context-len": "40000"}).read(tmp_path)
    (finding,) = told("context-length", launch, _config(tmp_path, max_position_embeddings=32768))
    assert (finding.severity, finding.where.path) == ("warning", str(tmp_path / "config.json"))
    assert "40000" in finding.message
    inner = _config(tmp_path, max_position_embeddings=512, text_config={"max_position_embeddings": 131072})
    assert told("context-length", launch, inner) == []
    assert told("context-length", launch, _config(tmp_path, max_position_embeddings="many")) == []


def test_a_prompt_that_leaves_no_token_to_generate(tmp_path: Path) -> None:
    """The longest prompt must be shorter than the context."""
    for prompt, wrong in (("8191", False), ("8192", True)):
        script = Script({"--rollout-max-context-len": "8192", "--rollout-max-prompt-len": prompt})
        reported = told("context-length", script.read(tmp_path))
        assert [finding.severity for finding in reported] == (["error"] if wrong else [])


def test_the_checkpoints_own_quantization_counts(tmp_path: Path) -> None:
    """With a config.json the name of the folder is not guessed from."""
    launch = Script({"--hf-checkpoint": "/models/fp8/Qwen3-4B"}).read(tmp_path)
    name = "weight-check-off"
    assert told(name, launch, _config(tmp_path, hidden_size=8)) == []
    (finding,) = told(name, launch, _config(tmp_path, quantization_config={"quant_method": "compressed-tensors"}))
    assert (finding.severity, finding.where.value) == ("warning", "compressed-tensors")


def _tokenizer(folder: Path, eos: str, ids: list[int]) -> Tokenizer:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "chat_template": template}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return read_tokenizer(folder)


def test_a_template_that_ends_turns_otherwise_than_generation(tmp_path: Path) -> None:
    """A base model's tokenizer with a chat template: turns end with a token that does not end generation."""
    name, launch = "stop-tokens", Script().read(tmp_path)
    base = _tokenizer(tmp_path, "<|endoftext|>", [151643])
    (finding,) = told(name, launch, base)
    assert finding.severity == "warning"
    assert "'<|im_end|>'" in finding.message
    assert "--rollout-stop '<|im_end|>'" in finding.fix
    assert told(name, Script({"--rollout-stop-token-ids": "151645"}).read(tmp_path), base) == []
    assert told(name, launch, _tokenizer(tmp_path, "<|im_end|>", [151645])) == []
    assert told(name, launch, _tokenizer(tmp_path, "<|endoftext|>", [151643, 151645])) == []


REWARDS = {
    "a key in a number": ({"--reward-key": "score"}, "error", "gives a number"),
    "a key that is not there": ({"--rm-type": "dapo", "--reward-key": "reward"}, "error", "is not in what"),
    "a boxed answer": ({"--rm-type": "boxed_dapo"}, "error", "gives a dict"),
    "an unknown type": ({"--rm-type": "maths"}, "warning", "none that"),
    "nobody to ask": ({"--rm-type": "remote_rm"}, "error", "--rm-url"),
    "the prompt as label": ({"--label-key": "prompt"}, "warning", "graded against it"),
}


@pytest.mark.parametrize("name", REWARDS)
def test_rewards_that_cannot_be_right(name: str, tmp_path: Path) -> None:
    """Each way in which reward type, key and label contradict each other; own reward code is left alone."""
    flags, severity, says = REWARDS[name]
    (finding,) = told("reward-key", Script(flags).read(tmp_path))
    assert (finding.severity, says in finding.message) == (severity, True)
    reported = told("reward-key", Script({**flags, "--custom-rm-path": "mine.reward"}).read(tmp_path))
    assert [finding.message for finding in reported] == ([finding.message] if "--label-key" in flags else [])


def test_labels_and_rewards_that_are_not_there(tmp_path: Path) -> None:
    """A graded reward without a label key trains on nothing; no reward at all fails at the first sample."""
    (label,) = told("reward-key", Script(drop=["--label-key"]).read(tmp_path))
    assert (label.severity, "labels are None" in label.message) == ("error", True)
    (none,) = told("reward-key", Script(drop=["--rm-type"]).read(tmp_path))
    assert (none.severity, "no reward" in none.message) == ("warning", True)
    assert told("reward-key", Script({"--loss-type": "sft_loss"}, drop=["--rm-type"]).read(tmp_path)) == []


NEEDS = {
    "--eval-interval": "20", "--enable-mtp-training": "", "--use-opd": "", "--opd-teacher-load": "/models/teacher",
    "--sglang-dp-size": "2", "--expert-model-parallel-size": "4",
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDS)
def test_flags_that_need_another(name: str, tmp_path: Path) -> None:
    """Each is an error at its line, and none where the trainer's part that asks for it does not run."""
    (finding,) = told("required-with", Script({name: NEEDS[name]}).read(tmp_path))
    assert (finding.severity, finding.where.item) == ("error", name)
    if name.startswith("--sglang"):
        assert told("required-with", Script({name: NEEDS[name], "--debug-train-only": ""}).read(tmp_path)) == []
    if name.startswith("--expert"):
        assert told("required-with", Script({name: NEEDS[name], **MOE}).read(tmp_path)) == []


def test_a_launch_says_how_long_it_runs(tmp_path: Path) -> None:
    """Rollouts or epochs must be given, and over-sampling takes at least a batch."""
    (finding,) = told("required-with", Script(drop=["--num-rollout"]).read(tmp_path))
    assert "neither --num-rollout nor --num-epoch" in finding.message
    (over,) = told("required-with", Script({"--over-sampling-batch-size": "16"}).read(tmp_path))
    assert "16 is below --rollout-batch-size 32" in over.message


def test_padding_that_only_costs(tmp_path: Path) -> None:
    """A large multiplier and a micro-batch size beside dynamic batching are notes, and bshd without it too."""
    name = "padded-manually"
    (micro,) = told(name, Script({"--micro-batch-size": "2"}).read(tmp_path))
    (multiplier,) = told(name, Script({"--data-pad-size-multiplier": "4096"}).read(tmp_path))
    drop = ["--use-dynamic-batch-size", "--max-tokens-per-gpu"]
    (bshd,) = told(name, Script({"--qkv-format": "bshd"}, drop=drop, system="miles").read(tmp_path))
    assert {micro.severity, multiplier.severity, bshd.severity} == {"note"}
    assert told(name, Script({"--data-pad-size-multiplier": "256"}).read(tmp_path)) == []


def test_what_is_ignored_and_what_experts_forbid(tmp_path: Path) -> None:
    """A cap that nobody heeds, an interval that train.py does not read, fp16 with expert parallelism."""
    (ignored,) = told("dynamic-batch-size", Script(drop=["--use-dynamic-batch-size"]).read(tmp_path))
    assert (ignored.severity, "not looked at" in ignored.message) == ("warning", True)
    (interval,) = told("update-interval", Script({"--update-weights-interval": "4"}).read(tmp_path))
    assert (interval.severity, "train.py" in interval.message) == ("note", True)
    experts = Script({**MOE, "--fp16": "", "--expert-model-parallel-size": "8"}).read(tmp_path)
    (refused,) = told("fp16", experts)
    assert refused.severity == "error"


REFUSED = {
    "--prefill-num-servers": ({"--prefill-num-servers": "1", "--sglang-config": "e.yaml"}, "slime", "train.py"),
    "--decoder-first-pipeline-num-layers": ({"--decoder-first-pipeline-num-layers": "3"}, "slime", "train.py"),
    "--kl-coef": ({"--advantage-estimator": "ppo", "--kl-coef": "0.1"}, "miles", "train.py"),
    "--megatron-to-hf-mode": ({"--advantage-estimator": "ppo", "--megatron-to-hf-mode": "bridge"}, "miles", "train.py"),
    "--fully-async": ({"--fully-async": ""}, "miles", "train.py"),
    "--partial-rollout": ({"--fully-async": "", "--partial-rollout": ""}, "miles", "train_async.py"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_trainers_refuse_together(name: str, tmp_path: Path) -> None:
    """Each is an error at the flag to remove, and none for a trainer that takes it."""
    flags, system, entry = REFUSED[name]
    (finding,) = told("exclusive-flags", Script(flags, system=system, entry=entry).read(tmp_path))
    assert (finding.severity, finding.where.item) == ("error", name)
    if name != "--prefill-num-servers":
        other = "slime" if system == "miles" else "miles"
        assert told("exclusive-flags", Script(flags, system=other, entry=entry).read(tmp_path)) == []


def test_engines_that_may_cut_a_request(tmp_path: Path) -> None:
    """A response as long as the engine's context is no error where a request may ask for less."""
    script = Script({"--sglang-context-length": "8000", "--custom-generate-function-path": "mine.generate"})
    (finding,) = told("context-length", script.read(tmp_path))
    assert finding.severity == "warning"


def test_disk_transfers_need_their_folders(tmp_path: Path) -> None:
    """Slime's delta mode wants the disk transport, both folders, and no colocated engines."""
    name = "weight-transfer"
    reported = told(name, Script({"--update-weight-mode": "delta"}).read(tmp_path))
    assert [part.message.rpartition(" needs ")[2] for part in reported[:2]] == [
        "--update-weight-transport disk", "--update-weight-local-checkpoint-dir",
    ]  # fmt: skip
    assert "--colocate" in reported[2].message
    whole = {
        "--update-weight-mode": "delta", "--update-weight-transport": "disk", "--update-weight-disk-dir": "/shared",
        "--update-weight-local-checkpoint-dir": "/nvme",
    }  # fmt: skip
    assert told(name, Script(whole, drop=["--colocate"]).read(tmp_path)) == []


_FLAGS = sorted(
    {word for path in PATIENTS.glob("*/faulty/run.sh") for word in re.findall(r"--[a-z0-9-]+", path.read_text())}
)
_ODD = st.sampled_from(
    ["", "nan", "-inf", "1e400", "0", "-1", "$X", "`date`", "9" * 400, "x=y", "{}", "[1", "\x00", "ü"]
)


@given(
    st.lists(st.tuples(st.sampled_from(_FLAGS), st.lists(st.one_of(_ODD, st.text(max_size=5)), max_size=2)), max_size=9)
)
def test_no_value_makes_a_rule_raise(words: list[tuple[str, list[str]]]) -> None:
    """Any values at all behind any flags: findings or none, no exception, and one line each."""
    flat = [word for name, values in words for word in (name, *values)]
    launch: Launch = launch_of_argv(["python", "train.py", *flat, "--lr", "1"])
    assert all(finding.message for finding in tried(launch))

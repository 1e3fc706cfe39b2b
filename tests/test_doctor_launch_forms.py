"""What the doctor makes of launch scripts, lists of flags, Python launchers and argv."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import warm_kit
from doctor_flags_kit import launch

from repro.doctor.artefacts.launches.scripts import LAUNCH, launch_of_argv, read_launch
from repro.doctor.examine import examine, look
from repro_golden.base.errors import ReproError

SCRIPT = """#!/bin/bash
export PYTHONUNBUFFERED=1
export NCCL_ALGO=Ring
export GONE=1
unset GONE
N=$(nvidia-smi -L | wc -l)
GPUS=${GPUS:-8}
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/tiny.sh"

CKPT_ARGS=(
   --hf-checkpoint /root/tiny
   #--hf-checkpoint /root/other
   --save "/root/a b"
)

RUNTIME_ENV_JSON="{
  \\"env_vars\\": {
    \\"PYTHONPATH\\": \\"/root/slime/:/root/Megatron-LM/\\",
    \\"NVTE\\": \\"${N}\\",
    \\"NCCL_ALGO\\": \\"Tree\\"
  }
}"

ray start --head --num-gpus ${GPUS}
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json="${RUNTIME_ENV_JSON}" \\
   -- python3 train.py \\
   --actor-num-gpus-per-node ${N} \\
   --lr=1e-6 \\
   ${MODEL_ARGS[@]} \\
   "${CKPT_ARGS[@]}" ${UNKNOWN_ARGS[@]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text("MODEL_ARGS=(\n   --num-layers 2\n   --swiglu\n)\n")
    (tmp_path / "run.sh").write_text(SCRIPT)
    return tmp_path


def test_a_script_is_read_with_its_lines(folder: Path) -> None:
    """Flags with values and lines, also those of a sourced file; what a shell must compute stays as written."""
    path = folder / "run.sh"
    read = launch(path)
    assert read.entry == "train.py"
    assert read.system == "slime"
    assert read.submitted
    assert not read.asynchronous
    assert list(read.flags) == [
        "--actor-num-gpus-per-node", "--lr", "--num-layers", "--swiglu", "--hf-checkpoint", "--save",
    ]  # fmt: skip
    assert read.flags["--actor-num-gpus-per-node"].values == ("$(nvidia-smi -L | wc -l)",)
    assert read.value("--actor-num-gpus-per-node") is None
    assert read.number("--lr") == 1e-6
    assert read.value("--save") == "/root/a b"
    assert read.flags["--save"].values == ("/root/a b",)  # an array that is not known is no value
    assert (read.where("--save").path, read.where("--save").line) == (str(path), 14)
    assert (read.where("--lr").line, read.where("--lr").value) == (30, "1e-6")
    sourced = read.where("--swiglu")
    assert (Path(sourced.path).resolve(), sourced.line) == ((folder / "models" / "tiny.sh").resolve(), 3)
    assert ("ray", "start", "--head", "--num-gpus", "8") in read.commands
    assert read.argv[:2] == ("python3", "train.py")


def test_sourced_files_are_named_as_the_script_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to here where the script was given so, although the script asks for its folder's absolute path."""
    monkeypatch.chdir(folder)
    assert launch(Path("run.sh")).where("--swiglu").path == "models/tiny.sh"
    assert launch(folder / "run.sh").where("--swiglu").path == str(folder / "models" / "tiny.sh")
    monkeypatch.chdir(folder / "models")
    assert Path(launch(Path("../run.sh")).where("--swiglu").path).samefile(folder / "models" / "tiny.sh")


def test_variables_reach_the_trainer_by_three_ways(folder: Path) -> None:
    """Exports, the runtime environment, which wins, and prefixes; what is unset is gone but noted."""
    read = launch(folder / "run.sh")
    assert {name: (setting.value, setting.origin, setting.where.line) for name, setting in read.env.items()} == {
        "PYTHONUNBUFFERED": ("1", "export", 2),
        "NCCL_ALGO": ("Tree", "runtime-env", 21),
        "PYTHONPATH": ("/root/slime/:/root/Megatron-LM/", "runtime-env", 19),
        "NVTE": ("$(nvidia-smi -L | wc -l)", "runtime-env", 20),
    }
    assert [(name, setting.origin) for name, setting in read.settings][:4] == [
        ("PYTHONUNBUFFERED", "export"), ("NCCL_ALGO", "export"), ("GONE", "export"), ("GONE", "unset"),
    ]  # fmt: skip
    before = launch_of_argv(["env", "A=1", "python", "-u", "/root/miles/train_async.py", "--x", "--y", "-1"])
    assert before.env["A"].origin == "prefix"
    assert before.asynchronous
    assert before.system == "miles"
    assert before.flags["--y"].values == ("-1",)


def test_branches_that_only_a_shell_can_take_leave_what_is_sure(tmp_path: Path) -> None:
    """A variable that branches leave different is not known; of arrays the last change is taken; known tests decide."""
    path = tmp_path / "run.sh"
    path.write_text(
        "N=$(nvidia-smi -L | wc -l)\nif [ $N -gt 4 ]; then TP=4; A=(--colocate); else TP=2; fi\n"
        'if [ -z "$MASTER" ]; then echo none; exit 1; fi\nMODE=sft\n'
        "if [ $MODE = sft ]; then B=(--sft); else B=(--rl); fi\n"
        "python3 train.py --tp $TP ${A[@]} ${B[@]}\n"
    )
    read = launch(path)
    assert read.flags["--tp"].values == ("${TP}",)
    assert [flag.name for flag in read.given] == ["--tp", "--colocate", "--sft"]


HOOKS = {
    "an if": 'if [ "$DEBUG" = 1 ]; then MORE+=(--debug-rollout-only); fi',
    "an and": '[ -n "$DEBUG" ] && MORE+=(--debug-rollout-only)',
    "an option": "while [ $# -gt 0 ]; do case $1 in -d) MORE+=(--debug-rollout-only); shift;; *) shift;; esac; done",
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_branch_that_may_not_be_taken_silences_no_rule(tmp_path: Path, hook: str) -> None:
    """What is wrong without a debugging hook is a possible warning; what is wrong either way stays an error."""
    path = tmp_path / "run.sh"
    faults = "--actor-num-nodes 1 --colocate --num-rollout 9 --rollout-batch-size 32 --n-samples-per-prompt 8"
    faults += " --global-batch-size 300"
    path.write_text(f"MORE=()\n{hook}\npython3 /root/slime/train.py {faults} ${{MORE[@]}}\n")
    (finding,) = (finding for finding in examine(look([path])).findings if finding.rule == "batch-invariant")
    assert (finding.severity, finding.certainty) == ("warning", "possible")
    assert finding.message.endswith(" (where a branch of the script is not taken)")
    assert examine(look([path])).of("error") == []
    hook = hook.replace("--debug-rollout-only", "--seed 1")
    path.write_text(f"MORE=()\n{hook}\npython3 /root/slime/train.py {faults} ${{MORE[@]}}\n")
    (finding,) = (finding for finding in examine(look([path])).findings if finding.rule == "batch-invariant")
    assert (finding.severity, finding.certainty) == ("error", "certain")


DOUBTED = {
    "two hooks": (
        'if [ "$A" ]; then M+=(--debug-rollout-only); fi\nif [ "$B" ]; then M+=(--debug-train-only); fi\n'
        "python3 /root/slime/train.py --colocate ${M[@]}",
        "debug-modes-exclusive",
    ),
    "a number": (
        'if [ -n "$LARGE" ]; then N=1024; fi\npython3 /root/slime/train.py --colocate --num-rollout 9 '
        "--actor-num-nodes 1 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size ${N:-256}",
        "batch-invariant",
    ),
    "a variable": (
        'if [ "$FA" = 1 ]; then export NVTE_ALLOW_NONDETERMINISTIC_ALGO=1; fi\n'
        "python3 /root/slime/train.py --colocate --num-rollout 9 --actor-num-nodes 1 --deterministic-mode",
        "determinism-nvte",
    ),
}


@pytest.mark.parametrize(("script", "rule"), DOUBTED.values(), ids=DOUBTED)
def test_what_a_branch_may_do_is_no_error(tmp_path: Path, script: str, rule: str) -> None:
    """Flags, numbers and variables of a branch that may not be taken: what they make wrong is possible."""
    path = tmp_path / "run.sh"
    path.write_text(f"{script}\n")
    (finding,) = (finding for finding in examine(look([path])).findings if finding.rule == rule)
    assert (finding.severity, finding.certainty) == ("warning", "possible")
    assert "(where a branch of the script is taken)" in finding.message


WAYS = {
    "the middle one of three": "case $(cat size) in a) G=(1000);; b) G=(256);; *) G=(1000);; esac",
    "none of two": "G=(256)\nif [ $S = a ]; then G=(1000); elif [ $S = b ]; then G=(1000); fi",
    "one and not the other": 'G=(1000)\nif [ "$A" ]; then G=(256); fi\nif [ "$B" ]; then G=(1000); fi',
    "a later turn": "G=(1000); i=0\nwhile [ $i -lt 2 ]; do if [ $i = 1 ]; then G=(256); fi; i=$((i+1)); done",
    "two that are apart": (
        "G=(512)\nif [ $A = 1 ]; then N=(8); else N=(4); fi\nif [ $B = 1 ]; then R=(32); else R=(64); fi"
    ),
}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_what_a_way_makes_right_is_no_error(tmp_path: Path, ways: str) -> None:
    """An error is one in all ways that a script may take, also in those that neither reading takes."""
    path = tmp_path / "run.sh"
    path.write_text(
        f"N=(8); R=(32)\n{ways}\npython3 /root/slime/train.py --colocate --num-rollout 9 --actor-num-nodes 1 "
        "--rollout-batch-size ${R[0]} --n-samples-per-prompt ${N[0]} --global-batch-size ${G[0]}\n"
    )
    findings = [finding for finding in examine(look([path])).findings if finding.rule == "batch-invariant"]
    assert {(each.severity, each.certainty) for each in findings} == {("warning", "possible")}


def test_what_is_wrong_in_each_of_three_ways_stays_an_error(tmp_path: Path) -> None:
    """What three ways leave alike is known, and so is what stands beside it."""
    path = tmp_path / "run.sh"
    path.write_text(
        "case $S in a) G=(--lr 1 --global-batch-size 300);; b) G=(--lr 2 --global-batch-size 300);; "
        "*) G=(--lr 3 --global-batch-size 300);; esac\n"
        "python3 /root/slime/train.py --colocate --num-rollout 9 --actor-num-nodes 1 --rollout-batch-size 32 "
        '--n-samples-per-prompt 8 "${G[@]}"\n'
    )
    (finding,) = (finding for finding in examine(look([path])).findings if finding.rule == "batch-invariant")
    assert (finding.severity, finding.certainty) == ("error", "certain")


def test_what_is_wrong_both_ways_is_told_as_ever(tmp_path: Path) -> None:
    """A lost backslash is an error whatever a branch adds before it: both readings find it, and count other flags."""
    path = tmp_path / "run.sh"
    path.write_text(
        'A=(--colocate --num-rollout 9)\nif [ "$M" ]; then A+=(--use-kl-loss); fi\n'
        "python3 /root/slime/train.py ${A[@]}\n  --lr 1e-6 --seed 1 --rm-type math\n"
    )
    (finding,) = (finding for finding in examine(look([path])).findings if finding.rule == "continuation-lost")
    assert (finding.severity, finding.certainty) == ("error", "certain") and "branch" not in finding.message


def test_what_one_branch_alone_launches_is_no_error(tmp_path: Path) -> None:
    """Where nothing has flags without a branch, what is wrong with them is possible."""
    path = tmp_path / "run.sh"
    flags = "--colocate --num-rollout 9 --actor-num-nodes 1 --debug-rollout-only --debug-train-only"
    path.write_text(f'A=()\nif [ "$M" ]; then A=({flags}); fi\npython3 /root/slime/train.py "${{A[@]}}"\n')
    (finding,) = (finding for finding in examine(look([path])).findings if finding.rule == "debug-modes-exclusive")
    assert (finding.severity, finding.certainty) == ("warning", "possible")
    assert examine(look([path])).of("error") == []


def test_a_python_launcher_is_no_error_and_no_all_clear(tmp_path: Path) -> None:
    """Its branches need not run together, and one that may be passed by silences nothing."""
    path = tmp_path / "launch.py"
    flags = '"--colocate --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 300 "'
    path.write_text(
        f"def main(mode):\n    train_args = {flags}\n    if mode == 'rollout':\n"
        "        train_args += '--debug-rollout-only '\n    execute_train(train_args=train_args)\n"
    )
    (finding,) = (finding for finding in examine(look([path])).findings if finding.rule == "batch-invariant")
    assert (finding.severity, finding.certainty) == ("warning", "possible")
    assert examine(look([path])).of("error") == []


@pytest.mark.parametrize(
    ("command", "entry", "system"),
    [
        ("python3 train.py --a 1", "train.py", None),
        ("torchrun --nproc-per-node 8 /root/slime/train.py --a 1", "train.py", "slime"),
        ("python -m torch.distributed.run --nnodes 1 train_async.py --a 1", "train_async.py", None),
        ("cd /root/Relax && exec python relax/entrypoints/train.py --a 1", "relax/entrypoints/train.py", "relax"),
        ("nohup env X=1 python -m slime.train --a 1 > log 2>&1 &", "slime.train", "slime"),
        ("python tools/convert.py --b 1 --c 2 --d 3\npython train.py --a 1", "train.py", None),
        ("start() { python train.py --a 1; }\nstart", "train.py", None),
        ("( set -x; python train.py --a 1 | tee log )", "train.py", None),
        ("while true; do python train.py --a 1; done", "train.py", None),
        ("ray job submit --runtime-env-json='{}' -- python other.py --a 1 --b 2 x/train.py.txt", "other.py", None),
        ("bash -c 'python train.py --a 1'", "train.py", None),
    ],
)
def test_the_trainers_command_is_found(tmp_path: Path, command: str, entry: str, system: str | None) -> None:
    """By its program, whatever stands in front of it; failing that, the command with the most flags."""
    path = tmp_path / "run.sh"
    path.write_text(f"#!/bin/sh\n# ray job submit, torchrun\n{command}\n")
    read = launch(path)
    assert (read.entry, read.system) == (entry, system)
    assert read.flags["--a"].values == ("1",)
    assert "--nproc-per-node" not in read.flags


def test_a_list_of_flags_is_a_launch(tmp_path: Path) -> None:
    """A file of flags, with comments and quotes; prose is none."""
    path = tmp_path / "flags.txt"
    path.write_text("--lr 1e-6\n# --lr 2\n--prompt-data 'a b'  # here\n--colocate\n")
    read = launch(path)
    assert {name: flag.values for name, flag in read.flags.items()} == {
        "--lr": ("1e-6",), "--prompt-data": ("a b",), "--colocate": (),
    }  # fmt: skip
    assert read.where("--prompt-data").line == 3
    path.write_text("Some words.\n--lr is a flag.\n")
    assert not LAUNCH.fits(path)


PYTHON = """import slime.utils.external_utils.command_utils as U

MODEL = "Qwen3-0.6B"
NUM_GPUS = 4


def misc():
    return "--colocate "


def execute(args):
    ckpt_args = f"--hf-checkpoint /root/{MODEL} " f"--save {args.output_dir}/x "
    perf_args = (
        "--lr 1e-6 "
        "--train-env-vars '{\\"A\\": \\"b\\"}' "
        f"{'--use-fault-tolerance ' if args.ft else ''}"
    )
    match args.backend:
        case "fsdp":
            perf_args += "--train-backend fsdp "
        case "megatron":
            perf_args += "--tensor-model-parallel-size 2 "
    if args.long:
        perf_args += f"--seq-length {args.length} "
    train_args = f"{ckpt_args} {perf_args} {misc()} {args.extra_args} "
    U.execute_train(
        train_args=train_args + f"--n {NUM_GPUS}", num_gpus_per_node=NUM_GPUS, extra_env_vars={"NCCL_ALGO": "Ring"}
    )
"""


def test_a_python_launcher_is_read_without_running_it(tmp_path: Path) -> None:
    """Strings that are put together, with what only running knows as `$name`."""
    path = tmp_path / "run.py"
    path.write_text(PYTHON)
    read = launch(path)
    assert {name: flag.values for name, flag in read.flags.items()} == {
        "--hf-checkpoint": ("/root/Qwen3-0.6B",), "--save": ("$output_dir/x",), "--lr": ("1e-6",),
        "--train-env-vars": ('{"A": "b"}',), "--tensor-model-parallel-size": ("2",), "--seq-length": ("$length",),
        "--colocate": (), "--n": ("4",),
    }  # fmt: skip
    assert read.where("--tensor-model-parallel-size").line == 22
    assert (read.entry, read.system, read.submitted) == ("train.py", "slime", True)
    assert {name: setting.value for name, setting in read.env.items()} == {"A": "b", "NCCL_ALGO": "Ring"}
    assert read.commands == (("ray", "start", "--head", "--num-gpus", "4"),)
    path.write_text("import os\nos.remove('x')\nexecute_train('--x')\n")
    assert launch(path).flags.keys() == {"--x"}


def test_argv_may_name_a_script(folder: Path) -> None:
    """`-- bash run.sh` is that script; words alone are flags."""
    assert launch_of_argv(["bash", str(folder / "run.sh")]).flags["--num-layers"].values == ("2",)
    assert launch_of_argv(["--lr", "1", "--x=a=b", "y"]).flags["--x"].values == ("a=b", "y")
    assert launch_of_argv([]).flags == {}


def test_only_files_near_the_script_are_sourced(tmp_path: Path) -> None:
    """A file elsewhere on the disk is not opened, nor one that sources itself for ever."""
    (tmp_path / "secret").write_text("A=(--secret)\n")
    scripts = tmp_path / "one" / "two"
    scripts.mkdir(parents=True)
    (scripts / "self.sh").write_text("B+=(--again)\nsource ${DIR}/self.sh\n")
    path = scripts / "run.sh"
    path.write_text(
        f"DIR={scripts}\nsource {tmp_path}/secret\nsource ../../secret\nsource $DIR/self.sh\n"
        "python train.py --x ${A[@]} ${B[@]}\n"
    )
    read = launch(path)
    assert "--secret" not in read.flags
    assert 1 <= sum(flag.name == "--again" for flag in read.given) <= 8


@pytest.mark.parametrize(
    "source",
    [
        "X=aaaaaaaaaaaaaaaa\n" + "X=$X$X$X$X\n" * 40,
        "X=aa\n" + "X=${X//a/$X}\n" * 40,
        "A=(a b c d)\n" + 'A+=("${A[@]}" "${A[@]}")\n' * 40,
        "f() { f; f; f; }\nf\n",
        "a() { b; b; b; b; }\nb() { c; c; c; c; }\n" + "c() { a; a; }\na\n",
        "(" * 3000 + ")" * 3000 + "\n",
        "if true; then " * 500 + "\n",
        'X="' + "$(echo " * 400 + "\n",
        "for i in 1 2 3 4 5 6 7 8; do " * 12 + "x=1; " + "done; " * 12 + "\n",
        "eval 'eval $X'\n" * 50,
    ],
    ids=range(10),
)
def test_a_script_made_to_exhaust_the_reader_ends(tmp_path: Path, source: str) -> None:
    """Doubling, recursion, nesting: reading stops at a bound; what was read until there is kept."""
    path = tmp_path / "run.sh"
    path.write_text("python train.py --a 1 --b 2\n" + source)
    assert launch(path).flags["--b"].values == ("2",)


WRONG = "train.py --actor-num-nodes 1 --rollout-num-gpus 8 --hf-checkpoint /hf --num-rollout 9 --rollout-batch-size 32"
WRONG += " --n-samples-per-prompt 8 --global-batch-size 255"


@pytest.mark.parametrize(
    "source",
    [
        "wait() { curl -s http://head || { sleep 1; wait; }; }\nwait\npython {}",
        "until python {}; do sleep 5; done",
        "while ! python {}\ndo sleep 5\ndone",
        "bash <<'EOF'\npython {}\nEOF",
        "ssh node <<EOF\ncd /root\npython {}\nEOF",
        'ray job submit --address=http://head -- bash -c "python {}"',
        "srun --nodes 2 bash -lc 'cd /root; python {}'",
        'tmux new-session -d "python {}"',
        "if [ $MODE = big ]; then\npython {}\nelse\npython {} --global-batch-size 256 --seed 1\nfi",
    ],
)
def test_a_trainer_is_examined_wherever_a_script_starts_it(tmp_path: Path, source: str) -> None:
    """In what a loop asks, behind what waits, in what another shell reads; and each of several that a script starts."""
    path = tmp_path / "run.sh"
    path.write_text(source.replace("{}", WRONG) + "\n")
    seen = look([path])
    assert "batch-invariant" in {finding.rule for finding in examine(seen).findings}


def test_what_of_a_script_was_not_read_is_told(tmp_path: Path) -> None:
    """Where reading ends early a note says so; a script that starts no trainer is no error, and no clean bill."""
    path = tmp_path / "run.sh"
    path.write_text(f"python {WRONG}\n" + "true\n" * 41_000 + f"python {WRONG} --seed 1\n")
    notes = [finding for finding in examine(look([path])).findings if finding.rule == "not-read"]
    assert [note.message for note in notes] == [
        "reading it ended early (too many statements): what follows was not examined"
    ]
    path.write_text("echo --nothing train.py\n")
    done = warm_kit.run([sys.executable, "-m", "repro", "doctor", str(path)], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("it starts no trainer: no command of it that could be read has flags\n")


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    """Folders, files that are gone, too large or no text, and scripts that start nothing."""
    large = tmp_path / "large.sh"
    large.write_text("# train.py --x\n" * 100_000)
    binary = tmp_path / "binary.sh"
    binary.write_bytes(b"\x00train.py --x")
    nothing = tmp_path / "nothing.sh"
    nothing.write_text("# train.py --x\necho\n")
    loop = tmp_path / "loop.sh"
    loop.symlink_to(loop)
    for path in (tmp_path, tmp_path / "gone.sh", large, binary, nothing, loop):
        with pytest.raises(ReproError) as caught:
            read_launch(path)
        assert "\n" not in str(caught.value)

"""Variables that reach a trainer by its job, a container or a shell: what is not known is not called missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doctor_launch_kit import CLEAN, DETERMINISTIC, DETERMINISTIC_ENV, ENV

from repro.doctor.artefacts.launches.scripts import launch_of_argv
from repro.doctor.examine import examine, look

VARIABLES = {**ENV, **DETERMINISTIC_ENV}
FLAGS = " ".join(f"{name} {value}".rstrip() for name, value in {**CLEAN, **DETERMINISTIC}.items())
RULES = {"cuda-connections", "determinism-half", "determinism-hash-seed"}
JOB = "ray job submit"
KNOWN = {
    "YAML": (f"{JOB} --runtime-env=env.yaml --", {"env.yaml": "yaml"}),
    "YAML, a word behind": (f"{JOB} --runtime-env conf/env.yml --", {"conf/env.yml": "yaml"}),
    "JSON that cat puts in": (f'{JOB} --runtime-env-json="$(cat env.json)" --', {"env.json": "json"}),
    "JSON that a shell reads": (f'{JOB} --runtime-env-json "$(< env.json)" --', {"env.json": "json"}),
    "JSON that read reads": (f"read -r -d '' RE <<'EOF' || true\nJSON\nEOF\n{JOB} --runtime-env-json \"$RE\" --", {}),
    "JSON with a folder of its own": (
        'D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
        + 'RE="{\\"env_vars\\": {\\"P\\": \\"$D\\", \\"Q\\": $N'
        + "".join(f', \\"{k}\\": \\"{v}\\"' for k, v in VARIABLES.items())
        + f'}}}}"\n{JOB} --runtime-env-json="$RE" --',
        {},
    ),
    "Slurm": ("srun --export=ALL," + ",".join(f"{k}={v}" for k, v in VARIABLES.items()), {}),
}
HIDDEN = {
    "a file elsewhere": f"{JOB} --runtime-env=/shared/env.yaml --",
    "a file above": f"{JOB} --runtime-env=../env.yaml --",
    "what a shell makes": f'{JOB} --runtime-env-json="$(python3 env.py)" --',
    "a part that a shell makes": f"{JOB} --runtime-env-json='{{\"env_vars\": {{'$MORE'}}}}' --",
    "an env of a file": "env $(cat .env | xargs)",
    "a container": "docker run --env-file job.env image",
    "exported": "export $(grep -v '^#' .env | xargs)\n",
    "exported by a file": "set -a; source /shared/.env; set +a\n",
}


def text_of(kind: str) -> str:
    """A runtime environment's file."""
    if kind == "json":
        return json.dumps({"env_vars": VARIABLES})
    return "env_vars:\n" + "".join(f"  {name}: {json.dumps(value)}\n" for name, value in VARIABLES.items())


@pytest.mark.parametrize("name", KNOWN)
def test_a_runtime_environment_is_read_wherever_it_stands(tmp_path: Path, name: str) -> None:
    """Beside the script, or in what a shell reads: nothing of it is missing."""
    front, files = KNOWN[name]
    for file, kind in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text_of(kind))
    path = tmp_path / "run.sh"
    path.write_text(f"{front} python3 train.py {FLAGS}\n".replace("JSON\n", text_of("json") + "\n"))
    assert [finding for finding in examine(look([path])).findings if finding.rule in RULES] == []
    for each in (path, *(tmp_path / file for file in files)):
        each.write_text(each.read_text().replace("NCCL_ALGO", "OTHER"))
    assert [f.certainty for f in examine(look([path])).findings if "NCCL_ALGO" in f.message] == ["likely"]


@pytest.mark.parametrize("name", HIDDEN)
def test_what_may_be_set_is_possibly_missing(tmp_path: Path, name: str) -> None:
    """Where some variables are not known, whatever rests on one that is not set is possible, and a note."""
    path = tmp_path / "run.sh"
    path.write_text(f"{HIDDEN[name]} python3 train.py {FLAGS}\n".replace("\n python3", "\npython3"))
    outcomes = {(finding.rule, finding.severity, finding.certainty) for finding in examine(look([path])).findings}
    assert {each for each in outcomes if each[0] in RULES} == {(rule, "note", "possible") for rule in RULES}
    path.write_text(f"python3 train.py {FLAGS}\n")
    outcomes = {(finding.rule, finding.certainty) for finding in examine(look([path])).findings}
    assert {("cuda-connections", "likely"), ("determinism-half", "likely")} <= outcomes


@pytest.mark.parametrize(
    "words",
    [
        ["bash", "-c", "X=8; python3 train.py --n $X --colocate"],
        ["/bin/sh", "-e", "-c", "python3 train.py --n 8 --colocate"],
        ["bash", "-lc", "cd /root && exec python3 train.py --n 8 --colocate"],
        ["srun", "--nodes", "2", "bash", "-c", "python3 train.py --n 8 --colocate"],
        ["ssh", "node", "python3 train.py --n 8 --colocate"],
    ],
)
def test_argv_may_hold_a_line_that_a_shell_reads(words: list[str]) -> None:
    """`-- bash -c LINE` is what the line starts, as in a script."""
    read = launch_of_argv(words)
    assert (read.entry, read.value("--n"), read.has("--colocate")) == ("train.py", "8", True)


def test_options_before_a_script_are_no_script(tmp_path: Path) -> None:
    """`-- bash -ex run.sh` is that script."""
    (tmp_path / "run.sh").write_text('python3 train.py --n "$1"\n')
    assert launch_of_argv(["bash", "-ex", str(tmp_path / "run.sh"), "8"]).value("--n") == "8"

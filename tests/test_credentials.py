"""Programs of a repository get no variable that looks like a secret, unless a case names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Repo, environment

from repro_golden.base.credentials import handed_on, looks_secret, withheld
from repro_golden.case.file import Case
from repro_golden.recording.attach.entry import argv_given
from repro_golden.replay.children import base_environment

SECRET = {
    "GITHUB_TOKEN": "ghs_x", "GITHUB_SHA": "abc", "ACTIONS_ID_TOKEN_REQUEST_URL": "https://x", "RUNNER_TEMP": "/t",
    "AWS_SECRET_ACCESS_KEY": "x", "AWS_PROFILE": "p", "AZURE_CLIENT_ID": "x", "GOOGLE_APPLICATION_CREDENTIALS": "/f",
    "GCP_PROJECT": "p", "HF_TOKEN": "x", "HUGGING_FACE_HUB_TOKEN": "x", "WANDB_API_KEY": "x", "CI_JOB_TOKEN": "x",
    "SSH_AUTH_SOCK": "/s", "NETRC": "/n", "DOCKER_AUTH_CONFIG": "{}", "KUBECONFIG": "/k", "GHTOKEN": "x",
    "PGPASSWORD": "1234", "DB_PASSWD": "x", "MYSQL_PWD": "x", "MY_PASS": "x", "api-key": "x", "OPENAI_APIKEY": "x",
    "SESSION_COOKIE": "x", "PRIVATE_KEY": "x", "CIRCLE_OIDC_TOKEN": "x", "SLACK_WEBHOOK": "x", "SENTRY_DSN": "x",
    "PIP_INDEX_URL": "https://me:pw@index/simple", "UV_INDEX": "https://tok@index", "HTTPS_PROXY": "http://a:b@proxy",
    "DATABASE": "postgres://a:b@host/x", "NOTE": "ghp_" + "a" * 36, "BLOB": "-----BEGIN RSA PRIVATE KEY-----",
    "REMOTE": "AWS_SECRET_ACCESS_KEY=abc", "GIT_ASKPASS": "/a", "VSCODE_GIT_IPC_HANDLE": "/s",
    "SLACK_URL": "https://hooks.slack.com/services/T0/B0/x", "SAS_URL": "https://x/y", "REDIS_PASS": "31415926",
    "STORAGE": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=b", "DATA": "https://x/y?se=1&sig=0123456789",
    "SIGNINGKEY": "0123456789abcdef0123", "WANDBKEY": "a" * 40, "PASSCODE": "open",
}  # fmt: skip
PLAIN = {
    "PATH": "/bin", "HOME": "/h", "PWD": "/x", "OLDPWD": "/y", "TOKENIZERS_PARALLELISM": "false",
    "HF_TOKENIZER": "gpt2", "PYTHONHASHSEED": "0", "KEYBOARD": "us", "MONKEY": "m", "TURKEY": "t", "MAX_TOKENS": "4096",
    "NUM_KEY_VALUE_HEADS": "8", "USE_AUTH": "false", "AUTHOR": "me", "PASSES": "x", "COMPASS": "n", "BYPASS_CHECK": "x",
    "PIP_INDEX_URL": "https://index/simple", "HTTPS_PROXY": "http://proxy:8080", "REMOTE": "ssh://git@github.com/o/r",
    "HF_HOME": "/hf", "CUDA_VISIBLE_DEVICES": "0", "PRIVATEER": "x", "SECRETARY": "x", "CI": "true", "MASK": "1",
    "SSH_TTY": "/dev/pts/1", "WANDB_MODE": "offline", "GIT_AUTHOR_NAME": "me", "LR": "1e-4",
    "PASS_AT_K": "1", "NUM_PASS": "2", "PIN_MEMORY": "true", "HOTKEY": "F1", "PAGE": "https://x/y?sig=1",
}  # fmt: skip


@pytest.mark.parametrize("name", SECRET)
def test_what_looks_like_a_secret(name: str) -> None:
    """Names by their whole words, names of clouds and CI, and values with a password in them."""
    assert looks_secret(name, SECRET[name])


@pytest.mark.parametrize("name", PLAIN)
def test_what_does_not(name: str) -> None:
    """A word within a word, a number and a switch are no secrets: trainers need them."""
    assert not looks_secret(name, PLAIN[name])


def test_settings_of_git_stay_together() -> None:
    """Settings that hold a credential go with all the others; those that hold none stay."""
    safe = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    assert handed_on(safe) == safe
    header = {**safe, "GIT_CONFIG_KEY_0": "http.https://github.com/.extraheader", "GIT_CONFIG_VALUE_0": "x"}
    assert handed_on(header) == {} and withheld(header) == sorted(header)


def test_a_case_passes_a_variable_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pass_env` names what the program gets all the same; a case without it is the case that it was."""
    monkeypatch.setenv("HF_TOKEN", "one")
    monkeypatch.setenv("OTHER_TOKEN", "two")
    raw = {"case": {"name": "x", "steps": 1}, "subject": {"kind": "command", "command": "a"}}
    plain = Case.model_validate(raw)
    passing = Case.model_validate({**raw, "subject": {**raw["subject"], "pass_env": ["HF_TOKEN"]}})
    assert not {"HF_TOKEN", "OTHER_TOKEN"} & set(base_environment(plain))
    assert base_environment(passing).items() >= {"HF_TOKEN": "one"}.items()
    assert "OTHER_TOKEN" not in base_environment(passing)
    assert "pass_env" not in plain.canonical()["subject"] and plain.digest != passing.digest


THIEF = """\
import os, subprocess, sys
from pathlib import Path
seen = [dict(os.environ).__repr__()]
process = os.getppid()
while process > 1:
    folder = Path(f"/proc/{process}")
    try:
        seen.append((folder / "environ").read_text(errors="replace"))
    except OSError as error:
        seen.append(repr(error))
    process = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
seen.append(subprocess.run(["git", "config", "--list"], capture_output=True, text=True).stdout)
seen.append(subprocess.run(["git", "var", "-l"], capture_output=True, text=True).stdout)
Path(sys.argv[1]).write_text("\\n".join(seen))
sys.exit(Path("value").exists())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
def test_no_secret_reaches_the_code_of_a_commit(tmp_path: Path) -> None:
    """Neither its own variables nor those of any process above it, nor git's settings, show it our secrets."""
    repo, out = Repo(tmp_path / "repo"), tmp_path / "seen"
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / "thief.py").write_text(THIEF)
    repo.commit("Start")
    (repo.root / "value").write_text("1\n")
    repo.commit("Bad")
    secrets = {
        "GITHUB_TOKEN": "very-hidden-1",
        "AWS_SECRET_ACCESS_KEY": "very-hidden-2",
        "MY_PASSWORD": "very-hidden-3",
    }
    done = subprocess.run(
        [sys.executable, "-m", "repro", "bisect", "--no-explain", "HEAD~1..HEAD", "--when", "exit", "--",
         sys.executable, "thief.py", str(out)],
        cwd=repo.root, env=environment() | secrets | {"SEEN": "plain"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert "plain" in text and "very-hidden" not in text
    kept = [path.read_bytes() for path in (repo.root / ".git" / "repro").rglob("*") if path.is_file()]
    assert kept and not any(b"very-hidden" in content for content in kept)


HIDING = """\
import json, os, subprocess, sys
from pathlib import Path
from repro.pulls.github_pull import find_token
from repro_golden.base.credentials import hide
before = Path("/proc/self/environ").read_bytes()
hide(os.environ)
after = subprocess.run(["cat", f"/proc/{os.getpid()}/environ"], capture_output=True).stdout
shown = subprocess.run(["env"], capture_output=True, text=True).stdout
token = find_token()
without = subprocess.run(["env"], capture_output=True, text=True).stdout
print(json.dumps([b"deep" in before, b"deep" in after, "GITHUB_TOKEN=deep" in shown, token, "deep" in without]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
def test_our_own_token_is_read_and_then_gone() -> None:
    """What others can read of us has no secret; we have it until it is read, and then no process that we start does."""
    done = subprocess.run(
        [sys.executable, "-c", HIDING], env=environment() | {"GITHUB_TOKEN": "deep"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert json.loads(done.stdout) == [True, False, True, "deep", False], done.stderr
    assert os.environ.get("GITHUB_TOKEN") != "deep"


def test_a_trace_holds_no_secret_of_a_command_line() -> None:
    """A value that looks like one, behind its option, is a digest; what decides numbers stands as it is."""
    digits = "0123456789" * 4
    plain = ["python", "train.py", "--token-type", "wordpiece", "--lr=0.1", "--num-key-value-heads", "4"]
    given = argv_given([*plain, "--wandb-key", digits, f"--api-key={digits}", f"HF_TOKEN=hf_{digits}"])
    assert given[: len(plain)] == plain and digits not in str(given)
    assert [word.partition("=")[0] for word in given[len(plain) :: 2]] == ["--wandb-key", "--api-key"]
    assert argv_given(["--wandb-key", digits]) != argv_given(["--wandb-key", digits[::-1]])

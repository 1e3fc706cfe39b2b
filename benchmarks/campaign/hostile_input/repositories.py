"""Files and settings of a repository that other tools run: none of them runs in repro, nor in its git.

The program of these searches is `true`, so whatever the canary tells of was not started by the subject.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from conftest import Repo, environment
from history_kit import note, start

from hostile_input.place import Commands, Input, Place

__all__ = ["inputs"]

MODULES = (
    "sitecustomize.py", "usercustomize.py", "conftest.py", "json.py", "typing.py", "click.py", "torch.py", "numpy/__init__.py",
    "repro/__init__.py", "repro_golden/__init__.py", "repro_bisect/__init__.py", "re.py", "dvc/__init__.py", "pygit2.py",
    "encodings/__init__.py", "site.py", "signal.py", "tempfile.py", "pydantic/__init__.py", "core/repro_core/__init__.py",
    "jinja2.py", "pyarrow/__init__.py", "__main__.py", "setup.py",
)  # fmt: skip
HOOKS = (
    "post-checkout", "pre-commit", "post-commit", "reference-transaction", "post-index-change", "post-rewrite", "pre-auto-gc",
    "post-merge", "fsmonitor-watchman", "pre-push", "proc-receive", "sendemail-validate", "applypatch-msg",
)  # fmt: skip
SETTINGS = {
    "core.fsmonitor": "{evil}", "core.hooksPath": "{folder}", "core.pager": "{evil}", "core.editor": "{evil}",
    "core.sshCommand": "{evil}", "core.askPass": "{evil}", "core.gitProxy": "{evil}", "diff.external": "{evil}",
    "core.alternateRefsCommand": "{evil}", "credential.helper": "!{evil}", "gpg.program": "{evil}", "log.showSignature": "true",
    "gpg.ssh.program": "{evil}", "pager.log": "{evil}", "pager.diff": "{evil}", "alias.log": "!{evil}",
    "alias.rev-parse": "!{evil}", "alias.cat-file": "!{evil}", "merge.evil.driver": "{evil} %A", "interactive.diffFilter": "{evil}",
    "uploadpack.packObjectsHook": "{evil}", "sequence.editor": "{evil}", "web.browser": "{evil}", "trailer.x.cmd": "{evil}",
    "submodule.evil.update": "!{evil}", "remote.origin.vcs": "evil", "remote.origin.uploadpack": "{evil}",
    "protocol.ext.allow": "always", "url.ext::{evil}.insteadOf": "https://", "tar.evil.command": "{evil}", "include.path": "{folder}/inc",
    "maintenance.auto": "true", "gc.auto": "1", "gc.recentObjectsHook": "{evil}", "core.worktree": "{folder}",
    "extensions.partialClone": "origin", "fetch.recurseSubmodules": "true", "core.attributesFile": "{folder}/attributes",
    "diff.evil.textconv": "{evil}", "diff.evil.command": "{evil}", "filter.evil.smudge": "{evil}", "filter.evil.clean": "{evil}",
    "filter.evil.process": "{evil}", "filter.lfs.smudge": "{evil}", "filter.lfs.process": "{evil}", "core.commentChar": "auto",
}  # fmt: skip


def inputs() -> Iterator[Input]:
    """Every file and every setting."""
    for name in MODULES:
        yield Input(f"a module {name}", lambda place, name=name: _module(place, name))
    for name in HOOKS:
        yield Input(f"a hook {name}", lambda place, name=name: _hook(place, name))
    for name, value in SETTINGS.items():
        yield Input(f"a setting {name}", lambda place, name=name, value=value: _setting(place, name, value))
    for name, files in FILES.items():
        yield Input(f"files: {name}", lambda place, files=files: _files(place, files))
    yield Input("a submodule at another program", _submodule)
    yield Input("a submodule whose name leaves its folder", _escaping)
    yield Input("variables of a caller that name a program", _variables)
    yield Input("a folder on PATH of the repository", _on_path)


FILES: dict[str, dict[str, str]] = {
    "pytest's": {"pytest.ini": "[pytest]\naddopts = -p evil\n", "evil.py": "PYTHON", "conftest.py": "PYTHON"},
    "pip's": {"pip.conf": "[global]\nindex-url = file:///evil\n", "requirements.txt": "-e .\n./evil\n", "setup.py": "PYTHON"},
    "a build": {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "evil"\nbackend-path = ["."]\n', "evil.py": "PYTHON",
        "requirements.txt": "-e .\n",
    },
    "paths of Python": {"evil.pth": "import os; os.system('TOUCH')\n", "python311._pth": ".\nimport site\n", "pyvenv.cfg": "home = ."},
    "an environment": {".venv/bin/python": "SHELL", "venv/bin/python": "SHELL", ".python-version": "evil", "bin/python": "SHELL"},
    "direnv's and make's": {".envrc": "TOUCH\n", "Makefile": "$(shell TOUCH)\n", ".env": "PATH=.\nX=$(TOUCH)\n"},
    "DVC's stages": {"dvc.yaml": "stages:\n  evil:\n    cmd: TOUCH\n    outs: [made]\n", "golden/dvc.yaml": "stages:\n  evil:\n    cmd: TOUCH\n    outs: [made]\n"},
    "DVC's settings": {".dvc/config": "[core]\n    remote = r\n    hardlink_lock = true\n['remote \"r\"']\n    url = ssh://evil/x\n    ask_password = true\n    password_command = TOUCH\n"},
    "DVC's hooks": {".dvc/config": "", ".dvc/tmp/exp-runs/x": "x", ".dvc/plugins/evil.py": "PYTHON", ".dvcignore": "**\n"},
    "git's attributes": {".gitattributes": "* filter=evil diff=evil merge=evil ident text eol=crlf\n*.none working-tree-encoding=UTF-16\n"},
    "LFS's settings": {".lfsconfig": "[lfs]\n\turl = ext::TOUCH\n[lfs \"customtransfer.evil\"]\n\tpath = TOUCH\n", ".gitattributes": "*.py filter=lfs\n"},
    "mailmaps and ignores": {".mailmap": "Evil <e> <test@example.invalid>\n", ".gitignore": "*\n!*\n", ".git-blame-ignore-revs": "x"},
    "a case that is a program": {"golden/cases/evil.toml": '[case]\nname = "evil"\nsteps = 1\n[subject]\nkind = "command"\ncommand = "TOUCH"\nsetup = "TOUCH"\ncheck = "TOUCH"\n'},
    "workflows": {".github/workflows/x.yml": "on: push\njobs: {x: {steps: [{run: TOUCH}]}}\n", ".pre-commit-config.yaml": "repos: []\n", ".gitlab-ci.yml": "x: {script: [TOUCH]}\n"},
}  # fmt: skip


def _evil(place: Place) -> Path:
    path = place.write("evil", f"#!/bin/sh\n{place.touch}\nexit 0\n")
    path.chmod(0o755)
    return path


def _searches(root: Path, *, cold: bool = False) -> Commands:
    """What reads commits, worktrees, the index and the working tree."""
    how = ("!" if cold else "@") + str(root)
    return [
        [how, "bisect", "--when", "exit", "--no-explain", "HEAD~2..HEAD", "--out", str(root.parent / "report"), "--", "true"],
        [how, "golden", "list"], [how, "golden", "verify"], [how, "doctor", "."],
    ]  # fmt: skip


def _history(place: Place) -> Repo:
    repo = start(place.folder, case=None)
    note(repo, "one")
    return repo


def _module(place: Place, name: str) -> Commands:
    repo = _history(place)
    place.write(f"repo/{name}", f"open({str(place.canary)!r}, 'w').close()\n")
    repo.commit("Evil")
    return _searches(repo.root, cold=True)


def _hook(place: Place, name: str) -> Commands:
    repo = _history(place)
    note(repo, "two")
    hook = place.write(f"repo/.git/hooks/{name}", f"#!/bin/sh\n{place.touch}\n")
    hook.chmod(0o755)
    return _searches(repo.root)


def _setting(place: Place, name: str, value: str) -> Commands:
    repo = _history(place)
    evil = _evil(place)
    place.write("inc", f"[core]\n\tfsmonitor = {evil}\n\thooksPath = {place.folder}\n")
    place.write("attributes", "* filter=evil diff=evil\n")
    for hook in ("post-checkout", "reference-transaction", "post-index-change"):
        place.write(hook, f"#!/bin/sh\n{place.touch}\n").chmod(0o755)
    place.write("repo/.gitattributes", "*.py filter=evil diff=evil merge=evil\n*.bin filter=lfs\n")
    repo.commit("Evil")
    repo.git("config", name.format(evil=evil), value.format(evil=evil, folder=place.folder))
    os.utime(repo.root / "train.py", (1, 1))  # git must look at its content
    place.canary.unlink(missing_ok=True)
    return _searches(repo.root)


def _files(place: Place, files: dict[str, str]) -> Commands:
    repo = _history(place)
    for name, text in files.items():
        kinds = {"PYTHON": f"open({str(place.canary)!r}, 'w').close()\n", "SHELL": f"#!/bin/sh\n{place.touch}\n"}
        path = place.write(f"repo/{name}", kinds.get(text, text.replace("TOUCH", place.touch)))
        path.chmod(0o755)
    repo.git("add", "--all", "--force")
    repo.commit("Evil")
    place.canary.unlink(missing_ok=True)
    return [*_searches(repo.root, cold=True), ["!" + str(repo.root), "golden", "pull"]]


def _submodule(place: Place) -> Commands:
    repo = _history(place)
    text = f'[submodule "evil"]\n\tpath = evil\n\turl = ext::sh -c {place.canary}\n\tupdate = !{_evil(place)}\n'
    place.write("repo/.gitmodules", text)
    repo.git("update-index", "--add", "--cacheinfo", f"160000,{repo.git('rev-parse', 'HEAD')},evil")
    repo.git("add", ".gitmodules")
    repo.git("commit", "--quiet", "--message", "Evil")
    repo.git("config", "submodule.evil.url", f"ext::sh -c {_evil(place)}")
    repo.git("config", "submodule.evil.active", "true")
    repo.git("config", "protocol.ext.allow", "always")
    return _searches(repo.root)


def _escaping(place: Place) -> Commands:
    """Its git folder would be one outside, whose hooks are programs."""
    repo = _history(place)
    evil = Repo(place.outside / "modules")
    evil.root.mkdir()
    evil.git("init", "--quiet")
    hook = evil.root / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\n{place.touch}\n")
    hook.chmod(0o755)
    place.write("repo/.gitmodules", '[submodule "../../../outside/modules"]\n\tpath = evil\n\turl = ./evil\n')
    repo.git("update-index", "--add", "--cacheinfo", f"160000,{repo.git('rev-parse', 'HEAD')},evil")
    repo.git("add", ".gitmodules")
    repo.git("commit", "--quiet", "--message", "Evil")
    return _searches(repo.root)


def _variables(place: Place) -> Commands:
    """What names a program to git, in the environment that repro has from its caller."""
    repo = _history(place)
    note(repo, "two")
    evil = str(_evil(place))
    names = (
        "GIT_SSH_COMMAND",
        "GIT_EXTERNAL_DIFF",
        "GIT_PAGER",
        "GIT_EDITOR",
        "GIT_ASKPASS",
        "GIT_PROXY_COMMAND",
        "PAGER",
    )
    told = dict.fromkeys(names, evil) | {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.fsmonitor",
        "GIT_CONFIG_VALUE_0": evil,
    }
    command = [sys.executable, "-m", "repro", *_searches(repo.root)[0][1:]]
    subprocess.run(command, cwd=repo.root, env=environment() | told, capture_output=True, check=False, timeout=120)
    return []


def _on_path(place: Place) -> Commands:
    """PATH has an empty entry, which is the folder that one is in, and the repository has programs called as git's."""
    repo = _history(place)
    for name in ("dvc", "nvidia-smi", "git-lfs", "uv", "pip", "ssh", "less", "gh"):
        place.write(f"repo/{name}", f"#!/bin/sh\n{place.touch}\n").chmod(0o755)
    repo.commit("Evil")
    return _searches(repo.root, cold=True)

"""Names that become paths: of cases, runs, shards, signals, nights, files of DVC, and ranges of git."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import site_kit
from attempts import Attempt
from conftest import Repo, environment
from history_kit import note, start
from trace_kit import SMALL, write

from hostile_input.place import Commands, Input, Place
from repro_golden.trace.model import dump_path

__all__ = ["inputs"]

NAMES = (
    "../outside/kept", "../../outside", "..", ".", "/etc/passwd", "a/../../outside/kept", "a\\..\\b", "-rf", "--help-x",
    "~", "~root", "$(touch {canary})", "`touch {canary}`", ";touch {canary};", "a\nb", "x" * 300, "*", "con", "\u2024\u2024/x",
    "..%2foutside", "file:///etc/passwd", "%00", "{canary}", "|touch {canary}",
)  # fmt: skip
RANGES = (
    "--upload-pack=touch {canary};..HEAD", "--output={outside}/x..HEAD", "HEAD..--output={outside}/x", "-O{outside}/x..HEAD",
    "--exec=touch {canary}..HEAD", "$(touch {canary})..HEAD", "`touch {canary}`..HEAD", "ext::sh -c touch% {canary}..HEAD",
    "HEAD;touch {canary}..HEAD", ":/Start..HEAD", "HEAD^{{/Start}}..HEAD", "HEAD@{{1000000000}}..HEAD", "--all..HEAD",
    "--not..--all", "@{{-1}}..HEAD", "HEAD:train.py..HEAD", "--git-dir={outside}..HEAD", "--stdin..HEAD", "-c..HEAD",
    "refs/heads/../../../outside/kept..HEAD", "HEAD...HEAD..HEAD", "\n..HEAD", "..", "--batch-check..--textconv",
)  # fmt: skip


def inputs() -> Iterator[Input]:
    """Every name and every path."""
    for name in NAMES:
        yield Input(f"a case called {name[:40]!r}", lambda place, name=name: _case_name(place, name))
        yield Input(f"a path of a case: {name[:40]!r}", lambda place, name=name: _case_path(place, name))
        yield Input(f"a shard called {name[:40]!r}", lambda place, name=name: _shard(place, name))
        yield Input(f"a night of {name[:40]!r}", lambda place, name=name: _run(place, name), also=_site_alone)
        yield Input(f"a signal called {name[:40]!r}", lambda _place: [], also=_dump(name))
        yield Input(f"a checkpoint called {name[:40]!r}", lambda place, name=name: _tracker(place, name))
    for text in RANGES:
        yield Input(f"a range {text!r}", lambda place, text=text: _range(place, text))
    for name in ("../outside/kept", "/etc/passwd", "{outside}/kept", "a/../../outside/kept", "."):
        yield Input(f"a site that lists {name!r}", lambda place, name=name: _marker(place, name))
    for name in ("../../../outside/new", "{outside}/new", "../../../../outside/kept"):
        yield Input(f"a pointer of DVC to {name!r}", lambda place, name=name: _pointer(place, name))
        yield Input(f"a folder of DVC with {name!r}", lambda place, name=name: _listing(place, name))
    for what, link in _links().items():
        yield Input(f"a link: {what}", link)


def _filled(place: Place, text: str) -> str:
    return text.replace("{canary}", str(place.canary)).replace("{outside}", str(place.outside))


def _case_name(place: Place, name: str) -> Commands:
    name = _filled(place, name)
    (place.folder / "golden" / "cases").mkdir(parents=True)
    subprocess.run(["git", "init", "-q"], cwd=place.folder, env=environment(), check=True)
    place.write(".dvc/config", "")
    return [
        ["golden", "show", "--", name], ["golden", "verify", "--", name], ["golden", "approve", "--reason", "x", "--", name],
        ["report", "nightly", "--", name], ["rollout", "show", "--", name], ["golden", "record", name, "--", "true"],
        ["bisect", "--case", name, "HEAD..HEAD"], ["explain", "--case", name, "HEAD"], ["init", "--case", name, "--remote", "../r"],
    ]  # fmt: skip


def _case_path(place: Place, name: str) -> Commands:
    repo = start(place.folder)
    value = json.dumps(_filled(place, name))
    text = (
        '[case]\nname = "{0}"\nsteps = 1\n{1}\n[subject]\nkind = "command"\ncommand = "true"\npath = "train.py"\n{2}\n'
    )
    for case, above, below in (
        ("rollouts", f"rollouts = {value}", ""), ("link", "", f"link = [{value}]"), ("cwd", "", f"resume = {value}"),
    ):  # fmt: skip
        place.write(f"repo/golden/cases/{case}.toml", text.format(case, above, below))
    place.write("repo/golden/cases/path.toml", text.format("path", "", "").replace('"train.py"', value))
    cases, root = ("rollouts", "link", "path"), f"@{repo.root}"
    return [
        *([root, "golden", "verify", case] for case in cases),
        *(["doctor", f"repo/golden/cases/{case}.toml"] for case in cases),
        *(["rollout", "show", f"repo/golden/cases/{case}.toml"] for case in cases),
    ]  # fmt: skip


def _shard(place: Place, name: str) -> Commands:
    """Behind the name is a pipe, so that whoever opens it waits for ever."""
    os.mkfifo(place.folder / "pipe")
    where = {"metadata": {"total_size": 4}, "weight_map": {"a": _filled(place, name), "b": "../pipe"}}
    place.write("model/model.safetensors.index.json", json.dumps(where))
    place.write("model/config.json", json.dumps({"model_type": "qwen2", "auto_map": {"AutoConfig": f"{name}--x.Evil"}}))
    place.write("model/tokenizer_config.json", json.dumps({"tokenizer_file": name, "chat_template": name}))
    place.write("model/x.py", f"open({str(place.canary)!r}, 'w')")
    return [["doctor", "model"], ["doctor", "."]]


def _run(place: Place, name: str) -> Commands:
    name = _filled(place, name)
    made = site_kit.nightly_run("demo", number=3, chain="b", status="changed")
    evil = replace(made, case=name, machine=name, commit={**made.commit, "commit": name}, at="2026-11-22T03:12:45Z")
    place.write("golden/nights/m/c/2026-11-22T031245Z-aaaaaaaaaa.json", json.dumps(evil.to_mapping()))
    return [["report", "publish", "--out", "site"]]


def _site_alone(place: Place, _attempts: Sequence[Attempt]) -> str:
    extra = sorted(path.name for path in place.folder.iterdir() if path.name not in ("golden", "site"))
    out = [str(p) for p in place.folder.rglob("*") if p.is_symlink()]
    return f"beside the site stand {extra + out}" if extra or out else ""


def _dump(name: str) -> Callable[[Place, object], str]:
    def judge(place: Place, _attempts: object) -> str:
        folder = place.folder / "trace"
        for phase, signal in (("grad", name), ("input", name), ("update", f"{name}/w")):
            path = Path(os.path.normpath(dump_path(folder, 3, phase, signal)))
            if not path.is_relative_to(folder / "dumps"):
                return f"its dump would be {path}"
        return ""

    return judge


def _tracker(place: Place, name: str) -> Commands:
    place.write("load/latest_checkpointed_iteration.txt", _filled(place, name))
    place.write("load/latest", _filled(place, name))
    (place.folder / "load" / "iter_0000001").mkdir()
    return [["doctor", "load"]]


def _range(place: Place, text: str) -> Commands:
    repo = start(place.folder / "in", case=None)
    note(repo, "one")
    text = _filled(place, text)
    root = str(repo.root)
    base, _, head = text.partition("..")
    exit_code = ["--when", "exit", "--no-explain", "--", "true"]
    return [
        ["@" + root, "bisect", *exit_code[:3], "--", text, "--", "true"], ["@" + root, "bisect", text, *exit_code],
        ["@" + root, "history", text, "--", "true"], ["@" + root, "explain", text, "--", "true"],
        ["@" + root, "report", "pr", text, "--", "true"], ["@" + root, "report", "nightly", "--at", base or head],
    ]  # fmt: skip


def _marker(place: Place, name: str) -> Commands:
    """A folder of an earlier site whose list names what is not in it."""
    site_kit.write(place.folder / "golden" / "nights", [site_kit.nightly_run("demo")])
    listed = {"format": 1, "files": [_filled(place, name), "kept"]}
    place.write("site/repro-site.json", json.dumps(listed))
    (place.folder / "site" / "kept").symlink_to(place.outside / "kept")
    return [["report", "publish", "--out", "site"]]


def _with_dvc(place: Place) -> Path:
    """A repository with DVC and a remote of its own."""
    root = place.folder / "repo"
    root.mkdir()
    repo = Repo(root)
    repo.git("init", "--quiet")
    place.write("repo/.dvc/config", f"[core]\n    remote = r\n['remote \"r\"']\n    url = {place.folder}/remote\n")
    (root / "golden" / "runs" / "m").mkdir(parents=True)
    return root


def _stored(place: Place, content: bytes, ending: str = "") -> str:
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    place.write(f"remote/files/md5/{md5[:2]}/{md5[2:]}{ending}", content)
    return md5 + ending


def _pointer(place: Place, name: str) -> Commands:
    root = _with_dvc(place)
    md5 = _stored(place, b"evil")
    out = f"outs:\n- md5: {md5}\n  size: 4\n  hash: md5\n  path: {_filled(place, name)}\n"
    place.write("repo/golden/runs/m/toy.dvc", out)
    place.write("repo/dvc.yaml", f"stages:\n  evil:\n    cmd: touch {place.canary}\n    outs: [made]\n")
    return [
        ["@" + str(root), "golden", "pull"],
        ["@" + str(root), "golden", "list"],
        ["@" + str(root), "golden", "show", "m/toy"],
    ]


def _listing(place: Place, name: str) -> Commands:
    root = _with_dvc(place)
    files = [{"md5": _stored(place, b"evil"), "relpath": _filled(place, name)}]
    md5 = _stored(place, json.dumps(files).encode(), ".dir")
    place.write(
        "repo/golden/runs/m/toy.dvc", f"outs:\n- md5: {md5}\n  size: 4\n  nfiles: 1\n  hash: md5\n  path: toy\n"
    )
    return [["@" + str(root), "golden", "pull"], ["@" + str(root), "golden", "show", "m/toy"]]


def _links() -> dict[str, Callable[[Place], Commands]]:
    def nightly_runs(place: Place) -> Commands:
        (place.folder / "golden").mkdir()
        (place.folder / "golden" / "nights").symlink_to(place.outside)
        return [["report", "publish", "--out", "site"]]

    def site(place: Place) -> Commands:
        site_kit.write(place.folder / "golden" / "nights", [site_kit.nightly_run("demo")])
        (place.folder / "site").symlink_to(place.outside)
        return [["report", "publish", "--out", "site"]]

    def inside(place: Place) -> Commands:
        site_kit.write(place.folder / "golden" / "nights", [site_kit.nightly_run("demo")])
        (place.folder / "site").mkdir()
        (place.folder / "site" / "cases").symlink_to(place.outside)
        place.write("site/repro-site.json", json.dumps({"format": 1, "files": ["cases"]}))
        return [["report", "publish", "--out", "site"]]

    def case(place: Place) -> Commands:
        repo = start(place.folder)
        (repo.root / "golden" / "cases" / "evil.toml").symlink_to("/etc/passwd")
        return [["@" + str(repo.root), "golden", "verify", "evil"], ["@" + str(repo.root), "golden", "list"]]

    def trainer(place: Place) -> Commands:
        """The code that is guarded lies outside of the repository, and a commit's link points there."""
        repo = start(place.folder, case=None)
        (repo.root / "data").symlink_to(place.outside)
        note(repo, "one", "other")
        write_there = [sys.executable, "-c", "import os; os.remove('data') if os.path.islink('data') else 1"]
        return [["@" + str(repo.root), "bisect", "--when", "exit", "--no-explain", "HEAD~1..HEAD", "--", *write_there]]

    def worktree(place: Place) -> Commands:
        """A commit makes a folder of what its parent has as a link out of the repository."""
        repo = start(place.folder, case=None)
        (repo.root / "out").symlink_to(place.outside)
        repo.commit("Link")
        (repo.root / "out").unlink()
        note(repo, "evil", "out/new")
        return [["@" + str(repo.root), "bisect", "--when", "exit", "--no-explain", "HEAD~1..HEAD", "--", "true"]]

    def trace(place: Place) -> Commands:
        made = write(place.folder / "trace", SMALL)
        (made / "dumps").symlink_to(place.outside)
        (made / "rank-00000.log").unlink()
        (made / "rank-00000.log").symlink_to(place.outside / "kept")
        return [["diff", "trace", "trace"], ["doctor", "trace"]]

    return {
        "the nights": nightly_runs, "the site": site, "a folder of the site": inside, "a case": case, "data of a program": trainer,
        "a folder that a commit writes to": worktree, "the files of a trace": trace,
    }  # fmt: skip

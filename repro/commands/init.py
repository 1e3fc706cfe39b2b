"""`repro init`: prepare any git repository."""

from __future__ import annotations

import os
from pathlib import Path

import click

from repro.output import emit, json_option
from repro_golden.canonical import digest

__all__ = ["init"]

FIRST_CASE = """\
# A case: one experiment worth guarding. `repro golden record {name}` records it, `repro bisect GOOD..BAD` searches it.
[case]
name = "{name}"
steps = 8
rollouts = "golden/rollouts/{name}"

[subject]
# The module that is the door to your trainer (CONTRACT and build(case)), and the folder of this repository that goes on
# PYTHONPATH for it. An empty path uses the built-in trainer as installed, which no commit of this repository changes.
module = "repro_core"
path = "{path}"
timeout = "10m"

[subject.config]
# What your trainer reads; these keys are the built-in one's (repro_core.config.TrainConfig).
rollout_batch_size = 4
n_samples_per_prompt = 8
global_batch_size = 32
"""


@click.command()
@click.option("--case", "name", default="first", show_default=True, help="Name of the first case.")
@click.option(
    "--remote", help="A DVC remote to share (s3://, ssh://, a folder); by default a folder of your own outside git."
)
@json_option
def init(name: str, remote: str | None, as_json: bool) -> int:
    """Write golden/, a first case and, where missing, DVC with a remote. Twice is harmless."""
    from repro_golden.case import CASES
    from repro_golden.checkout import find_checkout
    from repro_golden.dvc import Dvc

    root = find_checkout(Path.cwd()).root
    done: list[str] = []
    dvc = Dvc(root)
    if not dvc.initialised:
        dvc.init()
        done.append(".dvc/ (dvc init)")
    if remote or not dvc.has_remote:
        url = remote or str(default_remote(root))
        # a folder of this machine means nothing to others: it stays out of the configuration that git carries
        dvc.set_default_remote("golden", url, local=not remote)
        done.append(f".dvc/config{'' if remote else '.local'} (remote golden: {url})")
    if not list((root / CASES).glob("*.toml")):
        case = root / CASES / f"{name}.toml"
        case.parent.mkdir(parents=True, exist_ok=True)
        path = "core" if (root / "core" / "repro_core").is_dir() else ""
        case.write_text(FIRST_CASE.format(name=name, path=path), encoding="utf-8")
        done.append(str(case.relative_to(root)))
    text = "\n".join(f"wrote {line}" for line in done) if done else "nothing to do: golden/, DVC and a case are here"
    emit(as_json, {"wrote": done}, text + "\nnext: repro golden record")
    return 0


def default_remote(root: Path) -> Path:
    """A folder outside the repository: training states must never enter git."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return data / "repro" / "remotes" / f"{root.name}-{digest(str(root))[:8]}"

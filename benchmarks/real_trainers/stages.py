"""What titan.py and megatron_lm.py share: environments out of parcels, stages with limits, a page of docs."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime import CUT, environment

PAGE = Path(__file__).parents[2] / "docs" / "real-trainers.md"
SHOWN, KEPT = 9000, 60000
"""Characters of a command's output, from its end: on the page, and in the log."""
APART = "--ignore grad_norm --ignore 'rng/*' "
OBSERVE = '\n[observe]\nignore = ["rng/*"]\n'
"""What two layouts of one training have of their own: the norm's last bits, and generators that draw nothing in it. The
second is for a case that bounds the norm instead."""


@dataclass(frozen=True)
class Stage:
    """One command in the trainer's checkout.

    Attributes:
        command: What is run; `repro ...` by our environment, anything else by the trainer's.
        limit: Seconds that it may take.
        gpus: How many it needs.
        after: The stage that it takes a file from.
        what: What the page says of it.
        shown: The command in short, for the page; by default as it is.
        env: Variables of its own.
    """

    command: str
    limit: int
    gpus: int = 1
    after: str | None = None
    what: str = ""
    shown: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Trainer:
    """A trainer and what is run of it.

    Attributes:
        name: Of its parcel, its checkout, its file of results and its marks on the page.
        stages: By name, in order; `{work}` in a command is the folder of all.
        prepare: Completes the checkout, once: cases, data.
        versions: Modules whose versions the page names.
        env: Variables of every command.
    """

    name: str
    stages: Mapping[str, Stage]
    prepare: Callable[[Path], None]
    versions: Sequence[str]
    env: Mapping[str, str]


def main(trainer: Trainer, doc: str) -> None:
    """The command line of one trainer."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"by default: {', '.join(trainer.stages)}")
    parser.add_argument("--work", type=Path, default=Path(f"{trainer.name}-work"))
    parser.add_argument("--parcels", type=Path, nargs="+", default=[], help="folders that hold the parcels")
    parser.add_argument("--out", type=Path, default=Path(), help="where results and logs are written")
    parser.add_argument("--limit", type=float, default=540, help="seconds of all stages together")
    parser.add_argument("--gpus", type=int, help="stages for so many GPUs alone")
    parser.add_argument("--page", type=Path, nargs="+", help="results to write the page from; nothing is run")
    parser.add_argument("--add", action="store_true", help="with --page: after what the page has")
    options = parser.parse_args()
    if options.page:
        write_page(trainer, [json.loads(path.read_text()) for path in options.page], add=options.add)
        return
    work, end = options.work.resolve(), time.monotonic() + options.limit
    work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    kept = work / f"{trainer.name}.json"
    told: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    if "machine" not in told:
        began = time.monotonic()
        environments(work, options.parcels, trainer.name)
        trainer.prepare(work)
        told["machine"] = machine(work, trainer)
        say(trainer, "setup", {"code": 0, "seconds": round(time.monotonic() - began), **told["machine"]})
    for name in with_needed(trainer, options.stages or list(trainer.stages)):
        stage = trainer.stages[name]
        if ended(told.get(name)) or options.gpus not in (None, stage.gpus):
            continue
        if (left := end - time.monotonic()) < 15:
            say(trainer, name, {"code": CUT, "seconds": 0, "tail": "no time is left"})
            continue
        before = told.get(name, {}).get("calls", [])
        told[name] = run(stage, work, trainer, min(stage.limit, left))
        told[name]["calls"] = [*before, told[name]["seconds"]]
        with (options.out / f"{trainer.name}.log").open("a") as log:
            log.write(f"\n== {name}: {stage.command}\n{told[name].pop('log')}\n")
        kept.write_text(json.dumps(told, indent=1))
        shutil.copy(kept, options.out / kept.name)
        brief = {key: told[name][key] for key in ("code", "seconds")}
        say(trainer, name, {**brief, "tail": told[name]["output"][-700:]})


def with_needed(trainer: Trainer, names: Sequence[str]) -> list[str]:
    """These stages, each behind those that it takes a file from."""
    out = dict[str, None]()
    for name in names:
        after = trainer.stages[name].after
        out |= dict.fromkeys([*(with_needed(trainer, [after]) if after else []), name])
    return list(out)


def ended(record: Mapping[str, Any] | None) -> bool:
    """Whether a stage came to its own end: a plain launch that succeeded, or a command of repro that answered."""
    return bool(record) and record["code"] in ((0, 1) if "repro " in record["command"] else (0,))


def traced(out: str, program: str, more: str = "") -> str:
    """A line for bash that records a program, whose own output is shown only where that fails."""
    log = f"../{out}.log"
    return (
        f"rm -rf ../{out} && {{ repro trace {more}--out ../{out} -- {program} > {log} 2>&1 || "
        f"{{ tail -c 5000 {log}; exit 9; }}; }} && tail -n 1 {log}"
    )


def say(trainer: Trainer, stage: str, told: Mapping[str, Any]) -> None:
    """One line of JSON."""
    print(json.dumps({"trainer": trainer.name, "stage": stage, **told}), flush=True)


def environments(work: Path, parcels: Sequence[Path], name: str) -> None:
    """An environment of repro and one of the programs, each over the machine's own; and what the parcel holds."""
    base = Path(
        subprocess.check_output([sys.executable, "-c", "import torch; print(torch.__file__)"], text=True)
    ).parents[1]
    for parcel in (path for folder in parcels for path in sorted(folder.glob("*.txz"))):
        if parcel.stem in (name, "site_te"):
            subprocess.run(["tar", "xf", str(parcel.resolve())], cwd=work, check=True)
    for env in ("env_repro", "env_programs"):
        if (work / env).exists():
            shutil.rmtree(work / env)
        site = environment(work / env)
        if env == "env_repro":
            (repro,) = (path for folder in parcels for path in folder.glob("repro.txz"))
            subprocess.run(["tar", "xf", str(repro.resolve())], cwd=site, check=True)
        else:
            for path in [*work.glob("site/*"), *work.glob("site_te/transformer_engine*")]:
                shutil.move(path, site / path.name)
            if (base / "nvidia").exists():  # Transformer Engine looks for CUDA's libraries beside itself
                (site / "nvidia").symlink_to(base / "nvidia")
        (site / "zz_base.pth").write_text(f"{base}\n")
    for env, name, where in (
        ("env_repro", "repro", "repro.__main__"),
        ("env_repro", "dvc", "dvc.cli"),
        ("env_programs", "torchrun", "torch.distributed.run"),
    ):
        script = work / env / "bin" / name
        python = script.with_name("python")
        script.write_text(f"#!{python}\nimport sys\nfrom {where} import main\nsys.exit(main())\n")
        script.chmod(0o755)


def checkout(work: Path, name: str, cases: Mapping[str, str]) -> Path:
    """The trainer's history with its newest commit checked out, `repro init` done and these cases in golden/cases."""
    place = work / name
    git = ["git", "-C", str(place), "-c", "user.name=reader", "-c", "user.email=reader@example.org"]
    subprocess.run([*git, "reset", "--quiet", "--hard"], check=True)
    env = os.environ | {"PATH": f"{work / 'env_repro/bin'}:{os.environ['PATH']}"}
    subprocess.run([str(work / "env_repro/bin/repro"), "init"], cwd=place, env=env, check=True, capture_output=True)
    (place / "golden" / "cases").mkdir(parents=True, exist_ok=True)
    for case, text in cases.items():
        (place / "golden" / "cases" / f"{case}.toml").write_text(text)
    subprocess.run([*git, "add", "golden", ".dvc", ".dvcignore"], check=False)
    subprocess.run([*git, "commit", "--quiet", "-m", "Cases"], check=True)
    return place


def machine(work: Path, trainer: Trainer) -> dict[str, Any]:
    """Its GPUs and the versions of what trains there."""
    code = (
        "import torch, platform, importlib.metadata as m; n = torch.cuda.device_count(); "
        "print('|'.join([f'{n} x ' + torch.cuda.get_device_name() if n > 1 else torch.cuda.get_device_name() if n else "
        f"'CPU', 'Python ' + platform.python_version(), *(x + ' ' + m.version(x) for x in {trainer.versions!r})]))"
    )
    words = [str(work / "env_programs/bin/python"), "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    device, *versions = done.stdout.strip().rpartition("\n")[2].split("|")
    return {"device": device, "date": time.strftime("%Y-%m-%d"), "versions": ", ".join(versions),
            "error": done.stderr[-600:] if done.returncode else ""}  # fmt: skip


def run(stage: Stage, work: Path, trainer: Trainer, limit: float) -> dict[str, Any]:
    """A command in the checkout: what it printed, its exit code and its seconds by the clock."""
    command = stage.command.replace("{work}", str(work))
    words = ["bash", "-c", command] if "&&" in command else shlex.split(command)
    bins = [work / "env_repro/bin", work / "env_programs/bin"]
    path = ":".join(str(folder) for folder in (bins if "repro " in command else bins[::-1]))
    environ = os.environ | {"PATH": f"{path}:{os.environ['PATH']}", "COLUMNS": "120", **trainer.env, **stage.env}
    began, since, log = time.monotonic(), time.time(), work / "last.log"
    with log.open("w") as out:
        process = subprocess.Popen(words, cwd=work / trainer.name, env=environ, stdout=out, stderr=subprocess.STDOUT)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
            code = CUT
    text = log.read_text(errors="replace").replace(f"{work}/", "")
    lines = "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())
    more = ""
    if code:
        for left in Path(tempfile.gettempdir()).glob("repro-trainer-*.log"):
            if left.stat().st_mtime > since:
                more += f"\n-- {left.name}\n{left.read_text(errors='replace')[-6000:]}"
    return {"command": stage.command.replace("{work}/", ""), "what": stage.what, "code": code, "output": lines[-SHOWN:],
            "seconds": round(time.monotonic() - began), "log": lines[-KEPT:] + more[-KEPT:]}  # fmt: skip


def write_page(trainer: Trainer, runs: Sequence[Mapping[str, Any]], *, add: bool = False) -> None:
    """docs/real-trainers.md, between this trainer's marks: what was run, then what each command of repro printed."""
    head, _, rest = PAGE.read_text().partition(f"<!-- {trainer.name} -->")
    before, _, tail = rest.partition(f"<!-- end of {trainer.name} -->")
    table, printed = ["| | command | by the clock | |", "|---|---|---|---|"], list[str]()
    if add:
        above, _, below = before.strip("\n").partition("|\n\n`")
        table, printed = [f"{above}|".partition("\n\n")[2]], ["", f"`{below}"]
    for told in runs:
        facts = told["machine"]
        for name, stage in trainer.stages.items():
            if name not in told:
                continue
            record = told[name]
            result = "ended by its time limit" if record["code"] == CUT else f"exit code {record['code']}"
            spent = " + ".join(f"{seconds} s" for seconds in record["calls"])
            row = f"{facts['device']}, {facts['date']}: {stage.what}"
            command = (stage.shown or record["command"]).replace("|", "\\|")
            table.append(f"| {row} | `{command}` | {spent} | {result} |")
            if "repro " in record["command"]:
                lines = "\n".join(line[:300] for line in record["output"].strip().splitlines())
                printed += ["", f"`{command}`, {facts['device']}:", "", "```text", lines, "```"]
    text = "\n".join([f"{runs[-1]['machine']['versions']}.", "", *table, *printed])
    PAGE.write_text(f"{head}<!-- {trainer.name} -->\n{text}\n<!-- end of {trainer.name} -->{tail}")

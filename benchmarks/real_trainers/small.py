"""Cases of benchmarks/real on a GPU without a network: ``python small.py --parcels DIR [CASE ...]``.

DIR holds ``small.txz`` and ``repro.txz`` of `parcels.py`. Each case is one `repro bisect`, of upstream's own code at
each commit, with the driver on the GPU; each program of GOLDENS is recorded and verified. Command, exit code, seconds
and what was printed go to ``small.json`` under ``--out``; what is there is not run again.

``python small.py --page small.json`` writes the part of docs/real-trainers.md that is about them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime import CUT, environment

HERE = Path(__file__).parent
REAL = HERE.parent / "real"
PAGE = HERE.parents[1] / "docs" / "real-trainers.md"
CASES = ("trl-truncated-normalizer", "trl-cispo-swapped", "nanogpt-weight-decay", "lightning-worker-seed")
GOLDENS = {
    "grpo": ("trl-cispo-swapped", ["trl_trainer.py", "grpo"]),
    "lightning": ("lightning-worker-seed", ["lightning_module.py"]),
    "trainer": ("", ["transformers_trainer.py", "qwen2", '{"gradient_accumulation_steps": 4}']),
}
"""Golden runs, of a case's checkout or of a repository with nothing but the driver, which then changes its rate."""
LONGEST = 300
"""Characters of a line on the page: a fused optimizer is given a hundred tensors."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CASE", help=f"by default {', '.join((*CASES, *GOLDENS))}")
    parser.add_argument("--work", type=Path, default=Path("small-work"))
    parser.add_argument("--parcels", type=Path)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=4, help="probes that share the GPU")
    parser.add_argument("--limit", type=float, default=560, help="seconds of all cases together")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--under", default="small", help="the page's marks: small, or trainers")
    options = parser.parse_args()
    if options.page:
        write_page(json.loads(options.page.read_text()), options.under)
        return
    work, end = options.work.resolve(), time.monotonic() + options.limit
    work.mkdir(parents=True, exist_ok=True)
    kept = work / "small.json"
    told: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    if not (work / "env_repro").exists():
        setup(work, options.parcels)
    told["machine"] = machine(work, options.device)
    for name in options.names or (*CASES, *GOLDENS):
        for key, record in (search if name in CASES else guard)(name, work, options, end, told):
            told[key] = record
            print(
                f"== {key}: {record['command']}\n{record['output']}\nexit {record['code']}, {record['seconds']} s",
                flush=True,
            )
            kept.write_text(json.dumps(told, indent=1))
            shutil.copy(kept, options.out / "small.json")


def setup(work: Path, parcels: Path) -> None:
    """An environment of repro and one of the programs, each over the machine's own."""
    base = Path(
        subprocess.check_output([sys.executable, "-c", "import torch; print(torch.__file__)"], text=True)
    ).parents[1]
    subprocess.run(["tar", "xf", str((parcels / "small.txz").resolve())], cwd=work, check=True)
    for name in ("env_repro", "env_programs"):
        site = environment(work / name)
        if name == "env_repro":
            subprocess.run(["tar", "xf", str((parcels / "repro.txz").resolve())], cwd=site, check=True)
        else:
            for path in (work / "site").iterdir():
                shutil.move(path, site / path.name)
        (site / "zz_base.pth").write_text(f"{base}\n")
    for name, where in (("repro", "repro.__main__"), ("dvc", "dvc.cli")):
        script = work / "env_repro" / "bin" / name
        script.write_text(f"#!{script.with_name('python')}\nimport sys\nfrom {where} import main\nsys.exit(main())\n")
        script.chmod(0o755)


def machine(work: Path, device: str) -> dict[str, str]:
    name = "torch.cuda.get_device_name()" if device == "cuda" else "'CPU'"
    code = (
        f"import torch, platform, transformers, accelerate, datasets; print({name}, '|', platform.python_version(), "
        "torch.__version__, transformers.__version__, accelerate.__version__, datasets.__version__)"
    )
    words = [str(work / "env_programs/bin/python"), "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    where, _, versions = done.stdout.strip().rpartition("\n")[2].partition(" | ")
    names = ("Python", "torch", "transformers", "accelerate", "datasets")
    return {"device": where, "date": time.strftime("%Y-%m-%d"), **dict(zip(names, versions.split(), strict=False)),
            "error": done.stderr[-400:] if done.returncode else ""}  # fmt: skip


def checkout(name: str, work: Path) -> tuple[Path, dict[str, Any]]:
    """A case's checkout of the newest commit of its range, and the case."""
    case, place = tomllib.loads((REAL / "cases" / f"{name}.toml").read_text()), work / "checkouts" / name
    if not place.exists():
        shutil.copytree(work / f"{case['repository']}.git", place / ".git")
        for command in (["config", "core.bare", "false"], ["checkout", "-q", "--detach", "--force", case["bad"]]):
            subprocess.run(["git", *command], cwd=place, check=True)
    return place, case


def search(
    name: str, work: Path, options: argparse.Namespace, end: float, told: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A case: what `repro bisect` printed, its exit code and its seconds by the clock."""
    if told.get(name, {"code": CUT})["code"] != CUT:
        return
    place, case = checkout(name, work)
    driver = ["python", str(REAL.resolve() / "drivers" / case["driver"]), *case.get("arguments", [])]
    words = ["bisect", f"{case['good']}..{case['bad']}", "-j", str(options.jobs), *case.get("options", [])]
    yield name, {"repository": case["repository"], "what": case["what"], "culprit": case["culprit"],
                 **run([*words, "--", *driver], place, work, options, end)}  # fmt: skip


def guard(
    name: str, work: Path, options: argparse.Namespace, end: float, told: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A golden run of a program, verified; where nothing but the driver is in the repository, a change of it too."""
    case, (driver, *arguments) = GOLDENS[name]
    place, words = work / "checkouts" / name, ["python", driver, *arguments]
    git = ["git", "-C", str(place), "-c", "user.name=reader", "-c", "user.email=reader@example.org"]
    if case:
        place, facts = checkout(case, work)
        words[1] = str(REAL.resolve() / "drivers" / driver)
        about = {"repository": facts["repository"], "what": "golden run", "culprit": ""}
    else:
        about = {"repository": "transformers' Trainer", "what": "golden run, then another rate", "culprit": ""}
        if not place.exists():
            place.mkdir(parents=True)
            for part in ("kit.py", driver):
                shutil.copy(REAL / "drivers" / part, place)
            subprocess.run([*git, "init", "-q"], check=True)
            subprocess.run([*git, "add", "."], check=True)
            subprocess.run([*git, "commit", "-q", "-m", "Program"], check=True)
            subprocess.run([*git, "tag", "before"], check=True)
    commands = {
        "init": ["init"], "record": ["golden", "record", name, "--", *words], "verify": ["golden", "verify", name],
    }  # fmt: skip
    if not case:
        commands["bisect"] = ["bisect", "before..HEAD", "-j", str(options.jobs), "--", *words]
    for stage, command in commands.items():
        if told.get(f"{name} {stage}", {"code": CUT})["code"] in (0, 1):
            continue
        if stage == "bisect" and subprocess.check_output([*git, "rev-list", "--count", "HEAD"]) == b"1\n":
            text = (place / driver).read_text()
            (place / driver).write_text(text.replace('"learning_rate": 1e-3', '"learning_rate": 2e-3'))
            subprocess.run([*git, "commit", "-q", "-m", "Another rate", driver], check=True)
        yield f"{name} {stage}", about | run(command, place, work, options, end)


def run(words: list[str], place: Path, work: Path, options: argparse.Namespace, end: float) -> dict[str, Any]:
    """A command of repro in a checkout."""
    programs = work / "env_programs"
    environ = os.environ | {
        "PATH": f"{programs / 'bin'}:{work / 'env_repro/bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(programs),
        "COLUMNS": "120", "DEVICE": options.device, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    began, log = time.monotonic(), work / "last.log"
    with log.open("w") as out:
        command = [str(work / "env_repro/bin/repro"), *words]
        process = subprocess.Popen(command, cwd=place, env=environ, stdout=out, stderr=subprocess.STDOUT)
        try:
            code = process.wait(max(1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(30)
            code = CUT
    text = log.read_text(errors="replace").replace(f"{REAL.resolve()}/", "").replace(f"{work}/", "")
    shown = " ".join(["repro", *words]).replace(f"{REAL.resolve()}/drivers/", "")
    return {"command": shown, "code": code, "seconds": round(time.monotonic() - began),
            "output": "\n".join(line.rstrip() for line in text.splitlines())[-9000:]}  # fmt: skip


def write_page(told: dict[str, Any], under: str) -> None:
    """docs/real-trainers.md, between two of its marks."""
    facts = told["machine"]
    versions = ", ".join(f"{key} {value}" for key, value in facts.items() if key not in ("device", "date", "error"))
    lines = [f"{facts['device']}, {facts['date']}; {versions}.", "", "| | command | by the clock | named |"]
    lines += ["|---|---|---|---|"]
    printed: list[str] = []
    for name, finding in told.items():
        if name == "machine" or name.endswith(" init"):
            continue
        named = finding["culprit"] and re.search(f"(?m)^(commit )?{finding['culprit']}", finding["output"])
        result = "the right commit" if named else f"exit code {finding['code']}"
        command = finding["command"].replace("|", "\\|")
        lines.append(
            f"| {finding['repository']}: {finding['what']} | `{command}` | {finding['seconds']} s | {result} |"
        )
        output = [
            line if len(line) <= LONGEST else f"{line[:LONGEST]} ..." for line in finding["output"].strip().splitlines()
        ]
        printed += ["", f"`{finding['command']}`:", "", "```text", *output, "```"]
    head, _, rest = PAGE.read_text().partition(f"<!-- {under} -->")
    tail = rest.partition(f"<!-- end of {under} -->")[2]
    text = "\n".join([*lines, *printed])
    PAGE.write_text(f"{head}<!-- {under} -->\n{text}\n<!-- end of {under} -->{tail}")


if __name__ == "__main__":
    main()

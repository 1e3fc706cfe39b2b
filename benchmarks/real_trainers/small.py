"""Cases of benchmarks/real on a GPU without a network: ``python small.py --parcels DIR [CASE ...]``.

DIR holds ``small.txz`` and ``repro.txz`` of `parcels.py`. Each case is one `repro bisect`, of upstream's own code at
each commit, with the driver on the GPU. Command, exit code, seconds and what was printed go to ``small.json`` under
``--out``; a case that is there is not run again.

``python small.py --page small.json`` writes the part of docs/real-trainers.md that is about them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from slime import CUT, environment

HERE = Path(__file__).parent
REAL = HERE.parent / "real"
PAGE = HERE.parents[1] / "docs" / "real-trainers.md"
CASES = ("trl-truncated-normalizer", "trl-cispo-swapped", "nanogpt-weight-decay")
LONGEST = 300
"""Characters of a line on the page: a fused optimizer is given a hundred tensors."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CASE", help=f"by default {', '.join(CASES)}")
    parser.add_argument("--work", type=Path, default=Path("small-work"))
    parser.add_argument("--parcels", type=Path)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=4, help="probes that share the GPU")
    parser.add_argument("--limit", type=float, default=560, help="seconds of all cases together")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.page:
        write_page(json.loads(options.page.read_text()))
        return
    work, end = options.work.resolve(), time.monotonic() + options.limit
    work.mkdir(parents=True, exist_ok=True)
    kept = work / "small.json"
    told: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    if not (work / "env_repro").exists():
        setup(work, options.parcels)
    told["machine"] = machine(work, options.device)
    for name in options.names or CASES:
        if told.get(name, {"code": CUT})["code"] == CUT:
            told[name] = run(name, work, options, end)
            one = told[name]
            print(f"== {name}: {one['command']}\n{one['output']}\nexit {one['code']}, {one['seconds']} s", flush=True)
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
    script = work / "env_repro" / "bin" / "repro"
    script.write_text(
        f"#!{script.with_name('python')}\nimport sys\nfrom repro.__main__ import main\nsys.exit(main())\n"
    )
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


def run(name: str, work: Path, options: argparse.Namespace, end: float) -> dict[str, Any]:
    """One case: what `repro bisect` printed, its exit code and its seconds by the clock."""
    case = tomllib.loads((REAL / "cases" / f"{name}.toml").read_text())
    checkout = work / "checkouts" / name
    if not checkout.exists():
        source = work / f"{case['repository']}.git"
        subprocess.run(["git", "clone", "-q", "--no-checkout", str(source), str(checkout)], check=True)
        subprocess.run(["git", "checkout", "-q", "--detach", case["bad"]], cwd=checkout, check=True)
    driver = ["python", str(REAL.resolve() / "drivers" / case["driver"]), *case.get("arguments", [])]
    ends, more = f"{case['good']}..{case['bad']}", ["-j", str(options.jobs), *case.get("options", [])]
    programs = work / "env_programs"
    own = os.environ | {
        "PATH": f"{programs / 'bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(programs), "COLUMNS": "120",
        "DEVICE": options.device, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    began, log = time.monotonic(), work / "last.log"
    with log.open("w") as out:
        words = [str(work / "env_repro/bin/repro"), "bisect", ends, *more, "--", *driver]
        process = subprocess.Popen(words, cwd=checkout, env=own, stdout=out, stderr=subprocess.STDOUT)
        try:
            code = process.wait(max(1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(30)
            code = CUT
    text = log.read_text(errors="replace").replace(f"{REAL.resolve()}/", "").replace(f"{work}/", "")
    shown = f"repro bisect {ends} {' '.join(more)} -- python {case['driver']} {' '.join(case.get('arguments', []))}"
    return {
        "command": shown.strip(), "repository": case["repository"], "what": case["what"], "culprit": case["culprit"],
        "code": code, "seconds": round(time.monotonic() - began),
        "output": "\n".join(line.rstrip() for line in text.splitlines())[-9000:],
    }  # fmt: skip


def write_page(told: dict[str, Any]) -> None:
    """docs/real-trainers.md, between its marks of the small cases."""
    facts = told["machine"]
    versions = ", ".join(f"{key} {value}" for key, value in facts.items() if key not in ("device", "date", "error"))
    lines = [f"{facts['device']}, {facts['date']}; {versions}.", "", "| | command | by the clock | named |"]
    lines += ["|---|---|---|---|"]
    printed: list[str] = []
    for name, one in told.items():
        if name == "machine":
            continue
        named = f"{one['culprit']} moved" in one["output"] or f"\ncommit {one['culprit']}" in one["output"]
        said = "the right commit" if named else f"exit code {one['code']}"
        command = one["command"].replace("|", "\\|")
        lines.append(f"| {one['repository']}: {one['what']} | `{command}` | {one['seconds']} s | {said} |")
        output = [
            line if len(line) <= LONGEST else f"{line[:LONGEST]} ..." for line in one["output"].strip().splitlines()
        ]
        printed += ["", f"`{one['command']}`:", "", "```text", *output, "```"]
    head, _, rest = PAGE.read_text().partition("<!-- small -->")
    tail = rest.partition("<!-- end of small -->")[2]
    text = "\n".join([*lines, *printed])
    PAGE.write_text(f"{head}<!-- small -->\n{text}\n<!-- end of small -->{tail}")


if __name__ == "__main__":
    main()

"""Hold our reading and writing of rollout dumps against checkouts of slime and Miles, field by field.

    python benchmarks/compare_with_trainers.py --slime PATH --miles PATH [--out FILE.json]
        [--docs docs/reference/trainer-dumps.md]

Each checkout's own `Sample`, loader and saver run in a process of their own (compare_with_trainers_child.py). They load
what we write: samples with every field set, an evaluation, one with fields of former days alone, and dumps of the other
systems converted. We read what they save. `--docs` puts the result between the markers in that page. The exit code is 1
where a field differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import _kits  # noqa: F401
import numpy as np
from rollout_dump_kit import full_dump, plain_dump

from repro.text import table
from repro_golden.base.canonical import write_atomic
from repro_golden.base.systems import System
from repro_golden.dumps.rollout.columns import translate
from repro_golden.dumps.rollout.fields import FIELDS, defaults
from repro_golden.dumps.rollout.files import RolloutDump, read_rollout_dump, write_rollout_dump
from repro_golden.dumps.values import Record, Tensor

CHILD = Path(__file__).with_name("compare_with_trainers_child.py")
BEGIN, END = "<!-- compare_with_trainers: begin -->", "<!-- compare_with_trainers: end -->"
SYSTEMS: tuple[System, ...] = ("slime", "miles")
OLD = ("index", "prompt", "tokens", "response", "response_length", "label", "reward", "loss_mask", "status", "metadata")


def main() -> int:
    """Compare with every checkout that was given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for system in SYSTEMS:
        parser.add_argument(f"--{system}", type=Path, help=f"A checkout of {system}.")
    parser.add_argument("--python", default=sys.executable, help="The interpreter that the trainers' code runs in.")
    parser.add_argument("--out", type=Path, help="A JSON file for the result.")
    parser.add_argument("--docs", type=Path, help="A page with markers, for the table.")
    given = parser.parse_args()
    versions = {}
    for system in SYSTEMS:
        if checkout := getattr(given, system):
            versions[system] = compare(system, checkout.resolve(), given.python)
    if not versions:
        parser.error("give a checkout: --slime PATH or --miles PATH")
    text = shown(versions)
    print(text)
    if given.out:
        write_atomic(given.out, json.dumps(versions, indent=2, sort_keys=True) + "\n")
    if given.docs:
        page = given.docs.read_text(encoding="utf-8")
        head, _, rest = page.partition(BEGIN)
        write_atomic(given.docs, f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    return int(any("differs" in row.values() for version in versions.values() for row in version["fields"].values()))


def compare(system: System, checkout: Path, python: str) -> dict[str, Any]:
    """All fields of one system: our table, our dumps in its loader, its dumps in our reader."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "ours").mkdir()
        ours = dumps(system)
        for name, dump in ours.items():
            write_rollout_dump(folder / "ours" / name, dump)
        done = subprocess.run(
            [python, str(CHILD), system, str(checkout), scratch], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{system} at {checkout} failed:\n{done.stderr[-2000:]}")
        theirs = json.loads(done.stdout.splitlines()[-1])
        read = {name: read_rollout_dump(folder / "theirs" / "rollout_data" / name) for name in theirs["saved"]}
    names = [field.name for field in FIELDS[system]]
    names += sorted(theirs["fields"].keys() - names)
    rows = {name: {"table": in_table(system, name, theirs["fields"])} for name in names}
    for name in names:
        loaded = [
            (sample[name], each, name)
            for file, dump in ours.items()
            for sample, each in zip(dump.samples, theirs["loaded"][file]["samples"], strict=True)
            if name in sample
        ]
        saved = [
            (sample.get(name), their, name)
            for file, dump in read.items()
            for sample, their in zip(dump.samples, theirs["saved"][file], strict=True)
        ]
        rows[name]["our dump, its loader"] = verdict(loaded)
        rows[name]["its dump, our reader"] = verdict(saved)
    commit, date = revision(checkout)
    whole = {
        "system": all(dump.system == system for dump in read.values()),
        "evaluation": all(dump.evaluation == name.startswith("eval") for name, dump in read.items()),
        "unknown fields": all(dump.unknown_fields == {"of_a_user"} for dump in read.values()),
        "rollout_id": all(dump.rollout_id == 3 for dump in read.values()),
    }
    if system == "miles":
        whole["metadata read"] = read["3.pt"].metadata == {"turns": 2}
        whole["metadata written"] = theirs["loaded"]["3.pt"]["metadata"] == describe(ours["3.pt"].metadata)
    rows |= {f"({name})": {"whole": "equal" if held else "differs"} for name, held in whole.items()}
    return {
        "commit": commit, "date": date, "fields": rows, "stand_ins": theirs["stand_ins"],
        "torch": theirs["torch"], "numpy": theirs["numpy"], "files": sorted(ours),
    }  # fmt: skip


def dumps(system: System) -> dict[str, RolloutDump]:
    """What its loader is given, by file name."""
    full = full_dump(system)
    evaluation = full_dump(system)
    evaluation.evaluation = True
    old = [{name: sample[name] for name in OLD} for sample in plain_dump("slime").samples]
    dumps = {"3.pt": full, "eval_3.pt": evaluation, "old.pt": RolloutDump(system, 3, False, {}, old)}
    others: tuple[System, ...] = ("slime", "miles", "relax")
    return dumps | {f"from-{other}.pt": translate(full_dump(other), system)[0] for other in others if other != system}


def in_table(system: System, name: str, theirs: dict[str, Any]) -> str:
    """Whether our table has a field of theirs, with its default."""
    unset = defaults(system)
    if name not in theirs:
        return "not held"
    if name not in unset:
        return "differs"
    return "equal" if describe(unset[name]) == theirs[name] else "differs"


def verdict(pairs: list[tuple[Any, dict[str, Any], str]]) -> str:
    """Of one field in all samples: equal, differs, or not held where the class has no such field."""
    held = [
        (ours, sample["held"][name])
        for ours, sample, name in pairs
        if name in sample["held"].keys() - sample["attributes"]
    ]
    if not held:
        return "not held"
    return "equal" if all(describe(ours) == theirs for ours, theirs in held) else "differs"


def revision(checkout: Path) -> tuple[str, str]:
    """Short commit and date of a checkout."""
    words = ["git", "-C", str(checkout), "log", "-1", "--format=%h %cs"]
    commit, date = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    return commit, date


def describe(value: Any) -> Any:
    """As the child describes its own values."""
    if isinstance(value, Tensor):
        return ["tensor", value.dtype, list(value.shape), hashlib.sha256(value.array.tobytes()).hexdigest()]
    if isinstance(value, np.ndarray):
        return ["array", value.dtype.str, list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, Record):
        return ["record", value.name, describe(value.state)]
    if isinstance(value, bool | str | int) or value is None:
        return value
    if isinstance(value, float):
        return ["float", struct.pack(">d", value).hex()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(describe, value)]
    if isinstance(value, dict):
        return ["dict", sorted(([describe(k), describe(v)] for k, v in value.items()), key=repr)]
    return ["other", type(value).__name__]


def shown(versions: dict[str, dict[str, Any]]) -> str:
    """The result as Markdown."""
    lines = []
    for system, version in versions.items():
        absent = (
            f"; stand-ins for what is not installed: {', '.join(version['stand_ins'])}" if version["stand_ins"] else ""
        )
        lines.append(
            f"{system} {version['commit']} ({version['date']}), its code run with torch {version['torch']} "
            f"and numpy {version['numpy']}{absent}. Loaded of ours: {', '.join(version['files'])}."
        )
        head = ["field", "name and default", "our dump, its loader", "its dump, our reader"]
        cells = [
            [name, row.get("table", row.get("whole", "")), row.get(head[2], ""), row.get(head[3], "")]
            for name, row in version["fields"].items()
        ]
        lines += ["", table(head, cells), ""]
    return "\n".join(lines).strip()


if __name__ == "__main__":
    sys.exit(main())

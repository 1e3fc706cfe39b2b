"""The zoo: trainers in pairs. A pair is a small program, a change to it, and what must be said of the change.

Programs lie in tests/zoo as PROGRAM.py, pairs as PAIR.toml (see `Pair`). What a program saves and logs is observed
without the recorder by zoo_truth.py; so what a pair's file says is checked before the recorder is judged by it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import warm_kit

from repro.__main__ import main

__all__ = [
    "ALONE",
    "PAIRS",
    "ZOO",
    "Difference",
    "Pair",
    "Recording",
    "Verdict",
    "digest",
    "first_difference",
    "observe",
]

ZOO = Path(__file__).parent / "zoo"
SURROUNDINGS = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
ALONE = {"forked", "helper", "isolated", "loader"}
"""Programs that start others: all of their processes begin cold."""

END, LENGTH = "end", "length"
AFTERWARDS = ("end/", "saved/")
"""How signals begin that are read after the last step."""

Step = int | Literal["end", "length"]
Snapshots = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Pair:
    """A program, a change to it, and what must be said.

    Attributes:
        name: Of its file.
        program: Its file in tests/zoo, without `.py`: the side before the change.
        change: In words.
        edits: Texts that occur once in the program, and those that replace them.
        verdict: What may be said: ``agrees``, ``differs``, ``refused`` (an error instead of a verdict), or ``named``
            (agrees, and says what was seen but not looked at).
        step: After which step something that is saved or logged first differs; ``end`` for after the last one.
        named: Which steps a verdict may name; `step` by default. What is done after a step's end is read in the next.
            ``length`` where the first line must say after which step one side ended.
        phase: Phases that it may name; any by default.
        signal: Globs of names of the first signal; any by default.
        renamed: What is saved has other names, for which alone nothing differs.
        moved: What is saved is the same, under names that both sides have: that differs.
        rounds: The sides differ by how a sum rounds, which on some machines is alike: there they must agree.
        says: Regular expressions that the verdict's text must match, whatever the case.
        unread: One for the text that names what was not looked at, for ``named``.
    """

    name: str
    program: str
    change: str
    edits: Sequence[tuple[str, str]]
    verdict: Sequence[str]
    step: Step | None = None
    named: Sequence[Step] = ()
    phase: Sequence[str] = ()
    signal: Sequence[str] = ("*",)
    renamed: bool = False
    moved: bool = False
    rounds: bool = False
    says: Sequence[str] = ()
    unread: str = ""

    @staticmethod
    def read(path: Path) -> Pair:
        """The pair of a file; a key that is not known is an error."""
        data = tomllib.loads(path.read_text())
        for key in ("verdict", "signal"):
            if isinstance(data.get(key), str):
                data[key] = [data[key]]
        edits = [(edit["old"], edit["new"]) for edit in data.pop("edit")]
        return Pair(name=path.stem, edits=edits, **data)

    @property
    def before(self) -> str:
        """The program as it was."""
        return (ZOO / f"{self.program}.py").read_text()

    @property
    def after(self) -> str:
        """The program as it is."""
        text = self.before
        for old, new in self.edits:
            assert text.count(old) == 1, f"{self.name}: {old!r} occurs {text.count(old)} times in {self.program}.py"
            text = text.replace(old, new)
        return text


PAIRS = {path.stem: Pair.read(path) for path in sorted(ZOO.glob("*.toml"))}


def digest(text: str) -> str:
    """What stands for a program's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- what is so


@dataclass(frozen=True)
class Difference:
    """Where what two programs save or log first differs: the step, and the paths that do."""

    step: Step
    paths: Sequence[str]


def observe(folder: Path, programs: Mapping[str, str]) -> None:
    """Run programs without the recorder: NAME.json is what zoo_truth.py saw of NAME."""
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("zoo_truth.py"), *(folder / f"{name}.py" for name in programs)],
        env=os.environ | SURROUNDINGS, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def first_difference(a: Snapshots, b: Snapshots, *, names: bool = True) -> Difference | None:
    """The first step after which two runs save or log something else; without `names`, only contents count."""
    steps = min(len(a), len(b)) - 1
    for step, x, y in [*zip(range(steps), a, b, strict=False), (END, a[-1], b[-1])]:
        if step == END and len(a) != len(b):
            return Difference(steps, ["length"])
        paths = [path for path in {**x, **y} if x.get(path) != y.get(path)]
        if paths and (names or Counter(x.values()) != Counter(y.values())):
            return Difference(step, paths)
    return None


# -- what is said


@dataclass(frozen=True)
class Recording:
    """A recorded program: its trace, or the error there is instead."""

    folder: Path

    @property
    def trace(self) -> Path:
        """The trace's folder."""
        return self.folder / "trace"

    @property
    def error(self) -> str:
        """What was said where there is no trace, or it is not whole."""
        done = json.loads((self.folder / "done.json").read_text())
        return str(done["stderr"]) if done["code"] else ""

    @staticmethod
    def make(folder: Path, text: str, *, cold: bool) -> None:
        """Record a program as a user does; `cold` has every process begin as a user's."""
        work = folder / "work"
        work.mkdir()
        (folder / "train.py").write_text(text)
        command = [sys.executable, "-m", "repro", "trace", "--out", "../trace", "--", sys.executable, "../train.py"]
        variables = os.environ | SURROUNDINGS
        if cold:
            done = subprocess.run(command, cwd=work, env=variables, capture_output=True, text=True, check=False)
        else:
            done = warm_kit.run(command, work, variables, 300)
        (folder / "done.json").write_text(json.dumps({"code": done.returncode, "stderr": done.stderr}))


@dataclass(frozen=True)
class Verdict:
    """What `repro diff` says of two recordings."""

    kind: str
    text: str
    data: Mapping[str, Any]

    @staticmethod
    def of(before: Recording, after: Recording) -> Verdict:
        """Compare; where a side could not be recorded, that is the verdict."""
        if error := before.error or after.error:
            return Verdict("refused", error, {})
        traces = [str(before.trace), str(after.trace)]
        code, text, stderr = _repro("diff", *traces)
        _, data, _ = _repro("diff", "--json", *traces)
        return Verdict({0: "agrees", 1: "differs"}.get(code, "refused"), text + stderr, json.loads(data))

    def problems(self, pair: Pair) -> list[str]:
        """What is wrong with it, in words; nothing where it says what it must."""
        named = self.kind == "agrees" and "named" in pair.verdict and self._says(pair.unread)
        if self.kind not in pair.verdict and not named:
            wanted = " or ".join(pair.verdict)
            return [f"{self.kind}, and not {wanted}: {self.text.strip().splitlines()[0] if self.text.strip() else ''}"]
        wrong = [f"does not say {text!r}" for text in pair.says if not self._says(text)]
        if self.kind == "differs":
            wrong += self._misplaced(pair)
        return wrong

    def _says(self, pattern: str) -> bool:
        return re.search(pattern, self.text, re.IGNORECASE) is not None

    def _misplaced(self, pair: Pair) -> list[str]:
        """What is wrong with the place that it names."""
        head = self.text.splitlines()[0]
        place = self.data.get("divergence") or {}
        signal = str(place.get("signal"))
        step: Any = place.get("step", LENGTH if "ended after" in head else None)
        step = END if signal.startswith(AFTERWARDS) else step
        wanted = pair.named or [pair.step]
        wrong = [] if step in wanted else [f"names step {step}, and not {wanted}: {head}"]
        if pair.phase and place.get("phase") not in pair.phase:
            wrong.append(f"names phase {place.get('phase')}, and not {list(pair.phase)}: {head}")
        if not any(fnmatch.fnmatchcase(signal, glob) for glob in pair.signal):
            wrong.append(f"names signal {signal}, and not {list(pair.signal)}: {head}")
        return wrong


def _repro(*arguments: str) -> tuple[int, str, str]:
    """One command of ours in this process: its exit code, and what it says."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)

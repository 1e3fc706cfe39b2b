"""A reward function of the user's, called in its own interpreter. Asked for by name alone: it runs the user's code."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro.doctor.artefacts.kinds import RewardFunction
from repro.doctor.artefacts.machine import interpreter, last_line, printable
from repro_golden.base.canonical import decode_float
from repro_golden.base.credentials import handed_on
from repro_golden.base.errors import NotVerifiableError, ReproError
from repro_golden.base.files import open_regular
from repro_golden.replay.children import Child, ChildFailure

__all__ = ["Odd", "reward_function"]

PATIENCE = 300.0
"""Seconds that all samples together may take."""
_LARGEST = 64 << 20
_NAME = re.compile(r"[A-Za-z_][\w.]*[:.][A-Za-z_]\w*")


@dataclass(frozen=True)
class Odd:
    """A reward that is neither a number, a dict of such, nor None: `kind` is its type's name."""

    kind: str


_RUN = r"""
import asyncio, importlib, inspect, json, os, struct, sys, traceback
from argparse import Namespace

source, out = sys.argv[1:3]
with open(source) as file:
    asked = json.load(file)
module, function, arguments = asked["module"], asked["function"], Namespace(**asked["arguments"])

def plain(value):
    if hasattr(value, "item") and not isinstance(value, (dict, list, str)):
        value = value.item()  # a scalar of numpy or torch
    if value is None or isinstance(value, (bool, int)):
        return {"plain": str(value) if isinstance(value, int) and abs(value) >= 2**53 else value}
    if isinstance(value, str):
        return {"text": value[:200]}
    if isinstance(value, float):
        return {"bits": struct.pack(">d", value).hex()}
    if isinstance(value, dict):
        return {"dict": {str(key): plain(one) for key, one in value.items()}}
    return {"odd": type(value).__name__}

def sample_of(values):
    # the trainer's own class, where the function's module has loaded it
    for name in ("slime", "miles", "relax"):
        kinds = sys.modules.get(name + ".utils.types")
        if kinds is not None and hasattr(kinds, "Sample"):
            return kinds.Sample.from_dict(dict(values, status=values.get("status") or "completed"))
    return Namespace(**values)

def place(error):
    frames = traceback.extract_tb(error.__traceback__)
    return "%s:%s" % (os.path.basename(frames[-1].filename), frames[-1].lineno) if frames else ""

async def rewards(call, samples):
    names = list(inspect.signature(call).parameters)
    batched = len(names) > 1 and names[1] == "samples"
    groups = [samples] if batched else [[one] for one in samples]
    found = []
    for group in groups:
        at = len(found)
        try:
            value = call(arguments, group if batched else group[0])
            value = await value if inspect.isawaitable(value) else value
        except Exception as error:
            lacks = isinstance(error, AttributeError) and getattr(error, "obj", None) is arguments
            raise Failed(error, at, getattr(error, "name", "") if lacks else "") from error
        if batched and (not isinstance(value, (list, tuple)) or len(value) != len(group)):
            what = "%d rewards" % len(value) if isinstance(value, (list, tuple)) else "a " + type(value).__name__
            raise Failed(TypeError("it returned %s for %d samples" % (what, len(group))), at)
        found += [plain(one) for one in value] if batched else [plain(value)]
    return found

class Failed(Exception):
    def __init__(self, error, at, lacks=""):
        Exception.__init__(self, str(error))
        self.error, self.at, self.lacks = error, at, lacks

def main():
    try:
        call = getattr(importlib.import_module(module), function)
    except BaseException as error:
        return {"import": "%s: %s" % (type(error).__name__, error), "place": place(error)}
    if not callable(call):
        return {"import": "%s is no function" % function, "place": ""}
    try:
        samples = [sample_of(one) for one in asked["samples"]]
    except Exception as error:
        return {"import": "its samples cannot be made (%s: %s)" % (type(error).__name__, error), "place": place(error)}
    try:
        return {"rewards": asyncio.run(rewards(call, samples))}
    except Failed as failed:
        return {"error": "%s: %s" % (type(failed.error).__name__, failed.error), "at": failed.at,
                "place": place(failed.error), "lacks": failed.lacks}

answer = main()
with open(out, "w") as file:
    json.dump(answer, file)
sys.stdout.flush()
os._exit(0)  # threads and connections that the function leaves open do not hold it up
"""


def reward_function(
    name: str, python: str | None, root: Path, arguments: Mapping[str, Any] | None = None, *, limit: float = PATIENCE
) -> RewardFunction:
    """A reward function by its name. Nothing is run until it is called.

    Args:
        name: ``package.module:function``, or with dots alone as the trainers write it.
        python: The interpreter that it runs in; None for this one.
        root: The checkout that its package lies in. It starts in a folder of its own, with this on PYTHONPATH.
        arguments: What the trainer's ``args`` hold beside; a function that reads others cannot be judged.
        limit: Seconds that it may take for all samples of a call.

    Raises:
        ReproError: no such name can be, or there is no such interpreter.
    """
    if not _NAME.fullmatch(name):
        raise ReproError(f"--reward {name[:100]!r} names no function: write package.module:function")
    module, _, function = name.rpartition(":" if ":" in name else ".")
    program = interpreter(python)
    known = {"custom_rm_path": f"{module}.{function}", "reward_key": None, "rm_type": None, **(arguments or {})}

    def score(samples: Sequence[Mapping[str, Any]]) -> list[Any]:
        asked = {"module": module, "function": function, "arguments": known, "samples": [_sent(s) for s in samples]}
        return _called(name, program, root, asked, limit)

    return RewardFunction(name, score)


def _called(name: str, program: str, root: Path, asked: Mapping[str, Any], limit: float) -> list[Any]:
    """Run the function on samples.

    Raises:
        NotVerifiableError: it reads arguments that only a trainer has.
        ReproError: it failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="repro-reward-") as scratch:
        folder = Path(scratch)
        (folder / "call_reward.py").write_text(_RUN, encoding="utf-8")
        (folder / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
        path = os.pathsep.join(entry for entry in (str(root.resolve()), os.environ.get("PYTHONPATH", "")) if entry)
        variables = {**handed_on(os.environ), "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1"}
        command = [program, "call_reward.py", "asked.json", "answer.json"]
        try:
            code = Child(command, folder, variables, folder / "log", limit).run()
            with open_regular(folder / "answer.json") as file:
                answer = json.loads(file.read(_LARGEST))
        except ChildFailure:
            raise ReproError(f"{name} gave no rewards within {limit:g} s") from None
        except (OSError, ValueError, RecursionError):
            raise ReproError(f"{name} ended without rewards ({last_line(folder / 'log')}; exit code {code})") from None
    if "rewards" in answer:
        return [_received(reward) for reward in answer["rewards"]]
    if "import" in answer:
        raise ReproError(f"{name} cannot be loaded: {printable(answer['import'])}{_at(answer)}")
    if answer.get("lacks"):
        raise NotVerifiableError(f"{name} reads args.{printable(answer['lacks'])}, which only a trainer knows")
    raise ReproError(f"{name} raised {printable(answer['error'])}{_at(answer)} on sample {answer['at']}")


def _at(answer: Mapping[str, Any]) -> str:
    return f" at {answer['place']}" if answer.get("place") else ""


def _sent(sample: Mapping[str, Any]) -> dict[str, Any]:
    """What of a sample is plain: a reward is not made of arrays. Its recorded reward is left out, as before scoring."""
    fields = {key: _plain(value, 20) for key, value in sample.items()}
    return {key: value for key, value in fields.items() if value is not _NOT} | {"reward": None}


_NOT = object()


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _NOT
    if depth and isinstance(value, (list, tuple)):
        parts = [_plain(item, depth - 1) for item in value]
        return _NOT if any(part is _NOT for part in parts) else parts
    if depth and isinstance(value, Mapping):
        fields = {str(key): _plain(item, depth - 1) for key, item in value.items()}
        return {key: item for key, item in fields.items() if item is not _NOT}
    return _NOT


def _received(value: Any) -> Any:
    if not isinstance(value, Mapping) or len(value) != 1:
        return Odd("answer")
    ((kind, content),) = value.items()
    if kind == "bits":
        return decode_float(content)
    if kind == "dict":
        return {key: _received(item) for key, item in content.items()}
    if kind == "plain":
        return _whole(content) if isinstance(content, str) else content
    return Odd("str" if kind == "text" else str(content))


def _whole(text: str) -> int | Odd:
    try:
        number = int(text)
    except ValueError:  # thousands of digits
        return Odd("number beyond all floats")
    return number if number.bit_length() < 1000 else Odd("number beyond all floats")

"""One pass over prompt data for all rules: what its rows hold under the keys that a launch reads."""

from __future__ import annotations

import functools
import re
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Generic, TypeVar

from repro.doctor.artefacts.kinds import Launch, PromptData
from repro.doctor.artefacts.prompts import LABELS, PROMPT_KEYS, is_conversation
from repro_golden.base.canonical import xxh3_128_hexdigest

__all__ = ["MARKERS", "ROWS", "Keys", "Survey", "Tally", "keys_of", "survey", "text_of"]

ROWS = 1_000_000
"""Rows that are looked at."""
_KEPT = 100

MARKERS = (
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|eot_id|>", "<start_of_turn>", "<|user|>", "<|assistant|>",
    "<|system|>", "[INST]", "<<SYS>>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "[gMASK]", "<|start|>",
    "<|begin_of_text|>", "]~b]user",
)  # fmt: skip
"""What templates of chat models put around turns."""

_MARKED = re.compile("|".join(map(re.escape, MARKERS)))


@dataclass(frozen=True)
class Keys:
    """What a launch reads of a file.

    Attributes:
        prompt: The key of prompts; None where no launch says so.
        label: The key of labels; None where none is read, or no launch says so.
        template: Whether the chat template is applied; None where no launch says so.
        sure: Whether the launch names this very file.
        evaluation: Whether it is data of an evaluation.
    """

    prompt: str | None = None
    label: str | None = None
    template: bool | None = None
    sure: bool = False
    evaluation: bool = False


def keys_of(launch: Launch | None, data: PromptData) -> Keys:
    """What a launch reads of a file; unknown keys where it names other files."""
    if launch is None:
        return Keys()
    template = launch.has("--apply-chat-template")
    prompt = launch.value("--input-key") if launch.has("--input-key") else "input"
    label = launch.value("--label-key")
    names = [_name(value) for value in _values(launch, "--prompt-data")]
    if data.path.name in names:
        return Keys(prompt, label, template, sure=True)
    if data.path.name in [_name(value) for value in _values(launch, "--eval-prompt-data")]:
        keys = [launch.value(f"--eval-{kind}-key") or key for kind, key in (("input", prompt), ("label", label))]
        return Keys(keys[0], keys[1], template, sure=True, evaluation=True)
    unknown = any("$" in name or "`" in name for name in names)
    return Keys(prompt, label, template) if unknown else Keys()


def _values(launch: Launch, name: str) -> tuple[str, ...]:
    flag = launch.flags.get(name)
    return flag.values if flag else ()


def _name(value: str) -> str:
    """The file's name, without the ``@[0:100]`` that takes a slice of it."""
    return PurePath(re.sub(r"@\[-?\d*:-?\d*\]$", "", value)).name


T = TypeVar("T")


@dataclass
class Tally(Generic[T]):
    """How many lines are of a kind, and what is said of the first hundred of them."""

    count: int = 0
    first: list[T] = field(default_factory=list)

    def add(self, entry: T) -> None:
        """One more."""
        self.count += 1
        if self.count <= _KEPT:
            self.first.append(entry)


@dataclass
class Survey:
    """What one pass found. Of each `Tally` the entries are lines, and where it says so what stands there.

    Attributes:
        prompt: The key that prompts were looked for under; None where no row has one.
        label: The key of labels, likewise.
        rows: Rows that are objects.
        whole: Whether the file was read to its end.
        broken: Lines that are no objects, with what is wrong.
        keys: In how many rows each key stands.
        absent: Rows without the prompt's key.
        unlabelled: Rows without the label's key.
        empty: Empty prompts.
        blank: Empty labels.
        kinds: How many prompts are ``text``, ``messages``, or a type's name.
        odd: Prompts that are neither text nor messages, with their type.
        marked: Prompts that hold a marker of a template, with it.
        again: Prompts that came before, with the line of the first.
        lines: Lines of prompts that are text or messages.
        characters: How long each of those is.
    """

    prompt: str | None = None
    label: str | None = None
    rows: int = 0
    whole: bool = True
    broken: Tally[tuple[int, str]] = field(default_factory=Tally)
    keys: Counter[str] = field(default_factory=Counter)
    absent: Tally[int] = field(default_factory=Tally)
    unlabelled: Tally[int] = field(default_factory=Tally)
    empty: Tally[int] = field(default_factory=Tally)
    blank: Tally[int] = field(default_factory=Tally)
    kinds: Counter[str] = field(default_factory=Counter)
    odd: Tally[tuple[int, str]] = field(default_factory=Tally)
    marked: Tally[tuple[int, str]] = field(default_factory=Tally)
    again: Tally[tuple[int, int]] = field(default_factory=Tally)
    lines: array[int] = field(default_factory=lambda: array("q"))
    characters: array[int] = field(default_factory=lambda: array("q"))

    @property
    def prompts(self) -> int:
        """Rows that have a prompt."""
        return self.rows - self.absent.count


def text_of(prompt: object) -> str:
    """The text of a prompt: itself, or what its messages hold."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        return ""
    pieces: list[str] = []
    for message in prompt:
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
        pieces += [text for text in texts if isinstance(text, str)]
    return "\n".join(pieces)


@functools.lru_cache(maxsize=8)
def survey(data: PromptData, prompt: str | None, label: str | None) -> Survey:
    """Look at the rows once.

    Args:
        data: The file.
        prompt: The key of prompts; None: the first common one that the first row with any has.
        label: The key of labels; None: likewise.

    Raises:
        ReproError: it cannot be read.
    """
    tally = Survey(prompt, label)
    first: dict[str, int] = {}
    for number, row in data.rows():
        if tally.rows + tally.broken.count >= ROWS:
            tally.whole = False
            break
        if isinstance(row, str):
            tally.broken.add((number, row))
            continue
        tally.rows += 1
        tally.keys.update(str(key) for key in row)
        if prompt is None and tally.prompt is None:
            tally.prompt = next((key for key in PROMPT_KEYS if key in row), None)
        if label is None and tally.label is None:
            tally.label = next((key for key in LABELS if key in row), None)
        _look(tally, number, row, first)
    return tally


def _look(tally: Survey, number: int, row: Mapping[str, Any], first: dict[str, int]) -> None:
    if tally.label is not None:
        if tally.label not in row:
            tally.unlabelled.add(number)
        elif _is_blank(row[tally.label]):
            tally.blank.add(number)
    if tally.prompt is None or row.get(tally.prompt) is None:
        tally.absent.add(number)
        return
    value = row[tally.prompt]
    kind = "text" if isinstance(value, str) else "messages" if is_conversation(value) else type(value).__name__
    tally.kinds[kind] += 1
    text = text_of(value)
    if kind not in ("text", "messages") and value != []:
        tally.odd.add((number, kind))
        return
    tally.lines.append(number)
    tally.characters.append(len(text))
    if not text.strip() and not _has_media(value):
        tally.empty.add(number)
        return
    if marker := _MARKED.search(text):
        tally.marked.add((number, marker[0]))
    try:
        key = xxh3_128_hexdigest(repr(value).encode("utf-8", "surrogatepass"))
    except RecursionError:  # nested as deep as JSON may be
        return
    if key in first:
        tally.again.add((number, first[key]))
    else:
        first[key] = number


def _is_blank(value: object) -> bool:
    return (
        value is None
        or (isinstance(value, str) and not value.strip())
        or (isinstance(value, (list, dict)) and not value)
    )


def _has_media(value: object) -> bool:
    """Whether a message holds something else than text, as an image."""
    contents = [m.get("content") for m in value if isinstance(m, Mapping)] if isinstance(value, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)

"""Where tools answer inside a response: by the markers of chat templates, and by tool messages in the metadata."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from repro.doctor.artefacts.checkpoints.tokenizer import vocabulary
from repro.doctor.artefacts.kinds import Tokenizer
from repro.doctor.facts.samples.train_columns import token_ids

__all__ = ["Span", "spans_of", "texts_of_tokens", "tokens_inside"]


class Span(NamedTuple):
    """What a tool said, between its markers.

    Attributes:
        start: Character of the text where it begins.
        end: Character behind it.
        marker: What it was recognised by.
    """

    start: int
    end: int
    marker: str


_MARKERS: tuple[tuple[str, str, str], ...] = (
    ("<tool_response>", r"<tool_response>", r"</tool_response>"),
    ("<|observation|>", r"<\|observation\|>", r"<\|assistant\|>|<\|user\|>"),
    ("role ipython", r"<\|start_header_id\|>(?:ipython|tool)<\|end_header_id\|>", r"<\|eot_id\|>"),
    ("role tool", r"<\|im_start\|>(?:tool|function|observation)\b[^\n]*\n", r"<\|im_end\|>"),
    ("role tool", r"<\|im_system\|>tool<\|im_middle\|>", r"<\|im_end\|>"),
    ("[TOOL_RESULTS]", r"\[TOOL_RESULTS\]", r"\[/TOOL_RESULTS\]"),
    ("tool outputs", r"<｜tool▁outputs?▁begin｜>", r"<｜tool▁outputs?▁end｜>"),  # noqa: RUF001 - DeepSeek's own signs
    ("role functions", r"<\|start\|>functions\.[^<]*<\|channel\|>[^<]*<\|message\|>", r"<\|end\|>"),
    ("<interpreter>", r"<interpreter>", r"</interpreter>"),
    ("<information>", r"<information>", r"</information>"),
)
"""Name, beginning and end of a tool's turn, in the templates of Qwen and Hermes, GLM, Llama, ChatML, Kimi, Mistral,
DeepSeek and gpt-oss, and in the examples retool and search-r1 of slime."""

_PATTERNS = tuple((name, re.compile(start), re.compile(end)) for name, start, end in _MARKERS)
_HINTS = (
    "<tool_response>", "<|observation|>", "<|end_header_id|>", "<|im_start|>", "<|im_system|>", "[TOOL_RESULTS]",
    "tool▁output", "functions.", "<interpreter>", "<information>",
)  # fmt: skip
"""One of these stands in every text that has a span."""

_ROLES = {"tool", "ipython", "function", "observation", "environment"}
_LONG = 16
"""Characters of a tool message that are enough to find it in a response."""
_DEPTH = 6
_MESSAGES = 256
_SPANS = 1000


def spans_of(text: str, metadata: Any = None) -> list[Span]:
    """Where tools answer in a response.

    Args:
        text: The response, special tokens included where it has them.
        metadata: Of the sample: tool messages in it are looked for in the text.

    Returns:
        Spans that do not overlap, in order. Markers belong to none: a model may well write the first one itself.
    """
    spans = list(itertools.islice(_marked(text), _SPANS)) if any(hint in text for hint in _HINTS) else []
    for content in itertools.islice(_tool_messages(metadata, _DEPTH), _MESSAGES):
        at = text.find(content)
        if at >= 0:
            spans.append(Span(at, at + len(content), "a tool message in metadata"))
    selected: list[Span] = []
    # of two that overlap, a tool message is what was really called
    for span in sorted(spans, key=lambda s: (not s.marker.startswith("a tool"), s.start, -s.end)):
        if all(span.end <= other.start or span.start >= other.end for other in selected):
            selected.append(span)
    return sorted(selected)


def _marked(text: str) -> Iterator[Span]:
    for name, start, end in _PATTERNS:
        at = 0
        while begin := start.search(text, at):
            close = end.search(text, begin.end())
            at = close.start() if close else len(text)
            inside = text[begin.end() : at]
            if inside.strip():
                lead = len(inside) - len(inside.lstrip())
                yield Span(begin.end() + lead, begin.end() + len(inside.rstrip()), name)
            if close:
                at = close.end()


def _tool_messages(value: Any, depth: int) -> Iterator[str]:
    """Contents of messages of tools, anywhere in a sample's metadata."""
    if depth == 0:
        return
    if isinstance(value, Mapping):
        content = value.get("content")
        if value.get("role") in _ROLES if isinstance(value.get("role"), str) else False:
            if isinstance(content, str) and len(content.strip()) >= _LONG:
                yield content.strip()
            return
        for item in value.values():
            yield from _tool_messages(item, depth - 1)
    elif isinstance(value, list | tuple):
        for item in value[:_MESSAGES]:
            yield from _tool_messages(item, depth - 1)


# -- the text of each token


def texts_of_tokens(sample: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[str] | None:
    """The text of each response token: the dump's own (Relax), else by a tokenizer's folder; None without both."""
    response, ids = sample["response_length"], token_ids(sample["tokens"])
    if ids is None or not 0 < response <= len(ids):
        return None
    decoded = sample.get("decoded_tokens")
    if isinstance(decoded, list) and all(isinstance(text, str) for text in decoded):
        if len(decoded) == len(ids):
            return decoded[len(ids) - response :]
        if len(decoded) == response:
            return decoded
    known = None if tokenizer is None else _words(tokenizer.path)
    if known is None:
        return None
    texts = [known(int(token)) for token in ids[len(ids) - response :].tolist()]
    return None if any(text is None for text in texts) else [text or "" for text in texts]


@functools.lru_cache(maxsize=4)
def _words(folder: Path) -> Any:
    """A function from a token's id to its text; None without `tokenizers`, or a ``tokenizer.json`` that it reads."""
    fast = vocabulary(folder)
    if fast is None:
        return None

    @functools.lru_cache(maxsize=1 << 16)
    def text(token: int) -> str | None:
        if not 0 <= token < 1 << 32 or fast.id_to_token(token) is None:
            return None
        return str(fast.decode([token], skip_special_tokens=False))

    return text


def tokens_inside(texts: Sequence[str], spans: Sequence[Span]) -> list[npt.NDArray[np.bool_]]:
    """For each span over the joined texts, which tokens lie in it whole and are not empty."""
    sizes = np.array([len(text) for text in texts], dtype=np.int64)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    return [(starts >= span.start) & (ends <= span.end) & (sizes > 0) for span in spans]

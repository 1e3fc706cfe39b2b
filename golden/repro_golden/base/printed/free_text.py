"""Metrics in lines that were written for people: ``loss 3.17``, Megatron-LM's lines, progress bars, dicts in a log.

What is read here is shown and may be judged by bounds, and is never compared by bits: how often such a line is written,
to how many digits and in which words is no matter of the training. A number counts only under a name that ends in a
word for something that a training measures, so that times, ports and dates do not get in.

This runs inside foreign programs, with the standard library alone.
"""

from __future__ import annotations

import math
import re

from repro_golden.base.printed.lines import CALL, NUMBER, bare, numbers
from repro_golden.base.printed.machine_numbers import words_of

__all__ = ["in_bar", "in_dict", "in_text", "is_bar", "shown_in"]

_DEEP = 4
"""Levels of dicts in dicts."""
_LIMIT = 4096
"""Characters of the longest line that is searched for names."""

_LEVEL = (
    r"\b(?:DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|[Ss]tep|STEP|[Ee]poch|EPOCH|[Ii]ter(?:ation)?|[Mm]etrics)\b"
)
_LOGGED = re.compile(rf"(?=[^{{}}]*(?:{_LEVEL}|\d\d:\d\d:\d\d))[^{{}}]{{1,200}}?[\s:|>\])=-]\s{{0,8}}(?=\{{)")
"""What a logger or a label puts before a dict."""

_MEASURED = re.compile(
    r"(?:loss|losses|nll|ppl|perplexity|acc|accuracy|rewards?|kl|entropy|lr|norms?|gnorm|advantages?|clipfrac|scores?|"
    r"mse|mae|rmse|f 1|bleu|rouge|wer|cer|auc|iou|dice|psnr|log ?probs?|(?:learning|success|win|pass) rate|"
    r"clip (?:frac|fraction|ratio)|loss scale|num zeros)"
    r"(?: (?:mean|avg|average|max|min|std|sum|total|value|ema|train|training|val|valid|validation|eval|test|dev|\d+))*"
)
"""What the words of a metric's name end in, with those that may follow."""
_BEFORE = re.compile(
    r"mean|avg|average|max|min|std|sum|total|value|ema|train|training|val|valid|validation|eval|test|dev|lm|mlm|mtp|"
    r"policy|actor|critic|pg|vf|aux|auxiliary|running|smoothed|final|best|grad|gradient|params?|weight|learning|base|"
    r"ref|reward|kl|entropy|bce|ce|mse|l1|l2|z|router|load|balancing|masked|recon|reconstruction|contrastive|"
    r"generator|discriminator|log|success|win|pass|clip|loss|num"
)
"""Words that may stand before them, parted by blanks."""
_HINT = re.compile(
    r"loss|nll|ppl|perp|acc|rew|kl|entr|lr|rate|norm|adv|clip|score|mse|mae|f1|bleu|rou|[wc]er|auc|iou|dice|psnr|prob|"
    r"zeros",
    re.IGNORECASE,
)
_UNIT = r"(?:[mnuµ]?s|secs?|seconds?|mins?|minutes?|h|hours?|its?|[kKMGT]?i?B|[MG]?Hz|k?W|J|°C)"
_AFTER = rf"(?![\w/]|\.\d|[-,:]\d|\s?{_UNIT}(?![\w.]))"
"""What may not follow a number: the rest of a date or of a version, a unit."""
_WORD = r"(?!(?:nan|NaN|inf|Inf|Infinity)\b)[A-Za-z_][\w./@-]{0,60}"
_VALUE = rf"(?:{CALL}\(\s{{0,4}})?(?P<value>{NUMBER}){_AFTER}"
_EQUALS = r"(?:\s{0,40}[:=]\s{0,40}|\s{1,8})"
_PAIR = re.compile(rf"(?<![\w./@%-])(?P<name>(?:{_WORD} ){{0,2}}{_WORD}?){_EQUALS}{_VALUE}")
_CELL = re.compile(rf"\s*(?P<name>[A-Za-z_][^:=]{{0,80}}?)(?:\s*[:=]\s*|\s+){_VALUE}\s*")
"""What stands between two bars, as in Megatron-LM's and fairseq's lines."""

_BAR = re.compile(
    r"(?:\d{1,3}%\|[^|]{0,400}\|\s{0,8}\S{1,40}|\d\S{0,16}) \[(?:\d+:)?\d\d:\d\d(?:<[\d:?]+)?,(?P<rest>[^\[\]]*)\]"
)
"""tqdm's, with a total and without: behind the time come the rate and the postfix."""
_POSTFIX = re.compile(rf"\s*(?P<name>[^=]{{1,80}}?)=\s*{_VALUE}\s*")


def is_bar(line: str) -> bool:
    """Whether a line is a progress bar as tqdm draws them."""
    return _BAR.search(line) is not None


def shown_in(line: str) -> dict[str, float]:
    """The metrics that a line shows beside those which `printed.metrics_of` reads; no line at all is an error.

    Read are a dict behind what a logger or a label puts before it; in it, and in a dict alone in its line, also bools
    and the numbers of inner dicts, as ``outer/inner``; the postfix of a progress bar; and names of metrics with a
    number behind them, as ``loss 3.17``, ``train/loss=3.17``, ``lm loss: 6.95E+00 | grad norm: 0.97``.

    Args:
        line: without its line end.
    """
    text = bare(line)
    if (inside := in_dict(text)) or text.startswith("{"):
        return inside
    if bar := _BAR.search(text):
        return in_text(text[: bar.start()]) | in_bar(text)
    return in_text(text)


def in_dict(text: str) -> dict[str, float]:
    """The numbers of a dict that a text is, or ends in behind what a logger or a label puts before it."""
    if text.startswith("{"):
        return numbers(text, quoted=True, deep=_DEEP)
    prefix = _LOGGED.match(text) if text.endswith("}") else None
    return numbers(text[prefix.end() :], quoted=True, deep=_DEEP) if prefix else {}


def in_bar(text: str) -> dict[str, float]:
    """The numbers of a progress bar's postfix."""
    bar = _BAR.search(text)
    pairs = (_POSTFIX.fullmatch(part) for part in bar["rest"].split(",")) if bar else ()
    return _kept({pair["name"].strip(): _float(pair["value"]) for pair in pairs if pair})


def in_text(text: str) -> dict[str, float]:
    """The names of metrics in a text that have a number behind them."""
    if len(text) > _LIMIT or not _HINT.search(text):
        return {}
    metrics: dict[str, float | None] = {}
    cells = text.split("|")
    for cell in cells:
        whole = _CELL.fullmatch(cell) if len(cells) > 2 else None
        if whole and _measured(name := " ".join(whole["name"].split())):
            metrics[name] = _float(whole["value"])
        elif whole is None:
            metrics |= {
                name: _float(match["value"]) for match in _PAIR.finditer(cell) if (name := _name(match["name"]))
            }
    return _kept(metrics)


def _kept(metrics: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}


def _float(text: str) -> float | None:
    """A number; None for one that is too large for a float."""
    value = float(text)
    return None if math.isinf(value) and "n" not in text.lower() else value


def _name(text: str) -> str:
    """The name that words before a number end in; empty where they end in none of a metric."""
    terms = text.split(" ")
    least = next((n for n in (1, 2) if _measured(" ".join(terms[-n:]))), 0)
    if not least:
        return ""
    while least < len(terms) and _BEFORE.fullmatch(terms[-least - 1].lower()):
        least += 1
    return " ".join(terms[-least:])


def _measured(name: str) -> bool:
    """Whether the words of a name end in a metric."""
    terms = [word for word in words_of(name) if word != "/"]
    return any(_MEASURED.fullmatch(" ".join(terms[at:])) for at in range(len(terms)))

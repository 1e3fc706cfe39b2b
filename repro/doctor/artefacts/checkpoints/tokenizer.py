"""Folders with a tokenizer: its chat template, special tokens and the ids that end generation."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from repro.doctor.artefacts.bounded_json import read_bytes, read_object
from repro.doctor.artefacts.kinds import Reader, Tokenizer
from repro.doctor.artefacts.rendering import render_template
from repro_golden.base.errors import ReproError

__all__ = ["TOKENIZER", "has_tokenizer", "read_tokenizer", "vocabulary"]

_LIMIT = 64 << 20
_CONFIG, _VOCABULARY, _JINJA = "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"
_FILES = (_CONFIG, _VOCABULARY, _JINJA, "chat_template.json")
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds files of a tokenizer."""
    return any((folder / name).is_file() for name in _FILES)


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder.

    Raises:
        ReproError: a file of it is corrupt.
    """
    config = _optional(folder / _CONFIG)
    special = {**_optional(folder / "special_tokens_map.json"), **config}
    vocabulary = _optional(folder / _VOCABULARY)
    template = _template(folder, config)
    named = {key: text for key in _NAMED if (text := _text(special.get(key))) is not None}
    added = _added(config, vocabulary)
    extra = special.get("additional_special_tokens")
    texts = [*named.values(), *map(_text, extra if isinstance(extra, list) else []), *(t for t, _, s in added if s)]
    ids = {text: number for text, number, _ in added}
    eos = named.get("eos_token")
    values = {**named, "additional_special_tokens": [t for t in texts if t is not None and t not in named.values()]}
    return Tokenizer(
        path=folder,
        template=template,
        special=tuple(dict.fromkeys(text for text in texts if text)),
        eos=eos,
        eos_ids=_eos_ids(folder, ids.get(eos) if eos else None),
        render=functools.partial(_render, folder, template, values),
        size=_size(vocabulary, [number for _, number, _ in added]),
    )


def vocabulary(folder: Path, limit: float = _LIMIT) -> Any:
    """A folder's ``tokenizer.json`` as the package `tokenizers` loads it.

    Returns:
        None without that file or that package, and where the file is damaged, which another rule says, or too large.
    """
    path = folder / _VOCABULARY
    try:
        if not path.is_file() or path.stat().st_size > limit:
            return None
        from tokenizers import Tokenizer as Fast

        return Fast.from_file(str(path))
    except Exception:  # noqa: BLE001 - its Rust code raises Exception itself
        return None


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path, _LIMIT) if path.exists() else {}


def _text(token: Any) -> str | None:
    """A token as text: it may be written as an object with its ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: the file before the field, as transformers takes them."""
    if (folder / _JINJA).exists():
        raw = read_bytes(folder / _JINJA, _LIMIT)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ReproError(f"{folder / _JINJA} is not UTF-8: write it again") from None
    for template in (config.get("chat_template"), _optional(folder / "chat_template.json").get("chat_template")):
        if isinstance(template, str):
            return template
        if isinstance(template, list):
            named = {
                entry.get("name"): entry.get("template")
                for entry in template
                if isinstance(entry, dict) and isinstance(entry.get("name"), str | None)
            }
            texts = [text for text in (named.get("default"), *named.values()) if isinstance(text, str)]
            if texts:
                return texts[0]
    return None


def _added(config: Mapping[str, Any], vocabulary: Mapping[str, Any]) -> list[tuple[str, int, bool]]:
    """Tokens added to the vocabulary: text, id, whether special."""
    tokens: list[tuple[str, int, bool]] = []
    decoder = config.get("added_tokens_decoder")
    pairs: list[tuple[Any, Any]] = list(decoder.items()) if isinstance(decoder, dict) else []
    listed = vocabulary.get("added_tokens")
    pairs += [
        (token.get("id"), token) for token in (listed if isinstance(listed, list) else []) if isinstance(token, dict)
    ]
    for key, token in pairs:
        text = _text(token)
        number = _id(int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12 else key)
        if text is not None and number is not None and isinstance(token, dict):
            tokens.append((text, number, token.get("special") is True))
    return tokens


def _id(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def _size(vocabulary: Mapping[str, Any], added: Iterable[int]) -> int | None:
    """One more than the highest id; None without a vocabulary to read."""
    model = vocabulary.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        highest = max((number for number in map(_id, vocab.values()) if number is not None), default=-1)
    elif isinstance(vocab, list):  # a unigram's, in order
        highest = len(vocab) - 1
    else:
        return None
    return max([highest, *added]) + 1 or None


def _eos_ids(folder: Path, eos_id: int | None) -> tuple[int, ...]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        values = _optional(folder / name)
        inner = values.get("text_config")
        for eos in (values.get("eos_token_id"), inner.get("eos_token_id") if isinstance(inner, dict) else None):
            ids += [number for number in map(_id, eos if isinstance(eos, list) else [eos]) if number is not None]
    return tuple(dict.fromkeys([*ids, *([eos_id] if eos_id is not None else [])]))


def _render(
    folder: Path, template: str | None, special: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> str:
    if template is None:
        raise ReproError(f"{folder} has no chat template: take the instruct model's tokenizer")
    return render_template(folder, template, special, messages)


def _fits(path: Path) -> bool:
    if path.is_dir():
        return has_tokenizer(path)
    return path.name in (_CONFIG, _JINJA) and path.is_file()


TOKENIZER = Reader(
    "tokenizer", _fits, lambda path: [read_tokenizer(path if path.is_dir() else path.parent)],
    owns=("*.json", "*.txt", "*.jinja", "*.model"), beside=True,
)  # fmt: skip
"""A folder with a tokenizer and no model; ``tokenizer_config.json`` or ``chat_template.jinja`` stands for it."""

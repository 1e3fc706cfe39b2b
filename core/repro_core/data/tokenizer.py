"""The byte tokenizer: every string has ids, and no vocabulary file is needed.

Ids 0-255 are the bytes of the UTF-8 text, followed by three specials.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["BOS_ID", "EOS_ID", "PAD_ID", "VOCAB_SIZE", "decode", "encode"]

PAD_ID = 256
BOS_ID = 257
EOS_ID = 258
VOCAB_SIZE = 259


def encode(text: str, bos: bool = True) -> list[int]:
    """The UTF-8 bytes of `text` as ids, with `BOS_ID` in front unless `bos` is False.

    Raises:
        UnicodeEncodeError: `text` holds a lone surrogate, which UTF-8 cannot express.
    """
    return [BOS_ID] * bos + list(text.encode("utf-8"))


def decode(ids: Iterable[int]) -> str:
    """The text of `ids`: specials are dropped, bytes that are no UTF-8 become U+FFFD.

    Raises:
        ValueError: an id that the vocabulary does not have.
    """
    kept = bytearray()
    for token in ids:
        if not 0 <= token < VOCAB_SIZE:
            raise ValueError(f"token id {token} is outside the byte vocabulary: ids go from 0 to {VOCAB_SIZE - 1}")
        if token < PAD_ID:
            kept.append(token)
    return kept.decode("utf-8", errors="replace")

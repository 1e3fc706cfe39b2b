from __future__ import annotations

import pytest

from repro_golden.fingerprint import Lanes, Share, bind, reference
from repro_golden.fingerprint.share import Edge, Run

GOOD = Share("float32", (3,), 12, reference(bytes(8)), (Run(0, 10),), (Edge(8, b"\1\2"),))
TEXT = GOOD.cover_text()


def test_a_share_is_read_back_as_it_was() -> None:
    """Lanes and the line of text are all there is to know of a share."""
    assert Share.from_cover("float32", (3,), GOOD.lanes, TEXT) == GOOD


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        TEXT.replace("12", "16"),
        TEXT.replace("12", "0"),
        TEXT.replace("12", "12.0"),
        TEXT.replace("[0,10,0,1]", "[0,13,0,1]"),
        TEXT.replace("[0,10,0,1]", "[-1,10,0,1]"),
        TEXT.replace("[0,10,0,1]", "[0.5,10,0,1]"),
        TEXT.replace("[0,10,0,1]", '["a",10,0,1]'),
        TEXT.replace("[0,10,0,1]", "[0,10,8,2]"),
        TEXT.replace("[8,", "[12,"),
        TEXT.replace("0102", "01020"),
        '{"edges":[],"nbytes":0,"runs":[]}',
        TEXT.replace(",", ", "),
    ],
)
def test_text_that_is_no_cover_is_refused(text: str) -> None:
    """A damaged line is never read as a share, least of all as a whole one."""
    with pytest.raises((ValueError, KeyError, TypeError)):
        Share.from_cover("float32", (3,), GOOD.lanes, text)


def test_a_share_of_nothing_is_whole() -> None:
    """A tensor without elements is whole in every share of it, and has its fingerprint."""
    empty = Share("float32", (0, 3), 0, Lanes(0, 0), ())
    assert empty.whole and empty.fingerprint == bind(Lanes(0, 0), "float32", (0, 3))

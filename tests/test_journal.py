"""A journal that was cut short or damaged: what is left of it answers, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from repro_bisect.probe.journal import Entry, Journal


def test_a_line_after_a_torn_one(tmp_path: Path) -> None:
    """What a crash cut short costs the probe that it was about, and never the next one."""
    journal = Journal(tmp_path)
    entries = [Entry(f"key {n}", 0, "commit", "why", 0, 1.0, "") for n in range(2)]
    journal.add(entries[0], None)
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"format":1,"key":"torn')
    Journal(tmp_path).add(entries[1], None)
    reader = Journal(tmp_path)
    assert [reader.find(e.key, 0) for e in entries] == entries
    assert reader.count({"key 0", "key 1", "torn"}) == 2
    assert Journal(tmp_path, fresh=True).find("key 0", 0) is None


def test_a_flipped_byte_of_the_journal_is_no_verdict(tmp_path: Path) -> None:
    """A damaged line is passed over, so that its probe is made again; a line of an older version is read."""
    entry = Entry("key", 0, "c" * 40, "", 3, 1.5, "", 1)
    Journal(tmp_path).add(entry, None)
    file = tmp_path / "journal.jsonl"
    raw = file.read_bytes()
    for at in range(len(raw) - 1):
        for mask in (0x01, 0x10):
            file.write_bytes(raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :])
            assert Journal(tmp_path).find("key", 0) in (None, entry), raw[: at + 1]
    old = json.loads(raw)
    del old["check"]
    file.write_text(json.dumps(old) + "\n")
    assert Journal(tmp_path).find("key", 0) == entry

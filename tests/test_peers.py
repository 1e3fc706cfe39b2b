"""benchmarks/peers.py: its program and edits, and that ours sees each of them and no more."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import SOURCE

TOLD: dict[str, Any] = tomllib.loads((SOURCE / "benchmarks" / "peers.toml").read_text())
EDITS = [(kind, edit["name"]) for kind in ("planted", "harmless") for edit in TOLD[kind]]


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("peers", SOURCE / "benchmarks" / "peers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["peers"] = module
    spec.loader.exec_module(module)
    return module


def test_every_edit_is_another_program() -> None:
    """Each applies to the program and compiles, and no two are one."""
    texts = [TOLD["program"]]
    for kind in ("planted", "harmless"):
        for edit in TOLD[kind]:
            assert edit["old"] in texts[0], edit["name"]
            texts.append(texts[0].replace(edit["old"], edit["new"]))
            compile(texts[-1], edit["name"], "exec")
    assert len(set(texts)) == len(texts) > 20


def test_the_page_is_of_what_was_kept(peers: ModuleType) -> None:
    """It is written from the data beside it, and that holds every edit."""
    kept = json.loads(peers.DATA.read_text())
    assert peers.PAGE.read_text() == peers.page(kept)
    assert {name for _, name in EDITS} <= kept["changes"].keys()


@pytest.mark.campaign
@pytest.mark.parametrize(("kind", "name"), EDITS)
def test_ours_sees_what_moves_a_bit(peers: ModuleType, tmp_path: Path, kind: str, name: str) -> None:
    """`repro diff` tells the two versions apart if the edit moves something, and not if it moves nothing."""
    options = peers.argparse.Namespace(repositories=None, python=sys.executable, only=name)
    change = next(each for each in peers.changes(tmp_path, options) if each.name == name)
    runs = [peers.Run(change, side, tmp_path / side) for side in ("before", "after")]
    assert peers.CHECKS["repro diff"](*runs) is (kind == "planted")

"""Starts engines of SGLang in this process that do not start: prints what was said, as JSON."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from sglang_kit import CONFIG, tiny_checkpoint

from repro_core.rollout.engine import EngineError
from repro_core.rollout.sglang.engine import SglangEngine


def main() -> None:
    """All of it."""
    folder = Path(sys.argv[1])
    checkpoint = tiny_checkpoint(folder / "start")
    unknown, hurried = replace(CONFIG, args={"nonsense": 1}), replace(CONFIG, timeout=5.0)
    told: dict[str, Any] = {
        "unknown": _error(lambda: SglangEngine(unknown, checkpoint, "fp32", log=folder / "unknown.log")),
        "late": _error(lambda: SglangEngine(hurried, checkpoint, "fp32", log=folder / "late.log")),
    }

    def elsewhere() -> None:
        told["thread"] = _error(lambda: SglangEngine(CONFIG, checkpoint, "fp32", log=folder / "thread.log"))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    left = (" ".join(each.cmdline()) for each in psutil.Process().children(recursive=True))
    told["left"] = [each for each in left if "resource_tracker" not in each]
    print(json.dumps(told))


def _error(act: Callable[[], Any]) -> str:
    try:
        act()
    except EngineError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    main()

"""SGLang's server as a child that does not outlive its parent: ``python -m repro_core.rollout.sglang.child FLAGS``."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

from repro_core.rollout.sglang.stand_ins import make_importable

__all__ = ["PARENT", "main"]

_SET_DEATH_SIGNAL = 1
PARENT = "REPRO_SGLANG_PARENT"
"""Variable with the id of the process that started this one."""


def main() -> None:
    """Run ``sglang.launch_server`` with this process's flags."""
    if sys.platform == "linux":
        # SIGKILL when the parent is gone; SGLang's own processes do the same with this one.
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(os.environ.get(PARENT, os.getppid())):
        sys.exit("the process that started this server is gone")
    make_importable("cpu" if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" else "cuda")
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

"""Programs in forks of one process that has imported torch, each as if it had been started alone.

`zoo_warm.py SOCKET` serves; `zoo_warm.py SOCKET PROGRAM` has it run a program with the environment, folder and streams
of this process, and ends as that does. Importing torch takes ten times as long as a program of the zoo.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import socket
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any


def serve(path: str) -> dict[str, Any]:
    """Answer one program after another; in each one's process, return what was asked. Ends with standard input."""
    # every optimizer imports torch._dynamo when it first steps; numba is the recorder's
    for name in ("torch", "torch._dynamo", "safetensors.torch", "numba"):
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    assert threading.active_count() == 1
    while True:
        connection, _ = listener.accept()
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        line = connection.makefile().readline()
        child = os.fork()
        if child == 0:
            for place, stream in enumerate(streams):
                os.dup2(stream, place)
        for stream in streams:
            os.close(stream)
        if child == 0:
            connection.close()
            listener.close()
            asked: dict[str, Any] = json.loads(line)
            return asked
        _, status = os.waitpid(child, 0)
        connection.sendall(b"%d" % os.waitstatus_to_exitcode(status))
        connection.close()


def ask(path: str, program: str) -> int:
    """Have a program run; its exit code."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    socket.send_fds(connection, [b"!"], [0, 1, 2])
    asked = {"environ": dict(os.environ), "folder": os.getcwd(), "program": program}  # noqa: PTH109 - as it is
    connection.sendall(json.dumps(asked).encode() + b"\n")
    return int(connection.makefile().read())


def run(asked: dict[str, Any]) -> None:
    """Be the process of a program, to its end."""
    code = 0
    try:
        exec(*begin(asked))  # noqa: S102 - a program of the zoo
        threading._shutdown()  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - as Python does
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # to take all of torch apart would take longer than everything before


def begin(asked: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A program's code, and the names that it runs in, where all is as if it had just been started."""
    os.environ.clear()
    os.environ.update(asked["environ"])
    os.chdir(asked["folder"])
    program = Path(asked["program"]).resolve()
    sys.argv = [asked["program"]]
    sys.path[0] = str(program.parent)
    site = Path(os.environ["PYTHONPATH"].partition(os.pathsep)[0], "sitecustomize.py")
    names = {"__name__": "sitecustomize", "__file__": str(site)}
    exec(compile(site.read_text(), str(site), "exec"), names)  # noqa: S102 - what Python does when it starts
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = str(program)
    return compile(program.read_text(), str(program), "exec"), vars(module)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(ask(sys.argv[1], sys.argv[2]))
    run(serve(sys.argv[1]))

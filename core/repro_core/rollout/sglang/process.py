"""A server of SGLang that this process starts, watches and ends: the way to start one from Python.

```python
from repro_core.rollout.sglang.process import serve

with serve(SglangConfig(), "checkpoint", "bf16") as server:
    ...  # sglang.url is server.url
```
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil
import requests

from repro_core.config import SglangConfig
from repro_core.model.hf_config import read_config
from repro_core.rollout.engine import EngineError
from repro_core.rollout.sglang.child import PARENT
from repro_core.rollout.sglang.flags import (
    command_line,
    default_device,
    environment,
    installed_version,
    is_launchers,
    server_arguments,
)
from repro_core.rollout.sglang.host import end_trees, fresh_log, in_session, last_error, tree

__all__ = ["ServerProcess", "free_port", "serve"]

_CORE = Path(__file__).parents[3]
_TICK_S = 0.25


class ServerProcess:
    """A server as a child of this process, with everything that it starts. A context manager that closes it.

    The thread that makes it must outlive it: the server is killed when that thread ends, so that none is left behind
    when this process is killed.

    Args:
        command: starts the server.
        host: that it listens on.
        port: that it listens on; it must be free.
        environment: variables besides this process's own.
        log: file that it writes to, at its end; None makes one among temporary files.
        timeout: seconds until it must be healthy.
        term_s: seconds that it may take to end by SIGTERM.

    Attributes:
        url: its address.
        log: what it writes.
        pid: of the child.

    Raises:
        EngineError: the port is taken, or it ends or is not healthy in time; nothing of it is left then.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        host: str,
        port: int,
        environment: Mapping[str, str],
        log: Path | None = None,
        timeout: float = 600.0,
        term_s: float = 20.0,
    ) -> None:
        _check_free(host, port)
        self.url, self.log, self._term_s = f"http://{host}:{port}", log or fresh_log(), term_s
        mine = {name: value for name, value in os.environ.items() if not is_launchers(name)}
        variables = {**mine, **environment, PARENT: str(os.getpid())}
        with self.log.open("ab") as output:
            self._child = subprocess.Popen(
                list(command),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # by which all of it is found
            )
        self.pid, self._root = self._child.pid, psutil.Process(self._child.pid)
        try:
            self._wait_until_healthy(timeout)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it by SIGTERM, and what is left of it and its children by SIGKILL."""
        end_trees(tree([self._root]), self._term_s)
        # A server that is about to die of itself leaves children behind for a moment.
        end_trees(in_session(self.pid), 0)
        self._child.wait()

    def _wait_until_healthy(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        with requests.Session() as session:
            session.trust_env = False  # no proxy stands between us and our child
            while time.monotonic() < end:
                if self._child.poll() is not None:
                    raise EngineError(
                        f"SGLang's server ended with code {self._child.returncode} before it was "
                        f"ready{last_error(self.log)}"
                    )
                with contextlib.suppress(requests.RequestException):
                    if session.get(f"{self.url}/health", timeout=(1, 30)).status_code == requests.codes.ok:
                        return
                time.sleep(_TICK_S)
        raise EngineError(f"SGLang's server was not ready within {timeout:g} s{last_error(self.log)}")


def serve(
    config: SglangConfig,
    checkpoint: str | os.PathLike[str],
    dtype: str,
    *,
    device: str | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    log: Path | None = None,
    term_s: float = 20.0,
) -> ServerProcess:
    """Start a server of the installed SGLang.

    Args:
        config: how it samples; its `url` is not looked at.
        checkpoint: directory in Hugging Face's form.
        dtype: ``fp32`` or ``bf16``.
        device: ``cpu`` or ``cuda``; None is a GPU where there is one.
        host: that it listens on.
        port: that it listens on; None takes a free one.
        log: file that it writes to; None makes one among temporary files.
        term_s: seconds that it may take to end by SIGTERM.

    Raises:
        EngineError: SGLang is missing or of an unsupported version, the port is taken, or it does not start.
        repro_core.model.hf.HfError: the checkpoint's config cannot be read.
    """
    device = device or default_device()
    installed_version(device)
    port = free_port(host) if port is None else port
    arguments = {
        "skip_server_warmup": True,  # it gives up after 120 s, whatever the machine; a server is ready when it says so
        **server_arguments(config, read_config(Path(checkpoint)), checkpoint, dtype, device),
        "host": host,
        "port": port,
    }
    path = os.pathsep.join([str(_CORE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return ServerProcess(
        [sys.executable, "-m", "repro_core.rollout.sglang.child", *command_line(arguments)],
        host=host,
        port=port,
        environment={**environment(device), "PYTHONPATH": path},
        log=log,
        timeout=config.timeout,
        term_s=term_s,
    )


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _check_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EngineError(
                f"cannot listen on {host}:{port} ({error.strerror}): choose another port, or end what holds it"
            ) from error

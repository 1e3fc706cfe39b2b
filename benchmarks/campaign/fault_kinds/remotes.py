"""DVC remotes that fail, break off or lie: nothing is taken that is not what its pointer stands for."""

from __future__ import annotations

import http.server
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from attempts import attempt
from conftest import Repo
from promise import Asked, Promise

from repro_golden.store.dvc import Dvc

__all__ = ["promises"]

WHOLE = 40
MODES = ("refuses", "fails", "breaks off", "lies", "lies of the list", "has nothing", "says less", "empties")


class _Server(http.server.SimpleHTTPRequestHandler):
    """A folder over HTTP, whose answers are as bad as `mode` says."""

    mode, served, draw = "", Path(), Random(0)

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        """As GET, without content."""
        self._answer(content=False)

    def do_GET(self) -> None:
        """A file, or what the mode makes of it."""
        self._answer(content=True)

    def _answer(self, *, content: bool) -> None:
        path = self.served / self.path.lstrip("/")
        missing = self.mode == "has nothing" or not path.is_file()
        if self.mode in ("refuses", "fails") or missing:
            self.send_error({"refuses": 403, "fails": 500}.get(self.mode, 404))
            return
        raw = path.read_bytes()
        listing = path.name.endswith(".dir")
        if (self.mode == "lies" and not listing) or (self.mode == "lies of the list" and listing):
            at = self.draw.randrange(len(raw))
            raw = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        length = len(raw)
        if self.mode == "says less" and not listing:
            raw = raw[: length // 2]
            length = len(raw)
        if self.mode == "empties" and not listing:
            raw, length = b"", 0
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if content:
            self.wfile.write(raw[: length // 2] if self.mode == "breaks off" and not listing else raw)
        self.close_connection = True


@contextmanager
def _serving(folder: Path, mode: str, draw: Random) -> Iterator[str]:
    handler = type("Handler", (_Server,), {"mode": mode, "served": folder, "draw": draw})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def promises(asked: Asked) -> Iterator[Promise]:
    """One promise over all modes."""
    promise = Promise("A DVC remote that fails, breaks off or lies gives one line, and the next pull heals")
    whole = asked.work / "remotes"
    repo = Repo(whole / "repo")
    repo.root.mkdir(parents=True)
    repo.git("init", "--quiet")
    dvc = Dvc(repo.root)
    dvc.init()
    dvc.set_default_remote("store", str(whole / "remote"), local=False)
    kept = repo.root / "golden" / "runs" / "m" / "toy"
    kept.mkdir(parents=True)
    for name in ("run.json", "trace.bin", "ü.txt"):
        (kept / name).write_text(f"content of {name} " * 20)
    dvc.add(kept)
    dvc.push(kept.with_name("toy.dvc"))
    content = {path.name: path.read_bytes() for path in kept.iterdir()}
    draw, told = asked.random("remotes"), 0
    for number in range(asked.count(WHOLE, least=len(MODES))):
        mode = MODES[number % len(MODES)]
        _forget(repo)
        with _serving(whole / "remote", mode, draw) as address:
            dvc.set_default_remote("store", address, local=False)
            failed = attempt(["golden", "pull"], repo.root, seconds=240, room=None)
        dvc.set_default_remote("store", str(whole / "remote"), local=False)
        faults = [failed.fault()] if failed.fault() else []
        told += failed.code == 2
        if failed.code != 2:
            faults.append(f"ended with {failed.code}: {failed.text[-200:]}")
        elif not failed.err.decode().strip().splitlines()[-1].startswith("repro: "):
            faults.append(failed.text[-200:])
        healed = attempt(["golden", "pull"], repo.root, seconds=240, room=None)
        found = {path.name: path.read_bytes() for path in kept.iterdir()} if kept.exists() else {}
        if healed.code or found != content:
            faults.append(f"the next pull ended with {healed.code}: {healed.text[-300:]}")
        promise.judge(not faults, f"a remote that {mode}: {'; '.join(faults)}")
    promise.figures = {"kinds": str(len(MODES)), "told in one line": str(told)}
    yield promise


def _forget(repo: Repo) -> None:
    shutil.rmtree(repo.root / "golden" / "runs" / "m" / "toy", ignore_errors=True)
    shutil.rmtree(repo.root / ".dvc" / "cache", ignore_errors=True)
    shutil.rmtree(repo.root / ".dvc" / "tmp", ignore_errors=True)

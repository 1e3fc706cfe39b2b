"""DVC remotes that fail, break off, lie or stall: nothing is taken that is not what its pointer stands for."""

from __future__ import annotations

import http.server
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from random import Random

from attempts import Attempt, attempt
from conftest import Repo, _set_remote
from promise import Asked, Promise

from repro.__main__ import main
from repro_golden.store.dvc import Dvc

__all__ = ["promises"]

WHOLE, STALLS = 60, 24
MODES = {
    "pull": ("refuses", "fails", "breaks off", "lies", "lies of the list", "has nothing", "says less", "empties"),
    "push": ("refuses", "fails", "breaks off", "forgets"),
}
STALLED = (("pull", "is silent"), ("pull", "stops amid a file"), ("push", "is silent"), ("push", "takes a file"))
ENDED = {"by itself": 2, "by Ctrl-C": 130, "by kill -9": None}
"""How a command at a remote that stalls ends, and its exit code."""
PATIENCE = 8.0
"""Seconds instead of DVC's minutes."""


class _Server(http.server.SimpleHTTPRequestHandler):
    """A folder over HTTP, whose answers are as bad as `mode` says."""

    mode, served, draw, over = "", Path(), Random(0), threading.Event()

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        """As GET, without content."""
        self._answer(content=False)

    def do_GET(self) -> None:
        """A file, or what the mode makes of it."""
        self._answer(content=True)

    def do_POST(self) -> None:
        """Nothing is ever said to who brings something to one that stalls."""
        if self.mode in ("is silent", "takes a file"):
            self.over.wait()
        elif self.mode == "breaks off":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif self.mode in ("refuses", "fails"):
            self.send_error({"refuses": 403, "fails": 500}[self.mode])
        else:
            self._take()
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
        self.close_connection = True

    def _take(self) -> None:
        """Read what is sent here, in chunks or whole."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            return
        while size := int(self.rfile.readline(), 16):
            self.rfile.read(size + 2)
        self.rfile.readline()

    def _answer(self, *, content: bool) -> None:
        if self.mode == "is silent":
            self.over.wait()
            return
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
            half = self.mode in ("breaks off", "stops amid a file") and not listing
            self.wfile.write(raw[: length // 2] if half else raw)
            if self.mode == "stops amid a file" and half:
                self.over.wait()
        self.close_connection = True


@contextmanager
def _serving(folder: Path, mode: str, draw: Random) -> Iterator[str]:
    over = threading.Event()
    handler = type("Handler", (_Server,), {"mode": mode, "served": folder, "draw": draw, "over": over})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Kept:
    """A repository with a golden run's folder that is pushed, and what is in it."""

    def __init__(self, folder: Path) -> None:
        self.repo, self.remote = Repo(folder / "repo"), folder / "remote"
        self.folder = self.repo.root / "golden" / "runs" / "m" / "toy"
        self.folder.mkdir(parents=True)
        self.repo.git("init", "--quiet")
        dvc = Dvc(self.repo.root)
        dvc.init()
        dvc.set_default_remote("store", str(self.remote), local=False)
        for name in ("run.json", "trace.bin", "ü.txt"):
            (self.folder / name).write_text(f"content of {name} " * 20)
        dvc.add(self.folder)
        dvc.push(self.folder.with_name("toy.dvc"))
        self.content, self.pushed = _files(self.folder), _files(self.remote)

    def forget(self, verb: str) -> None:
        """All that a command would bring."""
        root = self.repo.root
        gone = [self.folder, root / ".dvc" / "cache", root / ".dvc" / "tmp"] if verb == "pull" else [self.remote]
        for each in gone:
            shutil.rmtree(each, ignore_errors=True)

    def healed(self, verb: str) -> str:
        """What is wrong with the same command at a remote that is well; "" for nothing."""
        _set_remote(self.repo, self.remote)
        done = attempt(["golden", verb], self.repo.root, seconds=240, room=None)
        whole = (_files(self.folder), _files(self.remote)) == (self.content, self.pushed)
        return "" if whole and done.code == 0 else f"the next {verb} ended with {done.code}: {done.text[-300:]}"


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def promises(asked: Asked) -> Iterator[Promise]:
    """One promise over all modes, one over all ways to stall."""
    kept = _Kept(asked.work / "remotes")
    yield _wrong(asked, kept)
    yield _stalled(asked, kept)


def _wrong(asked: Asked, kept: _Kept) -> Promise:
    promise = Promise("A DVC remote that fails, breaks off or lies gives one line, and the next pull or push heals")
    every = [(verb, mode) for verb, modes in MODES.items() for mode in modes]
    draw, told, some = asked.random("remotes"), 0, asked.some(every, "remotes")
    for number in range(asked.count(WHOLE, least=len(some))):
        verb, mode = some[number % len(some)]
        kept.forget(verb)
        with _serving(kept.remote, mode, draw) as address:
            _set_remote(kept.repo, address)
            failed = attempt(["golden", verb], kept.repo.root, seconds=240, room=None)
        told += failed.code == 2
        there = _files(kept.folder)
        faults = [] if there.items() <= kept.content.items() else [f"{sorted(there)} lie there, and not as pushed"]
        faults += [why for why in (_no_line(failed), kept.healed(verb)) if why]
        promise.judge(not faults, f"{verb} at a remote that {mode}: {'; '.join(faults)}")
    promise.figures = {"kinds": str(len(some)), "told in one line": str(told)}
    return promise


def _no_line(failed: Attempt) -> str:
    """What is wrong with the end of a command that could not do its work."""
    if (why := failed.fault()) or failed.code != 2:
        return why or f"ended with {failed.code}: {failed.text[-200:]}"
    return "" if failed.err.decode().strip().splitlines()[-1].startswith("repro: ") else failed.text[-200:]


def _stalled(asked: Asked, kept: _Kept) -> Promise:
    promise = Promise("At a DVC remote that stalls a command ends, by itself or by us, and the next one heals")
    draw, slowest, ways = asked.random("stalls"), 0.0, [*product(STALLED, ENDED)]
    draw.shuffle(ways)
    for number in range(asked.count(STALLS, least=2)):
        (verb, mode), end = ways[number % len(ways)]
        kept.forget(verb)
        with _serving(kept.remote, mode, draw) as address:
            _set_remote(kept.repo, address)
            ended = _ended(kept.repo, verb, end, draw.uniform(1.0, 6.0))
        slowest = max(slowest, ended.seconds)
        faults = [ended.text[-200:]] if ended.code != ENDED[end] else []
        faults += [why for why in (_no_line(ended) if end == "by itself" else "", kept.healed(verb)) if why]
        promise.judge(not faults, f"{verb} from a remote that {mode}, ended {end}: {'; '.join(faults)}")
    promise.figures = {"patience": f"{PATIENCE:g} s", "slowest": f"{slowest:.1f} s"}
    return promise


def _ended(repo: Repo, verb: str, end: str, after: float) -> Attempt:
    """A command that waits for a remote, and how it ends: alone, or after so many seconds."""
    words = ["golden", verb]

    def interrupted() -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts us in the background ignores it
        threading.Timer(after, os.kill, [os.getpid(), signal.SIGINT]).start()
        return main(words)

    before, Dvc.patience = Dvc.patience, PATIENCE
    try:
        inside = interrupted if end == "by Ctrl-C" else None
        return attempt(
            words, repo.root, seconds=after if end == "by kill -9" else 240, room=None, inside=inside, alone=True
        )
    finally:
        Dvc.patience = before

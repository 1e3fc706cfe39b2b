"""A package index on this machine: wheels written by hand, served as real indexes serve theirs."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import importlib.util
import json
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

JSON = "application/vnd.pypi.simple.v1+json"
_torch = importlib.util.find_spec("torch")
assert _torch is not None and _torch.origin is not None
TORCH_FOLDER = str(Path(_torch.origin).parents[1])
"""Where torch is installed: a `.pth` file with this line lends it to another environment."""


@dataclass(frozen=True)
class Wheel:
    """A file of a package; `content` is None for one that no test installs."""

    file: str
    python: str = ""
    yanked: str | bool = False
    content: Path | None = None


@dataclass
class Index:
    """What is served, and what was asked for. Files wait until the gate is open, as it is at first."""

    wheels: dict[str, list[Wheel]] = field(default_factory=dict)
    html_only: bool = False
    login: str = ""
    status: int = 0
    asked: list[str] = field(default_factory=list)
    url: str = ""
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def add(self, name: str, *wheels: Wheel) -> None:
        """More files of a package."""
        self.wheels.setdefault(name, []).extend(wheels)

    def downloads(self, name: str) -> int:
        """How often a file of a package was fetched."""
        return sum(path.startswith("/files/") and f"/{name}-" in path for path in self.asked)


def wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str],
    *,
    needs: Sequence[str] = (),
    python: str = "",
    tag: str = "py3-none-any",
    yanked: str | bool = False,
    scripts: str = "",
) -> Wheel:
    """A wheel with its hashes."""
    about = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"]
    metadata += [f"Requires-Python: {python}\n"] if python else []
    metadata += [f"Requires-Dist: {need}\n" for need in needs]
    texts = dict(files) | {
        f"{about}/METADATA": "".join(metadata),
        f"{about}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    texts |= {f"{about}/entry_points.txt": f"[console_scripts]\n{scripts}\n"} if scripts else {}
    record = "".join(f"{path},sha256={_hash(text)},{len(text.encode())}\n" for path, text in texts.items())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inner, text in (texts | {f"{about}/RECORD": f"{record}{about}/RECORD,,\n"}).items():
            archive.writestr(inner, text)
    return Wheel(path.name, python, yanked, path)


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@contextlib.contextmanager
def serving(index: Index) -> Iterator[Index]:
    """The index on a port of this machine, for the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.asked.append(self.path)
            login = "Basic " + base64.b64encode(index.login.encode()).decode()
            if index.login and self.headers.get("Authorization") != login:
                return self.answer(401, "text/plain", b"who are you?")
            if index.status:
                return self.answer(index.status, "text/plain", b"not now")
            kind, name = self.path.strip("/").split("/")[0], unquote(self.path.strip("/").split("/")[-1])
            if kind == "files":
                path = next(w.content for all_ in index.wheels.values() for w in all_ if w.file == name)
                assert path is not None
                index.gate.wait(60)
                return self.answer(200, "application/octet-stream", path.read_bytes())
            if name not in index.wheels:
                return self.answer(404, "text/plain", b"no such package")
            if JSON in self.headers.get("Accept", "") and not index.html_only:
                return self.answer(200, JSON, _json(name, index.wheels[name]))
            return self.answer(200, "text/html", page(index.wheels[name], "/files/").encode())

        def answer(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # who asked was killed
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_port}/simple"
    try:
        yield index
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _json(name: str, wheels: Sequence[Wheel]) -> bytes:
    files = [
        {"filename": w.file, "url": f"/files/{quote(w.file)}", "hashes": {}, "yanked": w.yanked}
        | ({"requires-python": w.python} if w.python else {})
        for w in wheels
    ]
    return json.dumps({"meta": {"api-version": "1.1"}, "name": name, "files": files}).encode()


def page(wheels: Sequence[Wheel], folder: str) -> str:
    """The HTML of PEP 503."""
    lines = ["<!DOCTYPE html><html><body>"]
    for w in wheels:
        more = f' data-requires-python="{html.escape(w.python)}"' if w.python else ""
        if w.yanked is not False:
            more += f' data-yanked="{html.escape(w.yanked)}"' if isinstance(w.yanked, str) else " data-yanked"
        lines.append(f'<a href="{folder}{quote(w.file)}#sha256=00"{more}>{html.escape(w.file)}</a><br>')
    return "\n".join([*lines, "</body></html>"])

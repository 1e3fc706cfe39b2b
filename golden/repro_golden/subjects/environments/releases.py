"""Which versions of a package there are, as its index says, and which of them an interpreter can have.

The index is asked once, for one package: its JSON form (PEP 691), or HTML where it has no other (PEP 503). Nothing is
downloaded. What the network fails is the machine's failure, so that no version is ever passed over for it.
"""

from __future__ import annotations

import ast
import base64
import functools
import http.client
import json
import os
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import packaging
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from repro_golden.base.canonical import parse_json
from repro_golden.base.credentials import handed_on
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.recording.attach.code.identify import marked

__all__ = [
    "DECIDING",
    "Release",
    "VersionRange",
    "asked",
    "index_urls",
    "parse_range",
    "pip_settings",
    "readable",
    "redacted",
    "releases",
]

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_PYPI = "https://pypi.org/simple"
_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPTED = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.01"
_PATIENCE = 60.0
"""Seconds to wait for an index to say anything."""


@dataclass(frozen=True)
class VersionRange:
    """The versions of a package from `low` to `high`, both among them.

    Attributes:
        name: Its normalised name (PEP 503).
        low: The older end.
        high: The newer end. Either both or neither have a local label such as ``+cpu``, which then is the same.
    """

    name: str
    low: Version
    high: Version

    def __str__(self) -> str:
        return f"{self.name}=={self.low}..{self.high}"


@dataclass(frozen=True)
class Release:
    """One version.

    Attributes:
        version: As it is asked for: with a local label only where the range has one.
        yanked: Why all of its files were withdrawn (PEP 592), or None.
        incompatible: Why the interpreter can have none of its files, or None.
    """

    version: Version
    yanked: str | None = None
    incompatible: str | None = None

    @property
    def problem(self) -> str | None:
        """Why it cannot be tested, or None."""
        return f"was yanked ({self.yanked})" if self.yanked is not None else self.incompatible


def parse_range(text: str) -> VersionRange:
    """Read ``NAME==LOW..HIGH``.

    Raises:
        ReproError: it is not one, with what to write.
    """
    name, equal, versions = text.partition("==")
    low, dots, high = versions.partition("..")
    name = name.strip()
    if not (equal and dots and _NAME.fullmatch(name)):
        raise ReproError(f"{text!r} is no range of versions: write NAME==LOW..HIGH, such as torch==2.12.0..2.13.0")
    parsed = VersionRange(canonicalize_name(name), _version(text, low), _version(text, high))
    if parsed.low.local != parsed.high.local:
        raise ReproError(f"{text!r} varies the build with the version: give both ends the same +label, or none")
    if parsed.low == parsed.high:
        raise ReproError(f"{text!r} holds one version: give two that differ")
    if parsed.low > parsed.high:
        raise ReproError(f"{text!r} runs downwards: write {parsed.name}=={parsed.high}..{parsed.low}")
    return parsed


def _version(text: str, version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        raise ReproError(f"{version.strip()!r} in {text!r} is no version: write one such as 2.13.0") from None


def releases(range: VersionRange, *, index: str | None = None, python: str = sys.executable) -> list[Release]:  # noqa: A002
    """The versions of a range, ascending; pre-releases among them only where an end is one.

    Args:
        range: The package and its ends.
        index: The index's URL, in place of pip's own settings.
        python: The interpreter that they are to run in.

    Raises:
        MachineFailureError: an index could not be read.
        ReproError: the package or an end is not there, or an end cannot be tested.
    """
    urls = index_urls(index, python)
    able = _Interpreter.of(python)
    files: dict[Version, list[_File]] = {}
    for version, file in _files(range.name, _project(range.name, urls)):
        if range.low.local is None:
            version = Version(version.public)  # any build serves who names none
        if version.local == range.low.local:
            files.setdefault(version, []).append(file)
    for end in (range.low, range.high):
        if end not in files:
            raise ReproError(f"{range.name} has no {end} on {redacted(' and '.join(urls))}: {_nearest(end, files)}")
    early = range.low.is_prerelease or range.high.is_prerelease
    within = sorted(v for v in files if range.low <= v <= range.high and (early or not v.is_prerelease))
    candidates = [Release(v, _yanked(files[v]), able.lacks(files[v])) for v in within]
    for release, others in ((candidates[0], candidates), (candidates[-1], candidates[::-1])):
        if release.problem is not None:
            serves = next((str(other.version) for other in others if other.problem is None), None)
            fix = f"begin or end at {serves}" if serves else "no version in the range serves: choose another"
            raise ReproError(f"{range.name} {release.version} {release.problem}: {fix}")
    return candidates


def _nearest(end: Version, versions: Mapping[Version, Sequence[_File]]) -> str:
    near = [max((v for v in versions if v < end), default=None), min((v for v in versions if v > end), default=None)]
    names = " and ".join(str(v) for v in near if v is not None)
    return f"the nearest are {names}" if all(near) else f"the nearest is {names}" if names else "no version is there"


def _files(name: str, files: Sequence[_File]) -> Iterator[tuple[Version, _File]]:
    """Those that pip could install, with their versions."""
    for file in files:
        try:
            if file.name.endswith(".whl"):
                owner, version, _, _ = parse_wheel_filename(file.name)
            else:
                stem = re.sub(r"\.(tar\.(bz2|xz)|tgz)$", ".tar.gz", file.name)  # packaging knows two of the endings
                owner, version = parse_sdist_filename(stem)
        except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
            continue
        if owner == name:
            yield version, file


def _yanked(files: Sequence[_File]) -> str | None:
    if any(file.yanked is None for file in files):
        return None
    return next((file.yanked for file in files if file.yanked), "no reason is given")


# -- what an interpreter can have


_TAGS = """\
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location(
    "packaging", sys.argv[1] + "/__init__.py", submodule_search_locations=[sys.argv[1]])
sys.modules["packaging"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from packaging import tags
print(json.dumps(["%d.%d.%d" % sys.version_info[:3], [str(tag) for tag in tags.sys_tags()]]))
"""


@dataclass(frozen=True)
class _Interpreter:
    """What decides which files it can have."""

    version: str
    tags: frozenset[Tag]
    name: str

    @classmethod
    @functools.cache
    def of(cls, python: str) -> _Interpreter:
        """Asked of itself, with our `packaging` and nothing else of ours."""
        version, tags = asked(python, _TAGS, str(Path(packaging.__file__).parent))
        _, _, platform = tags[0].split("-", 2)
        return cls(version, frozenset(Tag(*tag.split("-")) for tag in tags), f"Python {version} on {platform}")

    def lacks(self, files: Sequence[_File]) -> str | None:
        """Why it can have none of the files; None where it can."""
        files = [file for file in files if file.yanked is None] or files
        able = [file for file in files if self._may(file)]
        if not able:
            return (
                f"needs Python {' or '.join(dict.fromkeys(file.python for file in files))}, which {self.version} is not"
            )
        if any(not file.name.endswith(".whl") or parse_wheel_filename(file.name)[3] & self.tags for file in able):
            return None
        return f"has neither an sdist nor a wheel for {self.name}"

    def _may(self, file: _File) -> bool:
        try:
            return not file.python or SpecifierSet(file.python).contains(self.version, prereleases=True)
        except InvalidSpecifier:
            return True  # as pip does


def asked(python: str, script: str, *arguments: str, variables: Mapping[str, str] | None = None) -> Any:
    """What a script in an interpreter answers in JSON, on its last line. PYTHONPATH is not ours to give it.

    Raises:
        ReproError: the interpreter does not start, or the script fails.
    """
    environment = handed_on(os.environ) if variables is None else dict(variables)
    for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"):
        environment.pop(name, None)
    script = "import sys\nsys.path[:] = [p for p in sys.path if p]\n" + script  # not the folder that it starts in
    try:
        done = subprocess.run(
            [python, "-c", script, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        return json.loads(done.stdout.splitlines()[-1])
    except OSError as error:
        raise ReproError(f"{python} does not start ({error.strerror}): correct subject.python") from None
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
        raise ReproError(f"{python} does not answer ({last}): correct subject.python") from None


# -- where to ask


def index_urls(
    index: str | None = None, python: str = sys.executable, variables: Mapping[str, str] | None = None
) -> list[str]:
    """The indexes that pip would use: the one that is named or set, or PyPI, then the extra ones of its settings.

    Args:
        index: The one that is named.
        python: Whose pip.
        variables: What pip runs with, in place of our own.

    Raises:
        ReproError: pip is told to use none.
    """
    environment = os.environ if variables is None else variables
    settings = pip_settings(python, environment)
    if not index and settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        raise ReproError("pip is set to use no index: name one with --index-url")
    index_url = index or settings.get("index-url") or environment.get("UV_DEFAULT_INDEX") or _PYPI
    return list(dict.fromkeys(url.rstrip("/") for url in [index_url, *settings.get("extra-index-url", "").split()]))


def readable(names: Iterable[str], urls: Sequence[str]) -> None:
    """Ask indexes for packages, whether they have them or not.

    Raises:
        MachineFailureError: an index could not be read.
        ReproError: an index refuses us.
    """
    for name in names:
        for url in urls:
            _page(f"{url}/{name}/")


def pip_settings(python: str, variables: Mapping[str, str]) -> dict[str, str]:
    """The settings of pip for an install, by option: its files first, then the variables, which win."""
    file = variables.get("PIP_CONFIG_FILE")
    settings = dict(_pip_files(python, file, tuple(marked(_pip_places(python, file)).items())))
    for name in ("retries", *DECIDING):
        if value := variables.get(f"PIP_{name.upper().replace('-', '_')}"):
            settings[name] = value
    return settings


DECIDING = (
    "index-url", "extra-index-url", "no-index", "find-links", "pre", "constraint", "only-binary", "no-binary",
    "prefer-binary",
)  # fmt: skip
"""The settings of pip that decide which files it installs."""


def _pip_places(python: str, file: str | None) -> list[str]:
    """Where pip looks for its files."""
    user_files = [os.path.expanduser(f"~/{name}") for name in (".pip/pip.conf", ".config/pip/pip.conf")]  # noqa: PTH111
    folders = [os.environ.get("XDG_CONFIG_HOME"), *os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(os.pathsep)]
    prefix = Path(os.path.abspath(python)).parent.parent  # noqa: PTH100 - an environment's python is a link
    shared = [f"{folder}/pip/pip.conf" for folder in folders if folder]
    return [*user_files, *shared, "/etc/pip.conf", f"{prefix}/pip.conf", *([file] if file else [])]


@functools.lru_cache(maxsize=32)
def _pip_files(python: str, file: str | None, marks: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """What pip's files say, in the order in which they win; read anew where one of them was touched."""
    del marks
    environment = os.environ | ({"PIP_CONFIG_FILE": file} if file else {}) | {"PYTHONSAFEPATH": "1"}
    command = [python, "-m", "pip", "config", "list", "--disable-pip-version-check"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines() if done.returncode == 0 else []
    except OSError:
        lines = []  # who asks the interpreter itself says so
    settings: dict[str, str] = {}
    for section in ("global", "install"):
        for line in lines:
            key, _, value = line.partition("=")
            if key.startswith(f"{section}."):
                settings[key.removeprefix(f"{section}.")] = str(ast.literal_eval(value))
    return settings


# -- reading an index


@dataclass(frozen=True)
class _File:
    """One file of a package.

    Attributes:
        name: Its name.
        python: Its Requires-Python, or nothing.
        yanked: Why it was withdrawn, which may be nothing; None where it was not.
    """

    name: str
    python: str
    yanked: str | None


def redacted(text: str) -> str:
    """A text without the credentials of the URLs in it."""
    return re.sub(r"(?<=://)\S*@", "", text)  # up to the last "@": a password may hold what it should have quoted


def _project(name: str, urls: Sequence[str]) -> list[_File]:
    """All files of a package on several indexes."""
    pages = [_page(f"{url}/{name}/") for url in urls]
    if all(page is None for page in pages):
        where = redacted(" and ".join(urls))
        raise ReproError(f"no package {name} on {where}: correct its name, or name its index with --index-url")
    return [file for page in pages for file in page or ()]


def _page(url: str) -> list[_File] | None:
    """What an index says of a package; None where it has none of that name."""
    safe_url = redacted(url)
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https", "file"):
        raise ReproError(f"{safe_url} is no index: name one that begins with https://, http:// or file://")
    try:
        kind, raw = _fetched(url + "index.html" if parts.scheme == "file" else url)
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (404, 410):
                return None
            if error.code in (401, 403):
                raise ReproError(f"{safe_url} refuses us ({error.code}): correct its name or credentials") from None
            raise MachineFailureError(f"cannot read {safe_url} ({error.code} {error.reason}): run again") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, FileNotFoundError | NotADirectoryError):
            return None
        raise MachineFailureError(f"cannot read {safe_url} ({redacted(str(error.reason))}): run again") from None
    except (OSError, http.client.HTTPException) as error:
        raise MachineFailureError(
            f"cannot read {safe_url} ({redacted(str(error)) or type(error).__name__}): run again"
        ) from None
    try:
        return _from_json(raw) if kind == _JSON else _from_html(raw)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise MachineFailureError(f"{safe_url} does not answer as an index does: run again, or correct it") from None


def _fetched(url: str) -> tuple[str, bytes]:
    """The type and content of a page; the credentials in its URL go to its own host alone."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    headers = {"Accept": _ACCEPTED, "User-Agent": "repro"}
    request = urllib.request.Request(parts._replace(netloc=host).geturl(), headers=headers)  # noqa: S310 - see _page
    if user:
        name, _, password = user.partition(":")
        credentials = base64.b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {credentials}")
    bundle = os.environ.get("PIP_CERT") or os.environ.get("REQUESTS_CA_BUNDLE")  # as pip does
    secure = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=bundle))
    with urllib.request.build_opener(secure, _SameHost).open(request, timeout=_PATIENCE) as answer:
        return answer.headers.get_content_type(), answer.read()


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Redirects keep the credentials only within the host that they were given for."""

    def redirect_request(self, req: Any, *rest: Any) -> Any:
        """The next request."""
        redirected = super().redirect_request(req, *rest)
        authorization = req.unredirected_hdrs.get("Authorization")
        if redirected and authorization and urlsplit(redirected.full_url)[:2] == urlsplit(req.full_url)[:2]:
            redirected.add_unredirected_header("Authorization", authorization)
        return redirected


def _from_json(raw: bytes) -> list[_File]:
    """PEP 691."""
    page = parse_json(raw)
    if (version := str(page["meta"]["api-version"])).split(".")[0] != "1":
        raise ReproError(f"the index speaks version {version} of its protocol, of which repro knows 1: update repro")
    return [
        _File(file["filename"], file.get("requires-python") or "", _reason(file.get("yanked", False)))
        for file in page["files"]
    ]


def _reason(yanked: bool | str) -> str | None:
    return None if yanked is False else " ".join(yanked.split()) if isinstance(yanked, str) else ""


def _from_html(raw: bytes) -> list[_File]:
    """PEP 503."""
    parser = _Anchors()
    parser.feed(raw.decode("utf-8", "replace"))
    parser.close()
    return parser.files


class _Anchors(HTMLParser):
    """The links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[_File] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A file."""
        attributes = dict(attrs)
        if tag == "a" and (link := attributes.get("href")):
            name = unquote(urlsplit(link).path.rpartition("/")[2])
            yanked = " ".join((attributes["data-yanked"] or "").split()) if "data-yanked" in attributes else None
            self.files.append(_File(name, attributes.get("data-requires-python") or "", yanked))

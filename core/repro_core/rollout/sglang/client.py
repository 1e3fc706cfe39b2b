"""Requests to one address, with errors in one line."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import requests

from repro_core.rollout.engine import EngineError

__all__ = ["Client", "check_address", "is_here"]

_CONNECT_S = 10.0


class Client:
    """Talks to one server.

    Args:
        url: its address, of `check_address`.
        timeout: seconds that one request may take.
        note: ends every message, such as where its log is.
    """

    def __init__(self, url: str, timeout: float, note: str) -> None:
        self.url, self._timeout, self._note = url, timeout, note
        self._session = requests.Session()
        # A proxy cannot reach this machine's own servers.
        self._session.trust_env = not is_here(url)

    def get(self, path: str) -> dict[str, Any]:
        """A JSON object.

        Raises:
            EngineError: there is none.
        """
        told = self._json(self._ask("GET", path, None, "say what it serves"), path)
        if not isinstance(told, dict):
            raise EngineError(f"{self.url}{path} is no JSON object: is this SGLang?{self._note}")
        return told

    def post(self, path: str, body: Mapping[str, Any] | None, what: str) -> Any:
        """The JSON that it answers; None for an answer without any.

        Args:
            path: begins with a slash.
            body: is sent as JSON.
            what: it is to do, for messages.

        Raises:
            EngineError: it refuses, or does not answer.
        """
        answer = self._ask("POST", path, body, what)
        if answer.status_code != requests.codes.ok:
            raise EngineError(f"SGLang at {self.url} refuses to {what}: {_message(answer)}{self._note}")
        return self._json(answer, path) if "json" in answer.headers.get("content-type", "") else None

    def agreed(self, path: str, body: Mapping[str, Any], what: str, *, absent: bool = False) -> bool:
        """Ask for what is answered with ``{"success": …, "message": …}``.

        Args:
            path: begins with a slash.
            body: is sent as JSON.
            what: it is to do, for messages.
            absent: whether a server that does not know the path will do as well.

        Returns:
            False if it does not know the path.

        Raises:
            EngineError: it refuses, or does not answer.
        """
        answer = self._ask("POST", path, body, what)
        if absent and answer.status_code == requests.codes.not_found:
            return False
        told = self._json(answer, path) if "json" in answer.headers.get("content-type", "") else None
        if answer.status_code != requests.codes.ok or not isinstance(told, dict) or told.get("success") is not True:
            raise EngineError(f"SGLang at {self.url} refuses to {what}: {_message(answer)}{self._note}")
        return True

    def workers(self) -> list[str]:
        """Addresses of the servers behind a router; its own where it is a server.

        Raises:
            EngineError: nobody answers, or a router has no servers.
        """
        # Today's gateway, then the routers before it.
        for path, key in (("/workers", "workers"), ("/list_workers", "urls")):
            answer = self._ask("GET", path, None, "list its servers")
            if answer.status_code != requests.codes.ok:
                continue
            told = self._json(answer, path)
            listed = told.get(key) if isinstance(told, dict) else None
            if not isinstance(listed, list):
                continue
            urls = [each.get("url") if isinstance(each, dict) else each for each in listed]
            if not urls:
                raise EngineError(f"the router at {self.url} has no servers: add one{self._note}")
            return [check_address(str(url)) for url in urls]
        return [self.url]

    def close(self) -> None:
        """Let go of the connection."""
        self._session.close()

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, what: str) -> requests.Response:
        try:
            return self._session.request(method, self.url + path, json=body, timeout=(_CONNECT_S, self._timeout))
        except requests.ConnectTimeout as error:
            raise EngineError(f"nobody answers at {self.url}: check sglang.url{self._note}") from error
        except requests.Timeout as error:
            raise EngineError(
                f"SGLang at {self.url} did not {what} within {self._timeout:g} s: nothing of it is kept; raise "
                f"sglang.timeout, or look whether it hangs{self._note}"
            ) from error
        except requests.ConnectionError as error:
            if _is_refused(error):
                raise EngineError(f"nobody listens at {self.url}: start SGLang there{self._note}") from error
            raise EngineError(
                f"SGLang at {self.url} broke off when it was to {what}: it died or was ended; nothing of it is "
                f"kept{self._note}"
            ) from error
        except requests.RequestException as error:
            raise EngineError(f"cannot ask {self.url} ({error}): check sglang.url{self._note}") from error

    def _json(self, answer: requests.Response, path: str) -> Any:
        if answer.status_code != requests.codes.ok and "json" not in answer.headers.get("content-type", ""):
            raise EngineError(f"{self.url}{path} answers {answer.status_code}: is this SGLang?{self._note}")
        try:
            return answer.json()
        except requests.JSONDecodeError as error:
            raise EngineError(f"{self.url}{path} is no JSON: is this SGLang?{self._note}") from error


def check_address(url: str) -> str:
    """An address without a slash at its end.

    Raises:
        EngineError: it is none.
    """
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise EngineError(f"{url!r} is no address of a server: write it like http://127.0.0.1:30000")
    return url.rstrip("/")


def is_here(url: str) -> bool:
    """Whether an address is one of this machine's."""
    host = urlsplit(url).hostname or ""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False


def _is_refused(error: requests.ConnectionError) -> bool:
    text = str(error)
    return "NewConnectionError" in text or "NameResolutionError" in text or "Max retries exceeded" in text


def _message(answer: requests.Response) -> str:
    """What a refusal says, in one line."""
    try:
        told = answer.json()
    except requests.JSONDecodeError:
        told = answer.text
    while isinstance(told, dict):
        told = told.get("message") or told.get("error") or told.get("detail") or str(answer.status_code)
    line = " ".join(str(told).split())
    return line[:300] or f"status {answer.status_code}"

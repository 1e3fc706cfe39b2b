"""Requests to one address, with errors in one line."""

from __future__ import annotations

import base64
import binascii
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
import torch
from torch import Tensor

from repro_core.config import ModelConfig
from repro_core.model.experts import routing_dtype
from repro_core.rollout.engine import EngineError, Response, Sampling

__all__ = ["Asked", "Client", "check_address", "is_here", "responses"]

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
        reply = self._json(self._ask("GET", path, None, "say what it serves"), path)
        if not isinstance(reply, dict):
            raise EngineError(f"{self.url}{path} is no JSON object: is this SGLang?{self._note}")
        return reply

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
        reply = self._json(answer, path) if "json" in answer.headers.get("content-type", "") else None
        if answer.status_code != requests.codes.ok or not isinstance(reply, dict) or reply.get("success") is not True:
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
            reply = self._json(answer, path)
            listed = reply.get(key) if isinstance(reply, dict) else None
            if not isinstance(listed, list):
                continue
            urls = [worker.get("url") if isinstance(worker, dict) else worker for worker in listed]
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
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
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
        reply = answer.json()
    except requests.JSONDecodeError:
        reply = answer.text
    while isinstance(reply, dict):
        reply = reply.get("message") or reply.get("error") or reply.get("detail") or str(answer.status_code)
    line = " ".join(str(reply).split())
    return line[:300] or f"status {answer.status_code}"


# -- SGLang's answers, checked and as `Response` s


@dataclass(frozen=True)
class Asked:
    """What the answers must fit.

    Attributes:
        prompts: [rows] lists of ids.
        sampling: how.
        weight_version: that the engine was last given.
        model: that answers.
        where: whose answer it is, for messages.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    weight_version: str
    model: ModelConfig
    where: str


def responses(answers: Any, asked: Asked) -> list[Response]:
    """One response to each prompt.

    Args:
        answers: what ``/generate`` or `sglang.Engine.async_generate` gave: a list, or one answer by itself.
        asked: what was asked.

    Raises:
        EngineError: they do not hold together. Nothing of them is kept.
    """
    if isinstance(answers, Mapping):
        answers = [answers]
    if not isinstance(answers, list):
        raise EngineError(f"{asked.where} gave no list of answers but a {type(answers).__name__}: the batch is dropped")
    if len(answers) != len(asked.prompts):
        raise EngineError(
            f"{asked.where} gave {len(answers)} answers to {len(asked.prompts)} prompts: the batch is dropped"
        )
    return [_Answer(answer, row, asked).response() for row, answer in enumerate(answers)]


class _Answer:
    """One answer. Each method reads one part of it and says what is wrong with that."""

    def __init__(self, answer: Any, row: int, asked: Asked) -> None:
        self._row, self._asked = row, asked
        meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
        if not isinstance(meta, Mapping):
            raise self._wrong("has no meta_info")
        self._meta, self._ids = meta, answer.get("output_ids")

    def response(self) -> Response:
        reason = self._reason()
        version = self._version()
        tokens, log_probs = self._tokens()
        sampling = self._asked.sampling
        if reason["type"] == "stop":
            if sampling.ignore_eos or tokens[-1] != sampling.eos_id:
                raise self._wrong(
                    f"stopped at token {tokens[-1]}, which is not the end of sequence {sampling.eos_id}: "
                    "the checkpoint's config or generation config names other ones"
                )
        elif len(tokens) != sampling.max_response_len:
            raise self._wrong(
                f"was cut at {len(tokens)} tokens of {sampling.max_response_len}: prompt and response exceed the "
                "model's max_position_embeddings or the engine's max_total_tokens"
            )
        return Response(
            tokens,
            log_probs,
            "completed" if reason["type"] == "stop" else "truncated",
            routed_experts=self._experts(len(tokens)) if sampling.routed_experts else None,
            prompt_log_probs=self._prompt_log_probs() if sampling.prompt_log_probs else None,
            weight_version=version,
        )

    def _wrong(self, what: str) -> EngineError:
        return EngineError(f"{self._asked.where}: answer {self._row} {what}; the batch is dropped")

    def _reason(self) -> Mapping[str, Any]:
        reason = self._meta.get("finish_reason")
        if not isinstance(reason, Mapping) or reason.get("type") not in ("stop", "length", "abort"):
            raise self._wrong(f"has no known finish_reason but {reason!r}")
        if reason["type"] == "abort":
            raise self._wrong(f"was aborted ({' '.join(str(reason.get('message') or 'no message').split())})")
        return reason

    def _version(self) -> str | None:
        spans = self._meta.get("weight_versions") or []
        versions = {str(span["version"]) for span in spans if isinstance(span, Mapping) and "version" in span}
        last = self._meta.get("weight_version")
        if last is not None:
            versions.add(str(last))
        stale = sorted(versions - {self._asked.weight_version})
        if stale:
            raise self._wrong(
                f"was sampled with weights {', '.join(map(repr, stale))} in place of {self._asked.weight_version!r}: "
                "they are stale, or somebody else updates this engine"
            )
        return None if last is None else str(last)

    def _tokens(self) -> tuple[list[int], list[float]]:
        pairs = self._meta.get("output_token_logprobs")
        if not isinstance(pairs, list) or not pairs:
            raise self._wrong("has no tokens with log-probs")
        tokens = [pair[1] for pair in pairs if isinstance(pair, (list, tuple)) and len(pair) >= 2]
        counts = {"log-probs": len(pairs), "log-probs with a token": len(tokens)}
        if self._ids is not None:
            counts["tokens"] = len(self._ids)
        if "completion_tokens" in self._meta:
            counts["completion_tokens"] = self._meta["completion_tokens"]
        if len(set(counts.values())) != 1:
            raise self._wrong("has " + ", ".join(f"{count} {name}" for name, count in counts.items()))
        if self._ids is not None and list(self._ids) != tokens:
            raise self._wrong("has log-probs of other tokens than those that it gives")
        if not all(isinstance(token, int) and token >= 0 for token in tokens):
            raise self._wrong("has tokens that are no ids")
        if len(tokens) > self._asked.sampling.max_response_len:
            raise self._wrong(f"has {len(tokens)} tokens, more than {self._asked.sampling.max_response_len}")
        return tokens, self._finite([pair[0] for pair in pairs], "token")

    def _finite(self, values: Sequence[Any], what: str) -> list[float]:
        for position, value in enumerate(values):
            # JSON has no NaN: SGLang's server writes null.
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                number = "NaN" if value is None else value
                raise self._wrong(
                    f"has log-prob {number} at {what} {position}: its weights have diverged or did not load"
                )
        return [float(value) for value in values]

    def _prompt_log_probs(self) -> list[float]:
        logprobs = self._meta.get("input_token_logprobs")
        pairs: list[Any] = logprobs if isinstance(logprobs, list) else []
        prompt = list(self._asked.prompts[self._row])
        # SGLang shows the last id of the vocabulary as 0 here; the log-prob beside it is that of the true one.
        last = self._asked.model.vocab_size - 1
        ids = [pair[1] for pair in pairs]
        if len(ids) != len(prompt) or any(
            a != b and not (a == 0 and b == last) for a, b in zip(ids, prompt, strict=True)
        ):
            raise self._wrong("does not give the log-probs of its prompt's tokens")
        return self._finite([pair[0] for pair in pairs[1:]], "prompt token")

    def _experts(self, tokens: int) -> Tensor:
        model, encoded = self._asked.model, self._meta.get("routed_experts")
        if not isinstance(encoded, str):
            raise self._wrong("has no routed experts: start the engine with enable_return_routed_experts")
        try:
            content = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            raise self._wrong("has routed experts that are no base64") from None
        # The last token was never fed to the model, so SGLang has no row for it.
        rows = len(self._asked.prompts[self._row]) + tokens - 1
        shape = (rows, model.num_hidden_layers, model.num_experts_per_tok)
        if len(content) != 4 * math.prod(shape):
            raise self._wrong(f"has {len(content)} bytes of routed experts in place of int32 {list(shape)}")
        experts = torch.frombuffer(bytearray(content), dtype=torch.int32).reshape(shape)
        if bool(((experts < 0) | (experts >= model.num_experts)).any()):
            raise self._wrong(f"has routed experts outside 0 to {model.num_experts - 1}")
        last = torch.zeros(1, *shape[1:], dtype=torch.int32)
        return torch.cat([experts, last]).to(routing_dtype(model.num_experts))

"""Engines that die, refuse, hang or answer nonsense: real processes, real signals, real servers."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from sglang_kit import CONFIG, CORE, DENSE, tiny_checkpoint

from repro_core.config import TrainConfig
from repro_core.engines.megatron.parallel import timeout_s
from repro_core.engines.torch_engine import TorchEngines
from repro_core.rollout.engine import EngineError, Sampling
from repro_core.rollout.scratch import fresh_folder, scratch_folder
from repro_core.rollout.sglang.client import is_here
from repro_core.rollout.sglang.flags import EXPORT
from repro_core.rollout.sglang.http import SglangServer
from repro_core.rollout.sglang.process import free_port
from repro_core.rollout.sglang_inside import export
from repro_core.rollout.sync import from_lead

EOS = 258
SAMPLING = Sampling(2, 1.0, EOS, ignore_eos=True)
INFO = {"version": "0.5.23", "device": "cpu", "dtype": "float32", "enable_deterministic_inference": True, "tp_size": 1}
ANSWER = {
    "output_ids": [5, 6],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 2},
        "weight_version": "default",
        "completion_tokens": 2,
        "output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]],
    },
}
Reply = Callable[[Any], tuple[int, Any]]


class _Handler(BaseHTTPRequestHandler):
    routes: dict[str, Reply]

    def do_GET(self) -> None:
        self._reply(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self._reply(json.loads(body) if body else None)

    def _reply(self, body: Any) -> None:
        status, content = self.routes.get(urlsplit(self.path).path, lambda _: (404, {"detail": "Not Found"}))(body)
        if status == 0:  # break off
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "text/html" if isinstance(content, str) else "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def _player(**routes: Any) -> Iterator[str]:
    """A server that speaks SGLang's JSON, at an address; each route is an answer, or a function of what was sent."""
    whole = {"server_info": INFO, "model_info": {"weight_version": "default"}, "generate": [ANSWER], **routes}
    made: dict[str, Reply] = {
        f"/{name}": value if callable(value) else (lambda _, value=value: (200, value)) for name, value in whole.items()
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"routes": made}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _engine(url: str, timeout: float = 20.0) -> SglangServer:
    return SglangServer(replace(CONFIG, url=url, timeout=timeout), DENSE, "fp32")


def test_a_sound_server_is_heard() -> None:
    """The player of these tests is one that works: its faults alone are what fails."""
    with _player() as url:
        assert _engine(url).generate([[1]], SAMPLING, [1])[0].tokens == [5, 6]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None], [-3.0, 7, None]]}, "3 log-probs.* 2 tokens"),
        ({"output_token_logprobs": [[-1.0, 5, None], [None, 6, None]]}, "log-prob NaN at token 1"),
        ({"weight_version": "7"}, "'7' in place of 'default'"),
        ({"finish_reason": {"type": "abort", "message": "out of\nmemory"}}, "was aborted .out of memory."),
    ],
)
def test_an_answer_that_does_not_hold_together_drops_the_batch(meta: dict[str, Any], message: str) -> None:
    """Fewer tokens than log-probs, NaN (null in JSON), stale weights and an abort are errors of one line."""
    wrong = {**ANSWER, "meta_info": {**ANSWER["meta_info"], **meta}}  # type: ignore[dict-item]
    with _player(generate=[ANSWER, wrong]) as url, pytest.raises(EngineError, match=message) as error:
        _engine(url).generate([[1], [2]], SAMPLING, [1, 2])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("version", ["0.5.14", "0.4.3", "0.6.0", "None"])
def test_a_server_of_an_unsupported_version_is_refused_by_name(version: str) -> None:
    """Before anything is asked of it, with the versions that will do."""
    with _player(server_info={**INFO, "version": version}) as url, pytest.raises(EngineError, match=version) as error:
        _engine(url)
    assert ">=0.5.15,<0.6" in str(error.value)


def test_a_server_that_does_not_answer_in_time_is_an_error() -> None:
    """The message names the time-out and the address."""
    release = threading.Event()

    def hang(_: Any) -> tuple[int, Any]:
        release.wait(30)
        return 200, [ANSWER]

    with _player(generate=hang) as url:
        engine = _engine(url, timeout=0.3)
        with pytest.raises(EngineError, match=rf"SGLang at {url} did not sample within 0.3 s"):
            engine.generate([[1]], SAMPLING, [1])
        release.set()


def test_addresses_where_no_sglang_is(tmp_path: Path) -> None:
    """Nobody there, a connection that breaks off, another program, and what is no address are told apart."""
    with pytest.raises(EngineError, match="nobody listens at"):
        _engine(f"http://127.0.0.1:{free_port('127.0.0.1')}")
    with (
        _player(generate=lambda _: (0, None)) as url,
        pytest.raises(EngineError, match="broke off when it was to sample"),
    ):
        _engine(url).generate([[1]], SAMPLING, [1])
    with _player(server_info="<html>") as url, pytest.raises(EngineError, match="is this SGLang"):
        _engine(url)
    with _player(server_info=lambda _: (404, "<html>")) as url, pytest.raises(EngineError, match="answers 404"):
        _engine(url)
    for wrong in ("127.0.0.1:30000", "ftp://127.0.0.1", "http://", "http://[", str(tmp_path)):
        with pytest.raises(EngineError, match="is no address of a server"):
            _engine(wrong)


def test_log_probs_at_another_temperature_are_found_out() -> None:
    """A server that gives log-probs at temperature 1 whatever it samples at is refused; one that scales is not."""

    def answer(scaled: bool) -> Reply:
        def reply(body: Any) -> tuple[int, Any]:
            if "top_logprobs_num" not in body:
                return 200, [ANSWER]
            by = body["sampling_params"]["temperature"] if scaled else 1.0
            best = [[[-0.5 / by, 5, None], [-1.25 / by, 6, None]]]
            return 200, {**ANSWER, "meta_info": {**ANSWER["meta_info"], "output_top_logprobs": best}}  # type: ignore[dict-item]

        return reply

    warm = replace(SAMPLING, temperature=0.7)
    with _player(generate=answer(scaled=True)) as url:
        assert _engine(url).generate([[1]], warm, [1])
    with _player(generate=answer(scaled=False)) as url, pytest.raises(EngineError, match="RETURN_ORIGINAL_LOGPROB"):
        _engine(url).generate([[1]], warm, [1])


@pytest.mark.parametrize("way", ["workers", "list_workers"])
def test_behind_a_router_weights_go_to_every_server(way: str) -> None:
    """Responses come through the router; updates and versions are each server's own, which must be alike."""
    taken: list[tuple[str, str]] = []

    def take(name: str) -> Reply:
        def reply(body: Any) -> tuple[int, Any]:
            taken.append((name, body["weight_version"]))
            return 200, {"success": True, "message": ""}

        return reply

    with (
        _player(update_weights_from_disk=take("one")) as server,
        _player(update_weights_from_disk=take("two")) as other,
        _player(update_weights_from_disk=take("odd"), server_info={**INFO, "page_size": 4}) as odd,
        _player(model_info={"weight_version": "9"}) as late,
    ):

        def listed(*urls: str) -> dict[str, Any]:
            return {way: {"workers": [{"url": url} for url in urls]} if way == "workers" else {"urls": list(urls)}}

        with _player(**listed(server, other), server_info=lambda _: (500, "no")) as url:
            engine = _engine(url)
            engine.update_from_disk("/somewhere", "4")
            assert taken == [("one", "4"), ("two", "4")]
            assert engine.identity()["flags"]["servers"] == 2
        with _player(**listed(server, odd)) as url, pytest.raises(EngineError, match="differ in page_size: None and 4"):
            _engine(url)
        with _player(**listed(server, late)) as url, pytest.raises(EngineError, match="weights of several versions"):
            _engine(url)
        with _player(**listed()) as url, pytest.raises(EngineError, match="has no servers"):
            _engine(url)


def test_refused_weights_end_the_session_and_keep_the_version() -> None:
    """The refusal's own words are told, the session is closed, and nothing counts as taken."""
    asked: list[str] = []

    def note(name: str, success: bool) -> Reply:
        def reply(_: Any) -> tuple[int, Any]:
            asked.append(name)
            return 200, {"success": success, "message": "" if success else "must run\nbetween"}

        return reply

    routes = {
        "begin_weight_update": note("begin", True),
        "update_weights_from_tensor": note("update", False),
        "end_weight_update": note("end", True),
    }
    with _player(**routes) as url:
        engine = _engine(url)
        with pytest.raises(EngineError, match="refuses to take weights by tensor: must run between"):
            engine.update([("a", torch.zeros(2))], "5")
        assert asked == ["begin", "update", "end"]
        assert engine.weight_version == "default"
        with pytest.raises(EngineError, match="cannot say what it holds: start it with --custom-weight-loader"):
            engine.held()
    # Earlier versions know no session.
    with _player(update_weights_from_tensor=lambda _: (200, {"success": True, "message": ""})) as url:
        engine = _engine(url)
        engine.update([("a", torch.zeros(2))], "5")
        assert engine.weight_version == "5"


def test_a_server_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in memory do not go there, and without a shared folder none come back: each says which key is the cure.
    With one the order to write them down arrives, and what hinders the writing comes back in one line."""  # noqa: D205, D209 - one claim
    assert is_here("http://127.0.0.1:3")
    assert is_here("http://localhost:3")
    assert not is_here("http://name.invalid")

    def take(body: Any) -> tuple[int, Any]:
        from sglang.srt.utils import MultiprocessingSerializer

        (payload,) = body["serialized_named_tensors"]
        # In this process nothing says which rank it is.
        export(torch.nn.Linear(1, 1), MultiprocessingSerializer.deserialize(payload))
        return 200, {"success": True, "message": ""}

    routes = {
        "server_info": {**INFO, "custom_weight_loader": [EXPORT]},
        "update_weights_from_tensor": take,
        "update_weights_from_disk": lambda _: (400, {"success": False, "message": "no such folder"}),
        "model_info": {"weight_version": "default", "model_path": str(tiny_checkpoint(tmp_path / "checkpoint"))},
    }
    with _player(**routes) as proxy:
        assert _engine(proxy).checkpoint == str(tmp_path / "checkpoint")
        monkeypatch.setenv("http_proxy", proxy)  # another machine's address leads to the player too
        monkeypatch.setenv("no_proxy", "")
        away = "http://192.0.2.1:3"
        engine = _engine(away)
        assert engine.checkpoint is None, "a path of another machine says nothing here"
        with pytest.raises(EngineError, match=r'another machine.*set sglang.sync to "disk" and sglang\.folder'):
            engine.update([("a", torch.zeros(2))], "5")
        with pytest.raises(EngineError, match=r"another machine, so to read its weights back set sglang\.folder"):
            engine.held()
        with pytest.raises(EngineError, match=r"no such folder: it is on another machine, so set sglang\.folder"):
            engine.update_from_disk("/somewhere", "5")
        sharing = SglangServer(replace(CONFIG, url=away, folder=str(tmp_path)), DENSE, "fp32")
        with pytest.raises(EngineError, match=rf"cannot write its weights to {tmp_path}: \w+: ") as error:
            sharing.held()
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("dtype", ["auto", None])
def test_a_server_must_say_what_it_computes_in(dtype: str | None) -> None:
    """Nothing tells what auto became."""
    with _player(server_info={**INFO, "dtype": dtype}) as url, pytest.raises(EngineError, match="--dtype float32"):
        _engine(url)


def test_no_room_in_shared_memory_is_one_line() -> None:
    """Torch's own error becomes one with the cure; a limit on the size of files stands for a full memory."""
    with _player() as url:
        engine, limits = _engine(url), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            with pytest.raises(EngineError, match=r"cannot put weights into shared memory .*make room in /dev/shm"):
                engine.update([("a", torch.zeros(1 << 20))], "5")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """The next process that makes one removes them, and leaves those of processes that live."""
    program = (
        "import os, signal; from repro_core.rollout.scratch import fresh_folder; "
        f"fresh_folder('held', {str(tmp_path)!r}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(CORE)}, check=False)
    assert len(list(tmp_path.iterdir())) == 1
    first = fresh_folder("weights", tmp_path)
    assert list(tmp_path.iterdir()) == [first]
    with scratch_folder("held", tmp_path, shared=True) as second:
        assert set(tmp_path.iterdir()) == {first, second}
        assert second.stat().st_mode & 0o777 == 0o777
    assert list(tmp_path.iterdir()) == [first]


def test_ranks_wait_longer_than_their_lead_may_wait_for_an_engine() -> None:
    """Else they would give up in a collective while the first of them still waits for SGLang."""
    long = TrainConfig(sglang=replace(CONFIG, timeout=3000.0))
    assert timeout_s(replace(long, rollout_engine="sglang")) > 3000
    assert timeout_s(long) == timeout_s(TrainConfig()) == 600


def test_the_others_are_told_also_where_gathering_fails() -> None:
    """A lead whose own part of the gathering fails still tells the others that it failed: they wait for that."""
    told: list[Any] = []

    class Ranks(TorchEngines):
        def tell(self, value: Any) -> Any:
            told.append(value)
            return value

    def fail() -> None:
        raise RuntimeError("gathering")

    with pytest.raises(RuntimeError, match="gathering"):
        from_lead(Ranks(TrainConfig(), "."), lambda: 1, last=fail)
    ((_, failure),) = told
    assert "failed" in failure

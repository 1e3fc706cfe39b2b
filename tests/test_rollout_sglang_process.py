"""SGLang's server as a process: ports, ends, orphans, one that does not start, and one through all that befalls it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from sglang_kit import CONFIG, CORE, EXPERTS, drive, gap, prompts_of, tiny_checkpoint, tiny_policy

from repro_core.model.decoder import Policy
from repro_core.rollout.engine import EngineError, Sampling
from repro_core.rollout.sglang.flags import command_line, environment, server_arguments
from repro_core.rollout.sglang.http import SglangServer
from repro_core.rollout.sglang.process import ServerProcess, free_port, serve
from repro_core.rollout.sglang.stand_ins import FOLDER

EOS = 258
SAMPLING = Sampling(2, 1.0, EOS, ignore_eos=True)


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    """It is said before anything is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=rf"cannot listen on 127.0.0.1:{port} .*choose another port"):
            serve(CONFIG, tiny_checkpoint(tmp_path), "fp32", port=port)


STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.environ["REPRO_SGLANG_PARENT"] = str(os.getpid())
sys.exit(subprocess.call(sys.argv[1:]))
"""


def test_a_server_that_ends_at_once_says_why(tmp_path: Path) -> None:
    """The exit code, the last error of the log, and where the log is; the child is gone."""
    log = tmp_path / "server.log"
    program = "raise RuntimeError('no memory left')"
    with pytest.raises(EngineError, match=r"ended with code 1 before it was ready: RuntimeError: no memory left .log"):
        ServerProcess(
            [sys.executable, "-c", program], host="127.0.0.1", port=free_port("127.0.0.1"), environment={}, log=log
        )
    with pytest.raises(EngineError, match=r"was not ready within 0\.5 s"):
        ServerProcess(
            [sys.executable, "-c", STUBBORN, "sleep", "600"],
            host="127.0.0.1", port=free_port("127.0.0.1"), environment={}, log=log, timeout=0.5, term_s=0.2,
        )  # fmt: skip
    assert _left(tmp_path, "sleep 600") == []


@pytest.mark.whole
def test_no_server_outlives_a_killed_parent(tmp_path: Path) -> None:
    """SIGKILL of the process that started a server ends the server too."""
    program = f"""
from pathlib import Path
from repro_core.config import SglangConfig
from repro_core.rollout.sglang.process import serve
serve(SglangConfig(), Path({str(tiny_checkpoint(tmp_path / "c"))!r}), "fp32", log=Path({str(tmp_path / "log")!r}))
"""
    parent = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(CORE)})
    child = _eventually(lambda: psutil.Process(parent.pid).children())[0]
    # SGLang's own libraries are loaded after the line that this is about.
    _eventually(lambda: any("/zmq/" in each.path for each in child.memory_maps()))
    parent.kill()
    parent.wait()
    _eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.whole
def test_an_engine_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    """Unknown arguments and a start that takes too long are one line, and leave no process."""
    told = drive("sglang_start_driver.py", tmp_path)
    assert "nonsense" in told["unknown"]
    assert "was not ready within 5 s" in told["late"]
    assert "main thread" in told["thread"]
    assert told["left"] == []
    assert not any("\n" in line for line in (told["unknown"], told["late"], told["thread"]))


def test_stand_ins_refuse_where_a_gpu_is(tmp_path: Path) -> None:
    """Each of them, with the cure, where torch sees a GPU; here a torch that says so comes first on the path."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "class cuda:\n    is_available = staticmethod(lambda: True)\nclass Tensor: ...\n"
    )
    for name in ("repro_sglang_cpu; repro_sglang_cpu.register()", "sgl_kernel", "torchvision"):
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(FOLDER)])},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "this one has a GPU: install the real package" in done.stderr, name


@pytest.mark.whole
def test_a_server_of_experts_through_all_that_befalls_it(tmp_path: Path) -> None:
    """Experts and log-probs are the model's; a hang times out; its scheduler's death drops the batch; it ends though
    the process around it ignores SIGTERM, and nothing of it is left."""  # noqa: D205, D209 - one claim
    checkpoint, port = tiny_checkpoint(tmp_path / "experts", EXPERTS), free_port("127.0.0.1")
    arguments = server_arguments(CONFIG, EXPERTS, checkpoint, "fp32", "cpu")
    command = [sys.executable, "-m", "repro_core.rollout.sglang.child"]
    flags = command_line({**arguments, "host": "127.0.0.1", "port": port})
    log = tmp_path / "server.log"
    with ServerProcess(
        [sys.executable, "-c", STUBBORN, *command, *flags],
        host="127.0.0.1",
        port=port,
        environment={**environment("cpu"), "PYTHONPATH": str(CORE)},
        log=log,
        timeout=240,
        term_s=0.5,
    ) as server:
        processes = psutil.Process(server.pid).children(recursive=True)
        scheduler = next(each for each in processes if "scheduler" in each.name())
        engine = SglangServer(replace(CONFIG, url=server.url), EXPERTS, "fp32", log=log)
        _check_experts(engine)
        hurried = SglangServer(replace(CONFIG, url=server.url, timeout=1.0), EXPERTS, "fp32", log=log)
        scheduler.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"did not sample within 1 s.*server.log"):
            hurried.generate([[1, 2]], SAMPLING, [1])
        scheduler.send_signal(signal.SIGCONT)
        assert engine.generate([[1, 2]], SAMPLING, [1])
        # 32 rows of 200 tokens take seconds.
        threading.Timer(0.4, scheduler.kill).start()
        with pytest.raises(EngineError, match=r"(broke off when it was to|refuses to) sample.*server.log"):
            engine.generate(prompts_of(32), Sampling(200, 1.0, EOS, ignore_eos=True), list(range(32)))
        engine.close()
        hurried.close()
    assert [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []
    assert not psutil.pid_exists(server.pid)


def _check_experts(engine: SglangServer) -> None:
    prompts, policy = prompts_of(8), tiny_policy(EXPERTS)
    sampling = Sampling(8, 0.8, EOS, ignore_eos=True, prompt_log_probs=True, routed_experts=True)
    answers = engine.generate(prompts, sampling, list(range(8)))
    alone = [engine.generate([prompt], sampling, [seed])[0] for seed, prompt in enumerate(prompts)]
    assert answers == alone
    assert gap(policy, prompts, answers, 0.8) <= 1e-5
    for prompt, response in zip(prompts, answers, strict=True):
        assert response.routed_experts is not None
        wanted = _routes(policy, [*prompt, *response.tokens])
        mine = response.routed_experts[:-1].sort(-1).values
        assert torch.equal(mine, wanted[:-1].sort(-1).values.to(mine.dtype))


@torch.no_grad()
def _routes(policy: Policy, tokens: list[int]) -> torch.Tensor:
    """[tokens, layers, top_k] of the built-in model."""
    chosen: list[torch.Tensor] = []
    policy(torch.tensor([tokens]), torch.arange(len(tokens))[None], chosen=chosen)
    return torch.stack(chosen, dim=2)[0]


def _eventually(ask: Callable[[], Any]) -> Any:
    """What `ask` gives when it first gives something; ends the test after a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if answer := ask():
            return answer
        time.sleep(0.02)
    raise AssertionError("it did not come about")


def _left(_folder: Path, command: str) -> list[int]:
    return [
        each.pid
        for each in psutil.Process().children(recursive=True)
        if command in " ".join(each.cmdline()) and each.status() != psutil.STATUS_ZOMBIE
    ]

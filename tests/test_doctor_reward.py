"""The doctor calls a reward function of the user's on recorded responses."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doctor_machine_kit import launch
from findings_kit import as_read, told
from syrupy.assertion import SnapshotAssertion

from repro.doctor.artefacts.kinds import Launch, Rollout
from repro.doctor.artefacts.reward import Odd, reward_function
from repro.doctor.artefacts.runs import ROLLOUT_DUMP
from repro_golden.base.checks import Finding
from repro_golden.base.errors import NotVerifiableError, ReproError
from repro_golden.dumps.rollout.files import RolloutDump, write_rollout_dump

LENGTH = "async def reward_func(args, sample, **kwargs):\n    return float(len(sample.response))\n"


def checkout(folder: Path, source: str, name: str = "custom_rm") -> Path:
    """A checkout with a module of rewards in a package of its own."""
    package = folder / "mine"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / f"{name}.py").write_text(source)
    return folder


def samples(count: int = 4, **more: Any) -> list[dict[str, Any]]:
    """Recorded samples whose reward is the length of their response."""
    return [
        {"index": k, "prompt": "?", "tokens": [1] * (k + 2), "response": "a" * (k + 1), "response_length": k + 1,
         "label": str(k), "reward": float(k + 1), "status": "completed", **more}
        for k in range(count)
    ]  # fmt: skip


def dump(path: Path, rows: list[dict[str, Any]]) -> Rollout:
    """A rollout dump as slime writes it, read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rollout_dump(path, RolloutDump("slime", 0, samples=rows))
    assert ROLLOUT_DUMP.fits(path)
    return next(artefact for artefact in ROLLOUT_DUMP.read(path) if isinstance(artefact, Rollout))


def scores(folder: Path, source: str, rows: list[dict[str, Any]] | None = None, **options: Any) -> list[Any]:
    """What a module's function gives to samples."""
    root = checkout(folder, source)
    return reward_function("mine.custom_rm:reward_func", None, root, **options).score(
        samples() if rows is None else rows
    )


def said_of(
    folder: Path, source: str, rows: list[dict[str, Any]] | None = None, read: Launch | None = None
) -> list[Finding]:
    """What the rule says of a module's function on a dump."""
    function = reward_function("mine.custom_rm:reward_func", sys.executable, checkout(folder, source))
    rollout = dump(folder / "dumps" / "0.pt", samples() if rows is None else rows)
    return told("reward-function", function, rollout, read)


class TestCall:
    """`reward_function`."""

    @pytest.mark.parametrize(
        "source",
        [
            LENGTH,
            "def reward_func(args, sample):\n    return len(sample.response)\n",
            "async def reward_func(args, samples, **kwargs):\n    return [len(s.response) for s in samples]\n",
            "class Rm:\n    async def __call__(self, args, sample):\n        return len(sample.response)\n"
            "reward_func = Rm()\n",
            "import numpy as np\ndef reward_func(args, sample):\n    return np.float32(len(sample.response))\n",
        ],
    )
    def test_every_form_that_the_trainers_take(self, source: str, tmp_path: Path) -> None:
        """Plain or async, of one sample or of all, an object that can be called, a scalar of numpy."""
        assert scores(tmp_path, source) == [1, 2, 3, 4]

    def test_its_name_may_be_written_as_the_trainers_do(self, tmp_path: Path) -> None:
        """With dots alone."""
        function = reward_function("mine.custom_rm.reward_func", None, checkout(tmp_path, LENGTH))
        assert function.score(samples(1)) == [1.0]

    def test_what_it_is_given(self, tmp_path: Path) -> None:
        """The sample's plain fields, without its recorded reward; arrays are left out; arguments as they are named."""
        source = (
            "def reward_func(args, sample):\n"
            "    return {'label': float(sample.label), 'reward': float(sample.reward is None),\n"
            "            'key': float(args.beta), 'meta': float(sample.metadata['x']),\n"
            "            'array': float(hasattr(sample, 'rollout_routed_experts'))}\n"
        )
        rows = samples(1, metadata={"x": 3}, rollout_routed_experts=np.zeros((2, 2, 2), np.int32))
        assert scores(tmp_path, source, rows, arguments={"beta": 5}) == [
            {"label": 0.0, "reward": 1.0, "key": 5.0, "array": 0.0, "meta": 3.0}
        ]

    def test_a_sample_is_the_trainers_own_where_its_module_loads_it(self, tmp_path: Path) -> None:
        """A function that checks the class gets it, made by the class."""
        types = tmp_path / "slime" / "utils"
        types.mkdir(parents=True)
        (types / "types.py").write_text(
            "class Sample:\n    @staticmethod\n    def from_dict(data):\n        made = Sample()\n"
            "        made.__dict__.update(data)\n        return made\n"
        )
        source = (
            "from slime.utils.types import Sample\ndef reward_func(args, sample):\n"
            "    assert isinstance(sample, Sample)\n    return len(sample.response)\n"
        )
        assert scores(tmp_path, source) == [1, 2, 3, 4]

    def test_it_starts_in_a_folder_of_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What it writes where it stands is not the user's, and no bytecode is left in the checkout."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        source = f"open('litter', 'w').close()\n{LENGTH}"
        assert scores(tmp_path, source) == [1, 2, 3, 4]
        assert not (tmp_path / "litter").exists() and not list(tmp_path.rglob("__pycache__"))

    @pytest.mark.parametrize(
        ("value", "back"),
        [
            ("True", True), ("None", None), ("-0.0", -0.0), ("10**20", 10**20), ("'1.0'", Odd("str")),
            ("10**400", Odd("number beyond all floats")), ("[1.0]", Odd("list")),
            ("{'score': 1.0, 'pred': 'x'}", {"score": 1.0, "pred": Odd("str")}),
            ("float('inf')", math.inf),
        ],
    )  # fmt: skip
    def test_values_come_back_as_they_are(self, value: str, back: object, tmp_path: Path) -> None:
        """Numbers bit for bit; what is no reward by its type."""
        (received,) = scores(tmp_path, f"def reward_func(args, sample):\n    return {value}\n", samples(1))
        assert received == back and type(received) is type(back)

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("raise ImportError('no judge')\n", "cannot be loaded: ImportError: no judge at custom_rm.py:1"),
            ("x = 1\n", "cannot be loaded: AttributeError"), ("reward_func = 3\n", "is no function"),
            ("def reward_func(args, sample):\n    1 / 0\n", "ZeroDivisionError: division by zero at custom_rm.py:2"),
            ("def reward_func(sample):\n    return 1\n", "raised TypeError"),
            ("def reward_func(args, samples):\n    return [1.0]\n", "it returned 1 rewards for 4 samples"),
            ("import os\ndef reward_func(args, sample):\n    os._exit(7)\n", "ended without rewards"),
            ("def reward_func(args, sample):\n    raise ValueError('two\\nlines')\n", "two lines"),
        ],
    )  # fmt: skip
    def test_what_fails_is_one_line_that_says_where(self, source: str, message: str, tmp_path: Path) -> None:
        """Its own error, at its own line."""
        with pytest.raises(ReproError) as error:
            scores(tmp_path, source)
        assert message in str(error.value) and "\n" not in str(error.value)

    def test_one_that_hangs_is_ended(self, tmp_path: Path) -> None:
        """With all that it started."""
        with pytest.raises(ReproError, match="within 1 s"):
            scores(tmp_path, "import time\ndef reward_func(args, sample):\n    time.sleep(600)\n", limit=1.0)

    def test_a_thread_that_it_leaves_does_not_hold_it_up(self, tmp_path: Path) -> None:
        """Pools and connections stay open in real functions."""
        source = f"import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n{LENGTH}"
        assert scores(tmp_path, source, limit=60.0) == [1, 2, 3, 4]

    def test_arguments_that_only_a_trainer_has(self, tmp_path: Path) -> None:
        """A function that reads them cannot be judged; one that asks whether they are there can."""
        with pytest.raises(NotVerifiableError, match=r"args\.rm_url"):
            scores(tmp_path, "def reward_func(args, sample):\n    return args.rm_url\n")
        source = "def reward_func(args, sample):\n    return float(getattr(args, 'rm_url', None) is None)\n"
        assert scores(tmp_path, source) == [1.0] * 4

    @pytest.mark.parametrize("name", ["", "reward", "a b:c", "a:b:c", "../x:f", ":f"])
    def test_what_names_no_function(self, name: str, tmp_path: Path) -> None:
        """Is told before anything runs."""
        with pytest.raises(ReproError, match=r"package\.module:function"):
            reward_function(name, None, tmp_path)

    def test_a_missing_interpreter(self, tmp_path: Path) -> None:
        """Likewise."""
        with pytest.raises(ReproError, match="--python"):
            reward_function("a:b", "no-such-python", tmp_path)


RANDOM = "import random\ndef reward_func(args, sample):\n    return random.random()\n"
CASES = {
    "raises": "def reward_func(args, sample):\n    raise KeyError('label')\n",
    "not-finite": "def reward_func(args, sample):\n    return float('nan')\n",
    "none": "def reward_func(args, sample):\n    pass\n",
    "text": "def reward_func(args, sample):\n    return 'good'\n",
    "random": RANDOM,
    "other": "def reward_func(args, sample):\n    return len(sample.response) + 1.0\n",
    "untested": "def reward_func(args, sample):\n    return args.judge\n",
}
"""What "reward-function" has something to say of."""


class TestRule:
    """`reward-function`."""

    @pytest.mark.parametrize("name", CASES)
    def test_what_is_wrong_is_told(self, name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
        """With what it returned."""
        text = as_read("reward-function", said_of(tmp_path, CASES[name]), tmp_path)
        assert re.sub(r"0\.\d+(e-\d+)?", "<drawn>", text) == snapshot

    def test_a_good_one_is_let_pass(self, tmp_path: Path) -> None:
        """Its rewards differ, come again, and are those of the dump."""
        assert said_of(tmp_path, LENGTH) == []

    def test_sets_of_text_are_not_repeatable(self, tmp_path: Path) -> None:
        """The second call is in another process, where Python orders a set of text anew."""
        names = "{str(k) for k in range(1000, 1200)}"  # the first one alone is the same in one call of 200
        source = f"def reward_func(args, sample):\n    return float(''.join({names})[:12])\n"
        messages = [finding.message for finding in said_of(tmp_path, source)]
        assert any("for the same response" in message for message in messages)

    def test_one_reward_for_all(self, tmp_path: Path) -> None:
        """From eight different responses on; the same responses may have the same reward."""
        source = "def reward_func(args, sample):\n    return 0.0\n"
        every = said_of(tmp_path / "a", source, samples(8))
        constant = [finding for finding in every if "different responses" in finding.message]
        assert [hit.severity for hit in constant] == ["warning"]
        same = [{**sample, "response": "a", "reward": 0.0} for sample in samples(8)]
        assert said_of(tmp_path / "b", source, same) == []

    @pytest.mark.parametrize(
        ("flags", "severities", "message"),
        [
            ("", ["error"], "--reward-key is not given"), ("--reward-key acc", ["error"], "its keys are 'score'"),
            ("--reward-key score", [], ""), ("--custom-reward-post-process-path mine.post", [], ""),
        ],
    )  # fmt: skip
    def test_rewards_in_a_dict(self, flags: str, severities: list[str], message: str, tmp_path: Path) -> None:
        """A key must be named, and be there."""
        source = "def reward_func(args, sample):\n    return {'score': float(len(sample.response))}\n"
        findings = said_of(tmp_path, source, None, launch(tmp_path / "run", f"--colocate {flags}"))
        assert [finding.severity for finding in findings] == severities
        assert all(message in finding.message for finding in findings)

    def test_rewards_that_the_dump_does_not_have_are_not_compared(self, tmp_path: Path) -> None:
        """A dump of before scoring has none."""
        assert said_of(tmp_path, LENGTH, [{**sample, "reward": None} for sample in samples()]) == []

    def test_a_few_of_many_samples_are_enough(self, tmp_path: Path) -> None:
        """The function is called on 32 samples at most, from all over the dump."""
        source = (
            "async def reward_func(args, samples):\n    assert len(samples) <= 32 and samples[-1].index > 150\n"
            "    return [float(len(s.response)) for s in samples]\n"
        )
        assert said_of(tmp_path, source, samples(200)) == []

    def test_a_dump_without_responses_is_let_pass(self, tmp_path: Path) -> None:
        """There is nothing to score."""
        assert said_of(tmp_path, LENGTH, []) == []

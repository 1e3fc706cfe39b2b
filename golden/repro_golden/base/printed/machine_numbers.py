"""Which numbers tell of the machine and the hour and not of a training: by their names, and the clock's by its size."""

from __future__ import annotations

import re
import time

__all__ = ["is_clock", "measures_time", "of_the_machine", "words_of"]

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]{2})")
"""Where a camelCase word begins; two letters after the capital, so that GPUs and TFLOPs stay whole."""

_WORDS = re.compile(r"[^\W\d_]+|[0-9]+|/")

_TIME = re.compile(
    # Words that mean nothing else. Not `second`, an ordinal in second_order and second_turn (as a unit it follows
    # `per`), nor `timeout`, `timesteps`, `flos`: counts, the same in every run.
    r"\b(?:timer|timers|timing|timeperf|timestamp|timestamps|walltime|seconds|secs|minutes|hours|duration|runtime|"
    r"elapsed|throughput|tps|tgs|flops|tflops|mfu|hfu|speed|memory|mem|vram|iops|bandwidth|latency)\b"
    # time_step and time_steps are positions in an episode, or counts of them
    r"|\btime\b(?! steps?\b)"
    # tokens_per_s, tok/s
    r"|\bper (?:s|sec|second|min|minute|hour)\b|/ s$"
    # Short words that mean something else elsewhere count only as the unit at the end of a part of the name, before
    # a statistic or `per`: eval/ms_marco, mmlu/us_history, en_US, times_clipped and the hyperparameter eta_min do not.
    r"|\beta(?= /|$)|\b(?:ms|sec|times|(?<=[a-z0-9] )(?<!\ben )us)"
    r"(?= per\b|(?: (?:avg|mean|median|min|max|std|sum|total|p|[0-9]+))*(?: /|$))"
)


def words_of(name: str) -> list[str]:
    """The words of a name, in small letters: of letters, of digits, and slashes."""
    return " ".join(_WORDS.findall(_CAMEL.sub(" ", name))).lower().split()


def measures_time(name: str) -> bool:
    """Whether a metric measures wall time, speed or memory by its name, so that it differs from run to run."""
    text = " ".join(words_of(name))
    return name.startswith("perf/") or bool(_TIME.search(text) and not _learnt(text))


_JUDGED = "acc|accuracy|mae|mse|rmse|mape|error|score|bonus|penalty|f1|auc"
_LEARNT = re.compile(
    # what stands in a folder of losses or rewards: rewards/latency_reward/mean, eval_rewards/speed/std, loss/memory
    r"(?:^|/ )(?:(?:train|eval|val|valid|validation|test) )?(?:loss|losses|reward|rewards) /"
    # What is learnt of a machine, and that alone or before a statistic: not memory_after_loss, nor reward_time. A
    # loss and a reward take time themselves: time_loss is how long one took, time_accuracy is none that a clock shows.
    rf"|\b(?:(?:memory|mem|vram|speed|throughput|bandwidth|latency|runtime|duration) "
    rf"(?:loss|losses|rewards?|returns?|advantages?|kl|{_JUDGED})|time (?:{_JUDGED}))"
    r"(?: (?:avg|mean|median|min|max|std|var|sum|total|p|step|epoch|/|[0-9]+))*$"
)


def _learnt(text: str) -> bool:
    """Whether words tell of what is learnt, and not in a folder of times (``timing_s/reward``, ``time/speed_loss``)."""
    learnt = _LEARNT.search(text)
    return learnt is not None and not _TIME.search(text[: learnt.start()])


_MACHINE = re.compile(
    r"pid|ppid|tid|ports?|date|wall|fps|sps|qps|rps|wps|ups|dt|rss|uptime|mb|gb|mib|gib|watts?|joules"
)
_OF_BATCHES = {
    "loss",
    "kl",
    "reward",
    "rewards",
    "return",
    "acc",
    "accuracy",
    "entropy",
    "ratio",
    "clip",
    "clipfrac",
    "advantage",
    "norm",
    "std",
}
"""Words in a name that ends with `mb` for a mini-batch, and not for megabytes."""
_TAKEN = {
    "step",
    "gen",
    "generate",
    "generation",
    "rollout",
    "train",
    "update",
    "collect",
    "sync",
    "wait",
    "idle",
    "load",
}
"""Words before `s` for seconds, which elsewhere is a state (`v_s`), or any letter (`upper_s`)."""


def of_the_machine(name: str) -> bool:
    """Whether a number tells of the process or the machine by the last words of its name: a port, seconds, megabytes.

    CleanRL's `SPS` are steps per second. Lightning's `v_num` counts the runs of a folder.
    """
    if _learnt(" ".join(words_of(name))):
        return False
    *_, before, last = ["", "", *words_of(name)]
    if last == "s":
        return before in _TAKEN
    minibatch = last == "mb" and bool(_OF_BATCHES.intersection(words_of(name)))
    return (before, last) == ("v", "num") or (bool(_MACHINE.fullmatch(last)) and not minibatch)


_DAY = 86_400.0


def is_clock(value: object) -> bool:
    """Whether a number is what the clock shows, give or take a day: seconds since 1970, or their thousandths and so on.

    Not a bool, and no text.
    """
    if not isinstance(value, (int, float)) or abs(value) >= 1 << 63:
        return False
    now = time.time()
    return any(abs(value - now * unit) < _DAY * unit for unit in (1, 10**3, 10**6, 10**9))

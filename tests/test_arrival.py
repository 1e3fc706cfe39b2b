"""What of a change reached the process that trains: by its own words and variables beside those without the change."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import pytest

from repro_bisect.axes.arrival import Lost, lost
from repro_golden.case.identity import short_digest
from repro_golden.trace import Header

NO: Mapping[str, str] = {}


def header(
    command: str, argv: str, env: Mapping[str, str] = NO, given: Mapping[str, str] | None = NO, **more: str
) -> Header:
    """Of a case and of the process that trained."""
    subject: dict[str, object] = {"kind": "command", "argv": shlex.split(argv), **more}
    if given is not None:
        subject["variables"] = {short_digest(name): short_digest(value) for name, value in given.items()}
    return Header({"subject": {"command": command, "env": dict(env)}}, "", subject, {}, 1)


@pytest.mark.parametrize(
    ("commands", "argvs", "message"),
    [
        # a script that drops its words, some of which it has itself
        (("bash r.sh", "bash r.sh --seed 2"), ("python t.py --seed 12", "python t.py --seed 12"), "--seed 2 is not on"),
        (("bash r.sh", "bash r.sh --wd 0.1 --lr 1"), ("python t.py --lr 1", "python t.py --lr 1"), "--wd is not on"),
        (("bash r.sh", "bash r.sh --fast"), ("python t.py --fast", "python t.py --fast"), "--fast is not on"),
        (("bash r.sh --wd 1", "bash r.sh"), ("python t.py", "python t.py"), "--wd 1 was not on"),
        (("bash r.sh --wd 1", "bash r.sh"), ("python t.py --wd 1", "python t.py --wd 1"), "--wd 1 is still on"),
        (("python t.py | tee log", "python t.py | tee log --lr 1"), ("python t.py", "python t.py"), "--lr is not on"),
        # a value that only another option got
        (("bash r.sh", "bash r.sh --wd 1 --lr 1"), ("python t.py", "python t.py --lr 1"), "--wd is not on"),
        # launchers that write them otherwise
        (("bash r.sh", "bash r.sh --lr 1"), ("python t.py", "python t.py --lr=1"), ""),
        (("bash r.sh", "bash r.sh --lr=1"), ("python t.py", "python t.py --lr 1"), ""),
        (("bash r.sh", "bash r.sh lr=1"), ("python t.py", "python t.py optim.lr=1"), ""),
        (("bash r.sh", "bash r.sh --lr 1"), ("python t.py", "python t.py learning_rate=1"), ""),
        (("bash r.sh", "bash r.sh --lr 1"), ("python t.py --lr 2", "python t.py --lr 1"), ""),
        (("bash r.sh", "bash r.sh --tags 'a b'"), ("python t.py", "python t.py --tags a b"), ""),
        (("bash r.sh", "bash r.sh --lr 1"), ("python t.py", """python t.py --optim '{"lr": 1}'"""), ""),
        # words of launchers
        (("bash r.sh", "bash r2.sh"), ("python t.py", "python t.py"), ""),
        (("python t.py", "torchrun --nproc-per-node 2 t.py"), ("python t.py", "/bin/python -u t.py"), ""),
        (("torchrun --nnodes 2 t.py", "torchrun --nnodes 4 t.py"), ("python -u t.py", "python -u t.py"), ""),
        (("deepspeed --include localhost:0 t.py", "deepspeed --include localhost:0,1 t.py"),
         ("python -u t.py --local_rank=0", "python -u t.py --local_rank=0"), ""),
        (("deepspeed --num_gpus 1 t.py --x 1", "deepspeed --num_gpus 1 --bind_cores_to_rank t.py --x 1"),
         ("python -u t.py --local_rank=0 --x 1", "python -u t.py --local_rank=0 --x 1"), ""),
        (("torchrun --no-python --max-restarts 1 ./t.sh", "torchrun --no-python --max-restarts 3 ./t.sh"),
         ("python t.py", "python t.py"), ""),
        (("torchrun t.py", "torchrun t.py --lr 1"), ("python -u t.py", "python -u t.py"), "--lr is not on"),
        (("env A=1 python t.py", "env A=2 python t.py"), ("python t.py", "python t.py"), ""),
        (("env A=1 deepspeed --num_gpus 2 t.py", "env A=1 deepspeed --num_gpus 4 t.py"),
         ("python -u t.py --local_rank=0", "python -u t.py --local_rank=0"), ""),
        (("deepspeed --num_gpus 2 --module p.t", "deepspeed --num_gpus 4 --module p.t"),
         ("python -u -m p.t --local_rank=0", "python -u -m p.t --local_rank=0"), ""),
        (("python -m torch.distributed.launch --nproc_per_node 2 t.py --x 1",
          "python -m torch.distributed.launch --nproc_per_node 4 t.py --x 1"),
         ("python -u t.py --local-rank=0 --x 1", "python -u t.py --local-rank=0 --x 1"), ""),
        (("env A=1 deepspeed t.py", "env A=1 deepspeed t.py --lr 1"),
         ("python -u t.py --local_rank=0", "python -u t.py --local_rank=0"), "--lr is not on"),
        (("python -m p.r --tp 2 c.py", "python -m p.r --tp 4 c.py"), ("python t.py", "python t.py"), "4 is not on"),
        # as they are
        (("python t.py --lr 1", "python t.py --lr 2"), ("python t.py --lr 1", "python t.py --lr 2"), ""),
        (("{python} t.py", "{python} t.py --to {out}/x"), ("python t.py", "python t.py --to /tmp/x"), ""),
    ],
)  # fmt: skip
def test_words(commands: tuple[str, str], argvs: tuple[str, str], message: str) -> None:
    """A word arrived where the process has more of it than without it, however a launcher writes it."""
    good, made = (header(command, argv) for command, argv in zip(commands, argvs, strict=True))
    part = lost(good, made)
    assert (part.text if part else "").startswith(message)
    assert bool(part) is bool(message)
    for other in (header(commands[1], argvs[1], kind="slime"), header(commands[1], "")):
        assert lost(good, other) is None, "nothing is known of it"


def test_a_trainer_is_asked_at_its_entry_point() -> None:
    """Its words are those of the command and of `flags`, wherever the process that trains was started from."""

    def trainer(command: str, flags: str, entry: str) -> Header:
        made = header(command, "python default_worker.py", kind="slime")
        case = {"subject": {**made.case["subject"], "flags": shlex.split(flags)}}
        return Header(case, "", {**made.subject, "entry": {"argv": shlex.split(entry)}}, {}, 1)

    good = trainer("bash r.sh", "", "python train.py --lr 1")
    assert lost(good, trainer("bash r.sh", "--wd 2", "python train.py --lr 1 --wd 2")) is None
    for made in (("bash r.sh", "--wd 2"), ("bash r.sh --wd 2", "")):
        part = lost(good, trainer(*made, "python train.py --lr 1"))
        assert part and part.sure and part.text.startswith("--wd is not on")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("--lr 0.1 --shift 1", "--lr 0.2 --shift -1"),
        ("--shift 1", "--shift -1"),
        ("--shift=1", "--shift=-1"),
        ("--betas 0.9,0.95", "--betas 0.95,0.9"),
        ("m.l=[1,2]", "m.l=[2,1]"),
        ("x.a=1", "+x.a=1"),
        ("--s 1:2", "--s 2:1"),
        ("--d a/b", "--d b/a"),
        ("--d 'data/*'", "--d data/"),
        ("--t a,b", "--t b"),
        ("--dims 64,64,128", "--dims 64,128"),
        ("--dims 64,64", "--dims 64,64,64"),
        ("--x --lr=1", "-x --lr=1"),
        ("--a=1 --b=2", "--a=2 --b=1"),
        ("--m 'a|b'", "--m 'a&b'"),
        ("--j '[1, 2]'", "--j '[2, 1]'"),
        ("--e 1-2", "--e 1+2"),
        ("--no-x", "--no_x"),
    ],
)
def test_words_that_stand_there_as_they_are(before: str, after: str) -> None:
    """What stands on the command line arrived, be it another sign, order or punctuation; else it is lost."""
    lines = [f"python t.py {words}" for words in (before, after)]
    for good, made in (lines, lines[::-1]):
        assert lost(header(good, good), header(made, made)) is None
        assert lost(header(good, good), header(made, good)) is not None


def test_words_that_a_script_hands_on_as_they_are() -> None:
    """A script may join words by `=`, part or export them; a sign counts where it writes them otherwise."""
    good = header("bash r.sh --betas 1,2", "python t.py --betas=1,2", given={"B": "1,2"})
    assert lost(good, header("bash r.sh --betas 2,1", "python t.py --betas=2,1")) is None
    assert lost(good, header("bash r.sh --betas 2,1", "python t.py --betas=1,2", given={"B": "2,1"})) is None
    assert lost(good, header("bash r.sh --betas 2,1", "python t.py --betas=1,2", given={"B": "1,2"})) is not None
    joined = header("bash r.sh --betas=1,2", "python t.py --betas 1,2")
    assert lost(joined, header("bash r.sh --betas=2,1", "python t.py --betas 2,1")) is None
    shift = header("bash r.sh --shift 1", "python t.py '{shift: 1}'")
    assert lost(shift, header("bash r.sh --shift -1", "python t.py '{shift: -1}'")) is None
    assert lost(shift, header("bash r.sh --shift -1", "python t.py '{shift: 1}'")) is not None


@pytest.mark.parametrize(
    ("commands", "argvs"),
    [
        (("--micro 8 --b 1", "--micro 16 --b 1"), ("--micro 8 --accum 16 --b 1", "--micro 16 --accum 8 --b 1")),
        (("--micro 8 --b 1", "--micro 16 --b 2"), ("--micro 8 --accum 16 --b 1", "--micro 16 --accum 8 --b 2")),
        (("8", "16"), ("--micro 8 --accum 16", "--micro 16 --accum 8")),
        (("--tp 2", "--tp 1"), ("--tp 2 --dp 1", "--tp 1 --dp 2")),
    ],
)
def test_a_script_that_computes_beside_its_words(commands: tuple[str, str], argvs: tuple[str, str]) -> None:
    """An option's value arrived though what is computed of it is what the option was before."""
    good, made = (header(f"bash r.sh {c}", f"python t.py {a}") for c, a in zip(commands, argvs, strict=True))
    assert lost(good, made) is None
    assert lost(made, good) is None


@pytest.mark.parametrize(
    ("commands", "argvs", "refused"),
    [
        (("--batch 8 --wd 1", "--batch 16 --wd 2"), ("--mb 1 --wd 1", "--mb 2 --wd 2"), False),
        (("--amp no", "--amp yes"), ("--amp False", "--amp True"), False),
        (("--lr 2e-3", "--lr 1e-3"), ("--lr 0.002", "--lr 0.001"), False),
        (("", "--tp 2"), ("", ""), True),
        (("--micro 8", "--micro 16 --tp 2"), ("--micro 8", "--micro 16"), True),
        (("--micro 8", "--micro 16 --tp 2"), ("--micro=8 --o /a", "--micro=16 --o /b"), True),
    ],
)
def test_layouts_that_a_script_computes_with(commands: tuple[str, str], argvs: tuple[str, str], refused: bool) -> None:
    """Layouts are refused only where their numbers agree and nothing in the process is unlike its given words."""
    good, made = (header(f"bash r.sh {c}", f"python t.py {a}") for c, a in zip(commands, argvs, strict=True))
    for part in (lost(good, made), lost(made, good)):
        assert part
        assert not part.refuses(agree=False)
        assert part.refuses(agree=True) is refused


def test_layouts_are_refused_for_what_the_process_says() -> None:
    """Other threads than a layout asks for are known, whatever the numbers are."""
    assert Lost("", sure=True, known=True).refuses(agree=False)
    assert not Lost("", sure=False).refuses(agree=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("--tp 2 --pp 4", "--tp 4 --pp 2"),
        ("--tp 2 --pp 4 --x 1", "--x 2 --tp 4 --pp 2"),
        ("--betas 1 2", "--betas 2 1"),
        ("--x 1 --x 2", "--x 2 --x 1"),
        ("2 4", "4 2"),
        ("tp=2 pp=4", "tp=4 pp=2"),
    ],
)
def test_values_that_are_swapped(before: str, after: str) -> None:
    """They are lost where the process has them as it had, and have arrived where they stand otherwise there."""
    good, made = (header(f"bash r.sh {words}", "python t.py --a 1 --b 2") for words in (before, after))
    for left, right in ((good, made), (made, good)):
        part = lost(left, right)
        assert part and part.refuses(agree=True)
    for form in ("{} --k 1", '--j "{{{}}}"'):
        good, made = (header(f"bash r.sh {w}", f"python t.py {form.format(w)}") for w in (before, after))
        assert lost(good, made) is None
        assert lost(made, good) is None
    given = [{"TP": "2", "PP": "4"}, {"TP": "4", "PP": "2"}]
    good, made = (header(f"bash r.sh {w}", "python t.py", given=g) for w, g in zip(("2 4", "4 2"), given, strict=True))
    assert lost(good, made) is None


def test_options_in_another_order() -> None:
    """A script may read them and write its own, which is the same."""
    good = header("bash r.sh --a 1 --b 2 --fast", "python t.py --a 1 --b 2")
    for words in ("--b 2 --a 1 --fast", "--fast --a 1 --b 2", "--b 2 --fast --a 1"):
        assert lost(good, header(f"bash r.sh {words}", "python t.py --a 1 --b 2")) is None


@pytest.mark.parametrize("name", ["--name run-{}", "--name=run-{}", "run.id={}", "{}"])
def test_words_of_a_process_own_time(name: str) -> None:
    """What parts two replays of one layout too is not computed of what the layouts are given."""
    words = (f"{name.format(k)} --x 1" for k in range(17, 21))
    lines = [f"bash r.sh --tp {tp}" for tp in (2, 2, 4, 4)]
    good, again, made, last = (header(line, f"python t.py {word}") for line, word in zip(lines, words, strict=True))
    part = lost(good, made, twins=[(good, again), (made, last)])
    assert part
    assert part.refuses(agree=True)
    part = lost(good, header(lines[2], f"python t.py {name.format(21)} --x 3"), twins=[(good, again)])
    assert part
    assert not part.refuses(agree=True)


def test_what_a_script_computes_in_another_order() -> None:
    """Words that only change places are computed as well."""
    lines, words = ("bash r.sh --tp 8", "bash r.sh --tp 6"), ("--dp 1 --pp 2", "--dp 2 --pp 1")
    good, made = (header(line, f"python t.py {word}") for line, word in zip(lines, words, strict=True))
    part = lost(good, made)
    assert part
    assert not part.refuses(agree=True)


def test_words_that_become_variables() -> None:
    """A script that exports what it is given hands it on; a variable that had the value before tells nothing."""
    before, after = {"SHLVL": "2"}, {"SHLVL": "2", "WD": "2"}
    good = header("bash r.sh", "python t.py", given=before)
    assert lost(good, header("bash r.sh 2", "python t.py", given=after)) is None
    assert lost(good, header("bash r.sh 2", "python t.py", given=before)) is not None


@pytest.mark.parametrize(
    ("without", "given", "message"),
    [
        ({}, {"SCALE": "2"}, ""),
        ({"SCALE": "1"}, {"SCALE": "1"}, "SCALE is what it is without the change in the process that trains"),
        ({"SCALE": "1"}, {"SCALE": "4"}, ""),  # made of it
        ({}, {}, "SCALE is not set in the process that trains"),
        ({}, {"FACTOR": "2"}, ""),  # under another name
        (None, None, ""),  # of an older recorder
        (None, {"SCALE": "1"}, ""),
    ],
)
def test_variables(without: dict[str, str] | None, given: dict[str, str] | None, message: str) -> None:
    """A variable was lost where the process has another value, which it has without the change too."""
    good = header("bash r.sh", "python t.py", {}, without)
    part = lost(good, header("bash r.sh", "python t.py", {"SCALE": "2"}, given))
    assert (part.text if part else "") == message


def test_a_variable_that_is_left_out() -> None:
    """One that a script sets again is there all the same."""
    good = header("bash r.sh", "python t.py", {"OLD": "1"}, {"OLD": "1"})
    assert lost(good, header("bash r.sh", "python t.py", {}, {})) is None
    part = lost(good, header("bash r.sh", "python t.py", {}, {"OLD": "1"}))
    assert part and part.text == "OLD is in the process that trains all the same"


def test_a_secret_is_not_asked_for() -> None:
    """It is not written down, so that its lack says nothing."""
    good, env = header("r", "python t.py"), {"API_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz"}
    assert lost(good, header("r", "python t.py", env)) is None


def test_a_worker_is_not_sure() -> None:
    """What multiprocessing starts has its words from the process that made it."""
    worker = "python -c 'from multiprocessing.spawn import spawn_main' --multiprocessing-fork"
    part = lost(header("python t.py", worker), header("python t.py --lr 1", worker))
    assert part and not part.sure


def test_words_of_a_line_that_saves_are_its_own() -> None:
    """GOOD may have trained by the line that saves: what stands there alone is none of the case's words."""
    good = header("python t.py", "python t.py --save-at 2", launched="python t.py --save-at 2")
    assert lost(good, header("python t.py --seed 2", "python t.py --seed 2")) is None

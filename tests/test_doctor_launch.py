"""The reader of launch scripts: the words that bash itself would pass on, with the line that each was written in."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from repro.doctor.artefacts.launches.scripts import LAUNCH
from repro.doctor.artefacts.shell_scripts.reading import read_script
from repro_golden.base.errors import ReproError

BASH = shutil.which("bash") or "/bin/bash"
FAKE = 'python3() { printf "%s\\0" "$@"; printf "\\1\\0"; }\nray() { shift 2; [ "$1" = -- ] && shift; "$@"; }\nset -f\n'


def by_bash(path: Path) -> list[list[str]]:
    """The words of each call of `python3`, by running the script in bash with a `python3` that prints them."""
    fake = path.parent / "fake.env"
    fake.write_text(FAKE)
    done = subprocess.run(
        [BASH, path.name],
        cwd=path.parent,
        env={"BASH_ENV": str(fake), "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        timeout=20,
        check=False,
    )
    calls: list[list[str]] = [[]]
    for word in done.stdout.decode(errors="replace").split("\0")[:-1]:
        if word == "\1":
            calls.append([])
        else:
            calls[-1].append(word)
    assert calls.pop() == []
    return calls


def by_reader(path: Path) -> list[list[str]]:
    """The words of each call of `python3`, by the reader alone."""
    reported = []
    for command in read_script(path.read_bytes(), path).commands:
        words = [word.text for word in command.words]
        while words and words[0] != "python3":
            words = words[1:]
        if words:
            reported.append(words[1:])
    return reported


SCRIPTS = {
    "arrays": (
        'A=( --load x "y z" )\nB=(${A[@]} --n 1)\nA+=(--more)\npython3 train.py "${A[@]}" ${B[@]} ${#A[@]} "${A[*]}"'
    ),
    "comments": ("A=(\n  --a 1 # --b 2\n  # --c 3\n  --d 4\n)\npython3 train.py ${A[@]} # --e"),
    "defaults": (
        "X=${X:-8}\nY=${Z-7}\nE=''\npython3 train.py --x $X --y ${Y} --z ${E:-6} --w ${E-5} --v \"${Q:-a b}\" ${Q:-a b}"
    ),
    "assigning defaults": (": ${PORT:=8265}\n: ${PORT:=1}\npython3 train.py --port $PORT"),
    "alternatives": ('A=()\nE=""\nX=1\npython3 train.py ${X:+--x $X} ${E:+--no} ${A[@]+--never} --end'),
    "quotes": "python3 train.py 'a $X' \"b \\\"c\\\" \\$d \\\\ \\e\" $'t\\tn\\x41' a\\ b c\"d\"'e'f \"\" ''",
    "continuations": ("python3 train.py \\\n  --a 1 \\\n  --b \"two \\\nlines\" --c 'kept \\\nas is'"),
    "splitting": ("X='--a  1   --b\t2'\npython3 train.py $X \"$X\" pre${X}post"),
    "appending": ('X=a\nX+=b\nX+=" c"\npython3 train.py $X "$X"'),
    "arithmetic": (
        "N=4\nM=3\npython3 train.py $((N * M)) $(( ($N + 1) / 2 )) $((-7 / 2)) $((7 % -4)) $((${N} > 3 && M < 2))"
    ),
    "conditions": (
        'M=co\nif [ "$M" = co ]; then A=(--colocate); else A=(--rollout-num-gpus 4); fi\npython3 train.py ${A[@]}'
    ),
    "empty or not": (
        'X=1\nif [[ -z $X ]]; then A=1; elif [ -n "$X" ] && [ $X -ge 1 ]; then A=2; fi\npython3 train.py $A'
    ),
    "patterns": ("M=qwen3-4B\nif [[ $M == qwen* ]]; then A=yes; fi\n[[ $M != glm* ]] && B=yes\npython3 train.py $A $B"),
    "case": ("M=b\ncase $M in\n a) X=1 ;;\n b|c) X=2 ;;\n *) X=3 ;;\nesac\npython3 train.py $X"),
    "loops": (
        "for lr in 1e-6 2e-6; do python3 train.py --lr $lr; done\n"
        "A=()\n"
        "for n in x y; do A+=(--$n); done\n"
        "python3 train.py ${A[@]}"
    ),
    "functions": (
        'run() { local X=in; python3 train.py --first "$1" "${@:2}" "${@:1:1}"; }\n'
        "X=out\n"
        "run a b c\n"
        'run2() { python3 train.py "$@" "$1"; }\n'
        'run2 "a b" c'
    ),
    "subshells": ("X=1\n( X=2; python3 train.py $X )\npython3 train.py $X"),
    "cutting": (
        "P=/a/b/run.tar.gz\n"
        "python3 train.py ${P##*/} ${P%/*} ${P%.gz} ${P%%.*} ${P#/a/} ${P/run/walk} ${P:1:3} ${P^^} ${#P}"
    ),
    "here-documents": (
        "H=1\n"
        "J=$(cat <<EOF\n"
        '{"a": "$H", "b": "\\$H"}\n'
        "EOF\n"
        ")\n"
        "K=$(cat <<'EOF'\n"
        "$H\n"
        "EOF\n"
        ")\n"
        'python3 train.py "$J" "$K"'
    ),
    "substitutions": (
        'D=$(dirname /a/b/c.sh)\nB=$(basename "$D"/x.sh .sh)\npython3 train.py $D $B $(echo one two) $(seq 2 2 8)'
    ),
    "slices": ('A=(a "b c" d)\npython3 train.py "${A[@]:1}" ${A[@]:0:2} "${A[@]:5}"'),
    "nothing": ('A=()\nE=\npython3 train.py "${A[@]}" ${A[@]} "$E" $E "x${A[@]}" "${A[*]}" "end"'),
    "indices": ("A=(a b c)\nA[1]=x\nI=2\npython3 train.py ${A[0]} ${A[1]} $A"),
    "submitted": ("A=(--x 1)\nray job submit -- python3 train.py ${A[@]}"),
    "braces stay": "python3 train.py --save /x/{rollout_id}.pt /y/{a}/b",
    "glued": ("P=80\nA=(http://h:$P/x [0]*$P+[1]*2)\npython3 train.py ${A[@]} http://h:$P/x a=$P,b"),
    "unset": ("X=1\nA=(1)\nunset X A\npython3 train.py --x ${X:-gone} ${A[@]}"),
    "eval": ('X="--a \'b c\'"\neval "python3 train.py $X"'),
    "bash -c": ("X=1\npython3 train.py $X\nbash -c 'echo'"),
    "set": ('set -- --a "b c"\npython3 train.py "$@"\nshift\npython3 train.py "$@" $1'),
    "or and and": ("true && X=1\nfalse && X=2\nfalse || Y=3\npython3 train.py $X $Y"),
    "exit": ("python3 train.py --a 1 --b 2 --c 3\nexit 0\npython3 train.py --never"),
    "env": ("python3 train.py --a\nFOO=1 BAR='x y' python3 train.py --b"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_reader_finds_the_words_that_bash_passes_on(tmp_path: Path, name: str) -> None:
    """For each construct of the shell that launch scripts use."""
    path = tmp_path / "run.sh"
    path.write_text(SCRIPTS[name] + "\n")
    words = by_bash(path)
    assert words
    assert by_reader(path) == words


VALUES = st.text(st.sampled_from(list("ab-=/.:0 \t\n'\"\\$`{}[](),#!&;|<>~@%+é")), max_size=8)


def double(text: str) -> str:
    """A text in double quotes."""
    return '"' + "".join("\\" + char if char in '$`"\\' else char for char in text) + '"'


def ansi(text: str) -> str:
    """A text in ``$'...'``; the grammar takes a backslash before the last quote for part of it."""
    return "$'" + "".join({"\n": "\\n", "\t": "\\t", "'": "\\'", "\\": "\\x5c"}.get(char, char) for char in text) + "'"


@st.composite
def scripts(draw: st.DrawFn) -> str:
    """Scripts of assignments, arrays and one call."""

    def quoted() -> str:
        return draw(st.sampled_from([shlex.quote, double, ansi]))(draw(VALUES))

    lines = ["S=''", "T=x", "A=()", "B=(b)"]
    for _ in range(draw(st.integers(0, 6))):
        name, array = draw(st.sampled_from("ST")), draw(st.sampled_from("AB"))
        lines.append(
            draw(
                st.sampled_from(
                    [
                        f"{name}={quoted()}",
                        f"export {name}={quoted()}{quoted()}",
                        f"{name}+={quoted()}",
                        f'{name}="$T"{quoted()}',
                        f"{array}=( {quoted()} {quoted()} )",
                        f"{array}+=({quoted()}\n  # a comment\n  $T)",
                        f'if [ "$S" = "" ]; then {name}={quoted()}; else {array}=({quoted()}); fi',
                        f'{array}+=("${{B[@]}}")',
                    ]
                )
            )
        )
    uses = [
        "$S",
        '"$S"',
        "${T}",
        '"${A[@]}"',
        "${A[@]}",
        'p"${B[@]}"q',
        '"${T:-d}"',
        "${S:-e f}",
        '"${B[*]}"',
        "x$T-y",
        '"${#A[@]}"',
    ]
    words = [draw(st.one_of(st.sampled_from(uses), st.just(""))) or quoted() for _ in range(draw(st.integers(0, 6)))]
    return "\n".join([*lines, f"python3 train.py --first {' '.join(words)} --last"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scripts())
def test_the_reader_agrees_with_bash_on_any_quoting(tmp_path: Path, source: str) -> None:
    """Random values in random quotes, in scalars and arrays, split and not split."""
    path = tmp_path / "run.sh"
    path.write_text(source + "\n")
    assert by_reader(path) == by_bash(path)


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=10), max_size=6))
def test_what_shlex_joins_is_read_back(words: list[str]) -> None:
    """Quoting round trip, for any text."""
    source = shlex.join(["python3", "train.py", *words]).encode()
    (command,) = read_script(source, Path("run.sh")).commands
    assert [word.text for word in command.words][2:] == words


PIECES = [
    "if",
    "then",
    "fi",
    "(",
    ")",
    "{",
    "}",
    "$(",
    "${",
    "A=(",
    "A+=(",
    "'",
    '"',
    "\n",
    " ",
    ";;",
    "case",
    "<<E",
    "$A",
    "f()",
    "\\",
    "[[",
    "&&",
    "`",
    "--x",
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=200), st.lists(st.sampled_from(PIECES), max_size=40).map(lambda x: "".join(x).encode())
    )
)
def test_any_bytes_are_a_launch_or_an_error(tmp_path: Path, source: bytes) -> None:
    """Garbage and torn scripts give a launch or a `ReproError`, in every form of file."""
    for name in ("run.sh", "flags.txt", "run.py"):
        path = tmp_path / name
        path.write_bytes(source)
        LAUNCH.fits(path)
        with contextlib.suppress(ReproError):
            list(LAUNCH.read(path))

"""Ways in which a launch script writes variables: the doctor knows what bash passes on, or that it does not know."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_doctor_launch import by_bash

from repro.doctor.artefacts.shell_scripts.reading import read_script
from repro.doctor.artefacts.shell_scripts.values import known

READ = {
    "local": "RB=32; f() { local RB=4; python3 train.py --x $RB; }; f",
    "declare in a function": "RB=32; f() { declare RB=4 Q=1; typeset RB; }; f",
    "local of itself": 'RB=32; f() { local RB=$((RB / 8)); python3 train.py --x "$RB"; }; f',
    "local before a branch returns": "RB=4; f() { local RB=1; if true; then RB=2; return; fi; }; f; RB=32",
    "a function's own, unset": "RB=32; f() { local RB; python3 train.py --x ${RB:-none}; }; f",
    "a function within a function": "RB=32; g() { RB=8; python3 train.py --x $RB; }; f() { local RB=4; g; }; f",
    "an array of a function": 'RB=1; A=(--x 1); f() { local A=(--y 2); }; f; python3 train.py "${A[@]}"',
    "exported in a function": "export RB=32; f() { local RB=4; }; f",
    "before a function": "RB=32; f() { python3 train.py --x $RB; }; RB=4 f",
    "arithmetic": "RB=4; ((RB=32))",
    "arithmetic that adds": "RB=4; ((RB+=28)); ((RB++)); ((--RB))",
    "let": "RB=4; let RB*=8",
    "a sequence": "RB=4; for i in {1..3}; do RB=$((RB*2)); done",
    "sequences": "RB=1; for i in {8..2..3} {a..c} {01..3} x{1,2}y{3,4} {,z}; do python3 train.py --x $i; done",
    "braces that are none": "RB=1; python3 train.py {} {a} '{1..3}' \"{a,b}\" {a.b} a{b",
    "braces": 'RB=1; X=1; python3 train.py {"a":1,"b":$X} p{a,"b c"}$X {a,{b,c}d} /x/{a,b}.{1..2}',
    "falling through": "RB=4; M=a; case $M in a) X=1 ;& b) RB=32;; c) RB=8;; esac",
    "testing on": "RB=4; M=a; case $M in a) X=1 ;;& b) RB=8;; a*) RB=32;; *) RB=2;; esac",
    "declare -i": "declare -i RB=4*8; declare -i Q; Q=3+4; Q+=1; python3 train.py --x $Q",
    "the background": "RB=32; RB=4 & wait",
    "a function in the background": "RB=32; f() { RB=4; }; f & wait",
    "break": "for RB in 8 32 64; do if [ $RB -gt 16 ]; then break; fi; done",
    "continue": "for i in 8 32 64; do [ $i = 64 ] && continue; RB=$i; done",
    "a value without spaces between": "IFS=,; X='a b,c'; RB=32; Y=(q w); python3 train.py \"${Y[*]}\"",
    "IFS of lines": "IFS=$'\\n\\t'; X='--a 1'; RB=32; python3 train.py $X",
    "an element that is unset": "A=(--x 1 --y); unset 'A[2]'; python3 train.py \"${A[@]}\"; RB=32",
    "positions": "f() { shift 2; RB=$1; }; f 1 2 32",
    "a place of an array": "A=(1 2 3); I=1; A[I+1]=32; RB=${A[-1]}; A[3]=x; python3 train.py ${A[$I]} ${A[3]} ${#A[@]}",
    "read, whole": (
        "read -r -d '' RB <<'EOF' || true\n  a b\nEOF\nread -rd '' X <<'EOF'\n c\\d\nEOF\n"
        'set -- "$X"; python3 train.py $1'
    ),
    "a backslash that joins": "RB=32; python3 train.py --a 32\\\n--b ${RB}\\\nx \"c\"\\\n'd'",
}
"""Scripts of which all is known; a last line passes on ``RB``."""

NOT_READ = {
    "several in one": "RB=4; ((X=1, RB=32))",
    "let with quotes": 'RB=4; let "X = RB = 32" Y=1',
    "an expansion that adds": "RB=4; : $((RB+=28))",
    "an expansion in a test": "RB=31; [ $((RB++)) -gt 4 ]; if [[ $((RB+=0)) -eq 3 ]]; then :; fi",
    "an index that adds": "RB=31; A=(1 2); : ${A[RB++ - 31]}",
    "a name that a backslash joins": "RB=4; python3 train.py --x $RB\\\nx",
    "exported where it stands before a call": "RB=4; f() { export RB=32; }; RB=8 f; python3 train.py $RB",
    "an argument that is none": "f() { RB=$2; python3 train.py ${2:-none} $#; }; f $(true) 4 32",
    "words that may be several": 'X=$(echo a b | cat); A=($X 4 32); RB=${A[1]}; python3 train.py ${#A[@]} "${A[@]:1}"',
    "a word of its own": 'X=$(echo a | cat); A=("$X" 32); RB=${A[1]}; python3 train.py --x ${#A[@]}',
    "a computed name": 'RB=4; N=RB; declare "$N=32"; printf -v $N 32',
    "printf": "RB=4; printf -v RB %d 32",
    "read": "RB=4; read -r X RB <<< 'a 32'",
    "read into an array": "A=(1); read -r -a A <<< '32 4'; RB=${A[0]}; set -- ${A[@]}; python3 train.py $#",
    "mapfile": 'RB=4; A=(1); mapfile -t A < <(seq 31 33); RB=${A[1]}; python3 train.py "${#A[@]}"',
    "getopts": "RB=4; set -- -r 32; while getopts r: o; do case $o in r) RB=$OPTARG;; esac; done",
    "a reference": "RB=4; declare -n N=RB; N=32",
    "a reference in a function": "RB=4; f() { local -n N=$1; N=32; }; f RB",
    "upper case": "declare -u RB; RB=ab",
    "keys": "declare -A M=([a]=4 [b]=32); RB=${M[b]}; M[c]=1; python3 train.py ${#M[@]}",
    "places": "A=([2]=32 [0]=4); RB=${A[2]}; B[3]=x; B[1]=y; python3 train.py ${B[@]}",
    "a loop": "X=4; Y=32; for ((i=0;i<3;i++)); do RB=$X; X=$Y; done; python3 train.py $i $X",
    "a loop that asks": "RB=1; X=1; while [ $((X*=2)) -lt 20 ]; do RB=$((RB*2)); done; python3 train.py $X",
    "a loop of several": "X=4; Y=4; Z=32; i=0; while ((i++ < 5)); do RB=$X; X=$Y; Y=$Z; done",
    "a loop that is left": "for i in 1 2 3; do RB=$i; if ls / >/dev/null; then break; fi; RB=9; done",
    "a function that is left": "f() { if ls / >/dev/null; then RB=32; return; fi; RB=4; }; f",
    "select": "select RB in 32 4; do break; done <<< 1",
    "a name that one branch makes its own": "RB=32; f() { if ls / >/dev/null; then local RB=4; fi; RB=8; }; f",
    "one that a branch takes away": "RB=4; if ls / >/dev/null; then unset RB; fi; RB=${RB:-32}",
    "positions of a branch": "set -- 4 32; if ls / >/dev/null; then shift; fi; RB=$1",
    "functions by branches": "if ls / >/dev/null; then f() { RB=32; }; else f() { RB=4; }; fi; f",
    "a function that calls itself": "RB=1; f() { if [ $RB -lt $(echo 20 | cat) ]; then RB=$((RB*2)); f; fi; }; f",
    "a shift that is computed": "set -- 1 2 32; shift $((1+1)); shift $(true); RB=$1",
    "what eval makes": "RB=4; X=$(echo 32 | cat); eval RB=$X",
    "a pattern that is computed": "RB=4; P=$(echo a | cat); case a in $P) RB=32;; a) RB=8;; esac",
    "patterns of ksh": (
        "shopt -s extglob\nRB=4; M=ab\nif [[ $M == @(ab|c) ]]; then RB=32; fi\ncase $M in @(ab|x)) ;; *) RB=8;; esac"
    ),
    "an argument that is counted": "f() { RB=$(( $1 * 8 )); }; f 4; python3 train.py $((010)) $((!3 < 5)) $((2**3))",
    "seconds": "SECONDS=100; RB=32; python3 train.py --x $((SECONDS/50))",
    "what may be empty": "X=$(true); RB=${X:+4}; RB=${RB:-32}",
}
"""Scripts of which something is not read through."""

LAST = "\npython3 train.py --rollout-batch-size $RB --end\n"


@pytest.mark.parametrize("name", READ)
def test_what_is_read_through_is_what_bash_passes_on(tmp_path: Path, name: str) -> None:
    """Each word is known, and bash's."""
    path = tmp_path / "run.sh"
    path.write_text(READ[name] + LAST)
    calls = by_bash(path)
    commands = [command.words for command in read_script(path.read_bytes(), path).commands]
    assert [[word.text for word in words[1:]] for words in commands if words[0].text == "python3"] == calls
    assert all(known(word.value) for words in commands for word in words)


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_not_read_through_is_not_known(tmp_path: Path, name: str) -> None:
    """Each word that the doctor knows is bash's, and there are as many where it knows all."""
    path = tmp_path / "run.sh"
    path.write_text(NOT_READ[name] + LAST)
    calls = by_bash(path)
    commands = [command.words[1:] for command in read_script(path.read_bytes(), path).commands]
    reported = [words for words in commands if words and words[0].text == "train.py"]
    assert len(reported) == len(calls)
    for words, theirs in zip(reported, calls, strict=True):
        if len(words) == len(theirs):
            assert [word.text for word in words if known(word.value)] == [
                other for word, other in zip(words, theirs, strict=True) if known(word.value)
            ]
        else:
            assert not all(known(word.value) for word in words)

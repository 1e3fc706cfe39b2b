"""Scripts that the doctor's reader and bash itself both read: what the reader says is known, bash says too."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from test_doctor_launch import BASH

from repro.doctor.artefacts.shell_scripts.reading import read_script
from repro.doctor.artefacts.shell_scripts.values import Word, known

FOLLOWED = [
    # what a list sets is not asked again
    'A=1; B=1; R=; [ "$A" = "$B" ] && B=4 || { R=7; }; R=$B',
    'G=; [ -z "$G" ] && [ -n "$G" ] || G=256; R=$G',
    # what leaves a function, from within loops and branches
    "f() { for i in 1 2 3; do if [ $i = 2 ]; then R=$i; return 0; fi; done; R=9; }; f",
    'f() { for s in 16:128 32:256; do if [ "${s%%:*}" = "$1" ]; then R=${s##*:}; return 0; fi; done; R=9; }; f 32',
    "f() { if [ $1 = a ]; then if [ $2 = b ]; then R=1; return; fi; fi; R=2; }; f a b",
    "f() { case $1 in a) R=1; return;; esac; R=2; }; f a; S=$R; f b; R=$S$R",
    "f() { [ $1 = a ] && return || R=5; R=2; }; R=1; f a",
    "f() { [ $1 = a ] || { R=7; return 0; }; R=2; }; R=1; f b",
    "f() { for i in 1 2; do for j in 1 2; do R=$i$j; [ $j = 2 ] && return; done; done; }; f",
    "S=; f() { break; R=2; }; for i in 1 2; do f; S=$S$i; done; R=$R$S",
    # and from loops
    "for i in 1 2; do for j in 1 2; do [ $j = 2 ] && break 2; R=$i$j; done; done; R=$R$i$j",
    "for i in 1 2; do for j in 1 2; do continue 2; done; R=x; done; R=${R:-n}$i$j",
    "R=; for i in 1 2; do for j in 1 2; do for k in 1 2; do [ $j$k = 12 ] && continue 2; R=$R$i$j$k; done; done; done",
    "R=; for i in 1 2; do for j in 1 2; do for k in 1 2; do R=$R$i$j$k; [ $i = 1 ] && break 2; done; done; R=$R-; done",
    "for i in 1 2; do for j in 1 2; do break 9; done; R=x; done; R=${R:-n}$i$j",
    "for i in 1 2; do for j in a b; do if [ $j = b ]; then break; fi; R=$i$j; done; done",
    "R=n; while false; do R=1; done; until true; do R=2; done; while [ 1 = 2 ]; do R=3; done",
    "R=n; for i in; do R=1; done",
    # patterns
    'S=-run; X=32-run; R=${X%$S}${X%${S}}${X%"$S"}',
    'A=base-; B=; X=base-256; R=${X/$A/$B}${X//"$A"/"$B"}',
    'P="*.c"; X=a.c; R="${X%$P}-${X%"$P"}-${X#"a"}"',
    'S="-[0-9]*"; X=run-12; R=${X%$S}',
    "X=aXbXc; R=${X%X*}-${X%%X*}-${X#*X}-${X##*X}-${X#[^b]}-${X%'*'}-${X#\\a}",
    'X=a/b/c; R=${X##*/}-${X%/*}-${X//\\//_}-${X/b}-${X//"/"/+}',
    "case b in [^a]) R=1;; *) R=2;; esac",
    "P='a*'; case abc in \"$P\") R=1;; $P) R=2;; esac; if [[ abc == $P ]]; then R=3$R; fi",
    'P=\'a*\'; if [[ abc == "$P" ]]; then R=1; else R=2; fi; if [[ abc == a"b"* ]]; then R=3$R; fi',
    "case '*' in '*') R=1;; *) R=2;; esac; case a\\* in a\\*) R=3$R;; esac",
    # declarations
    "R=9; export A=1 B=$R R=2 C=$R; R=$R$B$C",
    "A=9; declare A=1 B=$A; R=$A$B; readonly C=3 D=$A; R=$R$D.",
    "f() { local A=1 B=$A; R=$A$B; }; A=9; f",
    "A=(9); declare A=(1) B=$A; R=$B",
    "B=1; declare B=2 C=($B); R=${C[0]}",
    # functions that call themselves
    "f() { [ $1 -le 256 ] && return; R=$(($1 / 2)); f $R; }; f 1024",
    "f() { if [ $1 -le 32 ]; then R=$1; else f $(($1 / 2)); fi; }; f 128",
    "f() { [ $1 -le 0 ] && return; R=$1; f $(($1 - 1)); }; f 3",
    # tests
    "X=; if [ -n $X ]; then R=1; else R=2; fi; if [ -z $X ]; then R=3$R; fi",
    "X=a; Y=b; if [ $X = a -a $Y = b ]; then R=1; else R=2; fi; if [[ $X = a && $Y = b ]]; then R=3$R; fi",
    "if [ a = b -o c = c ]; then R=1; fi; if [[ a = b || c = c ]]; then R=2$R; fi",
    "if [ ! a = b -a c = c ]; then R=1; else R=2; fi",
    "if [[ ! a = b && ( c = d || e = e ) ]]; then R=1; else R=2; fi",
    "if [[ ! ( a = a && b = c ) ]]; then R=1; else R=2; fi",
    'X=\'b = b\'; if [ "$X" ]; then R=1; fi; if [[ a != "$X" && -n $X ]]; then R=2$R; fi',
    "if [ 010 -eq 10 ]; then R=1; else R=2; fi",
    # the rest
    "f() { unset R; R=5; }; R=1; f",
    "set -- 1 2; shift 3; R=$1$2",
    "X=${B:-a\\ b}; R=${X}; set -- ${B:-a\\ b} ${B:-c d}; R=$R-$1-$2-$3",
    "R=\"${B:-'q'}\"-${B:-'q'}",
    'set -- a "b c"; R="${X:-"$1"}"',
    "R=4; R=5 >/dev/null",
    "f() { A=a; X=$A-$1; local Y=$A-$2.x Z=$A/$B-$3; set -- $A-$1$2; R=$X-$Y-$Z-$1; }; B=b; f 1 2 3",
    "B=b; A=(x -$B:$B/c a:$B/c\n b=$B-$B); R=${A[0]}${A[1]}${A[2]}${A[3]}",
    "A=(1 2); A=7; R=${A[0]}${A[1]}${#A[@]}",
    "A=(1 2); f() { R=${A[1]:-n}; }; A=9 f; R=$R${A[1]}",
    "A=1; A=5 R=$A >/dev/null",
    "R=1; R+=2 >/dev/null",
    "R=(1 2)\nR=(5) >/dev/null",
    "f() { R=2; }; ( f() { R=3; }; unset -f f ); f",
    "A=(1 2); i=0; while [ $i -lt 2 ]; do A+=(x); i=$((i+1)); done; R=${A[1]}",
    "X=1; R=`echo 3`",
    "if true; then R=3; [ $R = 4 ] || R=5; fi",
]
"""Scripts of which the reader knows all that R is at their end."""

READ = [
    'A=1; B=1; R=; [ "$A" = "$B" ] && B=4 || R=7',
    'R=; [ -z "$R" ] && R=256 || R=$((R * 2))',
    'G=; if [ -z "$G" ] && G=256 && true; then R=$G; else R=1; fi',
    'G=; while [ -z "$G" ] && G=256; do R=1; done',
    "f() { if [ $1 = a ]; then if [ $2 = b ]; then return; fi; fi; R=2; }; R=1; f a b",
    "f() { for i in 1 2; do if ls / >/dev/null; then R=5; break; fi; R=9; return; done; R=2; }; f",
    "f() { for i in 1 2; do if ls / >/dev/null; then R=5; continue; fi; R=9; return; done; S=$R; }; f; R=$S",
    "for i in 1 2; do for j in 1 2; do ls / >/dev/null && break 2; R=$i$j; done; R=x$i; done; R=${R:-n}",
    "R=1; while [ $# -gt 0 ]; do R=2; shift; done",
    "R=1; while [[ -n $NEVER ]]; do R=2; done",
    "i=0; while true; do i=$((i+1)); [ $i -ge 3 ] && break; done; R=$i",
    "f() { [ $1 -le 0 ] && return; R=$1; f $(($1 - 1)); }; f 40",
    "f() { if [ $1 -le $(echo 0 | cat) ]; then R=$1; else f $(($1 - 1)); fi; }; f 4; R=${R:-n}",
    "f() { if [ $1 -gt 0 ]; then g $(($1 - 1)); fi; }; g() { R=$1; f $1; }; f 3",
    "X=; if [ $X = a ]; then R=1; else R=2; fi",
    "X=; if [ $X != a ]; then R=1; else R=2; fi",
    "X='a b'; if [ $X = a ]; then R=1; else R=2; fi",
    "if [[ 010 -eq 8 ]]; then R=1; else R=2; fi",
    "shopt -s nocasematch; if [[ ABC == abc ]]; then R=1; else R=2; fi",
    "shopt -s nocasematch; case ABC in abc) R=1;; *) R=2;; esac",
    "shopt -s lastpipe; R=1; echo 3 | read R",
    "shopt -s lastpipe; R=1; echo 3 | { R=3; }",
    "R=1; trap 'R=9' ERR; false",
    "R=1; trap 'R=9' DEBUG; R=2; :",
    "t() { R=9; }; R=1; trap t ERR; false",
    "R=1; time R=2",
    "f() { R=2; }; R=1; time f",
    "R=1; builtin eval R=2; command export R=3; builtin declare R=4",
    "L=/dev/null; R=1; R=2 >$L",
    "f() { local R=2; g; S=${R:-none}; }; g() { unset R; }; R=1; f; R=$S$R",
    "f() { local R; S=${R:-n}; }; R=1; R=2 f; R=$S",
    "f() { unset R; S=${R:-n}; }; R=1; R=2 f; R=$S",
    "f() { local R=3; g; S=$R; }; g() { local R; R=${R:-none}; }; f; R=$S",
    "R=$((18446744073709551615))",
    "R=$((9223372036854775807 + 1))",
    'set -- a "b c"; R="${X:-$@}"',
    "R=\"${B:-'$B'}\"",
    "R=`echo \\`echo 1\\``",
    "set +B; R={a,b}; set -- {a,b}; R=$1",
    "X=ab; R=${X%@(b)}${X/a?/c}${X#[[:alpha:]]}${X/#a/c}${X/%b/c}",
    "X=a; R=${X/a/[&]}",
    "P='['; X='a['; R=${X%$P}; P='\\*'; X='a*'; R=$R${X%$P}",
    "case a5 in a[[:digit:]]) R=1;; *) R=2;; esac",
    "if ls / >/dev/null; then A=(--x 1); else A=(--x 2); fi; R=${A[1]}",
    "set -- a b c; R=${@:0:1}",
    "set -- a b; if ls / >/dev/null; then shift; fi; R=${1:-5}${2:-6}",
    "f() { shift $(echo 1 | cat); R=${1:-5}; }; f a b",
    "X=ab; if [[ $X =~ ^a ]]; then R=1; else R=2; fi",
    "X=10; Y=9; if [[ $X < $Y ]]; then R=1; else R=2; fi",
    "if [ 1_0 -eq 10 ] 2>/dev/null; then R=1; else R=2; fi",
    "Z=3; if [[ Z -eq 3 ]]; then R=1; else R=2; fi",
    "R=1; for i in $(echo a b | cat); do R=$i; done",
    "i=5; X=ab; R=${X%$((i++))}$i",
    "f() { if ls /never 2>/dev/null; then return; fi; R=2; }; R=1; f",
    'if [ -z "${NEVER:-}" ]; then R=1; else R=2; fi',
    "R=1; if ! ls / >/dev/null; then R=2; exit; fi",
    # what more than two ways leave
    "case $(echo b) in a) A=(1);; b) A=(2);; *) A=(1);; esac; R=${A[0]}",
    "A=(2); if ls /never; then A=(1); elif ls /never; then A=(1); fi; R=${A[0]}",
    "A=(1); if ls / >/dev/null; then A=(2); fi; if ls /never; then A=(1); fi; R=${A[0]}",
    "A=(1 2); if ls /never; then A=(3); elif ls / >/dev/null; then A=(1 2 3); fi; R=${#A[@]}${A[2]:-n}",
    "if ls /never; then A=5; elif ls /never; then A=5; fi; R=${A:-n}",
    "export R=1; if ls /never; then unset R; elif ls /never; then unset R; fi; R=${R:-n}",
    "A=(1); if ls / >/dev/null; then A=(2); else A=(3); fi; B=(${A[0]}); if ls /never; then B=(1); fi; R=${B[0]}",
    "if ls /never; then declare -i R; fi; R=1+2",
    "R=1; if ls /never; then f() { R=2; }; fi; f",
    "R=1; f() { R=2; }; if ls / >/dev/null; then unset -f f; fi; f",
    # what a further turn of a loop leaves
    "A=(1); i=0; while [ $i -lt 2 ]; do if [ $i = 1 ]; then A=(2); fi; i=$((i+1)); done; R=${A[0]}",
    "A=(1); i=0; while [ $i -lt 2 ]; do if [ $i = 1 ]; then A+=(2); fi; i=$((i+1)); done; R=${#A[@]}",
    "A=(1); i=0; while [ $i -lt 2 ]; do if [ $i = 1 ]; then unset A; fi; i=$((i+1)); done; R=${A[0]:-n}",
    "A=(1); i=0; while [ $i -lt 2 ]; do if [ $i = 1 ]; then read -a A <<< '2 3'; fi; i=$((i+1)); done; R=${A[0]}",
    "A=(1); f() { A=(2); }; for ((i=0;i<2;i++)); do if ((i == 1)); then f; fi; done; R=${A[0]}",
    # other writers
    "A=1; set -- '1 2'; time R=$A-$1",
    "R=(1); mapfile <<< 2; R=${MAPFILE[0]:-n}",
    "REPLY=1; read <<< 5; R=$REPLY",
    "readonly A=1; unset A; R=${A:-5}",
    "A=(1); : ${A[1]:=5}; R=${#A[@]}",
    "A=(1 2 3); let A[0]+=1; A[0]=5; R=${A[1]}",
    "A=1; f() { R=$A; }; A+=2 f",
]
"""Scripts that the reader need not follow: then R is not known."""

LAST = '\npython3 "$R"\n'


@pytest.fixture(scope="module")
def by_bash(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What bash passes on at the end of each script, in a shell of its own, all of one process."""
    folder = tmp_path_factory.mktemp("scripts")
    lines = ['python3() { printf "%s\\0" "$@"; }', "set -f"]
    for number, script in enumerate([*FOLLOWED, *READ]):
        (folder / f"{number}.sh").write_text(script + LAST)
        lines.append(f'( . "./{number}.sh" ); printf "\\1\\0"')
    done = subprocess.run(
        [BASH, "-c", "\n".join(lines)],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    words = [part.split("\0")[:-1] for part in done.stdout.decode(errors="replace").split("\1\0")[:-1]]
    return dict(zip([*FOLLOWED, *READ], words, strict=True))


def by_reader(script: str, *, taken: bool | None = True) -> Word:
    """R at the end of a script."""
    read = read_script((script + LAST).encode(), Path("run.sh"), taken=taken)
    assert not read.cut
    (word,) = read.commands[-1].words[1:]
    return word


@pytest.mark.parametrize("script", FOLLOWED)
def test_what_is_followed_is_known_and_what_bash_says(by_bash: dict[str, list[str]], script: str) -> None:
    """All that the script sets is known, and bash's."""
    word = by_reader(script)
    assert [word.text] == by_bash[script]
    assert known(word.value)


@pytest.mark.parametrize("script", READ)
def test_what_is_known_is_what_bash_says(by_bash: dict[str, list[str]], script: str) -> None:
    """What all readings know to be the same is bash's; where they differ, nothing is certain."""
    words = [by_reader(script, taken=taken) for taken in (True, False, None)]
    if all(known(word.value) and word.text == words[0].text for word in words):
        assert by_bash[script] == [words[0].text]

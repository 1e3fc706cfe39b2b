"""Launch scripts and argv, read into what they would start."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from repro.doctor.artefacts.kinds import Flag, Launch, NotRead, Reader, Variable
from repro.doctor.artefacts.launches.environment import ASSIGNED, Placed, environment
from repro.doctor.artefacts.launches.python import Started, started
from repro.doctor.artefacts.launches.system import ENTRY, MODULE, of_trainer, system_of
from repro_golden.base.checks import Where
from repro_golden.base.errors import ReproError

if TYPE_CHECKING:
    from repro.doctor.artefacts.shell_scripts.script import Command, Script, Setting

__all__ = ["LAUNCH", "launch_of_argv", "launch_of_command", "launch_of_program", "read_launch"]

_LARGEST = 1 << 20
_SHELLS = (".sh", ".bash")
_LISTS = (".txt", ".args")
_FLAG = re.compile(r"--[A-Za-z]")
_SHEBANG = re.compile(rb"#!.*\b(ba|da|z|k)?sh\b")
_LINE = re.compile(r"-[a-z]*c")
"""The option of a shell behind which it reads a line: ``bash -lc``."""
_STARTS = re.compile(rb"train\w*\.py|-m (slime|miles|relax)\b|torchrun|torch\.distributed|ray job submit")


class NoFlagsError(ReproError):
    """A Python file that starts a trainer with nothing that can be read."""


# -- which files are


def _fits(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_LARGEST)
    if b"\0" in head:
        return False
    if path.suffix in _SHELLS or _SHEBANG.match(head):
        return b"--" in head and _STARTS.search(head) is not None
    if path.suffix in _LISTS:
        lines = [line.strip() for line in head.decode(errors="replace").splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        return bool(lines) and bool(_FLAG.match(lines[0])) and sum(bool(_FLAG.match(x)) for x in lines) * 2 > len(lines)
    if path.suffix == ".py":
        return b"execute_train(" in head and re.search(rb"[\"' ]--[a-z]", head) is not None
    return False


def _read(path: Path) -> Iterable[Launch | NotRead]:
    try:
        return _launches(path, None)
    except NoFlagsError:
        return []  # a module that hands on what others build


LAUNCH = Reader("launch script", _fits, _read)
"""Shell scripts, files of flags and Python launchers."""


def read_launch(path: Path, arguments: Sequence[str] | None = None) -> Launch:
    """Read a launch script: what it starts, of several trainers that with the most flags.

    Args:
        path: A shell script, a file of flags, or a Python launcher.
        arguments: What the script is started with; None where that is not known.

    Raises:
        ReproError: If it cannot be read, or starts no trainer.
    """
    return _first(path, _launches(path, arguments))


def _first(path: Path, launches: Sequence[Launch | NotRead]) -> Launch:
    for launch in launches:
        if isinstance(launch, Launch):
            return launch
        raise ReproError(f"{path}: {launch.reason}")
    raise ReproError(f"{path} starts nothing")


def _launches(path: Path, arguments: Sequence[str] | None) -> list[Launch | NotRead]:
    """All that a launch script starts, that with the most flags first, and what of it was not read."""
    try:
        with path.open("rb") as file:
            source = file.read(_LARGEST + 1)
    except OSError as error:
        raise ReproError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(source) > _LARGEST:
        raise ReproError(f"{path} is larger than 1 MiB: no launch script")
    if b"\0" in source:
        raise ReproError(f"{path} is no text")
    text = source.decode(errors="replace")
    if path.suffix == ".py":
        call = started(text, path)
        if call is None:
            raise NoFlagsError(f"{path} gives execute_train no flags that can be read")
        other = started(text, path, taken=False, line=call.line) if call.doubted else None
        return [_also(_of_call(call, text, path), other and _of_call(other, text, path))]
    if path.suffix in _LISTS and not _SHEBANG.match(source):
        return [launch_of_command(path, _listed(text, path), text=text)]
    return _script(source, text, path, arguments)


def _of_call(call: Started, text: str, path: Path) -> Launch:
    cluster = (("ray", "start", "--head", "--num-gpus", call.gpus),) if call.gpus else ()
    launch = launch_of_command(path, call.argv, text=text, env=call.env)
    return replace(launch, commands=cluster, submitted=True)


def _also(launch: Launch, other: Launch | None) -> Launch:
    """A launch that may also be another, by the branches that are taken."""
    return launch if other is None or other == launch else replace(launch, otherwise=other)


def launch_of_argv(argv: Sequence[str]) -> Launch:
    """What a command line starts.

    Args:
        argv: The words behind ``--``: ``python train.py --x 1``, flags alone, ``bash run.sh`` or ``bash -c LINE``.

    Raises:
        ReproError: If it names a script that cannot be read, or starts no trainer.
    """
    from repro.doctor.artefacts.shell_scripts.script import handed_on, is_shell, line_behind
    from repro.doctor.artefacts.shell_scripts.values import Part, Word

    if argv and is_shell(argv[0]):
        operands = list(itertools.dropwhile(lambda word: word.startswith("-"), argv[1:]))
        if operands and not any(_LINE.fullmatch(word) for word in argv[1 : -len(operands)]):
            return read_launch(Path(operands[0]), operands[1:])
    parsed = [Word((Part(word),), "argv", 1) for word in argv]
    if parsed and ((is_shell(argv[0]) and line_behind(parsed)) or handed_on(parsed)[1]):
        line = shlex.join(argv)
        return _first(Path("argv"), _script(line.encode(), line, Path("argv"), None))
    placed = [(word, Where("argv", item=word)) for word in argv]
    return launch_of_command(Path("argv"), placed, text=shlex.join(argv))


def launch_of_program(path: Path) -> Launch | None:
    """What starting a Python program without flags starts; None of a trainer, which takes flags, or of no text."""
    with path.open("rb") as file:
        head = file.read(_LARGEST)
    if b"\0" in head:
        return None
    command = [(word, Where(str(path), 1, item=word)) for word in ("python3", path.name)]
    launch = launch_of_command(path, command, text=head.decode(errors="replace"))
    return None if launch.trainer else launch


def _listed(text: str, path: Path) -> list[Placed]:
    placed: list[Placed] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip().removesuffix("\\")
        try:
            tokens = shlex.split(line, comments=True)
        except ValueError:
            tokens = line.split()
        placed += [(word, Where(str(path), number, item=word)) for word in tokens]
    return placed


# -- shell scripts


def _script(source: bytes, text: str, path: Path, arguments: Sequence[str] | None) -> list[Launch | NotRead]:
    # tree-sitter is of no use to `--list` and to other kinds
    from repro.doctor.artefacts.shell_scripts.reading import read_script

    script = read_script(source, path, arguments)
    started = _started_by(script, text, path)
    launches: list[Launch | NotRead] = [launch for _, launch in started]
    if script.doubts:
        without = read_script(source, path, arguments, taken=False)
        readings = [without]
        if max(script.doubts, without.doubts) > 1:  # these two are not all ways
            readings.append(read_script(source, path, arguments, taken=None))
        # of several in one place, in a loop, the first
        others = [dict(reversed(_started_by(reading, text, path))) for reading in readings]
        launches = [
            replace(
                _also(launch, others[0].get(place)),
                shared=others[1].get(place) if others[1:] else None,
                doubted=not all(place in starts for starts in others),
            )
            for place, launch in started
        ]
    if not launches and script.broken:
        raise ReproError(f"{path} breaks off, or is no shell script: no command of it could be read")
    if not launches:
        launches.append(NotRead(path, "it starts no trainer: no command of it that could be read has flags"))
    if script.cut:
        launches.append(NotRead(path, f"reading it ended early ({script.cut}): what follows was not examined"))
    return launches


def _started_by(script: Script, text: str, path: Path) -> list[tuple[Where, Launch]]:
    """What a script starts, that with the most flags first, and where the word stands that each begins with."""
    commands = [
        [(word.text, Where(word.path, word.line, item=word.text)) for word in command.words]
        for command in script.commands
    ]
    ranked: list[tuple[tuple[bool, int, int], Command, list[Placed]]] = []
    for number, (command, placed) in enumerate(zip(script.commands, commands, strict=True)):
        count = sum(bool(_FLAG.match(word)) for word, _ in _trainer(placed)[1])
        if count:
            ranked.append(((_entry(placed) is not None, count, number), command, placed))
    ranked.sort(key=lambda entry: entry[0], reverse=True)
    return [
        (
            placed[0][1],
            replace(
                launch_of_command(
                    path,
                    placed,
                    text=text,
                    env={name: value for name, value in _exports(command).items() if value.origin != "unset"},
                    settings=[(setting.name, _variable(setting)) for setting in script.settings],
                    sources={str(path): text},
                    hidden=script.hidden,
                ),
                commands=tuple(tuple(word for word, _ in other) for other in commands if other is not placed),
                missing=tuple(Where(word.path, word.line, "source", word.text) for word in script.missing),
                joined=tuple(where for word, where in placed if word in {each.text for each in script.joined}),
                shortened=tuple(Where(word.path, word.line, word.text) for word in command.shortened),
                returns=tuple(Where(word.path, word.line, "CR", word.text) for word in script.returns),
            ),
        )
        # beside what starts a trainer by its name, no other program's flags are a trainer's
        for number, ((named, _, _), command, placed) in enumerate(ranked)
        if named or number == 0
    ]


def _exports(command: Command) -> dict[str, Variable]:
    """What a command gets from the script."""
    exported = {name: _variable(setting) for name, setting in command.exported.items()}
    return exported | {setting.name: _variable(setting) for setting in command.settings}


def _variable(setting: Setting) -> Variable:
    value = "".join(part.text for part in setting.value or ())
    origin = "unset" if setting.value is None else "prefix" if setting.prefix else "export"
    where = Where(setting.where.path, setting.where.line, setting.name, value)
    return Variable(value, origin, where)  # type: ignore[arg-type]


# -- words


def launch_of_command(
    path: Path,
    command: Sequence[Placed],
    *,
    text: str,
    env: Mapping[str, Variable] | None = None,
    settings: Sequence[tuple[str, Variable]] = (),
    sources: Mapping[str, str] | None = None,
    hidden: bool = False,
) -> Launch:
    """A launch by its command's words.

    Args:
        path: What it was read from.
        command: The whole command, with what stands in front of the trainer.
        text: The script.
        env: Exported variables.
        settings: All settings, in order.
        sources: Texts by path, to find lines of a runtime environment in.
        hidden: Whether variables are exported that are not known.
    """
    front, trainer = _trainer(command)
    flags = _flags(trainer)
    more, others = environment(path, front, flags, sources or {})
    variables = dict(env or {}) | dict(more)
    start = _entry(command)
    entry = "" if start is None else command[start][0]
    program = [word for word, _ in front if word.endswith(".py")]
    entry = ENTRY.match(entry)[1] if (ENTRY.match(entry)) else entry or (program[-1] if program else "")  # type: ignore[index]
    argv = [word for word, _ in _command(command)]
    return Launch(
        path,
        tuple(argv),
        {flag.name: flag for flag in flags},
        tuple(flags),
        variables,
        (*settings, *more),
        system_of(path, text, entry, argv, flags, variables),
        of_trainer(path, text, entry, argv, flags),
        entry,
        _submits(front),
        text=text,
        hidden=hidden or others,
    )


def _entry(placed: Sequence[Placed]) -> int | None:
    """Where the trainer's program stands."""
    for number, (word, _) in enumerate(placed):
        if number and placed[number - 1][0] == "-m" and MODULE.match(word):
            return number
        if ENTRY.match(word) and not word.startswith("-"):
            return number
    return None


def _command(placed: Sequence[Placed]) -> Sequence[Placed]:
    """The command without what submits it and variables in front of it."""
    names = [word for word, _ in placed]
    if "--" in names and names[0].rpartition("/")[2] in ("ray", "srun", "docker", "kubectl", "accelerate"):
        placed = placed[names.index("--") + 1 :]
    while placed and (ASSIGNED.match(placed[0][0]) or placed[0][0] in ("env", "exec", "nohup", "time")):
        placed = placed[1:]
    return placed


def _trainer(placed: Sequence[Placed]) -> tuple[Sequence[Placed], Sequence[Placed]]:
    """The words up to the trainer's program, and those behind it: its own flags."""
    start = _entry(placed)
    if start is None:
        names = [word for word, _ in placed]
        begin = names.index("--") + 1 if "--" in names else 0
        scripts = [n for n in range(begin, len(names)) if names[n].endswith(".py") and not names[n].startswith("-")]
        first = [n for n in range(begin, len(names)) if _FLAG.match(names[n])]
        start = scripts[0] if scripts else (first[0] - 1 if first else len(names) - 1)
    return placed[: start + 1], placed[start + 1 :]


def _submits(front: Sequence[Placed]) -> bool:
    names = [word for word, _ in front]
    return any(names[n : n + 3] == ["ray", "job", "submit"] for n in range(len(names)))


_SOME = re.compile(r"\$(@|\*|\{\w+\[[@*]\][^}]*\}|\{?\w*(ARGS|FLAGS|OPTS|OPTIONS|PARAMS)\w*\}?)", re.IGNORECASE)
"""What is not known and may hold flags: it is nobody's value."""


def _flags(placed: Sequence[Placed]) -> list[Flag]:
    flags: list[tuple[str, list[str], Where]] = []
    for word, where in placed:
        if _FLAG.match(word):
            name, equals, value = word.partition("=")
            flags.append((name, [value] if equals else [], where))
        elif flags and not _SOME.fullmatch(word) and word != "--":
            flags[-1][1].append(word)
    return [
        Flag(name, tuple(values), Where(where.path, where.line, name, " ".join(values)[:200]))
        for name, values, where in flags
    ]

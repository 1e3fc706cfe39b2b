"""What a program's numbers may rest on beside its code, its case and its rollouts, each as a digest.

A probe's key holds it, so that nothing is used again that was found under other circumstances.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import itertools
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from repro_golden.base.canonical import canonical_json, digest
from repro_golden.case.file import Case
from repro_golden.recording.attach.code.identify import marked, sources
from repro_golden.replay.children import base_environment
from repro_golden.subjects.argv import interpreter, variables_of
from repro_golden.subjects.caches import implicit_files
from repro_golden.subjects.watched import Snapshot

__all__ = [
    "CANNOT_MATTER",
    "folders_of",
    "found_outside",
    "outside_of",
    "paths_in",
    "seen",
    "variables_digest",
    "variables_of_key",
]

CANNOT_MATTER: Mapping[str, tuple[str, ...]] = {
    "terminals and their colours": (
        "ALACRITTY_LOG", "ALACRITTY_SOCKET", "ALACRITTY_WINDOW_ID", "CLICOLOR", "CLICOLOR_FORCE", "COLORFGBG",
        "COLORTERM", "COLUMNS", "FORCE_COLOR", "ITERM_PROFILE", "ITERM_SESSION_ID", "KITTY_INSTALLATION_DIR",
        "KITTY_LISTEN_ON", "KITTY_PID", "KITTY_PUBLIC_KEY", "KITTY_WINDOW_ID", "KONSOLE_DBUS_SERVICE",
        "KONSOLE_DBUS_SESSION", "KONSOLE_DBUS_WINDOW", "KONSOLE_VERSION", "LC_TERMINAL", "LC_TERMINAL_VERSION",
        "LINES", "LSCOLORS", "LS_COLORS", "NO_COLOR", "STY", "TERM", "TERMCAP", "TERM_FEATURES", "TERM_PROGRAM",
        "TERM_PROGRAM_VERSION", "TERM_SESSION_ID", "TMUX", "TMUX_PANE", "TMUX_PLUGIN_MANAGER_PATH", "TMUX_TMPDIR",
        "VTE_VERSION", "WEZTERM_CONFIG_DIR", "WEZTERM_CONFIG_FILE", "WEZTERM_EXECUTABLE", "WEZTERM_EXECUTABLE_DIR",
        "WEZTERM_PANE", "WEZTERM_UNIX_SOCKET", "WINDOWID", "WT_PROFILE_ID", "WT_SESSION", "ZELLIJ", "ZELLIJ_PANE_ID",
        "ZELLIJ_SESSION_NAME",
    ),
    "shells, their prompts and where they stand": (
        "BASH_SILENCE_DEPRECATION_WARNING", "CONDA_PROMPT_MODIFIER", "CONDA_SHLVL", "HISTCMD", "HISTCONTROL",
        "HISTFILE", "HISTFILESIZE", "HISTIGNORE", "HISTSIZE", "HISTTIMEFORMAT", "OLDPWD", "PROMPT_COMMAND",
        "PROMPT_DIRTRIM", "PS[0-4]", "PWD", "SHLVL", "VIRTUAL_ENV_PROMPT", "ZSH", "ZSH_CACHE_DIR", "ZSH_CUSTOM", "_",
    ),
    "sessions and desktops": (
        "DBUS_SESSION_BUS_ADDRESS", "DBUS_SESSION_BUS_PID", "DBUS_SESSION_BUS_WINDOWID", "DBUS_STARTER_ADDRESS",
        "DBUS_STARTER_BUS_TYPE", "DESKTOP_SESSION", "DESKTOP_STARTUP_ID", "DISPLAY", "GDMSESSION",
        "GNOME_DESKTOP_SESSION_ID", "GNOME_KEYRING_CONTROL", "GNOME_KEYRING_PID", "GNOME_SETUP_DISPLAY",
        "GNOME_SHELL_SESSION_MODE", "GNOME_TERMINAL_SCREEN", "GNOME_TERMINAL_SERVICE", "GPG_AGENT_INFO", "GPG_TTY",
        "GTK_IM_MODULE", "GTK_MODULES", "INVOCATION_ID", "JOURNAL_STREAM", "MAIL", "MANAGERPID",
        "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE", "NOTIFY_SOCKET", "QT_ACCESSIBILITY",
        "QT_AUTO_SCREEN_SCALE_FACTOR", "QT_IM_MODULE", "QT_LINUX_ACCESSIBILITY_ALWAYS_ON", "QT_QPA_PLATFORMTHEME",
        "QT_WAYLAND_RECONNECT", "SESSION_MANAGER", "SSH_AGENT_PID", "SSH_ASKPASS", "SSH_ASKPASS_REQUIRE",
        "SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_ORIGINAL_COMMAND", "SSH_TTY", "SSH_USER_AUTH",
        "SYSTEMD_EXEC_PID", "VSCODE_AGENT_FOLDER", "VSCODE_AMD_ENTRYPOINT", "VSCODE_CRASH_REPORTER_PROCESS_TYPE",
        "VSCODE_CWD", "VSCODE_DEBUGPY_ADAPTER_ENDPOINTS", "VSCODE_GIT_ASKPASS_EXTRA_ARGS", "VSCODE_GIT_ASKPASS_MAIN",
        "VSCODE_GIT_ASKPASS_NODE", "VSCODE_GIT_IPC_HANDLE", "VSCODE_HANDLES_SIGPIPE",
        "VSCODE_HANDLES_UNCAUGHT_ERRORS", "VSCODE_INJECTION", "VSCODE_IPC_HOOK", "VSCODE_IPC_HOOK_CLI",
        "VSCODE_NLS_CONFIG", "VSCODE_NONCE", "VSCODE_PID", "VSCODE_STABLE", "WAYLAND_DISPLAY", "XAUTHORITY",
        "XDG_CURRENT_DESKTOP", "XDG_RUNTIME_DIR", "XDG_SEAT", "XDG_SEAT_PATH", "XDG_SESSION_CLASS",
        "XDG_SESSION_DESKTOP", "XDG_SESSION_ID", "XDG_SESSION_PATH", "XDG_SESSION_TYPE", "XDG_VTNR",
    ),
    "temporary folders, which differ from run to run": ("TEMP", "TEMPDIR", "TMP", "TMPDIR"),
    "editors, pagers, git and DVC, which show and keep text; what git writes counts itself": (
        "DVC_EXP_BASELINE_REV", "DVC_EXP_NAME", "DVC_NO_ANALYTICS", "DVC_ROOT", "DVC_STAGE", "EDITOR", "GIT_ASKPASS",
        "GIT_AUTHOR_DATE", "GIT_AUTHOR_EMAIL", "GIT_AUTHOR_NAME", "GIT_COMMITTER_DATE", "GIT_COMMITTER_EMAIL",
        "GIT_COMMITTER_NAME", "GIT_CONFIG_COUNT", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_KEY_[0-9]*", "GIT_CONFIG_NOSYSTEM",
        "GIT_CONFIG_PARAMETERS", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_VALUE_[0-9]*", "GIT_DIFF_OPTS", "GIT_DIR",
        "GIT_EDITOR", "GIT_EXEC_PATH", "GIT_EXTERNAL_DIFF", "GIT_INDEX_FILE", "GIT_OPTIONAL_LOCKS", "GIT_PAGER",
        "GIT_PAGER_IN_USE", "GIT_PREFIX", "GIT_REFLOG_ACTION", "GIT_SEQUENCE_EDITOR", "GIT_SSH", "GIT_SSH_COMMAND",
        "GIT_SSL_CAINFO", "GIT_TERMINAL_PROMPT", "GIT_TRACE", "GIT_TRACE2", "GIT_TRACE2_EVENT", "GIT_TRACE2_PERF",
        "GIT_WORK_TREE", "LESS", "LESSCHARSET", "LESSCLOSE", "LESSHISTFILE", "LESSHISTSIZE", "LESSKEY", "LESSOPEN",
        "LESS_TERMCAP_*", "MANPATH", "MANPAGER", "PAGER", "VISUAL",
    ),
    "names of one job of a scheduler, of a cluster or of a test run": (
        "HOSTNAME", "KUBERNETES_PORT", "KUBERNETES_PORT_[0-9]*", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT",
        "KUBERNETES_SERVICE_PORT_HTTPS", "PYTEST_CURRENT_TEST", "PYTEST_VERSION", "PYTEST_XDIST_TESTRUNUID",
        "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN",
        "RAY_AUTH_TOKEN_PATH", "RAY_CLIENT_MODE", "RAY_CLOUD_INSTANCE_ID", "RAY_JOB_ID", "RAY_LD_PRELOAD_ON_WORKERS",
        "RAY_RAYLET_PID", "RAY_REDIS_ADDRESS", "RAY_TMPDIR", "RAY_USAGE_STATS_ENABLED", "SLURMD_DEBUG",
        "SLURMD_NODENAME", "SLURM_JOBID", "SLURM_JOB_END_TIME", "SLURM_JOB_ID", "SLURM_JOB_NODELIST",
        "SLURM_JOB_START_TIME", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_NODELIST", "SLURM_SRUN_COMM_HOST",
        "SLURM_SRUN_COMM_PORT", "SLURM_STEPID", "SLURM_STEPMGR", "SLURM_STEP_GPUS", "SLURM_STEP_ID",
        "SLURM_STEP_LAUNCHER_PORT", "SLURM_STEP_NODELIST", "SLURM_STEP_RESV_PORTS", "SLURM_SUBMIT_DIR",
        "SLURM_SUBMIT_HOST", "SLURM_TASK_PID", "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN",
    ),
    "our own": (
        "REPRO_CHILD", "REPRO_INSTRUMENT", "REPRO_PROBE", "REPRO_RAY_MODULES", "REPRO_SGLANG_PARENT", "REPRO_TRACE",
        "REPRO_TRUST",
    ),
}  # fmt: skip
"""Variables that decide no numbers and differ between two terminals, by the reason; see docs/reference/bisect.md.

They are named one by one: what begins alike may be a program's own (``HISTORY``, ``TERM_PENALTY``). Of the
temporary folders, those that are there; any other value is no folder's name.
"""

_WHOLE = 1 << 24
"""Bytes of a file up to which all of its content is read."""
_PART = 1 << 16
"""Bytes that are read at the start, in the middle and at the end of a larger one."""
_MOST, _BUDGET = 10_000, 1 << 28
"""Files of a folder that are looked at, and bytes of them that are read."""


def seen(case: Case, build: str) -> str:
    """32 digits for what a case's program sees of the process that starts it.

    Args:
        case: The case.
        build: The digest of `subjects.build_of`, where it runs.
    """
    return digest("seen", build, variables_digest(case))


def variables_digest(case: Case) -> str:
    """32 digits for the variables of a case's program that numbers may rest on, beside those that the case sets."""
    return digest("variables", canonical_json(variables_of_key(base_environment(case))))


def variables_of_key(variables: Mapping[str, str]) -> dict[str, str]:
    """Digests of the variables that numbers may rest on, by name; never their values."""
    relevant = {k: v for k, v in variables.items() if not _cannot_matter(k, v)}
    if "PATH" in relevant:  # folders that are not there, or are named twice, find no program
        folders = [folder for folder in relevant["PATH"].split(os.pathsep) if os.path.isdir(folder)]  # noqa: PTH112 - raises nothing
        relevant["PATH"] = os.pathsep.join(dict.fromkeys(folders))
    return {name: digest("variable", name, value.encode(errors="surrogateescape")) for name, value in relevant.items()}


def _cannot_matter(name: str, value: str) -> bool:
    if name in _FOLDERS:  # TEMP=0.7 is a temperature
        return Path(value).is_absolute() and os.path.isdir(value)  # noqa: PTH112 - raises nothing
    return bool(_CANNOT_MATTER.fullmatch(name))


_FOLDERS = ("TEMP", "TEMPDIR", "TMP", "TMPDIR")
_CANNOT_MATTER = re.compile("|".join(fnmatch.translate(name) for names in CANNOT_MATTER.values() for name in names))


# -- files that no commit holds


def outside_of(case: Case, root: Path, marks: dict[str, str] | None = None) -> list[str]:
    """What stands for the files and folders that a case names by absolute paths, below ``{root}``, or in `link`.

    So for the programs that its commands name and PATH finds, and for what inherited variables name. No commit holds
    them, and they change. A file counts by its content; one of more than 16 MiB by its size, time and place on the disk
    and three pieces of it. So does each file of a folder, as far as the bounds go; of one that PYTHONPATH alone names
    what a library may consist of (`identify.sources`).

    Args:
        case: The case.
        root: The user's checkout.
        marks: To which the marks of what is in folders of PYTHONPATH are added.
    """
    marks = {} if marks is None else marks
    named, libraries = _met(case, root)
    facts = [fact for path in sorted(named | libraries) for fact in _facts(path, root, path in libraries, marks)]
    # a key of these words holds no probe from before, when every commit was run on the checkout's data
    for name in sorted(map(os.path.normpath, case.subject.link)):
        what = digest("linked, or as its commit names it", name)  # without it, it may be a skip
        facts += [what, *_facts(root / name, root, False, marks)]
    return facts


def found_outside(case: Case, root: Path) -> Snapshot:
    """`outside_of` a case, with the marks of the files that it looks at."""
    look = functools.partial(_places, case, root)
    marks = look()  # before the content: what changes meanwhile is seen
    inside = dict[str, str]()
    facts = tuple(outside_of(case, root, inside))
    return Snapshot(facts, {**marks, **inside}, lambda: {**look(), **marked(inside)})


def _places(case: Case, root: Path) -> dict[str, tuple[int, ...]]:
    """Where the files that `outside_of` looks at lie, and when they last changed; so of links that lead to them.

    Those in folders of PYTHONPATH have marks of their own.
    """
    named, libraries = _met(case, root)
    known: dict[str, tuple[int, ...]] = {}
    for path in named | libraries | {root / name for name in case.subject.link}:
        inside = iter(()) if path in libraries else itertools.islice(_files(path, root), _MOST)
        for place in [path, *path.parents, *inside]:
            with contextlib.suppress(OSError):
                link_status = place.lstat()
                link = (link_status.st_ino, link_status.st_ctime_ns) if stat.S_ISLNK(link_status.st_mode) else ()
                known[str(place)] = link
                status = place.stat()
                changed = status.st_ctime_ns if stat.S_ISREG(status.st_mode) else 0  # a folder's is that of its list
                size = status.st_size if changed else 0
                known[str(place)] = (*link, status.st_dev, status.st_ino, size, changed)
    return known


def _files(path: Path, root: Path) -> Iterator[Path]:
    """A file, or what `_walked` finds in a folder that is looked at."""
    if os.path.isfile(path):  # noqa: PTH113 - raises nothing
        yield path
    elif not _is_everything(path, root):
        yield from (place for place, _ in _walked(path, root))


def _walked(folder: Path, root: Path) -> Iterator[tuple[Path, bool]]:
    """The files in a folder, and behind the links in it that lead to other folders; before those the links, told so.

    What may not be looked at is passed over, or yielded as a file.
    """
    places, known = [folder], {_real(folder)}
    while places:
        for place, below, names in os.walk(places.pop()):
            below[:] = sorted(name for name in below if name not in (".git", "__pycache__"))
            for link in [Path(place, name) for name in below if os.path.islink(f"{place}/{name}")]:  # noqa: PTH114 - raises nothing
                yield link, True  # the walk does not follow it
                if (real := _real(link)) not in known and not _is_everything(real, root):  # so that circles end
                    known.add(real)
                    places.append(link)
            yield from ((Path(place, name), False) for name in sorted(names) if not name.endswith(".pyc"))


def folders_of(case: Case, root: Path) -> list[Path]:
    """The folders of the absolute paths that a case names, and of those below ``{root}``."""
    named, libraries = _named(case, root)
    return sorted({p if os.path.isdir(p) else p.parent for p in named | libraries})  # noqa: PTH112 - raises nothing


def _named(case: Case, root: Path) -> tuple[set[Path], set[Path]]:
    """The absolute paths in a case's commands, or its configuration, and its variables; and those of PYTHONPATH alone.

    PATH's are left out. Of a program also the files that launchers read unasked.
    """
    subject = case.subject
    texts = subject.texts + [value for name, value in subject.env.items() if name not in ("PATH", "PYTHONPATH")]
    texts += implicit_files(base_environment(case) | subject.env, root) if subject.program else []
    named = {path for word in texts for path in paths_in(word, root)}
    return named, set(paths_in(subject.env.get("PYTHONPATH", ""), root)) - named


def _met(case: Case, root: Path) -> tuple[set[Path], set[Path]]:
    """`_named`, with what a program meets although its case does not name it."""
    named, libraries = _named(case, root)
    return named | _programs(case, root) | _inherited(case, root), libraries


_NAME = re.compile(r"""[^\s;|&()<>{}"'`$=,]+""")
"""What may name a program amid a line for a shell."""
_SYSTEM = tuple(map(Path, ("/bin", "/sbin", "/usr/bin", "/usr/sbin")))
"""Where the system's own programs lie."""


def _programs(case: Case, root: Path) -> set[Path]:
    """The programs that PATH finds by the words of a case's commands, whatever word it is that runs them.

    The system's are left out, and those of the interpreter's environment, which has a digest of its own.
    """
    if not (subject := case.subject.program):
        return set()
    python = interpreter(subject, root)
    search = variables_of(case, subject, python, {"root": str(root), "python": python})["PATH"]
    names = {name for word in subject.texts for name in _NAME.findall(word) if os.sep not in name}
    programs = {Path(path) for name in names if (path := shutil.which(name, path=search))}
    return {path for path in programs if path.is_absolute() and path.parent not in (*_SYSTEM, Path(python).parent)}


_FEW = 1000
"""Entries of a folder that an inherited variable names: of more it is an installation, a cache or a whole disk."""
_WRITTEN = frozenset((
    "artifact", "artifacts", "cache", "checkpoint", "checkpoints", "ckpt", "ckpts", "coverage", "debug", "dump", "exp",
    "experiment", "experiments", "extensions", "history", "home", "lock", "log", "logdir", "logfile", "logs", "mlruns",
    "mplconfigdir", "out", "outdir", "output", "outputs", "pid", "prefix", "profile", "result", "results", "run",
    "runs", "save", "savedir", "saves", "scratch", "snapshot", "snapshots", "sock", "socket", "storage", "tmp", "trace",
    "tracking", "wandb", "workdir", "zdotdir",
))  # fmt: skip
"""Words in the name of a variable, or of what it leads to, that tell of what programs write from run to run."""
_WRITTEN_INTO = _WRITTEN | {
    "flashinfer", "jit", "logger", "logging", "metrics", "profiler", "profiling", "report", "reports", "status", "tb",
    "temp", "tensorboard", "tmpdir",
}  # fmt: skip
"""Those of folders: a file that is called so may be settings. What is saved, or a workspace, may be read too."""
_SETTINGS = frozenset(("cfg", "conf", "config", "ini", "settings", "toml", "yaml", "yml"))
"""Words of files that are settings, whatever else they are called."""
_DATABASES = (".db", ".sqlite", ".sqlite3")
"""Endings of files that programs write from run to run."""


def _inherited(case: Case, root: Path) -> set[Path]:
    """What the variables that a program inherits name by absolute paths: files, and folders that hold little."""
    variables = {k: v for k, v in base_environment(case).items() if not _cannot_matter(k, v)}
    pairs = [(name, path) for name, value in variables.items() if name != "PATH" for path in paths_in(value, root)]
    there = {path for name, path in pairs if not _is_written(name, path) and path.suffix.lower() not in _DATABASES}
    named = {p for p in there if p.parent not in _SYSTEM and ".git" not in p.parts and not _is_everything(p, root)}
    return {path for path in named if not os.path.isdir(path) or _is_small(path)}  # noqa: PTH112 - raises nothing


def _is_written(name: str, path: Path) -> bool:
    """Whether a variable and the path that it names are called like what programs write from run to run."""
    parts = {*re.split(r"[\W_]+", f"{name} {path.name}".lower())}
    if os.path.isdir(path):  # noqa: PTH112 - raises nothing
        return not parts.isdisjoint(_WRITTEN_INTO)
    return parts.isdisjoint(_SETTINGS) and not parts.isdisjoint(_WRITTEN)


def _is_small(folder: Path) -> bool:
    """Whether a folder, with those behind its links, holds few entries; no more of them are looked at."""
    left, places, known = _FEW, [str(folder)], set[str]()
    while places and left >= 0:
        place = os.path.realpath(places.pop())
        if place not in known:
            known.add(place)
            with contextlib.suppress(OSError), os.scandir(place) as entries:
                for entry in itertools.islice(entries, left + 1):
                    left -= 1
                    places += [entry.path] if entry.is_dir() else []
    return left >= 0


_STARTS = re.compile(r"(?<![\w.~/+}-])~?/|(?<=^-\w)/")
"""Where an absolute path may begin in a word: not amid another, and behind a flag of one letter."""
_ENDS = re.compile(r"""[=:,;|&()<>\[\]{}"'`@!?*#%\s]|\Z""")


def paths_in(word: str, root: Path) -> Iterator[Path]:
    """The absolute paths in a word that are there, such as ``--data=/a``, ``/a:/b``, ``x=[/a,/b]`` and ``@/a``.

    A path goes on as long as something of that name is there; of a pattern, such as ``/a/part-*``, its folder counts.
    """
    word = word.replace("{root}", str(root))
    for start in _STARTS.finditer(word):
        text = os.path.expanduser(word[start.start() :])  # noqa: PTH111 - pathlib leaves out what ends in a slash
        matches = [end for end in _ENDS.finditer(text) if end.start() < 4096]
        places = [text[: end.start()] for end in matches]
        places += [str(Path(text[: end.start()]).parent) for end in matches if end[0] in tuple("*?[{")]
        there = [path for path in places if path.startswith("/") and "\0" not in path and os.path.lexists(path)]
        if there:
            yield Path(os.path.normpath(max(there, key=len)))


def _facts(path: Path, root: Path, library: bool, marks: dict[str, str]) -> Iterator[str]:
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode):
            yield digest("file", str(path), _content(path, status, _WHOLE))
        elif stat.S_ISDIR(status.st_mode) and not _is_everything(path, root):
            yield digest("folder", str(path), *(sources(path, marks=marks) if library else _listing(path, root)))
    except OSError as error:
        yield digest("unreadable", str(path), str(error.errno))


def _is_everything(folder: Path, root: Path) -> bool:
    """Whether a folder holds more than what a case means by it: the checkout itself, a home, what is temporary."""
    if any(folder.is_relative_to(system) for system in ("/dev", "/proc", "/sys", "/run")):
        return True
    tops = [root, Path(tempfile.gettempdir()), Path("/tmp"), Path("/usr/bin")]  # noqa: S108
    with contextlib.suppress(RuntimeError):  # a user without a home
        tops.append(Path.home())
    real = _real(folder)
    return any(place.is_relative_to(real) for top in tops for place in (top, _real(top)))  # a home may be a link


def _real(path: Path) -> Path:
    """Where links lead; `Path.resolve` fails at those that lead in a circle."""
    return Path(os.path.realpath(path))


def _listing(folder: Path, root: Path) -> Iterator[str]:
    left, budget = _MOST, _BUDGET
    for path, leads_on in _walked(folder, root):
        name = path.relative_to(folder)
        if leads_on:
            yield f"{name} -> {_real(path)}"
        elif left:
            left -= 1
            try:
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    budget -= min(status.st_size, _WHOLE)
                    yield f"{name} {_content(path, status, _WHOLE if budget > 0 else 0)}"
            except OSError:  # a link to nowhere, or not ours to read
                yield f"{name} -"


def _content(path: Path, status: os.stat_result, most: int) -> str:
    """What stands for a file's content; of one that is larger than `most` bytes, for what changes with it."""
    with path.open("rb") as file:
        if status.st_size <= most:
            return digest("content", file.read())
        pieces = []
        for start in (0, status.st_size // 2, max(0, status.st_size - _PART)) if most else ():
            file.seek(start)
            pieces.append(file.read(_PART))
    return digest("large", f"{status.st_size} {status.st_mtime_ns} {status.st_ino}", *pieces)

"""What a process is and meets: its Python, code that it runs and files of the checkout that it opens.

Code and files may not be of the commit under test, and the Python may be another than its case tells.

Python's audit events tell of both when they happen. So it counts in every process: one that is forked, replaced or
killed ends without `atexit`. A line for each is written at once, and judged when the program has ended (`strangers`).
This runs inside foreign programs, from their start on: the standard library alone, and little of that.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from repro_golden.base.machine.audit import hear
from repro_golden.recording.attach.code import earlier
from repro_golden.recording.attach.code.noted import notes

if TYPE_CHECKING:
    from repro_golden.recording.attach.code.installed import Copy
    from repro_golden.recording.attach.code.working_trees import Origin

__all__ = ["FILES", "PYTHONS", "TRACKED", "is_deaf", "watch"]

FILES = "met-*.jsonl"
"""What each process that met something leaves in the folder of its raw records; one that does not end with the end of a
line was not written whole."""
PYTHONS = "python-*.json"
"""There too: the interpreter of each process."""
TRACKED = "tracked"
"""There too, before the program starts: the files that git tracks in the checkout, each with a NUL behind it."""

_KEPT = ("site-packages", "dist-packages")
"""An environment inside a checkout is none of its code."""
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # noqa: PTH100, PTH120
_STANDARD = os.path.dirname(os.__file__)  # noqa: PTH120
_HOOKS = tuple(
    f"{what}_{of}"
    for what in ("build", "get_requires_for_build", "prepare_metadata_for_build")
    for of in ("editable", "sdist", "wheel")
)
"""What an installer has a Python do that builds a package (PEP 517, PEP 660), in an environment for that alone."""
_BUILDS = "REPRO_BUILDS"
"""A variable of such a process, which those that it starts inherit."""
_LINKS = 40
"""Links of a path that a system follows."""


def watch(place: str, home: str | None, folder: str, *, tests: bool) -> None:
    """Write down what this process and its forks meet from now on, and the modules that it has by now.

    Args:
        place: The working tree under test.
        home: The user's own checkout, where that is another.
        folder: Where it is written.
        tests: Whether the program only tests the tree.
    """
    import atexit

    _say_python(folder)
    process = _Process(place, home, folder, tests)
    hear({"exec": process.ran, "import": process.loaded, "cpython.run_file": process.started})
    if others := earlier.others_in(folder):
        state = os.path.join(folder, "..", "..", "..")  # noqa: PTH118 - what is kept of the repository
        no_commits = [*_environments(), sys.base_prefix, _OURS, _STANDARD, state]
        touched = earlier.Touched(others, home and place, home or place, process.tracked, no_commits, process.touched)
        hear({"open": touched.opened, "os.rename": touched.renamed})
    if home is not None:
        hear({"open": process.opened, "os.rename": process.renamed, "os.link": process.renamed})
    hear({"subprocess.Popen": lambda _, argv, __, variables: process.starts(argv, variables)})
    hear({event: lambda _, argv, variables: process.starts(argv, variables) for event in ("os.exec", "os.posix_spawn")})
    process.look()
    atexit.register(process.look)


class _Process:
    def __init__(self, place: str, home: str | None, folder: str, tests: bool) -> None:
        self._place, self._home, self._folder, self._tests = place, home, folder, tests
        here, standard = os.path.realpath(place), os.path.realpath(_STANDARD)
        listed = os.path.join(os.path.realpath(folder), TRACKED)  # noqa: PTH118
        programs = [os.path.join(top, "bin") for top in _environments()]  # noqa: PTH118
        self._meant = tuple(f"{top.rstrip('/')}/" for top in (place, here, _OURS, standard, _STANDARD, *programs))
        checkout = os.path.realpath(home) if home else ""
        self._own, self._others = f"{checkout.rstrip('/')}/", (f"{checkout}/.git/", f"{here}/", f"{_OURS}/", listed)
        self._known: set[str] = set()
        self._foreign: set[str] = set()
        self._links: dict[str, bool] = {}
        self._made: dict[str, tuple[int, ...] | None] = {}
        self._read: set[str] = set()
        self._tracked: frozenset[str] | None = None
        self._real: dict[str, str] = {}
        self._path: list[str] = []
        self._copies: list[Copy] = []
        self._sites: dict[str, Sequence[Copy]] = {}

    # -- modules

    def ran(self, code: Any) -> None:
        """Code is about to be run: a module's, with its file."""
        path = code.co_filename
        if path.startswith("/"):
            self._module(path)

    def loaded(self, name: str, path: object, *_: object) -> None:
        """A module is asked for; only one that is compiled has a path by now."""
        if isinstance(path, str):
            self._module(path, name)

    def started(self, path: str) -> None:
        """Python has been given a file."""
        self._module(os.path.abspath(path), "__main__")  # noqa: PTH100

    def look(self) -> None:
        """Take the modules that are here, of which no event told, and packages that are folders alone."""
        with contextlib.suppress(Exception):  # the program's exit code is its own
            for name, module in list(sys.modules.items()):
                if isinstance(file := _attribute(module, "__file__"), str):
                    self._module(os.path.abspath(file), name)  # noqa: PTH100
                elif name not in self._known:
                    for folder in self._folders_from_elsewhere(module):
                        self._tell(self._about(folder, name))
                        self._known.add(name)

    def _folders_from_elsewhere(self, module: object) -> Iterator[str]:
        """The folders of a namespace package, but for those behind what the tree has in their place."""
        folders = _folders(module)
        for n, folder in enumerate(folders):
            if folder.startswith(self._meant) or self._is_kept(folder):
                continue
            from repro_golden.recording.attach.code.working_trees import real

            origin = self._origin(folder)
            if origin and os.path.isdir(folder) and origin.counterpart(real(folder)) not in map(real, folders[:n]):  # noqa: PTH112
                yield folder

    def _module(self, spelled: str, name: str = "") -> None:
        path = os.path.normpath(spelled) if "/../" in spelled or "//" in spelled else spelled
        if path in self._known:
            return
        if copy := self._copy(path):
            self._tell(self._about(spelled, name) | {"path": path, "site": copy.site})
            self._known.add(path)
            return
        if path.startswith(self._meant) or self._is_kept(path):
            if path in self._read:  # through a link of the tree's
                self._tell({"path": path})
                self._known.add(path)
            return
        if path in self._foreign:
            return
        file = path
        if os.path.islink(path) and self._origin(path) is None:  # noqa: PTH114
            file = os.path.realpath(path)
        if self._origin(file) is None:
            self._foreign.add(path)
        elif file not in self._known and not self._is_made(file):
            self._tell(self._about(spelled, name) | {"path": file})
            self._known |= {path, file}

    def _is_kept(self, path: str) -> bool:
        """Whether it is of an environment: a link there may lead to any code."""
        for part in _KEPT:
            before, within, after = path.partition(f"/{part}/")
            if within:
                top = f"{before}/{part}/{after.partition('/')[0]}"
                if top not in self._links:
                    self._links[top] = os.path.islink(top)  # noqa: PTH114
                return not self._links[top]
        return False

    def _is_made(self, file: str) -> bool:
        """Whether code is this run's own: of a file that it wrote anew, or of a name for none."""
        from repro_golden.recording.attach.code.working_trees import real_file

        file, now = real_file(file), _stamp(file)
        if file in self._made:
            return now != self._made[file]  # else it could not be written
        return now is None and not os.path.exists(f"{file}c")  # noqa: PTH110

    def _about(self, path: str, name: str) -> dict[str, Any]:
        """What tells of a module: its name, its file as it calls it, and the folders of its top-level package."""
        if not name:  # the newest is the last; to ask a module that is lazy would import it
            modules = reversed(list(sys.modules.items()))
            name = next((name for name, module in modules if _attribute(module, "__file__") == path), "__main__")
        return {"name": name, "path": path, "folders": _folders(sys.modules.get(name.partition(".")[0]))}

    def _origin(self, path: str) -> Origin | None:
        """The other working tree of this repository that a path is of; None of any other path."""
        from repro_golden.recording.attach.code.working_trees import origin_in, real_file

        file = real_file(path)
        if file.startswith(self._meant) or any(part in file for part in _KEPT):
            return None
        return origin_in(os.path.dirname(file), self._place, self._home)  # noqa: PTH120

    def _copy(self, path: str) -> Copy | None:
        """What an installer made of this repository, where a file is part of it."""
        if self._path != sys.path:
            self._path = list(sys.path)
            sites = dict.fromkeys(site for site in self._path if os.path.isabs(site))  # noqa: PTH117
            self._copies = [copy for site in sites for copy in self._copies_in(site)]
        return next((copy for copy in self._copies if copy.has(path)), None)

    def _copies_in(self, site: str) -> Sequence[Copy]:
        if site not in self._sites:
            self._sites[site] = ()
            if notes(site):
                from repro_golden.recording.attach.code.installed import copies

                self._sites[site] = copies(site, self._place, self._home)
        return self._sites[site]

    # -- files

    def opened(self, path: object, mode: object, flags: int) -> None:
        """A file is about to be opened: to be read, or to be made anew."""
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if type(path) is not str or (writes and not flags & (os.O_TRUNC | os.O_EXCL)):
            return
        if not path.startswith("/"):
            if mode is None:  # `os.open`, whose path may be one below a folder that is open
                return
            path = f"{os.getcwd()}/{path}"  # noqa: PTH109
        if path in self._read and not writes:
            return
        file = path
        for _ in range(_LINKS):
            file = self._placed(file)
            if self._is_own(file):
                if writes:
                    self._made.setdefault(file, _stamp(file))
                elif file[len(self._own) :] in self.tracked():
                    self._tell({"read": path, "file": file})
                    self._read.add(path)
                return
            if not os.path.islink(file):  # noqa: PTH114
                return
            file = os.path.join(os.path.dirname(file), os.readlink(file))  # noqa: PTH115, PTH118, PTH120

    def renamed(self, source: Any, target: Any, *folders: int) -> None:
        """A file or a folder is about to get another name: what this run has made stays its own."""
        if folders != (-1, -1):  # a path below one of two folders that are open
            return
        old, new = (self._placed(os.path.abspath(os.fsdecode(path))) for path in (source, target))  # noqa: PTH100
        if not self._is_own(new):
            return
        if os.path.isdir(old):  # noqa: PTH112
            files = [file for file in self._made if file.startswith(f"{old}/")]
        else:
            files = [old] if old in self._made or self._origin(old) is None else []  # code of elsewhere is no tree's
        for file in files:
            if _stamp(file) != self._made.get(file):
                self._made.setdefault(known := new + file[len(old) :], _stamp(known))

    def _is_own(self, file: str) -> bool:
        """Whether a file lies in the user's checkout, in what may be a commit's."""
        return file.startswith(self._own) and not file.startswith(self._others)

    def _placed(self, path: str) -> str:
        """A path without links to its folder."""
        folder, _, name = path.rpartition("/")
        if (real_folder := self._real.get(folder)) is None:
            real_folder = self._real[folder] = os.path.realpath(folder or "/").rstrip("/")
        return f"{real_folder}/{name}"

    def touched(self, file: str, changed: float | None) -> None:
        """A file was opened that other code may have written, or may read."""
        self._write([file, changed], earlier.FILES)

    def tracked(self) -> frozenset[str]:
        """What git tracks in the checkout; of other files nothing is kept, for programs open many."""
        if self._tracked is None:
            with open(os.path.join(self._folder, TRACKED), "rb") as file:  # noqa: PTH118, PTH123
                self._tracked = frozenset(os.fsdecode(file.read()).split("\0"))
        return self._tracked

    # -- processes

    def starts(self, argv: Any, variables: Any) -> None:
        """A program is about to be started: of a Python that will not read our `sitecustomize`, say so in the trace."""
        argv = [argv] if isinstance(argv, (str, bytes, os.PathLike)) else list(argv)
        line = " ".join(map(os.fsdecode, argv))
        if line in self._known or not is_deaf([os.fsdecode(word) for word in argv], _is_bare(variables)):
            return
        self._known.add(line)
        import json

        why = "started with -I, -E, -S or other variables, it does not tell what it imports"
        path = os.path.join(self._folder, f"note-deaf-{_called()}-{len(self._known)}.json")  # noqa: PTH118
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump({f"the code of `{line[:80]}`": why}, file)

    def _tell(self, line: dict[str, Any]) -> None:
        self._write(line | {"tests": self._tests})

    def _write(self, line: object, files: str = FILES) -> None:
        import json

        name = os.path.join(self._folder, files.replace("*", _called()))  # noqa: PTH118
        file = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, json.dumps(line).encode() + b"\n")
        except OSError:  # none of it, which the lines before must not hide
            if size := os.fstat(file).st_size:
                os.ftruncate(file, size - 1)
        finally:
            os.close(file)


def _say_python(folder: str) -> None:
    """Write down which interpreter this process is; one that builds a package, or is started by it, runs no program."""
    how, what = [*sys.orig_argv[1:3], "", ""][:2]
    if what in _HOOKS or (how == "-c" and any(hook in what for hook in _HOOKS)):  # as pip and build do, and uv
        os.environ[_BUILDS] = "1"
    if _BUILDS in os.environ:
        return
    import json
    import zlib

    with contextlib.suppress(Exception):  # the program goes on
        executable = sys.executable if _is_python(sys.executable or "") else os.path.join(sys.prefix, "bin", "python")  # noqa: PTH118
        which = f"{_called()}-{zlib.crc32(executable.encode()):08x}"  # a process may become another Python
        name = os.path.join(folder, PYTHONS.replace("*", which))  # noqa: PTH118
        with open(name, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(executable, file)


def _environments() -> Sequence[str]:
    """Where the packages of this Python are, also without links; no checkout, which may have programs of its own."""
    prefixes = {sys.prefix, os.path.realpath(sys.prefix)}
    return [prefix for prefix in prefixes if not os.path.lexists(os.path.join(prefix, ".git"))]  # noqa: PTH118


def is_deaf(argv: Sequence[str], bare: bool) -> bool:
    """Whether a command is a Python that reads no PYTHONPATH, or is given none of ours.

    Args:
        argv: Program and arguments.
        bare: Whether its environment is without our variables.
    """
    if not argv or not _is_python(argv[0]):
        return False
    options = iter(argv[1:])
    for word in options:
        if not word.startswith("-") or word == "-":
            break
        for at, letter in enumerate(word[1:], 2):
            if letter in "IES":
                return True
            if letter in "cm":  # the rest is the program's
                return bare
            if letter in "WX-":
                if word == "--check-hash-based-pycs" or (at == len(word) and letter != "-"):
                    next(options, None)  # its argument
                break
    return bare


def _is_python(program: str) -> bool:
    """Whether a program is called as a Python is."""
    name = os.path.basename(program)  # noqa: PTH119
    return name.startswith("python") and not name[len("python") :].strip("0123456789.t")


def _is_bare(variables: Any) -> bool:
    """Whether an environment, or this process's own where None is given, is without what brings the recorder in."""
    held = {
        os.fsdecode(name): os.fsdecode(value)
        for name, value in (os.environ if variables is None else variables).items()
    }
    sites = sys.__dict__.get("_repro_sites", ())
    return "REPRO_TRACE" not in held or not set(sites).intersection(held.get("PYTHONPATH", "").split(os.pathsep))


def _stamp(path: str) -> tuple[int, ...] | None:
    """What is another where a file has been written; None where there is none."""
    try:
        facts = os.stat(path)  # noqa: PTH116
    except FileNotFoundError:
        return None
    except OSError:  # in an archive
        return ()
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _called() -> str:
    """What this process is called: nodes that share a folder may have one of its number too."""
    return f"{os.uname().nodename}-{os.getpid()}"


def _folders(module: object) -> list[str]:
    """Where a package's modules are looked for."""
    try:
        return [os.path.normpath(folder) for folder in _attribute(module, "__path__") or () if isinstance(folder, str)]
    except Exception:  # noqa: BLE001 - a namespace whose parent is gone, or what only is called so
        return []


def _attribute(module: object, name: str) -> Any:
    try:
        return object.__getattribute__(module, "__dict__").get(name)
    except (AttributeError, TypeError):
        return None

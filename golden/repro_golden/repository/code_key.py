"""What stands for a subject's code in a commit: the one definition, for a checkout as for ten thousand commits.

Equal keys are equal code: names, contents, kinds (file, symlink, folder, submodule) and modes. A folder's key is git's
own tree id. That of a plain file is its blob's id; anything else (an executable file, a symlink, a submodule) has its
mode in its key. Where a symlink leads from a subject's paths to something else of the repository, all of the commit is
the subject's code. A `.gitattributes` in a folder above them decides how files are checked out (line ends, encodings,
filters), so it is in the key too.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from repro_golden.base.canonical import digest
from repro_golden.repository.git import Git, GitFailedError

__all__ = ["CodeKeys", "code_keys", "not_code"]

_GOLDEN = "golden"
_OF_DVC = (".dvc", ".dvcignore")
_WRITTEN: Mapping[str, re.Pattern[bytes] | None] = {
    **dict.fromkeys(("dvc.yaml", "dvc.lock", "check.json", "check-steps.json", ".gitignore")),
    "cases/*.toml": re.compile(rb"^\s*\[\s*case\s*\]", re.MULTILINE),
    **{f"{folder}/**/{name}": None for folder in ("runs", "rollouts", "nights") for name in ("*.dvc", ".gitignore")},
    **dict.fromkeys(("runs/*/*/run.json", "runs/*/*/trace/**", "rollouts/**/[0-9]*.safetensors", "nights/*/*/*.json")),
    "rollouts/**/index.json": re.compile(rb'"rollouts"'),
}
"""The files that recording itself writes into ``golden/``, and what stands in those whose names others may give.

A program's data or a package may lie beside them, in any of these folders.
"""
NOT_CODE = (*_OF_DVC, *(f"{_GOLDEN}/{name}" for name in _WRITTEN))
"""What recording itself writes into a repository: it is no part of the code of a subject that is all of it."""
_MADE = {folder for folder, _, rest in (name.partition("/") for name in _WRITTEN) if rest}
_ELSEWHERE = (*_OF_DVC, _GOLDEN)
"""The same where ``golden`` is a symlink or a submodule: what is written lies in another place."""

_ATTRIBUTES = ".gitattributes"
_TREE, _FILE, _LINK, _SUBMODULE = b"40000", b"100644", b"120000", b"160000"
_FILES = (_FILE, b"100755")


@dataclass(frozen=True)
class _Entry:
    """One entry of a tree: its mode and its object's id.

    `rest` is the path from there on, inside a submodule or behind a symlink.
    """

    mode: bytes
    id: str
    rest: bytes = b""

    @property
    def key(self) -> str:
        if self.mode in (_TREE, _FILE):  # ids of blobs and trees never meet: git hashes the kind with the content
            return self.id
        return digest("entry", self.mode, self.id, *([self.rest] if self.rest else []))


@dataclass(frozen=True)
class _Whole:
    """All of a commit: the key, and what at the root is not part of it."""

    key: str
    left_out: Sequence[str]


@dataclass(frozen=True)
class CodeKeys:
    """The keys of some commits.

    Attributes:
        paths: What holds the code.
        keys: For each of `paths`, the key of each commit; None where it has none there.
        whole: The commits in which a symlink leads from `paths` to something else of the repository.
        attributes: Of each place of a `.gitattributes` above `paths`, its key in each commit.
        elsewhere: The commits in which ``golden`` is a symlink or a submodule, where that was looked at.
    """

    paths: Sequence[str]
    keys: Sequence[Mapping[str, str | None]]
    whole: Mapping[str, _Whole] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()

    def of(self, commit: str) -> str | None:
        """One key for all paths; None where a commit has none of them."""
        path_keys = [keys[commit] for keys in self.keys]
        if any(path_keys) and commit in self.whole:
            return self.whole[commit].key
        if not any(path_keys):
            return None
        attributes = [f"{key} {path}" for path, keys in self.attributes.items() if (key := keys[commit])]
        if len(path_keys) == 1 and not attributes:
            return path_keys[0]
        return digest("paths", *(key or "" for key in path_keys), *attributes)

    def covers(self, commit: str) -> tuple[list[PurePosixPath], Sequence[str]]:
        """The paths whose content the key of a commit stands for, and what at the root it does not stand for."""
        paths = [PurePosixPath(path) for path in self.paths]
        if commit in self.whole:
            return [PurePosixPath()], self.whole[commit].left_out
        left_out = _ELSEWHERE if commit in self.elsewhere else NOT_CODE
        return paths, left_out if PurePosixPath() in paths else ()

    def absent(self, commits: Iterable[str]) -> list[str]:
        """The paths that none of some commits have."""
        commits = list(commits)
        return [path for path, keys in zip(self.paths, self.keys, strict=True) if not any(keys[c] for c in commits)]


def code_keys(git: Git, commits: Iterable[str], paths: Sequence[str]) -> CodeKeys:
    """Look up paths in commits: one git process for each level of folders, however many commits there are.

    Args:
        git: In the repository.
        commits: Full ids.
        paths: Folders and files, relative to the root; ``.`` is all but `NOT_CODE`. Of what lies inside a submodule,
            the submodule's commit is the key. Where a path passes through a symlink, or holds one that leads out of
            `paths`, the key of that commit is that of ``.``; of one that leads into `NOT_CODE`, of everything.

    Raises:
        GitFailedError: git failed, or an object is not here.
    """
    unique = list(dict.fromkeys(commits))
    asked = "".join(f"{commit}^{{tree}}\n" for commit in unique).encode()
    answers = git("cat-file", "--batch-check=%(objectname)", given=asked).decode(errors="replace").splitlines()
    for commit, answer in zip(unique, answers, strict=True):
        if " " in answer:  # COMMIT^{tree} missing
            raise GitFailedError("cat-file", f"commit {commit[:10]} or its tree is not here: fetch it")
    roots = dict(zip(unique, answers, strict=True))
    trees = _Trees(git)
    keys = [trees.keys(roots, path) for path in paths]
    above = dict.fromkeys(str(parent / _ATTRIBUTES) for path in paths for parent in PurePosixPath(path).parents)
    attributes = {path: trees.keys(roots, path) for path in above}
    leaving = _leaving(git, trees, list(dict.fromkeys(roots.values())), paths)
    wholes = trees.keys({root: root for root in leaving}, ".") if leaving else {}
    # each commit by itself, so that a commit has one key in every range and in a golden run
    elsewhere = frozenset(commit for commit, root in roots.items() if root in trees.elsewhere)
    whole = {
        commit: _Whole(root, ())
        if leaving[root]
        else _Whole(wholes[root] or "", _ELSEWHERE if commit in elsewhere else NOT_CODE)
        for commit, root in roots.items()
        if root in leaving
    }
    return CodeKeys(paths, keys, whole, attributes, elsewhere)


def not_code(root: Path, of_commit: Sequence[str] = NOT_CODE) -> list[str]:
    """Git's words for all of a working tree but what is no code, where that of its commit is known.

    A folder may have been exchanged since, and so may a file that lies where recording writes.
    """
    golden = root / _GOLDEN
    if of_commit and (golden.is_symlink() or (golden / ".git").exists()):
        of_commit = _ELSEWHERE
    left_out = [f"glob){name}" for name in of_commit]
    for name, mark in _WRITTEN.items():
        spec = f"glob){_GOLDEN}/{name}"
        files = [path for path in golden.glob(name) if path.is_file()] if mark and spec in left_out else []
        ours = [path for path in files if mark and not path.is_symlink() and mark.search(path.read_bytes())]
        if len(ours) < len(files):
            left_out.remove(spec)
            left_out += [f"literal){path.relative_to(root)}" for path in ours]
    return [f":(top,exclude,{spec}" for spec in left_out]


def same_beside(git: Git, commit: str, other: str) -> bool:
    """Whether two commits have the same files, but for what recording writes; False where one of them is not here."""
    try:
        keys = code_keys(git, [commit, other], ["."])
    except GitFailedError:
        return False
    return keys.of(commit) == keys.of(other)


class _Trees:
    """The tree objects of a repository, each read once."""

    def __init__(self, git: Git) -> None:
        self._git, self._known = git, dict[str, bytes]()
        self._stripped = dict[tuple[str, str], bytes | None]()  # by tree and path in golden: the id of what is code
        self.through: dict[str, set[tuple[PurePosixPath, str]]] = {}  # by root: symlinks on the way to a path
        self.elsewhere: set[str] = set()  # roots in which golden is a symlink or a submodule

    def keys(self, roots: Mapping[str, str], path: str) -> dict[str, str | None]:
        """The key of a path below the tree of each commit."""
        parts = [os.fsencode(part) for part in PurePosixPath(path).parts]
        if not parts:
            self._read(roots.values())
            goldens = {tree: self._below(_Entry(_TREE, tree), _GOLDEN.encode(), b"") for tree in set(roots.values())}
            self._strip(entry.id for entry in goldens.values() if entry and entry.mode == _TREE)
            whole = {tree: self._whole(tree, golden) for tree, golden in goldens.items()}
            return {commit: whole[tree] for commit, tree in roots.items()}
        entries: dict[str, _Entry | None] = {tree: _Entry(_TREE, tree) for tree in set(roots.values())}
        for at, part in enumerate(parts):
            self._read(entry.id for entry in entries.values() if entry and entry.mode == _TREE)
            rest = b"/".join(parts[at:])
            entries = {root: self._below(entry, part, rest) for root, entry in entries.items()}
        linked = {root: entry for root, entry in entries.items() if entry and entry.mode == _LINK and entry.rest}
        for root, entry in linked.items():
            link = PurePosixPath(*(os.fsdecode(part) for part in parts[: -1 - entry.rest.count(b"/")]))
            self.through.setdefault(root, set()).add((link, entry.id))
        for root in set(linked) - self._there(linked, path):
            entries[root] = None
        tree_keys = {root: entry.key if entry else None for root, entry in entries.items()}
        return {commit: tree_keys[root] for commit, root in roots.items()}

    def _whole(self, tree: str, golden: _Entry | None) -> str:
        """The id of a root's tree without what is not code."""
        changed: dict[bytes, bytes | None] = dict.fromkeys(map(os.fsencode, _OF_DVC))
        if golden and golden.mode in (_LINK, _SUBMODULE):
            self.elsewhere.add(tree)
            changed[_GOLDEN.encode()] = None
        elif golden and golden.mode == _TREE:
            changed[_GOLDEN.encode()] = self._stripped[golden.id, ""]
        return _tree_id(_without(self._known[tree], changed, len(tree)), len(tree))

    def _strip(self, goldens: Iterable[str]) -> None:
        """Find what of trees that are ``golden`` is code: a git process for each level of folders, and one for files.

        Only the folders that recording makes are looked into.
        """
        levels = [{(tree, "") for tree in goldens} - self._stripped.keys()]
        entries = dict[tuple[str, str], list[tuple[str, _Entry]]]()
        while levels[-1]:
            self._read(tree for tree, _ in levels[-1])
            for tree, path in levels[-1]:
                length, content = len(tree) // 2, self._known[tree]
                entries[tree, path] = [
                    (f"{path}{os.fsdecode(name)}", _Entry(mode, content[end - length : end].hex()))
                    for mode, name, _, end in _entries(content, length)
                ]
            inner = [entry for folder in levels[-1] for entry in entries[folder]]
            levels.append({(e.id, f"{path}/") for path, e in inner if e.mode == _TREE and path.split("/")[0] in _MADE})
        files = [(path, e) for inner in entries.values() for path, e in inner if e.mode in _FILES]
        asked = {e.id: mark for path, e in files if (mark := _WRITTEN.get(_pattern_of(path)))}
        marked = {blob for blob, text in _contents(self._git, list(asked), "blob").items() if asked[blob].search(text)}
        for tree, path in (folder for level in reversed(levels) for folder in level):
            changed = dict[bytes, bytes | None]()
            for name, entry in entries[tree, path]:
                pattern, key = _pattern_of(name), os.fsencode(name.removeprefix(path))
                if entry.mode == _TREE and (entry.id, f"{name}/") in self._stripped:
                    changed[key] = self._stripped[entry.id, f"{name}/"]
                elif entry.mode in _FILES and pattern and (_WRITTEN[pattern] is None or entry.id in marked):
                    changed[key] = None
            rest = _without(self._known[tree], changed, len(tree))
            self._stripped[tree, path] = bytes.fromhex(_tree_id(rest, len(tree))) if rest else None

    def _below(self, entry: _Entry | None, name: bytes, rest: bytes) -> _Entry | None:
        if entry and entry.mode in (_SUBMODULE, _LINK):
            return entry if entry.rest else _Entry(entry.mode, entry.id, rest)
        if entry is None or entry.mode != _TREE:
            return None
        length = len(entry.id) // 2
        tree = self._known[entry.id]
        for mode, entry_name, _, end in _entries(tree, length):
            if entry_name == name:
                return _Entry(mode, tree[end - length : end].hex())
        return None

    def _there(self, roots: Iterable[str], path: str) -> set[str]:
        """The trees in which something is at a path that passes through symlinks."""
        asked = list(roots) if "\n" not in path else []
        if not asked:
            return set()
        stdin = os.fsencode("".join(f"{root}:{PurePosixPath(path)}\n" for root in asked))
        output = self._git("cat-file", "--batch-check=%(objecttype)", "--follow-symlinks", given=stdin)
        present, at = set[str](), 0
        for root in asked:
            line, at = output[at : output.index(b"\n", at)], output.index(b"\n", at) + 1
            kind, _, length = line.partition(b" ")
            if kind in (b"dangling", b"loop", b"notdir", b"symlink") and length.isdigit():
                at += int(length) + 1  # how far it was followed
            elif kind in (b"blob", b"tree") and not length:
                present.add(root)
        return present

    def _read(self, trees: Iterable[str]) -> None:
        """Read trees that are not known yet, all by one process."""
        self._known |= _contents(self._git, [tree for tree in dict.fromkeys(trees) if tree not in self._known], "tree")


def _pattern_of(path: str) -> str:
    """The pattern of `_WRITTEN` that is for a file in ``golden``; '' where it is nothing of ours."""
    parts = path.split("/")
    return next((pattern for pattern in _WRITTEN if _matches(parts, pattern.split("/"))), "")


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """As git's ``:(glob)``."""
    if not (parts and pattern):
        return not parts and set(pattern) <= {"**"}
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or _matches(parts[1:], pattern)
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _contents(git: Git, ids: Sequence[str], kind: str) -> dict[str, bytes]:
    """The content of trees or blobs, all read by one process.

    Raises:
        GitFailedError: one is not here.
    """
    if not ids:
        return {}
    output = git("cat-file", "--batch", "--buffer", given="".join(f"{name}\n" for name in ids).encode())
    contents, at = dict[str, bytes](), 0
    for name in ids:
        line = output.index(b"\n", at)
        facts = output[at:line].split()
        if len(facts) != 3 or facts[1] != kind.encode():
            raise GitFailedError("cat-file", f"the {kind} {name[:10]} is not here: fetch it")
        at = line + 1 + int(facts[2])
        contents[name] = output[line + 1 : at]
        at += 1
    return contents


def _entries(tree: bytes, length: int) -> Iterable[tuple[bytes, bytes, int, int]]:
    """Mode, name, begin and end of each entry of a tree object, whose ids have so many bytes."""
    at = 0
    while at < len(tree):
        space = tree.index(b" ", at)
        nul = tree.index(b"\0", space)
        end = nul + 1 + length
        yield tree[at:space].lstrip(b"0"), tree[space + 1 : nul], at, end
        at = end


def _without(tree: bytes, changed: Mapping[bytes, bytes | None], digits: int) -> bytes:
    """A tree object whose ids have so many digits, with other ids for some entries; without those that have None."""
    if not any(b" %b\0" % name in tree for name in changed):  # as in most commits of most repositories
        return tree
    length, parts = digits // 2, list[bytes]()
    for _, name, begin, end in _entries(tree, length):
        new = changed.get(name, tree[end - length : end])
        parts += [] if new is None else [tree[begin : end - length], new]
    return b"".join(parts)


def _tree_id(tree: bytes, digits: int) -> str:
    """The id that git gives a tree object."""
    hasher = hashlib.new("sha1" if digits == 40 else "sha256", usedforsecurity=False)
    hasher.update(b"tree %d\0" % len(tree) + tree)
    return hasher.hexdigest()


# -- symlinks that lead out of a subject's paths


def _leaving(git: Git, trees: _Trees, roots: Sequence[str], paths: Sequence[str]) -> dict[str, bool]:
    """The root trees in which a symlink leads from paths to something else, and whether that is in `NOT_CODE`."""
    links = _links(git, roots, paths)
    links = {root: links[root] | trees.through.get(root, set()) for root in roots}
    targets = _contents(git, sorted({blob for linked in links.values() for _, blob in linked}), "blob")
    inside = [PurePosixPath(path) for path in paths]
    leads = {link: _leads(link[0], targets[link[1]], inside) for link in set().union(*links.values())}
    leaving = {root: {leads[link] for link in links[root]} - {None} for root in roots}
    return {root: True in kinds for root, kinds in leaving.items() if kinds}


def _links(git: Git, roots: Sequence[str], paths: Sequence[str]) -> dict[str, set[tuple[PurePosixPath, str]]]:
    """Path and blob of each symlink below paths, by root tree.

    One process, however many trees there are: the first is compared with nothing, each other one with that before it.
    """
    if not roots:
        return {}
    empty = hashlib.new("sha1" if len(roots[0]) == 40 else "sha256", b"tree 0\0", usedforsecurity=False).hexdigest()
    pairs = dict(zip(roots, [empty, *roots], strict=False))
    specs = [f":(top,literal){path}" if path.parts else ":(top)" for path in map(PurePosixPath, paths)]
    stdin = "".join(f"{before} {root}\n" for root, before in pairs.items()).encode()
    output = git("diff-tree", "--stdin", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", "--", *specs, given=stdin)
    links: dict[str, set[tuple[PurePosixPath, str]]] = {}
    last: set[tuple[PurePosixPath, str]] = set()
    now, root, moved = dict[bytes, str](), "", False
    fields = iter(output.split(b"\0"))
    for facts in fields:
        *heads, entry = facts.split(b"\n")  # heads are "BEFORE ROOT", and end in a newline in spite of -z
        for head in heads:
            if moved:
                last, moved = {(PurePosixPath(os.fsdecode(name)), blob) for name, blob in now.items()}, False
            links[root], root = last, head.split()[1].decode()
        if not entry:
            continue
        name, (old, mode, _, blob, _) = next(fields), entry.lstrip(b":").split()
        if _LINK in (old, mode):
            moved = True
            now.pop(name, None)
            if mode == _LINK:
                now[name] = blob.decode()
    links[root] = {(PurePosixPath(os.fsdecode(name)), blob) for name, blob in now.items()}
    return links


def _leads(link: PurePosixPath, target: bytes, inside: Sequence[PurePosixPath]) -> bool | None:
    """Whether a symlink leads to something else of the repository; None where it does not, True for `NOT_CODE`.

    What lies outside of the repository is in no commit, so that no key of code can stand for it.
    """
    to = PurePosixPath(os.fsdecode(target))
    if to.is_absolute():
        return None
    parts, at = list(to.parts), list(link.parts[:-1])
    while parts and parts[0] == "..":
        if not at:
            return None
        del parts[0], at[-1]
    end = PurePosixPath(*at, *parts)
    if ".." in parts:  # after a folder that may itself be a symlink: anywhere
        return any(name in _ELSEWHERE for name in parts)
    left_out = bool(end.parts) and end.parts[0] in _ELSEWHERE
    if any(end.is_relative_to(path) and (path.parts or not left_out) for path in inside):
        return None
    return left_out

"""What runs inside the interpreters of environments: texts, for the standard library of any Python from 3.8 on."""

from __future__ import annotations

__all__ = ["ABOUT", "BEHIND", "COMMON", "EDITED", "MODULES", "OUTSHONE", "PIP", "SEEN", "SITES"]

COMMON = ("benchmarks", "docs", "examples", "scripts", "test", "tests", "tools")
"""Names that tell no package: many install their tests by the name that a repository's own have."""

ABOUT = """\
import json, os, platform, re, site
from importlib import metadata
found = {}
for one in metadata.distributions():
    name = one.metadata["Name"]
    if name:
        link = one.read_text("direct_url.json") or ""
        own = "dir_info" in link or "vcs_info" in link  # installed from a folder or a repository: no release
        found.setdefault(re.sub("[-_.]+", "-", name).lower(), [name, one.version, own, one.requires or []])
folders = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
implementation = "{0.major}.{0.minor}.{0.micro}".format(sys.implementation.version)
marks = {
    "implementation_name": sys.implementation.name, "implementation_version": implementation, "os_name": os.name,
    "platform_machine": platform.machine(), "platform_release": platform.release(),
    "platform_system": platform.system(), "platform_version": platform.version(),
    "python_full_version": platform.python_version(), "sys_platform": sys.platform,
    "platform_python_implementation": platform.python_implementation(),
    "python_version": ".".join(platform.python_version_tuple()[:2]), "extra": "",
}
print(json.dumps({
    "prefix": sys.prefix, "folders": [f for f in folders + site.getsitepackages() if os.path.isdir(f)],
    "marks": marks, "packages": found,
}))
"""

SITES = """\
import json, site
print(json.dumps(([site.getusersitepackages()] if site.ENABLE_USER_SITE else []) + site.getsitepackages()))
"""

BEHIND = '''\
"""Puts the base environment behind this one, and sees to it that the packages that moved are found here alone."""

import os
import site
import sys
from importlib.machinery import PathFinder

HIDDEN = {hidden!a}
OURS = {ours!a}


def _here(path):
    real = os.path.realpath
    return path.startswith(sys.prefix + os.sep) or real(path).startswith(real(sys.prefix) + os.sep)


class Keeper:
    """A finder that finds nothing.

    It hides what only the base's copies had, unless it lies elsewhere, and refuses other copies of what is here.
    """

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in HIDDEN or name in OURS:
            spec = PathFinder.find_spec(name, path)
            where = spec and spec.origin
            if where and name in OURS and not _here(where):
                raise RuntimeError("{{}} is hidden by {{}}: remove or rename that".format(OURS[name], where))
            if where and name in HIDDEN and where.startswith(HIDDEN[name] + os.sep):
                raise ModuleNotFoundError("No module named {{!r}} in this version".format(name), name=name)
        return None


sys.meta_path.insert(0, Keeper)
for folder in {folders!a}:
    site.addsitedir(folder)
'''

MODULES = """\
import json, os, sysconfig
from importlib import machinery, metadata
endings = machinery.all_suffixes()
found = {}
for wanted in sys.argv[1:]:
    one = metadata.distribution(wanted)
    paths = [str(file).replace(os.sep, "/") for file in one.files or ()]
    packages = {os.path.dirname(p) for p in paths if os.path.basename(p).split(".")[0] == "__init__"}
    roots, code, libraries = set(), [], []
    for path in paths:
        ending = next((e for e in sorted(endings, key=len, reverse=True) if path.endswith(e)), None)
        folder, base = os.path.split(path)
        if ".so." in base or (base.startswith("lib") and base.endswith(".so")):
            libraries.append(path)
        if ending is None or path.startswith((".", "/")) or "__pycache__" in folder:
            continue
        if base[:-len(ending)] != "__init__" and not base.startswith("lib"):
            code.append(path)
        words = (folder.split("/") if folder else []) + [base[:-len(ending)]]
        if not all(word.isidentifier() for word in words):
            continue
        depth = next((n for n in range(1, len(words)) if "/".join(words[:n]) in packages), len(words))
        roots.add(".".join(words[:depth]))
    home = os.path.abspath(str(one.locate_file("")))
    found[wanted] = {
        "version": one.version, "home": home, "pure": sysconfig.get_path("purelib"), "roots": sorted(roots),
        "bare": bool(libraries and not code), "libraries": libraries,
        "code": bool(code),  # there is something to import
        "scripts": [os.path.basename(p) for p in paths if "/bin/" in p and p.startswith("..")],
    }
print(json.dumps(found))
"""
"""What each distribution offers to `import`: the shortest names that are a module or a package with an `__init__`."""

EDITED = """\
import csv, hashlib, json, os, re, sys
from base64 import urlsafe_b64encode
from importlib import metadata
def content(path):
    found = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for piece in iter(lambda: file.read(1 << 20), b""):
                found.update(piece)
    except OSError:
        return ""
    return urlsafe_b64encode(found.digest()).decode().rstrip("=")
def is_edited(one):
    listed = csv.reader((one.read_text("RECORD") or "").splitlines())
    files = [(row[0], row[1][7:]) for row in listed if len(row) > 1 and row[1].startswith("sha256=")]
    return any(content(str(one.locate_file(name))) != told for name, told in files if not name.startswith(".."))
known = {}
for one in metadata.distributions():
    known.setdefault(re.sub("[-_.]+", "-", one.metadata["Name"] or "").lower(), one)
print(json.dumps([wanted for wanted in sys.argv[1:] if is_edited(known[wanted])]))
"""
"""Which distributions are not what their lists of files say; scripts name their Python, and are left out."""

SEEN = """\
import importlib.util, json
from importlib import metadata
def origin(name):
    try:
        spec = importlib.util.find_spec(name)
    except Exception as error:
        return type(error).__name__
    return spec and (spec.origin or "")
wanted = json.loads(sys.argv[1])
print(json.dumps({n: [metadata.version(n), {root: origin(root) for root in roots}] for n, roots in wanted.items()}))
"""

OUTSHONE = (
    MODULES.replace("sys.argv[1:]", "sys.argv[2:]").replace("print(json.dumps(found))\n", "")
    + f"common = {COMMON}\n"
    + """\
from importlib import invalidate_caches, util
def place(root):
    words = root.split(".")
    for depth in range(len(words)):  # what ran at the start was found before
        sys.modules.pop(".".join(words[:depth + 1]), None)
    spec = util.find_spec(root)
    return spec and spec.origin
sys.path[:0] = json.loads(sys.argv[1])
sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "__name__", "") != "Keeper"]
invalidate_caches()
other = []
for wanted, one in found.items():
    told = os.path.abspath(str(metadata.distribution(wanted).locate_file("")))
    roots = [root for root in one["roots"] if root.split(".")[0] not in common]
    places = [told + os.sep] if told != one["home"] else []
    places += [p for p in map(place, roots) if p and not p.startswith(one["home"] + os.sep)]
    other += [[wanted, one["version"], places[0].rstrip(os.sep)]] if places else []
print(json.dumps(other))
"""
)
"""Which packages have another copy in the folders that are put first on the search path, and where."""

PIP = "import pip, sys; sys.exit(tuple(map(int, pip.__version__.split('.')[:2])) < (22, 3))"
"""The first pip that installs into another interpreter's environment."""

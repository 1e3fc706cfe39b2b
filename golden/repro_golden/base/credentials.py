"""Variables that look like secrets: the programs of a repository do not get them, unless a case names them.

A program that is judged is code of whoever wrote the commit. It can read its own environment, and on Linux that of
every process of the same user, ours among them: so the secrets that we hold are taken out of what others can read.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Collection, Mapping, MutableMapping
from pathlib import Path

__all__ = ["handed_on", "hide", "looks_secret", "unreadable", "withheld"]

_WORDS = frozenset({
    "ACCESSKEY", "APIKEY", "ASKPASS", "AUTH", "AUTHORIZATION", "BEARER", "COOKIE", "COOKIES", "CRED", "CREDENTIAL",
    "CREDENTIALS", "CREDS", "DSN", "JWT", "KEY", "KEYS", "NETRC", "OAUTH", "OIDC", "PASS", "PASSPHRASE", "PASSWD",
    "PASSCODE", "PASSWORD", "PASSWORDS", "PAT", "PRIVATE", "PWD", "SAS", "SECRET", "SECRETS", "TOKEN", "TOKENS",
    "WEBHOOK",
})  # fmt: skip
"""A name with one of these among its words, which '_' parts, is a secret's."""

_ENDS = ("ACCESSKEY", "APIKEY", "CREDENTIALS", "PASSPHRASE", "PASSWD", "PASSWORD", "PRIVATEKEY", "SECRET", "SECRETKEY",
         "SSHKEY", "TOKEN", "WEBHOOK")  # fmt: skip
"""So is one with a word that ends so, such as GHTOKEN and PGPASSWORD; not TOKENIZERS."""

_KEY = re.compile(r"[^\s/]{16,}")
"""What a word that ends in KEY holds where it is a key: WANDBKEY, not MONKEY."""

_PASSES = re.compile(r"(?:^|_)(?:PASS|PASSCODE|PWD|SECRET)$")
"""Under such a name a number of four digits and more is a secret too."""

_ALWAYS = ("ACTIONS_", "AWS_", "AZURE_", "CLOUDSDK_", "GCP_", "GH_", "GITHUB_", "RUNNER_", "VSCODE_GIT_")
"""Beginnings of the names by which clouds and CI hand out secrets and the ways to them."""

_FILES = ("BOTO_CONFIG", "DOCKER_CONFIG", "KRB5CCNAME", "KUBECONFIG", "PGPASSFILE")
"""Names of files that hold secrets."""

_NOT = ("PWD", "OLDPWD")

_NUMBER = re.compile(r"[+-]?\d{0,9}(\.\d{1,9})?([eE][+-]?\d{1,2})?|true|false|yes|no|on|off|none", re.IGNORECASE)
"""Values of MAX_TOKENS, NUM_KEY_VALUE_HEADS and USE_AUTH: too little to be a token or a key."""

_VALUES = re.compile(
    r"\bhttps?://[^\s/@]+@|://[^\s/@:]*:[^\s/@]+@"  # a URL with a password, or a token for a name
    r"|\bgh[opsur]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{15,}|\bhf_[A-Za-z0-9]{25,}"
    r"|\bsk-[\w-]{20,}|\bxox[abprs]-[\w-]{10,}|\bA[KS]IA[A-Z0-9]{16}\b|\bAWS_SECRET_ACCESS_KEY="
    r"|\bhooks\.slack\.com/|\bdiscord(?:app)?\.com/api/webhooks/|\baccountkey=|\bsharedaccess(?:key|signature)="
    r"|[?&](?:sig|signature|x-amz-signature|access_token|api_?key|token)=[^&\s]{8,}"  # an address that opens a door
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.|\bauthorization: *(basic|bearer) ",
    re.IGNORECASE,
)
"""What is a secret under any name."""

_GIT = "GIT_CONFIG_"
"""Begins the variables that hold git's settings together: git fails where only some of them are there."""


def looks_secret(name: str, value: str) -> bool:
    """Whether a variable looks like a secret, or like a way to one.

    Args:
        name: Its name; upper and lower case are one.
        value: Its value. A number or a switch under a name such as MAX_TOKENS is none.
    """
    name = name.upper()
    if name in _NOT:
        return False
    if name.startswith(_ALWAYS) or name in _FILES or _VALUES.search(value):
        return True
    parts = re.split(r"[^A-Z0-9]+", name)
    if any("PASSW" in word for word in parts) or (_PASSES.search(name) and len(value) >= 4):
        return True
    if any(word.endswith("KEY") for word in parts) and _KEY.fullmatch(value):
        return True
    return not _NUMBER.fullmatch(value) and any(word in _WORDS or word.endswith(_ENDS) for word in parts)


def withheld(environ: Mapping[str, str], passed: Collection[str] = ()) -> list[str]:
    """The names of the variables that look like secrets and are not passed on by name, sorted."""
    names = {name for name, value in environ.items() if looks_secret(name, value) and not name.startswith(_GIT)}
    settings = [name for name in environ if name.startswith(_GIT)]
    if any(_VALUES.search(environ[name]) or _asks(environ[name]) for name in settings):
        names |= set(settings)
    return sorted(names.difference(passed))


def _asks(setting: str) -> bool:
    """Whether a setting of git is one that credentials stand in or come from."""
    return re.search(r"extraheader|credential|cookie|password", setting, re.IGNORECASE) is not None


def handed_on(environ: Mapping[str, str], passed: Collection[str] = ()) -> dict[str, str]:
    """What a program of the repository gets of an environment.

    Args:
        environ: Ours.
        passed: Names that it gets although they look like secrets.
    """
    hidden = set(withheld(environ, passed))
    return {name: value for name, value in environ.items() if name not in hidden}


# -- what others can read of us


def hide(environ: MutableMapping[str, str]) -> None:
    """Take secrets out of what other processes of this user can read of this one; we ourselves go on having them.

    On Linux ``/proc/PID/environ`` shows the block of memory that a process was started with: the secrets in it are
    blanked, once the library has copies of its own, and its memory is closed to others (`unreadable`). Elsewhere
    nothing is done. Root can always read us.

    Args:
        environ: `os.environ`, which writes through to the library.
    """
    secret = withheld(environ)
    if not secret or sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_void_p
    for name in secret:
        environ[name] = environ[name]  # a copy on the heap takes the place of the one in the block
    first, last = _block()
    held = ctypes.string_at(first, last - first) if first else b""
    at = first
    for entry in held.split(b"\0"):
        key, _, value = entry.partition(b"=")
        if os.fsdecode(key) in secret:
            start = at + len(key) + 1
            if not first <= (library.getenv(key) or 0) < last:
                ctypes.memset(start, ord("*"), len(value))
        at += len(entry) + 1
    unreadable()


def unreadable() -> None:
    """Let only root read the memory of this process, as far as the system can; the programs it starts are as ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def _block() -> tuple[int, int]:
    """Where the environment lies that this process was started with; zeros where the kernel does not say."""
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        first, last = int(fields[47]), int(fields[48])
    except (OSError, IndexError, ValueError):
        return 0, 0
    return (first, last) if 0 < first < last else (0, 0)

"""Which variables of the environment a probe's key holds: what may matter, and not what differs by terminal."""

from __future__ import annotations

import os
from pathlib import Path

from conftest import SOURCE

from repro_golden.subjects.surroundings import _WRITTEN, CANNOT_MATTER, variables_of_key


def test_what_cannot_matter_is_documented() -> None:
    """docs/reference/bisect.md shows every variable that is left out, with its reason."""
    text = (SOURCE / "docs" / "reference" / "bisect.md").read_text()
    for reason, names in CANNOT_MATTER.items():
        assert reason in text
        for name in names:
            assert f"`{name}`" in text, name
    assert not [word for word in _WRITTEN if f"`{word}`" not in text]


LOOK_ALIKES = {
    "terminals and their colours": (
        "TERM_PENALTY", "TERMS", "WT_DECAY", "WINDOW", "KITTY_SEED", "ITERM_COUNT", "TMUX_LAYERS", "ZELLIJ_LR",
    ),
    "shells, their prompts and where they stand": (
        "PROMPT", "PROMPT_TEMPLATE", "PROMPT_KEY", "PROMPTS", "HISTORY", "HIST_LEN", "HISTOGRAM_BINS", "PS9", "PS",
        "BASH_ENV", "FISH_EYE", "ZSHARD",
    ),
    "sessions and desktops": (
        "QT_X", "GTK_X", "GPG_SEED", "SSH_SEED", "DESKTOP_DATA", "DBUS_X", "GNOME_DATA", "VSCODE_SEED", "SYSTEMD_SEED",
        "XDG_CACHE_HOME", "XDG_CONFIG_HOME",
    ),
    "temporary folders, which differ from run to run": ("TEMP", "TMP", "TEMPERATURE", "TMPL"),
    "editors, pagers, git and DVC, which show and keep text; what git writes counts itself": (
        "LESSON", "LESS_DATA", "DVC_X", "GIT_SEED", "GIT_CONFIG_KEY_X", "EDITORS"
    ),
    "names of one job of a scheduler, of a cluster or of a test run": (
        "RAY_SEED", "RAY_X", "KUBERNETES_SEED", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_SUBMIT_SEED", "SLURMD_X"
    ),
    "our own": ("REPRO_SEED", "REPRODUCE"),
}  # fmt: skip


def test_what_looks_alike_counts() -> None:
    """A program's own variable counts, however much its name begins as that of a terminal or a job."""
    assert LOOK_ALIKES.keys() == CANNOT_MATTER.keys()
    for names in LOOK_ALIKES.values():
        for name in names:
            assert variables_of_key({name: "1"}) != variables_of_key({name: "2"}), name


def test_temporary_folders(tmp_path: Path) -> None:
    """The name of a temporary folder that is there does not count; anything else does, as a temperature."""
    for name in CANNOT_MATTER["temporary folders, which differ from run to run"]:
        assert not variables_of_key({name: str(tmp_path)})
        assert {*variables_of_key({name: "0.7"})} == {*variables_of_key({name: str(tmp_path / "no")})} == {name}


def test_two_terminals_have_one_key(tmp_path: Path) -> None:
    """What two terminals, two desktops and two jobs set, each in its own way, changes no key."""
    variables = {
        "TERM": "xterm-256color", "COLORTERM": "truecolor", "TERM_PROGRAM": "iTerm.app", "TERM_PROGRAM_VERSION": "3",
        "TERM_SESSION_ID": "w0t0p0:A", "ITERM_SESSION_ID": "w0t0p0:A", "ITERM_PROFILE": "Default", "LINES": "24",
        "COLUMNS": "80", "LC_TERMINAL": "iTerm2", "LESS": "-R", "LESSOPEN": "| a %s", "LESS_TERMCAP_mb": "x",
        "HISTFILE": "/a", "HISTSIZE": "10", "PROMPT_COMMAND": "history -a", "PS1": "$ ", "SHLVL": "1", "PWD": "/a",
        "OLDPWD": "/b", "SSH_TTY": "/dev/pts/1", "SSH_CONNECTION": "1 2", "SSH_AUTH_SOCK": "/a", "TMPDIR": os.sep,
        "GIT_EDITOR": "vi", "EDITOR": "vi", "RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "11", "_": "/bin/a",
    }  # fmt: skip
    others = {
        "TERM": "tmux", "TMUX": "/a,1,0", "TMUX_PANE": "%1", "STY": "1.pts", "WINDOWID": "7",
        "WT_SESSION": "b", "WT_PROFILE_ID": "c", "VTE_VERSION": "6800", "GNOME_TERMINAL_SCREEN": "/a", "LINES": "50",
        "KITTY_WINDOW_ID": "1", "WEZTERM_PANE": "0", "HISTCONTROL": "ignoredups", "HISTTIMEFORMAT": "%F", "PS4": "+",
        "DISPLAY": ":0", "WAYLAND_DISPLAY": "wayland-0", "XDG_SESSION_ID": "5", "XDG_RUNTIME_DIR": "/run/user/0",
        "DBUS_SESSION_BUS_ADDRESS": "unix:a", "QT_IM_MODULE": "ibus", "GTK_MODULES": "gail", "INVOCATION_ID": "f",
        "VSCODE_IPC_HOOK_CLI": "/a", "VSCODE_GIT_IPC_HANDLE": "/b", "TMPDIR": str(tmp_path), "SLURM_JOB_ID": "5",
        "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_NODELIST": "n1", "SLURMD_NODENAME": "n1", "HOSTNAME": "n1",
        "SLURM_TASK_PID": "7", "SLURM_SUBMIT_DIR": "/a", "SLURM_TOPOLOGY_ADDR": "n1", "KUBERNETES_PORT": "tcp://a",
        "KUBERNETES_PORT_443_TCP_ADDR": "a", "KUBERNETES_SERVICE_HOST": "a", "RAY_ADDRESS": "a:1", "DVC_STAGE": "x",
    }  # fmt: skip
    assert variables_of_key({"SEED": "1", **variables}) == variables_of_key({"SEED": "1", **others}) != {}

"""What a killed process leaves for others to wait for: a Ray cluster's address, the lock of an extension's build."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import ray_kit

from repro_golden.base.errors import MachineFailureError
from repro_golden.replay.children import Child

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")

START = """\
{python} -m ray.scripts.scripts start --head --node-ip-address=127.0.0.1 --port={port} --num-cpus=1 \
    --object-store-memory={store} --include-dashboard=false --disable-usage-stats
cat $TMPDIR/ray/ray_current_cluster
"""


@LINUX
@pytest.mark.whole
@pytest.mark.skipif(not ray_kit.INSTALLED, reason="needs ray")
def test_a_cluster_that_ended_with_its_launch_is_not_waited_for() -> None:
    """`ray start` of a launch leaves no address of its killed cluster; another's stays.

    Where such an address is met all the same, the launch that waits for it is the machine's failure, and no commit's.
    """
    with ray_kit.short() as folder, socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        named, variables = folder / "ray" / "ray_current_cluster", ray_kit.variables() | {"TMPDIR": str(folder)}

        def ran(script: str, limit: float = 60.0) -> str:
            log = folder / "log"
            log.unlink(missing_ok=True)
            Child(["/bin/sh", "-ec", script], folder, variables, log, limit).run()
            return log.read_text()

        ports = ray_kit.free_ports(2)
        heads = [START.format(python=sys.executable, port=port, store=ray_kit.STORE) for port in ports]
        assert ran(heads[0]).endswith(f":{ports[0]}"), "it was there while the cluster was"
        assert not named.exists()
        port = dead.getsockname()[1]
        ran(f"{heads[1]}\necho 127.0.0.1:{port} > {named}")
        assert named.read_text() == f"127.0.0.1:{port}\n", "it names no cluster of this launch"
        with pytest.raises(MachineFailureError, match=rf"a Ray cluster at \S+:{port}, where none"):
            ran(f"{sys.executable} -c 'import ray; ray.init()'", limit=20.0)


# -- extensions of torch


BUILD = """\
import os, sys, time
from pathlib import Path
from torch.utils.file_baton import FileBaton
folder = Path(sys.argv[1])
folder.mkdir(parents=True)
(folder / "build.ninja").touch()
(folder / "made").touch()
assert FileBaton(str(folder / "lock")).try_acquire()
Path("/proc/self/comm").write_bytes("Übersetzungen".encode()[:12] + b"\\xc3")  # a name may be any bytes
if "again" in sys.argv:
    (folder / "lock").unlink()
    (folder / "lock").touch()
(folder / "holds").touch()
time.sleep(999)
"""


@LINUX
@pytest.mark.parametrize("whose", ["ours", "again"])
def test_nobody_waits_for_a_build_that_was_killed(tmp_path: Path, whose: str) -> None:
    """The lock of torch's extensions goes with the process that builds; one that another made since stays."""
    folder = tmp_path / "fused"
    building = Child(
        [sys.executable, "-c", BUILD, str(folder), whose], tmp_path, dict(os.environ), tmp_path / "log", 60.0
    )
    assert building.run(enough=(folder / "holds").exists) == -signal.SIGKILL
    assert (folder / "lock").exists() == (whose == "again")
    assert (folder / "made").exists()

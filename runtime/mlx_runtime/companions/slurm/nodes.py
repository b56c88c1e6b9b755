"""Start Ray on one node of the allocation; each node runs this, as a task of one step of the job.

    srun --ntasks-per-node=1 python -m mlx_runtime.companions.slurm.nodes FILE

The first node is the head. It writes its address to FILE.head for the others, and to FILE once all have joined.

`ray symmetric-run` is not used, because it ends with `ray stop`, which also kills the user's other jobs on a node; see
docs/decisions/0032-slurm.md.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mlx_runtime.loop.job import address_towards
from mlx_runtime.settings import prepare_ray
from mlx_runtime.storage.local import write_atomic

OWN_NAME = "127.0.1.1"  # of a machine's own name, in Debian's /etc/hosts
JOIN_S = 300.0  # maximum time until all nodes have joined


def start(file: Path) -> int:
    """Start Ray on this node, and wait until it ends. Return its exit code."""
    variables = os.environ
    is_head, meeting = variables["SLURM_PROCID"] == "0", file.with_name(f"{file.name}.head")
    if is_head:
        host = variables["SLURM_LAUNCH_NODE_IPADDR"]  # that of `srun`, which runs on this node
        host = address_towards(("8.8.8.8", 1)) if host == OWN_NAME else host  # like Ray
        write_atomic(meeting, f"{host}:{_free_port()}")
    address = _read_once_written(meeting)
    host, _, port = address.rpartition(":")
    cpus = variables.get("SLURM_CPUS_PER_TASK") or variables["SLURM_CPUS_ON_NODE"]
    folder = tempfile.mkdtemp(prefix="mlx-ray-", dir="/tmp")  # short, because the paths of sockets are limited
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={address_towards((host, 1))}", f"--num-cpus={cpus}", f"--temp-dir={folder}"]
    command += ["--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={_free_port()}"]
    if is_head:
        client = f"--ray-client-server-port={_free_port()}"
        command += ["--head", f"--port={port}", client, "--include-dashboard=false"]
    else:
        command += [f"--address={address}"]
    prepare_ray()
    os.environ.setdefault("RAY_raylet_start_wait_time_s", f"{JOIN_S:.0f}")
    ray = subprocess.Popen(command, preexec_fn=os.setpgrp)
    try:
        if is_head:
            _wait_for_nodes(address, int(variables["SLURM_NTASKS"]), ray)
            write_atomic(file, f"{address}\n")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the driver has ended; `ray.init` has another handler
        return ray.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ray.pid, signal.SIGKILL)  # Ray takes up to 30 s to drain after SIGTERM, and nothing is left to do
        ray.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_nodes(address: str, count: int, started: "subprocess.Popen[bytes]") -> None:
    """Wait until that many nodes have joined the cluster."""
    import ray

    until = time.monotonic() + JOIN_S
    while True:
        with contextlib.suppress(ConnectionError):
            ray.init(address, logging_level="ERROR", log_to_driver=False, ignore_reinit_error=True)
            joined = sum(node["Alive"] for node in ray.nodes())
            if joined == count:
                ray.shutdown()
                return
        if started.poll() is not None or time.monotonic() > until:
            sys.exit(f"error: not all of {count} nodes started Ray within {JOIN_S:.0f} s")
        time.sleep(0.5)


def _read_once_written(file: Path) -> str:
    until = time.monotonic() + JOIN_S
    while not file.is_file():
        if time.monotonic() > until:
            sys.exit(f"error: the first node did not write {file} within {JOIN_S:.0f} s")
        time.sleep(0.2)
    return file.read_text()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(start(Path(sys.argv[1])))

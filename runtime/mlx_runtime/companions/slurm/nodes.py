"""Start Ray on one node of the allocation; each node runs this, as a task of one step of the job.

    srun --ntasks-per-node=1 python -m mlx_runtime.companions.slurm.nodes FILE

The first node is the head. Once all nodes have joined, it writes the address of the cluster to FILE.

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
FIRST_PORT, PORTS = 20_000, 10_000
"""Ports of heads, below Linux's ephemeral ports. Jobs that share a node need different ones."""


def start(file: Path) -> int:
    """Start Ray on this node, and wait until it ends. Return its exit code."""
    variables = os.environ
    head_address = variables["SLURM_LAUNCH_NODE_IPADDR"]  # that of `srun`, which runs on the first node
    if head_address == OWN_NAME:
        head_address = address_towards(("8.8.8.8", 1))  # like Ray
    port = FIRST_PORT + int(variables["SLURM_JOB_ID"]) % PORTS
    cpus = variables.get("SLURM_CPUS_PER_TASK") or variables["SLURM_CPUS_ON_NODE"]
    folder = tempfile.mkdtemp(prefix="mlx-ray-", dir="/tmp")  # short, because the paths of sockets are limited
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={address_towards((head_address, 1))}", f"--num-cpus={cpus}", f"--temp-dir={folder}"]
    command += ["--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={_free_port()}"]
    is_head = variables["SLURM_PROCID"] == "0"
    if is_head:
        client = f"--ray-client-server-port={_free_port()}"
        command += ["--head", f"--port={port}", client, "--include-dashboard=false"]
    else:
        command += [f"--address={head_address}:{port}"]
    prepare_ray()
    os.environ.setdefault("RAY_raylet_start_wait_time_s", f"{JOIN_S:.0f}")
    ray = subprocess.Popen(command, preexec_fn=os.setpgrp)
    try:
        if is_head:
            _wait_for_nodes(f"{head_address}:{port}", int(variables["SLURM_NTASKS"]), ray)
            write_atomic(file, f"{head_address}:{port}\n")
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(start(Path(sys.argv[1])))

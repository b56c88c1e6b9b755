"""Real Ray clusters on loopback: a head and raylets, with separate ports, folders and tokens."""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leftovers import kill, marked

START_S = 300

MARK = "RAY_TEST_NODE"
"""Variable that all processes of a node inherit."""

RAY = str(Path(sys.executable).with_name("ray"))

LISTS = (
    *("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands"),
    *("head_setup_commands", "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"),
)
"""Keys of an autoscaler's config that are lists, and must be there."""

IDLE = {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
"""Keeps nodes from starting workers before they are needed: most of them would never be used."""

NOTICED = {"RAY_health_check_period_ms": "500", "RAY_health_check_initial_delay_ms": "500"}
"""Lets Ray notice soon that a node is lost, whose port is closed then. Busy nodes get as much time as usual."""


FIRST_PORT, PORTS = 20_000, 3_000
"""First port of the first process of a test session, and number of ports of each. Outgoing connections of Linux have
higher ports, so nobody takes a free one of these before the test does."""

_taken: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that no other test uses."""
    first = FIRST_PORT + PORTS * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 4)
    found: list[int] = []
    while len(found) < count:
        port = first + secrets.randbelow(PORTS)
        if port not in _taken:
            with contextlib.suppress(OSError), socket.socket() as item:
                item.bind(("127.0.0.1", port))
                found.append(port)
                _taken.add(port)
    return found


@dataclass
class RayCluster:
    """A head without CPUs, and the raylets that are added to it.

    Args:
        environment: environment variables of all processes, including jobs.
        token: required from clients; None means that none is required.
        grows_to: maximum number of nodes with one CPU that its autoscaler starts; None means that it has none.
    """

    environment: Mapping[str, str]
    token: str | None = None
    grows_to: int | None = None
    raylets: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    _marks: dict[int, str] = field(default_factory=dict)

    def __enter__(self) -> "RayCluster":
        self.folder = Path(tempfile.mkdtemp(prefix="mlxr-", dir="/tmp"))  # short, because socket paths are limited
        self.port, self.dashboard, self.client = free_ports(3)
        self.url = f"http://127.0.0.1:{self.dashboard}"
        auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token} if self.token else {"RAY_AUTH_MODE": "disabled"}
        unused = ("RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH", "PYTHONDONTWRITEBYTECODE")  # many processes import an upload
        self._env = {name: value for name, value in self.environment.items() if name not in unused} | auth | IDLE
        self._env |= NOTICED | {"RAY_raylet_start_wait_time_s": str(START_S)}  # for a busy machine
        scaling = []
        if self.grows_to is not None:
            (config := self.folder / "autoscaler.yaml").write_text(json.dumps(self._autoscaler(self.grows_to)))
            scaling = [f"--autoscaling-config={config}"]
            self._env |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        self.head = self._start(
            *("--head", f"--port={self.port}", f"--ray-client-server-port={self.client}", "--num-cpus=0", *scaling),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard}", f"--temp-dir={self.folder}"),
        )
        try:
            self.wait(0)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _autoscaler(self, most: int) -> dict[str, Any]:
        """Return the config of an autoscaler that starts nodes on this machine."""
        from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE
        from ray.util import get_node_ip_address

        node = {"resources": {"CPU": 1, "object_store_memory": 100_000_000}, "max_workers": most, "node_config": {}}
        one_machine = {"use_node_id_as_ip": True, "disable_node_updaters": True, "disable_launch_config_check": True}
        address = f"{get_node_ip_address()}:{self.port}"
        return {
            "cluster_name": "growing",
            "max_workers": most,
            "idle_timeout_minutes": 0.05,
            "upscaling_speed": 1.0,
            "provider": {
                "type": "fake_multinode",
                "head_node_id": FAKE_HEAD_NODE_ID,
                "gcs_address": address,
                **one_machine,
            },
            "available_node_types": {
                FAKE_HEAD_NODE_TYPE: {"resources": {"CPU": 0}, "max_workers": 0, "node_config": {}},
                "small": node,
            },
            "head_node_type": FAKE_HEAD_NODE_TYPE,
            **{name: {} for name in ("auth", "docker", "head_node", "worker_nodes", "file_mounts")},
            **{name: [] for name in LISTS},
            "file_mounts_sync_continuously": False,
        }

    def __exit__(self, *_: object) -> None:
        for process in [*self.raylets, self.head]:
            self._end(process)
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(
        self,
        cpus: int = 1,
        environment: Mapping[str, str] | None = None,
        *,
        gpus: int = 0,
    ) -> None:
        """Start a raylet. Its GPUs are only numbers, which Ray assigns to workers."""
        folder = self.folder / str(len(self.raylets))
        self.raylets.append(
            self._start(
                *(f"--address=127.0.0.1:{self.port}", f"--num-cpus={cpus}", f"--num-gpus={gpus}"),
                f"--temp-dir={folder}",  # in that of the head, each of them would forward all logs
                environment=environment or {},
            )
        )

    def remove(self) -> None:
        """Kill the raylet that was added last, and wait until the head has noticed."""
        self._end(self.raylets.pop())
        self.wait(len(self.raylets))

    def kill_head(self) -> None:
        """Kill all processes of the head at once, as if its machine were lost."""
        self._end(self.head)

    def wait(self, nodes: int) -> None:
        """Wait until that many raylets have joined the head, and it accepts jobs."""
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError, KeyError, ValueError):
                self.get("/api/jobs/")
                found = self.get("/nodes?view=summary")["data"]["summary"]
                if sum(item["raylet"].get("state") == "ALIVE" for item in found) == nodes + 1:
                    return
            if self.head.poll() is not None or time.monotonic() > until:
                logs = (self.folder / "start.log").read_text()[-2000:]
                raise TimeoutError(f"no cluster of {nodes} nodes within {START_S} s: {logs}")
            time.sleep(0.2)

    def get(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=10) as answer:
            return json.load(answer)

    def _start(self, *options: str, environment: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
        common = ("--node-ip-address=127.0.0.1", "--disable-usage-stats", "--block")
        ports = ("--min-worker-port=0", "--max-worker-port=0", "--include-log-monitor=true")
        command = [RAY, "start", *options, *common, *ports, f"--dashboard-agent-listen-port={free_ports(1)[0]}"]
        with (self.folder / "start.log").open("ab") as log:
            mark = f"{self.folder}:{time.monotonic_ns()}"
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._env | dict(environment or {}) | {MARK: mark},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._marks[process.pid] = mark
        return process

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        """Send SIGKILL to all processes of a `ray start`, and to those that they start until they are dead."""
        mark = self._marks[process.pid]
        kill(lambda: _members(mark))
        process.wait()


def _members(mark: str) -> set[int]:
    """Return the living processes of a node: those with its mark, and their children, whose titles may overwrite it."""
    found, parents = set(marked(mark, MARK)), dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(stat.parent.name)] = int(parent)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


@contextlib.contextmanager
def cluster(environment: Mapping[str, str], token: str | None = None, raylets: int = 2) -> Iterator[RayCluster]:
    """Yield a cluster of a head and raylets with two CPUs each."""
    with RayCluster(environment, token) as made:
        for number in range(raylets):
            made.add(cpus=2)
            made.wait(number + 1)
        yield made

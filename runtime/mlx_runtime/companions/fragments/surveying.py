"""The machines of a Ray cluster: from the labels of its nodes, or measured by a job on them.

On the cluster, this module is the job. It prints one line of JSON.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_runtime import companions
from mlx_runtime.errors import ConfigError

MARKER = "mlx-survey "
QUESTION = "MLX_SURVEY"

LABELS = ("ram", "bandwidth", "speed")
"""Labels of nodes, as the fields of nodes.json: GB, Mbps, and relative to the machine that plans."""

SURVEY_S = 180.0
"""Timeout of the job."""

NODE_S = 60.0
"""Timeout of what is measured on nodes at once."""

PAIR_S = 20.0
"""Timeout of the measurement of a bandwidth."""

MEASURE_S, MEASURE_BYTES = 1.0, 256 << 20
"""What is sent to measure a bandwidth: for this time, but not more than this."""


def survey(ray_address: str | None, cfg: Any) -> list[dict[str, Any]]:
    """Return `name`, `ram` (GB), `bandwidth` (Mbps), and `speed` or `flops_per_s` of each node of a cluster.

    Raises:
        ClusterError: the cluster does not answer, or the job fails.
        ConfigError: a label is not a number above 0.
    """
    launch, jobs = companions.part("ray.launch"), companions.part("ray.jobs")
    address = companions.part("ray.addresses").Address.parse(ray_address)
    dashboard, upload = launch.connect(address, Path.cwd(), files=False)
    question = {"threads": cfg.cpus_per_worker, "gpus": cfg.use_gpu is not False}
    environment, command = {QUESTION: json.dumps(question)}, ["python", "-m", __name__]
    runtime_env = companions.part("ray.preflight").without_secrets(cfg.runtime_env or {})
    spec = jobs.JobSpec(command, upload, environment, {"mlx": "survey"}, runtime_env)
    found: list[dict[str, Any]] = dashboard.ask("mlx-survey", spec, marker=MARKER, timeout_s=SURVEY_S)
    for node in found:
        for label in node.pop("labels"):
            value = node[label]
            with contextlib.suppress(ValueError):
                node[label] = float(value)
            if not isinstance(node[label], float) or not 0 < node[label] < 1e9:
                raise ConfigError(f"node {node['name']}: its label {label}={value!r:.40} is not a number above 0")
    return found


def measure_nodes(question: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the facts of `survey`, in which values of labels are text; `labels` names those."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(logging_level="ERROR", log_to_driver=False)
    nodes = companions.part("ray.node_names").named_nodes()
    found: list[dict[str, Any]] = []
    actors = []
    on_gpu = bool(question["gpus"]) and all(node["Resources"].get("GPU") for node in nodes.values())  # as a run trains
    for name, node in nodes.items():
        given = {label: node["Labels"][label] for label in LABELS if label in node["Labels"]}
        found.append({"name": name, "labels": [*given], **given})
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        kind = ray.remote(num_cpus=0, num_gpus=0.01 if on_gpu else 0)(_Machine)
        actors.append(kind.options(scheduling_strategy=here).remote(question["threads"], on_gpu))
    sizes = [
        actor.sizes.remote() if {"ram", "speed"} - node.keys() else {}
        for actor, node in zip(actors, found, strict=True)
    ]
    asked = [size for size in sizes if size]
    done = ray.wait(asked, num_returns=len(asked), timeout=NODE_S)[0] if asked else []
    if silent := [node["name"] for node, size in zip(found, sizes, strict=True) if size and size not in done]:
        busy = ", and their GPUs must be free" if on_gpu else ""
        sys.exit(f"{', '.join(silent)} did not answer within {NODE_S:.0f} s; check these nodes{busy}")
    for node, size in zip(found, sizes, strict=True):
        node |= {name: value for name, value in (ray.get(size) if size else {}).items() if name not in node}
    rates = [0.0] * len(found)
    for number, actor in enumerate(actors if len(actors) > 1 else ()):
        other = (number + 1) % len(actors)
        if any("bandwidth" not in found[place] for place in (number, other)):  # one after the other, for whole links
            try:
                rate = ray.get(
                    actor.send.remote(*ray.get(actors[other].listen.remote(), timeout=PAIR_S)), timeout=PAIR_S
                )
            except ray.exceptions.RayError:  # GetTimeoutError, or an error of the socket
                pair = f"{found[number]['name']} cannot send to {found[other]['name']}"
                sys.exit(f"{pair}: open the ports between them, or give both the label bandwidth")
            rates[number], rates[other] = max(rates[number], rate), max(rates[other], rate)
    for node, rate in zip(found, rates, strict=True):
        node.setdefault("bandwidth", 8 * rate / 1e6 or 1e6)  # a node without others sends nothing
    return found


class _Machine:
    """The actor that answers for a node."""

    def __init__(self, threads: int, on_gpu: bool) -> None:
        self._threads, self._on_gpu = threads, on_gpu

    def sizes(self) -> dict[str, float]:
        import torch

        from mlx_runtime.companions.fragments.tracing import available_bytes, flops_per_s

        torch.set_num_threads(self._threads)
        device = torch.device("cuda" if self._on_gpu else "cpu")
        return {"ram": available_bytes(device) / 1e9, "flops_per_s": flops_per_s(device)}

    def listen(self) -> tuple[str, int]:
        """Return an address at which this node receives what another one sends."""
        import ray

        host = ray.util.get_node_ip_address()
        server = socket.create_server((host, 0))

        def receive() -> None:
            with server, contextlib.suppress(OSError):
                server.settimeout(SURVEY_S)
                peer, _ = server.accept()
                with peer:
                    while peer.recv(1 << 20):
                        pass
                    peer.sendall(b".")

        threading.Thread(target=receive, daemon=True).start()
        return host, server.getsockname()[1]

    def send(self, host: str, port: int) -> float:
        """Return the bytes per second that arrive at another node."""
        block, sent, start = bytes(1 << 18), 0, time.perf_counter()
        with socket.create_connection((host, port), timeout=SURVEY_S) as peer:
            while sent < MEASURE_BYTES and time.perf_counter() < start + MEASURE_S:
                peer.sendall(block)
                sent += len(block)
            peer.shutdown(socket.SHUT_WR)
            peer.recv(1)
        return sent / (time.perf_counter() - start)


if __name__ == "__main__":
    print(MARKER + json.dumps(measure_nodes(json.loads(os.environ[QUESTION]))), flush=True)
    with contextlib.suppress(OSError):
        sys.stdout.close()
    os._exit(0)  # Ray's own shutdown takes seconds

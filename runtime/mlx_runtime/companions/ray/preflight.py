"""Checks of a cluster before a launch: versions, capacity, storage, secrets and network."""

import contextlib
import importlib.metadata
import json
import platform
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime.companions.jobs.checks import Check
from mlx_runtime.companions.ray import probe
from mlx_runtime.companions.ray.autoscaler import Room
from mlx_runtime.companions.ray.dashboard import Dashboard
from mlx_runtime.companions.ray.jobs import JobSpec
from mlx_runtime.companions.ray.start import refuse_no_task
from mlx_runtime.errors import ClusterError, ConfigError, StorageError, short_message
from mlx_runtime.runs.snapshots import Upload
from mlx_runtime.storage.files import is_uri, storage_at
from mlx_runtime.workers.placement import shortage, uses_gpus

if TYPE_CHECKING:
    from mlx_runtime.companions.jobs.options import DataConfig
    from mlx_runtime.loop.options import TrainConfig

MIN_RAY = 2, 60  # as in pyproject.toml
LIMIT_BYTES = 100 << 20  # maximum size of an upload
PROBE_S = 180.0  # timeout of the probe job
NODE_S = 60.0  # timeout of a node's answer to the probe
INSTALL_S = 600.0  # added to both if the cluster installs packages first, as with `--pip`


def check_cluster(dashboard: Dashboard) -> Iterator[Check]:
    """Report a cluster that has answered, and compare its version of Ray with the one here."""
    token = f", token from {dashboard.token_source}" if dashboard.token_source else ""
    yield Check("cluster", f"{dashboard.address.url} (from {dashboard.address.source}) answered{token}")
    there = dashboard.ray_version
    try:
        here = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:  # on a machine that only launches
        here, fits = f"{'.'.join(map(str, MIN_RAY))} or newer", _numbers(there) >= MIN_RAY
    else:
        fits = _numbers(there) == _numbers(here)
    yield Check("ray", f"the cluster has Ray {there}", None if fits else f"Use a cluster with Ray {here}")


def check_upload(upload: Upload) -> Check:
    """Compare the size of the upload with the limit, and name the largest files if it is too large."""
    size = sum(size for _, size in upload.files)
    text = f"{len(upload.files):,} files, {size / 1e6:,.1f} MB"
    if size <= LIMIT_BYTES:
        return Check("upload", text)
    most = sorted(upload.files, key=lambda item: item[1], reverse=True)[:10]
    largest = "".join(f"\n      {item / 1e6:>9,.1f} MB  {path}" for path, item in most)
    hint = f"Add files that runs do not need to .rayignore or .gitignore; the largest are:{largest}"
    return Check("upload", f"{text}; clusters accept at most {LIMIT_BYTES / 1e6:,.0f} MB", hint)


def check_nodes(
    dashboard: Dashboard, cfg: Any, root: str, upload: Upload, runtime_env: Mapping[str, Any], *, tasks: bool = False
) -> list[Check]:
    """Run a job that checks Python, torch, the storage and variables on every node, and the cluster's capacity.

    The workers of `cfg` form a group, or are the independent `tasks` of a data job.
    """
    content = uuid.uuid4().hex
    file = f".probe-{content}"
    extra_s = INSTALL_S if {"pip", "uv", "conda"} & runtime_env.keys() else 0.0
    question: dict[str, Any] = {"root": root, "file": file, "content": content}
    question |= {"variables": list(cfg.secrets), "seconds": NODE_S + extra_s}
    question |= {"workers": 0, "gpus": None} if tasks else _group(cfg)
    environment, command = {probe.QUESTION: json.dumps(question)}, ["python", "-m", probe.__name__]
    spec = JobSpec(command, upload, environment, {"mlx": "check"}, runtime_env)
    with writable(root, file, content) as unwritable:
        if unwritable is not None:
            return [unwritable]
        try:
            # Twice, because the head installs packages for itself first.
            found = dashboard.ask("mlx-check", spec, marker=probe.MARKER, timeout_s=PROBE_S + 2 * extra_s)
            written = sum(name.startswith(f"{file}-") for name in storage_at(root).names())
        except (ClusterError, OSError) as error:
            cure = "Try again; the nodes are listed in the dashboard"
            if "No module named 'ray'" in str(error):
                cure = "Nodes run jobs with the python on their PATH: activate the environment of Ray before ray start"
            return [Check("nodes", short_message(error), cure)]
    room = Room(**found["room"])
    capacity = task_check(room, cfg) if tasks else capacity_check(room, cfg)
    return [*node_checks(found["nodes"], root, written), *network_checks(found["group"]), capacity]


def _group(cfg: "TrainConfig") -> dict[str, int | None]:
    """Return the number of `workers` in a run, and the minimum number of `gpus` to train on them, or None."""
    workers = max(1, cfg.elastic.min_workers or cfg.start_workers)
    gpus = None if cfg.use_gpu is False else workers * cfg.gpus_per_worker
    return {"workers": cfg.elastic.max_workers or cfg.start_workers, "gpus": gpus}


@contextlib.contextmanager
def writable(root: str, file: str, content: str = "") -> Iterator[Check | None]:
    """Write a file to the storage for the block. Yield a failed check if that is not possible.

    Afterwards, files whose names begin with its name are removed, and created empty folders: an empty storage on
    this machine would hide that of the cluster.
    """
    parts = [] if is_uri(root) else [Path(root), *Path(root).parents]
    created = [part for part in parts if not part.exists()]
    try:
        yield _write(root, file, content)
    finally:
        with contextlib.suppress(OSError, StorageError):
            for name in storage_at(root).names():
                if name.startswith(file):
                    storage_at(root).remove_file(name)
        for part in created:
            with contextlib.suppress(OSError):
                part.rmdir()


def _write(root: str, file: str, content: str) -> Check | None:
    try:
        storage = storage_at(root)
        if storage.local:
            Path(storage.path).mkdir(parents=True, exist_ok=True)
        storage.write(content.encode(), file)
    except (OSError, StorageError) as error:
        hint = "Choose another with cfg.storage_path=FOLDER or MLX_STORAGE"
        return Check("storage", f"cannot write {root}: {short_message(error)}", hint)
    return None


def node_checks(nodes: Sequence[Mapping[str, Any]], root: str, written: int) -> Iterator[Check]:
    """Evaluate the answers of nodes to the probe. Files written by `written` of them are visible on this machine."""
    answers = [node for node in nodes if "error" not in node]
    count = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
    if failed := [f"{node['ip']} {node['error']}" for node in nodes if "error" in node]:
        yield Check("nodes", "; ".join(failed), "See the dashboard for the cause")
    if not answers:
        return
    here, there = platform.python_version(), ", ".join(sorted({node["python"] for node in answers}))
    if all(_numbers(node["python"]) == _numbers(here) for node in answers):
        yield Check("python", f"{there} on {count}, {here} here")
    else:
        hint = "Use the same minor version of Python here and on the nodes"
        yield Check("python", f"the cluster has {there}, this machine {here}", hint)
    if lacking := ", ".join(node["ip"] for node in answers if not node["torch"]):
        yield Check("torch", f"is not installed on {lacking}", "Use an image with torch, or install it with --pip")
    else:
        yield Check("torch", f"on {count}")
    blind = "; ".join(f"{node['ip']}: {node['storage']}" for node in answers if node["storage"])
    if not blind and written < len(answers):
        blind = f"this machine, which sees the files of {written} of {len(answers)} nodes"
    if blind:
        hint = "Set cfg.storage_path or MLX_STORAGE to a folder that every node mounts, or to s3://BUCKET/PATH"
        yield Check("storage", f"{root} is not shared with {blind}", hint)
    else:
        yield Check("storage", f"{root} is writable and readable on {count}")
    unset = []
    for name in sorted({name for node in answers for name in node["unset"]}):
        without = [node["ip"] for node in answers if name in node["unset"]]
        unset.append(f"{name} is missing on {len(without)} of {count}: {', '.join(without)}")
    if unset:
        yield Check("secrets", "; ".join(unset), "Set it in the environment of ray start on each node")


def network_checks(group: Mapping[str, Any] | None) -> Iterator[Check]:
    """Evaluate the process group that the nodes have tried to form, if they had to."""
    if group is None:
        return
    if "torch" in group:
        yield Check("torch", f"cannot be imported: {group['torch']}", 'Try on that node: python -c "import torch"')
    elif "error" in group:
        hint = (
            "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in cfg.runtime_env.env_vars to the network interface "
            "between the nodes, and open all TCP ports between them: docs/guides/cluster.md#network"
        )
        yield Check("network", f"the nodes cannot form a process group: {group['error']}", hint)
    else:
        text = f"{group['nodes']} nodes form a process group" if group else "not tried: not every node has a free GPU"
        yield Check("network", text)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the major and the minor number of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def task_check(room: Room, cfg: "DataConfig") -> Check:
    """Check that a task of a data job fits into the cluster, once it has grown."""
    try:
        refuse_no_task(cfg, room)
    except ConfigError as error:
        return Check("capacity", str(error), "Lower cfg.cpus_per_worker, or add larger nodes")
    return Check("capacity", f"the cluster has {room.now(CPU=1):g} CPUs and {room.now(GPU=1):g} GPUs")


def capacity_check(room: Room, cfg: "TrainConfig") -> Check:
    """Check that the workers fit into the whole cluster, once it has grown, ignoring its current use by others."""
    if lacking := shortage(cfg, room.most(CPU=1), room.most(GPU=1), cluster=True):
        return Check("capacity", lacking, "")
    workers, each = cfg.elastic.min_workers or cfg.start_workers, {"CPU": cfg.cpus_per_worker}
    if uses_gpus(cfg, room.now(GPU=1)):
        each["GPU"] = cfg.gpus_per_worker
    resources = " and ".join(f"{amount:g} {name}" for name, amount in each.items())
    need = f"{workers} worker{'s' * (workers != 1)} of {resources}"
    if (fit := room.most(**each)) < workers:
        hint = "Lower cfg.cpus_per_worker, or add larger nodes"
        return Check("capacity", f"{need} each do not fit: the nodes of the cluster hold {fit:g}", hint)
    waits = "; they wait until its autoscaler has started nodes" if room.now(**each) < workers else ""
    return Check(
        "capacity", f"the cluster has {room.now(CPU=1):g} CPUs and {room.now(GPU=1):g} GPUs, for {need}{waits}"
    )

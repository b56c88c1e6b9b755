"""The manifest of a RayJob: the cluster that a run needs, and the job that trains it.

Fields: https://docs.ray.io/en/latest/cluster/kubernetes/references/api.html (KubeRay 1.5.1 to 1.7).
"""

import math
import re
import shlex
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.settings import Settings
from mlx_runtime.storage.documents import to_yaml
from mlx_runtime.workers.placement import JOB_FLAG

NAME_LETTERS = 47
"""Maximum length of a RayJob's name: KubeRay appends to it for the names of the cluster, its pods and services."""

MOUNT = "/mnt/runs"
"""Storage in the pods if `cfg.storage_path` is relative to the experiment on this machine."""

JOB_LABEL = "mlx-runtime/job"
"""Label of the pods with the name of their RayJob."""

HEAD_CONTAINER = "ray-head"
"""Container of the head."""

GPU = "nvidia.com/gpu"
"""Resource of a GPU, with `cfg.use_gpu=true`."""

PID_FILE = "mlx-driver.pid"
"""File with the process id of the driver, in the folder for temporary files of the head."""

GRACE_S = 60
"""Time for a checkpoint when a pod is deleted."""

HEAD = {"cpu": "1", "memory": "4Gi"}
"""Resources of the head, which runs the driver."""

STOP_DRIVER = f'read pid < "${{TMPDIR:-/tmp}}/{PID_FILE}" && kill $pid && while kill -0 $pid; do sleep 1; done; true'
"""Hook of the head before its deletion: the driver stops with a checkpoint."""

DRAIN_NODE = (
    "busy() { grep -qs 'ray::[R]ayWorker' /proc/[0-9]*/cmdline; }; busy || exit 0; "
    "ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'the pod is being deleted' "
    f"--deadline-remaining-seconds {GRACE_S}; while busy; do sleep 1; done; true"
)
"""Hook of a pod with workers before its deletion: they save a checkpoint. `RayWorker` is the class that Ray names."""


@dataclass(frozen=True)
class Pods:
    """Options of `mlx train launch --kube`."""

    image: str
    namespace: str | None = None
    context: str | None = None
    claim: str | None = None
    secret: tuple[str, ...] = ()
    workers_per_pod: int = 1
    memory: str = "4Gi"
    template: str | None = None  # file


def job_name(title: str) -> str:
    """Return a new name for a RayJob: a DNS label that begins with a title."""
    words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    words = words if words[:1].isalpha() else f"run-{words}"
    return f"{words[: NAME_LETTERS - 7].rstrip('-')}-{uuid.uuid4().hex[:6]}"


def rayjob(
    name: str,
    pods: Pods,
    cfg: TrainConfig,
    root: str,
    command: Sequence[str],
    metadata: Mapping[str, str],
    *,
    ray_version: str,
    trials: int | None = None,
    template: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the manifest of a job that runs a command on the head of its cluster.

    Args:
        name: name of the RayJob, and id of the job.
        pods: options of the launch.
        cfg: settings of the run, or of all runs of a sweep.
        root: folder or URI of the storage, as the pods see it.
        command: words of the command.
        metadata: shown in Ray's dashboard.
        ray_version: version of Ray in the image.
        trials: runs of a sweep that train at the same time; None for a single run.
        template: fields of the RayJob that are merged into the manifest; see `merge`.
    """
    alone = trials is None and cfg.start_workers == 0  # trains in the driver
    head = _pod(name, pods, root, HEAD_CONTAINER, _worker_amounts(cfg, pods, 1) if alone else HEAD, STOP_DRIVER)
    if alone:
        head["spec"] |= _tolerations(cfg)
    cluster: dict[str, Any] = {"rayVersion": ray_version, "authOptions": {"mode": "token"}}
    if not alone and trials is None and _most(cfg) > _least(cfg):
        cluster |= {"enableInTreeAutoscaling": True, "autoscalerOptions": {"version": "v2"}}
    cluster["headGroupSpec"] = {"rayStartParams": {"num-cpus": "0"}, "template": head}
    if not alone:
        cluster["workerGroupSpecs"] = [_worker_group(name, pods, cfg, root, trials or 1)]
    environment = {JOB_FLAG: "1", "MLX_JOB": name, "MLX_JOB_ADDRESS": f"kube://{pods.namespace or ''}/{name}"}
    settings, runtime_env = Settings.read(), dict(cfg.runtime_env or {})
    environment |= {"MLX_VERBOSE": "1"} if settings.verbose else {}
    environment |= {"MLX_QUIET": "1"} if settings.quiet else {}
    runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **environment}
    spec: dict[str, Any] = {
        "entrypoint": shlex.join(command),
        "jobId": name,
        "metadata": dict(metadata),
        "submissionMode": "HTTPMode",
        "backoffLimit": 2,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 300,
        "runtimeEnvYAML": to_yaml(runtime_env),
        "rayClusterSpec": cluster,
    }
    about = {"name": name} | ({"namespace": pods.namespace} if pods.namespace else {})
    job = merge({"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": about, "spec": spec}, template or {})
    return dict(job)


def merge(tree: Any, template: Any) -> Any:
    """Return a manifest with the fields of a template.

    Mappings are merged, and so are lists of mappings with a `name` or `groupName`, like containers. `null` removes a
    field. Anything else is replaced.
    """
    if isinstance(template, Mapping):
        ours = tree if isinstance(tree, Mapping) else {}
        found = {**ours, **{key: merge(ours.get(key), item) for key, item in template.items()}}
        return {key: item for key, item in found.items() if item is not None}
    if isinstance(template, list) and isinstance(tree, list) and (theirs := _by_name(template)):
        known = _by_name(tree)
        return [merge(known.get(name), theirs.get(name, {})) for name in {**known, **theirs}]
    return template


def _by_name(items: Sequence[Any]) -> dict[str, Any]:
    """Return the items of a list by name; empty if one has no name."""
    names = [str(item.get("name") or item.get("groupName") or "") for item in items if isinstance(item, Mapping)]
    return dict(zip(names, items, strict=True)) if all(names) and len(names) == len(items) else {}


def _least(cfg: TrainConfig) -> int:
    return cfg.elastic.min_workers or cfg.start_workers


def _most(cfg: TrainConfig) -> int:
    return cfg.elastic.max_workers or cfg.start_workers


def _worker_group(name: str, pods: Pods, cfg: TrainConfig, root: str, trials: int) -> dict[str, Any]:
    """Return the group of pods with workers, enough for `trials` runs of a sweep, or for one run."""
    least, start, most = (
        trials * math.ceil(max(1, workers) / pods.workers_per_pod)
        for workers in (_least(cfg), cfg.start_workers, _most(cfg))
    )
    template = _pod(name, pods, root, "ray-worker", _worker_amounts(cfg, pods, pods.workers_per_pod), DRAIN_NODE)
    template["spec"] |= _tolerations(cfg)
    sizes = {"replicas": start, "minReplicas": least, "maxReplicas": most}
    return {"groupName": "workers", **sizes, "rayStartParams": {}, "template": template}


def _tolerations(cfg: TrainConfig) -> dict[str, Any]:
    """Return the field that lets pods with GPUs run on nodes that are reserved for them."""
    return {"tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]} if cfg.use_gpu else {}


def _pod(
    name: str, pods: Pods, root: str, container: str, amounts: Mapping[str, str], before_deletion: str
) -> dict[str, Any]:
    """Return the template of a pod with one container, which runs a hook before its deletion."""
    ray: dict[str, Any] = {"name": container, "image": pods.image}
    ray["resources"] = {"requests": dict(amounts), "limits": dict(amounts)}
    ray["lifecycle"] = {"preStop": {"exec": {"command": ["/bin/sh", "-c", before_deletion]}}}
    ray["env"] = [{"name": "MLX_STORAGE", "value": root}]  # for commands that are typed in the pod
    if pods.secret:
        ray["envFrom"] = [{"secretRef": {"name": secret}} for secret in pods.secret]
    spec: dict[str, Any] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": GRACE_S}
    # Claims often belong to root; the user of the image has this group.
    spec["securityContext"] = {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"}
    if pods.claim:
        ray["volumeMounts"] = [{"name": "storage", "mountPath": root}]
        spec["volumes"] = [{"name": "storage", "persistentVolumeClaim": {"claimName": pods.claim}}]
    return {"metadata": {"labels": {JOB_LABEL: name}}, "spec": spec | {"containers": [ray]}}


def _worker_amounts(cfg: TrainConfig, pods: Pods, workers: int) -> dict[str, str]:
    """Return the resources of a pod with this number of workers."""
    unit = pods.memory.lstrip("0123456789")
    memory = f"{workers * int(pods.memory.removesuffix(unit))}{unit}"
    gpus = {GPU: str(workers * cfg.gpus_per_worker)} if cfg.use_gpu else {}
    return {"cpu": str(workers * cfg.cpus_per_worker), "memory": memory} | gpus

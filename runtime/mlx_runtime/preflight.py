"""Would it run? What can be known of a cluster, or of this machine, before a run starts."""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime import probe
from mlx_runtime.config import TrainConfig
from mlx_runtime.errors import ClusterError, ConfigError, MlxError, StorageError, UsageError, first_line
from mlx_runtime.jobs import Address, Jobs, Reached, reached
from mlx_runtime.layout import CONF
from mlx_runtime.logs import last_lines
from mlx_runtime.redaction import redacted_override, secret_keys
from mlx_runtime.settings import Settings
from mlx_runtime.storage import Storage, is_uri
from mlx_runtime.uploads import LIMIT_BYTES, Upload

if TYPE_CHECKING:
    from mlx_runtime.loading import Config

PROBE_S = 60.0
"""How long the cluster has to run a small job."""

NODE_S = 30.0
"""Of it, how long each node has to answer."""

INSTALL_S = 600.0
"""How much longer each of these may take where an environment is made first, as for `--pip`."""


@dataclass(frozen=True)
class Check:
    """What was found.

    Attributes:
        name: of what was looked at.
        text: what was found.
        cure: what to do about it; None when all is well.
    """

    name: str
    text: str
    cure: str | None = None

    @property
    def ok(self) -> bool:
        return self.cure is None

    def line(self) -> str:
        """For a person."""
        return f"{'ok' if self.ok else 'FAIL':<6}{self.name:<10} {self.text}{f'. {self.cure}' if self.cure else ''}"


def cluster(address: Address) -> tuple[Reached | None, list[Check]]:
    """Does it answer, take the token, and run our version of Ray?"""
    try:
        found = reached(address)
    except ClusterError as error:
        text, _, cure = str(error).partition("; ")
        return None, [Check("cluster", text, cure[:1].upper() + cure[1:])]
    by = f", token from {found.token_from}" if found.token_from else ""
    checks = [Check("cluster", f"{address.url} (from {address.source}) answers in {1000 * found.seconds:.0f} ms{by}")]
    ours = importlib.metadata.version("ray")
    if found.ray.split(".")[:2] != ours.split(".")[:2]:
        cure = f"Use a cluster with Ray {ours}, or a version of mlx-runtime that is made for {found.ray}"
        return found, [*checks, Check("ray", f"the cluster has Ray {found.ray}, here is {ours}", cure)]
    return found, [*checks, Check("ray", f"{found.ray} there, {ours} here")]


def fits(unseen: Sequence[str]) -> Check:
    """A config without problems, and the targets in it that were not checked because only a run imports them."""
    left_out = f"; not checked, because src does not import it: {', '.join(unseen)}" if unseen else ""
    return Check("config", f"{CONF} fits the code{left_out}")


def upload(found: Upload) -> Check:
    """Is it small enough? If not, what is large?"""
    size = found.size_bytes
    text = f"{len(found.files):,} files, {size / 1e6:,.1f} MB"
    if size <= LIMIT_BYTES:
        return Check("upload", text)
    largest = "".join(f"\n      {item / 1e6:>9,.1f} MB  {path}" for path, item in found.largest())
    cure = f"Name what no run needs in .rayignore or .gitignore; the largest are:{largest}"
    return Check("upload", f"{text}; a cluster takes {LIMIT_BYTES / 1e6:,.0f} MB", cure)


def secrets(config: "Config") -> Check:
    """Is none written down where everybody can read it?"""
    sent = {"cfg": {"runtime_env": config.cfg.runtime_env or {}}}  # also what comes from the environment here
    written = list(dict.fromkeys([*secret_keys(sent), *secret_keys(config.unresolved)]))
    for item in config.overrides:
        name = item.partition("=")[0].lstrip("+")
        if redacted_override(item) != item and not any(f"{key}.".startswith(f"{name}.") for key in written):
            written.append(name)
    if written:
        cure = "Set it in the environment of the nodes, and name it: cfg.secrets=[NAME], and ${oc.env:NAME} as value"
        return Check("secrets", f"{', '.join(written)} would show in the dashboard and in run.json", cure)
    names = config.cfg.secrets
    return Check("secrets", f"by name: {', '.join(names)}" if names else "none")


def nodes(jobs: Jobs, cfg: TrainConfig, root: str, folder: Path, runtime_env: Mapping[str, Any]) -> list[Check]:
    """Ask every node: versions, torch, the storage, variables, and whether there is room. Takes a job of some seconds.

    Args:
        jobs: of the cluster.
        cfg: of the run.
        root: of its storage.
        folder: to upload.
        runtime_env: of the run.
    """
    content = uuid.uuid4().hex
    file = f".probe-{content}"
    try:
        storage = Storage(root)
        if storage.local:
            Path(storage.path).mkdir(parents=True, exist_ok=True)
        storage.write(content.encode(), file)
    except (OSError, StorageError) as error:
        cure = "Choose another with cfg.storage_path=FOLDER or MLX_STORAGE"
        return [Check("storage", f"cannot write {root}: {first_line(error)}", cure)]
    try:
        told = _asked(jobs, {"root": root, "file": file, "content": content}, cfg, folder, runtime_env)
        seen = [name for name in storage.names() if name.startswith(f"{file}-")]
    except (ClusterError, OSError) as error:
        return [Check("nodes", first_line(error), "Look at the dashboard, or try again")]
    finally:
        with contextlib.suppress(OSError):
            for name in storage.names():
                if name.startswith(file):
                    storage.remove_file(name)
    return list(_judged(told, cfg, root, len(seen)))


def _asked(
    jobs: Jobs, question: dict[str, Any], cfg: TrainConfig, folder: Path, runtime_env: Mapping[str, Any]
) -> dict[str, Any]:
    """What the probe says.

    Raises:
        ClusterError: it does not come to its end.
    """
    more = INSTALL_S if {"pip", "uv", "conda"} & runtime_env.keys() else 0.0
    question = question | {"variables": list(cfg.secrets), "seconds": NODE_S + more}
    job = f"mlx-check-{uuid.uuid4().hex[:8]}"
    jobs.submit(
        ["python", "-m", "mlx_runtime.probe"],
        job=job,
        folder=folder,
        environment={probe.QUESTION: json.dumps(question)},
        metadata={"mlx": "check"},
        runtime_env=runtime_env,
    )
    until = time.monotonic() + PROBE_S + 2 * more  # the head makes its own first
    while not (details := jobs.details(job)).ended:
        if time.monotonic() > until:
            jobs.stop(job)
            raise ClusterError(
                f"the job {job} did not end within {PROBE_S + 2 * more:.0f} s; is there room on the head node?"
            )
        time.sleep(0.2)
    log = jobs.log(job)
    for line in log.splitlines():
        if line.startswith(probe.MARK):
            jobs.forget(job)
            found: dict[str, Any] = json.loads(line.removeprefix(probe.MARK))
            return found
    why = last_lines(log, 1).strip() or last_lines(details.message.strip(), 1)
    raise ClusterError(f"a small job fails there: {why}")


def _judged(told: Mapping[str, Any], cfg: TrainConfig, root: str, seen: int) -> Iterator[Check]:
    all_nodes: list[dict[str, Any]] = told["nodes"]
    silent = [node for node in all_nodes if "error" in node]
    answered = [node for node in all_nodes if "error" not in node]
    count = f"{len(all_nodes)} node{'s' * (len(all_nodes) != 1)}"
    if silent:
        text = "; ".join(f"{node['ip']} {node['error']}" for node in silent)
        yield Check("nodes", text, "See the dashboard for what ails them")
    versions = sorted({node["python"] for node in answered})
    here = platform.python_version()
    if any(item.split(".")[:2] != here.split(".")[:2] for item in versions):
        cure = "Use the cluster's version of Python here, or an image with this one there"
        yield Check("python", f"the cluster has {', '.join(versions)}, here is {here}", cure)
    elif answered:
        yield Check("python", f"{', '.join(versions)} on {count}, {here} here")
    without = {node["ip"]: node["torch"] for node in answered if node["torch"]}
    if without:
        where = "; ".join(f"{ip}: {why}" for ip, why in without.items())
        yield Check("torch", f"cannot be imported on {where}", "Use an image with torch, or install it with --pip")
    elif answered:
        yield Check("torch", f"on {count}")
    blind = {node["ip"]: node["storage"] for node in answered if node["storage"]}
    if not blind and seen < len(answered):
        blind = {"this machine": f"sees what {seen} of {len(answered)} nodes have written"}
    if blind:
        where = "; ".join(f"{ip}: {why}" for ip, why in blind.items())
        cure = "Set cfg.storage_path or MLX_STORAGE to a folder that every node mounts, or to s3://BUCKET/PATH"
        yield Check("storage", f"{root} is not shared with {where}", cure)
    elif answered:
        yield Check("storage", f"{root} is written and read by {count}")
    unset = sorted({name for node in answered for name in node["unset"]})
    if unset:
        cure = "Set it in the environment that the nodes are started with"
        yield Check("secrets", f"{', '.join(unset)} is not set on every node", cure)
    yield _room(told, cfg)


def _room(told: Mapping[str, Any], cfg: TrainConfig) -> Check:
    """Does the cluster have what the run needs, counting what others use at present?"""
    name, least = ("min_workers", cfg.min_workers) if cfg.min_workers else ("start_workers", cfg.start_workers)
    cpus, gpus = told["cpus"], told["gpus"]
    wanted = least * cfg.cpus_per_worker
    has = f"the cluster has {cpus:g} CPUs and {gpus:g} GPUs"
    if wanted > cpus:
        return Check("room", f"cfg.{name}={least} needs {wanted} CPUs; {has}", "Lower it, or cfg.cpus_per_worker")
    if cfg.use_gpu and least > gpus:
        return Check("room", f"cfg.use_gpu=true needs {least} GPUs; {has}", f"Lower cfg.{name}, or use_gpu=null")
    return Check("room", f"{has}, for {least} workers of {cfg.cpus_per_worker} CPU")


def doctor() -> Iterator[Check]:
    """Is this machine ready? Looks at Python, packages, the storage, and the experiment in the working directory."""
    version = platform.python_version()
    old = sys.version_info < (3, 10)
    yield Check("python", version, "Python 3.10 or newer is needed" if old else None)
    for package in ("torch", "ray", "torchmetrics", "tensorboard"):
        try:
            yield Check(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Check(package, "is not installed", f"pip install {package}")
    yield _devices()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    yield Check("machine", f"{os.cpu_count()} cores, {memory:.0f} GB of memory")
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free / 1e9
        cure = "Ray keeps objects there; in a container: --shm-size=4g" if free < 1 else None
        yield Check("/dev/shm", f"{free:.1f} GB free", cure)
    yield from _experiment()


def _devices() -> Check:
    try:
        import torch
    except Exception as error:
        return Check("devices", f"torch cannot be imported: {first_line(error)}", "pip install torch")
    if not torch.cuda.is_available():
        return Check("devices", "no GPU that torch can use; training runs on CPUs")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Check("devices", ", ".join(names))


def _experiment() -> Iterator[Check]:
    """Of the working directory, when it is one."""
    from mlx_runtime.layout import EXPERIMENT, storage_root

    chosen = Settings.read().storage
    if EXPERIMENT.is_file():
        from mlx_runtime import loading, projects

        try:
            config = loading.load_config(projects.main_class(projects.AN_EXPERIMENT, Path.cwd()), look=True)
            yield fits(config.unseen)
            chosen = config.cfg.storage_path if chosen is None else chosen
        except ConfigError as error:
            yield Check("config", str(error), "See it with: mlx train show")
        except MlxError as error:
            yield Check("config", str(error), "Mend it first")
    else:
        yield Check("config", "this folder is no experiment; nothing to look at")
    if chosen is None:
        return
    try:
        root = storage_root(chosen)
    except UsageError as error:
        yield Check("storage", str(error), "See cfg.storage_path and MLX_STORAGE")
        return
    try:
        storage = Storage(root)
        if storage.local:
            Path(storage.path).mkdir(parents=True, exist_ok=True)
        name = f".probe-{uuid.uuid4().hex}"
        storage.write(b"", name)
        storage.remove_file(name)
        free = "" if is_uri(root) else f", {shutil.disk_usage(root).free / 1e9:,.0f} GB free"
        yield Check("storage", f"{root} can be written{free}")
    except (OSError, StorageError) as error:
        cure = "Choose another with cfg.storage_path=FOLDER or MLX_STORAGE"
        yield Check("storage", f"cannot write {root}: {first_line(error)}", cure)

"""Checks of this machine: Python, packages, devices, memory, and the experiment in the working directory."""

import importlib.metadata
import os
import platform
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from mlx_runtime.companions.jobs.checks import Check
from mlx_runtime.companions.ray.preflight import writable
from mlx_runtime.config import projects
from mlx_runtime.errors import ConfigError, MlxError, short_message
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import is_uri, storage_root


def checks() -> Iterator[Check]:
    """Check this machine, and yield each finding."""
    yield Check("python", platform.python_version())
    for package in ("torch", "ray", "torchmetrics", "tensorboard"):
        try:
            yield Check(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Check(package, "is not installed", f"pip install {package}")
    yield _devices()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    yield Check("machine", f"{os.cpu_count()} cores, {memory:.0f} GB of memory")
    storage = Settings.read().storage
    if projects.EXPERIMENT.is_file():
        from mlx_runtime.driver.request import load_config

        try:
            config = load_config(projects.main_class(projects.AN_EXPERIMENT, Path.cwd()))
            yield Check("config", f"{projects.CONF} fits the code")
            storage = config.cfg.storage_path if storage is None else storage
        except MlxError as error:
            yield Check("config", str(error), "See: mlx train show")
    else:
        yield Check("config", "this folder is not an experiment")
    if storage is not None:
        yield _storage(storage)


def _devices() -> Check:
    try:
        import torch
    except Exception as error:
        return Check("devices", f"torch cannot be imported: {short_message(error)}", "pip install torch")
    if not torch.cuda.is_available():
        return Check("devices", "no GPU available to torch; training runs on CPUs")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Check("devices", ", ".join(names))


def _storage(path: str) -> Check:
    try:
        root = storage_root(path)
    except ConfigError as error:
        return Check("storage", str(error), "See cfg.storage_path and MLX_STORAGE")
    with writable(root, f".probe-{uuid.uuid4().hex}") as unwritable:
        if unwritable is not None:
            return unwritable
        free = "" if is_uri(root) else f", {shutil.disk_usage(root).free / 1e9:,.0f} GB free"
    return Check("storage", f"{root} is writable{free}")

"""Jobs of a cluster: their commands, packages of their code, and their states."""

import contextlib
import hashlib
import io
import os
import signal
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlx_runtime.errors import ConfigError, UsageError, short_message
from mlx_runtime.runs.snapshots import Upload
from mlx_runtime.storage.documents import from_yaml

SIGNAL_S = 5.0
"""Time to wait for Ray's signal before a job exits; none comes if an earlier one is the reason for exiting."""

SUPERVISED = "MLX_SUPERVISED"
"""Variable of drivers whose parent process decides whether their job has ended."""

Send = Callable[[str, Callable[[], bytes]], str]
"""Uploads a package under a name, unless the cluster has it, and returns its URI."""


@dataclass(frozen=True)
class JobSpec:
    """A command to run on the head node, in a working directory with the uploaded files."""

    command: Sequence[str]
    upload: Upload
    environment: Mapping[str, str] = field(default_factory=dict)  # of the command and its children
    metadata: Mapping[str, str] = field(default_factory=dict)  # shown in the dashboard
    runtime_env: Mapping[str, Any] = field(default_factory=dict)  # other fields of Ray's runtime environment
    added: Mapping[str, bytes] = field(default_factory=dict)  # contents of further files by path

    def pack(self, send: Send) -> dict[str, Any]:
        """Return Ray's runtime environment, with the contents of named local files, and with local modules uploaded."""
        packed = dict(self.runtime_env)
        for installer in ("pip", "uv"):
            if isinstance(file := packed.get(installer), str):
                packed[installer] = _requirements(Path(file))
        conda = packed.get("conda")
        if isinstance(conda, str) and conda.endswith((".yml", ".yaml")):  # otherwise the name of an environment
            try:
                packed["conda"] = from_yaml(Path(conda).read_bytes())
            except (OSError, ValueError) as error:
                problem = f"cannot read {conda}, which cfg.runtime_env.conda names: {short_message(error)}"
                raise ConfigError(problem) from error
        if modules := packed.get("py_modules"):
            packed["py_modules"] = [item if "://" in item else _send_module(Path(item), send) for item in modules]
        packed["env_vars"] = {**packed.get("env_vars", {}), **self.environment}
        packed["working_dir"] = send(*_package(self.upload.sources, self.added))
        return packed


def end_as_stopped(job: Mapping[str, str]) -> None:
    """Make the dashboard list the job of this process as STOPPED. Call this in the main thread, just before exiting.

    Ray treats every exit code other than 0 as a failure, unless it was asked to stop the job. It then sends SIGTERM.
    Does nothing in a supervised driver, or in a job of Slurm.
    """
    if SUPERVISED in os.environ or job["address"].startswith("slurm:"):
        return
    from ray.job_submission import JobSubmissionClient

    received = threading.Event()
    with contextlib.suppress(Exception):  # Ray raises various types; the record of the run is correct anyway
        signal.signal(signal.SIGTERM, lambda *_: received.set())
        JobSubmissionClient().stop_job(job["id"])  # in a job, RAY_ADDRESS is the address of its cluster
        received.wait(SIGNAL_S)


def _requirements(file: Path) -> list[str]:
    """Return the lines of a requirements file without comments."""
    if not file.is_file():
        raise UsageError(f"{file} does not exist; it should list the packages that the cluster installs")
    lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    return [line for line in lines if line]


def _send_module(module: Path, send: Send) -> str:
    if module.suffix == ".whl":
        return send(module.name, module.read_bytes)
    if module.is_dir():
        root = module.resolve()
        return send(*_package({f"{root.name}/{path}": root / path for path, _ in Upload.of(root).files}))
    if module.is_file():
        return send(*_package({module.name: module}))
    raise ConfigError(f"cfg.runtime_env.py_modules names {module}, which does not exist")


def _package(
    sources: Mapping[str, Path], added: Mapping[str, bytes] = MappingProxyType({})
) -> tuple[str, Callable[[], bytes]]:
    """Return the name of a package with these files and the added ones, and a function that zips them.

    The name contains a hash, so that a cluster receives the same code only once.
    """
    files = [(zipfile.ZipInfo(name), content) for name, content in sorted(added.items())]
    for info, _ in files:
        info.external_attr = 0o644 << 16
    for name, file in sorted(sources.items()):
        with contextlib.suppress(FileNotFoundError):  # removed since the folder was listed
            files.append((zipfile.ZipInfo.from_file(file, name, strict_timestamps=False), file.read_bytes()))
    digest = hashlib.sha256()
    for info, content in files:  # which is kept, as the files may change
        mode = info.external_attr >> 16
        digest.update(f"{len(info.filename)} {info.filename} {mode} {len(content)} ".encode() + content)

    def zipped() -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as package:
            for info, content in files:
                package.writestr(info, content, zipfile.ZIP_DEFLATED)
        return buffer.getvalue()

    return f"_ray_pkg_{digest.hexdigest()[:32]}.zip", zipped

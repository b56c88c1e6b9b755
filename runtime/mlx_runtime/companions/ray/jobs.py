"""Jobs of a cluster: their commands, packages of their code, and their states."""

import contextlib
import getpass
import hashlib
import io
import os
import signal
import socket
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_runtime.errors import ConfigError, UsageError
from mlx_runtime.runs.snapshots import Upload

SIGNAL_S = 5.0
"""Time to wait for Ray's signal before a job exits; none comes if an earlier one is the reason for exiting."""

SUPERVISED = "MLX_SUPERVISED"
"""Variable of drivers whose parent process decides whether their job has ended."""

Send = Callable[[str, Callable[[], bytes]], str]
"""Uploads a package under a name, unless the cluster has it, and returns its URI."""


def user_name() -> str:
    """Return the name of the user, or the number of one without a name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def command_metadata() -> dict[str, str]:
    """Return the metadata of the job of a command, which only its user removes from the list of jobs."""
    return {"mlx": "command", "user": f"{user_name()}@{socket.gethostname()}"}


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
        """Return Ray's runtime environment, with the files uploaded, and with the packages of requirements files."""
        packed = dict(self.runtime_env)
        if local := [item for item in packed.get("py_modules") or () if "://" not in item]:
            problem = f"cfg.runtime_env.py_modules names {local[0]}, which is not uploaded"
            raise ConfigError(f"{problem}; move it into the folder of the experiment, which is")
        if str(packed.get("conda")).endswith((".yml", ".yaml")):
            raise ConfigError(f"cfg.runtime_env.conda is {packed['conda']}; write the content of that file instead")
        for installer in ("pip", "uv"):
            if isinstance(file := packed.get(installer), str):
                packed[installer] = _requirements(Path(file))
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


def _package(sources: Mapping[str, Path], added: Mapping[str, bytes]) -> tuple[str, Callable[[], bytes]]:
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

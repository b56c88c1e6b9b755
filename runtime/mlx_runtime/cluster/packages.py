"""Zip files that carry code to a cluster, in the form that Ray's runtime environments expect."""

import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlx_runtime.errors import ConfigError, UsageError, short_message
from mlx_runtime.storage.documents import from_yaml
from mlx_runtime.storage.uploads import Upload

Send = Callable[[str, bytes], str]
"""Uploads a package under a name and returns its URI."""


def pack(files: Mapping[str, Path]) -> tuple[str, bytes]:
    """Zip files and name the package after a hash of its content, so that a cluster receives the same code only once.

    Args:
        files: files on this machine, by their path in the package.
    """
    digest, buffer = hashlib.sha256(), io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as package:
        for name, file in sorted(files.items()):
            content = file.read_bytes()
            digest.update(f"{len(name)} {name} {file.stat().st_mode} {len(content)} ".encode() + content)
            package.write(file, name)
    return f"_ray_pkg_{digest.hexdigest()[:32]}.zip", buffer.getvalue()


def pack_folder(folder: Path) -> tuple[str, bytes]:
    """Zip all files of a folder."""
    return pack({str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()})


def resolve(runtime_env: Mapping[str, Any], send: Send) -> dict[str, Any]:
    """Replace what a runtime environment names on this machine: requirements files, conda files and local modules.

    Raises:
        ConfigError: a file cannot be read.
    """
    resolved = dict(runtime_env)
    for installer in ("pip", "uv"):
        if isinstance(file := resolved.get(installer), str):
            resolved[installer] = read_requirements(Path(file))
    conda = resolved.get("conda")
    if isinstance(conda, str) and conda.endswith((".yml", ".yaml")):  # otherwise the name of an environment
        try:
            resolved["conda"] = from_yaml(Path(conda).read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read {conda}, which cfg.runtime_env.conda names: {short_message(error)}"
            ) from error
    if modules := resolved.get("py_modules"):
        resolved["py_modules"] = [item if "://" in item else _send_module(Path(item), send) for item in modules]
    return resolved


def read_requirements(file: Path) -> list[str]:
    """Return the lines of a requirements file without comments.

    Raises:
        UsageError: there is no such file.
    """
    if not file.is_file():
        raise UsageError(f"{file} does not exist; it should list the packages that the cluster installs")
    lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    return [line for line in lines if line]


def _send_module(module: Path, send: Send) -> str:
    if module.suffix == ".whl":
        return send(module.name, module.read_bytes())
    if module.is_dir():
        root = module.resolve()
        return send(*pack({f"{root.name}/{path}": root / path for path, _ in Upload.of(root).files}))
    if module.is_file():
        return send(*pack({module.name: module}))
    raise ConfigError(f"cfg.runtime_env.py_modules names {module}, which does not exist")

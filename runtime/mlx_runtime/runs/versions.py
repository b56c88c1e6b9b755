"""The provenance of a run: command, code, versions, machine."""

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from mlx_runtime.storage.leases import this_process
from mlx_runtime.storage.redaction import FILES, redact, redact_override

PACKAGES = ("mlx-runtime", "torch", "torchmetrics", "ray", "hydra-core", "hydra-zen", "numpy")
"""Packages whose versions are recorded."""


def provenance(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the origin of a run with these overrides, as fields of its record, without secrets."""
    return {
        "command": shlex.join(redact_override(word) for word in sys.orig_argv),
        "overrides": [redact_override(item) for item in overrides],
        "git": _git(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    } | this_process()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(limit_bytes: int = 1 << 20) -> dict[str, Any] | None:
    """Return the commit and the uncommitted changes of the working directory, or None outside a repository.

    Leaves out files whose names suggest that they hold secrets, and recognizable secrets in others.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, errors="replace")
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    names = [f"{name}**" if name.endswith("/") else name for name in FILES if not name.startswith("!")]
    hidden = [f":(exclude,icase,glob)**/{name}" for name in names]
    diff = git("diff", "HEAD", "--", ".", *hidden) or ""
    if len(diff) > limit_bytes:  # cut after whole lines, so that every secret in them is recognized
        diff = diff[: diff.rfind("\n", 0, limit_bytes) + 1]
    return {"commit": commit.strip(), "diff": redact(diff)}

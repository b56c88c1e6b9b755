"""Programs of the distribution that some tests need, installed when the first of them runs."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SBIN = "/usr/sbin:/usr/local/sbin"


def program(name: str) -> str | None:
    """Return the path of a program, which may be a daemon; None if it is not installed."""
    return shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}")


def install(packages: Sequence[str], programs: Sequence[str]) -> None:
    """Install packages of Debian or Ubuntu unless their programs are there. Raises if that is impossible."""
    with Path(tempfile.gettempdir(), f"mlx-tests-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of the suite may need some, too
        if all(map(program, programs)):
            return
        words = f"apt-get install --no-install-recommends {' '.join(packages)}"
        needs = f"these tests need {', '.join(programs)}"
        if shutil.which("apt-get") is None or os.geteuid():
            raise RuntimeError(f"{needs}; install them, on Debian with: sudo {words}")
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-q"], [*words.split(), "-q", "-y"]):
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{needs}; `{' '.join(command)}` failed: {done.stderr[-500:]}")

"""Working copies of the benchmark experiments, and commands to run in them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent

Command = Sequence[str | Path]


class RunError(Exception):
    """A command failed."""

    def __init__(self, command: Command, printed: str) -> None:
        super().__init__(f"{' '.join(map(str, command))} failed:\n{printed[-6000:]}")


def workplace(parent: Path, name: str) -> Path:
    """Copy a benchmark experiment and bind it. Returns the copy."""
    folder = Path(shutil.copytree(ROOT / "benchmarks" / name, parent / name))
    shutil.copy(ROOT / "<<cookiecutter.experiment_name>>" / "main.py", folder)
    subprocess.run([BIN / "mlx", "train", "bind"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


def environment(folder: Path, threads: int = 1) -> dict[str, str]:
    """Return the environment of all contenders: threads per worker, the experiment's `src`, gloo over loopback."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    own = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **own}


def mlx(*overrides: str) -> Command:
    return [BIN / "mlx", "train", "run", *overrides]


def torchrun(processes: int, *arguments: str | Path) -> Command:
    return [BIN / "torchrun", "--standalone", "--nproc-per-node", str(processes), "peers.py", *arguments]


def found_by(command: Command, folder: Path, out: Path, variables: Mapping[str, str]) -> Any:
    """Run a contender and return its own measurements, which it writes to `out` as JSON.

    Raises:
        RunError: the command failed, or wrote nothing.
    """
    out.unlink(missing_ok=True)
    done = subprocess.run(list(map(str, command)), cwd=folder, env=variables, capture_output=True, text=True)
    if done.returncode or not out.exists():
        raise RunError(command, done.stdout[-2000:] + done.stderr[-4000:])
    return json.loads(out.read_text())

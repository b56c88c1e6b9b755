"""The cost of a run on a cluster of Ray, compared with Ray's own trainer."""

import shlex
import sys
import tempfile
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from commands import BIN, ROOT, Command, environment, workplace
from page import table
from processes import MARK, Processes, cost
from rounds import alternating, compared, median

sys.path.append(str(ROOT / "tests"))
from clusters import cluster

TITLE = "Runs on a cluster"

CONTENDERS = {
    "ray": "Ray's `TorchTrainer`, `ray job submit`",
    "mlx": "**mlx**, `ray job submit`",
    "mlx-launch": "**mlx**, `mlx train launch`, with its checks",
}

SETTLE_S = 3
"""Time for the processes of a job to end after it."""


@dataclass(frozen=True)
class Run:
    """Seconds to the first step and of the whole run, from the command on, and CPU seconds of the cluster."""

    first_step_s: float
    wall_s: float
    cpu_s: float


def command(contender: str, url: str, folder: Path, out: Path) -> Command:
    if contender == "mlx-launch":
        return [BIN / "mlx", "train", "launch", "--ray-address", url, "-f", f"cfg.out={out}"]
    words = ["functions.py", "ray-job", out] if contender == "ray" else ["main.py", f"cfg.out={out}"]
    job = f"cd {folder} && MLX_IN_JOB=1 exec {shlex.join(map(str, [sys.executable, *words]))}"
    return [BIN / "ray", "job", "submit", "--address", url, "--", "bash", "-c", job]


def section(rounds: int, only: Collection[str]) -> str:
    mark = f"{MARK}-{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = workplace(Path(parent), "starting")
        variables = {**environment(folder), "PATH": f"{BIN}:{environment(folder)['PATH']}"}
        with Processes(0, mark.encode()) as processes, cluster({**variables, MARK: mark}) as nodes:

            def run(contender: str) -> Run:
                out = folder / "stepped"
                out.unlink(missing_ok=True)
                before = processes.cpu_s
                taken = cost(command(contender, nodes.url, folder, out), folder, variables)
                time.sleep(SETTLE_S)
                first = float(out.read_text().split()[0])
                return Run(first - taken.started, taken.wall_s, processes.cpu_s - before)

            run("mlx")  # the first job of a cluster also starts processes that stay
            found = alternating(list(CONTENDERS), only, rounds, run)
    fields = ("first_step_s", "wall_s", "cpu_s")
    columns = [{name: [getattr(item, field) for item in runs] for name, runs in found.items()} for field in fields]
    rows = []
    for name in found:
        base = name == "ray"
        cells = [
            f"{median(column[name]):.2f} s" if base else compared(column[name], column["ray"]) for column in columns
        ]
        rows.append([CONTENDERS[name], *cells])
    head = ["two workers", "to the first step", "whole run", "CPU seconds of the cluster"]
    return f"""The experiment of *Starting*, and a function that trains the same network, as jobs on a running cluster:
a head and two nodes with two CPUs each, all on this machine. CPU seconds are those of all processes of the cluster,
daemons included, but not of the command that submits the job and follows it. Medians of {rounds} alternating rounds,
with the minimum and maximum ratio.

{table(head, rows)}
"""

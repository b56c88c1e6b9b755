"""The time until a run trains, and the cost of starting it."""

import math
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from commands import BIN, Command, environment, found_by, mlx, torchrun, workplace
from page import table
from processes import Cost, cost
from rounds import alternating, compared, median, repeated

TITLE = "Starting"

LAUNCH = [
    "--multi_gpu",
    "--num_processes",
    "2",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
]
"""Options of Accelerate for several processes on this machine; the script selects the CPU."""

TWO_WORKERS = {
    "torchrun": "torchrun script, DDP",
    "accelerate": "HF Accelerate, `accelerate launch`",
    "lightning": 'Lightning, `strategy="ddp"`',
    "mlx-local": "**mlx**, local engine",
    "mlx-ray": "**mlx**, embedded Ray",
}

ONE_PROCESS = {
    "plain": "a plain script",
    "mlx-in-process": "**mlx**, `cfg.start_workers=0`",
    "mlx-fast-dev-run": "**mlx**, the same with `--fast-dev-run`, two steps",
}

FROM_PYTHON = {
    "plain": "a plain script",
    "cold": "**mlx**, the first `run()` of a process",
    "warm": "**mlx**, later ones",
}

IMPORTING = {"import": "`import src.experiment`", "mlx-bind": "**mlx** `train bind`"}
HELPING = {"click": "`import click`", "mlx-help": "**mlx** `--help`"}

GOALS = {
    "first_step_s": {"mlx-local": 1.1, "mlx-ray": 2.5, "mlx-in-process": 1.1, "mlx-fast-dev-run": 1.1},
    "cpu_s": {"mlx-local": 1.3},
    "seconds": {"mlx-bind": 1.2, "mlx-help": 1.5},
}
"""Greatest ratio of contenders, by what is measured."""

SHORT = 5
"""Number of runs of a command that takes a fraction of a second, for each run of one that takes seconds."""


@dataclass(frozen=True)
class Start:
    """Measurements of one run.

    Attributes:
        first_step_s: seconds from the start of its process to the end of the first step.
        wall_s: seconds of the whole run.
        cpu_s: CPU seconds of all its processes.
    """

    first_step_s: float
    wall_s: float
    cpu_s: float


def command(contender: str, out: Path) -> Command:
    """Return the command of a contender, which writes the time of its first step to `out`."""
    python = [sys.executable, "peers.py"]
    own = f"cfg.out={out}"
    return {
        "torchrun": torchrun(2, contender, out),
        "accelerate": [BIN / "accelerate", "launch", *LAUNCH, "peers.py", contender, out],
        "lightning": [*python, contender, out],
        "mlx-local": mlx("cfg.engine=local", "cfg.start_workers=2", own),
        "mlx-ray": mlx("cfg.engine=ray", "cfg.start_workers=2", own),
        "plain": [*python, contender, out],
        "mlx-in-process": mlx("cfg.start_workers=0", own),
        "mlx-fast-dev-run": mlx("--fast-dev-run", "cfg.start_workers=0", own),
        "import": [sys.executable, "-c", "import src.experiment"],
        "mlx-bind": [BIN / "mlx", "train", "bind"],
        "click": [sys.executable, "-c", "import click"],
        "mlx-help": [BIN / "mlx", "--help"],
    }[contender]


def stepped(contender: str, folder: Path, **variables: str) -> tuple[Cost, float, int]:
    """Run a contender. Returns its cost, the time at the end of its first step, and the pid of rank 0."""
    out = folder / "stepped"
    out.unlink(missing_ok=True)
    taken = cost(command(contender, out), folder, environment(folder) | variables)
    when, pid = out.read_text().split()
    return taken, float(when), int(pid)


def section(rounds: int, only: Collection[str]) -> str:
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = workplace(Path(parent), "starting")

        def start(contender: str) -> Start:
            taken, when, _ = stepped(contender, folder)
            return Start(when - taken.started, taken.wall_s, taken.cpu_s)

        def wall(contender: str) -> float:
            return cost(command(contender, folder / "stepped"), folder, environment(folder)).wall_s

        def session(_: str) -> dict[str, tuple[float, float]]:
            out = folder / "stepped"
            found: dict[str, tuple[float, float]] = found_by(
                [sys.executable, "session.py", out], folder, out, environment(folder)
            )
            return found

        two = alternating(list(TWO_WORKERS), only, rounds, start)
        one = alternating(list(ONE_PROCESS), only, rounds, start)
        python = [] if only else [repeated(session, "run()") for _ in range(rounds)]
        importing = alternating(list(IMPORTING), only, rounds, wall)
        helping = alternating(list(HELPING), only, rounds * SHORT, wall)
    head = ["", "to the first step", "whole run", "CPU seconds of all processes"]
    return f"""The same small experiment, measured from the start of the process: 2,048 images, a small network, Adam, a
loss and a metric of TorchMetrics, one epoch, with metrics and a checkpoint at the end; one thread per process. mlx also
writes TensorBoard events and the record of the run. Runs from Python are measured from the call of `run()`, after the
import of the experiment. Medians of {rounds} alternating rounds, with the minimum and maximum ratio.

{table(["two workers", *head[1:]], rows(two, TWO_WORKERS))}

{table(["one process", *head[1:]], rows(one, ONE_PROCESS))}

{table(["from Python, one process", *head[1:3]], _from_python(one["plain"], python))}

{table(["command", "seconds"], [*_walls(importing, IMPORTING), *_walls(helping, HELPING)])}

Goals: to the first step with the local engine <= 1.1x torchrun, with embedded Ray <= 2.5x, in process <= 1.1x the plain
script; CPU seconds with the local engine <= 1.3x torchrun; `bind` <= 1.2x the import, `--help` <= 1.5x importing click.
On embedded Ray, its daemons start first, and workers are new interpreters that import torch, Ray and the experiment
again, all at once (see *Imports*); local workers are forks of a driver that has.
In process, mlx also imports Hydra, TensorBoard and its own modules (0.7 s), checks the config, and stores the code and
the record of the run before it trains.
"""


def rows(found: dict[str, list[Start]], titles: dict[str, str]) -> list[list[str]]:
    columns = [
        _compared({name: [getattr(start, field) for start in starts] for name, starts in found.items()}, field)
        for field in ("first_step_s", "wall_s", "cpu_s")
    ]
    return [[titles[name], *(column[name] for column in columns)] for name in found]


def _from_python(plain: list[Start], sessions: list[dict[str, tuple[float, float]]]) -> list[list[str]]:
    columns = []
    for number, field in enumerate(("first_step_s", "wall_s")):
        runs = {name: [found[name][number] for found in sessions] for name in ("cold", "warm") if sessions}
        columns.append(_compared({"plain": [getattr(start, field) for start in plain], **runs}))
    return [[FROM_PYTHON[name], *(column[name] for column in columns)] for name in columns[0]]


def _walls(found: dict[str, list[float]], titles: dict[str, str]) -> list[list[str]]:
    return [[titles[name], cell] for name, cell in _compared(found, "seconds").items()]


def _compared(seconds: dict[str, list[float]], field: str = "") -> dict[str, str]:
    """Return the median of the first contender in seconds, and the medians of the others as ratios to it."""
    base, *others = seconds
    goals = GOALS.get(field, {})
    ratios = {name: compared(seconds[name], seconds[base], at_most=goals.get(name, math.inf)) for name in others}
    return {base: f"{median(seconds[base]):.2f} s"} | ratios

"""What each process of a command imports, and how long that takes."""

import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from commands import BIN, ROOT, environment, workplace
from page import table
from processes import cost

from parts.starting import stepped

TITLE = "Imports"

LIBRARIES = (
    "torch._dynamo",
    "torch",
    "ray",
    "torchmetrics",
    "matplotlib",
    "scipy",
    "tensorboard",
    "pandas",
    "pyarrow",
    "hydra",
)

COMMANDS = {"`mlx --help`": ["--help"], "`mlx xp ls`": ["xp", "ls"], "`mlx train bind`": ["train", "bind"]}

RUNS = {
    "torchrun": "torchrun",
    "mlx-in-process": "`mlx train run`, in process",
    "mlx-local": "`mlx train run`, local engine",
    "mlx-ray": "`mlx train run`, embedded Ray",
}

Seconds = dict[str, float]


def section(rounds: int, only: Collection[str]) -> str:
    """One run of each command: seconds of imports differ little from run to run."""
    found: dict[str, Seconds] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = workplace(Path(parent), "starting")
        for title, arguments in COMMANDS.items():
            found |= {title: sum_of(processes_of(arguments, folder).values())}
        for contender, title in RUNS.items():
            if not only or contender in only:
                found |= dict(by_process(contender, title, folder))
    head = ["seconds", *(f"`{name}`" for name in LIBRARIES), "other", "all"]
    rows = [
        [title, *(cell(seconds.get(name, 0)) for name in (*LIBRARIES, "other")), cell(sum(seconds.values()))]
        for title, seconds in found.items()
    ]
    return f"""Seconds that processes spend importing, by library; what a library imports that is not named here is its
own. The worker is that of rank 0; the other one is among the other processes. One run each.

{table(head, rows)}
"""


def by_process(contender: str, title: str, folder: Path) -> Iterator[tuple[str, Seconds]]:
    """The driver of a run, its worker of rank 0, and what else it starts beside the other worker."""
    with tempfile.TemporaryDirectory() as place:
        taken, _, worker = stepped(contender, folder, **hooked(folder, place))
        found = read(Path(place))
    yield f"{title}: driver" if worker != taken.pid else title, found.pop(taken.pid)
    ours = found.pop(worker, {})
    if worker != taken.pid:
        yield f"{title}: worker", ours
    if found:
        yield f"{title}: {len(found)} other process{'es' if len(found) > 1 else ''}", sum_of(found.values())


def hooked(folder: Path, place: str) -> dict[str, str]:
    """Return the variables that let Python time its imports, into a folder."""
    path = f"{ROOT / 'benchmarks' / 'importing'}:{folder}"
    return {"PYTHONPATH": path, "MLX_BENCH_IMPORTS": place, "MLX_BENCH_LIBRARIES": " ".join(LIBRARIES)}


def processes_of(arguments: list[str], folder: Path) -> dict[int, Seconds]:
    with tempfile.TemporaryDirectory() as place:
        cost([BIN / "mlx", *arguments], folder, environment(folder) | hooked(folder, place))
        return read(Path(place))


def read(place: Path) -> dict[int, Seconds]:
    """Seconds by library, by process."""
    found: dict[int, Seconds] = {}
    for file in place.iterdir():
        lines = [line.split() for line in file.read_text().splitlines()]
        found[int(file.name)] = sum_of({library: float(seconds)} for library, seconds in lines)
    return found


def sum_of(items: Iterable[Seconds]) -> Seconds:
    total: Seconds = defaultdict(float)
    for item in items:
        for library, seconds in item.items():
            total[library] += seconds
    return dict(total)


def cell(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 0.005 else ""

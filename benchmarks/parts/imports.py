"""The seconds that each process of a command spends importing, by library."""

import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from commands import BIN, ROOT, environment, workplace
from page import table
from processes import cost
from rounds import repeated

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
    """Ignores `rounds`: import times differ little between runs."""
    found: dict[str, Seconds] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = workplace(Path(parent), "starting")
        for title, arguments in COMMANDS.items():
            found |= {title: sum_of(processes_of(arguments, folder).values())}
        for contender, title in RUNS.items():
            if not only or contender in only:
                found |= repeated(lambda name, title=title: dict(by_process(name, title, folder)), contender)
    head = ["seconds", *(f"`{name}`" for name in LIBRARIES), "other", "all"]
    rows = [
        [title, *(cell(seconds.get(name, 0)) for name in (*LIBRARIES, "other")), cell(sum(seconds.values()))]
        for title, seconds in found.items()
    ]
    return f"""Seconds that processes spend importing, by library. Imports by a library that are not listed here count
as its own. The worker is rank 0; rank 1 is one of the other processes. One run each.

{table(head, rows)}
"""


def by_process(contender: str, title: str, folder: Path) -> Iterator[tuple[str, Seconds]]:
    """Yield the seconds of the driver, of rank 0, and of all other processes, including rank 1."""
    with tempfile.TemporaryDirectory() as output:
        taken, _, worker = stepped(contender, folder, **hooked(folder, output))
        found = read(Path(output))
    yield f"{title}: driver" if worker != taken.pid else title, found.pop(taken.pid)
    ours = found.pop(worker, {})
    if worker != taken.pid:
        yield f"{title}: worker", ours
    if found:
        yield f"{title}: {len(found)} other process{'es' if len(found) > 1 else ''}", sum_of(found.values())


def hooked(folder: Path, output: str) -> dict[str, str]:
    """Return environment variables that make Python time its imports and write the results to a folder."""
    path = f"{ROOT / 'benchmarks' / 'importing'}:{folder}"
    return {"PYTHONPATH": path, "MLX_BENCH_IMPORTS": output, "MLX_BENCH_LIBRARIES": " ".join(LIBRARIES)}


def processes_of(arguments: list[str], folder: Path) -> dict[int, Seconds]:
    with tempfile.TemporaryDirectory() as output:
        cost([BIN / "mlx", *arguments], folder, environment(folder) | hooked(folder, output))
        return read(Path(output))


def read(output: Path) -> dict[int, Seconds]:
    """Return the seconds by library for each process."""
    found: dict[int, Seconds] = {}
    for file in output.iterdir():
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

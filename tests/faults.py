"""Kill a run of `tests/experiments/faults` repeatedly, on one machine or on a cluster of several raylets.

`make chaos` calls `main`; `tests/runtime/workers/test_faults.py` uses the other functions.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from clusters import IDLE, START_S
from forkserver import Command, Commands

from mlx_runtime.runs.checkpoints.store import read

ROOT = Path(__file__).parents[1]
EXPERIMENTS = Path(__file__).parent / "experiments"
MAIN = ROOT / "<<cookiecutter.experiment_name>>" / "main.py"

KINDS = {"local": ("worker", "server", "driver", "save"), "ray": ("worker", "raylet", "driver", "save")}
"""What to kill, by engine: `server` is the fork server of the local engine, `save` a worker that is saving."""

SLOW_TO_SAVE = {
    "ddp": ("models.net.ballast=5000000",),
    "fsdp": ("cfg.strategy=fsdp", "models.net.frozen=4000000"),
}
"""Overrides by strategy that make checkpoints large enough to be interrupted."""

SLOW = "models.net.ballast=1000000"
PIPELINES = ("cfg.strategy=pipeline", "cfg.start_workers=4", "cfg.fragments.stages=2")
AVERAGED = ("cfg.replicas.every=3", "cfg.replicas.lr=0.7", "cfg.replicas.momentum=0.9")

REPLICAS = {
    "pipeline": ("cfg.strategy=pipeline", SLOW),
    "pipelines": (*PIPELINES, SLOW),
    "averaged": (*AVERAGED, SLOW),
    "averaged_pipelines": (*PIPELINES, *AVERAGED, SLOW),
}
"""The same of runs whose models are cut into two stages, or averaged every three updates."""

MOST_S = 400
"""Maximum time without progress before the campaign fails."""

LAST_S = 1800
"""Maximum time of a run after the last kill."""

Driver = Command | subprocess.Popen


def make(folder: Path) -> Path:
    """Create a bound copy of the experiment. Returns its folder."""
    shutil.copytree(EXPERIMENTS / "faults", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(MAIN, folder)
    subprocess.run([sys.executable, "-m", "mlx_runtime", "train", "bind"], cwd=folder, check=True, capture_output=True)
    return folder


def run_of(folder: Path, run: str = "run_001") -> Path:
    return folder / "runs" / "faults" / run


def record(folder: Path, run: str = "run_001") -> dict[str, Any]:
    """Return run.json of the only run of that name."""
    (file,) = folder.glob(f"runs/*/{run}/run.json")
    return dict(json.loads(file.read_text()))


def final_state(run: Path) -> dict[str, Any]:
    """Return the state of the last checkpoint, without paths and times."""
    last = max(path for path in (run / "checkpoints").iterdir() if re.fullmatch(r"epoch_\d+", path.name))
    return {name: value for name, value in read(str(last)).items() if name not in ("config", "tracking")}


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Return the keys at which two states are not bit-identical."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [at]
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{at}: {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [item for key in one for item in differences(one[key], other[key], f"{at}.{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [f"{at}: {len(one)} and {len(other)}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [item for number, (a, b) in pairs for item in differences(a, b, f"{at}[{number}]")]
    return [] if one == other or (one != one and other != other) else [f"{at}: {one} and {other}"]


CLOCKS = ("time", "date", "hostname", "node_ip", "pid", "samples_per_s")
"""Prefixes of metrics that differ between two runs with the same results."""


def reports(run: Path) -> list[dict[str, Any]]:
    """Return the content of `metrics.jsonl` without times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(CLOCKS)} for line in lines]


def points(run: Path, name: str) -> list[tuple[int, float]]:
    """Return the steps and values of a scalar, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    return [(item.step, item.value) for item in events.Scalars(name)]


def same(folder: Path, other: Path) -> list[str]:
    """Return what differs between the runs of two folders: states, by bitwise comparison, and what was recorded."""
    one, two = run_of(folder), run_of(other)
    found = differences(final_state(one), final_state(two))
    if reports(one) != reports(two):
        found.append("metrics.jsonl")
    names = ("train/mse", "val/mse", "lr/adam")
    return found + [name for name in names if points(one, name) != points(two, name)]


def diary(folder: Path) -> list[dict[str, Any]]:
    """Return the notes of all workers, in order of time."""
    notes = []
    for file in folder.glob("diary/rank_*.jsonl"):
        for line in file.read_text().splitlines():
            with contextlib.suppress(ValueError):  # truncated by a kill
                notes.append(json.loads(line) | {"rank": int(file.stem.removeprefix("rank_"))})
    return sorted(notes, key=lambda note: note["at"])


def rows_per_epoch(folder: Path, stages: int = 1) -> dict[int, list[int]]:
    """Return the rows that count: those of steps that no later start repeated. All stages read the same rows."""
    counted: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for note in [item for item in diary(folder) if item["rank"] % stages == 0]:
        if "start" in note:
            counted = {key: item for key, item in counted.items() if key[0] <= note["start"]}
        elif "rows" in note:  # there may be several notes per update
            counted.setdefault((note["step"], note["rank"]), (note["epoch"], []))[1].extend(note["rows"])
    epochs: dict[int, list[int]] = {}
    for epoch, rows in counted.values():
        epochs.setdefault(epoch, []).extend(rows)
    return {epoch: sorted(rows) for epoch, rows in epochs.items()}


def wait_for(what: Callable[[], Any], seconds: float = MOST_S, every_s: float = 0.1) -> Any:
    """Call a function until its result is true, and return the result."""
    until = time.monotonic() + seconds
    while not (found := what()):
        if time.monotonic() > until:
            raise TimeoutError(f"not within {seconds:.0f} s")
        time.sleep(every_s)
    return found


@contextlib.contextmanager
def cluster(nodes: int, environment: Mapping[str, str]) -> Iterator[Any]:
    """A Ray cluster on this machine: a head without CPUs, and raylets with one CPU each.

    Args:
        nodes: number of raylets.
        environment: environment variables of all processes, including workers.
    """
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment | IDLE | {"RAY_raylet_start_wait_time_s": str(START_S)})
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(nodes):
            made.add_node(num_cpus=1)
        yield made
    finally:
        made.shutdown()
        os.environ.clear()
        os.environ.update(before)


@dataclass
class Campaign:
    """A run that is restarted after each kill of its driver, until it succeeds.

    Args:
        folder: folder of the experiment.
        seed: seed of the moments of the kills.
        raylets: the cluster, or None for the local engine.
        overrides: overrides of the run.
        environment: environment variables of its drivers.
        commands: forks its drivers, which saves seconds; None starts new interpreters, as users do.
    """

    folder: Path
    seed: int
    raylets: Any
    overrides: Sequence[str]
    environment: Mapping[str, str]
    commands: Commands | None = None
    recoveries: list[tuple[str, float]] = field(default_factory=list)
    output: str = ""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.log = self.folder / "output.txt"
        self.workers = 4 if "cfg.start_workers=4" in self.overrides else 2

    def carry_out(self, kinds: Sequence[str]) -> int:
        """Kill the run once per kind, then let it end. Returns its exit status."""
        driver = self._start()
        try:
            for kind in kinds:
                self._steps(self.random.randint(2, 9), driver)
                time.sleep(self.random.uniform(0, 0.2))  # otherwise, always at the beginning of a step
                at, victim = time.time(), kind
                if kind in ("driver", "server"):
                    os.kill(driver.pid if kind == "driver" else self._server(), signal.SIGKILL)
                    self._end(driver)
                    driver = self._start("--resume=run_001")
                elif kind == "raylet":
                    self._kill_raylet()
                elif kind == "save":
                    self._kill_while_saving()
                    at = time.time()
                else:
                    worker = self._worker()
                    os.kill(worker["pid"], signal.SIGKILL)
                    victim = f"rank {worker['rank']}"
                step = max(note.get("step", 0) for note in diary(self.folder) if note["at"] <= at)
                back = wait_for(lambda at=at: [note for note in self._new(at) if "start" in note])[0]
                self.recoveries.append((kind, back["at"] - at))
                again = f"back at step {back['start']} after {back['at'] - at:.1f} s"
                print(f"{len(self.recoveries):>4} {victim:<7} killed in step {step:>3}, {again}", flush=True)
            (self.folder / "diary" / "hurry").touch()
            return driver.wait(timeout=LAST_S)
        finally:
            driver.kill()
            self._end(driver)

    def _end(self, driver: Driver) -> None:
        """Wait for the end of a driver, and keep what it has printed."""
        driver.wait()
        self.output += self._printed(driver)

    def _printed(self, driver: Driver) -> str:
        return "".join(driver.communicate()) if isinstance(driver, Command) else self.log.read_text()

    def _start(self, *options: str) -> Driver:
        environment = dict(self.environment)
        if self.raylets is not None:
            environment |= {"MLX_IN_JOB": "1", "RAY_ADDRESS": self.raylets.address}
        overrides = [*self.overrides, f"cfg.out={self.folder / 'diary'}"]  # workers have a different working directory
        words = ["train", "run", *overrides, *options]
        if self.commands is not None:
            return self.commands.start(self.folder, words, environment)
        command = [sys.executable, "-W", "ignore", "-m", "mlx_runtime", *words]
        with self.log.open("wb") as log:
            return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def _new(self, since: float) -> list[dict[str, Any]]:
        return [note for note in diary(self.folder) if note["at"] > since]

    def _steps(self, count: int, driver: Driver) -> None:
        """Wait until rank 0 has taken that many more steps."""
        at = time.time()

        def gone_on() -> bool:
            if driver.poll() is not None:
                raise RuntimeError(f"the run ended with {driver.returncode}:\n{self._printed(driver)}")
            return sum("rows" in note and note["rank"] == 0 for note in self._new(at)) >= count

        wait_for(gone_on)

    def _worker(self, rank: int | None = None) -> dict[str, Any]:
        """Return the last note of a rank, by default a random one."""
        rank = self.random.randrange(self.workers) if rank is None else rank
        return [note for note in diary(self.folder) if "start" in note and note["rank"] == rank][-1]

    def _server(self) -> int:
        """Return the pid of the process that started the workers."""
        status = Path(f"/proc/{self._worker()['pid']}/status").read_text()
        return int(status.partition("PPid:")[2].split()[0])

    def _kill_raylet(self) -> None:
        victim = self._worker()["node"]
        node = next(item for item in self.raylets.worker_nodes if item.node_id == victim)
        self.raylets.add_node(num_cpus=1)
        self.raylets.remove_node(node, allow_graceful=False)

    def _kill_while_saving(self) -> None:
        checkpoints = run_of(self.folder) / "checkpoints"
        sharded = "cfg.strategy=fsdp" in self.overrides
        pid = self._worker(rank=None if sharded else 0)["pid"]  # without shards, rank 0 writes everything
        wait_for(lambda: any(checkpoints.glob(".*.part-*/*")), every_s=0.001)
        time.sleep(self.random.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    """`python tests/faults.py --kills 20 --engine local --strategy averaged`: compare a killed run with another one."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--kills", type=int, default=50, help="of each engine, divided by the strategies")
    parser.add_argument("--engine", choices=[*KINDS, "both"], default="both")
    parser.add_argument("--strategy", choices=[*SLOW_TO_SAVE, *REPLICAS, "both"], default="both")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    strategies = SLOW_TO_SAVE if options.strategy == "both" else [options.strategy]
    for engine in KINDS if options.engine == "both" else [options.engine]:
        for strategy in strategies:
            campaign_on(engine, strategy, options.kills // len(strategies), options.seed)


def campaign_on(engine: str, strategy: str, kills: int, seed: int) -> None:
    """Kill a run that many times, and exit if its result differs from that of the undisturbed run."""
    kinds = [KINDS[engine][number % len(KINDS[engine])] for number in range(kills)]
    random.Random(seed).shuffle(kinds)
    epochs = kills * 3 // 4 + 4
    overrides = [f"cfg.num_epochs={epochs}", "cfg.checkpoint_every_steps=3", "cfg.elastic.max_failures=-1"]
    overrides += [*(SLOW_TO_SAVE | REPLICAS)[strategy], f"cfg.pause_s={0.15 if strategy in SLOW_TO_SAVE else 0.03}"]
    with tempfile.TemporaryDirectory(prefix="mlx-chaos-") as place:
        environment = dict(os.environ) | {"HOME": place}
        undisturbed, disturbed = make(Path(place) / "undisturbed"), make(Path(place) / "disturbed")
        command = [sys.executable, "-W", "ignore", "-m", "mlx_runtime", "train", "run", *overrides, "cfg.pause_s=0"]
        subprocess.run(command, cwd=undisturbed, env=environment, check=True, stdout=subprocess.DEVNULL)
        with cluster(3, environment) if engine == "ray" else contextlib.nullcontext() as raylets:
            campaign = Campaign(disturbed, seed, raylets, overrides, environment)
            status = campaign.carry_out(kinds)
        problems = [] if status == 0 else [f"the run ended with {status}"]
        problems += verdict(disturbed, undisturbed, epochs, stages=2 if "pipeline" in strategy else 1)
        times: dict[str, list[float]] = {}
        for kind, seconds in campaign.recoveries:
            times.setdefault(kind, []).append(seconds)
        for kind, found in sorted(times.items()):
            found.sort()
            print(
                f"{kind:<7} {len(found):>3} kills, back after {found[len(found) // 2]:.1f} s (at most {found[-1]:.1f})"
            )
        if problems:
            print(campaign.output)
            sys.exit("\n".join(problems))
        print(f"{engine}, {strategy}: {len(kinds)} kills: the same checkpoint, metrics.jsonl and rows as without")


def verdict(disturbed: Path, undisturbed: Path, epochs: int, stages: int = 1) -> list[str]:
    """Return the differences between a killed run and an undisturbed one.

    The last checkpoint contains the weights, states of optimizers, random numbers and metrics of all workers; that of
    replicas, also the outer momentum.
    """
    problems = [f"it differs at {item}" for item in same(undisturbed, disturbed)]
    rows = rows_per_epoch(disturbed, stages)
    problems += [
        f"epoch {epoch}: rows {rows.get(epoch)}" for epoch in range(epochs) if rows.get(epoch) != list(range(61))
    ]
    return problems


if __name__ == "__main__":
    main()

"""Ratios against peers in one run, medians of alternating rounds: `make bench`.

Writes docs/benchmarks.md. Nothing here passes or fails: the figures are for people.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent

PARTS = ("reading", "logging", "checkpoints")

CONTENDERS = {
    "torchrun": "torchrun, DDP, DataLoader",
    "torchrun-2": "the same, `num_workers=2`",
    "accelerate": "HF Accelerate",
    "lightning": "Lightning, `barebones`",
    "loader": "the loader of mlx under torchrun, without Ray",
    "mlx": "**mlx**",
    "mlx-prepared": "**mlx, prepared**",
}


def measure(contender: str, folder: Path) -> dict:
    """One run of a contender in a process group of its own."""
    out = folder / f"{contender}.json"
    prepared = "auto" if contender == "mlx-prepared" else "never"
    run_once(contender, folder, out, [f"cfg.prepared={prepared}"])
    return json.loads(out.read_text())


def run_once(contender: str, folder: Path, out: Path, overrides: list[str]) -> None:
    """Let a contender write what it measures; the overrides are those of mlx."""
    out.unlink(missing_ok=True)
    if contender.startswith("mlx"):
        command = [BIN / "mlx", "train", "run", *overrides, f"cfg.out={out}"]
    else:
        command = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", "peers.py", contender, out]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode or not out.exists():
        sys.exit(f"{contender} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def table(rounds: dict[str, list[dict]]) -> str:
    """Markdown: samples per second of the first contender, and everybody's ratio to it."""
    medians = {
        contender: {
            case: statistics.median(item["samples_per_s"][case] for item in measured)
            for case in measured[0]["samples_per_s"]
        }
        for contender, measured in rounds.items()
    }
    base = medians["torchrun"]
    cases = sorted({tuple(case.rsplit(" ", 1)) for case in base}, key=lambda case: list(base).index(" ".join(case)))
    kinds = list(dict.fromkeys(kind for kind, _ in cases))
    sizes = list(dict.fromkeys(size for _, size in cases))
    titles = {kind: kind.replace(" none", ", no model").replace(" mlp", ", MLP") for kind in kinds}
    lines = [
        "| | "
        + " | ".join(f"{titles[kind]}<br>{' / '.join(sizes)}" for kind in kinds)
        + " | memory of a worker, MB<br>own / resident |",
        "|---" * (len(kinds) + 2) + "|",
    ]
    for contender, measured in rounds.items():
        cells = []
        for kind in kinds:
            found = [(medians[contender].get(f"{kind} {size}"), base[f"{kind} {size}"]) for size in sizes]
            ratios = " / ".join(f"{rate / first:.2f}x" if rate else "-" for rate, first in found)
            absolute = " / ".join(f"{first / 1000:,.0f}k" for _, first in found)
            cells.append(f"{absolute} samples/s" if contender == "torchrun" else ratios)
        memory = [item["memory_mb"] for item in measured]
        sizes_mb = " / ".join(f"{statistics.median(item[key] for item in memory):,.0f}" for key in memory[0])
        lines.append(f"| {CONTENDERS[contender]} | {' | '.join(cells)} | {sizes_mb} |")
    return "\n".join(lines)


def reading(rounds: int, only: list[str] | None) -> str:
    """The section on reading data."""
    chosen = ["torchrun", *(name for name in only or CONTENDERS if name != "torchrun")]
    measured: dict[str, list[dict]] = {contender: [] for contender in chosen}
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        folder = workplace(Path(place), "input")
        subprocess.run([BIN / "mlx", "train", "prepare"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for number in range(rounds):
            for contender in chosen:
                started = time.monotonic()
                measured[contender].append(measure(contender, folder))
                took = time.monotonic() - started
                print(f"round {number + 1}/{rounds}  {contender:<14}{took:.0f} s", flush=True)
    return f"""Samples per second of both workers, per batch size. 50,000 rows of 32 float32, and 20,000 images of
3 x 32 x 32 bytes, from memory; the model is an MLP with one hidden layer of 64. All read the same datasets, in a new
order each epoch. Medians of {rounds} alternating rounds; differences under 1.3x with a model are noise.

{table(measured)}
"""


def checkpoints() -> str:
    """The section on what a checkpoint per epoch costs: epochs with and without one, in turns in the same run."""
    lines = ["| parameters | state, MB | epoch, s | with a checkpoint | of it the loop waits |", "|---" * 5 + "|"]
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        folder = workplace(Path(place), "checkpoints")
        for layers in (1, 4):
            out = folder / "measured.json"
            command = [BIN / "mlx", "train", "run", f"models.net.layers={layers}", f"cfg.out={out}"]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
            found = json.loads(out.read_text())
            without, with_one, blocked = (statistics.median(found[name]) for name in ("without", "with", "blocked"))
            size = found["parameters"] * 12 / 1e6  # float32: the weights, and two moments of Adam
            cells = [f"{found['parameters'] / 1e6:.1f} M", f"{size:.0f}", f"{without:.1f}"]
            cells += [f"{with_one / without:.3f}x", f"{1000 * blocked:.0f} ms"]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    rows = "\n".join(lines)
    return f"""One checkpoint per epoch of a model with Adam, two workers that keep all cores busy: what is written in
the background is taken from them. Medians of four epochs each.

{rows}
"""


def logging(rounds: int) -> str:
    """The section on what recording metrics costs: epochs with and without it, in turns in the same run."""
    titles = {
        "writer": "torchrun, TorchMetrics' `compute()`, SummaryWriter",
        "lightning": "Lightning, `self.log` of metrics, TensorBoardLogger",
        "mlx-untracked": "**mlx**, no trackers",
        "mlx": "**mlx**, TensorBoard",
    }
    measured: dict[str, list[dict]] = {contender: [] for contender in titles}
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        folder = workplace(Path(place), "logging")
        for number in range(rounds):
            for contender in titles:
                out = folder / "measured.json"
                run_once(contender, folder, out, ["~cfg.trackers.tensorboard"] * (contender == "mlx-untracked"))
                measured[contender].append(json.loads(out.read_text()))
                print(f"round {number + 1}/{rounds}  {contender:<14}{measured[contender][-1]}", flush=True)
    lines = ["| | a step without, ms | with | more per step | in the calls that record |", "|---" * 5 + "|"]
    for contender, found in measured.items():
        without = statistics.median(item["off"] for item in found)
        ratio = statistics.median(item["on"] / item["off"] for item in found)
        more = statistics.median(item["on"] - item["off"] for item in found)
        inside = statistics.median(item["inside"] for item in found)
        own = f"{1e6 * inside:.0f} µs" if contender.startswith("mlx") else ""
        lines.append(f"| {titles[contender]} | {1000 * without:.2f} | {ratio:.3f}x | {1e6 * more:.0f} µs | {own} |")
    rows = "\n".join(lines)
    return f"""Four metrics and two losses of TorchMetrics see every batch, in all epochs. In every other one they are
also recorded: with mlx by `save_metrics_and_losses` at each step, and so by Lightning; by hand every 50th step. All
write to TensorBoard every 50th step; the values of mlx and of the loop by hand are over both workers, those of
Lightning over one, until the epoch's end. Medians over epochs of 200 steps, in {rounds} alternating rounds; two workers
and what Ray runs beside them share two cores, so that the difference of two epochs has the noise of both, and the time
in mlx's own calls, of rank 0 with its waiting for others, has not.

{rows}
"""


def workplace(place: Path, name: str) -> Path:
    """An experiment of this folder, bound."""
    folder = Path(shutil.copytree(ROOT / "benchmarks" / name, place / name))
    shutil.copy(ROOT / "<<cookiecutter.experiment_name>>" / "main.py", folder)
    subprocess.run([BIN / "mlx", "train", "bind"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, help="with torchrun, the contenders to run")
    parser.add_argument("--part", choices=PARTS, help="measure, and write, only this section")
    options = parser.parse_args()
    chosen = [options.part] if options.part else PARTS
    if "reading" in chosen:
        text = reading(options.rounds, options.only)
        print(text)
        if not options.only:
            write("Reading data", text)
    if "logging" in chosen and not options.only:
        write("Logging", logging(options.rounds))
    if "checkpoints" in chosen and not options.only:
        write("Checkpoints", checkpoints())


def write(title: str, text: str) -> None:
    """A section of docs/benchmarks.md; the others stay."""
    page = ROOT / "docs" / "benchmarks.md"
    sections = re.split(r"^## (.*)\n", page.read_text() if page.exists() else "", flags=re.MULTILINE)[1:]
    found = dict(zip(sections[::2], sections[1::2], strict=True)) | {title: f"\n{text}\n"}
    versions = subprocess.run([BIN / "pip", "freeze"], capture_output=True, text=True, check=True).stdout.splitlines()
    named = [line for line in versions if line.split("==")[0] in ("torch", "ray", "accelerate", "lightning")]
    head = f"""# Benchmarks

Written by `make bench`: ratios against peers in one run, on {os.cpu_count()} cores without a GPU ({", ".join(named)}).
Two DDP workers over gloo, one thread each.

"""
    body = "\n\n".join(f"## {name}\n\n{content.strip()}" for name, content in found.items())
    page.write_text(head + body + "\n")


if __name__ == "__main__":
    main()

"""Runs on GPUs: `make test-gpu`. The smallest test of each kind also runs on the CPU, if it does not depend on the
device, so that the tests are known to work."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, unbound
from faults import record

from mlx_runtime.data.batches import DeviceCopies
from mlx_runtime.distributed import randomness
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.runs.checkpoints.store import PARTS, BackgroundSaver, CheckpointStore, Staging

TEMPLATE = ROOT / "<<cookiecutter.experiment_name>>"

DEVICES = [pytest.param("cpu", marks=pytest.mark.examples), pytest.param("cuda", marks=pytest.mark.gpu)]

EXACT = ("cfg.deterministic=true", "cfg.checkpoint_every_steps=2", "cfg.loader=workers=1")

HALF = ("cfg.precision=bf16", "cfg.fragments.traffic=bf16", "cfg.gradient_clip=1.0")

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An experiment, without a conf.yaml: the first run binds it."""
    return unbound("gpu", TEMPLATE, tmp_path)


def python(folder: Path, *arguments: str) -> str:
    """Run Python in an experiment folder, as in a new terminal. Return what it prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLX_", "RAY_", "MAKE"))}
    paths = [str(ROOT / "runtime"), str(folder), kept.get("PYTHONPATH", "")]
    settings = kept | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def run(folder: Path, request: pytest.FixtureRequest) -> Run:
    """`run(device, *overrides)` trains on all GPUs, or with one worker on the CPU, and returns what rank 0 reports."""

    def run(device: str, *overrides: str, workers: int | None = None) -> dict[str, Any]:
        workers = workers or (torch.cuda.device_count() if device == "cuda" else 1)
        placed = (f"cfg.start_workers={workers}", f"cfg.use_gpu={str(device == 'cuda').lower()}")
        (folder / "found.json").unlink(missing_ok=True)
        if device == "cuda":
            python(folder, "-m", "mlx_runtime", "train", "run", *placed, *overrides)
        else:
            done = request.getfixturevalue("mlx")(folder, "train", "run", *placed, *overrides)
            assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        assert found["device"] == device
        assert found["workers"] == workers
        assert found["products"] == ("high" if device == "cuda" else "highest")
        if device == "cuda":
            assert "nccl" in found["backend"]
        return found

    return run


@pytest.mark.parametrize("device", DEVICES)
def test_a_stream_of_reading_processes_resumes_bit_identically(run: Run, folder: Path, device: str) -> None:
    """A worker is killed in the second epoch, and trains again from a checkpoint in the middle of it."""
    rows = 48 * (torch.cuda.device_count() if device == "cuda" else 1)
    stream = f"datasets.train={{_target_: src.experiment.Stream, rows: {rows}, batch_size: 4}}"
    whole, killed = run(device, *EXACT, stream), run(device, *EXACT, stream, "cfg.fault_step=17")
    assert len(whole["losses"]) == 24
    assert len(killed["losses"]) in (8, 10, 12)  # the last checkpoint may not have been complete
    assert killed["digest"] == whole["digest"]
    assert whole["losses"][-len(killed["losses"]) :] == killed["losses"]


@pytest.mark.parametrize(
    ("device", "overrides"),
    [
        pytest.param("cpu", ("cfg.strategy=fsdp", "cfg.precision=bf16"), marks=pytest.mark.examples),
        pytest.param("cpu", ("cfg.strategy=pipeline", *HALF), marks=pytest.mark.examples),
        *(
            pytest.param("cuda", overrides, marks=pytest.mark.gpu, id=" ".join(overrides))
            for overrides in (
                ("cfg.precision=bf16", "cfg.gradient_clip=1.0"),
                ("cfg.precision=fp16", "cfg.accumulate_grad_batches=2"),
                ("cfg.precision=bf16", "cfg.compile={mode: default, dynamic: false}"),
                ("cfg.strategy=fsdp", "cfg.precision=bf16", "cfg.gradient_clip=1.0"),
                ("cfg.strategy=fsdp", "cfg.precision=fp16", "cfg.gradient_clip=1.0"),
                ("cfg.strategy=fsdp", "cfg.sharding.offload=cpu", "cfg.activation_checkpointing=true"),
                ("cfg.strategy=fsdp", "cfg.precision=bf16", "cfg.compile=true"),
                ("cfg.strategy=pipeline", *HALF),
                ("cfg.strategy=pipeline", "cfg.precision=fp16", "cfg.fragments.traffic=fp16"),
                ("cfg.replicas.every=2", "cfg.replicas.momentum=0.9", "cfg.replicas.traffic=fp16"),
            )
        ),
    ],
)
def test_strategies_and_precisions_learn(run: Run, folder: Path, device: str, overrides: tuple[str, ...]) -> None:
    """Training continues from a checkpoint of the first epoch, which a second command restores."""
    several = overrides[0].startswith(("cfg.strategy=pipeline", "cfg.replicas"))
    if several and device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each of two workers")
    settings, workers = (*overrides, "optimizers.adam.lr=0.01"), 2 if several else None
    first = run(device, *settings, "cfg.num_epochs=1", workers=workers)
    second = run(device, *settings, "--resume=run_001", "cfg.num_epochs=3", workers=workers)
    assert sum(second["losses"][-3:]) < sum(first["losses"][:3])
    assert record(folder, "run_001")["status"] == "SUCCEEDED"
    lines = (folder / "runs" / "gpu" / "run_001" / "metrics.jsonl").read_text().splitlines()
    peaks = [reported["gpu/memory"] for line in lines if "gpu/memory" in (reported := json.loads(line))]
    assert bool(peaks) == (device == "cuda")
    assert all(0 < peak < 10 for peak in peaks)


@pytest.mark.parametrize("device", DEVICES)
def test_torchrun_trains_like_the_local_engine(run: Run, folder: Path, device: str) -> None:
    """With NCCL on GPUs, and gloo on two CPU workers: the same bits."""
    workers = torch.cuda.device_count() if device == "cuda" else 2
    local = run(device, *EXACT, "cfg.num_epochs=1", workers=workers)
    processes = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}")
    words = (*EXACT, "cfg.num_epochs=1", f"cfg.use_gpu={str(device == 'cuda').lower()}")
    python(folder, *processes, "-m", "mlx_runtime", "train", "run", *words)
    found = json.loads((folder / "found.json").read_text())
    assert record(folder, "run_002")["engine"]["used"] == "torchrun"
    assert [found[name] for name in ("digest", "backend", "workers")] == [
        local[name] for name in ("digest", "backend", "workers")
    ]


@pytest.mark.gpu
def test_trials_of_a_sweep_share_a_gpu(folder: Path) -> None:
    options = ("--gpus-per-trial=0.5", "cfg.num_epochs=1", "cfg.start_workers=1", "cfg.monitor=train/loss")
    python(folder, "-m", "mlx_runtime", "train", "sweep", "optimizers.adam.lr=0.001,0.01,0.1,0.2", *options)
    devices = {json.loads(file.read_text())["device"] for file in folder.glob("runs/**/run_*/run.json")}
    assert devices == {torch.cuda.get_device_name(0)}


# -- parts of a run, in this process


@pytest.mark.gpu
def test_batches_arrive_whole_while_the_gpu_is_busy() -> None:
    device = torch.device("cuda", 0)
    copies, busy = DeviceCopies(device), torch.randn(4096, 4096, device=device)
    sums = []
    for number in range(200):
        batch = copies({"x": torch.full((1 << 18,), number), "name": "x"})
        busy = (busy @ busy).clamp(-1, 1)
        sums.append(batch["x"].sum() / (1 << 18))
        del batch  # its memory may be used again
    assert torch.stack(sums).tolist() == list(range(200))


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_for_a_checkpoint_is_of_before_the_next_update(device: str) -> None:
    staging = Staging()
    weights = torch.zeros(1 << 24, device=device)
    for number in range(3):
        weights.fill_(number)
        staging.begin()
        copy = staging.copy_tree({"net": weights})["net"]
        staging.end()
        weights.fill_(-1)
        staging.wait()
        assert copy.device.type == "cpu"
        assert copy.is_pinned() == (device == "cuda")
        assert copy.min() == copy.max() == number


@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_continue(device: str) -> None:
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    randomness.set_seed(3)
    state = randomness.random_state_dict(place)
    with randomness.temporary_seed(5):
        torch.rand(2, device=place)
    wanted = torch.rand(2, device=place), torch.rand(2)
    randomness.load_random_state_dict(state, place)
    assert [item.tolist() for item in (torch.rand(2, device=place), torch.rand(2))] == [i.tolist() for i in wanted]


# -- figures for docs/benchmarks.md

SIZES = {"cpu": (32, 2, 48, 4), "cuda": (1024, 8, 16384, 256)}
"""Width, layers, rows and rows per step."""

TURNS = {"cpu": 1, "cuda": 2}
"""Number of measurements of each side."""


def note(**row: str) -> None:
    """Add a row to the table that `make test-gpu` prints."""
    if file := os.environ.get("MLX_GPU_FIGURES"):
        with Path(file).open("a") as figures:
            figures.write(json.dumps({name.replace("_", " "): value for name, value in row.items()}) + "\n")


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        pytest.param("cpu", "bf16", marks=pytest.mark.examples),
        *(pytest.param("cuda", precision, marks=pytest.mark.gpu) for precision in ("32", "bf16")),
    ],
)
def test_speed_and_memory_beside_plain_torch(run: Run, folder: Path, device: str, precision: str) -> None:
    """One worker trains in turns with the same loop in plain torch, and needs as much memory."""
    width, layers, rows, batch_size = SIZES[device]
    call = f"plain({device!r}, {width}, {layers}, {rows}, {batch_size}, {precision != '32'})"
    shape = (f"models.net.width={width}", f"models.net.layers={layers}", f"cfg.precision={precision}")
    data = (f"datasets.train.rows={rows}", f"datasets.train.batch_size={batch_size}", "cfg.num_epochs=1")
    turns = []
    for _ in range(TURNS[device]):
        printed = python(folder, "-c", f"from src.experiment import plain; {call}")
        turns.append((json.loads(printed.splitlines()[-1]), run(device, *shape, *data, workers=1)))
    speeds = [statistics.median(batch_size / item["step_s"] for item in side) for side in zip(*turns, strict=True)]
    peaks = [max(item["peak_bytes"] for item in side) for side in zip(*turns, strict=True)]
    assert min(speeds) > 0
    if device == "cpu":
        return
    title = {"32": "float32 (TF32)", "bf16": "bf16"}[precision]
    for what, (one, other), unit in (("samples/s", speeds, 1.0), ("peak memory, MB", peaks, 1e6)):
        note(
            measured=f"{title}, {what}",
            plain_torch=f"{one / unit:,.0f}",
            mlx=f"{other / unit:,.0f}",
            ratio=f"{other / one:.2f}x",
        )
    assert peaks[1] < 1.1 * peaks[0]


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_holds_up_the_gpu_for_a_fraction_of_writing(device: str, tmp_path: Path) -> None:
    saver = BackgroundSaver(CheckpointStore(str(tmp_path)), lambda checkpoint: None, lambda: None)
    count = 300 if device == "cuda" else 1
    state = dict.fromkeys(PARTS) | {
        "models": {"net": {str(i): torch.ones(1 << 20, device=device) for i in range(count)}}
    }
    pauses, waits, writing = [], [], []
    for number in range(3):  # the first allocates memory
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device == "cuda" else []
        for event in events[:1]:
            event.record()
        started = time.perf_counter()
        saver.save(state, CheckpointInfo(number, True, number, {}))
        waits.append(time.perf_counter() - started)
        for event in events[1:]:
            event.record()
        saver.wait()
        writing.append(time.perf_counter() - started)
        pauses.append(events[0].elapsed_time(events[1]) / 1e3 if events else 0.0)
    assert len(CheckpointStore(str(tmp_path)).all()) == 3
    if device == "cpu":
        return
    size = f"checkpoint of {count * 4 * (1 << 20) / 1e6:,.0f} MB"
    for what, seconds in (
        ("the GPU pauses", pauses[-1]),
        ("the loop waits", waits[-1]),
        ("written after", writing[-1]),
    ):
        ratio = f"{seconds / writing[-1]:.1%} of writing"
        note(measured=f"{size}: {what}", plain_torch="", mlx=f"{seconds * 1e3:,.0f} ms", ratio=ratio)

"""Loss after equally many updates against the bytes that stages or replicas send per update, on sorter.py."""

import shutil
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path

from commands import RunError, environment, mlx
from page import table
from rounds import alternating, median

from mlx_runtime import open_run
from parts.fragments import BATCH, prepare_experiment

TITLE = "Compression"

EPOCHS = 5
"""Of 64 updates each."""

EVERY = 10

STAGES, REPLICAS = ("cfg.strategy=pipeline",), ("cfg.strategy=ddp", f"cfg.replicas.every={EVERY}")

CONTENDERS: dict[str, tuple[str, ...]] = {
    "two stages": STAGES,
    **{
        f"two stages, `cfg.fragments.traffic={kind}`": (*STAGES, f"cfg.fragments.traffic={kind}")
        for kind in ("bf16", "fp16")
    },
    f"two replicas, `cfg.replicas.every={EVERY}`": REPLICAS,
    "the same, `cfg.replicas.traffic=fp16`": (*REPLICAS, "cfg.replicas.traffic=fp16"),
}


def section(rounds: int, only: Collection[str]) -> str:
    with tempfile.TemporaryDirectory(prefix="bench-") as parent:
        folder = prepare_experiment(Path(parent), "sorter")
        seeds = dict.fromkeys(CONTENDERS, 0)

        def measured(contender: str) -> tuple[float, float, float]:
            seeds[contender] += 1
            return _measured(contender, folder, seeds[contender])

        found = alternating(list(CONTENDERS), only, rounds, measured)
    rows = []
    for name, runs in found.items():
        sent, losses, shares = zip(*runs, strict=True)
        loss = f"{median(losses):.3f} ({min(losses):.3f}-{max(losses):.3f})"
        rows.append([name, f"{sent[0] / 1e3:.1f}", loss, f"{100 * median(shares):.1f} %"])
    return f"""[sorter.py](examples/sorter.py), {EPOCHS * 64} updates with {BATCH} rows on two workers. What is sent per
update is `fragments/bytes` of the stage that sends most, and `replicas/bytes` of a replica, divided by {EVERY}. Losses
and shares of correct answers are those of the validation set: medians of seeds 1 to {rounds}, with the minimum and
maximum loss. They still improve steeply after so few updates, so seeds differ more than most rows.

{table(["", "kB sent per update", "loss", "correct"], rows)}
"""


def _measured(contender: str, folder: Path, seed: int) -> tuple[float, float, float]:
    """Return the bytes per update, the loss and the share of correct answers."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    overrides = CONTENDERS[contender]
    replicas = overrides[0] == "cfg.strategy=ddp"
    batch = f"datasets.train.batch_size={BATCH // 2 if replicas else BATCH}"
    fixed = (f"cfg.num_epochs={EPOCHS}", "cfg.engine=local", "cfg.trackers={}", f"cfg.seed={seed}", batch)
    command = list(map(str, mlx(*fixed, *overrides)))
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True)
    if done.returncode:
        raise RunError(command, done.stdout + done.stderr)
    last = open_run(folder / "runs" / "sorter" / "run_001").metrics().ffill().iloc[-1]
    stages = max(last.get(f"fragments/bytes/rank_{rank}", 0.0) for rank in range(2))
    sent = last["replicas/bytes"] / EVERY if replicas else stages
    return float(sent), float(last["val/loss"]), float(last["val/sorted"])

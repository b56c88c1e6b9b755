"""Whichever process of pipelines or replicas is killed, and whenever: the run ends as if nobody had killed anything."""

import json
import os
import random
import shutil
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import pytest
from conftest import Mlx
from faults import REPLICAS, Campaign, run_of, verdict
from forkserver import Commands

pytestmark = [pytest.mark.kills, pytest.mark.timeout(1800)]

KILLS = int(os.environ.get("KILLS", "1"))


BASIC = [("pipeline", "driver"), ("averaged_pipelines", "worker")]
OTHERS = [("pipelines", "worker"), ("averaged", "driver")]


@pytest.mark.parametrize(("kind", "first"), BASIC if KILLS == 1 else BASIC + OTHERS)
def test_runs_killed_at_random_moments_equal_undisturbed_ones(
    kind: str,
    first: str,
    mlx: Mlx,
    make_in: Callable[[str, Path], Path],
    commands: Commands,
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    """Workers of any stage, drivers, fork servers and savers: one per run, and 20 of more runs in `make chaos`."""
    undisturbed = make_in("faults", tmp_path / "undisturbed")
    disturbed = Path(shutil.copytree(undisturbed, tmp_path / "disturbed" / "faults"))
    parts = [first, *islice(cycle(("worker", "save", "worker", "driver", "server")), KILLS - 1)]
    random.Random(kind).shuffle(parts)
    epochs = 2 + KILLS
    often = (f"cfg.num_epochs={epochs}", "cfg.checkpoint_every_steps=3", "cfg.elastic.max_failures=-1")
    overrides = [*REPLICAS[kind], *often]
    done = mlx(undisturbed, "train", "run", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    campaign = Campaign(disturbed, KILLS, None, [*overrides, "cfg.pause_s=0.03"], environment, commands)
    assert campaign.carry_out(parts) == 0, campaign.output
    assert verdict(disturbed, undisturbed, epochs, stages=2 if "pipeline" in kind else 1) == []
    record = json.loads((run_of(disturbed) / "run.json").read_text())
    assert len(record.get("attempts", [])) == sum(part in ("driver", "server") for part in parts)

"""How a driver claims the record of its run."""

import signal
from pathlib import Path

import pytest
from forkserver import Commands

from mlx_runtime.companions.jobs.launching import pending
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import claim_run
from mlx_runtime.storage import documents

pytestmark = pytest.mark.process

DRIVER = """
import contextlib, os, signal, sys
from types import SimpleNamespace
from mlx_runtime.driver.run_recorder import claim
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.runs.folder import named_run

config = SimpleNamespace(run=named_run(sys.argv[1], "", ""), cfg=TrainConfig(name="digits"), overrides=(), sweep=None)
plan = SimpleNamespace(config=config, fold=None, cluster=SimpleNamespace(engine="local"))
with contextlib.ExitStack() as guard:
    claim(plan, guard)
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""A driver that is killed before its run begins."""


def test_drivers_of_a_launched_resume_that_die_keep_what_its_launcher_has_recorded(
    commands: Commands, environment: dict[str, str], tmp_path: Path
) -> None:
    folder, job = claim_run(str(tmp_path), "digits"), {"id": "digits-run_001", "address": "http://head:8265"}
    former = {"status": "FAILED", "command": "mlx train run", "git": {"commit": "1", "diff": None}, "attempt": 1}
    records.Record(folder, **former, start=documents.now(), end=documents.now())
    before = records.load_record(folder)
    with pending(folder, before, (), job=job, command="mlx train launch", git={"commit": "2", "diff": None}):
        pass
    settings = environment | {"MLX_JOB": job["id"], "MLX_JOB_ADDRESS": job["address"]}
    for attempt in (1, 2):
        done = commands.run(tmp_path, [folder.location], settings, 60, DRIVER)
        assert done.returncode == -signal.SIGKILL, done.stderr
        found = records.load_record(folder)
        assert (found["status"], found["attempt"], found["job"]) == ("RUNNING", attempt, job)
        assert (found["command"], found["git"]["commit"]) == ("mlx train launch", "2")
        assert [item["command"] for item in found["attempts"]] == ["mlx train run"]
        assert found[records.REPLACED] == before

"""Launches: what they print and record when something fails."""

import dataclasses
import os
from pathlib import Path

import pytest

from mlx_runtime import TrainConfig
from mlx_runtime.companions.jobs.checks import refuse_engine
from mlx_runtime.companions.jobs.launching import SubmittedJob, pending
from mlx_runtime.companions.kubernetes.kubectl import Kubectl
from mlx_runtime.companions.ray.engine import OnRay
from mlx_runtime.errors import ConfigError
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import claim_run
from mlx_runtime.sections import Fragments
from mlx_runtime.storage import documents

pytestmark = pytest.mark.pure


def test_an_interrupted_submission_leaves_no_run_that_waits(tmp_path: Path) -> None:
    new, old = (claim_run(str(tmp_path), "digits") for _ in range(2))
    records.Record(old, status="SUCCEEDED", end=documents.now())
    before = records.load_record(old)
    for run, former in ((new, {}), (old, before)):
        with pytest.raises(KeyboardInterrupt), pending(run, former, ()):
            raise KeyboardInterrupt
    found = records.load_record(new)
    assert (found["status"], found["error"]) == ("FAILED", "KeyboardInterrupt")
    assert records.load_record(old) == before


def test_plans_for_named_machines_are_refused_on_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launch and, if that has not checked it, by the job."""
    cfg = TrainConfig(strategy="pipeline", fragments=Fragments(plan="src/fragments.json"))
    monkeypatch.setenv("MLX_IN_JOB", "1")
    for refuse in (refuse_engine, lambda cfg: OnRay.connect(cfg, "")):
        with pytest.raises(ConfigError, match="cfg.fragments.plan is for machines that run `mlx train join`"):
            refuse(cfg)
        refuse_engine(dataclasses.replace(cfg, strategy="ddp"))  # which does not read the plan
        refuse_engine(dataclasses.replace(cfg, start_workers=0))


def test_a_job_that_was_accepted_is_launched_even_if_its_state_is_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\necho 'Error from server (Forbidden): rayjobs.ray.io is forbidden' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert SubmittedJob(Kubectl.of(None, None), "digits-4f1c9a", {}).wait() == "PENDING"

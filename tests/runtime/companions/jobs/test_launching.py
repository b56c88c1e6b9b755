"""Launches: what they print and record when something fails."""

import os
from pathlib import Path

import pytest

from mlx_runtime.companions.jobs.launching import QueuedJob
from mlx_runtime.companions.kubernetes.kubectl import Kubectl

pytestmark = pytest.mark.pure


def test_a_job_that_was_accepted_is_launched_even_if_its_state_is_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\necho 'Error from server (Forbidden): rayjobs.ray.io is forbidden' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert QueuedJob(Kubectl.of(None, None), "digits-4f1c9a", {}).wait() == "PENDING"

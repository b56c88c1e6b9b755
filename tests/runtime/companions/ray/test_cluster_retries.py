"""Drivers that come back, on a real cluster."""

import json
import os
import signal
from pathlib import Path

import pytest
from cluster_users import LONG, User, until
from clusters import RayCluster
from faults import differences, final_state

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


class TestRetries:
    """Drivers that are killed, and come back in the same job."""

    def test_a_killed_driver_resumes_as_if_nothing_had_happened(
        self, trained: Path, user: User, ray_cluster: RayCluster
    ) -> None:
        words = ("--name=killed", "--retries=1", "cfg.num_epochs=3", "cfg.checkpoint_every_steps=5")
        done = user.types("train", "launch", "--ray-address", ray_cluster.url, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        until(lambda: user.record(name="killed").get("latest"))
        os.kill(user.record(name="killed")["pid"], signal.SIGKILL)
        log = user.types("xp", "logs", "killed", "run_001")  # follows both drivers
        assert log.returncode == 0, log.stdout + log.stderr
        assert "retry     the driver was killed by SIGKILL (out of memory?); retry 1 of 1 begins at " in log.stdout
        record, runs = user.record(name="killed"), user.folder / "runs"
        assert (record["status"], record["attempt"], record["epoch"]) == ("SUCCEEDED", 2, 2)
        (first,) = json.loads(user.types("xp", "ls", "killed", "--json").stdout)[0]["attempts"]
        assert (first["status"], first["error"]) == ("FAILED", "the driver was killed by SIGKILL (out of memory?)")
        assert first["job"] == record["job"]
        assert differences(final_state(trained), final_state(runs / "killed/run_001")) == []

    def test_one_that_is_stopped_during_the_pause_stays_stopped(self, user: User, ray_cluster: RayCluster) -> None:
        words = ("--name=paused", "--retries=1", "cfg.start_workers=1", *LONG)
        done = user.types("train", "launch", "--ray-address", ray_cluster.url, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        until(lambda: user.record(name="paused")["status"] == "RUNNING")
        os.kill(user.record(name="paused")["pid"], signal.SIGKILL)
        until(lambda: user.record(name="paused")["status"] == "WAITING")
        assert user.types("xp", "stop", "paused", "latest").stdout.startswith("paused run_001 ")
        until(lambda: ray_cluster.get("/api/jobs/paused-run_001")["status"] == "STOPPED")
        record = user.record(name="paused")
        assert (record["status"], len(record["attempts"]), record["attempt"]) == ("STOPPED", 1, 1)

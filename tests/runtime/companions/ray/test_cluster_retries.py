"""Drivers that come back, on a real cluster."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from cluster_users import LONG, TOKEN, User, until
from clusters import RayCluster, redis
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
        assert "retry     the driver was killed by SIGKILL; retry 1 of 1 begins at " in log.stdout
        record, runs = user.record(name="killed"), user.folder / "runs"
        assert (record["status"], record["attempt"], record["epoch"]) == ("SUCCEEDED", 2, 2)
        (first,) = json.loads(user.types("xp", "ls", "killed", "--json").stdout)[0]["attempts"]
        assert (first["status"], first["error"]) == ("FAILED", "the driver was killed by SIGKILL")
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


class TestLostNodes:
    """Drivers whose job is lost, and that come back in another one."""

    def test_a_driver_comes_back_on_another_node(self, environment: dict[str, str], user: User) -> None:
        variables = environment | {"RAY_JOB_ALLOW_DRIVER_ON_WORKER_NODES": "1"}
        with RayCluster(variables, TOKEN, one_folder=True) as cluster:
            cluster.add()
            cluster.wait(1)
            name = launched_on_a_worker(user, cluster)
            until(lambda: guards(cluster))
            following = user.starts("xp", "logs", "--follow", name, "run_001")
            assert following.stdout is not None
            following.stdout.readline()  # of the job that is about to be lost
            cluster.remove()
            resumed(user, name)
            record = user.record(name=name)
            assert (record["retries"], record["job"]["id"]) == (1, f"{name}-run_001.2")
            (first,) = record["attempts"]
            assert (first["status"], first["job"]["id"]) == ("FAILED", f"{name}-run_001")
            assert re.fullmatch(r"the node \S+ of the driver was lost", first["error"])
            log = (user.folder / "runs" / name / "run_001" / "logs" / "driver.log").read_text()
            assert re.search(r"of the driver was lost; retry 1 of 1 begins at .*\nrestored  ", log, re.DOTALL)
            driver = Path(f"/proc/{record['pid']}/stat").read_text()
            os.kill(int(driver.rpartition(")")[2].split()[1]), signal.SIGKILL)  # its parent
            until(lambda: not guards(cluster))  # the run has ended, so it has, too
            record = user.record(name=name)
            assert record["status"] == "FAILED"
            assert record["error"] == "the job of the driver was killed, after 1 of 1 retries"
            output = following.stdout.read()
            assert re.search(rf"job {name}-run_001: .*job {name}-run_001\.2: .*\nrestored  ", output, re.DOTALL)
            assert following.wait() == 128 + signal.SIGKILL

    def test_a_driver_on_the_head_comes_back_with_it(self, environment: dict[str, str], user: User) -> None:
        with redis() as address:
            variables = environment | {"RAY_REDIS_ADDRESS": address}
            with RayCluster(variables, TOKEN) as cluster:
                cluster.add()
                cluster.wait(1)
                launch(user, cluster, "headless")
                until(lambda: guards(cluster))
                cluster.restart_head()
                cluster.wait(1)
                resumed(user, "headless")
                assert user.record(name="headless")["retries"] == 1
                assert user.types("xp", "stop", "headless", "latest").returncode == 0


def launch(user: User, cluster: RayCluster, name: str) -> None:
    """Launch a run that trains in its driver, and wait until it has a checkpoint."""
    words = (f"--name={name}", "--retries=1", "cfg.start_workers=0", "cfg.checkpoint_every_steps=5", *LONG)
    done = user.types("train", "launch", "--ray-address", cluster.url, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    until(lambda: user.record(name=name).get("latest"))


def launched_on_a_worker(user: User, cluster: RayCluster) -> str:
    """Launch runs until Ray, which chooses a node at random, puts a driver on a raylet. Return the name of its run."""
    for number in range(10):
        launch(user, cluster, name := f"lost{number}")
        nodes = [item["raylet"] for item in cluster.get("/nodes?view=summary")["data"]["summary"]]
        (head,) = [node["nodeId"] for node in nodes if "node:InternalHead" in node["resourcesTotal"]]
        if cluster.get(f"/api/jobs/{name}-run_001")["driver_node_id"] != head:
            return name
        assert user.types("xp", "stop", name, "latest").returncode == 0
    raise AssertionError("no driver on a raylet")


def resumed(user: User, name: str) -> None:
    until(lambda: (found := user.record(name=name))["attempt"] == 2 and found["status"] == "RUNNING")


def guards(cluster: RayCluster) -> int:
    """Return the number of guards on a cluster."""
    found = cluster.get("/api/v0/actors?limit=100")["data"]["result"]["result"]
    return sum(item["state"] == "ALIVE" and item["class_name"] == "Guard" for item in found)

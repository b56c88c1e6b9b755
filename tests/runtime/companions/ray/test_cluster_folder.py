"""A storage that only the cluster has, from a machine that reaches nothing but the dashboard."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_users import LONG, User, tags
from clusters import RayCluster, free_ports
from faults import wait_for
from transcripts import check_transcript

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


SCRIPT = """
import json
import os
import sys

import torch

from mlx_runtime import MlxError, Trainer, get_dataset_shard, reattach, report


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, row):
        return torch.tensor(row)


def train():
    for epoch in range(2):
        report(loss=epoch)
    return sorted(row.item() for row in get_dataset_shard())


url, storage = sys.argv[1:]
trainer = Trainer(1, address=url, name="far", storage_path=storage)
name = trainer.launch(train, dataset=Rows())
running = reattach(name, address=url)
losses = [results[0]["loss"] for results in running]
found = {"name": name, "losses": losses, "rows": running.get_returns(), "storage": os.environ["MLX_STORAGE"]}
try:
    trainer.launch(train, dataset=Rows(), fold=(0, 2), resume="run_001")
except MlxError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def hidden(user: User, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the cluster with the storage `runs`, which has a run."""
    folder = tmp_path_factory.mktemp("ceph")
    shutil.copytree(user.folder / "runs", folder / "runs")
    return folder


@pytest.fixture(scope="module")
def laptop(hidden: Path, user: User, ray_cluster: RayCluster) -> "Callable[..., subprocess.Popen[str]]":
    """`laptop("xp", "ls")` starts a command on a machine without that folder."""
    mount = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', hidden]
    settings = {"RAY_ADDRESS": ray_cluster.url, "MLX_STORAGE": str(hidden / "runs")}

    def start(*arguments: str, **more: str) -> "subprocess.Popen[str]":
        is_python = arguments[0] == "-c" or arguments[0].endswith(".py")
        command = [*mount, sys.executable, *([] if is_python else ["-m", "mlx_runtime"]), *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = user.environment | settings | more
        return subprocess.Popen(command, cwd=user.folder, env=environment, text=True, **pipes)

    return start


@pytest.fixture(scope="module")
def far(laptop: "Callable[..., subprocess.Popen[str]]") -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str, **more: str) -> tuple[int, str, str]:
        process = laptop(*arguments, **more)
        output, errors = process.communicate(timeout=300)
        print(arguments, process.returncode, output, errors)
        return process.returncode, output, errors

    return run


class TestAFolderOfTheCluster:
    """The storage is in a folder that commands cannot see: in their mount namespace, another one is mounted on it."""

    def test_all_commands_reach_a_run(self, far: Any, hidden: Path, user: User, ray_cluster: RayCluster) -> None:
        code, output, errors = far("xp", "ls")
        assert (code, "digits      run_001  SUCCEEDED  3/3" in output) == (0, True)
        assert errors == f"storage   {hidden}/runs on {ray_cluster.url}, as this machine lacks it\n"
        nothing = {"RAY_ADDRESS": ""}
        code, output, errors = far("--on", ray_cluster.url, "xp", "ls", "--json", **nothing)
        assert (code, errors, [row["run"] for row in json.loads(output)]) == (0, "", ["run_001"])
        stored = (hidden / "runs/digits/run_001/logs/rank_0.log").read_text()
        assert far("xp", "logs", "digits", "run_001", "--rank", "0")[:2] == (0, stored)
        assert "run           digits/run_001" in far("xp", "best", "digits")[1]
        assert far("xp", "report", "digits", "run_001", "-o", "pages/one.html")[0] == 0
        assert (user.folder / "pages/one.html").read_text().startswith("<!doctype html>")
        assert "└── digits" in far("data", "show", "--depth", "1")[1]

    def test_removals_are_confirmed_here(self, laptop: Any, hidden: Path) -> None:
        old = hidden / "runs" / "old"
        old.mkdir()
        for answer, code, left in (("n", 1, True), ("y", 0, False)):
            process = laptop("data", "rm", "old")
            output, errors = process.communicate(f"{answer}\n", timeout=300)
            print(output, errors)
            assert (process.returncode, old.exists()) == (code, left)
            assert output.startswith(f"remove {hidden}/runs/old, 0 files, 0 bytes? [y/N]: ")

    def test_a_log_is_followed_until_it_is_interrupted(self, laptop: Any, far: Any, ray_cluster: RayCluster) -> None:
        """Ctrl-C ends the job that reads the log, and the run continues."""
        assert far("train", "launch", "cfg.name=long", "cfg.start_workers=0", *LONG)[0] == 0
        follower = laptop("xp", "logs", "-f", "long", "latest")
        lines = iter(follower.stdout)
        seen = [next(line for line in lines if re.match(r" *\d+/", line)) for _ in range(2)]
        assert len({*seen}) == 2
        follower.send_signal(signal.SIGINT)
        assert follower.wait(60) == 130
        follower.communicate()

        def reading() -> list[str]:
            jobs = [job for job in ray_cluster.get("/api/jobs/") if job["metadata"].get("mlx") == "command"]
            return [job["submission_id"] for job in jobs if job["status"] in ("PENDING", "RUNNING")]

        wait_for(lambda: not reading())
        assert json.loads(far("xp", "ls", "long", "--json")[1])[0]["status"] == "RUNNING"
        assert far("xp", "stop", "long", "latest")[:2] == (0, "long run_001 is STOPPED\n")

    def test_a_run_is_launched_and_removed_as_the_guide_shows(
        self, far: Any, hidden: Path, ray_cluster: RayCluster
    ) -> None:
        """The record has the plain path, with which the job has trained."""
        settings = ["cfg.num_epochs=2", "cfg.start_workers=0", "cfg.name=d"]
        commands = (["train", "launch", "-f", *settings], ["xp", "ls", "d"])
        shown = [f"$ export MLX_STORAGE=/ceph/runs RAY_ADDRESS={ray_cluster.url}"]
        for command in commands:
            code, output, errors = far(*command)
            assert code == 0, output + errors
            lines = output.splitlines()
            if command[0] == "train":
                summary = next(number for number, line in enumerate(lines) if line.startswith("best val/accuracy"))
                lines = [*lines[: lines.index(next(line for line in lines if line.startswith("stop"))) + 1], "…"]
                lines += output.splitlines()[summary:]
            shown += [f"$ mlx {' '.join(command)}", *errors.splitlines(), *lines]
        names = {str(hidden): "/ceph", ray_cluster.url: "http://head:8265"}
        check_transcript("cluster.md", "laptop", shown, names)
        folder = hidden / "runs" / "d" / "run_001"
        record = json.loads((folder / "run.json").read_text())
        assert (record["status"], record["latest"]["path"]) == ("SUCCEEDED", f"{folder}/checkpoints/epoch_0002")
        assert f"storage_path: {hidden}/runs\n" in (folder / "conf.yaml").read_text()
        assert far("xp", "rm", "d", "latest", "-y")[0] == 0
        assert not folder.exists()

    def test_a_function_trains_and_its_values_come_back(
        self, far: Any, hidden: Path, user: User, ray_cluster: RayCluster
    ) -> None:
        """No variable names the storage or the cluster, only the arguments of the Trainer."""
        (user.folder / "calls.py").write_text(SCRIPT)
        nothing = {"RAY_ADDRESS": "", "MLX_STORAGE": ""}
        code, output, errors = far("calls.py", ray_cluster.url, f"{hidden}/runs", **nothing)
        assert code == 0, output + errors
        assert json.loads(output.splitlines()[-1]) == {
            "name": f"{hidden}/runs/far/run_001",
            "losses": [0, 1],
            "rows": [[*range(8)]],
            "storage": "",
            "refused": "far/run_001 was started with another fold; leave out fold= to resume it with its own, or "
            "resume= to start a new run",
        }
        assert errors == ""
        assert f"storage_path: {hidden}/runs\n" in (hidden / "runs/far/run_001/conf.yaml").read_text()

    def test_the_board_answers(self, laptop: Any) -> None:
        port = free_ports(1)[0]
        server = laptop("xp", "board", "digits", "run_001", "--port", str(port))
        try:
            wait_for(lambda: "val/accuracy" in tags(port).get(".", {}), 180)
        finally:
            server.terminate()
            server.communicate()

"""A real cluster with a token, and its user at a terminal, for several files of tests. Each file has its own."""

import contextlib
import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from clusters import RayCluster, cluster
from forkserver import Commands

TOKEN = "token-of-the-test-cluster-0123456789abcdef"

LONG = ("cfg.num_epochs=100000", "tools.early_stopping.patience=1000000", "cfg.keep_checkpoints=1")


@pytest.fixture(scope="module")
def ray_cluster(environment: dict[str, str]) -> Iterator[RayCluster]:
    with cluster(environment, TOKEN) as made:
        yield made


@dataclass
class User:
    """A user at a terminal in an experiment, who has the cluster's token.

    Args:
        folder: folder of the experiment.
        environment: environment of the terminal.
        commands: the server that runs most commands.
    """

    folder: Path
    environment: dict[str, str]
    commands: Commands

    def types(self, *arguments: str, **settings: str) -> "subprocess.CompletedProcess[str]":
        done = self.commands.run(self.folder, [*arguments], self.environment | settings, 560)
        print(" ".join(arguments), "->", done.returncode, done.stdout[-3000:], done.stderr[-3000:])
        return done

    def starts(self, *arguments: str, **settings: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "mlx_runtime", *arguments],
            cwd=self.folder,
            env=self.environment | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def record(self, run: str = "run_001", name: str = "digits") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "runs" / name / run / "run.json").read_text())
        return found


@pytest.fixture(scope="module")
def user(
    bound: Path,
    environment: dict[str, str],
    commands: Commands,
    ray_cluster: RayCluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> User:
    folder = Path(shutil.copytree(bound, tmp_path_factory.mktemp("user") / "digits"))
    named = {"RAY_AUTH_TOKEN": TOKEN, "RAY_ADDRESS": ray_cluster.url}
    return User(folder, environment | named, commands)


def tags(port: int) -> dict[str, Any]:
    """Return the tags that a TensorBoard displays, by run."""
    with contextlib.suppress(OSError):
        url = f"http://127.0.0.1:{port}/data/plugin/scalars/tags"
        found: dict[str, Any] = json.load(urllib.request.urlopen(url, timeout=5))
        return found
    return {}


@pytest.fixture(scope="module")
def trained(user: User) -> Path:
    """The folder of a run of three epochs with one worker, trained on the user's machine."""
    done = user.types("train", "run", "cfg.num_epochs=3", "cfg.start_workers=1")
    assert done.returncode == 0, done.stdout + done.stderr
    return user.folder / "runs" / "digits" / "run_001"

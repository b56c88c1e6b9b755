"""Runs that other machines continue only from their mirrors, on a local Hub (tests/hub_server.py)."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Mlx, Start, unbound
from faults import differences, final_state, reports
from hub_server import Faults, Hub
from safetensors.torch import load
from tiny_bert import save_tiny_bert

pytestmark = pytest.mark.kills

COMMAND = ("train", "run", "cfg.num_epochs=4", "cfg.checkpoint_every_steps=2", "cfg.log_every_steps=1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A Hub with a tiny BERT."""
    with Hub() as server:
        server.upload_folder("org/bert", save_tiny_bert(tmp_path_factory.mktemp("bert")))
        yield server


@pytest.fixture(scope="module")
def alone(mlx: Mlx, baked: Path, server: Hub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment that was trained without interruption."""
    folder = unbound("bert", baked, tmp_path_factory.mktemp("alone"))
    done = mlx(folder, *COMMAND, **server.variables(), HF_HOME=str(folder.parent / "hf"))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_fine_tuning_is_killed_and_continues_on_an_empty_machine(
    mlx: Mlx, start: Start, server: Hub, alone: Path, tmp_path: Path
) -> None:
    """The other machine has the experiment and a token; its home, storage and caches are empty, and the mirror is all
    that is left of the first one. Weights and metrics are identical, and no weights are downloaded to be overwritten.
    """
    ignored = shutil.ignore_patterns("runs")
    one, two = (Path(shutil.copytree(alone, tmp_path / name / "bert", ignore=ignored)) for name in ("one", "two"))
    server.repositories.pop("models/alice/bert", None)
    killed: list[int] = []

    def upload(method: str, path: str) -> bool:
        """Kill the driver while it commits its second state, which does not arrive."""
        if path.startswith("/api/models/alice/bert/commit") and len(server.commits("alice/bert")) == 2 and not killed:
            killed.append(driver.pid)
            os.kill(driver.pid, signal.SIGKILL)
            raise ConnectionAbortedError
        return False

    server.faults = Faults(1, when=upload)
    mirrored = (*COMMAND, "cfg.hub.mirror=hf://alice/bert", "--resume=auto")
    driver = start(one, *mirrored, **server.variables(), HF_HOME=str(tmp_path / "one" / "hf"))
    driver.wait(240)
    assert killed
    shutil.rmtree(tmp_path / "one")
    asked = len(server.requests)
    done = mlx(two, *mirrored, **server.variables(), HOME=str(tmp_path / "two"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "downloaded bert/run_001 from hf://alice/bert (attempt 1" in done.stdout
    assert "hf://alice/bert is complete" in done.stdout
    wanted, found = (folder / "runs" / "bert" / "run_001" for folder in (alone, two))
    assert differences(final_state(wanted), final_state(found)) == []
    assert reports(wanted) == reports(found)
    assert (found / "examples.pt").is_file()  # rows of the data stay here
    assert "examples.pt" not in server.files("alice/bert")
    stored = load(server.files("alice/bert")["model.safetensors"])
    trained = final_state(found)["models"]["net"]
    assert differences({f"net.{name}": weight for name, weight in trained.items()}, stored) == []
    assert not [path for _, path in server.requests[asked:] if "org/bert" in path and path.endswith(".safetensors")]


def test_a_sharded_run_continues_under_another_strategy(
    mlx: Mlx, make_in: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    """A mirrored checkpoint has a file of weights per worker, in safetensors."""
    one = make_in("shards", tmp_path / "one")
    two = Path(shutil.copytree(one, tmp_path / "two" / "shards"))
    command = ("train", "run", "cfg.start_workers=2", "cfg.num_epochs=3")
    with Hub() as server:
        mirrored = (*command, "cfg.hub.mirror=hf://alice/shards", "--resume=auto")
        for folder, strategy, steps in ((one, "fsdp", 7), (two, "ddp", 12)):
            limits = (f"cfg.strategy={strategy}", f"cfg.max_steps={steps}")
            done = mlx(folder, *mirrored, *limits, **server.variables())
            assert done.returncode == 0, done.stdout + done.stderr
            if folder == one:
                names = {path.rpartition("/")[2] for path in server.files("alice/shards") if path.startswith("check")}
                assert names >= {"shard_00000.safetensors", "shard_00001.safetensors"}
        assert "downloaded shards/run_001 from hf://alice/shards (attempt 1, step 7" in done.stdout

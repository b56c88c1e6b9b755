"""Whichever process is killed, and whenever: the run continues, and ends with the same weights, metrics and rows."""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from clusters import NOTICED, free_ports
from conftest import MAIN, Mlx, Start, Started
from faults import (
    KINDS,
    SLOW_TO_SAVE,
    Campaign,
    cluster,
    diary,
    differences,
    final_state,
    points,
    record,
    reports,
    rows_per_epoch,
    run_of,
    same,
    verdict,
    wait_for,
)
from forkserver import Commands

from mlx_runtime import open_run
from mlx_runtime.companions.kubernetes.manifest import DRAIN_NODE
from mlx_runtime.storage.files import join_path

pytestmark = [
    pytest.mark.kills,
    pytest.mark.timeout(900),  # lost nodes are noticed after a while, which is long on a busy machine
]

EPOCHS = 5

MARK = f"faults {os.getpid()}"
"""Value of a variable of all processes of the cluster."""

LONG = "datasets.train.rows=1200"
"""With `cfg.pause_s=0.2`, the first epoch on two workers takes half a minute."""

OFTEN = ("cfg.checkpoint_every_steps=3", "cfg.elastic.max_failures=-1")


@pytest.fixture(scope="module")
def bound(make_in: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experiment, bound; tests use copies."""
    return make_in("faults", tmp_path_factory.mktemp("bound"))


@pytest.fixture
def folder(bound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bound, tmp_path / "faults"))


@pytest.fixture(scope="module")
def whole(mlx: Mlx, bound: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`whole("fsdp")`: the folder of an undisturbed run on two workers."""

    @cache
    def whole(strategy: str) -> Path:
        folder = Path(shutil.copytree(bound, tmp_path_factory.mktemp("whole") / "faults"))
        done = mlx(folder, "train", "run", *OFTEN, f"cfg.num_epochs={EPOCHS}", *SLOW_TO_SAVE[strategy])
        assert done.returncode == 0, done.stdout + done.stderr
        return folder

    return whole


@pytest.fixture(scope="module")
def whole_here(mlx: Mlx, bound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run in one process, with three epochs."""
    folder = Path(shutil.copytree(bound, tmp_path_factory.mktemp("whole_here") / "faults"))
    done = mlx(folder, "train", "run", "cfg.start_workers=0", *OFTEN)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def steps_of(folder: Path, since: float = 0.0) -> list[dict[str, Any]]:
    return [note for note in diary(folder) if "rows" in note and note["at"] > since]


@pytest.fixture(scope="module")
def raylets(environment: dict[str, str]) -> Iterator[Any]:
    """A cluster of two nodes with one CPU each, shared by the tests that lose one of them and add another."""
    with cluster(2, environment | NOTICED | {"MLX_TEST_MARK": MARK}) as raylets:
        yield raylets


@pytest.mark.parametrize(
    ("engine", "strategy", "kinds"),
    [("local", "fsdp", KINDS["local"]), ("ray", "ddp", ("raylet",))],
    ids=["local", "ray"],
)
def test_the_run_ends_as_if_nobody_had_killed_anything(
    engine: str,
    strategy: str,
    kinds: tuple[str, ...],
    commands: Commands,
    environment: dict[str, str],
    folder: Path,
    whole: Callable[[str], Path],
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Workers, drivers, fork servers and savers are killed once each in one run, at random moments, and a node of Ray.

    The tests of the cluster kill a driver on Ray.
    `make chaos` does the same with many more of them, and with both strategies and all kinds on each engine.
    """
    overrides = [*OFTEN, f"cfg.num_epochs={EPOCHS}", *SLOW_TO_SAVE[strategy], "cfg.pause_s=0.15"]
    raylets = request.getfixturevalue("raylets") if engine == "ray" else None
    campaign = Campaign(folder, 7, raylets, overrides, environment, commands)
    with capsys.disabled():
        print()
        status = campaign.carry_out(kinds)
    assert status == 0, campaign.output
    assert verdict(folder, whole(strategy), EPOCHS) == []
    assert len(record(folder).get("attempts", [])) == sum(
        kind in ("driver", "server") for kind, _ in campaign.recoveries
    )
    assert record(folder)["status"] == "SUCCEEDED"


@pytest.mark.process
@pytest.mark.parametrize("moment", ["in an epoch", "while saving"])
def test_a_killed_driver_goes_on_where_it_was(
    moment: str, start: Start, mlx: Mlx, folder: Path, whole_here: Path
) -> None:
    """In a single process, so each of the two kills ends everything."""
    options = ["cfg.start_workers=0", *OFTEN]
    at = 0.0
    for attempt, pause_from in enumerate((14, 30)):
        pauses = "cfg.pause_s=0.05" if moment == "while saving" else f"cfg.pause_s=1 cfg.pause_from={pause_from}"
        process = start(folder, "train", "run", *options, *pauses.split(), *(["--resume"] if attempt else []))
        if moment == "while saving":
            wait_for(lambda at=at: len(steps_of(folder, at)) > 7)
            wait_for(lambda: list(run_of(folder).glob("checkpoints/.*.part-*")), every_s=0.0001)
        else:
            wait_for(lambda step=pause_from: any(note["step"] == step for note in steps_of(folder)))
        process.kill()
        process.wait()
        at = time.time()
    refused = mlx(folder, "train", "run", "--resume=run_007")
    assert refused.returncode == 2
    assert refused.stderr == "error: faults has no run 'run_007'. Did you mean 'run_001'?\n"
    done = mlx(folder, "train", "run", "--resume", "cfg.pause_s=0")
    assert done.returncode == 0, done.stderr
    assert "restored  " in done.stdout
    assert same(folder, whole_here) == []
    assert {epoch: rows == list(range(61)) for epoch, rows in rows_per_epoch(folder).items()} == dict.fromkeys(
        range(3), True
    )
    assert not list(run_of(folder).glob("checkpoints/.*.part-*"))


@pytest.mark.process
def test_what_has_succeeded_is_not_run_again_and_more_epochs_extend_it(
    mlx: Mlx, folder: Path, whole_here: Path
) -> None:
    here = ("--resume=auto", "cfg.start_workers=0")
    assert mlx(folder, "train", "run", *here, "cfg.num_epochs=1").returncode == 0  # the first one with this name
    again = mlx(folder, "train", "run", *here, "cfg.num_epochs=1")
    assert again.returncode == 0
    assert again.stderr.startswith(
        "faults/run_001 has succeeded. To train further, raise cfg.num_epochs=1 or cfg.max_steps;"
    )
    assert (again.stdout, len(diary(folder))) == ("loading   src/experiment.py\n", 17)
    longer = mlx(folder, "train", "run", *here, *OFTEN, "cfg.num_epochs=3")
    assert longer.returncode == 0, longer.stderr
    assert same(folder, whole_here) == []
    assert len(record(folder)["attempts"]) == 1
    assert "cfg.num_epochs=3" in record(folder)["overrides"]


@pytest.mark.process
def test_a_checkpoint_of_another_model_is_refused_and_its_weights_are_transferred(
    mlx: Mlx, folder: Path, whole_here: Path
) -> None:
    checkpoint = run_of(whole_here) / "checkpoints" / "epoch_0002"
    options = ["cfg.start_workers=0", "cfg.num_epochs=0", "models.net.width=8"]
    refused = mlx(folder, "train", "run", *options, f"cfg.restore_checkpoint_path={checkpoint}")
    assert refused.returncode == 1
    assert "models.net in the checkpoint does not fit the config: " in refused.stderr
    assert "changed   models.net.width: 16 → 8\n" in refused.stdout
    rules = "[{slice:{layers.0.*:0,layers.1.*:0,layers.3.weight:1}},{fresh:frozen}]"
    transfer = [f"+cfg.transfer.net.source={checkpoint}", f"+cfg.transfer.net.rules={rules}"]
    taken = mlx(folder, "train", "run", *options, "models.net.frozen=3", *transfer)
    assert taken.returncode == 0, taken.stderr
    sizes = re.search(r"([\d,]+) parameters, ([\d,]+) trained$", taken.stdout, re.MULTILINE)
    assert sizes is not None
    total, trained = (int(size.replace(",", "")) for size in sizes.groups())
    assert total == trained + 3
    assert f"transfer  net from {checkpoint}\n" in taken.stdout
    assert "    1  fresh frozen: frozen\n" in taken.stdout
    assert not re.search(r"^ *1/", taken.stdout, re.MULTILINE)


@pytest.mark.process
def test_one_driver_per_run_and_the_other_is_told_how_to_end_it(
    start: Start, mlx: Mlx, folder: Path, whole_here: Path
) -> None:
    """`xp stop` ends a run that it can reach only through the storage, with a checkpoint."""
    process = start(folder, "train", "run", "cfg.start_workers=0", *OFTEN, "cfg.pause_s=1", "cfg.pause_from=5")
    wait_for(lambda: len(steps_of(folder)) > 4)
    second = mlx(folder, "train", "run", "--resume")
    assert second.returncode == 2
    assert re.match(
        rf"error: faults run_001 is being trained by process {process.pid} on \S+, last heard from \d+ s ago. "
        r"Wait for it, or end it with: mlx xp stop faults run_001\n",
        second.stderr,
    )
    found = json.loads(mlx(folder, "xp", "ps", "faults", "--json").stdout)
    assert (found["run"], found["status"], found["world_size"]) == ("faults/run_001", "RUNNING", 1)
    assert found["workers"][0]["pid"] == process.pid
    assert (found["workers"][0]["stage"], found["workers"][0]["step"] > 0) == ("train", True)
    assert found["workers"][0]["at"].startswith("src/experiment.py:")
    stopped = mlx(folder, "xp", "stop", "faults", "run_001")
    assert (stopped.returncode, stopped.stdout) == (0, "faults run_001 is STOPPED\n"), stopped.stderr
    ended = mlx(folder, "xp", "ps", "faults", "1")
    assert ended.stderr == "error: faults/run_001 is STOPPED; see how it went with: mlx xp logs faults run_001\n"
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "stopping  after this step, with a checkpoint (mlx xp stop)" in output
    assert errors.endswith("Resume: mlx train run --resume=run_001\n")
    nothing = mlx(folder, "xp", "stop", "faults", "run_001")
    assert (nothing.returncode, nothing.stderr) == (2, "error: faults run_001 is STOPPED; there is nothing to stop\n")
    before = len(steps_of(folder))
    assert mlx(folder, "train", "run", "--resume=1", "cfg.pause_s=0").returncode == 0
    assert same(folder, whole_here) == []
    assert len(steps_of(folder)) == 48, f"{before} before: the checkpoint was not of the last step"


@pytest.mark.local
class TestTwoWorkers:
    """Tests that need a process group."""

    def test_sigterm_ends_with_a_checkpoint_of_the_last_step(self, start: Start, mlx: Mlx, folder: Path) -> None:
        process = start(folder, "train", "run", "cfg.pause_s=0.2", LONG)
        wait_for(lambda: len(steps_of(folder)) > 4)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 143, errors
        self.check_stopped(folder)

    @pytest.mark.kills
    def test_a_closed_output_ends_it_in_the_same_way(self, start: Start, folder: Path) -> None:
        """As `mlx train run | head` does."""
        process = start(folder, "train", "run", "cfg.pause_s=0.2", LONG, PYTHONUNBUFFERED="1")  # a new interpreter
        wait_for(lambda: len(steps_of(folder)) > 4)
        assert isinstance(process, subprocess.Popen)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == 141
        lines = process.stderr.read().splitlines()
        assert lines[0] == ("standard output was closed; stopping with a checkpoint. Redirect it to a file to train on")
        assert lines[-1].startswith("stopped; faults run_001 is marked STOPPED")
        assert len(lines) == 2
        self.check_stopped(folder)

    @pytest.mark.kills
    @pytest.mark.parametrize("ignored", [False, True], ids=["", "under nohup"])
    def test_so_does_a_closed_terminal(self, ignored: bool, environment: dict[str, str], folder: Path) -> None:
        """Unless it ignores SIGHUP, whatever its output goes to."""
        overrides = ["cfg.pause_s=1", "cfg.pause_from=3", "cfg.num_epochs=1"] if ignored else ["cfg.pause_s=0.2", LONG]
        command = [sys.executable, "-m", "mlx_runtime", "train", "run", "-q", *overrides]
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(folder)
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
            os.execve(sys.executable, command, environment)
        wait_for(lambda: len(steps_of(folder)) > 4)
        os.close(terminal)
        if ignored:
            (folder / "diary" / "hurry").touch()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == (0 if ignored else 129)
        if ignored:
            assert record(folder)["status"] == "SUCCEEDED"
        else:
            self.check_stopped(folder)

    def check_stopped(self, folder: Path) -> None:
        """It was stopped with a checkpoint of its last step."""
        assert record(folder)["status"] == "STOPPED"
        (saved,) = (run_of(folder) / "checkpoints").iterdir()
        last = max(note["step"] for note in steps_of(folder))
        assert saved.name == f"epoch_0001_step_{last:08d}"

    @pytest.mark.kills
    def test_a_hang_tells_where_every_rank_stands(self, mlx: Mlx, folder: Path) -> None:
        done = mlx(folder, "train", "run", "cfg.fault=hang", "cfg.elastic.hang_timeout_s=4")
        assert done.returncode == 1
        assert re.fullmatch(
            r"error: the workers have taken no step for \d+ s:\n"
            # in the stop consensus after step 6 if it is due, else in the next backward
            r"  rank 0 has been waiting in \S.* for \d+ s: epoch 1, train step [67], "
            r"src/experiment.py:\d+ in \w+\n"
            r"  rank 1 has been busy for \d+ s: epoch 1, train step 6, src/experiment.py:\d+ in step\n"
            r"If a step may take that long, raise cfg.elastic.hang_timeout_s\n",
            done.stderr,
        )
        assert record(folder)["status"] == "FAILED"


def test_rows_that_a_killed_process_of_ray_data_held_are_read_again(
    raylets: Any, start: Start, folder: Path, bound: Path, tmp_path: Path
) -> None:
    """The process is one that reads a stream, then the one that assigns blocks to workers."""
    undisturbed = Path(shutil.copytree(bound, tmp_path / "undisturbed"))
    options = ["datasets.train._target_=src.experiment.Table", "cfg.num_epochs=2", "cfg.checkpoint_every_steps=2"]
    readers = raylets.add_node(num_cpus=2)  # workers take the others
    whole = driver_on(raylets, start, undisturbed, *options)
    output, errors = whole.communicate(timeout=300)
    assert whole.returncode == 0, output + errors
    process = driver_on(raylets, start, folder, *options, "cfg.pause_s=0.5")
    for victim in ("ray::(MapWorker|.*Map|.*Read)", "ray::StreamAssigner"):
        at = time.time()
        wait_for(lambda at=at: len(steps_of(folder, at)) > 4)
        os.kill(wait_for(lambda victim=victim: named(victim), every_s=0.001), signal.SIGKILL)
    (folder / "diary" / "hurry").touch()
    output, errors = process.communicate(timeout=300)
    raylets.remove_node(readers)
    assert process.returncode == 0, output + errors
    assert same(folder, undisturbed) == []


def named(title: str) -> int | None:
    """Return a process of the cluster by its title, or None."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            titled = entry.name.isdecimal() and re.match(title, (entry / "cmdline").read_text().replace("\0", " "))
            if titled and f"MLX_TEST_MARK={MARK}".encode() in (entry / "environ").read_bytes():
                return int(entry.name)
    return None


def driver_on(raylets: Any, start: Start, folder: Path, *options: str) -> Started:
    """Runs as jobs of a cluster."""
    settings = {"MLX_IN_JOB": "1", "RAY_ADDRESS": raylets.address}
    return start(folder, "train", "run", f"cfg.out={folder / 'diary'}", *options, **settings)


def test_a_lost_node_shrinks_the_group_and_a_new_one_grows_it(raylets: Any, start: Start, folder: Path) -> None:
    """Throughout, each row is read once per epoch, and each update uses four rows of each of two workers.

    The models are sharded, so each new group reads shards that a group of another size has saved.
    """
    sizes = [
        "cfg.start_workers=2",
        "cfg.elastic.min_workers=1",
        "cfg.elastic.max_workers=2",
        "cfg.elastic.keep_global_batch=true",
    ]
    options = [*OFTEN, "cfg.strategy=fsdp", *sizes, "cfg.num_epochs=99", "cfg.pause_s=0.1"]
    process = driver_on(raylets, start, folder, *options)
    wait_for(lambda: len(steps_of(folder)) > 12)
    at = time.time()
    lost = [note for note in diary(folder) if "start" in note and note["rank"] == 1][-1]["node"]
    raylets.remove_node(next(node for node in raylets.worker_nodes if node.node_id == lost), allow_graceful=False)
    fewer = wait_for(lambda: [note for note in diary(folder) if "start" in note and note["at"] > at])[0]["at"]
    wait_for(lambda: len(steps_of(folder, fewer)) > 5)
    added = time.time()
    raylets.add_node(num_cpus=1)
    wait_for(lambda: any(note["rank"] == 1 for note in steps_of(folder, added)))
    wait_for(lambda grown=time.time(): len(steps_of(folder, grown)) > 30)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 143, output + errors
    assert "workers   2 → 1: restarted" in output
    assert "workers   1 → 2: restarted" in output
    epochs = rows_per_epoch(folder)
    last = max(epochs)
    assert last > 1
    assert all(epochs[epoch] == list(range(61)) for epoch in range(last))
    again = next(note for note in diary(folder) if "start" in note and note["at"] > added)["at"]
    updates: dict[int, list[int]] = {}
    for note in steps_of(folder, fewer):
        if note["at"] < again:
            assert note["rank"] == 0
            updates.setdefault(note["step"], []).append(len(note["rows"]))
    assert max(sum(rows) for rows in updates.values()) == 8
    assert all(size <= 4 for rows in updates.values() for size in rows)


def test_a_pod_that_is_deleted_is_drained_and_ends_the_run_with_a_checkpoint(
    environment: dict[str, str], raylets: Any, start: Start, folder: Path, tmp_path: Path
) -> None:
    """Kubernetes runs the hook in the pod, where `ray` knows its node.

    The last of the tests that share the cluster, which has one node less then.
    """
    process = driver_on(raylets, start, folder, "cfg.pause_s=0.3", "cfg.num_epochs=60")
    wait_for(lambda: len(steps_of(folder)) > 4)
    node = next(note for note in diary(folder) if "start" in note and note["rank"] == 1)["node"]
    ray = tmp_path / "bin" / "ray"
    ray.parent.mkdir()
    real = Path(sys.executable).with_name("ray")
    ray.write_text(f'#!/bin/sh\nexec {real} "$@" --address {raylets.address} --node-id {node}\n')
    ray.chmod(0o755)
    pod = environment | {"PATH": f"{ray.parent}:{environment['PATH']}"}
    with subprocess.Popen(["/bin/sh", "-c", DRAIN_NODE], env=pod) as hook:
        output, _ = process.communicate(timeout=120)
        hook.terminate()  # it may see workers of other tests
    assert process.returncode == 143, output
    assert "a node of this run is being drained; stopping with a checkpoint" in output
    assert record(folder)["status"] == "STOPPED"
    last = max(note["step"] for note in steps_of(folder))
    assert any(path.name.endswith(f"_step_{last:08d}") for path in (run_of(folder) / "checkpoints").iterdir())


@pytest.mark.s3
class TestObjectStore:
    """Runs on an S3 server: resuming needs no local files."""

    def test_a_run_goes_on_from_another_machine(
        self, s3: str, start: Start, mlx: Mlx, folder: Path, bound: Path, whole_here: Path, tmp_path: Path
    ) -> None:
        storage = s3.format(f"runs-{tmp_path.name}")
        place = f"cfg.storage_path='{storage}'"
        options = ["cfg.start_workers=0", place, *OFTEN, "cfg.pause_s=1", "cfg.pause_from=22"]
        process = start(folder, "train", "run", *options, MLX_CACHE=str(tmp_path / "a"))
        wait_for(lambda: len(steps_of(folder)) > 22)
        process.kill()
        process.wait()
        elsewhere = Path(shutil.copytree(bound, tmp_path / "elsewhere"))
        settings = {"MLX_STORAGE": storage, "MLX_CACHE": str(tmp_path / "b")}
        done = mlx(elsewhere, "train", "run", "--resume", "cfg.pause_s=0", **settings)
        assert done.returncode == 0, done.stderr
        assert "restored  s3://bucket/runs-" in done.stdout
        run = open_run(join_path(storage, "faults", "run_001"))
        assert run.record["status"] == "SUCCEEDED"
        assert differences(plain(run.state()), final_state(run_of(whole_here))) == []
        copy = next((tmp_path / "b").glob("runs/*/faults/run_001"))
        assert reports(copy) == reports(run_of(whole_here))
        assert points(copy, "train/mse") == points(run_of(whole_here), "train/mse")
        frame = run.metrics()
        assert list(frame["step"].dropna()) == [line["step"] for line in reports(copy)]


IMPATIENT = """
from mlx_runtime.companions.stores import object_store
from mlx_runtime.runs import records
object_store.TIMEOUTS.update(connect_timeout=1.0, request_timeout=1.0)
records.LAST_S = 3.0
"""
"""A run with this code waits for seconds where others wait for half a minute."""


@pytest.mark.s3
def test_an_object_store_may_stop_answering_for_a_while(
    commands: Commands,
    environment: dict[str, str],
    folder: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """A run waits for it, and says so; if it never answers again, Ctrl-C still ends the run."""
    import boto3

    (port,) = free_ports(1)
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], **options
    ) as server:
        try:
            wait_for(lambda: not socket.socket().connect_ex(("127.0.0.1", port)))
            client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1")
            client.create_bucket(Bucket="bucket")
            storage = (
                f"cfg.storage_path='s3://bucket/a?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1'"
            )
            often = [*OFTEN, "cfg.num_epochs=999", "cfg.pause_s=0.05"]
            settings = environment | {"MLX_CACHE": str(tmp_path)}
            process = commands.start(folder, ["train", "run", storage, *often], settings, IMPATIENT + MAIN)
            request.addfinalizer(process.kill)
            wait_for(lambda: len(steps_of(folder)) > 12)
            (log,) = tmp_path.glob("runs/*/faults/run_001/logs/driver.log")
            server.send_signal(signal.SIGSTOP)
            wait_for(lambda: "training continues, and the next checkpoint waits for it" in log.read_text())
            server.send_signal(signal.SIGCONT)
            wait_for(lambda: "storage   answers again" in log.read_text())
            before = len(steps_of(folder))
            wait_for(lambda: len(steps_of(folder)) > before + 20)
            server.kill()
            server.wait()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
        finally:
            server.kill()
    assert process.returncode == 130
    assert re.match(r"error: cannot write s3://bucket/a/faults/run_001.*the server does not answer", errors), errors
    assert "Once the storage can be written again, resume: mlx train run '--resume=s3://bucket/a" in errors


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in ("config", "tracking")}

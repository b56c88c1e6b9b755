"""Several machines without a cluster: real torchruns, in network namespaces where the system allows them."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from clusters import free_ports
from conftest import Mlx
from faults import diary, differences, final_state, reports, run_of, wait_for
from transcripts import check_transcript

from mlx_runtime import TrainConfig, open_run
from mlx_runtime.companions.torchrun import roster
from mlx_runtime.companions.torchrun.commands import train_join
from mlx_runtime.companions.torchrun.engine import Torchrun
from mlx_runtime.companions.torchrun.offers import Offer
from mlx_runtime.data.sampling import Subset
from mlx_runtime.errors import ConfigError, MlxError
from mlx_runtime.events import RunInfo
from mlx_runtime.loop.job import Cluster, Job

WAIT_S = 240
"""How long anything may take on a busy machine."""

HIDE = 'mount --bind "$0" "$1" && shift && exec "$@"'
"""Script that runs a command with another folder in place of one."""


@pytest.mark.pure
class TestRoster:
    def read(self, folder: Path, content: Any) -> list[roster.Node]:
        file = folder / "nodes.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return roster.read(file)

    def test_the_form_of_the_spec(self, tmp_path: Path) -> None:
        nodes = self.read(
            tmp_path,
            {
                "0": {"IP": "10.0.0.1:8080", "benchmarks": {"ram": 8, "bandwidth": 20}},
                "gpu": {"IP": "second", "ram": 16, "slots": 2},
            },
        )
        assert nodes == [
            roster.Node("node_0", "10.0.0.1", 8080, ram=8, bandwidth=20),
            roster.Node("gpu", "second", 0, slots=2, ram=16),
        ]

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            ("{", "nodes.json: Expecting"),
            ('{"0": {"IP": "a"}, "0": {"IP": "b"}}', "nodes.json: the key '0' occurs twice"),
            ({"0": {}}, "node '0': IP is missing"),
            ({"0": {"IP": "-oProxyCommand=x"}}, "node '0': IP is '-oProxyCommand=x', not an address"),
            ({"0": {"IP": "a", "slot": 1}}, "node '0': unknown field 'slot'. Did you mean 'slots'?"),
            ({"0": {"IP": "a"}, "1": {"IP": "a"}}, "node '1': IP is the same as that of node_0"),
            ({"0": {"IP": "a"}, "1": {"IP": "b", "name": "node_0"}}, "node '1': the name node_0 is already used"),
        ],
    )
    def test_problems_name_the_file_the_node_and_the_field(self, content: Any, problem: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=re.escape(problem)):
            self.read(tmp_path, content)

    @pytest.mark.timeout(30)
    def test_a_pipe_is_refused(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "nodes.json")  # reading it would block forever
        with pytest.raises(ConfigError, match=r"cannot read .*nodes.json, the list of machines: .*not a regular file"):
            roster.read(tmp_path / "nodes.json")


@pytest.mark.pure
@pytest.mark.parametrize(
    ("first", "words", "problem"),
    [
        ("10.0.0.1:29500", ["--name=node_7"], "nodes.json has no machine 'node_7'. Did you mean 'node_1'?"),
        (
            "10.0.0.1",
            ["--name=node_1"],
            "nodes.json: node_0, the first machine, needs a port; write its IP as HOST:PORT",
        ),
    ],
)
def test_what_cannot_join_is_refused_at_once(
    first: str, words: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nodes.json").write_text(json.dumps({"0": {"IP": first}, "1": {"IP": "10.0.0.2"}}))
    done = CliRunner().invoke(train_join, ["nodes.json", *words])
    assert problem in str(done.exception)


@pytest.mark.pure
def test_a_process_takes_part_only_with_the_same_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job crosses the store of torchrun, which answers anybody, without pickle."""
    run = RunInfo("digits", "run_001", tmp_path / "runs/digits/run_001", str(tmp_path), {"cfg": {"seed": 1}}, 2)
    rows = Subset(torch.arange(3), {"batch_size": 4})
    options = {"prepared": {}, "subsets": {"train": rows}, "receiver": (("10.0.0.1", 9), b"key"), "evaluate": False}
    tree = {"cfg": {"storage_path": "runs"}, "optimizers": {1: [None, 1e-3, "${x}"]}}
    here = Cluster("", 2, 0, host="10.0.0.1")
    for name in ("first", "second"):
        (tmp_path / name / "src").mkdir(parents=True)
        (tmp_path / name / "src/experiment.py").write_text("x = 1\n")
    job = Job("src.experiment.E", tree, run, str(tmp_path), tmp_path / "first", here, False, **options)
    message = Offer.of(job, "gloo", 60.0, 0).encode()
    monkeypatch.chdir(tmp_path / "second")
    offer = Offer.decode(message)
    assert offer.problem(1) == ""
    received = offer.job_here(sees=True, shared=False)
    assert torch.equal(received.subsets.pop("train").rows, job.subsets.pop("train").rows)
    cluster = dataclasses.replace(here, captures_output=False, shares_storage=False)
    assert received == dataclasses.replace(job, cluster=cluster, project=tmp_path / "second")
    Path("src/experiment.py").write_text("x = 2\n")
    refused = r"has a different src/experiment.py than rank 0 \(\w{12} instead of \w{12}\); use the same checkout"
    assert re.match(refused, offer.problem(1))
    with pytest.raises(MlxError, match="rank 0 sent an invalid job"):
        Offer.decode(b"\x80\x04." + message[:40])
    job.tree["cfg"]["object"] = object()
    with pytest.raises(ConfigError, match="torchrun cannot train this: object objects cannot be sent"):
        Offer.of(job, "gloo", 60.0, 0).encode()


@pytest.mark.pure
def test_a_busy_port_is_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a driver without torchrun's store, before it claims a run, and by `mlx train join` on the first machine."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "experiment.py").touch()
    monkeypatch.chdir(tmp_path)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    monkeypatch.setattr(os, "environ", os.environ | variables)
    with socket.create_server(("", 0)) as busy:
        os.environ["MASTER_PORT"] = port = str(busy.getsockname()[1])
        problem = f"cannot listen at port {port} of this machine: Address already in use; "
        with pytest.raises(ConfigError, match=f"^{problem}set MASTER_PORT to another one$"):
            Torchrun.connect(TrainConfig(start_workers=2), "").__enter__()
        Path("nodes.json").write_text(json.dumps({"0": {"IP": f"127.0.0.1:{port}"}, "1": {"IP": "127.0.0.2"}}))
        done = CliRunner().invoke(train_join, ["nodes.json", "--name=node_0"])
        assert str(done.exception) == (
            f"{problem}end the process that uses it, or write another port into nodes.json, on all machines"
        )


Machines = list[tuple[str, list[str]]]
"""Address of each machine, and the words before a command that runs on it."""


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Two machines with a network of their own; without network namespaces, two addresses of loopback."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    names = [f"mlx{os.getpid()}{end}" for end in "ab"]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "delete", name)
            ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
            for number, name in enumerate(names, start=1):
                ip("-netns", name, "address", "add", f"10.79.0.{number}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    ip("-netns", name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError):
            yield [("127.0.0.1", []), ("127.0.0.2", [])]
            return
        yield [(f"10.79.0.{number}", ["ip", "netns", "exec", name]) for number, name in enumerate(names, start=1)]


class Joined:
    """`mlx train join` on a machine."""

    def __init__(self, command: Sequence[str], folder: Path, environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as stream:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=stream, stderr=stream)

    def wait(self) -> int:
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        self.process.terminate()  # torchrun ends its processes
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(40)
        self.process.kill()


@pytest.fixture
def join(
    machines: Machines, environment: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Joined]]:
    """`join(number, folder, "cfg.num_epochs=3")` runs `mlx train join` as a node, with its own storage if hidden.

    There are two nodes, or as many as its parameter says. Even ones are on the first machine.
    """
    file, started = tmp_path / "nodes.json", list[Joined]()
    ports = [free_ports(1)[0], *range(1, getattr(request, "param", 2))]  # only the first one is used
    listed = [f"{machines[number % 2][0]}:{port}" for number, port in enumerate(ports)]
    file.write_text(json.dumps({str(number): {"IP": address} for number, address in enumerate(listed)}))

    def join(number: int, folder: Path, *words: str, hidden: Path | None = None) -> Joined:
        command = [*machines[number % 2][1]]
        if hidden is not None:
            (tmp_path / "empty").mkdir()
            command += ["unshare", "-m", "sh", "-c", HIDE, str(tmp_path / "empty"), str(hidden)]
        command += ["nohup", sys.executable, "-m", "mlx_runtime", "train", "join", str(file)]
        command += ["--name", f"node_{number}", *words]
        started.append(Joined(command, folder, environment, tmp_path / f"join_{len(started)}.log"))
        return started[-1]

    yield join
    for item in started:
        item.kill()


def may_hide_folders() -> bool:
    """Return True if a process may have its own mounts here."""
    done = subprocess.run(["unshare", "-m", "true"], capture_output=True) if shutil.which("unshare") else None
    return done is not None and done.returncode == 0


@pytest.mark.kills
def test_lost_processes_end_an_attempt_and_the_next_one_resumes(
    mlx: Mlx, join: Callable[..., Joined], experiment: Callable[[str], Path], tmp_path: Path
) -> None:
    """A worker and the driver are killed in the middle of epochs; one machine does not see the storage.

    The run ends with the bits of a local one.
    """
    folder = experiment("faults")
    reference, other = (Path(shutil.copytree(folder, tmp_path / name)) for name in ("reference", "other"))
    done = mlx(reference, "train", "run", "cfg.checkpoint_every_steps=3")
    assert done.returncode == 0, done.stderr
    words = ("cfg.checkpoint_every_steps=3", f"cfg.out={folder / 'diary'}", "cfg.pause_s=1", "cfg.pause_from=5")
    hidden = may_hide_folders()
    (folder / "runs").mkdir(exist_ok=True)
    first = join(0, folder, *words)
    second = join(1, other, **({"hidden": folder / "runs"} if hidden else {}))
    wait_for(lambda: [note for note in diary(folder) if note.get("step") == 5 and note["rank"] == 1], WAIT_S)
    starts = [note for note in diary(folder) if "start" in note and note["rank"] == 1]
    assert len(starts) == 1
    first.process.send_signal(signal.SIGHUP)  # without effect, because of nohup
    os.kill(starts[0]["pid"], signal.SIGKILL)
    wait_for(lambda: len([note for note in diary(folder) if note.get("start", 0) >= 3]) == 2, WAIT_S)
    wait_for(lambda: [note for note in diary(folder) if note.get("step", 0) >= 10 and note["rank"] == 0], WAIT_S)
    os.kill(json.loads((run_of(folder) / "run.json").read_text())["pid"], signal.SIGKILL)
    (folder / "diary" / "hurry").touch()
    assert [first.wait(), second.wait()] == [0, 0], first.log.read_text() + second.log.read_text()

    one, plain = run_of(folder), run_of(reference)
    assert differences(final_state(one), final_state(plain)) == []
    assert reports(one) == reports(plain)
    record = json.loads((one / "run.json").read_text())
    assert (record["engine"]["used"], record["workers"], record["attempt"]) == ("torchrun", 2, 3)
    if hidden:
        elsewhere = other / "runs/.elsewhere/faults/run_001/logs/rank_1.log"
        assert elsewhere.is_file()
        assert not (one / "logs" / "rank_1.log").exists()
    output = first.log.read_text()
    lines = [line for line in output.splitlines() if line.startswith(("attempt ", "error: a worker", "lost "))]
    check_transcript("torchrun.md", "lost", lines[:4], {str(folder): "digits"})


@pytest.mark.kills
def test_ctrl_c_ends_all_machines(
    join: Callable[..., Joined], experiment: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = experiment("faults")
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    first, second = join(0, folder, f"cfg.out={folder / 'diary'}", "cfg.fault=hang"), join(1, other)
    wait_for(lambda: [note for note in diary(folder) if note.get("step") == 7 and note["rank"] == 0], WAIT_S)
    first.process.send_signal(signal.SIGINT)  # rank 1 has finished step 6 with it, and is asleep
    assert [first.wait(), second.wait()] == [130, 130], first.log.read_text() + second.log.read_text()
    assert "ended     by rank 0; see its output" in second.log.read_text()
    assert "attempt   2" not in second.log.read_text()


STAGES = {
    "by name": [[("node_1", 0, 0), ("node_0", 1, 1)], [("node_2", 0, 1)]],
    "in order": [[("a", 0, 0), ("b", 1, 1)], [("c", 0, 1)]],
}
"""Clusters of a plan: the node of each stage, and its first and last block."""


@pytest.mark.examples
@pytest.mark.parametrize("join", [3], indirect=True)
def test_a_plan_of_unequal_clusters_trains_replicas(
    mlx: Mlx, join: Callable[..., Joined], experiment: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two nodes hold a stage each, and the third one the whole model. The weights are those of a local run."""
    folder = experiment("faults")
    for name, clusters in STAGES.items():
        stages = [[dict(zip(("node", "first", "last"), stage, strict=True)) for stage in item] for item in clusters]
        plan = {"model": "net", "blocks": ["layers.0", "layers.3"], "clusters": [{"stages": item} for item in stages]}
        (folder / f"{name.replace(' ', '_')}.json").write_text(json.dumps(plan))
    words = ("cfg.num_epochs=1", "cfg.strategy=pipeline", "cfg.fragments.microbatches=1", "cfg.replicas.every=3")
    done = mlx(folder, "train", "run", *words, "cfg.start_workers=3", "cfg.fragments.plan=in_order.json")
    assert done.returncode == 0, done.stdout + done.stderr
    joined = [join(0, folder, *words, "cfg.fragments.plan=by_name.json"), join(1, folder), join(2, folder)]
    logs = [item.log for item in joined]
    assert [item.wait() for item in joined] == [0, 0, 0], "".join(log.read_text() for log in logs)
    runs = [run_of(folder, name) for name in ("run_001", "run_002")]
    local, run = (open_run(item).state()["models"] for item in runs)
    assert differences(local, run) == []
    in_order, by_name = (next(line for line in reports(item) if "fragments/bytes" in line) for item in runs)
    assert in_order["fragments/bytes/rank_0"] == by_name["fragments/bytes/rank_1"] != by_name["fragments/bytes/rank_0"]
    output = logs[0].read_text()
    assert "replicas  2, of 2 + 1 workers, averaged every 3 updates" in output
    assert "Traceback" not in output + logs[1].read_text() + logs[2].read_text()

"""Several machines without a cluster: real processes at different addresses of this machine."""

import contextlib
import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from clusters import free_ports
from conftest import Mlx, Start
from faults import diary, differences, final_state, reports, run_of, wait_for
from transcripts import check_transcript

from mlx_runtime.companions.nodes import agent, channel, roster
from mlx_runtime.companions.nodes.channel import Channel, connect
from mlx_runtime.companions.nodes.commands import train_join
from mlx_runtime.companions.nodes.engine import largest_group, stores_shards
from mlx_runtime.companions.nodes.rendezvous import Rendezvous, versions
from mlx_runtime.companions.nodes.store import NetworkStore, Values
from mlx_runtime.errors import ConfigError, MlxError

KEY = b"0123456789abcdef"

NODES = [roster.Node("node_0", "127.0.0.1", slots=1), roster.Node("node_1", "127.0.0.2", slots=1)]

WAIT_S = 240
"""How long anything may take on a busy machine."""


class Bomb:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    rendezvous = Rendezvous(NODES, "127.0.0.1", KEY, {"code": "abc"}, gpus=0)
    yield rendezvous
    rendezvous.close()


def hello(**changed: Any) -> dict[str, Any]:
    return {"name": None, "process": "p", "address": "127.0.0.2", "versions": versions(), "gpus": 0} | changed


def answer(rendezvous: Rendezvous, **changed: Any) -> tuple[Any, ...]:
    """Join, and return the first answer. The connection is closed when the test ends."""
    joined = connect(rendezvous.address, KEY)
    joined.send("join", hello(**changed))
    KEPT.append(joined)
    return joined.receive()


KEPT: list[Channel] = []


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
                "gpu": {"address": "second", "ram": 16, "slots": 2, "ssh": "me@second"},
            },
        )
        assert nodes == [
            roster.Node("node_0", "10.0.0.1", 8080, ram=8, bandwidth=20),
            roster.Node("gpu", "second", 0, ram=16, slots=2, ssh="me@second"),
        ]

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            ("{", "nodes.json: Expecting"),
            ("[]", "nodes.json: it is a list, not a mapping"),
            ("{}", "nodes.json: it lists no machines"),
            ({"0": 1}, "node '0': it is 1, not a mapping"),
            ({"0": {}}, "node '0': IP is missing"),
            ({"0": {"IP": "10.0.0.1:99999"}}, "node '0': IP is '10.0.0.1:99999', not an address like 10.0.0.1:29500"),
            ({"0": {"IP": "10.0.0.300"}}, "node '0': IP is '10.0.0.300', not an address"),
            ({"0": {"IP": "::1"}}, "node '0': IP is '::1'; IPv6 addresses are not supported"),
            ({"0": {"IP": "a", "ram": -1}}, "node '0': ram is -1, not a number above 0"),
            ({"0": {"IP": "a", "benchmarks": {"ram": "8"}}}, "node '0': benchmarks: ram is '8', not a number above 0"),
            ({"0": {"IP": "a", "slot": 1}}, "node '0': there is no field 'slot'. Did you mean 'slots'?"),
            ({"0": {"IP": "a", "slots": 0}}, "node '0': slots is 0, not a whole number above 0"),
            ({"0": {"IP": "a", "ssh": "-oProxyCommand=x"}}, "node '0': ssh is '-oProxyCommand=x', not a destination"),
            ({"0": {"IP": "a"}, "1": {"IP": "a"}}, "node '1': IP is that of node_0, too"),
            ({"0": {"IP": "a"}, "1": {"IP": "b", "name": "node_0"}}, "node '1': name node_0 is that of another node"),
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

    @pytest.mark.parametrize(
        ("nodes", "workers", "slots"), [(2, 5, [3, 2]), (1, 4, [4]), (3, 3, [1, 1, 1]), (4, 3, None), (0, 3, None)]
    )
    def test_workers_are_shared_evenly(self, nodes: int, workers: int, slots: list[int] | None) -> None:
        cfg = SimpleNamespace(nodes=nodes, start_workers=workers)
        if slots is None:
            with pytest.raises(ConfigError):
                roster.nodes_of(cfg)
        else:
            assert [node.slots for node in roster.nodes_of(cfg)] == slots


@pytest.mark.pure
@pytest.mark.parametrize(
    ("words", "key", "problem"),
    [
        (["--name=node_7"], "k" * 16, "nodes.json has no machine 'node_7'. Did you mean 'node_1'?"),
        (["--name=node_1"], "short", "the key has 5 characters; those of runs have at least 16"),
    ],
)
def test_what_no_run_would_accept_is_refused_at_once(
    words: list[str], key: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLX_JOIN_KEY", key)
    Path("nodes.json").write_text(json.dumps({"0": {"IP": "10.0.0.1:29500"}, "1": {"IP": "10.0.0.2"}}))
    done = CliRunner().invoke(train_join, ["nodes.json", *words])
    assert str(done.exception) == problem


@pytest.mark.pure
class TestRendezvous:
    def test_only_holders_of_the_key_come_in(self, rendezvous: Rendezvous) -> None:
        with pytest.raises(AuthenticationError, match="another key"):
            connect(rendezvous.address, b"another key 0123")
        assert answer(rendezvous) == ("welcome", {"code": "abc", "name": "node_1"})

    def test_a_wrong_key_is_one_line(self, rendezvous: Rendezvous) -> None:
        address = f"127.0.0.1:{rendezvous.address[1]}"
        with pytest.raises(MlxError, match=f"^cannot join {address}: the run has another key$"):
            agent.join(rendezvous.address, "another key 0123", None, None, wait_s=60)

    def test_strangers_are_not_unpickled_and_keep_nobody_waiting(self, rendezvous: Rendezvous) -> None:
        chance, bomb, strangers = random.Random(0), pickle.dumps(Bomb()), []
        for number in range(300):
            stranger = socket.create_connection(rendezvous.address)
            strangers.append(stranger)
            with contextlib.suppress(OSError):
                match number % 5:
                    case 0:
                        stranger.sendall(chance.randbytes(chance.randrange(1, 400)))
                    case 1:
                        stranger.sendall(b"\x7f\xff\xff\xff" + bomb)
                    case 2:
                        stranger.sendall(len(bomb).to_bytes(4, "big") + bomb)
                    case 3:
                        stranger.sendall((64).to_bytes(4, "big") + chance.randbytes(64) + bomb)
        assert answer(rendezvous)[0] == "welcome"
        for stranger in strangers:
            stranger.close()

    def test_a_forged_message_ends_the_connection(self) -> None:
        """Whoever takes over a connection after both ends have authenticated cannot send anything."""
        here, there = Pipe()
        admitted: list[Channel] = []
        thread = threading.Thread(target=lambda: admitted.append(channel.admit(here, KEY)))
        thread.start()
        greeting = there.recv_bytes()
        nonces = greeting[len(channel.GREETING) :] + bytes(32)
        there.send_bytes(bytes(32) + channel.hmac.digest(KEY, b"node" + nonces, "sha256"))
        there.recv_bytes()
        thread.join()
        peer = Channel(there, channel.hmac.digest(KEY, b"session" + nonces, "sha256"), at_head=False)
        peer.send("first")
        assert admitted[0].receive() == ("first",)
        there.send_bytes(bytes(32) + pickle.dumps(Bomb()))
        with pytest.raises(OSError, match="wrong signature"):
            admitted[0].receive()

    def test_something_else_at_the_address(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:

            def serve() -> None:
                peer, _ = other.accept()
                with peer:
                    peer.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(AuthenticationError, match="no run of this version of mlx answers"):
                connect(other.getsockname(), KEY)
            thread.join()

    def test_a_machine_must_have_the_same_versions(self, rendezvous: Rendezvous) -> None:
        kind, problem, again = answer(rendezvous, versions=versions() | {"torch": "1.0"})
        assert (kind, again) == ("refused", False)
        assert "has torch 1.0, and the first machine 2." in problem

    def test_each_machine_joins_once(self, rendezvous: Rendezvous) -> None:
        assert answer(rendezvous, name="node_1")[0] == "welcome"
        assert answer(rendezvous, name="node_1", process="q") == ("refused", "node_1 has joined already", True)
        assert answer(rendezvous, name="node_1")[0] == "welcome", "it has lost its connection"
        assert answer(rendezvous, name="node_7", process="q")[2] is False
        assert answer(rendezvous, address="127.0.0.9", process="q")[2] is False

    def test_the_store(self, rendezvous: Rendezvous) -> None:
        rendezvous.stores = {3: Values()}
        one, other = (NetworkStore(rendezvous.address, KEY, 3) for _ in range(2))
        one.set("a", "1")
        assert other.get("a") == b"1"
        assert [one.add("n", 2), other.add("n", 3)] == [2, 5]
        assert one.compare_set("key", "", "mine") == other.compare_set("key", "", "theirs") == b"mine"
        assert (one.check(["a", "b"]), one.num_keys(), one.delete_key("a"), one.check(["a"])) == (False, 3, True, False)
        with pytest.raises(RuntimeError, match="timeout"):
            one.wait(["b"], timedelta(seconds=0.05))


Machine = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def blind(environment: dict[str, str], tmp_path: Path) -> Iterator[Machine]:
    """`blind(hidden, "host:port")` joins from another home, and sees an empty folder in place of `hidden`."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "blind" / "empty").mkdir(parents=True)

    def blind(hidden: Path, *words: str) -> "subprocess.Popen[str]":
        script = 'mount --bind "$0" "$1" && shift && exec "$@"'
        mount = ["unshare", "-m", "sh", "-c", script, str(tmp_path / "blind" / "empty"), str(hidden)]
        process = subprocess.Popen(
            [*mount, sys.executable, "-m", "mlx_runtime", "train", "join", *words],
            cwd=tmp_path / "blind",
            env=environment | {"HOME": str(tmp_path / "blind"), "MLX_JOIN_KEY": KEY.decode()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield blind
    for process in started:
        process.kill()
        process.wait()


def nodes_file(folder: Path) -> tuple[Path, str]:
    """Return a file for two machines, and the address of the first."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    file = folder / "nodes.json"
    file.write_text(json.dumps({"0": {"IP": address}, "1": {"IP": "127.0.0.2"}}))
    return file, address


def may_hide_folders() -> bool:
    """Return True if a process may have its own mounts here."""
    done = subprocess.run(["unshare", "-m", "true"], capture_output=True) if shutil.which("unshare") else None
    return done is not None and done.returncode == 0


@pytest.mark.local
def test_a_lost_machine_joins_again_and_the_run_ends_as_a_local_one(
    mlx: Mlx, start: Start, blind: Machine, experiment: Callable[[str], Path], tmp_path: Path
) -> None:
    """It is killed in the middle of an epoch, and replaced by one that does not see the storage.

    That gets the code and the checkpoint from the first one.
    """
    if not may_hide_folders():
        pytest.skip("processes may not have their own mounts here")
    folder = experiment("faults")
    reference = Path(shutil.copytree(folder, tmp_path / "reference"))
    words = ("cfg.checkpoint_every_steps=3",)
    done = mlx(reference, "train", "run", *words)
    assert done.returncode == 0, done.stderr
    file, address = nodes_file(tmp_path)
    notes = f"cfg.out={folder / 'diary'}"  # where all machines find `hurry`
    words = (*words, "cfg.engine=nodes", f"cfg.nodes={file}", notes, "cfg.pause_s=1", "cfg.pause_from=10")
    run = start(folder, "train", "run", *words, MLX_JOIN_KEY=KEY.decode())
    lost = start(tmp_path, "train", "join", str(file), "--name", "node_1", MLX_JOIN_KEY=KEY.decode())
    wait_for(lambda: any(note.get("step") == 10 for note in diary(folder)), WAIT_S)
    lost.send_signal(signal.SIGKILL)
    lost.wait(WAIT_S)
    (folder / "diary" / "hurry").touch()
    again = blind(folder / "runs", str(file), "--name", "node_1")
    output, errors = run.communicate(timeout=WAIT_S)
    assert run.returncode == 0, output + errors
    assert "lost      rank 1: node_1 (127.0.0.2) is lost: its connection was closed\n" in output
    assert "workers   2: restarted" in output
    printed, _ = again.communicate(timeout=WAIT_S)
    assert again.returncode == 0, printed
    assert "copied from the first machine" in printed
    one, other = run_of(folder), run_of(reference)
    assert differences(final_state(one), final_state(other)) == []
    assert reports(one) == reports(other)
    record = json.loads((one / "run.json").read_text())
    assert (record["engine"]["used"], record["workers"], record["failures"]) == ("nodes", 2, 1)
    assert (one / "logs" / "rank_1.log").is_file()
    key_file = re.search(r"\S+/join\.key", output)
    assert key_file is not None
    names = {address: "10.0.0.1:40321", "127.0.0.2": "10.0.0.2", key_file[0]: "/tmp/mlx-local-06eb8r5z/join.key"}
    lines = [line for line in output.splitlines() if not line.startswith("waiting   for ")]  # only on a slow machine
    for name, first, last in (("join", "join ", "machines "), ("lost", "lost ", "restored ")):
        begin, end = (next(at for at, line in enumerate(lines) if line.startswith(word)) for word in (first, last))
        shown = [line for line in lines[begin:end] if not line.startswith("starting ")]  # only after two seconds
        check_transcript("nodes.md", name, shown, names)


@pytest.mark.kills
def test_ssh_starts_a_machine_until_it_answers(
    start: Start, experiment: Callable[[str], Path], tmp_path: Path, environment: dict[str, str]
) -> None:
    """It is killed, and unreachable at first; the other one trains until it joins again."""
    folder = experiment("faults")
    file, _ = nodes_file(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, script in {
        "mlx": f'echo $$ >> {tmp_path}/pids; exec {sys.executable} -m mlx_runtime "$@"',
        "ssh": f'for last; do :; done; cd {tmp_path}; [ "$(cat pids | wc -l)" != 1 ] || [ -e tried ] || '
        '{ touch tried; echo "No route to host"; exit 255; }; exec sh -c "$last"',
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "pids").touch()
    machine = {"IP": "127.0.0.2", "ssh": "second", "command": str(tmp_path / "bin" / "mlx")}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"1": machine}))
    words = ("cfg.engine=nodes", f"cfg.nodes={file}", "cfg.elastic.min_workers=1", "cfg.checkpoint_every_steps=3")
    words += ("cfg.elastic.wait_s=3",)  # less than the pause before the second attempt of ssh
    words += (f"cfg.out={folder / 'diary'}", "cfg.pause_s=1", "cfg.pause_from=4")
    path = f"{tmp_path / 'bin'}:{environment['PATH']}"
    run = start(folder, "train", "run", *words, PATH=path)
    wait_for(lambda: any(note["rank"] == 1 and note.get("step", 0) >= 4 for note in diary(folder)), WAIT_S)
    os.kill(int((tmp_path / "pids").read_text()), signal.SIGKILL)
    log = run_of(folder) / "logs" / "driver.log"
    wait_for(lambda: log.read_text().count("joined    node_1") == 2, WAIT_S)
    (folder / "diary" / "hurry").touch()
    output, errors = run.communicate(timeout=WAIT_S)
    assert run.returncode == 0, output + errors
    assert "ssh       node_1: No route to host; again in 5 s" in output
    assert "workers   2 → 1: restarted" in output
    assert output.count("joined    node_1") == 2


@pytest.mark.pure
def test_machines_whose_workers_fill_no_pipeline_are_left_out() -> None:
    nodes = [roster.Node(f"node_{number}", slots=slots) for number, slots in enumerate((1, 1, 3, 2))]
    assert largest_group(nodes, 1) == nodes
    assert largest_group(nodes[:3], 2) == [nodes[0], nodes[2]]
    assert largest_group(nodes, 3) == [nodes[0], nodes[2], nodes[3]]
    assert largest_group(nodes[:2], 3) == []


@pytest.mark.pure
def test_pipelines_need_no_shared_storage() -> None:
    assert stores_shards("fsdp")
    assert not stores_shards("pipeline")


@pytest.mark.local
def test_a_stop_reaches_all_machines(mlx: Mlx, start: Start, experiment: Callable[[str], Path], tmp_path: Path) -> None:
    """The second one waits for the run before that has begun."""
    folder = experiment("faults")
    file, address = nodes_file(tmp_path)
    other = start(tmp_path, "train", "join", address, "--name", "node_1", MLX_JOIN_KEY=KEY.decode())
    words = ("cfg.engine=nodes", f"cfg.nodes={file}", "cfg.pause_s=0.2", "cfg.num_epochs=100")
    run = start(folder, "train", "run", *words, MLX_JOIN_KEY=KEY.decode())
    wait_for(lambda: any(note.get("step") == 3 for note in diary(folder)), WAIT_S)
    assert mlx(folder, "xp", "stop", "faults", "run_001").returncode == 0
    output, errors = run.communicate(timeout=WAIT_S)
    assert run.returncode == 143, output + errors
    printed, errors = other.communicate(timeout=WAIT_S)
    assert other.returncode == 0, printed + errors
    assert json.loads((run_of(folder) / "run.json").read_text())["status"] == "STOPPED"

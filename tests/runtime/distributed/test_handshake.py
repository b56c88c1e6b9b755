"""Process groups that other processes on the same machine can neither join nor end."""

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two workers and a stranger, each a process of its own, have found."""
    folder = tmp_path_factory.mktemp("strangers")
    done = subprocess.run([sys.executable, "-c", STRANGERS, folder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


def test_groups_connect_although_a_stranger_sends_junk_first(found: dict[str, Any]) -> None:
    """Bytes that are not gloo's, a connection without any, and one that is reset."""
    assert found["0"]["before"] == found["1"]["before"] == [3.0, 3.0]


def test_nobody_connects_once_a_group_has_started(found: dict[str, Any]) -> None:
    assert found["strangers"]["junk"] == 3
    assert found["strangers"]["later"] == ["timed out"] * 4  # two workers with two groups each
    assert found["0"]["after"] == found["1"]["after"] == [3.0, 3.0]


def test_groups_listen_on_the_loopback_interface(found: dict[str, Any]) -> None:
    assert {host for host, _ in found["strangers"]["addresses"]} == {"127.0.0.1"}


def test_a_stranger_in_the_place_of_a_peer_is_found_out(found: dict[str, Any]) -> None:
    """It has won the race for a connection, and sends as many bytes as a proof has."""
    assert found["impostor"]["error"] == (
        "MlxError: another process connected to rank 0 as if it were rank 1; nothing was read from it. "
        "Look for it among the processes of other users, and start the run again"
    )


def test_a_stranger_who_says_nothing_ends_the_wait(found: dict[str, Any]) -> None:
    error, _, why = found["silent"]["error"].partition(" the run: ")
    assert error == "WorkerLostError: rank 1 did not prove to rank 0 that it belongs to"
    assert why == "Timed out waiting 500ms for recv operation to complete"


STRANGERS = r"""
import json, os, socket, struct, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from mlx_runtime.distributed import handshake
from mlx_runtime.distributed.handshake import LOOPBACK, keep_groups_private

folder = Path(sys.argv[1])

def started(work, *args):
    pid = os.fork()
    if pid == 0:
        try:
            work(*args)
            os._exit(0)
        finally:
            os._exit(1)
    return pid

def wait_for(what):
    until = time.monotonic() + 120
    while not (found := what()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found

def worker(rank):
    keep_groups_private()
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store")), rank=rank, world_size=2)
    groups = [None, dist.new_group(backend="gloo")]
    found = {"before": sums(groups, rank)}
    (folder / f"{rank}.ready").touch()
    wait_for((folder / "go").exists)
    found["after"] = sums(groups, rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))

def sums(groups, rank):
    values = [torch.tensor(rank + 1.0) for _ in groups]
    for value, group in zip(values, groups):
        dist.all_reduce(value, group=group)
    return [value.item() for value in values]

def addresses(*pids):
    links = [os.readlink(file) for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir()]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]
    return [(socket.inet_ntoa(struct.pack("<I", int(host, 16))), int(port, 16)) for host, port in ends]

def connected(address):
    return socket.create_connection(address, timeout=0.3)

def refusal(address):
    try:
        connected(address)
    except OSError as error:
        return str(error)

def impostor(send):
    group = other_group("impostor" if send else "silent")
    if send:
        group.send([torch.frombuffer(bytearray(os.urandom(32)), dtype=torch.uint8)], 0, handshake._TAG).wait()
    time.sleep(120)

def other_group(name, rank=1):
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(interface=LOOPBACK)]
    return ProcessGroupGloo(dist.FileStore(str(folder / name)), rank, 2, options)

def deceived(name):
    group = other_group(name, rank=0)
    try:
        handshake.prove(group, dist.FileStore(str(folder / f"{name}.keys")), 0, 2)
        error = None
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    (folder / f"{name}.json").write_text(json.dumps({"error": error}))

first = started(worker, 0)
(address,) = wait_for(lambda: addresses(first))
junk = [connected(address) for _ in range(3)]
junk[0].send(b"\xff" * 64)
junk[2].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
junk[2].close()
second = started(worker, 1)
wait_for(lambda: all((folder / f"{rank}.ready").exists() for rank in range(2)))
ends = addresses(first, second)
results = {"junk": len(junk), "later": [refusal(end) for end in ends], "addresses": ends}
(folder / "go").touch()
codes = [os.waitpid(pid, 0)[1] for pid in (first, second)]
(folder / "strangers.json").write_text(json.dumps(results))

for name in ("impostor", "silent"):
    handshake.PROOF_S = 0.5 if name == "silent" else 60
    stranger = started(impostor, name == "impostor")
    codes.append(os.waitpid(started(deceived, name), 0)[1])
    os.kill(stranger, 9)
    os.waitpid(stranger, 0)
sys.exit(any(codes))
"""

"""Errors that mean a lost worker."""

from pathlib import Path

import pytest
import ray.exceptions
import torch
from forkserver import Commands

from mlx_runtime.distributed.collectives import lost_peer

pytestmark = pytest.mark.pure


class TestLostPeer:
    """Lost workers are recognized by the type of an error, or by the location in gloo's source that it starts with."""

    GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:45699."

    @pytest.mark.parametrize(
        "error",
        [
            torch.distributed.DistNetworkError("connection refused"),
            torch.distributed.DistBackendError("NCCL error"),
            ray.exceptions.ActorDiedError(),
            RuntimeError(GLOO),  # raised again, or sent by another process
        ],
        ids=repr,
    )
    def test_types_that_mean_it(self, error: Exception) -> None:
        assert lost_peer(error)

    @pytest.mark.parametrize(
        "error",
        [
            RuntimeError("the database says: connection refused"),
            RuntimeError("Connection reset by peer"),
            RuntimeError("Connection closed by peer, see gloo/transport"),
            NotImplementedError(GLOO),
            ConnectionRefusedError(111, "Connection refused"),
            ConnectionResetError(104, "Connection reset by peer"),
        ],
        ids=repr,
    )
    def test_what_user_code_raises_is_its_own(self, error: Exception) -> None:
        with pytest.raises(type(error)) as caught:
            raise error
        assert not lost_peer(caught.value)

    @pytest.mark.process
    def test_collectives_and_backward_whose_peer_is_gone(self, commands: Commands, tmp_path: Path) -> None:
        done = commands.run(tmp_path, [str(tmp_path / "store")], commands.environment, 60, PEERS)
        assert done.stdout.split() == ["True"] * 3, done.stdout + done.stderr


PEERS = """
import os, sys, time
import torch
import torch.distributed as dist
from mlx_runtime.distributed.collectives import lost_peer

rank = 0 if os.fork() else 1
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
loss = model(torch.ones(1, 2)).sum()
dist.barrier()
if rank == 1:
    os._exit(1)
os.wait()

def asynchronous():
    dist.all_reduce(torch.ones(3), async_op=True).wait()

for use in (loss.backward, lambda: dist.all_reduce(torch.ones(3)), asynchronous):
    try:
        use()
    except Exception as error:
        print(lost_peer(error), flush=True)
        if not lost_peer(error):
            raise
os._exit(0)
"""

"""Workers that perform one action, selected by `cfg.act`, and write down its result."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import ray
import ray.train
import ray.train.collective
import ray.train.torch
import torch.distributed as dist

import mlx_runtime
from mlx_runtime import BaseModule
from mlx_runtime.distributed import handshake

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR")
TORCHRUN += ("OMP_NUM_THREADS",)


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "acts"
    act: str = field(default="nothing", metadata={"resumable": True})
    count: int = 0
    out: Path = Path("seen")


class Experiment(BaseModule):
    cfg: TrainConfig

    def worker_loop(self, dataset_shards):
        self.rank = ray.train.get_context().get_world_rank()
        getattr(self, self.cfg.act)()

    def note(self, **fields):
        self.cfg.out.mkdir(exist_ok=True)
        part = self.cfg.out / f"rank_{self.rank}.part"
        part.write_text(json.dumps(fields | {"pid": os.getpid()}))
        part.replace(part.with_suffix(".json"))

    def nothing(self):
        self.note()

    def look(self):
        """Note the environment of a worker."""
        context = ray.train.get_context()
        barrier = self.barrier()
        self.note(
            ranks=[context.get_world_rank(), context.get_local_rank(), context.get_node_rank()],
            sizes=[context.get_world_size(), context.get_local_world_size()],
            name=context.get_experiment_name(),
            device=str(ray.train.torch.get_device()),
            checkpoint=ray.train.get_checkpoint(),
            told=ray.train.collective.broadcast_from_rank_zero([f"by {self.rank}"]),
            barrier=barrier,
            environment={name: os.environ.get(name) for name in TORCHRUN},
            listening=[socket.socket(fileno=os.dup(item)).getsockname()[0] for item in handshake.listening_sockets()],
        )

    def barrier(self):
        """Return the times before and after a barrier that rank 1 reaches late."""
        if self.rank == 1:
            time.sleep(0.5)
        before = time.monotonic()
        ray.train.collective.barrier()
        return before, time.monotonic()

    def print_everything(self):
        """Print in every possible way, in the order of the lines below."""
        libc = ctypes.CDLL(None)
        print(f"rank {self.rank}: printed äöü :smile: [b]")
        os.write(1, f"rank {self.rank}: to descriptor 1\n".encode())
        libc.puts(f"rank {self.rank}: by libc".encode())
        libc.fflush(None)
        print(f"rank {self.rank}: printed to stderr", file=sys.stderr)
        os.write(2, f"rank {self.rank}: to descriptor 2\n".encode())
        subprocess.run(["echo", f"rank {self.rank}: by a child"], check=True)
        if dist.is_initialized():
            dist.destroy_process_group()  # as scripts for torchrun do at their end, which prints nothing

    def crash_in_mid_line(self):
        self.wait_for_all()
        if self.rank == 1:
            os.write(1, b"the last words")
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)

    def leave_a_child(self):
        """Start a process that holds the worker's pipes and prints forever."""
        child = subprocess.Popen(["yes"], start_new_session=True)
        self.note(child=child.pid)
        print("the child is on its own")

    def exit_silently(self):
        self.wait_for_all()
        if self.rank == 1:
            os._exit(0)
        time.sleep(60)

    def exit_politely(self):
        sys.exit(0)

    def wait_to_be_killed(self):
        """Wait, with a child that waits as well."""
        subprocess.Popen(["sleep", str(self.cfg.count)])
        self.note()
        self.wait_for_all()
        time.sleep(self.cfg.count)

    def report(self):
        ray.train.report({"loss": 0.5})

    def use_ray(self):
        """Note the error of each way to use Ray, and the processes that were started."""
        errors = []
        for use in (ray.init, lambda: ray.get(ray.ObjectRef(bytes(28))), ray.remote(int).remote):
            try:
                use()
            except mlx_runtime.MlxError as error:
                errors.append(str(error))
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        self.note(errors=errors, children=children)
        if self.rank == 0:
            ray.get(ray.ObjectRef(bytes(28)))

    def wait_for_all(self):
        """Wait until no process is still starting."""
        if dist.is_initialized():
            dist.barrier()

"""Workers that do one thing, which `cfg.act` names, and write down what came of it."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import ray
import ray.train
import ray.train.collective
import ray.train.torch
import torch
import torch.distributed as dist

import mlx_runtime
from mlx_runtime import BaseModule

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR")


@dataclass
class TrainConfig(mlx_runtime.TrainConfig):
    name: str = "acts"
    act: str = "nothing"
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
        self.note(start_method=os.environ.get("MLX_START_METHOD"))

    def look(self):
        """At everything that a worker has around it."""
        context = ray.train.get_context()
        ray.train.report({"loss": 0.5})
        waited = self.barrier()
        self.note(
            ranks=[context.get_world_rank(), context.get_local_rank(), context.get_node_rank()],
            sizes=[context.get_world_size(), context.get_local_world_size()],
            name=context.get_experiment_name(),
            device=str(ray.train.torch.get_device()),
            checkpoint=ray.train.get_checkpoint(),
            told=ray.train.collective.broadcast_from_rank_zero([f"by {self.rank}"]),
            waited=waited,
            environment={name: os.environ.get(name) for name in TORCHRUN},
            timeout_s=timeout_s(),
            threads=os.environ["OMP_NUM_THREADS"],
        )

    def barrier(self):
        """How long a barrier takes to which rank 1 comes late."""
        began = time.monotonic()
        if self.rank == 1:
            time.sleep(0.5)
        ray.train.collective.barrier()
        return time.monotonic() - began

    def print_everything(self):
        """By every way there is, each in the order of the next lines."""
        libc = ctypes.CDLL(None)
        print(f"rank {self.rank}: printed äöü")
        os.write(1, f"rank {self.rank}: to descriptor 1\n".encode())
        libc.puts(f"rank {self.rank}: by libc".encode())
        libc.fflush(None)
        print(f"rank {self.rank}: printed to stderr", file=sys.stderr)
        os.write(2, f"rank {self.rank}: to descriptor 2\n".encode())
        subprocess.run(["echo", f"rank {self.rank}: by a child"], check=True)

    def crash_in_mid_line(self):
        self.wait_for_all()
        if self.rank == 1:
            os.write(1, b"the last words")
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)

    def print_much(self):
        for number in range(self.cfg.count):
            print(f"{number:07} {'x' * 91}")

    def leave_a_child(self):
        """One that holds the worker's pipes."""
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
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
        self.note()
        self.wait_for_all()
        time.sleep(self.cfg.count)

    def report_a_checkpoint(self):
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory("."))

    def ray_get(self):
        ray.get(ray.ObjectRef(bytes(28)))

    def ray_init(self):
        ray.init()

    def ray_remote(self):
        ray.remote(int).remote()

    def wait_for_all(self):
        """So that none is still starting."""
        if dist.is_initialized():
            dist.barrier()


def timeout_s():
    """Of collectives."""
    group = dist.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

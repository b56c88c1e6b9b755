"""An engine of sweeps that trains one run after the other: `cfg.engine=more_mlx.trials.OneByOne`.

Each run is a Python process of its own, and its workers are those of `cfg.engine=local`.
"""

import contextlib
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from mlx_runtime.engines import PRUNE, STOP, Link, Local, record_end, run_trial
from mlx_runtime.errors import UsageError
from mlx_runtime.events import RunEnded


class InTurn:
    def __init__(self, cfg, *, parallel, gpus_per_trial):
        if parallel not in (None, 1) or gpus_per_trial:
            raise UsageError("more_mlx.trials.OneByOne trains one run at a time, on CPUs")
        self.process = None

    def run(self, sweep):
        while not sweep.killing and (job := sweep.next()) is not None:
            ended = self.train(job, sweep)
            if ended is not None:
                sweep.ended(job, ended.status, str(ended.error or ""))
                continue
            status, error = ("STOPPED", "") if sweep.killing else ("FAILED", "its process was lost")
            record_end(job, status, error)
            sweep.ended(job, status, error)

    def train(self, job, sweep):
        """Train a run, and return its end; None if its process has died."""
        here, there = Pipe()
        command = [sys.executable, "-m", "more_mlx.trials", str(there.fileno())]
        with here:
            with there:  # in a session of its own, the process gets no Ctrl-C
                self.process = subprocess.Popen(command, pass_fds=[there.fileno()], start_new_session=True)
            here.send(job)
            ended = self.follow(job, sweep, here)
        self.close()
        return ended

    def follow(self, job, sweep, connection):
        asked = False
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                reason = STOP if sweep.stopping else None
                if connection.poll(0.2):
                    event = connection.recv()
                    if isinstance(event, RunEnded):
                        return event
                    reason = PRUNE if sweep.handle(job, event) else reason
                if reason and not asked:
                    connection.send(reason)
                    asked = True
                if sweep.killing:
                    self.process.kill()
        return None

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class OneByOne(Local):
    sweep_engine = InTurn


if __name__ == "__main__":
    connection = Connection(int(sys.argv[1]))
    job = connection.recv()
    link = Link(connection)
    link.finish(run_trial(job, link.emit, link.control))

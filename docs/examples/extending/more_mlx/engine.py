"""An engine that starts each worker as a separate Python process: `cfg.engine=more_mlx.engine.Subprocesses`."""

import contextlib
import dataclasses
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

from mlx_runtime.engines import WorkerJob, load_results, lost, run_worker, this_machine


class Subprocesses:
    @staticmethod
    def refusal(cfg, *, in_job):
        if in_job:
            return "its workers are processes of one machine, not of a cluster"
        return "the number of its workers is fixed" if cfg.elastic.min_workers or cfg.elastic.max_workers else None

    @staticmethod
    @contextlib.contextmanager
    def connect(cfg, why):
        here = this_machine(cfg, why)
        yield dataclasses.replace(here, use_gpu=False, captures_output=False)

    def __init__(self, cfg, cluster, *, timeout_s):
        self.size, self.timeout_s = cfg.start_workers, timeout_s

    def start(self, job, handle, stop_asked):
        return Processes(job, self.size, self.timeout_s)

    def close(self):
        pass


class Processes:
    """The workers of one run. Lost workers are not replaced, so the run fails."""

    def __init__(self, job, size, timeout_s):
        self.scratch = tempfile.TemporaryDirectory()  # only this user can open it
        folder = Path(self.scratch.name)
        shared = WorkerJob(job, size, "gloo", timeout_s, results=folder, store=folder / "store")
        (folder / "job").write_bytes(pickle.dumps(shared))
        command = [sys.executable, "-m", "more_mlx.engine", str(folder / "job")]
        self.workers = [subprocess.Popen([*command, str(rank)]) for rank in range(size)]

    def poll(self):
        codes = [worker.poll() for worker in self.workers]
        results = load_results(Path(self.scratch.name))
        for error in results.values():
            if error is not None:
                raise error
        for rank, code in enumerate(codes):
            if code and rank not in results:
                raise lost(f"rank {rank} exited with code {code}", max_failures=0)
        return None in codes

    def waits_for(self):
        return None  # they start at once

    def close(self):
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.scratch.cleanup()


if __name__ == "__main__":
    code = run_worker(pickle.loads(Path(sys.argv[1]).read_bytes()), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads can abort an interpreter that is finalizing

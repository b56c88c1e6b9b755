"""Commands without the seven seconds of a core that importing their libraries takes.

A server imports torch, TorchMetrics, Ray and what they bring once, and forks itself for each command. The fork has the
arguments, folder, environment and streams of the command, imports mlx_runtime and the experiment itself, and ends as
any interpreter does. What libraries read from the environment while they are imported is that of the server.
"""

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

STREAMS = ("stdout", "stderr")

LIBRARIES = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torchmetrics", "torch.utils.tensorboard"),
    *("ray", "ray.data", "ray.train.torch", "ray.train.v2._internal.execution.context", "ray.job_submission"),
    *("hydra", "hydra_zen", "ruamel.yaml", "rich.progress", "click", "pyarrow.dataset", "pyarrow.fs", "pandas"),
    *("cookiecutter.main", "sklearn.datasets", "matplotlib.figure"),
)


ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""With these, libraries make no pools of threads when they are imported: a process with threads cannot fork safely."""

LOOK_S = 0.01
"""How often the server looks whether a command has ended."""


class Command:
    """A command that was started, with what tests need of `subprocess.Popen`.

    Attributes:
        pid: of its process.
        returncode: None until it is known to have ended.
    """

    def __init__(self, commands: "Commands", arguments: list[str], pid: int, place: str) -> None:
        self._commands, self._arguments, self.pid = commands, arguments, pid
        self._streams = [Path(place, name) for name in STREAMS]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """How it ended.

        Raises:
            subprocess.TimeoutExpired: it did not end in time.
        """
        if self.returncode is None:
            self.returncode = self._commands.end_of(self.pid, timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._arguments, timeout, *(path.read_bytes() for path in self._streams))
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it printed until its end, to stdout and to stderr."""
        self.wait(timeout)
        out, err = (path.read_text() for path in self._streams)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Commands:
    """The server, for the time of a `with` block.

    Args:
        environment: of the server, so that libraries read it as those of a command would.

    Attributes:
        threads: names of those that the server has beside its main one; None before the first command.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.threads: list[str] | None = None

    def __enter__(self) -> "Commands":
        self._places = tempfile.TemporaryDirectory()
        self._ends: dict[int, int] = {}
        command, streams = [sys.executable, __file__], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen(command, env=dict(self.environment) | ONE_THREAD, bufsize=0, **streams)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        self._places.cleanup()

    def start(self, folder: Path, arguments: list[str], environment: Mapping[str, str]) -> Command:
        """`python -m mlx_runtime` with arguments, in the background."""
        place = tempfile.mkdtemp(dir=self._places.name)
        streams = [Path(place, name) for name in STREAMS]
        for stream in streams:
            stream.touch()  # so that they can be read before the command has begun
        order = [str(folder), arguments, dict(environment), [str(stream) for stream in streams]]
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        if self.threads is None:
            self.threads = json.loads(self._server.stdout.readline())
        self._server.stdin.write(json.dumps(order).encode() + b"\n")
        while (pid := self._hear()) is None:
            pass
        return Command(self, arguments, pid, place)

    def run(
        self, folder: Path, arguments: list[str], environment: Mapping[str, str], timeout_s: float
    ) -> "subprocess.CompletedProcess[str]":
        """The same to its end.

        Raises:
            subprocess.TimeoutExpired: it did not end in time, and was killed.
        """
        command = self.start(folder, arguments, environment)
        try:
            code = command.wait(timeout_s)
        except subprocess.TimeoutExpired:
            command.kill()
            command.wait()
            raise
        return subprocess.CompletedProcess(arguments, code, *command.communicate())

    def end_of(self, pid: int, timeout_s: float | None) -> int | None:
        """How a command ended, or None if it has not in that time."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while pid not in self._ends:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._server.stdout], [], [], left)[0]:
                return None
            self._hear()
        return self._ends[pid]

    def _hear(self) -> int | None:
        """Wait for what the server says next: the number of a command that has begun, or how one has ended."""
        assert self._server.stdout is not None
        pid, *code = map(int, self._server.stdout.readline().split())
        if not code:
            return pid
        self._ends[pid] = code[0]
        return None


def serve() -> None:
    """Name the threads of this process, answer each order by the number of a child, and say how each has ended.

    Returns in the children alone.
    """
    for name in LIBRARIES:
        importlib.import_module(name)
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    print(json.dumps([(task / "comm").read_text().strip() for task in tasks]), flush=True)
    orders = sys.stdin.buffer.raw  # not of its buffer, which would keep orders from `select`
    running: set[int] = set()
    while True:
        if select.select([orders], [], [], LOOK_S if running else None)[0]:
            order = orders.readline()
            if not order:
                sys.exit()
            pid = os.fork()
            if pid == 0:
                become(*json.loads(order))
                return
            running.add(pid)
            print(pid, flush=True)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                print(pid, os.waitstatus_to_exitcode(status), flush=True)


def become(folder: str, arguments: list[str], environment: dict[str, str], streams: list[str]) -> None:
    """Make this process what `python -m mlx_runtime` starts as."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate([os.devnull, *streams]):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    sys.path[0] = folder
    sys.argv[1:] = arguments
    sys.orig_argv = [sys.executable, "-m", "mlx_runtime", *arguments]


if __name__ == "__main__":
    from mlx_runtime.settings import prepare_ray

    prepare_ray()
    serve()
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_runtime"]:
        del sys.modules[name]
    runpy.run_module("mlx_runtime", run_name="__main__", alter_sys=True)

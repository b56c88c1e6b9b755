"""Run commands without the seven CPU seconds of importing their libraries.

A server imports torch, TorchMetrics, Ray and their dependencies once, and forks itself for each command. The fork
receives the arguments, working directory, environment and streams of the command, and imports mlx_runtime and the
experiment. Libraries that read the environment on import see that of the server.
"""

import atexit
import contextlib
import gc
import importlib
import itertools
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

STREAMS = ("stdout", "stderr")

LIBRARIES = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torchmetrics", "torch.utils.tensorboard"),
    *("ray", "ray.data", "ray.train.torch", "ray.train.v2._internal.execution.context", "ray.job_submission"),
    *("hydra", "hydra_zen", "ruamel.yaml", "rich.progress", "click", "pyarrow.dataset", "pyarrow.fs", "pandas"),
    *("cookiecutter.main", "sklearn.datasets", "ray.tune", "tensorboard.plugins.hparams.metadata"),
    *("detect_secrets.core.scan", "detect_secrets.plugins.high_entropy_strings", "detect_secrets.plugins.keyword"),
    "pathspec",
)


ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Keep libraries from starting thread pools on import, because a process with threads cannot fork safely."""

LOOK_S = 0.01
"""Interval at which the server checks whether commands have ended."""


class Command:
    """A command that was started, with the part of the interface of `subprocess.Popen` that tests use.

    Attributes:
        pid: process id.
        returncode: exit code, or None until the command is known to have ended.
    """

    def __init__(self, commands: "Commands", arguments: list[str], number: int, pid: int, place: str) -> None:
        self._commands, self._arguments, self._number, self.pid = commands, arguments, number, pid
        self._streams = [Path(place, name) for name in STREAMS]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it did not end in time.
        """
        if self.returncode is None:
            self.returncode = self._commands.end_of(self._number, timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._arguments, timeout, *(path.read_bytes() for path in self._streams))
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end and return the output to stdout and to stderr."""
        self.wait(timeout)
        out, err = (path.read_text() for path in self._streams)
        return out, err

    def output(self) -> str:
        """Return what the command has printed so far."""
        return self._streams[0].read_text()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Commands:
    """The server, for the duration of a `with` block.

    Args:
        environment: environment of the server, which libraries read on import.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment

    def __enter__(self) -> "Commands":
        self._places = tempfile.TemporaryDirectory()
        self._numbers = itertools.count()  # of commands, because the system uses process ids again
        self._pids: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        command, streams = [sys.executable, __file__], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen(command, env=dict(self.environment) | ONE_THREAD, bufsize=0, **streams)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._server.stdin.write(b"\n")  # what this process has forked may hold the pipe open
        self._server.stdin.close()
        self._server.wait()
        self._places.cleanup()

    def start(
        self, folder: Path, arguments: list[str], environment: Mapping[str, str], code: str | None = None
    ) -> Command:
        """Start `python -m mlx_runtime`, or `python -c` with that code, with arguments, in the background."""
        place = tempfile.mkdtemp(dir=self._places.name)
        streams = [Path(place, name) for name in STREAMS]
        for stream in streams:
            stream.touch()  # so that they can be read before the command starts
        number = next(self._numbers)
        order = [number, str(folder), arguments, dict(environment), [str(stream) for stream in streams], code]
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order).encode() + b"\n")
        while number not in self._pids:
            self._hear()
        return Command(self, arguments, number, self._pids[number], place)

    def run(
        self,
        folder: Path,
        arguments: list[str],
        environment: Mapping[str, str],
        timeout_s: float,
        code: str | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run what `start` starts to its end.

        Raises:
            subprocess.TimeoutExpired: it did not end in time, and was killed.
        """
        command = self.start(folder, arguments, environment, code)
        try:
            code = command.wait(timeout_s)
        except BaseException:  # also Ctrl-C, which does not reach its session
            command.kill()
            command.wait()
            raise
        return subprocess.CompletedProcess(arguments, code, *command.communicate())

    def end_of(self, number: int, timeout_s: float | None) -> int | None:
        """Return the exit code of a command, or None if it has not ended in that time."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while number not in self._ends:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._server.stdout], [], [], left)[0]:
                return None
            self._hear()
        return self._ends[number]

    def _hear(self) -> None:
        """Wait for the next message of the server: that a command has started, or has ended."""
        assert self._server.stdout is not None
        kind, number, fact = self._server.stdout.readline().split()
        (self._pids if kind == b"pid" else self._ends)[int(number)] = int(fact)


def as_script(folder: str, command: list[str]) -> str:
    """Return code that does what `python script.py ...` does in a folder."""
    path = Path(folder, command[0])
    return (
        f"import sys; __file__, sys.argv = {str(path)!r}, {command!r}; sys.orig_argv[1:] = sys.argv\n"
        f"sys.path[0] = {str(path.parent)!r}\n"
        f"exec(compile(open(__file__).read(), __file__, 'exec'))"
    )


def serve() -> str | None:
    """Send the process id of each command, and its exit code.

    Returns only in the children: the code to run, or None for `mlx`.
    """
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each child traverses all of them as it exits, which takes two CPU seconds
    orders = sys.stdin.buffer.raw  # unbuffered: a buffer would hide commands from `select`
    running: dict[int, int] = {}  # numbers by process id
    while True:
        if select.select([orders], [], [], LOOK_S if running else None)[0]:
            order = orders.readline()
            if not order.strip():
                sys.exit()
            number, *place, code = json.loads(order)
            pid = os.fork()
            if pid == 0:
                become(*place)
                return code
            running[pid] = number
            print("pid", number, pid, flush=True)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                print("end", running.pop(pid), os.waitstatus_to_exitcode(status), flush=True)


def become(folder: str, arguments: list[str], environment: dict[str, str], streams: list[str]) -> None:
    """Turn this process into one started by `python -m mlx_runtime`."""
    os.setsid()  # so that a signal to its group does not reach the server, as from a terminal of its own
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate([os.devnull, *streams]):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    tempfile.tempdir = None  # that of this TMPDIR
    if "HF_HOME" in environment:  # they have read it during their import
        for name in [name for name in sys.modules if name.partition(".")[0] in ("huggingface_hub", "transformers")]:
            del sys.modules[name]
    added = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [folder, *(path for path in added if path not in sys.path)]
    sys.argv[1:] = arguments
    sys.orig_argv = [sys.executable, "-m", "mlx_runtime", *arguments]


def leave(status: int) -> None:
    """Exit like any interpreter, without clearing its modules: that copies all memory shared with the server.

    It would take 0.4 CPU seconds, more than most commands.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    from mlx_runtime.settings import prepare_ray

    prepare_ray()
    code = serve()
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_runtime"]:
        del sys.modules[name]
    status: object = None
    try:
        if code is None:
            runpy.run_module("mlx_runtime", run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(code, vars(main))
    except SystemExit as end:
        status = end.code
        if not isinstance(status, int | None):
            raise
    leave(status or 0)

"""Commands without the seven seconds of a core that importing their libraries takes.

A server imports torch, TorchMetrics, Ray and what they bring once, and forks itself for each command. The fork has the
arguments, folder, environment and streams of the command, imports mlx_runtime and the experiment itself, and ends as
any interpreter does. What libraries read from the environment while they are imported is that of the server.
"""

import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIBRARIES = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torchmetrics", "torch.utils.tensorboard"),
    *("ray", "ray.data", "ray.train.torch", "ray.train.v2._internal.execution.context", "ray.job_submission"),
    *("hydra", "hydra_zen", "ruamel.yaml", "rich.progress", "click", "pyarrow.dataset", "pyarrow.fs", "pandas"),
    *("cookiecutter.main", "sklearn.datasets", "matplotlib.figure"),
)


class Commands:
    """The server, for the time of a `with` block.

    Args:
        environment: of the server, so that libraries read it as those of a command would.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment

    def __enter__(self) -> "Commands":
        self._server = subprocess.Popen(
            [sys.executable, __file__], env=dict(self.environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def run(
        self, folder: Path, arguments: list[str], environment: Mapping[str, str], timeout_s: float
    ) -> "subprocess.CompletedProcess[str]":
        """`python -m mlx_runtime` with arguments, and how it ended.

        Raises:
            subprocess.TimeoutExpired: it did not end in time, and was killed.
        """
        with tempfile.TemporaryDirectory() as place:
            streams = [Path(place, name) for name in ("stdout", "stderr")]
            order = [str(folder), arguments, dict(environment), [str(path) for path in streams]]
            pid = self._answer(order)
            if not select.select([self._server.stdout], [], [], timeout_s)[0]:
                os.kill(pid, signal.SIGKILL)
                self._answer()
                raise subprocess.TimeoutExpired(arguments, timeout_s, *(path.read_bytes() for path in streams))
            code = self._answer()
            return subprocess.CompletedProcess(arguments, code, *(path.read_text() for path in streams))

    def _answer(self, order: Any = None) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        if order is not None:
            self._server.stdin.write(json.dumps(order).encode() + b"\n")
            self._server.stdin.flush()
        return int(self._server.stdout.readline())


def serve() -> None:
    """Answer each order by the number of a child, and of how it ended. Returns in the children alone."""
    for name in LIBRARIES:
        importlib.import_module(name)
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            become(*json.loads(line))
            return
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()


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

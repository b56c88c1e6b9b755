"""The command by which a machine takes part in a run."""

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from mlx_runtime.cli import commands, options
from mlx_runtime.companions.torchrun import roster
from mlx_runtime.config.projects import AN_EXPERIMENT
from mlx_runtime.driver.arguments import OPTIONS, Request, refuse_options
from mlx_runtime.errors import UsageError, short_message, suggest
from mlx_runtime.workers.local import NODE_NAME
from mlx_runtime.workers.stop_requests import hangup_ignored

TORCHRUN = f"from {__name__} import torchrun; torchrun()"

AGAIN_S = 3.0
"""Pause before the next attempt, in which the processes of the last one end."""


@click.command("join", context_settings=commands.OVERRIDES, params=[*OPTIONS[:-1]])
@options.debug
@click.option("--name", metavar="NODE", required=True, type=options.word, help="This machine in FILE, like node_1.")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
def train_join(file: Path, name: str, **typed: Any) -> None:
    """Train on this machine as one of those in FILE, a nodes.json; the first one drives the run.

    Runs torchrun repeatedly until the run has ended. Options and OVERRIDES are those of mlx train run; they take
    effect on the first machine only.
    """
    nodes = roster.read(file)
    names = [node.name for node in nodes]
    if name not in names:
        raise UsageError(f"{file} has no machine {name!r:.60}.{suggest(name, names)}")
    first, number = nodes[0], names.index(name)
    if not first.port:
        raise UsageError(f"{file}: {first.name}, the first machine, needs a port; write its IP as HOST:PORT")
    refuse_options(typed["overrides"], "mlx train join")
    request = Request.of(**typed)
    AN_EXPERIMENT.folder()
    if number == 0:
        roster.check_port(
            first.port, f"end the process that uses it, or write another port into {file}, on all machines"
        )
    command = [sys.executable, "-c", TORCHRUN, "--rdzv-backend=static", "--max-restarts=0"]
    command += [f"--nnodes={len(nodes)}", f"--node-rank={number}", f"--nproc-per-node={nodes[number].slots}"]
    command += [f"--master-addr={first.host}", f"--master-port={first.port}", "-m", __package__ + ".attempt"]
    sys.exit(_train(command, name, request))


def _train(command: list[str], name: str, request: Request) -> int:
    """Execute torchrun until the run has ended, and return its exit code."""
    attempt, failures, process, signals = 0, 0, None, list[int]()

    def forward(number: int, _: Any) -> None:
        signals.append(number)
        if process is not None:
            process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or not hangup_ignored():
            signal.signal(number, forward)
    while not signals:
        attempt += 1
        with tempfile.TemporaryDirectory(prefix="mlx-join-") as folder:
            run = Path(folder, "run")
            quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # torchrun and c10d warn otherwise
            variables = quiet | os.environ | {NODE_NAME: name, "MLX_ATTEMPT": f"{failures}:{run}"}
            print(f"attempt   {attempt}: waiting for all machines", flush=True)
            # In a session of its own, torchrun gets no signals from the terminal, but each of them once, from here.
            process = subprocess.Popen([*command, folder, *request.words], env=variables, start_new_session=True)
            process.wait()
            codes = [int(file.read_text()) for file in Path(folder).iterdir() if file.name.isdecimal()]
            if codes:
                return codes[0]
            failures += run.is_file()  # others have not begun
            if run.is_file() and not request.fast:
                request = dataclasses.replace(request, resume=run.read_text(), origin=None)
        if not signals:
            print("lost      a process of the run; starting the next attempt", flush=True)
            time.sleep(AGAIN_S)
    return 128 + signals[0]


def torchrun() -> None:
    """Execute torchrun without its reports: a failed process has printed its own error."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)
    try:
        run.main()
    except (ChildFailedError, SignalException):
        sys.exit(1)
    except Exception as error:  # whatever it is, `join` tries again
        sys.exit(f"error: torchrun: {short_message(error)}")

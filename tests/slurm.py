"""A real Slurm on loopback: a controller and nodes, as processes of this machine that nobody else uses."""

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from clusters import free_ports
from packages import install, program

PACKAGES, PROGRAMS = ("slurm-wlm", "munge"), ("munged", "slurmctld", "slurmd", "sbatch")
"""Of Debian and Ubuntu."""

START_S = 60

CONF = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=5
MinJobAge=300
MpiDefault=none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
"""


@contextlib.contextmanager
def slurm(nodes: int = 2, cpus: int = 2) -> Iterator[Mapping[str, str]]:
    """Start a cluster with nodes `n1`, `n2`, ... in the partition `debug`. Yield the variables of its commands."""
    install(PACKAGES, PROGRAMS)
    folder = Path(tempfile.mkdtemp(prefix="mlxs-", dir="/tmp"))  # short, because socket paths are limited
    host = socket.gethostname().partition(".")[0]
    controller, *ports = free_ports(nodes + 1)
    names = [f"n{number}" for number in range(1, nodes + 1)]
    conf = CONF.format(host=host, user=getpass.getuser(), controller=controller, folder=folder)
    for name, port in zip(names, ports, strict=True):
        conf += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}\n"
    conf += f"PartitionName=debug Nodes={','.join(names)} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO\n"
    file = folder / "slurm.conf"
    file.write_text(conf)
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    variables = {"SLURM_CONF": str(file)}
    environment = os.environ | variables
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *options: str) -> None:
        command = [str(program(name)), *options]
        with (folder / f"{name}.out").open("ab") as log:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))

    def ask(*command: str) -> list[str]:
        return subprocess.run(command, env=environment, capture_output=True, text=True).stdout.split()

    def wait(done: Callable[[], bool], seconds: float = START_S) -> None:
        until = time.monotonic() + seconds
        while not done():
            if time.monotonic() > until or any(process.poll() is not None for process in started):
                logs = [file for kind in ("out", "log") for file in folder.glob(f"*.{kind}")]
                raise TimeoutError("\n".join(f"{file.name}: {file.read_text()[-500:]}" for file in logs))
            time.sleep(0.05)

    try:
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
        start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        wait((folder / "munge.socket").exists)
        start("slurmctld", "-D", "-f", str(file))
        for name in names:
            (folder / name).mkdir()
            start("slurmd", "-D", "-f", str(file), "-N", name)
        wait(lambda: ask("sinfo", "-h", "-o", "%T %D") == ["idle", str(nodes)])
        yield variables
    finally:
        ask("scancel", "--user", getpass.getuser())
        with contextlib.suppress(TimeoutError):
            wait(lambda: not ask("squeue", "-h"), 15)
        for process in reversed(started):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)

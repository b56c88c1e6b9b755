"""The end of a command: one line, the right exit code, and no side effects if the process continues."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Start
from faults import wait_for

from mlx_runtime.cli.verbs import xp
from mlx_runtime.errors import RunStopped, UsageError
from mlx_runtime.exits import clean_exit

pytestmark = pytest.mark.pure


@pytest.mark.process
@pytest.mark.parametrize(("address", "asked"), [("kube://team/a-1", ["a-1"]), ("slurm://x", [])])
def test_jobs_of_ray_end_as_stopped(address: str, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, Ray calls them failed, and KubeRay starts them again."""
    import ray.job_submission

    class Client:
        def stop_job(self, job: str) -> None:
            stopped.append(job)
            os.kill(os.getpid(), signal.SIGTERM)  # as Ray does

    stopped: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray.job_submission, "JobSubmissionClient", Client)
    monkeypatch.setenv("MLX_JOB", "a-1")
    monkeypatch.setenv("MLX_JOB_ADDRESS", address)
    try:
        with pytest.raises(SystemExit) as exits, clean_exit():
            raise RunStopped("stopped", 143)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (exits.value.code, stopped) == (143, asked)


@pytest.mark.process
@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("mlx xp ls >&-", 1, "standard output or standard error is closed; redirect it to /dev/null instead"),
        ("mlx xp ls >/dev/full", 1, "cannot write the output: No space left on device"),
        ("mlx xp ls --json | true; exit ${PIPESTATUS[0]}", 1, None),  # a reader that closes its pipe has what it wanted
        ("mkdir gone && cd gone && rmdir ../gone && mlx xp ls", 2, "the working directory no longer exists"),
        ("HOME=/proc/none mlx xp ls", 0, None),
        ("mlx xp report digits -o /proc/page.html", 2, "cannot write /proc/page.html: No such file or directory"),
    ],
)
def test_what_the_system_refuses_is_one_line(command: str, code: int, told: str | None, tmp_path: Path) -> None:
    for number in range(1, 2_000 if "--json" in command else 2):  # more than fits in a pipe
        folder = tmp_path / f"runs/digits/run_{number:03d}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text('{"status": "FAILED"}')
    place = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": place, "MLX_STORAGE": str(tmp_path / "runs")}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    assert (len(lines) == 1 and lines[0].startswith(f"error: {told}")) if told else not lines, done.stderr


@pytest.mark.process
def test_a_second_interrupt_disturbs_nothing_that_others_do_at_the_end() -> None:
    script = (
        "import atexit, os, signal, time; from mlx_runtime.exits import clean_exit\n"
        "def shut_down():\n"
        "    os.kill(os.getpid(), signal.SIGINT); time.sleep(0.1); print('shut down')\n"
        "atexit.register(shut_down)\n"
        "with clean_exit(): raise KeyboardInterrupt"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (RunStopped.exit_code, "shut down\n")
    assert done.stderr == "error: interrupted\n"


@pytest.mark.process
def test_a_board_that_is_terminated_leaves_nothing(tmp_path: Path) -> None:
    """Neither TensorBoard, which `sleep` stands for, nor its copies of what an object store has."""
    copies = tmp_path / "copies"
    copies.mkdir()
    (tmp_path / "runs").mkdir()
    points = tmp_path / "runs/events.out.tfevents.1"
    points.write_bytes(b"one")
    script = (
        "from mlx_runtime.cli.verbs import xp\n"
        "from mlx_runtime.companions.stores import board\n"
        "board.MIRROR_S, xp._command = 0.1, lambda *_: ['sleep', '600']\n"
        f"xp.board('file://{tmp_path}/runs', None, 0)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"TMPDIR": str(copies)})
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    servers: list[int] = []
    try:
        wait_for(lambda: children.read_text(), 60)
        servers = [int(child) for child in children.read_text().split()]
        points.write_bytes(b"one, two")
        (copy,) = copies.rglob(points.name)
        wait_for(lambda: copy.read_bytes() == b"one, two", 60)
        process.terminate()
        assert process.wait(60) == 143
        assert list(copies.iterdir()) == []
        assert [server for server in servers if Path(f"/proc/{server}").exists()] == []
    finally:
        process.kill()
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)


@pytest.mark.process
def test_a_killed_bind_leaves_nothing(start: Start, tmp_path: Path) -> None:
    """It binds in a fork, which nobody else would end."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "experiment.py").write_text("import time\n\ntime.sleep(120)\n")
    process = start(tmp_path, "train", "bind")
    (fork,) = wait_for(lambda: Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split(), 60)
    process.kill()
    wait_for(lambda: not Path(f"/proc/{fork}").exists(), 60)


def test_a_board_of_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    for path in (f"file://{tmp_path}/run_002", str(tmp_path / "run_002")):
        with pytest.raises(UsageError, match="there are no runs in"):
            xp.board(path, None, 0)


@pytest.mark.process
def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = board(tmp_path, port)
    assert done.returncode == 2
    cure = "choose another with --port, or any with --port 0"
    assert done.stderr == f"error: cannot serve on port {port}: Address already in use; {cure}\n"


def board(folder: Path, port: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mlx_runtime", "xp", "board", "--port", port]
    environment = os.environ | {"MLX_STORAGE": str(folder)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

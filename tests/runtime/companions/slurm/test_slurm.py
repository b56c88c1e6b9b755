"""`mlx train launch --slurm` on a real slurmctld with two slurmd: jobs, the time limit, two nodes, errors."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import Mlx
from faults import differences, final_state, reports, wait_for
from slurm import slurm
from transcripts import check_transcript

from mlx_runtime.companions.slurm.queue import state_of_job
from mlx_runtime.companions.slurm.requeue import requeue
from mlx_runtime.errors import ClusterError
from mlx_runtime.runs import records
from mlx_runtime.runs.folder import claim_run
from mlx_runtime.storage import leases

pytestmark = pytest.mark.cluster

ONE = ("cfg.start_workers=0", "cfg.trackers={}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Mapping[str, str]]:
    with slurm() as variables:
        yield variables


@pytest.fixture
def ask(cluster: Mapping[str, str]) -> Callable[..., str]:
    """`ask("squeue", ...)` returns the output of a command of Slurm."""

    def run(*command: str) -> str:
        return subprocess.run(command, env=os.environ | cluster, capture_output=True, text=True, check=True).stdout

    return run


def record_of(folder: Path, run: str = "run_001") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "runs/digits" / run / "run.json").read_text())
    return content


def test_a_run_continues_exactly_after_the_time_limit(
    mlx: Mlx, digits: Path, cluster: Mapping[str, str], ask: Callable[..., str]
) -> None:
    """slurmctld sends the same signal before the time limit as `scancel --batch` here."""
    words = (*ONE, "cfg.num_epochs=8", "datasets.train.batch_size=4")
    plain = digits.parent / "plain"
    assert mlx(digits, "train", "run", *words, f"cfg.storage_path={plain}").returncode == 0
    launch = ("train", "launch", "--slurm", "--time=10", *words)
    done = mlx(digits, *launch, **cluster)
    assert done.returncode == 0, done.stderr
    shown = [f"$ mlx {' '.join(launch)}", *done.stdout.splitlines()]
    (digits / "src/experiment.py").write_text("raise SystemExit('edited while the job waits')")
    run = digits / "runs/digits/run_001"
    job = record_of(digits)["job"]
    assert job["address"] == "slurm://loopback"
    assert f"job       {job['id']} on slurm://loopback" in done.stdout
    wait_for(lambda: record_of(digits).get("best"))
    ask("scancel", "--batch", "--signal=USR1", job["id"])
    wait_for(lambda: record_of(digits)["status"] == "PENDING")
    wait_for(lambda: "BeginTime" in ask("squeue", "--noheader", "--format=%r"))
    listed = mlx(digits, "xp", "ls", **cluster).stdout
    assert "PENDING (BeginTime)" in listed
    shown += ["$ mlx xp ls", *listed.splitlines()]
    wait_for(lambda: record_of(digits)["status"] not in records.LIVING)
    found = record_of(digits)
    assert (found["status"], found["job"]) == ("SUCCEEDED", job)
    assert [item["status"] for item in found["attempts"]] == ["STOPPED"]
    assert differences(final_state(run), final_state(plain / "digits/run_001")) == []
    assert reports(run) == reports(plain / "digits/run_001")
    shown += ["$ mlx xp ls      # later", *mlx(digits, "xp", "ls", **cluster).stdout.splitlines()]
    check_transcript("slurm.md", "requeued", shown, {str(digits): "/shared/digits"})
    done = mlx(digits, "xp", "logs", "digits", "1", "--no-follow", **cluster)
    assert "requeued  digits/run_001 resumes" in done.stdout, done.stderr


def test_two_nodes_train_as_tasks_and_continue_after_the_time_limit(
    mlx: Mlx, digits: Path, cluster: Mapping[str, str], ask: Callable[..., str]
) -> None:
    words = ("cfg.num_epochs=6", "datasets.train.batch_size=4", "cfg.trackers={}")
    done = mlx(digits, "train", "launch", "--slurm", "--nodes=2", *words, **cluster)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for(lambda: record_of(digits).get("best"))
    ask("scancel", "--batch", "--signal=USR1", record_of(digits)["job"]["id"])
    wait_for(lambda: record_of(digits)["status"] == "PENDING")
    wait_for(lambda: record_of(digits)["status"] not in records.LIVING)
    found, run = record_of(digits), digits / "runs/digits/run_001"
    output = "".join(file.read_text() for file in run.glob("slurm/1/*.out"))
    assert (found["status"], found["engine"]["used"], found["workers"]) == ("SUCCEEDED", "torchrun", 2), output
    assert [item["status"] for item in found["attempts"]] == ["STOPPED"]
    assert "2 DDP workers started by torchrun, 1 of them on this machine" in output


def test_a_sweep_is_one_job(mlx: Mlx, digits: Path, cluster: Mapping[str, str]) -> None:
    words = ("--sweep", "optimizers.adam.lr=1e-2,1e-3", *ONE, "cfg.num_epochs=1", "cfg.debug.limit_batches=2", "-f")
    done = mlx(digits, "train", "launch", "--slurm", *words, **cluster)
    assert done.returncode == 0, done.stdout + done.stderr
    sweep = record_of(digits, "sweep_001")
    assert (sweep["status"], sweep["job"]["address"]) == ("SUCCEEDED", "slurm://loopback")
    assert [record_of(digits, run)["sweep"]["trial"] for run in ("run_001", "run_002")] == [1, 2]


def test_jobs_that_are_refused_wait_or_are_cancelled(
    mlx: Mlx, digits: Path, cluster: Mapping[str, str], ask: Callable[..., str]
) -> None:
    def launch(*words: str) -> "subprocess.CompletedProcess[str]":
        return mlx(digits, "train", "launch", "--slurm", *ONE, *words, **cluster)

    def statuses() -> dict[str, str]:
        rows = json.loads(mlx(digits, "xp", "ls", "--json", **cluster).stdout)
        return {row["run"]: f"{row['status']} {row['reason'] or ''}".strip() for row in rows}

    done = launch("--partition=nope")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 2), done.stderr
    assert done.stderr.startswith("FAIL  job        sbatch failed: invalid partition specified: nope")
    assert "sinfo" in done.stderr
    assert not (digits / "runs/digits").exists(), "no run was claimed"

    done = launch("--sbatch=--begin=now+1hour --comment=later")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: ask("squeue", "--noheader", "--format=%r") == "BeginTime\n")  # once Slurm has looked at the job
    assert statuses() == {"run_001": "PENDING BeginTime"}
    done = mlx(digits, "xp", "stop", "digits", "1", **cluster)
    assert done.stdout == "digits run_001 was STOPPED before it began\n", done.stderr
    assert ask("squeue", "--noheader") == ""

    assert launch("--sbatch=--begin=now+1hour").returncode == 0
    ask("scancel", record_of(digits, "run_002")["job"]["id"])
    assert statuses() == {"run_001": "STOPPED", "run_002": "STOPPED"}


def test_without_slurm_the_cure_is_named(mlx: Mlx, digits: Path, tmp_path: Path) -> None:
    done = mlx(digits, "train", "launch", "--slurm", *ONE, PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "error: scontrol is not on the PATH\nRun this on a login node of a Slurm cluster\n"
    done = mlx(digits, "train", "launch", "--slurm", "--dry-run", *ONE, PATH=str(tmp_path))
    assert (done.returncode, "#SBATCH --cpus-per-task=1\n" in done.stdout) == (0, True), done.stderr


def test_each_node_has_the_cpus_of_one_run_or_of_its_part(mlx: Mlx, digits: Path, tmp_path: Path) -> None:
    launch = ("train", "launch", "--slurm", "--dry-run", "--nodes=2", "cfg.start_workers=4")
    for words, tasks, cpus in ((), 2, 1), (("--sweep", "optimizers.adam.lr=1e-2,1e-3"), 1, 4):
        done = mlx(digits, *launch, *words, PATH=str(tmp_path))
        assert f"#SBATCH --ntasks-per-node={tasks}\n#SBATCH --cpus-per-task={cpus}\n" in done.stdout, done.stderr
    done = mlx(digits, *launch, "cfg.start_workers=3", PATH=str(tmp_path))
    assert "error: cfg.start_workers=3 must be a multiple of --nodes=2" in done.stderr


@pytest.mark.process
def test_a_printed_script_creates_nothing(mlx: Mlx, digits: Path, tmp_path: Path) -> None:
    """A line break in a directive would begin a command of the script, and Slurm replaces `%j`."""
    launch, storage = ("train", "launch", "--slurm", "--dry-run", *ONE), tmp_path / "storage"
    for words, name in ((), "run_001"), (("--sweep", "optimizers.adam.lr=1e-2,1e-3"), "sweep_001"):
        done = mlx(digits, *launch, *words, PATH=str(tmp_path), MLX_STORAGE=str(storage))
        assert f"#SBATCH --output={storage}/digits/{name}/slurm/1/%j.out\n" in done.stdout, done.stderr
        assert not storage.exists()
    done = mlx(digits, *launch, PATH=str(tmp_path), MLX_STORAGE=f"{storage}\ntouch owned")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert "; Slurm cannot use a folder with '\\n' in its name" in done.stderr


@pytest.mark.pure
@pytest.mark.parametrize(
    ("slurms", "ours"),
    [
        (("CANCELLED by 1000", "None"), "STOPPED"),
        (("TIMEOUT", "TimeLimit"), "FAILED (TIMEOUT)"),
        (("COMPLETED", "None"), "SUCCEEDED"),
    ],
)
def test_states_of_slurm(slurms: tuple[str, str], ours: str) -> None:
    assert str(state_of_job(*slurms)) == ours


@pytest.mark.pure
def test_only_preempted_runs_with_a_new_checkpoint_are_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no Slurm here, so a job that would be requeued is an error."""
    monkeypatch.setenv("MLX_JOB", "1")
    monkeypatch.setenv("MLX_JOB_ADDRESS", "slurm://here")
    monkeypatch.setenv("PATH", str(tmp_path))
    run = claim_run(str(tmp_path), "digits")
    stopped = {"status": "STOPPED", "start": "2020-01-01T00:00:00+00:00"}
    (checkpoint := Path(run.checkpoints) / "epoch_0001").mkdir(parents=True)
    saved = {"latest": {"epoch": 0, "path": str(checkpoint)}}
    records.Record(run, **stopped, **saved, stop_reason="mlx xp stop")
    assert not requeue(run.location)
    records.Record(run, **stopped, stop_reason="SIGTERM")
    with pytest.raises(ClusterError, match=r"before its first checkpoint .* Give it more time"):
        requeue(run.location)
    records.Record(run, **stopped, **saved, stop_reason="SIGTERM")
    with pytest.raises(ClusterError, match="scontrol is not on the PATH"):
        requeue(run.location)
    dead = leases.this_process() | {"pid": 1, "pid_started": "0"}
    records.Record(run, **stopped | saved | dead | {"status": "RUNNING"})  # it could not record its end
    with pytest.raises(ClusterError, match="scontrol is not on the PATH"):
        requeue(run.location)
    records.Record(run, **stopped, **saved, stop_reason="mlx xp stop")  # put back by two drivers that did not resume it
    assert run.claim_attempt(1, leases.lease())
    with pytest.raises(ClusterError, match="before its first checkpoint"):
        requeue(run.location)
    capsys.readouterr()
    assert run.claim_attempt(2, leases.lease() | {"stop_reason": "mlx xp stop"})
    assert not requeue(run.location)
    assert capsys.readouterr().out == "digits/run_001 was stopped by mlx xp stop, so the job is not requeued\n"

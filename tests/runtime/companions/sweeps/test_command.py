"""`mlx train sweep` as typed by a user: real runs, stopped, killed and resumed."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Mlx, Start
from faults import diary, wait_for

from mlx_runtime.companions.sweeps.results import SweepResult
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.storage.files import join_path, storage_at

pytestmark = pytest.mark.process

Make = Callable[[str], Path]

COMMON = ("--metric=val/mse", "--mode=min", "cfg.start_workers=0", "cfg.num_epochs=2")
LR = "optimizers.adam.lr=0.1,0.01"


def record(folder: Path, name: str = "sweep_001") -> dict[str, Any]:
    return json.loads((folder / "runs" / "faults" / name / "run.json").read_text())


def statuses(folder: Path) -> list[str]:
    return [record(folder, name)["status"] for trial in record(folder)["trials"] for name in trial["runs"]]


def table(folder: Path) -> dict[str, Any]:
    frame = SweepResult(RunFolder(folder / "runs" / "faults" / "sweep_001")).table()
    return frame.drop(columns="duration_s").to_dict("index")


@pytest.fixture(scope="module")
def swept(mlx: Mlx, make_in: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An experiment after a sweep of four trials, and what it printed."""
    folder = make_in("faults", tmp_path_factory.mktemp("swept"))
    done = mlx(folder, "train", "sweep", LR, "models.net.width=4,16", *COMMON)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return folder, done.stdout


def test_a_sweep_trains_every_trial(swept: tuple[Path, str]) -> None:
    folder, _ = swept
    assert record(folder)["status"] == "SUCCEEDED"
    assert statuses(folder) == ["SUCCEEDED"] * 4
    for number, trial in enumerate(record(folder)["trials"], 1):
        run = record(folder, f"run_{number:03d}")
        facts = {"name": "sweep_001", "trial": number, "seed": None, "fold": None, "values": trial["values"]}
        assert run["sweep"] == facts
        assert run["epoch"] == 1
    assert record(folder)["trials"][1]["values"] == {"optimizers.adam.lr": "0.1", "models.net.width": "16"}


def test_the_output_names_the_best_trial_and_the_command_that_trains_it(swept: tuple[Path, str]) -> None:
    folder, printed = swept
    best = SweepResult(RunFolder(folder / "runs" / "faults" / "sweep_001")).best
    lines = printed.splitlines()
    assert f"best      trial {best.number}, val/mse {best.score:.4f} (epoch {best.epoch})" in lines
    values = " ".join(best.overrides)
    assert f"full run  mlx train run {values} cfg.start_workers=0 cfg.num_epochs=2" in lines
    assert lines.count("trial 1 run_001  optimizers.adam.lr=0.1 models.net.width=4") == 1
    assert sum("SUCCEEDED" in line for line in lines) == 8  # as each trial ends, and in the table


def test_what_cannot_be_swept_is_refused_before_anything_is_written(swept: tuple[Path, str], mlx: Mlx) -> None:
    folder, _ = swept
    before = sorted(path.name for path in (folder / "runs" / "faults").iterdir())
    done = mlx(folder, "train", "sweep", "optimizers.adam.lr=0.1,fast", *COMMON)
    assert done.returncode == 1
    assert "optimizers.adam.lr" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in (folder / "runs" / "faults").iterdir()) == before


@pytest.mark.kills
def test_a_stopped_sweep_resumes_where_it_was(experiment: Make, mlx: Mlx, start: Start) -> None:
    """Stopped by Ctrl-C, and then by `mlx xp stop`."""
    folder = experiment("faults")
    words = [LR, *COMMON, "cfg.pause_s=1", "--parallel=1"]
    for attempt, (how, code) in enumerate((("Ctrl-C", 130), ("mlx xp stop", 143)), 1):
        process = start(folder, "train", "sweep", *(words if attempt == 1 else ["--resume"]))
        wait_for(lambda: sum("start" in note for note in diary(folder)) >= attempt)  # noqa: B023
        if how == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            assert mlx(folder, "xp", "stop", "faults", "sweep_001").stdout == "faults sweep_001 is STOPPED\n"
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, out + err
        assert err == "stopped with 2 trials of faults/sweep_001 left. Resume: mlx train sweep --resume=sweep_001\n"
        assert f"stopping  running trials save a checkpoint first ({how})" in out
        assert (statuses(folder), record(folder)["stop_reason"]) == (["STOPPED"], how)
        assert record(folder, "run_001")["latest"]["epoch"] == 0
    file = folder / "src" / "experiment.py"
    code_before = file.read_text()
    file.write_text(code_before + "# changed\n")
    refused = mlx(folder, "train", "sweep", "--resume", "optimizers.adam.lr=0.1,0.2")
    assert refused.returncode == 2
    assert (
        "faults/sweep_001 was started with other overrides, which cannot change: optimizers.adam.lr=0.1,0.01 "
    ) in refused.stderr
    assert "--force" not in refused.stderr
    refused = mlx(folder, "train", "sweep", "--resume", "--scheduler=asha")
    assert refused.returncode == 2
    assert "\n  scheduler: none → asha\n  src/experiment.py differs\n" in refused.stderr
    file.write_text(code_before)
    (folder / "diary" / "hurry").touch()
    done = mlx(folder, "train", "sweep", "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert statuses(folder) == ["SUCCEEDED"] * 2
    assert record(folder, "run_001")["attempt"] == 3


def test_a_scheduler_prunes_a_trial(experiment: Make, mlx: Mlx) -> None:
    folder = experiment("faults")
    words = ["optimizers.adam.lr=0.01,1e-9", *COMMON, "cfg.num_epochs=4", "--scheduler=asha", "--parallel=1"]
    done = mlx(folder, "train", "sweep", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert statuses(folder) == ["SUCCEEDED", "PRUNED"]
    assert record(folder, "run_002")["latest"]["epoch"] < 3


def test_a_sweep_ends_after_its_time(experiment: Make, mlx: Mlx) -> None:
    folder = experiment("faults")
    done = mlx(folder, "train", "sweep", LR, *COMMON, "cfg.pause_s=0.3", "cfg.num_epochs=50", "--max-time=2s")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "stopped with 2 trials of faults/sweep_001 left. Resume: mlx train sweep --resume=sweep_001\n"
    assert record(folder)["status"] == "STOPPED"


@pytest.mark.kills
def test_trials_that_fail_or_are_killed_do_not_end_the_sweep(experiment: Make, start: Start) -> None:
    folder = experiment("faults")
    words = ["datasets.train.rows=0,61,62", *COMMON, "cfg.pause_s=600", "--parallel=1"]
    process = start(folder, "train", "sweep", *words)
    wait_for(lambda: any("rows" in note for note in diary(folder)))
    os.kill(record(folder, "run_002")["pid"], signal.SIGKILL)
    (folder / "diary" / "hurry").touch()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    assert statuses(folder) == ["FAILED", "FAILED", "SUCCEEDED"]
    why = "its process was killed by SIGKILL (out of memory?)"
    assert record(folder, "run_002")["error"] == why
    log = folder / "runs" / "faults" / "run_002" / "logs" / "driver.log"
    assert log.read_text().endswith(f"error: {why}\n")
    assert "trial 1 FAILED: " in out
    assert "failed    2 of 3 trials" in out


@pytest.mark.kills
def test_a_signal_to_all_processes_does_not_cost_the_checkpoints(experiment: Make, start: Start) -> None:
    """`ray job stop` and systemd signal the trials of a sweep, too."""
    folder = experiment("faults")
    process = start(folder, "train", "sweep", LR, *COMMON, "cfg.pause_s=1", "--parallel=2")
    wait_for(lambda: len({note["pid"] for note in diary(folder) if "start" in note}) == 2)
    wait_for(lambda: sum("rows" in note for note in diary(folder)) >= 2)
    for pid in (process.pid, *(record(folder, f"run_{number:03d}")["pid"] for number in (1, 2))):
        os.kill(pid, signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, out + err
    assert statuses(folder) == ["STOPPED"] * 2
    assert [record(folder, f"run_{number:03d}")["latest"]["epoch"] for number in (1, 2)] == [0, 0]


@pytest.mark.kills
def test_trials_do_not_survive_their_killed_driver(experiment: Make, start: Start) -> None:
    folder = experiment("faults")
    process = start(folder, "train", "sweep", LR, *COMMON, "cfg.pause_s=0.2", "cfg.num_epochs=50")
    wait_for(lambda: list((folder / "diary").glob("*.jsonl")))
    process.kill()
    begun = [file.parent.name for file in (folder / "runs" / "faults").glob("run_*/run.json")]
    pids = [record(folder, name)["pid"] for name in begun]
    assert pids != []
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 60)  # they would train for 160 s


@pytest.mark.kills
def test_the_second_ctrl_c_kills_the_trials(experiment: Make, mlx: Mlx, start: Start) -> None:
    folder = experiment("faults")
    arguments = [LR, *COMMON, "datasets.train.rows=4", "cfg.pause_s=600", "--parallel=2"]
    process = start(folder, "train", "sweep", *arguments)
    wait_for(lambda: sum("rows" in note for note in diary(folder)) == 2)  # both are within a step
    pids = [record(folder, f"run_{number:03d}")["pid"] for number in (1, 2)]
    process.send_signal(signal.SIGINT)
    log = folder / "runs" / "faults" / "sweep_001" / "logs" / "driver.log"
    wait_for(lambda: "stopping  running trials save a checkpoint first" in log.read_text())
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    assert err == "stopped with 2 trials of faults/sweep_001 left. Resume: mlx train sweep --resume=sweep_001\n"
    assert statuses(folder) == ["STOPPED"] * 2
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 60)


@pytest.mark.s3
def test_a_sweep_on_an_object_store(experiment: Make, mlx: Mlx, start: Start, s3: str, tmp_path: Path) -> None:
    """Killed, resumed, and read by its URI."""
    folder, storage = experiment("faults"), s3.format(f"swept-{tmp_path.name}")
    first, sweep = (join_path(storage, "faults", name) for name in ("run_001", "sweep_001"))
    settings = (f"cfg.storage_path='{storage}'", "cfg.pause_s=1", "cfg.pause_from=3", "cfg.checkpoint_every_steps=2")
    settings += ("--parallel=1",)
    process = start(folder, "train", "sweep", LR, *COMMON, *settings)
    wait_for(lambda: CheckpointStore(join_path(first, "checkpoints")).any())
    process.kill()
    process.wait()
    (folder / "diary" / "hurry").touch()
    done = mlx(folder, "train", "sweep", f"--resume={sweep}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (folder / "runs").exists()
    there = {"MLX_STORAGE": storage}
    rows = json.loads(mlx(folder, "xp", "ls", "faults", "--sweep", "sweep_001", "--json", **there).stdout)
    assert [(row["run"], row["status"], row["epoch"]) for row in rows] == [
        ("run_001", "SUCCEEDED", 2),
        ("run_002", "SUCCEEDED", 2),
    ]
    assert json.loads(storage_at(first).read("run.json"))["attempt"] == 2
    page = mlx(folder, "xp", "report", sweep).stdout.strip()
    assert page == join_path(sweep, "report.html")
    assert "optimizers.adam.lr" in storage_at(sweep).read("report.html").decode()


@pytest.mark.examples
def test_a_sweep_over_seeds_ranks_by_the_mean_and_takes_more_of_them(experiment: Make, mlx: Mlx) -> None:
    """Seeds are added by the sweep itself, and by the commands of a comparison."""
    folder = experiment("faults")
    conf = folder / "src" / "conf.yaml"
    given = conf.read_text()
    conf.write_text(re.sub(r"(?m)^cfg:$", "cfg:\n  seed: 5", re.sub(r"(?m)^  seed: .*\n", "", given)))
    for words in ((LR, *COMMON, "--seeds=2"), ("--resume", "--seeds=3")):
        done = mlx(folder, "train", "sweep", *words)
        assert done.returncode == 0, done.stdout + done.stderr
    runs = [record(folder, name) for trial in record(folder)["trials"] for name in trial["runs"]]
    assert [(run["sweep"]["trial"], run["seed"], run["status"]) for run in runs] == [
        (trial, seed, "SUCCEEDED") for trial in (1, 2) for seed in (5, 6, 7)
    ]
    assert runs[0]["attempt"] == 1
    result = SweepResult(RunFolder(folder / "runs" / "faults" / "sweep_001"))
    best, other = result.ranked()
    values = [run.epochs[best.epoch]["val/mse"] for run in best.runs]
    assert best.score == pytest.approx(sum(values) / 3)
    assert best.score <= other.score
    lines = [line for line in done.stdout.splitlines() if " ± " in line and " … " in line]
    assert [int(line.split()[0]) for line in lines] == [best.number, other.number]
    refused = mlx(folder, "train", "sweep", "--resume", "--seeds=2")
    assert (refused.returncode, "other seeds, which cannot change: 3 → 2" in refused.stderr) == (2, True)
    conf.write_text(given)
    refused = mlx(folder, "train", "sweep", "--resume", "--force")
    assert (refused.returncode, "cfg.seed=5, which cannot change" in refused.stderr) == (2, True)
    compare = ("xp", "compare", "--json", "run_001", runs[3]["run"], "--metric=val/mse", "--mode=min")
    commands = json.loads(mlx(folder, *compare).stdout)["commands"]
    assert [command.partition(" cfg.seed")[2] for command in commands] == [
        "=8 --seeds 2 --metric val/mse --mode min"
    ] * 2
    for command in commands:
        done = mlx(folder, *shlex.split(command)[1:])
        assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(mlx(folder, *compare).stdout)
    assert [len(found[side]["values"]) for side in "ab"] == [5, 5]
    assert found["interval"][0] < found["interval"][1]


@pytest.mark.kills
@pytest.mark.timeout(1200)
def test_a_driver_killed_at_random_moments_finds_what_an_undisturbed_one_does(
    experiment: Make, mlx: Mlx, start: Start, tmp_path: Path
) -> None:
    """Up to twice; KILLS=20 in `make chaos`."""
    folder = experiment("faults")
    arguments = [LR, "--folds=3", "cfg.checkpoint_every_steps=2", *COMMON, "cfg.num_epochs=3"]
    undisturbed = Path(shutil.copytree(folder, tmp_path / "undisturbed"))
    done = mlx(undisturbed, "train", "sweep", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    moments = random.Random(os.environ.get("SEED", "0"))
    slow = [*arguments, "cfg.pause_s=0.3"]
    process = start(folder, "train", "sweep", *slow)
    kills = 0
    for _ in range(int(os.environ.get("KILLS", "2"))):
        time.sleep(moments.uniform(1, 8))
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
        begun = (folder / "runs" / "faults" / "sweep_001" / "run.json").exists()
        process = start(folder, "train", "sweep", *(["--resume"] if begun else slow))
    wait_for((folder / "diary").is_dir)
    (folder / "diary" / "hurry").touch()
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, out + err
    assert kills >= 1
    assert table(folder) == table(undisturbed)
    numbers = sorted(int(path.name[4:]) for path in (folder / "runs" / "faults").glob("run_*"))
    assert numbers == list(range(1, 7))

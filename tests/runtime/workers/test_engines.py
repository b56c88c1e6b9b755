"""Engines: a run has the same results on each of them, and none of its processes outlives it.

Most tests are about the local engine, which does the work of Ray itself: it sets up the environment of the workers,
collects their output, replaces lost workers, and terminates them with all processes that they started.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Mlx, Start, Started
from faults import diary, record, same, wait_for
from leftovers import of_session

from mlx_runtime.errors import ConfigError
from mlx_runtime.loop.job import Cluster
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.runs.folder import run_folder
from mlx_runtime.sections import Elastic
from mlx_runtime.workers.local import LocalGroup
from mlx_runtime.workers.placement import engine_for

pytestmark = pytest.mark.local

Make = Callable[[str], Path]

OFTEN = "cfg.checkpoint_every_steps=3"


@pytest.fixture
def acts(experiment: Make) -> Path:
    return experiment("acts")


def children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def seen(folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """Wait for the notes of all ranks, and return them."""
    files = [folder / "seen" / f"rank_{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files if all(file.exists() for file in files)]


def log_of(folder: Path, rank: int) -> str:
    return next(folder.glob(f"runs/*/run_001/logs/rank_{rank}.log")).read_text()


class TestTheSameNumbers:
    """With dropout and batch norm, random numbers of every kind, metrics, and a schedule."""

    @pytest.fixture(scope="class")
    def bound(self, make_in: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_in("faults", tmp_path_factory.mktemp("bound"))

    @pytest.fixture(scope="class")
    def finished(self, mlx: Mlx, bound: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
        """`finished("cfg.start_workers=0")` returns the folder of such a run, which is shared by all tests."""
        made: dict[tuple[str, ...], Path] = {}

        def finished(*overrides: str) -> Path:
            if overrides not in made:
                made[overrides] = Path(shutil.copytree(bound, tmp_path_factory.mktemp("finished") / "faults"))
                done = mlx(made[overrides], "train", "run", OFTEN, *overrides)
                assert done.returncode == 0, done.stdout + done.stderr
            return made[overrides]

        return finished

    def test_one_worker_trains_as_no_worker_does(self, finished: Callable[..., Path]) -> None:
        here = finished("cfg.start_workers=0")
        there = finished("cfg.start_workers=1", "cfg.engine=local")
        assert same(there, here) == []
        assert record(there)["engine"] == {"asked": "local", "used": "local"}
        assert record(here)["engine"] == {"asked": "auto", "used": "in_process"}

    @pytest.mark.parametrize(
        ("first", "then", "end"),
        [
            pytest.param("local", "ray", signal.SIGKILL, marks=pytest.mark.cluster),
            pytest.param("ray", "local", signal.SIGTERM, marks=pytest.mark.cluster),
        ],
    )
    def test_a_run_resumes_on_another_engine(
        self,
        first: str,
        then: str,
        end: signal.Signals,
        start: Start,
        mlx: Mlx,
        bound: Path,
        finished: Callable[..., Path],
        tmp_path: Path,
    ) -> None:
        """Between them, the two runs that change the engine take every step on Ray."""
        folder = Path(shutil.copytree(bound, tmp_path / "faults"))
        process = start(folder, "train", "run", OFTEN, f"cfg.engine={first}", "cfg.pause_s=1", "cfg.pause_from=10")
        wait_for(lambda: any(note.get("step") == 10 for note in diary(folder)))
        process.send_signal(end)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == (143 if end == signal.SIGTERM else -signal.SIGKILL), errors
        done = mlx(folder, "train", "run", "--resume", f"cfg.engine={then}", "cfg.pause_s=0")
        assert done.returncode == 0, done.stderr
        assert "restored  " in done.stdout
        assert same(folder, finished()) == []
        assert record(folder)["engine"] == {"asked": then, "used": then}

    def test_a_new_interpreter_forks_the_workers_where_an_import_has_started_a_thread(
        self, mlx: Mlx, bound: Path, finished: Callable[..., Path], tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(bound, tmp_path / "faults"))
        with (folder / "src" / "experiment.py").open("a") as file:
            file.write("\nimport threading\nthreading.Thread(target=time.sleep, args=(9999,), daemon=True).start()\n")
        one = ("cfg.start_workers=1", "cfg.engine=local")
        done = mlx(folder, "train", "run", OFTEN, *one)
        assert done.returncode == 0, done.stderr
        assert same(folder, finished(*one)) == []


@pytest.mark.pure
class TestGroupsOnGPUs:
    """What torch is called with where there are GPUs."""

    @pytest.mark.parametrize(
        ("gpus", "visible", "expected"),
        [
            (1, None, [None, None]),
            (2, "GPU-a,GPU-b,5,6,7", ["GPU-a,GPU-b", "5,6"]),
            (0.5, "3", ["3", "3"]),
        ],
    )
    def test_each_local_worker_with_several_sees_its_own(
        self,
        gpus: float,
        visible: str | None,
        expected: list[str | None],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        cluster = Cluster("here", 8, 8, use_gpu=True, gpus_per_worker=gpus)
        engine: Any = SimpleNamespace(cfg=TrainConfig(), use_gpu=True, timeout_s=60.0, server=Server(), pipes=None)
        job: Any = SimpleNamespace(folder=run_folder(str(tmp_path), "x", "run_001"), cluster=cluster)
        (tmp_path / "x" / "run_001").mkdir(parents=True)
        LocalGroup(engine, job, lambda _: None).close()
        assert [item.get("CUDA_VISIBLE_DEVICES") for item in engine.server.environments] == expected


class Server:
    """A fork server that starts nothing."""

    def __init__(self) -> None:
        self.environments: list[dict[str, str]] = []

    def start(self, rank: int, call: Any, environment: dict[str, str], streams: Any) -> None:
        self.environments.append(environment)

    def kill(self, *ranks: int) -> None:
        self.ranks = ranks

    def exits(self, timeout_s: float) -> dict[int, int]:
        return dict.fromkeys(self.ranks, -9)


class TestALocalWorker:
    """The environment of user code."""

    @pytest.fixture(scope="class")
    def looked(
        self, mlx: Mlx, make_in: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory
    ) -> tuple[list[dict[str, Any]], str]:
        folder = make_in("acts", tmp_path_factory.mktemp("looked"))
        done = mlx(folder, "train", "run", "cfg.act=look", "cfg.cpus_per_worker=2")
        assert (done.returncode, done.stderr) == (0, "")
        return seen(folder), done.stdout

    def test_ray_trains_functions_answer(self, looked: tuple[list[dict[str, Any]], str]) -> None:
        for rank, found in enumerate(looked[0]):
            assert found["ranks"] == [rank, rank, 0]
            assert found["sizes"] == [2, 2]
            assert found["name"] == "acts"
            assert found["device"] == ("cuda:0" if torch.cuda.device_count() > 1 else "cpu")
            assert found["checkpoint"] is None

    def test_its_collectives_synchronize(self, looked: tuple[list[dict[str, Any]], str]) -> None:
        """Rank 1 reaches a barrier half a second late."""
        assert [found["told"] for found in looked[0]] == [["by 0"], ["by 0"]]
        before, after = zip(*(found["barrier"] for found in looked[0]), strict=True)
        assert max(before) <= min(after)  # by one clock

    def test_the_environment_is_torchruns(self, looked: tuple[list[dict[str, Any]], str]) -> None:
        for rank, found in enumerate(looked[0]):
            place = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            assert found["environment"] == place | {
                "GROUP_RANK": "0",
                "NODE_RANK": "0",
                "MASTER_ADDR": None,  # workers meet in a file that only this user can open
                "OMP_NUM_THREADS": "2",
            }

    def test_its_groups_are_on_the_loopback_interface(self, looked: tuple[list[dict[str, Any]], str]) -> None:
        for found in looked[0]:
            assert found["listening"]
            assert set(found["listening"]) == {"127.0.0.1"}

    def test_a_report_of_ray_train_is_refused(self, mlx: Mlx, acts: Path) -> None:
        done = mlx(acts, "train", "run", "cfg.act=report", "cfg.start_workers=1")
        first, where, *_ = done.stderr.splitlines()
        assert first == "error: ray.train.report does not work in worker_loop; call self.log and self.save_checkpoint"
        assert re.match(r"  src/experiment.py:\d+ in ", where)
        assert done.returncode != 0
        assert record(acts)["status"] == "FAILED"

    def test_there_is_no_ray(self, mlx: Mlx, acts: Path) -> None:
        """Neither by `ray.init` nor by functions that call it implicitly."""
        done = mlx(acts, "train", "run", "cfg.act=use_ray")
        line = "a worker of the local engine has no Ray; train with cfg.engine=ray to use it in worker_loop"
        first, where, *_ = done.stderr.splitlines()
        assert first == f"error: {line}"
        assert re.match(r"  src/experiment.py:\d+ in ", where)
        assert done.returncode != 0
        assert [(found["errors"], found["children"]) for found in seen(acts)] == [([line] * 3, [])] * 2


class TestOutput:
    """The output of workers goes to the logs of their ranks and to the streams of the driver."""

    def test_all_that_is_printed_arrives(self, mlx: Mlx, acts: Path) -> None:
        done = mlx(acts, "train", "run", "cfg.act=print_everything")
        assert done.returncode == 0, done.stderr
        by_stdout = ("printed äöü :smile: [b]", "to descriptor 1", "by libc", "by a child")
        by_stderr = ("printed to stderr", "to descriptor 2")
        for rank in range(2):
            mine = f"rank {rank}: "
            lines = log_of(acts, rank).splitlines()
            for stream, texts in ((done.stdout, by_stdout), (done.stderr, by_stderr)):
                wanted = [mine + text for text in texts]
                assert [line for line in stream.splitlines() if line.startswith(mine)] == wanted
                assert [line for line in lines if line in wanted] == wanted
            assert len(lines) == len(by_stdout) + len(by_stderr)

    def test_the_last_words_before_a_crash_are_kept(self, mlx: Mlx, acts: Path) -> None:
        """Of a line that did not end."""
        done = mlx(acts, "train", "run", "cfg.act=crash_in_mid_line", "cfg.elastic.max_failures=0")
        assert done.stderr.startswith("error: a worker was lost: rank 1 was killed by SIGSEGV\n")
        assert log_of(acts, 1) == "the last words\n"
        assert done.stdout.splitlines()[-1] == "the last words"

    def test_a_child_that_prints_without_end_does_not_keep_the_run_from_ending(self, mlx: Mlx, acts: Path) -> None:
        """The child has left the worker's process group, and holds its pipes."""
        done = mlx(acts, "train", "run", "cfg.act=leave_a_child", "cfg.start_workers=1")
        child = seen(acts, 1)[0]["child"]
        with contextlib.suppress(ProcessLookupError):  # printing into a closed pipe kills it
            os.kill(child, signal.SIGKILL)
        assert done.returncode == 0, done.stderr
        assert "the child is on its own" in done.stdout

    def test_a_log_that_cannot_be_written_ends_nothing(self, mlx: Mlx, acts: Path) -> None:
        """/dev/full simulates a full disk."""
        assert mlx(acts, "train", "run", "cfg.act=exit_politely").returncode == 1
        log = next(acts.glob("runs/acts/run_001/logs/rank_0.log"))
        log.unlink()
        log.symlink_to("/dev/full")
        done = mlx(acts, "train", "run", "--resume", "cfg.act=print_everything")
        assert done.returncode == 0, done.stderr
        assert "rank 0: by libc" in done.stdout.splitlines()
        assert "rank 1: by libc" in log_of(acts, 1).splitlines()


@pytest.mark.kills
class TestNothingIsLeft:
    """Whichever process is killed, no process of the run survives, and one line says how it ended."""

    WAITING = ("train", "run", "cfg.act=wait_to_be_killed", "cfg.count=300", "cfg.elastic.max_failures=0")

    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_the_driver_is_killed_while_it_trains(self, method: str, start: Start, acts: Path) -> None:
        """Processes that workers have started end as well."""
        process = start(acts, *self.WAITING, MLX_START_METHOD=method)
        wait_for(lambda: len(of_session(process.pid)) >= 6, 120)
        process.kill()
        wait_for(lambda: not of_session(process.pid), 60)

    def test_the_fork_server_is_killed(self, start: Start, acts: Path) -> None:
        process = start(acts, *self.WAITING)
        wait_for(lambda: seen(acts), 60)
        (server,) = children(process.pid)
        os.kill(server, signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
        assert errors == (
            "error: the fork server ended: it was killed by SIGKILL (out of memory?); all workers ended with it\n"
        )
        assert process.returncode == 1
        assert record(acts)["status"] == "FAILED"
        workers = {found["pid"] for found in seen(acts)}
        wait_for(lambda: not workers & set(of_session(process.pid)), 60)
        for pid in of_session(process.pid):  # what the workers have started
            os.kill(pid, signal.SIGKILL)

    def test_a_worker_is_killed_that_has_children(self, start: Start, acts: Path) -> None:
        process = start(acts, *self.WAITING)
        victim = wait_for(lambda: seen(acts), 60)[1]["pid"]
        assert children(victim)
        os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1
        why = "rank 1 was killed by SIGKILL (out of memory?)"
        assert errors.splitlines()[0] == f"error: a worker was lost: {why}"
        wait_for(lambda: not of_session(process.pid), 60)  # they were killed, and may take a moment to end

    def test_a_worker_that_ends_without_a_word_is_lost(self, mlx: Mlx, acts: Path) -> None:
        """And are replaced, up to the limit; the other workers connect to the new one."""
        done = mlx(acts, "train", "run", "cfg.act=exit_silently", "cfg.elastic.max_failures=3")
        why = "rank 1 exited with code 0"
        assert done.stdout.count(f"lost      rank 1: {why}\n") == 3
        assert done.stderr == (
            f"error: a worker was lost: {why}; no replacements are left (cfg.elastic.max_failures=3)\n"
        )
        assert record(acts)["failures"] == 3

    def test_worker_loop_must_not_end_by_any_exception(self, mlx: Mlx, acts: Path) -> None:
        """Even those that are not an `Exception` are failures of user code, and no worker is replaced."""
        done = mlx(acts, "train", "run", "cfg.act=exit_politely", "cfg.start_workers=1", "cfg.elastic.max_failures=1")
        lines = done.stderr.splitlines()
        assert lines[0] == "error: SystemExit: 0 (return instead of exiting) (raised on rank 0)"
        assert any(re.fullmatch(r"  src/experiment.py:\d+ in exit_politely", line) for line in lines)
        assert record(acts)["status"] == "FAILED"
        assert record(acts).get("failures") is None


@pytest.mark.kills
class TestInterrupt:
    """Ctrl-C at any moment: the terminal sends SIGINT to the driver, its fork server and workers that just began."""

    def moments(self, process: Started, folder: Path) -> "dict[str, Callable[[], Any]]":
        def maps(name: str) -> bool:
            return name in Path(f"/proc/{process.pid}/maps").read_text()

        return {
            "torch is imported": lambda: maps("libtorch"),
            "workers train": lambda: seen(folder),
        }

    @pytest.mark.parametrize(
        ("moment", "later_s", "times"),
        [
            ("torch is imported", 0.0, 1),
            pytest.param("workers train", 0.3, 2, marks=pytest.mark.local),
        ],
    )
    def test_it_ends_the_run(self, moment: str, later_s: float, times: int, start: Start, acts: Path) -> None:
        new = {"PYTHONUNBUFFERED": "1"} if moment == "torch is imported" else {}  # for a new interpreter
        process = start(acts, *TestNothingIsLeft.WAITING, **new)
        wait_for(self.moments(process, acts)[moment], 60, every_s=0.005)
        time.sleep(later_s)
        assert of_session(process.pid)
        for _ in range(times):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.02)
        _, errors = process.communicate(timeout=60)
        saved = list(acts.glob("runs/acts/run_001/checkpoints/epoch_*"))
        left = "keeps its checkpoints. Resume" if saved else "has no checkpoint yet. Start it over"
        resume = f"stopped; acts run_001 is marked STOPPED and {left}: mlx train run --resume=run_001"
        assert errors in ("error: interrupted\n", f"{resume}\n")
        assert process.returncode == 130
        wait_for(lambda: not of_session(process.pid), 60)
        if list(acts.glob("runs/acts/*/run.json")):
            assert record(acts)["status"] == "STOPPED"


class TestAuto:
    """`cfg.engine=auto` is the local engine if that can train the run."""

    @pytest.mark.pure
    @pytest.mark.parametrize(
        ("cfg", "chosen"),
        [
            (TrainConfig(), ("local", "")),
            (TrainConfig(start_workers=0), ("in_process", "")),
            (TrainConfig(elastic=Elastic(1)), ("ray", "cfg.elastic.min_workers=1 lets the number of workers change")),
        ],
    )
    def test_by_settings(self, cfg: TrainConfig, chosen: tuple[str, str]) -> None:
        assert engine_for(cfg) == chosen

    @pytest.mark.pure
    def test_one_that_was_asked_for_and_cannot_train_the_run_is_refused(self) -> None:
        refused = "^cfg.engine=local cannot train this: cfg.elastic.min_workers=1 lets .*; use cfg.engine=auto$"
        with pytest.raises(ConfigError, match=refused):
            engine_for(TrainConfig(engine="local", elastic=Elastic(1)))

    @pytest.mark.pure
    def test_a_worker_on_ray_is_not_one_of_torchrun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A script that a worker imports may make a `Trainer`."""
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MLX_WORKER", "1")):
            monkeypatch.setenv(name, value)
        assert engine_for(TrainConfig(start_workers=1)) == ("local", "")

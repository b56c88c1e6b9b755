"""`Trainer`: functions on several workers."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EXPERIMENTS, Mlx
from faults import cluster, wait_for
from leftovers import marked

from mlx_runtime import (
    MlxError,
    Trainer,
    accelerate,
    get_dataset_shard,
    get_device,
    load_checkpoint,
    local_rank,
    open_run,
    report,
    save_checkpoint,
    world_rank,
    world_size,
)
from mlx_runtime.companions.notebook.calls import override
from mlx_runtime.config.composition import parse_overrides
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError, UsageError

SCRIPT = """
import json, sys, traceback
from mlx_runtime import MlxError, Trainer
from mlx_runtime.sections import Elastic
from src import training
from src.training import Execution


def own(results):
    return [{name: value for name, value in result.items() if name[0] != "_"} for result in results]


def refused(call, *arguments, **options):
    try:
        return call(*arguments, **options)
    except MlxError as error:
        return [type(error).__name__, str(error), traceback.format_exception(error)[-1].strip()]


def loading():
    value = trainer.run(training.resumable, config={"num_epochs": 5}, checkpoint={"epoch": 2, "model": 3})
    return value, trainer.latest_checkpoint, trainer.latest_checkpoint_path, trainer.latest_run.config["cfg"]


def iterator():
    running = trainer.run_iterator(training.with_epochs)
    results = [own(item) for item in running]
    return results, running.is_finished(), running.get_returns()


def torch_trainer():
    returned = trainer.run(training.of_torch_trainer, {"num_epochs": 2})
    path = trainer.latest_checkpoint_path
    returned += trainer.run(training.of_torch_trainer, {"num_epochs": 3}, checkpoint=path)
    losses = trainer.latest_run.metrics()["loss"].dropna().tolist()
    return returned, losses, sorted(trainer.latest_checkpoint["files"])


def failing():
    config = {"num_epochs": 4, "fails_after": 2}
    failed = refused(trainer.run, training.resumable, config=config)
    place = trainer.latest_run_dir
    from_path = trainer.run(training.resumable, config={"num_epochs": 4}, checkpoint=trainer.latest_checkpoint_path)
    resumed = trainer.run(training.resumable, config={"fails_after": None}, resume=place)
    again = refused(trainer.run, training.resumable, resume=place)
    return failed, resumed, from_path, trainer.latest_run.record["attempt"], again, place


def restarted():
    config = {"num_epochs": 4, "dies_after": 1}
    return trainer.run(training.resumable, config=config), trainer.latest_run.record["failures"]


def stopped():
    for results in (running := trainer.run_iterator(training.endless)):
        if results[0]["step"] == 3:
            break
    left = refused(running.get_returns)
    for results in (stopping := trainer.run_iterator(training.endless_with_checkpoints)):
        if results[0]["number"] == 2:
            stopping.stop()
    kept = trainer.latest_checkpoint["number"], trainer.latest_run.metrics()["number"].max()
    def fail(results):
        raise RuntimeError("in a callback")
    try:
        trainer.run(training.endless, callbacks=[fail])
    except RuntimeError as error:
        return left, running.status, str(error), trainer.latest_run.record["status"], kept


def stateful():
    trainer.start(Execution, 5, step=2)
    found = [str(trainer), trainer.execute(lambda w: w.train()), trainer.execute(lambda w, n: w.value + n, 1)]
    found += [trainer.execute_single(lambda w: w.value), refused(trainer.execute, lambda w: w.trian())]
    found += [trainer.execute(lambda w: w.value), refused(trainer.execute, lambda w: w.fail_on_one())]
    found += [refused(trainer.execute, lambda w: w.value)]
    trainer.shutdown()
    return found


def used():
    return trainer.latest_run.record["engine"]


def refusals():
    names = ("unpicklable", "reports_text", "reports_on_rank_0")
    return [refused(trainer.run, getattr(training, name)) for name in names]


engine, *names = sys.argv[1:]
trainer = Trainer(num_workers=2, engine=engine, elastic=Elastic(max_failures=1))
print(json.dumps({name: globals()[name]() for name in names}))
"""

IN_MAKE_TEST = ("iterator", "loading", "torch_trainer")

OTHERS = ("failing", "restarted", "stopped", "refusals")

ON_A_CLUSTER = ("iterator", "used", "stateful")

Found = dict[str, Any]


@pytest.fixture(scope="module")
def of_script(python: Mlx, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Found]:
    """`of_script("local", "iterator", ...)` returns what a script finds with a Trainer of that engine, by name."""

    def found(engine: str, *names: str, **settings: str) -> Found:
        folder = made_in(tmp_path_factory.mktemp("functions"))
        (folder / "script.py").write_text(SCRIPT)
        done = python(folder, "script.py", engine, *names, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        *printed, returned = done.stdout.splitlines()
        return json.loads(returned) | {"printed": printed, "stderr": done.stderr, "folder": folder}

    return found


def made_in(folder: Path) -> Path:
    shutil.copytree(EXPERIMENTS / "functions", folder / "src")
    return folder


@pytest.fixture(scope="module")
def local(of_script: Callable[..., Found]) -> Found:
    return of_script("local", *IN_MAKE_TEST)


@pytest.fixture(scope="module")
def others(of_script: Callable[..., Found]) -> Found:
    return of_script("local", *OTHERS)


@pytest.fixture(scope="module")
def on_a_cluster(
    of_script: Callable[..., Found],
    environment: dict[str, str],
) -> Found:
    """What a script finds in a job of a cluster of two nodes with one CPU each."""
    with cluster(2, environment) as raylets:
        settings = {"MLX_IN_JOB": "1", "RAY_ADDRESS": raylets.address}
        return of_script("auto", *ON_A_CLUSTER, **settings)


@pytest.fixture(
    scope="module",
    params=[pytest.param("local", marks=pytest.mark.local), pytest.param("ray", marks=pytest.mark.cluster)],
)
def both(request: pytest.FixtureRequest) -> Found:
    """What was found with each of the two engines."""
    return request.getfixturevalue({"local": "local", "ray": "on_a_cluster"}[request.param])


class TestRuns:
    def test_an_iterator_yields_what_all_workers_report(self, both: Found) -> None:
        results, finished, returns = both["iterator"]
        assert results == [[{"epoch": epoch, "rank": rank} for rank in (0, 1)] for epoch in range(3)]
        assert finished
        assert returns == [[0, 2, 0], [1, 2, 1]]

    @pytest.mark.local
    def test_a_function_continues_from_a_checkpoint_and_saves_its_own(self, local: Found) -> None:
        returned, checkpoint, path, cfg = local["loading"]
        assert returned == [10, 10]
        assert checkpoint == {"epoch": 4, "model": 10}
        assert path == str(local["folder"] / "runs" / "resumable" / "run_001" / "checkpoints" / "epoch_0002")
        assert (cfg["function"], cfg["config"]) == ("src.training.resumable", {"num_epochs": 5})

    @pytest.mark.local
    def test_functions_of_ray_train_report_and_save(self, local: Found) -> None:
        returned, losses, files = local["torch_trainer"]
        assert returned == [[0, 2]] * 2 + [[2, 2]] * 2
        assert (losses, files) == ([1 / 3], ["empty", "part/state.pt"])

    @pytest.mark.local
    def test_its_runs_are_recorded_like_others(self, local: Found, mlx: Any) -> None:
        """runs/resumable/run_001/{run.json, conf.yaml, metrics.jsonl, code.zip, checkpoints/epoch_0002, ...}"""
        run = open_run(local["folder"] / "runs" / "resumable" / "run_001")
        assert run.record["status"] == "SUCCEEDED"
        assert run.record["overrides"][0] == "++cfg.name='resumable'"
        assert run.metrics()[["epoch", "model"]].dropna().to_numpy().tolist() == [[0, 6], [1, 10]]
        assert run.state()["own"]["saved"] == {"epoch": 4, "model": 10}
        listed = mlx(local["folder"], "xp", "ls").stdout
        assert [line.split()[:4] for line in listed.splitlines() if "resumable" in line] == [
            ["resumable", "run_001", "SUCCEEDED", "2/2"]
        ]


@pytest.mark.kills
class TestFailures:
    def test_a_failed_run_names_the_line_and_resumes(self, others: Found) -> None:
        (kind, message, printed_last), resumed, from_path, attempt, again, place = others["failing"]
        assert kind == "WorkerLoopError"
        assert message.startswith("ValueError: on purpose (raised on rank ")
        assert "src/training.py:" in message
        assert printed_last == f'Resume from the last checkpoint: trainer.run(resumable, resume="{place}")'
        assert (resumed, from_path, attempt) == ([6, 6], [6, 6], 2)
        start = "to start a new run: leave out resume=, or give the Trainer another name="
        assert again[1].endswith(f" has succeeded; {start}")

    def test_lost_workers_are_replaced_and_continue_from_the_checkpoint(self, others: Found) -> None:
        assert others["restarted"] == [[6, 6], 1]
        (told,) = (line for line in others["printed"] if line.startswith("lost rank "))
        assert told.endswith("; the workers are replaced")

    def test_leaving_the_loop_or_a_failing_callback_stops_the_run(self, others: Found) -> None:
        left, status, error, recorded, (saved, reported) = others["stopped"]
        assert saved == reported >= 2  # the epoch that was being trained is saved first
        assert left[0] == "RunStopped"
        assert left[1].endswith('was stopped before the function returned; resume it: resume="run_001"')
        assert (status, error, recorded) == ("STOPPED", "in a callback", "STOPPED")

    def test_what_cannot_run_is_refused_in_one_line(self, others: Found) -> None:
        pickled, reported, uneven = (message for _, message, _ in others["refusals"])
        assert pickled.startswith("src.training.unpicklable returned a function on rank ")
        text, *where = reported.splitlines()
        assert text == "report(loss='low') is not a number; report numbers, or tensors of one element"
        assert where == ["  src/training.py:77 in reports_text", '    report(loss="low")']
        on_every_worker = "; call report and save_checkpoint on every worker, not only on rank 0"
        assert uneven.splitlines()[0] == f"some workers call report, others return from the function{on_every_worker}"


@pytest.mark.cluster
class TestOnRay:
    def test_functions_and_objects_find_the_cluster(self, on_a_cluster: Found) -> None:
        assert on_a_cluster["used"] == {"asked": "auto", "used": "ray"}
        table = on_a_cluster["stateful"][0]
        assert table.splitlines()[2].split() == ["CPUs", "1", "2", "2"]

    def test_objects_stay_on_their_workers(self, on_a_cluster: Found) -> None:
        _, trained, with_argument, single, missing, kept, failed, closed = on_a_cluster["stateful"]
        assert trained == [[7, 15], [7, 15]]
        assert with_argument == [8, 8]
        assert single == 7
        assert missing[1].startswith("AttributeError: 'Execution' object has no attribute 'trian' (raised on rank ")
        assert kept == [7, 7]  # nobody waited for another
        assert failed[1].startswith("ValueError: on purpose (raised on rank 1)")
        assert closed[1] == "execute needs the objects of start(cls, ...), which was not called or is shut down"


@pytest.mark.kills
def test_ctrl_c_stops_the_run_and_leaves_no_processes(tmp_path: Path, environment: dict[str, str]) -> None:
    folder = made_in(tmp_path)
    (folder / "script.py").write_text(
        "from mlx_runtime import Trainer\nfrom src import training\n\n"
        "if __name__ == '__main__':\n    trainer = Trainer(num_workers=2)\n    try:\n"
        "        trainer.run(training.endless, callbacks=[lambda found: print(found[1]['step'], flush=True)])\n"
        "    except KeyboardInterrupt:\n        print(trainer.latest_run.record['status'])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=folder,
        env=environment | {"MLX_TEST_MARK": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "0\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120)[0].endswith("STOPPED\n")
    assert [(folder / f"left_{rank}").exists() for rank in (0, 1)] == [True, True]  # they were not killed
    wait_for(lambda: not marked(tmp_path), 60)


@pytest.mark.pure
class TestBeforeARun:
    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"num_workers": (8, 4)}, UsageError, r"num_workers is \(8, 4\); .* or a range like \(4, 8\)"),
            ({"scaling_config": 2}, UsageError, r"Write Trainer\(num_workers=2, use_gpu=True\).run\(train_func, conf"),
            ({"backend": "json.loads"}, ConfigError, "cfg.backend=json.loads has no method setup, which every backend"),
            ({"cpu_per_worker": 2}, UsageError, "Did you mean 'cpus_per_worker'"),
        ],
    )
    def test_wrong_settings_are_refused(self, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
        with pytest.raises(error, match=text):
            Trainer(**arguments)

    def test_wrong_calls_are_refused(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.syspath_prepend(made_in(tmp_path))
        monkeypatch.chdir(tmp_path)
        monkeypatch.delitem(sys.modules, "src", raising=False)
        from src import training

        trainer = Trainer(num_workers=2)
        with pytest.raises(UsageError, match=r"^a Trainer has no fit\(\); write trainer.run\(train_func, config\)"):
            trainer.fit()
        with pytest.raises(UsageError, match=r"config is \[1\]; it takes a dict"):
            trainer.run(training.resumable, [1])  # type: ignore[arg-type]  # as a user may
        with pytest.raises(UsageError, match=r"two_arguments\(config, model\) takes other arguments than config"):
            trainer.run(training.two_arguments)
        with pytest.raises(UsageError, match=r"cfg.config.layers\[0\] has the key '_target_', which names an object"):
            trainer.run(training.resumable, {"layers": [{"_target_": "os.getcwd"}]})
        with pytest.raises(UsageError, match=r"workers of the engine local do not keep a Execution"):
            Trainer(engine="local").start(training.Execution)
        assert not (tmp_path / "runs").exists()

    def test_without_a_trainer_a_function_is_alone(self) -> None:
        report(loss=0.5)
        save_checkpoint(epoch=1)
        assert load_checkpoint() is None
        assert (world_rank(), world_size(), local_rank()) == (0, 1, 0)
        assert accelerate(model := torch.nn.Linear(2, 1)) is model
        assert model.weight.device == get_device()
        with pytest.raises(MlxError, match=r"report\(loss='low'\) is not a number"):
            report(loss="low")  # type: ignore[arg-type]
        with pytest.raises(MlxError, match=r"get_dataset_shard\(\) works in a function that trainer.run\(train_func"):
            get_dataset_shard()
        with (
            Topology(0, 1, torch.device("cpu")).entered(),
            pytest.raises(MlxError, match=r"report\(\) works inside a function that Trainer.run has called"),
        ):
            report(loss=0.5)


@pytest.mark.pure
@pytest.mark.parametrize("value", [{"a": [1, 2.0, {"c": "it's \\ x"}], "lr-1": None}, 1e-5, "a\nb", "true", "${x}"])
def test_an_override_sets_exactly_the_value(value: Any) -> None:
    (read,) = parse_overrides([override("cfg.config", value)])
    assert repr(read.value()) == repr(value)


KEEPING_NONE = """
import json, os, signal, sys
from pathlib import Path
from mlx_runtime import MlxError, Trainer, load_checkpoint, report, save_checkpoint


def train(config):
    start = (load_checkpoint() or {"epoch": -1})["epoch"] + 1
    for epoch in range(start, 4):
        report(loss=epoch)
        save_checkpoint(epoch=epoch)
        if epoch == 2 and start == 0 and config["kills"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if epoch == 2 and config["fails"]:
            raise ValueError("on purpose")
    return start


if __name__ == "__main__":
    trainer = Trainer(num_workers=1, keep_checkpoints=0, monitor="loss")

    def left():
        folder, run = Path(trainer.latest_checkpoint_dir), trainer.latest_run
        names = sorted(item.name for item in folder.iterdir()) if folder.exists() else []
        return [run.record["status"], names, trainer.latest_checkpoint, run.record["best"]]

    found = {"returned": trainer.run(train, {"kills": True, "fails": False}, show=False), "succeeded": left()}
    try:
        trainer.run(train, {"kills": False, "fails": True}, show=False)
    except MlxError:
        found["failed"] = left()
    found["resumed"] = trainer.run(train, {"kills": False, "fails": False}, resume="latest", show=False), left()
    print(json.dumps(found))
"""


@pytest.mark.kills
def test_a_run_that_has_succeeded_may_keep_no_checkpoint(python: Mlx, tmp_path: Path) -> None:
    """Until then, a replaced worker and a resumed run continue from the latest one."""
    (tmp_path / "script.py").write_text(KEEPING_NONE)
    done = python(tmp_path, "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    (start,) = found["returned"]
    assert start in (2, 3)  # the worker was killed while it stored the checkpoint of epoch 2
    none = ["SUCCEEDED", [], None, None]
    assert found["succeeded"] == none
    assert found["failed"][:3] == ["FAILED", ["epoch_0003"], {"epoch": 2}]
    assert found["resumed"] == [[3], none]

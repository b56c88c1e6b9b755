"""Listing, comparing, ranking and removing runs, from their stored files."""

import datetime
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import Mlx

from mlx_runtime.cli import mlx as mlx_command
from mlx_runtime.cli.verbs import xp
from mlx_runtime.companions.sweeps import listing as sweeps
from mlx_runtime.errors import UsageError
from mlx_runtime.runs import records, tables
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import RunFolder, claim_run, run_folder
from mlx_runtime.runs.queries import listing
from mlx_runtime.runs.queries import ranking as ranking
from mlx_runtime.runs.queries.lookup import resolve_run
from mlx_runtime.storage import leases

pytestmark = pytest.mark.process

Made = Callable[..., RunFolder]


@pytest.fixture(scope="module")
def trained(mlx: Mlx, bound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template's experiment with two runs: the second has another learning rate and a shorter training."""
    folder = Path(shutil.copytree(bound, tmp_path_factory.mktemp("trained") / "digits"))
    monitored = ("cfg.start_workers=0", "cfg.monitor=val/cross_entropy", "cfg.mode=min")
    for overrides in (["cfg.num_epochs=2"], ["cfg.num_epochs=1", "optimizers.adam.lr=1e-5"]):
        done = mlx(folder, "train", "run", *monitored, *overrides)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty storage of either kind, set as the storage of the test process."""
    monkeypatch.setenv("MLX_CACHE", str(tmp_path / "cache"))
    if request.param == "folder":
        root = str(tmp_path / "runs")
    else:
        root = request.getfixturevalue("s3").format(f"listing-{tmp_path.name}")
    monkeypatch.setenv("MLX_STORAGE", root)
    return root


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """`made("digits", status="FAILED", …)` creates a run with such a record, in the storage of the test process."""
    if "MLX_STORAGE" not in os.environ:
        monkeypatch.setenv("MLX_STORAGE", str(tmp_path / "runs"))

    def make(experiment: str = "digits", **fields: Any) -> RunFolder:
        folder = claim_run(os.environ["MLX_STORAGE"], experiment)
        folder.claim_attempt(1)
        records.Record(folder, **({"status": "SUCCEEDED"} | fields))
        return folder

    return make


def ago(seconds: float) -> str:
    then = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=seconds)
    return then.isoformat(timespec="seconds")


def saved(folder: RunFolder, epoch: int, **metrics: float) -> str:
    """Create the parts of a checkpoint that listings read."""
    checkpoint = CheckpointInfo(
        epoch, True, 10 * epoch, {name.replace("_", "/"): value for name, value in metrics.items()}
    )
    CheckpointStore(folder.checkpoints).save({}, checkpoint)
    return checkpoint.name


class TestLs:
    def test_real_runs_in_a_pipe(self, trained: Path, mlx: Mlx) -> None:
        done = mlx(trained, "xp", "ls")
        assert done.returncode == 0, done.stderr
        head, first, second = done.stdout.splitlines()
        assert head.split() == list(tables.COLUMNS)
        time = r"(\d+ (min|s) ?)+"
        for line, run, epochs in ((first, "run_001", "2/2"), (second, "run_002", "1/1")):
            wanted = (
                rf"digits +{run} +SUCCEEDED +{epochs} +val/cross_entropy +\d\.\d{{4}} +\d\.\d{{4}} +0 +{time} +{time}"
            )
            assert re.fullmatch(wanted, line), line
        assert head.index("status") == first.index("SUCCEEDED") == second.index("SUCCEEDED")

    def test_json_has_what_the_records_say(self, trained: Path, mlx: Mlx) -> None:
        first, second = json.loads(mlx(trained, "xp", "ls", "digits", "--json").stdout)
        record = json.loads((trained / "runs/digits/run_001/run.json").read_text())
        assert (first["status"], first["epoch"], first["epochs"], first["workers"]) == ("SUCCEEDED", 2, 2, 0)
        assert (first["monitor"], first["mode"]) == ("val/cross_entropy", "min")
        assert first["best"] == record["best"]["value"] < second["best"]
        assert first["metrics"] == record["metrics"]
        assert first["place"] == str(trained / "runs/digits/run_001")
        assert first["problem"] is None
        assert (first["config"]["cfg.num_epochs"], first["tags"]) == (2, [])

    def test_an_empty_storage_says_what_to_do(self, mlx: Mlx, tmp_path: Path) -> None:
        storage = str(tmp_path / "nothing")
        done = mlx(tmp_path, "xp", "ls", MLX_STORAGE=storage)
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr == f"there are no runs in {storage} yet; start one with: mlx train run\n"

    def test_what_is_not_there_is_told(self, trained: Path, mlx: Mlx) -> None:
        for arguments, message in [
            (["digit"], "error: no runs of 'digit' in .* Did you mean 'digits'?"),
            (["--sort", "val/acuracy"], "error: no run has recorded val/acuracy. Did you mean 'val/accuracy'?"),
            (["--status", "DONE"], "Invalid value for '--status': 'DONE' is not one of"),
        ]:
            done = mlx(trained, "xp", "ls", *arguments)
            assert (done.returncode, done.stdout) == (2, "")
            assert re.search(message, done.stderr), done.stderr
        done = mlx(trained, "xp", "ls", "--status", "failed")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", f"no run in {trained / 'runs'} is FAILED\n")

    def test_every_status(self, storage: str, made: Made) -> None:
        here, elsewhere = leases.this_process(), leases.this_process() | {"boot": "elsewhere"}
        for status in ("SUCCEEDED", "FAILED", "PRUNED", "STOPPED"):
            made(status=status)
        made(status="RUNNING", **here)
        made(status="RUNNING", **here | {"pid_started": "1"})
        made(status="PENDING", **elsewhere)
        found = listing.list_rows()
        wanted = ["SUCCEEDED", "FAILED", "PRUNED", "STOPPED", "RUNNING", "STALE", "PENDING"]
        assert [row.status for row in found] == wanted
        assert [row.folder.name for row in listing.list_rows(status="STALE")] == ["run_006"]
        assert {row.folder.location for row in found} == {
            f"{storage.partition('?')[0]}/digits/run_{number:03d}{''.join(storage.partition('?')[1:])}"
            for number in range(1, 8)
        }

    def test_runs_of_a_sweep_are_below_it(self, storage: str, made: Made) -> None:
        def trial(number: int, fold: int | None, best: float, **fields: Any) -> None:
            values = {"optimizers.adam.lr": f"1e-{number}"}
            sweep = {"name": "sweep_001", "trial": number, "fold": fold, "values": values}
            scores = {"monitor": "val/loss", "mode": "min", "best": {"epoch": 0, "value": best, "path": ""}}
            made(sweep=sweep, metrics={"val/loss": best + 1}, **scores | fields)

        trial(1, 0, 0.5)
        made()
        trial(1, 1, 0.3)
        trial(2, 0, 0.4, status="PRUNED")
        made(sweep={"name": "sweep_lr", "trial": 1})
        sweep = run_folder(storage, "digits", "sweep_001")
        sweep.path.mkdir(parents=True)
        best = {"trial": 1, "epoch": 0, "value": 0.4, "std": 0.1414}  # the mean of its folds
        records.Record(sweep, status="STOPPED", monitor="val/loss", mode="min", best=best)
        table = sweeps.grouped(listing.list_rows())
        assert [(line["run"], line["status"], line["epoch"], line["best"]) for line in table] == [
            ("sweep_001", "STOPPED", "2 trials", "0.4000 ± 0.1414"),
            ("  run_001", "SUCCEEDED", "-", "0.5000"),
            ("  run_003", "SUCCEEDED", "-", "0.3000"),
            ("  run_004", "PRUNED", "-", "0.4000"),
            ("run_002", "SUCCEEDED", "-", "-"),
            ("sweep_lr", "-", "1 trial", "-"),  # its folder is gone
            ("  run_005", "SUCCEEDED", "-", "-"),
        ]
        ranked = listing.list_rows(sort="val/loss")
        assert [row.folder.name for row in ranked] == ["run_003", "run_004", "run_001", "run_002", "run_005"]
        assert [line["run"] for line in sweeps.grouped(listing.list_rows(status="PRUNED"))] == [
            "sweep_001",
            "  run_004",
        ]
        [short, full] = [listing.list_rows("digits", sweep=name) for name in ("001", "sweep_001")]
        assert short == full
        table = sweeps.table(full)
        assert [[line[name] for name in ("run", "trial", "fold", "optimizers.adam.lr")] for line in table] == [
            ["run_001", "1", "1", "1e-1"],
            ["run_003", "1", "2", "1e-1"],
            ["run_004", "2", "1", "1e-2"],
        ]
        assert "fold" not in sweeps.table(listing.list_rows(sweep="lr"))[0]
        with pytest.raises(UsageError, match=r"no run in .* belongs to a sweep 'sweep_02'. Did you mean 'sweep_001'\?"):
            listing.list_rows(sweep="sweep_02")

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (None, "cannot read .*run_001/run.json"),
            (b"[1, 2]", "cannot read .*run.json: it is a list, not a mapping"),
            (b'{"status": "FAILED", "start": "yesterday"}', "run.json: start is 'yesterday', not a time with"),
        ],
    )
    def test_a_record_that_cannot_be_read_hides_no_other(
        self, made: Made, content: bytes | None, why: str, tmp_path: Path
    ) -> None:
        broken, _ = made(), made()
        broken.record.unlink() if content is None else broken.record.write_bytes(content)
        os.utime(broken.path, (0, 0))
        first, second = listing.list_rows()
        assert (first.status, second.status) == ("UNREADABLE", "SUCCEEDED")
        assert re.search(why, first.fields()["problem"]), first.problem
        assert first.cells()["status"] == "UNREADABLE"
        assert [row.folder.name for row in listing.list_rows(status="UNREADABLE")] == ["run_001"]
        listed = CliRunner().invoke(mlx_command, ["xp", "ls"])
        assert listed.stderr == f"note: {first.problem}; repair it, or remove the run with mlx xp rm --force\n"
        assert "UNREADABLE" in listed.stdout
        done = CliRunner().invoke(mlx_command, ["xp", "rm", "digits/run_001", "-y", "--force"])
        assert (done.exit_code, broken.path.exists()) == (0, False), done.stderr

    def test_order_is_that_of_the_monitored_metric(self, made: Made) -> None:
        def run(mode: str, best: float | None, last: float | None) -> None:
            fields = {"best": {"epoch": 0, "value": best, "path": ""}} if best is not None else {}
            made(mode, monitor="val/f1", mode=mode, metrics={"val/f1": last, "loss": last}, **fields)

        for mode in ("max", "min"):
            run(mode, 0.5, 0.1)
            run(mode, 0.9, 0.2)
            run(mode, None, None)
            run(mode, None, 0.7)

        def order(name: str, metric: str, mode: str | None = None) -> list[int]:
            return [int(row.folder.name[-1]) for row in listing.list_rows(name, sort=metric, mode=mode)]

        assert order("max", "val/f1") == [2, 4, 1, 3]
        assert order("min", "val/f1") == [1, 4, 2, 3]
        assert order("min", "val/f1", "max") == [2, 4, 1, 3]
        assert order("max", "loss") == [1, 2, 4, 3]  # no run defines which is best: smallest first
        assert order("max", "loss", "max") == [4, 2, 1, 3]

    def test_age_is_that_of_the_first_attempt_and_work_that_of_all(self, made: Made) -> None:
        first = {"start": ago(10_000), "end": ago(9_000)}
        made(start=ago(100), end=ago(40), attempts=[first, {"start": ago(5_000), "end": None}])
        made(status="RUNNING", start=ago(100), **leases.this_process())
        done, running = listing.list_rows()
        assert done.age_s == pytest.approx(10_000, abs=60)
        assert done.duration_s == pytest.approx(1_060, abs=60)
        assert re.fullmatch(r"1[678] min( \d+ s)?", done.cells()["duration"])
        assert running.duration_s == pytest.approx(100, abs=60)


class TestLogs:
    LAST = "import sys, time; sys.stdin.readline(); time.sleep(0.3); open(sys.argv[1], 'a').write('four\\n')"
    """Program of a driver that prints one more line, some time after it has recorded the end."""

    @pytest.fixture
    def driver(self, tmp_path: Path) -> Iterator[subprocess.Popen]:
        command = [sys.executable, "-c", self.LAST, str(tmp_path / "runs/digits/run_001/logs/driver.log")]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as driver:
            yield driver

    @pytest.fixture
    def run(self, made: Made, driver: subprocess.Popen) -> RunFolder:
        """A running run that has printed one line."""
        process = {"pid": driver.pid, "pid_started": leases.start_time_of(driver.pid)}
        folder = made(status="RUNNING", **leases.this_process() | process)
        (folder.path / "logs").mkdir()
        (folder.path / "logs/driver.log").write_text("one\n")
        return folder

    @pytest.mark.parametrize(("status", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("STOPPED", 143)])
    def test_a_living_run_is_followed_to_its_end(
        self, run: RunFolder, driver: subprocess.Popen, monkeypatch: pytest.MonkeyPatch, status: str, code: int
    ) -> None:
        monkeypatch.setattr(xp, "FOLLOW_S", 0.01)
        told: list[str] = []

        def write(text: str) -> None:
            told.append(text)
            if len(told) < 3:
                with (run.path / "logs/driver.log").open("a") as log:
                    log.write(["two\n", "three\n"][len(told) - 1])  # the last line after the end is recorded
            if len(told) == 1:
                records.Record(run, records.load_record(run)).finish(status)
            if len(told) == 3:
                driver.kill() if status != "SUCCEEDED" else driver.stdin and os.write(driver.stdin.fileno(), b"\n")

        assert xp.logs(resolve_run("digits", "1"), write) == code
        assert told == ["one\n", "two\n", "three\n", *(["four\n"] if status == "SUCCEEDED" else [])]
        for follow in (None, True):  # it has ended, so there is nothing to wait for
            assert xp.logs(resolve_run("digits", "1"), told.append, follow=follow) == code
        assert xp.logs(resolve_run("digits", "1"), told.append, follow=False) == 0

    @pytest.mark.parametrize(("status", "code"), [("PRUNED", 0), ("STALE", 1), ("FAILED", 1)])
    def test_the_code_of_a_run_that_has_ended(self, made: Made, status: str, code: int) -> None:
        """`mlx train launch && mlx xp logs` fails in CI if the run has failed."""
        folder = made(status=status, heartbeat=ago(3600)) if status != "STALE" else made(status="RUNNING")
        (folder.path / "logs").mkdir()
        (folder.path / "logs/driver.log").write_text("one\n")
        if status == "STALE":
            record = json.loads(folder.record.read_text())
            folder.record.write_text(json.dumps(record | {"heartbeat": ago(3600)}))
        done = CliRunner().invoke(mlx_command, ["xp", "logs", "digits"])
        lost = "the driver of digits/run_001 was killed, or its machine was lost"
        told = f"{lost}. Resume: mlx train run --resume=digits/run_001\n" if status == "STALE" else ""
        assert (done.exit_code, done.stdout, done.stderr) == (code, "one\n", told)


class TestDiff:
    def test_only_what_differs(self, trained: Path, mlx: Mlx) -> None:
        done = mlx(trained, "xp", "diff", "digits/run_001", "2")
        assert done.returncode == 0, done.stderr
        lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
        assert lines["digits/run_001"] == ["digits/run_002"]
        assert lines["cfg.num_epochs"] == ["2", "1"]
        assert lines["optimizers.adam.lr"] == ["0.003", "1e-05"]
        assert "val/accuracy" in lines
        assert not {"cfg.seed", "seed", "status", "optimizers.adam.eps"} & set(lines)


class TestBest:
    def test_real_runs(self, trained: Path, mlx: Mlx) -> None:
        done = mlx(trained, "xp", "best", "digits")
        assert done.returncode == 0, done.stderr
        best = min(json.loads(line)["val/cross_entropy"] for line in _reports(trained / "runs/digits/run_001"))
        folder = trained / "runs/digits/run_001/checkpoints/epoch_0002"
        assert done.stdout.splitlines() == [
            f"val/cross_entropy  {best:.4f} (min)",
            "run                digits/run_001",
            f"checkpoint         {folder} (epoch 2)",
        ]
        assert (folder / "state.pt").is_file()

    def test_the_best_checkpoint_of_one_run(self, storage: str, made: Made) -> None:
        first, fold = made(monitor="f1", mode="max"), made(monitor="f1", mode="max", fold={"fold": 0})
        saved(first, 0, f1=0.9, loss=0.5)
        saved(fold, 0, f1=0.8, loss=0.5)
        best = saved(fold, 1, f1=0.85, loss=0.7)
        found = ranking.best("digits", run=fold)
        assert (found["run"], found["epoch"], found["value"]) == ("run_002", 2, 0.85)
        assert best in found["checkpoint"]
        with pytest.raises(UsageError, match="test/f1 is not recorded in digits/run_001"):
            ranking.best("digits", "test/f1", "max", run=first)

    def test_the_best_checkpoint_of_all_runs(self, storage: str, made: Made) -> None:
        first, second = made(monitor="f1", mode="max"), made(monitor="f1", mode="max")
        saved(first, 0, f1=0.9, loss=0.5)
        best = saved(first, 1, f1=0.95, loss=0.7)
        saved(second, 0, f1=0.8, loss=float("nan"))
        later = saved(second, 3, f1=0.7, loss=0.5)
        saved(second, 4, loss=float("nan"))
        found = ranking.best("digits")
        assert (found["run"], found["epoch"], found["value"], found["mode"]) == ("run_001", 2, 0.95, "max")
        assert found["checkpoint"] == CheckpointStore(first.checkpoints).path(
            CheckpointStore(first.checkpoints).all()[1]
        )
        assert best in found["checkpoint"]
        assert ranking.best("digits", mode="min")["value"] == 0.7
        found = ranking.best("digits", "loss", "min")  # the later of equal values; never NaN
        assert (found["run"], later in found["checkpoint"]) == ("run_002", True)

    def test_a_misspelled_monitor_hides_no_other_run(self, storage: str, made: Made) -> None:
        saved(made(monitor="f1", mode="max", metrics={"f1": 0.9}), 0, f1=0.9)
        made(monitor="f11", mode="max", metrics={"f1": 0.8})
        notes: list[str] = []
        found = ranking.best("digits", warn=notes.append)
        assert (found["run"], found["value"]) == ("run_001", 0.9)
        assert notes == ["the runs of digits monitor f1 and f11; this is by f1, see --metric"]

    def test_folds_do_not_compare_with_other_runs(self, storage: str, made: Made) -> None:
        fold = made(monitor="f1", mode="max", fold={"fold": 0}, sweep={"name": "sweep_001", "trial": 1, "fold": 0})
        saved(fold, 0, f1=1.0)
        with pytest.raises(
            UsageError, match=r"f1 is recorded in no other run of digits, and folds .* mlx xp best digits sweep_001"
        ):
            ranking.best("digits")
        saved(made(monitor="f1", mode="max"), 0, f1=0.9)
        notes: list[str] = []
        assert ranking.best("digits", warn=notes.append)["value"] == 0.9
        assert notes == ["folds of a cross-validation are not compared; see: mlx xp best digits sweep_001"]

    def test_a_number_of_the_end_comes_with_the_latest_checkpoint(self, trained: Path, mlx: Mlx) -> None:
        done = mlx(trained, "xp", "best", "digits", "--metric", "test/f1", "--mode", "max", "--json")
        found = json.loads(done.stdout)
        record = json.loads((trained / "runs/digits/run_001/run.json").read_text())
        assert found == {
            "metric": "test/f1",
            "mode": "max",
            "experiment": "digits",
            "run": "run_001",
            "value": record["metrics"]["test/f1"],
            "epoch": 2,
            "step": None,
            "checkpoint": record["latest"]["path"],
        }

    def test_what_nobody_knows_is_asked_for(self, made: Made) -> None:
        made(monitor="f1", mode="max", metrics={"f1": 0.5, "val/loss": 0.1})
        made("plain", metrics={"loss": 1.0})
        made("nan", monitor="loss", metrics={"loss": float("nan")}, best={"epoch": 0, "value": math.inf, "path": "x"})
        for arguments, message in [
            (("nan",), "no value of loss in the runs of nan is finite"),
            (("digits", "val/loss"), "val/loss is not monitored in the runs of digits; pass --mode"),
            (("digits", "val/los", "max"), "val/los is not recorded in the runs of digits. Did you mean 'val/loss'?"),
            (("plain",), "cfg.monitor is not set in the runs of plain; pass --metric. Available: loss."),
            (("digit",), "no runs of 'digit'"),
        ]:
            with pytest.raises(UsageError, match=message.replace("?", r"\?")):
                ranking.best(*arguments)


def _reports(run: Path) -> list[str]:
    return [line for line in (run / "metrics.jsonl").read_text().splitlines() if "val/cross_entropy" in line]


class TestRm:
    def test_it_asks_and_removes_one_run(self, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = Path(shutil.copytree(trained / "runs", tmp_path / "runs"))
        monkeypatch.setenv("MLX_STORAGE", str(folder))
        run = folder / "digits/run_002"
        size = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
        done = CliRunner().invoke(mlx_command, ["xp", "rm", "digits", "2"], input="n\n")
        assert (done.exit_code, run.is_dir()) == (1, True)
        asked = rf"remove digits/run_002, \d+ files, {size / 1e3:,.1f} kB, in {run}\? \[y/N\]: n\n"
        assert re.match(asked, done.output), done.output
        done = CliRunner().invoke(mlx_command, ["xp", "rm", "digits", "2"], input="y\n")
        assert (done.exit_code, run.exists()) == (0, False)
        assert "removed digits/run_002, " in done.output
        assert [path.name for path in (folder / "digits").iterdir()] == ["run_001"]

    def test_the_errors_of_failed_runs_are_listed(self, made: Made) -> None:
        made(status="FAILED", error="ValueError: no\nat x.py")
        listed = CliRunner().invoke(mlx_command, ["xp", "ls", "--status", "failed"])
        assert listed.stderr.splitlines()[0] == "digits/run_001: ValueError: no"

    def test_all_of_it_and_nothing_else(self, storage: str, made: Made, tmp_path: Path) -> None:
        first, second, other = made(), made(), made("other")
        for folder in (first, second):
            saved(folder, 0)
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "data").write_text("kept")
        if second.uri is None:
            (second.path / "data").symlink_to(outside)
        xp.remove(resolve_run("digits", "run_002"))
        assert not second.path.exists()
        assert [row.folder.location for row in listing.list_rows()] == [first.location, other.location]
        assert CheckpointStore(first.checkpoints).all()
        assert CheckpointStore(second.checkpoints).all() == []
        assert (outside / "data").read_text() == "kept"
        assert first.path.exists()

    def test_a_living_run_is_refused(self, storage: str, made: Made, mlx: Mlx, tmp_path: Path) -> None:
        folder = made(status="RUNNING", **leases.this_process())
        done = mlx(tmp_path, "xp", "rm", "digits", "1", "-y", MLX_STORAGE=storage)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "error: digits run_001 is RUNNING; stop it first: mlx xp stop digits run_001\n"
        assert records.load_record(folder)["status"] == "RUNNING"

    def test_of_one_without_a_record_it_says_so(self, made: Made, mlx: Mlx, tmp_path: Path) -> None:
        folder = made()
        folder.record.unlink()
        done = mlx(tmp_path, "xp", "rm", "digits", "latest", "-y", MLX_STORAGE=folder.root)
        assert (done.returncode, folder.path.exists()) == (2, True)
        assert done.stderr.endswith("it may still be running. To remove it anyway, add --force\n")
        done = mlx(tmp_path, "xp", "rm", "digits", "latest", "-y", "--force", MLX_STORAGE=folder.root)
        assert (done.returncode, folder.path.exists()) == (0, False)


@pytest.mark.pure
def test_a_long_name_does_not_widen_a_table() -> None:
    stream = io.StringIO()
    tables.print_table([{"metric": "x" * 300, "z" * 300: "0.5"}, {"metric": "y", "z" * 300: "1"}], stream)
    (_, title), (name, best), _ = (line.split() for line in stream.getvalue().splitlines())
    assert (len(title), title[-1], len(name), name[-1], best) == (100, "…", 100, "…", "0.5")

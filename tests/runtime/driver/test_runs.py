"""Complete runs as started by a user, with real Ray and real workers: their output and their files."""

import json
import os
import pty
import re
import select
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import MAIN, Mlx, edit, unbound
from faults import differences, record
from forkserver import Commands

pytestmark = pytest.mark.process

Make = Callable[[str], Path]

HERE = ("cfg.start_workers=0",)

TWO = ("cfg.start_workers=2", "cfg.num_epochs=4", "cfg.monitor=mine", "cfg.mode=min", "cfg.keep_checkpoints=2")
"""Overrides of the run with two workers: it keeps the first two and the last of four epochs."""


def reports(folder: Path, run: str = "run_001") -> list[dict]:
    lines = next(folder.glob(f"runs/*/{run}/metrics.jsonl")).read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def run(mlx: Mlx, baked: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of the probe with two DDP workers: its folder and its output."""
    folder = unbound("probe", baked, tmp_path_factory.mktemp("two"))
    done = mlx(folder, "train", "run", *TWO)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # no output of Ray
    return folder, done.stdout


@pytest.fixture(scope="module")
def seen(run: tuple[Path, str]) -> list[dict]:
    """The notes of each rank of that run."""
    return [json.loads((run[0] / "seen" / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.local
class TestTwoWorkers:
    """Tests of that run."""

    def test_ddp_keeps_weights_alike(self, seen: list[dict]) -> None:
        assert seen[0]["weights"] == seen[1]["weights"]

    def test_a_model_without_an_optimizer_stays_as_it_is(self, seen: list[dict]) -> None:
        assert seen[0]["teacher_unchanged"]

    def test_each_dataset_is_made_once_and_only_where_it_is_read(self, seen: list[dict]) -> None:
        assert [rank["made"] for rank in seen] == [["Rows", "TestRows"]] * 2

    def test_ranks_draw_different_numbers_with_as_many_threads_as_they_have_cpus(self, seen: list[dict]) -> None:
        assert seen[0]["random"] != seen[1]["random"]
        assert seen[0]["threads"] == seen[1]["threads"] == 1

    def test_the_run_folder_is_as_documented(self, run: tuple[Path, str]) -> None:
        folder = run[0] / "runs" / "probe" / "run_001"
        names = {re.sub(r"(tfevents)\..*", r"\1", path.name) for path in folder.iterdir()}
        files = {"run.json", "conf.yaml", "code.zip", "metrics.jsonl", "events.out.tfevents"}
        assert names == files | {"checkpoints", "logs", ".attempt-001"}
        assert {path.name for path in (folder / "logs").iterdir()} == {"driver.log", "rank_0.log", "rank_1.log"}
        assert {path.name for path in (folder / "checkpoints").glob("epoch_*")} == {
            "epoch_0001",
            "epoch_0002",
            "epoch_0004",
        }

    def test_the_record_tells_the_run(self, run: tuple[Path, str]) -> None:
        fields = record(run[0])
        assert fields["status"] == "SUCCEEDED"
        assert fields["workers"] == 2
        assert fields["overrides"] == list(TWO)
        assert fields["packages"]["torch"] == torch.__version__
        assert (fields["best"]["epoch"], fields["latest"]["epoch"]) == (0, 3)
        assert shlex.split(fields["command"])[-7:] == ["train", "run", *TWO]
        assert fields["start"] <= fields["heartbeat"] <= fields["end"]

    def test_a_checkpoint_is_plain_data_without_ddp_prefixes(self, run: tuple[Path, str]) -> None:
        path = run[0] / "runs" / "probe" / "run_001" / "checkpoints" / "epoch_0002" / "state.pt"
        state = torch.load(path, weights_only=True)
        assert set(state["models"]) == {"first", "second", "third", "teacher"}
        assert list(state["models"]["first"]) == ["layers.0.weight", "layers.0.bias"]
        assert state["tools"]["counter"] == {"count": 2, "history": []}
        assert (state["epoch"], state["global_step"]) == (1, 14)

    def test_what_is_printed(self, run: tuple[Path, str]) -> None:
        lines = run[1].splitlines()
        starts = [
            "loading ",
            "no src/conf.yaml",
            "wrote src/conf.yaml",
            "run ",
            "folder ",
            "workers ",
            "device ",
            "train ",
        ]
        assert [line.startswith(start) for line, start in zip(lines, starts, strict=False)] == [True] * len(starts)
        assert lines[3] == "run       probe run_001"
        titles = next(index for index, line in enumerate(lines) if line.startswith("epoch "))
        assert lines[titles].split()[:4] == ["epoch", "mine", "mse", "mean"]
        assert re.match(r"  1/4 .* 26\.0000 .* 15\.0000 .* [\d.]+ s", lines[titles + 1]), lines[titles + 1]
        assert lines[titles + 2].startswith("  2/4 ")
        assert lines[-1].endswith("mlx xp board probe run_001")


@pytest.mark.local
def test_the_example_of_the_design_runs_as_written_on_more_workers_than_cores(
    mlx: Mlx, baked: Path, tmp_path: Path
) -> None:
    folder = unbound("spec", baked, tmp_path)
    done = mlx(folder, "train", "run", f"cfg.start_workers={max(3, (os.cpu_count() or 1) + 1)}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("train/loss2 is skipped: it was not updated") == 1
    assert "notice   tools.early_stoppage.patience has no type, so its value cannot be checked\n" in done.stdout
    assert record(folder)["status"] == "SUCCEEDED"
    assert set(record(folder)["metrics"]) == {"train/loss1", "train/mae"}


def test_a_restored_run_ends_as_the_uninterrupted_one(mlx: Mlx, experiment: Make) -> None:
    folder = experiment("probe")
    assert mlx(folder, "train", "run", *HERE, "cfg.num_epochs=3").returncode == 0
    assert mlx(folder, "train", "run", *HERE, "cfg.num_epochs=1").returncode == 0
    checkpoint = folder / "runs" / "probe" / "run_002" / "checkpoints" / "epoch_0001"
    done = mlx(folder, "train", "run", *HERE, "cfg.num_epochs=3", f"cfg.restore_checkpoint_path={checkpoint}")
    assert done.returncode == 0, done.stderr
    assert f"restored  {checkpoint} (epoch 1, step 14)" in done.stdout
    whole, resumed = (
        torch.load(folder / "runs" / "probe" / run / "checkpoints" / "epoch_0003" / "state.pt", weights_only=True)
        for run in ("run_001", "run_003")
    )
    assert resumed.pop("config") != whole.pop("config")  # it names the checkpoint
    assert resumed.pop("tracking") != whole.pop("tracking")  # of a new run
    assert differences(whole, resumed) == []
    seen = json.loads((folder / "seen" / "rank_0.json").read_text())
    assert (seen["started"], seen["counter"]) == (1, 3)


@pytest.mark.local
def test_what_a_worker_raises_is_shown_once_with_its_rank_and_the_users_frames(mlx: Mlx, experiment: Make) -> None:
    folder = experiment("probe")
    done = mlx(folder, "train", "run", "cfg.start_workers=2", "cfg.fault=rank1")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "error: ValueError: only this rank (raised on rank 1)"
    assert re.fullmatch(r"  src/experiment.py:\d+ in worker_loop", lines[1])
    assert re.fullmatch(r"  src/experiment.py:\d+ in read", lines[3])
    assert lines[4].strip() == 'raise ValueError("only this rank")'
    assert lines[5:] == []  # there is no checkpoint yet to resume from
    assert record(folder)["status"] == "FAILED"
    assert "only this rank" in record(folder)["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["cfg.loader=fast"], "cfg.loader is 'fast'; write auto, or workers=N for"),
        (["cfg.storage_path=main.py"], "cannot write runs to "),
        (
            ["optimizers.adam.lr=nan"],
            "optimizers.adam: torch.optim.adam.Adam cannot be built: ValueError: Invalid learning",
        ),
    ],
)
def test_a_wrong_setting_ends_before_anything_starts(
    mlx: Mlx, experiment: Make, options: list[str], message: str
) -> None:
    folder = experiment("probe")
    done = mlx(folder, "train", "run", *HERE, *options)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) == 1
    assert not list(folder.glob("runs/*/*"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return self.values[index]", "return self.values[index + 99]", "IndexError: index "),
        (
            "import mlx_runtime\n",
            "import mlx_runtimes\n",
            "src/experiment.py:13: src.experiment cannot be imported: ModuleNotFoundError",
        ),
    ],
)
def test_wrong_code_is_told_in_one_clear_message(mlx: Mlx, experiment: Make, old: str, new: str, message: str) -> None:
    folder = experiment("probe")
    edit(folder / "src" / "experiment.py", old, new)
    done = mlx(folder, "train", "run", *HERE)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {message}")
    assert "Traceback" not in done.stderr


@pytest.mark.local
def test_a_model_that_each_worker_trains_on_its_own_is_named(mlx: Mlx, experiment: Make) -> None:
    folder = experiment("probe")
    own = "self.tools.counter.shadow = [next(self.models.second.parameters()).detach()]"
    edit(folder / "src" / "experiment.py", "self.models.second = prepare_model(self.models.second)\n", f"{own}\n")
    done = mlx(folder, "train", "run", "cfg.start_workers=2", "cfg.num_epochs=2")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "between workers" in line]
    assert len(lines) == 2
    assert "self.models.second = prepare_model(self.models.second)" in lines[0]
    assert "self.tools.counter differs between workers" in lines[1]


@pytest.mark.local
def test_rows_that_the_workers_do_not_share_are_named(mlx: Mlx, experiment: Make) -> None:
    folder = experiment("probe")
    source = folder / "src" / "experiment.py"
    own = """
        for rows in torch.utils.data.DataLoader(torch.ones(8), batch_size=4):
            self.models.third(rows[:, None]).sum().backward()
            self.optimizers.sgd.step()
        train, test, _ = self"""
    edit(source, "\n        train, test, _ = self", own)
    edit(source, "return len(self.values)", 'return len(self.values) - 10 * int(__import__("os").environ["RANK"])')
    done = mlx(folder, "train", "run", "cfg.start_workers=2")
    assert done.returncode == 1
    assert done.stdout.count("every worker trains on all rows of its own DataLoader; give each worker a part") == 1
    message = "error: datasets.train has 53 rows on rank 0, but 43 on rank 1; its __len__ must be the same on every"
    assert done.stderr.startswith(message)


def test_a_run_that_monitors_another_metric_forgets_the_best_value_of_the_former(mlx: Mlx, digits: Path) -> None:
    folder = digits
    done = mlx(folder, "train", "run", *HERE, "cfg.num_epochs=2", "cfg.monitor=train/cross_entropy", "cfg.mode=min")
    assert done.returncode == 0, done.stderr
    assert record(folder)["best"]["value"] == record(folder)["metrics"]["train/cross_entropy"]
    other = ("cfg.num_epochs=3", "cfg.monitor=val/accuracy", "cfg.mode=min")
    done = mlx(folder, "train", "run", "--resume=run_001", *HERE, *other)
    values = [row["val/accuracy"] for row in reports(folder) if "val/accuracy" in row]
    assert record(folder)["best"]["value"] == min(values)
    assert done.stdout.count("cfg.mode=min takes the worst val/accuracy for the best") == 1


def test_debug_shows_the_traceback(mlx: Mlx, experiment: Make) -> None:
    done = mlx(experiment("probe"), "train", "run", "--debug", *HERE, "cfg.fault=early")
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr


def test_outside_an_experiment(mlx: Mlx, tmp_path: Path) -> None:
    for arguments in (("train", "run"), ("train", "bind")):
        done = mlx(tmp_path, *arguments)
        assert done.returncode == 2
        assert done.stderr == (
            f"error: {tmp_path} is not an experiment: it has no src/experiment.py. "
            "Change into one, or make one with: mlx train new NAME\n"
        )


def test_a_disk_that_fills_up_while_training(python: Mlx, experiment: Make) -> None:
    """Files of more than 2 MB cannot be written, and the checkpoint is larger."""
    folder = experiment("probe")
    (folder / "src" / "conf.yaml").unlink()
    edit(folder / "src" / "experiment.py", "linear(3)", "linear(400_000)")
    (folder / "script.py").write_text(
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))\n"
        f"{MAIN}"
    )
    done = python(folder, "script.py", "train", "run", *HERE)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot write a checkpoint to {folder}/runs/probe/run_001/checkpoints: ")
    assert "File too large" in done.stderr
    cure = "Once the storage can be written again, resume: mlx train run --resume=run_001"
    assert done.stderr.splitlines()[1:] == [cure]
    assert record(folder)["status"] == "FAILED"
    assert list(folder.glob("runs/probe/run_001/checkpoints/*")) == []


def test_a_terminal_gets_a_bar(commands: Commands, environment: dict[str, str], experiment: Make) -> None:
    """On a pseudo-terminal the current stage is a progress bar, and finished epochs are lines."""
    folder = experiment("probe")
    screen, terminal = pty.openpty()
    code = f"import os\nfor number in range(3): os.dup2(os.open({os.ttyname(terminal)!r}, os.O_RDWR), number)\n{MAIN}"
    settings = environment | {"TERM": "xterm-256color", "COLUMNS": "120"}
    process = commands.start(folder, ["train", "run", *HERE, "datasets.train.rows=1000"], settings, code)
    read = b""
    while select.select([screen], [], [], 0.1)[0] or process.poll() is None:
        if select.select([screen], [], [], 0)[0]:
            read += os.read(screen, 65536)
    os.close(screen)
    os.close(terminal)
    shown = read.decode()
    assert process.returncode == 0, shown
    assert re.search(r"epoch 1 train .*━", shown)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
    assert re.search(r"epoch +[^\n]*mse .*  1/2 +\d.*  2/2 +\d", text, re.DOTALL)
    assert "\x1b[1mepoch 1 train" not in shown  # titles are bold, the bar next to them is not


def test_a_batch_of_one_row_is_named_if_its_step_fails(mlx: Mlx, experiment: Make) -> None:
    folder = experiment("probe")
    edit(folder / "src" / "experiment.py", "nn.Sequential(layer, act)", "nn.Sequential(nn.BatchNorm1d(1), layer, act)")
    done = mlx(folder, "train", "run", *HERE, "datasets.train.rows=5", "datasets.train.batch_size=2")
    assert done.returncode == 1
    message = "in step 3 of datasets.train, which has one row; drop_last leaves it out"
    assert done.stderr.splitlines()[0].endswith(f"({message}) (raised on rank 0)"), done.stderr

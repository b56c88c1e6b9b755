"""Overrides of a resumed run: permitted changes, and their effects."""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Mlx, edit
from faults import reports, run_of
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as schedules

import mlx_runtime
from mlx_runtime.config.composition import Config
from mlx_runtime.errors import ConfigError
from mlx_runtime.loop.resuming import (
    changes,
    changes_since,
    refusals,
    set_group_values,
    with_settings,
)
from mlx_runtime.runs.checkpoints.groups import load_into, state_of
from mlx_runtime.runs.tables import format_duration
from mlx_runtime.storage.redaction import HIDDEN

pytestmark = pytest.mark.pure

HERE = __name__


class Stopper:
    """`delta` is stored, `patience` too, but `_double` depends on it, and `left` is state with its initial value."""

    def __init__(self, patience: int = 5, names: tuple[str, ...] = (), counts: int = 3, delta: float = 0.0):
        self.patience, self.names, self._double, self.delta = patience, names, 2 * patience, delta
        self.left, self.best = counts, float("inf")


class Saving:
    """Has a state_dict."""

    def __init__(self, decay: float = 0.5):
        self.decay, self.shadow = decay, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.decay, self.shadow = state["decay"], state["shadow"]


@dataclass
class Settings(mlx_runtime.TrainConfig):
    num_epochs: int = 3
    mine: int = 1
    pace: float = field(default=0.0, metadata={"resumable": True})


def node(cls: type, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{HERE}.{cls.__name__}", **arguments}


def test_changes_from_the_run_of_a_checkpoint(tmp_path: Path) -> None:
    """Its number of epochs counts, unlike its name, its own checkpoint, and secrets."""
    then = {"name": "old", "num_epochs": 3, "restore_checkpoint_path": None, "monitor": HIDDEN}
    now = {"name": "new", "num_epochs": 5, "restore_checkpoint_path": "/old", "monitor": "val/loss"}
    tree = {"cfg": node(Settings, **now), "optimizers": {"adam": {"lr": 0.2}}}
    before = {"cfg": node(Settings, **then), "optimizers": {"adam": {"lr": 0.1}}}
    found = changes_since(before, Config(tree, tree, mlx_runtime.TrainConfig()))
    assert [str(change) for change in found] == ["cfg.num_epochs: 3 → 5", "optimizers.adam.lr: 0.1 → 0.2"]


class TestChanges:
    @pytest.mark.parametrize(
        ("before", "after", "refused"),
        [
            ({"models": {"net": {"width": 1}}}, {"models": {"net": {"width": 2}}}, True),
            ({"tools": {"x": {"a": 1}}}, {"tools": {"x": {"a": 2}}}, False),
            ({"tools": {"x": node(Stopper)}}, {"tools": {"x": node(Saving)}}, True),
            ({"optimizers": {"adam": {"lr": 1}}}, {"optimizers": {"adam": {"lr": 0.5}}}, False),
            ({"optimizers": {"adam": {"betas": [0.9, 0.99]}}}, {"optimizers": {"adam": {"betas": [0.8, 0.9]}}}, False),
            ({"optimizers": {"adam": {"amsgrad": False}}}, {"optimizers": {"adam": {"amsgrad": True}}}, True),
            ({"cfg": {"num_epochs": 1}}, {"cfg": {"num_epochs": 2}}, False),
            ({"cfg": {"seed": 1}}, {"cfg": {"seed": 2}}, True),
            ({"cfg": {"mine": 1}}, {"cfg": {"mine": 2}}, True),
            ({"cfg": {"pace": 1}}, {"cfg": {"pace": 2}}, False),
        ],
    )
    def test_what_is_refused(self, before: dict, after: dict, refused: bool) -> None:
        found = changes(before, after)
        assert found
        assert bool(refusals(found, Settings)) == refused


def trained(
    schedule: Any, steps: int, lr: float, make: Any = SGD, **options: Any
) -> tuple[Optimizer, Any, list[float]]:
    optimizer = make([nn.Parameter(torch.ones(2))], lr=lr, **options)
    made = schedule(optimizer) if schedule else None
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
        optimizer.step()
        if made is not None:
            made.step()
    return optimizer, made, rates


SCHEDULES = {
    "none": None,
    "CosineAnnealingLR": lambda item: schedules.CosineAnnealingLR(item, 20),
    "SequentialLR": lambda item: schedules.SequentialLR(
        item, [schedules.ConstantLR(item, total_iters=3), schedules.ExponentialLR(item, 0.9)], [4]
    ),
}


class TestGroupValues:
    @pytest.mark.parametrize("name", SCHEDULES)
    def test_a_changed_rate_continues_as_if_it_had_been_so_from_the_start(self, name: str) -> None:
        """With schedules created after the restore, as in `worker_loop`."""
        warnings.filterwarnings("ignore", module="torch.optim")
        schedule = SCHEDULES[name]
        _, _, wanted = trained(schedule, 12, 0.01)
        optimizer, made, _ = trained(schedule, 5, 0.1)
        saved = [state_of(SimpleNamespace(x=item))[0] for item in (optimizer, made) if item is not None]
        fresh, later, _ = trained(schedule, 0, 0.01)
        for item, state in zip((fresh, later), saved, strict=False):
            load_into(SimpleNamespace(x=item), state, "own")
        set_group_values({"sgd": fresh}, [later], {"sgd": {"lr": 0.1}}, {"sgd": {"lr": 0.01}})
        rates = []
        for _ in range(7):
            rates.append(fresh.param_groups[0]["lr"])
            fresh.step()
            if later is not None:
                later.step()
        assert rates == pytest.approx(wanted[5:])

    def test_other_numbers_are_set_too(self) -> None:
        optimizer, _, _ = trained(None, 2, 0.1, Adam)
        then = {"adam": {"lr": 0.1, "betas": [0.9, 0.999], "weight_decay": 0}}
        set_group_values({"adam": optimizer}, [], then, {"adam": {"lr": 0.1, "betas": [0.5, 0.9], "weight_decay": 0.1}})
        group = optimizer.param_groups[0]
        assert (group["lr"], group["betas"], group["weight_decay"]) == (0.1, (0.5, 0.9), 0.1)
        optimizer.step()

    @pytest.mark.parametrize(
        ("make", "then", "now"),
        [
            (Adam, {"amsgrad": False}, {"amsgrad": True}),
            (Adam, {"betas": [0.1, 0.2]}, {"betas": [0.3, 0.4]}),  # the loop has changed them
        ],
    )
    def test_what_cannot_be_set_is_an_error(self, make: Any, then: dict, now: dict) -> None:
        optimizer, _, _ = trained(None, 1, 0.1, make)
        with pytest.raises(ConfigError, match=f"optimizers.x.{next(iter(then))}"):
            set_group_values({"x": optimizer}, [], {"x": then}, {"x": now})


class TestTools:
    def saved(self, **changed: Any) -> dict[str, Any]:
        return state_of(SimpleNamespace(x=Stopper()))[0]["x"] | changed

    def test_an_argument_stored_under_its_own_name_is_that_of_the_config(self) -> None:
        saved = self.saved(best=0.1, left=1)
        assert with_settings(saved, node(Stopper), node(Stopper, delta=0.5), "tools.x") == saved | {"delta": 0.5}

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"patience": 9}, "tools.x.patience: 5 → 9 cannot change on resume: the tool does not store it"),
            ({"delta": 9.0}, "tools.x.delta: 0.0 → 9.0 cannot change on resume: the tool does not store it"),
        ],
    )
    def test_other_arguments_are_refused(self, changed: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            with_settings(self.saved(delta=0.1), node(Stopper), node(Stopper, **changed), "tools.x")


HERE_ONLY = ("cfg.start_workers=0", "cfg.num_epochs=1")

RECORDED = ("run.json", "conf.yaml", "metrics.jsonl", "checkpoints/**/*")


def snapshot(run: Path) -> dict[str, bytes]:
    """Return everything that a run has recorded."""
    files = [file for pattern in RECORDED for file in run.glob(pattern) if file.is_file()]
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


def to_the_source(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "src" / "experiment.py", old, new)


def damage(folder: Path) -> None:
    (run_of(folder) / "checkpoints" / "epoch_0001" / "state.pt").write_bytes(b"damaged")


def remove_checkpoints(folder: Path) -> None:
    shutil.rmtree(run_of(folder) / "checkpoints")


def damage_record(folder: Path) -> None:
    (run_of(folder) / "run.json").write_text('{"status": "SUCC')


NOT_RESUMED = "faults run_001 was not resumed and is unchanged."

FAILURES: dict[str, tuple[Callable[[Path], None] | None, tuple[str, ...], str]] = {
    "a model of another size": (None, ("models.net.width=24",), "models.net.width: 16 → 24"),
    "code with another layer": (
        to_the_source("Norm(width), nn.Dropout", "Norm(width), nn.Linear(width, width), nn.Dropout"),
        (),
        NOT_RESUMED,
    ),
    "an exit at import": (
        to_the_source("class Rows(", "raise SystemExit(0)\n\n\nclass Rows("),
        (),
        "src.experiment cannot be imported: SystemExit: 0",
    ),
    "an error in the loop": (None, ("cfg.late=raise",), "error: ValueError: on purpose (raised on rank 0)"),
    "a damaged checkpoint": (damage, (), "No other checkpoint is left to resume from"),
    "a damaged record": (
        damage_record,
        (),
        "Put a good copy back, or start a new run: mlx train run --from faults/run_001@latest",
    ),
    "no config any more": (
        lambda folder: (run_of(folder) / "conf.yaml").unlink(),
        (),
        "run_001/conf.yaml: No such file or directory. Put a good copy back, or start a new run with cfg.restore_",
    ),
    "no checkpoint any more": (remove_checkpoints, (), "faults/run_001 has saved checkpoints, the last one as "),
}


@pytest.fixture(scope="module")
def finished(mlx: Mlx, make_in: Callable[[str, Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch that has succeeded; tests use copies."""
    folder = make_in("faults", tmp_path_factory.mktemp("finished"))
    done = mlx(folder, "train", "run", *HERE_ONLY)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "faults"))


@pytest.mark.process
class TestRuns:
    @pytest.mark.parametrize("failure", FAILURES)
    def test_one_that_fails_to_resume_stays_as_it_was(self, failure: str, mlx: Mlx, folder: Path) -> None:
        spoil, overrides, message = FAILURES[failure]
        if spoil is not None:
            spoil(folder)
        before = snapshot(run_of(folder))
        done = mlx(folder, "train", "run", "--resume", "cfg.num_epochs=2", *overrides)
        assert done.returncode == 1, done.stdout
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert "Again from the last checkpoint" not in done.stderr
        assert snapshot(run_of(folder)) == before
        assert not (run_of(folder) / ".reserve").exists()

    def test_it_can_be_resumed_at_once_and_counts_what_was_trained(self, mlx: Mlx, folder: Path) -> None:
        assert mlx(folder, "train", "run", "--resume", "cfg.num_epochs=2", "cfg.late=raise").returncode == 1
        done = mlx(folder, "train", "run", "--resume", "cfg.num_epochs=2")
        assert done.returncode == 0, done.stderr
        record = json.loads((run_of(folder) / "run.json").read_text())
        assert (record["status"], record["attempt"], len(record["attempts"])) == ("SUCCEEDED", 3, 1)

    def test_overrides_are_applied_listed_and_recorded(self, mlx: Mlx, folder: Path) -> None:
        """The schedule is created in `worker_loop`: the rate of step n is `lr` * 0.98**n."""
        changed = ("optimizers.adam.lr=1e-4", "tools.noise.scale=0.5", "cfg.num_epochs=2")
        done = mlx(folder, "train", "run", "--resume", *changed)
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("changed")]
        assert lines == [
            "changed   cfg.num_epochs: 1 → 2",
            "changed   optimizers.adam.lr: 0.01 → 0.0001, set once its state is restored",
            "changed   tools.noise.scale: 0.1 → 0.5, set once its state is restored",
        ]
        ((took, total),) = re.findall(r"^took +(\d+\.\d) s, (.*) in all attempts$", done.stdout, re.MULTILINE)
        (row,) = json.loads(mlx(folder, "xp", "ls", "--json").stdout)
        assert (float(took) < row["duration_s"], total) == (True, format_duration(row["duration_s"]))
        rates = [line["lr/adam"] for line in reports(run_of(folder)) if "lr/adam" in line]
        steps = [line["step"] for line in reports(run_of(folder)) if "lr/adam" in line]
        assert rates == pytest.approx([(0.01 if step <= 16 else 0.0001) * 0.98**step for step in steps])
        state = torch.load(run_of(folder) / "checkpoints" / "epoch_0002" / "state.pt", weights_only=True)
        assert state["tools"]["noise"]["scale"] == 0.5
        assert "lr: 0.0001" in (run_of(folder) / "conf.yaml").read_text()

"""The content of checkpoints, their atomicity, and messages on restore."""

import contextlib
import os
import threading
from collections import defaultdict
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from mlx_runtime import open_run
from mlx_runtime.companions.sharding.consolidation import consolidate
from mlx_runtime.errors import ConfigError, StorageError
from mlx_runtime.runs.checkpoints import groups
from mlx_runtime.runs.checkpoints.groups import load_into, merge_ranks, state_of
from mlx_runtime.runs.checkpoints.index import ABOUT, STATE, CheckpointInfo
from mlx_runtime.runs.checkpoints.store import PARTS, BackgroundSaver, CheckpointStore, read
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.queries import lookup
from mlx_runtime.runs.queries import ranking as ranking
from mlx_runtime.storage.files import storage_at

pytestmark = pytest.mark.pure


class UserDict(dict):
    """A dict with methods of its own."""


class Stopper:
    def __init__(self, patience: int = 5):
        self.patience, self.best, self.seen = patience, float("inf"), [1, (2.0, "x")]


def reloaded(state: dict, folder: Path) -> dict:
    torch.save(groups.copy_to_cpu(state), folder / "x")
    return torch.load(folder / "x", weights_only=True)  # type: ignore[no-any-return]


def test_plain_tools_are_their_attributes_and_loads_run_no_code(tmp_path: Path) -> None:
    stopper = Stopper()
    stopper.best = 0.5
    stopper.where = {1, 2}  # type: ignore[attr-defined]
    stopper.call = print  # type: ignore[attr-defined]
    stopper.since = np.datetime64("2026-01-01")  # type: ignore[attr-defined]
    stopper.weight = nn.Parameter(torch.ones(1))  # type: ignore[attr-defined]  # an optimizer may hold it
    stopper.weights = [stopper.weight]  # type: ignore[attr-defined]
    state, left_out = state_of(SimpleNamespace(stopper=stopper))
    assert sorted(left_out) == ["stopper.call", "stopper.since", "stopper.weights", "stopper.where"]
    again = reloaded(state, tmp_path)
    assert again == {"stopper": {"patience": 5, "best": 0.5, "seen": [1, (2.0, "x")], "weight": torch.ones(1)}}
    fresh = Stopper()
    held = fresh.weight = nn.Parameter(torch.zeros(1))  # type: ignore[attr-defined]
    assert load_into(SimpleNamespace(stopper=fresh), again, "tools") == []
    assert (fresh.best, fresh.seen) == (0.5, [1, (2.0, "x")])
    assert (fresh.weight is held, held.item(), held.requires_grad) == (True, 1.0, True)  # type: ignore[attr-defined]


def test_attributes_of_tools_come_back_as_what_they_were(tmp_path: Path) -> None:
    """Types of NumPy, dicts with defaults, and objects that several attributes share."""
    values, times = torch.zeros(4), np.float64(0.5)
    history, words = [values, (times,)], defaultdict(list, {"a": [1]})
    first = SimpleNamespace(whole=values, left_out=[values, values, object()], same=values, own=[values])
    first.own.append(first.own)
    net = nn.Linear(2, 2)
    first.best = deepcopy(nn.ModuleDict({"embedding": net, "head": net}).state_dict())  # tied weights stay tied
    first.pair, first.none = {"column": torch.ones(2, 2).T}, [torch.zeros(0), torch.zeros(0)]
    vars(first).update(history=history, recent=history, words=words, times=[times, np.int32(3), np.bool_(True)])
    state, left_out = state_of(SimpleNamespace(tool=first))
    assert left_out == ["tool.left_out"]
    again = SimpleNamespace()
    load_into(SimpleNamespace(tool=again), reloaded(state, tmp_path), "tools")
    del first.left_out
    assert str(vars(again)) == str(vars(first))
    assert again.pair["column"].stride() == (1, 2)
    again.whole += 1
    again.recent.append(2)
    again.words["b"].append(3)
    assert again.same is again.whole is again.history[0]
    assert again.own[1] is again.own
    assert again.best["head.weight"] is again.best["embedding.weight"]
    assert again.history[-1] == 2
    big = torch.arange(1e5)
    parts, _ = state_of(SimpleNamespace(tool=SimpleNamespace(first=big[:2], second=big[2:4])))
    assert reloaded(parts, tmp_path)["tool"].keys() == {"first", "second"}  # not the whole of it
    assert again.words == {"a": [1], "b": [3]}
    assert [type(item) for item in (*again.times, *again.history[1])] == [np.float64, np.int32, np.bool_, np.float64]


@pytest.mark.parametrize("words", [defaultdict(lambda: 0), UserDict()])
def test_attributes_that_would_come_back_as_something_else_are_refused(words: dict) -> None:
    stopper = Stopper()
    stopper.words = [words]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"^Stopper.words contains a \w+, .*; save it in a state_dict of the class$"):
        state_of(SimpleNamespace(stopper=stopper))


def test_a_view_of_another_attribute_is_refused() -> None:
    values = torch.tensor([1j, 2, 3, 4])
    with pytest.raises(
        ConfigError, match=r"^SimpleNamespace.b is a view of another tensor of the tool, .* clone it, or"
    ):
        state_of(SimpleNamespace(tool=SimpleNamespace(a=[values], b={"part": values[1:3]})))


def test_tensors_of_tools_come_back_to_their_device(tmp_path: Path) -> None:
    """`meta` stands for a GPU."""
    ema = SimpleNamespace(ema=SimpleNamespace(shadow={"w": torch.ones(2, device="meta")}, count=torch.ones(1)))
    assert groups.on_device(ema) == ["ema.shadow"]
    saved = {"ema": {"shadow": {"w": torch.ones(2)}, "count": torch.ones(1)}}
    load_into(ema, saved, "tools", moved={"ema.shadow": torch.device("meta")})
    assert (ema.ema.shadow["w"].device.type, ema.ema.count.device.type) == ("meta", "cpu")


def test_models_must_all_have_a_counterpart() -> None:
    state, _ = state_of(SimpleNamespace(net=nn.Linear(1, 1), gone=nn.Linear(1, 1)))
    with pytest.raises(ConfigError) as caught:
        load_into(SimpleNamespace(net=nn.Linear(1, 1), new=nn.Linear(1, 1)), state, "models")
    assert str(caught.value).startswith("the checkpoint does not fit: models gone (only there), new (only in the code)")


def a_state(**fields: object) -> dict:
    return dict.fromkeys(PARTS) | {"models": {"net": {"weight": torch.arange(1000.0)}}, "tools": {}} | fields


def stored(root: str, *made: CheckpointInfo) -> CheckpointStore:
    saved = CheckpointStore(root)
    for item in made:
        saved.save(a_state(epoch=item.epoch), item)
    return saved


def names(saved: CheckpointStore) -> list[str]:
    return [item.name for item in saved.all()]


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A storage for checkpoints: a folder, and a bucket of a real S3 server."""
    if request.param == "folder":
        return str(tmp_path / "checkpoints")
    return str(request.getfixturevalue("s3").format(f"checkpoints/{tmp_path.name}"))


def test_a_checkpoint_is_found_with_its_numbers_and_read_back(root: str) -> None:
    saved = stored(
        root, CheckpointInfo(0, True, 8, {"val/loss": 0.5}), CheckpointInfo(1, False, 10, {"val/loss": float("nan")})
    )
    assert names(saved) == ["epoch_0001", "epoch_0002_step_00000010"]
    first, second = saved.all()
    assert (first.metrics, first.global_step, np.isnan(second.metrics["val/loss"])) == ({"val/loss": 0.5}, 8, True)
    assert torch.equal(saved.load(second)["models"]["net"]["weight"], torch.arange(1000.0))
    assert read(saved.path(first))["epoch"] == 0


@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_a_damaged_one_is_named_and_the_one_before_is_used(root: str, damage: str) -> None:
    saved = stored(root, CheckpointInfo(0, True, 8, {}), CheckpointInfo(1, True, 16, {}))
    storage, file = storage_at(root), saved.all()[1].file
    content = storage.read("epoch_0002", file)
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    if damage == "gone":
        storage.remove_file("epoch_0002", file)
    else:
        storage.write(bytes(flipped), "epoch_0002", file)
    told: list[str] = []
    found = saved.newest(told.append)
    assert found is not None
    assert found[0].name == "epoch_0001"
    assert len(told) == 1
    assert f"epoch_0002/{file}" in told[0]
    assert "is damaged: " in told[0]
    assert told[0].endswith("resuming from the previous one")
    assert names(saved) == ["epoch_0001", "epoch_0002"]  # nothing has changed so far
    saved.save(a_state(epoch=1), CheckpointInfo(1, False, 12, {}))
    saved.prune(1, None, "min")
    assert names(saved) == ["epoch_0001", "epoch_0002_step_00000012", "epoch_0002"]  # it counts for nothing
    saved.save(a_state(epoch=7), CheckpointInfo(1, True, 16, {}))
    found = CheckpointStore(root).newest(pytest.fail)
    assert found is not None
    assert (found[0].name, found[1]["epoch"]) == ("epoch_0002", 7)  # the damaged one has been replaced


def test_a_storage_that_does_not_answer_loses_nothing(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = stored(root, CheckpointInfo(0, True, 8, {}), CheckpointInfo(1, True, 16, {}))

    def refuse(*_: object) -> None:
        raise OSError("SLOW_DOWN")

    with monkeypatch.context() as patch:
        patch.setattr(type(storage_at(root)), "open", refuse)
        with pytest.raises(StorageError, match="cannot read .*: SLOW_DOWN"):
            saved.newest(print)
    assert names(saved) == ["epoch_0001", "epoch_0002"]


@pytest.mark.parametrize("damage", ["state", "description"])
def test_without_a_usable_one_it_is_an_error_that_changes_nothing(root: str, damage: str) -> None:
    saved = stored(root, CheckpointInfo(0, True, 8, {}), CheckpointInfo(1, True, 16, {}))
    storage = storage_at(root)
    for item in saved.all():
        if damage == "state":
            storage.write(b"damaged", item.name, item.file)
        else:
            storage.write(b'{"epoch": ', item.name, ABOUT)
    before = {item.path: storage.read(item.path) for item in storage.below()}
    for _ in range(2):
        with pytest.raises(ConfigError, match="is damaged: .*No other checkpoint is left to resume from"):
            saved.newest(pytest.fail)
    assert {item.path: storage.read(item.path) for item in storage.below()} == before
    assert saved.any()


def test_readers_name_those_that_they_leave_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_STORAGE", str(tmp_path))
    folder = RunFolder(tmp_path / "digits" / "run_001")
    scores = ({"loss": 2.0}, {"loss": 1.0})
    stored(folder.checkpoints, *(CheckpointInfo(epoch, True, epoch + 1, found) for epoch, found in enumerate(scores)))
    folder.record.write_text('{"status": "FAILED", "monitor": "loss", "mode": "min"}')
    folder.conf.write_text("cfg: {monitor: loss, mode: min}")
    damaged = Path(folder.checkpoints, "epoch_0002", ABOUT)
    damaged.write_text("{}")
    for reader in (
        lambda: open_run(folder.path).state(),
        lambda: open_run(folder.path).state("best"),
        lambda: consolidate(folder, "latest", tmp_path / "weights", force=True),
        lambda: ranking.best("digits"),
        lambda: lookup.resolve_checkpoint(str(folder.path)),
    ):
        reader()
        problem = f"{damaged} is damaged: it does not describe a checkpoint"
        assert capsys.readouterr().err == f"warning: left out epoch_0002: {problem}\n"


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_kill_while_a_name_is_saved_again_leaves_one_of_the_two(
    tmp_path: Path, renames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = stored(str(tmp_path), CheckpointInfo(0, True, 8, {}))
    rename, done = Path.rename, []

    def rename_until_killed(self: Path, target: Path) -> Path:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(target)
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_until_killed)
        with contextlib.suppress(KeyboardInterrupt):
            saved.save(a_state(epoch=7), CheckpointInfo(0, True, 9, {}))
    again = CheckpointStore(str(tmp_path))
    again.clean()
    found = again.newest(pytest.fail)
    assert found is not None
    assert found[0].global_step == (9 if renames == 2 else 8)
    assert found[1]["epoch"] == (7 if renames == 2 else 0)
    assert list(tmp_path.glob(".*")) == []


def test_one_of_a_run_that_was_taken_over_is_not_stored(root: str) -> None:
    saved = stored(root, CheckpointInfo(0, True, 8, {}))

    def refuse() -> None:
        raise StorageError("taken over")

    for epoch in (0, 1):  # of a name that the new driver has used, and of another
        with pytest.raises(StorageError, match="taken over"):
            saved.save(a_state(epoch=9), CheckpointInfo(epoch, True, 16, {}), refuse)
    assert names(saved) == ["epoch_0001"]
    assert saved.load(saved.all()[0])["epoch"] == 0
    saved.clean()
    assert [name for name in storage_at(root).names() if name.startswith(".")] == []


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "epoch_0002").mkdir()
    torch.save({"weights": 1}, tmp_path / "epoch_0002" / STATE)
    stored(str(tmp_path), CheckpointInfo(2, True, 1, {}))
    with pytest.raises(ConfigError, match=r"there is no checkpoint at .*epoch_0001: it has no state\.pt\. Name one"):
        read(str(tmp_path / "epoch_0001"))
    with pytest.raises(ConfigError, match="was not saved by this version: it has no config, epoch"):
        read(str(tmp_path / "epoch_0002"))
    stored(str(tmp_path), CheckpointInfo(3, True, 2, {}))
    next((tmp_path / "epoch_0004").glob("state*.pt")).write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"epoch_0004/.* is damaged: "):
        read(str(tmp_path / "epoch_0004"))


def test_reading_one_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / "epoch_0001").mkdir()
    torch.save(a_state(tools=Evil()), tmp_path / "epoch_0001" / STATE)
    with pytest.raises(ConfigError, match="is damaged"):
        read(str(tmp_path / "epoch_0001"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("keep", "mode", "values", "left"),
    [
        (2, "max", [None] * 4, ["0003", "0004"]),
        (1, "max", [5.0, 1.0, 1.0, 1.0], ["0001", "0004"]),
        (2, "max", [0.0, 9.0, 0.0, 0.0], ["0002", "0004"]),
        (1, "min", [5.0, 1.0, 3.0, float("nan")], ["0002", "0004"]),
    ],
)
def test_the_best_and_the_latest_are_kept(
    tmp_path: Path, keep: int, mode: str, values: list[float | None], left: list[str]
) -> None:
    made = [
        CheckpointInfo(epoch, True, epoch, {} if value is None else {"x": value}) for epoch, value in enumerate(values)
    ]
    saved = stored(str(tmp_path), *made)
    saved.prune(keep, "x", mode)
    assert names(saved) == [f"epoch_{number}" for number in left]


def test_in_the_middle_of_an_epoch_the_newest_two_are_kept_until_it_is_over(root: str) -> None:
    middle = [CheckpointInfo(1, False, 10 + number, {}) for number in range(3)]
    saved = stored(root, CheckpointInfo(0, False, 3, {}), CheckpointInfo(0, True, 8, {}), *middle)
    saved.prune(3, None, "min")
    assert names(saved) == ["epoch_0001", middle[1].name, middle[2].name]
    saved.save(a_state(), CheckpointInfo(1, True, 16, {}))
    saved.prune(3, None, "min")
    assert names(saved) == ["epoch_0001", "epoch_0002"]


def test_saving_in_the_background_keeps_the_values_of_its_moment(tmp_path: Path) -> None:
    weight = torch.zeros(10)
    entered, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        go_on.wait(10)

    told: list[CheckpointInfo] = []
    saver = BackgroundSaver(CheckpointStore(str(tmp_path)), told.append, wait)
    saver.save(a_state(models={"net": {"weight": weight}}), CheckpointInfo(0, True, 1, {}))
    weight += 1
    assert entered.wait(10)
    assert told == []
    go_on.set()
    saver.wait()
    assert [item.name for item in told] == ["epoch_0001"]
    assert read(str(tmp_path / "epoch_0001"))["models"]["net"]["weight"].sum() == 0


def some_metrics() -> SimpleNamespace:
    return SimpleNamespace(
        mean=torchmetrics.MeanMetric(),
        rank=torchmetrics.SpearmanCorrCoef(),
        both=torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError(), torchmetrics.MeanSquaredError()]),
        pearson=torchmetrics.PearsonCorrCoef(),
        most=torchmetrics.MaxMetric(),
    )


def update(group: SimpleNamespace, seed: int) -> None:
    a, b = torch.randn(2, 7, generator=torch.Generator().manual_seed(seed))
    for name, metric in vars(group).items():
        metric.update(*((a, b) if name in ("rank", "both", "pearson") else (a,)))


def values(group: SimpleNamespace) -> dict:
    found = {name: metric.compute() for name, metric in vars(group).items()}
    found |= {f"both/{key}": value for key, value in found.pop("both").items()}
    return {name: float(value) for name, value in found.items()}


def test_metrics_of_several_ranks_merge_into_one() -> None:
    ranks = [some_metrics() for _ in range(3)]
    whole = some_metrics()
    for seed, rank in enumerate(ranks):
        update(rank, seed)
        update(whole, seed)
    states = merge_ranks([state_of(rank)[0] for rank in ranks], whole)
    assert set(vars(whole)) - set(states) == {"pearson"}  # its states have a custom reduction
    one = some_metrics()
    load_into(one, states, "metrics", only=set(states))
    found, wanted = values(one), values(whole)
    assert all(found[name] == pytest.approx(wanted[name]) for name in wanted if name != "pearson")

"""What a checkpoint holds, and what restoring says about the rest."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from mlx_runtime.checkpoints import STATE, load_into, prune, read, state_of
from mlx_runtime.errors import ConfigError

NONE: dict = {"then": {}, "now": {}}


class Stopper:
    def __init__(self, patience: int = 5):
        self.patience, self.best, self.seen = patience, float("inf"), [1, (2.0, "x")]


def test_plain_tools_are_their_attributes_and_loads_run_no_code(tmp_path: Path) -> None:
    stopper = Stopper()
    stopper.best = np.float64(0.5)
    stopper.where = {1, 2}  # type: ignore[attr-defined]
    stopper.call = print  # type: ignore[attr-defined]
    state, left_out = state_of(SimpleNamespace(stopper=stopper))
    assert sorted(left_out) == ["stopper.call", "stopper.where"]
    torch.save(state, tmp_path / "x")
    again = torch.load(tmp_path / "x", weights_only=True)
    assert again == {"stopper": {"patience": 5, "best": 0.5, "seen": [1, (2.0, "x")]}}
    fresh = Stopper()
    assert load_into(SimpleNamespace(stopper=fresh), again, "tools", **NONE) == []
    assert (fresh.best, fresh.seen) == (0.5, [1, (2.0, "x")])


def test_a_setting_changed_since_wins_and_a_changed_counter_is_restored() -> None:
    saved = {"stopper": {"patience": 3, "best": 0.1, "seen": []}}  # it counts patience down
    same, raised = Stopper(5), Stopper(9)
    load_into(
        SimpleNamespace(stopper=same),
        saved,
        "tools",
        then={"stopper": {"patience": 5}},
        now={"stopper": {"patience": 5}},
    )
    assert (same.patience, same.best) == (3, 0.1)
    load_into(
        SimpleNamespace(stopper=raised),
        saved,
        "tools",
        then={"stopper": {"patience": 5}},
        now={"stopper": {"patience": 9}},
    )
    assert (raised.patience, raised.best) == (9, 0.1)


def test_models_must_all_have_a_counterpart() -> None:
    state, _ = state_of(SimpleNamespace(net=nn.Linear(1, 1), gone=nn.Linear(1, 1)))
    with pytest.raises(ConfigError) as caught:
        load_into(SimpleNamespace(net=nn.Linear(1, 1), new=nn.Linear(1, 1)), state, "models", **NONE)
    assert str(caught.value).startswith("the checkpoint does not fit: models gone (only there), new (only in the code)")


def test_tools_without_a_counterpart_are_told() -> None:
    lines = load_into(SimpleNamespace(new=Stopper()), {"made_later": {}}, "tools", **NONE)
    assert lines == [
        "tools.made_later is in the checkpoint only; if worker_loop makes it, call self.restore_checkpoint() after",
        "tools.new is new: the checkpoint has no state for it",
    ]


def test_another_shape_is_told_by_name() -> None:
    state, _ = state_of(SimpleNamespace(net=nn.Linear(1, 1)))
    with pytest.raises(ConfigError, match=r"models.net in the checkpoint does not fit the config: .*size mismatch"):
        load_into(SimpleNamespace(net=nn.Linear(2, 1)), state, "models", **NONE)


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "epoch_0002").mkdir()
    torch.save({"weights": 1}, tmp_path / "epoch_0002" / STATE)
    with pytest.raises(
        ConfigError, match=r"epoch_0001 is not a checkpoint: it has no state.pt. Beside it .*: epoch_0002"
    ):
        read(tmp_path / "epoch_0001")
    with pytest.raises(ConfigError, match="was not saved by this library: it has no config, epoch"):
        read(tmp_path / "epoch_0002")
    whole = (tmp_path / "epoch_0002" / STATE).read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"not a checkpoint"):
        (tmp_path / "epoch_0002" / STATE).write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"state.pt is damaged: "):
            read(tmp_path / "epoch_0002")


@pytest.mark.parametrize(
    ("keep", "scores", "left"),
    [(2, {}, ["3", "4"]), (1, {"1": 5.0, "2": 1.0, "3": 1.0, "4": 1.0}, ["1", "4"]), (2, {"2": 9.0}, ["2", "4"])],
)
def test_the_best_and_the_latest_are_kept(tmp_path: Path, keep: int, scores: dict[str, float], left: list[str]) -> None:
    for name in "1234":
        (tmp_path / name).mkdir()
        (tmp_path / name / STATE).write_text("")
    prune(tmp_path, keep, scores)
    assert sorted(path.name for path in tmp_path.iterdir()) == left

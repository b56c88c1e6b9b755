"""The template's tools in isolation: comparisons of values, state, and content of checkpoints."""

import importlib.util
import io
import math
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import ROOT
from torch import nn
from torch.optim import SGD

from mlx_runtime.runs.checkpoints import groups

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def tools() -> ModuleType:
    file = ROOT / "<<cookiecutter.experiment_name>>" / "src" / "tools.py"
    spec = importlib.util.spec_from_file_location("tools", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def restarted(saved: object, made: object) -> None:
    """Restore a tool from the checkpointed state of another one, through a file."""
    state, left_out = groups.state_of(SimpleNamespace(tool=saved))
    assert left_out == []
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert groups.load_into(SimpleNamespace(tool=made), state, "tools") == []


@pytest.mark.parametrize(
    ("options", "values", "epochs"),
    [
        ({"patience": 2}, [3, 2, 2, 1, 1, 1], 6),
        ({"patience": 3}, [math.nan, 1, math.nan, math.nan, math.nan], 5),
        ({"patience": 2, "mode": "max"}, [1, math.inf, 2, -math.inf, math.inf], 5),
    ],
)
@pytest.mark.parametrize("restart", [False, True])
def test_early_stopping_after_so_many_epochs(
    tools: ModuleType, options: dict, values: list[float], epochs: int, restart: bool
) -> None:
    stopping = tools.EarlyStopping(**options)
    for epoch, value in enumerate(values, start=1):
        assert not stopping.stopped
        stopping.update(value)
        if restart:
            again = tools.EarlyStopping(**options)
            restarted(stopping, again)
            stopping = again
        assert stopping.stopped == (epoch == epochs)


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("max", [1, 3, 3, 2], 2),  # the later of two equal values, as for checkpoints
        ("max", [math.nan, 1, math.nan], 1),
    ],
)
def test_the_best_weights_are_kept_and_restored(tools: ModuleType, mode: str, values: list[float], best: int) -> None:
    """Also with a tool that was restored from a checkpoint."""
    model = nn.BatchNorm1d(2)
    kept, again = tools.BestWeights(mode), tools.BestWeights(mode)
    for epoch, value in enumerate(values):
        nn.init.constant_(model.weight, epoch)
        model(torch.full((3, 2), float(epoch)))
        kept.update(value, epoch, model)
    assert kept.epoch == best
    restarted(kept, again)
    for tool in (kept, again):
        nn.init.constant_(model.weight, -1)
        tool.restore(model)
        assert model.weight.tolist() == [best] * 2
        assert model.num_batches_tracked == best + 1


def test_the_schedule_peaks_at_the_optimizers_rate_and_goes_on_with_more_epochs(tools: ModuleType) -> None:
    def rates(steps: int, total_steps: int, state: dict | None = None) -> tuple[list[float], dict]:
        optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
        schedule = tools.warmup_cosine(optimizer, total_steps=total_steps, warmup_steps=4)
        if state is not None:
            schedule.load_state_dict(state)
        found = []
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return found, schedule.state_dict()

    whole, state = rates(12, 12)
    assert whole[:5] == [0.125, 0.25, 0.375, 0.5, 0.5]
    assert whole[4:] == sorted(whole[4:], reverse=True)
    assert 0 < whole[-1] < 0.05
    more, _ = rates(25, 24, state)
    assert more[1:12] == rates(24, 24)[0][13:]
    assert more[12:] == [0.0] * 13

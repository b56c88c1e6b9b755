"""Files stored by version 0.1.0 can still be read.

stored_0_1/
    checkpoints/epoch_0004/           state.pt, checkpoint.json
    prepared/Rows-1a2b3c-4d5e6f/      manifest.json, last_used, one file per column
"""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchmetrics
from torch import nn

from mlx_runtime.companions.prepared.columns import load_columns
from mlx_runtime.companions.prepared.store import Store
from mlx_runtime.runs.checkpoints.groups import load_into
from mlx_runtime.runs.checkpoints.store import CheckpointStore, read

pytestmark = pytest.mark.pure


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return Path(shutil.copytree(Path(__file__).parent / "stored_0_1", tmp_path / "stored"))


def test_a_checkpoint(stored: Path) -> None:
    saved = CheckpointStore(str(stored / "checkpoints"))
    newest = saved.newest(pytest.fail)
    assert newest is not None
    found, _ = newest
    assert (found.name, found.finished, found.global_step, found.metrics["val/loss"]) == ("epoch_0004", True, 180, 0.25)
    state = saved.load(found)
    assert state["tools"] == read(saved.path(found))["tools"] == {"stopper": {"patience": 5, "best": 0.5}}
    net, mean = nn.Linear(2, 1, bias=False), torchmetrics.MeanMetric()
    sgd = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    load_into(SimpleNamespace(net=net), state["models"], "models")
    load_into(SimpleNamespace(sgd=sgd), state["optimizers"], "optimizers")
    load_into(SimpleNamespace(mean=mean), state["ranks"][0]["metrics"], "metrics")
    assert net.weight.tolist() == [[0.5, 1.5]]
    assert (sgd.param_groups[0]["lr"], sgd.state[net.weight]["momentum_buffer"].tolist()) == (0.5, [[1.0, 1.0]])
    assert mean.compute() == 2


def test_a_prepared_dataset(stored: Path) -> None:
    store = Store(str(stored / "prepared"))
    (entry,) = store.entries()
    manifest = store.find(entry.name)
    assert manifest is not None
    assert (entry.name, manifest.rows, entry.complete) == ("Rows-1a2b3c-4d5e6f", 2, True)
    columns = load_columns(store, manifest, stored / "cache", max_bytes=0)
    assert {name: column.tolist() for name, column in columns.items()} == {"x": [[0, 1], [2, 3]], "label": [0, 1]}

"""Examples of the papers on Ray SGD v2, as scripts in today's spelling; other tests of functions cover the rest.

Each script is an example with its imports, and data where the paper has none. docs/guides/functions.md lists what is
spelled differently.
"""

import json
import re

import pytest
from conftest import Mlx

HEAD = """
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from mlx_runtime import (
    Trainer, accelerate, get_dataset_shard, get_device, load_checkpoint, local_rank, report, save_checkpoint,
    world_rank,
)


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.fc1 = nn.Linear(1, 128)
        self.fc2 = nn.Linear(128, 1)

    def forward(self, x):
        x = self.fc1(x)
        x = F.relu(x)
        x = self.fc2(x)
        return x


def rows(count):
    x = torch.arange(count).float().view(count, 1) / count
    return TensorDataset(x, 2 * x)


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


class PrintingCallback:
    def handle_result(self, results, **info):
        print("RESULTS", [result["_training_iteration"] for result in results], results[0])

"""

EXAMPLES = {
    "general model training": """
def train_func(config):
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    model = DistributedDataParallel(model.to(get_device()))
    assert local_rank() == world_rank()
    dataset = rows(16)
    train_loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
    results = [train(model, optimizer, train_loader) for _ in range(config["epoch"])]
    return model, results


trainer = Trainer(num_workers=2, cpus_per_worker=1, use_gpu=False)
print(trainer)
trainer.start()
for model, result in trainer.run(train_func, config={"epoch": 2}):
    print(type(model).__name__, len(result), model(torch.ones(1, 1)).shape)
trainer.shutdown()
""",
    "checkpointing": """
def train_func(config):
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = load_checkpoint()
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for epoch in range(config["num_epochs"]):
        report(loss=train(model, optimizer, [(torch.ones(1, 1), torch.ones(1, 1))]))
        save_checkpoint(model=model, optimizer=optimizer, epoch=epoch)
    return model


trainer = Trainer(num_workers=(2, 2))
trained, _ = trainer.run(train_func, {"num_epochs": 2}, callbacks=[PrintingCallback()])
state = trainer.latest_checkpoint
print(state["epoch"], trained.fc1.weight.equal(state["model"]["fc1.weight"]))
again, _ = trainer.run(train_func, {"num_epochs": 0}, checkpoint=state)
print(again.fc1.weight.equal(trained.fc1.weight))
other, _ = trainer.run(train_func, {"num_epochs": 0}, checkpoint={**state, "model": trained})
print(other.fc1.weight.equal(trained.fc1.weight))
""",
    "algorithmic improvements": """
def train_func(config):
    model = accelerate(Net())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for _ in range(config["epoch"]):
        train(model, optimizer, get_dataset_shard().iter_torch_batches(batch_size=4))
    inner = model.module.fc1.register_forward_hook(lambda module, args, output: print("DTYPE", output.dtype))
    model(torch.ones(1, 1))
    inner.remove()
    return model


trainer = Trainer(num_workers=2, precision="bf16")
model, _ = trainer.run(train_func, {"epoch": 1}, dataset=rows(16))
print(type(model).__name__)
""",
    "log directories": """
def train_func():
    save_checkpoint(epoch=0)


trainer = Trainer(num_workers=2, name="sgd")
trainer.run(train_func)
print(trainer.logdir, trainer.latest_run_dir, sep="\\n")
print(trainer.latest_checkpoint_dir, trainer.latest_checkpoint_path, sep="\\n")
""",
}

PRINTED = {
    "general model training": (
        r"Trainer with 2 workers, engine local, backend torch\n(.*\n){3}(Net 2 torch.Size\(\[1, 1\]\)\n){2}"
    ),
    "checkpointing": r"RESULTS \[1, 1\] .*\nRESULTS \[2, 2\] .*\n1 True\nTrue\nTrue\n",
    "algorithmic improvements": r"(DTYPE torch.bfloat16\n){2}Net\n",
    "log directories": r"(?P<logs>.*/runs/sgd)\n(?P=logs)/run_001\n(?P=logs)/run_001/checkpoints\n"
    r"(?P=logs)/run_001/checkpoints/epoch_0001\n",
}
"""Patterns of the whole output of each script."""


RUNNER = """
import contextlib, io, json, runpy, traceback
from pathlib import Path

printed = {}
for number, name in enumerate(json.loads(Path("names.json").read_text())):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            runpy.run_path(f"{number}.py", run_name="__main__")
        except Exception:
            traceback.print_exc(file=output)
    printed[name] = output.getvalue()
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def printed(python: Mlx, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each script has printed. One process runs them all, because later runs of a process start faster."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "names.json").write_text(json.dumps([*EXAMPLES]))
    for number, text in enumerate(EXAMPLES.values()):
        (folder / f"{number}.py").write_text(HEAD + text)
    (folder / "runner.py").write_text(RUNNER)
    done = python(folder, "runner.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.examples
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, printed: dict[str, str]) -> None:
    assert re.fullmatch(PRINTED[name], printed[name]), printed[name]

"""`clusterize` and `mlx train clusterize`: from nodes.json to a table and fragments.json."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Mlx, Script
from torch import nn

from mlx_runtime import clusterize
from mlx_runtime.companions.fragments.clusterizing import machines_of
from mlx_runtime.errors import ConfigError, UsageError


def nodes(*sizes: tuple[float, float], **fields: Any) -> dict[str, Any]:
    """Return nodes.json with the RAM and bandwidth of each node."""
    return {
        str(index): {"IP": f"10.0.0.{index + 1}:8080", "benchmarks": {"ram": ram, "bandwidth": bandwidth}, **fields}
        for index, (ram, bandwidth) in enumerate(sizes)
    }


@pytest.mark.pure
def test_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The call of spec 004, for a model that no node can hold."""
    monkeypatch.chdir(tmp_path)
    Path("node_data").mkdir()
    Path("node_data/node_configs.json").write_text(json.dumps(nodes((1.2, 20), (0.65, 10), (0.35, 10))))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16)))
    found = clusterize(model=model, example_args=(torch.rand(64, 2048),))
    [stages] = found.clusters
    assert all(stage.memory <= stage.machine.memory for stage in stages)
    table = capsys.readouterr().out
    assert [line.split()[2] for line in table.splitlines()[1:4]] == ["Root", "Stem", "Leaf"]
    assert re.search(r" per step of 64 rows, in 4 microbatches; 838\.9 ms to send outputs to all stages\n", table)
    plan = json.loads(Path("fragments.json").read_text())
    assert plan["blocks"] == [str(index) for index in range(16)]
    [cluster] = plan["clusters"]
    assert sorted(stage["node"] for stage in cluster["stages"]) == ["node_0", "node_1", "node_2"]
    assert [stage["role"] for stage in cluster["stages"]] == ["Root", "Stem", "Leaf"]
    ends = [(stage["first"], stage["last"]) for stage in cluster["stages"]]
    assert ends[0][0] == 0
    assert ends[-1][1] == 15
    assert all(last + 1 == first for (_, last), (first, _) in itertools.pairwise(ends))
    assert sum(stage["parameters"] for stage in cluster["stages"]) == 16 * (2048 * 2048 + 2048)
    [halved] = clusterize(model, (torch.rand(64, 2048),), traffic="fp16").clusters
    sent = 2 * 64 * 2048 * 4  # an activation and its gradient, at the lower bandwidth
    for plain, half in zip(stages[:-1], halved[:-1], strict=True):
        assert (plain.transfer_s, half.transfer_s) == pytest.approx((sent / 1.25e6, sent / 2 / 1.25e6))
    assert "4 microbatches sent as fp16; " in capsys.readouterr().out


@pytest.mark.pure
def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match=r"write a tuple of arguments: example_args=\(tensor,\)"):
        clusterize(nn.Linear(8, 8), torch.rand(4, 8))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="traffic is 'half'; write 'bf16' or 'fp16', or None"):
        clusterize(nn.Linear(8, 8), (torch.rand(4, 8),), traffic="half")


@pytest.mark.pure
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"0": {"IP": "10.0.0.1", "ram": 8}}, 'node node_0: bandwidth is missing; write "bandwidth": its Mbps'),
        (nodes((float("nan"), 10)), "ram is nan, not a number above 0"),
    ],
)
def test_nodes_without_a_size_are_refused(content: Any, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps(content))
    for source in (file, content):
        with pytest.raises(ConfigError) as caught:
            machines_of(source)
        assert problem in str(caught.value)


@pytest.mark.process
def test_the_command_plans_an_experiment(bound: Path, mlx: Mlx, tmp_path: Path) -> None:
    """Rows come from its loader, states from its optimizer; nothing is trained or stored."""
    file, plan = tmp_path / "nodes.json", tmp_path / "plan.json"
    file.write_text(json.dumps(nodes((8, 20), (16, 10), (8, 10))))
    words = ("--nodes", str(file), "--clusters", "1", "--all-nodes", "-o", str(plan))
    done = mlx(bound, "train", "clusterize", *words, "datasets.train.batch_size=24", MLX_STORAGE=str(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    assert "per step of 24 rows" in done.stdout
    assert f"wrote {plan}; next: mlx train join {file} --name NODE cfg.strategy=pipeline" in done.stdout
    written = json.loads(plan.read_text())
    assert written["model"] == "net"
    assert [stage["role"] for stage in written["clusters"][0]["stages"]] == ["Root", "Stem", "Leaf"]
    assert not (tmp_path / "runs").exists()


CAPTURE = """
import json
import shutil
from pathlib import Path
import torch
from mlx_runtime.companions.fragments import capturing
from mlx_runtime.companions.fragments.tracing import trace
from mlx_runtime.driver.request import load_config
from src.experiment import Experiment

capturing.SHARE_FOR_MODELS = {share}
call = capturing.capture(Experiment, load_config(Experiment, ["cfg.precision=bf16"]), None, torch.device("cpu"))
found = trace(call.model, call.args, call.kwargs, call.optimizers)
print(json.dumps({{
    "meta": [item.is_meta for item in call.model.parameters()],
    "rows": [len(item) for item in call.args],
    "sizes": [[item.name, item.weights, item.states, item.activations, item.sends] for item in found.blocks],
    "notes": found.notes,
    "hooks": len(call.model._forward_pre_hooks),
}}))
"""


@pytest.mark.process
def test_a_model_too_large_for_this_machine_has_the_same_sizes(bound: Path, script: Script) -> None:
    """It is built without memory, and its loop runs until it is called; `prepare_model` cannot move it."""
    small, large = (script(bound, CAPTURE.format(share=share)) for share in (1, 0))
    assert not any(small["meta"])
    assert all(large["meta"])
    assert small["sizes"] == large["sizes"] != []
    assert small["rows"] == large["rows"] == [32]
    assert small["notes"] == []
    assert "estimated from FLOPs" in large["notes"][0]
    assert small["hooks"] == large["hooks"] == 0

"""Read-only commands: what they print about an experiment."""

import json
from pathlib import Path

import pytest
from conftest import Mlx

pytestmark = pytest.mark.process


def test_settings_are_explained_with_those_of_sections(digits: Path, mlx: Mlx) -> None:
    printed = mlx(digits, "train", "show", "--settings").stdout
    names = [line.partition("=")[0] for line in printed.splitlines() if line.startswith("cfg.")]
    assert names.index("cfg.sharding.shard_size") == names.index("cfg.sharding") + 1
    assert len(names) == len({*names}) > 60
    assert printed.count("\n    ") >= len(names)
    assert mlx(digits, "train", "show", "--settings", "cfg.sharding").stdout == (
        "cfg.sharding\n"
        "    sharding of models by `strategy`.\n"
        "cfg.sharding.shard_size=null  (at least 1)\n"
        "    number of workers that share a replica, a divisor of their total; None means all.\n"
        'cfg.sharding.offload="none"\n'
        "    `cpu` keeps sharded parameters, gradients and optimizer states in the memory of the host.\n"
    )
    done = mlx(digits, "train", "show", "--settings", "shard_size")
    assert (done.returncode, done.stderr) == (
        2,
        "error: there is no setting 'shard_size'. Did you mean 'sharding.shard_size'?\n",
    )


def test_the_doctor_checks_the_machine_and_the_experiment(digits: Path, mlx: Mlx) -> None:
    checked = mlx(digits, "doctor")
    assert checked.returncode == 0
    assert "config     src/conf.yaml fits the code" in checked.stdout
    conf = digits / "src" / "conf.yaml"
    conf.write_text(conf.read_text().replace("num_epochs: 30", "num_epochs: many"))
    refused = mlx(digits, "doctor", "--json")
    assert refused.returncode == 1
    (found,) = [check for check in json.loads(refused.stdout) if check["hint"]]
    assert found["name"] == "config"
    assert "cfg.num_epochs" in found["text"]

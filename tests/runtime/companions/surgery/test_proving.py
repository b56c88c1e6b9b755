"""`mlx train prove` holds for experiments that keep the rules, and names the fault of those that do not."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Mlx

pytestmark = pytest.mark.kills

Prove = Callable[..., dict[str, Any]]


@pytest.fixture
def prove(mlx: Mlx, request: pytest.FixtureRequest) -> Prove:
    """`prove(folder, override)` returns what the command prints as JSON."""

    def run(folder: Path, *words: str) -> dict[str, Any]:
        done = mlx(folder, "train", "prove", "--json", "--seed=1", *words)
        found: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (0 if found["holds"] else 1), done.stderr
        if found["folder"]:
            request.addfinalizer(lambda: shutil.rmtree(found["folder"]))
            assert Path(found["folder"], "whole", "runs").is_dir()
        assert not (folder / "runs").exists()
        return found

    return run


def failed(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in found["checks"] if check["holds"] is False}


def test_the_template_holds(prove: Prove, digits: Path) -> None:
    found = prove(digits, "--kills=2")
    assert [(check["name"], check["holds"]) for check in found["checks"]] == [
        ("deterministic", True),
        ("resume", True),
        ("workers", True),
    ]
    assert "(worker of rank " in found["checks"][1]["text"]
    assert "(driver of rank " in found["checks"][1]["text"]
    assert found["badge"].startswith("![mlx train prove: deterministic, exact resume, 2 workers = 1](https://")
    assert found["folder"] is None


@pytest.mark.parametrize(
    ("override", "check", "named"),
    [
        ("models.net.counts=true", "resume", "models.net.calls is "),
        ("tools.noise.scale=0.1", "resume", "tools.noise.source is a random generator"),
        ("cfg.fault=operation", "deterministic", "torch.use_deterministic_algorithms names put_"),
        ("cfg.fault=time", "deterministic", "something depends on time"),
        ("datasets.train.remembers=true", "resume", "datasets.train.read is "),
        ("cfg.fault=sum", "workers", "it is 0.5 times as large: return the mean"),
        ("cfg.fault=metric", "workers", "it depends on which worker reads a row"),
    ],
)
def test_a_fault_is_named(
    override: str, check: str, named: str, prove: Prove, experiment: Callable[[str], Path]
) -> None:
    """The experiment holds without the fault, as the other checks show."""
    found = failed(prove(experiment("proofs"), "--kills=1", override))
    assert found.keys() - {"workers"} == {check} - {"workers"}
    assert found[check]["causes"][0].startswith(named), found


def test_what_differs_first_is_named_in_one_process(mlx: Mlx, experiment: Callable[[str], Path]) -> None:
    """The process is killed as a whole, and resumed."""
    words = ("--seed=1", "--kills=1", "cfg.start_workers=0", "datasets.train.remembers=true")
    done: subprocess.CompletedProcess[str] = mlx(experiment("proofs"), "train", "prove", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[:1] == ["holds     deterministic: two uninterrupted runs are equal, bit for bit"], done.stderr
    assert lines[1].startswith("FAILS     resume: killed in step ")
    assert "by --seed 1, and resumed: the first difference is batch in step " in lines[1]
    assert lines[-1].startswith("runs      /")
    shutil.rmtree(lines[-1].split()[1])


def test_a_run_that_fails_proves_nothing(mlx: Mlx, experiment: Callable[[str], Path]) -> None:
    done = mlx(experiment("proofs"), "train", "prove", "cfg.fault=none", "cfg.start_workers=0")
    assert done.returncode == 1
    assert "error: the run 'whole' failed, so nothing is proven: KeyError: 'none' (raised on rank 0)" in done.stderr
    shutil.rmtree(Path(done.stderr.split()[-1]).parent)

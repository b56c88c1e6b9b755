"""`mlx train prove` holds for experiments that keep the rules, and names the fault of those that do not."""

import contextlib
import json
import shutil
import subprocess
import sys
import time
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
        assert done.returncode == (1 if found["holds"] is False else 0), done.stderr
        assert bool(found["badge"]) == (found["holds"] is True)
        if found["folder"]:
            request.addfinalizer(lambda: shutil.rmtree(found["folder"]))
            assert Path(found["folder"], "whole", "runs").is_dir()
        assert not (folder / "runs").exists()
        return found

    return run


def outcomes(found: dict[str, Any]) -> list[bool | None]:
    return [check["holds"] for check in found["checks"]]


def test_the_template_holds(prove: Prove, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = prove(digits, "--kills=2")
    assert outcomes(found) == [True, True, True]
    assert "(worker of rank " in found["checks"][1]["text"]
    assert "(driver of rank " in found["checks"][1]["text"]
    assert found["badge"].startswith("![mlx train prove: deterministic, exact resume, 2 workers = 1](https://")
    assert found["folder"] is None
    assert not [*tmp_path.glob("mlx-*")]


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("operation", "with cfg.deterministic=true: RuntimeError: put_ does not have a deterministic implementation"),
        ("import", "src.experiment.IMPORTED is "),
    ],
)
def test_what_differs_without_a_kill_is_named(
    fault: str, named: str, prove: Prove, experiment: Callable[[str], Path]
) -> None:
    found = prove(experiment("proofs"), f"cfg.fault={fault}")
    assert outcomes(found) == [False, None, None], found
    assert found["checks"][0]["causes"][0].startswith(named), found


@pytest.mark.parametrize(
    ("fault", "holds", "named"),
    [
        ("cfg.fault=sum", False, "the loss is a sum over the rows of a worker"),
        ("cfg.fault=decay", False, "workers use other rows, or weigh them otherwise"),
        ("cfg.fault=metric", False, "it depends on which worker reads a row"),
        ("cfg.fault=two", False, "the run 'two workers' failed: KeyError: 'two' (raised on rank "),
        ("datasets.train.augments=true", None, "the first update of 2 workers reads other rows than that of 1"),
    ],
)
def test_what_differs_by_the_number_of_workers_is_named(
    fault: str, holds: bool | None, named: str, prove: Prove, experiment: Callable[[str], Path]
) -> None:
    """No update follows the only checkpoint, so no run is killed."""
    short = ("cfg.start_workers=1", "cfg.num_epochs=1", "cfg.checkpoint_every_steps=null")
    found = prove(experiment("proofs"), *short, fault)
    assert outcomes(found) == [True, None, holds], found
    assert [*found["checks"][2]["causes"], found["checks"][2]["text"]][0].startswith(named), found


def test_what_checkpoints_lack_is_named(prove: Prove, experiment: Callable[[str], Path]) -> None:
    """The process is killed as a whole, once there is a checkpoint, and resumed."""
    faults = ("models.net.counts=true", "tools.noise.scale=0.1", "datasets.train.remembers=true")
    words = ("--kills=1", "cfg.start_workers=0", "cfg.checkpoint_every_steps=null")
    found = prove(experiment("proofs"), *words, *faults)
    assert outcomes(found)[:2] == [True, False]
    resume = found["checks"][1]
    assert ", and resumed: the first difference is batch in step 9" in resume["text"], found
    named = [cause.partition(" is ")[0] for cause in resume["causes"]]
    assert named == ["tools.noise.source", "datasets.train.read", "models.net.calls"], found


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("none", "the run 'whole' failed: KeyError: 'none' (raised on rank 0), so nothing is proven; see "),
        (
            "die",
            "the run 'whole' failed: a worker was lost: rank ",
        ),
        ("diverges", "gradients of the run 'whole' become infinite or NaN, so nothing is proven; see "),
    ],
)
def test_a_run_that_fails_proves_nothing(fault: str, why: str, mlx: Mlx, experiment: Callable[[str], Path]) -> None:
    done = mlx(experiment("proofs"), "train", "prove", f"cfg.fault={fault}")
    assert done.returncode == 1
    assert f"error: {why}" in done.stderr
    shutil.rmtree(done.stderr.split()[-1])


def test_a_proof_that_is_stopped_leaves_nothing(
    environment: dict[str, str], experiment: Callable[[str], Path], tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "mlx_runtime", "train", "prove"],
        cwd=experiment("proofs"),
        env=environment | {"TMPDIR": str(scratch)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("training  second"):
            assert process.poll() is None
        while not [*scratch.glob("mlx-proof-*/second/rank_0.jsonl")]:
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        assert process.stderr.read() == "stopped by SIGTERM during the proof\n"
    assert process.returncode == 143
    assert not [*scratch.glob("mlx-*")]
    left = []
    for found in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            left += [found] * (str(scratch).encode() in found.read_bytes())
    assert not left

"""Requests: what a command line, `mlx train run` and a job on a cluster ask a main.py for."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Mlx, edit

from mlx_runtime import BaseModule
from mlx_runtime.companions.notebook.functions import FunctionConfig
from mlx_runtime.driver import request
from mlx_runtime.driver.arguments import Request
from mlx_runtime.driver.console_lines import resume_command
from mlx_runtime.errors import RunFinished, UsageError
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.loop.resuming import refuse_finished
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import RunFolder, claim_run


class Plain(BaseModule):
    cfg: TrainConfig


@pytest.mark.pure
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", Request()),
        ("--resume", Request(resume="latest")),
        ("--resume run_003 cfg.seed=1", Request(("cfg.seed=1",), resume="run_003")),
        ("--from=digits/run_003 --eval=s3://a/b=c", Request(origin="digits/run_003", checkpoint="s3://a/b=c")),
        ("--variant small --overfit=2", Request(("--variant=small", "++cfg.debug.overfit_batches=2"))),
        ("--prepare-batches cfg.seed=1", Request(("cfg.seed=1", "cfg.preparation.mode=make"))),
        ("~tools.x --run=/runs/a/run_001", Request(("~tools.x",), claimed="/runs/a/run_001")),
    ],
)
def test_arguments_of_main_are_a_request_and_back(line: str, expected: Request) -> None:
    asked = Request.parse(shlex.split(line))
    assert asked == expected
    assert Request.parse(asked.words) == asked
    more = Request.parse([*asked, "cfg.more=1"])  # as in a main.py that adds an override
    assert more == replace(asked, overrides=(*asked.overrides, "cfg.more=1"))


@pytest.mark.pure
def test_a_run_of_another_experiment_is_resumed_by_its_whole_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLX_STORAGE", raising=False)
    run = RunFolder(tmp_path / "c2" / "run_001")
    assert resume_command(run, ("++cfg.name=c2",)) == "mlx train run --resume=c2/run_001"


@pytest.mark.pure
@pytest.mark.parametrize(
    ("address", "verb"), [("http://head:8265", ""), ("slurm://here", " --slurm"), ("kube://team/run", " --kube")]
)
def test_a_job_is_resumed_where_it_ran(monkeypatch: pytest.MonkeyPatch, address: str, verb: str) -> None:
    monkeypatch.setenv("MLX_JOB", "7")
    monkeypatch.setenv("MLX_JOB_ADDRESS", address)
    run = RunFolder(Path("/runs/digits/run_001"))
    assert resume_command(run, ()) == f"mlx train launch{verb} --resume=/runs/digits/run_001"


@pytest.mark.pure
def test_what_asks_for_nothing_that_exists_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no option --overfitt=2; see: mlx train run --help"):
        Request.parse(["--overfitt=2"])
    with pytest.raises(UsageError, match="names no run: ''"):
        Request(origin="")


@pytest.mark.pure
def test_resume_auto_starts_a_run_or_continues_the_latest_and_from_copies_its_config(tmp_path: Path) -> None:
    conf = tmp_path / "conf.yaml"
    conf.write_text(f"cfg: {{_target_: mlx_runtime.TrainConfig, name: plain, storage_path: {tmp_path}}}\n")

    def load(**fields: str) -> request.RunConfig:
        return request.load_config(Plain, Request(**fields), conf)

    assert load(resume="auto").run is None
    with pytest.raises(UsageError, match="no runs of 'plain'"):
        load(resume="latest")
    run = claim_run(str(tmp_path), "plain")
    assert load(resume="auto").run is None, "it died before it began"
    run.conf.write_text(conf.read_text().replace("name:", "seed: 7, name:"))
    run.record.write_text('{"status": "STOPPED", "attempt": 1, "num_epochs": 10}')
    resumed = load(resume="auto")
    assert (resumed.run, resumed.cfg.seed) == (run, 7)
    with pytest.raises(UsageError, match="plain has no run 'maybe'. Available: latest, run_001."):
        load(resume="maybe")
    with pytest.raises(UsageError, match="--resume resumes a run and --from starts a new one; give one of them"):
        load(origin="run_001", resume="latest")
    copied = load(origin="run_001")
    assert (copied.run, copied.cfg.seed, copied.cfg.restore_checkpoint_path) == (None, 7, None)
    with pytest.raises(UsageError, match="plain/run_001 has no readable checkpoint"):
        load(origin="run_001@best")
    CheckpointStore(run.checkpoints).save({}, CheckpointInfo(0, True, 10, {}))
    checkpoint = Path(run.checkpoints, "epoch_0001")
    started = load(origin="run_001@latest")
    assert (started.run, started.cfg.seed, started.cfg.restore_checkpoint_path) == (None, 7, str(checkpoint))
    assert started.overrides == (f"++cfg.restore_checkpoint_path='{checkpoint}'",), "a job needs it, too"
    with pytest.raises(UsageError, match="has no checkpoint epoch_0009"):
        load(origin="run_001@epoch_0009")


@pytest.mark.pure
@pytest.mark.parametrize(
    ("cfg", "cure"),
    [
        (TrainConfig(), "leave out --resume"),
        (FunctionConfig(), "leave out resume=, or give the Trainer another name="),
    ],
)
def test_a_new_run_after_one_that_has_succeeded_does_not_begin_with_its_weights(
    tmp_path: Path, cfg: TrainConfig, cure: str
) -> None:
    run = claim_run(str(tmp_path), "digits")
    run.record.write_text('{"status": "SUCCEEDED"}')
    run.conf.write_text("cfg: {num_epochs: 10}")
    with pytest.raises(RunFinished) as told:
        refuse_finished(run, run.conf, cfg, request.new_run(run, cfg, "@latest"), named=True)
    further = "To train further, raise cfg.num_epochs=10 or cfg.max_steps"
    assert str(told.value) == f"digits/run_001 has succeeded. {further}; to start a new run: {cure}"


@pytest.mark.process
def test_a_main_py_without_main_is_refused_with_a_cure(digits: Path, mlx: Mlx) -> None:
    edit(digits / "main.py", "def main(", "def train(")
    edit(digits / "main.py", "        main(", "        train(")
    done = mlx(digits, "train", "run", "cfg.start_workers=0")
    cure = "has no function main(overrides); write one like that of a new experiment"
    assert (done.returncode, cure in done.stderr) == (2, True), done.stderr

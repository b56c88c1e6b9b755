"""Trials as actors of Ray: real runs, replaced, pruned and lost. `ray/test_cluster.py` has sweeps with workers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Script
from test_local_trials import SCRIPT

pytestmark = pytest.mark.cluster

MIXED = """
from mlx_runtime.companions.sweeps.engines.cluster import OnCluster
from mlx_runtime.sections import Elastic

import ray

out, sys.stdout = sys.stdout, open(os.devnull, "w")  # Ray prints that workers were lost
ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)


def mixed(sweep, job):
    if job.trial == 1 and len(sweep.epochs[1]) == 1 or job.trial == 3:
        os.kill(sweep.pids[job.trial], signal.SIGKILL)
    return job.trial == 2


pauses = ("cfg.pause_s=0.1", "cfg.pause_from=16")  # after the first epoch
short, slow = (("cfg.start_workers=0", f"cfg.num_epochs={epochs}", *pauses) for epochs in (3, 1000))
sweep = Trials(short, slow, slow, act=mixed)
cfg = TrainConfig(start_workers=0, elastic=Elastic(max_failures=1))
with contextlib.closing(OnCluster(cfg, parallel=2, gpus_per_trial=None)) as engine:
    engine.run(sweep)
print(json.dumps({"outcomes": sweep.outcomes, "most": sweep.most}), file=out)
"""


def test_runs_are_replaced_pruned_and_lost(
    script: Script, make_in: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    found = script(make_in("faults", tmp_path), SCRIPT.partition("def mixed")[0] + MIXED)
    assert found["most"] == 2
    said = [item for _, item in sorted(found["outcomes"].items())]
    records = [json.loads(Path(item["run"], "run.json").read_text()) for item in said]
    expected = ["SUCCEEDED", "PRUNED", "FAILED"]
    assert [item["status"] for item in said] == expected
    assert [item["status"] for item in records] == expected
    assert [item["attempt"] for item in records] == [2, 1, 2]
    assert records[0]["epoch"] == 2
    assert said[2]["error"] == records[2]["error"]
    assert said[2]["error"].startswith("the driver of the run was lost: ")

"""Workers with several GPUs each, on a node of Ray whose GPUs are only numbers."""

import json
from pathlib import Path

import pytest
from clusters import RayCluster
from conftest import Mlx

pytestmark = pytest.mark.cluster

SCRIPT = """
import json, os, pickle, time
from pathlib import Path
from types import SimpleNamespace
import ray
from mlx_runtime import Trainer
from mlx_runtime.companions.notebook import actors
from mlx_runtime.companions.ray import engine, group, worker
from mlx_runtime.loop.options import TrainConfig

for module in (actors, group):
    module.backend_of = lambda use_gpu: "gloo"  # there is no NCCL without GPUs


def look():
    own = ray.get_gpu_ids()
    return [own, os.environ["CUDA_VISIBLE_DEVICES"], ray.get_runtime_context().get_assigned_resources().get("GPU", 0)]


class LookingWorker(worker.RayWorker):
    def train(self, rank, variables, **options):
        # in place of a run, which would use its GPU
        os.environ.update(variables)
        Path(FOLDER, f"{rank}.json").write_text(json.dumps(look()))
        return pickle.dumps(None)


class Looker:
    def look(self):
        return look()


def seen_by_runs(gpus):
    job = SimpleNamespace(prepared={}, run=SimpleNamespace(experiment="gpus", name="run_001"))
    cfg = TrainConfig(start_workers=2, gpus_per_worker=gpus)
    with engine.OnRay.connect(cfg, "") as cluster:
        workers = engine.OnRay(cfg, cluster, timeout_s=60).start(job, None, None)
        while workers.poll():
            time.sleep(0.1)
        workers.close()
    return [json.loads(Path(f"{rank}.json").read_text()) for rank in (0, 1)]


def seen_by_objects(gpus):
    trainer = Trainer(num_workers=2, engine="ray", gpus_per_worker=gpus)
    trainer.start(Looker)
    found = trainer.execute(Looker.look)
    trainer.shutdown()
    return found


if __name__ == "__main__":
    group.RayWorker = LookingWorker
    print(json.dumps([seen_by_runs(1), seen_by_runs(2), seen_by_objects(2)]))
"""


def test_ray_gives_each_worker_its_own(python: Mlx, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("FOLDER", repr(str(tmp_path))))
    with RayCluster(environment) as node:
        node.add(cpus=2, gpus=4)
        node.wait(1)
        done = python(tmp_path, "script.py", MLX_IN_JOB="1", RAY_ADDRESS=f"127.0.0.1:{node.port}")
    assert done.returncode == 0, done.stdout + done.stderr
    for gpus, workers in zip((1, 2, 2), json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert [resources for _, _, resources in workers] == [gpus, gpus]
        assert len({own for owns, _, _ in workers for own in owns}) == 2 * gpus
        own = [list(map(str, owns)) for owns, _, _ in workers]
        shared = [[gpu for owns in own for gpu in owns]] * 2  # NCCL copies between visible GPUs
        assert [visible.split(",") for _, visible, _ in workers] == (own if gpus > 1 else shared)

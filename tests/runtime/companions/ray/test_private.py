"""The private API of Ray that private.py uses. A version of Ray that changes it fails here, not in a run."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import ray.train
import ray.train.torch
import torch
from conftest import Mlx
from ray._private import auto_init_hook
from ray._private.state import state
from ray.train.v2._internal.execution import train_fn_utils

from mlx_runtime.companions.ray import private as ray_private
from mlx_runtime.companions.ray import private_train
from mlx_runtime.companions.ray.private import enter_ray_train
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import MlxError

pytestmark = pytest.mark.pure


def test_a_node_that_is_not_in_the_list_is_not_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_private.state is state
    assert list(inspect.signature(state.get_draining_nodes).parameters) == []
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a"))
    for nodes, drained in (({}, False), ({"b": 5}, False), ({"a": 0, "b": 5}, True)):
        monkeypatch.setattr(state, "get_draining_nodes", lambda nodes=nodes: nodes)
        assert ray_private.is_draining() is drained


class TestWorkerFunctions:
    def test_a_training_function_has_its_own_for_one_run(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(train_fn_utils, "_train_fn_utils", None)
        second = Topology(1, 2, torch.device("cpu"))
        enter_ray_train("digits", second, quiet=False)
        ray_private.call_functions(SimpleNamespace(report=dict, load_checkpoint=lambda: {"files": {}}))
        assert ray.train.get_checkpoint() is not None
        (tmp_path / "rank_1").touch()
        monkeypatch.setattr(private_train, "broadcast", lambda value: [])  # rank 0 has no files
        with second.entered(), pytest.raises(MlxError, match="files of rank 0, which has no 'rank_1' of rank 1"):
            ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(str(tmp_path)))
        enter_ray_train("digits", second, quiet=False)
        assert ray.train.get_checkpoint() is None

    def test_public_functions_ask_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(train_fn_utils, "_train_fn_utils", None)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        monkeypatch.setenv("NODE_RANK", "1")
        enter_ray_train("digits", Topology(5, 8, torch.device("cpu"), 1), quiet=False)
        found = ray.train.get_context()
        assert (found.get_world_rank(), found.get_local_rank(), found.get_node_rank()) == (5, 1, 1)
        assert (found.get_world_size(), found.get_local_world_size()) == (8, 4)
        assert found.get_experiment_name() == "digits"
        assert ray.train.get_checkpoint() is None
        enter_ray_train("digits", None, quiet=False)
        with pytest.raises(MlxError, match=r"does not work in worker_loop; call self.log and self.save_checkpoint"):
            ray.train.report({"loss": 0.5})

    def test_whoever_wants_ray_meets_the_refusal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ray, "init", ray.init)
        ray_private.refuse_ray()
        assert auto_init_hook.enable_auto_connect
        for use in (ray.init, auto_init_hook.auto_init_ray, ray.remote(int).remote, lambda: ray.put(1)):
            with pytest.raises(MlxError, match="train with cfg.engine=ray"):
                use()


@pytest.mark.process
def test_a_version_of_ray_without_it_is_named(python: Mlx, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import ray.train.torch, sys\nsys.modules['ray.train.v2._internal.execution.train_fn_utils'] = None\n"
        "from mlx_runtime import clean_exit\nwith clean_exit():\n import mlx_runtime.companions.ray.private_train"
    )
    done = python(tmp_path, "script.py")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: Ray {ray.__version__} lacks a part of the private API of Ray 2.60: ")
    assert done.stderr.endswith('; type: pip install "ray==2.60.*"\n')
    assert done.stderr.count("\n") == 1

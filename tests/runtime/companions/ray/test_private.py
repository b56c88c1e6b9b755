"""The private API of Ray that private.py uses. A version of Ray that changes it fails here, not in a run."""

import inspect
import logging
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
import ray.train.torch
import torch
from ray._private import auto_init_hook
from ray.runtime_context import RuntimeContext
from ray.train.v2._internal import util
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution import context, train_fn_utils
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, FixedScalingPolicy, ScalingPolicy
from ray.train.v2._internal.execution.scaling_policy.factory import create_scaling_policy
from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils, TrainFnUtils
from ray.train.v2._internal.execution.worker_group import worker_group
from ray.train.v2.api.context import LocalTrainContext
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.torch import train_loop_utils

from mlx_runtime.companions.ray import private as ray_private
from mlx_runtime.companions.ray.private import TrimmedTrainer, enter_ray_train, quiet_ray_train
from mlx_runtime.distributed import Topology
from mlx_runtime.errors import MlxError

pytestmark = pytest.mark.pure


@pytest.fixture
def levels() -> Iterator[None]:
    """Restore the settings of loggers after each test."""
    before = {name: logging.getLogger(name).level for name in logging.root.manager.loggerDict}
    yield
    for name in logging.root.manager.loggerDict:
        logging.getLogger(name).setLevel(before.get(name, logging.NOTSET))


@pytest.mark.usefixtures("levels")
class TestLoggers:
    def test_no_report_and_no_traceback_is_printed(self) -> None:
        reports, tracebacks = context.logger, util.logger
        assert 'logger.info(\n                f"Reporting training result' in inspect.getsource(context)
        assert 'logger.error(f"Error in training function' in inspect.getsource(util)
        logging.getLogger("ray.train").setLevel(logging.INFO)
        for logger in (reports, tracebacks, train_fn_utils.logger):
            logger.setLevel(logging.INFO)
        train_fn_utils.logger.setLevel(logging.NOTSET)
        quiet_ray_train()
        assert not reports.isEnabledFor(logging.INFO)
        assert not tracebacks.isEnabledFor(logging.ERROR)
        assert not train_fn_utils.logger.isEnabledFor(logging.INFO)
        assert train_fn_utils.logger.isEnabledFor(logging.WARNING)


class TestTrimmedTrainer:
    @staticmethod
    def callbacks(cls: type, **options: bool) -> set[type]:
        trainer = cls(lambda: None, scaling_config=ray.train.ScalingConfig(num_workers=2), **options)
        return {type(item) for item in trainer._create_default_callbacks()}

    def test_helpers_are_left_out(self) -> None:
        usual = self.callbacks(ray.train.torch.TorchTrainer)
        assert {DatasetsCallback, PlacementGroupCleanerCallback} < usual
        assert self.callbacks(TrimmedTrainer, embedded=False) == usual - {DatasetsCallback}
        assert self.callbacks(TrimmedTrainer, embedded=True) == usual - {
            DatasetsCallback,
            PlacementGroupCleanerCallback,
        }

    def test_fit_asks_for_them_by_this_name(self) -> None:
        assert "callbacks=self._create_default_callbacks()" in inspect.getsource(ray.train.torch.TorchTrainer.fit)


class TestSizePolicy:
    @staticmethod
    def policy(
        workers: Any, multiple_of: int, monkeypatch: pytest.MonkeyPatch, patience: tuple[int, float] = (0, 0.0)
    ) -> ScalingPolicy:
        """Return the policy that a trainer starts its controller with."""
        options: dict[str, Any] = {}

        class Controller:
            def __init__(self, **started: Any) -> None:
                options.update(started)

            async def run(self) -> None: ...
            def get_result(self) -> None: ...

        monkeypatch.setattr(ray_private, "TrainController", Controller)
        config = ray.train.ScalingConfig(num_workers=workers)
        settings = {"embedded": True, "multiple_of": multiple_of, "patience": patience}
        trainer = TrimmedTrainer(lambda: None, scaling_config=config, **settings)
        trainer._initialize_and_run_controller(scaling_policy=create_scaling_policy(config))
        return options["scaling_policy"]

    @pytest.mark.parametrize(("cpus", "workers"), [(9, 8), (7, 4), (5, 4), (3, 0)])
    def test_an_elastic_group_changes_by_whole_replicas(
        self, cpus: int, workers: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ray starts no group below the minimum, so 0 means that it waits."""
        policy = self.policy((4, 8), 4, monkeypatch)
        policy._latest_reserved_resources = {"a": {"CPU": cpus - 1.0}, "b": {"CPU": 1.0}}
        policy._latest_reserved_resources_query_time = policy._latest_monitor_time = math.inf
        monkeypatch.setattr(policy, "_maybe_send_resource_request", lambda: None)
        decision = policy.make_decision_for_non_running_worker_group()
        assert getattr(decision, "num_workers", 0) == workers

    def test_only_the_first_group_waits_for_more_workers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        policy = self.policy((1, 4), 1, monkeypatch, (3, 60.0))
        policy._latest_reserved_resources_query_time = math.inf
        monkeypatch.setattr(policy, "_maybe_send_resource_request", lambda: None)

        def size(cpus: float) -> int:
            policy._latest_reserved_resources = {"a": {"CPU": cpus}}
            return getattr(policy.make_decision_for_non_running_worker_group(), "num_workers", 0)

        assert [size(0), size(2), size(3), size(2)] == [0, 0, 3, 2]
        policy = self.policy((1, 4), 1, monkeypatch, (3, 0.0))
        policy._latest_reserved_resources_query_time = math.inf
        monkeypatch.setattr(policy, "_maybe_send_resource_request", lambda: None)
        assert size(2) == 2

    def test_other_groups_are_left_to_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert type(self.policy(8, 4, monkeypatch)) is FixedScalingPolicy
        assert type(self.policy((4, 8), 1, monkeypatch)) is ElasticScalingPolicy

    def test_fit_creates_the_policy_by_this_name(self) -> None:
        assert "scaling_policy=create_scaling_policy(" in inspect.getsource(ray.train.torch.TorchTrainer.fit)


class TestControllerHere:
    def test_fit_starts_it_by_this_name(self) -> None:
        assert "self._initialize_and_run_controller(" in inspect.getsource(ray.train.torch.TorchTrainer.fit)
        started = inspect.getsource(DataParallelTrainer._initialize_and_run_controller)
        assert "(TrainController)" in started
        assert "controller.run.remote()" in started
        assert "controller.get_result.remote()" in started

    def test_workers_get_no_handle_and_no_other_ray_is_started(self) -> None:
        """Both apply only while a controller runs."""
        asked = "ray.get_runtime_context().current_actor"
        assert asked in inspect.getsource(worker_group)
        with ray_private.controller_here():
            assert ray.get_runtime_context().current_actor is None
            with pytest.raises(ray.exceptions.RaySystemError):
                ray.put(1)
        assert not ray.is_initialized()
        assert auto_init_hook.enable_auto_connect
        assert isinstance(RuntimeContext.current_actor, property)


class TestForkedWorker:
    def test_ray_asks_it_nothing_new(self) -> None:
        """The methods that are not overridden must be correct for a group of workers, too."""
        ours = {"report", "barrier", "broadcast_from_rank_zero"}
        for_one = {"get_checkpoint", "get_all_reported_checkpoints", "get_dataset_shard", "get_context"}
        for_one |= {"get_preemption_info", "is_distributed"}
        assert TrainFnUtils.__abstractmethods__ == ours | for_one
        assert ours <= vars(ray_private.ForkedWorker).keys()
        assert not ray_private.ForkedWorker.__abstractmethods__

    def test_what_is_reported_comes_first(self) -> None:
        names = list(inspect.signature(LocalTrainFnUtils.report).parameters)
        assert names[:3] == ["self", "metrics", "checkpoint"]

    def test_its_place(self) -> None:
        place = {"world_size", "world_rank", "local_rank", "local_world_size", "node_rank"}
        assert inspect.signature(LocalTrainContext).parameters.keys() == place | {"experiment_name"}
        assert inspect.signature(LocalTrainFnUtils).parameters.keys() == place | {"experiment_name", "dataset_shards"}

    def test_public_functions_ask_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(train_fn_utils, "_train_fn_utils", None)
        monkeypatch.setattr(ray, "init", ray.init)
        enter_ray_train("digits", Topology(3, 8, torch.device("cpu")))
        found = ray.train.get_context()
        assert (found.get_world_rank(), found.get_local_rank(), found.get_node_rank()) == (3, 3, 0)
        assert (found.get_world_size(), found.get_local_world_size()) == (8, 8)
        assert found.get_experiment_name() == "digits"
        assert ray.train.get_checkpoint() is None
        with pytest.raises(MlxError, match="use self.save_checkpoint"):
            ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory("."))

    def test_whoever_wants_ray_meets_the_refusal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(train_fn_utils, "_train_fn_utils", None)
        monkeypatch.setattr(ray, "init", ray.init)
        enter_ray_train("digits", Topology(0, 1, torch.device("cpu")))
        assert auto_init_hook.enable_auto_connect
        for use in (ray.init, auto_init_hook.auto_init_ray, ray.remote(int).remote, lambda: ray.put(1)):
            with pytest.raises(MlxError, match="train with cfg.engine=ray"):
                use()


class TestShardedModels:
    def test_prepare_model_looks_the_wrapper_up_by_this_name(self) -> None:
        assert ray.train.torch.prepare_model.__globals__ is vars(train_loop_utils)
        assert "DataParallel = DistributedDataParallel\n" in inspect.getsource(ray.train.torch.prepare_model)


@pytest.mark.process
def test_a_version_of_ray_without_it_is_named(tmp_path: Path) -> None:
    script = (
        "import ray.train.torch, sys\nsys.modules['ray.train.v2._internal.execution.controller'] = None\n"
        "from mlx_runtime import clean_exit\nwith clean_exit():\n import mlx_runtime.companions.ray.private"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: Ray {ray.__version__} lacks a part of the private API of Ray 2.60: ")
    assert done.stderr.endswith('; type: pip install "ray==2.60.*"\n')
    assert done.stderr.count("\n") == 1

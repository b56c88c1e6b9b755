"""`self.backward` and `self.optimizer_step`: the updates of a large batch, in any precision, over any interruption."""

import copy
import math
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sessions import ALONE, Events, attach, session_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from mlx_runtime import BaseModule, MlxError, TrainConfig
from mlx_runtime.data.loaders import DatasetShard, DatasetShards, Loader, LoaderOptions
from mlx_runtime.errors import ConfigError, WorkerLoopError
from mlx_runtime.events import Notice
from mlx_runtime.loop.examples import ExampleRecorder
from mlx_runtime.loop.forward import in_half_precision
from mlx_runtime.loop.strategies import DDP
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.sections import Debug, Elastic
from mlx_runtime.workers.worker import loop_errors

pytestmark = pytest.mark.pure

CPU = torch.device("cpu")

Pair = namedtuple("Pair", "first second")

SCALE = {"scale": 2.0**4, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
"""State of a scaler with which nothing overflows."""


class Rows(Dataset):
    shuffle = False

    def __init__(self, rows: int, batch_size: int):
        self.batch_size = batch_size
        self.values = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]

    @staticmethod
    def ray_map_batches(batch):
        return {"x": torch.stack(batch["item"])}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.inside: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](x)
        self.inside.append(hidden.dtype)
        return self.layers[1:](hidden)[:, 0]


Begin = Callable[..., BaseModule]


@pytest.fixture
def begin(tmp_path: Path) -> Begin:
    """`begin(accumulate_grad_batches=4)`: an experiment with these settings of `cfg`, as it is when its loop begins."""

    def begin(*, sink: Events | None = None, **settings: Any) -> BaseModule:
        torch.manual_seed(0)
        nets = SimpleNamespace(net=Net(), other=Net())
        optimizers = SimpleNamespace(
            sgd=torch.optim.SGD(nets.net.parameters(), lr=0.1, momentum=0.9),
            adam=torch.optim.Adam(nets.other.parameters(), lr=0.1),
        )
        module = BaseModule(cfg=TrainConfig(**settings), models=nets, optimizers=optimizers)
        session = attach(module, tmp_path, sink)
        for optimizer in vars(optimizers).values():
            optimizer.register_step_pre_hook(lambda optimizer, *_: session.update_begins(optimizer))
            optimizer.register_step_pre_hook(lambda optimizer, *_: session.optimization.before_update(optimizer))
            optimizer.register_step_post_hook(lambda item, *_: session.update_finished(item))
        session.begin()
        return module

    return begin


def loader_of(module: BaseModule, *, batch_size: int, name: str = "train", wanted_workers: int | None = None) -> Loader:
    """A loader of 22 rows."""
    group = SimpleNamespace(**{name: Rows(22, batch_size)})
    times = module.cfg.accumulate_grad_batches
    shard = DatasetShard(name, group, ALONE, LoaderOptions(accumulate=times, wanted_workers=wanted_workers))
    return module.generate_loaders(DatasetShards({name: shard}))[0]


def step(module: BaseModule, batch: dict[str, torch.Tensor], factor: float = 1.0) -> bool:
    module.backward(factor * (module.models.net(batch["x"]) - batch["x"].sum(dim=1)).square().mean())
    return module.optimizer_step("sgd")


def same(one: nn.Module, other: nn.Module, **tolerance: float) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, **tolerance) if tolerance else torch.equal(a, b) for a, b in pairs)


class TestUpdates:
    """In one process."""

    @pytest.mark.parametrize("clip", [None, 0.1])
    def test_four_steps_are_one_large_batch(self, begin: Begin, clip: float | None) -> None:
        """Also the last update of a pass, of three steps; and a plain loop without any of it is the same."""
        parts = begin(accumulate_grad_batches=4, gradient_clip=clip)
        done = [step(parts, batch) for _ in range(3) for batch in loader_of(parts, batch_size=2)]
        assert done == [*[False, False, False, True] * 2, False, False, True] * 3
        assert parts.global_step == 9
        plain = begin()
        net, sgd = plain.models.net, plain.optimizers.sgd
        for batch in [batch for _ in range(3) for batch in loader_of(plain, batch_size=8)]:
            (net(batch["x"]) - batch["x"].sum(dim=1)).square().mean().backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            sgd.step()
            sgd.zero_grad()
        assert same(parts.models.net, net, atol=1e-6)

    def test_a_small_group_keeps_its_global_batch(self, begin: Begin) -> None:
        """Four workers were wanted, and one is there."""
        parts, whole = begin(gradient_clip=0.1, elastic=Elastic(keep_global_batch=True)), begin(gradient_clip=0.1)
        loader = loader_of(parts, batch_size=2, wanted_workers=4)
        assert (loader.batch_size, loader.accumulate) == (2, 4)
        done = [step(parts, batch) for batch in loader]
        assert done == [*[False, False, False, True] * 2, False, False, True]
        assert all(step(whole, batch) for batch in loader_of(whole, batch_size=8))
        assert same(parts.models.net, whole.models.net, atol=1e-6)

    def test_evaluation_in_the_middle_of_an_update_changes_nothing(self, begin: Begin) -> None:
        one, other = begin(accumulate_grad_batches=4), begin(accumulate_grad_batches=4)
        val = loader_of(other, batch_size=2, name="val")
        for batch in loader_of(one, batch_size=2):
            step(one, batch)
        for batch in loader_of(other, batch_size=2):
            step(other, batch)
            assert len(list(val)) == 11
        assert one.global_step == other.global_step == 3
        assert same(one.models.net, other.models.net)

    def test_an_update_that_was_left_in_the_middle_is_forgotten(self, begin: Begin) -> None:
        one, other = begin(accumulate_grad_batches=4), begin(accumulate_grad_batches=4)
        train = loader_of(other, batch_size=2)
        for batch in train:
            assert not step(other, batch, factor=1000)
            break
        for module, loader in ((one, loader_of(one, batch_size=2)), (other, train)):
            for batch in loader:
                step(module, batch)
        assert same(one.models.net, other.models.net)

    def test_a_checkpoint_waits_for_the_end_of_an_update(self, begin: Begin, tmp_path: Path) -> None:
        module = begin(accumulate_grad_batches=4)
        for number, batch in enumerate(loader_of(module, batch_size=2)):
            step(module, batch)
            if number == 1:
                module.save_checkpoint(0)
        session_of(module).end()
        assert [path.name for path in tmp_path.rglob("epoch_*")] == ["epoch_0001_step_00000001"]
        state = torch.load(next(tmp_path.rglob("state.pt")), weights_only=True)
        assert state["loaders"]["train"]["steps"] == 4

    def test_models_that_share_a_loss_step_apart(self, begin: Begin) -> None:
        """Under fp16 both must have stepped before the scale changes, which it does at every step here."""
        module, plain = begin(precision="fp16"), begin()
        session_of(module).optimization.load_state_dict(SCALE | {"growth_interval": 1})
        for batch in loader_of(module, batch_size=8):
            module.backward((module.models.net(batch["x"]) + module.models.other(batch["x"])).square().mean())
            assert module.optimizer_step("sgd")
            assert module.optimizer_step("adam")
        for batch in loader_of(plain, batch_size=8):
            plain.backward((plain.models.net(batch["x"]) + plain.models.other(batch["x"])).square().mean())
            assert plain.optimizer_step("sgd")
            assert plain.optimizer_step("adam")
        assert session_of(module).optimization.state_dict()["scale"] == 2.0**7
        assert same(module.models.net, plain.models.net, atol=0.01)
        assert not same(module.models.net, plain.models.net)

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_a_loss_that_passes_through_the_model_of_another_optimizer(self, begin: Begin, accumulate: int) -> None:
        """The generator `net` and its discriminator `other`, which the reference freezes for the generator's loss."""

        def train(module: BaseModule, **generator: Any) -> None:
            net, other = module.models.net, module.models.other
            for batch in loader_of(module, batch_size=4):
                module.backward((other(batch["x"] + net(batch["x"])[:, None].detach()) - 1).square().mean())
                module.optimizer_step("adam")
                other.requires_grad_(bool(generator))
                module.backward(other(batch["x"] + net(batch["x"])[:, None]).square().mean(), **generator)
                module.optimizer_step("sgd")
                other.requires_grad_(True)

        settings = {"accumulate_grad_batches": accumulate}
        module, frozen = begin(**settings), begin(**settings)
        train(module, optimizer="sgd")
        train(frozen)
        assert same(module.models.net, frozen.models.net)
        assert same(module.models.other, frozen.models.other)
        with pytest.raises(MlxError, match=r"self.backward\(loss, optimizer='adm'\).* Did you mean 'adam'"):
            module.backward(torch.zeros(1, requires_grad=True).sum(), optimizer="adm")

    def test_gradients_are_shared_at_the_last_step_of_an_update_only(
        self, begin: Begin, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module, shared = begin(accumulate_grad_batches=4), list[bool]()
        monkeypatch.setattr(DDP, "sync_gradients", lambda strategy, models, enabled: shared.append(enabled))
        for batch in loader_of(module, batch_size=2):
            step(module, batch)
        assert shared == [*[False, False, False, True] * 2, False, False, True]
        assert module.global_step == 3


class TestErrors:
    """Each tells what to do instead."""

    def test_the_name_of_an_optimizer(self, begin: Begin) -> None:
        module = begin()
        with pytest.raises(
            MlxError, match=r"optimizer_step\('sdg'\) needs the name of an optimizer. Did you mean 'sgd'\?"
        ):
            module.optimizer_step("sdg")
        with pytest.raises(MlxError, match=r"optimizer_step\(\) needs the name of an optimizer. Available: adam, sgd."):
            module.optimizer_step()
        del module.optimizers.adam
        module.backward(module.models.net(torch.ones(1, 3)).sum())
        assert module.optimizer_step()

    def test_a_plain_loop_where_several_steps_may_make_an_update(self, begin: Begin) -> None:
        """Also in a group that is whole: it would else fail when it has lost a worker."""
        module = begin(elastic=Elastic(keep_global_batch=True))
        batch = next(iter(loader_of(module, batch_size=2)))
        module.models.net(batch["x"]).sum().backward()
        with pytest.raises(MlxError, match=r"cfg.elastic.keep_global_batch needs self.backward\(loss\) and"):
            module.optimizers.sgd.step()

    def test_a_plain_step_does_not_clip_which_is_noticed_once(self, begin: Begin) -> None:
        events = Events()
        module = begin(sink=events, gradient_clip=1.0)
        for _ in range(2):
            module.optimizers.sgd.step()
        (event,) = [event for event in events if isinstance(event, Notice)]
        assert event.text == "cfg.gradient_clip needs self.optimizer_step(); optimizer.step() does not clip"

    def test_a_plain_backward(self, begin: Begin) -> None:
        module = begin()
        module.models.net(torch.ones(1, 3)).sum().backward()
        with pytest.raises(MlxError, match=r"goes with self.backward\(loss\)"):
            module.optimizer_step("sgd")

    def test_arguments_that_torch_compile_does_not_take(self, begin: Begin) -> None:
        message = "cfg.compile is 'inducto', but torch.compile says: Invalid backend: 'inducto'"
        with pytest.raises(ConfigError, match=message):
            begin(compile="inducto")


class TestPrecision:
    """Half inside the models, float32 outside."""

    @pytest.mark.parametrize(("precision", "inside"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
    def test_models_run_in_it_and_plain_loops_too(self, begin: Begin, precision: str, inside: torch.dtype) -> None:
        module, full = begin(precision=precision), begin()
        net = module.models.net
        output = net(torch.ones(2, 3))
        assert (net.inside, output.dtype) == ([inside], torch.float32)
        assert torch.allclose(output, full.models.net(torch.ones(2, 3)), atol=0.02)
        assert list(net.state_dict()) == list(full.models.net.state_dict())
        output.sum().backward()
        assert next(net.parameters()).grad.dtype == torch.float32
        module.optimizers.sgd.step()

    def test_outputs_of_any_shape(self) -> None:
        class Many(nn.Linear):
            def forward(self, x, *, exact):
                half = super().forward(x)
                return {"list": [half, (half, 3)], "pair": Pair(half, "text"), "exact": exact, "whole": half.argmax()}

        model = Many(2, 2)
        in_half_precision(model, CPU, "bf16")
        output = model(torch.ones(1, 2), exact=torch.ones(1, dtype=torch.float64))
        assert output["list"][0].dtype == output["list"][1][0].dtype == output["pair"].first.dtype == torch.float32
        assert (output["list"][1][1], type(output["pair"]), output["pair"].second) == (3, Pair, "text")
        assert (output["exact"].dtype, output["whole"].dtype) == (torch.float64, torch.int64)

    def test_a_deep_copy_has_weights_of_its_own(self, begin: Begin) -> None:
        net = begin(precision="bf16").models.net
        average = copy.deepcopy(net)
        with torch.no_grad():
            for param in average.parameters():
                param.zero_()
        assert average(torch.ones(1, 3)).item() == 0
        assert net(torch.ones(1, 3)).item() != 0

    def test_gradients_that_are_not_finite_leave_a_step_out(self, begin: Begin) -> None:
        module = begin(precision="fp16", gradient_clip=1.0)
        before = copy.deepcopy(module.models.net)
        assert not step(module, {"x": torch.ones(2, 3)}, factor=float("inf"))  # so that schedules wait, too
        assert module.global_step == 0
        assert same(module.models.net, before)
        assert session_of(module).optimization.state_dict()["scale"] == 2.0**15
        assert session_of(module).optimization.step_completed_update()
        assert not session_of(module).optimization.step_completed_update()
        assert step(module, {"x": torch.ones(2, 3)}, factor=1e-3)
        assert module.global_step == 1
        assert not same(module.models.net, before)


def test_a_gradient_that_is_not_finite_ends_the_run_at_once(begin: Begin) -> None:
    module = begin(debug=Debug(stop_on_nan=True))
    module.optimizers.adam.step()  # without any gradients
    assert step(module, {"x": torch.ones(2, 3)})
    net = module.models.net.layers
    module.models.net(torch.ones(4, 3)).sum().backward()
    net[0].bias.grad[0] = math.nan
    net[2].bias.grad[0] = math.inf
    message = r"^the gradient of net.layers.0.bias \(and 1 more\) is not finite at step 2 \(cfg.debug.stop_on_nan\)"
    with pytest.raises(MlxError, match=message):
        module.optimizers.sgd.step()


@pytest.mark.parametrize(("backend", "precision"), [("eager", "bf16"), ({"backend": "aot_eager", "dynamic": True}, 32)])
def test_a_compiled_model_trains_to_the_same_weights(begin: Begin, backend: Any, precision: Any) -> None:
    compiled, plain = begin(compile=backend, precision=precision), begin(precision=precision)
    for module in (compiled, plain):
        for batch in loader_of(module, batch_size=11):
            step(module, batch)
    assert compiled.models.net._compiled_call_impl is not None
    assert list(compiled.models.net.state_dict()) == list(plain.models.net.state_dict())
    assert same(compiled.models.net, plain.models.net, atol=1e-6)


def test_models_in_the_wrapper_of_ddp(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        strategy, model = DDP(TrainConfig(), ALONE), DistributedDataParallel(nn.Linear(1, 1))
        strategy.sync_gradients([nn.Linear(1, 1), model, "something else"], False)
        assert not model.require_backward_grad_sync
        strategy.sync_gradients([model], True)
        assert model.require_backward_grad_sync
        experiment = BaseModule(cfg=TrainConfig(), models=SimpleNamespace(net=DistributedDataParallel(Net())))
        experiment.predict = lambda batch: {"y": experiment.models.net.layers(batch["x"])}
        cure = r"\(mlx_runtime.unwrap\(model\).layers works; to train by layers, "
        with pytest.raises(WorkerLoopError, match=cure), loop_errors(0, tmp_path):
            experiment.predict({"x": torch.zeros(2, 3)})
        recorder = ExampleRecorder(RunFolder(tmp_path))
        recorder.on_batch_start(experiment, "train", {"x": torch.zeros(2, 3)})
        assert recorder.problem(experiment, CPU) == ""  # predictors find the model itself
    finally:
        torch.distributed.destroy_process_group()

"""States of trees of arrays, places in a mesh, and what is missing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from hidden import hiding
from jax.sharding import Mesh
from safetensors.torch import save_file
from sessions import ALONE, Events, Rows, attach

import mlx_runtime
from mlx_runtime import BaseModule
from mlx_runtime.companions.jax.batches import own_rows
from mlx_runtime.companions.jax.building import make
from mlx_runtime.companions.jax.module import JaxModule
from mlx_runtime.companions.jax.options import TrainConfig
from mlx_runtime.companions.jax.states import LAYOUT, adapter
from mlx_runtime.companions.jax.strategy import JAX, mesh_of, placed
from mlx_runtime.companions.surgery.rules import parse
from mlx_runtime.companions.surgery.sources import find
from mlx_runtime.companions.surgery.transferring import Plan, tensors_of
from mlx_runtime.data.loaders import DatasetShard, LoaderOptions
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.driver.planning import prepare_run
from mlx_runtime.errors import ConfigError, MlxError

pytestmark = pytest.mark.pure


def tree() -> Any:
    return {
        "adam": optax.adam(1e-3).init({"w": jnp.ones((2, 3), jnp.bfloat16)}),
        "key": jax.random.key(3),
        "flags": (jnp.array([True, False]), np.arange(3, dtype=np.uint32)),
        "lr": jnp.asarray(0.1),  # weakly typed
        "steps": 7,
        "scalar": np.float64(3.5),
        "activation": jax.nn.relu,
    }


def test_a_tree_is_restored_with_its_types() -> None:
    owner = SimpleNamespace(tree=tree())
    saved = adapter(owner.tree, owner, "tree").state_dict()
    assert {type(value) for value in saved.values()} == {torch.Tensor, dict, int}
    assert saved["adam.0.mu.w"].dtype == torch.bfloat16
    owner.tree = other = jax.tree.map(lambda leaf: leaf, tree()) | {
        "key": jax.random.key(4),
        "steps": 1,
        "scalar": np.float64(1),
    }
    adapter(other, owner, "tree").load_state_dict(saved)
    assert owner.tree["steps"] == 7
    assert jnp.array_equal(jax.random.key_data(owner.tree["key"]), jax.random.key_data(jax.random.key(3)))
    assert [(item.dtype, item.weak_type) for item in (owner.tree["lr"], owner.tree["adam"][0].mu["w"])] == [
        (jnp.float32, True),
        (jnp.bfloat16, False),
    ]
    assert type(owner.tree["adam"][0]) is type(other["adam"][0])
    assert (type(owner.tree["scalar"]), owner.tree["scalar"]) == (np.float64, 3.5)


def test_a_module_is_restored_in_place() -> None:
    net, other = (nnx.Linear(2, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    adapter(other, None, "").load_state_dict(adapter(net, None, "").state_dict())
    assert jnp.array_equal(net.kernel, other.kernel)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"steps": 7.0}, "steps is a float, and a int here"),
        ({"lr": torch.tensor(0.1, dtype=torch.float64)}, r"lr is torch.float64 \(\), and torch.float32 \(\) here"),
        ({"flags.0": torch.tensor([True])}, r"flags.0 is torch.bool \(1,\), and torch.bool \(2,\) here"),
        ({"key": {"impl": "rbg", "key": torch.zeros(4)}}, "key is no key of the generator threefry2x32"),
        ({"more": 1}, "more is only there"),
        ({LAYOUT: {"mesh": {"data": 2}, "specs": 5}}, "mlx_runtime.layout is none"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], line: str) -> None:
    owner = SimpleNamespace(tree=tree())
    state = adapter(owner.tree, owner, "tree")
    with pytest.raises(ValueError, match=line):
        state.load_state_dict(state.state_dict() | changed)


def test_other_attributes_are_no_states() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    for item in (torch.nn.Linear(1, 1), {"a": 1}, "text", np.ones(2), object(), {1: 2, "a": 3}, cycle):
        assert adapter(item, SimpleNamespace(item=item), "item") is None


@pytest.mark.parametrize(
    ("item", "line"),
    [
        ({"a": {"b": jnp.ones(2)}, "a.b": jnp.zeros(2)}, "two values of item have the name a.b in a checkpoint"),
        ({1: jnp.ones(2), "a": 3}, "a checkpoint cannot hold the arrays of item: .*; a tree has no cycles, and its di"),
        ([jnp.ones(2, jnp.float8_e4m3fn)], "a checkpoint cannot hold item.0, of the type float8_e4m3fn"),
    ],
    ids=["names", "keys", "types"],
)
def test_what_a_checkpoint_cannot_hold_is_refused(item: Any, line: str) -> None:
    owner = SimpleNamespace(item=item)
    with pytest.raises(MlxError, match=line):
        adapter(item, owner, "item").state_dict()


def test_weights_come_from_elsewhere(tmp_path: Path) -> None:
    net = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    model = adapter(net, None, "net")
    kernel = torch.ones(2, 3)
    save_file({"first.kernel": kernel, "first.bias": torch.ones(3)}, tmp_path / "w.safetensors")
    rules = [{"map": {"first.*": "layers.0.*"}}, {"fresh": "layers.1.*"}]
    given = parse({"source": find(str(tmp_path / "w.safetensors"), None), "rules": rules}, "cfg.transfer.net")
    plan = Plan(given, "net", model)
    values = {name: plan.value(name, own) for name, own in tensors_of(model).items()}
    model.load_state_dict({name: value for name, value in values.items() if value is not None}, strict=False)
    assert (net.layers[0].kernel.tolist(), values["layers.1.kernel"]) == (kernel.tolist(), None)


def test_only_rows_of_the_batch_are_local() -> None:
    with pytest.raises(MlxError, match=r"self.local takes arrays with the 4 rows of the batch, not one of shape \(\)"):
        own_rows({"mask": jnp.ones(4, bool)}, (jnp.float32(1),), SimpleNamespace(of_batches=jnp.ones(4).sharding))


def test_a_mask_that_was_donated_is_made_again() -> None:
    strategy = JAX(TrainConfig(), Topology(0, 1, torch.device("cpu")))
    strategy.mesh = mesh_of({"data": -1}, np.array(jax.devices()))
    strategy.whole_mask(4).delete()
    assert strategy.whole_mask(4).tolist() == [True] * 4


def device(process: int) -> Any:
    return SimpleNamespace(process_index=process)


def fake_mesh(devices: list[list[int]], axes: tuple[str, ...]) -> Any:
    return SimpleNamespace(
        devices=np.array([[device(process) for process in row] for row in devices]),
        axis_names=axes,
        shape=dict(zip(axes, np.shape(devices), strict=True)),
    )


@pytest.mark.parametrize(
    ("devices", "axes", "replicas"),
    [
        ([[0, 0], [1, 1]], ("data", "model"), ((0,), (1,))),  # a worker for each row
        ([[0, 1], [2, 3]], ("data", "model"), ((0, 1), (2, 3))),
        ([[0, 1], [2, 3]], ("model", "data"), ((0, 2), (1, 3))),
        ([[0, 1]], ("first", "model"), ((0, 1),)),
    ],
)
def test_workers_at_the_same_position_along_data_read_the_same_rows(
    devices: list[list[int]], axes: tuple[str, ...], replicas: tuple[tuple[int, ...], ...]
) -> None:
    topology = Topology(1, int(np.max(devices)) + 1, torch.device("cpu"))
    assert placed(topology, fake_mesh(devices, axes)).replicas == replicas


def test_a_mesh_that_cuts_through_the_rows_of_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="whose axis data divides the devices of a worker unequally"):
        placed(Topology(0, 2, torch.device("cpu")), fake_mesh([[0, 0], [0, 1], [1, 1]], ("data", "model")))


def test_the_axes_of_a_mesh_make_up_all_devices() -> None:
    devices = np.array(jax.devices() * 1)
    assert mesh_of({"data": -1, "model": 1}, devices) == Mesh(devices.reshape(1, 1), ("data", "model"))
    with pytest.raises(ConfigError, match="cfg.mesh is .*, but the workers have 1 devices together"):
        mesh_of({"data": 2}, devices)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"precision": "bf16"}, "cfg.precision is for torch; give the layers dtype=jnp.bfloat16, and leave out"),
        ({"mesh": {"data": -1, "model": -1}}, "cfg.mesh is {'data': -1, 'model': -1}; write devices per axis"),
        ({"mesh": {"data": 0}}, "cfg.mesh is {'data': 0}; write devices per axis"),
    ],
    ids=["precision", "mesh", "no devices"],
)
def test_settings_for_torch_are_refused(changed: dict[str, Any], line: str) -> None:
    assert str(JAX.refusal(TrainConfig(**changed))).startswith(line)


def test_updates_of_torch_are_refused() -> None:
    with pytest.raises(MlxError, match="self.backward and self.optimizer_step are for torch; in JAX, write: loss, gra"):
        JaxModule.optimizer_step(SimpleNamespace(backward=lambda: JaxModule.backward(None)))


def test_an_experiment_for_torch_is_refused() -> None:
    assert str(JAX.refusal(mlx_runtime.TrainConfig())).startswith("it has no mesh; let TrainConfig inherit from")
    line = "cfg.strategy=jax trains models of jax, but BaseModule has models of torch; change cfg.strategy, or the base"
    with pytest.raises(ConfigError, match=line), prepare_run(BaseModule, SimpleNamespace(cfg=TrainConfig()), None):
        pass


@pytest.mark.parametrize(("use_gpu", "device"), [(None, "cuda:0"), (True, "cpu")])  # as torch sees it
def test_gpus_need_a_jaxlib_for_gpus(use_gpu: bool | None, device: str) -> None:
    topology = Topology(0, 1, torch.device(device))
    with (
        pytest.raises(ConfigError, match="rank 0 should use a GPU, but JAX finds none; install a jaxlib for GPUs"),
        JAX(TrainConfig(use_gpu=use_gpu), topology).connected(),
    ):
        pass


@pytest.mark.process
@pytest.mark.parametrize("library", ["jax", "flax", "optax"])
def test_without_a_library_there_is_one_line(commands: Any, tmp_path: Any, library: str) -> None:
    code = (
        "from mlx_runtime.errors import MlxError\ntry: import mlx_runtime.jax\nexcept MlxError as error: print(error)"
    )
    done = commands.run(tmp_path, [], commands.environment, 60, f"{hiding([library])}\n{code}")
    assert done.stdout == f'an experiment in JAX needs {library}; type: pip install "mlx-runtime[jax]"\n', done.stderr


def test_an_axis_that_the_mesh_lacks_is_named_with_its_setting() -> None:
    init = nnx.with_partitioning(nnx.initializers.zeros_init(), (None, "model"))
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"not found in mesh: .*; add this axis to cfg.mesh"),
    ):
        make(nnx.Linear, "models.net", 2, 2, kernel_init=init)


def test_arrays_that_are_assigned_after_the_first_batch_are_reported(tmp_path: Path) -> None:
    events, module = Events(), BaseModule(cfg=mlx_runtime.TrainConfig(num_epochs=1))
    session = attach(module, tmp_path, sink=events)
    session.begin()
    shard = DatasetShard("train", SimpleNamespace(train=Rows(4)), ALONE, LoaderOptions(), follow=session.watch)
    for _ in module.generate_loaders(shard):
        module.key = jax.random.key(0)
    module.save_checkpoint(epoch=0)
    session.end()
    assert any("self.key: assigned after the first batch" in getattr(event, "text", "") for event in events)

"""Defaults of Flax NNX and Optax: declared while `src` is imported, written to conf.yaml, and re-created exactly."""

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from conftest import ROOT
from flax import nnx

from mlx_runtime import BaseModule, TrainConfig
from mlx_runtime.config.binding.conf_file import bind
from mlx_runtime.config.binding.equality import unlike
from mlx_runtime.config.building import build, build_optimizers
from mlx_runtime.config.checks import problems_of
from mlx_runtime.config.constructors.declarations import Declaration, defer_loading
from mlx_runtime.config.constructors.signatures import groups, parameters
from mlx_runtime.config.constructors.targets import path_of
from mlx_runtime.config.interpolation import parse_config
from mlx_runtime.distributed.randomness import set_seed
from mlx_runtime.errors import BindError, ConfigError

pytestmark = pytest.mark.pure

defer_loading("zoo_jax")  # as for `src`
import zoo_jax  # noqa: E402

SEED = 5

KEPT = list(vars(zoo_jax.Kept)["__annotations__"])
REFUSED = [cls for name, cls in vars(zoo_jax).items() if name.startswith("Refuse")]

BIND = """
import sys
import test_declared_models as tests
tests.bound(tests.zoo_jax.Kept, tests.Path(sys.argv[1]))
"""


def experiment(group: type) -> type:
    hints = {"cfg": TrainConfig, "tools": group}
    return type("Zoo", (BaseModule,), {"__annotations__": hints, "__module__": group.__module__})


def bound(group: type, path: Path) -> Any:
    binding = bind(experiment(group), path)
    binding.write()
    return parse_config(binding.after)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return bound(zoo_jax.Kept, tmp_path_factory.mktemp("bound") / "conf.yaml")


def test_neither_the_import_nor_bind_computes(tmp_path: Path) -> None:
    """JAX has no device in this process, so any computation would fail."""
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT / "tests")])
    environment = os.environ | {"JAX_PLATFORMS": "none", "PYTHONPATH": path}
    command = [sys.executable, "-c", BIND, str(tmp_path / "conf.yaml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "conf.yaml").exists()


def test_what_bind_writes_is_valid(tree: Any) -> None:
    assert list(problems_of(tree, groups(experiment(zoo_jax.Kept)), TrainConfig)) == []
    assert "_src" not in str(tree)
    assert tree["tools"]["nested"] == {
        "_target_": "zoo_jax.Net",
        "first": tree["tools"]["module"] | {"width": 8},
        "head": {
            "_target_": "flax.nnx.nn.linear.Linear",
            **{"in_features": 8, "out_features": 2, "use_bias": True},
            **{"dtype": None, "precision": None, "preferred_element_type": None},
        },
        "shape": [1, 2],
    }


@pytest.fixture
def mesh() -> Iterator[None]:
    """The context in which runs build models; annotations of shardings name its axes."""
    with jax.set_mesh(jax.make_mesh((1, 1), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)):
        yield


def make(value: Any) -> Any:
    """Construct what a default declares, each object with a stream of the same seed."""
    if type(value) in (list, tuple):
        return type(value)(map(make, value))
    if not isinstance(value, Declaration):
        return value
    items = {item.name: item for item in parameters(value.target) or []}
    given = inspect.Signature(list(items.values())).bind(*value.args, **value.kwargs).arguments
    missing = {name: item.default for name, item in items.items() if name not in given}
    kwargs = value.kwargs | {name: item for name, item in missing.items() if isinstance(item, Declaration)}
    if "rngs" in missing and items["rngs"].kind is inspect.Parameter.KEYWORD_ONLY:
        kwargs["rngs"] = nnx.Rngs(jax.random.fold_in(jax.random.key(SEED), 0))
    return value.target(*map(make, value.args), **{name: make(item) for name, item in kwargs.items()})


def arrays(thing: Any) -> dict[str, list[Any]]:
    """Return the values of all arrays of an object of NNX."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(thing))
    keys = [(str(path), jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key), leaf) for path, leaf in leaves]
    return {path: np.asarray(jax.random.key_data(leaf) if is_key else leaf).tolist() for path, is_key, leaf in keys}


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str, tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bind itself compares the calls. Here both are made: with the same graph of modules, and the same values."""
    monkeypatch.setattr("zlib.crc32", lambda _: 0)  # of the key, so that all objects have the same stream
    set_seed(SEED)
    built = build(tree["tools"][name], f"tools.{name}")
    declared = {"typed": Declaration(zoo_jax.Net), "made": Declaration(zoo_jax.Block, 7)}
    expected = make(declared.get(name) or getattr(zoo_jax.Kept, name))
    if isinstance(built, nnx.Pytree):
        assert arrays(built) == arrays(expected)
    assert unlike(expected, lambda: built) is None


@pytest.mark.parametrize("group", REFUSED, ids=lambda group: group.__name__)
def test_refused(group: type, tmp_path: Path) -> None:
    with pytest.raises(BindError, match=r"^tools\.it"):
        bound(group, tmp_path / "conf.yaml")
    assert not (tmp_path / "conf.yaml").exists()


@pytest.mark.parametrize("default", ["jnp.ones(3)", "jax.random.key(0)", "optax.sgd(jnp.float32(0.1))"])
def test_arrays_are_refused(default: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute while `src` is imported, before workers are connected."""
    lines = [
        "import jax, optax",
        "import jax.numpy as jnp",
        f"class Group:\n    def __init__(self, it=({default})): ...",
    ]
    (tmp_path / "computing.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "computing", raising=False)
    import computing

    with pytest.raises(BindError, match=r"^tools\.it.*: JAX computes this array while src is imported; compute it in"):
        bound(computing.Group, tmp_path / "conf.yaml")


def test_streams_depend_on_the_seed_and_the_key() -> None:
    node = {"_target_": "zoo_jax.Block"}

    def values(key: str, seed: int = 1) -> Any:
        set_seed(seed)
        return build(node, key).linear.kernel[...].tolist()

    assert values("models.a") == values("models.a")
    assert values("models.a") != values("models.b")
    assert values("models.a") != values("models.a", seed=2)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rate": "fast"}, "tools.module.rate is 'fast'; zoo_jax.Block takes float"),
        ({"zzz": 3}, "tools.module.zzz: zoo_jax.Block has no such argument. Available: act, rate, width."),
        ({"_target_": "optax.adam"}, "tools.module.learning_rate: missing, and optax.adam has no default for it"),
    ],
)
def test_values_are_checked_against_constructors(change: dict[str, Any], problem: str, tree: Any) -> None:
    module = tree["tools"]["module"] | change
    changed = tree | {"tools": tree["tools"] | {"module": module if "_target_" not in change else change}}
    [found] = problems_of(changed, groups(experiment(zoo_jax.Kept)), TrainConfig)
    assert found.text.startswith(problem)


def test_paths_lead_to_public_modules_of_libraries_but_not_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert path_of(optax.contrib.muon) == "optax.contrib.muon"
    assert path_of(jax.nn.relu) == "jax.nn.relu"
    package = tmp_path / "private_jax"
    package.mkdir()
    (package / "__init__.py").write_text("from private_jax._nets import Net")
    (package / "_nets.py").write_text("class Net: ...")
    monkeypatch.syspath_prepend(tmp_path)
    import private_jax

    assert path_of(private_jax.Net) == "private_jax.Net"
    defer_loading("private_jax")
    assert path_of(private_jax.Net) == "private_jax._nets.Net"


def test_a_constructor_that_fails_is_reported_with_its_key() -> None:
    node = {"_target_": "flax.nnx.nn.linear.Linear", "in_features": -3, "out_features": 4}
    with pytest.raises(ConfigError, match=r"^models\.net: flax\.nnx\.nn\.linear\.Linear cannot be built: "):
        build(node, "models.net")


class Hiding(torch.optim.SGD):
    """An optimizer whose signature does not name its parameters."""

    def __init__(self, **options: Any):
        super().__init__(**options)


class Models:
    map_params_to_optimizers = {"net": "hiding"}

    def __init__(self) -> None:
        self.net = torch.nn.Linear(2, 2)


def test_optimizers_without_parameters_are_built_as_they_are() -> None:
    node = {
        "_target_": "builtins.dict",
        "hiding": {"_target_": f"{__name__}.Hiding", "lr": 0.1},
        "adam": {"_target_": "optax.adamw", "_partial_": True, "weight_decay": 0.1},
        "sgd": {"_target_": "optax.sgd", "learning_rate": 0.1},
    }
    made = build_optimizers(node, Models())
    assert len(made["hiding"].param_groups[0]["params"]) == 2
    assert (made["adam"].func, made["adam"].keywords) == (optax.adamw, {"weight_decay": 0.1})
    assert isinstance(made["sgd"], optax.GradientTransformation)

"""Every kind of default is re-created exactly from YAML, or rejected by name. None is silently wrong."""

import inspect
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mlx_runtime import DUMMY_PARAMS, BaseModule, TrainConfig
from mlx_runtime.config.binding.conf_file import bind
from mlx_runtime.config.binding.equality import unlike
from mlx_runtime.config.binding.expressions import record_default
from mlx_runtime.config.building import build, declare
from mlx_runtime.config.checks import problems_of
from mlx_runtime.config.constructors.declarations import Declaration, defer_loading
from mlx_runtime.config.constructors.signatures import groups
from mlx_runtime.config.interpolation import parse_config
from mlx_runtime.errors import BindError

pytestmark = pytest.mark.pure

defer_loading("zoo")  # as for `src`
defer_loading("zoo_libraries")
import zoo  # noqa: E402
import zoo_libraries  # noqa: E402

KEPT = [*(cls for name, cls in vars(zoo).items() if name.startswith("Keep")), zoo_libraries.kept()]
REFUSED = [cls for name, cls in vars(zoo).items() if name.startswith("Refuse")]


def experiment(group: type) -> type:
    return type(
        "Zoo", (BaseModule,), {"__annotations__": {"cfg": TrainConfig, "tools": group}, "__module__": group.__module__}
    )


def bound_text(group: type, tmp_path: Path) -> str:
    binding = bind(experiment(group), tmp_path / "conf.yaml")
    binding.write()
    return (tmp_path / "conf.yaml").read_text()


def declared(group: type, name: str) -> Any:
    default = inspect.signature(group).parameters[name].default
    if type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
        recorded = record_default(group, name)
        assert recorded is not None
        return recorded[0]
    return default


class Catch:
    """Records the arguments of calls of a group's constructor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, group: type) -> None:
        self.given: dict[str, Any] = {}
        signature = inspect.signature(group)

        def init(made: Any, *args: Any, **kwargs: Any) -> None:
            self.given = dict(signature.bind(*args, **kwargs).arguments)

        init.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *signature.parameters.values()]
        )
        init.__annotations__ = group.__init__.__annotations__  # type: ignore[misc]
        monkeypatch.setattr(group, "__init__", init)


@pytest.fixture(scope="module")
def tree_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[type], Any]:
    """`tree_of(group)`: the group as bind has written it."""

    @cache
    def tree_of(group: type) -> Any:
        tree = parse_config(bound_text(group, tmp_path_factory.mktemp("bound")))
        problems = problems_of(tree, groups(experiment(group)), TrainConfig)
        assert [problem for problem in problems if "???" not in str(problem)] == []
        return tree["tools"]

    return tree_of


@pytest.mark.filterwarnings("ignore")  # libraries deprecate much of their API
@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group in KEPT for name in inspect.signature(group).parameters]
)
def test_kept(group: type, name: str, tree_of: Callable[[type], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tree_of(group)
    expected = declared(group, name)
    catch = Catch(monkeypatch, group)
    it = tree.get(name)

    def make() -> Any:
        if isinstance(it, dict) and it.get("params") == "???":
            return build({name: item for name, item in it.items() if name != "params"}, params=DUMMY_PARAMS)
        found = declare({"_target_": tree["_target_"]} | ({name: it} if name in tree else {}))
        if isinstance(found, Declaration):  # of a group whose argument loads trained weights
            found.make()
        return catch.given[name]

    assert unlike(expected, make) is None
    made = make()
    if isinstance(expected, float) and not math.isnan(expected):  # equal is not enough: -0.0 == 0.0
        assert math.copysign(1, expected) == math.copysign(1, made)
    if isinstance(expected, torch.nn.Module | Declaration):
        assert made is not expected


@pytest.mark.parametrize("group", REFUSED, ids=lambda group: group.__name__)
def test_refused(group: type, tmp_path: Path) -> None:
    with pytest.raises(BindError) as caught:
        bound_text(group, tmp_path)
    assert str(caught.value).startswith(("tools.it", "tools._target_"))
    assert not (tmp_path / "conf.yaml").exists()

"""Mistakes in engines of other packages, reported in one line that names the engine and the method."""

import contextlib
from typing import Any

import pytest

from mlx_runtime.driver.planning import connect
from mlx_runtime.errors import MlxError
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.workers.placement import this_machine

pytestmark = pytest.mark.pure


class Alone:
    @staticmethod
    def refusal(cfg: Any, *, in_job: bool) -> str | None:
        return None

    @staticmethod
    @contextlib.contextmanager
    def connect(cfg: Any, why: str) -> Any:
        yield this_machine(cfg, why)

    def start(self, *args: Any) -> None: ...


class Inherits(Alone):
    pass


class Refuses(Alone):
    @staticmethod
    def refusal(cfg: Any) -> str | None:  # type: ignore[override]
        return None


class Generates(Alone):
    @staticmethod
    def connect(cfg: Any, why: str) -> Any:
        yield this_machine(cfg, why)


class YieldsNothing(Alone):
    @staticmethod
    @contextlib.contextmanager
    def connect(cfg: Any, why: str) -> Any:
        yield


def test_a_subclass_is_the_engine_itself() -> None:
    with connect(TrainConfig(engine=f"{__name__}.Inherits")) as cluster:
        assert cluster.engine == f"{__name__}.Inherits"


@pytest.mark.parametrize(
    ("cls", "method", "error"),
    [
        (Refuses, "refusal", "TypeError: Refuses.refusal() got an unexpected keyword argument 'in_job'"),
        (Generates, "connect", "TypeError: '"),
        (YieldsNothing, "connect", "ConfigError: it yielded None instead of a Cluster"),
    ],
)
def test_a_mistake_names_the_engine_and_the_method(cls: type, method: str, error: str) -> None:
    name = f"{__name__}.{cls.__name__}"
    with pytest.raises(MlxError) as raised, connect(TrainConfig(engine=name)):
        pass
    assert str(raised.value).startswith(f"cfg.engine={name} failed in {method}: {error.removeprefix('ConfigError: ')}")
    assert "\n" not in str(raised.value)


def test_an_error_of_the_block_is_not_one_of_the_engine() -> None:
    with pytest.raises(ZeroDivisionError), connect(TrainConfig(engine=f"{__name__}.Alone")):
        raise ZeroDivisionError

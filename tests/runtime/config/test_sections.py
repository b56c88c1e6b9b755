"""Sections of `cfg`: settings below one key, of which conf.yaml, overrides and user code may change any part."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_runtime import BaseModule, TrainConfig
from mlx_runtime.config.binding.conf_file import bind
from mlx_runtime.driver.request import load_config
from mlx_runtime.loop import resuming
from mlx_runtime.sections import CrossValidation, Elastic, Hub, Section, Sharding

pytestmark = pytest.mark.pure

MAX_FLAT = 35
"""Settings of `TrainConfig` outside of sections. A change may lower this figure, not raise it."""


class Plain(BaseModule):
    cfg: TrainConfig


class Halves:
    def __init__(self, n_splits: int = 2) -> None:
        self.n_splits = n_splits

    def split(self, rows: Any) -> Any:
        raise NotImplementedError


@dataclass
class OwnConfig(TrainConfig):
    strategy: Any = "fsdp"
    sharding: Sharding = Sharding(shard_size=2)
    cross_validation: CrossValidation = CrossValidation(splitter=Halves(3))


class Own(BaseModule):
    cfg: OwnConfig


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLX_STORAGE", raising=False)
    return tmp_path / "conf.yaml"


def bound(experiment: type, conf: Path) -> dict[str, Any]:
    """Bind, and return what conf.yaml lists of `cfg`."""
    bind(experiment, conf).write()
    cfg: dict[str, Any] = yaml.safe_load(conf.read_text())["cfg"]
    return cfg


def write(conf: Path, text: str) -> None:
    """Add lines to `cfg` in a conf.yaml."""
    conf.write_text(conf.read_text().replace("  trackers:\n", f"{text}  trackers:\n"))


def sections() -> dict[str, Section]:
    return {item.name: item.default for item in dataclasses.fields(TrainConfig) if isinstance(item.default, Section)}


def test_few_settings_are_flat() -> None:
    assert len(dataclasses.fields(TrainConfig)) - len(sections()) <= MAX_FLAT
    assert len(sections()) <= 8


class TestConfYaml:
    def test_a_part_of_a_section_is_completed_and_stays_as_it_is(self, conf: Path) -> None:
        bound(Plain, conf)
        write(conf, "  elastic: {max_failures: 5} # flaky\n  hub:\n    timeout_s: 60\n")
        before = conf.read_text()
        assert not bind(Plain, conf).stale
        assert bound(Plain, conf)["elastic"] == {"max_failures": 5}
        assert conf.read_text() == before
        config = load_config(Plain, ["cfg.elastic.min_workers=1"], conf)
        assert config.cfg.elastic == Elastic(min_workers=1, max_failures=5)
        assert config.cfg.hub == Hub()
        assert config.tree["cfg"]["elastic"]["keep_global_batch"] is False


class TestUserCode:
    def test_defaults_of_a_section(self, conf: Path) -> None:
        cfg = bound(Own, conf)
        assert cfg["sharding"] == {"_target_": "mlx_runtime.sections.Sharding", "shard_size": 2, "offload": "none"}
        assert cfg["cross_validation"]["splitter"]["n_splits"] == 3
        assert "elastic" not in cfg
        config = load_config(Own, [], conf)
        assert config.cfg.sharding == Sharding(2)
        assert config.cfg.cross_validation.splitter.n_splits == 3
        found = load_config(Own, ["cfg.sharding.shard_size=4", "cfg.start_workers=4"], conf).cfg.sharding
        assert found == Sharding(4)


def test_settings_that_a_run_keeps(conf: Path) -> None:
    bound(Plain, conf)
    before = load_config(Plain, [], conf).tree
    allowed = ("cfg.elastic.max_failures=1", "cfg.debug.stop_on_nan=true", "cfg.hub.timeout_s=1")
    kept = ("cfg.debug.limit_batches=1", "cfg.cross_validation.folds=2", "cfg.cross_validation.fold=0")
    changes = resuming.changes(before, load_config(Plain, [*allowed, *kept], conf).tree)
    assert [change.key for change in changes] == [
        *(
            "cfg.cross_validation.folds",
            "cfg.cross_validation.fold",
            "cfg.debug.limit_batches",
            "cfg.debug.stop_on_nan",
        ),
        *("cfg.elastic.max_failures", "cfg.hub.timeout_s"),
    ]
    assert resuming.refusals(changes, TrainConfig) == [
        "cfg.cross_validation.folds: null → 2 (it cannot change within a run)",
        "cfg.cross_validation.fold: null → 0 (it cannot change within a run)",
        "cfg.debug.limit_batches: null → 1 (it cannot change within a run)",
    ]

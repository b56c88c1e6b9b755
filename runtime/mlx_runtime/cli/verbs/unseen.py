"""Stand-ins for the code of a project on a machine without torch, from which runs are launched elsewhere."""

import dataclasses
from pathlib import Path
from typing import Any

from mlx_runtime.config import parse_config
from mlx_runtime.config.projects import AN_EXPERIMENT, CONF, Kind
from mlx_runtime.errors import ConfigError, UsageError


def stand_in(kind: Kind, folder: Path) -> type:
    """Return a class with the groups of conf.yaml, for `load_config` with `look`; the job checks the real one.

    Only the runtime's own settings in `cfg` have types.
    """
    from mlx_runtime.training import DataConfig, TrainConfig

    conf = folder / CONF
    if not conf.is_file():
        raise UsageError(f"there is no {CONF}; write it where torch is installed, with: {kind.command} bind")
    try:
        tree = parse_config(conf.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{CONF} is not valid YAML: {error}") from error
    base: Any = TrainConfig if kind == AN_EXPERIMENT else DataConfig
    cfg = tree.get("cfg")
    own = [name for name in cfg if name.isidentifier()] if isinstance(cfg, dict) else []
    known = {field.name for field in dataclasses.fields(base)}
    added = [(name, Any, None) for name in own if name not in known]
    names = {"__module__": __name__, "out_of_range": staticmethod(lambda cfg: _out_of_range(base, cfg))}
    settings = dataclasses.make_dataclass("Settings", added, bases=(base,), namespace=names)
    globals()[settings.__name__] = settings  # where the checks of the config find it
    hints: dict[str, type] = {name: object for name in tree if name.isidentifier()} | {"cfg": settings}
    return type("Unseen", (), {"__module__": "src", "__annotations__": hints, "CONFIG": "cli.verbs.unseen.Settings"})


def _out_of_range(base: Any, cfg: Any) -> list[str]:
    """Return the problems of settings, without those of strategies, which need torch."""
    problems: list[str] = base.out_of_range(
        dataclasses.replace(cfg, strategy=None) if hasattr(cfg, "strategy") else cfg
    )
    return problems

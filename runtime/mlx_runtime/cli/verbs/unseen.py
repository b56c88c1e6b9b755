"""Stand-ins for the code of a project on a machine without torch, from which runs are launched elsewhere."""

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mlx_runtime.config.interpolation import parse_config
from mlx_runtime.config.projects import AN_EXPERIMENT, CONF, Kind
from mlx_runtime.errors import ConfigError, UsageError


def stand_in(kind: Kind, folder: Path) -> type:
    """Return a class with the groups of conf.yaml, for `load_config` with `look`; the job checks the real one.

    Only the runtime's own settings in `cfg` have types.
    """
    from mlx_runtime import DataConfig
    from mlx_runtime.loop.options import TrainConfig

    conf = folder / CONF
    if not conf.is_file():
        raise UsageError(f"there is no {CONF}; write it where torch is installed, with: {kind.command} bind")
    try:
        tree = parse_config(conf.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{CONF} is not valid YAML: {error}") from error
    base: Any = TrainConfig if kind == AN_EXPERIMENT else DataConfig
    cfg = tree.get("cfg")
    node: dict[str, Any] = cfg if isinstance(cfg, dict) else {}
    known = {field.name for field in dataclasses.fields(base)}
    own = [(name, Any, None) for name in node if name.isidentifier() and name not in known and name != "_target_"]
    module, _, name = str(node.get("_target_")).rpartition(".")
    if not name.isidentifier() or module.partition(".")[0] in ("", "mlx_runtime"):
        module, name = __name__, "Settings"
    names = {"__module__": module, "out_of_range": staticmethod(lambda cfg: _out_of_range(base, cfg))}
    settings = dataclasses.make_dataclass(name, own, bases=(base,), namespace=names)
    # Where the checks of the config find it, by the name in conf.yaml.
    vars(sys.modules.setdefault(module, ModuleType(module)))[name] = settings
    globals()["Settings"] = settings
    hints: dict[str, type] = {name: object for name in tree if name.isidentifier()} | {"cfg": settings}
    return type("Unseen", (), {"__module__": "src", "__annotations__": hints, "CONFIG": "cli.verbs.unseen.Settings"})


def _out_of_range(base: Any, cfg: Any) -> list[str]:
    """Return the problems of settings, without those of strategies, which need torch."""
    problems: list[str] = base.out_of_range(
        dataclasses.replace(cfg, strategy=None) if hasattr(cfg, "strategy") else cfg
    )
    return problems

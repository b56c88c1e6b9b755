"""The companions: parts of the package that stand on its core, and that only runs which ask for them load.

The core knows them by the names in this module alone, so that a companion is removed with its folder and its line.
"""

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple


class Companion(NamedTuple):
    """The names by which the core asks for a companion, whose modules are imported when they are needed."""

    setting: str  # in its section of `cfg`; asks for its extension of a run, in `extension.py`
    scheme: str  # of the URIs of runs and checkpoints that its `remote.py` reads


COMPANIONS = {
    "hub": Companion(setting="mirror", scheme="hf"),
}
"""By the name of the folder."""


def asked_for(cfg: Mapping[str, Any]) -> list[Any]:
    """Return the modules `extension` of the companions that the node `cfg` asks for. Each has three functions:

    extension(config)                the `RunExtension` of a run that is about to begin, which it may refuse
    latest(cfg, root, experiment)    with `cfg.resume=auto`, the run to continue or None, and lines for the user
    refuse_sweep(cfg)                raises a ConfigError if the runs of a sweep cannot have the setting
    """
    sections = {name: cfg.get(name) or {} for name in COMPANIONS}
    return [
        _module(name, "extension") for name, item in COMPANIONS.items() if sections[name].get(item.setting) is not None
    ]


def scheme_of(uri: str) -> str | None:
    """Return the scheme of a URI if a companion reads it, or else None."""
    scheme, mark, _ = uri.partition("://")
    return scheme if mark and any(scheme == companion.scheme for companion in COMPANIONS.values()) else None


def remote_of(scheme: str) -> Any:
    """Return the module `remote` of the companion that reads URIs with a scheme."""
    return next(_module(name, "remote") for name, companion in COMPANIONS.items() if companion.scheme == scheme)


def _module(name: str, module: str) -> Any:
    return importlib.import_module(f"mlx_runtime.{name}.{module}")

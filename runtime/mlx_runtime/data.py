"""The verbs of `mlx data`: look after what runs read."""

from typing import TYPE_CHECKING

from mlx_runtime.errors import UsageError
from mlx_runtime.layout import CONF, prepared_root
from mlx_runtime.settings import Settings

if TYPE_CHECKING:
    from mlx_runtime.prepared import Found, Store


def prepared_store() -> "Store":
    """The prepared sets of the experiment here, or of `MLX_STORAGE`.

    Raises:
        UsageError: neither says where they are.
    """
    storage, path = Settings.read().storage, None
    if CONF.is_file():
        from omegaconf import OmegaConf

        conf = OmegaConf.load(CONF)
        storage = storage or OmegaConf.select(conf, "cfg.storage_path")
        path = OmegaConf.select(conf, "cfg.prepared_path")
    if storage is None and path is None:
        raise UsageError("which storage? Change into an experiment, or set MLX_STORAGE=FOLDER")
    from mlx_runtime.prepared import Store

    return Store(prepared_root(storage or "", path))


def unwanted_prepared(store: "Store", older_than_days: float, larger_than_gb: float) -> "list[Found]":
    """Prepared sets to remove: unused for longer, and the longest unused ones of all that are larger together."""
    return store.unwanted(max_age_s=older_than_days * 86_400, max_bytes=larger_than_gb * 1e9)


def remove_prepared(store: "Store", sets: "list[Found]") -> "list[Found]":
    """Remove prepared sets, but not under a run's feet. Returns those that are gone."""
    return [item for item in sets if store.remove(item.name)]

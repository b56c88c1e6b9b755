"""The work of the commands. Each module is imported when one of its commands runs."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    "data positions projects unseen xp",
)

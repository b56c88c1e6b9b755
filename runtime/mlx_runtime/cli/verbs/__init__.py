"""What the commands do; each module is imported when its command runs."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    "data projects xp",
)

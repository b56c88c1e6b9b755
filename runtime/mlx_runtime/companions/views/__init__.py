"""Pages and comparisons: reports of runs, and the differences between two."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    "commands",
    report="OF_TRAINING escape known_facts read_curves render render_runs write",
)

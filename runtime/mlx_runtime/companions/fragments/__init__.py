"""Models cut into fragments for several workers or unequal machines, and replicas that are averaged."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(__name__, "commands replicas", clusterizing="clusterize")

"""Models cut into fragments for several unequal machines, planned by measured memory, time and bandwidth."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(__name__, "commands", clusterizing="clusterize")

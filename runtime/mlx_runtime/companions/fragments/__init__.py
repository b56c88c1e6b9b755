"""One model over several unequal machines: replicas that are averaged from time to time."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(__name__, "replicas")

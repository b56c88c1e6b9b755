"""Where the runs of a sweep train: in processes of this machine, or on a cluster."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    base="STOP SweepEngine SweepEngineClass Trials",
    cluster="OnCluster",
    local="Local",
)

"""Engines, which start the workers of a run: in this process, as processes on this machine, or by Ray."""

from mlx_runtime.importing import door

ENGINES = {
    "in_process": "mlx_runtime.training.engines.in_process.InProcess",
    "local": "mlx_runtime.training.engines.local.Local",
    "nodes": "mlx_runtime.companions.nodes.engine.Nodes",
    "ray": "mlx_runtime.companions.ray.engine.OnRay",
}
"""Import paths of engine classes by name. Other classes are named by their import path in `cfg.engine`."""

__all__, __getattr__ = door(
    __name__,
    "local recovery worker",
    base="Cluster Handle Job StopAsked backend_of lost",
    local="cool_down warm_up",
    placement="JOB_FLAG changing_size check_room engine_class engine_for errors_of shortage this_machine uses_gpus",
    protocol="Engine EngineClass Group",
    scratch="Scratch",
)

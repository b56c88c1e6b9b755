"""Engines, which start the workers of a run: in this process, as processes on this machine, or by Ray."""

ENGINES = {
    "in_process": "mlx_runtime.training.engines.in_process.InProcess",
    "local": "mlx_runtime.training.engines.local.Local",
    "nodes": "mlx_runtime.companions.nodes.engine.Nodes",
    "ray": "mlx_runtime.companions.ray.engine.OnRay",
}
"""Import paths of engine classes by name. Other classes are named by their import path in `cfg.engine`."""

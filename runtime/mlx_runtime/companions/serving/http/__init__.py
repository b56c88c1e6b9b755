"""Servers on this machine: one Starlette application with dynamic batching."""

from mlx_runtime.extras import require

for _library in ("orjson", "starlette", "uvicorn"):
    require(_library, "a server")

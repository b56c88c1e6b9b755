"""Servers on this machine: one ASGI application with dynamic batching, and the commands that control it."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    "registry terminal",
    access="LOOPBACK MAKE_A_TOKEN Access digest_of read_token",
    asgi="NAME Application Limits application",
    server="is_loopback serve",
)

"""Errors that mean only that another worker is lost."""

import re
import sys

import torch

_RAY_LOST = (
    "RayActorError",  # a reader or assigner of rows, or its owner
    "ObjectLostError",
    "WorkerCrashedError",
    "NodeDiedError",
)

_GLOO = re.compile(r"\[[^\]]*\bgloo/transport/[^\]]+:\d+\] ")
"""Prefix of the messages of gloo's connection errors: a location in its source."""


def lost_peer(error: BaseException) -> bool:
    """Return True if an error means only that another worker is lost.

    Gloo raises plain RuntimeErrors whose messages begin with a location in its source, also if user code reraises
    them. Any other RuntimeError, for example about a server that refuses connections, comes from user code.
    """
    ray_errors = sys.modules.get("ray.exceptions")  # if Ray is not imported, it raised no error
    lost = [getattr(ray_errors, name) for name in _RAY_LOST] if ray_errors is not None else []
    if isinstance(error, (torch.distributed.DistError, *lost)):
        return True
    return type(error) is RuntimeError and _GLOO.match(str(error)) is not None

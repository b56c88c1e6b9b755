"""Backends of training functions: the library besides torch whose collectives a function uses.

torch        torch.distributed, which the runtime sets up in each worker anyway
jax          `jax.distributed`, with gloo between CPUs
tensorflow   `TF_CONFIG`, for `tf.distribute.MultiWorkerMirroredStrategy`
"""

import contextlib
import functools
import importlib.util
import json
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from mlx_runtime.config.constructors.targets import named_class
from mlx_runtime.data.loaders import DatasetShards
from mlx_runtime.distributed.collectives import broadcast, gather
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import UsageError, WorkerLostError, short_message
from mlx_runtime.extras import require
from mlx_runtime.loop.job import address_towards
from mlx_runtime.loop.stopping import LoopStopped

BACKENDS = {name: f"{__name__}.{kind}" for name, kind in (("jax", "JAX"), ("tensorflow", "TensorFlow"))}
"""Import paths of backend classes by name. Other classes are named by their import path in `cfg.backend`."""

FORMER = {
    "horovod": "whose last release was in 2023; use 'torch', and DistributedDataParallel for hvd.DistributedOptimizer"
}
"""Backends of Ray SGD's `Trainer` that do not exist here, with the reason and the replacement."""


class Backend(Protocol):
    """A library that connects the workers of a function in its own way, besides torch.

    Every worker has its own object. A worker whose function fails ends without `teardown`.
    """

    def setup(self, addresses: list[str], topology: Topology) -> None:
        """Connect this worker to the others, before its function is imported.

        Args:
            addresses: one `host:port` for each worker, by rank. Its worker reserves the port with a socket that does
                not listen, so that a server with SO_REUSEADDR, as most have, can listen there.
            topology: the position of this worker, and its device.
        """

    def teardown(self) -> None:
        """Disconnect after the function has returned or was stopped. Every worker calls this."""

    def lost_peer(self, error: Exception) -> bool:
        """Return True if an error of the function means only that another worker is lost."""


class JAX:
    """`jax.distributed`, so that `jax.devices()` are those of all workers."""

    def setup(self, addresses: list[str], topology: Topology) -> None:
        import jax

        jax.distributed.initialize(
            addresses[0],
            num_processes=topology.world_size,
            process_id=topology.rank,
            local_device_ids=None if topology.device.type == "cpu" else [topology.device.index],
            cluster_detection_method="deactivate",
            coordinator_bind_address=addresses[0],  # JAX would listen on all interfaces
        )
        if jax.config.jax_cpu_collectives_implementation == "gloo":  # the default
            _listen_at(addresses[topology.rank].rpartition(":")[0].strip("[]"))

    def teardown(self) -> None:
        import jax

        jax.distributed.shutdown()

    def lost_peer(self, error: Exception) -> bool:
        return isinstance(error, ValueError | RuntimeError) and "/gloo/transport/" in str(error)  # the source of gloo


def _listen_at(host: str) -> None:
    """Let JAX's gloo listen at this address instead of that of the machine's name, unless JAX lacks these names."""
    with contextlib.suppress(ImportError, AttributeError):  # nothing public does this
        from jax._src import distributed, xla_bridge
        from jax._src.lib import _jax
        from jax.extend.backend import register_backend_factory

        gloo = _jax.make_gloo_tcp_collectives(distributed.global_state.client, hostname=host)
        register_backend_factory("cpu", functools.partial(xla_bridge.make_cpu_client, gloo), fail_quietly=False)


class TensorFlow:
    """`TF_CONFIG`, which `tf.distribute.MultiWorkerMirroredStrategy` reads."""

    def setup(self, addresses: list[str], topology: Topology) -> None:
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": topology.rank}}
        os.environ["TF_CONFIG"] = json.dumps(config)

    def teardown(self) -> None:
        del os.environ["TF_CONFIG"]

    def lost_peer(self, error: Exception) -> bool:
        import tensorflow as tf

        return isinstance(error, tf.errors.UnavailableError)


def backend_class(name: Any) -> Any:
    """Return the class of a backend; None for `torch`, which needs none.

    Raises:
        UsageError, ConfigError: there is no such backend.
    """
    if name == "torch":
        return None
    if isinstance(name, str) and name in FORMER:
        raise UsageError(f"backend is {name!r}, {FORMER[name]}")
    if not isinstance(name, str) or (name not in BACKENDS and "." not in name):
        known = ", ".join(map(repr, ("torch", *BACKENDS)))
        raise UsageError(f"backend is {name!r}; there are {known}, and classes of other packages, by their import path")
    return named_class("backend", name, BACKENDS, ("setup", "teardown", "lost_peer"))


def require_library(name: str) -> None:
    """Check that the library of a backend is installed, without importing it: a process with its threads cannot fork.

    Raises:
        MissingLibraryError: it is not. The message has the command that installs it.
    """
    if name in BACKENDS and importlib.util.find_spec(name) is None:  # they are named after their libraries
        require(name, f"backend={name!r}")


@contextlib.contextmanager
def connected(name: str, topology: Topology) -> Iterator[None]:
    """Connect the workers with a backend within the block. Every worker must call this.

    Raises:
        WorkerLostError: the code in the block failed because another worker was lost.
    """
    kind = backend_class(name)
    if kind is None:
        yield
        return
    require_library(name)
    backend: Backend = kind()
    with socket.socket(socket.AF_INET6 if ":" in (host := _host(topology)) else socket.AF_INET) as reserved:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # a server with one of them can listen there
            reserved.setsockopt(socket.SOL_SOCKET, option, 1)
        reserved.bind((host, 0))
        port = reserved.getsockname()[1]
        backend.setup(_exchange(f"[{host}]:{port}" if ":" in host else f"{host}:{port}"), topology)
        try:
            yield
        except LoopStopped:  # on all workers
            backend.teardown()
            raise
        except Exception as error:
            if backend.lost_peer(error):
                text = f"rank {topology.rank} lost its connection to another worker: {short_message(error)}"
                raise WorkerLostError(text) from error
            raise
        backend.teardown()


def with_backend(loop: Callable[[Any, DatasetShards], None]) -> Callable[[Any, DatasetShards], None]:
    """Connect the workers with `cfg.backend` of an experiment while its loop runs."""

    @functools.wraps(loop)
    def connected_loop(experiment: Any, shards: DatasetShards) -> None:
        with connected(experiment.cfg.backend, experiment._session.context.topology):
            loop(experiment, shards)

    return connected_loop


def _host(topology: Topology) -> str:
    """Return the address at which other workers reach this one: that of the loopback interface on one machine."""
    if len({*_exchange(topology.local_rank)}) == topology.world_size:
        return "127.0.0.1"
    return address_towards((os.environ["MASTER_ADDR"], 9))  # the same network as torch's


def _exchange(value: Any) -> list[Any]:
    """Return the values of all workers, by rank."""
    values: list[Any] = broadcast(gather(value))
    return values

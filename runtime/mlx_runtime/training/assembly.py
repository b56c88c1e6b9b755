"""Build the experiment of a worker: models first, then the strategy, then optimizers."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mlx_runtime.config.building import build, build_cfg, build_group, build_optimizers
from mlx_runtime.config.targets import object_at
from mlx_runtime.distributed.randomness import seed_everything, seeded
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.errors import ConfigError
from mlx_runtime.runs.checkpoints import members
from mlx_runtime.training.experiment import BaseModule
from mlx_runtime.training.job import Job
from mlx_runtime.training.options import TrainConfig
from mlx_runtime.training.strategies import Strategy


def build_experiment(
    job: Job, topology: Topology, strategy: Strategy, stack: contextlib.ExitStack
) -> tuple[dict[str, Any], BaseModule]:
    """Return the groups of conf.yaml as live objects, and the experiment made of them.

    Args:
        job: The run.
        topology: Topology of this worker.
        strategy: Applied to the models.
        stack: Closed at the end of the run.

    Raises:
        ConfigError: an object cannot be built, or there is no GPU for `cfg.use_gpu=true`.
    """
    cls = object_at(job.experiment)
    cfg = build_cfg(job.tree["cfg"], TrainConfig)
    if cfg.use_gpu and topology.device.type == "cpu":
        hint = "mlx doctor shows what torch finds; cfg.use_gpu=null uses what there is"
        raise ConfigError(f"cfg.use_gpu=true, but rank {topology.rank} has no GPU that torch can use; {hint}")
    if cfg.deterministic:
        stack.enter_context(deterministic())
    groups = _build_groups(job.tree, cfg, strategy)
    return groups, cls(**groups)


def _build_groups(tree: Mapping[str, Any], cfg: TrainConfig, strategy: Strategy) -> dict[str, Any]:
    groups: dict[str, Any] = {"cfg": cfg}
    seed_everything(cfg.seed)
    for name, node in tree.items():
        if name == "datasets":
            groups[name] = build_group(node, name, lambda: seeded(cfg.seed))  # random data is the same on all ranks
        elif name not in ("cfg", "optimizers"):
            groups[name] = build(node, name)
    for model in members(groups.get("models")).values():
        if isinstance(model, torch.nn.Module):
            strategy.prepare(model)
    if "optimizers" in tree:
        groups["optimizers"] = build_optimizers(tree["optimizers"], groups.get("models"))
    return groups


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Restrict torch to deterministic algorithms inside the block."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is initialized
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]

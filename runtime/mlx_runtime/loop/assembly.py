"""The objects that a worker builds from the config: models, optimizers and other groups, and the dataset shards."""

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from mlx_runtime import companions
from mlx_runtime.config.building import build, build_group, build_optimizers, built_to_be_restored
from mlx_runtime.config.constructors.declarations import is_pretrained
from mlx_runtime.config.constructors.targets import object_at, targets_of
from mlx_runtime.data.definitions import construction, stream_names
from mlx_runtime.data.loaders import DatasetShard, DatasetShards, Loader, LoaderOptions, reading_processes
from mlx_runtime.distributed.collectives import broadcast
from mlx_runtime.distributed.randomness import set_seed
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.loop.experiment import BaseModule
from mlx_runtime.loop.job import Job
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.runs.checkpoints.groups import members
from mlx_runtime.runs.checkpoints.store import CheckpointStore

if TYPE_CHECKING:
    from mlx_runtime.loop.strategies import DDP


def build_experiment(job: Job, topology: Topology, cfg: Any, strategy: "DDP") -> tuple[dict[str, Any], BaseModule]:
    """Build the groups of conf.yaml, and return them and the experiment that contains them.

    Raises:
        ConfigError: an object cannot be built.
    """
    cls = object_at(job.experiment)
    if topology.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # `fp32_precision` would break torch.compile in torch 2.13
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is initialized
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if not topology.writes:
        silence_load_reports()
    groups: dict[str, Any] = {"cfg": cfg}
    set_seed(cfg.seed)
    for name, node in job.tree.items():
        if name == "datasets":
            groups[name] = build_group(node, name, lambda item: construction(job.tree["datasets"][item], cfg.seed))
        elif name == "models":
            make = partial(strategy.build, node)
            groups[name] = built_to_be_restored(make) if _restores(job, topology, cfg, node) else make()
        elif name not in ("cfg", "optimizers"):
            groups[name] = build(node, name)
    if cfg.tuning:
        strategy.tuning = companions.part("surgery.tuning").Tuner(cfg.tuning, groups.get("models"), strategy.topology)
    if "optimizers" in job.tree:
        make_optimizers = strategy.tuning.optimizers if cfg.tuning else build_optimizers
        groups["optimizers"] = make_optimizers(job.tree["optimizers"], groups.get("models"))
        strategy.prepare_optimizers(members(groups["optimizers"], Optimizer))
    return groups, cls(**groups)


def silence_load_reports() -> None:
    """Silence transformers' reports of missing and unexpected weights here; another worker prints the same ones."""
    logging.getLogger("transformers.modeling_utils").setLevel(logging.ERROR)


def _restores(job: Job, topology: Topology, cfg: Any, models: Mapping[str, Any]) -> bool:
    """Return True if a checkpoint will overwrite the pretrained weights of models. Every worker must call this."""
    builds_weights = any(item.save == "trained" for item in (cfg.tuning or {}).values())
    if builds_weights or not any(is_pretrained(object_at(target)) for target in targets_of(models)):
        return False
    some = broadcast(CheckpointStore(job.folder.checkpoints).any() if topology.writes else None)
    return bool(some or cfg.restore_checkpoint_path)


def dataset_shards(
    cfg: TrainConfig, datasets: Any, job: Job, strategy: "DDP", follow: Callable[[Loader], Loader]
) -> DatasetShards:
    """Return one shard per argument of `Datasets`, in order. Every worker must call this.

    `follow` is called with each new loader, and returns the loader to use.
    """
    topology = strategy.topology
    nodes = {name: node for name, node in job.tree.get("datasets", {}).items() if not name.startswith("_")}
    streamed = {name: nodes[name] for name in stream_names(job.tree) if name not in job.prepared}
    arguments = streamed, job.project, topology, cfg.seed, job.cluster.in_driver
    streams = companions.part("ray.stream_reader").stream_readers(*arguments) if streamed else {}
    keeps_global_batch = cfg.elastic.keep_global_batch and not job.cluster.in_driver
    wanted = cfg.start_workers // strategy.model_parallel_size(cfg, cfg.start_workers) if keeps_global_batch else None
    limits = [limit for limit in (cfg.debug.limit_batches, cfg.debug.overfit_batches) if limit is not None]
    options = LoaderOptions(
        seed=cfg.seed,
        prefetch=cfg.prefetch_batches,
        processes=reading_processes(cfg.loader),
        accumulate=cfg.accumulate_grad_batches,
        wanted_workers=wanted,
        limit=min(limits, default=None),
        repeats=cfg.debug.overfit_batches is not None,
    )
    return DatasetShards(
        {
            name: DatasetShard(
                name=name,
                group=datasets,
                topology=topology,
                options=options,
                prepared=job.prepared.get(name),
                stream=streams.get(name),
                subset=job.subsets.get(name),
                node=nodes[name],
                follow=follow,
            )
            for name in nodes
        }
    )

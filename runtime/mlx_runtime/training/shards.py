"""The datasets of a run as one worker reads them."""

from collections.abc import Callable, Mapping
from typing import Any

from mlx_runtime.data.assigner import BlockAssigner, start_assigner
from mlx_runtime.data.loaders import DatasetShard, DatasetShards, Loader, LoaderOptions, reading_processes
from mlx_runtime.data.stream_reader import StreamReader
from mlx_runtime.data.streams import stream_names
from mlx_runtime.distributed.collectives import broadcast
from mlx_runtime.distributed.topology import Topology
from mlx_runtime.training.job import Job
from mlx_runtime.training.options import TrainConfig


def dataset_shards(
    cfg: TrainConfig, datasets: Any, job: Job, topology: Topology, follow: Callable[[Loader], Loader]
) -> DatasetShards:
    """Return one shard per argument of `Datasets`, in order. Every worker must call this.

    Args:
        cfg: Settings of the run.
        datasets: The live object of the group in conf.yaml.
        job: The run.
        topology: Topology of this worker.
        follow: Returns the loader to use instead of a new one.
    """
    nodes = {name: node for name, node in job.tree.get("datasets", {}).items() if not name.startswith("_")}
    streamed = {name: nodes[name] for name in stream_names(job.tree) if name not in job.prepared}
    streams = _stream_readers(streamed, job, topology, cfg.seed)
    keeps_global_batch = cfg.keep_global_batch and job.cluster.engine != "in_process"
    limits = [limit for limit in (cfg.limit_batches, cfg.overfit_batches) if limit is not None]
    options = LoaderOptions(
        seed=cfg.seed,
        processes=reading_processes(cfg.loader),
        accumulate=cfg.accumulate_grad_batches,
        wanted_workers=cfg.start_workers if keeps_global_batch else None,
        limit=min(limits, default=None),
        repeats=cfg.overfit_batches is not None,
    )
    return DatasetShards(
        {
            name: DatasetShard(
                name,
                datasets,
                topology,
                options,
                prepared=job.prepared.get(name),
                stream=streams.get(name),
                follow=follow,
            )
            for name in nodes
        }
    )


def _stream_readers(nodes: Mapping[str, Any], job: Job, topology: Topology, seed: int) -> dict[str, StreamReader]:
    """Return readers of streams of Ray Data by name. Rank 0 starts what assigns their rows to all workers."""
    if not nodes:
        return {}
    assigners = {}
    if job.cluster.engine == "in_process":
        assigners = {name: BlockAssigner(node, name, seed, job.project) for name, node in nodes.items()}
    elif topology.writes:
        size = topology.data_parallel_size
        assigners = {name: start_assigner(node, name, seed, job.project, size) for name, node in nodes.items()}
    return {name: StreamReader(assigner, name) for name, assigner in broadcast(assigners).items()}

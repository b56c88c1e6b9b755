"""From a model and nodes to a plan: its table, and its file."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, Optimizer
from torch.utils._pytree import tree_leaves

from mlx_runtime import companions
from mlx_runtime.companions.fragments.costs import Machine, Plan, roles
from mlx_runtime.companions.fragments.links import HALVES
from mlx_runtime.companions.fragments.planfile import write
from mlx_runtime.companions.fragments.planning import FILE, plan
from mlx_runtime.companions.fragments.tracing import Trace, device_of, trace
from mlx_runtime.errors import ConfigError, UsageError
from mlx_runtime.runs.tables import plural, print_table

RESERVE = 0.1
"""Share of a node's memory that is left for the process itself, and for temporary tensors."""

NODES = "node_data/node_configs.json"


def clusterize(
    model: nn.Module,
    example_args: Sequence[Any],
    nodes: str | Path | Mapping[str, Any] = NODES,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    optimizer: Optimizer | None = None,
    microbatches: int = 4,
    clusters: int | None = None,
    average_every: int = 1,
    all_nodes: bool = False,
    traffic: str | None = None,
    name: str = "net",
    output: str | Path | None = FILE,
) -> Plan:
    """Cut a model for unequal machines, print which of them holds which blocks, and write the plan.

        clusterize(model, example_args=(torch.rand(64, 3, 28, 28),), nodes="nodes.json")

    Memory is measured on tensors without memory, and time by a few forward and backward passes.

    Args:
        model: any model. One on the meta device, or too large for this machine, has times estimated from its FLOPs.
        example_args: arguments of a call, with a batch of the size that a cluster will train on.
        nodes: file with the machines, or its content, `{"0": {"IP": "10.0.0.1", "benchmarks": {"ram": 8, "bandwidth":
            20}}}` with GB and Mbps.
        example_kwargs: keyword arguments of the call.
        optimizer: its states need memory, too; None counts those of Adam.
        microbatches: parts of a batch that follow each other through a cluster.
        clusters: number of clusters, which hold the whole model each; None for the most batches per second.
        average_every: steps between two averages of the clusters.
        all_nodes: leave no machine idle, even if the others would be faster without it.
        traffic: `cfg.fragments.traffic`, the form in which activations and gradients are sent.
        name: name of the model in `Models`, for the file.
        output: file for the plan; None writes none.

    Raises:
        ConfigError: the model does not fit, or cannot be cut; or the nodes are wrong.
        UsageError: `example_args` is a tensor, or there is no such `traffic`.
    """
    if isinstance(example_args, torch.Tensor):
        raise UsageError("example_args is a tensor; write a tuple of arguments: example_args=(tensor,)")
    if traffic not in (None, *HALVES):
        raise UsageError(f"traffic is {traffic!r}; write 'bf16' or 'fp16', or None for values as they are")
    optimizers = [optimizer] if optimizer is not None else [Adam(model.parameters())]
    device = device_of(model)
    machines = machines_of(nodes)
    traced = trace(model, example_args, example_kwargs, optimizers, traffic=traffic)
    found = plan(
        traced.blocks,
        machines,
        microbatches=microbatches,
        clusters=clusters,
        average_every=average_every,
        all_nodes=all_nodes,
        collects=device.type == "cpu",
    )
    show(found, traced, rows_of(example_args, example_kwargs), traffic)
    if output is not None:
        write(Path(output), name, found)
    return found


def machines_of(nodes: str | Path | Mapping[str, Any]) -> list[Machine]:
    """Return the machines of a nodes file, or of its content; raise ConfigError if it lacks a size."""
    roster = companions.part("torchrun.roster")
    title = "nodes" if isinstance(nodes, Mapping) else str(nodes)
    listed = roster.parse(nodes, title) if isinstance(nodes, Mapping) else roster.read(Path(nodes))
    for node in listed:
        for name, unit in (("ram", "GB"), ("bandwidth", "Mbps")):
            if getattr(node, name) is None:
                raise ConfigError(f'{title}, node {node.name}: {name} is missing; write "{name}": its {unit}')
    return [
        Machine(node.name, node.ram * 1e9 * (1 - RESERVE), node.bandwidth * 1e6 / 8, node.speed or 1.0)
        for node in listed
    ]


def rows_of(args: Any, kwargs: Any) -> int:
    """Return the number of rows in a batch."""
    tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor) and item.ndim]
    return len(tensors[0]) if tensors else 1


def show(found: Plan, traced: Trace, rows: int, traffic: str | None = None) -> None:
    """Print the stages of each cluster, and the expected time of a step."""
    lines = []
    for number, stages in enumerate(found.clusters):
        slowest = max(stages, key=lambda item: item.busy_s)
        for role, stage in zip(roles(len(stages)), stages, strict=True):
            names = [block.name or "all" for block in found.blocks[stage.first : stage.last + 1]]
            lines.append(
                {
                    "cluster": str(number),
                    "node": stage.machine.name,
                    "role": role,
                    "blocks": names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})",
                    "parameters": f"{stage.parameters:,}",
                    "MB": f"{stage.memory / 1e6:,.1f} of {stage.machine.memory / 1e6:,.0f}",
                    "compute": _time(stage.compute_s),
                    "transfer": _time(stage.transfer_s + stage.outputs_s),
                    "step": _time(found.step_s(number)) if role == "Root" else "",
                    "bottleneck": f"{_bottleneck(stage)} ({_time(stage.busy_s)})" if stage is slowest else "",
                }
            )
    print_table(lines, sys.stdout)
    count = len(found.clusters)
    uses = [f"{_time(found.outputs_s)} to send outputs to all stages"] if found.outputs_s >= 5e-5 else []
    uses += [f"{_time(found.average_s)} to average {count} clusters"] if count > 1 else []
    share = f"; {' and '.join(uses)}" if uses else ""
    parts = f"{found.microbatches} microbatch{'es' * (found.microbatches > 1)}"
    parts += f" sent as {traffic}" if traffic else ""
    print(f"{_time(found.total_s)} per step of {plural(count * rows, 'row')}, in {parts}{share}")
    if found.idle:
        print(f"idle: {', '.join(machine.name for machine in found.idle)}; the fastest plan found does not use them")
    for note in traced.notes:
        print(f"note: {note}")


def _bottleneck(stage: Any) -> str:
    return "compute" if stage.compute_s >= stage.transfer_s else "network"


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:,.1f} ms"


def next_step(found: Plan, file: Path, nodes: Path, overrides: Sequence[str] = ()) -> str:
    """Return the command that trains with a plan, or the reason why none does.

    Args:
        found: The plan.
        file: Its file.
        nodes: File with the machines.
        overrides: Those with which the plan was made, and options for variants.
    """
    if max(map(len, found.clusters)) == 1:
        return "each cluster is one node, so train with cfg.strategy=ddp, without this plan"
    settings = {"cfg.strategy": "pipeline", "cfg.fragments.plan": file}
    words = [f"{name}={value}" for name, value in settings.items()]
    words += [shlex.quote(item) for item in overrides if item.partition("=")[0] not in settings]
    left_out = f"; first remove {', '.join(item.name for item in found.idle)} from {nodes}" if found.idle else ""
    return f"next: mlx train join {nodes} --name NODE {' '.join(words)}{left_out}"  # on each of them

"""The command that plans the fragments of a model."""

from pathlib import Path

import click

from mlx_runtime.cli import commands, options
from mlx_runtime.cli.verbs import projects
from mlx_runtime.config.projects import AN_EXPERIMENT
from mlx_runtime.driver.arguments import Request


@click.command("clusterize", context_settings=commands.OVERRIDES)
@options.debug
@click.option("--nodes", metavar="FILE", type=options.PAGE, default="nodes.json", show_default=True, help="Machines.")
@click.option("--model", metavar="NAME", type=options.word, help="Model in Models. Default: the largest.")
@click.option("--clusters", metavar="K", type=click.IntRange(min=1), help="Number of clusters. Default: the fastest.")
@click.option("--all-nodes", is_flag=True, help="Leave no node idle.")
@click.option("--dry-run", is_flag=True, help="Print the plan, and write nothing.")
@click.option("-o", "--output", metavar="FILE", type=options.PAGE, help="Default: fragments.json beside conf.yaml.")
@commands.variant_option
@click.argument("overrides", nargs=-1)
def train_clusterize(
    nodes: Path,
    model: str | None,
    clusters: int | None,
    all_nodes: bool,
    dry_run: bool,
    output: Path | None,
    variants: tuple[str, ...],
    overrides: tuple[str, ...],
) -> None:
    """Cut a model for machines that cannot hold it: measure its blocks, and plan which node holds which.

    Rows come from the experiment's own loader, with its batch_size per pipeline.
    """
    words = Request.of(overrides, variants=variants).overrides
    _, experiment = projects.load(AN_EXPERIMENT, words, "clusterize")
    import torch

    from mlx_runtime.companions.fragments import clusterizing
    from mlx_runtime.companions.fragments.capturing import capture
    from mlx_runtime.companions.fragments.planfile import write
    from mlx_runtime.companions.fragments.planning import FILE, plan
    from mlx_runtime.companions.fragments.tracing import trace
    from mlx_runtime.config.projects import CONF
    from mlx_runtime.distributed.topology import device_here
    from mlx_runtime.driver.request import load_config

    config = load_config(experiment, words)
    cfg = config.cfg
    torch.set_num_threads(cfg.cpus_per_worker)
    device = torch.device("cpu") if cfg.use_gpu is False else device_here()
    machines = clusterizing.machines_of(nodes)
    call = capture(experiment, config, model, device)
    traffic = cfg.fragments.traffic
    traced = trace(call.model, call.args, call.kwargs, call.optimizers, traffic=traffic, device=device)
    found = plan(
        traced.blocks,
        machines,
        microbatches=cfg.fragments.microbatches,
        clusters=clusters,
        average_every=cfg.replicas.every or 1,
        all_nodes=all_nodes,
        collects=device.type == "cpu",
    )
    clusterizing.show(found, traced, clusterizing.rows_of(call.args, call.kwargs), traffic)
    if not dry_run:
        file = output or CONF.with_name(FILE)
        write(file, call.name, found)
        click.echo(f"wrote {file}; {clusterizing.next_step(found, file, nodes, words)}")

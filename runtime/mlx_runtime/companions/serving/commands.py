"""Commands that answer with trained models."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from mlx_runtime.cli import options
from mlx_runtime.cli.options import say, word
from mlx_runtime.errors import UsageError, printable
from mlx_runtime.runs import queries

if TYPE_CHECKING:
    from mlx_runtime.companions.serving.cluster import Deployment

checkpoint_option = click.option(
    "--checkpoint", metavar="WHICH", type=word, help="best (the default), latest, or epoch_0004."
)
code_option = click.option(
    "--code", type=click.Choice(["here", "stored"]), default="here", show_default=True, help="Code of the model."
)


@click.command("launch")
@options.name()
@options.run("latest")
@checkpoint_option
@code_option
@click.option("--replicas", type=click.IntRange(1), default=1, show_default=True, help="Processes that answer.")
@click.option("--max-replicas", type=click.IntRange(1), help="Start up to this many under load.")
@click.option("--gpu", is_flag=True, help="Give each replica a GPU.")
@click.option("--route", metavar="/PATH", type=word, help="Path and name of the application. Default: /NAME.")
@click.option("--host", help="Address on which nodes listen, like 0.0.0.0, which needs a token. Default: 127.0.0.1.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port on which nodes listen. Default: 8000.")
@options.address
@options.verbosity
def serve_launch(
    name: str,
    run: str,
    checkpoint: str | None,
    code: str,
    replicas: int,
    max_replicas: int | None,
    gpu: bool,
    route: str | None,
    host: str | None,
    port: int | None,
    ray_address: str | None,
) -> None:
    """Answer requests with a RUN (run_003, 3 or latest) of NAME on a Ray cluster, detached.

    The token in MLX_SERVE_TOKEN, if it is set, is required from clients.
    """
    from mlx_runtime.companions.serving import cluster

    if max_replicas is not None and max_replicas < replicas:
        raise UsageError(f"--max-replicas is {max_replicas}; expected at least --replicas, {replicas}")
    stored = code == "stored"
    servers, upload = cluster.connect(ray_address, stored=stored)
    token = os.environ.get("MLX_SERVE_TOKEN") or None
    settings: dict[str, Any] = {"replicas": replicas, "max_replicas": max_replicas, "gpus": int(gpu)}
    folder = queries.resolve_run(name, run)
    spec = cluster.spec_of(folder, checkpoint, route=route, token=token, stored=stored, **settings)
    with _detached(spec.name, servers.option):
        _show(servers.launch(spec, upload, host, port, write=say), servers.option)


@contextlib.contextmanager
def _detached(name: str, option: str) -> Iterator[None]:
    """Say after Ctrl-C that the cluster goes on with its task."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(err=True)
        say(f"the cluster may continue to deploy {name}; to end that: mlx serve stop {name} {option}", err=True)
        sys.exit(130)


def _show(deployed: "Deployment", option: str) -> None:
    name = deployed.spec.name
    commands = {"log": "logs", "update": "update", "stop": "stop"}
    facts = deployed.facts()
    facts |= {
        title: f"mlx serve {verb} {name}{' RUN' * (verb == 'update')} {option}" for title, verb in commands.items()
    }
    for title, text in facts.items():
        say(f"{title:<9} {text}")


@click.command("ls")
@options.address
@options.json
def serve_ls(ray_address: str | None, as_json: bool) -> None:
    """List the models that a Ray cluster serves."""
    from mlx_runtime.companions.serving import cluster

    found = cluster.Cluster.connect(ray_address).deployments()
    if as_json:
        click.echo(json.dumps([item.document() for item in found.values()], indent=2))
    for name, item in {} if as_json else found.items():
        say(f"{name}  {item.status}  {item.running} of {item.wanted} replicas  {item.title}  {item.url}  {item.reason}")


@click.command("logs")
@click.argument("name", type=word)
@click.option("-n", "--lines", type=click.IntRange(1), default=100, show_default=True, help="Lines of each replica.")
@options.address
def serve_logs(name: str, lines: int, ray_address: str | None) -> None:
    """Print the last lines of the logs of the replicas of NAME on a Ray cluster."""
    from mlx_runtime.companions.serving import cluster

    for text in cluster.Cluster.connect(ray_address).logs(name, lines):
        click.echo(printable(text))


@click.command("stop")
@click.argument("name", type=word)
@options.address
def serve_stop(name: str, ray_address: str | None) -> None:
    """Stop NAME on a Ray cluster, when it has answered what it has accepted."""
    from mlx_runtime.companions.serving import cluster

    cluster.Cluster.connect(ray_address).stop(name)


@click.command("update")
@click.argument("name", type=word)
@options.run("latest")
@checkpoint_option
@code_option
@options.address
def serve_update(name: str, run: str, checkpoint: str | None, code: str, ray_address: str | None) -> None:
    """Serve another RUN (run_003, 3, latest or its path) as NAME on a Ray cluster, without a dropped request."""
    from mlx_runtime.companions.serving import cluster

    stored = code == "stored"
    servers, upload = cluster.connect(ray_address, stored=stored)
    former = servers.find(name)
    folder = queries.resolve_run(run) if "/" in run else queries.resolve_run(former.experiment, run)
    spec = cluster.spec_of(folder, checkpoint, stored=stored)
    with _detached(name, servers.option):
        _show(servers.update(name, spec, upload, write=say), servers.option)

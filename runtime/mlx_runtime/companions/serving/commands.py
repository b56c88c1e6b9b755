"""Commands that use trained models: predictions, exports and servers."""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_runtime.cli import options
from mlx_runtime.cli.options import FOLDER, PAGE, say, word
from mlx_runtime.errors import ConfigError, UsageError
from mlx_runtime.runs.queries import lookup
from mlx_runtime.settings import Settings

if TYPE_CHECKING:
    from mlx_runtime.companions.serving.cluster import client

FORMATS = ("pt2", "safetensors", "onnx")

port_option = click.option("--port", type=click.IntRange(1, 65535), help="Port of the server, if there are several.")

cluster_option = click.option(
    "--ray-address", metavar="URL", help="Models on this cluster, like http://head:8265, instead of this machine."
)

application_argument = click.argument("name", type=word, required=False)

checkpoint_option = click.option(
    "--checkpoint",
    metavar="WHICH",
    type=word,
    help="best, latest or epoch_0004. Default: best, or latest if there is none.",
)
code_option = click.option(
    "--code",
    type=click.Choice(["stored"]),
    help="Use the code stored with the run. Anyone who can write to its storage could have changed that code.",
)


def _columns(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word(name).strip() for name in text.split(","))) if text else ()


@click.command("predict")
@options.verbosity
@click.argument("run", type=word, default="latest", metavar="[RUN]")
@checkpoint_option
@click.option(
    "--dataset",
    metavar="ROWS",
    type=word,
    help="test, src.datasets.Others, or a file. Default: predict or test.",
)
@click.option(
    "-o",
    "--output",
    type=PAGE,
    default="predictions.parquet",
    show_default=True,
    help="A .parquet or .jsonl file.",
)
@click.option("--workers", metavar="N", type=click.IntRange(min=1), help="Processes. Default: 1, or one per GPU.")
@click.option(
    "--batch-size",
    metavar="N",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Rows per call of predict.",
)
@click.option("--device", metavar="D", type=word, help="Such as cpu or cuda:1. Default: a GPU if there is one.")
@click.option("--keep", metavar="COLUMN,...", help="Copy these columns of the rows to the output.")
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
@code_option
def train_predict(
    run: str,
    checkpoint: str | None,
    dataset: str | None,
    output: Path,
    workers: int | None,
    batch_size: int,
    device: str | None,
    keep: str | None,
    force: bool,
    code: str | None,
) -> None:
    """Write the outputs of predict for every row of a dataset or file. Repeat an interrupted command to resume it.

    RUN is run_003, 3, latest (the default), name/run_003, or the folder or URI of a run.
    """
    from mlx_runtime.companions.serving.predictions.offline import Options, predict

    chosen = Options(checkpoint, dataset, workers, batch_size, device, _columns(keep), force, code is not None)
    try:
        say(predict(run, output, chosen))
    except ConfigError as error:
        error.hint = error.hint or ("" if code else "on the command line, --code stored uses the stored code")
        raise


def formats(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> list[str]:
    """Convert `pt2,onnx`, which may be repeated."""
    names = [name.strip() for value in values for name in value.split(",")]
    if unknown := [name for name in names if name not in FORMATS]:
        raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(FORMATS)}")
    return names


@click.command("export")
@options.name()
@options.run("latest")
@click.option("-o", "--output", type=FOLDER, help="Default: NAME_RUN_CHECKPOINT in the working directory.")
@checkpoint_option
@click.option(
    "--format",
    "chosen",
    multiple=True,
    default=("pt2",),
    show_default=True,
    callback=formats,
    metavar="pt2|safetensors|onnx",
    help="Repeat it, or separate names by commas. The weights are always written as safetensors.",
)
@code_option
@click.option("--force", is_flag=True, help="Replace an earlier export.")
@click.option(
    "--timeout", type=click.FloatRange(0.1), default=900, show_default=True, help="Seconds for the check of the export."
)
def xp_export(
    name: str,
    run: str,
    output: str | None,
    checkpoint: str | None,
    chosen: list[str],
    code: str | None,
    force: bool,
    timeout: float,
) -> None:
    """Export a RUN (run_003, 3 or latest) of NAME as a program that runs without this project.

    The outputs of the program are compared with those of `predict`, in a process that cannot import mlx_runtime.
    """
    from mlx_runtime.companions.serving.exports.artifact import export

    folder = None if output is None else Path(output)
    kept: dict[str, Any] = {"trust": code == "stored", "force": force, "timeout_s": timeout}
    say(export(lookup.resolve_run(name, run), folder, checkpoint, chosen, **kept, report=partial(say, err=True)))


@click.command("run")
@click.argument("models", type=word, nargs=-1, metavar="[NAME] [RUN] [OTHER=RUN]...")
@checkpoint_option
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 for any free port.")
@click.option(
    "--host",
    type=word,
    default="127.0.0.1",
    show_default=True,
    help="0.0.0.0 to listen for other machines, which need a token: MLX_SERVE_TOKEN.",
)
@click.option(
    "--max-batch", type=click.IntRange(1), default=32, show_default=True, help="Maximum number of rows in a batch."
)
@click.option(
    "--max-wait-ms", type=click.FloatRange(0), default=0, help="Time that a batch waits for more rows. Default: 0."
)
@click.option(
    "--max-queue", type=click.IntRange(1), default=1024, show_default=True, help="Maximum number of waiting rows."
)
@click.option(
    "--timeout", type=click.FloatRange(0.1), default=30, show_default=True, help="Seconds to answer a request."
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads of torch. Default: OMP_NUM_THREADS, or 1.")
@click.option("--shadow", metavar="OTHER", type=word, help="A run to compare on the same rows, such as run_004.")
@code_option
@options.debug
def serve_run(
    models: tuple[str, ...],
    checkpoint: str | None,
    port: int,
    host: str,
    max_batch: int,
    max_wait_ms: float,
    max_queue: int,
    timeout: float,
    threads: int | None,
    shadow: str | None,
    code: str | None,
) -> None:
    """Answer HTTP requests with a RUN (run_003, 3 or latest) of NAME, or with an export.

    NAME is the folder of an export, or an experiment; the default is the one in the working directory. More models are
    added as OTHER=RUN, such as small=digits/run_004. The first answers at /predict, each at /models/NAME/predict.
    """
    from mlx_runtime.companions.serving.http import terminal
    from mlx_runtime.companions.serving.http.asgi import Limits

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    sources = terminal.parse(models)
    limits = Limits(max_batch, max_wait_ms / 1000, max_queue, timeout_s=timeout)
    other = None if shadow is None else next(iter(sources.values())).other(shadow)
    options: dict[str, Any] = {"checkpoint": checkpoint, "trust": code is not None, "shadow": other}
    sys.exit(terminal.ModelServer(sources, limits, host, port, **options).run(say))


@click.command("ls")
@cluster_option
@options.json
def serve_ls(ray_address: str | None, as_json: bool) -> None:
    """List your servers on this machine, or the models on a cluster."""
    from mlx_runtime.companions.serving.http import registry
    from mlx_runtime.storage.files import to_json

    if ray_address is not None:
        from mlx_runtime.companions.serving.cluster import client

        found = [*client.Cluster.connect(ray_address).deployments().values()]
        if as_json:
            click.echo(to_json([item.document() for item in found]), nl=False)
            return
        for item in found:
            facts = (item.url, item.title, item.status, f"{item.running} of {item.wanted} replicas", item.reason)
            say("  ".join(filter(None, facts)))
        if not found:
            say("no model is deployed there; deploy one: mlx serve launch NAME", err=True)
        return
    servers = registry.servers()
    if as_json:
        click.echo(to_json(servers), nl=False)
        return
    for record in servers:
        models = ", ".join(f"{name}={title}" for name, title in record["models"].items())
        say(f"{record['url']}  {models}  {record['status']}")
    if not servers:
        say("no server is running; start one: mlx serve run NAME", err=True)
    if address := os.environ.get("RAY_ADDRESS"):
        say(f"models on the cluster in RAY_ADDRESS: mlx serve ls --ray-address {shlex.quote(address)}", err=True)


@click.command("logs")
@application_argument
@port_option
@cluster_option
def serve_logs(name: str | None, port: int | None, ray_address: str | None) -> None:
    """Print the log of a server, or the last lines of the logs of NAME on a cluster."""
    from mlx_runtime.companions.serving.http import registry

    if ray_address is not None:
        from mlx_runtime.companions.serving.cluster import client

        for text in client.Cluster.connect(ray_address).logs(_named(name)):
            for line in text.splitlines():
                say(line)
        return
    _refuse_name(name)
    for line in Path(registry.find(port)["log"]).read_text(errors="replace").splitlines():
        say(line)


@click.command("stop")
@application_argument
@port_option
@cluster_option
def serve_stop(name: str | None, port: int | None, ray_address: str | None) -> None:
    """Stop a server, or NAME on a cluster, once all accepted requests are answered."""
    from mlx_runtime.companions.serving.http import registry

    if ray_address is not None:
        from mlx_runtime.companions.serving.cluster import client

        say(f"stopped {client.Cluster.connect(ray_address).stop(_named(name)).url}")
        return
    _refuse_name(name)
    record = registry.find(port)
    registry.ask(record, {"action": "stop"}, registry.ANSWER_S)
    registry.wait_for_end(record)
    say(f"stopped {record['url']}")


@click.command("update")
@click.argument("name", type=word)
@click.argument("run", type=word)
@port_option
@cluster_option
@checkpoint_option
@code_option
def serve_update(
    name: str, run: str, port: int | None, ray_address: str | None, checkpoint: str | None, code: str | None
) -> None:
    """Replace the model NAME by another RUN without failing a request.

    RUN without an experiment is one of the experiment that NAME serves now. On this machine, RUN can also be the folder
    of an export.
    """
    from mlx_runtime.companions.serving.http import registry

    if ray_address is not None:
        from mlx_runtime.companions.serving.cluster import client

        stored = code is not None
        servers, upload = client.connect(ray_address, stored=stored)
        former = servers.find(name)
        folder = lookup.resolve_run(run) if "/" in run else lookup.resolve_run(former.experiment, run)
        spec = client.spec_of(folder, checkpoint, stored=stored)
        with _detached(name, servers.option):
            _show(servers.update(name, spec, upload, write=_progress), servers.option)
        return
    record = registry.find(port, name)
    source = str(Path(run).resolve()) if Path(run).is_dir() else run
    message = {"action": "update", "name": name, "run": source, "checkpoint": checkpoint, "code": code}
    say(registry.ask(record, message, registry.UPDATE_S))


@click.command("launch")
@options.name()
@options.run("latest")
@checkpoint_option
@code_option
@click.option("--replicas", type=click.IntRange(1), default=1, show_default=True, help="Processes that answer.")
@click.option("--max-replicas", type=click.IntRange(1), help="Start up to this many under load.")
@click.option("--gpu", is_flag=True, help="Give each replica a GPU.")
@click.option(
    "--route", metavar="/PATH", type=word, help="Path of the URL, and name for other commands. Default: /NAME."
)
@click.option("--host", type=word, help="Address to listen on, like 0.0.0.0, with MLX_SERVE_TOKEN. Default: 127.0.0.1.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port to listen on. Default: 8000.")
@options.address
@options.verbosity
def serve_launch(
    name: str,
    run: str,
    checkpoint: str | None,
    code: str | None,
    replicas: int,
    max_replicas: int | None,
    gpu: bool,
    route: str | None,
    host: str | None,
    port: int | None,
    ray_address: str | None,
) -> None:
    """Answer HTTP requests with a RUN (run_003, 3 or latest) of NAME on a Ray cluster, in the background.

    If MLX_SERVE_TOKEN is set, clients need this token.
    """
    from mlx_runtime.companions.serving.cluster import client
    from mlx_runtime.companions.serving.http.access import read_token

    if max_replicas is not None and max_replicas < replicas:
        raise UsageError(f"--max-replicas is {max_replicas}; expected at least --replicas, {replicas}")
    token, stored = read_token(), code is not None
    servers, upload = client.connect(ray_address, stored=stored)
    settings: dict[str, Any] = {"replicas": replicas, "max_replicas": max_replicas, "gpus": int(gpu)}
    folder = lookup.resolve_run(name, run)
    spec = client.spec_of(folder, checkpoint, route=route, token=token, stored=stored, **settings)
    with _detached(spec.name, servers.option):
        _show(servers.launch(spec, upload, host, port, write=_progress), servers.option)


def _progress(line: str) -> None:
    if not Settings.read().quiet:
        say(line)


@contextlib.contextmanager
def _detached(name: str, option: str) -> Iterator[None]:
    """Print after Ctrl-C that the cluster may continue."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(err=True)
        say(f"the cluster may continue to deploy {name}; to stop it: mlx serve stop {name} {option}", err=True)
        sys.exit(130)


def _show(deployed: "client.Deployment", option: str) -> None:
    name = deployed.spec.name
    facts = deployed.facts() | {"log": f"mlx serve logs {name} {option}"}
    facts |= {"update": f"mlx serve update {name} RUN {option}", "stop": f"mlx serve stop {name} {option}"}
    for title, text in facts.items():
        say(f"{title:<9} {text}")


def _named(name: str | None) -> str:
    if name is None:
        raise UsageError("which model? Pass its name; list them: mlx serve ls --ray-address URL")
    return name


def _refuse_name(name: str | None) -> None:
    if name is not None:
        raise UsageError(f"{name} names a model on a cluster, which needs --ray-address; without one, leave it out")

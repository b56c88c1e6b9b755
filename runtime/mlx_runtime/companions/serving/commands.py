"""Commands that answer with trained models."""

import sys
from pathlib import Path

import click

from mlx_runtime.cli import options
from mlx_runtime.cli.options import FOLDER, PAGE, say, word
from mlx_runtime.errors import ConfigError
from mlx_runtime.runs import queries

FORMATS = ("pt2", "safetensors", "onnx", "aoti")

port_option = click.option("--port", type=click.IntRange(1, 65535), help="Port of the server, if there are several.")

checkpoint_option = click.option(
    "--checkpoint", metavar="WHICH", type=word, help="best, latest or epoch_0004. Default: best, or latest."
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
    "--dataset", metavar="ROWS", type=word, help="test, src.datasets.Digits(split=test), or a file. Default: test."
)
@click.option(
    "-o", "--output", type=PAGE, default="predictions.parquet", show_default=True, help="Or .jsonl, .csv, .npz."
)
@click.option("--workers", metavar="N", type=click.IntRange(min=1), help="Processes. Default: one, or one per GPU.")
@click.option("--batch-size", metavar="N", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--device", metavar="D", type=word, help="Like cpu, or cuda:1. Default: a GPU if there is one.")
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
    """Write what predict returns for every row of a dataset or file. An interrupted command continues if repeated.

    RUN is run_003, 3 or latest (the default), or name/run_003, or the folder or URI of a run.
    """
    from mlx_runtime.companions.serving.offline import Options, predict

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
@click.option("-o", "--output", type=FOLDER, help="Default: a folder in this one, named after the checkpoint.")
@checkpoint_option
@click.option(
    "--format",
    "chosen",
    multiple=True,
    default=("pt2",),
    show_default=True,
    callback=formats,
    metavar="pt2|safetensors|onnx|aoti",
    help="Repeat it, or separate names by commas. The weights are always written as safetensors.",
)
@code_option
@click.option("--force", is_flag=True, help="Replace an earlier export.")
def xp_export(
    name: str, run: str, output: str | None, checkpoint: str | None, chosen: list[str], code: str | None, force: bool
) -> None:
    """Write a RUN (run_003, 3 or latest) of NAME to a folder that needs nothing of this project, and prove it.

    The outputs of the exported program are compared with those of `predict`, in a process without this package.
    """
    from mlx_runtime.companions.serving.export import export

    folder = None if output is None else Path(output)
    run_folder = queries.resolve_run(name, run)
    say(export(run_folder, folder, checkpoint, chosen, trust=code == "stored", force=force))


@click.command("run")
@click.argument("models", type=word, nargs=-1, metavar="[NAME] [RUN] [OTHER=RUN]...")
@checkpoint_option
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 for any free port.")
@click.option("--host", type=word, default="127.0.0.1", show_default=True, help="Others need a token: MLX_SERVE_TOKEN.")
@click.option("--max-batch", type=click.IntRange(1), default=64, show_default=True, help="Rows computed at once.")
@click.option("--max-wait-ms", type=click.FloatRange(0), default=0, help="Time that a batch waits for further rows.")
@click.option("--max-queue", type=click.IntRange(1), default=1024, show_default=True, help="Rows that may wait.")
@click.option("--timeout", type=click.FloatRange(0.1), default=30, show_default=True, help="Seconds per request.")
@click.option("--threads", type=click.IntRange(1), help="Threads of torch. Default: OMP_NUM_THREADS, or 1.")
@click.option("--shadow", metavar="OTHER", type=word, help="A run that answers the same rows, to count differences.")
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
    """Answer HTTP requests with a RUN (run_003, 3 or latest) of NAME, or with the folder of an export.

    NAME is by default the experiment in the working directory. Further models are added as OTHER=RUN, such as
    small=digits/run_004. The first one answers at /predict, each at /models/NAME/predict.
    """
    from mlx_runtime.companions.serving import running
    from mlx_runtime.companions.serving.http import Limits

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    sources = running.parse(models)
    limits = Limits(max_batch, max_wait_ms / 1000, max_queue, timeout_s=timeout)
    other = None
    if shadow is not None:
        first = next(iter(sources.values()))
        experiment = first.text.split("/")[0] if not first.is_export else first.text
        other = running.Source(shadow) if "/" in shadow else running.Source(experiment, shadow)
    server = running.Running(sources, limits, host, port, checkpoint=checkpoint, trust=code is not None, shadow=other)
    sys.exit(server.run(say))


@click.command("ls")
@options.json
def serve_ls(as_json: bool) -> None:
    """List the servers of this user on this machine."""
    from mlx_runtime.companions.serving import registry
    from mlx_runtime.storage import to_json

    servers = registry.running()
    if as_json:
        click.echo(to_json(servers), nl=False)
        return
    for record in servers:
        models = ", ".join(f"{name}={title}" for name, title in record["models"].items())
        say(f"{record['url']}  {models}  {record['status']}")
    if not servers:
        say("no server runs; start one: mlx serve run NAME", err=True)


@click.command("logs")
@port_option
def serve_logs(port: int | None) -> None:
    """Print the log of a server: updates and errors."""
    from mlx_runtime.companions.serving import registry

    for line in Path(registry.find(port)["log"]).read_text(errors="replace").splitlines():
        say(line)


@click.command("stop")
@port_option
def serve_stop(port: int | None) -> None:
    """Stop a server, after it has answered what it has accepted."""
    from mlx_runtime.companions.serving import registry

    record = registry.find(port)
    registry.ask(record, {"action": "stop"}, registry.ANSWER_S)
    registry.wait_for_end(record)
    say(f"stopped {record['url']}")


@click.command("update")
@click.argument("name", type=word)
@click.argument("run", type=word)
@port_option
def serve_update(name: str, run: str, port: int | None) -> None:
    """Answer with another RUN, or export, as NAME of a server, without a failed request."""
    from mlx_runtime.companions.serving import registry

    record = registry.find(port, name)
    source = str(Path(run).resolve()) if Path(run).is_dir() else run
    say(registry.ask(record, {"action": "update", "name": name, "run": source}, registry.UPDATE_S))

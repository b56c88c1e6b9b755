"""Commands that use trained models: predictions, exports and servers."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from mlx_runtime.cli import options
from mlx_runtime.cli.options import FOLDER, PAGE, say, word
from mlx_runtime.errors import ConfigError, UsageError
from mlx_runtime.runs.queries import lookup
from mlx_runtime.settings import Settings

FORMATS = ("pt2", "safetensors", "onnx")

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
    code: str | None,
) -> None:
    """Answer HTTP requests with a RUN (run_003, 3 or latest) of NAME, or with an export, until Ctrl-C.

    NAME is the folder of an export, or an experiment; the default is the one in the working directory. More models are
    added as OTHER=RUN, such as small=digits/run_004. The first answers at /predict, each at /models/NAME/predict.
    """
    from mlx_runtime.companions.serving.http import terminal
    from mlx_runtime.companions.serving.http.limits import Limits

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    limits = Limits(max_batch, max_wait_ms / 1000, max_queue, timeout_s=timeout)
    kept: dict[str, Any] = {"checkpoint": checkpoint, "trust": code is not None, "say": say}
    sys.exit(terminal.run(terminal.parse(models), limits, host, port, **kept))


@click.command("launch")
@options.name()
@options.run("latest")
@checkpoint_option
@code_option
@click.option("--replicas", type=click.IntRange(1), default=1, show_default=True, help="Processes that answer.")
@click.option("--max-replicas", type=click.IntRange(1), help="Start up to this many under load.")
@click.option("--gpu", is_flag=True, help="Give each replica a GPU.")
@click.option(
    "--route", metavar="/PATH", type=word, help="Path of the URL, and name for `mlx serve stop`. Default: /NAME."
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

    A model that is deployed below the same path is replaced without failing a request. If MLX_SERVE_TOKEN is set,
    clients need this token.
    """
    from mlx_runtime.companions.serving.cluster import client

    if max_replicas is not None and max_replicas < replicas:
        raise UsageError(f"--max-replicas is {max_replicas}; expected at least --replicas, {replicas}")
    folder = lookup.resolve_run(name, run)
    kept: dict[str, Any] = {"route": route, "host": host, "port": port, "stored": code is not None}
    kept |= {"replicas": replicas, "max_replicas": max_replicas, "gpus": int(gpu)}
    write = (lambda line: None) if Settings.read().quiet else say
    for title, text in client.launch(ray_address, folder, checkpoint, write=write, **kept).items():
        say(f"{title:<9} {text}")


@click.command("stop")
@click.argument("name", type=word)
@options.address
@options.debug
def serve_stop(name: str, ray_address: str | None) -> None:
    """Stop the model NAME on a Ray cluster, once all accepted requests are answered."""
    from mlx_runtime.companions.serving.cluster import client

    client.stop(ray_address, name)
    say(f"stopped {name}")

"""Commands that answer with trained models."""

from pathlib import Path

import click

from mlx_runtime.cli import options
from mlx_runtime.cli.options import FOLDER, PAGE, say, word
from mlx_runtime.errors import ConfigError
from mlx_runtime.runs import queries

FORMATS = ("pt2", "safetensors", "onnx", "aoti")

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

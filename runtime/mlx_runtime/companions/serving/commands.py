"""Commands that answer with trained models."""

import sys
from pathlib import Path

import click

from mlx_runtime.cli import options
from mlx_runtime.cli.options import say, word

PORT = click.option("--port", type=click.IntRange(1, 65535), help="Port of the server, if there are several.")


@click.command("run")
@click.argument("models", type=word, nargs=-1, metavar="[NAME] [RUN] [OTHER=RUN]...")
@click.option("--checkpoint", metavar="WHICH", type=word, help="Default: best, or latest without cfg.monitor.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 for any free port.")
@click.option("--host", type=word, default="127.0.0.1", show_default=True, help="Others need a token: MLX_SERVE_TOKEN.")
@click.option("--max-batch", type=click.IntRange(1), default=64, show_default=True, help="Rows computed at once.")
@click.option("--max-wait-ms", type=click.FloatRange(0), default=0, help="Time that a batch waits for further rows.")
@click.option("--max-queue", type=click.IntRange(1), default=1024, show_default=True, help="Rows that may wait.")
@click.option("--timeout", type=click.FloatRange(0.1), default=30, show_default=True, help="Seconds per request.")
@click.option("--threads", type=click.IntRange(1), help="Threads of torch. Default: OMP_NUM_THREADS, or 1.")
@click.option("--shadow", metavar="OTHER", type=word, help="A run that answers the same rows, to count differences.")
@click.option("--trust", is_flag=True, help="Use the code that was stored with the run.")
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
    trust: bool,
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
    server = running.Running(sources, limits, host, port, checkpoint=checkpoint, trust=trust, shadow=other)
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
@PORT
def serve_logs(port: int | None) -> None:
    """Print the log of a server: updates and errors."""
    from mlx_runtime.companions.serving import registry

    for line in Path(registry.find(port)["log"]).read_text(errors="replace").splitlines():
        say(line)


@click.command("stop")
@PORT
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
@PORT
def serve_update(name: str, run: str, port: int | None) -> None:
    """Answer with another RUN, or export, as NAME of a server, without a failed request."""
    from mlx_runtime.companions.serving import registry

    record = registry.find(port, name)
    source = str(Path(run).resolve()) if Path(run).is_dir() else run
    say(registry.ask(record, {"action": "update", "name": name, "run": source}, registry.UPDATE_S))

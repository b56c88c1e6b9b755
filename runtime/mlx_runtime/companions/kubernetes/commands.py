"""The options of `mlx train launch --kube`."""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from mlx_runtime.cli import commands, options

if TYPE_CHECKING:
    from mlx_runtime.companions.kubernetes.launch import KubeLaunch

LEAST_GRACE_S = 30
"""Minimum of `--grace`: the time limit of a checkpoint at the end of a run, and some seconds to exit."""


def _size(text: str) -> str:
    if re.fullmatch(r"\d+(\.\d+)?[KMGT]i?", text):
        return text
    raise click.BadParameter(f"{text!r} is not an amount of memory; write 4Gi, 512Mi, …")


def _pair(text: str) -> tuple[str, str]:
    name, mark, value = text.partition("=")
    if name and mark:
        return name, value
    raise click.BadParameter(f"{text!r} is not a label; write KEY=VALUE")


def _seconds(text: str) -> int:
    return round(options.duration_s(text))


def _grace_s(text: str) -> int:
    if (seconds := _seconds(text)) < LEAST_GRACE_S:
        raise click.BadParameter(f"{text} is too short for a checkpoint; the minimum is {LEAST_GRACE_S}s")
    return seconds


def _option(flag: str, help: str, **settings: Any) -> Callable[[Any], Any]:
    """Define an option whose default may be set in the environment, like `MLX_KUBE_IMAGE`."""
    name = f"MLX_KUBE_{flag.removeprefix('--').replace('-', '_').upper()}"
    shows_default = settings.get("default") is not None
    return click.option(flag, help=help, envvar=name, show_envvar=True, show_default=shows_default, **settings)


@click.command("mlx train launch --kube", context_settings=commands.OVERRIDES, options_metavar="[OPTIONS]")
@_option("--image", "Image of all pods, with the experiment and its packages.", metavar="IMAGE", required=True)
@_option("--namespace", "Namespace of the RayJob. Default: that of kubectl.", metavar="NAME")
@_option("--context", "Context of kubectl. Default: the current one.", metavar="NAME")
@_option("--claim", "PersistentVolumeClaim with the storage of runs.", metavar="NAME")
@_option("--secret", "Secret whose keys become environment variables; may be repeated.", metavar="NAME", multiple=True)
@_option("--pull-secret", "Secret for pulling the image; may be repeated.", metavar="NAME", multiple=True)
@_option("--service-account", "ServiceAccount of the pods.", metavar="NAME")
@_option("--gpu", "Resource of a GPU, used with cfg.use_gpu=true.", metavar="TYPE", default="nvidia.com/gpu")
@_option("--workers-per-pod", "Workers in each pod.", metavar="N", type=click.IntRange(min=1), default=1)
@_option("--memory", "Memory per worker.", metavar="SIZE", type=_size, default="4Gi")
@_option("--head-cpus", "CPUs of the head, which runs the driver.", metavar="N", type=click.IntRange(1), default=1)
@_option("--head-memory", "Memory of the head.", metavar="SIZE", type=_size, default="4Gi")
@_option(
    "--label",
    "Label of the RayJob; may be repeated.",
    metavar="LABEL",
    type=_pair,
    multiple=True,
)
@_option("--node", "Label of the nodes for workers; may be repeated.", metavar="LABEL", type=_pair, multiple=True)
@_option("--backoff-limit", "Restarts of a failed job.", metavar="N", type=click.IntRange(min=0), default=2)
@_option("--deadline", "Stop the job after this time: 2d, 12h, …", metavar="TIME", type=_seconds)
@_option("--grace", "Time for a checkpoint when a pod is deleted.", metavar="TIME", type=_grace_s, default="60s")
@_option("--keep", "Keep the pods after the end for this time.", metavar="TIME", type=_seconds, default="5m")
@_option("--keep-failed", "Keep those of a failed job for another time.", metavar="TIME", type=_seconds)
@click.option("--dry-run", is_flag=True, help="Print the manifest, for kubectl apply -f -, without using kubectl.")
@click.argument("words", nargs=-1, metavar="[OVERRIDES]...")
def launch_kube(**_: Any) -> None:
    """Train on Kubernetes, as a RayJob of KubeRay.

    Other options are those of mlx train launch and, with --sweep, mlx train sweep. Labels are given as KEY=VALUE.
    """


def parse(words: Sequence[str]) -> "tuple[tuple[str, ...], Callable[..., KubeLaunch]]":
    """Return the words that are no options here, and the function that prepares the launch."""
    given: dict[str, Any] = launch_kube.make_context("launch --kube", [*words]).params
    rest, dry_run = given.pop("words"), given.pop("dry_run")

    def prepare(*arguments: Any, **settings: Any) -> "KubeLaunch":
        from mlx_runtime.companions.kubernetes.launch import prepare
        from mlx_runtime.companions.kubernetes.manifest import Pods

        return prepare(Pods(**given), *arguments, dry_run=dry_run, **settings)

    return rest, prepare

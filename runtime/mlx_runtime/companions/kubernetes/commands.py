"""The options of `mlx train launch --kube`."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_runtime.cli import commands

if TYPE_CHECKING:
    from mlx_runtime.companions.kubernetes.launch import KubeLaunch


def _size(text: str) -> str:
    if re.fullmatch(r"\d+([KMGT]i|[kMGT])", text):
        return text
    raise click.BadParameter(f"{text!r} is not an amount of memory; write 4Gi, 512Mi, …")


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
@_option("--workers-per-pod", "Workers in each pod.", metavar="N", type=click.IntRange(min=1), default=1)
@_option("--memory", "Memory per worker.", metavar="SIZE", type=_size, default="4Gi")
@_option("--template", "YAML file with fields of the RayJob, which are merged into the manifest.", metavar="FILE")
@click.option("--dry-run", is_flag=True, help="Print the manifest, for kubectl apply -f -, without using kubectl.")
@click.argument("words", nargs=-1, metavar="[OVERRIDES]...")
def launch_kube(**_: Any) -> None:
    """Train on Kubernetes, as a RayJob of KubeRay.

    Other options are those of mlx train launch and, with --sweep, mlx train sweep.
    """


def parse(words: Sequence[str]) -> "tuple[tuple[str, ...], Callable[..., KubeLaunch]]":
    """Return the words that are no options here, and the function that prepares the launch."""
    given: dict[str, Any] = launch_kube.make_context("launch --kube", [*words]).params
    rest, dry_run = given.pop("words"), given.pop("dry_run")

    def prepare(_: Path, load: Callable[[], Any], **settings: Any) -> "KubeLaunch":
        from mlx_runtime.companions.kubernetes.launch import prepare
        from mlx_runtime.companions.kubernetes.manifest import Pods

        return prepare(Pods(**given), load, dry_run=dry_run, **settings)

    return rest, prepare

"""The verbs of `mlx train`: make an experiment, bind its config, run it."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_runtime import projects, registry
from mlx_runtime.layout import CONF, RunFolder, experiment_folder
from mlx_runtime.projects import AN_EXPERIMENT
from mlx_runtime.settings import Settings

if TYPE_CHECKING:
    from mlx_runtime.launch import Launch
    from mlx_runtime.loading import Config


def new(name: str, output: Path) -> Path:
    """Generate an experiment from the template that came with this package; needs no network.

    Returns:
        The new folder.

    Raises:
        UsageError: the name cannot be one, or the folder exists.
    """
    return projects.new(AN_EXPERIMENT, name, output)


def bind(*, check: bool = False, diff: bool = False) -> list[str]:
    """Write or update `src/conf.yaml` of the experiment in the working directory, and its schema.

    Args:
        check: write nothing, and refuse a file that is not up to date.
        diff: write nothing, and return what would change.

    Returns:
        Lines for the user: what was written, then each change.

    Raises:
        UsageError: this is no experiment.
        BindError: a constructor that conf.yaml cannot describe; with `check`, a file that is not up to date.
    """
    return projects.bind(AN_EXPERIMENT, check=check, diff=diff)


def show(arguments: Sequence[str], *, as_json: bool = False) -> str:
    """The config that a run would have, checked as a run checks it, each changed value with where it came from.

    Args:
        arguments: Hydra overrides, before them perhaps a key to show only that part.
        as_json: `{"config": ..., "changed": {key: {"value", "from", "default"}}}` instead of YAML with comments.

    Raises:
        UsageError: this is no experiment, or the key does not exist.
        ConfigError: with one line per problem.
    """
    folder = experiment_folder()
    from mlx_runtime import loading, origins
    from mlx_runtime.nodes import Description

    keys = [item for item in arguments[:1] if "=" not in item and not item.startswith(("~", "+"))]
    overrides = arguments[len(keys) :]
    experiment = experiment_class(folder)
    loading.check(experiment, overrides)
    defaults = Description(experiment).tree
    return origins.shown(CONF, defaults, overrides, keys[0] if keys else None, as_json=as_json)


def run(overrides: Sequence[str]) -> None:
    """Train the experiment in the working directory on this machine: its `main.py` with these overrides.

    Raises:
        UsageError: this is no experiment.
    """
    projects.run(AN_EXPERIMENT, overrides)


def evaluate(run: RunFolder, checkpoint: str, overrides: Sequence[str]) -> None:
    """Run `eval_loop` of the experiment in the working directory on a checkpoint, with the config of its run.

    Args:
        run: that the checkpoint is of, and that gets the numbers.
        checkpoint: folder or URI.
        overrides: Hydra's.

    Raises:
        UsageError: this is no experiment.
    """
    projects.run(AN_EXPERIMENT, [f"--from={run.place}", f"--eval={checkpoint}", *overrides])


def launch(
    overrides: Sequence[str],
    *,
    ray_address: str | None = None,
    check: bool = False,
    follow: bool = False,
    pip: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Train the experiment in the working directory on a cluster.

    Args:
        overrides: as for `run`.
        ray_address: of the cluster; else `RAY_ADDRESS`. See `jobs.Address`.
        check: only look whether it would run, and tell everything that was found.
        follow: pass on what the job prints until it has ended.
        pip: let the cluster install what requirements.txt names.
        say: takes lines for the user.

    Returns:
        The exit code: with `follow` the job's, else 0.

    Raises:
        UsageError: this is no experiment, or there is no address.
        ClusterError: it would not run there, or died as it began.
    """
    folder = experiment_folder()
    projects.refuse_options(AN_EXPERIMENT, overrides, "launch")
    from mlx_runtime.jobs import Address
    from mlx_runtime.launch import Launch

    address = Address.of(ray_address)

    def load() -> "Config":
        projects.bind_first(AN_EXPERIMENT, folder)
        experiment = experiment_class(folder)
        from mlx_runtime import loading

        return loading.load_config(experiment, overrides, look=check)

    launch = Launch(folder, address, load, pip=pip)
    launch.passed(say, everything=check)
    return 0 if check else submitted(launch, say, follow=follow)


def submitted(launch: "Launch", say: Callable[[str], None], *, follow: bool) -> int:
    """Submit a launch that was checked, tell what to type next, and wait until it has begun, or ended.

    Raises:
        ClusterError: the job died as it began.
    """
    run, made = launch.submit()
    quiet = Settings.read().quiet
    tell: Callable[[str], None] = (lambda text: None) if quiet else say
    tell(f"run       {run.experiment} {run.name}")
    say(f"folder    {run.place}")
    tell(f"job       {made.job}")
    tell(f"dashboard {made.dashboard}")
    assert launch.config is not None
    elsewhere = Settings.read().storage or any("cfg.storage_path" in item for item in launch.config.overrides)
    words = [run.place] if elsewhere else [run.experiment, run.name]
    for verb, title in (("logs", "follow"), ("board", "look"), ("stop", "stop")):
        tell(f"{title:<9} mlx xp {verb} {shlex.join(words)}")
    if follow:
        return made.follow()
    details = made.wait(lambda: registry.recorded(run).get("status") != "PENDING")
    tell(f"status    {'has ended' if details.ended else registry.recorded(run).get('status')}")
    return 0


def prepare(overrides: Sequence[str]) -> None:
    """Prepare the datasets of the experiment in the working directory.

    Raises:
        UsageError: this is no experiment.
        DatasetError: a dataset cannot be prepared.
    """
    folder = experiment_folder()
    projects.refuse_options(AN_EXPERIMENT, overrides, "prepare")
    projects.bind_first(AN_EXPERIMENT, folder)
    experiment = experiment_class(folder)
    from mlx_runtime import loading, trainer

    trainer.prepare(loading.load_config(experiment, [*overrides, "cfg.prepared=make"]))


def experiment_class(folder: Path) -> type:
    """`src.experiment.Experiment` of a folder.

    Raises:
        MlxError: it cannot be imported, or there is no such class.
    """
    return projects.main_class(AN_EXPERIMENT, folder)

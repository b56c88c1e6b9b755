"""The verbs of `mlx train` that do not run `main.py`."""

from collections.abc import Sequence

from mlx_runtime.cli.verbs import running
from mlx_runtime.config import projects
from mlx_runtime.config.projects import AN_EXPERIMENT, CONF


def show(arguments: Sequence[str], *, as_json: bool = False) -> str:
    """Return the config that a run would have, checked as a run checks it, with the origin of each changed value.

    Args:
        arguments: overrides of Hydra; a key before them selects a part of the config.
        as_json: `{"config": ..., "changed": {key: {"value", "from", "default"}}}` instead of YAML with comments.

    Raises:
        UsageError: this is not an experiment, or the key does not exist.
        ConfigError: the config is invalid; the message has one line per problem.
    """
    folder = AN_EXPERIMENT.folder()
    from mlx_runtime.config import composition, origins
    from mlx_runtime.config.nodes import Description

    keys = [item for item in arguments[:1] if "=" not in item and not item.startswith(("~", "+"))]
    overrides = arguments[len(keys) :]
    experiment = projects.main_class(AN_EXPERIMENT, folder)
    composition.load(experiment, overrides, CONF, look=True)
    defaults = Description(experiment).tree
    return origins.shown(CONF, defaults, overrides, keys[0] if keys else None, as_json=as_json)


def prepare(overrides: Sequence[str]) -> None:
    """Prepare the datasets of the experiment in the working directory.

    Raises:
        UsageError: this is not an experiment.
        DatasetError: a dataset cannot be prepared.
    """
    folder = AN_EXPERIMENT.folder()
    running.refuse_options(AN_EXPERIMENT, overrides, "prepare")
    running.bind_first(AN_EXPERIMENT, folder)
    experiment = projects.main_class(AN_EXPERIMENT, folder)
    from mlx_runtime.training import terminal
    from mlx_runtime.training.request import load_config

    terminal.prepare(load_config(experiment, [*overrides, "cfg.prepared=make"]))

"""Prepare all datasets of an experiment, and display the progress."""

import contextlib
import sys
from pathlib import Path

from mlx_runtime import companions
from mlx_runtime.companions.prepared.datasets import prepare_datasets
from mlx_runtime.data.definitions import stream_names
from mlx_runtime.driver.planning import check_datasets
from mlx_runtime.driver.request import RunConfig
from mlx_runtime.tracking.console import Display


def prepare(config: RunConfig) -> None:
    """Prepare all datasets of an experiment that can be prepared and are not yet.

    Raises:
        DatasetError: a dataset cannot be batched or prepared.
        StorageError: the store cannot be written.
    """
    check_datasets(config)
    display = Display(sys.stdout)
    with contextlib.ExitStack() as stack:
        stack.callback(display.close)
        if stream_names(config.tree):
            stack.enter_context(companions.part("ray.start").start_ray(config.cfg))
        sets = prepare_datasets(config, Path.cwd(), display.handle, stack)
    if sets:
        display.print(f"{len(sets)} prepared in {config.prepared_root}; runs use them automatically")
    else:
        display.print("nothing was prepared")

"""The results of `mlx train eval`, stored with the run that was evaluated."""

import datetime
import uuid
from collections.abc import Mapping
from pathlib import Path

from mlx_runtime.driver.request import RunConfig
from mlx_runtime.errors import StorageError, short_message
from mlx_runtime.runs.folder import EVALUATIONS
from mlx_runtime.runs.versions import provenance
from mlx_runtime.storage.files import join_path, storage_at, to_json


def store_evaluation(config: RunConfig, metrics: Mapping[str, float]) -> str:
    """Store the metrics of a checkpoint in the folder of its run, and return their path."""
    assert config.origin is not None
    when = datetime.datetime.now(datetime.timezone.utc)
    facts = {"time": when.isoformat(timespec="seconds"), "checkpoint": config.checkpoint, "metrics": dict(metrics)}
    facts |= provenance(config.overrides) | {"workers": config.cfg.start_workers, "seed": config.cfg.seed}
    parts = (EVALUATIONS, f"{when:%Y-%m-%dT%H%M%S.%f}-{uuid.uuid4().hex[:6]}.json")  # names sort by time
    storage = storage_at(config.origin.location)
    try:
        if storage.local:
            Path(storage.of(EVALUATIONS)).mkdir(exist_ok=True)
        storage.write(to_json(facts).encode(), *parts)
    except OSError as error:
        raise StorageError(
            f"cannot write {join_path(config.origin.location, EVALUATIONS)}: {short_message(error)}"
        ) from error
    return join_path(config.origin.location, *parts)

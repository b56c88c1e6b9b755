"""The mirror of a run as an extension of it, and as a source of its latest state."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_runtime.companions.hub import restoring
from mlx_runtime.companions.hub.detection import refuse_secrets
from mlx_runtime.companions.hub.mirror import Follower, Mirror
from mlx_runtime.companions.hub.repository import UnreachableError
from mlx_runtime.driver.planning import AccompaniedRun, Listener
from mlx_runtime.driver.request import RunConfig
from mlx_runtime.errors import ConfigError
from mlx_runtime.events import CheckpointSaved, Event, Notice
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.runs import snapshots
from mlx_runtime.runs.folder import RunFolder

WITHOUT = "To train without it: cfg.hub.mirror=null. To upload the run later: mlx xp push NAME RUN --to URI"
"""Hint for errors if the Hub does not answer."""


class Mirroring:
    """Uploads the state of a run after each checkpoint and at its end; a `RunExtension`."""

    def __init__(self, mirror: Mirror, timeout_s: float) -> None:
        self._mirror, self._timeout_s = mirror, timeout_s

    @contextlib.contextmanager
    def accompany(self, run: AccompaniedRun) -> Iterator[Listener]:
        public = " (public: everybody can read it)" if self._mirror.public else ""
        with _hint():
            follower = Follower(self._mirror, run.record, run.stop, run.notify)
        run.notify(Notice(f"mirror    {self._mirror.uri}{public}"))

        def listener(event: Event) -> None:
            if isinstance(event, CheckpointSaved):
                follower.checkpoint_saved()

        yield listener
        if run.taken_over:
            follower.abandon()
        else:
            follower.finish(self._timeout_s, interrupted=run.interrupted)


def extension(config: RunConfig) -> Mirroring:
    """Open the mirror of a run that is about to begin.

    Raises:
        ConfigError: the run belongs to a sweep.
        UsageError: the run cannot be mirrored to this repository, or its config or code holds likely secrets.
        UnreachableError: the Hub does not answer.
    """
    if config.sweep:
        refuse_sweep(config.cfg)
    _refuse_secrets(config)
    with _hint():
        mirror = Mirror(str(config.cfg.hub.mirror))
        mirror.check(config.run)
    return Mirroring(mirror, config.cfg.hub.timeout_s)


@contextlib.contextmanager
def _hint() -> Iterator[None]:
    """Add a hint to errors of the block if the Hub does not answer."""
    try:
        yield
    except UnreachableError as error:
        error.hint = WITHOUT
        raise


def _refuse_secrets(config: RunConfig) -> None:
    """Raise a UsageError if the config or the code that the run will store holds likely secrets."""
    with tempfile.TemporaryDirectory(prefix="mlx-mirror-") as temporary:
        stored = RunFolder(Path(temporary))
        stored.conf.write_text(config.yaml(), encoding="utf-8")
        snapshots.store(Path.cwd(), stored)
        for name in (stored.conf.name, snapshots.CODE):
            refuse_secrets(stored.path / name, str(config.cfg.hub.mirror))


def refuse_sweep(cfg: TrainConfig) -> None:
    """Raise a ConfigError, because a repository can mirror only one run."""
    raise ConfigError(
        f"cfg.hub.mirror={cfg.hub.mirror} is for one run, but a sweep has many; leave it out, and mirror the best one "
        f"when the sweep has ended: mlx xp push {cfg.name} RUN --to {cfg.hub.mirror}"
    )


def latest(cfg: dict[str, Any], root: str, experiment: str) -> tuple[RunFolder | None, list[str]]:
    """Return the run to continue with `--resume auto`, downloaded if its mirror is ahead; see `restoring.latest`."""
    return restoring.latest(str(cfg["hub"]["mirror"]), root, experiment)

"""The tracker for Weights & Biases."""

import contextlib
import tempfile
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from mlx_runtime.companions.services.identity import read_or_create
from mlx_runtime.extras import require
from mlx_runtime.runs.checkpoints.index import best_first, list_checkpoints
from mlx_runtime.settings import environment
from mlx_runtime.storage.files import is_uri, parent_of
from mlx_runtime.tracking.callbacks import Report, RunInfo

DATA_DIR = "WANDB_DATA_DIR"
"""Environment variable with the folder for copies that W&B has not sent yet, by default in HOME."""


class WandB:
    """Metrics on Weights & Biases (`pip install "mlx-runtime[wandb]"`). A resumed run remains one run there.

    Offline, each attempt writes its own folder `offline-run-…` in the folder `wandb` of the run.

    Args:
        project: name of the project; None means that of the experiment.
        mode: `online`, or `offline`, which keeps everything in the run's folder for `wandb sync`; None means the
            environment variable `WANDB_MODE`, by default `online`.
        entity: name of a team; None means your own account.
        checkpoints: also send the checkpoint of each epoch, as a version of one artifact, with the aliases `latest`,
            `epoch_0001`, … and, for the best according to `cfg.monitor`, `best`.
    """

    files = ("wandb-run-id", "wandb/*run-*/**/*")  # without wandb/artifacts: checkpoints that are not sent yet

    def __init__(
        self,
        project: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        entity: str | None = None,
        checkpoints: bool = False,
    ):
        self.project, self.mode, self.entity, self.checkpoints = project, mode, entity, checkpoints
        self._run: Any = None
        self._monitor: tuple[str | None, str] = (None, "min")  # metric of the best checkpoint, and its mode
        self._environment = contextlib.ExitStack()
        self._sender: ThreadPoolExecutor | None = None
        self._sending: list[Future[None]] = []

    def on_run_start(self, run: RunInfo) -> None:
        require("wandb", "it")
        import wandb

        cfg = run.config.get("cfg") or {}
        self._monitor = cfg.get("monitor"), cfg.get("mode", "min")
        if not is_uri(run.place):
            self._environment.enter_context(environment({DATA_DIR: str(run.folder / "wandb")}))
        self._run = wandb.init(
            project=self.project or run.experiment,
            entity=self.entity,
            name=run.name,
            id=read_or_create(run.folder / "wandb-run-id", lambda: uuid.uuid4().hex),
            group=run.experiment,
            config=dict(run.config),
            dir=str(run.folder),
            mode=self.mode,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")

    def on_report(self, report: Report) -> None:
        self._run.log({**report.values, "epoch": report.epoch, "global_step": report.step})

    def on_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Start sending a checkpoint in a separate thread, because reports wait for the tracker."""
        if not self.checkpoints or not (checkpoint["finished"] or self._monitor[0] in checkpoint["metrics"]):
            return
        if self._sender is None:
            self._sender = ThreadPoolExecutor(1, "wandb")
        self._sending.append(self._sender.submit(self._send, checkpoint["path"]))
        for sent in [item for item in self._sending if item.done()]:
            self._sending.remove(sent)
            sent.result()

    def on_run_end(self, status: str, metrics: Mapping[str, float]) -> None:
        import wandb

        try:
            for sent in self._sending:
                sent.result()
        finally:
            self._run.summary.update({**metrics, "status": status})
            with self._environment:
                self._run.finish(exit_code=0 if status == "SUCCEEDED" else 1)
                wandb.teardown()  # unlike `finish`, waits until an offline log is written

    def _send(self, path: str) -> None:
        """Pass a copy of a checkpoint to W&B, unless newer ones have replaced it."""
        import wandb

        storage, name = parent_of(path)
        artifact, failure = wandb.Artifact(f"checkpoints-{self._run.id}", "model"), None
        with tempfile.TemporaryDirectory() as folder:
            try:
                for file in storage.names(name):
                    source = Path(storage.of(name, file))
                    if not storage.local:
                        source = Path(folder, file)
                        storage.download(source, name, file)
                    artifact.add_file(str(source), file, skip_cache=True)
            except (OSError, ValueError) as error:
                failure = error
        kept = {item.name: item for item in list_checkpoints(storage)}
        if name not in kept:
            return
        if failure is not None:
            raise failure
        own = kept[name]
        artifact.metadata = {"epoch": own.epoch, "global_step": own.global_step, **own.metrics}
        so_far = best_first([item for item in kept.values() if item.order <= own.order], *self._monitor)
        self._run.log_artifact(artifact, aliases=["latest", name, *(["best"] if so_far[:1] == [own] else [])])

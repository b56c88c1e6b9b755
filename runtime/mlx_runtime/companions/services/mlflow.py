"""The tracker for MLflow."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from mlx_runtime.companions.services.identity import read_or_create
from mlx_runtime.errors import UsageError
from mlx_runtime.extras import require
from mlx_runtime.tracking.callbacks import Report, RunInfo
from mlx_runtime.tracking.trackers import flatten


class MLflow:
    """Metrics on an MLflow server or in a local store (`pip install "mlx-runtime[mlflow]"`).

    A resumed run remains one run there.

    Args:
        tracking_uri: like `http://host:5000`; None means a SQLite file in the run's folder.
        experiment: name of the experiment; None means that of the run.
    """

    files = ("mlflow-run-id", "mlflow.db")

    def __init__(self, tracking_uri: str | None = None, experiment: str | None = None):
        self.tracking_uri, self.experiment = tracking_uri, experiment
        self._client: Any = None
        self._id = ""
        self._refused: set[tuple[str, str]] = set()  # kinds and names of which MLflow has not accepted a value
        self._unreported: dict[str, str] = {}  # those among them that no warning has named, with the reason

    def on_run_start(self, run: RunInfo) -> None:
        require("mlflow", "it")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(self.tracking_uri or f"sqlite:///{run.folder / 'mlflow.db'}")
        title = self.experiment or run.experiment
        found = self._client.get_experiment_by_name(title)
        home = found.experiment_id if found else self._client.create_experiment(title)
        begin = partial(self._client.create_run, home, run_name=run.name, tags={"mlx.place": run.place})
        self._id = read_or_create(run.folder / "mlflow-run-id", lambda: str(begin().info.run_id))
        self._client.update_run(self._id, status="RUNNING")
        if run.attempt == 1:
            params = [Param(name, str(value)[:500]) for name, value in flatten(run.config)]
            for start in range(0, len(params), 100):  # limit of a request
                self._send("params", params[start : start + 100])

    def on_report(self, report: Report) -> None:
        from mlflow.entities import Metric

        moment = int(1000 * report.facts["timestamp"])
        values = {**report.values, "epoch": report.epoch}
        self._send("metrics", [Metric(name, value, moment, report.step) for name, value in values.items()])
        if found := self._unreported:
            self._unreported = {}
            name, why = next(iter(found.items()))
            raise UsageError(f"MLflow does not accept the names {', '.join(found)}. For {name}: {why}")

    def _send(self, kind: str, items: list[Any]) -> None:
        """Send metrics or params; those refused before one by one, because MLflow would refuse a whole request."""
        from mlflow.exceptions import MlflowException

        requests = [[item for item in items if (kind, item.key) not in self._refused]]
        requests += [[item] for item in items if (kind, item.key) in self._refused]
        for sent in filter(None, requests):
            try:
                self._client.log_batch(self._id, **{kind: sent})
            except MlflowException as error:
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise
                name = sent[0].key
                if len(sent) > 1:
                    for item in sent:
                        self._send(kind, [item])
                elif (kind, name) not in self._refused:
                    self._refused.add((kind, name))
                    self._unreported[name] = error.message

    def on_run_end(self, status: str, metrics: Mapping[str, float]) -> None:
        ends = {"SUCCEEDED": "FINISHED", "STOPPED": "KILLED"}
        self._client.set_terminated(self._id, ends.get(status, "FAILED"))

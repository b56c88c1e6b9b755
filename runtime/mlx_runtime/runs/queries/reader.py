"""Stored runs for notebooks and scripts: record, config, metrics and weights."""

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlx_runtime import companions
from mlx_runtime.companions import is_remote, reader_of
from mlx_runtime.config.building import build, build_group, built_to_be_restored
from mlx_runtime.config.constructors.targets import object_at
from mlx_runtime.config.interpolation import parse_config, unset_variables
from mlx_runtime.config.projects import EXPERIMENT
from mlx_runtime.distributed.randomness import temporary_seed
from mlx_runtime.errors import USER_ERRORS, ConfigError, MlxError, StorageError, UsageError, full_message, located
from mlx_runtime.importing import add_to_path
from mlx_runtime.runs import records, snapshots
from mlx_runtime.runs.checkpoints import groups
from mlx_runtime.runs.checkpoints.groups import State
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import EVALUATIONS, SWEEP, RunFolder, read_errors, read_rows
from mlx_runtime.runs.queries import lookup
from mlx_runtime.storage.documents import from_json
from mlx_runtime.storage.files import is_uri, storage_at

if TYPE_CHECKING:
    import pandas

    from mlx_runtime.companions.serving.predictor import Predictor


def open_run(run: str | Path) -> "Run":
    """Open a run for reading, even while it trains.

    Args:
        run: `name/run_003`, the path or URI of its folder, or its mirror, like `hf://user/name` or
            `hf://user/name@REVISION`. A name is looked up in the storage of the experiment in the working directory, or
            in `MLX_STORAGE`.

    Raises:
        UsageError: there is no such run.
    """
    text = str(run)
    if is_remote(text):
        return _RemoteRun(reader_of(text).find(text))
    if "/" not in text and not is_uri(text) and not Path(text, "run.json").is_file():
        raise UsageError(f"{text!r} does not name a run; write name/run_003, or the path of its folder")
    found = lookup.resolve_run(text)
    if found.name.startswith(SWEEP):
        raise UsageError(f"{found.title} is a sweep; open it with mlx_runtime.open_sweep")
    return Run(found)


class Run:
    """A stored run. Nothing is cached, so each call reads the current state.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    @property
    def record(self) -> dict[str, Any]:
        """Content of `run.json`: status, command, versions, seed, best metrics, …

        Raises:
            StorageError: it cannot be read.
        """
        return records.load_record(self._folder)

    @property
    def config(self) -> dict[str, Any]:
        """The resolved conf.yaml as plain dicts; `${oc.env:NAME}` remains if that variable is not set here.

        Raises:
            StorageError: it cannot be read.
        """
        with read_errors(self._folder, "conf.yaml"):
            return parse_config(self._folder.document("conf.yaml"))

    def metrics(self, by: Literal["report", "epoch"] = "report") -> "pandas.DataFrame":
        """Return all recorded metrics, with `step`, `epoch` (from 0), `timestamp` (seconds since 1970) and a column per
        metric, NaN where a row lacks it.

        Args:
            by: `report` for one row per report, with the metrics of one pass; or `epoch` for one row per epoch, with
                the last value of each metric in that epoch, and the step and timestamp of its last report.

        Raises:
            UsageError: `by` has another value.
            StorageError: they cannot be read.
        """
        import pandas

        if by not in ("report", "epoch"):
            raise UsageError(f"metrics(by={by!r}): there is one row per 'report' or per 'epoch'")

        with read_errors(self._folder, "metrics.jsonl"):
            lines = [*read_rows(self._folder.read("metrics.jsonl"))]
            rows = [row for _, row in lines if row is not None]
            if len(rows) < len(lines):
                raise ValueError(f"{len(lines) - len(rows)} of its lines are damaged")
        if by == "epoch":
            epochs: dict[int, dict[str, Any]] = {}
            for row in rows:
                epochs.setdefault(row["epoch"], {}).update(row)
            rows = [epochs[epoch] for epoch in sorted(epochs)]
        return pandas.DataFrame(rows)

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the results of `mlx train eval`, oldest first: `time`, `checkpoint`, `metrics`, `command`, versions, …

        Raises:
            StorageError: they cannot be read.
        """
        with read_errors(self._folder, EVALUATIONS):
            names = storage_at(self._folder.location).names(EVALUATIONS)
            return [from_json(self._folder.document(EVALUATIONS, name), {}) for name in names if name.endswith(".json")]

    def state(self, checkpoint: str | int = "latest") -> State:
        """Return the content of a checkpoint, on the CPU: `{"models": {name: state_dict}, "optimizers": ..., ...}`.

        Names in state dicts have no prefix of DDP. With `cfg.tuning.NAME.save=trained`, parameters that never train are
        replaced by `{"mlx_runtime.frozen": SHA-256}`.

        Args:
            checkpoint: the `latest`, the `best` by `cfg.monitor`, one by its name, like `epoch_0002`, or the one at the
                end of an epoch, by its number from 0, as in `metrics()`.

        Raises:
            UsageError: there is no such checkpoint, or none with a value of `cfg.monitor`.
            ConfigError: it is damaged.
        """
        return CheckpointStore(self._folder.checkpoints).load(lookup.find_checkpoint(self._folder, checkpoint))

    def load_models(self, checkpoint: str | int = "latest", *, trust: bool = False) -> Any:
        """Build the group `models` from the run's config, with the weights of a checkpoint, on the CPU.

        Args:
            checkpoint: the same as for `state`.
            trust: use the code that was stored with the run, from any working directory. Anyone who can write to the
                storage could have put any code there. The default is the code in the working directory.

        Raises:
            UsageError: there is no such checkpoint or code, or the run has no models, like runs of functions.
            ConfigError: the code does not match the run.
        """
        if "models" not in self.config:
            raise UsageError(f"{self._folder.title} has no group of models; state() returns what its checkpoints hold")
        state = self.state(checkpoint)
        with matching_code(self._folder, "load_models", "models", self.config["models"], trust=trust) as node:
            object_at(node["_target_"])  # imports of `src`, which may draw random numbers, come first
            with temporary_seed(self.config["cfg"].get("seed") or 0):  # for values that checkpoints do not contain
                make, whole = partial(build, node, "models"), not groups.lacks_weights(state["models"])
                models = built_to_be_restored(make) if whole else make()
            groups.load_into(models, state["models"], "models")
        return models

    def predictor(
        self, checkpoint: str | int | None = None, *, device: str | None = None, trust: bool = False
    ) -> "Predictor":
        """Return an object that answers rows with the experiment's `predict`: `predictor(rows)`.

        Args:
            checkpoint: the same as for `state`; by default the `best`, or the `latest` if there is no `cfg.monitor`.
            device: device of the models, like `cuda:1`; by default a GPU if there is one.
            trust: the same as for `load_models`.

        Raises:
            UsageError: there is no such checkpoint or code, or the experiment has no `predict`.
            ConfigError: the code does not match the run.
        """
        predictor: Predictor = companions.part("serving.loading").load_predictor(
            self, self._folder, checkpoint, device=device, trust=trust
        )
        return predictor

    def server(
        self, checkpoint: str | int | None = None, *, device: str | None = None, trust: bool = False
    ) -> contextlib.AbstractContextManager[str]:
        """Answer HTTP requests in a thread while a block runs: `with run.server() as url:`. The port is any free one.

        Args:
            checkpoint, device, trust: the same as for `predictor`.

        Raises:
            UsageError, ConfigError: the same as for `predictor`.
            MissingLibraryError: the libraries of the extra `serving` are not installed.
        """
        server: contextlib.AbstractContextManager[str] = companions.part("serving.http.server").serve(
            {"model": self.predictor(checkpoint, device=device, trust=trust)}
        )
        return server

    def load_datasets(self, *, trust: bool = False) -> Any:
        """Build the group `datasets` from the run's config; each dataset is constructed when it is first read.

        In a run of a fold, `train` and `val` are the `Subset`s of `datasets.train` that were trained on and held out.

        Args:
            trust: the same as for `load_models`.

        Raises:
            UsageError: there is no such code, or the run has no datasets.
            ConfigError: the code does not match the run.
            DatasetError: the rows of a fold cannot be read.
        """
        config = self.config
        if "datasets" not in config:
            raise UsageError(f"{self._folder.title} has no group of datasets")
        with matching_code(self._folder, "load_datasets", "datasets", config["datasets"], trust=trust) as node:
            if config.get("cfg", {}).get("cross_validation", {}).get("fold") is not None:
                cfg = importable(self._folder, "cfg", config["cfg"], trust=trust)
                from mlx_runtime.data.folds import load_fold

                return load_fold(node, cfg)
            return build_group(node, "datasets", lambda name: contextlib.nullcontext())

    def __repr__(self) -> str:
        with contextlib.suppress(StorageError):
            return f"<Run {self._folder.title}, {records.status_of(self.record)}>"
        return f"<Run {self._folder.title}>"


@contextlib.contextmanager
def matching_code(folder: RunFolder, method: str, title: str, tree: Any, *, trust: bool) -> Iterator[Any]:
    """Provide a part of a run's config whose `_target_`s can be imported here, to be built in the block.

    If the code does not match it, raise a ConfigError with a cure. All errors of imports and constructors count as
    such mismatches.
    """
    found = importable(folder, title, tree, trust=trust)
    try:
        yield found
    except USER_ERRORS as error:
        if isinstance(error, MlxError) and not isinstance(error, ConfigError):
            raise
        stored = f"; if it has changed since, use the code that the run stored: {method}(trust=True)"
        code = "the stored code" if trust else f"the code in {Path.cwd()}"
        reason = full_message(error) if isinstance(error, ConfigError | ImportError) else located(error)
        if found is not tree:
            reason = companions.part("serving.stored_code").public(reason)
        why = f"{title} of {folder.title} cannot be built with {code}: {reason}"
        raise ConfigError(why if trust else why + stored) from error


def importable(folder: RunFolder, title: str, tree: Any, *, trust: bool) -> Any:
    """Return a part of a run's config whose `_target_`s name the code in the working directory, or the stored code."""
    if unset := sorted(unset_variables(tree)):
        raise ConfigError(f"{title} of {folder.title} read the environment: set {', '.join(unset)}")
    if trust:
        return companions.part("serving.stored_code").private(tree, snapshots.unpack(folder))
    here = Path.cwd()
    if not Path(here, EXPERIMENT).is_file():
        raise UsageError(
            f"{here} is not the experiment of {folder.title}, whose code its models need. Change to it or, "
            "if you trust everyone who can write to that storage, use the stored code: load_models(trust=True)"
        )
    loaded = getattr(sys.modules.get("src"), "__path__", [str(here / "src")])
    if str(here / "src") not in map(str, loaded):  # another experiment's `src` is loaded
        return companions.part("serving.stored_code").private(tree, here)
    add_to_path(here)
    return tree


class _RemoteRun(Run):
    """A run in a repository, at the commit at which it was opened. Checkpoints are downloaded when they are read."""

    def __init__(self, run: Any) -> None:
        super().__init__(run.fetch())
        self._remote = run

    def state(self, checkpoint: str | int = "latest") -> State:
        self._remote.fetch_checkpoint(lookup.find_checkpoint(self._folder, checkpoint).name)
        return super().state(checkpoint)

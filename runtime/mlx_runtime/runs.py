"""Read a run back: its record, config, numbers and weights, in a notebook or a script."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlx_runtime import checkpoints, registry, snapshots, xp
from mlx_runtime.checkpoints import Checkpoints, State
from mlx_runtime.documents import from_json
from mlx_runtime.errors import ConfigError, StorageError, UsageError, first_line
from mlx_runtime.layout import EVALUATIONS, EXPERIMENT, RunFolder, named_run
from mlx_runtime.loading import build, parsed, unset_variables
from mlx_runtime.storage import Storage, is_uri

if TYPE_CHECKING:
    import pandas

Which = Literal["latest", "best"]


def open_run(run: str | Path) -> "Run":
    """A run to look at, also while it trains.

    Args:
        run: `name/run_003`, or the path or URI of its folder. A name is looked up in the storage of the experiment in
            the working directory, or in `MLX_STORAGE`.

    Raises:
        UsageError: there is no such run.
    """
    text = str(run)
    if is_uri(text) or Path(text, "run.json").is_file():
        return Run(named_run(text, "", ""))
    if "/" not in text:
        raise UsageError(f"{text!r} names no run; write name/run_003, or the path of its folder")
    return Run(named_run(text, xp.storage(), ""))


class Run:
    """One run, read from where it is stored; nothing is kept, so each call sees the present.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    @property
    def record(self) -> dict[str, Any]:
        """What `run.json` says: status, command, versions, seed, best metrics, …

        Raises:
            StorageError: it cannot be read.
        """
        return registry.recorded(self._folder)

    @property
    def config(self) -> dict[str, Any]:
        """The resolved conf.yaml, as plain dicts; `${oc.env:NAME}` stays where that variable is not set here.

        Raises:
            StorageError: it cannot be read.
        """
        content = self._read("conf.yaml")
        try:
            return parsed(content)
        except ValueError as error:
            raise StorageError(f"cannot read {self._folder.place}/conf.yaml: {error}") from error

    def metrics(self) -> "pandas.DataFrame":
        """All recorded numbers: one row per report, with `step`, `epoch`, `timestamp` (seconds since 1970) and a column
        per name, NaN where a report did not have it.

        Raises:
            StorageError: they cannot be read.
        """
        import pandas

        whole = self._read("metrics.jsonl").rpartition("\n")[0]  # a run that trains may be writing the next line
        try:
            return pandas.DataFrame([from_json(line.encode(), {}) for line in whole.splitlines()])
        except ValueError as error:
            raise StorageError(f"cannot read {self._folder.place}/metrics.jsonl: {error}") from error

    def evaluations(self) -> list[dict[str, Any]]:
        """What `mlx train eval` has measured, oldest first: `time`, `checkpoint`, `metrics`, `command`, versions, …

        Raises:
            StorageError: they cannot be read.
        """
        try:
            names = sorted(Storage(self._folder.place).names(EVALUATIONS))
            return [from_json(self._folder.read(EVALUATIONS, name), {}) for name in names if name.endswith(".json")]
        except (OSError, ValueError) as error:
            raise StorageError(f"cannot read {self._folder.place}/{EVALUATIONS}: {first_line(error)}") from error

    def state(self, which: Which = "latest") -> State:
        """Everything that a checkpoint holds, on the CPU: `{"models": {name: state_dict}, "optimizers": ..., ...}`.

        Names in state dicts are those of the model itself, without the prefix of DDP.

        Args:
            which: the `latest`, or the `best` by `cfg.monitor`.

        Raises:
            UsageError: there is no checkpoint yet, or none to call the best.
            ConfigError: it is damaged.
        """
        saved = Checkpoints(self._folder.checkpoints)
        found = saved.all()
        if which == "best":
            cfg = self.config["cfg"]
            scored = [(checkpoints.score(item.metrics, cfg["monitor"], cfg["mode"]), item) for item in found]
            known = [(value, item) for value, item in scored if item.finished and value > float("-inf")]
            found = [item for _, item in sorted(known, key=lambda pair: (pair[0], pair[1].order))]
        if not found:
            why = "no checkpoint yet" if which == "latest" else "no checkpoint with a value of cfg.monitor"
            raise UsageError(f"{self._folder.title} has {why}")
        return saved.load(found[-1])

    def load_models(self, which: Which = "latest", *, trust: bool = False) -> Any:
        """Build the group `models` from the run's config, with the weights of a checkpoint, on the CPU.

        Args:
            which: as for `state`.
            trust: use the code that was stored with the run, from anywhere. Whoever can write to the storage could have
                put any code there. By default the code of the experiment in the working directory is used.

        Raises:
            UsageError: there is no such checkpoint, or no code.
            ConfigError: the code does not fit the run.
        """
        state = self.state(which)
        models = build(self._with_code("models", trust), "models")
        checkpoints.load_into(models, state["models"], "models")
        return models

    def _with_code(self, group: str, trust: bool) -> Any:
        """A group of the config, with `_target_`s that can be imported here."""
        node = self.config[group]
        if unset := sorted(unset_variables(node)):
            raise ConfigError(f"{group} of {self._folder.title} read the environment: set {', '.join(unset)}")
        if trust:
            return snapshots.private(node, snapshots.unpacked(self._folder))
        here = Path.cwd()
        if not Path(here, EXPERIMENT).is_file():
            raise UsageError(
                f"{here} is not the experiment of {self._folder.title}, whose code its models need. Change into it or, "
                "if you trust everybody who can write to that storage, use the stored code: load_models(trust=True)"
            )
        loaded = getattr(sys.modules.get("src"), "__path__", [str(here / "src")])
        if str(here / "src") not in map(str, loaded):  # of another experiment
            return snapshots.private(node, here)
        if str(here) not in sys.path:
            sys.path.insert(0, str(here))
        return node

    def __repr__(self) -> str:
        with contextlib.suppress(StorageError):
            return f"<Run {self._folder.title}, {registry.status_of(self.record)}>"
        return f"<Run {self._folder.title}>"

    def _read(self, name: str) -> str:
        try:
            return self._folder.read(name).decode()
        except (OSError, ValueError) as error:
            raise StorageError(f"cannot read {self._folder.place}/{name}: {first_line(error)}") from error

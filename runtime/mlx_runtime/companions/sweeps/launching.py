"""Launches of sweeps: the folder is claimed here, and the driver is a job on the cluster that resumes the sweep."""

from collections.abc import Callable
from dataclasses import dataclass, field

from mlx_runtime.companions.jobs.launching import Launch, SubmittedJob
from mlx_runtime.companions.sweeps.definition import Definition, SweepPlan, plan
from mlx_runtime.companions.sweeps.starting import find_sweep, resumed_plan
from mlx_runtime.driver.request import RunConfig
from mlx_runtime.errors import UsageError
from mlx_runtime.runs.folder import SWEEP
from mlx_runtime.storage.documents import is_name


@dataclass
class SweepLaunch:
    """A sweep to launch, as the command defines it; the fields are those of `sweeps.terminal.run_sweep`."""

    asked: Definition
    name: str = ""
    resume: str | None = None
    retry_failed: bool = False
    force: bool = False
    large: bool = False
    max_time_s: float | None = None
    plan: SweepPlan | None = field(default=None, init=False)  # set by `load`

    def load(self, experiment: Callable[[], type]) -> RunConfig:
        """Check the sweep, and return the common config of its runs.

        The job splits the rows into folds, because the datasets may be only on the cluster.
        """
        if self.name and not is_name(self.name):
            raise UsageError(f"--name {self.name!r} is not a valid folder name")
        if self.resume is None:
            self.plan = plan(experiment(), self.asked, large=self.large, split=False)
        else:
            folder = find_sweep(self.resume)
            how = {"large": self.large, "split": False, "force": self.force}
            self.plan = resumed_plan(experiment(), folder, self.asked, **how)
        return self.plan.config

    def submit(self, launch: Launch) -> SubmittedJob:
        """Claim the sweep, and submit its driver."""
        assert self.plan is not None, "load it first"
        given = {key: value for key, value in self.asked.changed_fields().items() if key != "overrides"}
        flags = {"--retry-failed": self.retry_failed, "--force": self.force, "--yes": self.large}
        words = [*self.asked.overrides, *(f"--{key.replace('_', '-')}={value}" for key, value in given.items())]
        words += [flag for flag, wanted in flags.items() if wanted]
        words += [f"--max-time={self.max_time_s:.0f}s"] if self.max_time_s is not None else []
        name = self.name.removeprefix(SWEEP)
        return launch.submit_sweep(self.plan.folder, name, words, self.plan.definition.as_json())

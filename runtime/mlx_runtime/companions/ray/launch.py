"""Submit the `main.py` of a folder to a cluster as a job, after checking that it can run there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime import companions
from mlx_runtime.companions.jobs.checks import Check, Checks, check_secrets, refuse_engine, require
from mlx_runtime.companions.jobs.launching import ClaimingLaunch, SubmittedJob, pending, typed_name
from mlx_runtime.companions.ray import preflight
from mlx_runtime.companions.ray.addresses import Address
from mlx_runtime.companions.ray.dashboard import Dashboard
from mlx_runtime.companions.ray.jobs import JobSpec
from mlx_runtime.config.composition import storage_override
from mlx_runtime.errors import ClusterError
from mlx_runtime.runs import drivers
from mlx_runtime.runs.folder import RunFolder, claim_run
from mlx_runtime.runs.snapshots import Upload
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import join_path, storage_root
from mlx_runtime.workers.placement import JOB_FLAG

if TYPE_CHECKING:
    from mlx_runtime.driver.request import RunConfig

DATA_JOB = "MLX_DATA_JOB"
"""Variable with the folder that the launcher of a data job has claimed for its record."""

STOP_WAIT_S = 30  # between SIGTERM and SIGKILL when a job is stopped: long enough to save a checkpoint


@dataclass(frozen=True)
class Launch(ClaimingLaunch):
    """A folder and a cluster that have passed all checks."""

    dashboard: Dashboard
    config: "RunConfig"
    upload: Upload
    runtime_env: Mapping[str, Any]
    retries: int = 0  # of a driver that dies

    def _submit_driver(
        self,
        run: RunFolder,
        before: Mapping[str, Any],
        command: Sequence[str],
        metadata: Mapping[str, str],
        **fields: Any,
    ) -> SubmittedJob:
        """Submit the driver of a claimed run, or of a sweep, and record that it is pending."""
        config = self.config
        attempt, is_data = run.attempts() + 1, "output" in fields
        there = run.location
        title = f"data-{run.experiment}-{run.name}" if is_data else f"{run.experiment}-{run.name}"
        job = self.dashboard.unused_id(title if attempt == 1 else f"{title}.{attempt}")
        known = {"id": job, "address": self.dashboard.address.url}
        kind = "data" if is_data else "train"
        metadata = {"mlx": kind, "experiment": run.experiment, "run": run.name, "folder": there, **metadata}
        if self.retries:
            command = ["-m", "mlx_runtime.companions.ray.supervision", str(self.retries), there, *command]
        with pending(run, before, config.overrides, job=known, **fields):
            page = self.submit(job, command, metadata, {DATA_JOB: there} if is_data else {})
        words = typed_name(run, config.overrides)
        facts = {"run": f"{run.experiment} {run.name}", "folder": there, "job": job, "dashboard": page}
        if is_data:
            facts |= {"folder": fields["output"], "follow": f"mlx data logs {words}", "stop": f"mlx data stop {words}"}
        else:
            facts |= {"follow": f"mlx xp logs {words}", "look": f"mlx xp board {words}", "stop": f"mlx xp stop {words}"}
        return SubmittedJob(self.dashboard, job, facts, run)

    def submit_data_job(self) -> SubmittedJob:
        """Create the record of a data job, and submit it."""
        jobs, cfg = companions.part("jobs.datajob"), self.config.cfg
        root, path = storage_root(cfg.storage_path), jobs.output_path(cfg)
        resumed = jobs.interrupted(self.config, path) if cfg.resume else None
        before = drivers.refuse_living(resumed) if resumed else {}
        command = ["main.py", *self.config.overrides, storage_override(root)]
        folder = resumed or claim_run(join_path(root, jobs.JOBS), cfg.name)
        return self._submit_driver(folder, before, command, {}, output=path)

    def submit(
        self, job: str, arguments: Sequence[str], metadata: Mapping[str, str], variables: Mapping[str, str]
    ) -> str:
        """Upload the folder, and start Python with these arguments. Return the URL of the job in the dashboard."""
        settings = Settings.read()
        environment = {JOB_FLAG: "1", "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **variables}
        environment |= {"MLX_VERBOSE": "1"} if settings.verbose else {}
        environment |= {"MLX_QUIET": "1"} if settings.quiet else {}
        command = ["python", "-u", *arguments]
        self.dashboard.submit(job, JobSpec(command, self.upload, environment, metadata, self.runtime_env))
        return f"{self.dashboard.address.url}/#/jobs/{job}"


def connect(address: Address, folder: Path, *, files: bool = True) -> tuple[Dashboard, Upload]:
    """Connect to a cluster that accepts jobs from here, and collect the `files` of a folder, or only the runtime.

    Raises `ClusterError` if it does not answer, has another version of Ray, or does not accept as many files.
    """
    dashboard = Dashboard.connect(address)
    upload = Upload.of(folder) if files else Upload(folder, ())
    for check in (*preflight.check_cluster(dashboard), preflight.check_upload(upload)):
        require(check)
    return dashboard, upload


def prepare(
    folder: Path,
    address: Address,
    load: "Callable[[], RunConfig]",
    *,
    pip: bool = False,
    retries: int = 0,
    tasks: bool = False,
    show_all: bool = False,
    write: Callable[[str], object] = print,
) -> Launch:
    """Check that a folder can run on a cluster, and write each result immediately, by default to stdout.

    With `pip`, the cluster installs the packages of requirements.txt. With `tasks`, the folder is a data job. With
    `show_all`, passed checks are printed, too.

    Raises `ClusterError` after failed checks, early if they prevent the others, and `UsageError` for a wrong option.
    """
    shown = Checks(show_all=show_all, write=write)
    if address.notice:
        write(f"note      {address.notice}")
    if not Settings.read().quiet:
        write(f"checking  {address.url} (from {address.source})")
    config = shown.config(load)  # first, because it may bind, and finds errors without the cluster
    if not tasks:
        refuse_engine(config.cfg)
    try:
        dashboard = Dashboard.connect(address)
    except ClusterError as error:
        shown.add(Check("cluster", str(error), error.hint))
        raise shown.failure() from error
    upload = Upload.of(folder)
    for line in (*config.notes, *(f"note      {note}" for note in upload.notes)):
        write(line)
    shown.require(*preflight.check_cluster(dashboard), preflight.check_upload(upload), check_secrets(config))
    runtime_env = {**(config.cfg.runtime_env or {}), **({"pip": str(folder / "requirements.txt")} if pip else {})}
    root = storage_root(config.cfg.storage_path)
    shown.require(*preflight.check_nodes(dashboard, config.cfg, root, upload, runtime_env, tasks=tasks))
    return Launch(dashboard, config, upload, runtime_env, retries)

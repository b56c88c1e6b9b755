"""Submit the `main.py` of a folder to a cluster as a job, after checking that it can run there."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mlx_runtime.cluster import preflight
from mlx_runtime.cluster.addresses import Address
from mlx_runtime.cluster.dashboard import Dashboard, JobSpec, JobState
from mlx_runtime.cluster.preflight import Check
from mlx_runtime.config.projects import CONF, commands
from mlx_runtime.errors import ClusterError, ConfigError, MlxError
from mlx_runtime.runs import provenance, records
from mlx_runtime.runs.folder import RunFolder, claim_run
from mlx_runtime.runs.logs import last_lines
from mlx_runtime.settings import Settings
from mlx_runtime.storage import documents
from mlx_runtime.storage.files import storage_root
from mlx_runtime.storage.redaction import redacted
from mlx_runtime.storage.uploads import Upload
from mlx_runtime.training.engines.placement import JOB_FLAG

if TYPE_CHECKING:
    from mlx_runtime.config.composition import Config
    from mlx_runtime.training.request import RunConfig

STARTUP_S = 30.0
"""How long a launch waits for the job to begin, to report one that fails during startup."""

FAILED_LOG_LINES = 40

STOP_WAIT_S = 30
"""Time between SIGTERM and SIGKILL of a job that is stopped: enough for a checkpoint."""

LAUNCHER_FACTS = ("command", "overrides", "git")
"""Parts of a run's provenance that only the launching machine knows."""


@dataclass(frozen=True)
class SubmittedJob:
    """A job that a cluster has accepted."""

    dashboard: Dashboard
    id: str

    @property
    def page(self) -> str:
        """URL of the job's page in the dashboard."""
        return f"{self.dashboard.address.url}/#/jobs/{self.id}"

    def follow(self) -> int:
        """Print what the job prints until it ends. Returns its exit code."""
        return self.dashboard.follow(self.id, partial(print, end="", flush=True)).exit_code

    def wait(self, has_begun: Callable[[], bool]) -> JobState:
        """Wait until the job has begun or ended, at most `STARTUP_S`.

        Raises:
            ClusterError: the job failed.
        """
        deadline = time.monotonic() + STARTUP_S
        while not (state := self.dashboard.state(self.id)).ended and time.monotonic() < deadline and not has_begun():
            time.sleep(0.3)
        if state.ended and state.exit_code:
            log = last_lines(self.dashboard.log(self.id), FAILED_LOG_LINES)
            raise ClusterError(f"{self.id} failed during startup: {state.reason}\n{log}".rstrip())
        return state


@dataclass(frozen=True)
class Launch:
    """A folder and a cluster that passed all checks together.

    Attributes:
        dashboard: dashboard of the cluster.
        config: config of the run or data job.
        upload: files of the folder.
        runtime_env: Ray's runtime environment of the job.
    """

    dashboard: Dashboard
    config: "Config"
    upload: Upload
    runtime_env: Mapping[str, Any]

    def submit(self, job: str, arguments: Sequence[str], metadata: Mapping[str, str]) -> SubmittedJob:
        """Upload the folder and start `main.py` with these arguments.

        Raises:
            ClusterError: the cluster rejects the job.
        """
        settings = Settings.read()
        environment = {JOB_FLAG: "1", "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}
        environment |= {"MLX_VERBOSE": "1"} if settings.verbose else {}
        environment |= {"MLX_QUIET": "1"} if settings.quiet else {}
        with self.upload.staged() as folder:
            command = ["python", "-u", "main.py", *arguments]
            self.dashboard.submit(job, JobSpec(command, folder, environment, metadata, self.runtime_env))
        return SubmittedJob(self.dashboard, job)

    def submit_run(self) -> tuple[RunFolder, SubmittedJob]:
        """Create the folder and the record of a run, and submit it.

        Raises:
            UsageError: another driver trains the run.
            StorageError: the storage cannot be written.
            ClusterError: the cluster rejects the job; the record then says FAILED, or what it said before.
        """
        config = cast("RunConfig", self.config)
        if config.run is None:
            run, before, attempt = claim_run(storage_root(config.cfg.storage_path), config.cfg.name), {}, 1
        else:
            run, before = config.run, records.refuse_living(config.run)
            before = before.get(records.REPLACED) or before
            attempt = run.attempts() + 1
        title = f"{run.experiment}-{run.name}"
        job = self.dashboard.unused_id(title if attempt == 1 else f"{title}.{attempt}")
        record = self._pending_record(run, before, job)
        origin = [f"--from={config.origin.location}"] if config.origin else []
        metadata = {"mlx": "train", "experiment": run.experiment, "run": run.name}
        try:
            return run, self.submit(job, [f"--run={run.location}", *origin, *config.overrides], metadata)
        except ClusterError as error:
            if before:
                record.withdraw()
            else:
                record.finish("FAILED", error=redacted(str(error)))
            raise

    def _pending_record(self, run: RunFolder, before: Mapping[str, Any], job: str) -> records.Record:
        """Write the record of a run that waits for its job; the job's driver continues it."""
        facts = {
            name: fact for name, fact in provenance.provenance(self.config.overrides).items() if name in LAUNCHER_FACTS
        }
        facts |= dict.fromkeys(("boot", "pid", "pid_started", "host"))  # of the previous driver
        facts |= {"status": "PENDING", "start": documents.now()}
        facts |= {"job": {"id": job, "address": self.dashboard.address.url}}
        if before:
            facts |= {"attempts": records.attempts(before), records.REPLACED: before}
        kept = {name: item for name, item in before.items() if name not in ("end", "error")}
        return records.Record(run, kept, **facts)


def prepare(
    folder: Path,
    address: Address,
    load: "Callable[[], Config]",
    *,
    pip: bool = False,
    show_all: bool = False,
    say: Callable[[str], None] = print,
) -> Launch:
    """Check that a folder can run on a cluster, and print each result as soon as it is known.

    Args:
        folder: folder that contains `main.py`.
        address: address of the cluster.
        load: returns the checked config.
        pip: the cluster installs the packages of requirements.txt.
        show_all: print the checks that passed, too.
        say: receives lines for the user.

    Raises:
        ClusterError: a check failed.
    """
    if address.notice:
        say(f"note      {address.notice}")
    if not Settings.read().quiet:
        say(f"checking  {address.url} (from {address.source})")
    failed = 0

    def passed(*checks: Check) -> bool:
        """Print checks. Returns True if all of them passed."""
        nonlocal failed
        for check in checks:
            failed += not check.ok
            if show_all or not check.ok:
                say(check.line())
        return all(check.ok for check in checks)

    launch = _check(folder, address, load, pip, passed, say)
    if failed or launch is None:
        raise ClusterError(f"preflight failed: {failed} check{'s' * (failed != 1)}, see above")
    return launch


def _check(
    folder: Path,
    address: Address,
    load: "Callable[[], Config]",
    pip: bool,
    passed: Callable[..., bool],
    say: Callable[[str], None],
) -> Launch | None:
    """Run the checks. Returns None if a failure makes the remaining checks impossible."""
    config, config_check = _load(load)  # first: it may write conf.yaml, and a wrong one costs the cluster nothing
    dashboard, checks = preflight.check_cluster(address)
    passed(*checks)
    if dashboard is None:
        return None
    passed(config_check)
    upload = Upload.of(folder)
    fits = passed(preflight.check_upload(upload))
    if config is None:
        return None
    for note in upload.notes:
        say(f"note      {note}")
    if not passed(preflight.check_secrets(config)) or not fits:
        return None
    runtime_env = {**(config.cfg.runtime_env or {}), **({"pip": str(folder / "requirements.txt")} if pip else {})}
    root = storage_root(config.cfg.storage_path)
    with upload.staged() as staged:
        passed(*preflight.check_nodes(dashboard, config.cfg, root, staged, runtime_env))
    return Launch(dashboard, config, upload, runtime_env)


def _load(load: "Callable[[], Config]") -> "tuple[Config | None, Check]":
    """Load the config.

    Raises:
        ConfigError: `cfg.engine` is `local`.
    """
    try:
        config = load()
    except ConfigError as error:
        return None, Check("config", str(error), f"Edit {CONF}, or pass overrides")
    except MlxError as error:
        return None, Check("config", str(error), f"See: {commands()} launch --help")
    if config.cfg.engine == "local":
        raise ConfigError(
            "cfg.engine=local trains on this machine, but launch submits to a cluster; use cfg.engine=auto, "
            f"or train here: {commands()} run"
        )
    return config, preflight.config_check(config.unseen)

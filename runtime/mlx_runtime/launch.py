"""A folder's `main.py` as a job of a cluster: look whether it would run, upload it, submit it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime import preflight, registry
from mlx_runtime.errors import ClusterError, ConfigError, MlxError, UsageError
from mlx_runtime.jobs import Address, Details, Jobs
from mlx_runtime.layout import CONF, RunFolder, claim_run, commands, storage_root
from mlx_runtime.logs import last_lines
from mlx_runtime.preflight import Check
from mlx_runtime.redaction import redacted
from mlx_runtime.settings import Settings
from mlx_runtime.uploads import Upload

if TYPE_CHECKING:
    from mlx_runtime.loading import Config

START_S = 30.0
"""How long a launch waits for the job to begin; one that dies before is told about at once."""

DYING_LINES = 40
"""Of a job that dies as it starts, what is shown of its log."""

KILL_S = 30
"""Between the SIGTERM and the SIGKILL of a job that is stopped: time for a checkpoint."""

KEPT = ("command", "overrides", "git")
"""What only the launching machine knows of a run's origin."""


@dataclass(frozen=True)
class Launched:
    """A job that was handed to a cluster.

    Attributes:
        jobs: of the cluster.
        job: its id.
    """

    jobs: Jobs
    job: str

    @property
    def dashboard(self) -> str:
        """Where a browser shows the job."""
        return f"{self.jobs.cluster.address.url}/#/jobs/{self.job}"

    def follow(self) -> int:
        """Pass on what it prints until it has ended. Its exit code."""
        return self.jobs.follow(self.job, partial(print, end="", flush=True)).code

    def wait(self, begun: Callable[[], bool]) -> Details:
        """Until it has begun or ended, `START_S` at the most. How it is doing then.

        Args:
            begun: whether it is at work.

        Raises:
            ClusterError: it died.
        """
        until = time.monotonic() + START_S
        while not (details := self.jobs.details(self.job)).ended and time.monotonic() < until and not begun():
            time.sleep(0.3)
        if details.ended and details.code:
            log = last_lines(self.jobs.log(self.job), DYING_LINES)
            raise ClusterError(f"{self.job} died as it began: {details.reason}\n{log}".rstrip())
        return details


class Launch:
    """A launch that is being prepared: first `check`, then `submit`.

    Args:
        folder: with `main.py`.
        address: of the cluster.
        load: gives the checked config.
        pip: let the cluster install what requirements.txt names.

    Attributes:
        jobs: of the cluster, once it has answered.
        config: of the run, once it was loaded.
    """

    def __init__(self, folder: Path, address: Address, load: "Callable[[], Config]", *, pip: bool = False) -> None:
        self.jobs: Jobs | None = None
        self.config: Config | None = None
        self._folder, self._address, self._load, self._pip = folder, address, load, pip

    @cached_property
    def _upload(self) -> Upload:
        """What the job gets; listed once the config was loaded, which may have written conf.yaml first."""
        return Upload.of(self._folder)

    def check(self) -> Iterator[Check]:
        """Look whether it would run; each finding as soon as it is known."""
        config = self._config_check()
        cluster, checks = preflight.cluster(self._address)
        yield from checks
        if cluster is None:
            return
        yield config
        size = preflight.upload(self._upload)
        yield size
        if self.config is None:
            return
        secrets = preflight.secrets(self.config)
        yield secrets
        if not size.ok or not secrets.ok:
            return
        self.jobs = Jobs(cluster)
        with self._upload.staged() as staged:
            yield from preflight.nodes(self.jobs, self.config.cfg, self._root, staged, self._runtime_env())

    def _config_check(self) -> Check:
        """Load the config.

        Raises:
            ConfigError: `cfg.engine` is `local`.
        """
        try:
            self.config = self._load()
        except ConfigError as error:
            return Check("config", str(error), f"Edit {CONF}, or give overrides")
        except MlxError as error:
            return Check("config", str(error), f"See: {commands()} launch --help")
        if self.config.cfg.engine == "local":
            raise ConfigError(
                "cfg.engine=local trains on this machine, but launch submits to a cluster; use cfg.engine=auto, "
                f"or train here: {commands()} run"
            )
        return preflight.fits(self.config.unseen)

    def passed(self, say: Callable[[str], None], *, everything: bool) -> None:
        """Check, telling what is wrong.

        Args:
            say: takes lines for the user.
            everything: tell what is right, too.

        Raises:
            ClusterError: it would not run.
        """
        if self._address.notice:
            say(f"note      {self._address.notice}")
        if not Settings.read().quiet:
            say(f"checking  {self._address.url} (from {self._address.source})")
        failed = 0
        for found in self.check():
            failed += not found.ok
            if everything or not found.ok:
                say(found.line())
        for note in self._upload.notes if self.config is not None else ():
            say(f"note      {note}")
        if failed:
            raise ClusterError(f"it would not run there: {failed} check{'s' * (failed != 1)} failed, see above")

    def submit(self) -> tuple[RunFolder, Launched]:
        """Make the run's folder and record, upload, and submit. Only after `check` found nothing.

        Raises:
            UsageError: another driver trains the run.
            StorageError: the storage cannot be written.
            ClusterError: the cluster does not take the job.
        """
        assert self.jobs is not None, "check first"
        assert self.config is not None, "check first"
        config, jobs = self.config, self.jobs
        if config.run is None:
            run, before, attempt = claim_run(self._root, config.cfg.name), {}, 1
        else:
            run, before = config.run, registry.refuse_living(config.run)
            before = before.get(registry.REPLACED) or before
            attempt = run.attempts() + 1
        title = f"{run.experiment}-{run.name}"
        job = jobs.named(title if attempt == 1 else f"{title}.{attempt}")
        record = self._recorded(run, before, job)
        origin = [f"--from={config.origin.place}"] if config.origin else []
        metadata = {"mlx": "train", "experiment": run.experiment, "run": run.name}
        try:
            made = self.send([f"--run={run.place}", *origin, *config.overrides], job, metadata)
        except ClusterError as error:
            if before:
                record.withdraw()
            else:
                record.finish("FAILED", error=redacted(str(error)))
            raise
        return run, made

    def send(self, arguments: Sequence[str], job: str, metadata: Mapping[str, str]) -> Launched:
        """Upload the folder and submit its `main.py`.

        Args:
            arguments: of `main.py`.
            job: its id, from `jobs.named`.
            metadata: for the dashboard.

        Raises:
            ClusterError: the cluster does not take the job.
        """
        assert self.jobs is not None, "check first"
        with self._upload.staged() as staged:
            self.jobs.submit(
                ["python", "-u", "main.py", *arguments],
                job=job,
                folder=staged,
                environment=self._environment(),
                metadata=metadata,
                runtime_env=self._runtime_env(),
            )
        return Launched(self.jobs, job)

    @property
    def _root(self) -> str:
        """Of the storage; on every node the same."""
        assert self.config is not None
        return storage_root(self.config.cfg.storage_path)

    @staticmethod
    def _environment() -> dict[str, str]:
        """What the job's processes find in theirs."""
        found = {"MLX_IN_JOB": "1", "RAY_JOB_STOP_WAIT_TIME_S": str(KILL_S)}
        said = Settings.read()
        return found | ({"MLX_VERBOSE": "1"} if said.verbose else {}) | ({"MLX_QUIET": "1"} if said.quiet else {})

    def _runtime_env(self) -> dict[str, Any]:
        assert self.config is not None
        found = dict(self.config.cfg.runtime_env or {})
        if self._pip:
            lines = [line.partition("#")[0].strip() for line in self._requirements.read_text().splitlines()]
            found["pip"] = [line for line in lines if line]
        return found

    @property
    def _requirements(self) -> Path:
        file = self._folder / "requirements.txt"
        if not file.is_file():
            raise UsageError(f"--pip installs what requirements.txt names; there is none in {self._folder}")
        return file

    def _recorded(self, run: RunFolder, before: dict[str, Any], job: str) -> registry.Record:
        """The record of a run that is about to start; its driver goes on with it."""
        assert self.jobs is not None
        assert self.config is not None
        facts = {name: item for name, item in registry.provenance(self.config.overrides).items() if name in KEPT}
        facts |= dict.fromkeys(("boot", "pid", "pid_started", "host"))  # of a driver that is gone
        facts |= {"status": "PENDING", "start": registry.now()}
        facts |= {"job": {"id": job, "address": self.jobs.cluster.address.url}}
        if before:
            facts["attempts"] = registry.attempts(before)
            facts[registry.REPLACED] = before
        kept = {name: item for name, item in before.items() if name not in ("end", "error")}
        return registry.Record(run, kept, **facts)

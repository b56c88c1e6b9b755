"""Submit the `main.py` of a folder to Slurm, with a copy of the code in the run's folder."""

import math
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime.companions.jobs.checks import Check, Checks, check_secrets, refuse_engine
from mlx_runtime.companions.jobs.launching import ClaimingLaunch, SubmittedJob, pending, typed_name
from mlx_runtime.companions.slurm import script
from mlx_runtime.companions.slurm.queue import SCHEME, Queue, run
from mlx_runtime.errors import ClusterError, ConfigError, UsageError
from mlx_runtime.runs.folder import RunFolder, next_name, run_folder
from mlx_runtime.runs.snapshots import Upload
from mlx_runtime.settings import Settings
from mlx_runtime.storage.files import is_uri, storage_at, storage_root
from mlx_runtime.workers.placement import changing_size

if TYPE_CHECKING:
    from mlx_runtime.driver.request import RunConfig

NOT_LINKED = {".git", "__pycache__"}


@dataclass(frozen=True)
class SlurmLaunch(ClaimingLaunch):
    """A folder that has passed all checks, and the options of its job."""

    queue: Queue
    config: "RunConfig"
    upload: Upload
    nodes: int
    options: Mapping[str, str | None]  # as typed
    words: Sequence[str]  # further options of sbatch
    sweep: bool
    dry_run: bool

    def _claim(self, kind: str, name: str = "") -> RunFolder:
        """Create the folder of a run or sweep; with `dry_run`, only return the one that would be created."""
        if not self.dry_run:
            return super()._claim(kind, name)
        cfg = self.config.cfg
        root = storage_root(cfg.storage_path)
        return run_folder(root, cfg.name, next_name(storage_at(root), cfg.name, kind, name))

    def _submit_driver(
        self,
        run: RunFolder,
        before: Mapping[str, Any],
        command: Sequence[str],
        metadata: Mapping[str, str],
        **fields: Any,
    ) -> SubmittedJob:
        """Copy the code, and submit a job that is held until the record names it.

        With `dry_run`, only print the script, and exit.
        """
        queue, overrides = self.queue, self.config.overrides
        folder = run.path / "slurm" / str(1 + len([*run.path.glob("slurm/*")]))
        text = self.script(run.location, folder, command)
        if self.dry_run:
            print(text, end="")
            raise SystemExit(0)
        with pending(run, before, overrides, **fields) as record:
            copy_code(self.upload, folder / "code")
            (folder / "job.sh").write_text(text)
            job = queue.submit(folder / "job.sh", self.typed)
            try:
                record.update(job={"id": job, "address": queue.url})
                queue.release(job)
            except BaseException:
                queue.stop(job)
                raise
        name = typed_name(run, overrides)
        facts = {"run": f"{run.experiment} {run.name}", "folder": run.location, "job": f"{job} on {queue.url}"}
        facts |= {"script": str(folder / "job.sh"), "follow": f"mlx xp logs {name}", "stop": f"mlx xp stop {name}"}
        return SubmittedJob(queue, job, facts)

    @property
    def typed(self) -> list[str]:
        """Options of sbatch as typed, which take precedence over the script and variables like SBATCH_PARTITION."""
        return [*(f"--{name}={value}" for name, value in self.options.items() if value is not None), *self.words]

    def script(self, run: str, folder: Path, command: Sequence[str]) -> str:
        """Return the script of the job: the resources follow from the config, unless options give others."""
        cfg, variables = self.config.cfg, {"MLX_JOB": "$SLURM_JOB_ID", "MLX_JOB_ADDRESS": self.queue.url}
        workers = max(1, cfg.start_workers)  # of a node, which trains a trial of a sweep or a part of a run
        workers = workers if self.sweep else workers // self.nodes
        tasks = workers if self.nodes > 1 and not self.sweep else 1
        gpus = math.ceil(workers * cfg.gpus_per_worker) if cfg.use_gpu else None
        options: dict[str, str | int | None] = {
            "job-name": "-".join(Path(run).parts[-2:]),
            "output": f"{folder}/%j.out",
            "open-mode": "append",  # a requeued job has the same file
            "signal": f"B:USR1@{script.WARNING_S}",
            "nodes": self.nodes,
            "ntasks-per-node": tasks,
            "cpus-per-task": workers * cfg.cpus_per_worker // tasks,
            "gpus-per-node": gpus if self.options.get("gres") is None else None,
        }
        options |= {name: value for name, value in self.options.items() if value is not None}
        return script.write(
            run=run,
            folder=folder,
            nodes=self.nodes,
            tasks=tasks,
            sweep=self.sweep,
            options=options,
            words=["--requeue", *self.words],
            command=command,
            variables=variables,
        )


def copy_code(upload: Upload, target: Path) -> None:
    """Copy the files of an upload, and link the other files of its folder, such as ignored data."""
    with upload.stage() as staged:
        shutil.copytree(staged, target)
    _link_others(upload.folder.resolve(), target)


def _link_others(source: Path, target: Path) -> None:
    for entry in os.scandir(source):
        copy = target / entry.name
        if not copy.exists() and entry.name not in NOT_LINKED:
            copy.symlink_to(entry.path)
        elif entry.is_dir(follow_symlinks=False) and copy.is_dir() and not copy.is_symlink():
            _link_others(Path(entry.path), copy)


def prepare(
    folder: Path,
    load: "Callable[[], RunConfig]",
    *,
    show_all: bool = False,
    nodes: int = 1,
    words: Sequence[str] = (),
    dry_run: bool = False,
    sweep: bool = False,
    **options: str | None,
) -> SlurmLaunch:
    """Check that a folder can run on the Slurm cluster of this machine, and that sbatch accepts the options.

    Failed checks are written to stderr, and all of them with `show_all`.

    Raises `ClusterError` if the cluster does not answer or a check fails, and `ConfigError` or `UsageError` for
    settings with which no job of Slurm can train.
    """
    queue = Queue(f"{SCHEME}cluster") if dry_run else Queue.connect()  # a script can be printed without a cluster
    shown = Checks(show_all=show_all)
    config = shown.config(load)
    cfg = config.cfg
    root = storage_root(cfg.storage_path)
    if is_uri(root):
        raise UsageError(f"the storage is {root}, but Slurm needs a folder that all nodes share; set MLX_STORAGE")
    if odd := re.search(r"[%\\\r\n]", root):  # in a directive, or replaced in it; scontrol shows %% as something else
        raise UsageError(f"the storage is {root!r:.300}; Slurm cannot use a folder with {odd[0]!r} in its name")
    if nodes > 1 and cfg.start_workers == 0:
        raise ConfigError(f"--nodes={nodes} needs workers, but cfg.start_workers=0 starts none")
    if nodes > 1 and sweep:
        refuse_engine(cfg)
    elif nodes > 1:
        if cfg.engine != "auto":
            raise ConfigError(f"cfg.engine={cfg.engine} cannot train on {nodes} nodes of Slurm; use cfg.engine=auto")
        if cfg.start_workers % nodes:
            raise ConfigError(f"cfg.start_workers={cfg.start_workers} must be a multiple of --nodes={nodes}")
        if why := changing_size(cfg):
            raise ConfigError(f"{why}, which Slurm does not support on {nodes} nodes")
    shown.require(check_secrets(config))
    for line in () if Settings.read().quiet or dry_run else config.notes:
        print(line)
    split = [item for text in words for item in shlex.split(text)]
    launch = SlurmLaunch(queue, config, Upload.of(folder), nodes, options, split, sweep, dry_run)
    if not dry_run:
        shown.require(_check_job(launch))
    return launch


def _check_job(launch: SlurmLaunch) -> Check:
    """Let sbatch check the job without submitting it."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(launch.script("/tmp/check/run", Path("/tmp"), ["main.py"]))
        file.flush()
        try:
            run("sbatch", "--test-only", *launch.typed, file.name)
        except ClusterError as error:
            return Check("job", str(error), error.hint)
    return Check("job", "sbatch accepts it")

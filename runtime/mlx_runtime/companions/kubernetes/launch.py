"""Launch runs and sweeps on Kubernetes: check them, and print or apply the manifest of a RayJob."""

import contextlib
import importlib.metadata
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime.companions.kubernetes.kubectl import Kubectl
from mlx_runtime.companions.kubernetes.manifest import JOB_LABEL, MOUNT, Pods, job_name, rayjob
from mlx_runtime.companions.kubernetes.preflight import check_cluster, check_options
from mlx_runtime.companions.ray.preflight import Check, check_config, check_secrets
from mlx_runtime.config.composition import storage_override
from mlx_runtime.errors import ClusterError, ConfigError, UsageError
from mlx_runtime.runs.folder import RUN, SWEEP, RunFolder
from mlx_runtime.settings import Settings
from mlx_runtime.storage.documents import to_yaml
from mlx_runtime.storage.files import is_uri, storage_root
from mlx_runtime.storage.redaction import secret_keys

if TYPE_CHECKING:
    from mlx_runtime.driver.request import RunConfig

DRIVER = "mlx_runtime.companions.kubernetes.driver"
"""Module that the job runs."""

FAILED = "preflight failed, see above"


@dataclass(frozen=True)
class AppliedJob:
    """A RayJob that the cluster has accepted, or a manifest that was printed; has the facts to print by title."""

    facts: Mapping[str, str] = field(default_factory=dict)

    def wait(self) -> str:
        """Return the status of the job, which waits for its pods. Empty for a printed manifest."""
        return "PENDING" if self.facts else ""


@dataclass(frozen=True)
class KubeLaunch:
    """An experiment and options that have passed the checks; `trials` is as in `manifest.rayjob`."""

    pods: Pods
    config: "RunConfig"
    trials: int | None
    dry_run: bool
    show_checks: Callable[..., bool]

    @property
    def root(self) -> str:
        """Folder or URI of the storage, as the pods see it."""
        return pod_storage(self.config.cfg.storage_path)

    @property
    def _storage_words(self) -> list[str]:
        """The override of the storage, if there was one: it takes precedence over `MLX_STORAGE` of the pods."""
        typed = any(item.lstrip("+").startswith("cfg.storage_path=") for item in self.config.overrides)
        return [storage_override(self.root)] if typed else []

    def submit_run(self) -> AppliedJob:
        """Apply the RayJob of a run."""
        from mlx_runtime.driver.arguments import Request

        config = self.config
        resume = config.run.name if config.run else None
        origin = config.origin.title if config.origin else None
        request = Request((*config.overrides, *self._storage_words), resume=resume, origin=origin)
        return self._submit(RUN, config.cfg.name, request.words)

    def submit_sweep(
        self, sweep: RunFolder | None, name: str, words: Sequence[str], definition: Mapping[str, Any]
    ) -> AppliedJob:
        """Apply the RayJob of a sweep, new or resumed; its driver reads the definition from the words."""
        resume = [f"--resume={sweep.name}"] if sweep else []
        title = f"{self.config.cfg.name}-{name or 'sweep'}"
        return self._submit(SWEEP, title, [*resume, *words, *self._storage_words])

    def check(self) -> bool:
        """Check the cluster, with the manifest of a run. Return True if it passed."""
        name = job_name(self.config.cfg.name)
        return self._check(self._manifest(name, RUN, []))

    def _check(self, manifest: str) -> bool:
        return self.show_checks(*check_cluster(self._kubectl, self.pods, self.config.cfg.secrets, manifest))

    @property
    def _kubectl(self) -> Kubectl:
        return Kubectl.of(self.pods.context, self.pods.namespace)

    def _manifest(self, name: str, kind: str, words: Sequence[str]) -> str:
        cfg = self.config.cfg
        command = ["python", "-u", "-m", DRIVER, kind, self.root, cfg.name, *words]
        metadata = {"mlx": "train", "experiment": cfg.name}
        version = _ray_version()
        tree = rayjob(name, self.pods, cfg, self.root, command, metadata, ray_version=version, trials=self.trials)
        if found := [*secret_keys(tree)]:  # besides those that `check_secrets` finds
            raise ConfigError(f"the manifest would contain a secret in {', '.join(found)}; pass it with --secret NAME")
        return to_yaml(tree)

    def _submit(self, kind: str, title: str, words: Sequence[str]) -> AppliedJob:
        pods, name = self.pods, job_name(title)
        manifest = self._manifest(name, kind, words)
        if self.dry_run:
            print(manifest, end="")
            return AppliedJob()
        if not self._check(manifest):
            raise ClusterError(FAILED)
        self._kubectl.run("apply", "--filename=-", document=manifest)
        typed = shlex.join(["kubectl", *self._kubectl.options])
        head = f"$({typed} get pod -o name -l {JOB_LABEL}={name},ray.io/node-type=head)"
        logs = shlex.join(["mlx", "xp", "logs", self.config.cfg.name, f"{SWEEP}{name}" if kind == SWEEP else "latest"])
        return AppliedJob(
            {
                "job": name,
                "folder": f"{self.root} on the claim {pods.claim}" if pods.claim else self.root,
                "state": f"{typed} get rayjob {name}",
                "follow": f"{typed} exec {head} -- {logs}",
                "stop": f"{typed} delete rayjob {name}",
            }
        )


def pod_storage(storage_path: str) -> str:
    """Return the storage as the pods see it: a URI or an absolute folder stays, a relative one is that of the claim."""
    path = Settings.read().storage or storage_path
    return storage_root(path) if is_uri(path) or Path(path).is_absolute() else MOUNT


def prepare(
    pods: Pods,
    folder: Path,
    load: "Callable[[], RunConfig]",
    *,
    trials: int | None,
    show_all: bool,
    dry_run: bool,
) -> KubeLaunch:
    """Check the config and the options, and write failed checks, or all of them, to stderr.

    With `show_all`, the cluster is checked, too.

    Raises:
        ClusterError: a check has failed.
        ConfigError: `cfg.runtime_env` refers to files of this machine.
    """

    def show(*checks: Check) -> bool:
        for check in checks:
            if show_all or not check.ok:
                print(check.line(), file=sys.stderr)
        return all(check.ok for check in checks)

    with _stdout_to_stderr():
        config, check = check_config(load)
    if not show(check) or config is None:
        raise ClusterError(FAILED)
    for line in config.notes:
        print(line, file=sys.stderr)
    _refuse_files(config.cfg.runtime_env or {})
    root = pod_storage(config.cfg.storage_path)
    if not show(check_secrets(config), *check_options(pods, root, config.cfg.secrets)):
        raise ClusterError(FAILED)
    if config.cfg.use_gpu is None and not Settings.read().quiet:
        print("note      the pods have no GPUs; cfg.use_gpu=true requests them", file=sys.stderr)
    launch = KubeLaunch(pods, config, trials, dry_run, show)
    if show_all and not launch.check():
        raise ClusterError(FAILED)
    return launch


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keep stdout for the manifest: within the block, `bind`, in another process, and `src` print to stderr."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _refuse_files(runtime_env: Mapping[str, Any]) -> None:
    """Refuse parts of a runtime environment that are files of this machine, which a manifest cannot contain."""
    for name in ("working_dir", "py_modules", "pip", "uv", "conda"):
        found = runtime_env.get(name)
        local = [item for item in (found if isinstance(found, list) else [found]) if isinstance(item, str)]
        if name in ("working_dir", "py_modules"):
            local = [item for item in local if "://" not in item]
        elif isinstance(found, list) or (name == "conda" and not str(found).endswith((".yml", ".yaml"))):
            continue
        if local:
            raise ConfigError(f"cfg.runtime_env.{name} is {local[0]}, a file of this machine; install it in the image")


def _ray_version() -> str:
    """Return the version of Ray in the image: that of constraints.txt, or else the one here."""
    file = Path("constraints.txt")
    pinned = re.search(r"^ray==(\S+)", file.read_text(), re.MULTILINE) if file.is_file() else None
    if pinned is not None:
        return pinned[1]
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError as error:
        raise UsageError("the version of Ray in the image is unknown; write ray==VERSION to constraints.txt") from error

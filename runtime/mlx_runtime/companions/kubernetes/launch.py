"""Launch runs and sweeps on Kubernetes: check them, and print or apply the manifest of a RayJob."""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime.companions.jobs.checks import Check, Checks, check_secrets, refuse_engine
from mlx_runtime.companions.jobs.launching import Launch, SubmittedJob
from mlx_runtime.companions.kubernetes.kubectl import Kubectl
from mlx_runtime.companions.kubernetes.manifest import JOB_LABEL, MOUNT, Pods, job_name, rayjob
from mlx_runtime.config.composition import storage_override
from mlx_runtime.errors import ClusterError, ConfigError, UsageError, short_message
from mlx_runtime.runs.folder import RUN, SWEEP, RunFolder
from mlx_runtime.settings import Settings
from mlx_runtime.storage.documents import from_plain_yaml, to_yaml
from mlx_runtime.storage.files import is_uri, storage_root
from mlx_runtime.storage.redaction import secret_keys

if TYPE_CHECKING:
    from mlx_runtime.driver.request import RunConfig

DRIVER = "mlx_runtime.companions.kubernetes.driver"
"""Module that the job runs."""

KUBERAY = "See: kubectl config get-contexts, and KubeRay: https://docs.ray.io/en/latest/cluster/kubernetes/"


@dataclass(frozen=True)
class KubeLaunch(Launch):
    """An experiment and options that have passed the checks; `trials` is as in `manifest.rayjob`."""

    pods: Pods
    template: Mapping[str, Any]
    config: "RunConfig"
    trials: int | None
    dry_run: bool
    shown: Checks

    @property
    def root(self) -> str:
        """Folder or URI of the storage, as the pods see it."""
        return pod_storage(self.config.cfg.storage_path)

    @property
    def _storage_words(self) -> list[str]:
        """The override of the storage, if there was one: it takes precedence over `MLX_STORAGE` of the pods."""
        typed = any(item.lstrip("+").startswith("cfg.storage_path=") for item in self.config.overrides)
        return [storage_override(self.root)] if typed else []

    def submit_run(self) -> SubmittedJob:
        """Apply the RayJob of a run."""
        from mlx_runtime.driver.arguments import Request

        config = self.config
        resume = config.run.name if config.run else None
        origin = config.origin.title if config.origin else None
        request = Request((*config.overrides, *self._storage_words), resume=resume, origin=origin)
        return self._submit(RUN, config.cfg.name, request.words)

    def submit_sweep(
        self, sweep: RunFolder | None, name: str, words: Sequence[str], definition: Mapping[str, Any]
    ) -> SubmittedJob:
        """Apply the RayJob of a sweep, new or resumed; its driver reads the definition from the words."""
        resume = [f"--resume={sweep.name}"] if sweep else []
        title = f"{self.config.cfg.name}-{name or 'sweep'}"
        return self._submit(SWEEP, title, [*resume, *words, *self._storage_words])

    def check(self) -> None:
        """Let the cluster check the manifest of a run."""
        self._validate(self._manifest(job_name(self.config.cfg.name), RUN, []))

    def _validate(self, manifest: str) -> None:
        try:
            self._kubectl.run("apply", "--dry-run=server", "--output=name", "--filename=-", document=manifest)
        except ClusterError as error:
            self.shown.require(Check("cluster", f"rejected the job: {error}", error.hint or KUBERAY))
        self.shown.add(Check("cluster", "accepted the job"))

    @property
    def _kubectl(self) -> Kubectl:
        return Kubectl.of(self.pods.context, self.pods.namespace)

    def _manifest(self, name: str, kind: str, words: Sequence[str]) -> str:
        cfg = self.config.cfg
        command = ["python", "-u", "-m", DRIVER, kind, self.root, cfg.name, *words]
        metadata = {"mlx": "train", "experiment": cfg.name}
        tree = rayjob(
            name,
            self.pods,
            cfg,
            self.root,
            command,
            metadata,
            ray_version=_ray_version(),
            trials=self.trials,
            template=self.template,
        )
        if found := [*secret_keys(tree)]:  # besides those that `check_secrets` finds
            raise ConfigError(f"the manifest would contain a secret in {', '.join(found)}; pass it with --secret NAME")
        return to_yaml(tree)

    def _submit(self, kind: str, title: str, words: Sequence[str]) -> SubmittedJob:
        pods, name = self.pods, job_name(title)
        manifest = self._manifest(name, kind, words)
        if self.dry_run:
            print(manifest, end="")
            raise SystemExit(0)
        self._validate(manifest)
        self._kubectl.run("apply", "--filename=-", document=manifest)
        typed = shlex.join(["kubectl", *self._kubectl.options])
        head = f"$({typed} get pod -o name -l {JOB_LABEL}={name},ray.io/node-type=head)"
        logs = shlex.join(["mlx", "xp", "logs", self.config.cfg.name, f"{SWEEP}{name}" if kind == SWEEP else "latest"])
        facts = {
            "job": name,
            "folder": f"{self.root} on the claim {pods.claim}" if pods.claim else self.root,
            "state": f"{typed} get rayjob {name}",
            "follow": f"{typed} exec {head} -- {logs}",
            "stop": f"{typed} delete rayjob {name}",
        }
        return SubmittedJob(self._kubectl, name, facts)


def pod_storage(storage_path: str) -> str:
    """Return the storage as the pods see it: a URI or an absolute folder stays, a relative one is that of the claim."""
    return storage_root(storage_path) if is_uri(storage_path) or Path(storage_path).is_absolute() else MOUNT


def prepare(
    pods: Pods,
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
        ConfigError: `cfg.runtime_env` has packages, which belong in the image, or the template cannot be read.
    """
    shown, template = Checks(show_all=show_all), _template(pods.template)
    with _stdout_to_stderr():
        config = shown.config(load)
    cfg = config.cfg
    refuse_engine(cfg)
    for line in config.notes:
        print(line, file=sys.stderr)
    if found := sorted({"working_dir", "py_modules", "pip", "uv", "conda"} & (cfg.runtime_env or {}).keys()):
        raise ConfigError(f"cfg.runtime_env.{found[0]} is not supported on Kubernetes; install packages in the image")
    shown.require(check_secrets(config), *check_options(pods, pod_storage(cfg.storage_path), cfg.secrets))
    if cfg.use_gpu is None and not Settings.read().quiet:
        print("note      the pods have no GPUs; cfg.use_gpu=true requests them", file=sys.stderr)
    launch = KubeLaunch(pods, template, config, trials, dry_run, shown)
    if show_all:
        launch.check()
    return launch


def check_options(pods: Pods, root: str, secrets: Sequence[str]) -> Iterator[Check]:
    """Check the options of a launch without the cluster. `secrets` are the names in `cfg.secrets`."""
    tag = pods.image.rpartition("/")[2].partition(":")[2]
    if "@" not in pods.image and tag in ("", "latest"):
        hint = "Tag each build, as in --image registry/digits:1, so that resumed attempts run the same code"
        yield Check("image", f"{pods.image} has no version tag", hint)
    else:
        yield Check("image", pods.image)
    if is_uri(root) and pods.claim:
        yield Check("storage", f"{root} is not on the claim {pods.claim}", "Leave out --claim")
    if not is_uri(root) and not (pods.claim or pods.template):
        hint = "Name a PersistentVolumeClaim with --claim, or set cfg.storage_path=s3://BUCKET/PATH"
        yield Check("storage", f"{root} would be deleted with the pods", hint)
    if secrets and not (pods.secret or pods.template):
        hint = "Create one: kubectl create secret generic NAME --from-env-file=.env; then pass --secret NAME"
        yield Check("secrets", f"no Secret was passed for {', '.join(secrets)} in cfg.secrets", hint)


def _template(file: str | None) -> dict[str, Any]:
    """Return the content of a template."""
    if file is None:
        return {}
    try:
        found = from_plain_yaml(Path(file).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--template: cannot read {file}: {short_message(error)}") from error
    cures = {"name": "each launch gives its RayJob a new name", "namespace": "pass --namespace"}
    about = found.get("metadata")
    for key in cures.keys() & (about.keys() if isinstance(about, Mapping) else ()):
        raise ConfigError(f"--template: remove metadata.{key} from {file}; {cures[key]}")
    return found


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


def _ray_version() -> str:
    """Return the version of Ray in the image, which constraints.txt determines."""
    file = Path("constraints.txt")
    pinned = re.search(r"^ray==(\S+)", file.read_text(), re.MULTILINE) if file.is_file() else None
    if pinned is None:
        raise UsageError("the version of Ray in the image is unknown; add ray==VERSION to constraints.txt")
    return pinned[1]

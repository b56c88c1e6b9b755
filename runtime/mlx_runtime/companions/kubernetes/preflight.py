"""Checks of a Kubernetes cluster before a launch: KubeRay, namespace, claim, secrets, and the manifest itself."""

import json
from collections.abc import Iterator, Sequence

from mlx_runtime.companions.kubernetes.kubectl import Kubectl
from mlx_runtime.companions.kubernetes.manifest import Pods
from mlx_runtime.companions.ray.preflight import Check
from mlx_runtime.errors import ClusterError
from mlx_runtime.storage.files import is_uri

KUBERAY = "Install KubeRay 1.5.1 or newer: https://docs.ray.io/en/latest/cluster/kubernetes/"


def check_options(pods: Pods, root: str, secrets: Sequence[str]) -> Iterator[Check]:
    """Check the options of a launch without the cluster. `secrets` are the names in `cfg.secrets`."""
    tag = pods.image.rpartition("/")[2].partition(":")[2]
    if "@" not in pods.image and tag in ("", "latest"):
        hint = "Tag each build, like --image registry/digits:1, so that an attempt that resumes has the same code"
        yield Check("image", f"{pods.image} names no version", hint)
    else:
        yield Check("image", pods.image)
    if is_uri(root):
        if pods.claim:
            yield Check("storage", f"{root} is not on the claim {pods.claim}", "Leave out --claim")
    elif not pods.claim:
        hint = "Name a PersistentVolumeClaim with --claim, or set cfg.storage_path=s3://BUCKET/PATH"
        yield Check("storage", f"{root} would end with the pods", hint)
    if secrets and not pods.secret:
        hint = "Create one: kubectl create secret generic NAME --from-env-file=.env; then pass --secret NAME"
        yield Check("secrets", f"no Secret holds {', '.join(secrets)} of cfg.secrets", hint)


def check_cluster(kubectl: Kubectl, pods: Pods, secrets: Sequence[str], manifest: str) -> Iterator[Check]:
    """Check that the cluster has everything that the manifest refers to, and accepts it."""
    try:
        versions = json.loads(kubectl.run("version", "--output=json"))
        there, here = (versions[side]["gitVersion"] for side in ("serverVersion", "clientVersion"))
    except ClusterError as error:
        yield Check("cluster", str(error), error.hint or "See: kubectl config get-contexts")
        return
    yield Check("cluster", f"Kubernetes {there}, kubectl {here}")
    failed = False
    for check in _check_objects(kubectl, pods, secrets):
        failed = failed or not check.ok
        yield check
    if failed:  # the server would report the same, less clearly
        return
    try:
        kubectl.run("apply", "--dry-run=server", "--output=name", "--filename=-", document=manifest)
    except ClusterError as error:
        yield Check("manifest", f"the cluster rejects it: {error}", KUBERAY)
    else:
        yield Check("manifest", "the cluster accepts it")


def _check_objects(kubectl: Kubectl, pods: Pods, secrets: Sequence[str]) -> Iterator[Check]:
    kinds = kubectl.run("api-resources", "--api-group=ray.io", "--output=name").split()
    if "rayjobs.ray.io" not in kinds:
        yield Check("kuberay", "the cluster has no RayJobs", KUBERAY)
        return
    yield Check("kuberay", "the cluster has RayJobs")
    if pods.namespace and not _found(kubectl, "namespace", pods.namespace):
        hint = f"Create it: kubectl create namespace {pods.namespace}"
        yield Check("namespace", f"there is no namespace {pods.namespace}", hint)
        return
    if pods.claim:
        yield _check_claim(kubectl, pods.claim)
    missing = {*secrets}
    for name in pods.secret:
        if _found(kubectl, "secret", name):
            missing -= {*_keys(kubectl, name, secrets)}
        else:
            yield Check("secrets", f"there is no Secret {name}", f"See: {_command(pods, 'get secrets')}")
            return
    if missing:
        hint = "Add it to one of them, or pass --secret with another"
        yield Check("secrets", f"{', '.join(sorted(missing))} is no key of {', '.join(pods.secret)}", hint)
    elif pods.secret:
        yield Check("secrets", f"{', '.join(pods.secret)}{', with ' * bool(secrets)}{', '.join(secrets)}")
    named = [("secret", name) for name in pods.pull_secret]
    named += [("serviceaccount", pods.service_account)] if pods.service_account else []
    for kind, name in named:
        if not _found(kubectl, kind, name):
            yield Check(kind, f"there is no {kind} {name}", f"See: {_command(pods, f'get {kind}s')}")


def _found(kubectl: Kubectl, kind: str, name: str) -> bool:
    """Return False if there is certainly no such object; the user may not be allowed to look."""
    try:
        return bool(kubectl.run("get", kind, name, "--ignore-not-found", "--output=name").strip())
    except ClusterError:
        return True


def _keys(kubectl: Kubectl, name: str, otherwise: Sequence[str]) -> Sequence[str]:
    try:
        return kubectl.keys_of_secret(name)
    except ClusterError:
        return otherwise


def _check_claim(kubectl: Kubectl, name: str) -> Check:
    try:
        claim = kubectl.get("persistentvolumeclaim", name)
    except ClusterError as error:
        return Check("claim", f"{name} was not checked: {error}")
    if claim is None:
        return Check("claim", f"there is no PersistentVolumeClaim {name}", "See: kubectl get persistentvolumeclaims")
    modes = claim.get("spec", {}).get("accessModes", [])
    if "ReadWriteMany" not in modes:
        hint = "All pods write to the storage, so it needs ReadWriteMany"
        return Check("claim", f"{name} has the access modes {', '.join(modes) or 'none'}", hint)
    phase = claim.get("status", {}).get("phase", "unknown")
    if phase == "Lost":
        return Check("claim", f"the volume of {name} is lost", "Restore it, or use another claim")
    return Check("claim", f"{name} is {phase}, ReadWriteMany")


def _command(pods: Pods, words: str) -> str:
    return f"kubectl {f'-n {pods.namespace} ' if pods.namespace else ''}{words}"
